package kvstore

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/nvme"
	"jbofd/internal/pipeline"
	"jbofd/internal/units"
)

// batches copies a range out of a store.
func (r *ranged) batches(size int) (all [][]byte) {
	r.walk(CopyOut, 0, math.MaxUint64, size, func(b nvme.KVRange, st Status) {
		if st != OK {
			r.tb.Fatalf("CopyOut: status %d", st)
		}
		all = append(all, slices.Clone(b))
	})
	return all
}

// digests are the sums of a store.
func (r *ranged) digests() (all []byte) {
	r.walk(Digest, 0, math.MaxUint64, 10000, func(b nvme.KVRange, st Status) {
		if st != OK {
			r.tb.Fatalf("Digest: status %d", st)
		}
		all = append(all, b[nvme.KVRangeHeaderBytes:]...)
	})
	return all
}

// unreadableKeys returns the keys whose values cannot be read.
func (r *ranged) unreadableKeys() (keys []string) {
	buf := make([]byte, 1<<20)
	for k, o := range r.has {
		if o.tombstone {
			continue
		}
		switch p := r.do(Request{Op: Get, Key: o.key, Value: buf}); p.Status {
		case Corrupt, DeviceError:
			keys = append(keys, k)
		case OK:
			if p.Version != o.version || string(buf[:p.ValueLen]) != string(o.value) {
				r.tb.Fatalf("%q: %+v, want %v", k, p, &o)
			}
		default:
			r.tb.Fatalf("%q: status %d", k, p.Status)
		}
	}
	return keys
}

// damageValues damages some values: their content, a sector, or a piece of several. Blocks are what cannot be read
// before it is written again, at is where the first of these values is.
func (r *ranged) damageValues() (blocks map[units.ExtentOffset]bool, at units.ExtentOffset) {
	blocks = map[units.ExtentOffset]bool{}
	all := r.liveValues()
	for _, v := range all {
		kind := r.rng.IntN(20)
		if kind < 2 && at == 0 { // what cannot be read is tried again later
			at = v.offset
		}
		switch kind {
		case 0:
			r.disk[v.offset+units.ExtentOffset(r.rng.IntN(v.bytes))] ^= 16
		case 1:
			clear(r.disk[v.offset:][:v.bytes])
		case 2:
			blocks[(v.offset+units.ExtentOffset(r.rng.IntN(v.bytes)))&^511] = true
		}
	}
	r.fail = func(q *IO) error {
		for at := q.Offset; at < q.Offset+units.ExtentOffset(len(q.Buf)); at += 512 {
			switch {
			case q.Op == pipeline.Write:
				delete(blocks, at)
			case blocks[at]:
				return fmt.Errorf("block %d cannot be read", at)
			}
		}
		return nil
	}
	return blocks, at
}

// TestACopyBringsBackValuesThatCannotBeRead: of a store whose keys all have the versions of the copy, values of all
// lengths are damaged or cannot be read. Each of these comes back and nothing else changes: the digests are the same,
// a second copy changes nothing, and neither a scrub nor compaction nor an audit finds any damage.
func TestACopyBringsBackValuesThatCannotBeRead(t *testing.T) {
	t.Parallel()
	for seed := range Seeds(t, 4) {
		r := newRanged(t, seed, Config{PartitionBytes: 24 << 20, BlockSize: 512, ChunkBytes: 256 << 10,
			GroupBytes: 8 << 10, ScrubBytesPerSec: 256 << 20})
		for range 1500 {
			r.change(700, []int{100, 3000, 30000, 110000}[r.rng.IntN(4)])
		}
		batches, sums := r.batches(200_000), r.digests()
		clock := uint64(0)
		if seed%2 == 1 {
			clock = r.s.clock
		}
		blocks, at := r.damageValues()
		bad := r.unreadableKeys()
		if len(bad) < 10 || len(blocks) == 0 {
			t.Fatalf("seed %d: %d keys are damaged, %d blocks unreadable", seed, len(bad), len(blocks))
		}
		// Compaction gives a chunk up for what it cannot move.
		r.s.compact.suspect = r.s.pool.Of(at)
		r.run()
		t.Logf("seed %d: %d keys, %d chunks are given up", seed, len(bad), r.s.AuditState().DamagedChunks)
		objects, applied := r.s.objects, 0
		for _, b := range batches {
			p := r.do(Request{Op: CopyIn, Value: b, Version: clock, Background: true})
			if p.Status != OK {
				t.Fatalf("seed %d: CopyIn: status %d", seed, p.Status)
			}
			applied += p.ValueLen
		}
		if applied != len(bad) {
			t.Errorf("seed %d: %d objects were stored, want the %d whose values could not be read", seed, applied,
				len(bad))
		}
		if left := r.unreadableKeys(); len(left) > 0 {
			t.Fatalf("seed %d: %d values cannot be read after the copy: %q", seed, len(left), left)
		}
		if got := r.digests(); string(got) != string(sums) || r.s.objects != objects {
			t.Errorf("seed %d: the copy has changed the digests, or the objects: %d, want %d", seed, r.s.objects,
				objects)
		}
		for _, b := range batches {
			if p := r.do(Request{Op: CopyIn, Value: b, Version: clock}); p.Status != OK || p.ValueLen != 0 {
				t.Fatalf("seed %d: again: %+v", seed, p)
			}
		}
		if r.s.copying != 0 || r.s.freeCopy.N != copyWrites || r.s.unchecked.N != 0 || r.s.reads.Busy() != 0 {
			t.Errorf("seed %d: ops are left: %s", seed, r.s.State())
		}
		r.free(blocks)
		r.act.Damage, r.s.stats.Scrubbed = r.act.Damage[:0], 0
		r.wait(t, "a whole scrub", func() bool { return r.s.stats.Scrubbed > 2*r.s.cfg.PartitionBytes })
		r.s.Audit(false)
		r.wait(t, "an audit", func() bool { return !r.s.AuditState().Running })
		if a := r.s.AuditState(); len(r.act.Damage) > 0 || a.DamagedChunks+int(a.Lossy+a.Unreadable) > 0 {
			t.Errorf("seed %d: after the copy: damage %+v, audit %+v", seed, r.act.Damage, a)
		}
		if err := r.s.Recount(r.disk, false); err != nil {
			t.Errorf("seed %d: %v", seed, err)
		}
	}
}

// free lets the blocks be read again, which no live value has.
func (r *ranged) free(blocks map[units.ExtentOffset]bool) {
	r.tb.Helper()
	for _, v := range r.liveValues() {
		for at := range blocks {
			if v.offset < at+512 && at < v.offset+units.ExtentOffset(v.bytes) {
				r.tb.Fatalf("the value of %q still has the unreadable block %d", v.key, at)
			}
		}
	}
	r.fail = nil
}

// TestOnlyTheSameVersionIsRead: a copy with older versions than those that are there, or with newer ones, reads no
// value. One with the same versions reads each once.
func TestOnlyTheSameVersionIsRead(t *testing.T) {
	r := newRanged(t, FixedSeed(t), rangedConfigs[0])
	for i := range 300 {
		r.do(Request{Op: Put, Key: fmt.Append(nil, "key", i), Value: make([]byte, 100+i)})
	}
	reads := 0
	r.fail = func(q *IO) error {
		if q.Op == pipeline.Read && r.s.pool.Chunks[r.s.pool.Of(q.Offset)].Kind == format.ValueLog {
			reads++
		}
		return nil
	}
	batches := r.batches(20000)
	for _, c := range []struct {
		what                  string
		by                    int64
		wantReads, wantStored int
	}{{"the same versions", 0, 300, 0}, {"older versions", -1, 0, 0}, {"newer versions", 1000, 0, 300}} {
		reads = 0
		stored := 0
		for _, b := range batches {
			b := nvme.KVRange(slices.Clone(b))
			for at := nvme.KVRangeHeaderBytes; at < len(b); {
				e, next := b.EntryAt(at)
				e.SetVersion(max(1, uint64(int64(e.Version())+c.by)))
				at = next
			}
			b.Seal()
			p := r.do(Request{Op: CopyIn, Value: b})
			if p.Status != OK {
				t.Fatalf("%s: %+v", c.what, p)
			}
			stored += p.ValueLen
		}
		if slack := 1; reads > c.wantReads+slack || reads < c.wantReads-slack || stored != c.wantStored {
			t.Errorf("%s: %d values are read and %d stored, want %d and %d", c.what, reads, stored, c.wantReads,
				c.wantStored)
		}
	}
}

// TestCopiesOutAndInDoNotKeepEachOtherWaiting: only one long value is read at a time. CopyOuts of such
// values, and CopyIns that have to look at them, come to their ends although others of both never cease.
func TestCopiesOutAndInDoNotKeepEachOtherWaiting(t *testing.T) {
	r := newRanged(t, FixedSeed(t), Config{PartitionBytes: 24 << 20, BlockSize: 512, ChunkBytes: 512 << 10})
	for i := range 12 {
		r.do(Request{Op: Put, Key: fmt.Append(nil, "key", i), Value: make([]byte, 100_000+[]int{0, -99_000}[i%2])})
	}
	batch := r.batches(MaxRangeBytes)[0]
	var ended [2 + MaxCopyIns]int
	var busy [len(ended)]bool
	bufs := make([]byte, 2*MaxRangeBytes)
	for n := 0; slices.Min(ended[:]) < 5; n++ {
		if n > 10_000 {
			t.Fatalf("CopyOuts and CopyIns have ended that often: %d", ended)
		}
		for i := range ended {
			q := Request{Op: CopyIn, Tag: uint64(i), Value: batch}
			if i < 2 {
				q.Op, q.Range, q.Value = CopyOut, Range{Last: math.MaxUint64}, bufs[i*MaxRangeBytes:][:MaxRangeBytes]
			}
			busy[i] = busy[i] || r.s.Submit(&q)
		}
		r.s.Turn(r.now, &r.act)
		r.now += 1000
		for _, p := range r.act.Replies {
			if p.Status != OK {
				t.Fatalf("%+v", p)
			}
			busy[p.Tag] = false
			ended[p.Tag]++
		}
		r.act.Replies = r.act.Replies[:0]
		r.transfer()
	}
	for i := range ended {
		r.s.EndEarly(uint64(i))
	}
	r.run()
	if r.s.copying != 0 || r.s.unchecked.N != 0 || r.s.reads.Busy() != 0 {
		t.Errorf("requests are left: %s", r.s.State())
	}
}

// TestARestoredKeyHasTheIdentitiesOfBoth: of the copy and of the store. A retry of either write is answered, and the
// value is that of the copy.
func TestARestoredKeyHasTheIdentitiesOfBoth(t *testing.T) {
	for _, c := range []struct {
		name        string
		here, there uint64 // the client of the write with version 7, or 0
		stored      int
	}{{"the same", 1, 1, 1}, {"only the copy has one", 0, 1, 1}, {"only the store has one", 1, 0, 1},
		{"different ones", 2, 1, 1}} {
		a, b := twins(t, FixedSeed(t))
		put := func(r *ranged, client uint64) Request {
			q := Request{Op: Put, Condition: IfNewer, Version: 7, Key: []byte("key"), Value: make([]byte, 3000),
				ID: Identity{Client: client, Seq: 5}}
			if p := r.do(q); p.Status != OK {
				t.Fatalf("%s: %+v", c.name, p)
			}
			q.ID.Retry = true
			return q
		}
		retries := []Request{put(a, c.there), put(b, c.here)}
		// Something behind the value, because the last block of the log is written again with what follows.
		b.do(Request{Op: Put, Key: []byte("another"), Value: make([]byte, 20000)})
		b.disk[b.s.ValueAt(b.disk, []byte("key"))+100] ^= 1
		b.one(t, Request{Op: Get, Key: []byte("key"), Value: make([]byte, 3000)}, Corrupt)
		batch := a.batches(50000)[0]
		for n, want := range []int{c.stored, 0} {
			if p := b.do(Request{Op: CopyIn, Value: batch}); p.Status != OK || p.ValueLen != want {
				t.Errorf("%s: CopyIn %d: %+v, want %d changes", c.name, n, p, want)
			}
		}
		p := b.do(Request{Op: Get, Key: []byte("key"), Value: make([]byte, 3000)})
		if p.Status != OK || p.Version != 7 {
			t.Errorf("%s: %+v", c.name, p)
		}
		for _, q := range retries {
			if p := b.do(q); q.ID.Client > 0 && (p.Status != OK || p.Version != 7) {
				t.Errorf("%s: the retry of client %d: %+v", c.name, q.ID.Client, p)
			}
		}
	}
}

// TestCopiesAtOnceRestoreAValueOnce: all of them find that the values cannot be read. The first one stores each again,
// and the others see that it is another record that they have read.
func TestCopiesAtOnceRestoreAValueOnce(t *testing.T) {
	const n = 20
	r := newRanged(t, FixedSeed(t), rangedConfigs[0])
	for i := range n {
		o := object{key: fmt.Appendf(nil, "key %d", i), value: make([]byte, 500)}
		o.version = r.do(Request{Op: Put, Key: o.key, Value: o.value}).Version
		r.has[string(o.key)] = o
	}
	for range 200 { // so that their chunk is sealed
		r.do(Request{Op: Put, Key: []byte("other"), Value: make([]byte, 1000)})
	}
	batch := r.batches(200_000)[0]
	for _, v := range r.liveValues() {
		if string(v.key) != "other" {
			r.disk[v.offset+units.ExtentOffset(v.bytes/2)] ^= 1
		}
	}
	if bad := r.unreadableKeys(); len(bad) != n {
		t.Fatalf("%d values are damaged, want %d", len(bad), n)
	}
	for c := range MaxCopyIns {
		if !r.s.Submit(&Request{Op: CopyIn, Tag: uint64(c), Value: slices.Clone(batch)}) {
			t.Fatal("a CopyIn is not taken")
		}
	}
	ended, changed := 0, 0
	for turns := 0; ended < MaxCopyIns && turns < 1000; turns++ {
		r.s.Turn(r.now, &r.act)
		r.now += 1000
		for _, p := range r.act.Replies {
			if ended, changed = ended+1, changed+p.ValueLen; p.Status != OK {
				t.Errorf("%+v", p)
			}
		}
		r.act.Replies = r.act.Replies[:0]
		r.transfer()
	}
	if ended != MaxCopyIns || changed != n {
		t.Errorf("%d CopyIns have ended and stored %d values, want %d", ended, changed, n)
	}
	if bad := r.unreadableKeys(); len(bad) > 0 {
		t.Errorf("%d values cannot be read", len(bad))
	}
}
