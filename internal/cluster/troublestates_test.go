package cluster

import (
	"fmt"
	"testing"
)

// TestEveryStateOfATroubleHasAnExit enumerates the states that the trouble of a partition can have, with times in units
// of the first calm time, and what a manager can know in each. A partition is out only after its drive has failed for
// awayNS, and while others can spare it. While its drive works the way back is finite, and the longer the more often it
// has been out. The bound of what is remembered is not in it: times end at one more than the longest calm time.
func TestEveryStateOfATroubleHasAnExit(t *testing.T) {
	const away = calm
	const most = 1<<mostDoublings + 1
	type state struct {
		trouble
		out bool
	}
	// The time is always 0, and what lies behind it negative. What is so old that its age makes no difference has the
	// same one.
	aged := func(s state) state {
		if s.firstNS != 0 {
			s.firstNS = max(s.firstNS, -away-2)
		}
		s.lastNS = max(s.lastNS, -most)
		s.times = min(s.times, mostDoublings+1)
		return s
	}
	begin := state{trouble: trouble{process: 1}}
	seen, todo := map[state]bool{begin: true}, []state{begin}
	for len(todo) > 0 {
		was := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		for event := range 32 {
			k := troubleLook{nowNS: 1, awayNS: away, process: 1 + Incarnation(event&1)*(3-was.process-1),
				heard: event&2 != 0, fails: event&2 != 0 && event&4 != 0, out: was.out, spare: event&8 != 0}
			if event&1 == 0 {
				k.process = was.process
			} else if was.out && was.times <= 1 {
				continue // the same as another look of this process
			}
			is := was
			var forget bool
			is.out, forget = is.look(&k)
			what := fmt.Sprintf("%+v, known %+v: %+v", was, k, is)
			quiet := k.nowNS - was.lastNS
			other := k.heard && k.process != was.process
			switch {
			case is.out && !was.out:
				if !k.fails || !k.spare || was.firstNS == 0 || k.nowNS-was.firstNS <= away {
					t.Fatalf("out without a reason: %s", what)
				}
				if is.times > was.times {
					t.Fatalf("counted before the view is written: %s", what)
				}
			case was.out && !is.out:
				wait := was.calmNS(away)
				if other {
					wait = (&trouble{}).calmNS(away)
				}
				decided := was.firstNS == 0 // before, in a view that could not be written
				if !k.heard || k.fails || !decided && (quiet <= 1 || k.spare && quiet <= wait) {
					t.Fatalf("back without a reason: %s", what)
				}
			case was.out && k.heard && !k.fails && (quiet > most || is.lastNS != was.lastNS):
				t.Fatalf("a drive that works does not come nearer to its way back: %s", what)
			}
			if forget && (is.out || is.firstNS != 0 || is.times > 0) {
				t.Fatalf("something is forgotten: %s", what)
			}
			if counts := was.out && !was.trouble.out; !other && counts != (is.times > was.times) && was.times < 255 {
				t.Fatalf("counted %v, want %v: %s", !counts, counts, what)
			}
			if event&16 != 0 { // the view could not be written
				is.out = was.out
			}
			// The next look is one unit later, at the time 0 again.
			if is.firstNS != 0 {
				is.firstNS -= k.nowNS
				if is.firstNS == 0 {
					is.firstNS = -1 // 0 says that there is none
				}
			}
			is.lastNS -= k.nowNS
			if is = aged(is); !forget && !seen[is] {
				seen[is] = true
				todo = append(todo, is)
			}
		}
	}
	t.Logf("%d states", len(seen))
}

// TestADriveThatFailsWhenItHasRangesIsTriedLessAndLess: it works while it has none. The time from one attempt to the
// next doubles up to a day, and begins anew when it has worked with ranges for a day, or when its node is restarted.
func TestADriveThatFailsWhenItHasRangesIsTriedLessAndLess(t *testing.T) {
	const away, minute, day = calm * 60, 60, 24 * 3600
	tr := &trouble{process: 1}
	k := troubleLook{nowNS: 1, awayNS: away, process: 1, heard: true, spare: true}
	tries := 0
	// pass lets time pass, in which the drive fails if it has ranges.
	pass := func(seconds int) {
		for range seconds {
			k.nowNS++
			k.fails = !k.out
			out, _ := tr.look(&k)
			if k.out && !out {
				tries++
			}
			k.out = out
		}
	}
	for n, want := 0, minute; n <= mostDoublings+2; n++ {
		for !k.out {
			pass(1)
		}
		was := tries
		if pass(want); tries != was {
			t.Fatalf("after %d times it is tried again within %d s", n, want)
		}
		if pass(2); tries != was+1 {
			t.Fatalf("after %d times it is not tried again after %d s", n, want)
		}
		want = min(2*want, minute<<mostDoublings)
	}
	was := tries
	if pass(30 * day); tries-was > 42 {
		t.Errorf("in the end it is tried %d times in 30 days", tries-was)
	}
	for name, ends := range map[string]func(){
		"a restart": func() { k.process++ },
		"a day": func() {
			pass(3 * day) // it has been out for long the last time
			for k.out {
				pass(1)
			}
			forgotten := false
			for i := range day + 2*minute {
				k.nowNS, k.fails = k.nowNS+1, false
				if _, forgotten = tr.look(&k); forgotten && i < day-minute {
					t.Fatalf("its trouble is forgotten %d s after it is back", i)
				}
			}
			if !forgotten {
				t.Error("it has worked for a day, and its trouble is not forgotten")
			}
			tr.times = 0
		},
	} {
		ends()
		for !k.out {
			pass(1)
		}
		was := tries
		if pass(minute + 2); tries != was+1 {
			t.Errorf("after %s it is not tried again within a minute", name)
		}
		for range 3 {
			pass(2 * away)
		}
	}
}
