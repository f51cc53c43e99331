package cluster

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"jbofd/client"
	"jbofd/client/internal/host"
	"jbofd/client/internal/kvop"
	"jbofd/client/kv"
	"jbofd/internal/nvme"
)

// request carries out one operation at a time: it chooses a member, sends the command and judges the answer, again and
// again until there is one that counts.
//
//	run ──> choose ──> send ──┬── an answer ──────────────> done
//	          ^               ├── wrong view, not ready ──┐
//	          │               ├── cancelled: moved, slow ─┤ a write that was sent is a retry from now on
//	          └──── pause <───┴── connection lost ────────┘
//
// The Store cancels what a request waits for: when the map has changed (reroute), or time is over (check).
type request struct {
	s  *Store
	op kvop.Op
	// timer is that of pauses.
	timer *time.Timer
	hedge *hedge // nil: reads are not hedged

	// What follows belongs to the goroutine of run. position is that of the key.
	position uint64
	// started: op has its command. unknown: an earlier try of the write may have been carried out. first is when it was
	// sent first.
	started, unknown bool
	first            time.Duration
	// tried are members that have not answered a read, since the last pause.
	tried []*member
	// last says why the latest try has failed.
	last error

	mu sync.Mutex
	// use counts operations. busy: there is one.
	use  uint64
	busy bool
	// write is its kind, at is where it is: guarded by mu for reroute and check. place is position.
	write bool
	at    *member
	place uint64
	// since is when at was sent the command, deadline is when the operation must end.
	since, deadline time.Duration
	// over, once set, is why the operation must end.
	over error
	// attempt is the context of the command.
	attempt attempt
}

// attempt is a context that is used again and again without allocations, unless it was cancelled.
type attempt struct {
	mu   sync.Mutex
	done chan struct{}
	err  error
}

func (a *attempt) Deadline() (time.Time, bool) { return time.Time{}, false }
func (a *attempt) Value(any) any               { return nil }

func (a *attempt) Done() <-chan struct{} {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.done
}

func (a *attempt) Err() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.err
}

func (a *attempt) cancel(err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.err == nil {
		a.err = err
		close(a.done)
	}
}

func (a *attempt) reset() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.err != nil || a.done == nil {
		a.err, a.done = nil, make(chan struct{})
	}
}

// Reasons to cancel a command.
var (
	errMoved  = errors.New("the map has changed")
	errSlow   = errors.New("no answer in time")
	errHedged = errors.New("another member was faster")
)

func newRequest(s *Store) *request {
	r := &request{s: s, timer: time.NewTimer(time.Hour), tried: make([]*member, 0, nvme.ClusterMapMaxMembers)}
	r.timer.Stop()
	r.attempt.reset()
	if s.o.Hedge > 0 {
		r.hedge = newHedge(r)
	}
	return r
}

// prepare begins a use and returns its number.
func (r *request) prepare() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.use++
	r.over = nil
	r.attempt.reset()
	return r.use
}

// cancelOp ends the operation of a use with the error of its context.
func (r *request) cancelOp(use uint64, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.use == use && r.over == nil {
		r.over = err
		r.attempt.cancel(err)
	}
}

// cancelAll ends whatever operation there is.
func (r *request) cancelAll(err error) {
	r.mu.Lock()
	use := r.use
	r.mu.Unlock()
	r.cancelOp(use, err)
}

// reroute cancels the command if it is at a member that does not serve it by a new map.
func (r *request) reroute(m *clusterMap) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.at == nil {
		return
	}
	if serves, head := m.has(r.place, r.at); !serves || r.write && !head {
		r.attempt.cancel(errMoved)
	}
}

// slow is how long a command may take before the map is read again.
const slow = 100 * time.Millisecond

// check ends an operation whose time is over, and a read that takes too long. It reports whether a newer map would
// help.
func (r *request) check(now time.Duration) (wantMap bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case !r.busy:
		return false
	case now >= r.deadline && r.over == nil:
		r.over = context.DeadlineExceeded
		r.attempt.cancel(r.over)
	case r.at != nil && !r.write && now-r.since >= r.s.o.ReadTimeout:
		r.attempt.cancel(errSlow)
	}
	return r.at != nil && now-r.since >= slow
}

// watch calls check for all requests until the Store is closed.
func (s *Store) watch() {
	const interval = 10 * time.Millisecond
	ticks := time.NewTicker(interval)
	defer ticks.Stop()
	for {
		select {
		case <-s.ctx.Done():
			return
		case <-ticks.C:
		}
		now, want := s.now(), false
		s.mu.Lock()
		for _, r := range s.all {
			want = r.check(now) || want
		}
		s.mu.Unlock()
		if want {
			s.wantMap()
		}
	}
}

// begin makes r ready for an operation.
func (r *request) begin(a *kvop.Args) error { // hot: 0 allocs
	if n := len(a.Key); n == 0 || n > nvme.MaxKVKey {
		return fmt.Errorf("%w: %s with a key of %d bytes: must be 1 to %d", client.ErrInvalid, a.Kind, n, nvme.MaxKVKey)
	}
	if err := offered(a.Kind); err != nil {
		return err
	}
	s := r.s
	write := a.Kind.IsWrite()
	if write {
		a.Client, a.Seq = s.identity, s.writes.Add(1)*kvop.SeqPerOp
		a.KeepSeconds = uint32((s.o.KeepFor + keepMargin) / time.Second)
		a.WantVersion = true // so that it is not sent without its identity
	}
	r.position = nvme.KVPosition(s.current.Load().seed, a.Key)
	r.started, r.unknown, r.first, r.last, r.tried = false, false, 0, nil, r.tried[:0]
	r.mu.Lock()
	defer r.mu.Unlock()
	if s.ctx.Err() != nil {
		return fmt.Errorf("%s: %w", a.Kind, client.ErrClosed)
	}
	r.busy, r.write, r.at, r.place, r.deadline = true, write, nil, r.position, s.now()+s.o.Timeout
	return nil
}

func (r *request) end() { // hot: 0 allocs
	r.mu.Lock()
	defer r.mu.Unlock()
	r.busy, r.at = false, nil
}

// run runs an operation to its end. wrap: errors that follow from the status come with the status.
func (r *request) run(a *kvop.Args, wrap bool) (res kv.Result, err error) { // hot: 0 allocs
	res.Kind = a.Kind
	if err := r.begin(a); err != nil {
		return res, err
	}
	defer r.end()
	s := r.s
	for try := 0; ; try++ {
		if try == s.o.MaxTries {
			return res, r.fail(a.Kind, fmt.Errorf("gave up after %d tries", try))
		}
		if r.unknown && s.now()-r.first > s.o.KeepFor {
			return res, r.fail(a.Kind, fmt.Errorf("not repeated after %s: Options.KeepFor", s.o.KeepFor))
		}
		m := s.current.Load()
		x, c := r.choose(m)
		var comp client.Completion
		done := false
		if x != nil {
			sp := x.space.Load()
			if sp == nil {
				continue // the node lists its partitions again
			}
			if !r.started {
				if err := r.op.Start(sp, a); err != nil {
					return res, err
				}
				r.started = true
			}
			r.op.Cmd.SQE.SetNSID(sp.NSID)
			if try > 0 {
				s.stats.retries.Add(1)
			}
			if comp, err = r.send(m, x, c); err != nil {
				if err := r.failed(x, err); err != nil {
					return res, err
				}
			} else {
				done = r.answered(m, x, &comp) && r.op.Step(sp, &comp)
			}
		}
		if done {
			return r.result(res, wrap)
		}
		if x != nil && !r.write {
			r.tried = append(r.tried, x)
			if r.mayGoOn() {
				continue // at another member, if there is one
			}
		}
		if !r.pause(m, try) {
			return res, r.fail(a.Kind, r.overCause())
		}
	}
}

// choose returns the member to send the command to, and the connection to it; nil if there is none now, for the reason
// in last.
func (r *request) choose(m *clusterMap) (*member, *client.Controller) { // hot: 0 allocs
	all := m.chainOf(r.position).members
	if len(all) == 0 {
		r.last = errNotServed
		r.s.wantMap()
		return nil, nil
	}
	candidates := all
	switch {
	case r.write:
		candidates = all[:1]
	case r.s.o.ReadFrom == ReadTail:
		candidates = all[len(all)-1:]
	}
	best, bestC, bestScore := (*member)(nil), (*client.Controller)(nil), score{}
	begin := 0
	if len(candidates) > 1 {
		begin = int(rand.Uint32()) % len(candidates) // which of those that are equal
	}
	for i := range candidates {
		x := candidates[(begin+i)%len(candidates)]
		if r.hasTried(x) {
			continue
		}
		c, sp := x.node.connected(), x.space.Load()
		if c == nil || sp == nil {
			if c != nil {
				x.node.relist() // the partition is new there
			} else {
				x.node.connect()
			}
			if r.last == nil || best == nil {
				r.last = x.node.problem()
			}
			continue
		}
		if len(candidates) == 1 {
			return x, c
		}
		if sc := x.score(c, sp); best == nil || sc.before(bestScore) {
			best, bestC, bestScore = x, c, sc
		}
	}
	if best == nil {
		r.s.wantMap()
	}
	return best, bestC
}

var errNotServed = errors.New("the range is not served by anybody")

func (r *request) hasTried(x *member) bool { // hot: 0 allocs
	for _, t := range r.tried {
		if t == x {
			return true
		}
	}
	return false
}

// mayGoOn reports whether a member is left that has not been tried for a read.
func (r *request) mayGoOn() bool {
	for _, x := range r.s.current.Load().chainOf(r.position).members {
		if r.s.o.ReadFrom == ReadAny && !r.hasTried(x) {
			return r.overCause() == nil
		}
	}
	return false
}

// score says how well a member can take a command.
type score struct {
	// free is how much of the credit is left, in units, less what waits; a large number without credits.
	free, outstanding int
}

func (a score) before(b score) bool { // hot: 0 allocs
	if a.free != b.free {
		return a.free > b.free
	}
	return a.outstanding < b.outstanding
}

// score uses the credit of the member's SSD, which all partitions there share.
//
// Source: LEED (SIGCOMM'23), Algorithm 1 and section 3.7: the replica with the most tokens. That a command is sent if
// it fits the credit or nothing is outstanding is package window's.
func (x *member) score(c *client.Controller, sp *kvop.Space) score { // hot: 0 allocs
	const unlimited = 1 << 30
	sc := score{unlimited, int(x.outstanding.Load())}
	if cr := c.Credit(sp.NSID); cr.On && cr.Units > 0 {
		sc.free = cr.Units - cr.Outstanding - cr.Waiting
	}
	return sc
}

// send sends the command to a member and waits for the answer.
func (r *request) send(m *clusterMap, x *member, c *client.Controller) (comp client.Completion, err error) {
	s := r.s // hot: 0 allocs
	r.mu.Lock()
	if r.over != nil {
		r.mu.Unlock()
		return comp, r.over
	}
	if s.current.Load() != m { // reroute has not seen where the command goes
		r.mu.Unlock()
		return comp, errMoved
	}
	r.attempt.reset()
	r.at, r.since = x, s.now()
	if r.write && r.first == 0 {
		r.first = r.since
	}
	r.mu.Unlock()
	x.outstanding.Add(1)
	s.stats.tries.Add(1)
	if r.hedge != nil && !r.write {
		comp, err = r.hedge.do(m, x, c)
	} else {
		comp, err = c.Do(&r.attempt, r.op.Kind().String(), false, &r.op.Cmd)
	}
	x.outstanding.Add(-1)
	r.mu.Lock()
	r.at = nil
	r.mu.Unlock()
	return comp, err
}

// failed judges a command without an answer. It returns an error if there is no use in another one.
func (r *request) failed(x *member, err error) error {
	if r.write && errors.Is(err, client.ErrIndeterminate) {
		r.lost()
	}
	if errors.Is(err, client.ErrInvalid) && !r.unknown {
		return err
	}
	r.last = fmt.Errorf("node %s: %w", x.node.key.name, err)
	if !errors.Is(err, errMoved) {
		r.s.wantMap()
	}
	return nil
}

// lost notes that a write may have been carried out.
func (r *request) lost() {
	r.unknown = true
	r.op.Lost()
}

// answered judges the status of a completion. It returns false if it says nothing of the key.
func (r *request) answered(m *clusterMap, x *member, c *client.Completion) bool { // hot: 0 allocs
	switch st := c.Status; st.Code() {
	case nvme.KVWrongView:
		r.s.stats.wrongViews.Add(1)
		if epoch := uint32(c.Result); epoch == 0 || epoch > m.chainOf(r.position).epoch {
			r.s.wantMap()
		}
	case nvme.InvalidNamespaceOrFormat:
		x.node.relist()
	case nvme.NamespaceNotReady, nvme.AdminMediaNotReady:
		if st.DNR() {
			return true
		}
	case nvme.CommandInterrupted, nvme.TransientTransportError, nvme.ANATransition, nvme.AbortedSQDeletion,
		nvme.AbortRequested:
		if st.DNR() && st.Code() != nvme.AbortRequested {
			return true
		}
		if r.write {
			r.lost()
		}
	default:
		return true
	}
	r.last = fmt.Errorf("node %s: %w", x.node.key.name, host.CheckStatus(r.op.Kind().String(), c.Status))
	return false
}

// Pauses between tries: the first, and the longest one.
const (
	minPause = time.Millisecond
	maxPause = 100 * time.Millisecond
)

// pause waits before the next try, until the map has changed or a node was connected at the latest. It returns false if
// the operation must end.
func (r *request) pause(m *clusterMap, try int) bool {
	r.tried = r.tried[:0]
	d := min(minPause<<min(try, 10), maxPause)
	changes := r.s.changes()
	if r.s.current.Load() != m {
		return r.overCause() == nil
	}
	r.mu.Lock()
	over := r.over != nil
	if !over {
		r.attempt.reset()
	}
	done := r.attempt.Done()
	r.mu.Unlock()
	if over {
		return false
	}
	r.timer.Reset(d/2 + rand.N(d/2+1))
	defer r.timer.Stop()
	select {
	case <-r.timer.C:
	case <-changes:
	case <-done:
	}
	return r.overCause() == nil
}

func (r *request) overCause() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.over
}

// fail returns the error of an operation that ends without an answer.
func (r *request) fail(kind kv.Kind, cause error) error {
	what := ErrUnavailable
	switch {
	case r.unknown:
		what = client.ErrIndeterminate
		r.s.stats.indeterminate.Add(1)
	case errors.Is(cause, client.ErrClosed):
		return fmt.Errorf("%s: %w", kind, cause)
	default:
		r.s.stats.unavailable.Add(1)
	}
	if r.last != nil {
		return fmt.Errorf("%s: %w: %w; the latest try: %v", kind, what, cause, r.last)
	}
	return fmt.Errorf("%s: %w: %w", kind, what, cause)
}

// result is that of an operation that was answered.
func (r *request) result(res kv.Result, wrap bool) (kv.Result, error) { // hot: 0 allocs
	op := &r.op
	res.Size, res.Version, res.Expires = op.Size, op.Version, op.Expires
	err := op.Err
	if st := op.Status; !st.OK() {
		if err = host.OfStatus(st); err == nil || wrap {
			err = host.CheckStatus(res.Kind.String(), st)
		}
		if wrap && st.Code() == nvme.KVVersionMismatch {
			err = &kv.VersionError{Current: op.Version, Err: err}
		}
	} else if err != nil && wrap {
		err = fmt.Errorf("%s: %w", res.Kind, err)
	}
	if errors.Is(err, client.ErrIndeterminate) {
		r.s.stats.indeterminate.Add(1)
	}
	return res, err
}
