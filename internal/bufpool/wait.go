package bufpool

import "jbofd/internal/invariants"

// Accounts that wait are in heaps, so that a Put costs the logarithm of their number. With a thousand hosts waiting, a
// scan of all of them would take longer than the I/O itself. For each order (a block has MinBytes<<order bytes) there
// is a heap of buffer sources, and in each source a heap of its accounts:
//
//	Pool.waiting[order] ── sources by their first account ── source.waiting[order] ── accounts by servedBefore
//
// All accounts in the heaps of one order wait for a block of the same size, so if the first of them cannot have one,
// none can.

// Waiter is a place in the queue for a buffer. The caller owns the memory,
// usually as a part of a larger struct, and must not copy or reuse it between
// GetOrWait and the call of Wake or a successful Cancel.
type Waiter struct {
	// Size is the buffer's length in bytes.
	Size int
	// Buf is set before Wake is called and then belongs to the waiter.
	Buf Buf
	// Wake tells that Buf is there. It is called without locks by the goroutine
	// that released the memory; it must not block.
	Wake func()

	acct       *Account
	next, prev *Waiter // the account's other waiters; prev is not valid in the first
	waiting    bool
}

// GetOrWait takes a buffer like Get, or else queues w; then w.Buf is set and
// w.Wake called later, unless Cancel removes w before. It reports whether the
// buffer is in w.Buf now (Wake is not called then).
//
// Cost: 0 allocs, one short mutex.
func (p *Pool) GetOrWait(a *Account, w *Waiter) bool { // hot: 0 allocs
	o := p.orderOf(w.Size)
	p.mu.Lock()
	defer p.mu.Unlock()
	invariants.Check(!w.waiting, "bufpool: waiter queued twice")
	if a.first == nil && p.take(a, o, w.Size, &w.Buf, nil) {
		return true
	}
	p.failures++
	a.failures++
	p.waits++
	a.waits++
	w.acct, w.next, w.waiting, w.Buf = a, nil, true, Buf{}
	if a.first == nil {
		a.first = w
		p.lastTurn++
		a.turn = p.lastTurn
		p.queue(a)
	} else {
		a.last.next, w.prev = w, a.last
	}
	a.last = w
	p.gatherForWaiter(a)
	return false
}

// Cancel removes w from its queue and reports whether it was there. False means
// that the buffer has been handed over: Wake has been or is being called, and
// the buffer must be used or Put after it.
//
// Cost: 0 allocs, one short mutex; the logarithm of how many accounts wait.
func (p *Pool) Cancel(w *Waiter) bool {
	p.mu.Lock()
	if !w.waiting {
		p.mu.Unlock()
		return false
	}
	a := w.acct
	first := a.first == w
	if first {
		a.first = w.next
	} else {
		w.prev.next = w.next
	}
	if a.last == w {
		a.last = w.prev
	} else {
		w.next.prev = w.prev
	}
	if a.first == nil {
		a.last = nil
	}
	if first {
		p.queue(a)
	}
	w.next, w.prev, w.waiting = nil, nil, false
	if p.gatherFor == w {
		p.gatherFor = nil
	}
	p.dropIfUnused(a)
	granted := p.grant()
	p.mu.Unlock()
	wake(granted)
	return true
}

// wake calls the Wake of each waiter in the list.
func wake(w *Waiter) {
	for w != nil {
		next := w.next
		w.next = nil // before Wake: the owner may queue it again at once
		w.Wake()
		w = next
	}
}

// servedBefore reports whether account x is served before y. Accounts that may use the reserve come first, then those
// that hold less, then those that have waited longer.
func (p *Pool) servedBefore(x, y *Account) bool {
	if xr, yr := p.mayUseReserve(x), p.mayUseReserve(y); xr != yr {
		return xr
	}
	if x.inUse != y.inUse {
		return x.inUse < y.inUse
	}
	return x.turn < y.turn
}

// makeRules makes the rules of the pool's heaps.
func (p *Pool) makeRules() {
	p.accountRules = rules[*Account]{before: p.servedBefore, put: func(a *Account, at int) { a.at = at }}
	for o := range p.orders {
		p.sourceRules[o] = rules[*source]{
			before: func(x, y *source) bool { return p.servedBefore(x.waiting[o][0], y.waiting[o][0]) },
			put:    func(s *source, at int) { s.place[o] = at },
		}
	}
}

// queue moves an account to the heaps of the order that its first waiter wants, or out of the heaps if it has no
// waiter. It is called when the account's first waiter has changed.
func (p *Pool) queue(a *Account) {
	order := -1
	if a.first != nil {
		order = p.orderOf(a.first.Size)
	}
	if order == a.order {
		if order >= 0 {
			p.moveAccount(a)
		}
		return
	}
	if o := a.order; o >= 0 {
		p.waitingAccounts--
		s := a.src
		if len(s.waiting[o]) == 1 {
			p.waiting[o].remove(&p.sourceRules[o], s.place[o])
		}
		s.waiting[o].remove(&p.accountRules, a.at)
		if len(s.waiting[o]) > 0 {
			p.waiting[o].fix(&p.sourceRules[o], s.place[o])
		}
	}
	a.order = order
	if order >= 0 {
		p.waitingAccounts++
		s := a.src
		s.waiting[order].add(&p.accountRules, a)
		if len(s.waiting[order]) == 1 {
			p.waiting[order].add(&p.sourceRules[order], s)
		} else {
			p.waiting[order].fix(&p.sourceRules[order], s.place[order])
		}
	}
}

// moveAccount restores the order of the heaps after a.inUse or a.turn has changed. a must have a waiter.
func (p *Pool) moveAccount(a *Account) {
	o := a.order
	a.src.waiting[o].fix(&p.accountRules, a.at)
	p.waiting[o].fix(&p.sourceRules[o], a.src.place[o])
}

// moveSource restores the order of the sources after mayUseReserve has changed for the accounts of s. The order within
// s does not change: of its accounts that hold nothing, all may use the reserve or none.
func (p *Pool) moveSource(s *source) {
	for o := range p.orders {
		if s.place[o] >= 0 {
			p.waiting[o].fix(&p.sourceRules[o], s.place[o])
		}
	}
}

// grant gives buffers to waiters, one at a time and in the order of next, until none can have one or the system has no
// memory. It returns those served as a list, linked by Waiter.next. The caller must pass the list to wake after it has
// released mu, because Wake may call the pool. It is called when a buffer has come back, and when a waiter has left,
// for the one behind it may need less. mu is held.
func (p *Pool) grant() (list *Waiter) {
	var tail *Waiter
	for {
		a := p.next()
		if a == nil {
			return list
		}
		w := a.first
		if !p.take(a, a.order, w.Size, &w.Buf, w) {
			return list // the system has no memory
		}
		if p.gatherFor == w {
			p.gatherFor = nil
		}
		a.first = w.next
		if a.first == nil {
			a.last = nil
		}
		p.lastTurn++
		a.turn = p.lastTurn
		p.queue(a)
		w.next, w.prev, w.waiting = nil, nil, false
		if tail == nil {
			list = w
		} else {
			tail.next = w
		}
		tail = w
	}
}

// next returns the account whose first waiter is to be served now: the waiter for which a region is being gathered, if
// its block is whole, otherwise the first by servedBefore of those that can be served. If there is none, it returns
// nil, and gathers a block for the first of those that lack only a whole block.
func (p *Pool) next() *Account {
	if w := p.gatherFor; w != nil && w.acct.first == w && p.fits(w.acct) {
		return w.acct
	}
	var can, cannot *Account
	for o := range p.orders {
		if len(p.waiting[o]) == 0 {
			continue
		}
		a := p.waiting[o][0].waiting[o][0]
		if p.fits(a) {
			if can == nil || p.servedBefore(a, can) {
				can = a
			}
		} else if p.withinShare(a, int64(p.cfg.MinBytes)<<o) && (cannot == nil || p.servedBefore(a, cannot)) {
			cannot = a
		}
	}
	if can == nil && cannot != nil {
		p.gatherForWaiter(cannot)
	}
	return can
}

// fits reports whether the account's first waiter can be served.
func (p *Pool) fits(a *Account) bool {
	if p.closed || !p.withinShare(a, int64(p.cfg.MinBytes)<<a.order) {
		return false
	}
	ri, _ := p.place(a, a.order, a.first)
	return ri >= 0
}

// gatherForWaiter reserves the region with the most free memory for a's first waiter, if that waiter may have a block
// by its share but the free memory has no whole block of that size. Blocks that come back there then merge instead of
// being handed out again, so that a waiter for a large block is not passed over for ever by waiters for small ones.
func (p *Pool) gatherForWaiter(a *Account) {
	size := int64(p.cfg.MinBytes) << a.order
	if p.closed || p.gatherFor != nil || !p.withinShare(a, size) {
		return
	}
	if reserve := int64(p.keep) * int64(p.cfg.MaxBytes); !p.mayUseReserve(a) && p.totalBytes-p.inUse-size < reserve {
		return // what is free is the reserve
	}
	best := 0
	for i := range p.regions {
		if p.regions[i].freeBytes > p.regions[best].freeBytes {
			best = i
		}
	}
	p.gatherFor, p.gatherRegion = a.first, best
}
