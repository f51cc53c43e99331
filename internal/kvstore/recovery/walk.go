package recovery

import (
	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/space"
	"jbofd/internal/units"
)

// walkPieceBytes is the length of one read of a Walk.
const walkPieceBytes = 128 << 10

// maxSearchBytes bounds what a Walk checksums in one go in search of the next record. A value that a host has chosen
// may look like the beginning of a record at every multiple of ValueUnit.
const maxSearchBytes = 128 << 10

// MaxUnreadable is how many blocks of a chunk may be unreadable before a walk fails: it may then be the drive that does
// not answer.
const MaxUnreadable = 32

// maxLookalikes is how many places that look like the header of a record are returned of a chunk, where it is not known
// that a record begins there. A value that a host has chosen may look like many.
const maxLookalikes = 64

// searchStepBytes is how many bytes are checksummed in the time that it takes to see that a place is no record.
const searchStepBytes = 32

// Walk goes through the records of a chunk, which it reads piece by piece, ahead of the records that are being handled.
// Make one with NewWalk and start it with Begin, any number of times.
//
// What cannot be read is read again in smaller and smaller parts. Blocks that cannot be read by themselves count as
// zeroes.
//
// A walk finds every sound record, whatever is damaged before it: behind bytes that are no record it looks for the next
// one wherever a record may begin. Damage cannot always be told from what no write has filled, such as the rest of the
// chunk behind the last group, or a group that a crash has torn: both begin at a block. Whoever has to know whether the
// walk has found all that is live compares it with the chunk's Live.
type Walk struct {
	pool  *space.Pool
	block int
	// Chunk is the chunk.
	Chunk format.ChunkNumber
	// Key: the chunk belongs to the key log, so that its records are segments.
	Key bool
	// Reading: a read is under way. Failed: more than MaxUnreadable blocks cannot be read.
	Reading, Failed bool
	// Searching: Next has stopped in the middle of a long search and is to be called again.
	Searching bool
	// Damaged is the number of damaged records. Sound is the length in bytes of all others, live or not. Holes is the
	// number of places where bytes that are no record lie between records. Unreadable is the number of blocks.
	Damaged, Holes, Unreadable int
	Sound                      int64
	// buf holds have bytes of the chunk, starting at base. Those before index cursor of buf have been handled.
	buf          []byte
	base         format.ChunkOffset
	have, cursor int
	// most is how much is read at once. It is halved when a read fails, and doubled when one succeeds.
	most int
	// lost: the bytes at cursor follow bytes that are no valid record. follows is then where the record behind a
	// damaged one begins, if the length in the damaged one's header is right; 0: not known.
	lost    bool
	follows format.ChunkOffset
	// needsMore: the record at cursor has not been read completely.
	needsMore bool
	// lookalikes is how many records were returned that only look like one.
	lookalikes int
	// searched is how many bytes have been checksummed in vain in this call of Next, or the time for it.
	searched int
}

// WalkBytes is the length of the memory for a walk in chunks of that size with values of at most that length: the
// longest record, from the start of its block, and a piece behind it.
func WalkBytes(chunkBytes, maxValue int) int { return min(chunkBytes, maxValue+2*walkPieceBytes) }

// NewWalk returns a walk with that memory.
func NewWalk(pool *space.Pool, blockSize int, buf []byte) Walk {
	return Walk{pool: pool, block: blockSize, buf: buf}
}

// Begin starts at the beginning of a chunk.
func (w *Walk) Begin(chunk format.ChunkNumber) {
	key := w.pool.Chunks[chunk].Kind == format.KeyLog
	*w = Walk{pool: w.pool, block: w.block, buf: w.buf, Chunk: chunk, Key: key, cursor: w.block, most: walkPieceBytes}
}

// Passed is how far the walk has come: what lies before that offset has been handled.
func (w *Walk) Passed() format.ChunkOffset { return w.base.Add(w.cursor) }

// Ended reports that all records have been returned.
func (w *Walk) Ended() bool { return w.Passed() >= w.pool.End() }

// Next returns the next record and its offset in the partition, or nil if there is none, at the moment or any more. The
// record is a view of the walk's memory and may be used until Piece is called with idle. A damaged record is returned
// with all bytes behind it, because its header, which has its length, may be wrong, too. If the header is right, a
// damaged record right behind it is returned as well. Otherwise whatever looks like the header of a value is, so that
// the caller must know of each whether there is a record.
//
// hot: 0 allocs (for valid records)
func (w *Walk) Next() (rec []byte, offset units.ExtentOffset, sound bool) {
	w.needsMore, w.Searching, w.searched = false, false, 0
	all := w.base.Add(w.have) == w.pool.End()
	for w.cursor < w.have {
		rec = w.buf[w.cursor:w.have]
		offset = w.pool.At(w.Chunk, w.Passed())
		begins, n := w.extent(rec)
		if !all && (len(rec) < format.SegmentHeaderBytes || begins && n > len(rec)) {
			w.needsMore = true
			return nil, 0, false
		}
		if begins && w.sound(rec, offset) {
			if w.lost {
				w.Holes++
			}
			w.cursor, w.lost, w.follows, w.Sound = w.cursor+n, false, 0, w.Sound+int64(n)
			return rec[:n], offset, true
		}
		switch inBlock := w.cursor % w.block; {
		case w.lost && w.Passed() == w.follows && begins:
			w.damaged(n)
			return rec, offset, false
		case w.lost:
			if w.Passed() == w.follows && zero(rec[:min(w.block-inBlock, len(rec))]) {
				w.follows = w.follows.RoundUp(w.block) // a group ends here
			}
			w.pass()
			if w.searched += searchStepBytes; begins {
				w.searched += n
				if !w.Key && w.lookalikes < maxLookalikes {
					w.lookalikes++
					return rec, offset, false
				}
			}
			if w.searched > maxSearchBytes {
				w.Searching = true
				return nil, 0, false
			}
		case inBlock != 0 && zero(rec[:min(w.block-inBlock, len(rec))]):
			// A group ends here.
			w.cursor += w.block - inBlock
		case !begins && inBlock == 0:
			w.pass()
		default:
			// A group goes on here, with a record that is damaged. The length that it gives is not used: it might lead
			// past sound records.
			if !begins {
				n = 0
			}
			w.damaged(n)
			return rec, offset, false
		}
	}
	w.needsMore = !all
	return nil, 0, false
}

// damaged passes over the beginning of a damaged record, which has that length or 0 if it has none.
func (w *Walk) damaged(n int) {
	w.Damaged++
	w.follows = 0
	if n > 0 {
		w.follows = w.Passed().Add(n)
	}
	w.pass()
}

// zero reports whether b contains only zeroes.
func zero(b []byte) bool {
	for _, v := range b {
		if v != 0 {
			return false
		}
	}
	return true
}

// pass continues where the next record may begin, behind bytes that are no valid record.
func (w *Walk) pass() {
	w.lost = true
	if w.Key {
		w.cursor += format.KeyUnit
	} else {
		w.cursor += format.ValueUnit
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
		return true, min(v.RecordBytes(), format.MaxValueBytes(format.MaxValue))
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

func (w *Walk) piece() int { return min(w.most, int(w.pool.End()-w.base)-w.have) }

// Read ends the read of a Piece.
func (w *Walk) Read(ok bool) {
	w.Reading, w.needsMore = false, false // the record may be complete now
	n := w.piece()
	switch {
	case ok:
		w.have += n
		w.most = min(2*w.most, walkPieceBytes)
	case w.most > w.block:
		w.most = max(w.most/2, w.block)
	case w.Unreadable == MaxUnreadable:
		w.Failed = true
	default:
		clear(w.buf[w.have : w.have+n])
		w.have += n
		w.Unreadable++
	}
}
