package kvop

import (
	"time"

	"jbofd/internal/invariants"
)

const (
	// numberLists is how many lists Numbers has.
	numberLists = 256
	// maxAhead is by how many writes one may be overtaken, before further ones of its key wait for it. Targets keep 64
	// identities of a key.
	maxAhead = 62
)

// Numbers gives the writes of a client their sequence numbers, and knows for each key from which one on writes are
// outstanding (Args.Answered). A write that is stuck holds back that of its own key only, so that targets can forget
// the identities of all others. It is guarded by a mutex of its owner.
type Numbers struct {
	last  uint64
	lists [numberLists]numberList
}

// numberList has the outstanding writes of some keys, in the order of their numbers.
type numberList struct {
	first, last *Number
	// begun counts its writes. late is how many of the outstanding ones are late.
	begun uint64
	late  int
	// held, until a time, is the lowest number of a write that has ended without an answer; heldHash is that of its
	// key. heldAll: there are such writes of several keys, so that it counts for all keys.
	held, heldHash uint64
	heldAll        bool
	until          time.Duration
}

// Number is the number of a write, while it is outstanding. The zero Number is that of none.
type Number struct {
	seq, nth   uint64 // nth is by numberList.begun
	hash       uint64
	list       *numberList
	prev, next *Number
	late       bool
}

// Begin numbers a write of a key, of which hash is any hash: writes of one key have the same. It returns the sequence
// number of its first command, and that below which all writes of the key are answered. The Number is that of no write.
//
// Cost: 0 allocs.
func (s *Numbers) Begin(n *Number, hash uint64, now time.Duration) (seq, answered uint64) { // hot: 0 allocs
	invariants.Check(n.list == nil, "the write that has had the Number before has ended")
	s.last += SeqPerOp
	l := &s.lists[hash%numberLists]
	l.begun++
	*n = Number{seq: s.last, nth: l.begun, hash: hash, list: l, prev: l.last}
	if l.last == nil {
		l.first = n
	} else {
		l.last.next = n
	}
	l.last = n
	o := l.first
	for o.hash != hash {
		o = o.next
	}
	answered = o.seq
	if l.held != 0 && now < l.until && (l.heldAll || l.heldHash == hash) {
		answered = min(answered, l.held)
	}
	return n.seq, answered
}

// Late tells that a write has to be sent again. Whatever begins before its end is an identity more that the targets
// keep of its key. A Number that is that of no write is left as it is.
func (s *Numbers) Late(n *Number) {
	if l := n.list; l != nil && !n.late {
		n.late = true
		l.late++
	}
}

// MustWait reports whether a write of a key must not begin before an earlier one has ended, which is late, or becomes
// late now because it was overtaken too often.
//
// Cost: 0 allocs.
func (s *Numbers) MustWait(hash uint64) bool { // hot: 0 allocs
	l := &s.lists[hash%numberLists]
	if l.late == 0 && (l.first == nil || l.begun-l.first.nth < maxAhead) {
		return false
	}
	for n := l.first; n != nil; n = n.next {
		if n.hash != hash {
			continue
		}
		if l.begun-n.nth >= maxAhead {
			s.Late(n)
		}
		if n.late {
			return true
		}
	}
	return false
}

// End tells that a write is not outstanding any more, and reports whether it was late. If it has ended without an
// answer, a copy of it may still be on its way: targets must remember it until then. A Number that is that of no write
// is left as it is.
//
// Cost: 0 allocs.
func (s *Numbers) End(n *Number, answered bool, now, until time.Duration) (late bool) { // hot: 0 allocs
	l := n.list
	if l == nil {
		return false
	}
	if late = n.late; late {
		l.late--
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
		if l.held == 0 || now >= l.until {
			l.held, l.heldHash, l.heldAll = n.seq, n.hash, false
		}
		l.held, l.heldAll = min(l.held, n.seq), l.heldAll || l.heldHash != n.hash
		l.until = max(l.until, until)
	}
	*n = Number{}
	return late
}
