package memverbs

import "jbofd/internal/nvmeof/rdma/verbs"

// Stats count what a queue pair, or all of a provider's, did. They never go back.
type Stats struct {
	// Sends, Writes and Reads are work requests that were posted; Sends with and without invalidation.
	Sends, Writes, Reads uint64
	// Recvs are messages that were received; RecvsPosted receives that were posted, 0 for a
	// queue pair with a shared receive queue.
	Recvs, RecvsPosted uint64
	// Doorbells are how often the device was told of new requests, 0 for receives of a
	// queue pair with a shared receive queue.
	Doorbells uint64
	// Completions are those that were made, polled or not.
	Completions uint64
	// RNRs are attempts to send that met no receive.
	RNRs uint64
}

// count counts a request that was posted.
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

// Stats are the queue pair's; they stay after Close.
func (e *Endpoint) Stats() Stats {
	e.net.mu.Lock()
	defer e.net.mu.Unlock()
	s := e.stats
	s.RecvsPosted = e.own.posted
	return s
}

// QPNum is the number of the endpoint's queue pair, 0 if it has none.
func (e *Endpoint) QPNum() uint32 {
	e.net.mu.Lock()
	defer e.net.mu.Unlock()
	return e.num
}

// Stats are those of all the provider's queue pairs, also of those that were closed.
func (p *Provider) Stats() Stats {
	p.net.mu.Lock()
	defer p.net.mu.Unlock()
	return p.stats
}
