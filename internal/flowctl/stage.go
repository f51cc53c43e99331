package flowctl

// stage is where requests wait: for the tokens of an SSD, or for a place of a link. Each tenant has a queue, and they
// take turns by deficit round robin.
type stage struct {
	// ssd or link is whose stage it is.
	ssd  *SSD
	link *Link
	// queues and deficit are by tenant; tenants without requests have no deficit. ring are the others, in the order of
	// their turns; ring[at] has its turn. Invariant: at < len(ring), or both are 0.
	queues  []queue
	deficit []int
	ring    []Tenant
	at      int
	dirty   bool // in Machine.dirty
}

// queue is the requests of a tenant, oldest first.
type queue struct{ first, last *node }

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
		s.queues, s.deficit = append(s.queues, queue{}), append(s.deficit, 0)
	}
	q, n := &s.queues[r.Tenant], &r.nodes[number]
	n.r, n.in, n.number, n.prev, n.next = r, s, uint8(number), q.last, nil
	if q.last != nil {
		q.last.next = n
		q.last = n
		return
	}
	q.first, q.last = n, n
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
	q := &s.queues[t]
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
	if q.first == nil {
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
		n := s.queues[t].first
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
