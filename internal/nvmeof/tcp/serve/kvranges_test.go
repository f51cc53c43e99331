package serve_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/client/kv"
	"jbofd/internal/ssd/mem"
	"jbofd/internal/testutil/loopback"
)

// cutter forwards connections to an address until it cuts them.
type cutter struct {
	address string
	wg      sync.WaitGroup
	mu      sync.Mutex
	conns   []net.Conn
}

func newCutter(t *testing.T, to string) *cutter {
	ln := loopback.Listen(t)
	c := &cutter{address: ln.Addr().String()}
	c.wg.Go(func() {
		for {
			in, err := ln.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", to)
			if err != nil {
				in.Close()
				continue
			}
			c.mu.Lock()
			c.conns = append(c.conns, in, out)
			c.mu.Unlock()
			for _, p := range [][2]net.Conn{{in, out}, {out, in}} {
				c.wg.Go(func() {
					_, _ = io.Copy(p[0], p[1]) // ends with a cut
					p[0].Close()
				})
			}
		}
	})
	t.Cleanup(func() {
		ln.Close()
		c.cut()
		c.wg.Wait()
	})
	return c
}

func (c *cutter) cut() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, n := range c.conns {
		n.Close()
	}
	c.conns = nil
}

// rangesRig is a namespace on a store of a drive in memory, reached over a cutter.
func rangesRig(t *testing.T) (*kv.Namespace, *cutter) {
	t.Helper()
	dev, err := mem.Open(mem.Config{Name: "m0", SizeBytes: testBytes})
	if err != nil {
		t.Fatal(err)
	}
	r := newRigOf(t, nil, dev)
	r.realKV(t)
	c := newCutter(t, r.address)
	ctrl, err := client.Connect(t.Context(), client.Options{Address: c.address, SubNQN: testNQN, Queues: 1,
		ReconnectDelay: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := ctrl.Close(); err != nil {
			t.Error(err)
		}
	})
	n, err := kv.Open(t.Context(), ctrl, kvNSID, kv.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return n, c
}

// TestRangesOfANamespaceOverLosses: everything that a host asks of ranges has the right result although the connection
// is cut again and again, and no key is seen twice or never.
func TestRangesOfANamespaceOverLosses(t *testing.T) {
	t.Parallel()
	n, c := rangesRig(t)
	ctx := t.Context()
	const keys = 3000
	want, size := map[string][]byte{}, 0
	for i := range keys {
		key, value := fmt.Append(nil, "key", i), bytes.Repeat([]byte{byte(i)}, i%1200)
		if err := n.Put(ctx, key, value); err != nil {
			t.Fatal(err)
		}
		want[string(key)] = value
		size += len(key) + len(value)
	}
	seen, last, newest := map[string]bool{}, uint64(0), uint64(0)
	for e, err := range n.Scan(ctx, kv.All()) {
		if err != nil {
			t.Fatal(err)
		}
		if seen[string(e.Key)] || len(want[string(e.Key)]) != e.Size || e.Position < last || e.Tombstone {
			t.Fatalf("%q, %d bytes, at %#x", e.Key, e.Size, e.Position)
		}
		seen[string(e.Key)], last, newest = true, e.Position, max(newest, e.Version)
		if len(seen)%500 == 100 {
			c.cut()
		}
	}
	if len(seen) != keys {
		t.Errorf("a Scan finds %d of %d keys", len(seen), keys)
	}
	c.cut()
	if got, err := n.Count(ctx, kv.All()); err != nil || got != (kv.Totals{Objects: keys, Bytes: uint64(size)}) {
		t.Errorf("%+v, %v", got, err)
	}
	half, err := n.Count(ctx, kv.Range{First: 1 << 63, Last: math.MaxUint64})
	if err != nil || half.Objects < keys/3 || half.Objects > keys*2/3 {
		t.Errorf("half of the range: %+v, %v", half, err)
	}
	before := digest(t, n, 100)
	var batches []kv.Batch
	for b, err := range n.CopyOut(ctx, kv.All()) {
		if err != nil {
			t.Fatal(err)
		}
		batches = append(batches, b)
	}
	// Another copy begins anew behind each batch.
	for r, ok := kv.All(), true; ok; {
		for b, err := range n.CopyOut(ctx, r) {
			if err != nil {
				t.Fatal(err)
			}
			for e := range b.Entries() {
				if !bytes.Equal(e.Value, want[string(e.Key)]) {
					t.Fatalf("the value of %q differs", e.Key)
				}
			}
			r, ok = b.Resume()
			c.cut()
			break
		}
	}
	if clock, err := n.DropRange(ctx, kv.All(), newest); err != nil || clock != newest {
		t.Fatalf("clock %d, %v", clock, err)
	}
	if got, err := n.Count(ctx, kv.All()); err != nil || got != (kv.Totals{}) {
		t.Errorf("after a drop: %+v, %v", got, err)
	}
	full := slices.IndexFunc(batches, func(b kv.Batch) bool { return len(slices.Collect(b.Entries())) > 0 })
	if changed, err := n.CopyIn(ctx, batches[full], 0); !errors.Is(err, kv.ErrSuperseded) || changed != 0 {
		t.Errorf("a copy of what is being cleared: %d changed, %v", changed, err)
	}
	to, c2 := rangesRig(t)
	changed := 0
	for _, b := range slices.Backward(batches) {
		c2.cut()
		got, err := to.CopyIn(ctx, b, 0)
		if err != nil {
			t.Fatal(err)
		}
		if again, err := to.CopyIn(ctx, b, 0); err != nil || again != 0 {
			t.Errorf("a copy that is repeated changes %d, %v", again, err)
		}
		changed += got
	}
	// What a copy has done before its connection was cut is not counted when it is repeated.
	if changed > keys || changed == 0 {
		t.Errorf("%d objects were copied", changed)
	}
	if after := digest(t, to, 100); !slices.Equal(after, before) {
		t.Error("the digests of the copy differ")
	}
	// What the copy has besides, lacks, and has in newer versions does not survive an exact copy.
	clock := uint64(0)
	for i := range 100 {
		if clock, err = to.PutWith(ctx, fmt.Append(nil, []string{"key", "other"}[i%2], i), nil,
			kv.PutOptions{}); err != nil {
			t.Fatal(err)
		}
		if err := to.Delete(ctx, fmt.Append(nil, "key", 200+i)); err != nil {
			t.Fatal(err)
		}
	}
	if clock, err = to.PutWith(ctx, []byte("key1"), nil, kv.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, b := range batches {
		c2.cut()
		if _, err := to.CopyIn(ctx, b, clock); err != nil {
			t.Fatal(err)
		}
	}
	if after := digest(t, to, 100); !slices.Equal(after, before) {
		t.Error("the digests of the exact copy differ")
	}
}

// digest returns the sums of everything. They are those of the sums of its halves.
func digest(t *testing.T, n *kv.Namespace, parts int) []uint64 {
	t.Helper()
	var all []uint64
	total := kv.Sum{}
	sums, err := n.Digest(t.Context(), kv.All(), parts, time.Time{})
	if err != nil || len(sums) > parts || len(sums) < parts/2 {
		t.Fatalf("%d sums of %d, %v", len(sums), parts, err)
	}
	next := uint64(0)
	for _, s := range sums {
		if s.First != next {
			t.Fatalf("a sub-range begins at %#x, want %#x", s.First, next)
		}
		all = append(all, s.Count, s.Sum)
		total.Count, total.Sum, next = total.Count+s.Count, total.Sum+s.Sum, s.Last+1
	}
	for _, r := range []kv.Range{{First: 0, Last: 1<<63 + 12345}, {First: 1<<63 + 12346, Last: math.MaxUint64}} {
		sums, err := n.Digest(t.Context(), r, 3, time.Time{})
		if err != nil || sums[0].First != r.First || sums[len(sums)-1].Last != r.Last {
			t.Fatalf("%+v, %v", sums, err)
		}
		for _, s := range sums {
			total.Count, total.Sum = total.Count-s.Count, total.Sum-s.Sum
		}
	}
	if total.Count != 0 || total.Sum != 0 {
		t.Errorf("the sums of the halves are not those of the whole: %d, %#x", total.Count, total.Sum)
	}
	// The identities of the writes will have expired.
	count, later := uint64(0), []uint64{}
	if sums, err = n.Digest(t.Context(), kv.All(), parts, time.Unix(1<<31, 0)); err != nil {
		t.Fatal(err)
	}
	for i, s := range sums {
		count, later = count+s.Count-all[2*i], append(later, s.Count, s.Sum)
	}
	if count != 0 || slices.Equal(later, all) {
		t.Errorf("when identities have expired there are %d keys more, the same digest: %v", int64(count),
			slices.Equal(later, all))
	}
	return all
}

// TestRangesAreRefusedClearly: without the extension, with bad arguments, and if a value does not fit a command.
func TestRangesAreRefusedClearly(t *testing.T) {
	t.Parallel()
	n, c := rangesRig(t)
	ctx := t.Context()
	old, err := kv.Open(ctx, connect(t, client.Options{Address: c.address, Queues: 1, NoExtendedKV: true}), kvNSID,
		kv.Options{})
	if err != nil {
		t.Fatal(err)
	}
	first := func(n *kv.Namespace, r kv.Range) error {
		for _, err := range n.Scan(ctx, r) {
			return err
		}
		return nil
	}
	_, count := old.Count(ctx, kv.All())
	_, digest := old.Digest(ctx, kv.All(), 4, time.Time{})
	_, drop := old.DropRange(ctx, kv.All(), 1)
	_, copyIn := old.CopyIn(ctx, nil, 0)
	for what, err := range map[string]error{"Scan": first(old, kv.All()), "Count": count, "Digest": digest,
		"DropRange": drop, "CopyIn": copyIn} {
		if !errors.Is(err, client.ErrUnsupported) {
			t.Errorf("%s without the extension: %v", what, err)
		}
	}
	_, digest = n.Digest(ctx, kv.All(), 0, time.Time{})
	_, late := n.Digest(ctx, kv.All(), 1, time.Unix(1<<33, 0))
	_, drop = n.DropRange(ctx, kv.Range{First: 1}, 1)
	_, clock := n.DropRange(ctx, kv.All(), 1<<63)
	_, copyIn = n.CopyIn(ctx, kv.Batch("no batch"), 0)
	_, count = n.Count(ctx, kv.Range{Last: 1, After: []byte("k")})
	for what, err := range map[string]error{"a Digest in no parts": digest, "a Digest at a late time": late,
		"a drop of nothing": drop, "a clock": clock, "no batch": copyIn, "a Count after a key": count,
		"a long key":  first(n, kv.Range{After: make([]byte, 17)}),
		"a bad range": first(n, kv.Range{First: 1})} {
		if !errors.Is(err, client.ErrInvalid) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if err := n.Put(ctx, []byte("large"), make([]byte, n.Info().MaxValue)); err != nil {
		t.Fatal(err)
	}
	for _, err := range n.CopyOut(ctx, kv.All()) {
		if !errors.Is(err, kv.ErrValueTooLarge) {
			t.Errorf("a copy of a value that fits no command: %v", err)
		}
	}
}
