package cluster

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/client/kv"
	"jbofd/internal/buildtags"
	"jbofd/internal/nvme"
)

func openQueue(t testing.TB, s *Store, depth int) *OpQueue {
	t.Helper()
	q, err := s.OpenQueue(depth)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { q.Close() })
	return q
}

func TestAQueueCarriesOutBatches(t *testing.T) {
	g := newRig(t, 3, 3)
	s := g.open()
	q := openQueue(t, s, 16)
	results := make([]kv.Result, 32)
	key := make([]byte, 8)
	for round := range 10 {
		var ops []kv.Op
		for i := range 20 {
			binary.LittleEndian.PutUint64(key, uint64(i))
			ops = append(ops, kv.Op{Kind: kv.Put, Key: append([]byte(nil), key...), Tag: uint64(i),
				Value: fmt.Appendf(nil, "%d of round %d", i, round)})
		}
		seen := map[uint64]bool{}
		for len(seen) < len(ops) {
			if len(ops) > len(seen)+q.Outstanding() {
				n, err := q.Submit(ops[len(seen)+q.Outstanding():])
				if err != nil || n == 0 && q.Free() > 0 {
					t.Fatal(n, err)
				}
			}
			n, err := q.Poll(results, -1)
			if err != nil {
				t.Fatal(err)
			}
			for _, r := range results[:n] {
				if r.Err != nil || r.Version == 0 || r.Kind != kv.Put || seen[r.Tag] {
					t.Fatalf("%+v", r)
				}
				seen[r.Tag] = true
			}
		}
	}
	buf := make([]byte, 100)
	for what, op := range map[string]kv.Op{
		"a key":       {Kind: kv.GetVersion, Key: make([]byte, 8), Value: buf, Tag: 7},
		"no such key": {Kind: kv.Get, Key: []byte("x"), Value: buf},
		"no offer":    {Kind: kv.PutIfNewer, Key: []byte("x"), Version: 1},
	} {
		if n, err := q.Submit([]kv.Op{op}); n != 1 || err != nil {
			t.Fatal(n, err)
		}
		if n, err := q.Poll(results, 10*time.Second); n != 1 || err != nil {
			t.Fatal(n, err)
		}
		r := results[0]
		switch what {
		case "a key":
			if r.Err != nil || string(buf[:r.Size]) != "0 of round 9" || r.Version == 0 || r.Tag != 7 {
				t.Errorf("%s: %+v, %q", what, r, buf)
			}
		case "no such key":
			if r.Err != kv.ErrKeyNotFound {
				t.Errorf("%s: %v", what, r.Err)
			}
		default:
			if !errors.Is(r.Err, client.ErrUnsupported) {
				t.Errorf("%s: %v", what, r.Err)
			}
		}
	}
	if n, err := q.Submit([]kv.Op{{Kind: kv.Get}}); n != 0 || !errors.Is(err, client.ErrInvalid) {
		t.Errorf("no key: %d, %v", n, err)
	}
	if n, err := q.Poll(results, 0); n != 0 || err != nil {
		t.Errorf("nothing is outstanding: %d, %v", n, err)
	}
	if n, err := q.Poll(results, time.Millisecond); n != 0 || err != nil {
		t.Errorf("nothing is outstanding: %d, %v", n, err)
	}
	time.AfterFunc(time.Millisecond, q.Interrupt)
	if _, err := q.Poll(results, -1); !errors.Is(err, client.ErrClosed) {
		t.Errorf("interrupted: %v", err)
	}
	if _, err := q.Submit([]kv.Op{{Kind: kv.Get, Key: key}}); !errors.Is(err, client.ErrClosed) {
		t.Errorf("interrupted: %v", err)
	}
	for _, depth := range []int{0, MaxDepth + 1} {
		if _, err := s.OpenQueue(depth); !errors.Is(err, client.ErrInvalid) {
			t.Errorf("depth %d: %v", depth, err)
		}
	}
}

func TestAQueueThatIsClosedGivesItsBuffersBack(t *testing.T) {
	g := newRig(t, 3, 3)
	s := g.open(func(o *Options) { o.ReadTimeout = 20 * time.Second })
	q := openQueue(t, s, 8)
	if err := s.Put(t.Context(), []byte("k"), []byte("value")); err != nil {
		t.Fatal(err)
	}
	for _, n := range g.nodes {
		n.setScript(func(uint8) (verdict, nvme.Status) { return hold, 0 })
	}
	for i := range 8 {
		op := kv.Op{Kind: kv.Get, Key: []byte("k"), Value: make([]byte, 100)}
		if i%2 == 0 {
			op.Kind = kv.Put
		}
		if n, err := q.Submit([]kv.Op{op}); n != 1 || err != nil {
			t.Fatal(n, err)
		}
	}
	until(t, "commands are at the nodes", func() bool {
		n := 0
		for i := range g.nodes {
			n += g.nodes[i].heldCommands()
		}
		return n == 8
	})
	if err := q.Close(); err != nil {
		t.Error(err)
	}
	if st := s.Stats(); st.Indeterminate != 4 {
		t.Errorf("%+v", st)
	}
	if _, err := q.Poll(make([]kv.Result, 100), 0); err != nil && !errors.Is(err, client.ErrClosed) {
		t.Error(err)
	}
}

func TestOperationsOfAQueueAllocateNothing(t *testing.T) {
	if buildtags.Race {
		t.Skip("the race detector allocates")
	}
	g := newRig(t, 3, 3)
	s := g.open(func(o *Options) { o.MapInterval = time.Hour })
	const depth = 16
	q := openQueue(t, s, depth)
	ops, results := make([]kv.Op, depth), make([]kv.Result, depth)
	for i := range ops {
		ops[i] = kv.Op{Kind: kv.Get, Key: fmt.Appendf(nil, "key%d", i), Value: make([]byte, 500)}
	}
	round := func() {
		if n, err := q.Submit(ops); n != depth || err != nil {
			t.Fatal(n, err)
		}
		for left := depth; left > 0; {
			n, err := q.Poll(results, -1)
			if err != nil {
				t.Fatal(err)
			}
			for _, r := range results[:n] {
				if r.Err != nil && r.Err != kv.ErrKeyNotFound && r.Err != kv.ErrKeyExists {
					t.Fatal(r.Err)
				}
			}
			left -= n
		}
	}
	for _, n := range g.nodes { // which allocate when they carry out a write
		n.setScript(func(op uint8) (verdict, nvme.Status) {
			if op == nvme.CmdKVXStore {
				return refuse, nvme.KeyExists | nvme.DNR
			}
			return carryOut, nvme.Success
		})
	}
	for _, kind := range []kv.Kind{kv.Get, kv.GetVersion, kv.Exists, kv.PutIfAbsent} {
		for i := range ops {
			ops[i].Kind = kind
		}
		for range 20 {
			round()
		}
		// The targets are in this process; keep alives, and a map that is read because the machine is slow, allocate.
		least := testing.AllocsPerRun(10, round)
		for range 50 {
			if least == 0 {
				break
			}
			least = min(least, testing.AllocsPerRun(10, round))
		}
		if least > 0 {
			t.Errorf("%s: %v allocations for %d operations", kind, least, depth)
		}
	}
}

// TestLoadGoesOnWhileTheMapChanges: each acknowledged write was carried out once, and no read goes back.
func TestLoadGoesOnWhileTheMapChanges(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	g := newRig(t, 4, 3)
	s := g.open(func(o *Options) { o.ReadTimeout = 100 * time.Millisecond })
	var (
		over    atomic.Bool
		load    sync.WaitGroup
		written atomic.Int64
	)
	for w := range 4 {
		load.Go(func() {
			key, buf := fmt.Appendf(nil, "key of %d", w), make([]byte, 8)
			last, version := uint64(0), uint64(0)
			for !over.Load() {
				last++
				binary.LittleEndian.PutUint64(buf, last)
				v, err := s.PutIfVersion(context.Background(), key, buf, version)
				if err != nil {
					t.Errorf("write %d: %v", last, err)
					return
				}
				version = v
				written.Add(1)
				o, err := s.GetVersion(context.Background(), key, buf)
				if got := binary.LittleEndian.Uint64(buf); err != nil || got != last || o.Version != v {
					t.Errorf("%d of version %d after %d of version %d: %v", got, o.Version, last, v, err)
					return
				}
			}
		})
	}
	rng := rand.New(rand.NewPCG(seed, 0))
	for range 12 {
		away := rng.IntN(len(g.nodes))
		n := g.nodes[away]
		// What the node is sent before others know better is carried out, or not, and not answered.
		how := []verdict{holdDone, hold, interrupt}[rng.IntN(3)]
		n.setScript(func(uint8) (verdict, nvme.Status) { return how, nvme.CommandInterrupted })
		g.change(func(_ int, c []int) []int { return without(c, away) })
		g.publish()
		at := written.Load()
		until(t, "writes go on without a node", func() bool { return written.Load() > at+20 || t.Failed() })
		n.release(nvme.CommandInterrupted)
		g.change(func(_ int, c []int) []int { return append(without(c, away), away)[:min(len(c)+1, 3)] })
		g.publish()
		at = written.Load()
		until(t, "writes go on with all nodes", func() bool { return written.Load() > at+20 || t.Failed() })
	}
	over.Store(true)
	load.Wait()
	if g.most() != 1 {
		t.Errorf("a write was carried out %d times", g.most())
	}
	t.Logf("%d writes, %+v", written.Load(), s.Stats())
}
