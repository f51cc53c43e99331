package pipeline

import (
	"flag"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

var seed = flag.Uint64("seed", uint64(time.Now().UnixNano()), "seed of the random tests")

// TestFIFOAgainstAListModel drives a FIFO and a plain list with the same events.
func TestFIFOAgainstAListModel(t *testing.T) {
	t.Logf("-seed %d", *seed)
	rng := rand.New(rand.NewPCG(*seed, 0))
	for range 200 {
		depth := 1 + rng.IntN(10)
		f := NewFIFO(depth)
		f.SetTenant(0, 0, 1)
		var queued, device, paused []Tag
		var next Tag
		var dst []Tag
		for step := range 500 {
			now := int64(step)
			switch k := rng.IntN(7); {
			case k == 0:
				f.Enqueue(now, IO{Tag: next, Op: Read, LenBytes: 4096})
				queued = append(queued, next)
				next++
			case k == 1:
				dst = f.Dispatch(now, append(dst[:0], 4711))
				if dst[0] != 4711 {
					t.Fatal("dispatch does not append")
				}
				n := max(0, min(depth-len(device), len(queued)))
				if len(dst)-1 != n {
					t.Fatalf("dispatched %d with %d queued and %d of %d at the device, want %d", len(dst)-1,
						len(queued), len(device), depth, n)
				}
				for i, tag := range dst[1:] {
					if tag != queued[i] {
						t.Fatalf("place %d: tag %d, want %d", i, tag, queued[i])
					}
				}
				device = append(device, queued[:n]...)
				queued = queued[n:]
			case k == 2 && len(device) > 0:
				i := rng.IntN(len(device))
				f.Complete(now, device[i], Result{})
				device = slices.Delete(device, i, i+1)
			case k == 3 && len(device) > 0:
				i := rng.IntN(len(device))
				f.Pause(now, device[i])
				paused = append(paused, device[i])
				device = slices.Delete(device, i, i+1)
			case k == 4 && len(paused) > 0:
				f.Resume(now, paused[0])
				device = append(device, paused[0])
				paused = paused[1:]
			case k == 6 && len(paused) > 0: // its host will never send the data
				f.Complete(now, paused[0], Result{Failed: true})
				paused = paused[1:]
			case k == 5 && len(queued) > 0:
				i := rng.IntN(len(queued))
				f.Cancel(now, queued[i])
				queued = slices.Delete(slices.Clone(queued), i, i+1)
			}
			if f.queued != len(queued) || f.inflight != len(device) {
				t.Fatalf("it counts %d queued, %d in flight; want %d and %d", f.queued, f.inflight, len(queued),
					len(device))
			}
			if _, ok := f.NextWake(); ok {
				t.Fatal("a FIFO waits for time")
			}
		}
	}
}

func TestCompletionWithoutDispatchPanics(t *testing.T) {
	for name, do := range map[string]func(*FIFO){"complete": func(f *FIFO) { f.Complete(0, 0, Result{}) },
		"pause": func(f *FIFO) { f.Pause(0, 0) }} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: no panic", name)
				}
			}()
			do(NewFIFO(1))
		}()
	}
}

func TestFIFOAllocatesNothing(t *testing.T) {
	f := NewFIFO(64)
	f.SetTenant(0, 0, 1)
	dst := make([]Tag, 0, 64)
	if n := testing.AllocsPerRun(100, func() {
		for i := range Tag(64) {
			f.Enqueue(0, IO{Tag: i})
		}
		for _, tag := range f.Dispatch(0, dst[:0]) {
			f.Pause(0, tag)
			f.Resume(0, tag)
			f.Complete(0, tag, Result{})
		}
	}); n != 0 {
		t.Errorf("%v allocations, want 0", n)
	}
}

func TestEveryOpHasANameAndSaysIfItMutates(t *testing.T) {
	mutating := map[Op]bool{Write: true, Deallocate: true, WriteZeroes: true, DeallocateRanges: true,
		CompareWrite: true}
	for op := range Ops {
		if op.String() == "" || op.Mutates() != mutating[op] {
			t.Errorf("%d: %q, mutates %v", op, op, op.Mutates())
		}
	}
	if got := Ops.String(); got != "Op(9)" {
		t.Errorf("unknown operation is called %q", got)
	}
}
