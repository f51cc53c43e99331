package kvstore_test

import (
	"fmt"
	"slices"
	"testing"

	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
)

// rest lets the store do all that it does of itself for ten seconds.
func (m *model) rest() {
	for until := m.now + 10e9; !m.crashed && m.now < until && m.step(); {
	}
}

// deleteMost deletes all keys but one in so many.
func (m *model) deleteMost(leave int) {
	for i := range m.keys {
		if i%leave > 0 {
			m.push(kvstore.Delete, i, absent)
		}
	}
	m.finish()
}

// list returns how many keys a List of all finds, and how many reads it takes.
func (m *model) list() (keys, reads int) {
	m.t.Helper()
	r, buf := m.dev.Reads, make([]byte, 1<<20)
	reply, n := m.reply, -1
	m.reply = func(p kvstore.Reply) { n = p.ValueLen }
	m.s.Submit(&kvstore.Request{Op: kvstore.List, Value: buf})
	for n < 0 {
		m.step()
	}
	m.reply = reply
	for range nvme.KVList(buf[:n]).All() {
		keys++
	}
	return keys, m.dev.Reads - r
}

// TestTheTableShrinks: after a mass deletion the table has a few times the segments that the rest needs, the next
// checkpoint is as much shorter, and a List reads no more than the segments that there are. When the keys come back,
// no segment is merged meanwhile.
func TestTheTableShrinks(t *testing.T) {
	const keys, each, leave = 13_000, 1, 20
	cfg := small(60)
	cfg.KeysPerSegment, cfg.Requests = each, 64
	r := newRig(t, 5*seeds(t)+4, cfg) // not eager
	m := newModel(r, keys, func() int { return 30 })
	checkpoint := func() (pages int) {
		m.s.FullCheckpoint()
		m.rest()
		return len(m.s.CheckpointPages())
	}
	fill := func(n int) {
		for i := range n {
			m.push(kvstore.Put, i, 30)
		}
		m.rest()
	}
	fill(keys)
	before, full := m.s.Stats(), checkpoint()
	if before.Segments < keys/each {
		t.Fatalf("%d segments for %d keys", before.Segments, keys)
	}
	m.deleteMost(leave)
	m.rest()
	st := m.s.Stats()
	if least, most := int64(keys/leave/each), int64(2*keys/leave/each); st.Segments < least || st.Segments > most {
		t.Fatalf("%d segments are left of %d, want %d to %d", st.Segments, before.Segments, least, most)
	}
	if n := st.Merges - before.Merges; n == 0 || n > before.Segments {
		t.Errorf("%d merges for %d segments", n, before.Segments-st.Segments)
	}
	if short := checkpoint(); short > full/2 {
		t.Errorf("a checkpoint has %d pages, and had %d: %d segments", short, full, st.Segments)
	}
	if n, reads := m.list(); n != keys/leave || reads > int(st.Segments) {
		t.Errorf("a List has %d keys and takes %d reads of %d segments", n, reads, st.Segments)
	}
	m.compare(true)
	m.power = m.rng.IntN(2) == 0
	m.crash()
	m.reopen()
	if n := m.s.Stats().Segments; n != st.Segments {
		t.Errorf("after a restart there are %d segments, want %d", n, st.Segments)
	}
	merges := m.s.Stats().Merges
	fill(keys / 4)
	m.compare(true)
	if n := m.s.Stats().Merges - merges; n > 0 {
		t.Errorf("%d segments were merged while the table grew", n)
	}
}

// shrinking returns a partition in which the table is to become shorter, after a crash.
func shrinking(t *testing.T, seed uint64) *model {
	cfg := small(40)
	cfg.KeysPerSegment, cfg.GroupBytes, cfg.FUA = 2, 512, seed%2 == 0
	cfg.Eager()
	m := newModel(newRig(t, seed, cfg), 300, func() int { return 20 })
	for i := range m.keys {
		m.push(kvstore.Put, i, 20)
	}
	m.rest()
	m.s.Checkpoint()
	m.settle()
	m.crash()
	return m
}

// work deletes three keys of four and overwrites others meanwhile.
func (m *model) work() {
	for i := 0; i < len(m.keys) && !m.crashed; {
		switch {
		case len(m.reqs) > 12:
		case i%4 > 0 && m.submit(kvstore.Delete, kvstore.Always, i, absent):
			i++
			continue
		case i%4 == 0 && m.submit(kvstore.Put, kvstore.Always, m.rng.IntN(len(m.keys)), 20):
			i++
			continue
		}
		m.step()
		if m.rng.IntN(60) == 0 {
			m.s.Checkpoint()
		}
	}
	m.rest()
}

// TestACrashAtEveryWriteOfMerges deletes most keys with a crash one write later each time, and crashes again while the
// table goes on to become shorter.
func TestACrashAtEveryWriteOfMerges(t *testing.T) {
	kvstore.PlainOnly(t)
	for seed := range kvstore.Seeds(t, 2) {
		base := shrinking(t, seed)
		whole := base.again(seed)
		whole.reopen()
		at := whole.dev.Writes
		whole.work()
		n := whole.dev.Writes - at
		if st := whole.s.Stats(); st.Merges < 50 {
			t.Fatalf("too few merges: %+v", st)
		}
		for at := 1; at <= n; at += every(1 + n/8) {
			m := base.again(seed)
			m.reopen()
			m.crashIn, m.power = at, at%2 == 0
			m.work()
			for range 2 {
				if !m.crashed {
					m.crash()
				}
				m.reopen()
				m.crashIn, m.power = 1+m.rng.IntN(60), m.rng.IntN(2) == 0
				m.work()
			}
			if m.crashed {
				m.reopen()
			}
			m.settle()
			m.compare(false)
		}
	}
}

// TestFailuresInEachStateOfCheckpointsAndMerges: one test a cell of the second table in docs/kvstore-states.md.
func TestFailuresInEachStateOfCheckpointsAndMerges(t *testing.T) {
	kvstore.PlainOnly(t)
	fresh := false // a cell is tested once
	for seed := range kvstore.Seeds(t, 2) {
		if fresh = !fresh; fresh && !*longFlag {
			continue
		}
		missing := 0
		for c, checkpoint := range checkpointStates {
			for s, merge := range []string{"none", "reads segments", "is being written", "broken"} {
				t.Run(fmt.Sprintf("%s, %s", checkpoint, merge), func(t *testing.T) {
					if !failInMerge(t, seed+uint64(10*c+s), checkpoint, merge) {
						t.Log("the state does not occur")
						missing++
					}
				})
			}
		}
		if missing > 3 {
			t.Errorf("%d states do not occur", missing)
		}
	}
}

// failInMerge lets a store fail in every way in a state, and reports whether it occurs.
func failInMerge(t *testing.T, seed uint64, checkpoint, merge string) bool {
	cfg := small(40)
	cfg.GroupBytes, cfg.KeysPerSegment, cfg.FUA = 512, 2, seed%2 == 0
	cfg.Eager()
	r := newRig(t, seed, cfg)
	r.sweep, r.dev.Fault = 3, good
	m := newModel(r, 400, func() int { return 20 })
	for _, f := range failures {
		if !m.reachMerge(checkpoint, merge) {
			return false
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
	return true
}

// reachMerge works until checkpoint and merge are in these states. Keys are put and deleted in turns, so that the table
// becomes longer and shorter.
func (m *model) reachMerge(checkpoint, merge string) bool {
	for n := range 20_000 {
		c, _ := m.s.States()
		now := m.s.MergeState()
		if c == checkpoint && now == merge {
			return true
		}
		op, size := kvstore.Put, 20
		if n/400%2 > 0 {
			op, size = kvstore.Delete, absent
		}
		if len(m.reqs) < 12 && m.rng.IntN(3) == 0 {
			m.submit(op, kvstore.Always, m.rng.IntN(len(m.keys)), size)
		}
		if m.rng.IntN(12) == 0 && checkpoint != "none" && (merge != "broken" || now == merge) {
			m.s.Checkpoint()
		}
		if merge == "broken" && now == "is being written" && m.rng.IntN(2) == 0 {
			m.failInFlight()
		}
		m.step()
	}
	return false
}

// TestNoMergeSpreadsALoss: the record of the last segment, or of the one that it would be merged into, is damaged. The
// table stays as it is, other keys are as they were, and it becomes shorter when what is lost was given up.
func TestNoMergeSpreadsALoss(t *testing.T) {
	for _, ofLast := range []bool{true, false} {
		cfg := small(40)
		cfg.KeysPerSegment, cfg.ScrubBytesPerSec = 1, 0
		var m *model
		var last, into, victim uint32
		// Not eager; with a seed by which the victim has a key.
		for seed, some := 5*seeds(t)+3, false; !some; seed += 5 {
			m = newModel(newRig(t, seed, cfg), 200, func() int { return 20 })
			for i := range m.keys {
				m.push(kvstore.Put, i, 20)
			}
			m.rest()
			last = uint32(m.s.Stats().Segments) - 1
			into = last - 1<<7
			victim = into
			if ofLast {
				victim = last
			}
			some = slices.ContainsFunc(m.keys, func(h history) bool { return m.s.SegmentOf(h.name) == victim })
		}
		lost := map[int]bool{}
		for i := range m.keys {
			if n := m.s.SegmentOf(m.keys[i].name); n == victim {
				at, _ := m.s.Place(m.keys[i].name)
				if len(lost) == 0 {
					m.dev.Flip(at+20, 0)
				}
				lost[i] = true
			}
		}
		if last>>7 != 1 || len(lost) == 0 {
			t.Fatalf("segment %d of %d has %d keys", victim, last+1, len(lost))
		}
		m.tolerant, m.hurt = true, lost
		for i := range m.keys {
			if n := m.s.SegmentOf(m.keys[i].name); n != last && n != into && i > 20 {
				m.push(kvstore.Delete, i, absent)
			}
		}
		m.finish()
		m.rest()
		if n := uint32(m.s.Stats().Segments); n != last+1 {
			t.Fatalf("the table has %d segments, want %d", n, last+1)
		}
		m.compare(false)
		m.s.Audit(true)
		m.rest()
		m.now += 1e12
		m.rest()
		if n := uint32(m.s.Stats().Segments); n > last/2 {
			t.Errorf("the table still has %d segments", n)
		}
		for i := range lost {
			m.keys[i].events = []event{{size: absent, state: done}}
		}
		m.compare(false)
	}
}
