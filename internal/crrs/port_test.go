package crrs

import (
	"fmt"
	"maps"
	"slices"
	"testing"

	"jbofd/internal/nvme"
)

// portRig is a chain of nodes with Ports, the ChainHead first, in which everything happens at once, but for what the
// test holds back. Its epoch is testEpoch.
type portRig struct {
	t     *testing.T
	nodes []*portNode
	// commands and responses count what was sent, by opcode and by status.
	commands, responses map[uint8]int
	replies             []Reply
	inFlight            map[uint64]flight
	handles             uint64
}

type portNode struct {
	p       *Port
	out     Actions
	t       Traffic
	stores  []StoreOp
	slow    bool // stores are held back
	deaf    bool // commands to it are lost
	release []uint32
}

type flight struct {
	host int
	tag  uint32
}

const testEpoch = 7

// chain makes a rig of n nodes.
func chain(t *testing.T, n int, change func(*PortConfig)) *portRig {
	r := &portRig{t: t, commands: map[uint8]int{}, responses: map[uint8]int{}, inFlight: map[uint64]flight{}}
	for i := range n {
		cfg := PortConfig{Config: Config{Window: 16, Reads: 16, Bits: 64, Parts: 1, Leaf: 1}, Range: 3, Keep: 4,
			Requests: 16, Served: 8}
		if change != nil {
			change(&cfg)
		}
		r.nodes = append(r.nodes, &portNode{p: NewPort(cfg)})
		r.nodes[i].p.r.Extend(1 << 60)
	}
	for i := range r.nodes {
		r.role(i, testEpoch)
	}
	r.settle()
	clear(r.commands)
	clear(r.responses)
	return r
}

// role gives a node its place in the view of an epoch.
func (r *portRig) role(i int, epoch uint64) {
	role := Role{Epoch: epoch, Member: true, Since: 1, Predecessor: Peer(i - 1), Successor: NoPeer, ChainTail: NoPeer}
	if last := len(r.nodes) - 1; i < last {
		role.Successor, role.ChainTail = Peer(i+1), Peer(last)
	}
	n := r.nodes[i]
	n.p.SetRole(role, &n.out, &n.t)
}

// settle does everything that can be done.
func (r *portRig) settle() {
	for again := true; again; {
		again = false
		for i, n := range r.nodes {
			n.p.Flush(&n.out, &n.t)
			r.replies = append(r.replies, n.out.Replies...)
			n.stores = append(n.stores, n.out.Stores...)
			n.release = append(n.release, n.out.Released...)
			commands, responses := n.t.Commands, n.t.Responses
			n.out, n.t = Actions{}, Traffic{Repeat: n.t.Repeat}
			for _, c := range commands {
				r.send(i, c)
			}
			for _, a := range responses {
				r.respond(i, a)
			}
			again = again || len(commands)+len(responses) > 0
			if !n.slow && len(n.stores) > 0 {
				r.store(n, len(n.stores))
				again = true
			}
		}
	}
}

// store ends the first stores of a node.
func (r *portRig) store(n *portNode, most int) {
	for _, op := range n.stores[:most] {
		if op.Op == Get {
			n.p.r.Fetched(op.Slot, Absent, 0, 0, 0, &n.out)
			continue
		}
		n.p.r.Stored(op.Slot, Done, op.Version, &n.out)
	}
	n.stores = n.stores[most:]
}

func (r *portRig) send(from int, c Command) {
	to := r.nodes[c.To]
	r.commands[c.SQE.Opcode()]++
	if sender := r.nodes[from].p.r; c.SQE.Opcode() == nvme.CmdKVForward && c.SQE.KVReplica().Mark() > sender.durable() {
		r.t.Fatalf("node %d says that %d is durable, and it is %d", from, c.SQE.KVReplica().Mark(), sender.durable())
	}
	r.handles++
	r.inFlight[r.handles] = flight{from, c.Tag}
	if !to.deaf {
		to.p.Receive(Peer(from), &Incoming{Handle: r.handles, SQE: &c.SQE, Header: &c.Header, Value: c.Value,
			Mem: c.Mem + 1000}, &to.out, &to.t)
	}
}

func (r *portRig) respond(from int, a Response) {
	f, ok := r.inFlight[a.Handle]
	if !ok {
		r.t.Fatalf("node %d answers command %d, which has ended", from, a.Handle)
	}
	delete(r.inFlight, a.Handle)
	host := r.nodes[f.host]
	r.responses[uint8(a.Status)]++
	host.p.Completed(f.tag, &Outcome{Status: a.Status, Result: a.Result}, &host.out, &host.t)
}

// write writes a key at the ChainHead.
func (r *portRig) write(key byte, tag uint64) {
	n := r.nodes[0]
	n.p.r.Write(Write{Op: Put, Key: Key{Bytes: [16]byte{key}, Len: 1}, Value: []byte{1}, Mem: uint32(tag),
		ID: Identity{1, tag}, KeepUntil: 1, Tag: tag}, &n.out)
	r.settle()
}

// forward sends a Forward to the last node as another one would, and returns its handle.
func (r *portRig) forward(from Peer, epoch uint32, seq uint64, keep uint8) (handle uint64) {
	var e nvme.SQE
	var h nvme.KVForwardHeader
	e.SetOpcode(nvme.CmdKVForward)
	k := e.KVReplica()
	k.SetEpoch(epoch)
	k.SetSequence(seq)
	k.SetKeyLen(1)
	k.SetKeep(keep)
	h.SetVersion(1000 + seq)
	h.SetKey([16]byte{byte(seq)})
	r.handles++
	n := r.nodes[len(r.nodes)-1]
	n.p.Receive(from, &Incoming{Handle: r.handles, SQE: &e, Header: &h, Mem: uint32(seq)}, &n.out, &n.t)
	return r.handles
}

// answered returns the responses of a node since it was last asked, as handle, status and result.
func (r *portRig) answered(n *portNode) (all []string) {
	n.p.Flush(&n.out, &n.t)
	n.stores = append(n.stores, n.out.Stores...)
	n.release = append(n.release, n.out.Released...)
	for _, a := range n.t.Responses {
		all = append(all, fmt.Sprintf("%d: %#x %d", a.Handle, uint16(a.Status), a.Result))
	}
	n.out, n.t = Actions{}, Traffic{}
	return all
}

func (r *portRig) want(what string, got []string, want ...string) {
	r.t.Helper()
	if !slices.Equal(got, want) {
		r.t.Errorf("%s: %q, want %q", what, got, want)
	}
}

// TestAWriteThatIsStoredAtOnceNeedsNoDurable: its Forward says that it is durable, also where several go together, of
// which the last one says so.
func TestAWriteThatIsStoredAtOnceNeedsNoDurable(t *testing.T) {
	r := chain(t, 2, nil)
	head := r.nodes[0]
	for writes := 1; writes <= 3; writes++ {
		clear(r.commands)
		for i := range writes {
			head.p.r.Write(Write{Op: Put, Key: Key{Bytes: [16]byte{byte(i)}, Len: 1}, Tag: 1}, &head.out)
		}
		head.stores, head.out.Stores = head.out.Stores, nil
		r.store(head, writes) // before the turn ends
		r.replies = nil
		r.settle()
		if f, d := r.commands[nvme.CmdKVForward], r.commands[nvme.CmdKVDurable]; f != writes || d != 0 ||
			len(r.replies) != writes || len(r.inFlight) > 0 {
			t.Errorf("%d writes: %d Forwards, %d Durables, %d replies", writes, f, d, len(r.replies))
		}
	}
}

// TestAPutCostsOneForwardAndOneAcknowledgementAHop: a PUT costs R-1 Forwards, of which the completions are the
// acknowledgements. One that is alone costs R-1 Durables more, many do not.
func TestAPutCostsOneForwardAndOneAcknowledgementAHop(t *testing.T) {
	for n := 1; n <= 5; n++ {
		r := chain(t, n, nil)
		r.write(1, 1)
		if len(r.replies) != 1 || r.replies[0].Status != OK || len(r.inFlight) > 0 {
			t.Fatalf("%d replicas: %+v, %d commands have not ended", n, r.replies, len(r.inFlight))
		}
		if f, d := r.commands[nvme.CmdKVForward], r.commands[nvme.CmdKVDurable]; f != n-1 || d > n-1 ||
			r.responses[0] != f+d || len(r.commands) > 2 {
			t.Errorf("%d replicas: %v commands, %v responses", n, r.commands, r.responses)
		}
		r = chain(t, n, nil)
		for _, node := range r.nodes {
			node.slow = true
		}
		const many = 12
		for i := range uint64(many) {
			r.write(byte(i), i+1)
		}
		for _, node := range r.nodes {
			node.slow = false
		}
		r.settle()
		if f, d := r.commands[nvme.CmdKVForward], r.commands[nvme.CmdKVDurable]; f != many*(n-1) || d > n-1 ||
			len(r.replies) != many || r.responses[0] != f+d || len(r.inFlight) > 0 {
			t.Errorf("%d replicas, %d writes: %v commands, %v responses, %d replies", n, many, r.commands, r.responses,
				len(r.replies))
		}
		for i, node := range r.nodes {
			if len(node.release) != many {
				t.Errorf("node %d of %d has released %d values", i, n, len(node.release))
			}
		}
	}
}

// TestTheNewestForwardsAreKept: of more than may be kept those with the lowest sequences are answered early, and the
// last one is kept whatever comes.
func TestTheNewestForwardsAreKept(t *testing.T) {
	r := chain(t, 2, func(c *PortConfig) { c.Served = 4 })
	n := r.nodes[1]
	n.slow = true
	const epoch, keep = testEpoch, 2
	r.forward(0, epoch, 2, keep)
	r.forward(0, epoch, 1, keep)
	r.want("two", r.answered(n))
	h := r.forward(0, epoch, 4, keep)
	r.want("three", r.answered(n), fmt.Sprint(h-1, ": 0x0 0"))
	r.forward(0, epoch, 3, 1)
	r.want("the fourth may be kept alone", r.answered(n), fmt.Sprint(h-2, ": 0x0 0"), fmt.Sprint(h+1, ": 0x0 0"))
	h5 := r.forward(0, epoch, 5, 0)
	r.want("none may be kept", r.answered(n), fmt.Sprint(h, ": 0x0 0"), fmt.Sprint(h5, ": 0x0 0"))
	again := r.forward(0, epoch, 5, keep)
	r.want("the same again", r.answered(n))
	// The mark that they wait for comes, and then what is committed is answered at once.
	var e nvme.SQE
	e.SetOpcode(nvme.CmdKVDurable)
	e.KVReplica().SetEpoch(epoch)
	e.KVReplica().SetMark(5)
	r.store(n, len(n.stores))
	n.p.Receive(0, &Incoming{Handle: 99, SQE: &e}, &n.out, &n.t)
	r.want("the end", r.answered(n), "99: 0x0 5", fmt.Sprint(again, ": 0x0 5"))
	h = r.forward(0, epoch, 5, keep)
	r.want("one that is committed", r.answered(n), fmt.Sprint(h, ": 0x0 5"))
	if len(n.p.kept) > 0 || n.p.served.N() > 0 {
		t.Errorf("%d are kept, %d places are taken", len(n.p.kept), n.p.served.N())
	}
	// Without a place for one more the oldest is answered, and not the one that came.
	first := r.forward(0, epoch, 6, 200)
	for seq := uint64(7); seq <= 10; seq++ {
		r.forward(0, epoch, seq, 200)
	}
	r.want("no place", r.answered(n), fmt.Sprint(first, ": 0x0 5"))
	h = r.forward(0, epoch, 6, 200)
	r.want("no place for one that is older than all", r.answered(n), fmt.Sprint(h, ": 0x0 5"))
	h = r.forward(0, epoch, 1000, 200)
	r.want("beyond the window", r.answered(n), fmt.Sprint(h, ": 0x0 5"))
}

// TestTheLastForwardIsKeptUntilItsOwnWriteIsCommitted: an acknowledgement of others goes with another one.
func TestTheLastForwardIsKeptUntilItsOwnWriteIsCommitted(t *testing.T) {
	r := chain(t, 2, nil)
	n := r.nodes[1]
	n.slow = true
	const epoch = testEpoch
	durable := func(mark uint64) {
		var e nvme.SQE
		e.SetOpcode(nvme.CmdKVDurable)
		e.KVReplica().SetEpoch(epoch)
		e.KVReplica().SetMark(mark)
		n.p.Receive(0, &Incoming{Handle: 99, SQE: &e}, &n.out, &n.t)
	}
	r.forward(0, epoch, 1, 1)
	second := r.forward(0, epoch, 2, 1)
	r.want("the first is early", r.answered(n), fmt.Sprint(second-1, ": 0x0 0"))
	durable(2)
	r.want("durable", r.answered(n), "99: 0x0 0")
	r.store(n, 1)
	r.want("the first is committed, and the second still needed", r.answered(n))
	third := r.forward(0, epoch, 3, 2)
	r.store(n, 1) // the second
	r.want("the second is committed", r.answered(n), fmt.Sprint(second, ": 0x0 2"))
	fourth := r.forward(0, epoch, 4, 2)
	r.forward(0, epoch, 5, 2)
	r.want("the oldest is early", r.answered(n), fmt.Sprint(third, ": 0x0 2"))
	durable(3)
	r.want("durable again", r.answered(n), "99: 0x0 2")
	r.store(n, 1)
	r.want("the third goes with the oldest of two", r.answered(n), fmt.Sprint(fourth, ": 0x0 3"))
}

// TestMessagesOfAnotherViewAreRefusedWithTheEpoch: whatever comes with another epoch, or from whom it should not, is
// answered KV Wrong View; so is what was kept when the view changes, or the store fails.
func TestMessagesOfAnotherViewAreRefusedWithTheEpoch(t *testing.T) {
	r := chain(t, 3, nil)
	n := r.nodes[2]
	n.slow = true
	const epoch, wrong = testEpoch, "0x1c4"
	for _, op := range []uint8{nvme.CmdKVForward, nvme.CmdKVDurable, nvme.CmdKVSync, nvme.CmdKVShip, nvme.CmdKVCompare,
		nvme.CmdKVFetch} {
		for _, from := range []Peer{0, 1, NoPeer} {
			for _, e := range []uint32{epoch - 1, epoch, epoch + 1} {
				var sqe nvme.SQE
				sqe.SetOpcode(op)
				sqe.KVReplica().SetEpoch(e)
				sqe.KVReplica().SetSequence(1)
				sqe.KVReplica().SetKeyLen(1)
				if e == epoch && from >= 0 && (op == nvme.CmdKVShip || from == 1 &&
					(op == nvme.CmdKVForward || op == nvme.CmdKVDurable)) {
					continue
				}
				var h nvme.KVForwardHeader
				h.SetVersion(1)
				n.p.Receive(from, &Incoming{Handle: 5, SQE: &sqe, Header: &h, Mem: 9}, &n.out, &n.t)
				r.want(fmt.Sprintf("opcode %#x of epoch %d from %d", op, e, from), r.answered(n),
					fmt.Sprint("5: ", wrong, " ", epoch))
				if released := n.release; op == nvme.CmdKVForward && !slices.Equal(released, []uint32{9}) {
					t.Errorf("the value of a Forward that is refused: %d", released)
				}
				n.release = nil
			}
		}
	}
	h := r.forward(1, epoch, 1, 4)
	r.want("one of this view", r.answered(n))
	r.role(2, epoch+1)
	r.want("another view", r.answered(n), fmt.Sprint(h, ": ", wrong, " ", epoch+1))
	h = r.forward(1, epoch+1, 1, 4)
	r.want("known by its version", r.answered(n))
	n.p.r.Stored(n.stores[0].Slot, Failed, 0, &n.out)
	r.want("the store has failed", r.answered(n), fmt.Sprint(h, ": ", wrong, " ", epoch+1))
}

// TestAnAcknowledgementOfAnotherEpochCountsForNothing: the sender has adopted a view before it came.
func TestAnAcknowledgementOfAnotherEpochCountsForNothing(t *testing.T) {
	r := chain(t, 2, nil)
	r.nodes[1].deaf = true
	r.write(1, 1)
	old := r.handles
	r.role(0, testEpoch+2)
	r.settle()
	r.respond(1, Response{Handle: old, Result: 1})
	r.settle()
	if len(r.replies) > 0 {
		t.Fatalf("an old acknowledgement commits: %+v", r.replies)
	}
	r.respond(1, Response{Handle: r.handles, Result: 1})
	r.settle()
	if len(r.replies) != 1 || r.replies[0].Status != OK {
		t.Errorf("one of this epoch: %+v", r.replies)
	}
	n := r.nodes[0]
	n.p.r.Write(Write{Op: Put, Key: Key{Len: 1}, Mem: 2, Tag: 2}, &n.out)
	r.settle()
	r.respond(1, Response{Handle: r.handles, Status: nvme.KVWrongView, Result: testEpoch + 5})
	if n.t.Epoch != testEpoch+5 {
		t.Errorf("the epoch of another node is not told: %d", n.t.Epoch)
	}
}

// TestAsksLeaveRoomForMarks: reads that are shipped take no more than a quarter of the commands.
func TestAsksLeaveRoomForMarks(t *testing.T) {
	r := chain(t, 2, nil)
	n := r.nodes[0]
	r.nodes[1].deaf, n.slow = true, true
	r.write(1, 1)
	for tag := range uint64(10) {
		n.p.r.Read(Read{Key: Key{Bytes: [16]byte{1}, Len: 1}, Tag: 100 + tag}, &n.out)
	}
	r.settle()
	if ships := r.commands[nvme.CmdKVShip]; ships != 4 || len(r.replies) != 6 || r.replies[0].Status != Unavailable {
		t.Errorf("%d reads are shipped, %+v", ships, r.replies)
	}
	n.slow = false
	r.settle()
	if r.commands[nvme.CmdKVDurable] != 1 {
		t.Errorf("%v", r.commands)
	}
	for handle, f := range r.inFlight {
		n.p.Failed(f.tag, &n.out, &n.t)
		delete(r.inFlight, handle)
	}
	r.settle()
	if len(r.replies) != 10 || n.p.requests.N() > 0 || n.p.asks > 0 {
		t.Errorf("after the loss of the connection: %d replies, %d requests", len(r.replies), n.p.requests.N())
	}
	r.nodes[1].deaf = false
	n.p.Repeat(1, &n.out)
	r.settle()
	if last := r.replies[len(r.replies)-1]; last.Tag != 1 || last.Status != OK {
		t.Errorf("the write: %+v", last)
	}
}

// TestWhatWasLostIsAskedForAgain: a member whose Sync was lost sends another one when there is a connection, and says
// nothing of its own accord before.
func TestWhatWasLostIsAskedForAgain(t *testing.T) {
	r := chain(t, 2, nil)
	n := r.nodes[1]
	r.nodes[0].deaf = true
	r.role(1, testEpoch+1)
	r.settle()
	if len(r.inFlight) != 1 || r.commands[nvme.CmdKVSync] != 1 {
		t.Fatalf("%v", r.commands)
	}
	n.p.Failed(0, &n.out, &n.t)
	clear(r.inFlight)
	r.settle()
	if r.commands[nvme.CmdKVSync] != 1 {
		t.Error("it is sent again without a connection")
	}
	n.p.Repeat(0, &n.out)
	r.settle()
	if len(r.inFlight) != 1 || r.commands[nvme.CmdKVSync] != 2 {
		t.Errorf("when there is a connection: %v", r.commands)
	}
}

// TestWhatFindsNoRequestIsRepeated: with fewer commands than messages everything is sent in the end.
func TestWhatFindsNoRequestIsRepeated(t *testing.T) {
	r := chain(t, 2, func(c *PortConfig) { c.Requests, c.Keep = 4, 2 })
	r.nodes[1].deaf = true
	const writes = 8
	for tag := range uint64(writes) {
		r.write(byte(tag), tag+1)
	}
	if len(r.inFlight) != 4 || len(r.replies) > 0 {
		t.Fatalf("%d in flight, %+v", len(r.inFlight), r.replies)
	}
	r.nodes[1].deaf = false
	for _, handle := range slices.Sorted(maps.Keys(r.inFlight)) {
		r.respond(1, Response{Handle: handle})
	}
	n := r.nodes[0]
	for round := 0; len(r.replies) < writes; round++ {
		r.settle()
		for _, to := range n.t.Repeat {
			n.p.Repeat(to, &n.out)
		}
		if len(n.t.Repeat) == 0 && len(r.replies) < writes || round > 20 {
			t.Fatalf("%d replies, and nothing is to be repeated", len(r.replies))
		}
		n.t.Repeat = nil
		r.settle()
	}
}

// TestAFullMemberIsHeardOfAtTheHead, with the answer to a write that comes by, and that there is room again without
// one. Nobody asks while nobody is full.
func TestAFullMemberIsHeardOfAtTheHead(t *testing.T) {
	for full := range 3 {
		r := chain(t, 3, nil)
		now := int64(1)
		pass := func(d int64) {
			now += d
			for range r.nodes { // one hop each
				for _, n := range r.nodes {
					n.p.r.Advance(now)
				}
				r.settle()
			}
		}
		head := r.nodes[0].p.r
		if head.Full() || head.DueNS() != 0 {
			t.Fatal("it is full at the beginning")
		}
		r.nodes[full].p.r.SetFull(true, false)
		r.write(1, 1)
		pass(1)
		if !head.Full() || full > 0 && head.DueNS() == 0 || full < 2 && r.nodes[2].p.r.Full() {
			t.Errorf("node %d is full: at the head %v, at the tail %v, due at %d", full, head.Full(),
				r.nodes[2].p.r.Full(), head.DueNS())
		}
		pass(askFullNS)
		if !head.Full() {
			t.Errorf("node %d is still full", full)
		}
		r.nodes[full].p.r.SetFull(false, false)
		pass(askFullNS)
		pass(askFullNS)
		if head.Full() || head.DueNS() != 0 {
			t.Errorf("node %d is full no more: at the head %v, due at %d", full, head.Full(), head.DueNS())
		}
		clear(r.commands)
		pass(100 * askFullNS)
		if len(r.commands) > 0 {
			t.Errorf("%v are sent though nobody is full", r.commands)
		}
	}
}

// TestTheHotPathOfAPortAllocatesNothing: of writes, at each member.
func TestTheHotPathOfAPortAllocatesNothing(t *testing.T) {
	r := chain(t, 3, nil)
	type sent struct {
		host int
		tag  uint32
	}
	var flights []sent
	tag := uint64(0)
	value := make([]byte, 100)
	var in Incoming
	var o Outcome
	if n := testing.AllocsPerRun(200, func() {
		tag++
		head := r.nodes[0]
		head.p.r.Write(Write{Op: Put, Key: Key{Bytes: [16]byte{byte(tag)}, Len: 1}, Value: value, Mem: 1, Tag: tag},
			&head.out)
		for again := true; again; {
			again = false
			for i, n := range r.nodes {
				n.p.Flush(&n.out, &n.t)
				for _, op := range n.out.Stores {
					n.p.r.Stored(op.Slot, Done, op.Version, &n.out)
					again = true
				}
				for k := range n.t.Commands {
					c := &n.t.Commands[k]
					in = Incoming{Handle: uint64(len(flights)), SQE: &c.SQE, Header: &c.Header, Value: c.Value, Mem: 1}
					flights = append(flights, sent{i, c.Tag})
					to := r.nodes[c.To]
					to.p.Receive(Peer(i), &in, &to.out, &to.t)
					again = true
				}
				for k := range n.t.Responses {
					a := &n.t.Responses[k]
					f := flights[a.Handle]
					o = Outcome{Status: a.Status, Result: a.Result}
					host := r.nodes[f.host]
					host.p.Completed(f.tag, &o, &host.out, &host.t)
					again = true
				}
				n.t.Commands, n.t.Responses = n.t.Commands[:0], n.t.Responses[:0]
				n.out.Stores, n.out.Released = n.out.Stores[:0], n.out.Released[:0]
			}
		}
		flights = flights[:0]
		if len(head.out.Replies) != 1 || head.out.Replies[0].Status != OK {
			t.Fatalf("%+v", head.out.Replies)
		}
		head.out.Replies = head.out.Replies[:0]
	}); n != 0 {
		t.Errorf("%v allocations a write", n)
	}
}
