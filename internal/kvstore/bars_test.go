package kvstore

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"reflect"
	"testing"

	"jbofd/internal/kvstore/lookup"
	"jbofd/internal/kvstore/space"
	"jbofd/internal/pipeline"
)

// instant is a device that completes at once, in order, and keeps what was written: in disk, or in sparse if that is
// not nil.
type instant struct {
	s                     *Store
	disk                  []byte
	sparse                sparse
	k                     [16]byte
	act                   Actions
	now                   int64
	reads, writes, wbytes int64
	last                  Reply
	replies, refused      int
	// fail, if set, says why an I/O fails.
	fail func(q *IO) error
}

// run lets the store act until it asks for nothing more.
func (d *instant) run() {
	const most = 1e6
	if d.turns(most) == most {
		panic(fmt.Sprintf("the store does not come to rest: %+v", d.s.Stats()))
	}
}

// turns lets the store act until it asks for nothing more, and most times at most. It returns how often.
func (d *instant) turns(most int) int {
	for n := range most {
		d.s.Turn(d.now, &d.act)
		d.now += 1000
		for _, p := range d.act.Replies {
			d.last = p
			d.replies++
			if p.Status == CapacityExceeded {
				d.refused++
			}
		}
		d.act.Replies = d.act.Replies[:0]
		if len(d.act.IOs) == 0 && (d.act.WakeNS == 0 || d.act.WakeNS > d.now) {
			return n
		}
		d.transfer()
	}
	return most
}

// transfer does what the store has asked for.
func (d *instant) transfer() {
	for i := range d.act.IOs {
		q := &d.act.IOs[i]
		if d.fail != nil {
			if err := d.fail(q); err != nil {
				d.s.Complete(q.Tag, err)
				continue
			}
		}
		switch q.Op {
		case pipeline.Read:
			d.reads++
			if d.sparse != nil {
				d.sparse.read(q.Buf, q.Offset)
				break
			}
			copy(q.Buf, d.disk[q.Offset:])
		case pipeline.Write:
			d.writes++
			d.wbytes += int64(len(q.Buf))
			if d.sparse != nil {
				d.sparse.write(q.Offset, q.Buf)
				break
			}
			copy(d.disk[q.Offset:], q.Buf)
		}
		d.s.Complete(q.Tag, nil)
	}
	d.act.IOs = d.act.IOs[:0]
}

func newInstant(tb testing.TB, cfg Config) *instant {
	cfg.SegTbl = make([]byte, 5<<18)
	cfg.Format, cfg.UUID, cfg.HashSeed = true, [16]byte{1}, 42
	s, err := New(cfg)
	if err != nil {
		tb.Fatal(err)
	}
	d := &instant{s: s}
	if cfg.PartitionBytes > 256<<20 {
		d.sparse = sparse{}
	} else {
		d.disk = make([]byte, cfg.PartitionBytes)
	}
	d.run()
	if !s.Ready() {
		tb.Fatal(s.Err())
	}
	return d
}

// put runs n Puts, up to depth at once. It stops at the first that fails for lack of space, and returns how many
// succeeded.
func (d *instant) put(first, n int, key func(i int) uint64, val []byte, depth int) (done int) {
	k := &d.k
	for i := first; i < first+n; {
		want := 0
		d.replies = 0
		for ; want < depth && i < first+n; want++ {
			binary.LittleEndian.PutUint64(k[:], key(i))
			if !d.s.Submit(&Request{Op: Put, Key: k[:], Value: val}) {
				break
			}
			i++
		}
		d.run()
		if d.last.Status != OK {
			return i - first
		}
	}
	return n
}

// one runs a request and returns how many I/Os it took.
func (d *instant) one(tb testing.TB, q Request, want Status) (reads, writes int64) {
	tb.Helper()
	r, w := d.reads, d.writes
	if !d.s.Submit(&q) {
		tb.Fatalf("op %d is not taken: %s", q.Op, d.s.State())
	}
	d.run()
	if d.last.Status != want {
		tb.Fatalf("op %d: status %d, want %d", q.Op, d.last.Status, want)
	}
	return d.reads - r, d.writes - w
}

func TestIOsPerRequest(t *testing.T) {
	d := newInstant(t, Config{PartitionBytes: 64<<20 + 1<<20, BlockSize: 512})
	key, val, buf := []byte("key"), make([]byte, 1000), make([]byte, 1000)
	for n, c := range []struct {
		q             Request
		want          Status
		reads, writes int64
	}{
		{Request{Op: Get, Key: key}, NotFound, 0, 0},
		{Request{Op: Exist, Key: key}, NotFound, 0, 0},
		// the value, and the first chunk's header
		{Request{Op: Put, Key: key, Value: val, Condition: IfPresent}, NotFound, 0, 2},
		{Request{Op: Put, Key: key, Value: val}, OK, 0, 3}, // the key log's first header
		{Request{Op: Put, Key: key, Value: val}, OK, 1, 2},
		{Request{Op: Put, Key: key, Value: val, Condition: IfAbsent}, Exists, 1, 1},
		{Request{Op: Put, Key: key, Value: val, Condition: IfPresent}, OK, 1, 2},
		{Request{Op: Get, Key: key, Value: buf}, OK, 2, 0},
		{Request{Op: Exist, Key: key}, OK, 1, 0},
		{Request{Op: Put, Key: key}, OK, 1, 1},
		{Request{Op: Get, Key: key}, OK, 1, 0},
		{Request{Op: Delete, Key: key}, OK, 1, 1},
		{Request{Op: Delete, Key: key}, NotFound, 0, 0},
		{Request{Op: Get, Key: key}, NotFound, 0, 0},
		{Request{Op: Get, Key: nil}, InvalidKey, 0, 0},
		{Request{Op: Get, Key: make([]byte, 17)}, InvalidKey, 0, 0},
		{Request{Op: Put, Key: key, Value: make([]byte, 1<<20+1)}, InvalidValue, 0, 0},
	} {
		if r, w := d.one(t, c.q, c.want); r != c.reads || w != c.writes {
			t.Errorf("%d: op %d took %d reads and %d writes, want %d and %d", n, c.q.Op, r, w, c.reads, c.writes)
		}
	}
	// Writers of one segment share its write, and small values a write of the value log: 16 segments at first.
	for i := range 64 {
		d.s.Submit(&Request{Op: Put, Key: []byte{1, byte(i)}, Value: val[:100]})
	}
	w := d.writes
	d.run()
	if d.writes-w > 8 {
		t.Errorf("64 Puts took %d writes, want at most 8", d.writes-w)
	}
}

func TestServingAllocatesNothing(t *testing.T) {
	d := newInstant(t, Config{PartitionBytes: 12<<20 + 1<<20, BlockSize: 512, ChunkBytes: 256 << 10, Requests: 64})
	val, buf := make([]byte, 256), make([]byte, 256)
	id := func(i int) uint64 { return uint64(i % 20000) }
	d.put(0, 40000, id, val, 32)
	n := 0
	allocs := testing.AllocsPerRun(2000, func() {
		n++
		d.put(n*32, 32, id, val, 32)
		k := &d.k
		binary.LittleEndian.PutUint64(k[:], uint64(n%20000))
		d.s.Submit(&Request{Op: Get, Key: k[:], Value: buf})
		d.s.Submit(&Request{Op: Exist, Key: k[:]})
		d.run()
		d.s.Submit(&Request{Op: Delete, Key: k[:]})
		d.run()
	})
	if allocs != 0 {
		t.Errorf("%v allocations for 35 requests, want 0", allocs)
	}
	if st := d.s.Stats(); st.Compactions == 0 || st.Checkpoints == 0 {
		t.Errorf("%+v: compaction and checkpoints should have been going on", st)
	}
}

// TestPartitionCapacity measures the share of the partition that is user bytes when it is full, and the DRAM.
func TestPartitionCapacity(t *testing.T) {
	PlainOnly(t)
	t.Parallel()
	for _, c := range []struct {
		value int
		least float64
	}{{1024, 0.88}, {256, 0.72}} {
		size := int64(128 << 20) // a chunk is 1/512 of it, as with 1 GiB
		if c.value == 256 {
			size = 48 << 20
		}
		d := newInstant(t, Config{PartitionBytes: size, BlockSize: 512, ChunkBytes: 256 << 10, GroupBytes: 16 << 10})
		val := make([]byte, c.value)
		d.put(0, 1<<30, func(i int) uint64 { return uint64(i) }, val, 128)
		if d.last.Status != CapacityExceeded {
			t.Fatalf("status %d", d.last.Status)
		}
		st := d.s.Stats()
		share := float64(st.Objects*int64(c.value)) / float64(size)
		// and the chunk table, with chunks of 2 MiB
		dram := (float64(st.Segments*lookup.EntryBytes) +
			float64(size>>21)*float64(reflect.TypeFor[space.Chunk]().Size())) / float64(st.Objects)
		t.Logf("%d B: %.1f %% user bytes, %.3f B of DRAM an object, %.2f bytes written per user byte, %+v", c.value,
			100*share, dram, float64(d.wbytes)/float64(st.UserBytes), st)
		if share < c.least {
			t.Errorf("%d B: the partition holds %.1f %% user bytes, want %.0f", c.value, 100*share, 100*c.least)
		}
		if dram > 0.40 {
			t.Errorf("%d B: %.3f B of DRAM an object, want 0.40", c.value, dram)
		}
		// All Deletes succeed, and free the space for as many keys again.
		full := st.Objects
		var k [16]byte
		for round := range Sized(2, 1) {
			d.last.Status = OK
			// The last Puts succeeded in part.
			for i := uint64(0); i < uint64(full)+1000; i++ {
				binary.LittleEndian.PutUint64(k[:], i)
				for !d.s.Submit(&Request{Op: Delete, Key: k[:]}) {
					d.run()
				}
				if i%97 == 0 {
					d.run()
				}
				if d.last.Status != OK && d.last.Status != NotFound {
					t.Fatalf("%d B: Delete %d of round %d: status %d, %+v", c.value, i, round, d.last.Status,
						d.s.Stats())
				}
			}
			d.run()
			if st := d.s.Stats(); st.Objects != 0 || st.LiveBytes != 0 {
				t.Fatalf("%d B: %d objects and %d bytes are left", c.value, st.Objects, st.LiveBytes)
			}
			if got := d.put(0, int(full)*98/100, func(i int) uint64 { return uint64(i) }, val,
				128); got < int(full)*98/100 {
				t.Fatalf("%d B: only %d of %d fit the second time: %+v", c.value, got, full, d.s.Stats())
			}
			full = int64(full) * 98 / 100
		}
	}
}

// written measures how many bytes are written for each user byte, in steady uniform overwrites.
func written(tb testing.TB, cfg Config, fill float64, value int, warm, measured float64) (wa float64, b, st Stats) {
	d := newInstant(tb, cfg)
	rng := rand.New(rand.NewPCG(FixedSeed(tb), 1))
	val := make([]byte, value)
	n := int(fill * float64(cfg.PartitionBytes) / float64(value))
	any := func(int) uint64 { return rng.Uint64N(uint64(n)) }
	put := func(n int, key func(int) uint64) {
		tb.Helper()
		if got := d.put(0, n, key, val, 128); got < n {
			tb.Fatalf("at %.0f %%: Put %d ends with status %d: %+v", 100*fill, got, d.last.Status, d.s.Stats())
		}
	}
	put(n, func(i int) uint64 { return uint64(i) })
	put(int(warm*float64(n)), any)
	before, b := d.wbytes, d.s.Stats()
	again := int(measured * float64(n))
	put(again, any)
	return float64(d.wbytes-before) / float64(again*value), b, d.s.Stats()
}

func TestWriteAmplification(t *testing.T) {
	PlainOnly(t)
	t.Parallel()
	for _, c := range []struct{ fill, most, warm float64 }{{0.45, 2.06, 2}, {0.65, 3.3, 1}, {0.75, 5.6, 1},
		{0.85, 20, 0.3}} {
		// A chunk is 1/512 of the partition, as in a partition of 1 GiB. The result is worse than with 1 GiB, where it
		// is 4.4 at 75 % (BenchmarkWritten): smaller chunks waste more at their ends, and the run is too short to reach
		// a steady state.
		wa, b, st := written(t, Config{PartitionBytes: 128 << 20, BlockSize: 512, ChunkBytes: 256 << 10}, c.fill, 1024,
			c.warm, 0.25)
		user := float64(st.UserBytes - b.UserBytes)
		t.Logf("at %.0f %%: %.2f bytes written per user byte, want < %.2f; key log %.2f, values %.2f, moved %.2f, "+
			"checkpoints %.2f (%d), compactions %d", 100*c.fill, wa, c.most,
			float64(st.KeyLogBytes-b.KeyLogBytes)/user, float64(st.ValueLogBytes-b.ValueLogBytes)/user,
			float64(st.MovedBytes-b.MovedBytes)/user, float64(st.CheckpointBytes-b.CheckpointBytes)/user,
			st.Checkpoints-b.Checkpoints, st.Compactions-b.Compactions)
		if wa >= c.most {
			t.Errorf("at %.0f %%: %.2f bytes written per user byte, want < %.2f", 100*c.fill, wa, c.most)
		}
	}
}

// TestSmallGroupsShareBlocks: a small value does not cost a block even if it is written alone, because the next group
// begins in the block in which the previous one ends.
func TestSmallGroupsShareBlocks(t *testing.T) {
	d := newInstant(t, Config{PartitionBytes: 16 << 20, BlockSize: 4096, ChunkBytes: 128 << 10})
	before := d.s.Stats()
	const n = 2000
	if got := d.put(0, n, func(i int) uint64 { return uint64(i) }, make([]byte, 256), 1); got < n {
		t.Fatalf("Put %d ends with status %d", got, d.last.Status)
	}
	st := d.s.Stats()
	if st.Compactions > 0 {
		t.Fatalf("%d compactions, want none", st.Compactions)
	}
	// The values are 5 chunks, and the segments that were written 8.
	if got := before.FreeChunks - st.FreeChunks; got > 18 {
		t.Errorf("%d values of 256 bytes, one by one, take %d chunks of %d, want at most 18", n, got, st.ChunkBytes)
	}
	if st.Objects != n {
		t.Errorf("%d objects, want %d", st.Objects, n)
	}
}

// TestSplitsAllocateNothing: Puts of new keys, with the splits, compaction and checkpoints that they cause, allocate
// nothing once the store's pools have reached their full size. Segments do not grow beyond their buffers.
func TestSplitsAllocateNothing(t *testing.T) {
	PlainOnly(t)
	d := newInstant(t, Config{PartitionBytes: 14<<20 + 1<<20, BlockSize: 512, ChunkBytes: 256 << 10, Requests: 64})
	val := make([]byte, 128)
	id := func(i int) uint64 { return uint64(i) }
	d.put(0, 20000, id, val, 32)
	d.put(0, 80000, func(i int) uint64 { return uint64(i*7) % 20000 }, val, 32)
	before, n := d.s.Stats(), 20000
	allocs := testing.AllocsPerRun(600, func() {
		d.put(n, 32, id, val, 32)
		d.put(0, 64, func(i int) uint64 { return uint64(n+i*7919) % 20000 }, val, 32)
		n += 32
	})
	st := d.s.Stats()
	if st.Splits-before.Splits < 500 || st.Compactions == before.Compactions || st.Checkpoints == before.Checkpoints ||
		st.Objects < 39000 {
		t.Errorf("too little has happened: %+v", st)
	}
	if allocs != 0 {
		t.Errorf("%v allocations for 96 Puts of which 32 are new keys, want 0", allocs)
	}
}

func TestMergesAllocateNothing(t *testing.T) {
	d := newInstant(t, Config{PartitionBytes: 14<<20 + 1<<20, BlockSize: 512, ChunkBytes: 256 << 10, KeysPerSegment: 1})
	n := 12000
	d.put(0, n, func(i int) uint64 { return uint64(i) }, make([]byte, 8), 32)
	before := d.s.Stats().Merges
	allocs := testing.AllocsPerRun(1000, func() {
		for range 10 {
			n--
			binary.LittleEndian.PutUint64(d.k[:], uint64(n))
			d.s.Submit(&Request{Op: Delete, Key: d.k[:]})
		}
		d.run()
	})
	if st := d.s.Stats(); st.Merges-before < 2000 || st.Objects > 2000 {
		t.Errorf("too little has happened: %+v", st)
	}
	if allocs != 0 {
		t.Errorf("%v allocations for 10 Deletes and the merges after them, want 0", allocs)
	}
}
