package kvstore_test

import (
	"testing"

	"jbofd/internal/kvstore"
	"jbofd/internal/kvstore/format"
	"jbofd/internal/lab"
	"jbofd/internal/ssd"
)

// TestDamageOfAValueHurtsNothingElse flips a bit of a chunk of values, or zeroes a block of it, and goes on working:
// compaction, overwrites, splits, checkpoints, restarts. Keys whose value has that place may be reported damaged until
// they are written again. All others keep their values.
func TestDamageOfAValueHurtsNothingElse(t *testing.T) {
	kvstore.PlainOnly(t)
	t.Parallel()
	lost := 0
	for seed := range kvstore.Seeds(t, times(kvstore.Sized(6, 4))) {
		cfg := variant(seed, 26)
		cfg.ScrubBytesPerSec = 1 << 27 * int64(seed&1)
		r := newRig(t, seed, cfg)
		m := newModel(r, 2500, sizes(r.rng, 20000))
		m.random(8000, 24)
		m.settle()
		m.damage(seed%8 == 7, func(kind format.Kind) bool { return kind == format.ValueLog })
		lost += len(m.hurt)
		m.live()
		// A damaged value does not keep its key from being deleted.
		for key := range m.hurt {
			m.push(kvstore.Delete, key, 0)
		}
		m.finish()
		m.tolerant = false
		m.settle()
		m.recount()
		m.live()
	}
	t.Logf("%d keys were damaged", lost)
}

// TestDamageOfASegmentHurtsNothingElse does the same to the key log: keys of the segment that has the place may be
// reported damaged.
func TestDamageOfASegmentHurtsNothingElse(t *testing.T) {
	kvstore.PlainOnly(t)
	t.Parallel()
	lost := 0
	for seed := range kvstore.Seeds(t, times(6)) {
		r := newRig(t, seed, variant(seed, 26))
		m := newModel(r, 2000, sizes(r.rng, 20000))
		m.random(8000, 24)
		m.settle()
		m.s.Checkpoint()
		m.settle()
		m.damage(seed%8 == 7, func(kind format.Kind) bool { return kind == format.KeyLog })
		lost += len(m.hurt)
		m.live()
		for key := range m.hurt {
			m.push(kvstore.Delete, key, 0)
		}
		m.finish()
		// What is lost is given up while the store is at work.
		for repaired := false; !repaired; repaired = m.s.AuditState().Repairing {
			m.s.Audit(true)
			m.random(500, 24)
		}
		m.settle()
		// An audit does not count chunks that are being emptied, which may rest half-way.
		for n := 0; n < 10 && (n == 0 || m.s.Recount(m.dev.Visible, true) != nil); n++ {
			m.random(min(1, n)*500, 24)
			m.settle()
			m.s.Audit(true)
			for m.settle(); m.s.AuditState().Running; {
				m.step()
			}
			m.settle()
		}
		// The last audit may be one of the store's own, which has followed.
		if got := m.s.AuditState(); got.Running || got.Lossy+got.Unreadable > 0 {
			t.Fatalf("after a repair: %+v", got)
		}
		m.tolerant = false
		m.recount()
		m.live()
	}
	t.Logf("%d keys were damaged", lost)
}

// damage flips a bit of what was written to chunks of a kind, or zeroes a block.
func (m *model) damage(zero bool, of func(format.Kind) bool) {
	m.t.Helper()
	var blocks []int64
	for at := int64(format.AreaStart); at < m.cfg.PartitionBytes-format.SuperblockBytes-m.cfg.ChunkBytes; at += 512 {
		if kind, used := m.s.KindAt(at); used && of(kind) && (at-format.AreaStart)%m.cfg.ChunkBytes != 0 {
			blocks = append(blocks, at)
		}
	}
	at := blocks[m.rng.IntN(len(blocks))]
	m.tolerant, m.hurt = true, map[int]bool{}
	hurt := func(at int64) {
		for i := range m.keys {
			if m.s.Hurts(m.dev.Visible, at, 1, m.keys[i].name) {
				m.hurt[i] = true
			}
		}
	}
	if zero {
		for i := range int64(512 / 8) {
			hurt(at + 8*i)
		}
		clear(m.dev.Visible[at:][:512])
		clear(m.dev.Durable[at:][:512])
		return
	}
	// The headers of records are hit as often as their content.
	if m.rng.IntN(2) == 0 {
		for i := m.rng.Int64N(512); i < 512; i++ {
			if b := m.dev.Visible[at+i]; i%8 == 4 && (b == 'V' || b == 'S') {
				at += i - 4
				break
			}
		}
	} else {
		at += m.rng.Int64N(512) &^ 7
	}
	at += m.rng.Int64N(8)
	hurt(at)
	m.dev.Flip(at, uint(m.rng.IntN(8)))
}

// live goes on with a partition that is damaged, through everything that a store does.
func (m *model) live() {
	m.t.Helper()
	for range 3 {
		m.random(1500, 24)
		m.settle()
		m.compare(false)
		switch m.rng.IntN(3) {
		case 0:
			m.stop()
			m.reopen()
		case 1:
			m.crash()
			m.reopen()
		}
	}
}

// TestAnAuditLeavesTheChunkOfASegmentThatItCannotRead: the drive does not answer for a while where a segment lies. What
// is live in its chunk is not known, and it is as it was when the drive answers again.
func TestAnAuditLeavesTheChunkOfASegmentThatItCannotRead(t *testing.T) {
	r := newRig(t, seeds(t), small(26))
	m := newModel(r, 900, func() int { return 500 })
	m.random(3000, 24)
	m.settle()
	at := int64(0)
	for i := range m.keys {
		if at, _ = m.s.Place(m.keys[i].name); at != 0 {
			break
		}
	}
	r.dev.Fault = func(q *ssd.Request) lab.Outcome {
		if q.Op == ssd.Read && q.Offset <= at && at < q.Offset+q.Len {
			return lab.FailUndone
		}
		return lab.Good
	}
	if !m.s.Audit(false) {
		t.Fatal("no audit begins")
	}
	for n := 0; m.s.AuditState().Running; n++ {
		if m.step(); n > 1e5 {
			t.Fatalf("the audit does not end: %+v", m.s.AuditState())
		}
	}
	if got := m.s.AuditState(); got.Unreadable == 0 {
		t.Fatalf("%+v, want unreadable segments", got)
	}
	r.dev.Fault = nil
	m.settle()
	m.recount()
	m.compare(false)
}
