package kvop

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// modelWrite is a write that is outstanding, or has ended without an answer and counts until a time.
type modelWrite struct {
	n               *Number
	seq, hash, list uint64
	nth             int // of its list
	late            bool
	end             time.Duration
}

// numbersModel has the writes of a Numbers.
type numbersModel struct {
	s          Numbers
	open, held []modelWrite
	begun      [numberLists]int
	last       uint64
	now        time.Duration
}

// begin begins a write and verifies what is said to be answered: all of its key that are outstanding are not, nor is
// what ended unanswered a short time ago. Such writes of several keys of a list count for all of them, until the last
// one may be forgotten.
func (m *numbersModel) begin(t *testing.T, hash uint64) {
	n, list := new(Number), hash%numberLists
	seq, answered := m.s.Begin(n, hash, m.now)
	if seq != m.last+SeqPerOp {
		t.Fatalf("number %d follows %d", seq, m.last)
	}
	m.last = seq
	m.begun[list]++
	m.open = append(m.open, modelWrite{n: n, seq: seq, hash: hash, list: list, nth: m.begun[list]})
	want := seq
	for _, w := range m.open {
		if w.hash == hash {
			want = min(want, w.seq)
		}
	}
	same, several, lowest := false, false, seq
	for _, w := range m.held {
		if w.list == list {
			same, several, lowest = same || w.hash == hash, several || w.hash != hash, min(lowest, w.seq)
		}
	}
	several = several && (same || m.severalHeld(list))
	if m.now < m.until(list) && (same || several) {
		want = min(want, lowest)
	}
	if answered != want {
		t.Fatalf("%d are answered, want %d; open %v, held %v, at %d", answered, want, m.open, m.held, m.now)
	}
}

// severalHeld reports whether writes of several keys of a list ended unanswered.
func (m *numbersModel) severalHeld(list uint64) bool {
	hashes := map[uint64]bool{}
	for _, w := range m.held {
		if w.list == list {
			hashes[w.hash] = true
		}
	}
	return len(hashes) > 1
}

// until is when all that ended unanswered in a list may be forgotten.
func (m *numbersModel) until(list uint64) (end time.Duration) {
	for _, w := range m.held {
		if w.list == list {
			end = max(end, w.end)
		}
	}
	return end
}

func (m *numbersModel) end(t *testing.T, i int, answered bool, until time.Duration) {
	w := m.open[i]
	m.open = slices.Delete(m.open, i, i+1)
	if !answered {
		if m.now >= m.until(w.list) { // what was held before is over
			m.held = slices.DeleteFunc(m.held, func(h modelWrite) bool { return h.list == w.list })
		}
		w.end = until
		m.held = append(m.held, w)
	}
	if m.s.End(w.n, answered, m.now, until) != w.late {
		t.Fatalf("a write that was late, or was not: %+v", w)
	}
	if *w.n != (Number{}) {
		t.Fatalf("a write that has ended has number %v", *w.n)
	}
	m.s.Late(w.n) // of no write
	m.s.End(w.n, !answered, m.now, until+1000)
}

// mustWait verifies whether a write of a key must wait: one of them is late, or was overtaken by maxAhead writes and is
// late from now on.
func (m *numbersModel) mustWait(t *testing.T, hash uint64) {
	want, late := false, 0
	for i := range m.open {
		w := &m.open[i]
		if w.hash != hash || want {
			continue
		}
		w.late = w.late || m.begun[w.list]-w.nth >= maxAhead
		want = w.late
	}
	if got := m.s.MustWait(hash); got != want {
		t.Fatalf("a write of %d must wait: %t", hash, got)
	}
	for _, w := range m.open {
		if w.late {
			late++
		}
	}
	for i := range m.s.lists {
		late -= m.s.lists[i].late
	}
	if late != 0 {
		t.Fatalf("%d more writes are late than counted", late)
	}
}

// TestNumbersSayWhatIsAnswered, and which writes must wait. Sequence numbers ascend by SeqPerOp.
func TestNumbersSayWhatIsAnswered(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 21))
	for range 100 {
		m := &numbersModel{}
		lists, most := 1+rng.Uint64N(3), 1+rng.IntN(40)
		anyKey := func() uint64 { return rng.Uint64N(lists) + numberLists*rng.Uint64N(4) }
		for range 500 {
			m.now += time.Duration(rng.IntN(3))
			switch {
			case len(m.open) < most && rng.IntN(2) == 0:
				m.begin(t, anyKey())
			case len(m.open) > 0 && rng.IntN(6) == 0:
				w := &m.open[rng.IntN(len(m.open))]
				w.late = true
				m.s.Late(w.n)
			case len(m.open) > 0:
				i := rng.IntN(len(m.open))
				if most > 20 && i == 0 && rng.IntN(8) > 0 {
					continue // it is overtaken
				}
				m.end(t, i, rng.IntN(8) > 0, m.now+time.Duration(1+rng.IntN(60)))
			}
			if rng.IntN(3) == 0 {
				m.mustWait(t, anyKey())
			}
		}
	}
}

// TestNumbersHoldBackTheirOwnKeyOnly: a stuck write leaves the watermarks of other keys alone, also those of keys in
// its list, and so does one that ended without an answer.
func TestNumbersHoldBackTheirOwnKeyOnly(t *testing.T) {
	var s Numbers
	var stuck, lost, n Number
	seq, _ := s.Begin(&stuck, 7, 0)
	s.Begin(&lost, 7, 0)
	s.End(&lost, false, 0, 1000)
	for i := range uint64(10) {
		for _, other := range []uint64{8, 7 + numberLists} {
			own, answered := s.Begin(&n, other, 0)
			if answered != own {
				t.Errorf("write %d of %d: %d are answered", own, other, answered)
			}
			s.End(&n, true, 0, 0)
		}
		if _, answered := s.Begin(&n, 7, 0); answered != seq {
			t.Errorf("%d are answered of the key of the stuck write %d", answered, seq)
		}
		s.End(&n, true, 0, 0)
		if s.MustWait(7) || s.MustWait(7+numberLists) {
			t.Errorf("a write must wait after %d others", i)
		}
	}
	for range maxAhead {
		s.Begin(&n, 7+numberLists, 0)
		s.End(&n, true, 0, 0)
	}
	if !s.MustWait(7) || s.MustWait(7+numberLists) || !s.End(&stuck, true, 0, 0) || s.MustWait(7) {
		t.Error("a write that was overtaken often is not waited for, or one of another key is")
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
