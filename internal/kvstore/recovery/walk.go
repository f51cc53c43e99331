package recovery

import (
	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/space"
	"jbofd/internal/units"
)

// walkPieceBytes is the length of one read of a Walk.
const walkPieceBytes = 128 << 10

// Walk goes through the records of a chunk, which it reads piece by piece, ahead of the records that are being handled.
// Make one with NewWalk and start it with Begin, any number of times.
type Walk struct {
	pool  *space.Pool
	block int
	// Chunk is the chunk.
	Chunk format.ChunkNumber
	// Key: the chunk belongs to the key log, so that its records are segments.
	Key bool
	// Searching: behind a damaged record the walk continues at the next record, if that is valid. Otherwise, and always
	// in chunks of values, it continues at the next block.
	Searching bool
	// Reading: a read is under way. Failed: a read has failed.
	Reading, Failed bool
	// Damaged is the number of damaged records.
	Damaged int
	// buf holds have bytes of the chunk, starting at base. Those before index cursor of buf have been handled.
	buf          []byte
	base         format.ChunkOffset
	have, cursor int
	// lost: the bytes at cursor follow bytes that are no valid record.
	lost bool
	// needsMore: the record at cursor has not been read completely.
	needsMore bool
}

// WalkBytes is the length of the memory for a walk in chunks of that size with values of at most that length: the
// longest record, from the start of its block, and a piece behind it.
func WalkBytes(chunkBytes, maxValue int) int { return min(chunkBytes, maxValue+2*walkPieceBytes) }

// NewWalk returns a walk with that memory.
func NewWalk(pool *space.Pool, blockSize int, buf []byte) Walk {
	return Walk{pool: pool, block: blockSize, buf: buf}
}

// Begin starts at the beginning of a chunk.
func (w *Walk) Begin(chunk format.ChunkNumber, searching bool) {
	key := w.pool.Chunks[chunk].Kind == format.KeyLog
	*w = Walk{pool: w.pool, block: w.block, buf: w.buf, Chunk: chunk, Key: key, Searching: searching, cursor: w.block}
}

// Passed is how far the walk has come: what lies before that offset has been handled.
func (w *Walk) Passed() format.ChunkOffset { return w.base.Add(w.cursor) }

// Ended reports that all records have been returned.
func (w *Walk) Ended() bool { return w.Passed() >= w.pool.End() }

// Next returns the next record and its offset in the partition, or nil if there is none, at the moment or any more. The
// record is a view of the walk's memory and may be used until Piece is called with idle. A damaged record is returned
// with all bytes behind it.
//
// hot: 0 allocs (for valid records)
func (w *Walk) Next() (rec []byte, offset units.ExtentOffset, sound bool) {
	w.needsMore = false
	all := w.base.Add(w.have) == w.pool.End()
	for w.cursor < w.have {
		rec = w.buf[w.cursor:w.have]
		offset = w.pool.At(w.Chunk, w.Passed())
		begins, n := w.extent(rec)
		switch {
		case !all && (len(rec) < format.SegmentHeaderBytes || begins && n > len(rec)):
			w.needsMore = true
			return nil, 0, false
		case begins && w.sound(rec, offset):
			w.cursor, w.lost = w.cursor+n, false
			return rec[:n], offset, true
		case !begins || w.lost && w.cursor%w.block != 0:
			w.pass()
			continue
		}
		w.Damaged++
		next := rec[min(n, len(rec)):]
		if begins, _ := w.extent(next); w.Searching && begins && w.sound(next, offset.Add(units.Bytes(n))) {
			w.cursor += n
		} else {
			w.pass()
		}
		return rec, offset, false
	}
	w.needsMore = !all
	return nil, 0, false
}

// pass continues behind bytes that are no valid record. If a group of segments was torn, its middle may be intact:
// recovery looks for segments at every multiple of KeyUnit, and those that it has found may be live. Values in torn
// groups never are.
func (w *Walk) pass() {
	w.lost = true
	if w.Key {
		w.cursor += format.KeyUnit
	} else {
		w.cursor = format.RoundUp(w.cursor+1, w.block)
	}
}

// sound reports whether rec begins with a valid record.
func (w *Walk) sound(rec []byte, offset units.ExtentOffset) bool {
	if w.Key {
		return format.Segment(rec).Check(w.pool.Seed(offset)) == nil
	}
	return format.Value(rec).Check(w.pool.Seed(offset)) == nil
}

// extent reports whether rec has the magic of a record, valid or not, and how long the record is in the log.
func (w *Walk) extent(rec []byte) (begins bool, n int) {
	if seg := format.Segment(rec); w.Key && seg.Begins() {
		return true, max(format.KeyUnit, seg.ExtentBytes())
	}
	if v := format.Value(rec); !w.Key && v.Begins() {
		return true, format.ValueBytes(min(v.ValueLen(), format.MaxValue))
	}
	return false, 0
}

// Piece returns the next piece to read and the memory for it, or nil. Read must be called when that has been done. With
// idle no record that Next has returned is in use, so that the memory may be moved.
//
// hot: 0 allocs
func (w *Walk) Piece(idle bool) (offset units.ExtentOffset, buf []byte) {
	n := w.piece()
	if n == 0 || w.Reading || w.Failed {
		return 0, nil
	}
	if len(w.buf)-w.have < n {
		if !w.needsMore || !idle {
			return 0, nil
		}
		from := w.cursor &^ (format.SuperblockBytes - 1)
		w.have = copy(w.buf, w.buf[from:w.have])
		w.base = w.base.Add(from)
		w.cursor -= from
	}
	w.Reading = true
	return w.pool.At(w.Chunk, w.base.Add(w.have)), w.buf[w.have : w.have+n]
}

func (w *Walk) piece() int { return min(walkPieceBytes, int(w.pool.End()-w.base)-w.have) }

// Read ends the read of a Piece.
func (w *Walk) Read(ok bool) {
	w.Reading, w.needsMore = false, false // the record may be complete now
	if ok {
		w.have += w.piece()
	} else {
		w.Failed = true
	}
}
