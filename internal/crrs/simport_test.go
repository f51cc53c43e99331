package crrs

import (
	"encoding/binary"
	"maps"
	"slices"

	"jbofd/internal/nvme"
)

// The wire of the simulated chain: in half of the histories nodes have Ports, and what they say is commands and
// responses. A connection is from a host to a target; when it is lost, the host's commands fail and the target aborts
// them. What is sent is read when it arrives, so that memory that was released too soon is noticed.

// wire is what a node has of its Port's traffic.
type wire struct {
	p *Port
	t Traffic
	// sent are commands that have not completed, by tag. came are those of others that are not answered, by handle.
	sent map[uint32]departed
	came map[uint64]arrived
	// memory are values that the replica has, by Mem.
	memory map[uint32][]byte
	// read is what others were answered with last, of each thing that they have asked for.
	read map[asked]Response
}

// asked is a Compare or a Fetch of another node.
type asked struct {
	from int
	sqe  nvme.SQE
}

// departed is a command that was sent over a connection.
type departed struct {
	to         Peer
	connection int
}

// arrived is a command that came from another node: from which process of it, over which connection.
type arrived struct {
	from, life, connection int
	tag                    uint32
	asked                  asked
}

// newWire gives a node a Port in place of a Replica.
func (s *sim) newWire(n *node, cfg Config) {
	requests := cfg.Window + s.rng.IntN(40)
	n.wire = &wire{sent: map[uint32]departed{}, came: map[uint64]arrived{}, memory: map[uint32][]byte{},
		read: map[asked]Response{},
		p: NewPort(PortConfig{Config: cfg, Range: 77, Keep: uint8(1 + s.rng.IntN(4)), Requests: requests,
			Served: 2 + s.rng.IntN(8)})}
	n.r = n.p.Replica()
}

// remember gives the replica memory with a value.
func (n *node) remember(value []byte) (held []byte, mem uint32) {
	if n.wire == nil {
		return value, 0
	}
	for mem = 1; n.memory[mem] != nil; mem++ {
	}
	n.memory[mem] = append(make([]byte, 0, 8), value...)
	return n.memory[mem], mem
}

// forget takes memory back and overwrites it.
func (s *sim) forget(n *node, mem uint32) {
	if n.memory[mem] == nil {
		s.t.Fatalf("node %d: memory %d was released twice", n.id, mem)
	}
	value := n.memory[mem]
	delete(n.memory, mem)
	for i := range value {
		value[i] = 0xEE
	}
}

func (s *sim) connected(a, b int) bool { return !s.cut[pair{a, b}] && !s.cut[pair{b, a}] }

// carryTraffic carries out what a Port asks for.
func (s *sim) carryTraffic(n *node, t *Traffic) {
	for _, c := range t.Commands {
		s.command(n, c)
	}
	for _, a := range t.Responses {
		s.respond(n, a)
	}
	for _, to := range t.Repeat {
		s.later(n, s.upTo(20*ms), func() { s.turn(n, func(out *Actions) { n.p.Repeat(to, out) }) })
	}
}

// command sends a command. Its memory is read when it arrives.
func (s *sim) command(n *node, c Command) {
	if _, twice := n.sent[c.Tag]; twice {
		s.t.Fatalf("node %d has sent tag %d twice", n.id, c.Tag)
	}
	to, w := s.nodes[c.To], n.wire
	connection := s.connections[pair{n.id, to.id}]
	n.sent[c.Tag] = departed{c.To, connection}
	if !c.SQE.KVReplica().Valid() || c.SQE.KVReplica().Range() != 77 {
		s.t.Fatalf("node %d sends % x", n.id, c.SQE[:])
	}
	if !s.connected(n.id, to.id) || to.dead {
		return
	}
	from := arrived{from: n.id, life: n.life, connection: connection, tag: c.Tag, asked: asked{n.id, c.SQE}}
	if s.fault == anyRound {
		from.asked.sqe.KVReplica().SetRound(0)
	}
	s.later(to, s.upTo(ms), func() {
		if !s.connected(n.id, to.id) || connection != s.connections[pair{n.id, to.id}] || n.wire != w {
			return
		}
		in := Incoming{Handle: s.handles, SQE: &c.SQE, Header: &c.Header}
		s.handles++
		to.came[in.Handle] = from
		var key [nvme.MaxKVKey]byte
		switch k := c.SQE.KVReplica(); c.SQE.Opcode() {
		case nvme.CmdKVForward:
			if err := c.Header.Check(k.KeyLen()); err != nil {
				s.t.Fatalf("%v", err)
			}
			if len(c.Value) > 0 && binary.LittleEndian.Uint64(c.Value) != c.Header.Sequence() {
				s.t.Fatalf("node %d sends the value of write %d, and it is % x", n.id, c.Header.Sequence(), c.Value)
			}
			if in.Value, in.Mem = to.remember(c.Value); len(c.Value) == 0 {
				in.Value = nil
			}
		case nvme.CmdKVShip:
			in.Value = make([]byte, k.LenBytes()-nvme.KVReadHeaderSize)
		case nvme.CmdKVFetch:
			if len(k.Key(&key)) > 0 {
				in.Position = position(int(key[0]))
			}
		}
		if a, ok := to.read[from.asked]; ok && s.rng.IntN(8) > 0 &&
			uint64(c.SQE.KVReplica().Epoch()) == to.r.role.Epoch && !to.r.damaged {
			a.Handle = in.Handle
			s.joined++
			s.respond(to, a)
			return
		}
		s.turn(to, func(out *Actions) { to.p.Receive(Peer(n.id), &in, out, &to.t) })
	})
}

// respond sends a response.
func (s *sim) respond(n *node, a Response) {
	c, ok := n.came[a.Handle]
	if !ok {
		s.t.Fatalf("node %d has answered command %d twice", n.id, a.Handle)
	}
	delete(n.came, a.Handle)
	host := s.nodes[c.from]
	here := func() bool {
		return host.life == c.life && s.connected(n.id, host.id) && c.connection == s.connections[pair{host.id, n.id}]
	}
	if !here() {
		return
	}
	if op := c.asked.sqe.Opcode(); a.Status == nvme.Success && (op == nvme.CmdKVCompare || op == nvme.CmdKVFetch) {
		n.read[c.asked] = Response{Part: a.Part, Data: slices.Clone(a.Data)}
		if s.rng.IntN(6) == 0 { // the drive was slow
			a = Response{Handle: a.Handle, Status: nvme.NamespaceNotReady}
		}
	}
	o := Outcome{Status: a.Status, Result: a.Result, Version: a.Version, Part: a.Part, Value: slices.Clone(a.Value)}
	data := slices.Clone(a.Data)
	s.later(host, s.upTo(ms), func() {
		if !here() {
			return
		}
		if a.Data != nil || a.Part != nil && a.Part.Sums == nil {
			o.Value, o.Mem = host.remember(data)
		}
		delete(host.sent, c.tag)
		s.turn(host, func(out *Actions) {
			q := host.p.requests.At(int32(c.tag))
			q.epoch = s.epochOf(host, q.kind == Forward || q.kind == Durable, q.epoch)
			host.p.Completed(c.tag, &o, out, &host.t)
		})
	})
}

// lost says to a node that messages to another one, or from it, were lost, and that there is a connection again.
func (s *sim) lost(n *node, other int) {
	if n.wire != nil {
		s.reconnect(n, other)
		return
	}
	s.turn(n, func(out *Actions) { n.r.Reconnected(Peer(other), out) })
}

// reconnect ends a connection of a host and makes another one. The target may hear of it later.
func (s *sim) reconnect(n *node, to int) {
	link := pair{n.id, to}
	s.connections[link]++
	target := s.nodes[to]
	s.later(target, s.upTo(20*ms), func() {
		s.turn(target, func(out *Actions) {
			for _, handle := range slices.Sorted(maps.Keys(target.came)) {
				c := target.came[handle]
				if c.from == n.id && (c.life != n.life || c.connection != s.connections[link]) {
					target.p.Abort(handle, &target.t)
				}
			}
		})
	})
	s.turn(n, func(out *Actions) {
		for _, tag := range slices.Sorted(maps.Keys(n.sent)) {
			if c := n.sent[tag]; c.to == Peer(to) && c.connection != s.connections[link] {
				delete(n.sent, tag)
				n.p.Failed(tag, out, &n.t)
			}
		}
		n.p.Repeat(Peer(to), out)
	})
}

func (s *sim) mend(a, b int, links []pair) {
	for _, l := range links {
		delete(s.cut, l)
	}
	s.trace("mended %v", links)
	if a == manager || b == manager {
		return
	}
	// What was under way is lost, also in the direction that worked.
	for _, p := range []pair{{a, b}, {b, a}} {
		s.lost(s.nodes[p.from], p.to)
	}
}

// disconnected tells the others that a node is gone.
func (s *sim) disconnected(id int) {
	if s.hot != nil {
		s.hot.lost(func(node int) bool { return node == id })
	}
	for _, n := range s.nodes {
		if n.id != id {
			s.after(s.upTo(50*ms), func() { s.lost(n, id) })
		}
	}
}

// endConnections ends connections of a node to another one, without a cut and without those in the other direction.
func (s *sim) endConnections(n *node, other int) {
	if other < 0 || other == n.id || n.wire == nil {
		return
	}
	for range s.rng.IntN(20) {
		s.after(s.upTo(300*ms), func() { s.reconnect(n, other) })
	}
}

// checkWire looks at the Ports when all has been calm for long.
func (s *sim) checkWire() {
	for _, n := range s.nodes {
		if n.wire == nil || n.dead {
			continue
		}
		busy := 0
		for _, u := range n.p.uses {
			busy += int(u.requests)
		}
		if tables := n.r.tables; n.r.Writes() == 0 && tables.led.used+tables.asked.used+n.r.led > 0 {
			s.t.Errorf("node %d: %d writes and %d reads are counted, and none is under way", n.id, tables.led.used,
				tables.asked.used)
		}
		if n.r.reads.N() > 0 {
			s.t.Errorf("node %d: %d reads have not ended", n.id, n.r.reads.N())
		}
		if len(n.sent)+len(n.came)+len(n.memory)+len(n.p.kept)+n.p.asks+busy > 0 ||
			n.p.requests.N()+n.p.served.N() > 0 {
			s.t.Errorf("node %d: %d commands sent and %d received have not ended, %d values are there, %d sent, "+
				"%d kept, %d ask, %d requests, %d served", n.id, len(n.sent), len(n.came), len(n.memory),
				busy, len(n.p.kept), n.p.asks, n.p.requests.N(), n.p.served.N())
		}
	}
}

// storeAtOnce does some writes of a turn before it ends.
func (s *sim) storeAtOnce(n *node, out *Actions) {
	for i := 0; i < len(out.Stores); i++ {
		if op := out.Stores[i]; op.Op != Get && s.rng.IntN(4) == 0 {
			out.Stores = slices.Delete(out.Stores, i, i+1)
			i--
			st, version := s.storeWrite(n, op, s.sound(n, &op))
			n.r.Stored(op.Slot, st, version, out)
		}
	}
}
