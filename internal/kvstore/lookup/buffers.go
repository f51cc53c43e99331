package lookup

import (
	"jbofd/internal/kvstore/fifo"
	"jbofd/internal/kvstore/format"
)

// Each op has a small buffer, which holds a record of 4 KiB with the blocks around it. A longer
// read borrows a buffer of one of two classes: many of middling length, for most values, and few of
// the longest. Ops for which there is none wait, in order.
const (
	smallRecord    = 4 << 10
	mediumRecord   = 64 << 10
	mediumBuffers  = 32
	longestBuffers = 2
)

// classes of buffers to borrow.
const (
	mediumClass = iota
	longestClass
	bufferClasses
)

// borrowed are the buffers of all classes: those of the middle class come first.
type borrowed struct {
	all     [][]byte
	free    [bufferClasses][]int32
	waiting [bufferClasses]fifo.List
}

func classOf(buffer int32) int {
	if buffer < mediumBuffers {
		return mediumClass
	}
	return longestClass
}

// roomFor is the size of a buffer for a record of n bytes that may begin anywhere in a block.
func (m *Machine) roomFor(n int) int { return format.RoundUp(n+2*m.BlockSize, 4096) }

// makeBuffers allocates all of them.
func (m *Machine) makeBuffers() {
	for i := range m.ops {
		m.ops[i].buf = m.Alloc(m.roomFor(smallRecord))
	}
	b := &m.borrowed
	b.waiting = [bufferClasses]fifo.List{fifo.None, fifo.None}
	for i := range int32(mediumBuffers + longestBuffers) {
		c, n := classOf(i), mediumRecord
		if c == longestClass {
			n = format.ValueBytes(max(m.MaxValueBytes, format.MaxSegmentBytes))
		}
		b.all = append(b.all, m.Alloc(m.roomFor(n)))
		b.free[c] = append(b.free[c], i)
	}
}

// memory returns room for a record of n bytes, or nil: the op is on the list of those that wait.
func (m *Machine) memory(i int32, n int) []byte {
	o, b := &m.ops[i], &m.borrowed
	n = m.roomFor(n)
	if o.big != nobody && len(b.all[o.big]) >= n {
		return b.all[o.big]
	}
	m.giveBack(i)
	if len(o.buf) >= n {
		return o.buf
	}
	c := mediumClass
	if len(b.all[0]) < n {
		c = longestClass
	}
	if len(b.free[c]) == 0 {
		m.links.Push(&b.waiting[c], i)
		return nil
	}
	o.big = b.free[c][len(b.free[c])-1]
	b.free[c] = b.free[c][:len(b.free[c])-1]
	return b.all[o.big]
}

// giveBack ends the borrowing of an op, and lets one that waits go on.
func (m *Machine) giveBack(i int32) {
	o, b := &m.ops[i], &m.borrowed
	if o.big == nobody {
		return
	}
	c := classOf(o.big)
	b.free[c] = append(b.free[c], o.big)
	o.big = nobody
	if b.waiting[c].N == 0 {
		return
	}
	switch w := m.links.Pop(&b.waiting[c]); {
	case m.ops[w].kind == List:
		m.list(w)
	case m.ops[w].place == 0:
		m.lookup(w)
	default:
		m.readValue(w)
	}
}

// bytesOf returns what was read for the op, from its record on.
func (m *Machine) bytesOf(o *op) []byte {
	if o.big != nobody {
		return m.borrowed.all[o.big][o.lead:]
	}
	return o.buf[o.lead:]
}
