package partition

import "jbofd/internal/tenant"

// waiting holds the Requests that the store has not yet taken, by tenant. The tenant with the fewest Requests in the
// store is served first, so that all active tenants have equally many there. Then all of them have I/Os waiting in the
// drive's pipeline, which gives each tenant its share by weight. The Requests of one tenant are taken in order.
type waiting struct {
	n      int
	queues []queue // by tenant
	// active are the tenants that have Requests here.
	active []tenant.ID
	// best is the index in active of the tenant to be served next, found by peek.
	best int
}

type queue struct {
	first, last *Request
	// inStore counts the tenant's Requests that the store has.
	inStore int
}

func (w *waiting) push(r *Request) {
	for int(r.Tenant) >= len(w.queues) {
		w.queues = append(w.queues, queue{})
	}
	q := &w.queues[r.Tenant]
	if q.first == nil {
		q.first = r
		w.active = append(w.active, r.Tenant)
	} else {
		q.last.next = r
	}
	q.last = r
	w.n++
}

// peek returns the Request to be served next, or nil.
func (w *waiting) peek() *Request {
	if len(w.active) == 0 {
		return nil
	}
	w.best = 0
	for i, t := range w.active {
		if w.queues[t].inStore < w.queues[w.active[w.best]].inStore {
			w.best = i
		}
	}
	return w.queues[w.active[w.best]].first
}

// leastInStore returns the number of Requests that the store has of the tenant that is served next. w must not be
// empty.
func (w *waiting) leastInStore() int {
	w.peek()
	return w.queues[w.active[w.best]].inStore
}

// pop takes out the Request that peek has returned and counts it as in the store.
func (w *waiting) pop() {
	q := &w.queues[w.active[w.best]]
	r := q.first
	q.first, r.next = r.next, nil
	q.inStore++
	w.n--
	if q.first == nil {
		w.active[w.best] = w.active[len(w.active)-1]
		w.active = w.active[:len(w.active)-1]
	}
}

// requestDone counts a Request that pop has taken out as no longer in the store.
func (w *waiting) requestDone(r *Request) { w.queues[r.Tenant].inStore-- }

// popAny takes out a Request that the store will not get, or returns nil.
func (w *waiting) popAny() *Request {
	r := w.peek()
	if r != nil {
		w.pop()
		w.requestDone(r)
	}
	return r
}
