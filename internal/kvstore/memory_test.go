package kvstore_test

import (
	"errors"
	"math/rand/v2"
	"strings"
	"testing"

	"jbofd/internal/kvstore"
)

var errNoPages = errors.New("no pages")

// TestOpeningWithoutMemorySaysWhatIsMissing denies each of the buffers in turn, for a new partition and for an existing
// one. With memory the same partition opens.
func TestOpeningWithoutMemorySaysWhatIsMissing(t *testing.T) {
	kvstore.PlainOnly(t)
	t.Parallel()
	m := newModel(newRig(t, seeds(t), small(30)), 200, func() int { return 500 })
	m.random(1000, 16)
	m.stop()
	for _, format := range []bool{false, true} {
		m.cfg.Format = format
		total, failAt := 0, -1
		m.cfg.Alloc = func(n int) ([]byte, error) {
			if total++; total-1 == failAt {
				return nil, errNoPages
			}
			return make([]byte, n), nil
		}
		if format {
			defer func(disk []byte) { copy(m.dev.Visible, disk) }(append([]byte(nil), m.dev.Visible...))
		}
		if err := m.open(); err != nil {
			t.Fatal(err)
		}
		all := total
		if all < 50 {
			t.Fatalf("opening takes %d buffers", all)
		}
		for failAt = range all {
			total = 0
			err := m.open()
			if !errors.Is(err, kvstore.ErrNoMemory) || !errors.Is(err, errNoPages) ||
				!strings.Contains(err.Error(), "not enough memory for ") {
				t.Fatalf("without buffer %d of %d: %v", failAt, all, err)
			}
		}
		if failAt = -1; format {
			continue
		}
		if err := m.open(); err != nil {
			t.Fatal(err)
		}
		m.compare(true)
		m.stop()
	}
}

// TestRequestsThatLackMemoryChangeNothing: a SegTbl of 16 segments makes segments longer than the preallocated buffers,
// and few longer buffers are granted. Requests end with NoMemory, and neither they nor splits and compaction that lack
// memory lose a key or get stuck.
func TestRequestsThatLackMemoryChangeNothing(t *testing.T) {
	kvstore.PlainOnly(t)
	t.Parallel()
	refused, compactions := 0, int64(0)
	for seed := range kvstore.Seeds(t, kvstore.Sized(4, 2)) {
		cfg := small(30)
		cfg.SegTbl = make([]byte, 5*24)
		served := false
		rng := rand.New(rand.NewPCG(seed, 5))
		cfg.Alloc = func(n int) ([]byte, error) {
			if served && rng.IntN(40) > 0 {
				return nil, errNoPages
			}
			return make([]byte, n), nil
		}
		r := newRig(t, seed, cfg)
		served = true
		m := newModel(r, 14000, func() int { return 60 })
		for i := range 14000 {
			m.push(kvstore.Put, i, 60)
		}
		m.random(6000, 32)
		refused += m.noMemory
		m.compare(false)
		compactions += m.s.Stats().Compactions
		served = false
		m.stop()
		m.reopen()
	}
	if refused == 0 || compactions == 0 {
		t.Errorf("%d requests lacked memory, %d compactions: too little has happened", refused, compactions)
	}
}
