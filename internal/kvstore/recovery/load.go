package recovery

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/lookup"
	"jbofd/internal/kvstore/space"
)

// chooseSuper chooses the valid superblock with the higher generation.
func (m *Machine) chooseSuper() {
	var errs [2]error
	best := none
	for i := range m.sbs {
		sb := format.Superblock(m.sbs[i])
		if errs[i] = sb.Check(m.cfg.PartitionBytes); errs[i] == nil &&
			(best == none || sb.Generation() > format.Superblock(m.sbs[best]).Generation()) {
			best = i
		}
	}
	// With a newer version in one copy and a known one in the other, a newer program was the last to write.
	for _, err := range errs {
		if errors.Is(err, format.ErrVersion) {
			m.err = err
			return
		}
	}
	if best == none {
		m.err = fmt.Errorf("first copy: %w; second copy: %w", errs[0], errs[1])
		return
	}
	m.image.Super = m.sbs[best]
	m.image.OneCopy = errs[1-best] != nil || format.Superblock(m.sbs[1-best]).Checkpoint() != m.image.Super.Checkpoint()
	if got := m.image.Super.BlockSize(); got < m.cfg.BlockSize {
		m.err = fmt.Errorf("made for blocks of %d bytes, the device has blocks of %d", got, m.cfg.BlockSize)
		return
	}
	m.cfg.BlockSize = m.image.Super.BlockSize()
	m.image.Pool = space.New(m.image.Super)
	mem := space.Buffers{Alloc: m.cfg.Alloc}
	if m.image.Buf = mem.Take("a chunk that is read", int(m.image.Pool.Bytes())); mem.Err != nil {
		m.err = mem.Err
		return
	}
	m.found = make([]found, len(m.image.Pool.Chunks))
	m.stage = readHeaders
	for i := range min(headerReads, len(m.found), len(m.image.Buf)/m.cfg.BlockSize) {
		m.readHeader(int32(i))
	}
	if len(m.found) == 0 {
		m.err = fmt.Errorf("superblock: %w: a partition of %d bytes has no chunk of %d", format.ErrCorrupt,
			m.cfg.PartitionBytes, m.image.Super.ChunkBytes())
	}
}

func (m *Machine) readHeader(slot int32) {
	m.of[slot] = m.next
	m.read(slot, m.image.Pool.At(m.next, 0), m.headerBuf(slot))
	m.next++
}

func (m *Machine) headerBuf(slot int32) []byte {
	return m.image.Buf[int(slot)*m.cfg.BlockSize:][:m.cfg.BlockSize]
}

// headerRead takes a chunk's header. If nothing in it looks like ours, nothing in the chunk counts. A block is written
// whole or not at all, so what is ours and not sound is damaged.
func (m *Machine) headerRead(slot int32) {
	i, sb := m.of[slot], m.image.Super
	h := format.ChunkHeader(m.headerBuf(slot)[:format.ChunkHeaderBytes])
	err := h.Check()
	if errors.Is(err, format.ErrCorrupt) && (h.Begins() || h.UUID() == sb.UUID()) {
		m.found[i] = found{epoch: h.Epoch(), damaged: err}
	}
	if err == nil && h.UUID() == sb.UUID() {
		m.found[i] = found{epoch: h.Epoch(), kind: h.Kind()}
		m.noteEpoch(h.Epoch())
		if n := int(h.Index()); h.Kind() == format.Checkpoint && h.Checkpoint() == sb.Checkpoint() && n < len(m.found) {
			for len(m.image.Checkpoint) <= n {
				m.image.Checkpoint = append(m.image.Checkpoint, none)
			}
			// One that was not finished before a crash may have had the same id.
			if other := m.image.Checkpoint[n]; other == none || m.found[other].epoch < h.Epoch() {
				m.image.Checkpoint[n] = i
			}
		}
	}
	if int(m.next) < len(m.found) {
		m.readHeader(slot)
		return
	}
	if m.pending > 0 {
		return
	}
	if sb.Checkpoint() == 0 {
		m.image.Checkpoint = nil
		m.classify()
		return
	}
	if want := sb.CheckpointChunks(); len(m.image.Checkpoint) != want || slices.Contains(m.image.Checkpoint, none) {
		m.err = fmt.Errorf("checkpoint %d: %w: chunks are %v, want %d", sb.Checkpoint(), format.ErrCorrupt,
			m.image.Checkpoint, want)
		return
	}
	m.stage = readPages
	m.readPages()
}

func (m *Machine) noteEpoch(epoch uint32) {
	m.image.Pool.LastEpoch = max(m.image.Pool.LastEpoch, epoch)
}

// readPages reads the pages in the next chunk of the checkpoint.
func (m *Machine) readPages() {
	sb := m.image.Super
	chunk, from := sb.PagePlace(uint32(m.step))
	to := from
	for page := uint32(m.step); page < sb.Pages(); page++ {
		c, offset := sb.PagePlace(page)
		if c != chunk {
			break
		}
		to = offset + format.PageBytes
	}
	m.load(m.image.Checkpoint[chunk], from, to)
}

func (m *Machine) pagesRead() {
	for all := m.loaded(); len(all) > 0; all = all[format.PageBytes:] {
		if m.takePage(format.Page(all[:format.PageBytes])); m.err != nil {
			return
		}
		m.step++
	}
	if uint32(m.step) < m.image.Super.Pages() {
		m.readPages()
		return
	}
	m.classify()
}

// takePage handles a page of the checkpoint.
func (m *Machine) takePage(p format.Page) {
	if m.err = p.Check(m.image.Super.Checkpoint(), uint32(m.step)); m.err != nil {
		return
	}
	data := p.Payload()
	offset := int64(m.step) * format.PagePayloadBytes
	if m.step == 0 {
		copy(m.summary[:], data)
		sum := format.Summary(m.summary[:])
		if sum.Chunks() != len(m.found) {
			m.err = fmt.Errorf("checkpoint: %w: number of chunks is %d, want %d", format.ErrCorrupt, sum.Chunks(),
				len(m.found))
			return
		}
		if !m.growTable(sum.Segments()) {
			return
		}
		m.image.Objects, m.image.Version = sum.Objects(), sum.NextVersion()
		m.noteEpoch(sum.LastEpoch())
		data, offset = data[format.SummaryBytes:], format.SummaryBytes
	}
	tableStart := format.SummaryBytes + int64(len(m.found))*format.ChunkEntryBytes
	for ; offset < tableStart && len(data) > 0; offset++ {
		m.partial = append(m.partial, data[0])
		data = data[1:]
		if len(m.partial) == format.ChunkEntryBytes {
			e := format.ChunkEntry(m.partial)
			m.noteEpoch(e.Epoch())
			m.image.Pool.Chunks[(offset-format.SummaryBytes)/format.ChunkEntryBytes] = space.Chunk{Epoch: e.Epoch(),
				Live: e.Live(), Kind: e.Kind()}
			m.partial = m.partial[:0]
		}
	}
	if offset >= tableStart {
		if at, table := offset-tableStart, m.image.Table.Bytes(); at < int64(len(table)) {
			copy(table[at:], data)
		}
	}
}

// growTable extends the table to n segments, or refuses the partition.
func (m *Machine) growTable(n uint32) bool {
	t := &m.image.Table
	if int64(n) > int64(t.Max()) {
		m.err = fmt.Errorf("SegTbl has room for %d segments, the partition has %d", t.Max(), n)
		return false
	}
	if n > t.Len() {
		t.Grow(n)
	}
	return true
}

// afterCheckpoint is the offset in chunk i of the first byte that was written after the checkpoint had begun. It is the
// end of the chunk if nothing was.
func (m *Machine) afterCheckpoint(i format.ChunkNumber) format.ChunkOffset {
	sum, epoch := format.Summary(m.summary[:]), m.image.Pool.Chunks[i].Epoch
	for l := range NumLogs {
		if e, end := sum.Open(l); e != 0 && e == epoch {
			return end
		}
	}
	if epoch > sum.LastEpoch() {
		return format.ChunkOffset(m.cfg.BlockSize)
	}
	return m.image.Pool.End()
}

// classify decides what every chunk is. For chunks that were opened since the checkpoint their headers say it, for all
// others the checkpoint.
func (m *Machine) classify() {
	sum := format.Summary(m.summary[:])
	pool := m.image.Pool
	pool.KeyEpoch = sum.KeyEpoch()
	if m.image.Table.Len() == 0 && !m.growTable(lookup.FirstSegments) {
		return
	}
	for i := range pool.Chunks {
		c, f := &pool.Chunks[i], &m.found[i]
		if f.reopened = max(f.epoch, c.Epoch) > sum.LastEpoch(); f.reopened {
			c.Live = 0
		}
		switch {
		case f.damaged != nil && (c.Kind == 0 || f.epoch != c.Epoch):
			m.err = fmt.Errorf("chunk %d: %w", i, f.damaged)
			return
		case f.damaged != nil:
			// The checkpoint says what the chunk is.
		case f.epoch > sum.LastEpoch():
			*c = space.Chunk{Epoch: f.epoch, Kind: f.kind}
		case m.image.Checkpoint == nil:
			*c = space.Chunk{}
		}
		c.State = space.Sealed
		if c.Kind == format.KeyLog && c.Epoch >= pool.KeyEpoch {
			m.keys = append(m.keys, format.ChunkNumber(i))
		}
		if c.Kind == 0 || c.Kind == format.Checkpoint {
			*c = space.Chunk{Epoch: c.Epoch, State: space.Free}
		}
	}
	for _, i := range m.image.Checkpoint {
		pool.Chunks[i] = space.Chunk{Epoch: m.found[i].epoch, Kind: format.Checkpoint, State: space.Open}
	}
	slices.SortFunc(m.keys, func(a, b format.ChunkNumber) int {
		return cmp.Compare(pool.Chunks[a].Epoch, pool.Chunks[b].Epoch)
	})
	m.stage, m.step = replay, 0
	m.readKeys()
}
