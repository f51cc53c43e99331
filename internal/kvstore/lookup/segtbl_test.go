package lookup

import (
	"maps"
	"math/bits"
	"math/rand/v2"
	"slices"
	"testing"

	"jbofd/internal/units"
)

// TestATableThatShrinksIsOneThatNeverGrew: a table grows, changes and shrinks at random. It has the entries, the empty
// segments and the marks of a table of the same length that was never longer, and each hash belongs to the segment that
// the last one's were split from.
func TestATableThatShrinksIsOneThatNeverGrew(t *testing.T) {
	t.Logf("-seed %d", *seed)
	rng := rand.New(rand.NewPCG(*seed, 2))
	for range 40 {
		most := 32 + rng.IntN(3000)
		mem := slices.Repeat([]byte{7}, int(TableBytes(int64(most))))
		tbl := NewSegTbl(mem)
		tbl.Grow(16)
		entries, marks := map[uint32]Entry{}, map[uint32]bool{}
		for i := range uint32(16) {
			marks[i/UnitSegments] = true
		}
		for range 300 {
			n := tbl.Len()
			switch rng.IntN(4) {
			case 0:
				to := n + uint32(rng.IntN(min(40, most-int(n))+1))
				for i := n; i < to; i++ {
					marks[i/UnitSegments] = true
				}
				tbl.Grow(to)
			case 1:
				hash := rng.Uint64()
				if n > 16 && tbl.Segment(hash) == n-1 {
					into, decided := Buddy(n - 1)
					tbl.Shrink(n - 1)
					delete(entries, n-1)
					if got := tbl.Segment(hash); got != into || tbl.Bits(into) != decided {
						t.Fatalf("of %d segments, %d belongs to %d by %d bits, want %d by %d", n, hash, got,
							tbl.Bits(into), into, decided)
					}
					break
				}
				tbl.Shrink(n - rng.Uint32N(min(40, n-15)))
			case 2:
				i := rng.Uint32N(n)
				entries[i] = NewEntry(units.ExtentOffset(32+32*rng.IntN(1000)), 100)
				marks[i/UnitSegments] = true
				tbl.Set(i, entries[i])
			case 3:
				unit, i, _, _ := tbl.TakeChanged(uint32(rng.IntN(int(n))/UnitSegments), n)
				if unit != nil && (i+1)*UnitSegments <= n {
					delete(marks, i)
				}
			}
			n = tbl.Len()
			maps.DeleteFunc(entries, func(i uint32, _ Entry) bool { return i >= n })
			maps.DeleteFunc(marks, func(i uint32, _ bool) bool { return i*UnitSegments >= n })
		}
		if tbl.Changed() != len(marks) {
			t.Errorf("%d units have changed, want %d", tbl.Changed(), len(marks))
		}
		used := uint32(0)
		for _, n := range tbl.used {
			used += n
		}
		if int(used) != len(entries) {
			t.Errorf("%d segments count as not empty, want %d", used, len(entries))
		}
		for i := range tbl.Len() {
			if tbl.Get(i) != entries[i] {
				t.Fatalf("segment %d of %d is %x, want %x", i, tbl.Len(), tbl.Get(i), entries[i])
			}
			if hash := uint64(i) | rng.Uint64()<<bits.Len32(tbl.mask); tbl.Segment(hash) != i {
				t.Fatalf("%x belongs to segment %d of %d, want %d", hash, tbl.Segment(hash), tbl.Len(), i)
			}
		}
	}
}

// TestATableEndsWhereNumbersDo: memory for more segments than numbers of 32 bits can have makes no longer table.
func TestATableEndsWhereNumbersDo(t *testing.T) {
	if n := Capacity(1 << 40); n != 1<<31 {
		t.Errorf("room for %d segments, want %d", n, int64(1)<<31)
	}
}

// TestOccupiedCountsSegments that are not empty, through all that changes a table.
func TestOccupiedCountsSegments(t *testing.T) {
	rng := rand.New(rand.NewPCG(rand.Uint64(), 0))
	tbl := NewSegTbl(make([]byte, 4096*EntryBytes))
	tbl.Grow(FirstSegments)
	for range 2000 {
		switch n := tbl.Len(); rng.IntN(8) {
		case 0:
			tbl.Grow(n + uint32(rng.IntN(1+min(32, tbl.Room()))))
		case 1:
			tbl.Shrink(max(1, n-uint32(rng.IntN(8))%n))
		default:
			tbl.Set(rng.Uint32N(n), Entry(rng.IntN(3))<<3)
		}
	}
	tbl.Set(0, 8)
	count := func(tbl *SegTbl) (n int) {
		for i := range tbl.Len() {
			if tbl.Get(i) != 0 {
				n++
			}
		}
		return n
	}
	if got, want := tbl.Occupied(), count(&tbl); got != want {
		t.Errorf("%d segments are not empty, want %d", got, want)
	}
	loaded := NewSegTbl(make([]byte, 4096*EntryBytes))
	loaded.Extend(tbl.Len())
	loaded.Load(0, tbl.Bytes())
	if got, want := loaded.Occupied(), count(&tbl); got != want {
		t.Errorf("after a load %d segments are not empty, want %d", got, want)
	}
}
