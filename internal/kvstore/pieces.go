package kvstore

import (
	"jbofd/internal/kvstore/format"
	"jbofd/internal/units"
)

// chunkPieces is how many pieces of the greatest length a chunk takes. A value that is longer than such a piece is
// written in pieces, each with a record of its own. So what does not fit into the end of a chunk is less than that part
// of it, however long the values are.
const chunkPieces = 64

// part is a part of a value: those of its pieces that are in the same group. There are two parts if a chunk ends within
// the value.
type part struct {
	// group contains the part at groupOff. When the group has its place, offset is that of the part in the partition,
	// and chunk is the chunk that is pinned for it.
	group    int32
	groupOff uint32
	offset   units.ExtentOffset
	chunk    format.ChunkNumber
	// pieces is how many there are, bytes the length of their records.
	pieces uint8
	bytes  uint32
	// next is the next part of the same group.
	next partRef
}

var noPart = part{group: none, chunk: none}

// partRef is a part of an op, or none.
type partRef int32

func refOf(op int32, part int) partRef { return partRef(2*op + int32(part)) }

func (r partRef) op() int32 { return int32(r) / 2 }

// partAt returns the part that r refers to.
func (s *Store) partAt(r partRef) *part { return &s.ops[r.op()].parts[r%2] }

// grouped reports that the op's value has been appended to a group.
func (o *op) grouped() bool { return o.parts[0].group != none }

// has reports whether one of the records of the op's value begins at an offset in the partition. It does not look for a
// value that is in no group.
func (o *op) has(place units.ExtentOffset) bool {
	for i := range o.parts {
		if p := &o.parts[i]; p.chunk != none && place >= p.offset && place < p.offset+units.ExtentOffset(p.bytes) {
			return true
		}
	}
	return false
}

// pieces is how many pieces a value of n bytes is written in.
func (s *Store) pieces(n int) int {
	if n <= s.pieceBytes { // a division would take 10 ns
		return 1
	}
	return (n + s.pieceBytes - 1) / s.pieceBytes
}

// extentBytes is the length of the records of a value of n bytes.
func (s *Store) extentBytes(n int) int {
	last := s.pieces(n) - 1
	return last*format.ValueBytes(s.pieceBytes) + format.ValueBytes(n-last*s.pieceBytes)
}

// setValue makes the items of a segment, from the one at offset at on, refer to the pieces of the op's value.
func (s *Store) setValue(seg format.Segment, at int, o *op) {
	n := int(o.valueLen)
	if n <= s.pieceBytes {
		it := seg.Item(at)
		it.SetValueLen(n)
		it.SetValueOffset(o.parts[0].offset)
		return
	}
	for i := range o.parts {
		offset := o.parts[i].offset
		for range o.parts[i].pieces {
			it := seg.Item(at)
			length := min(n, s.pieceBytes)
			it.SetValueLen(length)
			it.SetValueOffset(offset)
			n -= length
			at += it.LengthBytes()
			offset += units.ExtentOffset(format.ValueBytes(length))
		}
	}
}

// deadPiece is where the record of a piece is, and its length.
type deadPiece struct {
	place units.ExtentOffset
	bytes uint32
}

// replaces notes that the value of the item at an offset, of so many pieces, dies with a writer. What a damaged item
// names as a value's place may lie in no chunk; then no live bytes are counted for it.
func (s *Store) replaces(a *activeSeg, o *op, at, pieces int) {
	it := format.Segment(a.buf).Item(at)
	if pieces > 1 {
		s.kill(a, at)
	} else if s.pool.Contains(it.ValueOffset()) {
		o.oldOffset, o.oldBytes = it.ValueOffset(), uint32(it.RecordBytes())
	}
}

// kill notes that all pieces of the value of the item at an offset die with what is being written of a segment.
func (s *Store) kill(a *activeSeg, at int) {
	seg := format.Segment(a.buf)
	pieces, _ := seg.Pieces(at)
	for range pieces {
		it := seg.Item(at)
		at += it.LengthBytes()
		if it.ValueLen() > 0 && s.pool.Contains(it.ValueOffset()) {
			a.dead = append(a.dead, deadPiece{it.ValueOffset(), uint32(it.RecordBytes())})
		}
	}
}

// deaths appends the pieces that have died to the changes of a segment.
func (s *Store) deaths(said []byte, a *activeSeg) []byte {
	if len(a.dead) == 0 {
		return said
	}
	c := format.Change{Item: -1}
	for _, d := range a.dead {
		if s.isPutByWriter(a, d.place) {
			continue
		}
		if chunk := s.pool.Of(d.place); chunk != c.Chunk {
			said = format.AppendChange(said, c)
			c.Chunk, c.Died = chunk, 0
		}
		c.Died += int(d.bytes)
		if len(said) > format.MaxChangesBytes {
			return nil
		}
	}
	return format.AppendChange(said, c)
}
