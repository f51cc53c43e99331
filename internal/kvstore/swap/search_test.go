package swap

import (
	"errors"
	"slices"
	"testing"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/units"
)

// vanish has the drive of a source vanish, and come back, while the areas and the other sources go on. It returns how
// many records the areas have found, and how often one had to wait for its writes.
func (w *world) vanish(i int) (found, waited int) {
	w.t.Helper()
	all, h := w.sources, w.sources[i]
	w.lose(h)
	for k, a := range w.areas { // what an area has not taken of a store that is given up is dropped
		a.in = slices.DeleteFunc(a.in, func(p Append) bool { return p.Source == h.m.areas[k].Source })
	}
	w.sources = slices.Delete(slices.Clone(all), i, i+1)
	w.random(w.rng.IntN(2)*100, 6)
	var again []*Search
	for _, a := range w.areas {
		r := a.m.Search([16]byte{0xB0, byte(i)})
		for ; r == nil; r = a.m.Search([16]byte{0xB0, byte(i)}) {
			w.step()
			waited++
		}
		again = append(again, r)
	}
	for k, a := range w.areas {
		err := again[k].Read(func(offset units.ExtentOffset, b []byte) error {
			for range w.rng.IntN(50) {
				w.step()
			}
			return readFrom(a.disk.Visible)(offset, b)
		}, heap)
		if err != nil {
			w.t.Fatalf("area %d: %v", k, err)
		}
		a.m.Adopt(again[k])
		for _, s := range a.m.Sources() {
			if s.UUID == [16]byte{0xB0, byte(i)} && !s.Attached {
				found += s.Keys
			}
		}
	}
	w.sources = all
	w.begin(i)
	return found, waited
}

// TestASourceAttachesAgain: the drive of a source vanishes and comes back again and again while the areas work, and
// with failures. Every key is linearizable.
func TestASourceAttachesAgain(t *testing.T) {
	found, waited, laps := 0, 0, uint64(0)
	for i := range seeds(t, 12) {
		w := newWorld(t, i, 2, 2, 24)
		w.long, w.fickle, w.slow = i%2 == 1, i%4 >= 2, i%3 == 0
		for k := range 8 {
			w.fail = []float64{0, 0.02, 0.3}[w.rng.IntN(3)]
			w.random(200, 6)
			n, m := w.vanish(k % 2)
			found, waited = found+n, waited+m
			w.fail = 0
			w.settle()
			if w.rng.IntN(3) == 0 {
				w.random(w.rng.IntN(50), 6)
				w.crash()
				w.open()
			}
			w.verify()
		}
		laps += w.laps
	}
	t.Logf("%d records found again, %d steps waited, %d laps", found, waited, laps)
	if found < 100 || waited == 0 || laps < 10 {
		t.Error("not much has happened")
	}
}

// TestALogThatHasLostRecordsIsNotAttachedAgain: what is not found is not taken for nothing.
func TestALogThatHasLostRecordsIsNotAttachedAgain(t *testing.T) {
	w := newWorld(t, 1, 1, 1, 24)
	for w.areas[0].m.sources == nil || !w.areas[0].m.sources[0].live() {
		w.random(50, 6)
	}
	w.settle()
	a, id := w.areas[0], [16]byte{0xB0}
	if _, err := a.m.Attach(id); !errors.Is(err, ErrAttached) {
		t.Fatal(err)
	}
	r := a.m.Search(id)
	place := a.m.sources[0].last
	disk := slices.Clone(a.disk.Visible)
	disk[a.m.log.Offset(place)+8] ^= 1
	if err := r.Read(readFrom(disk), heap); !errors.Is(err, ErrArea) || !errors.Is(err, format.ErrCorrupt) {
		t.Errorf("a damaged record: %v", err)
	}
	if err := a.m.Search(id).Read(func(units.ExtentOffset, []byte) error { return errInjected }, heap); !errors.Is(err,
		errInjected) {
		t.Errorf("a failed read: %v", err)
	}
	if _, err := a.m.Attach(id); !errors.Is(err, ErrAttached) {
		t.Errorf("after these: %v", err)
	}
}
