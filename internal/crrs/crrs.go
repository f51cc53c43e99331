// Package crrs is chain replication with request shipping (CRRS): the replica of a range of keys in one partition, as a
// state machine. It has no I/O: it asks for operations of its store, sends messages to the other replicas of its chain,
// and answers clients.
//
//	client ─ Write ─> ChainHead ─ Forward ─> replica ─ Forward ─> ChainTail        Forward: data and the durable mark
//	                  │ Store                │ Store              │ Store          Ack: the committed mark
//	client <─ reply ─ ChainHead <──── Ack ── replica <──── Ack ── ChainTail
//
//	client ─ Read ──> any replica: key clean: its store answers
//	                               key dirty: Ship ─> ChainTail ─ Answer ─> replica ─> client
//
// A write gets its version and its number in the order of writes (seq) at the ChainHead. Every replica stores it and
// forwards it at once. So the stores work in parallel, and many writes are outstanding, also of one key; there is no
// lock across the chain. The key is dirty from then on, until the write is committed. The states of a write are at type
// write.
//
// The last member of the chain commits a write when it is durable at every replica, in the order of seq. It knows that
// from the durable mark that comes down the chain: all writes up to it are durable at the sender and upstream of it.
// The mark is part of each Forward; it is sent alone, as a Durable, only if there is nothing to forward. Acks go up the
// chain with the committed mark: each member marks the keys clean, and the ChainHead answers its clients. The last
// member is the ChainTail, or a filling member downstream of it (fill.go).
//
// Epoch here is always that of the chain, which counts the changes of this chain alone: View.ChainEpochs of the range,
// not the epoch of the view. Messages of another epoch are ignored. When the epoch changes, every write that is not
// committed is forwarded again under the new one. Each replica holds all writes that those downstream of it hold, so
// that only writes that were not acknowledged can be lost.
//
// A replica answers reads only while it has authority, which the manager grants and extends. It ends before the manager
// can make a view without the replica. A replica checks the time after it has fetched the value, because its process
// may be paused between the two.
//
// A ChainHead yields the head of the chain to another member when it has no writes outstanding (yield.go). So a node
// that was away, and has been the ChainTail of its ranges since, leads its share of them again.
//
// Upstream is towards the ChainHead (the Predecessor is next upstream), downstream towards the ChainTail and a filling
// member; comments also say before and behind. Replica is the machine itself: what a view changes and the marks are in
// replica.go, writes in write.go, reads in read.go, filling in fill.go. Port (port.go, and portserve.go for commands
// that come in) translates its messages to NVMe commands and back. Tables are memory that several replicas share.
//
// Times are in nanoseconds of the clock of Advance, durations in nanoseconds.
//
// Source: LEED (SIGCOMM'23), section 3.7. Deviations: writes are not held up by the store of the replica before (3.7
// and its code store and forward); the commit needs all replicas to be durable, so that any of them can be the last
// copy (a ChainTail that commits alone shows readers what a crash of all may take back); dirty marks are kept until the
// outcome is known, also across views.
package crrs

// Peer names another replica of the chain, as its driver knows it.
type Peer int32

// NoPeer is no replica.
const NoPeer Peer = -1

// Role is the position of the replica in its chain, by the view of an epoch.
//
// A filling member, which is being filled with the data of the range, is downstream of the ChainTail: it is its
// Successor, and has it as its Predecessor.
type Role struct {
	// Epoch counts the changes of the chain, from 1 on: View.ChainEpochs of the range.
	Epoch uint64
	// Member: the replica serves or is being filled. Otherwise only Epoch has a meaning.
	Member bool
	// Filling: it is being filled. It stores writes that are forwarded to it, and answers no clients.
	Filling bool
	// Since identifies the membership: it differs each time that the replica begins to be filled. It is
	// view.Member.Since, an epoch of the view, and is not to be compared with Epoch.
	Since uint64
	// Predecessor and Successor are the next replicas upstream and downstream. NoPeer: it is the ChainHead, or the last
	// member.
	Predecessor, Successor Peer
	// ChainTail answers reads of dirty keys; NoPeer: that is the replica itself, or it is being filled.
	ChainTail Peer
	// Others are the other members that serve, NumOthers of them, first the ChainTail if it is among them. The replica
	// asks them for data that its store cannot read.
	Others    [MaxOthers]Peer
	NumOthers uint8
}

// MaxOthers is how many members a chain has at most besides a replica.
const MaxOthers = 5

// isOther reports whether another replica serves.
func (r *Role) isOther(p Peer) bool {
	for _, o := range r.Others[:r.NumOthers] {
		if o == p {
			return true
		}
	}
	return false
}

func (r *Role) head() bool { return r.Predecessor == NoPeer }

// last: there is nobody to forward writes to, so that the replica knows first that they are committed.
func (r *Role) last() bool { return r.Successor == NoPeer }
func (r *Role) tail() bool { return r.ChainTail == NoPeer && !r.Filling }

// alone: no other member serves.
func (r *Role) alone() bool { return r.head() && r.tail() }

// Op is the operation of a Write or of a StoreOp.
type Op uint8

// Operations.
const (
	Get Op = iota
	Put
	Delete
)

// Status is the outcome of a request.
type Status uint8

// Statuses.
const (
	// OK: the write is committed, or Value is the value.
	OK Status = iota
	// NotFound: the key does not exist.
	NotFound
	// Refused: the store has refused the write, because of its condition or for lack of room; nothing has changed.
	Refused
	// WrongView: the replica does not serve the range, or is not its ChainHead. Nothing was done.
	WrongView
	// Unavailable: the replica cannot serve now, as it has no authority, too many requests, or data that has to be
	// repaired first. Nothing was done.
	Unavailable
	// Unknown: it is not known whether the write was, or will be, done.
	Unknown
	// Unreadable: neither this replica nor another one that serves can read the value, or the data that a write depends
	// on. For a Retry it is not known whether the first try was done.
	Unreadable
	// Failing: as Unreadable, but the drive of this replica may return the value later.
	Failing
)

// Identity identifies a write by its client and the client's sequence number, so that it is done once although it is
// sent twice. It is not the seq of the chain. A zero Client is no identity.
type Identity struct{ Client, Seq uint64 }

// Key is a key of at most 16 bytes.
type Key struct {
	Bytes [16]byte
	Len   uint8
}

// Write is a client's write, at the ChainHead.
type Write struct {
	Op  Op
	Key Key
	// Value belongs to the replica until Mem is among Actions.Released.
	Value []byte
	// Mem is the driver's handle of the memory of the Value; 0: there is none.
	Mem uint32
	ID  Identity
	// Answered: the Client repeats none of its writes of the key with a lower Seq, so that the store may forget them.
	Answered uint64
	// Expires is when the object, or the tombstone of a Delete, ceases to exist, and KeepUntil until when the store
	// keeps the identity: both in unix seconds.
	Expires, KeepUntil uint32
	// Retry: the client has sent the write before. The store checks whether it was done then.
	Retry bool
	// Conditional: the store decides whether the write is done. It is forwarded after that.
	Conditional bool
	// Position is that of the key. It is needed if the store decides whether the Write is done: Conditional, or a
	// Retry.
	Position uint64
	// Payer is the driver's number of the tenant that is charged for the work of the store.
	Payer uint32
	// Tag is repeated in the Reply.
	Tag uint64
}

// Read is a client's read.
type Read struct {
	// Key may be empty: then it is not the read of a key, but one that the driver knows by the Tag, such as a list of
	// the keys of a range. It is never shipped: the answer is what this replica's store has.
	Key   Key
	Payer uint32
	// Value is memory for the value. It belongs to the replica until the Reply.
	Value []byte
	Tag   uint64
}

// Reply answers a Write or a Read.
type Reply struct {
	Tag     uint64
	Status  Status
	Version uint64
	// ValueLen is the length of the value that a Read has found. Value has as much of it as there is memory.
	ValueLen int
	// Expires is when the value that a Read has found expires; 0: never.
	Expires uint32
}

// StoreOp is an operation of the partition's store. The driver calls Stored with its outcome.
type StoreOp struct {
	// Slot is the argument of Stored, or of Fetched for a Get.
	Slot int32
	// Tag is that of the Write, if the store decides whether it is done, or of the Read. Its Reply has not been given
	// before this turn.
	Tag uint64
	Op  Op
	Key Key
	// Value is the value of a Put, or memory for that of a Get.
	Value []byte
	// Version is that of a Put or Delete. It is done only if the key has no newer one.
	Version uint64
	ID      Identity
	// Answered, Expires, KeepUntil, Retry and Conditional are those of the Write, Payer is also that of the Read.
	Answered           uint64
	Expires, KeepUntil uint32
	Retry, Conditional bool
	Payer              uint32
	// Last: no other member can read the data that a Get, or a write that the store decides, depends on. Then the store
	// uses the items of a segment that has lost keys that are sound (sound.go), as if no other member served. Without
	// Last it uses none of them while others serve, because these are asked.
	Last bool
}

// StoreStatus is the outcome of a StoreOp or a RangeOp. What becomes of a client's request then:
//
//	Done, Superseded   a write is durable here; OK when it is committed. A Get: OK
//	Absent             NotFound
//	Repeated           OK
//	Declined           Refused; Unavailable, if the authority has ended meanwhile
//	Unjudged           the write waits for a repair (unjudged.go). Unreadable, if no other member has the data;
//	                   Unavailable, if it has waited for too long
//	Failed             Unknown for a write, Unavailable for a read; the replica is damaged
//	StoreUnreadable    other members are asked. Unreadable, if none has the data; Unavailable, if one could not answer
//	StoreFailing       likewise, with Failing for Unreadable
type StoreStatus uint8

// Outcomes.
const (
	// Done: the write is durable, or the Get has found the key.
	Done StoreStatus = iota
	// Absent: a Get has not found the key. A version is returned if it is known when the key was deleted.
	Absent
	// Superseded: the store has a newer version of the key, which is durable.
	Superseded
	// Repeated: a Retry that was done before, with the version that is returned.
	Repeated
	// Declined: the store has refused the write; nothing has changed.
	Declined
	// Unjudged: the store has lost the data that the decision on the write depends on; nothing has changed.
	Unjudged
	// Failed: the store has failed. The replica serves no longer (Actions.Damaged).
	Failed
	// StoreUnreadable, of a Get or a RangeOp: the store has lost the data, or cannot read it.
	StoreUnreadable
	// StoreFailing, of a Get: the same, but the drive may return the data later.
	StoreFailing
	// GivenUp, of a RangeOp: nothing was done, because the result is not needed any more (Wants), or it would take too
	// long. Another node that has asked for it may ask again.
	GivenUp
)

// MessageKind is the kind of a Message.
type MessageKind uint8

// Kinds of messages. Between nodes, Forward, Durable, Sync, Ship, Compare and Fetch are NVMe commands; an Ack is the
// completion of a Forward or a Durable, and Answer, Sums and Batch are those of what they answer (Port).
const (
	// Forward sends a write to the Successor.
	Forward MessageKind = iota
	// Durable sends the durable mark to the Successor.
	Durable
	// Ack sends the committed mark to the Predecessor.
	Ack
	// Sync tells the Predecessor that the replica has adopted the epoch, or may have lost messages, and asks for all
	// writes that are not committed.
	Sync
	// Ship asks the ChainTail for a value.
	Ship
	// Answer answers a Ship.
	Answer
	// Compare asks the copier for digests, and Sums answers it; Fetch asks for a batch, and Batch answers it.
	Compare
	Sums
	Fetch
	Batch
)

// Message is a message between two replicas of a chain. A message that a Replica sends refers to memory of the Replica,
// which does not change before the actions of that turn are carried out. The Value of a Forward or a Batch that is
// received belongs to the Replica until its Mem is among Actions.Released, or its RangeOp comes back. The Value of a
// Ship that is received is memory for the value, until the Answer.
type Message struct {
	Kind  MessageKind
	Epoch uint64
	// Seq is the number of a Forward in the order of the epoch's writes, from 1 on; of a Durable the durable mark, of
	// an Ack the committed mark.
	Seq uint64
	// Full, of an Ack: the partition of the sender, or of a member downstream of it, is nearly full.
	Full bool
	// Mark is the durable mark of a Forward's sender.
	Mark uint64
	// Clock is a version, not a time: all writes with a version up to it have ended, and no other write will get such a
	// version. It is 0 if the sender of a Durable does not know it yet.
	Clock   uint64
	Op      Op
	Key     Key
	Value   []byte
	Mem     uint32
	Version uint64
	ID      Identity
	// Answered, Expires and KeepUntil are those of the Write, or Expires that of the value of an Answer.
	Answered           uint64
	Expires, KeepUntil uint32
	// Payer is the receiver's number of the tenant that is charged for a Forward or a Ship. The receiver's driver sets
	// it.
	Payer uint32
	// Tag, Len and Status are those of a Ship and its Answer. Tag is also that of the messages of a pass or a repair,
	// and Len the greatest length in bytes of the answer to a Fetch.
	Tag    uint64
	Len    int
	Status Status
	// Part is the part of the range that a message of a pass or a repair is about. Round is that of a Compare or a
	// Fetch: see Replica.round.
	Part  *Part
	Round uint16
}

// Send is a message to a replica.
type Send struct {
	To Peer
	Message
}

// Actions are what the driver has to do after a call. The driver empties the slices.
type Actions struct {
	// Stores may be submitted in any order. The driver must call Stored, or Fetched for a Get, exactly once for each.
	Stores []StoreOp
	// Ranges are operations on ranges, as background work. The driver must call Ranged exactly once for each.
	Ranges []RangeOp
	// Sends may be lost and reordered. When a connection is made again, the driver calls Reconnected.
	Sends []Send
	// Replies may be sent at once.
	Replies []Reply
	// Released has the Mem of values of Writes, Forwards and Batches that are not needed any more.
	Released []uint32
	// Repairs tell how repairs of data that the store could not read go on.
	Repairs []RepairEvent
	// Complete: the replica has been filled. The node must report that (Replica.Complete).
	Complete bool
	// Damaged: the store has failed. The node must report that, and the replica does nothing until it revives.
	Damaged bool
}

// Config describes a Replica.
type Config struct {
	// Window is how many writes may have a seq and not be committed, a power of two. As many more may wait for a seq.
	Window int
	// Reads is how many reads may be outstanding.
	Reads int
	// Tables have the memory for writes and reads, and bound how many requests of clients all replicas that share them
	// accept; nil: the replica has Tables of its own.
	Tables *Tables
	// Version is the greatest version that the store has of the range, or 0, because the versions of an epoch are
	// greater than all of earlier ones anyway. It must not be that of another range: the next ChainHead, which does not
	// know it, would give lower ones.
	Version uint64
	// First is the first position of the range, Bits the logarithm of their number.
	First uint64
	Bits  uint8
	// Parts is how many parts of the range may be compared or copied at once while the replica is being filled.
	Parts int
	// Leaf: a part that differs and has at most that many objects is copied, and not compared further.
	Leaf uint64
	// LockKeys: a write waits until the earlier writes of its key are committed, as if the key were locked at all
	// members. LEED does that with segments. It is slower, and exists for comparison.
	LockKeys bool
}

// The versions that a ChainHead gives in an epoch begin at firstVersion, or versionGap above the greatest that it has
// seen if that is more. Earlier ChainHeads may have given versions to writes that no other replica has seen, and that
// one of their stores still has when it is filled again: all of them must be lower. Only outstanding writes may be
// unseen, so that the gap is enough where an epoch had more writes than versions. A ChainHead that stays ChainHead
// begins anew all the same: it may have missed a view in which another one led.
//
// A store takes versions below 2^62, and an epoch has 32 bits. The first manyEpochs get epochVersions each, half of
// all, so that a chain whose members come and go for years has fewer for each, but never none.
const (
	epochVersions     = 1 << 40
	manyEpochs        = 1 << 21
	lateEpochVersions = 1 << 28
	versionGap        = 1 << 20
)

// firstVersion is where the versions of an epoch begin.
func firstVersion(epoch uint64) uint64 {
	if epoch <= manyEpochs {
		return epoch * epochVersions
	}
	return manyEpochs*epochVersions + min(epoch-manyEpochs, 1<<32)*lateEpochVersions
}
