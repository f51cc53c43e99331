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
// A write gets its version and its place in the order (seq) at the ChainHead. Every replica stores it and passes it on
// at once. So the stores work in parallel, and many writes are under way, also of one key; there is no lock across the
// chain. The key is dirty from then on.
//
// The ChainTail commits a write when it is durable at every replica, in the order of seq. It knows that from the
// durable mark that comes down the chain: all writes up to it are durable at the sender and before it. The mark is part
// of each Forward; it goes alone only if there is nothing to forward. Acks go up the chain with the committed mark,
// clear the dirty marks, and let the ChainHead answer. A member that is filled is behind the ChainTail: then it is the
// one that commits first (fill.go).
//
// Everything depends on the epoch of the chain, which counts the changes of this chain alone: View.Versions of the
// range, not the epoch of the view. Messages of another epoch are ignored. When the epoch changes, every write that is
// not committed is forwarded again under the new one. The replica before holds all that the one behind it holds, so
// that nothing is lost but what no client was told of.
//
// A replica answers reads only while it has authority, which is a lease that the manager extends. It ends before the
// manager can make a view without the replica. A replica looks at the clock after it has fetched the value, because its
// process may be paused between the two.
//
// A ChainHead yields its place to another member when it has no writes under way (yield.go). So a node that was away,
// and is the ChainTail of its ranges since, leads its share of them again.
//
// In this package, before and behind are directions of the chain: the ChainHead is before all, and a filling member is
// behind all. Replica is the machine itself: what a view changes and the marks are in replica.go, writes in write.go,
// reads in read.go, filling in fill.go. Port (port.go, and portserve.go for what comes in) is around it, and makes NVMe
// commands of its messages. Tables are memory that several of them share.
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

// Role is the place of the replica in its chain, by the view of an epoch.
//
// A member that is filled is behind the ChainTail: it is its Successor, and has it as its Predecessor.
type Role struct {
	// Epoch counts the changes of the chain, from 1 on: View.Versions of the range.
	Epoch uint64
	// Member: the replica serves or is filled. Otherwise only Epoch has a meaning.
	Member bool
	// Filling: it is filled. It takes writes, and serves nothing.
	Filling bool
	// Since identifies the membership: it differs each time that the replica is filled. It is view.Member.Since, an
	// epoch of the view, and is not to be compared with Epoch.
	Since uint64
	// Predecessor and Successor are the replicas before and behind it, NoPeer at the ChainHead and the ChainTail.
	Predecessor, Successor Peer
	// ChainTail answers reads of dirty keys; NoPeer: the replica itself, or it is filled.
	ChainTail Peer
	// Others are the other members that serve, NumOthers of them, first the ChainTail if that is among them. They are
	// asked for what the store cannot read.
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

// Op is what a Write does, or what the store is asked for.
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
	// Refused: the store has refused the write, for its condition or for lack of room; nothing has changed.
	Refused
	// WrongView: the replica does not serve the range, or another one is its ChainHead. Nothing was done.
	WrongView
	// Unavailable: the replica cannot serve now: it has no authority, or too many requests. Nothing was done.
	Unavailable
	// Unknown: it is not known whether the write was, or will be, done.
	Unknown
	// Unreadable: neither this replica nor another one that serves can read the value, or what a write depends on. Of a
	// Retry it is not known whether the first try was done.
	Unreadable
	// Failing: as Unreadable, but the drive of this replica may return the value later.
	Failing
)

// Identity names a write, so that it is done once although it is sent twice. A zero Client is no identity.
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
	// Mem is the driver's name of the memory of the Value; 0: there is none.
	Mem uint32
	ID  Identity
	// Expires is when the object, or the tombstone of a Delete, ceases to exist, and KeepUntil until when the identity
	// is kept, for the store.
	Expires, KeepUntil uint32
	// Retry: the client has sent the write before. The store looks whether it has done it.
	Retry bool
	// Conditional: the store decides whether the write is done. It is passed on when that is known.
	Conditional bool
	// Position is that of the key. It is needed of a Write of which the store decides: Conditional, or a Retry.
	Position uint64
	// Payer is the driver's number for who pays for what the store does.
	Payer uint32
	// Tag is repeated in the Reply.
	Tag uint64
}

// Read is a client's read.
type Read struct {
	// Key may be empty: then it is no read of a key, but of what the driver knows by the Tag, such as a list of the
	// keys of a range. It is never shipped: the answer is what this replica's store has.
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
	// Slot is for Stored, or of a Get for Fetched.
	Slot int32
	// Tag is that of the Write of which the store decides, or of the Read. Its Reply has not been given before this
	// turn.
	Tag uint64
	Op  Op
	Key Key
	// Value is the value of a Put, or memory for that of a Get.
	Value []byte
	// Version is that of a Put or Delete. It is done only if the key has no newer one.
	Version uint64
	ID      Identity
	// Expires, KeepUntil, Retry and Conditional are those of the Write, Payer is also that of the Read.
	Expires, KeepUntil uint32
	Retry, Conditional bool
	Payer              uint32
	// Last: no other member can read what a Get, or a write of which the store decides, depends on. What the store has
	// in a segment that has lost keys counts if it is Sound, as if no other member served. Otherwise it does not count,
	// because others are asked.
	Last bool
}

// StoreStatus is the outcome of a StoreOp.
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
	// Unjudged: the store has lost what the decision on the write depends on; nothing has changed.
	Unjudged
	// Failed: the store has failed. The replica serves no longer (Actions.Damaged).
	Failed
	// StoreUnreadable is of a Get, or a RangeOp: the store has lost something, or cannot read it. Others are asked.
	StoreUnreadable
	// StoreFailing is of a Get: the same, but the drive may return it later.
	StoreFailing
	// GivenUp is of a RangeOp: nothing was done, because nobody needs it any more (Wants), or it would take too long.
	// Another node that has asked for it may ask again.
	GivenUp
)

// MessageKind is the kind of a Message.
type MessageKind uint8

// Kinds of messages. Between nodes, Forward, Durable, Sync, Ship, Compare and Fetch are NVMe commands; an Ack is the
// completion of a Forward or a Durable, and Answer, Sums and Batch are those of what they answer (Port).
const (
	// Forward passes a write on to the Successor.
	Forward MessageKind = iota
	// Durable tells the Successor the durable mark.
	Durable
	// Ack tells the Predecessor the committed mark.
	Ack
	// Sync tells the Predecessor that the replica has adopted the epoch, or has lost messages, and wants all writes
	// that are not committed.
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

// Message is a message between two replicas of a chain. What a Replica sends refers to memory of its own, which does
// not change before the turn that returned it is carried out. The Value of a Forward or a Batch that is received
// belongs to the Replica until its Mem is among Actions.Released, or its RangeOp comes back. The Value of a Ship that
// is received is memory for the value, until the Answer.
type Message struct {
	Kind  MessageKind
	Epoch uint64
	// Seq is the place of a Forward in the order of the epoch's writes, from 1 on; of a Durable the durable mark, of an
	// Ack the committed mark.
	Seq uint64
	// Full, of an Ack: the partition of the sender, or of a member behind it, is nearly full.
	Full bool
	// Mark is the durable mark of a Forward's sender.
	Mark uint64
	// Clock: all writes with a version up to it have ended, and no other one will get such a version. It is 0 if the
	// sender of a Durable does not know it.
	Clock   uint64
	Op      Op
	Key     Key
	Value   []byte
	Mem     uint32
	Version uint64
	ID      Identity
	// Expires and KeepUntil are those of the Write, or Expires that of the value of an Answer.
	Expires, KeepUntil uint32
	// Payer is who pays for what a Forward or a Ship does at the receiver. The receiver's driver sets it.
	Payer uint32
	// Tag, Len and Status are those of a Ship and its Answer. Tag is also that of the messages of a pass, and Len how
	// long the answer to a Fetch may be.
	Tag    uint64
	Len    int
	Status Status
	// Part is what the messages of a pass are about. Round is that of a Compare or a Fetch: see Replica.round.
	Part  *Part
	Round uint16
}

// Send is a message to a replica.
type Send struct {
	To Peer
	Message
}

// Actions are what is to be done after a call. The driver empties the slices.
type Actions struct {
	// Stores may be submitted in any order, and each must be answered by Stored exactly once.
	Stores []StoreOp
	// Ranges are operations on ranges, as background work. Each must be answered by Ranged exactly once.
	Ranges []RangeOp
	// Sends may be lost and come in another order. When a connection is made again, the driver calls Reconnected.
	Sends []Send
	// Replies may be passed on at once.
	Replies []Reply
	// Released names the memory of values of Writes, Forwards and Batches that are not needed any more: Mem.
	Released []uint32
	// Repairs are what has become of things that the store could not read.
	Repairs []RepairEvent
	// Complete: the replica has been filled. The node must report that (Replica.Complete).
	Complete bool
	// Damaged: the store has failed. The node must report that, and the replica does nothing until it revives.
	Damaged bool
}

// Config describes a Replica.
type Config struct {
	// Window is how many writes may have a place in the order and not be committed, a power of two. As many more may
	// wait for a place.
	Window int
	// Reads is how many reads may be under way.
	Reads int
	// Tables have the memory for them, and bound what all replicas that share them take of clients; nil: some of its
	// own, which bound nothing else.
	Tables *Tables
	// Version is the greatest version that the store has of the range, or 0, because those of an epoch are greater
	// than all of earlier ones anyway. It is not one of another range: the next ChainHead, which does not know it,
	// would give lower ones.
	Version uint64
	// First is the first position of the range, Bits the logarithm of their number.
	First uint64
	Bits  uint8
	// Parts is how many parts of the range may be compared or copied at once while the replica is filled.
	Parts int
	// Leaf is how many objects a part has at most that is copied when it differs, and not compared further.
	Leaf uint64
	// LockKeys: a write waits until those of its key before it are committed, as if the key were locked at all members,
	// which LEED does with segments. It is slower, and there to be compared with.
	LockKeys bool
}

// The versions that a ChainHead gives in an epoch begin at firstVersion, or at a distance of versionGap from those that
// it has seen if that is more. ChainHeads before it may have given versions to writes that no other replica has seen,
// and that one of their stores still has when it is filled: all of them must be lower. Only what is under way may be
// unseen, so that the gap is enough where an epoch had more writes than versions. A ChainHead that stays one begins
// anew all the same: it may have missed a view in which another one led.
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
