package recovery

import (
	"encoding/binary"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/lookup"
	"jbofd/internal/kvstore/space"
)

// CheckpointStream is a stream of bytes of a checkpoint: the summary, an entry for each chunk, and the SegTbl. Of that
// an increment only has the units that have changed since the stream before. The stream is copied page by page while
// the store goes on.
//
// The entry of a chunk says what was live when the stream began (space.Chunk.AtCheckpoint), because recovery adds to
// that what has changed since. An entry of the SegTbl may be newer: replaying the key log over it has the same result.
type CheckpointStream struct {
	Summary format.Summary
	Pool    *space.Pool
	Table   *lookup.SegTbl
	// Increment: only what has changed.
	Increment bool

	// offset is where in the stream the next page begins, have how much of that page is filled.
	offset int64
	have   int
	// unit is the unit from which on changed ones are looked for. searched: all have been. left is the rest of entry,
	// which did not fit into the last page.
	unit     uint32
	searched bool
	entry    [unitBytes]byte
	left     []byte
}

// unitBytes is the length of a unit with its number.
const unitBytes = 4 + lookup.UnitBytes

// tableStart is the offset of the SegTbl in the stream.
func (s *CheckpointStream) tableStart() int64 {
	return format.SummaryBytes + int64(len(s.Pool.Chunks))*format.ChunkEntryBytes
}

// Bytes is the length of the stream, or of an increment if nothing else changes.
func (s *CheckpointStream) Bytes() int64 {
	if s.Increment {
		return s.tableStart() + int64(s.Table.Changed())*unitBytes + 4
	}
	return s.tableStart() + int64(s.Summary.Segments())*lookup.EntryBytes
}

// Pages is the number of pages of the stream.
func (s *CheckpointStream) Pages() uint32 { return PagesOf(s.Bytes()) }

// PagesOf is the number of pages of a stream of n bytes.
func PagesOf(n int64) uint32 {
	return uint32((n + format.PagePayloadBytes - 1) / format.PagePayloadBytes)
}

// Ended reports that all pages of the stream have been filled.
func (s *CheckpointStream) Ended() bool {
	if s.Increment {
		return s.searched && len(s.left) == 0
	}
	return s.offset >= s.Bytes()
}

// Fill continues to fill the next page of the stream and reports whether that is done. If not it is called again, with
// the same page: a turn does not search the whole table for what has changed.
//
// hot: 0 allocs
func (s *CheckpointStream) Fill(page []byte) (done bool) {
	if s.have == 0 {
		s.head(page)
		s.have = int(max(0, min(s.tableStart()-s.offset, int64(len(page)))))
	}
	if s.Increment && !s.units(page) {
		return false
	}
	if !s.Increment {
		s.entries(page)
	}
	s.offset += int64(len(page))
	s.have = 0
	return true
}

// entries fills the rest of a page with the entries of the SegTbl.
func (s *CheckpointStream) entries(page []byte) {
	from := s.offset + int64(s.have) - s.tableStart()
	to := min(from+int64(len(page)-s.have), s.Bytes()-s.tableStart())
	if from < to {
		copy(page[s.have:], s.Table.Bytes()[from:to])
		s.Table.Unmark(from, to, s.Summary.Segments())
	}
}

// units fills the rest of a page with units that have changed, and reports whether there are no more, or there is no
// more room.
func (s *CheckpointStream) units(page []byte) bool {
	for s.have < len(page) && !s.Ended() {
		if len(s.left) > 0 {
			n := copy(page[s.have:], s.left)
			s.have, s.left = s.have+n, s.left[n:]
			continue
		}
		unit, number, next, more := s.Table.TakeChanged(s.unit, s.Summary.Segments())
		s.unit = next
		switch {
		case unit != nil:
			clear(s.entry[:])
			binary.LittleEndian.PutUint32(s.entry[:], number)
			copy(s.entry[4:], unit)
			s.left = s.entry[:]
		case more:
			return false
		default:
			binary.LittleEndian.PutUint32(s.entry[:], format.EndOfUnits)
			s.left, s.searched = s.entry[:4], true
		}
	}
	return true
}

// head copies the part of the summary and of the chunks' entries that belongs to the next page. The rest of it is zero.
func (s *CheckpointStream) head(page []byte) {
	offset := s.offset
	clear(page)
	put := func(at int64, src []byte) {
		if at < offset {
			src = src[min(offset-at, int64(len(src))):]
			at = offset
		}
		if at < offset+int64(len(page)) {
			copy(page[at-offset:], src)
		}
	}
	put(0, s.Summary)
	first := max(0, (offset-format.SummaryBytes)/format.ChunkEntryBytes)
	last := (offset + int64(len(page))) / format.ChunkEntryBytes
	for i := first; i <= min(last, int64(len(s.Pool.Chunks))-1); i++ {
		var e [format.ChunkEntryBytes]byte
		entry := format.ChunkEntry(e[:])
		if c := &s.Pool.Chunks[i]; c.AtCheckpoint != space.NotCounted {
			entry.SetEpoch(c.Epoch.N())
			entry.SetLive(c.AtCheckpoint.Bytes())
			entry.SetKind(c.Kind)
		}
		put(format.SummaryBytes+i*format.ChunkEntryBytes, e[:])
	}
}
