package baseline

import (
	"errors"
	"math"
	"slices"

	"jbofd/internal/pipeline"
)

// ErrOverbooked says that tenants were promised more tokens than the drive is taken to have.
var ErrOverbooked = errors.New("reservations exceed the capacity")

// ReFlexConfig configures a ReFlex. What is 0 gets its default.
type ReFlexConfig struct {
	// Depth is the most I/Os that may be at the device, at least 1.
	Depth int
	// TokensPerSec is what the drive is taken to bear at the latency that is wanted, at most
	// 1e9: a token is a read of 4 KiB. Default 420,000.
	TokensPerSec int64
	// WriteCost is what 4 KiB written cost, in tokens; default 10.
	WriteCost int64
	// ReadOnlyPercent is what a read costs while there are only reads, in percent of a token;
	// default 50.
	ReadOnlyPercent int64
}

const (
	// tokenUnits make a token: a rate of n tokens a second is n units a nanosecond.
	tokenUnits = 1_000_000_000
	// costUnitBytes is what costs a token: an I/O counts in these, rounded up.
	costUnitBytes = 4096
	// overdraft is how many tokens a latency-critical tenant may owe.
	overdraft = 50
	// burstNS is for how long a tenant saves tokens up.
	burstNS = 1_000_000
	// roundNS is the least time between two rounds that give out tokens.
	roundNS = 1_000
	// readOnlyAfterNS without a write makes reads cheaper.
	readOnlyAfterNS = 10_000_000
	// longestNS is what a round gives tokens for at most.
	longestNS = 1_000_000_000
)

// account is a tenant.
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

// ReFlex gives out tokens at a fixed rate, which an offline model says the drive can bear, and takes
// as many for each I/O as the same model says that it costs. Latency-critical tenants
// have a rate of their own and may overdraw it a little. Best-effort tenants share what is not reserved by
// weight; a tenant whose tokens do not pay for its next I/O saves them up, one that has
// nothing to do gives them to those who have. What nobody takes in a round is lost.
//
// Tenants are best-effort until Reserve.
//
// Source: Klimovic, Litz and Kozyrakis, ReFlex (ASPLOS'17), Algorithm 1.
type ReFlex struct {
	cfg      ReFlexConfig
	ios      requests
	accounts []account
	known    []pipeline.Tenant
	turn     int   // of known: who is first to take what others leave; past the end: the first
	reserved int64 // the sum of all reservations
	device   device
	// writes are queued or in flight; the last one was there at writeNS.
	writes  int
	wrote   bool
	writeNS int64
	roundNS int64 // time of the last round
	wakeNS  int64
	queued  int
	waited  bool // the last Dispatch left something for want of tokens
}

var _ pipeline.Policy = (*ReFlex)(nil)

// NewReFlex makes a ReFlex.
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
func (f *ReFlex) SetTenant(_ int64, t pipeline.Tenant, weight int) {
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

// Reserve makes a known tenant latency-critical with tokensPerSec of its own, or best-effort with
// 0.
//
// Errors: ErrOverbooked; then nothing has changed.
func (f *ReFlex) Reserve(t pipeline.Tenant, tokensPerSec int64) error {
	if f.reserved-f.accounts[t].reserved+tokensPerSec > f.cfg.TokensPerSec {
		return ErrOverbooked
	}
	f.accounts[t].reserved = tokensPerSec
	f.share()
	return nil
}

// RemoveTenant implements pipeline.Policy.
func (f *ReFlex) RemoveTenant(_ int64, t pipeline.Tenant) {
	f.accounts[t] = account{}
	f.known = slices.DeleteFunc(f.known, func(x pipeline.Tenant) bool { return x == t })
	f.share()
}

// share sums up what tenants may have.
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

// cost is what an I/O costs now, in 1/tokenUnits of a token.
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

// readOnly reports whether there have been only reads for a while.
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
	f.wakeNS = f.roundNS // there may be tokens for it
}

// Cancel implements pipeline.Policy.
func (f *ReFlex) Cancel(now int64, tag pipeline.Tag) {
	r := &f.ios[tag]
	f.ios.remove(&f.accounts[r.tenant].queue, tag)
	f.queued--
	f.forgetWrite(now, r)
	f.wakeNS = f.roundNS // others may have its tokens
}

// forgetWrite counts an I/O out that is over.
func (f *ReFlex) forgetWrite(now int64, r *request) {
	if r.class == pipeline.WriteClass {
		f.writes--
		f.wrote, f.writeNS = true, now
		f.wakeNS = f.roundNS // reads may become cheaper
	}
}

// Dispatch implements pipeline.Policy: a round, in which tenants get their tokens and
// spend them.
//
// hot: 0 allocs, given room in dst
func (f *ReFlex) Dispatch(now int64, dst []pipeline.Tag) []pipeline.Tag {
	if len(f.known) == 0 {
		return dst
	}
	bucket := f.give(now)
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
					f.turn = i + 1 // others first, the next time
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

// give gives all tenants their tokens for the time since the last round and returns those
// that are left to whoever needs them.
func (f *ReFlex) give(now int64) (bucket int64) {
	dt := now - f.roundNS
	if dt < roundNS {
		return 0
	}
	f.roundNS = now
	most := int64(longestNS)
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
		// One who has something to do saves up for it.
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

// wake is the first time at which somebody may have tokens enough.
func (f *ReFlex) wake(now int64) int64 {
	if f.queued == 0 {
		return math.MaxInt64
	}
	// What those may give away who need it less: at once, and a second.
	var spare int64
	given := f.reserved
	for _, t := range f.known {
		a := &f.accounts[t]
		switch {
		case a.reserved > 0:
			spare += max(0, a.balance-a.rate*burstNS)
		case a.queue.n == 0:
			spare += a.balance // what it was to have before it cancelled
			given += a.rate
		}
	}
	least, leastMissing, leastRate := float64(longestNS), int64(longestNS), int64(1)
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
			return now // only the device is full
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

// NextWake implements pipeline.Policy: the first time at which tokens may suffice for
// somebody.
func (f *ReFlex) NextWake() (at int64, ok bool) {
	if f.queued == 0 || f.device.full() {
		return 0, false
	}
	return f.wakeNS, true
}

// Credit implements pipeline.Policy: ReFlex does not say.
func (f *ReFlex) Credit(pipeline.Tenant) int { return 0 }

// Limit implements pipeline.Policy.
func (f *ReFlex) Limit(t pipeline.Tenant) pipeline.Limit {
	switch {
	case f.accounts[t].queue.n == 0:
		return pipeline.Unlimited
	case f.device.full():
		return pipeline.LimitSSD
	}
	return pipeline.LimitShare
}

// CostNS implements pipeline.Policy; it counts thousandths of a token.
func (f *ReFlex) CostNS(t pipeline.Tenant) int64 { return f.accounts[t].charged }

// Stats implements pipeline.Policy.
func (f *ReFlex) Stats(s *pipeline.Stats) {
	*s = pipeline.Stats{WriteCost: float64(f.cfg.WriteCost), TargetBytesPerSec: float64(f.cfg.TokensPerSec) * costUnitBytes}
	for _, t := range f.known {
		if a := &f.accounts[t]; a.queue.n+a.inflight > 0 {
			s.ActiveTenants++
		}
	}
}
