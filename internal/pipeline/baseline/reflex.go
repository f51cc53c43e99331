package baseline

import (
	"errors"
	"math"
	"slices"

	"jbofd/internal/pipeline"
	"jbofd/internal/tenant"
)

// ErrOverbooked is returned if the sum of all reservations would exceed the configured capacity of the drive.
var ErrOverbooked = errors.New("reservations exceed the capacity")

// ReFlexConfig configures a ReFlex. Zero fields get their defaults.
type ReFlexConfig struct {
	// Depth is the maximum number of I/Os at the device, at least 1.
	Depth int
	// TokensPerSec is the load that the drive is assumed to bear at the desired latency, at most 1e9; a token is a read
	// of 4 KiB. Default 420,000.
	TokensPerSec int64
	// WriteCost is the cost of writing 4 KiB, in tokens; default 10.
	WriteCost int64
	// ReadOnlyPercent is the cost of a read while there are only reads, in percent of a token; default 50.
	ReadOnlyPercent int64
}

const (
	// tokenUnits is the number of units in a token: n tokens a second are n units a nanosecond.
	tokenUnits = 1_000_000_000
	// costUnitBytes is what a token pays for; lengths are rounded up to it.
	costUnitBytes = 4096
	// overdraft is how many tokens a latency-critical tenant may owe.
	overdraft = 50
	// burstNS is the time for which a tenant can save tokens.
	burstNS = 1_000_000
	// roundNS is the least time between two rounds that hand out tokens.
	roundNS = 1_000
	// readOnlyAfterNS is how long after the last write reads become cheaper.
	readOnlyAfterNS = 10_000_000
	// maxRoundNS is the longest time for which a round hands out tokens.
	maxRoundNS = 1_000_000_000
)

// account is the state of a tenant.
type account struct {
	known    bool
	weight   int64
	reserved int64 // tokens a second; 0: best effort
	rate     int64 // tokens a second that it gets
	balance  int64 // in 1/tokenUnits of a token
	queue    queue
	inflight int
	charged  int64 // thousandths of a token
}

// ReFlex hands out tokens at the rate that an offline model says the drive can bear, and charges each I/O what the same
// model says it costs. A latency-critical tenant has a rate of its own, which it may overdraw a little. Best-effort
// tenants share the unreserved rate by weight. A tenant whose tokens do not pay for its next I/O saves them; a tenant
// with nothing queued gives them to the tenants that have. Tokens that no tenant takes in a round are lost.
//
// Tenants are best-effort until Reserve.
//
// Source: Klimovic, Litz and Kozyrakis, ReFlex (ASPLOS'17), Algorithm 1.
type ReFlex struct {
	cfg      ReFlexConfig
	ios      requests
	accounts []account
	known    []tenant.ID
	turn     int   // index into known of the tenant that may first take spare tokens; past the end: the first
	reserved int64 // the sum of all reservations
	device   device
	// writes counts those queued or in flight; the last one ended at writeNS.
	writes  int
	wrote   bool
	writeNS int64
	roundNS int64 // time of the last round
	wakeNS  int64
	queued  int
	waited  bool // the last Dispatch left an I/O queued for lack of tokens
}

var _ pipeline.Policy = (*ReFlex)(nil)

// NewReFlex returns a ReFlex.
func NewReFlex(cfg ReFlexConfig) *ReFlex {
	if cfg.TokensPerSec == 0 {
		cfg.TokensPerSec = 420_000
	}
	cfg.TokensPerSec = min(max(cfg.TokensPerSec, 1), 1e9)
	if cfg.WriteCost == 0 {
		cfg.WriteCost = 10
	}
	if cfg.ReadOnlyPercent == 0 {
		cfg.ReadOnlyPercent = 50
	}
	return &ReFlex{cfg: cfg, device: device{depth: max(cfg.Depth, 1)}}
}

// Name implements pipeline.Policy.
func (f *ReFlex) Name() string { return "reflex" }

// SetTenant implements pipeline.Policy.
func (f *ReFlex) SetTenant(_ int64, t tenant.ID, weight int) {
	for int(t) >= len(f.accounts) {
		f.accounts = append(f.accounts, account{})
	}
	a := &f.accounts[t]
	if !a.known {
		*a = account{known: true}
		f.known = append(f.known, t)
	}
	a.weight = int64(max(weight, 1))
	f.share()
}

// Reserve makes a known tenant latency-critical with a rate of tokensPerSec, or best-effort if that is 0.
//
// Errors: ErrOverbooked; then nothing has changed.
func (f *ReFlex) Reserve(t tenant.ID, tokensPerSec int64) error {
	if f.reserved-f.accounts[t].reserved+tokensPerSec > f.cfg.TokensPerSec {
		return ErrOverbooked
	}
	f.accounts[t].reserved = tokensPerSec
	f.share()
	return nil
}

// RemoveTenant implements pipeline.Policy.
func (f *ReFlex) RemoveTenant(_ int64, t tenant.ID) {
	f.accounts[t] = account{}
	f.known = slices.DeleteFunc(f.known, func(x tenant.ID) bool { return x == t })
	f.share()
}

// share computes the rates of all tenants.
func (f *ReFlex) share() {
	f.reserved = 0
	var weights int64 // of the best-effort tenants
	for _, t := range f.known {
		a := &f.accounts[t]
		f.reserved += a.reserved
		if a.reserved == 0 {
			weights += a.weight
		}
	}
	for _, t := range f.known {
		a := &f.accounts[t]
		if a.rate = a.reserved; a.rate == 0 {
			a.rate = max(1, (f.cfg.TokensPerSec-f.reserved)*a.weight/weights)
		}
	}
	f.wakeNS = f.roundNS
}

// cost returns the current cost of an I/O, in 1/tokenUnits of a token.
func (f *ReFlex) cost(now int64, r *request) int64 {
	n := int64(1)
	if r.class != pipeline.OtherClass {
		n = max(1, (r.lenBytes+costUnitBytes-1)/costUnitBytes)
	}
	switch {
	case r.class == pipeline.WriteClass:
		return n * f.cfg.WriteCost * tokenUnits
	case f.readOnly(now):
		return n * f.cfg.ReadOnlyPercent * (tokenUnits / 100)
	}
	return n * tokenUnits
}

// readOnly reports whether there were only reads for readOnlyAfterNS.
func (f *ReFlex) readOnly(now int64) bool {
	return f.writes == 0 && (!f.wrote || now-f.writeNS >= readOnlyAfterNS)
}

// Enqueue implements pipeline.Policy.
//
// hot: 0 allocs
func (f *ReFlex) Enqueue(_ int64, io pipeline.IO) {
	f.ios.add(io)
	f.ios.push(&f.accounts[io.Tenant].queue, io.Tag)
	f.queued++
	if io.Op.Class() == pipeline.WriteClass {
		f.writes++
	}
	f.wakeNS = f.roundNS // there may be tokens for the I/O
}

// Cancel implements pipeline.Policy.
func (f *ReFlex) Cancel(now int64, tag pipeline.Tag) {
	r := &f.ios[tag]
	f.ios.remove(&f.accounts[r.tenant].queue, tag)
	f.queued--
	f.forgetWrite(now, r)
	f.wakeNS = f.roundNS // other tenants may now get its tokens
}

// forgetWrite accounts for the end of an I/O, if it is a write.
func (f *ReFlex) forgetWrite(now int64, r *request) {
	if r.class == pipeline.WriteClass {
		f.writes--
		f.wrote, f.writeNS = true, now
		f.wakeNS = f.roundNS // reads may become cheaper
	}
}

// Dispatch implements pipeline.Policy. It is a round, in which tenants get their tokens and spend them.
//
// hot: 0 allocs, given room in dst
func (f *ReFlex) Dispatch(now int64, dst []pipeline.Tag) []pipeline.Tag {
	if len(f.known) == 0 {
		return dst
	}
	bucket := f.distribute(now)
	first := f.turn
	if first >= len(f.known) {
		first = 0
	}
	for i := range f.known {
		if i += first; i >= len(f.known) {
			i -= len(f.known)
		}
		a := &f.accounts[f.known[i]]
		for a.queue.n > 0 && !f.device.full() {
			tag := a.queue.first
			r := &f.ios[tag]
			cost := f.cost(now, r)
			if a.reserved > 0 {
				if a.balance <= -overdraft*tokenUnits {
					break
				}
			} else if a.balance < cost {
				taken := min(cost-a.balance, bucket)
				bucket -= taken
				if taken > 0 {
					f.turn = i + 1 // the next round begins with another tenant
				}
				if a.balance += taken; a.balance < cost {
					break
				}
			}
			a.balance -= cost
			a.charged += cost / (tokenUnits / 1000)
			f.ios.remove(&a.queue, tag)
			f.queued--
			a.inflight++
			f.device.enter(r)
			dst = append(dst, tag)
		}
		if a.queue.n == 0 && a.reserved == 0 {
			bucket += a.balance
			a.balance = 0
		}
	}
	f.waited = f.queued > 0 && !f.device.full()
	f.wakeNS = f.wake(now)
	return dst
}

// distribute hands out the tokens for the time since the last round and returns the spare ones, which any tenant may
// use.
func (f *ReFlex) distribute(now int64) (bucket int64) {
	dt := now - f.roundNS
	if dt < roundNS {
		return 0
	}
	f.roundNS = now
	most := int64(maxRoundNS)
	if !f.waited {
		most = burstNS
	}
	dt = min(dt, most)
	for _, t := range f.known {
		a := &f.accounts[t]
		a.balance += a.rate * dt
		if a.reserved > 0 {
			if over := a.balance - a.rate*burstNS; over > 0 {
				over = over / 10 * 9
				a.balance -= over
				bucket += over
			}
			continue
		}
		// A tenant with I/Os queued saves tokens for the first of them.
		var saves int64
		if a.queue.n > 0 {
			saves = max(a.rate*burstNS, f.cost(now, &f.ios[a.queue.first]))
		}
		if over := a.balance - saves; over > 0 {
			a.balance -= over
			bucket += over
		}
	}
	return bucket
}

// wake returns the first time at which a tenant may have enough tokens.
func (f *ReFlex) wake(now int64) int64 {
	if f.queued == 0 {
		return math.MaxInt64
	}
	// The tokens that other tenants can spare: at once, and per second.
	var spare int64
	given := f.reserved
	for _, t := range f.known {
		a := &f.accounts[t]
		switch {
		case a.reserved > 0:
			spare += max(0, a.balance-a.rate*burstNS)
		case a.queue.n == 0:
			spare += a.balance // saved for an I/O that was cancelled
			given += a.rate
		}
	}
	least, leastMissing, leastRate := float64(maxRoundNS), int64(maxRoundNS), int64(1)
	for _, t := range f.known {
		a := &f.accounts[t]
		if a.queue.n == 0 {
			continue
		}
		missing, rate := f.cost(now, &f.ios[a.queue.first])-a.balance, a.rate
		if a.reserved > 0 {
			missing = 1 - overdraft*tokenUnits - a.balance
		}
		if missing <= 0 {
			return now // tokens suffice; only the device is full
		}
		if a.reserved == 0 {
			missing, rate = max(missing-spare, 0), rate+given
		}
		if wait := float64(missing) / float64(rate); wait < least {
			least, leastMissing, leastRate = wait, missing, rate
		}
	}
	at := now + (leastMissing+leastRate-1)/leastRate
	if f.writes == 0 && !f.readOnly(now) {
		at = min(at, f.writeNS+readOnlyAfterNS)
	}
	return max(at, f.roundNS+roundNS)
}

// Pause implements pipeline.Policy.
//
// hot: 0 allocs
func (f *ReFlex) Pause(_ int64, tag pipeline.Tag) { f.device.pause(&f.ios[tag]) }

// Resume implements pipeline.Policy.
//
// hot: 0 allocs
func (f *ReFlex) Resume(_ int64, tag pipeline.Tag) { f.device.enter(&f.ios[tag]) }

// Complete implements pipeline.Policy.
//
// hot: 0 allocs
func (f *ReFlex) Complete(now int64, tag pipeline.Tag, _ pipeline.Result) {
	r := &f.ios[tag]
	f.device.leave(r)
	f.accounts[r.tenant].inflight--
	f.forgetWrite(now, r)
}

// NextWake implements pipeline.Policy: it is the first time at which the tokens may suffice for a tenant.
func (f *ReFlex) NextWake() (at int64, ok bool) {
	if f.queued == 0 || f.device.full() {
		return 0, false
	}
	return f.wakeNS, true
}

// Credit implements pipeline.Policy. ReFlex computes no credits.
func (f *ReFlex) Credit(tenant.ID) int { return 0 }

// Limit implements pipeline.Policy.
func (f *ReFlex) Limit(t tenant.ID) pipeline.Limit {
	switch {
	case f.accounts[t].queue.n == 0:
		return pipeline.Unlimited
	case f.device.full():
		return pipeline.LimitSSD
	}
	return pipeline.LimitShare
}

// CostNS implements pipeline.Policy; it counts thousandths of a token.
func (f *ReFlex) CostNS(t tenant.ID) int64 { return f.accounts[t].charged }

// Stats implements pipeline.Policy.
func (f *ReFlex) Stats(s *pipeline.Stats) {
	*s = pipeline.Stats{WriteCost: float64(f.cfg.WriteCost),
		TargetBytesPerSec: float64(f.cfg.TokensPerSec) * costUnitBytes}
	for _, t := range f.known {
		if a := &f.accounts[t]; a.queue.n+a.inflight > 0 {
			s.ActiveTenants++
		}
	}
}
