package replicas_test

import (
	"bytes"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"jbofd/internal/crrs"
	"jbofd/internal/nvme"
	"jbofd/internal/replicas"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/fault"
)

// askAs makes the host's Request that of another node, for the range of a key.
func (h *host) askAs(g *rig, from *node, opcode uint8, key string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	number := g.view.RangeOf(position([]byte(key)))
	sqe, room := &nvme.SQE{}, 4096
	sqe.SetOpcode(opcode)
	k := sqe.KVReplica()
	k.SetEpoch(g.view.ChainEpochs[number])
	k.SetRange(uint16(number))
	k.SetSender(uint16(from.id))
	switch opcode {
	case nvme.CmdKVShip:
		k.SetKey([]byte(key))
	case nvme.CmdKVFetch:
		room = from.part.MaxValueBytes() + nvme.KVEntryOverhead
		k.SetFirst(position([]byte(key)))
	}
	k.SetLenBytes(uint32(room))
	h.Request = replicas.Request{Kind: replicas.Node, SQE: sqe, Host: hostNQN(fmt.Sprint("n", from.id)),
		Value: bytes.Repeat([]byte{7}, room)}
}

// slowTest is a rig whose nodes answer within a short time, and a key of whose chain the drive of the ChainTail brings
// nothing.
type slowTest struct {
	*rig
	chain []*node
}

const testAnswer = 100 * time.Millisecond

func newSlowTest(t *testing.T, s setup) *slowTest {
	s.nodes, s.copies, s.ranges, s.answerWithin = 3, 3, testRanges, testAnswer
	g := s.rig(t)
	g.full(20 * time.Second)
	g.putSoon("key", "value", 1)
	g.frozen.Store(true)
	chain := g.chain([]byte("key"))
	silence(chain[2:], ssd.Read)
	return &slowTest{rig: g, chain: chain}
}

// TestASlowDriveIsNotWaitedForByOthers: a Ship and a Fetch are answered in time, whatever the drive does, and what it
// brings later harms nobody.
func TestASlowDriveIsNotWaitedForByOthers(t *testing.T) {
	for name, opcode := range map[string]uint8{"ship": nvme.CmdKVShip, "fetch": nvme.CmdKVFetch} {
		t.Run(name, func(t *testing.T) {
			s := newSlowTest(t, setup{})
			defer endSilence(s.chain[2:])
			tail, h := s.chain[2], newHost()
			h.askAs(s.rig, s.chain[0], opcode, "key")
			if h.ask(tail); h.Status != nvme.NamespaceNotReady || tail.r.Late() != 1 {
				t.Fatalf("it ends with %v; %d are late", h.Status, tail.r.Late())
			}
			memory := h.Value
			endSilence(s.chain[2:])
			for end := time.Now().Add(20 * time.Second); tail.r.Late() > 0; time.Sleep(time.Millisecond) {
				if time.Now().After(end) {
					t.Fatal("it never ends")
				}
			}
			for i, b := range memory {
				if b != 7 {
					t.Fatalf("byte %d of the memory of a command that has ended is %d", i, b)
				}
			}
			h.askAs(s.rig, s.chain[0], opcode, "key")
			if h.ask(tail); !h.Status.OK() || !bytes.Contains(h.Value[:min(h.Bytes, len(h.Value))], []byte("value")) {
				t.Errorf("later: %v, %d bytes: %.80q", h.Status, h.Bytes, h.Value)
			}
		})
	}
}

// TestWhatADriveIsSlowWithIsNotBegunTwice: a Fetch that is asked for again gets what was begun, and no other one does.
func TestWhatADriveIsSlowWithIsNotBegunTwice(t *testing.T) {
	s := newSlowTest(t, setup{})
	defer endSilence(s.chain[2:])
	tail, h := s.chain[2], newHost()
	for i, c := range []struct {
		from *node
		key  string
		late int
	}{
		{s.chain[0], "key", 1}, {s.chain[0], "key", 1}, {s.chain[1], "key", 2}, {s.chain[1], "key", 2},
		{s.chain[0], "key", 2},
	} {
		h.askAs(s.rig, c.from, nvme.CmdKVFetch, c.key)
		begin := time.Now()
		if h.ask(tail); time.Since(begin) < testAnswer {
			t.Errorf("Fetch %d is not waited for", i)
		}
		if h.Status != nvme.NamespaceNotReady || tail.r.Late() != c.late {
			t.Errorf("Fetch %d ends with %v; %d are late, want %d", i, h.Status, tail.r.Late(), c.late)
		}
	}
	h.askAs(s.rig, s.chain[0], nvme.CmdKVFetch, "key")
	h.SQE.KVReplica().SetBits(3)
	if h.ask(tail); tail.r.Late() != 3 {
		t.Errorf("another Fetch: %d are late, want 3", tail.r.Late())
	}
	for late := 4; late < 6; late++ {
		h.askAs(s.rig, s.chain[0], nvme.CmdKVFetch, "key")
		h.SQE.KVReplica().SetRound(uint16(1) << (8 * (late - 4)))
		if h.ask(tail); tail.r.Late() != late {
			t.Errorf("the same Fetch in another round: %d are late, want %d", tail.r.Late(), late)
		}
	}
	// What was begun answers the one that asks, at once.
	h.askAs(s.rig, s.chain[0], nvme.CmdKVFetch, "key")
	h.Sink, h.Tenant = h, 3
	var b replicas.Batch
	b.Add(&h.Request)
	tail.r.Submit(&b)
	if late := tail.r.Late(); late != 4 {
		t.Fatalf("%d are late while one of 5 is asked for again", late)
	}
	endSilence(s.chain[2:])
	if <-h.done; !h.Status.OK() || !bytes.Contains(h.Value[:h.Bytes], []byte("value")) {
		t.Errorf("it ends with %v", h.Status)
	}
}

// TestWhatWasBegunLongAgoIsBegunAgain, because it may have objects whose tombstones are over when they are stored.
func TestWhatWasBegunLongAgoIsBegunAgain(t *testing.T) {
	var ahead atomic.Int64
	s := newSlowTest(t, setup{clock: func() int64 { return clock() + ahead.Load() },
		authority: func() int64 { return clock() + ahead.Load() + int64(time.Minute) }})
	defer endSilence(s.chain[2:])
	for i, late := range []int{1, 1, 2} {
		h := newHost()
		h.askAs(s.rig, s.chain[0], nvme.CmdKVFetch, "key")
		if h.ask(s.chain[2]); s.chain[2].r.Late() != late {
			t.Errorf("Fetch %d: %d are late, want %d", i, s.chain[2].r.Late(), late)
		}
		ahead.Add(crrs.JoinNS * 2 / 3)
	}
}

// TestACommandThatWaitsForADriveCanBeAborted by its host.
func TestACommandThatWaitsForADriveCanBeAborted(t *testing.T) {
	g := setup{nodes: 3, copies: 3, ranges: testRanges, answerWithin: time.Hour}.rig(t)
	g.full(20 * time.Second)
	g.putSoon("key", "value", 1)
	g.frozen.Store(true)
	chain, h := g.chain([]byte("key")), newHost()
	defer endSilence(chain[2:])
	silence(chain[2:], ssd.Read)
	h.askAs(g, chain[0], nvme.CmdKVShip, "key")
	h.Sink, h.Tenant = h, 3
	var b replicas.Batch
	b.Add(&h.Request)
	chain[2].r.Submit(&b)
	chain[2].r.Abort(&h.Request)
	if <-h.done; h.Status != nvme.AbortRequested {
		t.Errorf("it ends with %v", h.Status)
	}
}

// TestAMemberIsFilledFromASlowDrive that needs longer for each answer than the nodes wait.
func TestAMemberIsFilledFromASlowDrive(t *testing.T) {
	g := setup{nodes: 2, copies: 2, ranges: 2, answerWithin: testAnswer}.rig(t)
	g.full(20 * time.Second)
	l := &ledger{g: g, have: map[string]string{}}
	l.write()
	away, copier := g.nodes[0], g.nodes[1]
	away.setAlive(false)
	l.await("the node is given up", func() bool { return g.holds(away) == 0 || len(g.chain([]byte("key0"))) == 1 })
	l.write()
	copier.dev.SetRules(fault.Rule{Ops: []ssd.Op{ssd.Read}, Delay: 2 * testAnswer})
	answered := g.completed[nvme.CmdKVFetch].Load()
	away.setAlive(true)
	g.full(time.Minute)
	if n := g.completed[nvme.CmdKVFetch].Load() - answered; n == 0 {
		t.Error("no batch was copied")
	}
	if sent, done := g.carried[nvme.CmdKVFetch].Load(), g.completed[nvme.CmdKVFetch].Load(); sent == done {
		t.Errorf("all of %d Fetches were answered in time: the drive was not slow", sent)
	}
	copier.dev.SetRules()
	l.settled()
}
