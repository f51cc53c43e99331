package kvop

import (
	"time"

	"jbofd/internal/invariants"
)

const (
	// numberLists is how many lists Numbers has.
	numberLists = 256
	// maxAhead is by how many writes of its list a write may be overtaken before further writes of its key wait for it.
	// All keys of the list count, so that no key must be searched for. Targets keep 64 identities of a key: that of the
	// write, those of the others, and that of one more that has begun.
	maxAhead = 62
)

// Numbers gives the writes of a client their sequence numbers, and knows for each key from which one on writes are
// outstanding (Args.Answered). A write that is stuck holds back Answered of its own key only, unless writes of several
// keys of a list end without an answer, so that targets can forget the identities of all others. It is guarded by a
// mutex of its owner.
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
	// unanswered, until a time, is the lowest number of a write that has ended without an answer; unansweredHash is
	// that of its key. allKeys: there are such writes of several keys, so that it counts for all keys.
	unanswered, unansweredHash uint64
	allKeys                    bool
	until                      time.Duration
}

// Number is the number of a write, while it is outstanding. The zero Number is that of none.
type Number struct {
	seq, nth   uint64 // nth is by numberList.begun
	hash       uint64
	list       *numberList
	prev, next *Number
	late       bool
}

// Begin gives a write its sequence numbers, SeqPerOp of them, and returns the first. answered is the lowest number of
// the key that may still be sent again, the new one included. hash identifies the key; different keys may share one. n
// must be zero. It is kept until End, and must neither move nor be used again before that.
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
	if l.unanswered != 0 && now < l.until && (l.allKeys || l.unansweredHash == hash) {
		answered = min(answered, l.unanswered)
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

// MustWait reports whether the next write of a key must wait, because an earlier one is late. It first makes late what
// maxAhead writes have overtaken. Ask again when End has returned true.
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

// End tells that a write is not outstanding any more. If answered is false, a copy of it may still be on its way:
// Answered of the key stays at or below its number until the time until. If End returns true the write was late, and
// those that wait (MustWait) may try again. A Number that is that of no write is left as it is.
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
		if l.unanswered == 0 || now >= l.until {
			l.unanswered, l.unansweredHash, l.allKeys = n.seq, n.hash, false
		}
		l.unanswered, l.allKeys = min(l.unanswered, n.seq), l.allKeys || l.unansweredHash != n.hash
		l.until = max(l.until, until)
	}
	*n = Number{}
	return late
}
