package kvop

import (
	"math/rand/v2"
	"testing"
	"time"
)

// modelWrite is a write that is outstanding, or has ended without an answer and counts until a time.
type modelWrite struct {
	n    *Number
	seq  uint64
	list uint64
	end  time.Duration
}

// TestNumbersSayWhatIsAnswered: sequence numbers ascend by SeqPerOp, and what is said to be answered is below each
// write of a list that is outstanding, or that ended unanswered a short time ago, whatever happens in the other lists.
func TestNumbersSayWhatIsAnswered(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 21))
	for range 100 {
		var s Numbers
		var open, held []modelWrite
		now, last, ends := time.Duration(0), uint64(0), time.Duration(0)
		lists := 1 + rng.Uint64N(3)
		most := 1 + rng.IntN(40)
		for range 500 {
			now += time.Duration(rng.IntN(3))
			switch {
			case len(open) < most && rng.IntN(2) == 0:
				list := rng.Uint64N(lists)
				n := new(Number)
				if len(held) > 0 && rng.IntN(2) == 0 {
					list = held[0].list
				}
				seq, answered := s.Begin(n, list+numberLists*rng.Uint64N(5), now)
				if seq != last+SeqPerOp {
					t.Fatalf("number %d follows %d", seq, last)
				}
				last = seq
				open = append(open, modelWrite{n: n, seq: seq, list: list})
				want, until := seq, time.Duration(0)
				for _, w := range open {
					if w.list == list {
						want = min(want, w.seq)
					}
				}
				// All that ended unanswered are held until the last one of them may be forgotten.
				for _, w := range held {
					if w.list == list {
						until = max(until, w.end)
					}
				}
				for _, w := range held {
					if w.list == list && now < until {
						want = min(want, w.seq)
					}
				}
				if answered != want {
					t.Fatalf("%d are answered, want %d; open %v, held %v, at %d", answered, want, open, held, now)
				}
				if now >= until { // a new one begins a new time
					kept := held[:0]
					for _, w := range held {
						if w.list != list {
							kept = append(kept, w)
						}
					}
					held = kept
				}
			case len(open) > 0:
				i := rng.IntN(len(open))
				w := open[i]
				open = append(open[:i], open[i+1:]...)
				ok := rng.IntN(8) > 0
				ends = now + time.Duration(1+rng.IntN(60))
				if !ok {
					until := time.Duration(0)
					for _, h := range held {
						if h.list == w.list {
							until = max(until, h.end)
						}
					}
					if now >= until { // what was held before is over
						kept := held[:0]
						for _, h := range held {
							if h.list != w.list {
								kept = append(kept, h)
							}
						}
						held = kept
					}
					held = append(held, modelWrite{seq: w.seq, list: w.list, end: ends})
				}
				s.End(w.n, ok, now, ends)
				if *w.n != (Number{}) {
					t.Fatalf("a write that has ended has number %v", *w.n)
				}
				s.End(w.n, rng.IntN(2) == 0, now, ends+1000) // of no write
			}
		}
	}
}

// TestNumbersHoldBackTheirOwnKeyOnly: one stuck write leaves the watermarks of other keys alone.
func TestNumbersHoldBackTheirOwnKeyOnly(t *testing.T) {
	var s Numbers
	var stuck, n Number
	seq, _ := s.Begin(&stuck, 7, 0)
	for range 10 {
		own, answered := s.Begin(&n, 8, 0)
		if answered != own {
			t.Errorf("write %d: %d are answered", own, answered)
		}
		s.End(&n, true, 0, 0)
		if _, answered = s.Begin(&n, 7+numberLists, 0); answered != seq {
			t.Errorf("%d are answered of the list of the stuck write %d", answered, seq)
		}
		s.End(&n, true, 0, 0)
	}
}

func TestNumbersAllocateNothing(t *testing.T) {
	var s Numbers
	var n [3]Number
	if got := testing.AllocsPerRun(1000, func() {
		for i := range n {
			s.Begin(&n[i], uint64(i/2), 0)
		}
		for _, i := range []int{1, 0, 2} {
			s.End(&n[i], i > 0, 0, 1)
		}
	}); got != 0 {
		t.Errorf("%v allocations", got)
	}
}
