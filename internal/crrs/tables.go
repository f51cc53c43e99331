package crrs

import "jbofd/internal/slab"

// Tables are the memory for what is under way at the Ports and Replicas of one driver. What each of them may have is
// bounded by its Config; memory is taken for what there is, and what one does not need another one takes.
type Tables struct {
	writes   *slab.Pool[write]
	reads    *slab.Pool[read]
	requests *slab.Pool[request]
	served   *slab.Pool[served]
	// led and asked bound what all of them together take of clients: writes at ChainHeads; reads, those included that
	// other replicas have shipped.
	led, asked budget
	// dirty is how many writes have marked their key.
	dirty int
	// unjudgedBytes is the length of the values of writes that wait for a repair.
	unjudgedBytes int
}

// Dirty returns how many writes are not known to be committed yet, of all Replicas with these Tables. The keys of these
// are dirty.
func (t *Tables) Dirty() int { return t.dirty }

// NewTables returns Tables for at most that many writes and reads of clients, and a few more for each replica. What
// comes from other replicas, and cannot be refused, is not counted among the writes: it is bounded by the Tables of the
// ChainHeads.
func NewTables(writes, reads int) *Tables {
	return &Tables{writes: slab.NewPool[write](8), reads: slab.NewPool[read](8), requests: slab.NewPool[request](16),
		served: slab.NewPool[served](16), led: budget{limit: writes}, asked: budget{limit: reads}}
}

// Trim gives up the memory that was not needed since the last Trim, and reports whether there may be more to give up.
func (t *Tables) Trim() (more bool) {
	w, r, q, s := t.writes.Trim(), t.reads.Trim(), t.requests.Trim(), t.served.Trim()
	return w || r || q || s
}

// budget is what several replicas may have together.
type budget struct{ limit, used int }

// assured is how many of a budget each replica may have, whatever the others have.
const assured = 4

// may reports whether a replica that has n may have one more: n must be less than what is left for all. So what a few
// busy ones leave is never less than what each of them has, and a replica that begins finds room.
func (b *budget) may(n int) bool { return n < assured || n < b.limit-b.used }
