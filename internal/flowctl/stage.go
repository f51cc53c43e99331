package flowctl

// stage is where requests wait: to be admitted at an SSD, for its tokens, or for a place of a link. Tenants take turns
// by deficit round robin, and the oldest request of a tenant is its first one.
type stage struct {
	// ssd or link is whose stage it is. admits: it is the one where writes are admitted.
	ssd    *SSD
	link   *Link
	admits bool
	// queues and deficit are by tenant; tenants without requests have no deficit. ring are the others, in the order of
	// their turns; ring[at] has its turn. Invariant: at < len(ring), or both are 0.
	queues  []queues
	deficit []int
	ring    []Tenant
	at      int
	readAt  int  // in ring: whose read was the latest of reservedRead
	dirty   bool // in Machine.dirty
}

// queues are the requests of a tenant: reads, and writes. They are apart because a read may have tokens for which the
// writes before it still have to wait.
type queues [2]queue

// queue is requests in the order in which they have come to the stage.
type queue struct{ first, last *node }

// of returns the queue of a request.
func (q *queues) of(r *Request) *queue { // hot: 0 allocs
	if r.Write {
		return &q[1]
	}
	return &q[0]
}

// first is the older one of the first read and the first write, nil if there is none.
func (q *queues) first() *node { // hot: 0 allocs
	read, write := q[0].first, q[1].first
	if read == nil || write != nil && write.r.age < read.r.age {
		return write
	}
	return read
}

// node is a request's place in a queue.
type node struct {
	r          *Request
	in         *stage // nil: it is in no queue
	prev, next *node
	number     uint8 // of Request.nodes
}

// cost is what a request takes of its tenant's deficit: tokens, or a place.
func (s *stage) cost(r *Request) int { // hot: 0 allocs
	if s.ssd != nil {
		return r.Units
	}
	return 1
}

func (s *stage) empty() bool { return len(s.ring) == 0 }

// touch notes that a request may be able to go on at a stage.
func (m *Machine) touch(s *stage) { // hot: 0 allocs
	if !s.dirty && len(s.ring) > 0 {
		s.dirty = true
		m.dirty = append(m.dirty, s)
	}
}

// push appends a request to its tenant's queue.
func (m *Machine) push(s *stage, r *Request, number int) { // hot: 0 allocs
	for int(r.Tenant) >= len(s.queues) {
		s.queues, s.deficit = append(s.queues, queues{}), append(s.deficit, 0)
	}
	was := s.queues[r.Tenant].first()
	q, n := s.queues[r.Tenant].of(r), &r.nodes[number]
	n.r, n.in, n.number, n.prev, n.next = r, s, uint8(number), q.last, nil
	if q.last != nil {
		q.last.next = n
	} else {
		q.first = n
	}
	if q.last = n; was != nil {
		return
	}
	s.ring = append(s.ring, r.Tenant)
	s.deficit[r.Tenant] = 0
	if len(s.ring) == 1 {
		s.begin(m)
	}
}

// begin begins the turn of ring[at].
func (s *stage) begin(m *Machine) { // hot: 0 allocs
	t := s.ring[s.at]
	s.deficit[t] += quantum * m.weights[t]
}

// remove takes a node out of its queue, if it is in one. A stage whose first request is gone may let another one go on.
func (m *Machine) remove(n *node) { // hot: 0 allocs
	s := n.in
	if s == nil {
		return
	}
	t := n.r.Tenant
	q := s.queues[t].of(n.r)
	if n.prev == nil {
		q.first = n.next
	} else {
		n.prev.next = n.next
	}
	if n.next == nil {
		q.last = n.prev
	} else {
		n.next.prev = n.prev
	}
	n.in, n.prev, n.next = nil, nil, nil
	if s.queues[t].first() == nil {
		s.retire(m, t)
	}
	m.touch(s)
}

// retire takes a tenant without requests out of the ring.
func (s *stage) retire(m *Machine, t Tenant) { // hot: 0 allocs
	i := 0
	for s.ring[i] != t {
		i++
	}
	s.ring = append(s.ring[:i], s.ring[i+1:]...)
	s.deficit[t] = 0
	if i < s.at {
		s.at--
		return
	}
	if i == s.at {
		if s.at == len(s.ring) {
			s.at = 0
		}
		if len(s.ring) > 0 {
			s.begin(m)
		}
	}
}

// head returns the request whose turn it is, nil if none waits.
func (m *Machine) head(s *stage) *node { // hot: 0 allocs
	for len(s.ring) > 0 {
		t := s.ring[s.at]
		n := s.queues[t].first()
		if s.cost(n.r) <= s.deficit[t] {
			return n
		}
		if s.at++; s.at == len(s.ring) {
			s.at = 0
		}
		s.begin(m)
	}
	return nil
}

// reservedRead returns a read that may go on although the request whose turn it is has no room; nil if there is none.
// That costs its tenant no turn.
func (m *Machine) reservedRead(now int64, s *stage) *node { // hot: 0 allocs
	if s.ssd == nil || s.admits {
		return nil
	}
	for range s.ring {
		s.readAt = (s.readAt + 1) % len(s.ring)
		t := s.ring[s.readAt]
		if n := s.queues[t][0].first; n != nil && m.reserved(now, s.ssd, n.r.Units) {
			s.deficit[t] += s.cost(n.r)
			return n
		}
	}
	return nil
}
