package peers

import (
	"errors"
	"fmt"
	"testing"
	"time"
)

// TestForHowLongANodeIsLeftAlone: from the third connection in a row on that ends for want of an answer, twice as long
// each time; anything else begins anew.
func TestForHowLongANodeIsLeftAlone(t *testing.T) {
	var s stuck
	unanswered, other, slow := fmt.Errorf("%w: x", errUnanswered), errors.New("reset"), fmt.Errorf("%w: x", errSlow)
	const hold = 30 * time.Second
	for i, c := range []struct {
		err    error
		lasted time.Duration
		want   time.Duration
	}{
		{unanswered, time.Second, 0}, {unanswered, time.Second, 0}, {unanswered, stuckWithin, hold},
		{unanswered, time.Second, 2 * hold}, {unanswered, time.Second, 4 * hold}, {other, time.Second, 0},
		{unanswered, time.Second, 0}, {unanswered, time.Second, 0}, {unanswered, stuckWithin + 1, 0},
		{unanswered, time.Second, 0}, {unanswered, time.Second, 0}, {slow, time.Second, 0},
		{unanswered, time.Second, 0}, {unanswered, time.Second, 0}, {unanswered, time.Second, hold},
	} {
		if got := s.after(c.err, c.lasted, hold); got != c.want {
			t.Errorf("end %d: %v, want %v", i, got, c.want)
		}
	}
	for range 100 {
		if got := s.after(unanswered, 0, hold); got < hold || got > maxHold {
			t.Fatalf("%v, want at most %v", got, maxHold)
		}
	}
}
