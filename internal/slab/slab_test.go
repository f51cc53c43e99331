package slab

import (
	"testing"

	"pgregory.net/rapid"
)

// TestTablesHoldWhatIsPutIntoThem: two tables of a pool, whatever is done, beside maps.
func TestTablesHoldWhatIsPutIntoThem(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		records := 1 << rapid.IntRange(0, 6).Draw(t, "log of the records of a chunk")
		p := NewPool[int](records)
		var tables [2]Table[int]
		want := [2]map[int32]int{{}, {}}
		for i := range tables {
			tables[i].Init(p, 100)
		}
		value := 0
		for range rapid.IntRange(0, 300).Draw(t, "steps") {
			n := rapid.IntRange(0, 1).Draw(t, "table")
			x, w := &tables[n], want[n]
			switch rapid.IntRange(0, 6).Draw(t, "what") {
			case 0, 1, 2:
				if x.Room() == 0 {
					continue
				}
				i := x.Take()
				if _, taken := w[i]; taken || *x.At(i) != 0 {
					t.Fatalf("record %d was taken %v, and is %d", i, taken, *x.At(i))
				}
				for j := range i {
					if _, taken := w[j]; !taken {
						t.Fatalf("record %d was taken, and %d is free", i, j)
					}
				}
				value++
				*x.At(i), w[i] = value, value
			case 3, 4, 5:
				i := rapid.Int32Range(0, 99).Draw(t, "record")
				if x.Has(i) {
					x.Put(i)
					delete(w, i)
				} else if x.Room() > 0 && rapid.Bool().Draw(t, "take it") {
					value++
					*x.TakeAt(i), w[i] = value, value
				}
			default:
				p.Trim()
			}
			for n := range tables {
				x := &tables[n]
				if x.N() != len(want[n]) || x.Room() != 100-x.N() || x.N() == 0 && x.End() != 0 || x.Has(x.End()) ||
					x.Has(-1) {
					t.Fatalf("table %d has %d records up to %d, want %d", n, x.N(), x.End(), len(want[n]))
				}
				last := int32(-1)
				for i, v := range want[n] {
					if !x.Has(i) || *x.At(i) != v {
						t.Fatalf("record %d of table %d is %d, want %d", i, n, *x.At(i), v)
					}
					last = max(last, i)
				}
				if x.End() > last+int32(records) {
					t.Fatalf("table %d goes up to %d, and its last record is %d", n, x.End(), last)
				}
			}
		}
	})
}

// TestMemoryThatIsNotNeededIsGivenUp, but not what was needed since the last Trim.
func TestMemoryThatIsNotNeededIsGivenUp(t *testing.T) {
	p := NewPool[[100]byte](4)
	var x Table[[100]byte]
	x.Init(p, 400)
	take := func(n int) {
		for range n {
			x.Take()
		}
		for i := range x.End() {
			if x.Has(i) {
				x.Put(i)
			}
		}
	}
	take(400)
	for _, c := range []struct {
		takes, free int
		more        bool
	}{{0, 400, true}, {100, 100, true}, {40, 40, true}, {4, 8, false}, {0, 8, false}, {400, 400, true}, {0, 8, false},
		{0, 8, false}} {
		take(c.takes)
		if more := p.Trim(); p.Free() != c.free || more != c.more {
			t.Errorf("after %d records: %d are free, more %v; want %d, %v", c.takes, p.Free(), more, c.free, c.more)
		}
	}
}

// TestATableAllocatesNothingInTheSteadyState, whatever is taken and put back.
func TestATableAllocatesNothingInTheSteadyState(t *testing.T) {
	p := NewPool[[10]int](8)
	tables := make([]Table[[10]int], 50)
	for i := range tables {
		tables[i].Init(p, 100)
	}
	once := func() {
		for i := range tables {
			for range i {
				tables[i].Take()
			}
			for j := range int32(i) {
				tables[i].Put(j)
			}
		}
	}
	once()
	if n := testing.AllocsPerRun(10, once); n > 0 {
		t.Errorf("%v allocations", n)
	}
}
