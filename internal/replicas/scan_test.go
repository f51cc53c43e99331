package replicas_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"jbofd/internal/cluster"
	"jbofd/internal/cluster/view"
	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
	"jbofd/internal/replicas"
)

// rangeBits is the logarithm of how many positions a range has.
const rangeBits = 60

// scan makes the host's Request a Scan.
func (h *host) scan(from nvme.KVCursor, last uint64) {
	h.Request = replicas.Request{Kind: replicas.Scan, Value: make([]byte, 512), Range: kvstore.Range{
		First: from.Position, From: from.Position, Last: last, Looks: 1024, FromKey: from.KeyLen > 0}}
	h.Key.Len, h.Key.Bytes = from.KeyLen, from.Key
}

// scanAll lists all keys: each part by any node that serves it, or another one if that refuses. It calls half in the
// middle.
func (g *rig) scanAll(h *host, rng *rand.Rand, half func()) (keys []string, refused int) {
	g.t.Helper()
	for from := (nvme.KVCursor{}); ; {
		if from.Position == 1<<63 && from.KeyLen == 0 {
			half()
		}
		last := from.Position | (1<<rangeBits - 1)
		end := time.Now().Add(20 * time.Second)
		for {
			n := g.nodes[rng.IntN(len(g.nodes))]
			if !n.alive.Load() {
				continue
			}
			h.scan(from, last)
			if h.ask(n); h.Status.OK() {
				break
			}
			if c := h.Status.Code(); c != nvme.KVWrongView && c != nvme.NamespaceNotReady || time.Now().After(end) {
				g.t.Fatalf("a Scan ends with %v", h.Status)
			}
			refused++
		}
		b := nvme.KVRange(h.Value[:h.Bytes])
		if err := b.Check(); err != nil || b.Lost() {
			g.t.Fatalf("%v; lost %t", err, b.Lost())
		}
		for e := range b.Entries() {
			if !e.Tombstone() {
				keys = append(keys, string(e.Key()))
			}
		}
		switch from = b.To(); {
		case !b.Complete():
		case last == 1<<64-1:
			return keys, refused
		default:
			from = nvme.KVCursorAt(last+1, nil)
		}
	}
}

// TestAListHasWhatIsThereAllTheTime: exactly once, while other keys come and go, and a node is lost and comes back.
// Nothing is in it that was deleted before.
func TestAListHasWhatIsThereAllTheTime(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	g := newRig(t, 3, 3)
	g.full(20 * time.Second)
	h := newHost()
	const stay = 300
	write := func(h *host, op kvstore.Op, key string) {
		t.Helper()
		h.put(key, "v")
		for end := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
			h.Op = op
			if chain := g.chain([]byte(key)); len(chain) > 0 && chain[0].alive.Load() {
				if h.ask(chain[0]); h.Status.OK() {
					return
				}
			}
			if time.Now().After(end) {
				t.Errorf("a write ends with %v", h.Status)
				return
			}
		}
	}
	put := func(h *host, key string) { write(h, kvstore.Put, key) }
	remove := func(h *host, key string) { write(h, kvstore.Delete, key) }
	for i := range stay {
		put(h, fmt.Sprint("stay", i))
		if i%3 == 0 {
			put(h, fmt.Sprint("gone", i))
			remove(h, fmt.Sprint("gone", i))
		}
	}
	var (
		over    atomic.Bool
		writers sync.WaitGroup
	)
	for w := range 2 {
		writers.Go(func() {
			h, rng := newHost(), rand.New(rand.NewPCG(seed, uint64(w)))
			for !over.Load() && !t.Failed() {
				key := fmt.Sprint("moves", w, rng.IntN(100))
				if put(h, key); rng.IntN(2) == 0 {
					remove(h, key)
				}
			}
		})
	}
	refusals, rng := 0, rand.New(rand.NewPCG(seed, 99))
	for round := range 6 {
		keys, refused := g.scanAll(h, rng, func() {
			switch lost := g.nodes[2]; round {
			case 1:
				lost.setAlive(false)
				for g.serves(lost) {
					time.Sleep(time.Millisecond)
				}
			case 3:
				lost.setAlive(true)
				for i, n := range g.nodes {
					n.r.NodeReachable("n2")
					lost.r.NodeReachable(fmt.Sprint("n", i))
				}
			}
		})
		refusals += refused
		seen := map[string]int{}
		for _, k := range keys {
			if seen[k]++; k[0] == 'g' {
				t.Errorf("round %d: %s, which was deleted", round, k)
			}
		}
		for i := range stay {
			if k := fmt.Sprint("stay", i); seen[k] != 1 {
				t.Errorf("round %d: %s is there %d times", round, k, seen[k])
			}
		}
	}
	over.Store(true)
	writers.Wait()
	g.full(20 * time.Second)
	t.Logf("%d Scans were refused", refusals)
}

// serves reports whether a node is in a chain.
func (g *rig) serves(n *node) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, c := range g.view.Chains {
		for _, e := range c {
			if e.Partition == view.PartitionID(n.id) && e.State == view.Serving {
				return true
			}
		}
	}
	return false
}

// TestAScanIsOfOneRangeThatIsServed, by a node with authority.
func TestAScanIsOfOneRangeThatIsServed(t *testing.T) {
	g := newRig(t, 3, 3)
	g.full(20 * time.Second)
	g.frozen.Store(true)
	h, key := newHost(), []byte("key")
	chain, at := g.chain(key), position(key)
	first, last := at>>rangeBits<<rangeBits, at|(1<<rangeBits-1)
	h.put("key", "value")
	h.want(chain[0], nvme.Success, "")
	ask := func(what string, n *node, from nvme.KVCursor, last uint64, want nvme.Status, objects int) {
		t.Helper()
		h.scan(from, last)
		if h.ask(n); h.Status.Code() != want || !want.OK() {
			if h.Status.Code() != want {
				t.Errorf("%s: %v, want %v", what, h.Status, want)
			}
			return
		}
		for range nvme.KVRange(h.Value[:h.Bytes]).Entries() {
			objects--
		}
		if objects != 0 || h.ValueLen != h.Bytes {
			t.Errorf("%s: %d objects are missing in %d of %d bytes", what, objects, h.Bytes, h.ValueLen)
		}
	}
	for _, n := range chain {
		ask("all of the range", n, nvme.KVCursorAt(first, nil), last, nvme.Success, 1)
		ask("behind the key", n, nvme.KVCursorAt(at, key), last, nvme.Success, 0)
		ask("two ranges", n, nvme.KVCursorAt(first-1, nil), last, nvme.InvalidField, 0)
		ask("two ranges", n, nvme.KVCursorAt(at, key), last+1, nvme.InvalidField, 0)
		ask("nothing", n, nvme.KVCursorAt(last, nil), first, nvme.InvalidField, 0)
	}
	// A view that does not act yet has taken the range from a node.
	without := *g.view
	without.Epoch++
	without.Chains = make([]view.Chain, testRanges)
	without.ChainEpochs = slices.Clone(g.view.ChainEpochs)
	for r, c := range g.view.Chains {
		without.ChainEpochs[r]++
		for _, e := range c {
			if e.Partition != view.PartitionID(chain[1].id) {
				without.Chains[r] = append(without.Chains[r], e)
			}
		}
	}
	active, newest := &cluster.Map{View: g.view}, &cluster.Map{View: &without}
	chain[1].r.SetState(active, newest)
	ask("no authority", chain[1], nvme.KVCursorAt(first, nil), last, nvme.NamespaceNotReady, 0)
	chain[1].r.SetState(newest, newest)
	ask("not served", chain[1], nvme.KVCursorAt(first, nil), last, nvme.KVWrongView, 0)
}
