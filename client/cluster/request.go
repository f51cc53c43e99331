package cluster

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"jbofd/client"
	"jbofd/client/internal/host"
	"jbofd/client/internal/kvop"
	"jbofd/client/kv"
	"jbofd/internal/credit"
	"jbofd/internal/flowctl"
	"jbofd/internal/nvme"
)

// request carries out one operation at a time: it chooses members, sends the command and judges the answer, again and
// again until there is one that counts.
//
//	start ──> next ──> waiting ──> sent ──┬── an answer ──────────────> finish
//	           ^       (tokens)           ├── wrong view, not ready ──┐
//	           │                          ├── cancelled: moved, slow ─┤ a write that was sent is a retry from now on
//	           └───────── paused <────────┴── connection lost ────────┘
//
// A command that is cancelled gives its buffer back at once.
type request struct {
	s  *Store
	e  *engine
	op kvop.Op
	// q is the queue whose operation it is; nil: ended, of capacity 1, tells the end to a goroutine.
	q     *OpQueue
	ended chan struct{}
	// args and key are of the operation, tag is its Op.Tag. wrap: errors that follow from the status come with the
	// status. position is that of the key.
	args     kvop.Args
	key      [nvme.MaxKVKey]byte
	tag      uint64
	wrap     bool
	position uint64
	// res and err are the outcome. They belong to the goroutine that was told of the end.
	res kv.Result
	err error

	// What follows is guarded by engine.mu.

	// index is the place in engine.all.
	index int
	// number is that of a write from when it is sent first until its end. held: it is paused until no earlier write of
	// its key is late.
	number kvop.Number
	held   bool
	// use counts operations.
	use    uint64
	phase  phase
	tenant flowctl.Tenant
	lane   int
	// m is the map of the latest try, tries is how many there were.
	m     *clusterMap
	tries int
	// started: op has its command. unknown: an earlier try of the write may have been carried out. first is when it was
	// sent first.
	started, unknown bool
	first            time.Duration
	// tried are members that have not answered a read, since the last pause.
	tried []*member
	// last says why the latest try has failed.
	last error
	// deadline is when the operation must end, due when a pause is over, queued when it began to wait for tokens.
	deadline, due, queued time.Duration
	// over, once set, is why the operation must end.
	over error
	// a is the command. second is a second one of a hedged read, nil: reads are not hedged. open is how many of them
	// are outstanding. winner is the one whose answer counts, nil: there is none yet.
	a      attempt
	second *attempt
	open   int
	winner *attempt
}

type phase uint8

const (
	idle     phase = iota
	choosing       // on the way to another phase
	waiting        // for tokens
	sent
	paused
)

// attempt is a command of a request.
type attempt struct {
	r  *request
	io client.Async
	// flow has the members that the command may go to, or whose tokens it takes, as targets; members are the same.
	flow    flowctl.Request
	members [flowctl.MaxTargets]*member
	x       *member       // the partition to which it was sent
	place   *place        // the namespace of x
	q       *ioQueue      // the queue through which it was sent
	since   time.Duration // when it was sent
	// open: it is outstanding. why is the reason why it was cancelled, or nil.
	open bool
	why  error
	// judged: op has its outcome.
	judged bool
	// buf is the buffer of a second command; the first one uses that of the caller.
	buf []byte
}

// Reasons to cancel a command.
var (
	errMoved  = errors.New("the map has changed")
	errSlow   = errors.New("no answer in time")
	errHedged = errors.New("another member was faster")
)

func newRequest(s *Store) *request {
	r := &request{s: s, e: s.engine, ended: make(chan struct{}, 1), tried: make([]*member, 0,
		nvme.ClusterMapMaxMembers)}
	r.a.init(r)
	if s.o.Hedge > 0 {
		r.second = &attempt{}
		r.second.init(r)
	}
	return r
}

func (at *attempt) init(r *request) {
	at.r = r
	at.io.Item, at.io.Sink = at, r.e
	at.flow.Item = at
}

// memory is what the request keeps for values.
func (r *request) memory() int {
	n := r.op.Kept()
	if r.second != nil {
		n += cap(r.second.buf)
	}
	return n
}

// begin makes r ready for the operation of args, whose key is copied. It needs no lock: r is the caller's.
//
// Errors: the operation cannot be carried out.
func (r *request) begin(a *kvop.Args) error { // hot: 0 allocs
	r.res, r.err = kv.Result{Kind: a.Kind}, nil
	if n := len(a.Key); n == 0 || n > nvme.MaxKVKey {
		return fmt.Errorf("%w: %s with a key of %d bytes: must be 1 to %d", client.ErrInvalid, a.Kind, n, nvme.MaxKVKey)
	}
	if err := offered(a.Kind); err != nil {
		return err
	}
	s := r.s
	r.args = *a
	r.args.Key = r.key[:copy(r.key[:], a.Key)]
	if a := &r.args; a.Kind.IsWrite() {
		a.Client, a.Seq = s.identity, kvop.SeqPerOp // send sets its number
		a.KeepSeconds = uint32((s.o.KeepFor + keepMargin) / time.Second)
		a.WantVersion = true // so that it is not sent without its identity
	}
	m := s.current.Load()
	r.position = nvme.KVPosition(m.seed, r.args.Key)
	r.started, r.unknown, r.first, r.last, r.tried, r.tries = false, false, 0, nil, r.tried[:0], 0
	for _, x := range m.chainOf(r.position).members {
		if p := x.place.Load(); p != nil {
			return r.startOp(p) // copies a value without the lock
		}
	}
	return nil
}

func (r *request) startOp(p *place) error { // hot: 0 allocs
	if err := r.op.Start(&p.space, &r.args); err != nil {
		return err
	}
	r.started = true
	return nil
}

func (r *request) write() bool { return r.args.Kind.IsWrite() }

// next begins the next try. mu is held, as for the following methods.
func (r *request) next(now time.Duration) { // hot: 0 allocs
	s := r.s
	r.phase, r.held = choosing, false
	switch {
	case r.over != nil:
		r.finish(r.fail(r.over))
		return
	case r.tries == s.o.MaxTries:
		r.finish(r.fail(fmt.Errorf("gave up after %d tries", r.tries)))
		return
	case r.expired(now):
		r.finish(r.fail(r.whyExpired()))
		return
	}
	r.tries++
	r.m = s.current.Load()
	if !r.a.choose(nil) {
		s.wantMap()
		r.pause(now)
		return
	}
	r.phase, r.queued = waiting, now
	r.e.flow.Add(int64(now), &r.a.flow)
}

// expired reports whether a write that may have been carried out cannot be repeated, because nobody may know its
// identity any more.
func (r *request) expired(now time.Duration) bool { return r.unknown && now-r.first > r.s.o.KeepFor } // hot: 0 allocs

func (r *request) whyExpired() error {
	return fmt.Errorf("not repeated after %s: Options.KeepFor", r.s.o.KeepFor)
}

// choose finds the members that the command may go to, all but one; of a write: whose tokens it takes. It returns false
// if there are none, for the reason in last.
func (at *attempt) choose(but *member) bool { // hot: 0 allocs
	r := at.r
	f := &at.flow
	f.Tenant, f.Write, f.N = r.tenant, r.write(), 0
	f.Units = credit.Units(len(r.args.Value))
	if r.started {
		f.Units = credit.Units(len(r.op.Cmd.Data))
	}
	all := r.m.chainOf(r.position).members
	if len(all) == 0 {
		r.last = errNotServed
		return false
	}
	if !f.Write && r.s.o.ReadFrom == ReadTail {
		all = all[len(all)-1:]
	}
	for i, x := range all {
		if x == but || r.hasTried(x) {
			continue
		}
		p := x.place.Load()
		if up := x.node.connected(); up == nil || p == nil {
			if up != nil {
				x.node.relist() // the partition is new there
			} else {
				x.node.connect()
			}
			if f.Write && i > 0 {
				continue
			}
			if r.last == nil || f.N == 0 {
				r.last = x.node.problem()
			}
			if f.Write {
				return false
			}
			continue
		}
		f.Targets[f.N], at.members[f.N] = p.ssd, x
		f.N++
	}
	return f.N > 0
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

// send hands the command to the queue of the node that was chosen.
//
// Source: LEED (SIGCOMM'23), Algorithm 1 and section 3.7: see package flowctl.
func (at *attempt) send(now time.Duration) { // hot: 0 allocs
	r := at.r
	e := r.e
	at.x = at.members[at.flow.SentTo()]
	l, p := at.x.node.ready.Load(), at.x.place.Load()
	if r.expired(now) { // while it waited for tokens
		e.flow.Ended(int64(now), &at.flow, 0)
		r.finish(r.fail(r.whyExpired()))
		return
	}
	if l == nil || p == nil { // there is no connection, or the partition is not in its namespace any more
		e.flow.Ended(int64(now), &at.flow, 0)
		if at == &r.a {
			r.next(now)
		}
		return
	}
	if !r.started {
		if err := r.startOp(p); err != nil {
			e.flow.Ended(int64(now), &at.flow, 0)
			r.finish(err)
			return
		}
	}
	if r.write() && r.first == 0 && !r.takeNumber(now) {
		e.flow.Ended(int64(now), &at.flow, 0)
		return
	}
	at.io.Cmd = r.op.Cmd
	at.io.Cmd.SQE.SetNSID(p.space.NSID)
	if at != &r.a {
		at.io.Cmd.Data = at.buf[:len(r.op.Cmd.Data)]
	}
	at.place, at.since, at.open, at.why, at.judged = p, now, true, nil, false
	at.q = l.queues[r.lane%len(l.queues)]
	r.phase = sent
	r.open++
	if r.first == 0 {
		r.first = max(now, 1)
	}
	if r.s.stats.tries.Add(1); r.tries > 1 && at == &r.a {
		r.s.stats.retries.Add(1)
	}
	at.io.Prepare()
	if at.io.Next = nil; at.q.first == nil {
		at.q.first = &at.io
		e.out = append(e.out, at.q)
	} else {
		at.q.last.Next = &at.io
	}
	at.q.last = &at.io
	if r.second != nil && at == &r.a && !r.write() {
		e.hedgeAt(now, r)
	}
}

// takeNumber gives a write its number before it is sent first. It returns false if the write must wait for an earlier
// one of its key. Then it pauses until a late write of the Store ends or a new map comes, and tries again; check ends
// it at its deadline.
func (r *request) takeNumber(now time.Duration) bool { // hot: 0 allocs
	n := &r.e.numbers
	if n.MustWait(r.position) {
		r.phase, r.held, r.due = paused, true, r.deadline
		r.tries-- // waiting is no try
		r.e.paused = append(r.e.paused, r)
		return false
	}
	r.op.SetNumber(n.Begin(&r.number, r.position, now))
	return true
}

// cancel cancels the command, if it is outstanding.
func (at *attempt) cancel(now time.Duration, why error) {
	if !at.open || at.why != nil {
		return
	}
	at.why = why
	if at.q.Cancel(&at.io) {
		at.settle(now)
	}
}

// judge takes over the answer, if it says something of the key. It needs no lock: a command that has ended belongs to
// the goroutine that was told so, and no other command uses op.
func (at *attempt) judge() { // hot: 0 allocs
	if at.r.second == nil || at.r.write() {
		at.take()
	}
}

func (at *attempt) take() { // hot: 0 allocs
	r := at.r
	if at.io.Err == nil && final(at.io.Comp.Status) {
		at.judged = r.op.Step(&at.place.space, &at.io.Comp)
	}
}

// settle goes on after the end of the command: it gives back its tokens, and then ends the operation if there is an
// answer, or no use in another try. Otherwise a read goes to a member that has not been tried since the last pause, if
// there is one; what is left pauses. Of a hedged read it waits for both commands (raced).
func (at *attempt) settle(now time.Duration) { // hot: 0 allocs
	r := at.r
	units := 0
	if at.io.Err == nil {
		units = client.ReportedCredit(at.io.Cmd.SQE.Opcode(), at.place.drive, &at.io.Comp)
	}
	at.open = false
	r.open--
	at.io.Cmd.Data = nil
	r.e.flow.Ended(int64(now), &at.flow, units)
	if r.second != nil && !r.write() {
		if at = r.raced(now, at); at == nil {
			return
		}
	}
	x := at.x
	switch {
	case at.judged:
		r.finish(nil)
		return
	case at.io.Err != nil:
		if err := r.failed(at); err != nil {
			r.finish(err)
			return
		}
	default:
		r.refused(at)
	}
	if !r.write() {
		r.tried = append(r.tried, x)
		if r.mayGoOn() {
			r.next(now) // at another member
			return
		}
	}
	r.pause(now)
}

// mayGoOn reports whether a member is left that has not been tried for a read.
func (r *request) mayGoOn() bool {
	if r.s.o.ReadFrom == ReadTail {
		return false
	}
	for _, x := range r.s.current.Load().chainOf(r.position).members {
		if !r.hasTried(x) {
			return true
		}
	}
	return false
}

// failed judges a command without an answer. It returns an error if there is no use in another one.
func (r *request) failed(at *attempt) error {
	err := at.io.Err
	if at.why != nil {
		err = at.why
	}
	if r.write() && at.io.Sent {
		r.lost()
	}
	if errors.Is(err, client.ErrInvalid) && !r.unknown {
		return err
	}
	r.last = fmt.Errorf("node %s: %w", at.x.node.key.name, err)
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

// final reports whether a status ends the operation. After the others it is tried again, at another member or with a
// newer map.
func final(st nvme.Status) bool { // hot: 0 allocs
	switch st.Code() {
	case nvme.KVWrongView, nvme.InvalidNamespaceOrFormat, nvme.AbortRequested:
		return false
	case nvme.NamespaceNotReady, nvme.AdminMediaNotReady, nvme.CommandInterrupted, nvme.TransientTransportError,
		nvme.ANATransition, nvme.AbortedSQDeletion:
		return st.DNR()
	}
	return true
}

// refused follows a status that is not final.
func (r *request) refused(at *attempt) {
	c := &at.io.Comp
	switch c.Status.Code() {
	case nvme.KVWrongView:
		r.s.stats.wrongViews.Add(1)
		if epoch := uint32(c.Result); epoch == 0 || epoch > r.m.chainOf(r.position).epoch {
			r.s.wantMap()
		}
	case nvme.InvalidNamespaceOrFormat:
		at.x.node.relist()
	case nvme.NamespaceNotReady, nvme.AdminMediaNotReady:
	default: // the outcome is unknown
		if r.write() {
			r.lost()
		}
	}
	r.last = fmt.Errorf("node %s: %w", at.x.node.key.name, host.CheckStatus(r.args.Kind.String(), c.Status))
}

// Pauses between tries: the first, and the longest one.
const (
	minPause = time.Millisecond
	maxPause = 100 * time.Millisecond
)

// pause waits before the next try, until the map has changed or a node was connected at the latest.
func (r *request) pause(now time.Duration) {
	r.tried = r.tried[:0]
	r.e.numbers.Late(&r.number)
	if r.over != nil || r.s.current.Load() != r.m {
		r.next(now)
		return
	}
	d := min(minPause<<min(r.tries, 10), maxPause)
	r.phase, r.due = paused, now+d/2+rand.N(d/2+1)
	r.e.paused = append(r.e.paused, r)
	r.e.setTimer(now, r.due)
}

// reroute looks at a new map: a command at a member that does not serve it any more is cancelled.
func (r *request) reroute(now time.Duration, m *clusterMap) {
	switch r.phase {
	case waiting:
		r.e.flow.Remove(int64(now), &r.a.flow)
		r.next(now)
	case sent:
		for _, at := range []*attempt{&r.a, r.second} {
			if at == nil || !at.open {
				continue
			}
			if serves, head := m.has(r.position, at.x); !serves || r.write() && !head {
				at.cancel(now, errMoved)
			}
		}
	}
}

// slow is how long a command may take before the map is read again.
const slow = 100 * time.Millisecond

// check ends an operation whose time is over, and lets a read that takes too long go to another member. It reports
// whether a newer map would help.
func (r *request) check(now time.Duration) (wantMap bool) {
	if r.phase == idle {
		return false
	}
	if now >= r.deadline {
		r.end(now, context.DeadlineExceeded)
		return false
	}
	if r.phase == waiting && !r.write() && now-r.queued >= r.s.o.ReadTimeout {
		r.leaveLink(now)
	}
	if r.phase != sent {
		return false
	}
	wantMap = now-r.a.since >= slow
	if !r.write() && now-r.a.since >= r.s.o.ReadTimeout {
		r.cancel(now, errSlow)
	}
	return wantMap
}

// leaveLink lets a read that has the tokens of a member, and waits for a place in the queues of its node, go to the
// other members, if one is connected: that node may be silent.
func (r *request) leaveLink(now time.Duration) {
	if !r.a.flow.AtLink() || r.s.o.ReadFrom == ReadTail {
		return
	}
	x := r.a.members[r.a.flow.SentTo()]
	for _, o := range r.s.current.Load().chainOf(r.position).members {
		if o == x || r.hasTried(o) || o.node.connected() == nil || o.place.Load() == nil {
			continue
		}
		r.e.flow.Remove(int64(now), &r.a.flow)
		r.tried = append(r.tried, x)
		r.last = fmt.Errorf("node %s: %w", x.node.key.name, errSlow)
		r.next(now)
		return
	}
}

// cancel cancels what is outstanding.
func (r *request) cancel(now time.Duration, why error) {
	r.a.cancel(now, why)
	if r.second != nil {
		r.second.cancel(now, why)
	}
}

// end ends the operation, if there is one, for a reason.
func (r *request) end(now time.Duration, why error) {
	if r.phase == idle || r.over != nil {
		return
	}
	r.over = why
	switch r.phase {
	case waiting:
		r.e.flow.Remove(int64(now), &r.a.flow)
		r.finish(r.fail(why))
	case paused:
		for i, o := range r.e.paused {
			if o == r {
				r.e.paused = append(r.e.paused[:i], r.e.paused[i+1:]...)
				break
			}
		}
		r.finish(r.fail(why))
	case sent:
		r.cancel(now, why)
	}
}
