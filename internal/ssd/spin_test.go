package ssd

import "testing"

// wait is a wait as its user carries it out; it returns how long it has looked.
func wait(s *Spin, underWay, found bool) int64 {
	w := s.WindowNS(underWay)
	if w > 0 {
		s.Looked(found)
	}
	if w == 0 || !found {
		s.Slept()
	}
	return w
}

func TestADeviceWithNothingUnderWayIsNotLookedAt(t *testing.T) {
	var s Spin
	for i := range 1000 {
		if w := wait(&s, false, false); w != 0 {
			t.Fatalf("wait %d looks for %d ns", i, w)
		}
	}
}

func TestABusyDeviceIsLookedAtAlways(t *testing.T) {
	var s Spin
	for i := range 1000 {
		if w := wait(&s, true, i%3 != 0); w == 0 { // a miss now and then changes nothing
			t.Fatalf("wait %d does not look", i)
		}
	}
}

// A device that is too slow costs few looks, and is looked at again when it has become fast.
func TestASlowDeviceIsLookedAtSeldom(t *testing.T) {
	for name, found := range map[string]func(look int) bool{
		"never in time":    func(int) bool { return false },
		"seldom in time":   func(look int) bool { return look%5 == 0 },
		"2 of 5 are found": func(look int) bool { return look%5 < 2 },
	} {
		t.Run(name, func(t *testing.T) {
			var s Spin
			looks := 0
			const waits = 10_000
			for range waits {
				if wait(&s, true, found(looks)) > 0 {
					looks++
				}
			}
			if limit := waits / 3; looks == 0 || looks > limit {
				t.Errorf("%d looks in %d waits, want 1 to %d", looks, waits, limit)
			}
			if name == "never in time" && looks > waits*mostMisses/restWaits+mostMisses {
				t.Errorf("%d looks in %d waits, all in vain", looks, waits)
			}
			for range restWaits {
				wait(&s, true, true)
			}
			for i := range 1000 {
				if wait(&s, true, true) == 0 {
					t.Fatalf("wait %d of a fast device does not look", i)
				}
			}
		})
	}
}
