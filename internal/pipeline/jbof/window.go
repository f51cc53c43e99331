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
	return w.taken < p.limit && o.inflight > 0 &&
		(now >= p.stallsAt(lane^1) || lane == readLane && p.readsCatchUp())
}

// readsCatchUp reports whether reads need not wait for the writes at the drive, because the reading tenant is so far
// behind the writers that it may catch up. Hosts that take turns on a processor leave the drive to others while they
// are off it. If writes filled the window in their turn, the drive still has some of them when the readers' turn comes,
// and reads that wait for these writes lose much of their turn.
func (p *Policy) readsCatchUp() bool {
	r, w := p.first(readLane), p.first(writeLane)
	if r == nil {
		return false
	}
	writer := p.writeVirtual
	if w != nil {
		writer = w.virtual
	}
	return r.virtual < writer-p.ahead()
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

// search is the state of the search for the window of a drive that was not calibrated. A trial doubles the window for
// some intervals in which only reads saturate the drive, and compares what it does with what it did before. The larger
// window stays if large and small reads both gain. If only some gain, they may gain what others lose, because the
// drive decides whose turn it is.
type search struct {
	known, trial bool
	// n counts the intervals of the trial, or those before the first one. It is negative while the search waits, for
	// waits intervals after the last trial.
	n, waits int
	// before are the rates before the trial. now are the amounts in it, reads is their number, and ns how long it took.
	before, now rates
	reads, ns   float64
}

const (
	// A trial lasts searchTicks intervals and until searchReads reads are counted, because numbers of reads vary by
	// their root. A drive that does not read so many in searchMost intervals needs no larger window. The first
	// searchSettle intervals are not counted.
	searchTicks, searchSettle, searchMost, searchReads = 5, 2, 10, 10000
	// A larger window must bring searchGain. A trial that brings less than searchWorse ends early.
	searchGain, searchWorse = 1.03, 0.9
	// searchWait is how many intervals the search waits after a trial that brought nothing, at first. Then it waits for
	// twice as many.
	searchWait = 50
)

// searchWindow learns from an interval of dt ns. It reports whether the window is being searched.
func (c *Costs) searchWindow(now *rates, dt float64) bool {
	s := &c.blank.search
	if s.known || c.blank.left > 0 || c.blank.settling > 0 {
		return false
	}
	if c.writeBytes > 0 || c.readOnly < readOnlyIntervals {
		c.endTrial(false)
		return false
	}
	// Hosts need some intervals to fill a larger window. If they never do, a smaller one is as good.
	if float64(c.saturatedNS) < saturatedPart*dt && (!s.trial || s.n >= searchSettle) {
		c.endTrial(s.trial)
		return false
	}
	if s.n++; s.n <= searchSettle {
		return s.n > 0
	}
	for k, a := range now {
		s.now[k].add(a.ios*dt, a.bytes*dt)
	}
	s.reads += c.reads
	s.ns += dt
	gain := c.gain()
	switch {
	case s.n < searchTicks:
		return true
	case s.trial && gain < searchWorse:
	case s.reads < searchReads:
		if s.n < searchMost {
			return true
		}
	case !s.trial || gain >= searchGain:
		before := s.now
		for k := range before {
			before[k] = amount{before[k].ios / s.ns, before[k].bytes / s.ns}
		}
		*s = search{trial: true, before: before, waits: s.waits}
		c.widen(2)
		return true
	}
	s.known = s.trial && c.blank.known[probeSizes]
	c.endTrial(true)
	return false
}

// gain returns the factor by which small and large reads at least have become more in a trial.
func (c *Costs) gain() float64 {
	s := &c.blank.search
	gain := 0.0
	for k, a := range s.now[:writes] {
		if before := s.ns * c.timeOf(k, s.before[k]); before > minWrites*s.ns {
			if g := c.timeOf(k, a) / before; gain == 0 || g < gain {
				gain = g
			}
		}
	}
	return gain
}

// endTrial ends a trial without a result, and lets the search wait if another one would have none either.
func (c *Costs) endTrial(wait bool) {
	s := &c.blank.search
	if s.trial {
		c.widen(0.5)
	}
	n := min(s.n, 0)
	if wait {
		s.waits = min(max(2*s.waits, searchWait), probeLast)
		n = -s.waits
	}
	*s = search{known: s.known, waits: s.waits, n: n}
}

// widen changes the window.
func (c *Costs) widen(factor float64) {
	c.depth *= factor
	c.place /= factor
	c.placeByte /= factor
}
