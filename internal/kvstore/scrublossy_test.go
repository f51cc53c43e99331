package kvstore

import (
	"math/bits"
	"testing"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/space"
)

// newScrubbedRig is a lossyRig with a scrub. A key of the segment was stored since the loss, and what was lost has left
// the chunks. The record of the segment is in a sealed chunk.
func newScrubbedRig(t *testing.T) *lossyRig {
	d := newLossyRig(t, 1000)
	d.one(t, Request{Op: Put, Key: d.keys[0], Value: make([]byte, 100)}, OK)
	d.seal(t)
	d.s.SetScrubRate(64 << 20)
	d.pass()
	d.seal(t)
	for d.s.scrub.next != 0 {
		d.run()
		d.now = max(d.now+1, d.act.WakeNS)
	}
	d.act.Damage = d.act.Damage[:0]
	return d
}

// seal stores keys of other segments until the record of the segment is in a sealed chunk.
func (d *lossyRig) seal(t *testing.T) {
	for i := 0; d.s.pool.Chunks[d.s.pool.Of(d.s.tbl.Get(d.segment).Offset())].State != space.Sealed; i++ {
		if key := numberedKey(i % 1000); d.s.tbl.Segment(format.HashKey(d.s.hashSeed, key)) != d.segment {
			d.one(t, Request{Op: Put, Key: key, Value: make([]byte, 100)}, OK)
		}
	}
}

// pass lets the scrub end its present pass, and returns what it has found.
func (d *lossyRig) pass() (ScrubPass, []Damage) {
	var found []Damage
	for passes := d.s.ScrubState().Passes; d.s.ScrubState().Passes == passes; d.now = max(d.now+1, d.act.WakeNS) {
		d.run()
		found = append(found, d.act.Damage...)
		d.act.Damage = d.act.Damage[:0]
	}
	return d.s.ScrubState().Last, found
}

// TestTheScrubReportsSegmentsThatHaveLostKeys, also if their records are sound, with all their positions: whoever has
// others to copy from hears of them after a restart.
func TestTheScrubReportsSegmentsThatHaveLostKeys(t *testing.T) {
	d := newScrubbedRig(t)
	got, found := d.pass()
	for _, key := range d.keys { // a split may have made two segments of it
		at, reported := bits.Reverse64(format.HashKey(d.s.hashSeed, key)), 0
		for _, x := range found {
			if at >= x.First && at <= x.Last && x.Hash == 0 {
				reported++
			}
		}
		if reported != 1 {
			t.Errorf("position %x is reported %d times, in %+v", at, reported, found)
		}
	}
	if len(found) == 0 || len(found) > 2 || got.Damaged != int64(len(found)) {
		t.Errorf("%+v, and %+v were reported", got, found)
	}
}

// TestAPassOfTheScrubCountsWhatItCannotReadItself: what the one before could not may be read.
func TestAPassOfTheScrubCountsWhatItCannotReadItself(t *testing.T) {
	d := newScrubbedRig(t)
	at := d.s.tbl.Get(d.segment).Offset()
	d.unreadable(at, at+1)
	if got, _ := d.pass(); got.Unreadable == 0 {
		t.Errorf("%+v, and a block cannot be read", got)
	}
	d.fail = nil
	d.pass()
	if got, _ := d.pass(); got.Unreadable != 0 {
		t.Errorf("%+v, and all can be read", got)
	}
}

// TestAPassOfTheScrubTakesNoTimeWhileItPauses, neither before the first one nor in the middle.
func TestAPassOfTheScrubTakesNoTimeWhileItPauses(t *testing.T) {
	d := newLossyRig(t, 1000)
	d.now += 3600e9
	d.run()
	if took := d.s.ScrubState().Present.TookNS; took != 0 {
		t.Errorf("the first pass has taken %d ns before it began", took)
	}
	d.s.SetScrubRate(1 << 20)
	for range 3 {
		d.run()
		d.now = max(d.now+1, d.act.WakeNS)
	}
	d.run()
	before := d.s.ScrubState().Present.TookNS
	d.s.SetScrubRate(0)
	d.now += 3600e9
	d.run()
	during := d.s.ScrubState().Present.TookNS
	d.s.SetScrubRate(1 << 20)
	d.run()
	after := d.s.ScrubState().Present.TookNS
	if before <= 0 || during != before || after < before || after > before+1e9 {
		t.Errorf("the pass has taken %d ns before a pause of an hour, %d in it and %d later", before, during, after)
	}
}
