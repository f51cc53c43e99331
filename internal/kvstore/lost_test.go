package kvstore

import (
	"cmp"
	"encoding/binary"
	"slices"
	"testing"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/space"
	"jbofd/internal/units"
)

// liveValue is a value that a segment refers to.
type liveValue struct {
	offset units.ExtentOffset
	bytes  int // of its record
	key    []byte
}

// liveValues are all live values of sealed chunks, or pieces of them, in the order of their places.
func (d *instant) liveValues() (all []liveValue) {
	s := d.s
	for n := range s.tbl.Len() {
		e := s.tbl.Get(n)
		if e == 0 {
			continue
		}
		seg := format.Segment(d.disk[e.Offset():])
		var key []byte
		for at := seg.First(); at < seg.LengthBytes(); at += seg.Item(at).LengthBytes() {
			it := seg.Item(at)
			if !it.Continues() {
				key = slices.Clone(it.Key())
			}
			if it.ValueLen() > 0 && s.tbl.Segment(format.HashKey(s.hashSeed, key)) == n &&
				s.pool.Chunks[s.pool.Of(it.ValueOffset())].State == space.Sealed {
				all = append(all, liveValue{it.ValueOffset(), it.RecordBytes(), key})
			}
		}
	}
	slices.SortFunc(all, func(a, b liveValue) int { return cmp.Compare(a.offset, b.offset) })
	return all
}

// wait lets time pass until done, as the store asks for it.
func (d *instant) wait(t *testing.T, what string, done func() bool) {
	t.Helper()
	for range 100_000 {
		if done() {
			return
		}
		if d.act.WakeNS == 0 {
			t.Fatalf("the store waits for nothing: %s does not come", what)
		}
		d.now = max(d.now, d.act.WakeNS)
		d.run()
	}
	t.Fatalf("%s does not come", what)
}

// TestAChunkIsKeptUntilWhatItHasLostIsGone: a value disappears without a trace, from among others or from the end of
// its chunk. The scrub notices, says how much is lost, and the chunk is used again when the key is deleted.
func TestAChunkIsKeptUntilWhatItHasLostIsGone(t *testing.T) {
	for _, x := range []struct {
		name string
		pick func(of []liveValue) liveValue // of the values of a chunk
	}{
		{"from among others", func(of []liveValue) liveValue { return of[len(of)/2] }},
		{"at the end", func(of []liveValue) liveValue { return of[len(of)-1] }},
	} {
		t.Run(x.name, func(t *testing.T) {
			d := newInstant(t, Config{PartitionBytes: 16 << 20, BlockSize: 512, ChunkBytes: 256 << 10,
				ScrubBytesPerSec: 64 << 20})
			d.put(0, 4000, func(i int) uint64 { return uint64(i) }, make([]byte, 1000), 64)
			s, all := d.s, d.liveValues()
			chunk := s.pool.Of(all[len(all)/2].offset)
			lost := x.pick(slices.DeleteFunc(all, func(v liveValue) bool { return s.pool.Of(v.offset) != chunk }))
			clear(d.disk[lost.offset:][:lost.bytes])
			d.act.Damage = d.act.Damage[:0]
			d.run()
			d.wait(t, "the report", func() bool { return len(d.act.Damage) > 0 })
			if got := d.act.Damage[0]; got.LostBytes != int64(lost.bytes) || s.pool.Of(got.Offset) != chunk {
				t.Errorf("%+v is reported, want %d bytes of chunk %d", got, lost.bytes, chunk)
			}
			d.one(t, Request{Op: Get, Key: lost.key, Value: make([]byte, 1000)}, Corrupt)
			if got := s.pool.Chunks[chunk]; got.State != space.Damaged || got.Live != uint32(lost.bytes) {
				t.Errorf("the chunk is %+v, want state %d", got, space.Damaged)
			}
			d.one(t, Request{Op: Delete, Key: lost.key}, OK)
			if got := s.pool.Chunks[chunk].State; got == space.Damaged {
				t.Error("the chunk is never used again, although nothing in it is live")
			}
			if err := s.Recount(d.disk, true); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestASearchGoesOnByItself: compaction has to look for the next record in many steps. No request comes meanwhile, and
// it continues all the same.
func TestASearchGoesOnByItself(t *testing.T) {
	d := newInstant(t, Config{PartitionBytes: 64 << 20, BlockSize: 512, ChunkBytes: 2 << 20})
	// A value that looks like the beginning of a record everywhere.
	val := make([]byte, 700<<10)
	for at := 0; at+8 <= len(val); at += 8 {
		format.Value(val[at:]).SetValueLen(64 << 10)
		val[at+4] = 'v'
	}
	key := make([]byte, 16)
	binary.LittleEndian.PutUint64(key, 1<<40)
	d.one(t, Request{Op: Put, Key: key, Value: val}, OK)
	d.put(0, 4000, func(i int) uint64 { return uint64(i) }, make([]byte, 1000), 64)
	s, all := d.s, d.liveValues()
	at := slices.IndexFunc(all, func(v liveValue) bool { return v.bytes > s.pieceBytes })
	if at < 0 {
		t.Fatal("the value is not in a full chunk")
	}
	d.disk[all[at].offset] ^= 1
	chunk := s.pool.Of(all[at].offset)
	s.compact.suspect = chunk
	for n := 0; s.pool.Chunks[chunk].State != space.Victim; n++ {
		if d.turns(1); n == 10 {
			t.Fatalf("the chunk is not being emptied: %+v", s.pool.Chunks[chunk])
		}
	}
	d.wait(t, "the end", func() bool { return s.pool.Chunks[chunk].State != space.Victim })
	if got := s.pool.Chunks[chunk]; got.State != space.Damaged || got.Live != uint32(all[at].bytes) {
		t.Errorf("the chunk is %+v, want %d bytes live, state %d", got, all[at].bytes, space.Damaged)
	}
}
