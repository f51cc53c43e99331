package format

import "encoding/binary"

// Change describes what one request did to a segment, as far as recovery needs it to count live bytes. With the changes
// of the segments that were written since a checkpoint, recovery brings the checkpoint's counts up to date without
// reading anything else.
//
// The changes of a segment lie behind its items:
//
//	uvarint  1 + length of the segment's previous record, in units of KeyUnit; 1: there was no previous record;
//	         0: the changes are not recorded
//	uvarint  chunk of the previous record, if there was one
//	for each Change:
//	u8       0x80, and flags: 0x01 a value was added, 0x02 a value died, 0x04 both have the same length,
//	         0x08 a key was added, 0x10 a key was removed, 0x20 the added value has several pieces,
//	         0x40 what died is the record of another segment, the last of the table, which was merged into this one
//	uvarint  number of the item of the added value, if 0x01
//	uvarint  number of its pieces besides the first, if 0x20
//	uvarint  chunk of the value that died, if 0x02
//	uvarint  length of its record in units of ValueUnit, if 0x02 without 0x04
//	u8       0, if the segment does not end here
type Change struct {
	// Item is the number of the item whose value was added; -1: none. More is how many of the items behind it have
	// further pieces of that value.
	Item, More int
	// Born is the length of the records of the value that was added.
	Born int
	// Died is the length of the records of the value that was replaced or removed, 0 if there were none. Chunk is where
	// they were.
	Died  int
	Chunk ChunkNumber
	// Keys is the change of the number of keys: -1, 0 or 1.
	Keys int
	// Merged: what died is the record of the segment that was merged into this one.
	Merged bool
}

const (
	changeAny     = 0x80
	changeBorn    = 0x01
	changeDied    = 0x02
	changeSame    = 0x04
	changeKeyMore = 0x08
	changeKeyLess = 0x10
	changeMore    = 0x20
	changeMerged  = 0x40
)

// MaxChangesBytes is the longest that the changes of a segment can be: the size of all extra units.
const MaxChangesBytes = 7 * KeyUnit

// maxExtentBytes is the longest that a segment with its changes can be.
const maxExtentBytes = 1 << 16

// BeginChanges appends the length and the chunk of the segment's previous record; length 0: there was none.
func BeginChanges(dst []byte, beforeBytes int, chunk ChunkNumber) []byte {
	dst = binary.AppendUvarint(dst, uint64(1+beforeBytes/KeyUnit))
	if beforeBytes > 0 {
		dst = binary.AppendUvarint(dst, uint64(chunk))
	}
	return dst
}

// AppendChange appends a Change to dst.
//
// hot: 0 allocs (if dst has room)
func AppendChange(dst []byte, c Change) []byte {
	head := byte(changeAny)
	if c.Item >= 0 {
		head |= changeBorn
		if c.More > 0 {
			head |= changeMore
		}
	}
	if c.Died > 0 {
		head |= changeDied
		if c.Died == c.Born {
			head |= changeSame
		}
	}
	switch c.Keys {
	case 1:
		head |= changeKeyMore
	case -1:
		head |= changeKeyLess
	}
	if c.Merged {
		head |= changeMerged
	}
	if head == changeAny {
		return dst
	}
	dst = append(dst, head)
	if c.Item >= 0 {
		dst = binary.AppendUvarint(dst, uint64(c.Item))
		if c.More > 0 {
			dst = binary.AppendUvarint(dst, uint64(c.More))
		}
	}
	if c.Died > 0 {
		dst = binary.AppendUvarint(dst, uint64(c.Chunk))
		if c.Died != c.Born {
			dst = binary.AppendUvarint(dst, uint64(c.Died/ValueUnit))
		}
	}
	return dst
}

// SetChanges reserves extra units for the changes behind the items. It returns changes if they fit, otherwise nothing.
func (b Segment) SetChanges(changes []byte) []byte {
	extra := (RoundUp(b.LengthBytes()+len(changes), KeyUnit) - RoundUp(b.LengthBytes(), KeyUnit)) / KeyUnit
	if extra > MaxChangesBytes/KeyUnit || RoundUp(b.LengthBytes(), KeyUnit)+extra*KeyUnit > maxExtentBytes {
		extra, changes = 0, nil
	}
	le.PutUint16(b[segItems:], uint16(b.Items()|extra<<13))
	return changes
}

// Changes appends the changes of a checked segment to dst. The first one stands for the previous record. The result
// known is false if the changes were not recorded.
//
// hot: 0 allocs (if dst has room)
func (b Segment) Changes(dst []Change) (changes []Change, known bool) {
	said := b[b.LengthBytes():b.ExtentBytes()]
	next := func() uint64 {
		v, n := binary.Uvarint(said)
		if known = known && n > 0; known {
			said = said[n:]
		}
		return v
	}
	known = true
	before := Change{Item: -1}
	extent := next() // in units, and 1 more
	if extent > 1 {
		before.Died, before.Chunk = int(extent-1)*KeyUnit, ChunkNumber(next())
	}
	dst = append(dst, before)
	for known = known && extent > 0; known && len(said) > 0 && said[0] != 0; {
		head := said[0]
		said = said[1:]
		c := Change{Item: -1, Merged: head&changeMerged != 0}
		if head&changeBorn != 0 {
			n, more := next(), uint64(0)
			if head&changeMore != 0 {
				more = next()
			}
			items := uint64(b.Items())
			if known = known && n < items && more < items-n; !known {
				break
			}
			c.Item, c.More = int(n), int(more)
			c.Born = b.bornBytes(c)
		}
		if head&changeDied != 0 {
			if c.Chunk, c.Died = ChunkNumber(next()), c.Born; head&changeSame == 0 {
				c.Died = int(next()) * ValueUnit
			}
		}
		if head&changeKeyMore != 0 {
			c.Keys++
		}
		if head&changeKeyLess != 0 {
			c.Keys--
		}
		dst = append(dst, c)
	}
	return dst, known
}

// NumberedItem returns item number, which must be below Items.
func (b Segment) NumberedItem(number int) Item {
	off := b.First()
	for range number {
		off += b.Item(off).LengthBytes()
	}
	return b.Item(off)
}

// bornBytes is the length of the records of the value that was added.
func (b Segment) bornBytes(c Change) int {
	n := 0
	for i := range c.More + 1 {
		n += b.NumberedItem(c.Item + i).RecordBytes()
	}
	return n
}
