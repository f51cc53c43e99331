package queue

import (
	"sync"
	"sync/atomic"

	"jbofd/internal/nvmeof/fabric"
	"jbofd/internal/owner"
	"jbofd/internal/partition"
)

// Outbox hands commands from the owners of SSDs and from partitions to their Queues: a stack that
// anybody pushes to and that is emptied as a whole. The zero Outbox is empty.
type Outbox struct{ head atomic.Pointer[Slot] }

// busy stands at the bottom of an outbox that somebody is about to empty.
var busy Slot

// push adds s, with news of it, and reports whether nobody is about to empty the outbox.
//
// hot: 0 allocs
func (o *Outbox) push(s *Slot, n news) (kick bool) {
	s.news = n
	for {
		old := o.head.Load()
		s.next = old
		if o.head.CompareAndSwap(old, s) {
			return old == nil
		}
	}
}

// Claim says that the caller is about to empty the outbox, so that nobody is
// kicked meanwhile.
func (o *Outbox) Claim() { o.head.CompareAndSwap(nil, &busy) }

// Take empties the outbox and returns its commands, oldest first, linked by Next; the
// claim stays.
//
// hot: 0 allocs
func (o *Outbox) Take() (first *Slot) {
	for s := o.head.Swap(&busy); s != nil && s != &busy; {
		next := s.next
		s.next = first
		first = s
		s = next
	}
	return first
}

// Leave ends the claim; it fails if something was pushed since Take.
func (o *Outbox) Leave() bool {
	return o.head.CompareAndSwap(&busy, nil) || o.head.Load() == nil
}

// Pending reports that there are commands in the outbox.
func (o *Outbox) Pending() bool {
	s := o.head.Load()
	return s != nil && s != &busy
}

// Batches collect IOs and Requests until they are handed to their SSDs and partitions, a batch for each.
type Batches struct {
	// Handing is held by whoever takes commands in until the SSDs and partitions have
	// them, and before the Queue's lock. After a change of the namespaces, whoever has had it knows that
	// no command of before is on its way any more.
	Handing sync.Mutex

	fab      *fabric.Fabric
	commands []owner.Batch // by SSD
	fetched  []owner.Batch
	touched  []int // SSDs with something in commands or fetched
	requests []partition.Batch
	stores   []int // partitions with something in requests
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

// request puts r into its partition's batch. It allocates when there are more partitions than
// before.
//
// hot: 0 allocs
func (b *Batches) request(partitionNumber int, r *partition.Request) {
	for len(b.requests) <= partitionNumber {
		b.requests = append(b.requests, partition.Batch{})
	}
	to := &b.requests[partitionNumber]
	if to.Empty() {
		b.stores = append(b.stores, partitionNumber)
	}
	to.Add(r)
}

// HandOver submits the batches; on return the commands may be done already.
func (b *Batches) HandOver() {
	for _, i := range b.touched {
		o := b.fab.SSD(i)
		o.Fetched(&b.fetched[i])
		o.Submit(&b.commands[i])
	}
	b.touched = b.touched[:0]
	for _, i := range b.stores {
		b.fab.Partition(i).Submit(&b.requests[i])
	}
	b.stores = b.stores[:0]
}
