package recovery

import (
	"fmt"
	"slices"
	"strings"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/lookup"
	"jbofd/internal/kvstore/space"
	"jbofd/internal/units"
)

// Loss is what is missing of the key log since the last checkpoint although it was durable, or may have been. A
// partition with a Loss opens only if Config.AcceptLoss has the Loss's Token. Then recovery replays everything that it
// has found. Keys whose newest change is in a missing segment have the value of an older change, or do not exist.
type Loss struct {
	// Segments is the number of segments that are missing. Their versions are from First to Last. Found is the number
	// of segments written since the checkpoint that are there.
	Segments, Found int64
	First, Last     uint64
	// BadPages of the Pages of the checkpoint cannot be read or are damaged. Then all of the key log is replayed, and
	// nothing else is known to be missing.
	BadPages, Pages int
	// UnreadBytes is how much cannot be read where the key log ends. It may have had the newest segments.
	UnreadBytes int64
	// Chunks cannot be read at all, and may have been the newest of the key log.
	Chunks []format.ChunkNumber
}

// lose adds the segments with versions from first to last to what is missing.
func (m *Machine) lose(first, last uint64) {
	if m.lossy { // they are known
		return
	}
	l := &m.loss
	if l.Segments == 0 {
		l.First = first
	}
	l.First, l.Last = min(l.First, first), max(l.Last, last)
	l.Segments += int64(last - first + 1)
}

// none reports that nothing is missing.
func (l *Loss) none() bool {
	return l.Segments == 0 && l.UnreadBytes == 0 && len(l.Chunks) == 0 && l.BadPages == 0
}

// Token identifies the Loss, so that nobody accepts more than what was stated.
func (l *Loss) Token() string {
	return fmt.Sprintf("%d-%d/%d/%d/%d/%d/%d", l.First, l.Last, l.Segments, l.Found, l.UnreadBytes, len(l.Chunks),
		l.BadPages)
}

func (l *Loss) String() string {
	if l.BadPages > 0 {
		return fmt.Sprintf("%d of the %d pages of the last checkpoint cannot be read or are damaged; without them the "+
			"whole key log is read, keys that were deleted may be back, and others may have older values", l.BadPages,
			l.Pages)
	}
	var s []string
	if l.Segments > 0 {
		s = append(s, fmt.Sprintf("%d of the %d segments that were written since the last checkpoint are missing, "+
			"versions %d to %d", l.Segments, l.Segments+l.Found, l.First, l.Last))
	}
	if l.UnreadBytes > 0 {
		s = append(s, fmt.Sprintf("%d bytes cannot be read where the key log ends, and may have had the newest "+
			"segments", l.UnreadBytes))
	}
	if len(l.Chunks) > 0 {
		s = append(s, fmt.Sprintf("chunks %v cannot be read, and may have had the newest segments", l.Chunks))
	}
	if l.Segments == 0 {
		s = append(s, fmt.Sprintf("%d segments that were written since the last checkpoint are there", l.Found))
	}
	return strings.Join(s, "; ")
}

// LossError is the error of a partition that does not open because of a Loss. It wraps format.ErrCorrupt.
type LossError struct{ Loss }

func (e *LossError) Error() string { return fmt.Sprintf("%v: %v", format.ErrCorrupt, &e.Loss) }

// Unwrap returns format.ErrCorrupt.
func (e *LossError) Unwrap() error { return format.ErrCorrupt }

// maxInFlight bounds how far behind the last durable group of a log there may be another one: groups of up to 64 KiB,
// and a segment more in each, are written up to four at once.
const maxInFlight = 4 * (64<<10 + 64<<10)

// maxUnread bounds how many blocks are found unreadable before the drive as a whole is given up.
const maxUnread = 8192

// piece is a part of image.Buf that is being read. again: it is a block whose read has failed, and is being read again.
type piece struct {
	offset   units.ExtentOffset
	from, to int
	again    bool
}

// beginPieces begins to read something else into image.Buf.
func (m *Machine) beginPieces() { m.pieces, m.unread = m.pieces[:0], m.unread[:0] }

// readPiece reads a part of image.Buf, in whole blocks.
func (m *Machine) readPiece(p piece) {
	m.pieces = append(m.pieces, p)
	m.read(int32(len(m.pieces)-1), p.offset, m.image.Buf[p.from:p.to])
}

// pieceFailed reads a piece that could not be read again, in halves, until the blocks are found that cannot be read
// twice by themselves. They are zeroed.
func (m *Machine) pieceFailed(slot int32) {
	p, block := m.pieces[slot], m.cfg.BlockSize
	switch n := p.to - p.from; {
	case n > block:
		half := format.RoundUp(n/2, block)
		m.readPiece(piece{offset: p.offset, from: p.from, to: p.from + half})
		m.readPiece(piece{offset: p.offset + units.ExtentOffset(half), from: p.from + half, to: p.to})
		return
	case !p.again:
		p.again = true
		m.readPiece(p)
		return
	}
	clear(m.image.Buf[p.from:p.to])
	m.image.Pool.NoteUnreadable(m.image.Pool.Of(p.offset))
	i, _ := slices.BinarySearch(m.unread, p.from)
	m.unread = slices.Insert(m.unread, i, p.from)
	m.failures++
}

// failed handles a read that has failed. It returns false if the partition cannot be opened therefore.
func (m *Machine) failed(slot int32, err error) bool {
	switch m.stage {
	case readSupers:
		m.sbErrs[slot] = err
	case readHeaders:
		m.failures++
	case readOpenings:
		m.badOpenings[slot] = true
	default:
		m.pieceFailed(slot)
	}
	if m.failures > maxUnread {
		m.err = fmt.Errorf("%d blocks cannot be read: %w", m.failures, err)
		return false
	}
	return true
}

// noteUse notes which of the chunks that are in doubt hold values: the segment refers to them.
func (m *Machine) noteUse(seg format.Segment) {
	if len(m.doubtful) == 0 {
		return
	}
	for at, n := seg.First(), seg.Items(); n > 0; n-- {
		it := seg.Item(at)
		at += it.LengthBytes()
		if place := it.ValueOffset(); it.ValueLen() > 0 && m.image.Pool.Contains(place) {
			m.found[m.image.Pool.Of(place)].used = true
		}
	}
}

// mayBeKeyLog reports whether a chunk that is in doubt may have been opened since the checkpoint for the key log. It
// was not if it holds values, or if it still holds what it held at the checkpoint.
func (m *Machine) mayBeKeyLog(i format.ChunkNumber) bool {
	if c := &m.image.Pool.Chunks[i]; c.Kind != 0 {
		return m.uncounted || c.Live == 0
	}
	return !m.found[i].used
}

// markBad makes the chunks bad that cannot be read where the key log might go on in them, and are not in use. If they
// were free, the next opening could not tell whether it has.
func (m *Machine) markBad() {
	for _, i := range m.unsafe {
		if c := &m.image.Pool.Chunks[i]; c.Live == 0 {
			*c = space.Chunk{Epoch: c.Epoch, Kind: format.Bad, State: space.Bad}
		}
	}
}

// missing notes versions whose segments were not found although they may have been durable. skipped is how much could
// not be read before the next segment.
func (m *Machine) missing(first, last uint64, skipped int64) {
	if from := m.image.Super.VolatileFrom(); m.lossy && (from == 0 || last < from) {
		return // it is known
	}
	if skipped > 0 {
		m.lose(first, last)
		return
	}
	m.gaps = append(m.gaps, gap{first, last})
}

// wereDurable takes the versions from first to last, which a segment says were durable, out of the gaps. It returns
// false if the replay starts again, because a loss of power has taken them.
func (m *Machine) wereDurable(first, last uint64) bool {
	var left []gap
	for _, g := range m.gaps {
		if first > g.last || g.first > last {
			if g.last >= first || first > last {
				left = append(left, g)
			}
			continue
		}
		lost := gap{max(first, g.first), min(last, g.last)}
		if from := m.image.Super.VolatileFrom(); from > 0 && lost.first >= from {
			m.restartUpTo(lost.first)
			return false
		}
		m.lose(lost.first, lost.last)
		if lost.last < g.last {
			left = append(left, gap{lost.last + 1, g.last})
		}
	}
	m.gaps = left
	return true
}

// mayMiss reports whether a segment with a version below v may be missing that has added a segment to the table.
func (m *Machine) mayMiss(v uint64) bool {
	return m.rebuild && !m.hasLength || m.lossy && m.loss.Segments > 0 && m.loss.First < v
}

// pagesEnded continues when the pages of the checkpoint were read. If not all are sound, the partition does not open.
// If the operator has accepted that, the checkpoint is not used: every chunk is what its header says, and the whole key
// log is replayed. Chunks that were free have records, too, but older ones: they only count for a segment of which the
// newest record is lost or had nothing in it.
func (m *Machine) pagesEnded() {
	if m.badPages == 0 && m.image.Super.FullPages() > 0 && !m.stream.ended {
		m.badPages++ // they end within a stream
	}
	if m.badPages == 0 {
		m.beginProbe()
		return
	}
	if m.listed {
		m.readAllHeaders()
		return
	}
	if !m.lossy {
		m.loss = Loss{BadPages: m.badPages, Pages: int(m.image.Super.Pages())}
		if m.loss.Token() != m.cfg.AcceptLoss {
			m.err = &LossError{m.loss}
			return
		}
		m.lossy, m.image.Loss = true, &m.loss
	}
	m.rebuild, m.uncounted, m.partial = true, true, nil
	clear(m.image.Pool.Chunks)
	m.image.Checkpoint = slices.DeleteFunc(m.image.Checkpoint, func(i format.ChunkNumber) bool { return i == none })
	m.image.Version, m.image.Objects, m.image.Table = 1, 0, lookup.NewSegTbl(m.cfg.SegTbl)
	m.hasLength = m.segments > 0
	clear(m.summary[:])
	if m.hasLength && !m.growTable(m.segments) {
		return
	}
	m.beginProbe()
}

// giveUpCheckpoint gives up the chunks of a checkpoint that cannot be used, with the next checkpoint. A key that was
// deleted and is back may have its value in one of them. They hold nothing of it any more, but the count of what is
// live in a chunk must not fall below what is.
func (m *Machine) giveUpCheckpoint() {
	for _, i := range m.image.Checkpoint {
		if c := &m.image.Pool.Chunks[i]; c.Live == 0 {
			*c = space.Chunk{Epoch: c.Epoch, State: space.Obsolete}
		} else {
			*c = space.Chunk{Epoch: c.Epoch, State: space.Free, Live: c.Live}
		}
	}
	m.image.Checkpoint = nil
}

// acceptLoss is called when the key log was replayed. If nothing is missing it returns true. Otherwise the partition
// does not open, or, if the operator has accepted what is missing, the replay starts again to make the best of it. A
// chunk that is in doubt does not belong to the key log if the last chunk that does is not nearly full.
func (m *Machine) acceptLoss() bool {
	if m.lossy {
		return true
	}
	m.loss.UnreadBytes = m.skipped
	for _, i := range m.doubtful {
		if m.mayBeKeyLog(i) && m.image.Pool.End()-m.keyEnd <= 2*maxInFlight {
			m.loss.Chunks = append(m.loss.Chunks, i)
		}
	}
	if m.loss.none() {
		return true
	}
	first := max(1, format.Summary(m.summary[:]).NextVersion())
	m.loss.Found = int64(m.image.Version-first) - m.loss.Segments
	if m.loss.Token() != m.cfg.AcceptLoss {
		m.err = &LossError{m.loss}
		return false
	}
	m.lossy = true
	m.image.Loss = &m.loss
	m.restart()
	return false
}
