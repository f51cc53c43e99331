package partition

import (
	"jbofd/internal/kvstore"
)

// Requests for ranges wait in a queue of their own, because the store takes only a few of them at a time: a long one
// must not keep Gets and Puts from the store.

// queueOf is the queue in which a Request waits for the store.
func (p *Partition) queueOf(r *Request) *waiting {
	if r.Op.IsRange() {
		return &p.ranges
	}
	return &p.waiting
}

// rangeBegan notes that the store has a Request, or the Source for it. While there is a CopyIn, no key is swapped out:
// the newest value of a key could otherwise be in a swap area although the CopyIn has a newer one.
func (p *Partition) rangeBegan(r *Request) {
	if !r.Op.IsRange() {
		return
	}
	r.state.Store(requestRanged)
	if r.Op != kvstore.CopyIn {
		return
	}
	if p.copying++; p.swapping != nil {
		p.swapping.source.Hold(p.copying > 0)
	}
}

// rangeEnded notes that such a Request has ended.
func (p *Partition) rangeEnded(r *Request) {
	if !r.Op.IsRange() {
		return
	}
	r.state.Store(requestStarted)
	r.Aborted = r.Status == kvstore.Aborted // after Store.EndEarly
	if r.Op != kvstore.CopyIn {
		return
	}
	if p.copying--; p.swapping != nil {
		p.swapping.source.Hold(p.copying > 0)
	}
}
