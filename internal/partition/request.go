package partition

import (
	"sync/atomic"

	"jbofd/internal/fence"
	"jbofd/internal/kvstore"
	"jbofd/internal/kvstore/format"
	"jbofd/internal/tenant"
	"jbofd/internal/turn"
)

// Sink is told when a Request is done. Its methods are called by whichever goroutine drives the
// partition at that moment: they hand the Request on and return.
type Sink interface {
	// KVDone: the Request is over; Status says how. It reports whether the sink must be kicked once the batch is
	// over.
	KVDone(r *Request) (kick bool)
	// Kick follows a batch of calls of which one asked for it.
	Kick()
}

// Request is one command to a partition. Its submitter allocates it once and uses it again and again; between
// Submit and KVDone it and the memory of Value belong to the partition.
type Request struct {
	Op        kvstore.Op
	Condition kvstore.Condition
	// Key of 1 to 16 bytes is the first KeyLen bytes. Of a List it is the one to begin at, and may be
	// empty.
	Key    [format.MaxKey]byte
	KeyLen uint8
	// Value is what a Put stores and where a Get and a List put what they have found, as much as fits.
	Value []byte
	// Room, if set, is asked for memory by a Get whose Value is too short, as soon as the value's length is known. It
	// makes Value as long as is wanted of it and returns it; with nil the Get ends, OK and without the value. It is
	// called as a Sink is, and may not use the partition.
	Room func(length int) []byte
	// Version, Given, Expires, Tombstone and ID are those of the kvstore.Request.
	Version   uint64
	Given     uint64
	Expires   uint32
	Tombstone bool
	ID        kvstore.Identity
	// ExpiresIn: Expires is in seconds from when the store gets the Request. KeepSeconds is for how long the store then
	// keeps the identity, in place of ID.KeepUntil; 0: ID.KeepUntil counts.
	ExpiresIn   bool
	KeepSeconds uint32
	// Background: what a Request for a range does to the drive is paid for as compaction is, and not by the tenant.
	Background bool
	// Restore, AheadSeconds and Sound are those of the kvstore.Request.
	Restore      bool
	AheadSeconds int64
	Sound        uint64
	// Tenant is the pipeline's number for who pays.
	Tenant tenant.ID
	// Credited: the host keeps to the tenant's credit, for which the Request counts as Units of 4 KiB.
	Credited bool
	Units    int
	// Pass says in whose name the Request is made. If it is stale when the store could take the Request, the store does
	// not get it and it ends with kvstore.Aborted, as it does when the partition is closed. A Request that the store
	// has runs to completion.
	Pass fence.Pass
	// Extent is the right of the namespace to the partition's extent; it works as Pass does.
	Extent fence.Pass
	// Slot is the sink's own number for the Request.
	Slot uint32
	// Sink is told when it is done.
	Sink Sink

	// Status is how it ended. Aborted: with kvstore.Aborted, because Abort has taken it out.
	Status  kvstore.Status
	Aborted bool
	// ValueLen is, after a Get that is OK, the whole length of the value, which may be more than
	// len(Value); after a List how many bytes of Value are of use.
	ValueLen int
	// ObjectVersion and ObjectExpires are Version and Expires of the kvstore.Reply.
	ObjectVersion uint64
	ObjectExpires uint32
	// CreditUnits is, when done, what the tenant should have outstanding at this SSD at most, as Units are
	// counted; 0: the policy does not say.
	CreditUnits int
	// Next links it into the sink's own list after KVDone.
	Next *Request

	node  turn.Node[Request] // in a Batch and the inbox
	next  *Request           // in the queues of tenants
	state atomic.Uint32
	// partition is where the Request was submitted last. It is read only by the one who has changed state from
	// requestQueued.
	partition *Partition

	// Range is that of a Scan, CopyOut, Count, Digest or Drop. It is last because others do not touch it.
	Range kvstore.Range
}

// Batch collects Requests for one Submit. The zero Batch is empty.
type Batch struct{ chain turn.Chain[Request] }

// Add appends r to the batch.
func (b *Batch) Add(r *Request) { // hot: 0 allocs
	r.node.Item = r
	b.chain.Add(&r.node)
}

// Empty reports whether there is nothing in the batch.
func (b *Batch) Empty() bool { return b.chain.Empty() }
