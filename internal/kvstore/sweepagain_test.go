package kvstore

import (
	"errors"
	"math"
	"math/bits"
	"testing"

	"jbofd/internal/kvstore/lookup"
	"jbofd/internal/pipeline"
	"jbofd/internal/units"
)

// spanOf is the first and the last position of a segment.
func (s *Store) spanOf(number uint32) (first, last uint64) {
	first = bits.Reverse64(uint64(number))
	return first, first | (uint64(1)<<(64-s.tbl.Bits(number)) - 1)
}

// unswept returns the segments that have records and lie between two positions, and the first and the last position of
// all of them.
func (s *Store) unswept(from, to uint64) (numbers []uint32, first, last uint64) {
	first = math.MaxUint64
	for n := range s.tbl.Len() {
		f, l := s.spanOf(n)
		if s.tbl.Get(n) != 0 && l >= from && f <= to {
			numbers = append(numbers, n)
			first, last = min(first, f), max(last, l)
		}
	}
	return numbers, first, last
}

// TestASweepIsRepeatedWhereItHasFailed: some segments of a range that is dropped cannot be read. What is swept again a
// minute later is the part from the first of them to the last, and no more; of these some can be read then, and the
// next time all. The Drop stays on the list until nothing is left of what it covers.
func TestASweepIsRepeatedWhereItHasFailed(t *testing.T) {
	for seed := range Seeds(t, 12) {
		r := newRanged(t, seed, rangedConfigs[0])
		for range 1500 {
			r.change(3000, 300)
		}
		r.checkpoint()
		r.s.merge.retryNS = math.MaxInt64 // the segments keep their numbers
		if r.s.tbl.Len() < 4*lookup.FirstSegments {
			t.Fatalf("there are only %d segments", r.s.tbl.Len())
		}
		// Each of these parts has whole segments.
		const part = math.MaxUint64/lookup.FirstSegments + 1
		from := r.rng.Uint64N(lookup.FirstSegments)
		to := from + r.rng.Uint64N(lookup.FirstSegments-from)
		if seed%3 == 0 {
			from, to = 0, lookup.FirstSegments-1
		}
		first, last := from*part, to*part+(part-1)
		var bad []units.ExtentOffset
		all, _, _ := r.s.unswept(first, last)
		for range 1 + r.rng.IntN(4) {
			bad = append(bad, r.s.tbl.Get(all[r.rng.IntN(len(all))]).Offset())
		}
		r.fail = func(q *IO) error {
			for _, at := range bad {
				if q.Op == pipeline.Read && q.Offset <= at && at < q.Offset+units.ExtentOffset(len(q.Buf)) {
					return errors.New("unreadable")
				}
			}
			return nil
		}
		r.drop(first, last, 0)
		r.run()
		for len(bad) > 0 {
			left, f, l := r.s.unswept(first, last)
			if len(left) == 0 || len(r.s.drops.later) != 1 || len(r.s.drops.swept) != 0 {
				t.Fatalf("%d segments are left, %d sweeps are to be repeated, %d have ended", len(left),
					len(r.s.drops.later), len(r.s.drops.swept))
			}
			if p := r.s.drops.later[0]; p.first != f || p.last != l {
				t.Fatalf("of %#x to %#x, %#x to %#x is to be swept again, want %#x to %#x", first, last, p.first,
					p.last, f, l)
			}
			r.checkpoint()
			if n := r.s.DropsLeft(); n != 1 {
				t.Fatalf("%d Drops are on the list, of which %d segments are left", n, len(left))
			}
			reads := r.reads
			r.now += sweepAgainNS / 2
			if r.run(); r.reads != reads {
				t.Fatal("it is swept again before its time")
			}
			bad = bad[:r.rng.IntN(len(bad))]
			r.now += sweepAgainNS / 2
			r.run()
		}
		if n, later := len(r.s.drops.swept), len(r.s.drops.later); n != 1 || later != 0 {
			t.Errorf("%d sweeps have ended, %d are to be repeated", n, later)
		}
		r.checkpoint()
		if n := r.s.DropsLeft(); n != 0 {
			t.Errorf("%d Drops are left", n)
		}
		if left, _, _ := r.s.unswept(first, last); len(left) > 0 {
			t.Errorf("%d segments were not swept", len(left))
		}
		if err := r.s.Recount(r.disk, true); err != nil {
			t.Error(err)
		}
		r.check(0, math.MaxUint64)
	}
}
