package kvstore_test

import (
	"errors"
	"strings"
	"testing"

	"jbofd/internal/kvstore"
	"jbofd/internal/kvstore/format"
	"jbofd/internal/ssd"
)

// resizer is a model of a partition in an extent, which is the whole drive.
type resizer struct {
	*model
	extent int64
}

func newResizer(t *testing.T, seed uint64, cfg kvstore.Config, keys, most int) *resizer {
	r := newRig(t, seed, cfg)
	m := newModel(r, keys, sizes(r.rng, most))
	return &resizer{model: m, extent: cfg.PartitionBytes}
}

// begin begins a resize to so many chunks.
func (m *resizer) begin(chunks int64) error {
	return m.s.Resize(kvstore.ResizeOptions{PartitionBytes: small(chunks).PartitionBytes, ExtentBytes: m.extent,
		SegTbl: m.cfg.SegTbl})
}

// finishResize runs requests until the resize has ended.
func (m *resizer) finishResize(depth int) {
	m.t.Helper()
	for n := 0; m.s.ResizeState().Running && !m.crashed; n++ {
		if depth > 0 {
			m.random(20, depth)
		} else if !m.step() && !m.crashed && m.s.ResizeState().Running {
			m.t.Fatalf("the resize does not end: %+v\n%s", m.s.ResizeState(), m.s.State())
		}
		if n > 1e6 {
			m.t.Fatalf("the resize does not end: %+v\n%s", m.s.ResizeState(), m.s.State())
		}
	}
}

// resize resizes the partition to so many chunks.
func (m *resizer) resize(chunks int64, depth int) {
	m.t.Helper()
	if err := m.begin(chunks); err != nil {
		m.t.Fatal(err)
	}
	m.finishResize(depth)
	if m.crashed {
		return
	}
	if err := m.s.ResizeState().Err; err != nil {
		m.t.Fatal(err)
	}
	if got, want := m.s.PartitionBytes(), small(chunks).PartitionBytes; got != want {
		m.t.Fatalf("the partition has %d bytes, want %d", got, want)
	}
}

// TestResizesUnderLoad: a partition that grows and shrinks while requests are served loses nothing, whether it is
// stopped or dies in between, and whether its extent follows or not.
func TestResizesUnderLoad(t *testing.T) {
	t.Parallel()
	refused := 0
	for seed := range kvstore.Seeds(t, times(4)) {
		m := newResizer(t, seed, variant(seed, 90), []int{60, 500, 900}[seed%3], 16<<10)
		for range 12 {
			to := 26 + m.rng.Int64N(65)
			err := m.begin(to)
			switch {
			case errors.Is(err, kvstore.ErrResize):
				refused++
			case err != nil:
				t.Fatal(err)
			}
			switch m.rng.IntN(4) {
			case 0:
				m.crashIn, m.power = 1+m.rng.IntN(300), m.rng.IntN(2) == 0
			case 1:
				m.s.Checkpoint()
			}
			m.finishResize(1 + m.rng.IntN(40))
			m.crashIn = 0
			if !m.crashed {
				st := m.s.ResizeState()
				if err == nil && st.Err != nil || err == nil && m.s.PartitionBytes() != small(to).PartitionBytes {
					t.Fatalf("a resize to %d chunks: %+v, %d bytes", to, st, m.s.PartitionBytes())
				}
				m.random(100, 20)
				if m.settle(); m.rng.IntN(2) == 0 {
					m.recount()
					m.stop()
				} else {
					m.crash()
				}
			}
			was := m.s.PartitionBytes()
			if m.cfg.PartitionBytes = m.extent; m.rng.IntN(3) == 0 && !m.crashed {
				m.cfg.PartitionBytes = was // the extent was shortened as well
			}
			m.reopen()
			m.random(50, 20)
		}
	}
	t.Logf("%d refused", refused)
}

// TestACrashAtEveryWriteOfAResize: the partition has the old or the new size, and everything that was acknowledged;
// also if one of its superblocks is damaged thereafter.
func TestACrashAtEveryWriteOfAResize(t *testing.T) {
	kvstore.PlainOnly(t)
	t.Parallel()
	for seed := range kvstore.Seeds(t, times(4)) {
		base := newResizer(t, seed, variant(seed, 60), 300, 4000)
		base.random(2500, 16)
		from, to := int64(60), int64(32)
		if seed%2 == 1 {
			base.resize(34, 8)
			from, to = 34, []int64{60, 57}[seed/2%2]
		}
		base.stop()
		again := func() *resizer {
			m := &resizer{model: base.again(seed), extent: base.extent}
			m.reopen()
			if err := m.begin(to); err != nil {
				t.Fatal(err)
			}
			return m
		}
		whole := again()
		at := whole.dev.Writes
		whole.finishResize(8)
		n := whole.dev.Writes - at + 3
		olds, news := 0, 0
		for at := 1; at <= n; at += every(1 + n/kvstore.Sized(20, 12)) {
			for _, damaged := range []int{-1, 0, 1} {
				m := again()
				m.crashIn, m.power = at, at%2 == 0
				m.finishResize(8)
				if !m.crashed {
					m.crash()
				}
				m.crashIn, m.cfg.PartitionBytes = 0, m.extent
				if damaged == 0 {
					m.damageSuper(0)
				} else if damaged > 0 {
					m.damageSuper(m.extent - format.SuperblockBytes)
				}
				m.reopen()
				switch m.s.PartitionBytes() {
				case small(from).PartitionBytes:
					olds++
				case small(to).PartitionBytes:
					news++
				default:
					t.Fatalf("after a crash at write %d of %d: %d bytes", at, n, m.s.PartitionBytes())
				}
				m.random(100, 8)
				m.settle()
				m.recount()
			}
		}
		if olds == 0 || news == 0 {
			t.Errorf("%d to %d chunks: the old size %d times, the new one %d times, want both", from, to, olds, news)
		}
	}
}

// TestAResizedPartitionIsFoundWithoutItsFirstSuperblock: long after a resize, or after a crash in the middle of one,
// the first superblock is damaged while the extent still has another length. What is opened is not what the partition
// was before the resize.
func TestAResizedPartitionIsFoundWithoutItsFirstSuperblock(t *testing.T) {
	kvstore.PlainOnly(t)
	t.Parallel()
	for seed := range kvstore.Seeds(t, times(2)) {
		base := newResizer(t, seed, variant(seed, 60), 300, 4000)
		base.random(1500, 16)
		base.resize(30, 8)
		base.stop()
		for _, to := range []int64{26, 44} {
			again := func() *resizer {
				m := &resizer{model: base.again(seed), extent: base.extent}
				m.reopen()
				if err := m.begin(to); err != nil {
					t.Fatal(err)
				}
				return m
			}
			whole := again()
			at := whole.dev.Writes
			whole.finishResize(0)
			n := whole.dev.Writes - at
			// The last writes are superblocks and the note. With 0 there is no crash.
			for _, left := range []int{0, 1, 2, 3, 4} {
				m := again()
				if left > 0 {
					m.crashIn = max(1, n-left+2)
				}
				if m.finishResize(0); m.crashed {
					m.reopen()
				}
				m.crashIn = 0
				for range 4 { // everything that the partition had before is written over
					m.random(800, 16)
					m.s.Checkpoint()
					m.settle()
				}
				m.crash()
				m.damageSuper(0)
				m.reopen()
			}
		}
	}
}

// TestNoNewChunkIsUsedBeforeTheNewSizeCounts: a partition without room grows while a host stores, and dies before or
// after the drive has written the superblocks of the new size.
func TestNoNewChunkIsUsedBeforeTheNewSizeCounts(t *testing.T) {
	kvstore.PlainOnly(t)
	t.Parallel()
	for seed := range kvstore.Seeds(t, times(2)) {
		base := newResizer(t, seed, variant(seed, 60), 3000, 2000)
		base.resize(28, 0)
		for i := 0; base.full == 0; i++ {
			base.push(kvstore.Put, i, 1500)
			base.turn()
		}
		base.finish()
		base.stop()
		for at := 1; at <= 700; at += every(kvstore.Sized(50, 90)) {
			m := &resizer{model: base.again(seed), extent: base.extent}
			m.reopen()
			if err := m.begin(58); err != nil {
				t.Fatal(err)
			}
			m.dev.Hold = func(q *ssd.Request) int64 { // the superblocks of the new size take long
				if q.Op == ssd.Write && q.Len == format.SuperblockBytes && (q.Offset == 0 ||
					q.Offset+q.Len == small(58).PartitionBytes) {
					return 1e9
				}
				return 0
			}
			m.ops = updates
			m.crashIn = at
			m.random(3000, 40)
			m.dev.Hold = nil
			if !m.crashed {
				m.crash()
			}
			m.crashIn = 0
			m.reopen()
		}
	}
}

// damageSuper overwrites what is at an offset, as a drive might that has failed.
func (m *resizer) damageSuper(at int64) {
	b := make([]byte, format.SuperblockBytes)
	for i := range b {
		b[i] = byte(m.rng.Uint32())
	}
	m.dev.Store(at, b)
}

// TestAShrinkWithoutRoomIsRefused, with the numbers, and before anything is moved.
func TestAShrinkWithoutRoomIsRefused(t *testing.T) {
	m := newResizer(t, seeds(t), small(80), 600, 0)
	for i := range m.keys {
		m.push(kvstore.Put, i, 8000)
	}
	m.settle()
	moved := m.s.Stats().MovedBytes
	err := m.begin(40)
	if !errors.Is(err, kvstore.ErrResize) || !strings.Contains(err.Error(), "MiB are in use") {
		t.Errorf("a shrink to less than is in use: %v", err)
	}
	if err := m.begin(20); !errors.Is(err, kvstore.ErrResize) ||
		!strings.Contains(err.Error(), "must have at least 24; allowed: 4MiB or more") {
		t.Errorf("a shrink to too few chunks: %v", err)
	}
	if m.settle(); m.s.Stats().MovedBytes != moved || m.s.ResizeState().Running {
		t.Error("a refused shrink has moved values")
	}
	// Puts beyond the new size are refused from the beginning, so that the shrink ends.
	for i := range m.keys[:400] {
		m.push(kvstore.Delete, i, 0)
	}
	m.finish()
	m.resize(40, 0)
	m.settle()
	m.recount()
	m.reopen()
}

// TestACancelledShrinkLeavesThePartitionAsItWas.
func TestACancelledShrinkLeavesThePartitionAsItWas(t *testing.T) {
	for seed := range kvstore.Seeds(t, 4) {
		m := newResizer(t, seed, variant(seed, 80), 300, 8000)
		m.random(2000, 20)
		chunks, most := m.s.Stats().Chunks, m.s.PartitionBytes()
		if err := m.begin(40); err != nil {
			t.Fatal(err)
		}
		for range m.rng.IntN(200) {
			m.step()
		}
		if m.rng.IntN(2) == 0 {
			m.random(m.rng.IntN(200), 10)
		}
		committed := m.s.Stats().Chunks < chunks
		m.s.CancelResize()
		m.finishResize(0)
		if m.finish(); !committed && (m.s.ResizeState().Err == nil || m.s.PartitionBytes() != most) {
			t.Errorf("cancelled: %+v, %d bytes", m.s.ResizeState(), m.s.PartitionBytes())
		}
		m.random(2000, 20)
		m.settle()
		m.recount()
		m.reopen()
	}
}

// TestAPartitionThatIsFullGrowsManyTimes: the checkpoint of the larger one has to find room in the small one.
func TestAPartitionThatIsFullGrowsManyTimes(t *testing.T) {
	t.Parallel()
	chunks := int64(1000)
	if *longFlag {
		chunks = 9000 // a checkpoint takes a chunk more then, so that it grows in steps
	}
	m := newResizer(t, seeds(t), small(chunks), 3000, 2000)
	m.resize(30, 0)
	for i := 0; m.full == 0; i++ {
		m.push(kvstore.Put, i, 2000)
		m.turn()
	}
	m.settle()
	m.resize(chunks, 4)
	if st := m.s.Stats(); st.FreeChunks < chunks-100 {
		t.Errorf("%d of %d chunks are free", st.FreeChunks, st.Chunks)
	}
	m.full = 0
	if m.random(300, 10); m.full > 0 {
		t.Errorf("%d Puts found no room", m.full)
	}
	m.settle()
	m.recount()
	m.reopen()
}

// TestAShrinkSaysHowFarItIs, and moves no more than what lies behind the new end and what that takes.
func TestAShrinkSaysHowFarItIs(t *testing.T) {
	m := newResizer(t, seeds(t), small(120), 1000, 0)
	for i := range m.keys {
		m.push(kvstore.Put, i, 10000)
	}
	for i := 0; i < len(m.keys); i += 2 {
		m.push(kvstore.Delete, i, 0)
	}
	m.settle()
	before := m.s.Stats()
	if err := m.begin(60); err != nil {
		t.Fatal(err)
	}
	seen, last := 0, int64(-1)
	for m.s.ResizeState().Running {
		if !m.step() && m.s.ResizeState().Running {
			t.Fatalf("the shrink does not end: %+v\n%s", m.s.ResizeState(), m.s.State())
		}
		if st := m.s.ResizeState(); st.TotalBytes > 0 && st.DoneBytes != last {
			if seen++; st.DoneBytes > st.TotalBytes || st.TotalBytes != 60*before.ChunkBytes {
				t.Fatalf("%+v", st)
			}
			last = st.DoneBytes
		}
	}
	st := m.s.Stats()
	if moved := st.MovedBytes - before.MovedBytes; seen < 3 || moved > before.LiveBytes {
		t.Errorf("seen %d times, %d bytes moved of %d", seen, moved, before.LiveBytes)
	}
	m.settle()
	m.recount()
	m.reopen()
}

// TestAllChunksOfAGrownPartitionAreUsed: a partition that grows by more chunks than a turn has time for gets all of
// them, also if it dies before it has. It takes Puts until they are refused, and can be made small again.
func TestAllChunksOfAGrownPartitionAreUsed(t *testing.T) {
	t.Parallel()
	for seed := range kvstore.Seeds(t, 2) {
		m := newResizer(t, seed, small(160), 2000, 0)
		m.sweep = 8
		m.resize(40, 0)
		if err := m.begin(160); err != nil {
			t.Fatal(err)
		}
		freed := 0 // how often the test sees that some chunks are free that were added, but not all
		for m.s.ResizeState().Running {
			m.step()
			if n := m.s.Stats().FreeChunks; n > 60 && n < 150 {
				m.recount()
				if freed++; freed == 6 && seed%2 == 1 {
					m.reopen()
					break
				}
			}
		}
		if freed < 6 {
			t.Fatalf("the growth has freed all chunks within %d turns", freed)
		}
		for i := 0; m.full == 0; i++ {
			m.push(kvstore.Put, i%len(m.keys), 9000)
			m.turn()
		}
		if m.settle(); m.s.Stats().LiveBytes < m.extent/10*8 {
			t.Errorf("a partition of %d bytes is full with %d", m.extent, m.s.Stats().LiveBytes)
		}
		for i := range m.keys {
			m.push(kvstore.Delete, i, 0)
		}
		m.settle()
		m.resize(40, 0)
		m.settle()
		m.recount()
		m.reopen()
	}
}
