package crrs

import (
	"maps"
	"slices"
	"testing"
)

// simAnswers is what clients say of writes that have been answered, and what comes of it.
type simAnswers struct {
	// unanswered are the writes of each key that are outstanding, or have ended as unknown, ascending. said is the
	// greatest number below which writes were said to be answered.
	unanswered [keys][]uint64
	said       [keys]uint64
	// forgotten counts the identities that stores have dropped for that, behind those of them that were not at the
	// ChainHead.
	forgotten, behind int
	// most is how many of a key a store has had, without those that came after a write that said that they are
	// answered, because stores do the writes of a key in any order here, and without those of later writes that a copy
	// has brought. told is what each node's store was told, last the greatest number of a write that it has done. hot
	// is the client of a hot key; nil: there is none.
	most       int
	told, last [5][keys]uint64
	hot        *hotClient
}

// begins notes a write of a key, and returns the number below which all are answered.
func (a *simAnswers) begins(key byte, seq uint64) uint64 {
	u := &a.unanswered[key]
	*u = append(*u, seq)
	a.said[key] = (*u)[0]
	return (*u)[0]
}

// answered notes that no copy of a write comes any more.
func (a *simAnswers) answered(w *Write) {
	u := &a.unanswered[w.Key.Bytes[0]]
	*u = slices.DeleteFunc(*u, func(seq uint64) bool { return seq == w.ID.Seq })
}

// forgetAnswered drops from a store what a write says is answered.
func (a *simAnswers) forgetAnswered(n *node, op *StoreOp) {
	done := n.done[op.Key.Bytes[0]]
	was := len(done)
	maps.DeleteFunc(done, func(id Identity, _ uint64) bool { return id.Seq < op.Answered })
	a.forgotten += was - len(done)
	told, last := &a.told[n.id][op.Key.Bytes[0]], &a.last[n.id][op.Key.Bytes[0]]
	*told, *last = max(*told, op.Answered), max(*last, op.ID.Seq)
	kept := 0
	for id := range done {
		if id.Seq >= *told && id.Seq <= *last {
			kept++
		}
	}
	a.most = max(a.most, kept)
	if n.r.role.Predecessor != NoPeer {
		a.behind += was - len(done)
	}
}

// dropSaid drops from a store all that was said to be answered. A copy may bring back what the member has dropped.
func (a *simAnswers) dropSaid(n *node) {
	for k, done := range n.done {
		maps.DeleteFunc(done, func(id Identity, _ uint64) bool { return id.Seq < a.said[k] })
	}
}

func (a *simAnswers) add(o *simAnswers) {
	a.forgotten += o.forgotten
	a.behind += o.behind
}

// check fails if stores have forgotten too little in so many operations.
func (a *simAnswers) check(t *testing.T, ops int) {
	t.Helper()
	if *runsFlag > 10 && (a.forgotten < ops/10 || a.behind < a.forgotten/10) {
		t.Errorf("%d operations: %d identities were forgotten because their writes were answered, %d behind ChainHeads",
			ops, a.forgotten, a.behind)
	}
}
