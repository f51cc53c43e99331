// Package walk goes through a chunk of a key-value partition: it is read piece by piece, ahead of what is done with it, and
// cut into records.
package walk

import (
	"jbofd/internal/kvstore/chunks"
	"jbofd/internal/kvstore/format"
)

// PieceBytes is how much of a chunk is read at once.
const PieceBytes = 128 << 10

// Walk is one walk. Make it with New and begin it with Begin, as often as wanted.
type Walk struct {
	pool  *chunks.Pool
	block int
	// Chunk is where it walks.
	Chunk int32
	// Key: the chunk is of the key log, its records are segments.
	Key bool
	// Searching: a record that is not sound is passed by its length if the next one is. Else, and of values always, all up to the next
	// block is left out.
	Searching bool
	// Reading: a read is under way. Failed: one has failed.
	Reading, Failed bool
	// Damaged is how many records were not sound.
	Damaged int
	// buf holds the chunk from base on, have bytes of it; those before cursor are dealt with.
	buf                []byte
	base, have, cursor int
	// lost: what is at cursor follows something that is no sound record.
	lost bool
	// hungry: the record at cursor is not whole.
	hungry bool
}

// BufBytes is the memory for a walk in chunks of that size with values of at most that length: for the longest
// record, from the start of a block, and a piece behind it.
func BufBytes(chunkBytes, maxValue int) int { return min(chunkBytes, maxValue+2*PieceBytes) }

// New is a walk with that memory.
func New(pool *chunks.Pool, blockSize int, buf []byte) Walk {
	return Walk{pool: pool, block: blockSize, buf: buf}
}

// Begin starts at the beginning of a chunk.
func (w *Walk) Begin(chunk int32, searching bool) {
	key := w.pool.Chunks[chunk].Kind == format.KeyLog
	*w = Walk{pool: w.pool, block: w.block, buf: w.buf, Chunk: chunk, Key: key, Searching: searching, cursor: w.block}
}

// Passed is how many bytes of the chunk are dealt with.
func (w *Walk) Passed() int { return w.base + w.cursor }

// Ended reports that there is no record any more.
func (w *Walk) Ended() bool { return w.Passed() >= int(w.pool.Bytes()) }

// Next returns the next record and its place in the partition: nil if there is none at the moment, or none any more. It is a view of the
// memory, and may be used until Piece is called with idle. One that is not sound is returned with all that follows it.
//
// hot: 0 allocs (for sound records)
func (w *Walk) Next() (rec []byte, offset int64, sound bool) {
	w.hungry = false
	all := w.base+w.have == int(w.pool.Bytes())
	for w.cursor < w.have {
		rec = w.buf[w.cursor:w.have]
		offset = w.pool.Start(w.Chunk) + int64(w.base+w.cursor)
		begins, n := w.extent(rec)
		switch {
		case !all && (len(rec) < format.SegmentHeaderBytes || begins && n > len(rec)):
			w.hungry = true
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
		if begins, _ := w.extent(next); w.Searching && begins && w.sound(next, offset+int64(n)) {
			w.cursor += n
		} else {
			w.pass()
		}
		return rec, offset, false
	}
	w.hungry = !all
	return nil, 0, false
}

// pass goes on behind something that is no sound record. A group of segments may have been torn and its middle be there: recovery looks
// for segments at all places, and what it has found may be live. Values in torn groups are not.
func (w *Walk) pass() {
	w.lost = true
	if w.Key {
		w.cursor += format.KeyUnit
	} else {
		w.cursor = format.RoundUp(w.cursor+1, w.block)
	}
}

// sound reports whether rec begins with the record that was written there.
func (w *Walk) sound(rec []byte, offset int64) bool {
	if w.Key {
		return format.Segment(rec).Check(w.pool.Seed(offset)) == nil
	}
	return format.Value(rec).Check(w.pool.Seed(offset)) == nil
}

// extent says whether rec looks like the beginning of a record, sound or not, and what it takes in the log.
func (w *Walk) extent(rec []byte) (begins bool, n int) {
	if seg := format.Segment(rec); w.Key && seg.Begins() {
		return true, max(format.KeyUnit, seg.ExtentBytes())
	}
	if v := format.Value(rec); !w.Key && v.Begins() {
		return true, format.ValueBytes(min(v.ValueLen(), format.MaxValue))
	}
	return false, 0
}

// Piece returns what to read next and where to, nil if nothing: call Read when that is done. idle: no record that Next has returned is in use.
//
// hot: 0 allocs
func (w *Walk) Piece(idle bool) (offset int64, buf []byte) {
	n := w.piece()
	if n == 0 || w.Reading || w.Failed {
		return 0, nil
	}
	if len(w.buf)-w.have < n {
		if !w.hungry || !idle {
			return 0, nil
		}
		from := w.cursor &^ (format.SuperblockBytes - 1)
		w.have = copy(w.buf, w.buf[from:w.have])
		w.base += from
		w.cursor -= from
	}
	w.Reading = true
	return w.pool.Start(w.Chunk) + int64(w.base+w.have), w.buf[w.have : w.have+n]
}

func (w *Walk) piece() int { return min(PieceBytes, int(w.pool.Bytes())-w.base-w.have) }

// Read ends the read of a Piece.
func (w *Walk) Read(ok bool) {
	w.Reading, w.hungry = false, false // the record may be whole now
	if ok {
		w.have += w.piece()
	} else {
		w.Failed = true
	}
}
