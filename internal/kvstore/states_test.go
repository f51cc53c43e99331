package kvstore_test

import (
	"fmt"
	"testing"

	"jbofd/internal/kvstore"
	"jbofd/internal/lab"
	"jbofd/internal/ssd"
)

// The states of a checkpoint and of a split, which the table in docs/kvstore-states.md has as rows and columns, and the
// failures of each cell.
var (
	checkpointStates = []string{"none", "waits for the key log", "notes what is live", "opens a chunk", "writes pages",
		"writes superblocks", "frees chunks"}
	splitStates = []string{"none", "reads sources", "is being written", "written in part", "will be repeated",
		"waits to be repeated", "broken"}
	failures = []struct {
		name string
		do   func(m *model)
	}{
		{"kill -9", func(m *model) { m.power = false; m.crash() }},
		{"loss of power", func(m *model) { m.power = true; m.crash() }},
		{"writes fail, then kill -9", func(m *model) {
			m.failInFlight()
			m.power = false
			m.crash()
		}},
		{"I/Os fail, and it goes on", func(m *model) { m.failInFlight() }},
	}
)

// failInFlight lets all I/Os in flight fail, some of them after they were done in part.
func (m *model) failInFlight() {
	n := len(m.dev.Flights)
	m.dev.Fault = func(*ssd.Request) lab.Outcome {
		return []lab.Outcome{lab.FailUndone, lab.FailTorn, lab.FailDone}[m.rng.IntN(3)]
	}
	for ; n > 0 && m.dev.Next() >= 0; n-- {
		i := m.dev.Next()
		m.now = max(m.now, m.dev.Flights[i].DueNS)
		q, err := m.dev.End(i)
		m.s.Complete(uint32(q.Tag), err)
	}
	m.dev.Fault = good
}

// good lets no request fail. The model knows from it that some have failed before.
func good(*ssd.Request) lab.Outcome { return lab.Good }

// reach works until checkpoint and split are in these states, with bursts of new keys, and checkpoints in between. It
// returns false if they were not for long.
func (m *model) reach(checkpoint, split string, first *int) bool {
	for n := range 20_000 {
		if c, s := m.s.States(); c == checkpoint && s == split {
			return true
		}
		switch {
		case *first == len(m.keys): // all keys are there: begin anew, in a new partition
			return false
		case m.rng.IntN(3) == 0 && len(m.reqs) < 60 && m.submit(kvstore.Put, kvstore.Always, *first, 20):
			*first++
		case m.rng.IntN(10) == 0 && len(m.reqs) < 60:
			m.submit(kvstore.Put, kvstore.Always, m.rng.IntN(*first+1)%len(m.keys), 20)
		}
		if every := 12; checkpoint != "none" || n%4000 < 1000 {
			if split == "broken" {
				every = 60
			}
			if m.rng.IntN(every) == 0 {
				m.s.Checkpoint()
			}
		}
		if _, s := m.s.States(); split == "broken" && s == "is being written" && m.rng.IntN(3) == 0 {
			m.failInFlight()
		}
		m.step()
	}
	return false
}

// TestFailuresInEachStateOfCheckpointsAndSplits: one test a cell of the table in docs/kvstore-states.md.
func TestFailuresInEachStateOfCheckpointsAndSplits(t *testing.T) {
	kvstore.PlainOnly(t)
	t.Parallel()
	fresh := false // a cell is tested once
	for seed := range kvstore.Seeds(t, 2*times(1)) {
		if fresh = !fresh; fresh && !*longFlag {
			continue
		}
		// A checkpoint that begins marks the round of splits under way to be repeated, unless none of its writes has
		// ended, and takes longer than such a round. Therefore ten cells are rare.
		missing := 0
		for c, checkpoint := range checkpointStates {
			for s, split := range splitStates {
				t.Run(fmt.Sprintf("%s, %s", checkpoint, split), func(t *testing.T) {
					cfg := small(60)
					cfg.GroupBytes, cfg.KeysPerSegment, cfg.FUA = 512, 2, s%2 == 0
					r := newRig(t, seed+uint64(10*c+s), cfg)
					r.sweep, r.dev.Fault = 3, good
					m, first := newModel(r, 6000, func() int { return 20 }), 0
					for _, f := range failures {
						if !m.reach(checkpoint, split, &first) {
							t.Log("the state does not occur")
							missing++
							break
						}
						f.do(m)
						if m.crashed {
							m.reopen()
						}
					}
					m.finish()
					m.settle()
					r.dev.Fault = nil
					m.compare(false)
				})
			}
		}
		if missing > 15 {
			t.Errorf("%d states do not occur", missing)
		}
	}
}
