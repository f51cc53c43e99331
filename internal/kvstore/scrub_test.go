package kvstore

import (
	"encoding/binary"
	"testing"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/space"
	"jbofd/internal/units"
)

func TestScrubFindsLiveDamageAndNothingElse(t *testing.T) {
	d := newInstant(t, Config{PartitionBytes: 32 << 20, BlockSize: 512, ChunkBytes: 256 << 10,
		ScrubBytesPerSec: 1 << 20})
	val := make([]byte, 1000)
	id := func(i int) uint64 { return uint64(i % 4000) }
	d.put(0, 6000, id, val, 64)
	d.act.Damage = d.act.Damage[:0]
	// Flip a byte of every 50th key's value, and of some obsolete values.
	want := map[units.ExtentOffset]bool{}
	s := d.s
	for n := range s.tbl.Len() {
		e := s.tbl.Get(n)
		if e == 0 {
			continue
		}
		seg := format.Segment(d.disk[e.Offset():])
		for at := seg.First(); at < seg.LengthBytes(); at += seg.Item(at).LengthBytes() {
			it := seg.Item(at)
			if s.tbl.Segment(format.HashKey(s.hashSeed, it.Key())) != n ||
				s.pool.Chunks[s.pool.Of(it.ValueOffset())].State != space.Sealed {
				continue
			}
			if binary.LittleEndian.Uint64(it.Key())%50 == 0 {
				want[it.ValueOffset()] = true
				d.disk[it.ValueOffset()+100] ^= 1
			}
		}
	}
	sealed := int64(0)
	for _, c := range s.pool.Chunks {
		if c.State == space.Sealed {
			sealed += 256 << 10
		}
	}
	for i := range 1000 {
		k := make([]byte, 16)
		binary.LittleEndian.PutUint64(k, uint64(i))
		d.s.Submit(&Request{Op: Get, Key: k, Value: val[:0]})
		d.run()
		if i%50 != 0 {
			d.one(t, Request{Op: Exist, Key: k}, OK)
		}
	}
	d.act.Damage = d.act.Damage[:0]
	begin, before := d.now, d.s.Stats().Scrubbed
	got := map[units.ExtentOffset]bool{}
	for d.s.Stats().Scrubbed-before < sealed+1<<20 {
		d.run()
		d.now = max(d.now, d.act.WakeNS)
		for _, x := range d.act.Damage {
			if x.LostBytes > 0 {
				// A chunk that was emptied because of what was found in it, and something in it is damaged indeed.
				for offset := range want {
					if s.pool.At(s.pool.Of(offset), 0) == x.Offset {
						x.LostBytes -= int64(format.ValueBytes(len(val)))
					}
				}
				if x.LostBytes != 0 {
					t.Fatalf("of chunk %d %d bytes too many are said to be lost", s.pool.Of(x.Offset), x.LostBytes)
				}
				continue
			}
			got[x.Offset] = true
			if !want[x.Offset] {
				t.Fatalf("%+v is reported, and is not damaged", x)
			}
		}
		d.act.Damage = d.act.Damage[:0]
	}
	if len(got) != len(want) || len(want) < 20 {
		t.Errorf("%d damaged values are reported, want %d", len(got), len(want))
	}
	if rate := float64(d.s.Stats().Scrubbed-before) / float64(d.now-begin) * 1e9; rate > 1.5*(1<<20) {
		t.Errorf("it reads %.0f bytes per second, want 1 MiB", rate)
	}
	d.s.Stop()
	for !d.s.Stopped() {
		d.run()
		d.now = max(d.now+1, d.act.WakeNS)
	}
}
