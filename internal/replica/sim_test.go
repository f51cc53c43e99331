package replica_test

import (
	"encoding/binary"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"jbofd/internal/crrs"
	"jbofd/internal/crrs/linear"
	"jbofd/internal/kvstore"
	"jbofd/internal/lab"
	"jbofd/internal/nvme"
	"jbofd/internal/replica"
	"jbofd/internal/testutil/hunt"
)

var (
	seedFlag = flag.Uint64("seed", 0, "seed of the random histories; 0: a new one")
	runsFlag = flag.Int("runs", 30, "number of random histories")
	nthFlag  = flag.Uint64("nth", 0, "number of the first history")
	traceSim = flag.Bool("trace", false, "print what happens")
)

// The simulated chain: three nodes, sometimes one to five, with the stores of the daemon on simulated drives, a
// manager, and clients, in virtual time.
//
// Fault model. Nodes die, with what their drives had not made durable, or lose their power; they come back with their
// store, or an empty one. They are paused for any time and go on. Drives fail requests, of which any part was done
// (lab.Drive), and take long; bits of one of them flip (simdamage_test.go). Connections end, each for itself; links are
// cut in both directions, and mended. Nodes adopt views late; clocks run at rates that differ by a twentieth. All
// processes end at once, and one of the stores goes on alone. Otherwise one member survives. In some histories drives
// fail all writes for seconds, also those of all members (simbroken_test.go).
const (
	ms        = int64(1e6)
	lease     = 200 * ms
	authority = lease / 2
	keys      = 8
	nodes     = 3
)

type pair struct{ from, to int }

type sim struct {
	*lab.Sim
	t hunt.Reporter
	// fault is planted.
	fault fault
	rng   *rand.Rand
	nodes []*node
	cut   map[pair]bool
	calm  bool

	// chain and epoch are the manager's view, leaving the members that it has given up and whose authority may last.
	// filling is the member that is filled, or -1. since are the epochs in which the memberships began.
	chain   []int
	epoch   uint64
	leaving map[int]bool
	filling int
	since   map[int]uint64
	fills   int
	// out are nodes that are to have no replica.
	out map[int]bool
	// number, first and bits are those of the range, in which the keys have their positions.
	number int
	first  uint64
	bits   uint8
	names  [keys]string
	// hurt is the node whose drive has bits that flip, healed: it has lost nothing any more. faulty is the one whose
	// drive fails requests until faultNS.
	hurt, faulty int
	healed       bool
	faultNS      int64
	// breaks: drives fail all writes for a while. halted: no member serves, and copies are the last ones.
	breaks, halted bool
	copies         []int

	// connections counts those of each pair, handles the commands that have arrived.
	connections map[pair]int
	handles     uint64

	tags    uint64
	pending map[uint64]func(replica.Reply)
	replied map[uint64]bool
	keys    [keys]keyState
	values  uint64
	open    int
	acked   int
	counts  map[string]int
}

// keyState is what clients know of a key.
type keyState struct {
	ops []linear.Operation
	// versions are those of values that were seen.
	versions map[uint64]uint64
	// deleted is the number of the only Delete, or 0. there is when the first write was known to be done.
	deleted uint64
	there   int64
	last    uint64 // a version that was seen
}

func (s *sim) trace(format string, args ...any) {
	if *traceSim {
		fmt.Printf("%9.3f ms  %s\n", float64(s.Now())/1e6, fmt.Sprintf(format, args...))
	}
}

// upTo is a random time of at most that.
func (s *sim) upTo(most int64) int64 { return 1 + s.rng.Int64N(most) }

// later runs do on a node after some time, if its process still lives, and when it is not paused.
func (s *sim) later(n *node, d int64, do func()) {
	life := n.life
	s.After(d, func() {
		if n.life == life {
			n.on(do)
		}
	})
}

// call runs one call of a node's Replica, and a turn.
func (s *sim) call(n *node, do func(r *replica.Replica)) {
	n.on(func() {
		n.r.SetTime(n.clock(s.Now()), wall(s.Now()))
		do(n.r)
		s.turn(n)
	})
}

func wall(now int64) uint32 { return 1e9 + uint32(now/1e9) }

// turn takes a turn of a node's Replica, and carries out what it wants.
func (s *sim) turn(n *node) {
	n.r.SetTime(n.clock(s.Now()), wall(s.Now()))
	n.r.Turn(&n.acts)
	a := n.acts
	n.acts = replica.Actions{}
	for _, p := range a.Replies {
		if s.replied[p.Tag] {
			s.t.Fatalf("request %d was answered twice", p.Tag)
		}
		s.replied[p.Tag] = true
		if p.Status == crrs.Unreadable || p.Status == crrs.Refused && p.Refusal == kvstore.Corrupt {
			s.toldOfDamage(n)
		}
		if f := s.pending[p.Tag]; f != nil {
			delete(s.pending, p.Tag)
			s.After(s.upTo(ms/4), func() { f(p) })
		}
	}
	for _, c := range a.Commands {
		s.command(n, c)
	}
	for _, c := range a.Responses {
		s.respond(n, c)
	}
	for i := range a.Requests {
		// What members are filled with, and what a damaged one tries, waits for what hosts do.
		if q := &a.Requests[i]; q.Background != (q.Op > kvstore.Scan || len(q.Key) == 16 && q.Key[0] == 0) {
			s.t.Fatalf("node %d asks its store for %v with Background = %t", n.id, q.Op, q.Background)
		}
	}
	n.requests = append(n.requests, s.spoil(n, a.Requests)...)
	if a.WakeNS != 0 {
		s.later(n, max(1, int64(float64(a.WakeNS)/n.rate)-s.Now()), func() { s.turn(n) })
	}
	s.turnDrops(n)
	for _, e := range a.Repairs {
		s.counts[[...]string{"found", "repaired", "without a source", "not repaired"}[e.Outcome]]++
		if e.Segment {
			s.counts["segments repaired"]++
		}
		s.trace("node %d: repair %+v", n.id, e)
	}
	s.noteDamage(n)
	s.storeTurn(n)
}

// connected reports whether there are connections between two nodes.
func (s *sim) connected(a, b int) bool {
	return !s.cut[pair{a, b}] && !s.nodes[a].dead && !s.nodes[b].dead
}

// command sends a command. Its memory is read when it arrives.
func (s *sim) command(n *node, c replica.Command) {
	if _, twice := n.sent[c.Tag]; twice {
		s.t.Fatalf("node %d has sent tag %d twice", n.id, c.Tag)
	}
	to := s.nodes[c.To]
	link := pair{n.id, to.id}
	connection := s.connections[link]
	n.sent[c.Tag] = departed{to.id, connection}
	if !c.SQE.KVReplica().Valid() {
		s.t.Fatalf("node %d sends % x", n.id, c.SQE[:])
	}
	s.trace("%d -> %d: %v", n.id, to.id, c.SQE.Opcode())
	if !s.connected(n.id, to.id) {
		return
	}
	from := arrived{from: n.id, connection: connection, tag: c.Tag, buf: c.Buf}
	s.later(to, s.upTo(ms/2), func() {
		if !s.connected(n.id, to.id) || connection != s.connections[link] {
			return
		}
		s.handles++
		handle := s.handles
		var data []byte
		switch k := c.SQE.KVReplica(); c.SQE.Opcode() {
		case nvme.CmdKVForward:
			data = append(data, c.Data...)
			if len(data) != int(k.LenBytes()) {
				s.t.Fatalf("a Forward of %d bytes says %d", len(data), k.LenBytes())
			}
			if len(c.Value) > 0 && binary.LittleEndian.Uint64(c.Value) != c.Header.Sequence() {
				s.t.Fatalf("node %d sends % x in place of write %d", n.id, c.Value[:8], c.Header.Sequence())
			}
		case nvme.CmdKVShip:
			data = make([]byte, k.LenBytes())
			from.data = data
		}
		to.came[handle] = from
		s.call(to, func(r *replica.Replica) { r.Receive(crrs.Peer(n.id), handle, &c.SQE, data, 4) })
	})
}

// respond sends a response.
func (s *sim) respond(n *node, a replica.Response) {
	c, ok := n.came[a.Handle]
	if !ok {
		s.t.Fatalf("node %d has answered command %d twice", n.id, a.Handle)
	}
	delete(n.came, a.Handle)
	host := s.nodes[c.from]
	link := pair{host.id, n.id}
	here := func() bool { return s.connected(host.id, n.id) && c.connection == s.connections[link] }
	if !here() {
		return
	}
	data := slices.Clone(a.Data)
	if c.data != nil && a.Status.OK() {
		h := (*nvme.KVReadHeader)(c.data)
		h.SetVersion(a.Version)
		h.SetExpires(a.Expires)
		data = slices.Clone(c.data[:nvme.KVReadHeaderSize+a.ValueLen])
	}
	s.later(host, s.upTo(ms/2), func() {
		if !here() {
			return
		}
		delete(host.sent, c.tag)
		if c.buf != nil {
			data = c.buf[:copy(c.buf, data)]
		}
		s.call(host, func(r *replica.Replica) { r.Completed(c.tag, a.Status, a.Result, data) })
	})
}

// reconnect ends a connection of a host and makes another one. The target may hear of it later.
func (s *sim) reconnect(n *node, to int) {
	link := pair{n.id, to}
	s.connections[link]++
	target := s.nodes[to]
	s.later(target, s.upTo(20*ms), func() {
		for _, handle := range sorted(target.came) {
			if c := target.came[handle]; c.from == n.id && c.connection != s.connections[link] {
				s.call(target, func(r *replica.Replica) { r.Abort(handle) })
			}
		}
	})
	n.on(func() {
		for _, tag := range sorted(n.sent) {
			if c := n.sent[tag]; c.to == to && c.connection != s.connections[link] {
				delete(n.sent, tag)
				s.call(n, func(r *replica.Replica) { r.Failed(tag) })
			}
		}
		if s.connected(n.id, to) {
			s.call(n, func(r *replica.Replica) { r.Reconnected(crrs.Peer(to)) })
		}
	})
}

// reconnectAll ends all connections of a node.
func (s *sim) reconnectAll(id int) {
	for _, n := range s.nodes {
		if n.id != id {
			s.After(s.upTo(20*ms), func() { s.reconnect(n, id) })
			s.reconnect(s.nodes[id], n.id)
		}
	}
}

// mend ends a cut between two nodes, or between a node and the manager.
func (s *sim) mend(a, b int) {
	delete(s.cut, pair{a, b})
	delete(s.cut, pair{b, a})
	if a != manager && b != manager {
		s.reconnect(s.nodes[a], b)
		s.reconnect(s.nodes[b], a)
	}
}

// TestHistoriesAreLinearizable runs chains of real stores under faults and looks at what clients have seen, and at what
// the stores have in the end.
func TestHistoriesAreLinearizable(t *testing.T) {
	seed := *seedFlag
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("-seed %d", seed)
	counts := map[string]int{}
	for i := range *runsFlag {
		history(t, seed, *nthFlag+uint64(i), counts, sound)
	}
	t.Log(counts)
	for _, what := range []string{"filled", "write done", "read", "swapped", "retry done", "deleted", "restarted",
		"drained", "dropped", "flipped", "repaired"} {
		if counts[what] == 0 && *runsFlag > 10 {
			t.Errorf("nothing was %s: %v", what, counts)
		}
	}
}

// history runs one history and checks it.
func history(t hunt.Reporter, seed, nth uint64, counts map[string]int, f fault) {
	s := &sim{Sim: lab.NewSim(seed ^ nth<<32), t: t, fault: f, rng: rand.New(rand.NewPCG(seed, nth)),
		cut: map[pair]bool{}, leaving: map[int]bool{}, out: map[int]bool{}, epoch: 1, filling: -1, hurt: nobody,
		since: map[int]uint64{}, connections: map[pair]int{}, pending: map[uint64]func(replica.Reply){},
		replied: map[uint64]bool{}, counts: counts}
	for k := range s.keys {
		s.keys[k].versions = map[uint64]uint64{}
	}
	s.setRange()
	members := nodes
	if s.rng.IntN(4) == 0 {
		members = 1 + s.rng.IntN(5)
	}
	for i := range members {
		n := &node{sim: s, id: i, rate: 0.98 + s.rng.Float64()/25}
		s.nodes = append(s.nodes, n)
		n.format()
		n.start()
		if i == 0 || s.rng.IntN(4) > 0 {
			s.chain, s.since[i] = append(s.chain, i), 1
		}
	}
	for _, n := range s.nodes {
		n.heard = s.Now()
		s.sendView(n)
		s.heartbeat(n)
	}
	s.watch()
	s.After(s.upTo(lease), s.disturb)
	for range 1 + s.rng.IntN(8) {
		s.After(s.upTo(ms), s.client)
	}
	length := s.rng.Int64N(8)*lease + 4*lease
	if s.breaks = s.rng.IntN(8) == 0; s.breaks {
		length += 16e9
		s.After(s.upTo(lease), s.breakDrive)
	}
	s.Run(length, t.Failed)
	// In the end everything works, and every operation ends.
	s.calm, s.acked = true, 0
	for _, n := range s.nodes {
		n.slow, n.brokenNS = false, 0
		n.resume()
		n.revive()
	}
	for link := range s.cut {
		s.mend(link.from, link.to)
	}
	s.healed = s.hurt == nobody
	clear(s.out)
	s.heal()
	if !s.Run(1000*lease, func() bool { return t.Failed() || s.healed }) {
		t.Errorf("node %d has still lost something; chain %v, filling %d", s.hurt, s.chain, s.filling)
	}
	s.hurt = nobody
	s.emptied()
	done := func() bool {
		return t.Failed() || s.acked >= 50 && s.open == 0 && len(s.chain) == len(s.nodes) && s.atRest()
	}
	if !s.Run(1000*lease, done) { // a sweep that could not read something is repeated after a minute
		t.Errorf("%d operations have not ended, %d were done at the end; chain %v, filling %d", s.open, s.acked,
			s.chain, s.filling)
		for _, n := range s.nodes {
			t.Logf("node %d: %+v, %d writes under way, damaged %v, %d commands sent and %d came, %d requests, idle %v",
				n.id, n.r.Role(), n.r.Writes(), n.bad(), len(n.sent), len(n.came), len(n.requests), n.store.Idle())
		}
	}
	s.checkEnd()
	for k := range s.keys {
		if err := linear.Check(s.keys[k].ops); err != nil {
			t.Errorf("key %d: %v", k, err)
		}
	}
	for _, n := range s.nodes {
		n.life++
	}
	if t.Failed() {
		t.Fatalf("repeat with -seed %d -nth %d -runs 1", seed, nth)
	}
	counts["filled"] += s.fills
}

// atRest reports whether no write is under way anywhere.
func (s *sim) atRest() bool {
	for _, n := range s.nodes {
		if n.dead || n.r.Writes() > 0 || len(n.sent)+len(n.came)+len(n.requests) > 0 || !n.store.Idle() {
			return false
		}
	}
	return true
}

// checkEnd compares the stores when all is at rest, and looks for memory and commands that were forgotten.
func (s *sim) checkEnd() {
	if s.t.Failed() {
		return
	}
	var first map[string]string
	for _, n := range s.nodes {
		if left := n.r.Left(); left != "" {
			s.t.Errorf("node %d: %s", n.id, left)
		}
		has := n.contents()
		if first == nil {
			first = has
		}
		for k := range first {
			if has[k] != first[k] {
				s.t.Errorf("%q at node %d is %s, at node 0 %s", k, n.id, has[k], first[k])
			}
		}
		if len(has) != len(first) {
			s.t.Errorf("node %d has %d keys, node 0 %d", n.id, len(has), len(first))
		}
	}
}
