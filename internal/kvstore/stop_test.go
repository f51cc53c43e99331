package kvstore_test

import (
	"testing"

	"jbofd/internal/kvstore"
	"jbofd/internal/kvstore/format"
	"jbofd/internal/lab"
	"jbofd/internal/ssd"
)

// TestAStoreStopsAfterItsLastRequest, whatever the request is and however it ends: the last checkpoint needs no further
// event.
func TestAStoreStopsAfterItsLastRequest(t *testing.T) {
	kvstore.PlainOnly(t)
	t.Parallel()
	seed := seeds(t)
	for i := range uint64(times(100)) {
		r := newRig(t, seed+i, variant(seed+i, 24))
		m := newModel(r, 12, sizes(r.rng, 3000))
		m.random(100, 24)
		for range 1 + r.rng.IntN(6) {
			op, cond := mixed[r.rng.IntN(len(mixed))], kvstore.Always
			if op == kvstore.Put && r.rng.IntN(2) == 0 {
				cond = []kvstore.Condition{kvstore.IfAbsent, kvstore.IfPresent}[r.rng.IntN(2)]
			}
			m.submit(op, cond, r.rng.IntN(len(m.keys)), m.size())
		}
		m.stop()
	}
}

// A setting brings a store into the states in which TestAStoreStopsInOrder stops it.
type setting struct {
	name string
	cfg  func(*kvstore.Config)
	// keys have values of about size bytes.
	keys, size int
	ops        []kvstore.Op
	// before is done to a partition that is in use.
	before func(*model)
	// fault is what the drive does until the store is stopped.
	fault func(m *model) func(*ssd.Request) lab.Outcome
	// states are those that are waited for, one after the other, each with a stop; see kvstore.Store.Doing.
	states []string
}

var settings = []setting{
	{name: "served", keys: 300, size: 900, ops: mixed, states: []string{"nothing", "a request reads",
		"a request writes", "a chunk is opened", "a checkpoint waits for the key log",
		"a checkpoint's pages are written", "a checkpoint's superblocks are written"}},
	{name: "scrubbed fast", cfg: func(c *kvstore.Config) { c.ScrubBytesPerSec = 1 << 30 }, keys: 300, size: 900,
		ops: mixed, states: []string{"the scrub reads"}},
	{name: "scrubbed slowly", cfg: func(c *kvstore.Config) { c.ScrubBytesPerSec = 10000 }, keys: 300, size: 900,
		before: func(m *model) { m.settle() }, states: []string{"the scrub waits for its rate"}},
	{name: "with nothing to scrub", cfg: func(c *kvstore.Config) { c.ScrubBytesPerSec = 10000 }, keys: 30, size: 300,
		before: func(m *model) { m.settle() }, states: []string{"the scrub waits for the next round"}},
	{name: "scrubbed and damaged", cfg: func(c *kvstore.Config) { c.ScrubBytesPerSec = 1 << 30 }, keys: 900, size: 900,
		before: func(m *model) {
			m.settle()
			for range 20 {
				m.damage(false, func(kind format.Kind) bool { return kind == format.ValueLog })
			}
			m.hurt = nil
		}, ops: []kvstore.Op{kvstore.Exist, kvstore.Put}, states: []string{"the scrub asks about a damaged value",
			"a suspicious chunk waits", "a chunk is damaged"}},
	{name: "audited", keys: 900, size: 900, before: func(m *model) { m.s.Audit(false) }, ops: mixed,
		states: []string{"an audit looks at segments"}},
	{name: "compacted", keys: 1800, size: 900, ops: updates, states: []string{"a victim is read", "values are moved",
		"segments are moved", "Puts wait for compaction", "Puts wait for a checkpoint"}},
	{name: "compacted by pieces", cfg: func(c *kvstore.Config) {
		c.ChunkBytes, c.PartitionBytes = 1<<20, 27<<20
	}, keys: 14000, size: 900, ops: updates, states: []string{"a victim is read", "values are moved"}},
	{name: "without checkpoints", keys: 1200, size: 900, ops: []kvstore.Op{kvstore.Put, kvstore.Delete},
		fault: noPages, states: []string{"a checkpoint is tried again", "Puts wait for a checkpoint",
			"segments wait for a checkpoint"}},
	{name: "unreadable now and then", keys: 1800, size: 900, ops: updates,
		fault: sometimes(ssd.Read, 0.2, lab.FailUndone), states: []string{"a victim could not be read"}},
	{name: "growing and unreadable now and then", keys: 3000, size: 40, ops: []kvstore.Op{kvstore.Put},
		fault: sometimes(ssd.Read, 0.2, lab.FailUndone), states: []string{"a split is tried again"}},
	{name: "growing and unwritable now and then", keys: 3000, size: 40, ops: []kvstore.Op{kvstore.Put},
		fault: sometimes(ssd.Write, 0.2, lab.FailTorn), states: []string{"a split has failed",
			"a checkpoint is tried again"}},
	{name: "volatile", cfg: func(c *kvstore.Config) { c.FUA, c.Volatile = false, true }, keys: 1800, size: 900,
		ops: updates, states: []string{"Puts wait for a checkpoint", "a checkpoint's superblocks are written",
			"a request writes"}},
}

// sometimes fails a part of the requests of a kind.
func sometimes(op ssd.Op, part float64, how lab.Outcome) func(*model) func(*ssd.Request) lab.Outcome {
	return func(m *model) func(*ssd.Request) lab.Outcome {
		return func(q *ssd.Request) lab.Outcome {
			if q.Op == op && m.rng.Float64() < part {
				return how
			}
			return lab.Good
		}
	}
}

// noPages fails the writes of checkpoint pages.
func noPages(m *model) func(*ssd.Request) lab.Outcome {
	return func(q *ssd.Request) lab.Outcome {
		if q.Op == ssd.Write && q.Len == format.PageBytes && m.ios[q.Tag].Background {
			return lab.FailUndone
		}
		return lab.Good
	}
}

// whileStopping is what the drive does while a store stops.
var whileStopping = []struct {
	name  string
	fault func(m *model) func(*ssd.Request) lab.Outcome
}{
	{"healthy", func(*model) func(*ssd.Request) lab.Outcome { return nil }},
	{"unreadable", sometimes(ssd.Read, 1, lab.FailUndone)},
	{"writes that fail now and then", sometimes(ssd.Write, 0.1, lab.FailDone)},
}

// TestAStoreStopsInOrder, whatever is under way and whatever the drive does: every request is answered, the store has
// its last checkpoint soon, and reads nothing for itself that no request waits for. What a restart finds is right.
func TestAStoreStopsInOrder(t *testing.T) {
	kvstore.PlainOnly(t)
	t.Parallel()
	seed := seeds(t)
	for _, set := range settings {
		t.Run(set.name, func(t *testing.T) {
			for _, state := range set.states {
				for _, drive := range whileStopping {
					t.Run(state+", "+drive.name, func(t *testing.T) {
						m := set.reach(t, seed, state)
						m.stopInOrder(drive.fault(m))
					})
				}
			}
		})
	}
}

// TestAStoreStopsBeforeItHasSettled: the checkpoint that a volatile device needs before the store serves is the last
// one, too.
func TestAStoreStopsBeforeItHasSettled(t *testing.T) {
	cfg := small(26)
	cfg.FUA, cfg.Volatile = false, true
	r := newRig(t, seeds(t), cfg)
	m := newModel(r, 300, func() int { return 500 })
	m.random(1000, 24)
	m.settle()
	m.crash()
	clear(m.reqs)
	s, err := kvstore.New(m.cfg)
	if err != nil {
		t.Fatal(err)
	}
	m.s, m.crashed, m.act = s, false, kvstore.Actions{}
	for !s.Doing("settling") {
		if !m.step() {
			t.Fatal(s.Err())
		}
	}
	m.stop()
	if n := s.Stats().Checkpoints; n != 1 {
		t.Errorf("%d checkpoints, want 1", n)
	}
	m.reopen()
}

// reach brings a store into a state.
func (set *setting) reach(t *testing.T, seed uint64, state string) *model {
	cfg := small(26)
	if set.cfg != nil {
		set.cfg(&cfg)
	}
	r := newRig(t, seed, cfg)
	r.dev.SlowOneIn = 0
	m := newModel(r, set.keys, func() int { return r.rng.IntN(2*set.size + 1) })
	if set.before != nil {
		m.random(4*set.keys, 24)
		set.before(m)
	}
	if set.fault != nil {
		r.dev.Fault = set.fault(m)
	}
	m.ops = set.ops
	for n := 0; !m.s.Doing(state); n++ {
		if state != "nothing" && len(set.ops) > 0 && len(m.reqs) < 24 && m.rng.IntN(4) > 0 {
			m.submit(m.ops[m.rng.IntN(len(m.ops))], kvstore.Always, m.rng.IntN(len(m.keys)), m.size())
		}
		if n%700 == 699 && len(set.ops) > 0 {
			m.s.Checkpoint()
		}
		m.step()
		if n > 3e5 {
			t.Fatalf("not reached: %+v", m.s.Stats())
		}
	}
	return m
}

// stopInOrder stops the store, of whose requests some fail.
func (m *model) stopInOrder(fault func(*ssd.Request) lab.Outcome) {
	m.t.Helper()
	m.tolerant = true
	if m.dev.Fault = fault; fault == nil {
		m.dev.Fault = func(*ssd.Request) lab.Outcome { return lab.Good }
	}
	idle := 0
	m.dev.Observe = func(q *ssd.Request) {
		// A segment that an audit could not read may be read again.
		if q.Op == ssd.Read && m.ios[q.Tag].Background && q.Len >= 64<<10 && len(m.reqs) == 0 {
			idle += int(q.Len)
		}
	}
	began := m.now
	m.stop()
	m.dev.Observe = nil
	if took := m.now - began; took > 1e9 {
		m.t.Errorf("it takes %d ms", took/1e6)
	}
	if len(m.reqs) > 0 {
		m.t.Errorf("%d requests have no answer", len(m.reqs))
	}
	if idle > 0 {
		m.t.Errorf("%d bytes are read for nobody", idle)
	}
	m.dev.Fault = nil
	m.reopen()
}
