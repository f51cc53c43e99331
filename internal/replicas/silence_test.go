package replicas

import (
	"testing"

	"pgregory.net/rapid"

	"jbofd/internal/drive"
	"jbofd/internal/ssd"
)

// silentTest is a store and its drive, one look after the other.
type silentTest struct {
	*testing.T
	s    silence
	work driveWork
}

// looks looks n times. work is what the drive does before each. It returns after how many looks silence has changed.
func (s *silentTest) looks(n int, work func(s *silentTest, i int)) (changed int) {
	for i := range n {
		work(s, i)
		if s.s.lookAt(&s.work) {
			return i + 1
		}
	}
	return 0
}

func nothing(*silentTest, int) {}

// completes is a drive that completes something of a kind before each look.
func completes(k kind) func(*silentTest, int) {
	return func(s *silentTest, _ int) { s.work.completed[k]++ }
}

// TestADriveIsSilentThatCompletesNothing of a kind of which the store has had something for so long; and no other one.
func TestADriveIsSilentThatCompletesNothing(t *testing.T) {
	for name, c := range map[string]struct {
		kinds []kind // that the store has
		work  func(s *silentTest, i int)
		want  int // after so many looks
	}{
		"it is silent":                      {[]kind{writeKind}, nothing, silentLooks},
		"it is silent, for reads":           {[]kind{readKind}, nothing, silentLooks},
		"it has nothing":                    {[]kind{writeKind}, func(s *silentTest, _ int) { s.work.busy = false }, 0},
		"the store has nothing":             {nil, nothing, 0},
		"the store has something else":      {[]kind{otherKind}, nothing, 0},
		"it reads, and is to write":         {[]kind{writeKind}, completes(readKind), silentLooks},
		"it reads, and does not write":      {[]kind{readKind, writeKind}, completes(readKind), silentLooks},
		"it writes, and does not read":      {[]kind{readKind, writeKind}, completes(writeKind), silentLooks},
		"it works, and one request is lost": {[]kind{writeKind}, completes(writeKind), 0},
		"it is slow": {[]kind{writeKind}, func(s *silentTest, i int) {
			if i%silentLooks == silentLooks-1 {
				s.work.completed[writeKind]++
			}
		}, 0},
		"it has nothing now and then": {[]kind{writeKind}, func(s *silentTest, i int) {
			s.work.busy = i%silentLooks != 3
		}, 0},
		"each request ends": {nil, func(s *silentTest, i int) {
			s.s.ended(writeKind, s.s.began(writeKind))
		}, 0},
	} {
		s := silentTest{T: t, work: driveWork{busy: true}}
		for _, k := range c.kinds {
			s.s.began(k)
		}
		if got := s.looks(10*silentLooks, c.work); got != c.want {
			t.Errorf("%s: silent after %d looks, want %d", name, got, c.want)
		}
	}
}

// TestSilenceEndsWithTheAnswers to what the store has had for so long, not with the first completion.
func TestSilenceEndsWithTheAnswers(t *testing.T) {
	s := silentTest{T: t, work: driveWork{busy: true}}
	first, second := s.s.began(writeKind), s.s.began(writeKind)
	if s.looks(2*silentLooks, nothing) == 0 {
		t.Fatal("the drive is never silent")
	}
	s.s.ended(writeKind, first)
	if n := s.looks(2*silentLooks, completes(writeKind)); n != 0 || !s.s.waits() {
		t.Errorf("silence is over after %d looks, and a request has no answer", n)
	}
	s.s.ended(writeKind, second)
	if n := s.looks(2*silentLooks, nothing); n != 1 || s.s.waits() {
		t.Errorf("silence is over after %d looks, want 1; it looks on: %t", n, s.s.waits())
	}
}

// TestSilenceCountsWhatTheStoreHas, whatever begins and ends between the looks.
func TestSilenceCountsWhatTheStoreHas(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var s silence
		type request struct {
			kind kind
			look uint32
		}
		var has []request
		for range rapid.IntRange(1, 200).Draw(t, "steps") {
			switch rapid.IntRange(0, 2).Draw(t, "step") {
			case 0:
				k := kind(rapid.IntRange(0, int(otherKind)).Draw(t, "kind"))
				has = append(has, request{k, s.began(k)})
			case 1:
				if n := len(has) - 1; n >= 0 {
					i := rapid.IntRange(0, n).Draw(t, "which")
					s.ended(has[i].kind, has[i].look)
					has[i], has = has[n], has[:n]
				}
			default:
				s.lookAt(&driveWork{})
			}
			for k := range numKinds {
				total, old := 0, 0
				for _, r := range has {
					if r.kind == k {
						total++
						if s.look-r.look >= silentLooks {
							old++
						}
					}
				}
				if c := &s.kinds[k]; c.all != total || c.old != old {
					t.Fatalf("kind %d: %d, %d of them old; want %d, %d", k, c.all, c.old, total, old)
				}
			}
		}
	})
}

// TestErrorsAndFlushesAreAnswers, too: a drive that fails all requests is not silent, nor one that only flushes.
func TestErrorsAndFlushesAreAnswers(t *testing.T) {
	for name, c := range map[string]struct {
		answer        func(d *drive.Stats)
		reads, writes int64
	}{
		"an error": {func(d *drive.Stats) { d.Errors.Add(1) }, 1, 1},
		"a read":   {func(d *drive.Stats) { d.Requests[ssd.Read].Add(1) }, 1, 0},
		"a write":  {func(d *drive.Stats) { d.Requests[ssd.Write].Add(1) }, 0, 1},
		"a flush":  {func(d *drive.Stats) { d.Requests[ssd.Flush].Add(1) }, 0, 1},
	} {
		g := &Replicas{cfg: Config{Drive: &drive.Stats{}}}
		if g.driveWork().busy {
			t.Errorf("%s: a drive without requests is busy", name)
		}
		g.cfg.Drive.Inflight.Add(1)
		c.answer(g.cfg.Drive)
		if w := g.driveWork(); w.completed[readKind] != c.reads || w.completed[writeKind] != c.writes || !w.busy {
			t.Errorf("%s: %+v", name, *w)
		}
	}
}
