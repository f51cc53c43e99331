package queue

import (
	"sync"
	"sync/atomic"

	"jbofd/internal/nvmeof/fabric"
	"jbofd/internal/owner"
)

// Outbox hands IOs from the owners of SSDs to the Queues: a stack that anybody pushes to and
// that is emptied as a whole. The zero Outbox is empty.
type Outbox struct{ head atomic.Pointer[owner.IO] }

// busy stands at the bottom of an outbox that somebody is about to empty.
var busy owner.IO

// push adds io and reports whether nobody is about to empty the outbox.
//
// hot: 0 allocs
func (o *Outbox) push(io *owner.IO) (kick bool) {
	for {
		old := o.head.Load()
		io.Next = old
		if o.head.CompareAndSwap(old, io) {
			return old == nil
		}
	}
}

// Claim says that the caller is about to empty the outbox, so that nobody is
// kicked meanwhile.
func (o *Outbox) Claim() { o.head.CompareAndSwap(nil, &busy) }

// Take empties the outbox and returns its IOs, oldest first, linked by Next; the
// claim stays.
//
// hot: 0 allocs
func (o *Outbox) Take() (first *owner.IO) {
	for io := o.head.Swap(&busy); io != nil && io != &busy; {
		next := io.Next
		io.Next = first
		first = io
		io = next
	}
	return first
}

// Leave ends the claim; it fails if something was pushed since Take.
func (o *Outbox) Leave() bool {
	return o.head.CompareAndSwap(&busy, nil) || o.head.Load() == nil
}

// Pending reports that there are IOs in the outbox.
func (o *Outbox) Pending() bool {
	io := o.head.Load()
	return io != nil && io != &busy
}

// Batches collect IOs until they are handed to their SSDs, a batch for each.
type Batches struct {
	// Handing is held by whoever takes commands in until the SSDs have
	// them, and before the Queue's lock. After a change of the namespaces, whoever has had it knows that
	// no command of before is on its way any more.
	Handing sync.Mutex

	fab      *fabric.Fabric
	commands []owner.Batch // by SSD
	fetched  []owner.Batch
	touched  []int // SSDs with something in commands or fetched
}

// NewBatches makes Batches for the fabric's SSDs.
func NewBatches(f *fabric.Fabric) *Batches {
	n := len(f.SSDs())
	return &Batches{fab: f, commands: make([]owner.Batch, n), fetched: make([]owner.Batch, n), touched: make([]int, 0, n)}
}

// add puts io, whose SSD is given, into one of the batches.
func (b *Batches) add(to []owner.Batch, ssd int, io *owner.IO) {
	if b.commands[ssd].Empty() && b.fetched[ssd].Empty() {
		b.touched = append(b.touched, ssd)
	}
	to[ssd].Add(io)
}

// HandOver submits the batches to their SSDs; on return the commands may be done already.
func (b *Batches) HandOver() {
	for _, i := range b.touched {
		o := b.fab.SSD(i)
		o.Fetched(&b.fetched[i])
		o.Submit(&b.commands[i])
	}
	b.touched = b.touched[:0]
}
