package kvstore_test

import (
	"cmp"
	"errors"
	"slices"
	"testing"

	"jbofd/internal/kvstore"
	"jbofd/internal/kvstore/format"
	"jbofd/internal/lab"
	"jbofd/internal/ssd"
	"jbofd/internal/units"
)

// lossy returns a partition whose process has died after writes that its last checkpoint does not have, and where these
// are in the key log.
func lossy(t *testing.T, seed uint64) (m *model, parts [][2]int64) {
	cfg := variant(seed, 34)
	cfg.CheckpointBytes = 1 << 30
	r := newRig(t, seed, cfg)
	m = newModel(r, 450, sizes(r.rng, 4000))
	m.random(3000, 24)
	m.settle()
	for again := true; again || len(parts) < 2 || len(known(m, parts)) == 0; {
		if before := m.s.Stats().Checkpoints; again {
			m.s.Checkpoint()
			m.settle()
			if m.s.Stats().Checkpoints == before {
				t.Fatal("there was no checkpoint")
			}
			m.mark()
		}
		before := m.s.Stats().Checkpoints
		m.random(100, 8)
		parts = m.s.KeyLogSince()
		again = m.s.Stats().Checkpoints != before // compaction needed one
	}
	m.added = make([]bool, len(m.keys))
	for i := range m.keys {
		m.added[i] = m.s.SegmentOf(m.keys[i].name) >= m.segments
	}
	m.crash()
	return m, parts
}

// lossKinds are ways to lose what was written to the key log since the last checkpoint.
var lossKinds = []struct {
	name string
	do   func(m *model, parts [][2]int64)
}{
	{"a flipped bit of a segment", func(m *model, parts [][2]int64) {
		places := known(m, parts)
		m.dev.Flip(places[m.rng.IntN(len(places))]+10, 1)
	}},
	{"an unreadable block", func(m *model, parts [][2]int64) {
		p := longest(parts)
		m.dev.Unreadable(p[0]+m.rng.Int64N((p[1]-p[0])/2), 1)
	}},
	{"the last block is unreadable", func(m *model, parts [][2]int64) {
		m.dev.Unreadable(parts[len(parts)-1][1]-1, 1)
	}},
	{"a chunk without its header and first records", func(m *model, parts [][2]int64) {
		p := parts[len(parts)-1]
		m.dev.Unreadable(p[0]-int64(m.dev.BlockSize()), p[1]-p[0]+int64(m.dev.BlockSize()))
	}},
	{"a chunk that is unreadable", func(m *model, parts [][2]int64) {
		at := parts[len(parts)-1][0] - int64(m.dev.BlockSize())
		m.dev.Unreadable(at, m.cfg.ChunkBytes)
	}},
}

// known returns where those segments are that were written since the last checkpoint and of which later ones say that
// they were durable. Those without look, once they are damaged, as if a crash had torn them.
func known(m *model, parts [][2]int64) (places []int64) {
	type place struct {
		at      int64
		version uint64
	}
	var all []place
	durable := map[uint64]bool{}
	for _, p := range parts {
		for at := p[0]; at < p[1]; at += format.KeyUnit {
			if seg := m.s.SegmentAt(m.dev.Visible, at); seg != nil {
				all = append(all, place{at, seg.Version()})
				for first, last := seg.Durable(); first <= last; first++ {
					durable[first] = true
				}
			}
		}
	}
	for _, p := range all {
		if durable[p.version] {
			places = append(places, p.at)
		}
	}
	return places
}

// longest returns the longest part.
func longest(parts [][2]int64) [2]int64 {
	return slices.MaxFunc(parts, func(a, b [2]int64) int { return cmp.Compare(a[1]-a[0], b[1]-b[0]) })
}

// TestALossIsStatedAndAcceptedBeforeThePartitionOpens: the key log has lost something that was acknowledged. The
// partition does not open, is not changed, and says what is lost. When that is accepted, it opens. Each key then has a
// value that it had at some time since the last checkpoint, or is damaged. The loss is settled once.
func TestALossIsStatedAndAcceptedBeforeThePartitionOpens(t *testing.T) {
	kvstore.PlainOnly(t)
	t.Parallel()
	for seed := range kvstore.Seeds(t, times(2)) {
		base, parts := lossy(t, seed)
		for _, kind := range lossKinds {
			t.Run(kind.name, func(t *testing.T) {
				m := base.again(seed)
				m.t, m.tolerant, m.since = t, true, make([][]event, len(m.keys))
				for i := range m.since {
					m.since[i] = slices.Clone(base.since[i])
				}
				kind.do(m, parts)
				writes := m.dev.Writes
				var loss *kvstore.LossError
				for range 2 {
					err := m.open()
					if !errors.As(err, &loss) || !errors.Is(err, format.ErrCorrupt) ||
						!errors.Is(err, kvstore.ErrPartition) {
						t.Fatalf("opening fails with %v, want a LossError", err)
					}
					if m.dev.Writes != writes {
						t.Fatal("the partition was written to")
					}
					m.cfg.AcceptLoss = "something else"
				}
				t.Log(loss)
				m.cfg.AcceptLoss = loss.Token()
				m.rewoundWithDamage()
				if m.s.Lost() == nil {
					t.Error("the store knows nothing of a loss")
				}
				m.cfg.AcceptLoss = ""
				m.random(500, 16)
				m.settle()
				m.crash()
				m.reopen()
				if m.s.Lost() != nil {
					t.Errorf("the loss is still there: %v", m.s.Lost())
				}
				m.random(500, 16)
				m.settle()
				m.compare(false)
			})
		}
	}
}

// rewoundWithDamage opens the partition and takes what each key has as its content, if it had that at some time since
// mark. Most keys must have their newest content. It returns how many do not.
func (m *model) rewoundWithDamage() int {
	m.t.Helper()
	clear(m.reqs)
	if err := m.open(); err != nil {
		m.t.Fatal(err)
	}
	newest := make([]event, len(m.keys))
	for i := range m.keys {
		h := &m.keys[i]
		for _, e := range h.possible(m.clock, m.clock, false) {
			if e.version >= newest[i].version {
				newest[i] = e
			}
		}
		h.open, h.events = nil, slices.Clone(m.since[i])
		if m.added != nil && m.added[i] { // if the segment is what is missing, so are its keys
			h.events = append(h.events, event{size: absent})
		}
		for j := range h.events {
			h.events[j].state, h.events[j].end = failed, never
		}
	}
	before, older := m.damaged, 0
	m.compare(true)
	for i := range m.keys {
		if e := m.keys[i].events; len(e) == 1 && e[0].version < newest[i].version &&
			(e[0].size != absent || newest[i].size != absent) {
			older++
		}
	}
	m.t.Logf("%d keys have older values, %d are damaged", older, m.damaged-before)
	if older+m.damaged-before > len(m.keys)/2 {
		m.t.Error("too much was lost")
	}
	return older + m.damaged - before
}

// TestADamagedCheckpointIsMadeAnewFromTheKeyLog: a page of the checkpoint is damaged or unreadable, or all of it with
// its header. When that is accepted, the partition opens. Keys have their newest values; those that were deleted may
// have an older one.
func TestADamagedCheckpointIsMadeAnewFromTheKeyLog(t *testing.T) {
	kvstore.PlainOnly(t)
	t.Parallel()
	for seed := range kvstore.Seeds(t, times(2)) {
		cfg := variant(seed, 60)
		cfg.KeysPerSegment = 1
		r := newRig(t, seed, cfg)
		base := newModel(r, 9000, func() int { return 8 + r.rng.IntN(40) })
		base.mark()
		for i := range base.keys {
			base.push(kvstore.Put, i, base.size())
		}
		base.finish()
		for base.ops = updates; base.s.Stats().Segments < 7000; {
			base.random(1000, 32)
		}
		base.ops = mixed
		base.random(1000, 32)
		base.s.Checkpoint()
		base.settle()
		pages := base.s.CheckpointPages()
		if len(pages) < 2 {
			t.Fatalf("the checkpoint has pages at %d, want more than one: %+v", pages, base.s.Stats())
		}
		if seed%2 == 0 {
			base.random(300, 16)
			base.settle()
			pages = base.s.CheckpointPages()
		}
		base.crash()
		for n, do := range []func(m *model){
			func(m *model) { m.dev.Flip(pages[0]+m.rng.Int64N(format.PageBytes), 3) },
			func(m *model) { m.dev.Flip(pages[1]+m.rng.Int64N(format.PageBytes), 3) },
			func(m *model) { m.dev.Unreadable(pages[len(pages)-1], 1) }, // blocks of zeroes behind it do no harm
			func(m *model) {
				m.dev.Unreadable(pages[0]-int64(m.dev.BlockSize()), format.PageBytes)
			},
		} {
			m := base.again(seed)
			m.since, m.tolerant = make([][]event, len(m.keys)), true
			for i := range m.since {
				m.since[i] = slices.Clone(base.since[i])
			}
			do(m)
			var loss *kvstore.LossError
			if err := m.open(); !errors.As(err, &loss) || loss.BadPages == 0 {
				t.Fatalf("damage %d: opening fails with %v, want a LossError", n, err)
			}
			m.cfg.AcceptLoss = loss.Token()
			back := m.rewoundWithDamage()
			if t.Logf("%v: %d keys", loss, back); back > len(m.keys)/50 {
				t.Errorf("damage %d: %d keys are not as they were", n, back)
			}
			m.cfg.AcceptLoss = ""
			m.recount()
			m.random(1000, 16)
			m.settle()
			m.crash()
			m.reopen()
		}
	}
}

// TestEarlierUsesOfTheCheckpointsChunkDoNotCount: the chunk of a damaged checkpoint belonged to the key log before, and
// its header is lost, or is still the one of then. The records of then are of no use, although those that have replaced
// them are lost: the chunk will be used again.
func TestEarlierUsesOfTheCheckpointsChunkDoNotCount(t *testing.T) {
	kvstore.PlainOnly(t)
	t.Parallel()
	for seed := range kvstore.Seeds(t, times(2)) {
		base, chunk, before := keysUnderCheckpoint(t, seed)
		others := int64(0) // chunks that were never used, but look as if they had lost their headers
		for lost := range int64(2) {
			m := base.again(seed)
			at := m.headerAt(chunk)
			m.dev.Flip(at+int64(m.dev.BlockSize())+m.rng.Int64N(format.PageBytes), 3)
			if m.dev.Store(at, before); lost == 1 {
				m.dev.Unreadable(at, 2*int64(m.dev.BlockSize()))
			}
			for i := range m.s.Stats().Chunks {
				other := m.headerAt(int(i))
				if h := format.ChunkHeader(m.dev.Visible[other:]); other != at && h.Kind() == format.KeyLog {
					m.dev.Store(other+int64(m.dev.BlockSize()), make([]byte, m.cfg.ChunkBytes-int64(m.dev.BlockSize())))
				}
			}
			var loss *kvstore.LossError
			if err := m.open(); !errors.As(err, &loss) || loss.BadPages == 0 {
				t.Fatalf("opening fails with %v, want a LossError", err)
			}
			m.cfg.AcceptLoss = loss.Token()
			clear(m.reqs)
			if err := m.open(); err != nil {
				t.Fatal(err)
			}
			m.recount()
			st := m.s.Stats()
			if lost == 0 {
				others = st.LostHeaders
			}
			if st.LostHeaders -= others; st.Objects != 0 || st.LostHeaders != lost || st.BadChunks != lost {
				t.Errorf("%d objects, %d headers lost, %d bad chunks, want 0, %d, %d", st.Objects, st.LostHeaders,
					st.BadChunks, lost, lost)
			}
		}
	}
}

// keysUnderCheckpoint returns a partition whose process has died when the checkpoint was in a chunk that has segments
// behind the checkpoint's pages, and the header that the chunk had when it belonged to the key log.
func keysUnderCheckpoint(t *testing.T, seed uint64) (m *model, chunk int, header []byte) {
	cfg := variant(seed, 34)
	if cfg.CheckpointBytes = 1 << 30; seed%2 == 0 {
		cfg.ListChunks()
	}
	r := newRig(t, seed, cfg)
	m = newModel(r, 450, sizes(r.rng, 4000))
	super := format.Superblock(m.dev.Visible[format.SuperblockOffset(1, cfg.PartitionBytes):])
	headers := map[int][]byte{}
	for range 200 {
		m.random(200, 16)
		for i := range int(m.s.Stats().Chunks) {
			at := m.headerAt(i)
			if kind, used := m.s.KindAt(at); used && kind == format.KeyLog {
				headers[i] = slices.Clone(m.dev.Visible[at:][:m.dev.BlockSize()])
			}
		}
		m.s.Checkpoint()
		m.settle()
		pages := m.s.CheckpointPages()
		chunk = int((pages[0] - format.AreaStart) / cfg.ChunkBytes)
		for at := pages[len(pages)-1] + format.PageBytes; headers[chunk] != nil && at < m.headerAt(chunk+1); {
			seed := format.Seed(super.Salt(), format.ChunkHeader(headers[chunk]).Epoch(), units.ExtentOffset(at))
			if seg := format.Segment(m.dev.Visible[at:]); seg.Begins() && !seg.Vacant() && seg.Check(seed) == nil {
				m.crash()
				return m, chunk, headers[chunk]
			}
			at += format.KeyUnit
		}
	}
	t.Fatal("no checkpoint is in a chunk that belonged to the key log")
	return nil, 0, nil
}

// TestABadFreeChunkIsNotUsed: the first blocks of a free chunk cannot be read, as on a drive whose sectors are larger
// than its blocks. The key log shows that the chunk was not used, so that the partition opens. The chunk is not used
// after the next starts either, also when its header can be read.
func TestABadFreeChunkIsNotUsed(t *testing.T) {
	kvstore.PlainOnly(t)
	t.Parallel()
	cfg := small(0)
	cfg.ChunkBytes, cfg.PartitionBytes, cfg.CheckpointBytes = 2<<20, 25*2<<20+128<<10, 1<<30
	m := newModel(newRig(t, 3*seeds(t)+1, cfg), 300, func() int { return 1000 })
	m.random(600, 8)
	m.s.Checkpoint()
	m.settle()
	m.random(100, 8)
	chunk := m.s.Stats().Chunks - 1
	for m.s.UseOf(format.ChunkNumber(chunk)) != "never used" {
		t.Fatal("the last chunk is in use")
	}
	at := m.headerAt(int(chunk))
	m.dev.Unreadable(at, 4096)
	m.dev.Fault = func(q *ssd.Request) lab.Outcome {
		if q.Op == ssd.Write && q.Offset == at {
			return lab.FailUndone // so that the store cannot heal it
		}
		return lab.Good
	}
	want := func(lost int64) {
		t.Helper()
		m.crash()
		m.reopen()
		if got := m.s.Stats(); got.BadChunks != 1 || got.LostHeaders != lost {
			t.Fatalf("%d bad chunks and %d headers lost, want 1 and %d", got.BadChunks, got.LostHeaders, lost)
		}
	}
	want(1)
	m.random(100, 8)
	want(1)
	// The key log's chunk may be full now: the checkpoint says that the chunk was not used.
	m.s.Checkpoint()
	m.settle()
	m.random(8000, 8)
	want(1)
	m.dev.Fault = nil
	if err := m.dev.Do(ssd.Request{Op: ssd.Write, Offset: at, Len: 4096, Buf: make([]byte, 4096)}); err != nil {
		t.Fatal(err)
	}
	want(0)
	m.random(300, 8)
	m.settle()
	m.compare(false)
}

// TestAReadThatFailsOnceLosesNothing: while the partition opens, each range is read in vain the first time. No loss is
// stated, because an operator might accept it.
func TestAReadThatFailsOnceLosesNothing(t *testing.T) {
	t.Parallel()
	for seed := range kvstore.Seeds(t, times(6)) {
		m := prepared(t, seed)
		end, failed := int64(m.s.Stats().Chunks)*m.cfg.ChunkBytes, map[[2]int64]bool{}
		m.dev.Fault = func(q *ssd.Request) lab.Outcome {
			at := q.Offset - format.AreaStart
			header := at < 0 || at >= end || at%m.cfg.ChunkBytes == 0
			if what := [2]int64{q.Offset, int64(q.Len)}; q.Op == ssd.Read && !header && !failed[what] {
				failed[what] = true
				return lab.FailUndone
			}
			return lab.Good
		}
		clear(m.reqs)
		if err := m.open(); err != nil || len(failed) == 0 {
			t.Fatalf("the partition does not open, or no read has failed: %v", err)
		}
		m.dev.Fault = nil
		m.recount()
		m.compare(true)
	}
}
