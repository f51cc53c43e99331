package node

import (
	"bufio"
	"flag"
	"fmt"
	"hash/fnv"
	"os"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"jbofd/internal/buildtags"
	"jbofd/internal/telemetry"
)

var (
	seedFlag  = flag.Uint64("seed", 0, "run only this seed of the lab")
	traceFlag = flag.String("lab.trace", "", "write what happens in the run of -seed to this file")
	seedsFlag = flag.Int("lab.seeds", 400, "how many new seeds are run")
	failFlag  = flag.Int64("lab.failures", 3, "at how many seeds that fail the test ends")
)

// TestMain lets the heap grow further between collections: runs are short and leave nothing, and took a fifth of their
// time to collect.
func TestMain(m *testing.M) {
	debug.SetGCPercent(400)
	os.Exit(m.Run())
}

var tel = telemetry.New(telemetry.Options{Version: "lab", Node: "lab"})

// counts has the sums over all runs.
type counts struct {
	Host
	mu                  sync.Mutex
	crashes, stops, cut int
	freezes, strays     int
	swapped             int64
	steps               uint64
}

func (c *counts) add(l *Lab) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, h := range l.Hosts {
		c.connects += h.connects
		c.resets += h.resets
		c.shutdowns += h.shutdowns
		c.cuts += h.cuts
		c.aborts += h.aborts
		c.aborted += h.aborted
		c.lostCommands += h.lostCommands
		c.commands += h.commands
	}
	c.crashes += l.crashes
	c.stops += l.stops
	c.cut += l.cut
	c.freezes += l.freezes
	c.strays += l.strays
	c.swapped += l.swapped
	c.steps += l.Sim.Steps()
}

func (c *counts) String() string {
	return fmt.Sprintf("%d steps, %d commands of which %d lost their connection, %d associations, %d resets, %d "+
		"shutdowns, %d cuts, %d aborts of which %d took effect, %d values swapped, %d crashes, %d stops of which %d "+
		"did not wait for a drive, %d freezes in which %d associations were cut off",
		c.steps, c.commands, c.lostCommands, c.connects, c.resets, c.shutdowns, c.cuts, c.aborts, c.aborted, c.swapped,
		c.crashes, c.stops, c.cut, c.freezes, c.strays)
}

// run runs the seeds from first on, and ends when -lab.failures of them have failed.
func run(t *testing.T, first uint64, n int) {
	var total counts
	var next, failed atomic.Int64
	var workers sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		workers.Go(func() {
			for failed.Load() < *failFlag {
				i := next.Add(1) - 1
				if i >= int64(n) {
					return
				}
				l := New(Options{Seed: first + uint64(i), Telemetry: tel})
				if v := l.Run(); v != "" {
					t.Errorf("-seed %d: %s", first+uint64(i), v)
					failed.Add(1)
				}
				total.add(l)
			}
		})
	}
	workers.Wait()
	t.Logf("%d seeds: %s", min(next.Load(), int64(n)), &total)
}

// fewer returns n, or a part of it under the race detector, where a run takes ten times as long. A run has one
// goroutine; the detector is useful only for telemetry, which parallel runs share.
func fewer(n, part int) int {
	if buildtags.Race {
		n = (n + part - 1) / part
	}
	return n
}

// TestOneSeed runs the seed given by -seed, with a trace to the file given by -lab.trace.
func TestOneSeed(t *testing.T) {
	if *seedFlag == 0 {
		return
	}
	o := Options{Seed: *seedFlag, Telemetry: tel}
	if *traceFlag != "" {
		f, err := os.Create(*traceFlag)
		if err != nil {
			t.Fatal(err)
		}
		w := bufio.NewWriter(f)
		defer func() {
			if err := w.Flush(); err != nil {
				t.Error(err)
			}
			if err := f.Close(); err != nil {
				t.Error(err)
			}
		}()
		o.Trace = func(line string) { fmt.Fprintln(w, line) }
	}
	l := New(o)
	if v := l.Run(); v != "" {
		t.Error(v)
	}
}

// TestHostsOfANodeReadWhatTheyWrote runs the lab with new seeds: no answer contradicts the model, every command is
// answered, every association comes back, and nothing is left over in the end.
func TestHostsOfANodeReadWhatTheyWrote(t *testing.T) {
	if *seedFlag != 0 {
		return
	}
	run(t, uint64(time.Now().UnixNano()), fewer(*seedsFlag, 100))
}

// TestFixedSeeds runs the same seeds each time.
func TestFixedSeeds(t *testing.T) {
	if *seedFlag == 0 {
		run(t, 1, fewer(20, 5))
	}
}

// TestASeedRepeatsItself: a run does the same things at the same times whenever its seed is run.
func TestASeedRepeatsItself(t *testing.T) {
	if *seedFlag != 0 {
		return
	}
	for seed := range uint64(fewer(4, 4)) {
		var sums [2]uint64
		for i := range sums {
			h := fnv.New64a()
			l := New(Options{Seed: seed + 100, Telemetry: tel, Trace: func(line string) { fmt.Fprintln(h, line) }})
			l.Run()
			sums[i] = h.Sum64()
		}
		if sums[0] != sums[1] {
			t.Errorf("seed %d takes two courses", seed+100)
		}
	}
}
