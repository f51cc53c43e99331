package crrs

import (
	"container/heap"
	"encoding/binary"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"jbofd/internal/crrs/linear"
	"jbofd/internal/invariants"
	"jbofd/internal/testutil/hunt"
)

var (
	seedFlag = flag.Uint64("seed", 0, "seed of the random histories; 0: a new one")
	runsFlag = flag.Uint64("runs", runs(), "number of random histories")
	traceSim = flag.Bool("trace", false, "print what happens")
)

// The simulated chain: replicas with stores, a manager, and clients, in virtual time.
//
// Fault model. Nodes die, and with them what their stores have not made durable; some come back, with their store or
// with an empty one. They are paused for any time and go on; stores take any time and work in any order; messages take
// any time and overtake each other, and those of a pass come twice, or are answered with what was read earlier; links
// are cut in one direction or both, which loses what is under way, and mended; nodes adopt views late, and miss some
// (overtake); all processes end at once, and one of the stores goes on alone. Clocks of nodes run at rates that differ
// by up to a tenth. A store fails now and then, also that of the only member, and works again. In a quarter of the
// histories segments of stores are lost (simlossy_test.go). Otherwise one member survives. Whoever has gone and is back
// is filled (simfill_test.go).
const (
	ms        = int64(1e6)
	lease     = 1000 * ms
	authority = lease / 2
	keys      = 6
)

var nthFlag = flag.Uint64("nth", 0, "number of the first history")

type event struct {
	at  int64
	nth int
	do  func()
}

type events []event

func (e events) Len() int { return len(e) }
func (e events) Less(i, j int) bool {
	return e[i].at < e[j].at || e[i].at == e[j].at && e[i].nth < e[j].nth
}
func (e events) Swap(i, j int) { e[i], e[j] = e[j], e[i] }
func (e *events) Push(x any)   { *e = append(*e, x.(event)) }
func (e *events) Pop() any {
	last := (*e)[len(*e)-1]
	*e = (*e)[:len(*e)-1]
	return last
}

// object is what a store has of a key: the version, and the number of the write that it comes from.
type object struct {
	version, value uint64
	deleted        bool
}

type node struct {
	id int
	// r is the Replica; wire has its Port, if it has one.
	r *Replica
	*wire
	rate    float64 // of its clock
	dead    bool
	paused  bool
	backlog []func()
	store   [keys]object
	done    [keys]map[Identity]uint64
	slow    bool // its store takes long
	life    int  // counts the processes that it has been
	late    bool // the process was paused after it had looked at the clock
	failed  bool // its store has failed for good
	ops     int  // that its store has
	heard   int64
	lossy
	fresh bool // the process is a new one, and was a member when it began
}

type pair struct{ from, to int }

type sim struct {
	t     hunt.Reporter
	fault fault
	rng   *rand.Rand
	now   int64
	nth   int
	queue events
	nodes []*node
	cut   map[pair]bool
	// chain and epoch are the manager's view, leaving those that it has given up and whose authority may last.
	chain   []int
	epoch   uint64
	leaving map[int]bool
	// filling is the member that is filled, or -1. since are the epochs in which the memberships began.
	filling int
	since   map[int]uint64
	fills   int
	// expired is the Delete whose tombstone was removed last, of each key.
	expired [keys]uint64
	calm    bool
	// still: no ChainHead yields any more, so that no view comes just before the end.
	still bool
	// ops are what clients have seen, of each key. byVersion is which write gave a key a version.
	ops [keys][]linear.Operation
	// seen is what some client has read or written last.
	seen      [keys]uint64
	byVersion [keys]map[uint64]uint64
	values    uint64
	pending   map[uint64]func(Reply)
	replied   map[uint64]bool
	// expected is the value that a conditional write replaces, by the number of the write.
	expected map[uint64]uint64
	// judgedBy is the value by which a conditional write was refused.
	judgedBy map[uint64]uint64
	// ports: nodes have Ports. connections counts the connections of each pair, handles the commands that have arrived.
	ports       bool
	connections map[pair]int
	handles     uint64
	tags        uint64
	open, acked int
	load        load
	// halted: the only member is damaged. revived counts those that went on without a new process.
	halted  bool
	revived int
	simLossy
	simAnswers
	// handed counts the views with another ChainHead that has not been lost, late those that came when it had writes.
	handed, late int
	// unseen are views that do not reach a node, by epoch. overtaken counts the ChainHeads that have gone from one view
	// to another one and missed those between them.
	unseen    map[int]uint64
	overtaken int
	// joined counts what was asked for and answered with what had been read before for the same.
	joined int
}

func (s *sim) trace(format string, args ...any) {
	if *traceSim {
		fmt.Printf("%9.3f ms  %s\n", float64(s.now)/1e6, fmt.Sprintf(format, args...))
	}
}

func (s *sim) after(d int64, do func()) {
	s.nth++
	heap.Push(&s.queue, event{s.now + max(d, 1), s.nth, do})
}

// later runs do on a node after some time, if its process still lives.
func (s *sim) later(n *node, d int64, do func()) {
	life := n.life
	s.after(d, func() {
		if n.life == life {
			s.on(n, do)
		}
	})
}

// upTo is a random time of at most that.
func (s *sim) upTo(most int64) int64 { return 1 + s.rng.Int64N(most) }

// on runs do on a node, when it is not paused.
func (s *sim) on(n *node, do func()) {
	switch {
	case n.dead:
	case n.paused:
		n.backlog = append(n.backlog, do)
	default:
		do()
	}
}

// turn runs one call of a node's replica and carries out its actions.
func (s *sim) turn(n *node, call func(out *Actions)) {
	s.on(n, func() {
		var out Actions
		if !n.late {
			n.r.Advance(n.clock(s.now))
		}
		call(&out)
		s.storeAtOnce(n, &out)
		if n.wire != nil {
			n.p.Flush(&out, &n.t)
			t := n.t
			n.t = Traffic{}
			s.carryTraffic(n, &t)
		} else if s.rng.IntN(3) > 0 {
			n.r.Flush(&out)
		} else {
			s.later(n, s.upTo(ms), func() { s.turn(n, n.r.Flush) })
		}
		s.carryOut(n, &out)
		if got, want := n.r.tables.Dirty(), n.r.marked(); got != want {
			s.t.Fatalf("node %d counts %d dirty writes, and has %d", n.id, got, want)
		}
	})
}

func (n *node) clock(now int64) int64 { return int64(float64(now) * n.rate) }

func (s *sim) carryOut(n *node, out *Actions) {
	n.ops += len(out.Stores) + len(out.Ranges)
	for _, op := range out.Stores {
		d := s.upTo(2 * ms)
		if n.slow && s.rng.IntN(4) == 0 {
			d = s.upTo(300 * ms)
		}
		sound := s.sound(n, &op)
		s.later(n, d, func() { s.runStore(n, op, sound) })
	}
	for _, op := range out.Ranges {
		s.later(n, s.rangeTime(), func() { s.runRange(n, op) })
	}
	for _, mem := range out.Released {
		s.forget(n, mem)
	}
	for _, m := range out.Sends {
		m.Value = append([]byte(nil), m.Value...)
		s.deliver(n, m)
	}
	for _, r := range out.Replies {
		if s.replied[r.Tag] {
			s.t.Fatalf("request %d was answered twice", r.Tag)
		}
		s.replied[r.Tag] = true
		if f := s.pending[r.Tag]; f != nil {
			delete(s.pending, r.Tag)
			s.after(s.upTo(ms), func() { f(r) })
		}
	}
	if out.Damaged {
		s.trace("node %d is damaged", n.id)
		n.failed = n.failed || s.rng.IntN(2) == 0 && s.others(n.id)
		s.later(n, s.upTo(200*ms), func() { s.tryToRevive(n) })
	}
}

// deliver carries a message, if the connection is there when it is sent and when it arrives.
func (s *sim) deliver(n *node, m Send) {
	to := s.nodes[m.To]
	link := pair{n.id, to.id}
	if *traceSim { // its arguments are what costs
		s.trace("%d -> %d %+v cut %v", n.id, to.id, m.Message, s.cut[link])
	}
	if s.cut[link] {
		return
	}
	if m.Kind == Ship {
		m.Value = make([]byte, m.Len)
	}
	arrive := func() {
		if !s.cut[link] {
			s.turn(to, func(out *Actions) {
				m.Epoch = s.epochOf(to, m.Kind == Ack, m.Epoch)
				to.r.Receive(Peer(n.id), &m.Message, out)
			})
		}
	}
	s.later(to, s.upTo(ms), arrive)
	if m.Part != nil && s.rng.IntN(8) == 0 {
		s.later(to, s.upTo(20*ms), arrive)
	}
}

// runStore does an operation of a node's store.
func (s *sim) runStore(n *node, op StoreOp, sound uint64) {
	if op.Op == Get {
		o := &n.store[op.Key.Bytes[0]]
		st, version := Done, o.version
		if o.deleted || version == 0 {
			st = Absent
		}
		if n.unsound(op.Key.Bytes[0], sound) {
			st = StoreUnreadable
		}
		binary.LittleEndian.PutUint64(op.Value, o.value)
		s.later(n, s.upTo(ms), func() {
			s.turn(n, func(out *Actions) {
				n.ops--
				if st == StoreUnreadable {
					n.r.Repair(position(int(op.Key.Bytes[0])), out)
				}
				s.reading(n, func() { n.r.Fetched(op.Slot, st, version, len(op.Value), 0, out) })
			})
		})
		return
	}
	st, version := s.storeWrite(n, op, sound)
	s.later(n, s.upTo(ms), func() {
		s.turn(n, func(out *Actions) {
			n.ops--
			n.r.Stored(op.Slot, st, version, out)
		})
	})
}

// storeWrite does a write of a node's store, and returns its outcome.
func (s *sim) storeWrite(n *node, op StoreOp, sound uint64) (st StoreStatus, version uint64) {
	k := op.Key.Bytes[0]
	o := &n.store[k]
	st, version = Done, op.Version
	switch v, known := n.done[k][op.ID]; {
	case !s.calm && s.load != hot && s.rng.IntN(4000) == 0 && (s.others(n.id) || len(s.chain) == 1):
		st = Failed
	case s.fault == missedWrite && n.r.role.Filling:
		return st, version
	case op.Retry && known && (s.fault != lostIdentity || v > n.r.base):
		st, version = Repeated, v
	case (op.Conditional || op.Retry) && n.unsound(k, sound), op.Retry && n.gone[segmentOf(int(k))]:
		st = Unjudged
	case op.Conditional && s.expected[op.ID.Seq] != s.valueOf(n, op.Key):
		st = Declined
		s.judgedBy[op.ID.Seq] = s.valueOf(n, op.Key)
	case op.Version < o.version:
		st = Superseded
		n.done[k][op.ID] = op.Version
	default:
		*o = object{version: op.Version, value: op.ID.Seq, deleted: op.Op == Delete}
		n.done[k][op.ID] = op.Version
	}
	if st == Done || st == Superseded {
		s.forgetAnswered(n, &op)
		if was, known := s.byVersion[k][op.Version]; known && was != op.ID.Seq {
			s.t.Fatalf("version %d of key %d was given to writes %d and %d", op.Version, k, was, op.ID.Seq)
		}
		s.byVersion[k][op.Version] = op.ID.Seq
	}
	return st, version
}

// The manager.

// heartbeat keeps a node's authority up, as long as manager and node hear each other.
func (s *sim) heartbeat(n *node) {
	s.after(lease/8, func() { s.heartbeat(n) })
	s.on(n, func() {
		sent := n.clock(s.now)
		if s.cut[pair{n.id, manager}] || s.silent(n) {
			return
		}
		s.report(n)
		s.reportYield(n)
		s.after(s.upTo(ms), func() {
			if s.leaving[n.id] {
				return
			}
			n.heard = s.now
			s.sendView(n)
			// Only members that serve have authority. One that is back may believe that it does, until it is filled.
			if !s.cut[pair{manager, n.id}] && slices.Contains(s.chain, n.id) {
				s.later(n, s.upTo(ms), func() { n.r.Extend(sent + authority) })
			}
		})
	})
}

// watch gives up members that are not heard of. A new view comes only when their authority has ended.
func (s *sim) watch() {
	s.after(lease/10, s.watch)
	if s.watchHalted(); s.halted {
		return
	}
	for _, id := range s.chain {
		if n := s.nodes[id]; (s.now-n.heard > lease || n.bad() || n.r.Lacks(s.since[id])) && s.others(id) {
			s.remove(id)
			return
		}
	}
	s.watchLastCopies()
	s.watchFilling()
}

func (s *sim) remove(id int) {
	if s.leaving[id] || !slices.Contains(s.chain, id) {
		return
	}
	s.leaving[id] = true
	// Nothing has been granted since it was last heard of, but for what was under way; clocks differ by a tenth.
	s.after(s.nodes[id].heard+lease-s.now, func() {
		delete(s.leaving, id)
		if !s.others(id) || !slices.Contains(s.chain, id) {
			return // the others may be gone for good
		}
		s.chain = slices.DeleteFunc(slices.Clone(s.chain), func(i int) bool { return i == id })
		s.newEpoch()
	})
}

// others reports whether members besides one are alive, serve, and are heard of.
func (s *sim) others(id int) bool {
	return !s.halted && slices.ContainsFunc(s.chain, func(i int) bool {
		n := s.nodes[i]
		return i != id && !n.dead && !n.bad() && !n.r.Lacks(s.since[i]) && !n.fresh && !s.leaving[i] &&
			s.now-n.heard <= lease
	})
}

// sendView tells a node its role.
func (s *sim) sendView(n *node) {
	role := Role{Epoch: s.epoch, Since: s.since[n.id], Predecessor: NoPeer, Successor: NoPeer, ChainTail: NoPeer}
	last := s.chain[len(s.chain)-1]
	switch i := slices.Index(s.chain, n.id); {
	case s.halted:
	case n.id == s.filling:
		role.Member, role.Filling, role.Predecessor = true, true, Peer(last)
	case i >= 0:
		role.Member = true
		if i > 0 {
			role.Predecessor = Peer(s.chain[i-1])
		}
		if i < len(s.chain)-1 {
			role.Successor, role.ChainTail = Peer(s.chain[i+1]), Peer(last)
		} else if s.filling >= 0 {
			role.Successor = Peer(s.filling)
		}
	}
	for i := len(s.chain) - 1; i >= 0 && role.Member; i-- {
		if id := s.chain[i]; id != n.id {
			role.Others[role.NumOthers] = Peer(id)
			role.NumOthers++
		}
	}
	if s.cut[pair{manager, n.id}] || s.unseen[n.id] == s.epoch {
		return
	}
	s.later(n, s.upTo(20*ms), func() {
		if n.fresh {
			return
		}
		s.turn(n, func(out *Actions) {
			setRole := n.r.SetRole
			if n.wire != nil {
				setRole = func(role Role, out *Actions) { n.p.SetRole(role, out, &n.t) }
			}
			s.sees(n, role, setRole, out)
		})
	})
}

const manager = -1

// run runs one history and checks it.
func run(t hunt.Reporter, seed, nth uint64, l load, f fault) *sim {
	s := &sim{t: t, load: l, fault: f, rng: rand.New(rand.NewPCG(seed, nth)), cut: map[pair]bool{},
		leaving: map[int]bool{}, unseen: map[int]uint64{}, epoch: 1, filling: -1, since: map[int]uint64{},
		ports: nth%2 == 0, connections: map[pair]int{}, pending: map[uint64]func(Reply){}, replied: map[uint64]bool{},
		expected: map[uint64]uint64{}, judgedBy: map[uint64]uint64{}}
	for k := range s.byVersion {
		s.byVersion[k] = map[uint64]uint64{}
	}
	for i := range 1 + s.rng.IntN(5) {
		n := &node{id: i, rate: 0.95 + s.rng.Float64()/10}
		s.wipe(n)
		s.restart(n)
		s.nodes = append(s.nodes, n)
		if i == 0 || s.rng.IntN(5) > 0 {
			s.chain, s.since[i] = append(s.chain, i), 1
		}
	}
	for _, n := range s.nodes {
		s.sendView(n)
		s.heartbeat(n)
	}
	s.watch()
	s.after(s.upTo(lease), s.disturb)
	if s.loses = nth%4 == 2; s.loses {
		s.after(s.upTo(lease), s.damage)
		for _, n := range s.nodes {
			s.lookForLosses(n)
		}
	}
	for range s.clients() {
		s.after(s.upTo(ms), s.client)
	}
	end := int64(4 + s.rng.IntN(6))
	s.until(end * lease)
	// In the end everything works, and every operation ends.
	s.calm = true
	if s.loses {
		s.heal()
	}
	s.acked = 0
	for _, n := range s.nodes {
		n.slow = false
		n.r.SetFull(false, false)
		s.resume(n)
		if n.dead {
			s.revive(n)
		}
	}
	for _, a := range s.nodes {
		for _, b := range s.nodes {
			if s.cut[pair{a.id, b.id}] {
				s.mend(a.id, b.id, []pair{{a.id, b.id}})
			}
		}
	}
	clear(s.cut)
	s.until((end + 36) * lease)
	s.still = true
	s.until((end + 40) * lease)
	if s.open > 0 || s.acked < 50 {
		t.Errorf("%d operations have not ended, %d were done at the end; chain %v", s.open, s.acked, s.chain)
	}
	if head := s.nodes[s.chain[0]]; head.r.Full() {
		t.Errorf("node %d believes that a partition is full, and none is", head.id)
	}
	for _, id := range s.chain {
		if d := s.nodes[id].r.Writes(); d > 0 && !s.nodes[id].dead {
			t.Errorf("node %d has %d writes that are not committed", id, d)
			r := s.nodes[id].r
			for i := range r.writes.End() {
				if w := r.writes.At(i); w.version != 0 || w.waited || w.storing || w.Key.Len > 0 {
					t.Logf("slot %d: %+v", i, *w)
				}
			}
			t.Logf("%+v applied %d above %d committed %d seq %d queued %d unordered %d", r.role, r.applied, r.above,
				r.committed, r.seq, r.queued.N, r.unordered.N)
		}
	}
	s.checkStores()
	s.checkWire()
	for k, ops := range s.ops {
		if err := linear.Check(ops); err != nil {
			t.Errorf("key %d: %v", k, err)
		}
	}
	if t.Failed() {
		t.Fatalf("repeat with -seed %d -nth %d -runs 1", seed, nth)
	}
	return s
}

func (s *sim) until(end int64) {
	for len(s.queue) > 0 && s.queue[0].at <= end && !s.t.Failed() {
		e := heap.Pop(&s.queue).(event)
		s.now = e.at
		e.do()
	}
	s.now = end
}

// runs is how many histories there are unless -runs says so: most where each invariant is checked.
func runs() uint64 {
	if invariants.Enabled {
		return 1200
	}
	return 200
}

// TestHistoriesAreLinearizable runs chains under faults and looks at what clients have seen.
func TestHistoriesAreLinearizable(t *testing.T) {
	seed := *seedFlag
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("-seed %d", seed)
	fills, revived, ops, handed, late, overtaken, joined, lost, readAnew, healed := 0, 0, 0, 0, 0, 0, 0, 0, 0, 0
	var answers simAnswers
	for i := range *runsFlag {
		s := run(t, seed, *nthFlag+i, mixed, sound)
		fills, revived, handed, late = fills+s.fills, revived+s.revived, handed+s.handed, late+s.late
		overtaken, joined = overtaken+s.overtaken, joined+s.joined
		lost, readAnew, healed = lost+s.lostSegments, readAnew+s.readAnew, healed+s.healed
		answers.add(&s.simAnswers)
		for k := range s.ops {
			ops += len(s.ops[k])
		}
	}
	t.Logf("%d members were filled, %d revived, %d ChainHeads handed over, %d of them too late, %d missed views, "+
		"%d operations checked", fills, revived, handed, late, overtaken, ops)
	t.Logf("%d segments were lost, %d nobody had, and %d reads were of what was stored since; %d copies and digests "+
		"were read before they were asked for", lost, healed, readAnew, joined)
	answers.check(t, ops)
	if fills == 0 && *runsFlag > 10 {
		t.Error("no member was filled")
	}
	if revived == 0 && *runsFlag > 100 {
		t.Error("no member that was damaged revived")
	}
	if (handed < 100 || late == 0 || overtaken == 0) && *runsFlag > 100 {
		t.Error("too few ChainHeads have handed their ranges over")
	}
	if joined == 0 && *runsFlag > 100 {
		t.Error("nothing was read before it was asked for")
	}
	if (healed == 0 || readAnew == 0) && *runsFlag > 100 {
		t.Error("no key was stored and read that all had lost")
	}
}
