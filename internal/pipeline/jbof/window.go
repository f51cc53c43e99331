package jbof

// window is what a lane has outstanding at the device.
type window struct {
	inflight   int
	inflightNS int64
	// taken is the sum of request.place.
	taken int64
	// movedNS is when the last I/O completed, or when the first one was sent to an idle device.
	movedNS int64
}

// open reports whether the window of a lane has room.
func (p *Policy) open(lane int, now int64) bool {
	w, o := &p.windows[lane], &p.windows[lane^1]
	if w.inflight+o.inflight >= p.depth {
		return false
	}
	if w.inflight < minInflight || w.taken+o.taken < p.limit {
		return true
	}
	return w.taken < p.limit && o.inflight > 0 && now >= p.stallsAt(lane^1)
}

// choose returns the lane whose first tenant is dispatched next, or -1.
//
// The tenant with the least virtual time has the right to go. If the window of its lane is full the drive is busy and
// all tenants wait. If others were dispatched instead, a drive that accepts writes into its buffer faster than it can
// program them would give writes more than their share. But if nothing of the lane has completed for longer than its
// outstanding I/Os should take, as happens to writes during garbage collection, the other lane may go on. The tenant
// can later catch up with no more than slack.
func (p *Policy) choose(now int64) int {
	r, w := p.first(readLane), p.first(writeLane)
	lane := readLane
	switch {
	case r == nil && w == nil:
		return -1
	case r == nil:
		if p.tooFarAhead(w) {
			if at := p.stallsAt(readLane); now < at {
				p.wakeNS = at
				return -1
			}
		}
		lane = writeLane
	case w != nil && (w.virtual < r.virtual || w.virtual == r.virtual &&
		p.ios[w.queues[writeLane].first].seq < p.ios[r.queues[readLane].first].seq):
		lane = writeLane
	}
	if p.open(lane, now) {
		return lane
	}
	other := lane ^ 1
	if len(p.heaps[other]) == 0 || p.windows[other].taken >= p.limit && p.windows[other].inflight >= minInflight {
		return -1
	}
	if at := p.stallsAt(lane); now < at {
		p.wakeNS = at
		return -1
	}
	if p.open(other, now) {
		return other
	}
	return -1
}

// tooFarAhead reports whether the writing tenant w is too far ahead of the readers while these have no I/O queued but
// much at the drive: more writes would then only slow the reads down. Readers with little at the drive do not ask for
// more, and writes do not wait for them.
func (p *Policy) tooFarAhead(w *tenantState) bool {
	return p.windows[readLane].taken > windowOne/4 && w.virtual > p.readVirtual+p.ahead()
}

// ahead is how far writes may get ahead of reads, in virtual time of weight 1.
func (p *Policy) ahead() int64 { return max(p.costs.WindowNS(), p.maxCost()) * weightOne }

// stallsAt returns when a full lane counts as stalled.
func (p *Policy) stallsAt(lane int) int64 {
	w := &p.windows[lane]
	return w.movedNS + w.inflightNS + p.costs.WindowNS() + p.costs.baseNS
}

// leaveWindow frees the I/O's place in the window.
func (p *Policy) leaveWindow(r *request) {
	w := &p.windows[r.lane]
	if w.inflight == 0 {
		panic("jbof: an I/O leaves the device, but none of its lane is there")
	}
	w.inflight--
	w.inflightNS -= r.costNS
	w.taken -= r.place
}
