package connection

import (
	"sync"
	"sync/atomic"

	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/executor"
	"jbofd/internal/nvmeof/target"
)

// event is why a command is in an outbox.
type event uint8

const (
	eventDone     event = iota
	eventNeedData       // its executor is ready for the host's data
)

// Outbox takes commands from their executors to their connections: a stack that any goroutine pushes to and that is
// emptied as a whole. The zero Outbox is empty.
type Outbox struct{ head atomic.Pointer[Slot] }

// busy stands at the bottom of an outbox that some goroutine is about to empty.
var busy Slot

// push adds s and reports whether no goroutine is about to empty the outbox.
//
// hot: 0 allocs
func (o *Outbox) push(s *Slot, e event) (kick bool) {
	s.event = e
	for {
		old := o.head.Load()
		s.next = old
		if o.head.CompareAndSwap(old, s) {
			return old == nil
		}
	}
}

// Claim says that the caller is about to empty the outbox, so that no push asks for a kick meanwhile.
func (o *Outbox) Claim() { o.head.CompareAndSwap(nil, &busy) }

// take empties the outbox and returns its commands, oldest first, linked by next; the claim stays.
//
// hot: 0 allocs
func (o *Outbox) take() (first *Slot) {
	for s := o.head.Swap(&busy); s != nil && s != &busy; {
		next := s.next
		s.next = first
		first = s
		s = next
	}
	return first
}

// leave ends the claim; it fails if something was pushed since take.
func (o *Outbox) leave() bool {
	return o.head.CompareAndSwap(&busy, nil) || o.head.Load() == nil
}

// Pending reports that there are commands in the outbox.
func (o *Outbox) Pending() bool {
	s := o.head.Load()
	return s != nil && s != &busy
}

// Batches collect commands until they are handed to their executors, a batch for each kind.
type Batches struct {
	// Handing is held by a goroutine that takes commands in until their executors have them, and is locked before
	// the Conn's lock. A goroutine that changes the namespaces and then has had Handing knows that no command of
	// before is on its way to an executor.
	Handing sync.Mutex

	service *target.Service
	batches [nvmeof.Kinds]executor.Batch // nil before the first command of the kind
	touched []nvmeof.Kind                // kinds with something in their batch
	isIn    [nvmeof.Kinds]bool           // those in touched
}

// NewBatches makes Batches for the service's executors.
func NewBatches(f *target.Service) *Batches {
	return &Batches{service: f, touched: make([]nvmeof.Kind, 0, nvmeof.Kinds)}
}

// of returns the batch of a kind, to which a command is about to be added.
//
// hot: 0 allocs, but for the first command of the kind
func (b *Batches) of(k nvmeof.Kind) executor.Batch {
	if !b.isIn[k] {
		b.isIn[k] = true
		b.touched = append(b.touched, k)
		if b.batches[k] == nil {
			b.batches[k] = b.service.Executor(k).NewBatch()
		}
	}
	return b.batches[k]
}

// HandOver submits the batches; on return the commands may be done already.
func (b *Batches) HandOver() {
	for _, k := range b.touched {
		b.isIn[k] = false
		b.batches[k].Submit()
	}
	b.touched = b.touched[:0]
}
