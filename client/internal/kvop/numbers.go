package kvop

import (
	"time"

	"jbofd/internal/invariants"
)

// numberLists is how many lists Numbers has. Keys that share one only hold back each other's watermarks.
const numberLists = 256

// Numbers gives the writes of a client their sequence numbers, and knows for each key from which one on writes are
// outstanding (Args.Answered). A write that is stuck holds back that of its own key, and of few others, so that targets
// can forget the identities of all others. It is guarded by a mutex of its owner.
type Numbers struct {
	last  uint64
	lists [numberLists]numberList
}

// numberList has the outstanding writes of some keys, in the order of their numbers.
type numberList struct {
	first, last *Number
	// held, until a time, is the lowest number of a write that has ended without an answer.
	held  uint64
	until time.Duration
}

// Number is the number of a write, while it is outstanding. The zero Number is that of none.
type Number struct {
	seq        uint64
	list       *numberList
	prev, next *Number
}

// Begin numbers a write of a key, of which hash is any hash: writes of one key have the same. It returns the sequence
// number of its first command, and that below which all writes of the key are answered. The Number is that of no write.
//
// Cost: 0 allocs.
func (s *Numbers) Begin(n *Number, hash uint64, now time.Duration) (seq, answered uint64) { // hot: 0 allocs
	invariants.Check(n.list == nil, "the write that has had the Number before has ended")
	s.last += SeqPerOp
	l := &s.lists[hash%numberLists]
	*n = Number{seq: s.last, list: l, prev: l.last}
	if l.last == nil {
		l.first = n
	} else {
		l.last.next = n
	}
	l.last, answered = n, l.first.seq
	if l.held != 0 && now < l.until {
		answered = min(answered, l.held)
	}
	return n.seq, answered
}

// End tells that a write is not outstanding any more. If it has ended without an answer, a copy of it may still be on
// its way: targets must remember it until then. A Number that is that of no write is left as it is.
//
// Cost: 0 allocs.
func (s *Numbers) End(n *Number, answered bool, now, until time.Duration) { // hot: 0 allocs
	l := n.list
	if l == nil {
		return
	}
	if n.prev == nil {
		l.first = n.next
	} else {
		n.prev.next = n.next
	}
	if n.next == nil {
		l.last = n.prev
	} else {
		n.next.prev = n.prev
	}
	if !answered {
		if l.held == 0 || now >= l.until || n.seq < l.held {
			l.held = n.seq
		}
		l.until = max(l.until, until)
	}
	*n = Number{}
}
