// Package baseline holds policies from the literature for comparison: ReFlex, whose token rates come from an offline
// model of the drive; FlashFQ, start-time fair queueing with an offline cost model; and IOCost, the kernel's
// blk-iocost, with such a model, too, and a rate that follows the latency of the drive. The other two do not react to
// how the drive performs.
package baseline

import (
	"jbofd/internal/pipeline"
	"jbofd/internal/tenant"
)

const noTag = ^pipeline.Tag(0)

// request is an I/O between Enqueue and Complete.
type request struct {
	tenant tenant.ID
	class  pipeline.Class
	// atDevice: dispatched and not paused.
	atDevice   bool
	next, prev pipeline.Tag // in a queue
	lenBytes   int64
}

// requests is a slab indexed by tag.
type requests []request

// add stores io in the slab.
func (s *requests) add(io pipeline.IO) {
	for int(io.Tag) >= len(*s) {
		*s = append(*s, request{})
	}
	(*s)[io.Tag] = request{tenant: io.Tenant, class: io.Op.Class(), lenBytes: io.LenBytes}
}

// queue is a tenant's queue in order of arrival.
type queue struct {
	first, last pipeline.Tag
	n           int
}

// push appends an I/O.
func (s requests) push(q *queue, tag pipeline.Tag) {
	if q.n == 0 {
		q.first, q.last = noTag, noTag
	}
	r := &s[tag]
	r.next, r.prev = noTag, q.last
	if q.last == noTag {
		q.first = tag
	} else {
		s[q.last].next = tag
	}
	q.last = tag
	q.n++
}

// remove removes an I/O.
func (s requests) remove(q *queue, tag pipeline.Tag) {
	r := &s[tag]
	if r.prev == noTag {
		q.first = r.next
	} else {
		s[r.prev].next = r.next
	}
	if r.next == noTag {
		q.last = r.prev
	} else {
		s[r.next].prev = r.prev
	}
	q.n--
}

// device counts the I/Os at the device.
type device struct{ n, depth int }

func (d *device) full() bool { return d.n >= d.depth }

func (d *device) enter(r *request) {
	r.atDevice = true
	d.n++
}

// leave removes an I/O from the device if it is there.
func (d *device) leave(r *request) {
	if r.atDevice {
		r.atDevice = false
		d.n--
	}
}

// pause removes an I/O, which must be there, from the device.
func (d *device) pause(r *request) {
	if !r.atDevice {
		panic("baseline: pause without dispatch")
	}
	d.leave(r)
}
