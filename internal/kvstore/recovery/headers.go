package recovery

import (
	"fmt"
	"slices"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/space"
)

// A chunk's header says what the chunk was opened for, and when. Recovery needs that for two things: to find the chunks
// of the checkpoint, and the chunks that were opened since. It does without the header of any chunk:
//
//   - The pages of the checkpoint say that they are pages, of which checkpoint, and which ones.
//   - A chunk that was opened since the checkpoint has records with a version that the checkpoint does not have yet.
//     The chunk's epoch is the one with which their checksums are right. Without such a record, the chunk is what the
//     checkpoint says.

// lostHeader is a chunk whose header cannot be read, is damaged, or may have been overwritten.
type lostHeader struct {
	chunk format.ChunkNumber
	// bytes is how much of the chunk is searched for records. It is the whole chunk, or no more than the first record
	// if there is something that looks like one behind a block that is no header at all.
	bytes int
	// version is that of the first record in the latter case, its low versionBits bits.
	version     uint64
	versionBits int
}

const (
	// spareEpochs is how many epochs there may have been after the last one that a header names.
	spareEpochs = 1024
	// maxAhead bounds by how much the version of a record can be ahead of the checkpoint's. It tells versions from
	// other bytes.
	maxAhead = 1 << 32
	// maxGuesses bounds how many records of a chunk are tried with all epochs.
	maxGuesses = 16
)

// beginHeaders begins to read the headers of the chunks that may have been opened since the checkpoint. With each it
// reads the block behind it, which shows whether a chunk without a header has been used (looksUsed).
func (m *Machine) beginHeaders() {
	m.found = make([]found, len(m.image.Pool.Chunks))
	m.stage, m.next = readHeaders, 0
	for i := range min(headerReads, m.headers(), len(m.image.Buf)/m.headerBytes()) {
		m.readHeader(int32(i))
	}
	switch {
	case len(m.found) > 0:
		if m.pending == 0 {
			m.headersRead()
		}
	default:
		m.err = fmt.Errorf("superblock: %w: a partition of %d bytes has no chunk of %d", format.ErrCorrupt,
			m.cfg.PartitionBytes, m.image.Super.ChunkBytes())
	}
}

// headers is how many headers are read.
func (m *Machine) headers() int {
	if m.listed {
		return len(m.toRead)
	}
	return len(m.found)
}

// headerBytes is the length of a header and the block behind it.
func (m *Machine) headerBytes() int { return 2 * m.cfg.BlockSize }

func (m *Machine) readHeader(slot int32) {
	i := format.ChunkNumber(m.next)
	if m.listed {
		i = m.toRead[m.next]
	}
	m.of[slot] = i
	m.read(slot, m.image.Pool.At(i, 0), m.headerBuf(slot))
	m.next++
}

func (m *Machine) headerBuf(slot int32) []byte {
	return m.image.Buf[int(slot)*m.headerBytes():][:m.headerBytes()]
}

// headerRead judges the header of a chunk and the block behind it, once the read in a slot has ended; ok is false if
// the read has failed. A valid header goes to found. A chunk whose header is lost, or may be, goes to lost: it is
// searched later for records that say what the header said. Then headerRead reads the next header in the same slot, or
// goes on to the checkpoint after the last one.
func (m *Machine) headerRead(slot int32, ok bool) {
	i, buf := m.of[slot], m.headerBuf(slot)
	m.found[i].read = true
	h := format.ChunkHeader(buf[:format.ChunkHeaderBytes])
	switch err := h.Check(); {
	case ok && err == nil:
		m.takeHeader(i, h)
	case !ok || h.Begins() || h.UUID() == m.image.Super.UUID():
		// The header cannot be read, or it is damaged: its magic or its UUID is still right.
		m.lost = append(m.lost, lostHeader{chunk: i, bytes: int(m.image.Pool.Bytes())})
	default:
		// The block is no header at all: the chunk was never used, or all of its header was lost. Only the block behind
		// it tells which.
		if l := m.looksUsed(i, buf[m.cfg.BlockSize:]); l.bytes > 0 {
			m.lost = append(m.lost, l)
		}
	}
	if m.next < m.headers() {
		m.readHeader(slot)
	} else if m.pending == 0 {
		m.headersRead()
	}
}

// looksUsed looks at b, the block behind the header of chunk i. If b begins with something that looks like a record or
// like a page of the checkpoint, it returns the length of the chunk that has to be read to be sure, as bytes, and the
// version of the record. Otherwise bytes is 0.
func (m *Machine) looksUsed(i format.ChunkNumber, b []byte) (l lostHeader) {
	l.chunk = i
	seg, v, p := format.Segment(b), format.Value(b), format.Page(b)
	switch {
	case p.Begins() && p.Stream() == m.image.Super.Checkpoint():
		l.bytes, l.version = m.cfg.BlockSize+format.PageBytes, 0
	case seg.Begins():
		l.bytes, l.version = m.cfg.BlockSize+format.RoundUp(seg.ExtentBytes(), m.cfg.BlockSize), seg.Version()
		l.versionBits = segmentVersionBits
	case v.Begins() && v.ValueLen() <= format.MaxValue:
		l.bytes = m.cfg.BlockSize + format.RoundUp(v.RecordBytes(), m.cfg.BlockSize)
		l.version, l.versionBits = v.Version()
	}
	l.bytes = min(l.bytes, int(m.image.Pool.Bytes()))
	return l
}

// takeCheckpoint sets image.Checkpoint to the chunks that the superblock names. It returns false if the superblock does
// not name them, or names one that is not in the partition. It also counts those whose header is lost.
func (m *Machine) takeCheckpoint() bool {
	chunks := m.image.Super.Chunks(m.image.Checkpoint[:0])
	if len(chunks) == 0 || int(slices.Max(chunks)) >= len(m.found) {
		return false
	}
	m.image.Checkpoint = chunks
	for _, l := range m.lost {
		if slices.Contains(chunks, l.chunk) {
			m.image.LostHeaders++
		}
	}
	return true
}

// takeHeader records what a valid header says. A header of another store is ignored: it is left from an earlier use of
// the extent, as is all that is in the chunk.
func (m *Machine) takeHeader(i format.ChunkNumber, h format.ChunkHeader) {
	if h.UUID() != m.image.Super.UUID() {
		return
	}
	m.found[i] = found{epoch: h.Epoch(), kind: h.Kind(), read: true}
	m.noteEpoch(h.Epoch())
	if h.Kind() == format.Checkpoint && h.Checkpoint() == m.image.Super.Checkpoint() {
		m.takeCheckpointChunk(i, int(h.Index()))
	}
}

// takeCheckpointChunk records that chunk i is number n of the checkpoint. If two chunks claim that, the one that was
// opened later is right: a checkpoint that a crash has interrupted may have had the same id.
func (m *Machine) takeCheckpointChunk(i format.ChunkNumber, n int) {
	if n >= m.image.Super.CheckpointChunks() {
		return
	}
	for len(m.image.Checkpoint) <= n {
		m.image.Checkpoint = append(m.image.Checkpoint, none)
	}
	if other := m.image.Checkpoint[n]; other == none || m.found[other].epoch < m.found[i].epoch {
		m.image.Checkpoint[n] = i
	}
}

// headersRead begins to read the checkpoint, or looks for its chunks first.
func (m *Machine) headersRead() {
	if m.image.Super.Checkpoint() == 0 {
		m.beginProbe()
		return
	}
	if m.takeCheckpoint() {
		m.beginPages()
		return
	}
	if len(m.lost) > 0 {
		m.stage, m.step = findPages, 0
		m.findPages()
		return
	}
	m.beginPages()
}

// complete reports whether all chunks of the checkpoint were found.
func (m *Machine) complete() bool {
	return len(m.image.Checkpoint) == m.image.Super.CheckpointChunks() && !slices.Contains(m.image.Checkpoint, none)
}

// findPages reads the first page of the next chunk whose header is lost.
func (m *Machine) findPages() {
	for m.step < len(m.lost) && !m.complete() {
		l := m.lost[m.step]
		if _, at := m.image.Super.PagePlace(0); l.bytes >= int(at)+format.PageBytes {
			m.load(l.chunk, at, at+format.PageBytes)
			return
		}
		m.step++
	}
	m.beginPages()
}

// pageFound handles the end of the read of findPages: a page of the checkpoint shows that its chunk belongs to it.
func (m *Machine) pageFound() {
	sb, l := m.image.Super, m.lost[m.step]
	p := format.Page(m.loaded())
	if n := p.Index(); p.Check(sb.Checkpoint(), n) == nil && n < sb.Pages() {
		if c, at := sb.PagePlace(n); at == m.at {
			m.image.LostHeaders++
			m.takeCheckpointChunk(l.chunk, c)
		}
	}
	m.step++
	m.findPages()
}

// beginProbe begins to look for records that were written since the checkpoint in the chunks whose headers are lost.
func (m *Machine) beginProbe() {
	if m.searched { // the replay starts again
		m.classify()
		return
	}
	m.searched = true
	sum := format.Summary(m.summary[:])
	m.lost = slices.DeleteFunc(m.lost, func(l lostHeader) bool {
		return !m.rebuild && slices.Contains(m.image.Checkpoint, l.chunk) ||
			l.bytes < int(m.image.Pool.Bytes()) && !isNew(l.version, l.versionBits, sum)
	})
	m.stage, m.step = probe, 0
	m.probe()
}

// segmentVersionBits is how many bits of its version a segment has.
const segmentVersionBits = 48

// isNew reports whether a version, of which only the low bits are known, may be that of a record that was written since
// the checkpoint.
func isNew(version uint64, bits int, sum format.Summary) bool {
	ahead := (version - sum.NextVersion()) & (1<<bits - 1)
	return ahead < min(maxAhead, uint64(1)<<(bits-1))
}

// probe reads the next chunk whose header is lost.
func (m *Machine) probe() {
	if m.step == len(m.lost) {
		if m.image.LostHeaders > 0 {
			// The epochs of those chunks must not be used again.
			m.image.Pool.LastEpoch += spareEpochs
		}
		m.classify()
		return
	}
	l := m.lost[m.step]
	m.load(l.chunk, 0, format.ChunkOffset(l.bytes))
}

// probed handles the end of the read of probe. It finds out what the chunk is: its header can be read after all, or the
// checkpoint names it, or its records say so (guess). If the whole chunk was read and none of that is the case, the
// header counts as lost.
func (m *Machine) probed() {
	l, buf := m.lost[m.step], m.loaded()
	h := format.ChunkHeader(buf[:format.ChunkHeaderBytes])
	whole := l.bytes == int(m.image.Pool.Bytes())
	// A block that cannot be read far behind the beginning of the chunk has nothing that matters.
	i, _ := slices.BinarySearch(m.unread, m.cfg.BlockSize)
	unsafe := i < len(m.unread) && m.unread[i] <= maxInFlight
	switch {
	case h.Check() == nil && h.UUID() == m.image.Super.UUID(): // it can be read after all
		m.found[l.chunk] = found{epoch: h.Epoch(), kind: h.Kind(), read: true}
		m.noteEpoch(h.Epoch())
	case slices.Contains(m.image.Checkpoint, l.chunk): // known, and LostHeaders has it already
	case m.guess(l.chunk, buf):
		m.image.LostHeaders++
	case whole:
		m.image.LostHeaders++
		m.found[l.chunk].lost = true
		if unsafe {
			m.doubtful = append(m.doubtful, l.chunk)
		}
	}
	if unsafe {
		m.unsafe = append(m.unsafe, l.chunk)
	}
	m.step++
	m.probe()
}

// guess looks for a record in chunk i that was written since the checkpoint, and for the epoch with which its checksum
// is right. If it finds both, they say what the header said: guess sets found and returns true. A record whose checksum
// is right with the epoch that the checkpoint has for the chunk belongs to a chunk that was open then. Such a record is
// not tried with other epochs, because each has a chance of one in 2^32 to be right by accident.
func (m *Machine) guess(i format.ChunkNumber, buf []byte) bool {
	sum, pool := format.Summary(m.summary[:]), m.image.Pool
	guesses := 0
	for at := m.cfg.BlockSize; at < len(buf) && guesses < maxGuesses; at += format.ValueUnit {
		seg, v := format.Segment(buf[at:]), format.Value(buf[at:])
		isSeg := at%format.KeyUnit == 0 && seg.Begins() && isNew(seg.Version(), segmentVersionBits, sum)
		isValue := false
		if v.Begins() {
			version, bits := v.Version()
			isValue = isNew(version, bits, sum)
		}
		if !isSeg && !isValue {
			continue
		}
		known := pool.Seed(pool.At(i, format.ChunkOffset(at)))
		if isSeg && seg.Check(known) == nil || isValue && v.Check(known) == nil {
			continue
		}
		guesses++
		for epoch := sum.LastEpoch() + 1; epoch <= pool.LastEpoch+spareEpochs; epoch++ {
			seed, kind := pool.SeedOf(space.NewEpoch(epoch), pool.At(i, format.ChunkOffset(at))), format.KeyLog
			if isValue {
				kind = format.ValueLog
			}
			if isSeg && seg.Check(seed) == nil || isValue && v.Check(seed) == nil {
				m.found[i] = found{epoch: epoch, kind: kind, read: true}
				m.noteEpoch(epoch)
				return true
			}
		}
	}
	return false
}
