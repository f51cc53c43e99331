package kvstore

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/pipeline"
)

// drop drops a range in a store and in its model. The clock is 0 or one that the Drop names.
func (r *ranged) drop(first, last, clock uint64) {
	r.tb.Helper()
	p := r.do(Request{Op: Drop, Range: Range{First: first, Last: last}, Version: clock})
	if p.Status != OK || clock != 0 && p.Version != clock {
		r.tb.Fatalf("a Drop: %+v", p)
	}
	for key, o := range r.has {
		if at := r.position(o.key); at >= first && at <= last && o.version <= p.Version {
			delete(r.has, key)
		}
	}
}

// checkpoint writes one.
func (r *ranged) checkpoint() {
	r.s.Checkpoint()
	r.run()
}

// TestDropsAgainstAModel: overlapping Drops, some with older clocks, with writes before and after them.
func TestDropsAgainstAModel(t *testing.T) {
	for seed := range Seeds(t, 3) {
		r := newRanged(t, seed, rangedConfigs[seed%2])
		for round := range 8 {
			for range 300 {
				r.change(600, 1000)
			}
			for range 1 + r.rng.IntN(4) {
				first, last := r.anyRange()
				clock := uint64(0)
				if r.rng.IntN(3) == 0 {
					clock = 1 + r.rng.Uint64N(r.s.clock)
				}
				r.drop(first, last, clock)
				r.check(r.anyRange())
			}
			if round%3 == 2 {
				r.checkpoint()
				r.run()
			}
		}
		r.check(0, math.MaxUint64)
		r.checkpoint()
		if len(r.s.drops.list) > 0 {
			t.Errorf("%d Drops are left after a checkpoint, %d of them swept", len(r.s.drops.list),
				len(r.s.drops.swept))
		}
		r.check(0, math.MaxUint64)
		if err := r.s.Recount(r.disk, true); err != nil {
			t.Error(err)
		}
		r.drop(0, math.MaxUint64, 0)
		if st := r.s.Stats(); st.Objects != 0 || st.LiveBytes != 0 {
			t.Errorf("everything was dropped, and there are %d objects and %d bytes", st.Objects, st.LiveBytes)
		}
		r.change(1, 100)
		r.check(0, math.MaxUint64)
	}
}

// TestADropLeavesNoRecordThatASplitHasEmptied: the record of a segment whose keys have all gone to new segments has
// nothing to leave out, and goes nevertheless.
func TestADropLeavesNoRecordThatASplitHasEmptied(t *testing.T) {
	r := newRanged(t, FixedSeed(t), rangedConfigs[0])
	emptied := func() bool {
		for n := range r.s.tbl.Len() {
			if e := r.s.tbl.Get(n); e != 0 {
				seg := format.Segment(r.disk[e.Offset():])
				seg = slices.Clone(seg[:seg.LengthBytes()])
				seg.Filter(func(key []byte) bool { return r.s.SegmentOf(key) == n })
				if seg.Vacant() {
					return true
				}
			}
		}
		return false
	}
	for n := 0; !emptied(); n++ {
		if n == 100_000 {
			t.Fatal("no split takes all keys of a segment")
		}
		r.do(Request{Op: Put, Key: fmt.Appendf(nil, "%d", n)})
	}
	r.drop(0, math.MaxUint64, 0)
	if st := r.s.Stats(); st.Objects != 0 || st.LiveBytes != 0 {
		t.Errorf("everything was dropped, and there are %d objects and %d bytes", st.Objects, st.LiveBytes)
	}
	if err := r.s.Recount(r.disk, true); err != nil {
		t.Error(err)
	}
}

// TestADropMakesRoomInAFullPartition: more than once.
func TestADropMakesRoomInAFullPartition(t *testing.T) {
	r := newRanged(t, FixedSeed(t), rangedConfigs[0])
	val := make([]byte, 5000)
	var most int
	for round := range 3 {
		n := 0
		for ; n < 5000; n++ {
			if p := r.do(Request{Op: Put, Key: fmt.Appendf(nil, "%d.%d", round, n), Value: val}); p.Status != OK {
				break
			}
		}
		if most = max(most, n); n < most*9/10 || n == 5000 {
			t.Errorf("round %d: %d values fit, %d before", round, n, most)
		}
		r.do(Request{Op: Drop, Range: Range{Last: math.MaxUint64}})
		r.run()
	}
}

// TestAListOfDropsHasAnEnd: while nothing can be swept 64 fit, and the others are refused, and do nothing. Drops that
// have the range of others replace them.
func TestAListOfDropsHasAnEnd(t *testing.T) {
	r := newRanged(t, FixedSeed(t), rangedConfigs[0])
	for range 300 {
		r.change(600, 100)
	}
	unreadable := func(q *IO) error {
		if q.Op == pipeline.Read {
			return errors.New("unreadable")
		}
		return nil
	}
	r.fail = unreadable
	for i := range uint64(format.MaxDrops) {
		r.drop(2*i<<50, 2*i<<50+1<<50, 0)
	}
	r.fail = nil
	if n := len(r.s.drops.list); n != format.MaxDrops {
		t.Fatalf("%d Drops are on the list", n)
	}
	if p := r.do(Request{Op: Drop, Range: Range{First: 1 << 63, Last: 1<<63 + 1}}); p.Status != NoMemory {
		t.Errorf("status %d, want NoMemory", p.Status)
	}
	r.check(0, math.MaxUint64)
	r.fail = unreadable
	r.drop(0, 1<<60, 0)
	r.fail = nil
	if n := len(r.s.drops.list); n != 1 {
		t.Errorf("%d Drops are on the list, want the one that has the others' ranges", n)
	}
	r.check(0, math.MaxUint64)
	p := r.do(Request{Op: Put, Condition: IfNewer, Version: 1, Key: r.keyIn(0, 1<<60)})
	if p.Status != Superseded {
		t.Errorf("a Put IfNewer with a version that was dropped: status %d", p.Status)
	}
	r.now += sweepAgainNS
	r.run()
	r.checkpoint()
	if n := len(r.s.drops.list); n != 0 {
		t.Errorf("%d Drops are left", n)
	}
}

// TestADamagedSegmentKeepsItsDropOnly: Drops elsewhere are swept and leave the list, and of the one that covers the
// damage what is sound is swept once. What is left of it is swept when the segment was repaired, and the list is empty
// when the store has rested for a while.
func TestADamagedSegmentKeepsItsDropOnly(t *testing.T) {
	r := newRanged(t, FixedSeed(t), rangedConfigs[0])
	val := make([]byte, 500)
	const n, end = 2000, 1<<61 - 1
	hurt := []byte(nil)
	for i := range n {
		key := fmt.Appendf(nil, "%d", i)
		if r.do(Request{Op: Put, Key: key, Value: val}); r.position(key) <= end {
			hurt = key
		}
	}
	r.checkpoint()
	r.disk[int64(r.s.tbl.Get(r.s.SegmentOf(hurt)).Offset())+40] ^= 0xff
	r.drop(0, end, 0)
	r.drop(end+1, math.MaxUint64, 0)
	r.run()
	if st := r.s.Stats(); st.Objects > 4*13 {
		t.Errorf("%d of %d objects are left, want those of the damaged segment", st.Objects, n)
	}
	reads := r.reads
	r.now += sweepAgainNS
	if r.run(); r.reads == reads || r.reads > reads+8 {
		t.Errorf("the next sweep takes %d reads", r.reads-reads)
	}
	for i := range uint64(format.MaxDrops + 10) {
		first := uint64(1)<<62 + i<<40
		r.drop(first, first+1<<39, 0)
	}
	r.checkpoint()
	if n := len(r.s.drops.list); n != 1 {
		t.Errorf("%d Drops are on the list, want one", n)
	}
	r.s.Audit(true)
	for range 3 {
		r.now += sweepAgainNS
		r.run()
	}
	if n := len(r.s.drops.list); n != 0 {
		t.Errorf("%d Drops are left when the segment was repaired", n)
	}
	if err := r.s.Recount(r.disk, true); err != nil {
		t.Error(err)
	}
}

// TestADropOfNothingLeavesTheList: of a store that nobody writes to as well.
func TestADropOfNothingLeavesTheList(t *testing.T) {
	r := newRanged(t, FixedSeed(t), rangedConfigs[0])
	r.do(Request{Op: Put, Key: []byte("key")})
	r.checkpoint()
	at := r.position([]byte("key"))
	r.drop(at+1, at+1, 0)
	if n := len(r.s.drops.list); n != 1 {
		t.Fatalf("%d Drops are on the list", n)
	}
	checkpoints := r.s.Stats().Checkpoints
	for range 10 {
		r.now += 60e9
		r.run()
	}
	if n, more := len(r.s.drops.list), r.s.Stats().Checkpoints-checkpoints; n != 0 || more != 1 {
		t.Errorf("%d Drops are left after %d checkpoints", n, more)
	}
}

// keyIn returns a key in a range of positions that the store does not have.
func (r *ranged) keyIn(first, last uint64) []byte {
	for i := 0; ; i++ {
		key := fmt.Appendf(nil, "new %d", i)
		if p := r.position(key); p >= first && p <= last {
			return key
		}
	}
}
