package peers

// Shares of partitions in the queues of commands that wait for drives: Ships in one, Compares and Fetches in the other.
//
// All partitions of a node share these queues. If the drive of one is slow, its commands stay there for seconds, and
// must not take all slots. So a quarter of the slots is for partitions that have less than a quarter: one alone may
// have three quarters, and its further commands wait in its target (held), in order, while those of others overtake
// them.

// forDrives reports whether the queue has commands that wait for a drive.
func (q *queue) forDrives() bool { return q == &q.node.queues[ships] || q == &q.node.queues[fills] }

// held is the share of a target in a queue for drives: how many commands were sent, and those that wait for a slot.
type held struct {
	sent    int
	waiting fifo
}

// heldOf returns the share of a target in the queue, which is one for drives.
func (q *queue) heldOf(t *target) *held {
	if q == &q.node.queues[ships] {
		return &t.ships
	}
	return &t.fills
}

// count counts a command that is sent, or has ended.
func (q *queue) count(c *Command, n int) { // hot: 0 allocs
	if q.forDrives() {
		q.heldOf(c.target).sent += n
	}
}

// nextForDrives takes the next command to send; nil: none may take a slot. There must be a free slot.
func (q *queue) nextForDrives() *Command { // hot: 0 allocs
	quarter := len(q.sent) / 4
	some := len(q.free) > quarter
	for i, t := range q.held {
		h := q.heldOf(t)
		if !some && h.sent >= quarter {
			continue
		}
		c := h.waiting.pop()
		if h.waiting.first == nil {
			q.held[i] = q.held[len(q.held)-1]
			q.held[len(q.held)-1] = nil
			q.held = q.held[:len(q.held)-1]
		}
		return c
	}
	for c := q.others.pop(); c != nil; c = q.others.pop() {
		h := q.heldOf(c.target)
		if some || h.sent < quarter {
			return c
		}
		if h.waiting.first == nil {
			q.held = append(q.held, c.target)
		}
		h.waiting.push(c)
	}
	return nil
}

// unhold ends all commands that wait in targets, as lost.
func (q *queue) unhold() {
	for _, t := range q.held {
		h := q.heldOf(t)
		for c := h.waiting.pop(); c != nil; c = h.waiting.pop() {
			q.lose(c)
		}
	}
	clear(q.held)
	q.held = q.held[:0]
}
