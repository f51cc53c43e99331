package recovery

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"slices"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/lookup"
	"jbofd/internal/kvstore/space"
)

func (m *Machine) noteEpoch(epoch uint64) {
	m.image.Pool.LastEpoch = max(m.image.Pool.LastEpoch, epoch)
}

// beginPages begins to read the checkpoint.
func (m *Machine) beginPages() {
	m.stage, m.step, m.badPages, m.stream, m.segments = readPages, 0, 0, streamState{}, 0
	m.merges, m.nextVersion = false, 0
	if !m.complete() {
		m.badPages = int(m.image.Super.Pages())
		m.pagesEnded()
		return
	}
	m.readPages()
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
	m.pagesEnded()
}

// takePage handles the next page of the checkpoint. One that is not sound is counted, and what is behind it is only
// checked: it may be part of any stream.
func (m *Machine) takePage(p format.Page) {
	sb, page := m.image.Super, uint32(m.step)
	last := uint32(0) // where the last stream begins
	if sb.LastPages() > 0 {
		last = sb.Pages() - sb.LastPages()
	}
	first, id := page == 0 || m.stream.ended, m.stream.id
	switch {
	case page == 0:
		id = sb.Checkpoint()
	case page >= last && last > 0:
		id = sb.LastStream()
	case first:
		id = p.Stream()
	}
	if p.Check(id, page) != nil {
		m.badPages++
		return
	}
	data := p.Payload()
	if page == last {
		sum := format.Summary(data)
		m.segments, m.nextVersion, m.merges = sum.Segments(), sum.NextVersion(), sum.Merges()
	}
	before := m.stream.id
	switch {
	case m.badPages > 0:
		return
	case first:
		m.stream = streamState{id: id, increment: page > 0}
		copy(m.summary[:], data)
	}
	if first && page > 0 && !format.IsNextStream(id, before) || !first && (id != before || page == last) {
		m.badPages++
		return
	}
	if first {
		if !m.beginStream() {
			return
		}
		data, m.stream.offset = data[format.SummaryBytes:], format.SummaryBytes
	}
	tableStart := format.SummaryBytes + int64(len(m.found))*format.ChunkEntryBytes
	for ; m.stream.offset < tableStart && len(data) > 0; m.stream.offset++ {
		m.partial = append(m.partial, data[0])
		data = data[1:]
		if len(m.partial) == format.ChunkEntryBytes {
			e := format.ChunkEntry(m.partial)
			m.noteEpoch(e.Epoch())
			m.image.Pool.Chunks[(m.stream.offset-format.SummaryBytes)/format.ChunkEntryBytes] = space.Chunk{
				Epoch: space.NewEpoch(e.Epoch()), Live: e.Live(), Kind: e.Kind()}
			m.partial = m.partial[:0]
		}
	}
	if m.stream.increment {
		m.takeUnits(data)
		return
	}
	if at := m.stream.offset - tableStart; len(data) > 0 && at < int64(len(m.image.Table.Bytes())) {
		m.image.Table.Load(at, data)
	}
	m.stream.offset += int64(len(data))
	m.stream.ended = page+1 == sb.FullPages()
}

// beginStream takes the summary of a stream.
func (m *Machine) beginStream() bool {
	sum, table := format.Summary(m.summary[:]), &m.image.Table
	if sum.Chunks() != len(m.found) {
		m.err = fmt.Errorf("checkpoint: %w: number of chunks is %d, want %d", format.ErrCorrupt, sum.Chunks(),
			len(m.found))
		return false
	}
	if !m.fitsTable(sum.Segments()) {
		return false
	}
	switch n := table.Len(); {
	case !m.stream.increment:
		table.Extend(sum.Segments())
	case n < sum.Segments():
		table.Grow(sum.Segments())
		table.Unmark(int64(n)*lookup.EntryBytes, int64(sum.Segments())*lookup.EntryBytes, sum.Segments())
	case n > sum.Segments():
		table.Shrink(sum.Segments())
	}
	m.image.Objects, m.image.Version = sum.Objects(), sum.NextVersion()
	m.image.Clock = max(m.image.Clock, sum.Clock())
	if e := sum.FirstExpiry(); e != 0 && (m.image.FirstExpiry == 0 || e < m.image.FirstExpiry) {
		m.image.FirstExpiry = e
	}
	m.noteEpoch(sum.LastEpoch())
	return true
}

// takeUnits takes a part of an increment that has units of the SegTbl.
func (m *Machine) takeUnits(data []byte) {
	for len(data) > 0 && !m.stream.ended {
		n := min(unitBytes-len(m.partial), len(data))
		if len(m.partial) < 4 {
			n = min(4-len(m.partial), len(data))
		}
		m.partial, data = append(m.partial, data[:n]...), data[n:]
		if len(m.partial) < 4 {
			continue
		}
		number := binary.LittleEndian.Uint32(m.partial)
		if m.stream.ended = number == format.EndOfUnits; m.stream.ended || len(m.partial) == unitBytes {
			if !m.stream.ended {
				m.image.Table.LoadUnit(number, m.partial[4:])
			}
			m.partial = m.partial[:0]
		}
	}
}

// growTable extends the table to n segments, or refuses the partition.
func (m *Machine) growTable(n uint32) bool {
	if !m.fitsTable(n) {
		return false
	}
	if n > m.image.Table.Len() {
		m.image.Table.Grow(n)
	}
	return true
}

// fitsTable refuses the partition if the table has no room for n segments.
func (m *Machine) fitsTable(n uint32) bool {
	if t := &m.image.Table; int64(n) > int64(t.Max()) {
		m.err = fmt.Errorf("SegTbl has room for %d segments, the partition has %d", t.Max(), n)
		return false
	}
	return true
}

// afterCheckpoint is the offset in chunk i of the first byte that was written after the checkpoint had begun. It is the
// end of the chunk if nothing was.
func (m *Machine) afterCheckpoint(i format.ChunkNumber) format.ChunkOffset {
	sum, epoch := format.Summary(m.summary[:]), m.image.Pool.Chunks[i].Epoch.N()
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

// numUnlisted is more than the chunks that were being opened at the end, so that no block lists them yet. They have
// nothing but, perhaps, a header; its epoch is not used again.
const numUnlisted = 16

// classify decides what every chunk is. For chunks that were opened since the checkpoint their headers say it, for all
// others the checkpoint.
func (m *Machine) classify() {
	sum := format.Summary(m.summary[:])
	pool := m.image.Pool
	pool.KeyEpoch = sum.KeyEpoch()
	if m.image.Table.Len() == 0 && !m.growTable(lookup.FirstSegments) {
		return
	}
	if m.listed {
		pool.LastEpoch += numUnlisted
	}
	for _, i := range m.image.Checkpoint {
		// Its header may be one of an earlier use. Records of that are not replayed: the chunk is given up if the
		// checkpoint is, and nothing may refer to it then.
		m.found[i].kind = format.Checkpoint
	}
	for i := range pool.Chunks {
		c, f := &pool.Chunks[i], &m.found[i]
		if m.listed && !f.read {
			f.epoch, f.kind = c.Epoch.N(), c.Kind // nothing has happened to it
		}
		if f.reopened = max(f.epoch, c.Epoch.N()) > sum.LastEpoch(); f.reopened {
			c.Live = 0
		}
		switch {
		case f.epoch > sum.LastEpoch():
			*c = space.Chunk{Epoch: space.NewEpoch(f.epoch), Kind: f.kind}
		case m.image.Checkpoint == nil:
			*c = space.Chunk{}
		}
		c.State = space.Sealed
		if c.Kind == format.KeyLog && c.Epoch.N() >= pool.KeyEpoch {
			m.keys = append(m.keys, format.ChunkNumber(i))
		}
		if c.Kind == 0 || c.Kind == format.Checkpoint {
			*c = space.Chunk{Epoch: c.Epoch, State: space.Free}
		}
		if c.Kind == format.Bad {
			// It was not taken as long as this checkpoint says so. It stays bad until the store has tried it: that its
			// header can be read says nothing of the rest.
			*c = space.Chunk{Epoch: c.Epoch, Kind: format.Bad, State: space.Bad}
			m.doubtful = slices.DeleteFunc(m.doubtful, func(d format.ChunkNumber) bool {
				return d == format.ChunkNumber(i)
			})
		}
		if f.lost {
			pool.Doubtful = append(pool.Doubtful, format.ChunkNumber(i))
		}
	}
	for _, i := range m.image.Checkpoint {
		pool.Chunks[i] = space.Chunk{Epoch: space.NewEpoch(m.found[i].epoch), Kind: format.Checkpoint,
			State: space.Open}
	}
	slices.SortFunc(m.keys, func(a, b format.ChunkNumber) int {
		return cmp.Compare(pool.Chunks[a].Epoch.N(), pool.Chunks[b].Epoch.N())
	})
	m.stage, m.step = replay, 0
	m.readKeys()
}
