package drive

import (
	"fmt"
	"slices"
	"testing"

	"jbofd/internal/bufpool"
	"jbofd/internal/pipeline"
	"jbofd/internal/ssd"
	"jbofd/internal/units"
)

// modelClaim is the model of a claim.
type modelClaim struct {
	io         *IO
	start, end int64
	exclusive  bool
	waits      bool
}

// TestClaimsAreServedInTheirOrder: a claim waits exactly as long as an earlier one overlaps it and one of the two is
// exclusive. The model is a list of all claims.
func TestClaimsAreServedInTheirOrder(t *testing.T) {
	rng := newRand(t)
	for _, span := range []int64{64 << 10, 4 << 20, 1 << 30} { // from one region to more than there are buckets
		t.Run(fmt.Sprint(span), func(t *testing.T) {
			var table claims
			var model []*modelClaim
			waits := func(i int) bool {
				m := model[i]
				return slices.ContainsFunc(model[:i], func(o *modelClaim) bool {
					return (m.exclusive || o.exclusive) && o.start < m.end && m.start < o.end
				})
			}
			waited := 0
			for range 30_000 {
				if len(model) < 2 || rng.IntN(2) == 0 && len(model) < 40 {
					m := &modelClaim{io: &IO{}, start: rng.Int64N(span), exclusive: rng.IntN(3) == 0}
					m.end = m.start + 1 + rng.Int64N(max(1, span>>rng.IntN(16)))
					m.io.Init(nil, 0)
					model = append(model, m)
					m.waits = waits(len(model) - 1)
					if got := table.add(m.io, units.DriveOffset(m.start), units.Bytes(m.end-m.start),
						m.exclusive); got == m.waits {
						t.Fatalf("a claim of %d to %d: free %v, want %v", m.start, m.end, got, !m.waits)
					}
					continue
				}
				i := rng.IntN(len(model)) // a waiting one may end, too, because it was aborted
				gone := model[i]
				model = slices.Delete(model, i, i+1)
				free := table.remove(gone.io)
				for k, m := range model {
					if was := m.waits; was {
						waited++
						m.waits = waits(k)
						if !m.waits {
							if !contains(&free, m.io) {
								t.Fatalf("a claim of %d to %d waits for nothing and is not free", m.start, m.end)
							}
							free.drop(m.io)
						}
					}
				}
				if free.n > 0 {
					t.Fatalf("%d claims are said to be free that are not", free.n)
				}
			}
			if waited == 0 {
				t.Error("no claim has waited: the test tests nothing")
			}
			for _, m := range model {
				table.remove(m.io)
			}
			if table.wide.first != nil || table.exclusive != 0 || slices.ContainsFunc(table.buckets[:],
				func(l claimList) bool { return l.first != nil || l.last != nil }) {
				t.Error("claims are left in the table")
			}
		})
	}
}

func contains(l *list, io *IO) bool {
	for o := l.first; o != nil; o = o.next {
		if o == io {
			return true
		}
	}
	return false
}

// TestAWideWriteIsNotStarved: a write of a wide range is not delayed by compare-and-writes of parts of the range that
// were submitted later.
func TestAWideWriteIsNotStarved(t *testing.T) {
	g, dev := newGate(t)
	r := newRig(t, rigConfig{}, dev)
	h := r.host("a")
	cw := func(slot uint32, place units.DriveOffset) *IO {
		return h.with(h.io(slot, pipeline.CompareWrite, place*4096, 4096), make([]byte, 8192))
	}
	wide := h.io(0, pipeline.WriteZeroes, 0, 2*4096)
	h.submit(cw(1, 0), cw(2, 1))
	g.exactly(t, 2)
	h.submit(wide)
	h.submit(cw(3, 0), cw(4, 1))
	g.exactly(t, 2)
	stop := make(chan struct{})
	defer close(stop)
	go g.all(stop)
	var order []uint32
	for _, io := range h.finish(5) {
		order = append(order, io.Slot)
		h.put(io)
	}
	if order[2] != 0 {
		t.Errorf("the write of slot 0 was not the third to end: %v", order)
	}
}

// BenchmarkCompareWrite measures a compare-and-write beside many writes of other ranges, as in a storm of metadata
// updates: the cost must depend only on what overlaps it.
func BenchmarkCompareWrite(b *testing.B) {
	for _, others := range []int{0, 1_000, 10_000} {
		b.Run(fmt.Sprintf("others=%d", others), func(b *testing.B) {
			r := newRig(b, rigConfig{}, func(p *bufpool.Pool) (ssd.Device, error) { return memory(p) })
			s := newBenchSink(r, 1)
			h := r.host("others")
			var ios []*IO
			for i := range others { // their hosts have not sent the data
				io := h.io(uint32(i), pipeline.Write, 1<<20+units.DriveOffset(i)*512, 512)
				io.Fetch, io.Buf.B = true, make([]byte, 512)
				ios = append(ios, io)
			}
			if others > 0 {
				h.submit(ios...)
				h.admit(others)
			}
			image := make([]byte, 1024)
			io := s.ios[0]
			io.Op, io.Len = pipeline.CompareWrite, 512
			b.ReportAllocs()
			b.ResetTimer()
			for range b.N {
				io.Buf.B = image
				var batch Batch
				batch.Add(io)
				r.o.Submit(&batch)
				s.ios[0].Buf = bufpool.Buf{}
			}
			b.StopTimer()
			if s.done < b.N {
				b.Fatalf("%d of %d done", s.done, b.N)
			}
			for _, io := range ios {
				io.Return(errReturned)
			}
			if others > 0 {
				h.finish(others)
			}
		})
	}
}
