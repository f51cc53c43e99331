package crrs

import "jbofd/internal/slab"

// Tables are the memory for the requests, reads and writes of the Ports and Replicas of one driver. The Config of each
// bounds how many it may have; memory is allocated for those that there are, and shared by all.
type Tables struct {
	writes   *slab.Pool[write]
	reads    *slab.Pool[read]
	requests *slab.Pool[request]
	served   *slab.Pool[served]
	// led and asked bound the requests of clients of all of them together: led the writes at ChainHeads; asked the
	// reads, including those that other replicas have shipped.
	led, asked budget
	// dirty is how many writes have their key dirty.
	dirty int
	// unjudgedBytes is the length of the values of writes that wait for a repair.
	unjudgedBytes int
}

// Dirty returns how many writes are not known to be committed yet, of all Replicas with these Tables: their keys are
// dirty.
func (t *Tables) Dirty() int { return t.dirty }

// NewTables returns Tables for at most that many writes and reads of clients, and a few more for each replica
// (assured). Forwards, which cannot be refused, are not counted among the writes: the Tables of the ChainHeads bound
// them.
func NewTables(writes, reads int) *Tables {
	return &Tables{writes: slab.NewPool[write](8), reads: slab.NewPool[read](8), requests: slab.NewPool[request](16),
		served: slab.NewPool[served](16), led: budget{limit: writes}, asked: budget{limit: reads}}
}

// Trim frees memory that was not needed since the last Trim, and reports whether there may be more to free.
func (t *Tables) Trim() (more bool) {
	w, r, q, s := t.writes.Trim(), t.reads.Trim(), t.requests.Trim(), t.served.Trim()
	return w || r || q || s
}

// budget bounds a number of requests that several replicas have together.
type budget struct{ limit, used int }

// assured is how many requests each replica may have, whatever the others have.
const assured = 4

// may reports whether a replica that has n requests may have one more: n must be less than the free rest of the budget.
// So the rest that a few busy replicas leave is at least as much as each of them has, and a further replica finds room.
func (b *budget) may(n int) bool { return n < assured || n < b.limit-b.used }
