package swap

import (
	"encoding/binary"
	"testing"

	"jbofd/internal/kvstore/format"
)

// TestRandomHistories: every key of every source is linearizable, wherever its values are.
func TestRandomHistories(t *testing.T) {
	var sum = newWorld(t, 1, 1, 1, 1).sum
	laps := uint64(0)
	for i := range seeds(t, 16) {
		w := newWorld(t, i, 2, 2, 24)
		w.long, w.fickle, w.slow = i%2 == 1, i%4 >= 2, i%3 == 0
		w.random(1500, 8)
		w.verify()
		for _, h := range w.sources {
			w.count(h)
		}
		sum.swapped += w.sum.swapped
		sum.returned += w.sum.returned
		sum.moved += w.sum.moved
		sum.reads += w.sum.reads
		sum.refused += w.sum.refused
		laps += w.laps
	}
	t.Logf("%+v, %d laps", sum, laps)
	if sum.swapped < 1000 || sum.returned < 500 || sum.reads < 100 || sum.moved < 100 || sum.refused < 10 || laps < 10 {
		t.Errorf("not much has happened: %+v, %d laps", sum, laps)
	}
}

// TestCrashAtAnyWrite: the power is lost at each write of areas and manifests in turn, and all writes under way are
// torn.
func TestCrashAtAnyWrite(t *testing.T) {
	for s := range seeds(t, 20) {
		w := newWorld(t, s, 2, 2, 12)
		w.long, w.fickle, w.slow = s%2 == 0, s%4 == 0, s%3 == 0
		for at := range 20 {
			w.crashIn = 1 + at*3
			w.random(100000, 6)
			w.crashIn = 0
			w.open()
			w.verify()
			w.random(20, 6)
		}
	}
}

// TestCrashesWithFailures: in addition, requests of all devices and stores fail.
func TestCrashesWithFailures(t *testing.T) {
	errors, indeterminate := int64(0), int64(0)
	for i := range seeds(t, 20) {
		w := newWorld(t, i, 2, 2, 12)
		w.long, w.fickle, w.slow = i%2 == 1, i%4 >= 2, i%3 == 0
		for k := range 8 {
			w.fail = []float64{0, 0.02, 0.3}[w.rng.IntN(3)]
			if k%2 == 1 {
				w.crashIn = 1 + w.rng.IntN(150)
			}
			w.random(300, 5)
			w.fail, w.crashIn = 0, 0
			if w.crashed {
				w.open()
			}
			w.settle()
			w.verify()
		}
		errors += w.sum.errors
		indeterminate += w.sum.indeterminate
	}
	t.Logf("%d errors, %d indeterminate", errors, indeterminate)
	if errors == 0 || indeterminate == 0 {
		t.Error("nothing has failed")
	}
}

// TestAnAreaKeepsUnreleasedRecords: the area is filled to the last byte again and again, with a loss of power at any
// write.
func TestAnAreaKeepsUnreleasedRecords(t *testing.T) {
	laps, refusals := uint64(0), int64(0)
	for i := range seeds(t, 15) {
		w := newWorld(t, i, 0, 1, 0)
		a := w.areas[0]
		// The records of each source in order, by version. Records in flight may or may not exist.
		type record struct {
			version uint64
			group   format.LogOffset
		}
		live := [2][]record{}
		version := uint64(0)
		for range 25 {
			numbers := [2]int{}
			for k := range numbers {
				at, err := a.m.Attach([16]byte{1, byte(k)})
				if err != nil {
					t.Fatal(err)
				}
				numbers[k] = at.Source
				found := map[uint64]FoundRecord{}
				for _, g := range at.Records {
					found[binary.LittleEndian.Uint64(g.Key[:])] = g
				}
				for _, r := range live[k] {
					g, ok := found[r.version]
					if !ok || g.Place-format.LogOffset(g.At) != r.group || g.ValueLen != uint32(r.version%1000) {
						t.Fatalf("record %d of source %d: found %v, %+v", r.version, k, ok, g)
					}
				}
				if len(live[k]) > 0 {
					a.m.Release(numbers[k], live[k][0].group)
				} else {
					a.m.Release(numbers[k], at.Tail)
				}
			}
			pending := map[uint32]uint64{}
			crashIn := 1 + w.rng.IntN(400)
			for crashIn > 0 {
				w.now += retryNS
				k := w.rng.IntN(2)
				switch w.rng.IntN(8) {
				case 0: // release some
					if n := len(live[k]); n > 0 {
						n = min(n-1, w.rng.IntN(6)) // less than comes
						live[k] = live[k][n:]
						a.m.Release(numbers[k], live[k][0].group)
					}
				case 1, 2, 3:
					if len(a.io) == 0 {
						break
					}
					n := w.rng.IntN(len(a.io))
					q := a.io[n]
					if crashIn--; crashIn == 0 {
						break // torn below, with the others
					}
					a.io = append(a.io[:n], a.io[n+1:]...)
					err, _ := w.device(a.disk, q)
					a.m.Complete(q.Tag, err)
				default:
					var key [8]byte
					version++
					binary.LittleEndian.PutUint64(key[:], version)
					p := Append{Source: numbers[k], Kind: format.SwapPut, Key: key[:],
						Value: make([]byte, version%1000), Tag: uint32(version)}
					if a.m.Submit(&p) {
						pending[p.Tag] = version
					}
				}
				a.m.Turn(w.now, &a.act)
				a.io = append(a.io, a.act.IOs...)
				for _, o := range a.act.Outcomes {
					for k := range numbers {
						if o.Source == numbers[k] && o.Result == Stored {
							live[k] = append(live[k], record{pending[o.Tag], o.Place - format.LogOffset(o.At)})
						}
					}
				}
				a.act.IOs, a.act.Outcomes = nil, nil
			}
			refusals += a.m.stats.Refusals
			w.crash()
			w.open()
			a = w.areas[0]
		}
		laps += uint64(a.m.tail) / a.m.log.LenBytes
	}
	t.Logf("%d laps, %d refusals", laps, refusals)
	if refusals < 100 {
		t.Errorf("%d refusals", refusals)
	}
}
