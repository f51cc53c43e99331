package cluster

import (
	"fmt"
	"maps"
	"slices"
	"testing"

	"jbofd/client/kv"
	"jbofd/internal/kvstore/format"
	"jbofd/internal/nvme"
)

// TestAHotKeyNeedsFewIdentities: its ChainHead is lost with all that is under way, and the next one has another view
// for so long that pauses are at their longest. Whoever is the first to come through must not write so often while
// others still pause that their identities are dropped: then their retries would end as unknown.
func TestAHotKeyNeedsFewIdentities(t *testing.T) {
	for name, how := range map[string]verdict{"carried out": holdDone, "lost": hold} {
		t.Run(name, func(t *testing.T) {
			const depth = 32
			g := newRig(t, 2, 2)
			s := g.open()
			connectAll(t, g, s)
			q, key := openQueue(t, s, depth), g.keyOf(0, 1)
			op, results := kv.Op{Kind: kv.Put, Key: key, Value: []byte("value")}, make([]kv.Result, depth)
			submit := func(n int) {
				for range n {
					if k, err := q.Submit([]kv.Op{op}); k != 1 || err != nil {
						t.Fatal(k, err)
					}
				}
			}
			// put ends n writes, and begins another one for each.
			put := func(n int) {
				for n > 0 {
					k, err := q.Poll(results, -1)
					if err != nil {
						t.Fatal(err)
					}
					for _, r := range results[:k] {
						if r.Err != nil {
							t.Error(r.Err)
						}
					}
					submit(k)
					n -= k
				}
			}
			submit(depth)
			put(1000)
			g.nodes[0].setScript(func(uint8) (verdict, nvme.Status) { return how, nvme.Success })
			until(t, "all are at the ChainHead", func() bool {
				k, err := q.Poll(results, 0)
				if err != nil {
					t.Fatal(err)
				}
				submit(k)
				return g.nodes[0].heldCommands() == depth
			})
			g.nodes[1].setScript(func(uint8) (verdict, nvme.Status) { return refuse, nvme.KVWrongView })
			g.nodes[0].stop()
			g.change(func(_ int, chain []int) []int { return without(chain, 0) })
			g.publish(1)
			until(t, "pauses are long", func() bool { return s.Stats().WrongViews > 9*depth })
			g.nodes[1].setScript(nil)
			put(5000)
			s.engine.mu.Lock()
			for _, r := range s.engine.all {
				if r.held {
					t.Error("a write still waits for earlier ones, which have ended")
				}
			}
			s.engine.mu.Unlock()
			g.mu.Lock()
			defer g.mu.Unlock()
			if g.mostKept > format.MaxIdentities {
				t.Errorf("%d identities of the key were to be kept, at most %d are", g.mostKept, format.MaxIdentities)
			}
			if most := slices.Max(slices.Collect(maps.Values(g.applied))); most != 1 {
				t.Errorf("a write was carried out %d times", most)
			}
		})
	}
}

// TestAWriteWaitsForALateOneOfItsKey, and not for one of another key that shares its list of numbers. While it waits it
// is not tried.
func TestAWriteWaitsForALateOneOfItsKey(t *testing.T) {
	g := newRig(t, 1, 1)
	s := g.open(func(o *Options) { o.MaxTries = 50 })
	key := []byte("key")
	connectAll(t, g, s)
	n, q, results := g.nodes[0], openQueue(t, s, 2), make([]kv.Result, 2)
	const lists = 256
	other := key
	for i := 0; string(other) == string(key) ||
		nvme.KVPosition(testSeed, other)%lists != nvme.KVPosition(testSeed, key)%lists; i++ {
		other = fmt.Append(nil, "other", i)
	}
	late, stores := make(chan error, 1), 0
	n.setScript(func(op uint8) (verdict, nvme.Status) {
		if op != nvme.CmdKVXStore {
			return carryOut, nvme.Success
		}
		if stores++; stores == 1 {
			return refuse, nvme.NamespaceNotReady
		}
		return hold, nvme.Success
	})
	go func() { late <- s.Put(t.Context(), key, []byte("value")) }()
	until(t, "the first write is tried again", func() bool { return n.heldCommands() == 1 })
	for i, k := range [][]byte{key, other} {
		if n, err := q.Submit([]kv.Op{{Kind: kv.Delete, Key: k, Tag: uint64(i)}}); n != 1 || err != nil {
			t.Fatal(n, err)
		}
	}
	for range 100 {
		s.engine.wake()
	}
	if k, err := q.Poll(results, -1); k != 1 || err != nil || results[0].Tag != 1 || results[0].Err != nil {
		t.Fatalf("%d results, %v: %+v", k, err, results[0])
	}
	if k := n.count(nvme.CmdKVXDelete); k != 1 {
		t.Errorf("%d deletes have come while the write is late", k)
	}
	n.answerHeld()
	if err := <-late; err != nil {
		t.Error(err)
	}
	if k, err := q.Poll(results, -1); k != 1 || err != nil || results[0].Tag != 0 || results[0].Err != nil {
		t.Errorf("%d results, %v: %+v", k, err, results[0])
	}
	if there, err := s.Exists(t.Context(), key); there || err != nil {
		t.Errorf("the delete came before the write: %v", err)
	}
}
