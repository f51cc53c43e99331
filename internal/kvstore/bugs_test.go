package kvstore_test

import (
	"bytes"
	"fmt"
	"slices"
	"testing"

	"jbofd/internal/kvstore"
	"jbofd/internal/kvstore/format"
	"jbofd/internal/lab"
	"jbofd/internal/ssd"
)

// Tests for the bugs B1 to B10 in LEED's code, as far as they concern a single store.

// isValues and isSegments recognise writes of the value log and of the key log.
func isValues(q *ssd.Request) bool {
	return q.Op == ssd.Write && format.Value(q.Buf).Begins()
}

func isSegments(q *ssd.Request) bool {
	return q.Op == ssd.Write && format.Segment(q.Buf).Begins()
}

// B1: a Put whose value, or whose segment, was not written is not acknowledged.
func TestAWriteThatFailedIsNotAcknowledged(t *testing.T) {
	seed := seeds(t)
	// A write of values may begin in the middle of one.
	notSegments := func(q *ssd.Request) bool { return q.Op == ssd.Write && !isSegments(q) }
	for name, of := range map[string]func(*ssd.Request) bool{"values": notSegments, "segments": isSegments} {
		r := newRig(t, seed, small(32))
		m := newModel(r, 100, func() int { return 1 + r.rng.IntN(2000) })
		m.random(500, 16)
		r.dev.Fault = func(q *ssd.Request) lab.Outcome {
			if of(q) {
				return lab.FailUndone + lab.Outcome(r.rng.IntN(3))
			}
			return lab.Good
		}
		m.ops = []kvstore.Op{kvstore.Put, kvstore.Get}
		failed, acknowledged := m.failed, 0
		r.reply = func(p kvstore.Reply) {
			if p.Status == kvstore.OK && m.reqs[p.Tag].op == kvstore.Put {
				acknowledged++
			}
			m.check(p)
		}
		m.random(1000, 32)
		if got := m.failed - failed; got < 50 || acknowledged > 0 {
			t.Errorf("%s: of 1000 requests %d failed, and %d Puts are acknowledged, want many and none", name, got,
				acknowledged)
		}
		r.reply = m.check
		r.dev.Fault = nil
		m.compare(false)
		m.crash()
		m.reopen()
	}
}

// B2: compaction preserves values of any length at any position in the pieces that it reads.
func TestCompactionKeepsValuesOfAnyLength(t *testing.T) {
	kvstore.PlainOnly(t)
	t.Parallel()
	seed := seeds(t)
	for i, n := range []int{272, 304, 528, 1008, 60000} {
		r := newRig(t, seed+uint64(i), small(40))
		m := newModel(r, min(40, (2600<<10)/(n+80)), func() int { return n })
		if n < 2000 {
			m = newModel(r, (2600<<10)/(n+80), func() int { return n })
		}
		m.ops = []kvstore.Op{kvstore.Put}
		m.random(max(200, len(m.keys)*min(5, times(2))), 32)
		m.settle()
		m.compare(false)
		if st := m.s.Stats(); st.MovedBytes == 0 || m.full > m.done/10 {
			t.Errorf("values of %d: %d times full, %+v", n, m.full, st)
		}
		m.crash()
		m.reopen()
	}
}

// B3: a Get returns the right result while its segment grows or its last key is deleted.
func TestAGetWhoseSegmentGrowsOrIsDeleted(t *testing.T) {
	t.Parallel()
	seed := seeds(t)
	cfg := small(40)
	cfg.SegTbl = make([]byte, 5*16) // the table cannot grow, so segments become long
	r := newRig(t, seed, cfg)
	r.dev.SlowOneIn = 2
	m := newModel(r, 2600, func() int { return 0 })
	longest := 0
	for n := 10; n < len(m.keys); n += n / 3 {
		for i := range n {
			m.push(kvstore.Put, i, 0)
			m.push(kvstore.Get, m.rng.IntN(i+1), 0)
		}
		m.finish()
		if m.full > 0 {
			break
		}
		longest = n
	}
	if longest < 1500 {
		t.Errorf("%d keys in 16 segments were too many", longest)
	}
	// Delete all keys again, the last one twice.
	for i := range m.keys {
		m.push(kvstore.Delete, i, 0)
		m.push(kvstore.Get, min(len(m.keys)-1, i+m.rng.IntN(3)), 0)
	}
	m.finish()
	m.settle()
	m.compare(false)
	m.audit(0)
}

// B4: more Puts to one segment than there are requests, groups and buffers, in two configurations: all are answered.
func TestMoreWritersOfOneKeyThanThereIsRoomFor(t *testing.T) {
	seed := seeds(t)
	var stores []*model
	for i := range uint64(2) {
		cfg := small(32)
		cfg.Requests = 8 + 120*int(i)
		r := newRig(t, seed+i, cfg)
		stores = append(stores, newModel(r, 2, func() int { return r.rng.IntN(16 << 10) }))
	}
	var left [2]int
	for i := range left {
		left[i] = 600
	}
	for n := 0; left[0]+left[1]+len(stores[0].reqs)+len(stores[1].reqs) > 0; n++ {
		for i, m := range stores {
			for left[i] > 0 && m.submit(kvstore.Put, kvstore.Always, left[i]%2, m.size()) {
				left[i]--
			}
			m.step()
		}
		if n > 1e6 {
			t.Fatalf("%v Puts are not taken, %d and %d get no answer", left, len(stores[0].reqs), len(stores[1].reqs))
		}
	}
	for _, m := range stores {
		if m.full > 0 {
			t.Errorf("%d Puts find the partition full: %+v", m.full, m.s.Stats())
		}
		m.settle()
		m.compare(false)
	}
}

// B6: a full partition answers CapacityExceeded, serves Gets and Deletes, and accepts Puts again when there is room.
func TestAFullPartitionStillServes(t *testing.T) {
	kvstore.PlainOnly(t)
	t.Parallel()
	for seed := range kvstore.Seeds(t, kvstore.Sized(4, 2)) {
		size := []int{0, 1000, 100, 20000}[seed%4]
		fillAndServe(t, seed, variant(seed, []int64{30, 40, 24, 64}[seed%4]), size, 1500)
	}
}

// TestAPartitionFullOfLongValuesStillServes: with values of more than 64 KiB, which are written in pieces.
func TestAPartitionFullOfLongValuesStillServes(t *testing.T) {
	kvstore.PlainOnly(t)
	t.Parallel()
	for seed := range kvstore.Seeds(t, kvstore.Sized(4, 2)) {
		cfg := variant(seed, 0)
		cfg.ChunkBytes = 512 << 10
		cfg.PartitionBytes = small(1).PartitionBytes + 48*cfg.ChunkBytes
		fillAndServe(t, seed, cfg, []int{256 << 10, 64<<10 + 1, 200_000, 100_000}[seed%4], 300)
	}
}

// fillAndServe fills a partition with values of a size, and goes on at the limit: with so many overwrites and deletes,
// a crash, and deletes that make room.
func fillAndServe(t *testing.T, seed uint64, cfg kvstore.Config, size, overwrites int) {
	t.Helper()
	r := newRig(t, seed, cfg)
	m := newModel(r, 1, func() int { return size })
	keys := int(r.cfg.PartitionBytes) / (size + 34)
	m = newModel(r, keys, m.size)
	m.longest = size
	for cycle := range 2 {
		m.full = 0
		for k := range m.keys {
			m.push(kvstore.Put, k, size)
		}
		m.finish()
		if m.full == 0 {
			t.Fatalf("%d values of %d bytes fit into %d", len(m.keys), size, r.cfg.PartitionBytes)
		}
		// At the limit: overwrites, with deletes among them.
		m.ops = []kvstore.Op{kvstore.Put, kvstore.Put, kvstore.Put, kvstore.Get, kvstore.Delete}
		m.random(overwrites, 48)
		if cycle == 1 {
			m.power = true
			m.crash()
			m.reopen()
		}
		m.compare(false)
		// Deleting every third key makes room for as many new ones.
		var gone []int
		for k := int(seed % 3); k < len(m.keys); k += 3 {
			if m.exists(k) {
				m.push(kvstore.Delete, k, 0)
				gone = append(gone, k)
			}
		}
		m.finish()
		m.settle()
		m.full = 0
		for _, k := range gone[:len(gone)/2] {
			m.push(kvstore.Put, k, size)
		}
		m.finish()
		if m.full > 0 {
			t.Errorf("values of %d: %d of %d Puts find the partition full, after twice as many Deletes: %+v", size,
				m.full, len(gone)/2, m.s.Stats())
		}
	}
	// All keys can be deleted, one after the other.
	for k := range m.keys {
		m.push(kvstore.Delete, k, 0)
	}
	m.finish()
	m.settle()
	m.compare(false)
}

// B7: compaction may move what a Get reads, and its chunk may be reused, before the device completes the read.
func TestADelayedGetReturnsTheCurrentValue(t *testing.T) {
	kvstore.PlainOnly(t)
	t.Parallel()
	seed := seeds(t)
	for round := range uint64(times(4)) {
		r := newRig(t, seed+round, small(32))
		m := newModel(r, 500, func() int { return 300 + r.rng.IntN(2000) })
		m.ops = updates
		m.random(2000, 24)
		// Half of the reads for requests complete very late, some of them with the data of the time of their
		// submission.
		r.dev.Hold = func(q *ssd.Request) int64 {
			if q.Op == ssd.Read && !r.ios[q.Tag].Background && r.rng.IntN(8) == 0 {
				return 20e6 + r.rng.Int64N(200e6)
			}
			return 0
		}
		before := m.s.Stats()
		m.random(times(5000), 60)
		if st := m.s.Stats(); st.Compactions-before.Compactions < 10 {
			t.Errorf("%d chunks compacted meanwhile, want more", st.Compactions-before.Compactions)
		}
		r.dev.Hold = nil
		m.settle()
		m.compare(false)
	}
}

// B7: while a Get's read is outstanding, its segment may be moved away and back to the same place, whose chunk has been
// reused meanwhile. Groups of one segment in large blocks make this likely, because there are few places. The device
// ends a read when that has happened.
func TestADelayedGetNoticesAReusedChunk(t *testing.T) {
	kvstore.PlainOnly(t)
	seed := seeds(t)
	cfg := small(24)
	cfg.BlockSize, cfg.CheckpointBytes = 4096, 64<<10
	r := newRig(t, seed, cfg)
	m := newModel(r, 40, func() int { return 0 })
	type read struct {
		key    int
		offset int64
		epoch  uint64
	}
	held, back := map[uint64]read{}, 0 // by tag of the I/O
	for range times(6000) {
		if len(m.reqs) < 55 {
			key := r.rng.IntN(len(m.keys))
			r.dev.Hold = func(q *ssd.Request) int64 {
				if q.Op != ssd.Read || r.ios[q.Tag].Background {
					return 0
				}
				offset, epoch := m.s.Place(m.keys[key].name)
				held[q.Tag] = read{key, offset, epoch}
				return 1e15
			}
			m.push(kvstore.Get, key, 0)
			m.turn()
			r.dev.Hold = nil
		}
		m.push([]kvstore.Op{kvstore.Put, kvstore.Put, kvstore.Delete}[r.rng.IntN(3)], r.rng.IntN(len(m.keys)), 0)
		for tag := m.tag - 1; m.reqs[tag] != nil; {
			if !m.step() && m.reqs[tag] != nil {
				t.Fatalf("a writer gets no answer: %+v", m.s.Stats())
			}
		}
		for i := range r.dev.Flights {
			f := &r.dev.Flights[i]
			g, ok := held[f.Tag]
			if offset, epoch := m.s.Place(m.keys[g.key].name); ok && offset == g.offset && epoch != g.epoch {
				f.DueNS = r.now
				delete(held, f.Tag)
				back++
			}
		}
	}
	if t.Logf("%d reads end with their segments back", back); back < 10 {
		t.Error("too few segments come back to their places")
	}
	for i := range r.dev.Flights {
		r.dev.Flights[i].DueNS = r.now
	}
	m.finish()
	m.settle()
	m.compare(false)
}

// B9: comparisons of keys include the length, and lengths of keys and buffers are checked.
func TestLengthsOfKeysAndBuffers(t *testing.T) {
	r := newRig(t, 1, small(32))
	m := newModel(r, 1, nil)
	put := func(key, val []byte, want kvstore.Status) {
		t.Helper()
		if p := m.do(kvstore.Request{Op: kvstore.Put, Key: key, Value: val}); p.Status != want {
			t.Errorf("Put of key %q and %d bytes: status %d, want %d", key, len(val), p.Status, want)
		}
	}
	for _, n := range []int{0, 17, 255, 256, 257} {
		key := bytes.Repeat([]byte{'k'}, n)
		for _, op := range []kvstore.Op{kvstore.Get, kvstore.Put, kvstore.Delete, kvstore.Exist} {
			if p := m.do(kvstore.Request{Op: op, Key: key, Value: []byte("v")}); p.Status != kvstore.InvalidKey {
				t.Errorf("op %d of a key of %d bytes: status %d", op, n, p.Status)
			}
		}
	}
	// All prefixes of one key, and of a key of zeroes.
	keys := [][]byte{}
	for n := 1; n <= format.MaxKey; n++ {
		keys = append(keys, append([]byte{'a'}, make([]byte, n-1)...), make([]byte, n))
	}
	for i, k := range keys {
		put(k, fmt.Appendf(nil, "value %d", i), kvstore.OK)
	}
	for i, k := range keys {
		if i%3 == 0 {
			if p := m.do(kvstore.Request{Op: kvstore.Delete, Key: k}); p.Status != kvstore.OK {
				t.Errorf("Delete of %q: status %d", k, p.Status)
			}
		}
	}
	for i, k := range keys {
		buf := make([]byte, 100)
		p := m.do(kvstore.Request{Op: kvstore.Get, Key: k, Value: buf})
		if want := fmt.Appendf(nil, "value %d", i); i%3 == 0 && p.Status != kvstore.NotFound || i%3 != 0 &&
			(p.Status != kvstore.OK || !bytes.Equal(buf[:p.ValueLen], want)) {
			t.Errorf("key %q: %+v, %q", k, p, buf[:p.ValueLen])
		}
	}
	most := m.s.MaxValueBytes()
	long := value(1, 1, most)
	put([]byte("long"), long, kvstore.OK)
	put([]byte("long"), make([]byte, most+1), kvstore.InvalidValue)
	for _, n := range []int{0, 1, 511, 512, 513, 4096, most - 1, most, most + 1000} {
		buf := bytes.Repeat([]byte{0xEE}, n+64)
		p := m.do(kvstore.Request{Op: kvstore.Get, Key: []byte("long"), Value: buf[:n]})
		got := min(n, most)
		if p.Status != kvstore.OK || p.ValueLen != most || !bytes.Equal(buf[:got], long[:got]) ||
			slices.ContainsFunc(buf[got:], func(b byte) bool { return b != 0xEE }) {
			t.Errorf("into %d bytes: %+v, or the wrong bytes", n, p)
		}
	}
}

// B10: more requests with long values than there are buffers for them.
func TestMoreLongValuesThanThereAreBuffers(t *testing.T) {
	seed := seeds(t)
	r := newRig(t, seed, small(64))
	m := newModel(r, 40, func() int { return 8<<10 + r.rng.IntN(40<<10) })
	for k := range m.keys {
		m.push(kvstore.Put, k, m.size())
	}
	m.finish()
	r.dev.SlowOneIn = 3
	for n := range times(400) {
		op := kvstore.Get
		if n%5 == 0 {
			op = kvstore.Put
		}
		m.push(op, r.rng.IntN(len(m.keys)), m.size())
	}
	if len(m.reqs) < 16 {
		t.Errorf("%d requests at once, want more", len(m.reqs))
	}
	m.finish()
	m.settle()
	m.compare(false)
}
