package partition

import (
	"jbofd/internal/kvstore"
)

// There is a queue for each kind of place in the store, so that a Request that waits for one keeps none from the store
// that has another. A Put waits as long as all groups of values are being written, which neither a Get nor a Delete
// needs; and a Delete may be what makes room for Puts. Of Requests for ranges the store takes only a few at a time, and
// they may be long; a CopyIn that waits does not keep Scans waiting.

// The queues in which Requests wait for the store.
const (
	getQueue    = iota // Get, Exist, List
	putQueue           // Put
	deleteQueue        // Delete
	rangeQueue         // Scan, CopyOut, Count, Digest
	copyInQueue
	dropQueue
	numQueues
)

// queueOf is the queue in which a Request waits for the store.
func (p *Partition) queueOf(r *Request) *waiting {
	switch {
	case r.Op == kvstore.CopyIn:
		return &p.queues[copyInQueue]
	case r.Op == kvstore.Drop:
		return &p.queues[dropQueue]
	case r.Op.IsRange():
		return &p.queues[rangeQueue]
	case r.Op == kvstore.Put:
		return &p.queues[putQueue]
	case r.Op == kvstore.Delete:
		return &p.queues[deleteQueue]
	}
	return &p.queues[getQueue]
}

// waiting is how many Requests the store has not taken yet.
func (p *Partition) waiting() (n int) {
	for i := range p.queues {
		n += p.queues[i].n
	}
	return n
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
