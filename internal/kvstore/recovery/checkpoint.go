package recovery

import (
	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/lookup"
	"jbofd/internal/kvstore/space"
)

// CheckpointStream is the stream of bytes of a checkpoint: the summary, an entry for each chunk, and the SegTbl. It is
// copied page by page while the store goes on.
//
// The entry of a chunk says what was live when the checkpoint began (space.Chunk.AtCheckpoint), because recovery adds
// to that what has changed since. An entry of the SegTbl may be newer: replaying the key log over it has the same
// result.
type CheckpointStream struct {
	Summary format.Summary
	Pool    *space.Pool
	Table   *lookup.SegTbl
}

// tableStart is the offset of the SegTbl in the stream.
func (s *CheckpointStream) tableStart() int64 {
	return format.SummaryBytes + int64(len(s.Pool.Chunks))*format.ChunkEntryBytes
}

// Bytes is the length of the stream. The SegTbl may have grown since the checkpoint began.
func (s *CheckpointStream) Bytes() int64 {
	return s.tableStart() + int64(s.Summary.Segments())*lookup.EntryBytes
}

// Pages is the number of pages of the stream.
func (s *CheckpointStream) Pages() uint32 {
	return uint32((s.Bytes() + format.PagePayloadBytes - 1) / format.PagePayloadBytes)
}

// Copy copies the part of the stream that begins at offset to dst. What lies behind the end is zero.
//
// hot: 0 allocs
func (s *CheckpointStream) Copy(dst []byte, offset int64) {
	clear(dst)
	put := func(at int64, src []byte) {
		if at < offset {
			src = src[min(offset-at, int64(len(src))):]
			at = offset
		}
		if at < offset+int64(len(dst)) {
			copy(dst[at-offset:], src)
		}
	}
	put(0, s.Summary)
	first := max(0, (offset-format.SummaryBytes)/format.ChunkEntryBytes)
	last := (offset + int64(len(dst))) / format.ChunkEntryBytes
	for i := first; i <= min(last, int64(len(s.Pool.Chunks))-1); i++ {
		var e [format.ChunkEntryBytes]byte
		entry := format.ChunkEntry(e[:])
		if c := &s.Pool.Chunks[i]; c.AtCheckpoint != space.NotCounted {
			entry.SetEpoch(c.Epoch)
			entry.SetLive(c.AtCheckpoint)
			entry.SetKind(c.Kind)
		}
		put(format.SummaryBytes+i*format.ChunkEntryBytes, e[:])
	}
	put(s.tableStart(), s.Table.Bytes()[:s.Bytes()-s.tableStart()])
}
