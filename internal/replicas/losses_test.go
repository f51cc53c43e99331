package replicas_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
	"jbofd/internal/replicas"
)

// TestDamageThatNobodyReadsIsRepaired: values that the scrub comes across, and segments that an audit finds, as it does
// after a restart. What two of three members have lost is repaired, too.
func TestDamageThatNobodyReadsIsRepaired(t *testing.T) {
	g := setup{nodes: 3, copies: 3, ranges: 16}.rig(t)
	g.full(20 * time.Second)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	h := newHost()
	values := map[string]string{}
	key := func(i int) string { return fmt.Sprintf("a-key-%03d", i) }
	for i := range 250 { // so that many chunks are sealed
		value := make([]byte, 32<<10)
		for i := range value {
			value[i] = byte(rng.Uint32())
		}
		values[key(i)] = string(value)
		h.put(key(i), string(value))
		h.want(g.chain([]byte(key(i)))[0], nvme.Success, "")
	}
	type damage struct {
		n    *node
		what string
	}
	var all []damage
	for i := range 6 {
		chain := g.chain([]byte(key(i)))
		for _, n := range []*node{chain[i%3], chain[(i+1)%3]} {
			lost := values[key(i)][1000:1100]
			if n.flip([]byte(lost)) == 0 {
				t.Fatal("the value is not on the drive")
			}
			all = append(all, damage{n, lost})
		}
	}
	for _, n := range g.nodes {
		n.part.SetScrubRate(64 << 20)
	}
	for _, d := range all {
		g.soon("a value is repaired that nobody reads", func() bool { return len(d.n.find([]byte(d.what))) > 0 })
	}
	// All is repaired that was found, and nothing is under way that keeps segments in memory.
	whole := func() bool {
		for _, n := range g.nodes {
			if n.part.AuditState().Running {
				return false
			}
			if known, _ := n.r.Losses(); known > 0 {
				return false
			}
		}
		return true
	}
	g.soon("all values are repaired", whole)
	for i := range 6 { // of which the records are in chunks that are not full
		n := g.chain([]byte(key(10 + i)))[i%3]
		if n.flip([]byte(key(10+i))) == 0 {
			t.Fatal("the key is not on the drive")
		}
	}
	for _, n := range g.nodes {
		n.part.LookForLosses()
	}
	g.soon("segments are repaired that nobody reads", whole)
	for i := range 250 {
		for _, n := range g.nodes {
			if st, value := n.stored(key(i)); st != kvstore.OK || value != values[key(i)][:len(value)] {
				t.Errorf("%s of node %d: %v", key(i), n.id, st)
			}
		}
	}
}

// TestALossThatWasReplacedIsKnownNoMore where there is one copy: it is looked for again and again, and forgotten when
// its key was stored anew or deleted. Of ranges that others have nothing is noted.
func TestALossThatWasReplacedIsKnownNoMore(t *testing.T) {
	g := newRig(t, 2, 1)
	g.full(20 * time.Second)
	h, value := newHost(), bytes.Repeat([]byte("what is lost"), 200)
	n := g.chain([]byte("a-0"))[0]
	var keys []string
	for i := 0; len(keys) < 3; i++ {
		if key := fmt.Sprintf("a-%d", i); g.chain([]byte(key))[0] == n {
			keys = append(keys, key)
		}
	}
	for i, key := range keys {
		h.put(key, string(append(value, byte(i))))
		h.want(n, nvme.Success, "")
	}
	if n.flip(value[:100]) < len(keys) {
		t.Fatal("the values are not on the drive")
	}
	for _, key := range keys {
		h.get(key)
		h.want(n, nvme.UnrecoveredReadError, "")
	}
	known := func(want int) func() bool {
		return func() bool { known, _ := n.r.Losses(); return known == want }
	}
	g.soon("what was lost is known", known(len(keys)))
	h.put(keys[0], "new")
	h.want(n, nvme.Success, "")
	h.Request = replicas.Request{Key: crrsKey(keys[1]), Op: kvstore.Delete}
	h.want(n, nvme.Success, "")
	g.soon("one of three things is known to be lost", known(1))
	h.get(keys[2])
	h.want(n, nvme.UnrecoveredReadError, "")
	// What comes across something of another one's range notes nothing.
	other := g.nodes[1-n.id]
	other.r.Damaged(kvstore.Damage{First: 0, Last: 1<<64 - 1})
	if _, found := other.r.Losses(); found >= testRanges {
		t.Errorf("%d losses were noted, of %d ranges", found, testRanges)
	}
}

// TestLossesAreTriedAgainWithAView, however long it is until they are due: the clock stands still.
func TestLossesAreTriedAgainWithAView(t *testing.T) {
	var stopped atomic.Int64
	g := setup{nodes: 1, copies: 1, ranges: testRanges, clock: func() int64 {
		if at := stopped.Load(); at != 0 {
			return at
		}
		return clock()
	}}.rig(t)
	g.full(20 * time.Second)
	h, n, value := newHost(), g.nodes[0], bytes.Repeat([]byte("what is lost"), 200)
	h.put("key", string(value))
	h.want(n, nvme.Success, "")
	if n.flip(value[:100]) == 0 {
		t.Fatal("the value is not on the drive")
	}
	stopped.Store(clock())
	g.frozen.Store(true)
	func() { // the manager has told its last view
		g.mu.Lock()
		defer g.mu.Unlock()
	}()
	h.get("key")
	h.want(n, nvme.UnrecoveredReadError, "")
	g.soon("what was lost is known", func() bool { known, _ := n.r.Losses(); return known == 1 })
	for range 20 { // meanwhile the store says that it is one
		h.get("key")
		h.want(n, nvme.UnrecoveredReadError, "")
	}
	h.put("key", "another")
	h.want(n, nvme.Success, "")
	g.frozen.Store(false)
	g.soon("nothing is known to be lost", func() bool { known, _ := n.r.Losses(); return known == 0 })
}

// TestWhatIsFoundBeforeTheFirstViewIsRemembered, until it is known which ranges it is of.
func TestWhatIsFoundBeforeTheFirstViewIsRemembered(t *testing.T) {
	g := setup{nodes: 2, copies: 2, ranges: testRanges, frozen: true}.rig(t)
	n := g.nodes[0]
	for i := range uint64(3) {
		n.r.Damaged(kvstore.Damage{First: i << 60, Last: i << 60})
		if known, found := n.r.Losses(); known != 0 || found != 0 {
			t.Fatalf("%d are known, %d were found", known, found)
		}
	}
	g.frozen.Store(false)
	g.full(20 * time.Second)
	g.soon("all three are known", func() bool { _, found := n.r.Losses(); return found == 3 })
}

// TestDamageThatIsFoundAtTheEndHoldsItUpNot: a store that comes across something while its replicas are closed tells
// that to nobody.
func TestDamageThatIsFoundAtTheEndHoldsItUpNot(t *testing.T) {
	g := newRig(t, 1, 1)
	g.full(20 * time.Second)
	n := g.nodes[0]
	var over atomic.Bool
	var finder sync.WaitGroup
	finder.Go(func() {
		for !over.Load() {
			n.r.Damaged(kvstore.Damage{First: 1, Last: 1})
		}
	})
	closed := make(chan error, 1)
	go func() { closed <- n.r.Close(30 * time.Second) }()
	select {
	case err := <-closed:
		must(t, err)
	case <-time.After(20 * time.Second):
		t.Error("it does not end")
	}
	over.Store(true)
	finder.Wait()
	n.closed = true
}
