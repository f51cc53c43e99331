package kvstore

import (
	"math"
	"math/bits"
	"slices"
	"testing"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/nvme"
)

// hurt flips a bit of the segments of some keys, or of their values, and returns the keys that are lost.
func (r *ranged) hurt(n int, value bool) map[string]bool {
	lost := map[string]bool{}
	all := r.expected(0, math.MaxUint64)
	for len(all) > 0 && n > 0 {
		o := all[r.rng.IntN(len(all))]
		if lost[string(o.key)] || value && len(o.value) == 0 {
			n-- // there may be few
			continue
		}
		at, _ := r.s.Place(o.key)
		seg := format.Segment(r.disk[at:])
		switch {
		case value:
			item := seg.Item(seg.Find(o.key))
			r.disk[int64(item.ValueOffset())+20] ^= 1
			lost[string(o.key)] = true
		default:
			r.disk[at+30] ^= 1
			for _, p := range all {
				if r.s.SegmentOf(p.key) == r.s.SegmentOf(o.key) {
					lost[string(p.key)] = true
				}
			}
		}
		n--
	}
	return lost
}

// parts returns whether positions are all of one of the segments that keys have now.
func (r *ranged) parts(keys map[string]bool) func(first, last uint64) bool {
	var all [][2]uint64
	for key := range keys {
		number := r.s.SegmentOf([]byte(key))
		first := bits.Reverse64(uint64(number))
		all = append(all, [2]uint64{first, first + (math.MaxUint64 >> r.s.tbl.Bits(number))})
	}
	return func(first, last uint64) bool {
		return slices.ContainsFunc(all, func(p [2]uint64) bool { return first >= p[0] && last <= p[1] })
	}
}

// TestALossIsNeverPassedForComplete: results say where something is lost, and have everything else.
func TestALossIsNeverPassedForComplete(t *testing.T) {
	for seed := range Seeds(t, 3) {
		r := newRanged(t, seed, rangedConfigs[seed%2])
		for range 1500 {
			r.change(800, 600)
		}
		segments := r.hurt(5, false)
		inDamaged := r.parts(segments)
		values := map[string]bool{}
		if seed%3 > 0 {
			values = r.hurt(3, true)
		}
		if seed%3 == 2 {
			// Some of what is lost is known again, in lossy segments.
			for key := range segments {
				if o := r.has[key]; r.rng.IntN(3) == 0 {
					o.value, o.tombstone, o.expires = []byte("again"), false, 0
					p := r.do(Request{Op: Put, Key: o.key, Value: o.value})
					if p.Status != OK {
						t.Fatalf("%+v", p)
					}
					o.version = p.Version
					r.has[key] = o
				}
			}
		}
		all := r.expected(0, math.MaxUint64)
		for _, op := range []Op{Scan, CopyOut, Count, Digest} {
			got, count := map[string]uint64{}, uint64(0)
			lostKeys, lostParts := map[string]bool{}, 0
			var found uint64
			r.walk(op, 0, math.MaxUint64, 2000, func(b nvme.KVRange, st Status) {
				if b.Lost() != (st == Corrupt) || st != Corrupt && st != OK {
					t.Fatalf("op %d: status %d, flags %d", op, st, b.Flags())
				}
				from, to := b.From(), b.To()
				hits := 0
				for _, o := range all {
					c := nvme.KVCursorAt(r.position(o.key), o.key)
					if !b.Lost() || c.Compare(&from) <= 0 || c.Compare(&to) > 0 {
						continue
					}
					lostKeys[string(o.key)] = true
					if segments[string(o.key)] || op == CopyOut && values[string(o.key)] {
						hits++
					}
				}
				// A split makes two lossy segments of one that has been written again. One may have had no key.
				if b.Lost() && hits == 0 && !inDamaged(from.Position, to.Position-1) {
					t.Fatalf("op %d: nothing is lost from %v to %v", op, from, to)
				}
				if b.Lost() {
					lostParts++
				}
				switch op {
				case Count:
					found += b.Totals().Objects() + b.Totals().Tombstones()
				case Digest:
					for i := range b.Items() {
						found += b.Sum(i).Count()
					}
				default:
					for e := range b.Entries() {
						got[string(e.Key())] = e.Version()
					}
				}
			})
			for _, o := range all {
				key := string(o.key)
				hurt := segments[key] || op == CopyOut && values[key]
				if lostKeys[key] && !hurt {
					t.Fatalf("op %d: %q is sound, and is said to be lost", op, key)
				}
				if !lostKeys[key] {
					count++
				}
				if (op == Scan || op == CopyOut) && !lostKeys[key] && got[key] != o.version {
					t.Fatalf("op %d: %q has version %d, want %d", op, key, got[key], o.version)
				}
			}
			if (op == Count || op == Digest) && found != count {
				t.Errorf("op %d: %d objects and tombstones, want %d", op, found, count)
			}
			if lostParts == 0 {
				t.Errorf("op %d: nothing is lost", op)
			}
		}
	}
}
