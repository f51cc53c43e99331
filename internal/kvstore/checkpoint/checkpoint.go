// Package checkpoint is the stream of bytes that a key-value partition's checkpoint consists of: the summary, an entry for each chunk,
// the SegTbl. It is copied page by page while the store goes on.
//
// The chunks' entries tell what was live when the checkpoint began (chunks.Chunk.Then), for recovery adds to them what has changed since. An
// entry of the SegTbl may be newer: playing the key log over it ends in the same.
package checkpoint

import (
	"jbofd/internal/kvstore/chunks"
	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/segtbl"
)

// Stream is the stream of one checkpoint.
type Stream struct {
	Summary format.Summary
	Pool    *chunks.Pool
	Table   *segtbl.Table
}

// tableStart is where the SegTbl begins.
func (s *Stream) tableStart() int64 {
	return format.SummaryBytes + int64(len(s.Pool.Chunks))*format.ChunkEntryBytes
}

// Bytes is its length. The SegTbl may have grown since the checkpoint began.
func (s *Stream) Bytes() int64 {
	return s.tableStart() + int64(s.Summary.Segments())*segtbl.EntryBytes
}

// Pages is how many pages it takes.
func (s *Stream) Pages() uint32 {
	return uint32((s.Bytes() + format.PagePayloadBytes - 1) / format.PagePayloadBytes)
}

// Copy copies the part that begins at offset to dst, which is cleared behind the end.
//
// hot: 0 allocs
func (s *Stream) Copy(dst []byte, offset int64) {
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
		if c := &s.Pool.Chunks[i]; c.Then != chunks.NotThen {
			entry.SetEpoch(c.Epoch)
			entry.SetLive(c.Then)
			entry.SetKind(c.Kind)
		}
		put(format.SummaryBytes+i*format.ChunkEntryBytes, e[:])
	}
	put(s.tableStart(), s.Table.Bytes()[:s.Bytes()-s.tableStart()])
}
