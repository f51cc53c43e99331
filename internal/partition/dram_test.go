package partition

import (
	"flag"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"strings"
	"testing"

	"jbofd/internal/bufpool"
	"jbofd/internal/buildtags"
	"jbofd/internal/kvstore"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/file"
)

var (
	dramBytes = flag.Int64("dram-bytes", 64<<20, "size of the partition whose memory is measured")
	dramValue = flag.Int("dram-value", 256, "length of its values")
	dramKeys  = flag.Int("dram-keys", 0, "keys of a segment; 0: the default")
	dramDir   = flag.String("dram-dir", "/dev/shm", "where its file is, which is not counted; a temporary directory "+
		"if there is none")
)

// anonymous returns the anonymous memory of this process: heap, stacks, buffers and tables, but not files.
func anonymous(t *testing.T) int64 {
	t.Helper()
	debug.FreeOSMemory()
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Skip(err)
	}
	for line := range strings.Lines(string(b)) {
		if s, ok := strings.CutPrefix(line, "RssAnon:"); ok {
			n, err := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(s), "kB")), 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			return n << 10
		}
	}
	t.Skip("the kernel does not say RssAnon")
	return 0
}

// TestMemoryOfAFullPartition measures how much the memory of the process has grown since before the partition was made.
// The partition is full, and has served as many requests of every kind at once as it can, and compaction. The bar is
// 0.40 bytes a key and a part that does not grow with the keys.
func TestMemoryOfAFullPartition(t *testing.T) {
	if buildtags.Race {
		t.Skip("the race detector has memory of its own")
	}
	const depth, fixed = 256, 16 << 20
	dir, err := os.MkdirTemp(*dramDir, "jbofd-dram-test-")
	if err != nil {
		dir = t.TempDir()
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	r := newRig(t, *dramBytes, nil, func(p *bufpool.Pool) (ssd.Device, error) {
		return file.Open(file.Config{Name: "ssd0", Path: filepath.Join(dir, "ssd"), Create: true,
			SizeBytes: *dramBytes + 2*offset, Pool: p})
	})
	h := newHost(nil, 1, depth, *dramValue)
	for _, q := range h.free {
		fill(q.Value, 1, 1) // touched
	}
	before := anonymous(t)
	p, err := Open(Config{Drive: r.o, OffsetBytes: offset, Background: 9, Store: kvstore.Config{
		PartitionBytes: r.size, Format: true, UUID: [16]byte{7}, HashSeed: 99, KeysPerSegment: *dramKeys,
	}})
	if err != nil {
		t.Fatal(err)
	}
	h.p = p
	empty := anonymous(t) - before
	rnd := rand.New(rand.NewPCG(*seed, 0))
	full := false
	most := int64(0)
	run := func(n int, next func(i int) (kvstore.Op, uint64)) {
		for i := 0; i < n && !full; {
			for ; i < n && len(h.free) > 0; i++ {
				op, key := next(i)
				h.add(op, key, *dramValue)
			}
			p.Submit(&h.batch)
			for _, q := range h.wait() {
				full = full || q.Status == kvstore.CapacityExceeded
			}
		}
		for len(h.free) < depth {
			h.wait()
		}
		most = max(most, anonymous(t)-before)
	}
	run(1<<40, func(i int) (kvstore.Op, uint64) { return kvstore.Put, uint64(i) })
	keys := uint64(p.Stats().Objects)
	full = false
	run(1000, func(i int) (kvstore.Op, uint64) { return kvstore.Delete, uint64(i) })
	run(50000, func(int) (kvstore.Op, uint64) {
		return []kvstore.Op{kvstore.Put, kvstore.Get, kvstore.Exist}[rnd.IntN(3)], 1000 + rnd.Uint64N(keys-2000)
	})
	st := p.Stats()
	t.Logf("%d keys of 16 and %d B in %d MiB, %d segments: %.2f MiB of memory, %.2f MiB before there were keys: %.3f "+
		"B a key above it, %.3f B a key in all; %d compactions",
		keys, *dramValue, *dramBytes>>20, st.Segments, float64(most)/(1<<20), float64(empty)/(1<<20),
		float64(most-empty)/float64(keys), float64(most)/float64(keys), st.Compactions)
	least := 0.40
	if *dramKeys >= 21 {
		least = 0.25
	}
	if got, want := most, int64(least*float64(keys))+fixed; got > want || keys < 1000 {
		t.Errorf("%d bytes of memory for %d keys, want at most %.2f a key and %d: %d", got, keys, least, fixed, want)
	}
	r.close(p)
}
