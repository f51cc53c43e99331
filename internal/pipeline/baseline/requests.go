// Package baseline holds policies from the literature to compare with: ReFlex, whose token rates come
// from an offline model of the drive, and FlashFQ, start-time fair queueing with an offline
// cost per I/O. Neither looks at how the drive fares.
package baseline

import "jbofd/internal/pipeline"

const noTag = ^pipeline.Tag(0)

// request is an I/O between Enqueue and Complete.
type request struct {
	tenant pipeline.Tenant
	class  pipeline.Class
	// atDevice: dispatched and not paused.
	atDevice   bool
	next, prev pipeline.Tag // in a queue
	lenBytes   int64
}

// requests is a slab by tag.
type requests []request

// add makes an entry for io.
func (s *requests) add(io pipeline.IO) {
	for int(io.Tag) >= len(*s) {
		*s = append(*s, request{})
	}
	(*s)[io.Tag] = request{tenant: io.Tenant, class: io.Op.Class(), lenBytes: io.LenBytes}
}

// queue is a tenant's, in order of arrival.
type queue struct {
	first, last pipeline.Tag
	n           int
}

// push puts an I/O at the end.
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

// remove takes an I/O out.
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

// leave takes an I/O off the device if it is there.
func (d *device) leave(r *request) {
	if r.atDevice {
		r.atDevice = false
		d.n--
	}
}

// pause takes an I/O off the device that is there.
func (d *device) pause(r *request) {
	if !r.atDevice {
		panic("baseline: pause without dispatch")
	}
	d.leave(r)
}
