package lookup

import (
	"flag"
	"math/bits"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/space"
	"jbofd/internal/nvme"
	"jbofd/internal/tenant"
	"jbofd/internal/units"
)

var seed = flag.Uint64("seed", uint64(time.Now().UnixNano()), "seed of the random tests")

// TestSkippedSegmentsAreEmpty: a walk over all positions visits each segment that is not empty exactly once, however
// many segments the table has and may have, whether its entries were set or loaded.
func TestSkippedSegmentsAreEmpty(t *testing.T) {
	t.Logf("-seed %d", *seed)
	rng := rand.New(rand.NewPCG(*seed, 1))
	for range 300 {
		most := 16 + rng.IntN(1<<rng.IntN(17))
		tbl := NewSegTbl(make([]byte, most*EntryBytes))
		tbl.Grow(uint32(16 + rng.IntN(most-15)))
		want := map[uint32]bool{}
		for range rng.IntN(1 << rng.IntN(12)) {
			i := rng.Uint32N(tbl.Len())
			want[i] = rng.IntN(3) > 0
			if want[i] {
				tbl.Set(i, NewEntry(units.ExtentOffset(32+32*rng.IntN(1000)), 100))
			} else {
				tbl.Set(i, 0)
			}
		}
		if rng.IntN(2) == 0 {
			old := slices.Clone(tbl.Bytes())
			tbl = NewSegTbl(slices.Repeat([]byte{7}, most*EntryBytes))
			tbl.Extend(uint32(len(old) / EntryBytes))
			for at := 0; at < len(old); {
				n := 1 + rng.IntN(min(1000, len(old)-at))
				tbl.Load(int64(at), old[at:at+n])
				at += n
			}
		}
		steps, o := 0, op{}
		for more := true; more; steps++ {
			i := tbl.Segment(bits.Reverse64(o.position))
			n := tbl.Empty(i)
			switch {
			case n == 0 && !want[i]:
				t.Fatalf("segment %d of %d is visited, which is empty or was visited before", i, tbl.Len())
			case n == 0:
				delete(want, i)
				n = tbl.Bits(i)
			}
			more = o.pass(n)
		}
		for i, there := range want {
			if there {
				t.Fatalf("segment %d of %d, at most %d, is not visited", i, tbl.Len(), most)
			}
		}
		if steps > int(tbl.Len()) {
			t.Fatalf("%d steps through %d segments", steps, tbl.Len())
		}
	}
}

// quiet is a Host on whose drive nothing can be read.
type quiet struct {
	m     *Machine
	reads []int32
	done  int
}

func (h *quiet) ReadFor(slot int32, _ tenant.ID, _ bool, _ units.ExtentOffset, _ []byte) {
	h.reads = append(h.reads, slot)
}
func (h *quiet) Done(uint64, Result, Object)                            { h.done++ }
func (*quiet) Checked(uint64, Result)                                   {}
func (h *quiet) Damaged(units.ExtentOffset, int, uint32, uint64) Result { return Corrupt }

// TestListsSkipFewSegmentsInATurn: a table of many segments is empty but for one of every so many. Several Lists
// together do no more than a turn has time for, and what they need all in all is bounded, too.
func TestListsSkipFewSegmentsInATurn(t *testing.T) {
	const segments, lists = 1 << 20, 5
	for _, c := range []struct {
		name string
		// used is a segment in how many that is not empty, none: 0.
		used int
		// turns is how many turns the Lists take.
		least, most int
	}{
		{"all empty", 0, 1, 1 + lists*(segments/classSegments+1)/maxSkips},
		{"one used", segments, 1 + lists*classSegments/4/maxSkips,
			2 + lists*(segments/classSegments+classSegments)/maxSkips},
		{"one of each class", classSegments + 1, lists * segments / 2 / maxSkips, 1 + lists*segments/maxSkips},
	} {
		t.Run(c.name, func(t *testing.T) {
			tbl := NewSegTbl(make([]byte, TableBytes(segments)))
			tbl.Grow(segments)
			for i := 0; c.used > 0 && i < segments; i += c.used {
				// The last segment in the order of Lists.
				tbl.Set(uint32(segments-1-i), NewEntry(format.AreaStart, 100))
			}
			sb := make(format.Superblock, format.SuperblockBytes)
			sb.SetPartitionBytes(64 << 20)
			sb.SetChunkBytes(1 << 20)
			h := &quiet{}
			m, err := New(Config{Host: h, Table: &tbl, Pool: space.New(sb), BlockSize: 512, Requests: lists,
				MaxExtentBytes: 4096, Alloc: space.HeapAlloc})
			if err != nil {
				t.Fatal(err)
			}
			h.m = m
			value := make([]byte, 4096)
			for tag := range uint64(lists) {
				m.Begin(&Request{Op: List, Tag: tag, Value: value[:len(nvme.NewKVList(value))+64]})
			}
			turns := 0
			for again := true; again || len(h.reads) > 0; turns++ {
				reads := h.reads
				h.reads = nil
				for _, slot := range reads {
					// Nothing in the segment is listed: the List goes on behind it.
					o := &m.ops[slot]
					if o.pass(m.Table.Bits(o.segment)) {
						m.list(slot)
					} else {
						m.finish(slot, Found)
					}
				}
				m.Continue()
				again = m.Waits()
				if m.skips > maxSkips {
					t.Fatalf("%d segments are skipped in a turn", m.skips)
				}
			}
			if h.done != lists || turns < c.least || turns > c.most {
				t.Errorf("%d of %d Lists end in %d turns, want %d to %d", h.done, lists, turns, c.least, c.most)
			}
		})
	}
}
