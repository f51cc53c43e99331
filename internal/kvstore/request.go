package kvstore

import (
	"jbofd/internal/pipeline"
	"jbofd/internal/tenant"
	"jbofd/internal/units"
)

// Op is what a Request asks for.
type Op uint8

// Operations.
const (
	// Get copies the value to Request.Value, as much as fits. Reply.ValueLen is the length of the whole value.
	Get Op = iota
	// Put stores Request.Value.
	Put
	// Delete removes the key.
	Delete
	// Exist reports whether the key exists.
	Exist
	// List writes the keys from Request.Key on, including that one if it exists, to Request.Value, as an nvme.KVList of
	// as many as fit. Reply.ValueLen is its length. Without a key it starts with the first one. The order is the
	// store's own. A key that exists all the time is listed exactly once.
	List
	// Scan, CopyOut, Count and Digest write what there is to say about Request.Range to Request.Value, as an
	// nvme.KVRange, which says how far it has come: at the end of the range it is nvme.KVRange.Complete. Until then a
	// request whose Range.From and Key are its cursor To continues. Reply.ValueLen is its length. Objects that have
	// expired or were dropped, and keys that do not exist, are left out, but for tombstones.
	//
	// Where objects are lost, what comes before the loss is returned first. Then the status is Corrupt, or DeviceError
	// if they may be readable later, and the result has nvme.KVLost and a cursor To behind the loss. With these two
	// statuses the result is valid as well.
	//
	// Scan returns all objects and tombstones in order, without values. An object that exists all the time is returned
	// exactly once.
	Scan
	// CopyOut returns them with their values and identities, and keys that do not exist but have identities. If there
	// is no room for the first one, the status is InvalidValue, and Reply.ValueLen how much memory it needs.
	CopyOut
	// Count returns the number of objects and tombstones.
	Count
	// Digest returns sums over as many sub-ranges as there is room for in the Value, so that the differences between
	// two stores with the same Config.HashSeed can be found: see nvme.KVSum.
	Digest
	// CopyIn stores the objects and tombstones of Request.Value, a result of CopyOut, each IfNewer, or if the key has
	// the same version but its value cannot be read, and adds the identities to those of their keys. Value belongs to
	// the Store until the Reply. Reply.ValueLen is how many entries have changed something. If the status is not OK
	// some of them may not be stored. It may be repeated. If a Drop covers one of its entries, the status is Superseded
	// and nothing has changed, until the Drop is off the list.
	//
	// With a Request.Version it is exact up to that clock: what is in the part of the range that the Value is about,
	// and has a version of at most the clock, ceases to exist if the Value does not have it with this version. So it is
	// with the identities, by the versions that their requests have given. The
	// Value must be of a store with the same Config.HashSeed, and lack nothing that is lost; else the status is
	// InvalidValue. If something of the part was lost it is Corrupt, until the loss is accepted.
	CopyIn
	// Drop makes everything in Request.Range cease to exist that has a version of at most Request.Version; 0: of at
	// most the greatest that the store has given, which Reply.Version is. It is durable, also with Config.Volatile, and
	// takes no longer if the range has more. Space is reclaimed in the background. The status is NoMemory if the store
	// has too many Drops at the moment.
	Drop
	// Settle tells of the segment of the position Range.First: Reply.ValueLen is how many high bits of a position say
	// that it belongs to the segment. If the segment has lost keys, Reply.Version is not 0; and if it has more
	// positions than those with Range.Width such bits, it will soon be split. A Settle with that Version accepts the
	// loss: of the keys that are not known none exists. The status is Superseded, and nothing has changed, if more was
	// lost since, or if the segment has more positions than those with Range.Width such bits.
	Settle
	// Certain tells whether the outcome of each write that has failed is known: OK, or DeviceError if a restart may
	// find one done, until the next checkpoint. The store begins that by itself.
	Certain

	opMove    // copy a live value out of a chunk that is compacted
	opRewrite // write a live segment again, for the same reason
	opVerify  // report a damaged value if it is live
	opAudit   // look at a segment for an audit
	opExpire  // drop what has expired in a segment
	opSweep   // drop what a Drop has covered in a segment
	opProbe   // read a segment, to see whether the drive reads anything
	opClear   // remove what an exact CopyIn does not have from a segment
)

// Condition restricts a Put or a Delete.
type Condition uint8

// Conditions.
const (
	// Always is no condition.
	Always Condition = iota
	// IfAbsent: the key must not exist.
	IfAbsent
	// IfPresent: the key must exist. A Delete has this condition anyway.
	IfPresent
	// IfVersion: the object must have Request.Version, or not exist if that is 0. Otherwise the outcome is
	// VersionMismatch.
	IfVersion
	// IfNewer: Request.Version, 1 to MaxVersion, is the version that the object is to have, and it must be newer than
	// that which the object has, or its tombstone. Otherwise the outcome is Superseded. With this condition copies of a
	// store take the changes that it has made, in any order and any number of times. A Delete with a Tombstone leaves
	// that also if the key does not exist. Where it was lost what the key has, the request counts as newer: copies are
	// how that comes back.
	IfNewer
)

// Bounds of versions, so that no request leaves the store without versions of its own to give.
const (
	// MaxVersion is the greatest version that a request IfNewer may give to an object, and the greatest clock of a
	// Drop, unless the store has given greater ones.
	MaxVersion = 1<<62 - 1
	// MaxCopied is the same for CopyIn. It is greater so that copies have room for what a store has given beyond
	// MaxVersion.
	MaxCopied = 3<<61 - 1
	// maxOwn is the greatest version of all. A Put or Delete that would need a greater one ends with CapacityExceeded.
	maxOwn = 1<<63 - 1
)

// Status is the outcome of a request.
type Status uint8

// Statuses.
const (
	// OK: the request is done. What it wrote is durable.
	OK Status = iota
	// NotFound: the key does not exist.
	NotFound
	// Exists: the key exists and the Put was IfAbsent.
	Exists
	// CapacityExceeded: there is no space for the value, or no version is left. Nothing has changed.
	CapacityExceeded
	// DeviceError: an I/O failed. The outcome of a write that ends so is indeterminate: a restart may find it done or
	// not.
	DeviceError
	// Corrupt: a record that is needed is damaged.
	Corrupt
	// InvalidKey: the key is empty or longer than format.MaxKey.
	InvalidKey
	// InvalidValue: the value is longer than Store.MaxValueBytes, the memory of a List is shorter than 4 bytes, or a
	// version or clock is too great.
	InvalidValue
	// Aborted: the request was not begun, because the right of its sender had ended; a partition answers so in place of
	// the store. A CopyIn that was ended early has begun.
	Aborted
	// NoMemory: a segment has grown beyond its buffer and there is no memory for a longer one. Nothing has changed, and
	// the request may be tried again.
	NoMemory
	// VersionMismatch: the object does not have the version that a request IfVersion has named. Reply.Version is the
	// one that it has, 0 if the key does not exist. Nothing has changed.
	VersionMismatch
	// Superseded: a request IfNewer, or with a version that was Given, was not newer than the object or its tombstone,
	// whose version Reply.Version is. The object has not changed.
	Superseded
	// Indeterminate: a request is a Retry, and its identity was not found but may have been dropped. So it is not known
	// whether the first try has changed the object. Nothing has changed now.
	Indeterminate
)

// Identity names a Put or Delete, so that the store recognizes a repetition of it, also after a crash.
type Identity struct {
	// Client and Seq are chosen by the client: no two requests have both in common. Client 0: the request has no
	// identity.
	Client, Seq uint64
	// KeepUntil is how long the store remembers the request, in unix seconds; 0: until newer ones take its place. It
	// remembers the last 64 that have changed a key.
	KeepUntil uint32
	// Answered: no Retry of a request of this Client to this key comes any more whose Seq is smaller. The store forgets
	// those when it remembers this one. It is at most Seq; 0: nothing is said.
	Answered uint64
	// Retry: the request may have been made before.
	Retry bool
}

// Request is one command. Submit copies it.
type Request struct {
	Op        Op
	Condition Condition
	// Tag is repeated in the Reply.
	Tag uint64
	Key []byte
	// Value is the value of a Put, which Submit copies, or memory for the result of a Get or List, which belongs to the
	// Store until the Reply.
	Value []byte
	// Room, if set, is called when a Get has found that its value is longer than Value. It returns memory for as much
	// of the value as is wanted. If it returns nil the Request ends with OK and without the value.
	Room func(length int) []byte
	// Tenant pays for the I/Os. Background: those of a request for a range are paid for by the store's background work.
	Tenant     tenant.ID
	Background bool
	// Range is that of a Scan, CopyOut, Count, Digest or Drop. Key is then the key behind which to begin at the
	// position Range.From, or empty.
	Range Range
	// Version belongs to the Condition.
	Version uint64
	// Given, if it is not 0, is the version that a Put or Delete takes, 1 to MaxVersion. It is for whoever gives the
	// versions of several stores that are to have the same. Without a Condition everything is decided: the request is
	// done if the key has no version at least as high, and if it has one, the outcome is Superseded, and the key gets
	// the ID nevertheless, whose version is the one Given. So stores that take the same requests in any order, and some
	// of them twice, end with the same objects and identities. With another Condition than Always, or a Retry, the
	// store decides: the outcome is Superseded, and nothing has changed, if the condition holds, but the key has a
	// version at least as high. The ID is looked for only if it is a Retry. A Delete without a Condition leaves its
	// Tombstone also if the key does not exist. IfNewer is no Condition of such a request.
	Given uint64
	// Sound: a Get, Put or Delete ends with Corrupt, and nothing has changed, if the key's segment has lost keys and
	// does not have this one with a greater version. With 0 whatever is known of a key counts. But where writes come in
	// another order than that of their versions, as with Given, the newest one may be lost, and an older one known that
	// came later.
	Sound uint64
	// Restore: a CopyIn also stores objects of keys that do not exist but had a newer version of which identities are
	// left, with a new version. Tombstones count nevertheless.
	Restore bool
	// AheadSeconds: a CopyIn adds so many seconds to the times until which its batch keeps identities and tombstones.
	// That is by how much the time of day of this store is ahead of that of the source, so that they are kept here for
	// as long as there.
	AheadSeconds int64
	// Expires is when the object that a Put stores does not exist any more, in unix seconds; 0: never. For a Delete
	// with a Tombstone it is when that may be dropped; 0: never.
	Expires uint32
	// Tombstone: the Delete leaves a tombstone with its version.
	Tombstone bool
	// ID is the identity of a Put or Delete. If the store remembers a request with this identity that has changed the
	// key, it changes nothing and replies as it did then. In a full partition that of a Delete is not remembered.
	ID Identity
}

// Reply is the answer to a Request. What the Request has written is durable when the Reply is given, so that the driver
// may pass it on at once.
type Reply struct {
	Tag      uint64
	Status   Status
	ValueLen int
	// Version is the version of the object that a Get or Exist has found or a Put has stored, or of the Delete; with
	// Exists, VersionMismatch and Superseded that of the object that is there. It is 0 if there is none. Versions are
	// given by one counter for the whole store: no version is ever given twice, and those of a key ascend, also when
	// it is deleted and stored again. What was stored with an older format of the partition has version 1.
	Version uint64
	// Expires is when the object that a Get or Exist has found expires, in unix seconds; 0: never.
	Expires uint32
}

// IO is a request to the device. Offset is in the partition. Offset and length are whole blocks.
type IO struct {
	// Op is pipeline.Read, Write or Flush.
	Op pipeline.Op
	// FUA: the write must not complete before it is durable. A driver that completes it earlier breaks the promise of
	// OK.
	FUA bool
	// Background: the I/O is for compaction, a checkpoint, the scrub or recovery.
	Background bool
	// Tenant pays for the I/O. A read for a Request is paid for by its tenant. A group of records of several tenants is
	// paid for by the tenant of the first one: in the long run a tenant is first as often as it has records.
	Tenant tenant.ID
	Offset units.ExtentOffset
	// Buf belongs to the device until Complete. The driver must not keep it longer.
	Buf []byte
	// Tag is for Complete.
	Tag uint32
}

// Actions are what a Turn wants done. The driver keeps the value and empties the slices.
type Actions struct {
	// IOs must all be submitted, in any order, and each must be completed exactly once. The store does not ask for an
	// I/O before those that it depends on have completed: it is the FUA writes and flushes in here that make Replies of
	// later Turns true.
	IOs []IO
	// Replies may be passed on at once, before the IOs of the same Turn are submitted.
	Replies []Reply
	// Damage are live records that were found damaged.
	Damage []Damage
	// WakeNS is when Turn must be called at the latest, even if nothing happens before; 0: never.
	WakeNS int64
}
