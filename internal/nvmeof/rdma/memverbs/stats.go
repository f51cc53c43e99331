package memverbs

import "jbofd/internal/nvmeof/rdma/verbs"

// Stats are counters of one queue pair, or of all queue pairs of a provider. They never decrease.
type Stats struct {
	// Sends, Writes and Reads count posted work requests. Sends counts those with invalidation, too.
	Sends, Writes, Reads uint64
	// Recvs counts received messages. RecvsPosted counts posted receives; it is 0 for a queue pair with a shared
	// receive queue.
	Recvs, RecvsPosted uint64
	// Doorbells counts how often the device was notified of new requests. Receives posted to a shared receive queue do
	// not count for a queue pair.
	Doorbells uint64
	// Completions counts the completions generated, whether polled or not.
	Completions uint64
	// RNRs counts attempts to send that failed because there was no receive.
	RNRs uint64
}

// count counts a posted request.
func (e *Endpoint) count(op verbs.Op) {
	for _, s := range [...]*Stats{&e.stats, &e.dev.provider.stats} {
		switch op {
		case verbs.OpWrite:
			s.Writes++
		case verbs.OpRead:
			s.Reads++
		default:
			s.Sends++
		}
	}
}

// Stats returns the counters of the queue pair. They remain available after Close.
func (e *Endpoint) Stats() Stats {
	e.net.mu.Lock()
	defer e.net.mu.Unlock()
	s := e.stats
	s.RecvsPosted = e.own.posted
	return s
}

// QPNum returns the number of the endpoint's queue pair, or 0 if it has none.
func (e *Endpoint) QPNum() uint32 {
	e.net.mu.Lock()
	defer e.net.mu.Unlock()
	return e.num
}

// Stats returns the sum over all queue pairs of the provider, closed ones included.
func (p *Provider) Stats() Stats {
	p.net.mu.Lock()
	defer p.net.mu.Unlock()
	return p.stats
}
