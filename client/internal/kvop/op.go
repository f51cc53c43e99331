// Package kvop is one operation on a key value namespace as a machine: which commands it
// takes, and what their outcomes mean. Those who run it, one at a time or many at once, are
// kv.Namespace and kv.Queue.
//
//	Start ──> Cmd ──> (the target) ──> Step ──┬──> Cmd again
//	                                          └──> done: Status, Err, Size
//
// With keys of up to 16 bytes each operation is one command. With long keys the device's key is a
// hash of the key, the key itself stands in front of the value, and an operation looks at it first
// where it matters whose value is there:
//
//	Get           Retrieve
//	Exists        Retrieve of the key
//	Put           Store, must not exist; if something exists: Retrieve of the key, Store, must exist
//	PutIfAbsent   Store, must not exist; if something exists: Retrieve of the key
//	PutIfPresent  Retrieve of the key; Store, must exist
//	Delete        Retrieve of the key; Delete
//
// Between two commands another host may have deleted the key and put one of the same hash. That takes two
// keys of one hash, and then it is one in which of them the second command finds.
package kvop

import (
	"fmt"
	"slices"

	"jbofd/client/internal/host"
	"jbofd/internal/nvme"
)

// Kind is what to do.
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

// String is the operation's name in package kv.
func (k Kind) String() string {
	if k >= kinds {
		return fmt.Sprintf("Kind(%d)", uint8(k))
	}
	return [...]string{"Get", "Put", "PutIfAbsent", "PutIfPresent", "Delete", "Exists"}[k]
}

// Space is what an operation must know of its namespace.
type Space struct {
	NSID uint32
	// MaxKey and MaxValue are the longest key and value that the namespace takes, and
	// MaxTransfer what one command moves, in bytes.
	MaxKey, MaxValue, MaxTransfer int
	// Hash, if set, makes all keys long ones.
	Hash func(key []byte) [nvme.MaxKVKey]byte
	// Counted: a completion says truly how many bytes came (Received), which RDMA does
	// not know.
	Counted bool
}

// MaxKeyLen is the longest key that an operation takes.
func (s *Space) MaxKeyLen() int {
	if s.Hash != nil {
		return MaxLongKey
	}
	return s.MaxKey
}

// Limit is the most bytes that one value may have on its way, key in front included, and what sets it.
func (s *Space) Limit() (n int, by string) {
	if s.MaxTransfer < s.MaxValue {
		return s.MaxTransfer, "the transfer limit of a command (MDTS)"
	}
	return s.MaxValue, "the value limit of the namespace (KVVML)"
}

type step uint8

const (
	stepOnly     step = iota // the one and only command
	stepIfAbsent             // Store, must not exist
	stepLook                 // Retrieve of the key
	stepReplace              // Store, must exist
	stepGet                  // Retrieve of key and value
	stepDelete
)

// maxTurns bounds how often a Put finds that its key exists and then that it does not, which
// other hosts may cause, or a target that is not of one mind.
const maxTurns = 100

var errTurns = fmt.Errorf("%w: the key exists and does not, again and again", host.ErrProtocol)

// Op is one operation. It may be used again and again, and keeps its buffer for that. It has one
// user at a time.
type Op struct {
	// Cmd is the command to run next. Its data belongs to the target until the completion.
	Cmd host.Command

	// When Step says that the operation is done: Status is its outcome; with a good one, Err may
	// tell why it has failed nevertheless. Size is that of the whole value after a Get.
	Status nvme.Status
	Err    error
	Size   int

	kind  Kind
	step  step
	turns uint8
	dev   [nvme.MaxKVKey]byte // the device's key, of a long one
	own   int                 // header and key of a long key are buf[:own]
	val   int                 // the value to store is buf[own:own+val]
	dst   []byte              // where a Get's value is to go
	buf   []byte
}

// Forget drops what the operation refers to of its user's.
func (o *Op) Forget() { o.Cmd.Data, o.dst = nil, nil }

// Kind is what Start was told.
func (o *Op) Kind() Kind { return o.kind }

// Start begins an operation; Cmd is its first command. value is what to store, or where a
// Get's value goes. key and, with long keys, a value to store are the caller's again.
//
// Errors: host.ErrInvalid, ErrValueTooLarge.
//
// Cost: 0 allocs, once buffers for long keys have grown.
func (o *Op) Start(s *Space, kind Kind, key, value []byte) error { // hot: 0 allocs
	o.kind, o.step, o.turns, o.dst = kind, stepOnly, 0, nil
	o.Status, o.Err, o.Size = 0, nil, 0
	if n := len(key); n == 0 || n > s.MaxKeyLen() || kind >= kinds {
		return fmt.Errorf("%w: %s with a key of %d bytes: must be 1 to %d", host.ErrInvalid, kind, n, s.MaxKeyLen())
	}
	total := 0 // bytes that one command must be able to move
	if kind == Put || kind == PutIfAbsent || kind == PutIfPresent {
		total = len(value)
	}
	if s.Hash != nil {
		total += LongBytes(len(key))
	}
	if limit, by := s.Limit(); total > limit {
		return fmt.Errorf("%w: %s of %d bytes (%d of key and value): %s is %d", host.ErrValueTooLarge, kind, total, len(key)+len(value), by, limit)
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

// startLong lays out the buffer:
//
//	header and key | value to store, or a Get's header, key and value | header and key of another
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
		o.look(s)
	}
}

func (o *Op) storeIfAbsent(s *Space) { // hot: 0 allocs
	o.step = stepIfAbsent
	SetStore(&o.Cmd, s.NSID, o.dev[:], o.buf[:o.own+o.val], nvme.KVStoreMustNotExist)
}

func (o *Op) look(s *Space) { // hot: 0 allocs
	o.step = stepLook
	SetRetrieve(&o.Cmd, s.NSID, o.dev[:], o.buf[o.own+o.val:])
}

// MayRepeat reports whether Cmd may be carried out twice: all but a PutIfAbsent, which would find what it
// has put itself.
func (o *Op) MayRepeat() bool {
	return o.kind != PutIfAbsent || o.step == stepLook
}

// Step takes the outcome of Cmd. If it returns false, Cmd is the next command to run.
//
// Cost: 0 allocs.
func (o *Op) Step(s *Space, c *host.Completion) (done bool) { // hot: 0 allocs
	st := c.Status.Code()
	o.Status = c.Status
	if st == nvme.Success {
		o.Status = nvme.Success // More and the retry delay mean nothing then
	}
	switch o.step {
	case stepOnly:
		if o.kind == Get && st == nvme.Success {
			o.Size, o.Err = size(s, c, len(o.Cmd.Data))
			o.whole(len(o.Cmd.Data))
		}
	case stepIfAbsent:
		if st == nvme.KeyExists {
			o.look(s)
			return false
		}
	case stepLook:
		if st == nvme.Success {
			return o.found(s, c)
		}
		if st == nvme.KeyDoesNotExist && (o.kind == Put || o.kind == PutIfAbsent) {
			return o.again(s)
		}
	case stepReplace:
		if st == nvme.KeyDoesNotExist && o.kind == Put {
			return o.again(s)
		}
	case stepGet:
		if st == nvme.Success {
			o.got(s, c)
		}
	}
	if o.kind == Delete && st == nvme.KeyDoesNotExist {
		o.Status = nvme.Success // as it is by default: KVErrorOnDelete
	}
	return true
}

// again begins a Put anew whose key was deleted between two of its commands.
func (o *Op) again(s *Space) (done bool) { // hot: 0 allocs
	if o.turns++; o.turns == maxTurns {
		o.Err = errTurns
		return true
	}
	o.storeIfAbsent(s)
	return false
}

// found follows a look: there is a value, but whose?
func (o *Op) found(s *Space, c *host.Completion) (done bool) { // hot: 0 allocs
	n, err := size(s, c, len(o.Cmd.Data))
	if err != nil {
		o.Err = err
		return true
	}
	mine, foreign := belongs(o.Cmd.Data[:min(n, len(o.Cmd.Data))], o.buf[:o.own])
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

// got takes the value out of what a Get with a long key has brought.
func (o *Op) got(s *Space, c *host.Completion) { // hot: 0 allocs
	n, err := size(s, c, len(o.Cmd.Data))
	if err != nil {
		o.Err = err
		return
	}
	b := o.Cmd.Data[:min(n, len(o.Cmd.Data))]
	mine, foreign := belongs(b, o.buf[:o.own])
	switch {
	case foreign:
		o.Err = host.ErrForeignValue
	case !mine:
		o.Status = nvme.KeyDoesNotExist
	default:
		o.Size = n - o.own
		copy(o.dst, b[o.own:])
		o.whole(len(o.Cmd.Data) - o.own)
	}
}

// whole fails a Get whose buffer has room for more of the value than one command, of that room, has brought.
func (o *Op) whole(room int) { // hot: 0 allocs
	if o.Err == nil && room < min(o.Size, len(o.dst)) {
		o.Err = fmt.Errorf("%w: %d bytes, of which one command brings %d: the transfer limit (MDTS)", host.ErrValueTooLarge, o.Size, room)
	}
}

// size is that of the value which a Retrieve of room bytes has found.
//
// Errors: ErrProtocol if it does not go with what came.
func size(s *Space, c *host.Completion, room int) (int, error) { // hot: 0 allocs
	n := uint64(uint32(c.Result))
	if s.Counted && uint64(c.Received) != min(n, uint64(room)) {
		return 0, fmt.Errorf("%w: Retrieve of %d bytes: %d came of a value of %d", host.ErrProtocol, room, c.Received, n)
	}
	return int(n), nil
}
