package kvstore_test

import (
	"math/rand/v2"
	"testing"

	"jbofd/internal/kvstore"
	"jbofd/internal/kvstore/format"
)

func TestHistoriesAgainstAMap(t *testing.T) {
	t.Parallel()
	ops := 0
	for s := range kvstore.Seeds(t, times(4)) {
		r := newRig(t, s, variant(s, 28))
		keys := []int{5, 50, 550, 700}[s%4]
		m := newModel(r, keys, sizes(r.rng, 64<<10))
		m.random(12000, 1+r.rng.IntN(64))
		m.settle()
		m.compare(false)
		st := m.s.Stats()
		if wraps := st.KeyLogBytes + st.ValueLogBytes + st.MovedBytes; keys > 500 &&
			(wraps < r.cfg.PartitionBytes || st.Compactions == 0 || st.Checkpoints < 3 || st.Splits == 0) {
			t.Errorf("too little has happened: %+v", st)
		}
		m.stop()
		m.reopen()
		m.random(1000, 16)
		ops += m.done
	}
	t.Logf("%d requests", ops)
}

// prepared returns a nearly full partition after a loss of power: the next writes cause compaction, checkpoints and
// splits.
func prepared(t *testing.T, seed uint64) *model {
	r := newRig(t, seed, variant(seed, 32))
	m := newModel(r, 500, sizes(r.rng, 8000))
	for m.s.Stats().Compactions < 3 {
		m.random(300, 24)
	}
	m.crash()
	m.reopen()
	m.random(300, 24)
	m.crash()
	return m
}

// again returns a copy of a partition and of the model's knowledge of it.
func (m *model) again(seed uint64) *model {
	r := *m.rig
	r.rng = rand.New(rand.NewPCG(seed, 99))
	r.dev, r.ios = m.dev.Clone(r.rng), map[uint64]kvstore.IO{}
	r.dev.LastWrite = nil
	c := m.on(&r)
	c.size = sizes(r.rng, 8000)
	return c
}

// TestACrashAtEveryWrite repeats a history with a crash one write later each time, continues, and crashes again during
// recovery or soon after.
func TestACrashAtEveryWrite(t *testing.T) {
	kvstore.PlainOnly(t)
	t.Parallel()
	for seed := range kvstore.Seeds(t, 2) {
		crashAtEveryWrite(t, seed)
	}
}

func crashAtEveryWrite(t *testing.T, seed uint64) {
	base := prepared(t, seed)
	whole := base.again(seed)
	whole.reopen()
	at := whole.dev.Writes
	whole.random(700, 24)
	whole.s.Checkpoint()
	whole.settle()
	st := whole.s.Stats()
	n := whole.dev.Writes - at
	t.Logf("%d writes, %+v", n, st)
	step := every(1 + n/15)
	crashes := 0
	for at := 1 + int(seed%uint64(step)); at <= n; at += step {
		m := base.again(seed)
		m.reopen()
		m.crashIn, m.power = at, at/step%2 == 0
		m.random(700, 24)
		m.s.Checkpoint()
		m.settle()
		if !m.crashed {
			m.crash()
		}
		for range 3 {
			// Unflushed writes of the process that died may be lost with the power until the partition has been opened.
			if m.rng.IntN(3) == 0 {
				m.dieOpening()
			}
			m.reopen()
			m.crashIn, m.power = 1+m.rng.IntN(50), m.rng.IntN(2) == 0
			m.s.Checkpoint()
			m.random(1e6, 1+m.rng.IntN(40))
			crashes++
		}
		m.reopen()
		m.settle()
		m.compare(false)
	}
	t.Logf("%d crashes", crashes)
}

// dieOpening opens the partition and loses the power before recovery has finished.
func (m *model) dieOpening() {
	s, err := kvstore.New(m.cfg)
	if err != nil {
		m.t.Fatal(err)
	}
	m.s, m.crashed = s, false
	m.act = kvstore.Actions{}
	for n := m.rng.IntN(60); n > 0 && !m.s.Ready(); n-- {
		m.step()
	}
	m.power = true
	m.crash()
}

// TestRecoveryAfterRecovery crashes repeatedly and checks that no space leaks.
func TestRecoveryAfterRecovery(t *testing.T) {
	kvstore.PlainOnly(t)
	t.Parallel()
	for s := range kvstore.Seeds(t, times(3)) {
		r := newRig(t, s, variant(s, 40))
		m := newModel(r, []int{60, 700, 1000}[s%3], sizes(r.rng, 20000))
		m.random(3000, 32)
		for range 30 {
			m.crashIn, m.power = 1+r.rng.IntN(200), r.rng.IntN(2) == 0
			m.random(1e6, 1+r.rng.IntN(48))
			if m.full > m.done/20 {
				t.Fatalf("%d of %d requests found the partition full: %+v", m.full, m.done, m.s.Stats())
			}
			m.reopen()
		}
		m.settle()
		m.compare(false)
		for i := range m.keys {
			if p := m.do(kvstore.Request{Op: kvstore.Delete, Key: m.keys[i].name}); p.Status != kvstore.OK &&
				p.Status != kvstore.NotFound {
				t.Fatalf("Delete of key %d: status %d", i, p.Status)
			}
			m.keys[i].events = []event{{size: absent, state: done, start: m.clock, end: m.clock}}
		}
		m.settle()
		if st := m.s.Stats(); st.Objects != 0 || st.LiveBytes != 0 {
			t.Errorf("everything was deleted, and there are %d objects and %d bytes", st.Objects, st.LiveBytes)
		}
		m.reopen()
		if st := m.s.Stats(); st.Objects != 0 || st.LiveBytes != 0 {
			t.Errorf("everything was deleted, and after a restart there are %d objects and %d bytes", st.Objects,
				st.LiveBytes)
		}
	}
}

func TestACleanStopLeavesNothingToReplay(t *testing.T) {
	seed := seeds(t)
	r := newRig(t, seed, small(40))
	m := newModel(r, 700, sizes(r.rng, 20000))
	m.random(5000, 32)
	m.stop()
	before := *m.dev
	m.reopen0()
	chunks := int(m.s.Stats().Chunks)
	reads, bytes := m.dev.Reads-before.Reads, m.dev.ReadBytes-before.ReadBytes
	if most := m.atLeastRead() + 3*m.s.Stats().ChunkBytes; bytes > most {
		t.Errorf("opening read %d bytes, want at most %d", bytes, most)
	}
	// Superblocks, headers, the pages of a checkpoint, and the ends of three logs.
	if most := 2 + chunks + 4 + 3; reads > most || m.dev.Writes != before.Writes {
		t.Errorf("opening took %d reads and %d writes, want at most %d and none", reads, m.dev.Writes-before.Writes,
			most)
	}
	t.Logf("opening takes %d reads, %d bytes", reads, bytes)
	m.compare(true)
}

// atLeastRead is the number of bytes that recovery always reads: superblocks, headers and the checkpoint.
func (m *model) atLeastRead() int64 {
	st := m.s.Stats()
	stream := format.SummaryBytes + st.Chunks*format.ChunkEntryBytes + 5*st.Segments
	return 2*format.SuperblockBytes + st.Chunks*int64(m.dev.BlockSize()) +
		(stream/format.PagePayloadBytes+1)*format.PageBytes
}

// TestRecoveryReadsTheCheckpointAndWhatWasWrittenSince, and not all of the key log, however large it is.
func TestRecoveryReadsTheCheckpointAndWhatWasWrittenSince(t *testing.T) {
	kvstore.PlainOnly(t)
	t.Parallel()
	seed := seeds(t)
	cfg := small(150)
	cfg.CheckpointBytes = 1 << 30 // no checkpoints except on request
	r := newRig(t, seed, cfg)
	m := newModel(r, 30000, func() int { return 8 * r.rng.IntN(2) })
	for i := range m.keys {
		m.push(kvstore.Put, i, m.size())
	}
	m.finish()
	m.s.Checkpoint()
	m.settle()
	before := m.s.Stats().KeyLogBytes
	m.ops = mixed
	for i := range m.keys[:400] {
		m.push(m.ops[m.rng.IntN(len(m.ops))], i, m.size())
	}
	m.crashIn, m.power = 1+m.rng.IntN(10), seed&1 == 0
	m.random(1e6, 8)
	since := m.s.Stats().KeyLogBytes - before
	device := *m.dev
	m.reopen0()
	bytes := m.dev.ReadBytes - device.ReadBytes
	st := m.s.Stats()
	// Each log is read to the end of a chunk.
	most := m.atLeastRead() + since + 4*st.ChunkBytes
	if all := m.s.KeyLogChunks() * st.ChunkBytes; all < 2*most || since == 0 {
		t.Fatalf("%d bytes of key log, %d of them since the checkpoint, are too little to tell: a recovery may read %d",
			all, since, most)
	}
	t.Logf("opening read %d bytes", bytes)
	if bytes > most {
		t.Errorf("opening read %d bytes, want at most %d, of which %d were written since the checkpoint", bytes, most,
			since)
	}
	if err := m.s.Recount(m.dev.Visible, true); err != nil {
		t.Error(err)
	}
	m.compare(true)
}

// TestASegmentWithMoreChangesThanItRecords: with so few segments all writers change the same one, and recovery has to
// count live bytes from zero.
func TestASegmentWithMoreChangesThanItRecords(t *testing.T) {
	seed := seeds(t)
	cfg := small(40)
	cfg.SegTbl = make([]byte, 5*16)
	r := newRig(t, seed, cfg)
	m := newModel(r, 2000, sizes(r.rng, 500))
	m.s.Checkpoint()
	m.random(4000, 64)
	m.s.Checkpoint()
	m.settle()
	for range 4 {
		m.crashIn, m.power = 50+m.rng.IntN(100), m.rng.IntN(2) == 0
		m.random(1e6, 64)
		m.reopen()
	}
}

// TestAnIdleStoreWritesACheckpoint: it writes one checkpoint and then rests; a restart has nothing to replay.
func TestAnIdleStoreWritesACheckpoint(t *testing.T) {
	r := newRig(t, seeds(t), small(40))
	m := newModel(r, 700, sizes(r.rng, 2000))
	m.random(2000, 32)
	m.settle()
	for m.step() {
	}
	before, at := m.s.Stats().Checkpoints, m.now
	m.push(kvstore.Put, 0, 100)
	m.finish()
	for m.step() {
	}
	st := m.s.Stats()
	if st.Checkpoints != before+1 || m.act.WakeNS != 0 || m.now-at < 59e9 {
		t.Fatalf("%d checkpoints after %d ns, and a timer at %d, want one after a minute and none",
			st.Checkpoints-before, m.now-at, m.act.WakeNS)
	}
	m.power = true
	m.crash()
	device := *m.dev
	m.reopen0()
	if bytes, most := m.dev.ReadBytes-device.ReadBytes, m.atLeastRead()+3*st.ChunkBytes; bytes > most {
		t.Errorf("opening read %d bytes, want at most %d", bytes, most)
	}
	m.compare(true)
}

// reopen0 only opens.
func (m *model) reopen0() {
	m.t.Helper()
	if err := m.open(); err != nil {
		m.t.Fatal(err)
	}
}

func TestACrashWhileFormatting(t *testing.T) {
	t.Parallel()
	seed := seeds(t)
	for at := 1; at <= 3; at++ {
		for k := range uint64(8) {
			r := newRig(t, seed+k, small(24))
			m := newModel(r, 20, sizes(r.rng, 2000))
			m.random(100, 4)
			m.stop()
			old := m.again(k)
			// After a crash while formatting again, recovery finds the complete old store, the new one, or neither.
			old.cfg.Format, old.cfg.UUID, old.cfg.HashSeed = true, [16]byte{9}, 99
			old.crashIn, old.power = at, k%2 == 0
			if err := old.open(); err != nil || !old.crashed {
				t.Fatalf("crashed %v, %v", old.crashed, err)
			}
			old.cfg.Format = false
			err := old.open()
			if err != nil {
				old.cfg.Format = true
				if err := old.open(); err != nil {
					t.Fatal(err)
				}
				continue
			}
			if n := old.s.Stats().Objects; n == 0 {
				for i := range old.keys {
					old.keys[i].events = []event{{size: absent, state: done}}
				}
				old.given = map[uint64]bool{}
			}
			old.compare(true)
			old.random(300, 8)
		}
	}
}

// TestACheckpointDuringSplits: when a checkpoint begins after some new segments of a round of splits were written and
// before others were, recovery finds only a part of the round. The source segments must then keep the keys that have
// moved. With groups of hardly more than a segment a round takes many writes, and checkpoints follow each other.
func TestACheckpointDuringSplits(t *testing.T) {
	t.Parallel()
	crashes := 0
	for seed := range kvstore.Seeds(t, times(6)) {
		cfg := small(60)
		cfg.GroupBytes, cfg.KeysPerSegment = 512, 2
		m := newModel(newRig(t, seed, cfg), 3000, func() int { return 20 })
		for first := 0; first < len(m.keys); {
			m.crashIn, m.power = 1+m.rng.IntN(400), m.rng.IntN(2) == 0
			// New keys in a burst, so that the table lacks many segments at once.
			for range 20 + m.rng.IntN(300) {
				if m.crashed || first == len(m.keys) {
					break
				}
				if m.submit(kvstore.Put, kvstore.Always, first, 20) {
					first++
				} else {
					m.step()
				}
			}
			// Overwrites change the sources of the splits.
			for n := 0; n < 300 && !m.crashed; n++ {
				if m.rng.IntN(4) == 0 {
					m.s.Checkpoint()
				}
				if len(m.reqs) < 40 {
					m.submit(kvstore.Put, kvstore.Always, m.rng.IntN(first+1)%len(m.keys), 20)
				}
				m.step()
			}
			if !m.crashed {
				m.crash()
			}
			crashes++
			m.reopen()
		}
	}
	t.Logf("%d crashes", crashes)
}

// TestATrickleOfPutsWritesFewCheckpoints: each would write the whole table.
func TestATrickleOfPutsWritesFewCheckpoints(t *testing.T) {
	cfg := small(64)
	cfg.KeysPerSegment = 1
	r := newRig(t, seeds(t), cfg)
	const keys, puts, gapNS = 20_000, 2000, 2e9
	m := newModel(r, keys, func() int { return 0 })
	for i := range keys {
		m.push(kvstore.Put, i, 0)
	}
	m.settle()
	m.s.Checkpoint()
	m.settle()
	before := m.s.Stats()
	for i := range puts {
		at := m.now
		m.push(kvstore.Put, i, 256)
		for m.turn(); m.dev.Next() >= 0 || m.act.WakeNS != 0 && m.act.WakeNS <= at+gapNS; m.turn() {
			m.step()
		}
		m.now = max(m.now, at+gapNS)
	}
	st := m.s.Stats()
	written, logged := st.CheckpointBytes-before.CheckpointBytes, st.KeyLogBytes-before.KeyLogBytes
	if written > logged/4 {
		t.Errorf("%d bytes of checkpoints for %d bytes of key log: %d checkpoints", written, logged,
			st.Checkpoints-before.Checkpoints)
	}
}
