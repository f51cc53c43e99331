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
// With extended key-value, a write that needs it, or that has an identity, is an extended Store or Delete in place of
// the Store or Delete above. PutIfVersion and DeleteIfVersion are one command, also with long keys, because the version
// names the object; PutIfNewer and DeleteIfNewer take a Retrieve of the key before.
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
	GetVersion
	PutIfVersion
	PutIfNewer
	DeleteIfVersion
	DeleteIfNewer
	kinds
)

// String returns the name of the operation in package kv.
func (k Kind) String() string {
	if k >= kinds {
		return fmt.Sprintf("Kind(%d)", uint8(k))
	}
	return [...]string{"Get", "Put", "PutIfAbsent", "PutIfPresent", "Delete", "Exists", "GetVersion", "PutIfVersion",
		"PutIfNewer", "DeleteIfVersion", "DeleteIfNewer"}[k]
}

// isPut and isDelete report what a kind does.
func (k Kind) isPut() bool {
	return k == Put || k == PutIfAbsent || k == PutIfPresent || k == PutIfVersion || k == PutIfNewer
}
func (k Kind) isDelete() bool { return k == Delete || k == DeleteIfVersion || k == DeleteIfNewer }

// IsWrite reports whether operations of the kind may have an identity.
func (k Kind) IsWrite() bool { return k.isPut() || k.isDelete() }

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
	// Extended: the target has granted extended key-value.
	Extended bool
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
	stepNewer // Store or Delete, if newer
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
	// Version is that of the value of a GetVersion, or the one that a write has given. If the key does not fulfil the
	// condition of a write, it is that of the key, or 0. It is 0 if the target has not reported one. Expires is that of
	// the value of a GetVersion.
	Version uint64
	Expires uint32

	// Number is that of a write with an identity, while it is outstanding.
	Number Number

	args     Args
	kind     Kind
	step     step
	restarts uint8
	// extended: writes are extended commands. retry: Cmd is an extended write whose first copy was lost.
	extended, retry bool
	// head is the size of the header in front of the data of an extended write, which is buf[:head].
	head int
	dev  [nvme.MaxKVKey]byte // hash of a long key
	own  int                 // header and key of a long key are buf[head:][:own]
	val  int                 // the value to store follows them
	dst  []byte              // the caller's buffer of a Get
	buf  []byte
}

// Forget drops the references to the caller's buffers.
func (o *Op) Forget() { o.Cmd.Data, o.dst, o.args.Key, o.args.Value = nil, nil, nil, nil }

// Kept returns the size of the buffer that the Op keeps.
func (o *Op) Kept() int { return cap(o.buf) }

// Kind returns the kind that was passed to Start.
func (o *Op) Kind() Kind { return o.kind }

// Start begins an operation; Cmd is its first command. The key is copied, and so is the value to store if keys are long
// or the command is an extended one.
//
// Errors: host.ErrInvalid, ErrValueTooLarge; ErrUnsupported if the operation needs extended key-value and the target
// has not granted it.
//
// Cost: 0 allocs, once buffers for long keys and extended commands have grown.
func (o *Op) Start(s *Space, a *Args) error { // hot: 0 allocs
	kind, key, value := a.Kind, a.Key, a.Value
	o.args, o.kind, o.step, o.restarts, o.dst, o.retry = *a, kind, stepOnly, 0, nil, false
	o.Status, o.Err, o.Size, o.Version, o.Expires = 0, nil, 0, 0, 0
	if n := len(key); n == 0 || n > s.MaxKeyLen() || kind >= kinds {
		return fmt.Errorf("%w: %s with a key of %d bytes: must be 1 to %d", host.ErrInvalid, kind, n, s.MaxKeyLen())
	}
	if err := a.check(s); err != nil {
		return err
	}
	total := 0 // bytes that one command must be able to transfer
	if kind.isPut() {
		total = len(value)
	}
	if s.Hash != nil {
		total += LongBytes(len(key))
	}
	if limit, by := s.Limit(); total > limit {
		return fmt.Errorf("%w: %s of %d bytes (%d of key and value): %s is %d", host.ErrValueTooLarge, kind, total,
			len(key)+len(value), by, limit)
	}
	o.head, o.extended = 0, kind.IsWrite() && s.Extended && (a.Client != 0 || a.needsExtension())
	if o.extended && total > s.MaxTransfer-nvme.KVWriteHeaderSize {
		if a.needsExtension() {
			return fmt.Errorf("%w: %s of %d bytes (%d of key and value): with its header, the transfer limit of a "+
				"command (MDTS) is %d", host.ErrValueTooLarge, kind, total, len(key)+len(value),
				s.MaxTransfer-nvme.KVWriteHeaderSize)
		}
		o.extended = false // without an identity then
	}
	if o.extended {
		o.head = nvme.KVWriteHeaderSize
	}
	if s.Hash != nil {
		o.startLong(s, kind, key, value)
		return nil
	}
	if o.extended {
		o.startExtended(s, key, value)
		return nil
	}
	switch kind {
	case GetVersion:
		o.dst = value
		o.buf = slices.Grow(o.buf[:0], min(nvme.KVReadHeaderSize+len(value), s.MaxTransfer))
		o.buf = o.buf[:min(nvme.KVReadHeaderSize+len(value), s.MaxTransfer)]
		o.step = stepGet
		set(&o.Cmd, nvme.CmdKVXRetrieve, s.NSID, key, o.buf)
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
//	write header, if the write is extended | header and key | value to store | header and key that a look reads
//	header and key | read header of a GetVersion | header, key and value that a Get reads
func (o *Op) startLong(s *Space, kind Kind, key, value []byte) { // hot: 0 allocs
	o.dev = s.Hash(key)
	o.own, o.val = LongBytes(len(key)), 0
	need := o.head + 2*o.own
	switch {
	case kind == Get, kind == GetVersion:
		if kind == GetVersion {
			need += nvme.KVReadHeaderSize
		}
		need = min(need+len(value), o.own+s.MaxTransfer)
		o.dst = value
	case kind.isPut():
		o.val = len(value)
		need += len(value)
	}
	o.buf = appendLong(slices.Grow(o.buf[:0], need)[:o.head], key)
	if o.val > 0 {
		o.buf = append(o.buf, value...)
	}
	o.buf = o.buf[:need]
	switch {
	case kind == Get:
		o.step = stepGet
		SetRetrieve(&o.Cmd, s.NSID, o.dev[:], o.buf[o.own:])
	case kind == GetVersion:
		o.step = stepGet
		set(&o.Cmd, nvme.CmdKVXRetrieve, s.NSID, o.dev[:], o.buf[o.own:])
	case kind == Put, kind == PutIfAbsent, kind == PutIfVersion && o.args.Version == 0:
		o.storeIfAbsent(s)
	case kind == PutIfVersion:
		o.store(s, nvme.KVIfVersion)
	case kind == DeleteIfVersion:
		o.remove(s)
	default:
		o.lookUp(s)
	}
}

func (o *Op) storeIfAbsent(s *Space) { // hot: 0 allocs
	o.step = stepIfAbsent
	o.store(s, nvme.KVIfAbsent)
}

func (o *Op) lookUp(s *Space) { // hot: 0 allocs
	o.step = stepLookUp
	SetRetrieve(&o.Cmd, s.NSID, o.dev[:], o.buf[o.head+o.own+o.val:])
}

// newer is the write of a PutIfNewer or DeleteIfNewer with a long key, after the look.
func (o *Op) newer(s *Space) { // hot: 0 allocs
	o.step = stepNewer
	if o.kind == DeleteIfNewer {
		o.remove(s)
		return
	}
	o.store(s, nvme.KVIfNewer)
}

// MayRepeat reports whether Cmd may be sent again, after Lost, if its answer was lost. A conditional write without an
// identity may not: the second one would find what the first one has done, or what another host has done since, and its
// status would say nothing about the first.
func (o *Op) MayRepeat() bool {
	switch o.kind {
	case PutIfAbsent, PutIfPresent, PutIfVersion, PutIfNewer, DeleteIfVersion, DeleteIfNewer:
		return o.step == stepLookUp || o.HasIdentity()
	}
	return true
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
	if o.extended && nvme.KVVersioned(o.Cmd.SQE.Opcode()) {
		switch st {
		case nvme.Success, nvme.KeyExists, nvme.KVVersionMismatch, nvme.KVSuperseded:
			o.Version = c.Result
		case nvme.InvalidOpcode:
			if o.retry {
				o.Status, o.Err = nvme.Success, errWithdrawn
				return true
			}
		}
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
		switch {
		case st != nvme.KeyDoesNotExist:
		case o.kind == PutIfNewer, o.kind == DeleteIfNewer:
			o.newer(s)
			return false
		case o.kind == Put, o.kind == PutIfAbsent, o.kind == PutIfVersion:
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
	if o.kind.isDelete() && st == nvme.KeyDoesNotExist {
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
	mine, foreign := valueOwner(o.Cmd.Data[:min(n, len(o.Cmd.Data))], o.buf[o.head:][:o.own])
	switch {
	case foreign:
		o.Err = host.ErrForeignValue
	case !mine && (o.kind.isPut() && o.kind != PutIfPresent || o.kind == DeleteIfNewer):
		o.Err = host.ErrKeyCollision
	case !mine:
		o.Status = nvme.KeyDoesNotExist
		if o.kind == Delete {
			o.Status = nvme.Success
		}
	case o.kind == PutIfAbsent:
		o.Status = nvme.KeyExists
	case o.kind == PutIfVersion:
		o.Status = nvme.KVVersionMismatch
	case o.kind == PutIfNewer, o.kind == DeleteIfNewer:
		o.newer(s)
		return false
	case o.kind == Put, o.kind == PutIfPresent:
		o.step = stepReplace
		o.store(s, nvme.KVIfPresent)
		return false
	case o.kind == Delete:
		o.step = stepDelete
		o.remove(s)
		return false
	}
	return true
}

// got extracts the value from what a Get with a long key, or a GetVersion, has read.
func (o *Op) got(s *Space, c *host.Completion) { // hot: 0 allocs
	data := o.Cmd.Data
	if o.kind == GetVersion {
		if data = o.readHeader(s, c); data == nil {
			return
		}
	}
	n, err := size(s, c, len(data))
	if err != nil {
		o.Err = err
		return
	}
	b := data[:min(n, len(data))]
	if s.Hash == nil {
		o.Size = n
		copy(o.dst, b)
		o.checkRoom(len(data))
		return
	}
	mine, foreign := valueOwner(b, o.buf[:o.own])
	switch {
	case foreign:
		o.Err = host.ErrForeignValue
	case !mine:
		o.Status = nvme.KeyDoesNotExist
	default:
		o.Size = n - o.own
		copy(o.dst, b[o.own:])
		o.checkRoom(len(data) - o.own)
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
