package kvstore

import (
	"fmt"
	"math/bits"
	"slices"
	"testing"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/space"
)

// lossRig is a store with some keys in sealed chunks.
func lossRig(t *testing.T, cfg Config) (d *instant, keys []string) {
	t.Helper()
	cfg.PartitionBytes, cfg.BlockSize, cfg.ChunkBytes = 8<<20, 512, 128<<10
	d = newInstant(t, cfg)
	for i := range 400 {
		key := fmt.Sprintf("the-key-%04d", i)
		keys = append(keys, key)
		d.one(t, Request{Op: Put, Key: []byte(key), Value: make([]byte, 900)}, OK)
	}
	for i := range 200 { // so that the chunks of those are sealed
		d.one(t, Request{Op: Put, Key: fmt.Appendf(nil, "other-%04d", i), Value: make([]byte, 900)}, OK)
	}
	return d, keys
}

// itemOf returns where the item of a key is on the disk, in its segment.
func (d *instant) itemOf(key string) (seg format.Segment, at int) {
	seg = format.Segment(d.disk[d.s.tbl.Get(d.s.tbl.Segment(format.HashKey(d.s.hashSeed, []byte(key)))).Offset():])
	return seg, seg.Find([]byte(key))
}

// lossesOf runs the store for a while, and returns the Damage that it reports, by what it is of.
func (d *instant) lossesOf(ns int64) (values, segments map[uint64]Damage) {
	values, segments = map[uint64]Damage{}, map[uint64]Damage{}
	for end := d.now + ns; d.now < end; {
		d.run()
		for _, x := range d.act.Damage {
			switch {
			case x.LostBytes > 0:
			case x.Hash != 0:
				values[x.First] = x
			default:
				segments[x.First] = x
			}
		}
		d.act.Damage = d.act.Damage[:0]
		next := d.act.WakeNS
		if next <= d.now {
			next = d.now + 1e6
		}
		d.now = next
	}
	return values, segments
}

// positionOf is the position of a key.
func (d *instant) positionOf(key string) uint64 {
	return bits.Reverse64(format.HashKey(d.s.hashSeed, []byte(key)))
}

// TestTheScrubSaysWhichPositionsAreDamaged: those of values, and of segments that have lost keys, also if their records
// are sound, because they were lost before. Nobody reads them.
func TestTheScrubSaysWhichPositionsAreDamaged(t *testing.T) {
	d, keys := lossRig(t, Config{ScrubBytesPerSec: 4 << 20})
	seg, at := d.itemOf(keys[3])
	d.disk[seg.Item(at).ValueOffset()+100] ^= 1
	// The segment of another one is lost, and a Put of one of its keys replaces its record.
	seg, _ = d.itemOf(keys[7])
	number := seg.Number()
	seg[seg.LengthBytes()-1] ^= 1
	d.one(t, Request{Op: Put, Key: []byte(keys[7]), Value: []byte("new")}, OK)
	for i := range 300 {
		d.one(t, Request{Op: Put, Key: fmt.Appendf(nil, "more-%04d", i), Value: make([]byte, 900)}, OK)
	}
	d.act.Damage = d.act.Damage[:0]
	values, segments := d.lossesOf(20e9)
	v, ok := values[d.positionOf(keys[3])]
	if !ok || v.Last != v.First || len(values) != 1 {
		t.Errorf("values: %+v", values)
	}
	x, ok := segments[bits.Reverse64(uint64(number))]
	if at := d.positionOf(keys[7]); !ok || at < x.First || at > x.Last || len(segments) != 1 {
		t.Errorf("segments: %+v", segments)
	}
	if p := d.s.ScrubState(); p.Passes < 2 || p.Last.Damaged < 2 || p.Last.TookNS < 1e8 || p.BytesPerSec != 4<<20 {
		t.Errorf("%+v", p)
	}
}

// TestLossesAreReportedAgainAfterARestart, without a scrub that gets there, and what the drive refuses to read as well.
func TestLossesAreReportedAgainAfterARestart(t *testing.T) {
	for _, off := range []bool{false, true} {
		d, keys := lossRig(t, Config{})
		seg, _ := d.itemOf(keys[7])
		lost := bits.Reverse64(uint64(seg.Number()))
		before := d.s.tbl.Get(seg.Number()).Offset()
		seg[seg.LengthBytes()-1] ^= 1
		d.one(t, Request{Op: Put, Key: []byte(keys[7]), Value: []byte("new")}, OK)
		seg, _ = d.itemOf(keys[8])
		damaged := bits.Reverse64(uint64(seg.Number()))
		seg[seg.LengthBytes()-1] ^= 1
		d.s.Stop()
		for !d.s.Stopped() {
			d.run()
			d.now = max(d.now+1, d.act.WakeNS)
		}
		cfg := d.s.cfg
		cfg.Format, cfg.ScrubBytesPerSec = false, 1<<20
		if off {
			cfg.ScrubBytesPerSec = 0
		}
		cfg.SegTbl = make([]byte, 5<<18)
		var err error
		if d.s, err = New(cfg); err != nil {
			t.Fatal(err)
		}
		for range 1000 {
			d.run()
		}
		if !d.s.Ready() {
			t.Fatal(d.s.Err())
		}
		d.act.Damage = slices.DeleteFunc(d.act.Damage, func(x Damage) bool { return x.Offset == before })
		d.s.LookForLosses()
		d.s.SetScrubRate(0)
		values, segments := d.lossesOf(5e9)
		_, told := segments[lost]
		if len(values) > 0 || told == off || !off && (len(segments) != 2 || segments[lost].Last < lost ||
			segments[damaged].Last < damaged) {
			t.Errorf("off %t: %+v, %+v; want %x and %x", off, values, segments, lost, damaged)
		}
	}
}

// TestAnAuditNamesTheValuesThatAChunkHasLost: nothing says any more where their records were.
func TestAnAuditNamesTheValuesThatAChunkHasLost(t *testing.T) {
	d, keys := lossRig(t, Config{ScrubBytesPerSec: 8 << 20})
	want := map[uint64]bool{}
	for _, key := range keys[20:24] {
		seg, at := d.itemOf(key)
		offset := seg.Item(at).ValueOffset()
		if d.s.pool.Chunks[d.s.pool.Of(offset)].State != space.Sealed {
			t.Fatal("its chunk is not sealed")
		}
		clear(d.disk[offset : offset+900])
		want[d.positionOf(key)] = true
	}
	values, segments := d.lossesOf(20e9)
	for at := range want {
		if _, ok := values[at]; !ok {
			t.Errorf("%x is not reported", at)
		}
	}
	if len(values) != len(want) || len(segments) > 0 {
		t.Errorf("%d values, %+v", len(values), segments)
	}
}

// TestTheScrubPauses where it is, and goes on.
func TestTheScrubPauses(t *testing.T) {
	d, _ := lossRig(t, Config{ScrubBytesPerSec: 1 << 20})
	read := func() int64 { return d.s.Stats().Scrubbed }
	d.lossesOf(1e9)
	d.s.SetScrubRate(0)
	d.lossesOf(1e8)
	before := read()
	if before == 0 {
		t.Fatal("nothing was read")
	}
	if d.lossesOf(3e9); read() != before || d.s.ScrubState().BytesPerSec != 0 {
		t.Errorf("%d bytes were read meanwhile", read()-before)
	}
	for i := range d.s.pool.Chunks {
		if c := d.s.pool.Chunks[i]; c.State == space.Sealed && c.Pins > 0 {
			t.Errorf("chunk %d is pinned", i)
		}
	}
	d.s.SetScrubRate(4 << 20)
	if d.lossesOf(1e9); read()-before < 2<<20 || read()-before > 5<<20 {
		t.Errorf("%d bytes were read in a second", read()-before)
	}
}
