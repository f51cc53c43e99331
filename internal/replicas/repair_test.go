package replicas_test

import (
	"bytes"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"jbofd/internal/cluster/view"
	"jbofd/internal/crrs"
	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
	"jbofd/internal/partition"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/fault"
)

// raw reads or writes the drive of a node, past everything else.
func (n *node) raw(op ssd.Op, at int64, buf []byte) {
	n.rig.t.Helper()
	q, err := n.dev.OpenQueue(1)
	must(n.rig.t, err)
	if q.Submit([]ssd.Request{{Op: op, Offset: at, Len: int64(len(buf)), Buf: buf}}) != 1 {
		n.rig.t.Fatal("the drive takes no request")
	}
	var done [1]ssd.Completion
	for ssd.Await(q, done[:], time.Second) == 0 {
	}
	must(n.rig.t, done[0].Err)
	must(n.rig.t, q.Close())
}

// find returns where a node's drive has some bytes.
func (n *node) find(what []byte) (places []int64) {
	const piece = 1 << 20
	buf := make([]byte, piece)
	for at := int64(0); at < n.dev.Info().SizeBytes; at += piece {
		n.raw(ssd.Read, at, buf)
		for from := 0; ; {
			i := bytes.Index(buf[from:], what)
			if i < 0 {
				break
			}
			places = append(places, at+int64(from+i))
			from += i + 1
		}
	}
	return places
}

// flip flips a bit of each place of a node's drive that has some bytes, and reports how many there are.
func (n *node) flip(what []byte) (places int) {
	const block = 4096
	buf := make([]byte, block)
	for _, at := range n.find(what) {
		n.raw(ssd.Read, at/block*block, buf)
		buf[at%block] ^= 4
		n.raw(ssd.Write, at/block*block, buf)
		places++
	}
	return places
}

// stored is a Get of the node's own store.
type stored struct {
	partition.Request
	done chan struct{}
}

func (s *stored) KVDone(*partition.Request) bool {
	close(s.done)
	return false
}

func (s *stored) Kick() {}

func (n *node) stored(key string) (kvstore.Status, string) {
	s := &stored{done: make(chan struct{})}
	s.Op, s.Sink, s.Value, s.Sound, s.Tenant = kvstore.Get, s, make([]byte, 8192), math.MaxUint64, 3
	s.KeyLen = uint8(copy(s.Key[:], key))
	var b partition.Batch
	b.Add(&s.Request)
	n.part.Submit(&b)
	<-s.done
	return s.Status, string(s.Value[:min(s.ValueLen, len(s.Value))])
}

// TestWhatADriveLosesIsRepaired: bits of a value flip at each member in turn, and those of a segment. Clients get what
// they have written, there as elsewhere, a moment later the member's own store has it, and the view stays what it was.
func TestWhatADriveLosesIsRepaired(t *testing.T) {
	g := newRig(t, 3, 3)
	g.full(20 * time.Second)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	h := newHost()
	keys, values := []string{}, map[string]string{}
	for i := range 40 {
		key, value := fmt.Sprintf("key-%03d-%08x", i, rng.Uint32()), make([]byte, 3000)
		for i := range value {
			value[i] = byte(rng.Uint32())
		}
		keys, values[key] = append(keys, key), string(value)
		h.put(key, string(value))
		h.ask(g.chain([]byte(key))[0])
		if !h.Status.OK() {
			t.Fatal(h.Status)
		}
	}
	read := func(n *node, key string) {
		t.Helper()
		h.get(key)
		h.Value = make([]byte, 8192)
		h.want(n, nvme.Success, values[key])
	}
	chains := func() string {
		g.mu.Lock()
		defer g.mu.Unlock()
		var all []view.Chain
		return fmt.Sprint(append(all, g.view.Chains...))
	}
	before := chains()
	for i, what := range []string{"value", "value", "value", "segment", "segment", "segment"} {
		key := keys[i]
		bad := g.chain([]byte(key))[i%3]
		lost := values[key][1000:1100]
		if what == "segment" {
			lost = key
		}
		if bad.flip([]byte(lost)) == 0 {
			t.Fatalf("%s %s is not on the drive", what, key)
		}
		if st, _ := bad.stored(key); st != kvstore.Corrupt {
			t.Fatalf("the store reads %s, whose %s was damaged: %v", key, what, st)
		}
		for _, n := range g.chain([]byte(key)) {
			read(n, key)
		}
		if what == "segment" { // also writes that depend on what is there
			h.put(key, "another value")
			h.Condition = kvstore.IfAbsent
			h.ask(g.chain([]byte(key))[0])
			if h.Status.Code() != nvme.KeyExists {
				t.Errorf("a Put of a key that exists: %v", h.Status)
			}
		}
		for end := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
			st, value := bad.stored(key)
			if st == kvstore.OK && value == values[key] {
				break
			}
			if time.Now().After(end) {
				t.Fatalf("%s %s of member %d is not repaired: %v", what, key, i%3, st)
			}
		}
	}
	for _, key := range keys {
		for _, n := range g.chain([]byte(key)) {
			read(n, key)
		}
	}
	if after := chains(); after != before {
		t.Errorf("the chains were %s, and are %s", before, after)
	}
	if g.repairs[crrs.RepairDone].Load() < 6 || g.repairs[crrs.RepairNoSource].Load() > 0 {
		t.Errorf("%d were found, %d were repaired, for %d there was nobody, and %d have failed",
			g.repairs[0].Load(), g.repairs[1].Load(), g.repairs[2].Load(), g.repairs[3].Load())
	}
}

// TestWhatNobodyHasIsReportedForItself: of a range with one member a value is lost. Its clients are told, and all else
// goes on.
func TestWhatNobodyHasIsReportedForItself(t *testing.T) {
	g := newRig(t, 1, 1)
	g.full(20 * time.Second)
	n, h, value := g.nodes[0], newHost(), bytes.Repeat([]byte("what is lost"), 200)
	h.put("key", string(value))
	h.want(n, nvme.Success, "")
	if n.flip(value[:100]) == 0 {
		t.Fatal("the value is not on the drive")
	}
	for range 3 {
		h.get("key")
		h.want(n, nvme.UnrecoveredReadError, "")
	}
	h.put("other", "value")
	h.want(n, nvme.Success, "")
	h.put("key", "new")
	h.want(n, nvme.Success, "")
	h.get("key")
	h.want(n, nvme.Success, "new")
	if g.repairs[crrs.RepairNoSource].Load() == 0 {
		t.Error("it is not told that nobody has it")
	}
}

// TestANearlyEmptyPartitionIsRepaired: its store has few segments, each with positions of many ranges.
func TestANearlyEmptyPartitionIsRepaired(t *testing.T) {
	g := setup{nodes: 3, copies: 3, ranges: 512}.rig(t)
	g.full(20 * time.Second)
	h := newHost()
	const key = "the-key-000001"
	for i := range 4 {
		name := fmt.Sprintf("the-key-%06d", i)
		h.put(name, "value")
		h.want(g.chain([]byte(name))[0], nvme.Success, "")
	}
	head := g.chain([]byte(key))[0]
	if head.flip([]byte(key)) == 0 {
		t.Fatal("the key is not on the drive")
	}
	h.put(key, "another")
	h.Condition = kvstore.IfAbsent
	h.ask(head)
	if h.Status.Code() != nvme.KeyExists {
		t.Errorf("a Put of a key that exists: %v", h.Status)
	}
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		h.get(key)
		h.Value = make([]byte, 100)
		h.want(head, nvme.Success, "value")
		if st, value := head.stored(key); st == kvstore.OK && value == "value" {
			break
		} else if time.Now().After(end) {
			t.Fatalf("the segment is not repaired: %v", st)
		}
	}
	// The other ranges of the segment, of which there are 32, are repaired as well.
	if n := g.repairs[crrs.RepairBegun].Load(); n > 2*32+8 || g.repairs[crrs.RepairFailed].Load() > 0 {
		t.Errorf("%d were found, and %d have failed", n, g.repairs[crrs.RepairFailed].Load())
	}
}

// TestTheRestIsCopiedOfWhatTheOnlyMemberHasPartlyLost, so that it is not lost with that member.
func TestTheRestIsCopiedOfWhatTheOnlyMemberHasPartlyLost(t *testing.T) {
	g := setup{nodes: 2, copies: 2, ranges: 2}.rig(t) // each with many segments
	g.full(20 * time.Second)
	g.setOut(1)
	survivor, other := g.nodes[0], g.nodes[1]
	g.soon("the other node has no ranges", func() bool { return g.holds(other) == 0 })
	h := newHost()
	var keys []string
	for i := range 60 {
		key := fmt.Sprintf("a-key-%03d", i)
		keys = append(keys, key)
		h.put(key, "value of "+key)
		h.want(survivor, nvme.Success, "")
	}
	if survivor.flip([]byte(keys[7])) == 0 {
		t.Fatal("the key is not on the drive")
	}
	var have, lost []string
	for _, key := range keys {
		if st, _ := survivor.stored(key); st == kvstore.OK {
			have = append(have, key)
		} else {
			lost = append(lost, key)
		}
	}
	if len(have) < 10 || len(lost) == 0 {
		t.Fatalf("the survivor has %d keys, and has lost %d", len(have), len(lost))
	}
	g.setOut()
	for _, key := range have {
		g.soon("what is not lost is copied", func() bool {
			st, value := other.stored(key)
			return st == kvstore.OK && value == "value of "+key
		})
	}
	h.get(lost[0])
	h.want(survivor, nvme.UnrecoveredReadError, "")
	// An operator accepts the loss, as docs/cluster.md says.
	survivor.setAlive(false)
	g.soon("the other one serves", func() bool {
		g.acceptLosses()
		c := g.chain([]byte(lost[0]))
		return len(c) == 1 && c[0] == other && g.serves(other)
	})
	survivor.setAlive(true)
	g.full(20 * time.Second)
	for _, n := range g.nodes {
		for _, key := range have {
			h.get(key)
			h.Value = make([]byte, 100)
			h.want(n, nvme.Success, "value of "+key)
		}
		for _, key := range lost {
			h.get(key)
			h.want(n, nvme.KeyDoesNotExist, "")
		}
	}
}

// acceptLosses gives up the data of all ranges that are halted.
func (g *rig) acceptLosses() {
	g.mu.Lock()
	defer g.mu.Unlock()
	v := *g.view
	v.Chains, v.ChainEpochs = slices.Clone(v.Chains), slices.Clone(v.ChainEpochs)
	changed := false
	for r := range v.Chains {
		changed = v.AcceptLoss(r, g) || changed
	}
	if changed {
		v.Epoch++
		g.view = &v
	}
}

// TestWhatADriveRefusesToReadIsRepaired also where there is nothing else to do, so that the store does not learn by
// itself that the drive reads everything else: a write of it is held up for a moment, and the view stays what it was.
func TestWhatADriveRefusesToReadIsRepaired(t *testing.T) {
	for _, what := range []string{"read", "write"} {
		g := newRig(t, 3, 3)
		g.full(20 * time.Second)
		h := newHost()
		for i := range 200 {
			key := fmt.Sprintf("some-key-%03d", i)
			h.put(key, "value")
			h.want(g.chain([]byte(key))[0], nvme.Success, "")
		}
		const key = "some-key-007"
		head := g.chain([]byte(key))[0]
		var rules []fault.Rule
		for _, at := range head.find([]byte(key)) {
			rules = append(rules, fault.Rule{Ops: []ssd.Op{ssd.Read}, Offset: at, Len: 1, Err: ssd.ErrMedia})
		}
		if len(rules) == 0 {
			t.Fatal("the key is not on the drive")
		}
		before := fmt.Sprint(g.chain([]byte(key)))
		head.dev.SetRules(rules...)
		value := "value"
		if what == "write" {
			value = "another"
			h.put(key, value)
			h.want(head, nvme.Success, "")
		}
		h.get(key)
		h.Value = make([]byte, 100)
		h.want(head, nvme.Success, value)
		g.soon("the segment is repaired", func() bool {
			st, got := head.stored(key)
			return st == kvstore.OK && got == value
		})
		if after := fmt.Sprint(g.chain([]byte(key))); after != before {
			t.Errorf("%s: the chain was %s, and is %s", what, before, after)
		}
	}
}

// TestTwoMembersAreRepairedFromTheThird: they have lost the same, and ask each other in vain.
func TestTwoMembersAreRepairedFromTheThird(t *testing.T) {
	g := newRig(t, 3, 3)
	g.full(20 * time.Second)
	h := newHost()
	var keys []string
	for i := range 60 {
		key := fmt.Sprintf("a-key-%03d", i)
		keys = append(keys, key)
		h.put(key, "value of "+key)
		h.want(g.chain([]byte(key))[0], nvme.Success, "")
	}
	read := func(n *node, key string) {
		t.Helper()
		h.get(key)
		h.Value = make([]byte, 100)
		h.want(n, nvme.Success, "value of "+key)
	}
	for i, key := range keys[:3] {
		chain := g.chain([]byte(key))
		for _, bad := range []*node{chain[i], chain[(i+1)%3]} {
			if bad.flip([]byte(key)) == 0 {
				t.Fatal("the key is not on the drive")
			}
		}
		for _, n := range chain {
			read(n, key)
		}
	}
	for _, key := range keys {
		for _, n := range g.nodes {
			g.soon("all is repaired", func() bool {
				read(n, key)
				st, value := n.stored(key)
				return st == kvstore.OK && value == "value of "+key
			})
		}
	}
}
