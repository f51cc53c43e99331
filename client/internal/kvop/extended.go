package kvop

import (
	"fmt"
	"slices"

	"jbofd/client/internal/host"
	"jbofd/internal/nvme"
)

// Args are the arguments of an operation.
type Args struct {
	Kind Kind
	// Key, and Value: the value to store, or the buffer of a Get.
	Key, Value []byte
	// Version is the one that PutIfVersion and DeleteIfVersion expect, and that PutIfNewer and DeleteIfNewer give.
	Version uint64
	// Expires is when the object, or the Tombstone of a Delete, expires: see nvme.KVWriteHeader.
	Expires             uint32
	Relative, Tombstone bool
	// WantVersion: the operation must report the version that it has given.
	WantVersion bool
	// Client is the first half of the identity of a write, 0: it has none. Seq is the second half of its first command:
	// the commands of one operation take up to SeqPerOp numbers. KeepSeconds is how long the target keeps it.
	// Answered is the number below which all writes of the Client to this key have been answered.
	Client, Seq, Answered uint64
	KeepSeconds           uint32
}

// SeqPerOp is how many sequence numbers an operation may take.
const SeqPerOp = 256

// needsExtension reports whether the operation cannot be done without extended key-value.
func (a *Args) needsExtension() bool {
	switch a.Kind {
	case GetVersion, PutIfVersion, PutIfNewer, DeleteIfVersion, DeleteIfNewer:
		return true
	}
	return a.Expires != 0 || a.Tombstone || a.WantVersion
}

// check validates the arguments that extended key-value adds.
func (a *Args) check(s *Space) error { // hot: 0 allocs
	switch {
	case !a.needsExtension():
		return nil
	case !s.Extended:
		return fmt.Errorf("%w: %s needs extended key-value (wire extension bit 3), which the target has not granted",
			host.ErrUnsupported, a.what())
	case (a.Kind == PutIfNewer || a.Kind == DeleteIfNewer || a.Kind == DeleteIfVersion) && a.Version == 0:
		return fmt.Errorf("%w: %s with version 0: versions begin with 1", host.ErrInvalid, a.Kind)
	case a.Tombstone && !a.Kind.isDelete(), a.Expires != 0 && !a.Kind.isPut() && !a.Tombstone:
		return fmt.Errorf("%w: %s has no tombstone or expiry", host.ErrInvalid, a.Kind)
	}
	return nil
}

// what names what the operation needs extended key-value for.
func (a *Args) what() string {
	switch {
	case a.Tombstone:
		return a.Kind.String() + " with a tombstone"
	case a.Expires != 0:
		return a.Kind.String() + " with an expiry"
	case a.WantVersion && (a.Kind == Put || a.Kind == PutIfAbsent || a.Kind == PutIfPresent || a.Kind == Delete):
		return a.Kind.String() + " that reports a version"
	}
	return a.Kind.String()
}

// startExtended lays out the buffer of an extended write without a long key: write header | value.
func (o *Op) startExtended(s *Space, key, value []byte) { // hot: 0 allocs
	copy(o.dev[:], key)
	if !o.kind.isPut() {
		value = nil
	}
	o.buf = append(slices.Grow(o.buf[:0], o.head+len(value))[:o.head], value...)
	o.own, o.val = 0, len(value)
	if o.kind.isDelete() {
		o.remove(s)
		return
	}
	o.store(s, o.condition())
}

// condition is that of the only write of an operation.
func (o *Op) condition() nvme.KVCondition {
	switch o.kind {
	case PutIfAbsent:
		return nvme.KVIfAbsent
	case PutIfPresent:
		return nvme.KVIfPresent
	case PutIfVersion, DeleteIfVersion:
		return nvme.KVIfVersion
	case PutIfNewer, DeleteIfNewer:
		return nvme.KVIfNewer
	}
	return nvme.KVAlways
}

// device is the key that the target knows.
func (o *Op) device(s *Space) []byte {
	if s.Hash != nil {
		return o.dev[:]
	}
	return o.dev[:len(o.args.Key)]
}

// store makes Cmd a Store, extended or not.
func (o *Op) store(s *Space, c nvme.KVCondition) { // hot: 0 allocs
	data := o.buf[:o.head+o.own+o.val]
	if o.extended {
		o.writeHeader(c)
		set(&o.Cmd, nvme.CmdKVXStore, s.NSID, o.device(s), data)
		return
	}
	options := uint8(0)
	switch c {
	case nvme.KVIfAbsent:
		options = nvme.KVStoreMustNotExist
	case nvme.KVIfPresent:
		options = nvme.KVStoreMustExist
	}
	SetStore(&o.Cmd, s.NSID, o.device(s), data, options)
}

// remove makes Cmd a Delete, extended or not.
func (o *Op) remove(s *Space) { // hot: 0 allocs
	if o.extended {
		o.writeHeader(o.condition())
		set(&o.Cmd, nvme.CmdKVXDelete, s.NSID, o.device(s), o.buf[:o.head])
		return
	}
	SetDelete(&o.Cmd, s.NSID, o.device(s))
}

// writeHeader fills the header of the next extended write, which gets a sequence number of its own.
func (o *Op) writeHeader(c nvme.KVCondition) { // hot: 0 allocs
	a, h := &o.args, (*nvme.KVWriteHeader)(o.buf)
	*h = nvme.KVWriteHeader{}
	h.SetCondition(c)
	if c == nvme.KVIfVersion || c == nvme.KVIfNewer {
		h.SetVersion(a.Version)
	}
	h.SetExpires(a.Expires)
	flags := uint8(0)
	if a.Relative && a.Expires != 0 {
		flags |= nvme.KVRelative
	}
	if a.Tombstone {
		flags |= nvme.KVTombstone
	}
	h.SetFlags(flags)
	if a.Client != 0 {
		h.SetClient(a.Client)
		h.SetSequence(a.Seq)
		h.SetKeep(a.KeepSeconds)
		h.SetAnswered(a.Answered)
		a.Seq++
	}
	o.retry = false
}

// SetNumber gives the first command of an operation its place among the writes of the client: Args.Seq and Answered.
// Keys are not hashed.
func (o *Op) SetNumber(seq, answered uint64) { // hot: 0 allocs
	if o.HasIdentity() {
		h := (*nvme.KVWriteHeader)(o.buf)
		h.SetSequence(seq)
		h.SetAnswered(answered)
	}
}

// Lost tells that Cmd was sent, and its answer was lost with the connection: if Cmd has an identity, it is a retry from
// now on.
func (o *Op) Lost() { // hot: 0 allocs
	if o.HasIdentity() {
		h := (*nvme.KVWriteHeader)(o.buf)
		h.SetFlags(h.Flags() | nvme.KVRetry)
		o.retry = true
	}
}

// Retry reports whether Cmd is a retry, which must not be sent when the target may have forgotten its identity.
func (o *Op) Retry() bool { return o.retry }

// HasIdentity reports whether Cmd is a write with an identity.
func (o *Op) HasIdentity() bool {
	return o.extended && o.args.Client != 0 && nvme.KVVersioned(o.Cmd.SQE.Opcode())
}

// readHeader reads the header of a value, and returns the data behind it; nil if the header is wrong. c then tells how
// much data came behind the header.
func (o *Op) readHeader(s *Space, c *host.Completion) []byte { // hot: 0 allocs
	h := (*nvme.KVReadHeader)(o.Cmd.Data)
	if s.Counted && c.Received < nvme.KVReadHeaderSize {
		o.Err = fmt.Errorf("%w: extended Retrieve: received %d bytes, without a whole header", host.ErrProtocol,
			c.Received)
		return nil
	}
	if err := h.Check(); err != nil {
		o.Err = fmt.Errorf("%w: extended Retrieve: %w", host.ErrProtocol, err)
		return nil
	}
	o.Version, o.Expires = h.Version(), h.Expires()
	c.Received -= min(c.Received, nvme.KVReadHeaderSize)
	return o.Cmd.Data[nvme.KVReadHeaderSize:]
}

var errWithdrawn = fmt.Errorf("%w: the target has extended key-value no more, and cannot tell whether the lost "+
	"command was carried out", host.ErrIndeterminate)
