package replica

import (
	"math/rand/v2"
	"testing"

	"jbofd/internal/crrs"
)

// TestLossesOfTablesOfDifferentLengths: the table becomes longer and shorter while losses are found and repaired, so
// that those of segments of different widths, and of values in them, overlap. When none is known everything was
// repaired that was lost when it was found, and that takes no more repairs than there are segments to repair.
func TestLossesOfTablesOfDifferentLengths(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	for history := range 300 {
		const positions = 512
		var l Losses
		var lost [positions]bool
		width := func() uint64 { return 16 << rng.IntN(5) }
		now, segment := int64(1), width()
		found, repairs := 0, 0
		for l.Known() > 0 || found < 20 {
			if rng.IntN(3) == 0 {
				segment = width()
			}
			if p := rng.Uint64N(positions); found < 20 && rng.IntN(2) == 0 {
				first, last := p&^(segment-1), p|(segment-1)
				if rng.IntN(3) == 0 {
					first, last = p, p // a value
				}
				for i := first; i <= last; i++ {
					lost[i] = true
				}
				found++
				l.Found(1, first, last, now)
			}
			busy := false
			var at uint64
			l.Next(now, func(_ int, position uint64) LossStep {
				if busy {
					return LossBusy
				}
				busy, at = true, position
				return LossBegun
			})
			if busy {
				last := at | (segment - 1)
				e := crrs.RepairEvent{Position: at &^ (segment - 1), Last: last, SegmentLast: last,
					Outcome: crrs.RepairDone, Segment: true}
				if at%3 > 0 && rng.IntN(4) == 0 {
					e = crrs.RepairEvent{Outcome: crrs.RepairFailed}
				} else {
					repairs++
					for i := e.Position; i <= e.Last; i++ {
						lost[i] = false
					}
				}
				l.Ended(1, &e, now)
			}
			if now += 100e6; repairs > 20*positions/16 {
				t.Fatalf("history %d: %d repairs, and %d losses are known", history, repairs, l.Known())
			}
		}
		for i, is := range lost {
			if is {
				t.Fatalf("history %d: position %d is lost, and not known", history, i)
			}
		}
	}
}
