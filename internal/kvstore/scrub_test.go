package kvstore

import (
	"encoding/binary"
	"math"
	"slices"
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

// adjacentRig is a store with sealed chunks, and values of it that lie one right behind the other, as many as n, with a
// sound one before and behind them. Audits do not begin.
func adjacentRig(t *testing.T, n int) (d *instant, adjacent []liveValue) {
	t.Helper()
	d = newInstant(t, Config{PartitionBytes: 8 << 20, BlockSize: 512, ChunkBytes: 128 << 10})
	d.put(0, 1500, func(i int) uint64 { return uint64(i) }, make([]byte, 900), 64)
	all := d.liveValues()
	for i := len(all) / 3; ; i++ {
		together := all[i : i+n+2]
		for k, v := range together[1:] {
			if before := together[k]; before.offset+units.ExtentOffset(before.bytes) != v.offset {
				together = nil
				break
			}
		}
		if together != nil {
			d.act.Damage = d.act.Damage[:0]
			d.s.audit.dueNS = math.MaxInt64
			return d, together[1 : n+1]
		}
	}
}

// TestTheScrubFindsDamagedValuesSideBySide: each is reported in one pass, without an audit, wherever its content is
// damaged.
func TestTheScrubFindsDamagedValuesSideBySide(t *testing.T) {
	for _, n := range []int{2, 3, 7} {
		d, values := adjacentRig(t, n)
		for i, v := range values {
			d.disk[v.offset+format.ValueHeaderBytes+units.ExtentOffset(i*100)] ^= 4
		}
		d.s.SetScrubRate(8 << 20)
		d.run()
		got := map[units.ExtentOffset]bool{}

		d.wait(t, "the end of a pass", func() bool { return d.s.ScrubState().Passes == 1 })
		for _, x := range d.act.Damage {
			got[x.Offset] = x.LostBytes == 0 || got[x.Offset]
		}
		for i, v := range values {
			if !got[v.offset] {
				t.Errorf("of %d damaged values, number %d at %d is not reported", n, i, v.offset)
			}
		}
	}
}

// TestTheScrubFindsADamagedValueBehindADamagedHeader: its own header says which key it is of. It is reported before an
// audit finds the other one.
func TestTheScrubFindsADamagedValueBehindADamagedHeader(t *testing.T) {
	for _, harm := range []func(rec []byte){
		func(rec []byte) { rec[4] ^= 1 }, // the magic
		func(rec []byte) { rec[6] ^= 1 }, // a longer length
		func(rec []byte) { clear(rec) },
	} {
		d, values := adjacentRig(t, 2)
		harm(d.disk[values[0].offset:][:values[0].bytes])
		d.disk[values[1].offset+200] ^= 4
		d.s.SetScrubRate(8 << 20)
		d.run()
		d.wait(t, "the end of a pass", func() bool { return d.s.ScrubState().Passes == 1 })
		found := slices.ContainsFunc(d.act.Damage, func(x Damage) bool {
			return x.Offset == values[1].offset && x.Hash == format.HashKey(d.s.hashSeed, values[1].key)
		})
		if !found {
			t.Errorf("the value is not reported: %+v", d.act.Damage)
		}
		for _, x := range d.act.Damage {
			if x.LostBytes == 0 && x.Offset != values[0].offset && x.Offset != values[1].offset {
				t.Errorf("%+v is reported, and is sound", x)
			}
		}
	}
}

// TestAnAuditFindsDamagedValuesBehindADamagedHeader: the scrub does not know of which key the first one is. It leaves
// the chunk as damaged until the audit has ended, however often it comes by, and reads the chunk again afterwards.
func TestAnAuditFindsDamagedValuesBehindADamagedHeader(t *testing.T) {
	for _, harm := range []struct {
		name string
		do   func(rec []byte)
	}{
		{"the magic", func(rec []byte) { rec[4] ^= 1 }},
		{"a longer length", func(rec []byte) { rec[6] ^= 1 }},
		{"the hash", func(rec []byte) { rec[9] ^= 1 }},
		{"all of it", func(rec []byte) { clear(rec) }},
	} {
		t.Run(harm.name, func(t *testing.T) {
			d, values := adjacentRig(t, 2)
			s, chunk := d.s, d.s.pool.Of(values[0].offset)
			was := slices.Clone(d.disk[values[0].offset:][:values[0].bytes+values[1].bytes])
			harm.do(d.disk[values[0].offset:][:values[0].bytes])
			d.disk[values[1].offset+200] ^= 4
			s.SetScrubRate(64 << 20)
			d.run()
			damaged := func() bool { return s.pool.Chunks[chunk].State == space.Damaged }
			d.wait(t, "what the scrub finds", damaged)
			s.beginAudit(false, false)
			s.audit.dueNS = d.now + 1e9 // a slow one
			d.act.Damage = d.act.Damage[:0]
			passes := s.ScrubState().Passes
			d.wait(t, "a further pass", func() bool {
				if !damaged() {
					t.Fatalf("the chunk is %+v during the audit", s.pool.Chunks[chunk])
				}
				return s.ScrubState().Passes > passes+3
			})
			d.wait(t, "the end of the audit", func() bool { return !s.audit.Running })
			got := map[string]int{}
			for _, x := range d.act.Damage {
				for _, v := range values {
					if x.Offset == v.offset && x.Hash == format.HashKey(s.hashSeed, v.key) {
						got[string(v.key)]++
					}
				}
			}
			if len(got) != 2 {
				t.Errorf("%d of 2 values are reported: %+v", len(got), d.act.Damage)
			}
			copy(d.disk[values[0].offset:], was) // the drive reads it again
			d.wait(t, "the end of the damage", func() bool { return s.pool.Chunks[chunk].Live == 0 || !damaged() })
			d.wait(t, "the emptied chunk", func() bool { return s.pool.Damaged == 0 && s.compact.suspect == none })
			for _, v := range values {
				d.one(t, Request{Op: Get, Key: v.key, Value: make([]byte, 900)}, OK)
			}
		})
	}
}

// TestARestingScrubKeepsNoChunk: between two pieces, which may be hours, the chunk that the scrub reads is released
// when nothing in it is live, or emptied and used again. The scrub goes on with another one.
func TestARestingScrubKeepsNoChunk(t *testing.T) {
	for _, how := range []string{"deleted", "emptied", "emptied and used again"} {
		t.Run(how, func(t *testing.T) {
			d := newInstant(t, Config{PartitionBytes: 16 << 20, BlockSize: 512, ChunkBytes: 256 << 10})
			val := make([]byte, 1000)
			d.put(0, 4000, func(i int) uint64 { return uint64(i) }, val, 64)
			s, all := d.s, d.liveValues()
			chunk := s.pool.Of(all[len(all)/2].offset)
			s.scrub.next = chunk
			s.SetScrubRate(16) // a piece in hours
			d.run()
			sl := &s.compact.slots[len(s.compact.slots)-1]
			if !sl.scrub || sl.Chunk != chunk || sl.Ended() || s.scrub.dueNS < d.now+3600e9 {
				t.Fatalf("the scrub does not rest in chunk %d: %+v", chunk, s.scrub)
			}
			epoch := s.pool.Chunks[chunk].Epoch
			if how == "deleted" {
				for _, v := range all {
					if s.pool.Of(v.offset) == chunk {
						d.one(t, Request{Op: Delete, Key: v.key}, OK)
					}
				}
			} else {
				s.compact.suspect = chunk
				d.run()
			}
			if st := s.pool.Chunks[chunk].State; st == space.Sealed || st == space.Victim {
				t.Fatalf("the chunk is in state %d", st)
			}
			for n := 0; how == "emptied and used again" && s.pool.Chunks[chunk].Epoch == epoch; n++ {
				if d.put(0, 4000, func(i int) uint64 { return uint64(i) }, val, 64); n > 20 {
					t.Fatal("the chunk is not used again")
				}
			}
			d.act.Damage = d.act.Damage[:0]
			s.SetScrubRate(64 << 20)
			d.wait(t, "a further pass", func() bool { return s.ScrubState().Passes > 1 })
			if len(d.act.Damage) > 0 || s.pool.Damaged > 0 {
				t.Errorf("something is damaged: %+v", d.act.Damage)
			}
			for i := range s.pool.Chunks {
				if c := &s.pool.Chunks[i]; c.Pins > 1 || c.Pins > 0 && !s.scrub.pinned {
					t.Errorf("chunk %d stays pinned: %+v", i, c)
				}
			}
			if err := s.Recount(d.disk, true); err != nil {
				t.Error(err)
			}
		})
	}
}
