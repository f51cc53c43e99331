package replica

import (
	"slices"
	"testing"

	"jbofd/internal/crrs"
)

// TestALossIsTriedUntilItIsRepaired, less often each time, and soon in another view. Others of the range wait for the
// end of its repair, those of other ranges do not.
func TestALossIsTriedUntilItIsRepaired(t *testing.T) {
	var l Losses
	now, busy, began := int64(1), false, map[uint64]int{}
	gone := -1
	begin := func(number int, position uint64) LossStep {
		switch {
		case number == 1 && busy:
			return LossBusy
		case number == gone:
			return LossGone
		}
		began[position]++
		busy = busy || number == 1
		return LossBegun
	}
	run := func(until int64) {
		for now < until {
			if next := l.NextNS(); next == 0 || next > until {
				now = until
			} else {
				now = max(now+1, next)
			}
			l.Next(now, begin)
		}
	}
	for range 3 {
		l.Found(1, 100, 100, now)
		l.Found(1, 200, 200, now)
		l.Found(2, 300, 300, now)
	}
	run(now + 1e9)
	if l.Known() != 3 || l.Reported() != 3 || began[100] != 1 || began[200] != 0 || began[300] != 1 {
		t.Fatalf("%d are known, %v were begun", l.Known(), began)
	}
	busy = false
	l.Ended(1, &crrs.RepairEvent{Position: 64, Last: 127, Outcome: crrs.RepairDone}, now)
	if run(now + 1e6); l.Known() != 2 || began[200] != 1 {
		t.Fatalf("%d are known, %v were begun: the next one does not follow at once", l.Known(), began)
	}
	// Nobody has it: it is tried again and again.
	for range 3600 {
		if busy {
			busy = false
			l.Ended(1, &crrs.RepairEvent{Position: 200, Last: 200, Outcome: crrs.RepairNoSource}, now)
		}
		run(now + 1e9)
	}
	if n := began[200]; n < 10 || n > 20 || l.Known() != 2 {
		t.Errorf("it was tried %d times in an hour", n)
	}
	before := began[200]
	l.Retry(now)
	if run(now + 1e9); began[200] != before+1 {
		t.Error("another view changes nothing")
	}
	l.Ended(1, &crrs.RepairEvent{Position: 200, Last: 200, Outcome: crrs.RepairDone}, now)
	gone = 2
	l.Retry(now)
	if run(now + 1e9); l.Known() != 0 || l.NextNS() != 0 {
		t.Errorf("%d are left, to be looked at at %d", l.Known(), l.NextNS())
	}
}

// TestLossesAreBounded, and a turn looks at some of them.
func TestLossesAreBounded(t *testing.T) {
	var l Losses
	for i := range uint64(2 * MaxLosses) {
		l.Found(1, i, i, 1)
	}
	looked, turns := 0, 0
	for ; looked < MaxLosses; turns++ {
		before := looked
		l.Next(1, func(int, uint64) LossStep { looked++; return LossBegun })
		if looked-before > lossesInTurn || looked == before {
			t.Fatalf("a turn looks at %d", looked-before)
		}
	}
	if l.Known() != MaxLosses {
		t.Errorf("%d are known", l.Known())
	}
}

// TestTheRestOfASegmentThatWasSplitIsRepaired: a repair is of one of its parts. Also if that was whole already.
func TestTheRestOfASegmentThatWasSplitIsRepaired(t *testing.T) {
	for _, segment := range []bool{true, false} {
		var l Losses
		l.Found(1, 0, 127, 1)
		l.Found(1, 5, 5, 1)
		var began []uint64
		for now := int64(1); l.Known() > 0 && now < 1000; now++ {
			l.Next(now, func(_ int, position uint64) LossStep {
				began = append(began, position)
				return LossBegun
			})
			for _, p := range began {
				e := crrs.RepairEvent{Position: p, Last: p, SegmentLast: p | 31, Outcome: crrs.RepairDone}
				if segment {
					e.Last = e.SegmentLast
				}
				l.Ended(1, &e, now)
			}
		}
		slices.Sort(began)
		want := []uint64{0, 5, 32, 64, 96}
		if !slices.Equal(began, want) {
			t.Errorf("repairs of %v, want %v", began, want)
		}
	}
}

// TestAnotherViewBeginsAnew: a loss is tried again soon if the first try fails, also after many before.
func TestAnotherViewBeginsAnew(t *testing.T) {
	var l Losses
	l.Found(1, 100, 100, 1)
	now, began := int64(1), 0
	run := func(until int64) {
		for now < until {
			if now = until; l.NextNS() > 0 && l.NextNS() < until {
				now = l.NextNS()
			}
			l.Next(now, func(int, uint64) LossStep { began++; return LossBegun })
		}
	}
	run(3600e9)
	l.Retry(now)
	began = 0
	if run(now + 2*lossAgainNS); began != 2 {
		t.Errorf("it was begun %d times", began)
	}
}

// TestALossThatIsFoundAgainMayReachFurther, and keeps what it has reached.
func TestALossThatIsFoundAgainMayReachFurther(t *testing.T) {
	for _, last := range [][2]uint64{{31, 127}, {127, 31}} {
		var l Losses
		for _, at := range last {
			l.Found(1, 0, at, 1)
		}
		l.Ended(1, &crrs.RepairEvent{Last: 31, SegmentLast: 31, Outcome: crrs.RepairDone}, 2)
		if l.Known() != 1 {
			t.Errorf("of what was found up to %v, and repaired up to 31, %d are known", last, l.Known())
		}
	}
}

// TestTheNextLossFollowsAtOnce when a repair of its range has ended.
func TestTheNextLossFollowsAtOnce(t *testing.T) {
	var l Losses
	l.Found(1, 100, 100, 1)
	l.Found(1, 200, 200, 1)
	l.Next(1, func(_ int, position uint64) LossStep {
		if position == 100 {
			return LossBegun
		}
		return LossBusy
	})
	l.Ended(1, &crrs.RepairEvent{Position: 100, Last: 100, Outcome: crrs.RepairDone}, 2)
	if l.NextNS() != 2 {
		t.Errorf("the next one is looked at at %d", l.NextNS())
	}
}
