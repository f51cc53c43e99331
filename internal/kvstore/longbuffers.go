package kvstore

import (
	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/space"
)

// Every activeSeg has a buffer for a segment of smallSegment. Longer ones are rare: with the default of 13 keys a
// segment it takes values of more than 1 MiB in all, identities, or a table without room for more segments. An
// activeSeg borrows a longer buffer for as long as it is active. So there are as many as there were long segments in
// use at once, and not one for each activeSeg that ever had one. They are kept until the store is closed.

// longClasses is the number of classes of longer buffers. Each class is twice as long as the one before.
const longClasses = 6

// longBuffers are the free ones of each class.
type longBuffers [longClasses][][]byte

// longBytes is the length of the buffers of a class.
func (s *Store) longBytes(class int) int {
	return format.RoundUp(smallSegment<<(class+1)+2*s.cfg.BlockSize, format.SuperblockBytes)
}

// makeSegments gives every activeSeg its buffer.
func (s *Store) makeSegments(mem *space.Buffers) {
	for i := range s.segs {
		a := &s.segs[i]
		a.small = mem.Take("a segment in use", format.RoundUp(smallSegment+2*s.cfg.BlockSize, format.SuperblockBytes))
		a.buf = a.small
	}
}

// makeLen makes the buffer of a segment at least n bytes long, keeping its content, and reports whether there was
// memory for it.
func (s *Store) makeLen(a *activeSeg, n int) bool {
	if len(a.buf) >= n {
		return true
	}
	class := 0
	for s.longBytes(class) < n {
		class++
	}
	var longer []byte
	if free := &s.long[class]; len(*free) > 0 {
		longer = (*free)[len(*free)-1]
		*free = (*free)[:len(*free)-1]
	} else {
		var err error
		if longer, err = s.cfg.Alloc(s.longBytes(class)); err != nil {
			return false
		}
	}
	copy(longer, a.buf)
	s.returnLong(a)
	a.buf = longer
	return true
}

// returnLong returns the buffer of a segment if it is a longer one.
func (s *Store) returnLong(a *activeSeg) {
	if len(a.buf) == len(a.small) {
		return
	}
	class := 0
	for s.longBytes(class) < len(a.buf) {
		class++
	}
	s.long[class] = append(s.long[class], a.buf)
	a.buf = a.small
}
