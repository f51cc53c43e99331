package lookup

import (
	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/space"
	"jbofd/internal/list"
)

// Each op has a small buffer, which holds a record of 4 KiB with the blocks around it. For a longer record it takes a
// buffer of one of two classes: there are many of medium length, for most values, and few of the greatest length. An op
// waits, in order of arrival, if none is free.
const (
	smallRecord    = 4 << 10
	mediumRecord   = 64 << 10
	mediumBuffers  = 32
	longestBuffers = 2
)

// Classes of larger buffers.
const (
	mediumClass = iota
	longestClass
	bufferClasses
)

// borrowed are the larger buffers of all classes. Those of the medium class come first.
type borrowed struct {
	all     [][]byte
	free    [bufferClasses][]int32
	waiting [bufferClasses]list.List
}

func classOf(buffer int32) int {
	if buffer < mediumBuffers {
		return mediumClass
	}
	return longestClass
}

// roomFor is the length of a buffer for a record of n bytes that may begin anywhere in a block.
func (m *Machine) roomFor(n int) int { return format.RoundUp(n+2*m.BlockSize, 4096) }

// makeBuffers allocates all buffers.
//
// Errors: space.ErrNoMemory.
func (m *Machine) makeBuffers() error {
	mem := space.Buffers{Alloc: m.Alloc}
	for i := range m.ops {
		m.ops[i].buf = mem.Take("a read of a short record", m.roomFor(smallRecord))
	}
	b := &m.borrowed
	b.waiting = [bufferClasses]list.List{list.None, list.None}
	for i := range int32(mediumBuffers + longestBuffers) {
		c, n := classOf(i), mediumRecord
		if c == longestClass {
			n = max(m.MaxExtentBytes, format.MaxSegmentBytes)
		}
		b.all = append(b.all, mem.Take("reads of long records", m.roomFor(n)))
		b.free[c] = append(b.free[c], i)
	}
	return mem.Err
}

// memory returns a buffer for a record of n bytes. If there is none it returns nil, and the op waits for one.
func (m *Machine) memory(i int32, n int) []byte {
	o, b := &m.ops[i], &m.borrowed
	n = m.roomFor(n)
	if o.big != none && len(b.all[o.big]) >= n {
		return b.all[o.big]
	}
	m.returnBuffer(i)
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

// returnBuffer returns the larger buffer of an op, if it has one, and continues ops that wait for one of its class,
// until one of them takes it: what an op waited for may be shorter now, or gone.
func (m *Machine) returnBuffer(i int32) {
	o, b := &m.ops[i], &m.borrowed
	if o.big == none {
		return
	}
	c := classOf(o.big)
	b.free[c] = append(b.free[c], o.big)
	o.big = none
	for b.waiting[c].N > 0 && len(b.free[c]) > 0 {
		switch w := m.links.Pop(&b.waiting[c]); {
		case m.ops[w].lists():
			m.list(w)
		case len(m.ops[w].pieces) == 0:
			m.lookup(w)
		default:
			m.readValue(w)
		}
	}
}

// bytesOf returns the bytes that were read for an op, starting with its record.
func (m *Machine) bytesOf(o *op) []byte {
	if o.big != none {
		return m.borrowed.all[o.big][o.lead:]
	}
	return o.buf[o.lead:]
}
