package pipeline

import "jbofd/internal/tenant"

// FIFO dispatches I/Os in order of arrival, limited only by the queue depth of the device. It does what targets without
// fair queueing do, and is the baseline that fair policies are compared with.
type FIFO struct {
	ios []fifoIO // by tag
	// first and last are the ends of the queue, noTag if empty.
	first, last Tag
	queued      int
	inflight    int
	depth       int
	bytes       []int64 // by tenant
}

type fifoIO struct {
	next, prev Tag
	io         IO
	paused     bool
}

const noTag = ^Tag(0)

var _ Policy = (*FIFO)(nil)

// NewFIFO returns a FIFO that keeps at most depth I/Os at the device.
func NewFIFO(depth int) *FIFO { return &FIFO{depth: depth, first: noTag, last: noTag} }

// Name implements Policy.
func (f *FIFO) Name() string { return "fifo" }

// SetTenant implements Policy. FIFO ignores weights.
func (f *FIFO) SetTenant(_ int64, t tenant.ID, _ int) {
	for int(t) >= len(f.bytes) {
		f.bytes = append(f.bytes, 0)
	}
}

// RemoveTenant implements Policy.
func (f *FIFO) RemoveTenant(_ int64, t tenant.ID) { f.bytes[t] = 0 }

// Enqueue implements Policy.
//
// hot: 0 allocs
func (f *FIFO) Enqueue(_ int64, io IO) {
	for int(io.Tag) >= len(f.ios) {
		f.ios = append(f.ios, fifoIO{})
	}
	f.ios[io.Tag] = fifoIO{next: noTag, prev: f.last, io: io}
	if f.last == noTag {
		f.first = io.Tag
	} else {
		f.ios[f.last].next = io.Tag
	}
	f.last = io.Tag
	f.queued++
}

// Cancel implements Policy.
func (f *FIFO) Cancel(_ int64, tag Tag) { f.remove(tag) }

func (f *FIFO) remove(tag Tag) {
	s := &f.ios[tag]
	if s.prev == noTag {
		f.first = s.next
	} else {
		f.ios[s.prev].next = s.next
	}
	if s.next == noTag {
		f.last = s.prev
	} else {
		f.ios[s.next].prev = s.prev
	}
	f.queued--
}

// Dispatch implements Policy.
//
// hot: 0 allocs, given room in dst
func (f *FIFO) Dispatch(_ int64, dst []Tag) []Tag {
	for f.inflight < f.depth && f.queued > 0 {
		tag := f.first
		f.remove(tag)
		f.bytes[f.ios[tag].io.Tenant] += f.ios[tag].io.LenBytes
		dst = append(dst, tag)
		f.inflight++
	}
	return dst
}

// Pause implements Policy.
//
// hot: 0 allocs
func (f *FIFO) Pause(_ int64, tag Tag) {
	f.ios[tag].paused = true
	f.leave("pause")
}

// Resume implements Policy.
//
// hot: 0 allocs
func (f *FIFO) Resume(_ int64, tag Tag) {
	f.ios[tag].paused = false
	f.inflight++
}

// Complete implements Policy.
//
// hot: 0 allocs
func (f *FIFO) Complete(_ int64, tag Tag, _ Result) {
	if !f.ios[tag].paused {
		f.leave("completion")
	}
}

func (f *FIFO) leave(what string) {
	if f.inflight == 0 {
		panic("pipeline: " + what + " without dispatch")
	}
	f.inflight--
}

// NextWake implements Policy: a FIFO never waits for time.
func (f *FIFO) NextWake() (at int64, ok bool) { return 0, false }

// Credit implements Policy: a FIFO does not say.
func (f *FIFO) Credit(tenant.ID) int { return 0 }

// Limit implements Policy.
func (f *FIFO) Limit(tenant.ID) Limit {
	if f.queued > 0 && f.inflight >= f.depth {
		return LimitSSD
	}
	return Unlimited
}

// CostNS implements Policy; it counts bytes.
func (f *FIFO) CostNS(t tenant.ID) int64 { return f.bytes[t] }

// Stats implements Policy.
func (f *FIFO) Stats(s *Stats) { *s = Stats{} }
