// Package kv is a host for namespaces of the NVMe Key Value command set: Get, Put and Delete.
//
//	client.Connect ───> Controller
//	kv.Open ──────────>   ├── Namespace   Get, Put, PutIfAbsent, PutIfPresent, Delete, Exists, Keys
//	                      │               GetVersion, PutIfVersion, PutWith, DeleteWith, Update
//	                      │               Scan, Count, Digest, CopyOut, CopyIn, DropRange
//	                      │               for any number of goroutines, with contexts
//	Namespace.OpenQueue ─>└── OpQueue     the same for one goroutine, many outstanding, without allocations
//
// A target that has extended key-value (docs/wire-extensions.md) gives every object a version, and applies a write once
// although it was sent twice. The second and third line of methods need it, and Put and Delete are better with it.
//
// Credits, buffers, transports and losses of the connection are as in package client.
package kv

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"sync"
	"sync/atomic"
	"time"

	"jbofd/client"
	"jbofd/client/internal/host"
	"jbofd/client/internal/kvop"
	"jbofd/internal/nvme"
)

// Namespace is a key value namespace of a controller: values under keys of 1 to 16 bytes, or of up to 64 KiB with
// Options.LongKeys. Any goroutine may call its methods. OpQueue is for a goroutine that keeps many operations
// outstanding.
//
// An operation is atomic. Whether it is durable when it has returned depends on the target.
//
// When the connection is lost, outstanding operations are treated as by client.Controller:
//
//   - Get, GetVersion, Exists and Keys are repeated.
//   - Writes are repeated with the identity of their first copy, if the target has extended key-value. It carries out
//     one of the two, and the result is that of this one. client.ErrIndeterminate remains for three cases: the target
//     has dropped the identity because 64 younger writes, of other hosts or not answered, have changed the key; the
//     host was not connected again within Options.KeepFor; the target has lost extended key-value meanwhile.
//
// Without extended key-value, with Options.AtLeastOnce, or if a value does not fit a command together with the header
// of 48 bytes:
//
//   - Put and Delete are repeated, but only when the target can no longer carry out their first copy. They may be
//     carried out twice: if another host or goroutine puts the same key meanwhile, the second copy replaces that value,
//     or deletes it. Programs that need a decision between writers use one writer per key.
//   - PutIfAbsent and PutIfPresent are not repeated, because the second copy would judge by what the first one, or
//     another host, has stored. They fail with client.ErrIndeterminate if they were sent.
//
// A method whose context ends returns at once, and its buffers are the caller's again. The host asks the target to
// abort the command, but the target may still carry it out (client.ErrIndeterminate).
//
// Errors of all methods: those of this package; other *client.StatusErrors; client.ErrInvalid, ErrConnectionLost,
// ErrClosed, ErrIndeterminate, ErrProtocol, ErrUnsupported, ErrNamespaceGone; the context's.
type Namespace struct {
	c    *client.Controller
	nsid uint32
	hash func([]byte) [nvme.MaxKVKey]byte // of long keys; nil: keys are not hashed
	geo  atomic.Pointer[geometry]
	ops  sync.Pool // of *kvop.Op
	// atLeastOnce and keepFor are from Options. identity names the writes of this Namespace and of its OpQueues. base
	// is the origin of its clock.
	atLeastOnce bool
	keepFor     time.Duration
	identity    uint64
	base        time.Time

	mu sync.Mutex
	// numbers counts the writes of this Namespace and of its OpQueues.
	numbers kvop.Numbers
}

// geometry is the part of Identify that operations need.
type geometry struct {
	info  Info
	space kvop.Space
}

// Options configure a Namespace.
type Options struct {
	// LongKeys allows keys of up to 64 KiB. The target's key is then a hash of the key, the first 128 bits of its
	// SHA-256, and the key itself is stored in front of the value (integers are little endian):
	//
	//	0 magic "JKVL" | 4 version u16, 1 | 6 zero u16 | 8 key length u32 | 12 key | value
	//
	// Every operation compares the key, so that it never uses the value of another key with the same hash: a Put of
	// such a key fails with ErrKeyCollision. All keys are hashed, short ones too, so that none can be equal to the hash
	// of another. All users of a namespace must agree on LongKeys: values that were stored without it are
	// ErrForeignValue. A Put of an existing key takes three commands instead of one, PutIfPresent and Delete take two.
	LongKeys bool
	// AtLeastOnce lets Put and Delete go without an identity, so that they may be carried out twice when the connection
	// is lost. An identity takes some 30 bytes of the drive for KeepFor, and a put with one is not swapped out to
	// another drive. Other writes have one in any case.
	AtLeastOnce bool
	// KeepFor bounds for how long after it was first sent a write is repeated, 1 s to 59 min. Default 2 min. The target
	// keeps identities for a minute longer, so that a step of its clock within that does no harm.
	KeepFor time.Duration

	hash func([]byte) [nvme.MaxKVKey]byte // set by tests
}

// Info describes a namespace.
type Info struct {
	NSID uint32
	// SizeBytes is the capacity, UsedBytes the part of it that is in use.
	SizeBytes, UsedBytes uint64
	// MaxKey is the longest key and MaxValue the longest value in bytes that both the namespace and one command allow.
	// With long keys, key and value together may have MaxValue less 12 bytes.
	MaxKey, MaxValue int
	// MaxKeys is the largest number of keys; 0: the target reports none.
	MaxKeys uint32
	// UUID, NGUID and EUI64 are zero where the target reports none.
	UUID, NGUID [16]byte
	EUI64       [8]byte
	// ANAGroup is the ANA group whose state applies to the namespace; 0: none.
	ANAGroup uint32
	// ReadOnly: the namespace is write protected.
	ReadOnly bool
	// SSD is the number of the drive in a jbofd node; 0 for other targets.
	SSD uint16
	// Extended: the target has granted extended key-value. MaxVersionedValue is then the longest value of the
	// operations that need it: MaxValue, or less if a command cannot move MaxValue and a header.
	Extended          bool
	MaxVersionedValue int
}

// Bounds of Options.KeepFor. keepMargin is how much longer than that the target keeps an identity.
const (
	minKeepFor     = time.Second
	maxKeepFor     = nvme.MaxKVKeep*time.Second - keepMargin
	defaultKeepFor = 2 * time.Minute
	keepMargin     = time.Minute
)

// Open opens a key value namespace: it identifies it and learns its drive.
//
// Errors: client.ErrNamespaceGone if there is no namespace of this NSID; client.ErrUnsupported if it has another
// command set; client.ErrInvalid for bad Options; those of Namespace.
func Open(ctx context.Context, c *client.Controller, nsid uint32, o Options) (*Namespace, error) {
	if o.KeepFor == 0 {
		o.KeepFor = defaultKeepFor
	}
	if o.KeepFor < minKeepFor || o.KeepFor > maxKeepFor {
		return nil, fmt.Errorf("%w: KeepFor is %s, must be %s to %s", client.ErrInvalid, o.KeepFor, minKeepFor,
			maxKeepFor)
	}
	n := &Namespace{c: c, nsid: nsid, ops: sync.Pool{New: func() any { return new(kvop.Op) }},
		atLeastOnce: o.AtLeastOnce, keepFor: o.KeepFor, identity: newIdentity(),
		base: time.Now()}
	if o.LongKeys {
		n.hash = kvop.Hash
		if o.hash != nil {
			n.hash = o.hash
		}
	}
	if err := n.Refresh(ctx); err != nil {
		return nil, err
	}
	return n, nil
}

// maxValue bounds the limit for values that a target reports.
const maxValue = 1 << 30

// newIdentity returns a number that no other Namespace has.
func newIdentity() uint64 {
	var b [8]byte
	// crypto/rand.Read never fails; it ends the program instead.
	_, _ = rand.Read(b[:])
	return max(binary.LittleEndian.Uint64(b[:]), 1) // 0 is none
}

// Refresh identifies the namespace again, after a client.EventNamespaces, to update Info.UsedBytes, or after the target
// has gained or lost extended key-value.
func (n *Namespace) Refresh(ctx context.Context) error {
	who, err := n.c.Identity(ctx)
	if err != nil {
		return err
	}
	d, err := n.c.Describe(ctx, n.nsid)
	if err != nil {
		return err
	}
	if d.CSI != uint8(nvme.CSIKV) {
		return fmt.Errorf("%w: namespace %d has command set %d, not the Key Value command set", client.ErrUnsupported,
			n.nsid, d.CSI)
	}
	var id nvme.IdentifyNamespaceKV
	if err := n.c.IdentifyCSI(ctx, nvme.CNSNamespaceCSI, uint8(nvme.CSIKV), n.nsid, id[:]); err != nil {
		return fmt.Errorf("namespace %d: %w", n.nsid, err)
	}
	if id.Inactive() {
		return fmt.Errorf("namespace %d: %w", n.nsid, client.ErrNamespaceGone)
	}
	if err := id.Check(); err != nil {
		return fmt.Errorf("%w: namespace %d: %w", client.ErrProtocol, n.nsid, err)
	}
	f := id.Format()
	if n.hash != nil && f.KVKML() < nvme.MaxKVKey {
		return fmt.Errorf("%w: keys of namespace %d have up to %d bytes, long keys need %d", client.ErrUnsupported,
			n.nsid,
			f.KVKML(), nvme.MaxKVKey)
	}
	g := geometry{
		space: kvop.Space{NSID: n.nsid, MaxKey: int(f.KVKML()), MaxValue: int(min(f.KVVML(), maxValue)),
			MaxTransfer: who.MaxTransferBytes,
			Hash:        n.hash, Counted: n.c.Options().Transport != client.RDMA, Extended: who.ExtendedKV},
		info: Info{NSID: n.nsid, SizeBytes: id.NSZE(), UsedBytes: id.NUSE(), MaxKeys: f.MNKS(), UUID: d.UUID,
			NGUID: id.NGUID(), EUI64: id.EUI64(),
			ANAGroup: id.ANAGRPID(), ReadOnly: id.NSATTR()&nvme.NSATTRWriteProtected != 0},
	}
	if g.space.MaxTransfer == 0 {
		g.space.MaxTransfer = maxValue
	}
	g.info.MaxKey = g.space.MaxKeyLen()
	g.info.MaxValue, _ = g.space.Limit()
	if g.info.Extended = g.space.Extended; g.info.Extended {
		g.info.MaxVersionedValue = min(g.info.MaxValue, g.space.MaxTransfer-nvme.KVWriteHeaderSize)
	}
	if who.Extensions {
		g.info.SSD = id.SSD()
		if err := n.c.Locate(ctx, n.nsid, id.SSD()); err != nil {
			return fmt.Errorf("namespace %d: %w", n.nsid, err)
		}
	}
	n.geo.Store(&g)
	return nil
}

// Info returns what the latest Refresh has found.
func (n *Namespace) Info() Info { return n.geo.Load().info }

// NSID returns the namespace identifier.
func (n *Namespace) NSID() uint32 { return n.nsid }

// Controller returns the controller of the namespace.
func (n *Namespace) Controller() *client.Controller { return n.c }

// outcome is the outcome of an operation.
type outcome struct {
	size    int
	version uint64
	expires uint32
}

// identify gives a write of op its identity, if it is to have one. If it has, answered must be called.
func (n *Namespace) identify(s *kvop.Space, op *kvop.Op, a *kvop.Args) { // hot: 0 allocs
	if !s.Extended || !a.Kind.IsWrite() || n.atLeastOnce && (a.Kind == Put || a.Kind == Delete) {
		return
	}
	hash := uint64(0) // two long keys may have the same one at the target
	if s.Hash == nil && len(a.Key) <= nvme.MaxKVKey {
		hash = nvme.KVPosition(0, a.Key)
	}
	a.Client = n.identity
	n.mu.Lock()
	a.Seq, a.Answered = n.numbers.Begin(&op.Number, hash, time.Since(n.base))
	n.mu.Unlock()
	a.KeepSeconds = uint32((n.keepFor + keepMargin) / time.Second)
}

// ended notes the end of an operation. If it was not answered, it may still be under way.
func (n *Namespace) ended(op *kvop.Op, answered bool) { // hot: 0 allocs
	now := time.Since(n.base)
	n.mu.Lock()
	n.numbers.End(&op.Number, answered, now, now+n.keepFor)
	n.mu.Unlock()
}

// run runs an operation to its end.
func (n *Namespace) run(ctx context.Context, a kvop.Args) (out outcome, err error) {
	s := &n.geo.Load().space
	op, done := n.ops.Get().(*kvop.Op), false
	n.identify(s, op, &a)
	defer func() {
		n.ended(op, done)
		op.Forget()
		n.ops.Put(op)
	}()
	if err := op.Start(s, &a); err != nil {
		done = true
		return out, err
	}
	name := a.Kind.String()
	for !done {
		var comp client.Completion
		if op.HasIdentity() {
			sent := time.Now()
			comp, err = n.c.DoOnce(ctx, name, &op.Cmd, func() error {
				op.Lost()
				return n.mayRetry(time.Since(sent))
			})
		} else {
			comp, err = n.c.Do(ctx, name, op.MayRepeat(), &op.Cmd)
		}
		if err != nil {
			return out, err
		}
		done = op.Step(s, &comp)
	}
	out = outcome{op.Size, op.Version, op.Expires}
	if err := host.CheckStatus(name, op.Status); err != nil {
		if st := op.Status.Code(); st == nvme.KVVersionMismatch || st == nvme.KVSuperseded {
			err = &VersionError{Current: op.Version, Err: err}
		}
		return out, err
	}
	if op.Err != nil {
		return out, fmt.Errorf("%s: %w", a.Kind, op.Err)
	}
	return out, nil
}

// mayRetry returns an error if a write that was first sent so long ago must not be sent again, because the target may
// have forgotten its identity.
func (n *Namespace) mayRetry(age time.Duration) error {
	if age > n.keepFor {
		return fmt.Errorf("not repeated after %s: Options.KeepFor is %s", age.Round(time.Millisecond), n.keepFor)
	}
	return nil
}

// Get copies the value of key to dst, as much as fits, and returns the size of the whole value, which may be greater
// than len(dst).
//
// Errors: ErrKeyNotFound; ErrValueTooLarge if one command cannot transfer as much of the value as fits.
func (n *Namespace) Get(ctx context.Context, key, dst []byte) (size int, err error) {
	out, err := n.run(ctx, kvop.Args{Kind: Get, Key: key, Value: dst})
	return out.size, err
}

// firstGet is the size of the first buffer that Value uses.
const firstGet = 4096

// Value returns the value of key in a new buffer.
//
// Errors: ErrKeyNotFound; ErrValueTooLarge if one command cannot transfer all of it.
func (n *Namespace) Value(ctx context.Context, key []byte) ([]byte, error) {
	for b := make([]byte, firstGet); ; {
		size, err := n.Get(ctx, key, b)
		if err != nil {
			return nil, err
		}
		if size <= len(b) {
			return b[:size:size], nil
		}
		if limit := n.geo.Load().space.MaxTransfer; size > limit {
			return nil, fmt.Errorf("%w: Value of %d bytes: one command transfers %d (MDTS)", ErrValueTooLarge, size,
				limit)
		}
		b = make([]byte, size) // the value may have grown again by the next Get
	}
}

// Put stores value under key, and replaces an earlier value.
//
// Errors: ErrValueTooLarge, ErrCapacityExceeded; with long keys ErrKeyCollision.
func (n *Namespace) Put(ctx context.Context, key, value []byte) error {
	_, err := n.run(ctx, kvop.Args{Kind: Put, Key: key, Value: value})
	return err
}

// PutIfAbsent stores value under key if the key does not exist. Without extended key-value it is never repeated: after
// client.ErrIndeterminate it may or may not have taken effect.
//
// Errors: ErrKeyExists; those of Put.
func (n *Namespace) PutIfAbsent(ctx context.Context, key, value []byte) error {
	_, err := n.run(ctx, kvop.Args{Kind: PutIfAbsent, Key: key, Value: value})
	return err
}

// PutIfPresent stores value under key if the key exists. Without extended key-value it is never repeated: after
// client.ErrIndeterminate it may or may not have taken effect.
//
// Errors: ErrKeyNotFound; those of Put.
func (n *Namespace) PutIfPresent(ctx context.Context, key, value []byte) error {
	_, err := n.run(ctx, kvop.Args{Kind: PutIfPresent, Key: key, Value: value})
	return err
}

// Delete deletes key and its value. It succeeds if the key does not exist.
func (n *Namespace) Delete(ctx context.Context, key []byte) error {
	_, err := n.run(ctx, kvop.Args{Kind: Delete, Key: key})
	return err
}

// Exists reports whether key exists.
func (n *Namespace) Exists(ctx context.Context, key []byte) (bool, error) {
	_, err := n.run(ctx, kvop.Args{Kind: Exists, Key: key})
	if errors.Is(err, ErrKeyNotFound) {
		return false, nil
	}
	return err == nil, err
}

// listBytes is the size of the buffer of a List, firstLook that of the first Retrieve of a long key.
const (
	listBytes = 64 << 10
	firstLook = 512
)

// Keys yields all keys in the target's order, with one List command after the other. A key that is put or deleted
// meanwhile may be missing. A key that exists all the time is yielded, and may be yielded again if others are deleted.
// A key is valid until the next iteration. An error comes with a nil key and ends the sequence.
//
// With long keys each key takes an additional Retrieve. Values that were not stored with long keys are skipped.
func (n *Namespace) Keys(ctx context.Context) iter.Seq2[[]byte, error] {
	return func(yield func([]byte, error) bool) {
		for key, err := range n.deviceKeys(ctx) {
			if err == nil && n.hash != nil {
				if key, err = n.longKey(ctx, key); err == nil && key == nil {
					continue
				}
			}
			if err != nil {
				yield(nil, err)
				return
			}
			if !yield(key, nil) {
				return
			}
		}
	}
}

// deviceKeys yields the keys of the target; with Options.LongKeys they are hashes. A List includes its start key, so
// the loop ends at the first List that has no other one.
func (n *Namespace) deviceKeys(ctx context.Context) iter.Seq2[[]byte, error] {
	return func(yield func([]byte, error) bool) {
		buf := make([]byte, min(listBytes, n.geo.Load().space.MaxTransfer))
		var last, from []byte // the latest key, and the first key of the current List
		for progressed := true; progressed; {
			progressed = false
			from = append(from[:0], last...)
			list, err := n.list(ctx, from, buf)
			if err != nil {
				yield(nil, err)
				return
			}
			for key := range list.All() {
				if bytes.Equal(key, from) {
					continue
				}
				progressed = true
				last = append(last[:0], key...)
				if !yield(key, nil) {
					return
				}
			}
		}
	}
}

// list runs one List, which begins with key from.
func (n *Namespace) list(ctx context.Context, from, buf []byte) (nvme.KVList, error) {
	const name = "List"
	var cmd client.Command
	SetList(&cmd, n.nsid, from, buf)
	comp, err := n.c.Do(ctx, name, true, &cmd)
	if err != nil {
		return nil, err
	}
	if err := host.CheckStatus(name, comp.Status); err != nil {
		return nil, err
	}
	list := nvme.KVList(buf[:comp.Received])
	if err := list.Check(); err != nil {
		return nil, fmt.Errorf("%w: %w", client.ErrProtocol, err)
	}
	return list, nil
}

// longKey reads the long key in front of the value that the target has under dev. It returns nil if the value does not
// exist any more, or was not stored with a long key.
func (n *Namespace) longKey(ctx context.Context, dev []byte) ([]byte, error) {
	const name = "Retrieve"
	limit := n.geo.Load().space.MaxTransfer
	for b := make([]byte, min(firstLook, limit)); ; {
		var cmd client.Command
		SetRetrieve(&cmd, n.nsid, dev, b)
		comp, err := n.c.Do(ctx, name, true, &cmd)
		if err != nil {
			return nil, err
		}
		if comp.Status.Code() == nvme.KeyDoesNotExist {
			return nil, nil
		}
		if err := host.CheckStatus(name, comp.Status); err != nil {
			return nil, err
		}
		have := b[:min(comp.Received, uint32(comp.Result))]
		if key, ok := kvop.LongKey(have); ok {
			if h := n.hash(key); !bytes.Equal(h[:], dev) {
				return nil, nil
			}
			return key, nil
		}
		size, ok := kvop.KeyLen(have)
		if !ok || kvop.LongBytes(size) <= len(b) || kvop.LongBytes(size) > limit {
			return nil, nil
		}
		b = make([]byte, kvop.LongBytes(size))
	}
}
