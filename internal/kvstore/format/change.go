package format

import "encoding/binary"

// Change is what one writer did to a segment, as far as recovery must know it to count what is live. The numbers of a segment's
// Changes are all that has to be read to keep the counts of a checkpoint up to date.
//
// They lie behind the items:
//
//	uvarint  1 + what the segment's record before this one took, in units of KeyUnit; 1: there was none.
//	         0: nothing is said
//	uvarint  chunk of that record, if there was one
//	for each Change
//	u8       0x80, 0x01: a value was born, 0x02: one died, 0x04: which was as long as the born one,
//	         0x08: a key more, 0x10: a key less
//	uvarint  number of the item of the born value
//	uvarint  chunk of the one that died
//	uvarint  what that took, in units of ValueUnit, if it was not as long as the born one
//	u8       0, if there is more of the segment
type Change struct {
	// Item is the number of the item whose value is new; -1: none.
	Item int
	// Died is what the value took that was there before, 0 if there was none, and Chunk where it was.
	Died  int
	Chunk int32
	// Keys is how many keys were added, -1 to 1.
	Keys int
}

const (
	changeAny     = 0x80
	changeBorn    = 0x01
	changeDied    = 0x02
	changeSame    = 0x04
	changeKeyMore = 0x08
	changeKeyLess = 0x10
)

// MostChangesBytes is the longest that the changes of a segment can be: what the extra units hold.
const MostChangesBytes = 7 * KeyUnit

// maxExtentBytes is what a segment takes at most.
const maxExtentBytes = 1 << 16

// BeginChanges appends that the record before this one took so many bytes of a chunk; 0: there was none.
func BeginChanges(dst []byte, beforeBytes int, chunk int32) []byte {
	dst = binary.AppendUvarint(dst, uint64(1+beforeBytes/KeyUnit))
	if beforeBytes > 0 {
		dst = binary.AppendUvarint(dst, uint64(chunk))
	}
	return dst
}

// AppendChange appends a Change of the segment.
//
// hot: 0 allocs (if dst has room)
func (b Segment) AppendChange(dst []byte, c Change) []byte {
	head, born := byte(changeAny), 0
	if c.Item >= 0 {
		head |= changeBorn
		born = b.bornBytes(c.Item)
	}
	if c.Died > 0 {
		head |= changeDied
		if c.Died == born {
			head |= changeSame
		}
	}
	switch c.Keys {
	case 1:
		head |= changeKeyMore
	case -1:
		head |= changeKeyLess
	}
	if head == changeAny {
		return dst
	}
	dst = append(dst, head)
	if c.Item >= 0 {
		dst = binary.AppendUvarint(dst, uint64(c.Item))
	}
	if c.Died > 0 {
		dst = binary.AppendUvarint(dst, uint64(c.Chunk))
		if c.Died != born {
			dst = binary.AppendUvarint(dst, uint64(c.Died/ValueUnit))
		}
	}
	return dst
}

// SetChanges makes room for changes behind the items and returns how many of them there is room for: all or none.
func (b Segment) SetChanges(changes []byte) []byte {
	units := (RoundUp(b.LengthBytes()+len(changes), KeyUnit) - RoundUp(b.LengthBytes(), KeyUnit)) / KeyUnit
	if units > MostChangesBytes/KeyUnit || RoundUp(b.LengthBytes(), KeyUnit)+units*KeyUnit > maxExtentBytes {
		units, changes = 0, nil
	}
	le.PutUint16(b[segItems:], uint16(b.Items()|units<<13))
	return changes
}

// Changes appends the changes of a checked segment, the first of which is that the record before it is gone. known: the segment says them.
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
	units := next()
	if units > 1 {
		before.Died, before.Chunk = int(units-1)*KeyUnit, int32(next())
	}
	dst = append(dst, before)
	for known = known && units > 0; known && len(said) > 0 && said[0] != 0; {
		head := said[0]
		said = said[1:]
		c, born := Change{Item: -1}, 0
		if head&changeBorn != 0 {
			n := next()
			if known = known && n < uint64(b.Items()); !known {
				break
			}
			c.Item = int(n)
			born = b.bornBytes(c.Item)
		}
		if head&changeDied != 0 {
			if c.Chunk, c.Died = int32(next()), born; head&changeSame == 0 {
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

// NumberedItem is the item of that number, below Items.
func (b Segment) NumberedItem(number int) Item {
	off := SegmentHeaderBytes
	for range number {
		off += b.Item(off).LengthBytes()
	}
	return b.Item(off)
}

// bornBytes is what the value of an item takes in the value log.
func (b Segment) bornBytes(number int) int { return ValueBytes(b.NumberedItem(number).ValueLen()) }

// NumberOf is the number of the item whose value is at that place of the partition, -1 if there is none.
//
// hot: 0 allocs
func (b Segment) NumberOf(place int64) int {
	off := SegmentHeaderBytes
	for i := range b.Items() {
		it := b.Item(off)
		if it.ValueOffset() == place {
			return i
		}
		off += it.LengthBytes()
	}
	return -1
}
