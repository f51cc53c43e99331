package serve

import (
	"sync/atomic"

	"jbofd/internal/owner"
)

// outbox hands IOs from the owners of SSDs to their connection: a stack that
// anybody pushes to and that is emptied as a whole.
type outbox struct{ head atomic.Pointer[owner.IO] }

// busy stands at the bottom of an outbox that somebody is about to empty.
var busy owner.IO

// push adds io and reports whether nobody is about to empty the outbox.
//
// hot: 0 allocs
func (o *outbox) push(io *owner.IO) (kick bool) {
	for {
		old := o.head.Load()
		io.Next = old
		if o.head.CompareAndSwap(old, io) {
			return old == nil
		}
	}
}

// claim says that the caller is about to empty the outbox, so that nobody is
// kicked meanwhile.
func (o *outbox) claim() { o.head.CompareAndSwap(nil, &busy) }

// take empties the outbox and returns its IOs, oldest first, linked by Next; the
// claim stays.
//
// hot: 0 allocs
func (o *outbox) take() (first *owner.IO) {
	for io := o.head.Swap(&busy); io != nil && io != &busy; {
		next := io.Next
		io.Next = first
		first = io
		io = next
	}
	return first
}

// leave ends the claim; it fails if something was pushed since take.
func (o *outbox) leave() bool {
	return o.head.CompareAndSwap(&busy, nil) || o.head.Load() == nil
}
