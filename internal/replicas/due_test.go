package replicas

import (
	"testing"

	"pgregory.net/rapid"
)

// TestTheFirstOneDueIsKnown: whatever times members want, beside a search among all of them.
func TestTheFirstOneDueIsKnown(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var h dueHeap
		members := make([]*member, 12)
		for i := range members {
			members[i] = &member{index: -1}
		}
		for range rapid.IntRange(0, 100).Draw(t, "steps") {
			m := members[rapid.IntRange(0, len(members)-1).Draw(t, "member")]
			m.wakeNS = rapid.Int64Range(0, 9).Draw(t, "wake")
			m.retryNS = rapid.Int64Range(0, 9).Draw(t, "retry")
			h.set(m)
			want, n := int64(0), 0
			for _, m := range members {
				for _, at := range [2]int64{m.wakeNS, m.retryNS} {
					if at != 0 && (want == 0 || at < want) {
						want = at
					}
				}
				if m.wakeNS != 0 || m.retryNS != 0 {
					n++
					if m.index < 0 || m.index >= len(h) || h[m.index] != m {
						t.Fatalf("a member that wants a turn is not at its place %d", m.index)
					}
				}
			}
			if len(h) != n || n > 0 && h[0].dueNS != want {
				t.Fatalf("%d members are due, the first one at %d; want %d, %d", len(h), h[0].dueNS, n, want)
			}
		}
	})
}

// TestRequestsThatAreNotNeededAreGivenUp, but not what was needed since the last time.
func TestRequestsThatAreNotNeededAreGivenUp(t *testing.T) {
	var s spares
	s.n = 1000
	for _, c := range []struct {
		takes, gone int
		more        bool
	}{{0, 0, true}, {300, 700, true}, {100, 200, true}, {1, 36, false}, {0, 0, false}} {
		for range c.takes {
			s.take()
		}
		s.n += c.takes
		if n, more := s.unneeded(); n != c.gone || more != c.more {
			t.Errorf("after %d were used: %d are given up, more %v; want %d, %v", c.takes, n, more, c.gone, c.more)
		}
	}
	for range 100 { // more than there are
		s.take()
	}
	if s.n != 0 || s.low != 0 {
		t.Errorf("%+v", s)
	}
}
