package kvstore_test

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
	"slices"
	"testing"

	"jbofd/internal/kvstore"
	"jbofd/internal/kvstore/format"
	"jbofd/internal/lab"
	"jbofd/internal/ssd"
)

// TestAnyIOMayFailAtAnyTime: failed I/Os fail requests and do no other harm. When the device works again, so does the
// store.
func TestAnyIOMayFailAtAnyTime(t *testing.T) {
	t.Parallel()
	for s := range kvstore.Seeds(t, times(4)) {
		anyIOFails(t, s)
	}
}

// TestIOsFailInAFullPartition repeats seeds with which a Delete found no room: a chunk waited for a block to be
// restored, chunks that could not be read were not tried again, failed writes used up the last chunk of the key log,
// and the rest of the key log's open chunk was too short.
func TestIOsFailInAFullPartition(t *testing.T) {
	t.Parallel()
	for _, s := range []uint64{702577085632802, 22315853610147, 8756146859395, 1036993316843, 13513884890186} {
		anyIOFails(t, s)
	}
}

// TestReadsFailByChance repeats seeds with which a segment was given up because half of all reads have failed for a
// while. A Put on condition of one of its keys ended with Corrupt, and the values of the others stayed counted.
func TestReadsFailByChance(t *testing.T) {
	kvstore.PlainOnly(t)
	t.Parallel()
	for _, s := range []uint64{6069727856789, 21820888076841} {
		anyIOFails(t, s)
	}
}

func anyIOFails(t *testing.T, s uint64) {
	failed, crashes := 0, 0
	r := newRig(t, s, variant(s, 32))
	m := newModel(r, []int{4, 60, 500, 700}[s%4], sizes(r.rng, 20000))
	m.random(3000, 32)
	for range 6 {
		p := []float64{0.01, 0.1, 0.5, 1}[r.rng.IntN(4)]
		only := []ssd.Op{ssd.Read, ssd.Write, ssd.Flush}[r.rng.IntN(3)]
		r.dev.Fault = func(q *ssd.Request) lab.Outcome {
			if only != ssd.Flush && q.Op != only || r.rng.Float64() >= p {
				return lab.Good
			}
			return lab.FailUndone + lab.Outcome(r.rng.IntN(3))
		}
		if r.rng.IntN(2) == 0 {
			m.crashIn, m.power = 1+r.rng.IntN(300), r.rng.IntN(2) == 0
		}
		m.random(1500, 1+r.rng.IntN(48))
		if !m.crashed && r.rng.IntN(3) == 0 {
			m.crash()
		}
		if m.crashed {
			r.dev.Fault = nil
			m.reopen()
			crashes++
		}
		r.dev.Fault = nil
		m.crashIn = 0
		m.finish()
		failed += m.failed
		m.worksAgain(t)
	}
	m.stop()
	m.reopen()
	t.Logf("%d requests failed, %d crashes", failed, crashes)
}

// TestOneIOFails repeats a history and lets one I/O fail, a different one each time.
func TestOneIOFails(t *testing.T) {
	t.Parallel()
	for seed := range kvstore.Seeds(t, 2) {
		oneIOFails(t, seed)
	}
}

func oneIOFails(t *testing.T, seed uint64) {
	base := prepared(t, seed)
	whole := base.again(seed)
	whole.reopen()
	whole.random(500, 24)
	whole.s.Checkpoint()
	whole.settle()
	n := whole.dev.Reads + whole.dev.Writes - base.dev.Reads - base.dev.Writes
	step := every(1 + n/20)
	for at := 1 + int(seed%uint64(step)); at <= n; at += step {
		m := base.again(seed)
		left, kind := at, lab.FailUndone+lab.Outcome(at/step%3)
		m.dev.Fault = func(*ssd.Request) lab.Outcome {
			if left--; left == 0 {
				return kind
			}
			return lab.Good
		}
		clear(m.reqs)
		if err := m.open(); err != nil {
			if !errors.Is(err, lab.ErrInjected) || !errors.Is(err, kvstore.ErrPartition) || left > 0 {
				t.Fatalf("I/O %d: %v", at, err)
			}
			m.reopen()
		}
		m.compareThrough()
		m.random(500, 24)
		m.s.Checkpoint()
		m.settle()
		m.dev.Fault = nil
		if at%2 == 0 {
			m.crash()
			m.reopen()
		}
		m.compare(false)
		m.random(200, 24)
		m.settle()
		m.compare(false)
		m.stop()
		m.reopen()
	}
	t.Logf("%d I/Os", n)
}

// compareThrough compares all keys after a restart, and repeats those whose reads failed.
func (m *model) compareThrough() {
	m.t.Helper()
	f := m.dev.Fault
	m.dev.Fault = nil
	m.compare(true)
	m.dev.Fault = f
}

// TestFailedSuperblocksHoldTheCheckpointUp: the last checkpoint stays intact until the superblock of the next one is
// written.
func TestFailedSuperblocksHoldTheCheckpointUp(t *testing.T) {
	seed := seeds(t)
	r := newRig(t, seed, small(32))
	m := newModel(r, 500, sizes(r.rng, 4000))
	m.random(2000, 24)
	r.dev.Fault = func(q *ssd.Request) lab.Outcome {
		if q.Op == ssd.Write && (q.Offset < format.AreaStart ||
			q.Offset >= r.cfg.PartitionBytes-format.SuperblockBytes) {
			return lab.FailUndone + lab.Outcome(r.rng.IntN(3))
		}
		return lab.Good
	}
	for range 5 {
		// Finally the chunks run out, and writes fail.
		m.random(1500, 24)
		m.crash()
		m.reopen()
	}
	r.dev.Fault = nil
	m.settle()
	m.full = 0
	m.random(2000, 24)
	if m.full > 1000 {
		t.Errorf("%d of 2000 requests find the partition full: %+v", m.full, m.s.Stats())
	}
	m.stop()
	m.reopen()
}

// TestAFlippedBitIsNeverAWrongValue flips bits of everything that was written before the store opens. An acknowledged
// key has its value or is reported damaged, or the partition does not open.
func TestAFlippedBitIsNeverAWrongValue(t *testing.T) {
	kvstore.PlainOnly(t)
	t.Parallel()
	for seed := range kvstore.Seeds(t, 2) {
		clean := seed%2 == 1
		base := flipped(t, seed, clean)
		// Recovery relies on superblocks, headers and what was written since the checkpoint.
		var special, others []int64
		super, last := int64(0), base.cfg.PartitionBytes-format.SuperblockBytes
		if base.dev.LastWrite[last] > base.dev.LastWrite[super] {
			super = last
		}
		for at := range base.dev.LastWrite {
			switch {
			case at < format.AreaStart || at >= last || (at-format.AreaStart)%base.cfg.ChunkBytes == 0,
				base.dev.LastWrite[at] > base.dev.LastWrite[super] && (base.dev.Visible[at+4] == 'S' || *longFlag):
				special = append(special, at)
			default:
				others = append(others, at)
			}
		}
		slices.Sort(special)
		slices.Sort(others)
		var result [3]int
		for i, at := range special {
			in := int64(i * 61 % 64)
			if i%3 == 0 {
				in = base.rng.Int64N(512)
			}
			result[flip(base, at+in, uint(base.rng.IntN(8)))]++
		}
		t.Logf("clean stop %v: %d blocks that recovery goes by: keys are damaged %d times, refused %d times, nothing "+
			"%d times", clean, len(special), result[1], result[2], result[0])
		clear(result[:])
		step := every(1 + len(others)/40)
		for i := int(seed % uint64(step)); i < len(others); i += step {
			result[flip(base, others[i]+base.rng.Int64N(512), uint(base.rng.IntN(8)))]++
		}
		t.Logf("clean stop %v: %d others: keys are damaged %d times, refused %d times, nothing %d times", clean,
			len(others), result[1], result[2], result[0])
	}
}

// flip opens a copy of a partition with a bit flipped. It returns 0 if that had no effect, 1 if keys are damaged, 2 if
// the partition did not open.
func flip(base *model, at int64, bit uint) int {
	m := base.again(uint64(at))
	m.tolerant = true
	m.dev.Flip(at, bit)
	err := m.open()
	defer func() {
		if m.t.Failed() {
			m.t.Logf("bit %d at %d, that is in chunk %d at %d", bit, at, (at-format.AreaStart)/m.cfg.ChunkBytes,
				(at-format.AreaStart)%m.cfg.ChunkBytes)
		}
	}()
	switch {
	case err == nil:
		m.compare(true)
		return min(1, m.damaged)
	case !errors.Is(err, kvstore.ErrPartition) || m.dev.Writes != base.dev.Writes:
		m.t.Fatalf("refused with %v, after %d writes", err, m.dev.Writes-base.dev.Writes)
	}
	return 2
}

// flipped is a partition that has been stopped, or was not.
func flipped(t *testing.T, seed uint64, clean bool) *model {
	r := newRig(t, seed, small(24))
	r.dev.LastWrite = map[int64]int{}
	m := newModel(r, 120, sizes(r.rng, 4000))
	m.random(2500, 24)
	m.settle()
	m.s.Checkpoint()
	m.settle()
	m.random(500, 8)
	m.settle()
	m.compare(false)
	before := m.keys[0].events[0]
	if clean {
		m.stop()
	} else {
		// Damage at the very end of a log looks like a torn write: only records behind it prove otherwise.
		m.submit(kvstore.Put, kvstore.Always, 0, 1)
		m.finish()
		m.keys[0].events = append(m.keys[0].events, before)
		m.keys[0].events[0].state, m.keys[0].events[1].start, m.keys[0].events[1].end = failed, m.clock, m.clock
	}
	m.power = true
	m.crash()
	return m
}

func TestADamagedOrForeignPartitionIsLeftAlone(t *testing.T) {
	seed := seeds(t)
	base := flipped(t, seed, true)
	super := func(m *model, generation uint64) format.Superblock {
		at := format.SuperblockOffset(generation, m.cfg.PartitionBytes)
		return format.Superblock(m.dev.Visible[at : at+format.SuperblockBytes])
	}
	for _, c := range []struct {
		name string
		do   func(m *model)
		want error
	}{
		{"both superblocks damaged", func(m *model) { super(m, 1)[40] ^= 4; super(m, 2)[50] ^= 1 }, format.ErrCorrupt},
		{"blank", func(m *model) { clear(m.dev.Visible) }, format.ErrBlank},
		{"somebody else's", func(m *model) { copy(super(m, 1), "LABELONE"); copy(super(m, 2), "somewhat") },
			format.ErrCorrupt},
		{"a newer version", func(m *model) { newer(super(m, 1)); newer(super(m, 2)) }, format.ErrVersion},
		{"a newer version in one", func(m *model) { newer(super(m, 2)) }, format.ErrVersion},
		{"both superblocks unreadable", func(m *model) {
			m.dev.Unreadable(0, 1)
			m.dev.Unreadable(m.cfg.PartitionBytes-format.SuperblockBytes, 1)
		}, lab.ErrInjected},
		{"another length", func(m *model) { m.cfg.PartitionBytes -= 1 << 20 }, format.ErrCorrupt},
	} {
		m := base.again(seed)
		c.do(m)
		err := m.open()
		if !errors.Is(err, kvstore.ErrPartition) || !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
		t.Log(err)
		if m.dev.Writes != base.dev.Writes || m.dev.Flushes != base.dev.Flushes {
			t.Errorf("%s: it was written to", c.name)
		}
	}
	for generation := uint64(1); generation <= 2; generation++ {
		for _, damage := range []func(m *model){
			func(m *model) { super(m, generation)[30] ^= 4 },
			func(m *model) {
				m.dev.Unreadable(int64(format.SuperblockOffset(generation, m.cfg.PartitionBytes)), 1)
			},
		} {
			m := base.again(seed)
			damage(m)
			m.reopen()
			m.random(300, 8)
			m.crash()
			m.reopen()
		}
	}
}

// newer turns a superblock into a valid one of a later version.
func newer(sb format.Superblock) {
	sb[8] = 200
	table := crc32.MakeTable(crc32.Castagnoli)
	binary.LittleEndian.PutUint32(sb[12:], crc32.Update(crc32.Update(0, table, sb[:12]), table, sb[16:]))
}
