package partition

import "jbofd/internal/kvstore"

// States of a Request.
const (
	requestIdle    = iota
	requestQueued  // submitted, and the store does not have it: Request.Abort takes it out
	requestAborted // taken out; KVDone will follow
	requestStarted // the store has it, or is about to
	requestRanged  // the same for a Request for a range that the store has: it may be ended early
	requestEnding  // the store has it, and is to end it early
)

// Abort removes r from its partition if the store does not have it yet; then it ends with kvstore.Aborted, soon. It
// reports whether that succeeded: otherwise the Request runs to completion, but for one for a range, which the store
// ends as soon as it can (kvstore.Store.EndEarly). From any goroutine, also with locks held that Sinks take.
func (r *Request) Abort() bool {
	aborted := r.state.CompareAndSwap(requestQueued, requestAborted)
	if !aborted && !r.state.CompareAndSwap(requestRanged, requestEnding) {
		return false
	}
	p := r.partition            // r belongs to it until the turn that ends r
	if !p.aborting.Swap(true) { // else a turn is coming that finds this one too
		p.driver.RunLater()
	}
	return aborted
}

// start reports whether the store may have r, and keeps Abort from it.
func (r *Request) start() bool { return r.state.CompareAndSwap(requestQueued, requestStarted) }

// takeAborted ends the Requests that were aborted before the store had them, and those for ranges that the store has.
func (p *Partition) takeAborted() {
	for tag, r := range p.reqs {
		if r != nil && r.state.CompareAndSwap(requestEnding, requestStarted) {
			p.endEarly(uint64(tag))
		}
	}
	for i := range p.queues {
		for r := p.queues[i].takeAborted(); r != nil; {
			next := r.next
			r.next = nil
			p.endAborted(r)
			r = next
		}
	}
}

// endEarly ends a Request for a range that the store has, or the Source, or the store by way of the Source.
func (p *Partition) endEarly(tag uint64) {
	if l := p.swapping; l != nil {
		if at, ok := l.source.EndEarly(tag); ok {
			p.store.EndEarly(at | sourceTag)
			return
		}
	}
	p.store.EndEarly(tag)
}

// endAborted ends a Request that is in no list any more.
func (p *Partition) endAborted(r *Request) {
	r.Status, r.ValueLen, r.Aborted = kvstore.Aborted, 0, true
	p.complete(r)
}

// takeAborted takes all aborted Requests out of the queues, and returns them linked by next. Aborts are rare: it looks
// at all Requests.
func (w *waiting) takeAborted() (first *Request) {
	for i := 0; i < len(w.active); {
		q := &w.queues[w.active[i]]
		all := q.first
		q.first, q.last = nil, nil
		for r := all; r != nil; {
			next := r.next
			r.next = nil
			switch {
			case r.state.Load() == requestAborted:
				r.next, first = first, r
				w.n--
			case q.last == nil:
				q.first, q.last = r, r
			default:
				q.last.next, q.last = r, r
			}
			r = next
		}
		if q.first != nil {
			i++
			continue
		}
		w.active[i] = w.active[len(w.active)-1]
		w.active = w.active[:len(w.active)-1]
	}
	return first
}
