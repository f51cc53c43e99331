// Package kvop is the state machine of one operation on a key value namespace: which commands it takes, and what their
// outcomes mean. It is pure. Its drivers are kv.Namespace, for one operation at a time, and kv.OpQueue, for many.
//
//	Start ──> Cmd ──> (the target) ──> Step ──┬──> Cmd again
//	                                          └──> done: Status, Err, Size
//
// With keys of up to 16 bytes each operation is one command. With long keys the target's key is a hash of the key, and
// the key itself is stored in front of the value. Operations compare it where it matters whose value is stored:
//
//	Get           Retrieve
//	Exists        Retrieve of the key
//	Put           Store, must not exist; if something exists: Retrieve of the key, Store, must exist
//	PutIfAbsent   Store, must not exist; if something exists: Retrieve of the key
//	PutIfPresent  Retrieve of the key; Store, must exist
//	Delete        Retrieve of the key; Delete
//
// Between two commands another host may delete the key and put another key with the same hash. That takes two keys with
// the same hash; the second command then applies to the other key.
package kvop

import (
	"fmt"
	"slices"

	"jbofd/client/internal/host"
	"jbofd/internal/nvme"
)

// Kind is the kind of an operation.
type Kind uint8

// Kinds of operations.
const (
	Get Kind = iota
	Put
	PutIfAbsent
	PutIfPresent
	Delete
	Exists
	kinds
)

// String returns the name of the operation in package kv.
func (k Kind) String() string {
	if k >= kinds {
		return fmt.Sprintf("Kind(%d)", uint8(k))
	}
	return [...]string{"Get", "Put", "PutIfAbsent", "PutIfPresent", "Delete", "Exists"}[k]
}

// Space describes the namespace of an operation.
type Space struct {
	NSID uint32
	// MaxKey and MaxValue are the longest key and value of the namespace, MaxTransfer is the most data of one command,
	// all in bytes.
	MaxKey, MaxValue, MaxTransfer int
	// Hash, if set, hashes all keys: they are long keys.
	Hash func(key []byte) [nvme.MaxKVKey]byte
	// Counted: Completion.Received is the number of bytes that were received, as over TCP and not over RDMA.
	Counted bool
}

// MaxKeyLen returns the length of the longest key of an operation.
func (s *Space) MaxKeyLen() int {
	if s.Hash != nil {
		return MaxLongKey
	}
	return s.MaxKey
}

// Limit returns the most bytes that one value may have, a long key in front of it included, and the name of that limit.
func (s *Space) Limit() (n int, by string) {
	if s.MaxTransfer < s.MaxValue {
		return s.MaxTransfer, "the transfer limit of a command (MDTS)"
	}
	return s.MaxValue, "the value limit of the namespace (KVVML)"
}

type step uint8

const (
	stepOnly     step = iota // the only command
	stepIfAbsent             // Store, must not exist
	stepLookUp               // Retrieve of the key
	stepReplace              // Store, must exist
	stepGet                  // Retrieve of key and value
	stepDelete
)

// maxRestarts bounds how often a Put finds that its key exists and then that it does not. Other hosts may cause that,
// or a target with a defect.
const maxRestarts = 100

var errRestarts = fmt.Errorf("%w: a Store and a Retrieve contradict each other %d times on whether the key exists",
	host.ErrProtocol, maxRestarts)

// Op is one operation. It may be reused, and keeps its buffer for that. One goroutine at a time may call its methods.
type Op struct {
	// Cmd is the next command. Its data belongs to the queue pair until the completion.
	Cmd host.Command

	// When Step has returned true, Status is the outcome. If Status is Success, Err may be set, and the operation has
	// failed nevertheless. Size is the size of the whole value after a Get.
	Status nvme.Status
	Err    error
	Size   int

	kind     Kind
	step     step
	restarts uint8
	dev      [nvme.MaxKVKey]byte // hash of a long key
	own      int                 // header and key of a long key are buf[:own]
	val      int                 // the value to store is buf[own:own+val]
	dst      []byte              // the caller's buffer of a Get
	buf      []byte
}

// Forget drops the references to the caller's buffers.
func (o *Op) Forget() { o.Cmd.Data, o.dst = nil, nil }

// Kind returns the kind that was passed to Start.
func (o *Op) Kind() Kind { return o.kind }

// Start begins an operation; Cmd is its first command. value is the value to store, or the buffer of a Get. key is
// copied, and so is the value to store if keys are long.
//
// Errors: host.ErrInvalid, ErrValueTooLarge.
//
// Cost: 0 allocs, once buffers for long keys have grown.
func (o *Op) Start(s *Space, kind Kind, key, value []byte) error { // hot: 0 allocs
	o.kind, o.step, o.restarts, o.dst = kind, stepOnly, 0, nil
	o.Status, o.Err, o.Size = 0, nil, 0
	if n := len(key); n == 0 || n > s.MaxKeyLen() || kind >= kinds {
		return fmt.Errorf("%w: %s with a key of %d bytes: must be 1 to %d", host.ErrInvalid, kind, n, s.MaxKeyLen())
	}
	total := 0 // bytes that one command must be able to transfer
	if kind == Put || kind == PutIfAbsent || kind == PutIfPresent {
		total = len(value)
	}
	if s.Hash != nil {
		total += LongBytes(len(key))
	}
	if limit, by := s.Limit(); total > limit {
		return fmt.Errorf("%w: %s of %d bytes (%d of key and value): %s is %d", host.ErrValueTooLarge, kind, total,
			len(key)+len(value), by, limit)
	}
	if s.Hash != nil {
		o.startLong(s, kind, key, value)
		return nil
	}
	switch kind {
	case Get:
		o.dst = value
		SetRetrieve(&o.Cmd, s.NSID, key, value[:min(len(value), s.MaxTransfer)])
	case Put:
		SetStore(&o.Cmd, s.NSID, key, value, 0)
	case PutIfAbsent:
		SetStore(&o.Cmd, s.NSID, key, value, nvme.KVStoreMustNotExist)
	case PutIfPresent:
		SetStore(&o.Cmd, s.NSID, key, value, nvme.KVStoreMustExist)
	case Delete:
		SetDelete(&o.Cmd, s.NSID, key)
	case Exists:
		SetExist(&o.Cmd, s.NSID, key)
	}
	return nil
}

// startLong lays out the buffer of an operation with a long key:
//
//	header and key | value to store, or header, key and value that a Get reads | header and key that a look reads
func (o *Op) startLong(s *Space, kind Kind, key, value []byte) { // hot: 0 allocs
	o.dev = s.Hash(key)
	o.own, o.val = LongBytes(len(key)), 0
	need := 2 * o.own
	switch kind {
	case Get:
		need = min(need+len(value), o.own+s.MaxTransfer)
		o.dst = value
	case Put, PutIfAbsent, PutIfPresent:
		o.val = len(value)
		need += len(value)
	}
	o.buf = appendLong(slices.Grow(o.buf[:0], need), key)
	if o.val > 0 {
		o.buf = append(o.buf, value...)
	}
	o.buf = o.buf[:need]
	switch kind {
	case Get:
		o.step = stepGet
		SetRetrieve(&o.Cmd, s.NSID, o.dev[:], o.buf[o.own:])
	case Put, PutIfAbsent:
		o.storeIfAbsent(s)
	default:
		o.lookUp(s)
	}
}

func (o *Op) storeIfAbsent(s *Space) { // hot: 0 allocs
	o.step = stepIfAbsent
	SetStore(&o.Cmd, s.NSID, o.dev[:], o.buf[:o.own+o.val], nvme.KVStoreMustNotExist)
}

func (o *Op) lookUp(s *Space) { // hot: 0 allocs
	o.step = stepLookUp
	SetRetrieve(&o.Cmd, s.NSID, o.dev[:], o.buf[o.own+o.val:])
}

// MayRepeat reports whether Cmd may be carried out twice without changing what the operation means. A conditional Store
// may not: the second one would find what the first one has stored, or what another host has done since, and its
// status would say nothing about the first.
func (o *Op) MayRepeat() bool {
	return o.kind != PutIfAbsent && o.kind != PutIfPresent || o.step == stepLookUp
}

// Step processes the outcome of Cmd. It returns true if the operation is done; otherwise Cmd is the next command.
//
// Cost: 0 allocs.
func (o *Op) Step(s *Space, c *host.Completion) (done bool) { // hot: 0 allocs
	st := c.Status.Code()
	o.Status = c.Status
	if st == nvme.Success {
		o.Status = nvme.Success // without the bits for More and the retry delay
	}
	switch o.step {
	case stepOnly:
		if o.kind == Get && st == nvme.Success {
			o.Size, o.Err = size(s, c, len(o.Cmd.Data))
			o.checkRoom(len(o.Cmd.Data))
		}
	case stepIfAbsent:
		if st == nvme.KeyExists {
			o.lookUp(s)
			return false
		}
	case stepLookUp:
		if st == nvme.Success {
			return o.found(s, c)
		}
		if st == nvme.KeyDoesNotExist && (o.kind == Put || o.kind == PutIfAbsent) {
			return o.restart(s)
		}
	case stepReplace:
		if st == nvme.KeyDoesNotExist && o.kind == Put {
			return o.restart(s)
		}
	case stepGet:
		if st == nvme.Success {
			o.got(s, c)
		}
	}
	if o.kind == Delete && st == nvme.KeyDoesNotExist {
		o.Status = nvme.Success // as a target answers by default, unless KVErrorOnDelete is set
	}
	return true
}

// restart restarts a Put whose key was deleted between two of its commands.
func (o *Op) restart(s *Space) (done bool) { // hot: 0 allocs
	if o.restarts++; o.restarts == maxRestarts {
		o.Err = errRestarts
		return true
	}
	o.storeIfAbsent(s)
	return false
}

// found processes the result of a look that has found a value: it may be that of another key.
func (o *Op) found(s *Space, c *host.Completion) (done bool) { // hot: 0 allocs
	n, err := size(s, c, len(o.Cmd.Data))
	if err != nil {
		o.Err = err
		return true
	}
	mine, foreign := valueOwner(o.Cmd.Data[:min(n, len(o.Cmd.Data))], o.buf[:o.own])
	switch {
	case foreign:
		o.Err = host.ErrForeignValue
	case !mine && (o.kind == Put || o.kind == PutIfAbsent):
		o.Err = host.ErrKeyCollision
	case !mine:
		o.Status = nvme.KeyDoesNotExist
		if o.kind == Delete {
			o.Status = nvme.Success
		}
	case o.kind == PutIfAbsent:
		o.Status = nvme.KeyExists
	case o.kind == Put, o.kind == PutIfPresent:
		o.step = stepReplace
		SetStore(&o.Cmd, s.NSID, o.dev[:], o.buf[:o.own+o.val], nvme.KVStoreMustExist)
		return false
	case o.kind == Delete:
		o.step = stepDelete
		SetDelete(&o.Cmd, s.NSID, o.dev[:])
		return false
	}
	return true
}

// got extracts the value from what a Get with a long key has read.
func (o *Op) got(s *Space, c *host.Completion) { // hot: 0 allocs
	n, err := size(s, c, len(o.Cmd.Data))
	if err != nil {
		o.Err = err
		return
	}
	b := o.Cmd.Data[:min(n, len(o.Cmd.Data))]
	mine, foreign := valueOwner(b, o.buf[:o.own])
	switch {
	case foreign:
		o.Err = host.ErrForeignValue
	case !mine:
		o.Status = nvme.KeyDoesNotExist
	default:
		o.Size = n - o.own
		copy(o.dst, b[o.own:])
		o.checkRoom(len(o.Cmd.Data) - o.own)
	}
}

// checkRoom fails a Get if the value is longer than room, the most that one command can read, and the caller's buffer
// is, too.
func (o *Op) checkRoom(room int) { // hot: 0 allocs
	if o.Err == nil && room < min(o.Size, len(o.dst)) {
		o.Err = fmt.Errorf("%w: %d bytes, of which one command transfers %d (MDTS)", host.ErrValueTooLarge, o.Size,
			room)
	}
}

// size returns the size of the value that a Retrieve with a buffer of room bytes has found.
//
// Errors: ErrProtocol if it contradicts the number of bytes that were received.
func size(s *Space, c *host.Completion, room int) (int, error) { // hot: 0 allocs
	n := uint64(uint32(c.Result))
	if s.Counted && uint64(c.Received) != min(n, uint64(room)) {
		return 0, fmt.Errorf("%w: Retrieve of %d bytes: received %d of a value of %d", host.ErrProtocol, room,
			c.Received, n)
	}
	return int(n), nil
}
