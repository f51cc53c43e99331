package connection

import (
	"testing"
	"time"
)

// transfers is a host that has to send n transfers of 1 MiB each, all requested at the beginning. In each second it
// sends perSecond bytes of the transfer that pick chooses.
type transfers struct {
	n         int
	perSecond int
	pick      func(second int, left []int) int
}

// cutOff returns after how many seconds, of at most limit, the host counts as too slow; -1: never.
func (t transfers) cutOff(l StallLimits, limit int) int {
	var s stall
	left := make([]int, t.n)
	for i := range left {
		left[i] = 1 << 20
	}
	came, owedBytes := 0, t.n<<20
	for second := range limit {
		if owedBytes > 0 {
			i := t.pick(second, left)
			n := min(t.perSecond, left[i])
			left[i] -= n
			came += n
			owedBytes -= n
		}
		o := dueData{slot: -1, came: uint64(came), bytes: owedBytes}
		for i, n := range left {
			if n > 0 {
				o.slot, o.got, o.left, o.requestedNS = i, 1<<20-n, n, 1
				break
			}
		}
		if s.check(int64(second)*int64(time.Second), l, o) {
			return second
		}
	}
	return -1
}

func inOrder(_ int, left []int) int {
	for i, n := range left {
		if n > 0 {
			return i
		}
	}
	return 0
}

func TestSlowSendersAreDetected(t *testing.T) {
	limits := StallLimits{Timeout: 30 * time.Second, BytesPerSec: 64 << 10}
	for _, x := range []struct {
		name     string
		host     transfers
		from, to int // seconds; -1: never
	}{
		{"sends nothing", transfers{1, 0, inOrder}, 31, 32},
		{"trickles one transfer", transfers{1, 4, inOrder}, 31, 47},
		{"trickles sixty", transfers{60, 4, inOrder}, 31, 47},
		{"is a little too slow", transfers{60, 50 << 10, inOrder}, 31, 47},
		{"is just fast enough", transfers{60, 70 << 10, inOrder}, -1, -1},
		{"is fast", transfers{60, 100 << 20, inOrder}, -1, -1},
		{"is fast at the last and trickles the first", transfers{60, 128 << 10, func(second int, left []int) int {
			if second%10 == 0 {
				return 0 // an eighth of a MiB in ten seconds
			}
			for i := len(left) - 1; i > 0; i-- {
				if left[i] > 0 {
					return i
				}
			}
			return 0
		}}, 40, 48},
		{"sends the first at 16 KiB a second", transfers{2, 16 << 10, inOrder}, 31, 48},
	} {
		got := x.host.cutOff(limits, 3000)
		if got < x.from || got > x.to {
			t.Errorf("a host that %s is cut off after %d s, want %d to %d", x.name, got, x.from, x.to)
		}
	}
	if got := (transfers{1, 4, inOrder}).cutOff(StallLimits{Timeout: 30 * time.Second}, 3000); got != -1 {
		t.Errorf("without a least rate, a host that goes on is cut off after %d s", got)
	}
}

func TestTimeWithoutDueDataDoesNotCount(t *testing.T) {
	limits := StallLimits{Timeout: 30 * time.Second, BytesPerSec: 64 << 10}
	var s stall
	now := int64(0)
	for i := range 100 {
		o := dueData{slot: 0, left: 1 << 20, bytes: 1 << 20, requestedNS: now + 1, came: uint64(i) << 20}
		for range 3 { // each transfer takes ten seconds, each pause an hour
			if s.check(now, limits, o) {
				t.Fatalf("cut off at transfer %d", i)
			}
			now += int64(5 * time.Second)
		}
		if s.check(now, limits, dueData{slot: -1, came: uint64(i+1) << 20}) {
			t.Fatalf("cut off behind transfer %d", i)
		}
		now += int64(time.Hour)
	}
}
