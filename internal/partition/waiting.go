package partition

import "jbofd/internal/pipeline"

// waiting holds the Requests that the store has not yet taken, by tenant. Those with the fewest in the
// store go first, so that each of the tenants that want something has as many there as the others: then
// all of them have I/Os waiting in the SSD's pipeline, and that gives each its share by weight. Within a
// tenant it is first come, first served.
type waiting struct {
	n      int
	queues []queue // by tenant
	// active are the tenants that have Requests here.
	active []pipeline.Tenant
	// best is the place in active of the one whose turn it is, found by peek.
	best int
}

type queue struct {
	first, last *Request
	// inStore counts those that the store has.
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

// peek returns the one whose turn it is, or nil.
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

// pop takes what peek has returned: it is in the store now.
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

// ended says that a Request that was popped is over.
func (w *waiting) ended(r *Request) { w.queues[r.Tenant].inStore-- }

// any takes some Request that will never be in the store, or nil.
func (w *waiting) any() *Request {
	r := w.peek()
	if r != nil {
		w.pop()
		w.ended(r)
	}
	return r
}
