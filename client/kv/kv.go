// Package kv is a host for namespaces of the NVMe Key Value command set: Get, Put and Delete.
//
//	client.Connect ───> Controller
//	kv.Open ──────────>   ├── Namespace   Get, Put, PutIfAbsent, PutIfPresent, Delete, Exists, Keys
//	                      │               for any number of goroutines, with contexts
//	Namespace.OpenQueue ─>└── OpQueue     the same for one goroutine, many outstanding, without allocations
//
// Credits, buffers, transports and losses of the connection are as in package client.
package kv

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"iter"
	"sync"
	"sync/atomic"

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
//   - Get, Exists and Keys are repeated.
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
}

// Open opens a key value namespace: it identifies it and learns its drive.
//
// Errors: client.ErrNamespaceGone if there is no namespace of this NSID; client.ErrUnsupported if it has another
// command set; those of Namespace.
func Open(ctx context.Context, c *client.Controller, nsid uint32, o Options) (*Namespace, error) {
	n := &Namespace{c: c, nsid: nsid, ops: sync.Pool{New: func() any { return new(kvop.Op) }}}
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

// Refresh identifies the namespace again, after a client.EventNamespaces or to update Info.UsedBytes.
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
			Hash:        n.hash, Counted: n.c.Options().Transport != client.RDMA},
		info: Info{NSID: n.nsid, SizeBytes: id.NSZE(), UsedBytes: id.NUSE(), MaxKeys: f.MNKS(), UUID: d.UUID,
			NGUID: id.NGUID(), EUI64: id.EUI64(),
			ANAGroup: id.ANAGRPID(), ReadOnly: id.NSATTR()&nvme.NSATTRWriteProtected != 0},
	}
	if g.space.MaxTransfer == 0 {
		g.space.MaxTransfer = maxValue
	}
	g.info.MaxKey = g.space.MaxKeyLen()
	g.info.MaxValue, _ = g.space.Limit()
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

// run runs an operation to its end.
func (n *Namespace) run(ctx context.Context, kind kvop.Kind, key, value []byte) (size int, err error) {
	s := &n.geo.Load().space
	op := n.ops.Get().(*kvop.Op)
	defer func() {
		op.Forget()
		n.ops.Put(op)
	}()
	if err := op.Start(s, kind, key, value); err != nil {
		return 0, err
	}
	for done := false; !done; {
		comp, err := n.c.Do(ctx, kind.String(), op.MayRepeat(), &op.Cmd)
		if err != nil {
			return 0, err
		}
		done = op.Step(s, &comp)
	}
	if err := host.CheckStatus(kind.String(), op.Status); err != nil {
		return 0, err
	}
	if op.Err != nil {
		return 0, fmt.Errorf("%s: %w", kind, op.Err)
	}
	return op.Size, nil
}

// Get copies the value of key to dst, as much as fits, and returns the size of the whole value, which may be greater
// than len(dst).
//
// Errors: ErrKeyNotFound; ErrValueTooLarge if one command cannot transfer as much of the value as fits.
func (n *Namespace) Get(ctx context.Context, key, dst []byte) (size int, err error) {
	return n.run(ctx, Get, key, dst)
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
	_, err := n.run(ctx, Put, key, value)
	return err
}

// PutIfAbsent stores value under key if the key does not exist. It is never repeated: after client.ErrIndeterminate it
// may or may not have taken effect.
//
// Errors: ErrKeyExists; those of Put.
func (n *Namespace) PutIfAbsent(ctx context.Context, key, value []byte) error {
	_, err := n.run(ctx, PutIfAbsent, key, value)
	return err
}

// PutIfPresent stores value under key if the key exists. It is never repeated: after client.ErrIndeterminate it may or
// may not have taken effect.
//
// Errors: ErrKeyNotFound; those of Put.
func (n *Namespace) PutIfPresent(ctx context.Context, key, value []byte) error {
	_, err := n.run(ctx, PutIfPresent, key, value)
	return err
}

// Delete deletes key and its value. It succeeds if the key does not exist.
func (n *Namespace) Delete(ctx context.Context, key []byte) error {
	_, err := n.run(ctx, Delete, key, nil)
	return err
}

// Exists reports whether key exists.
func (n *Namespace) Exists(ctx context.Context, key []byte) (bool, error) {
	_, err := n.run(ctx, Exists, key, nil)
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

// deviceKeys yields the keys of the target, which are hashes of long keys.
func (n *Namespace) deviceKeys(ctx context.Context) iter.Seq2[[]byte, error] {
	return func(yield func([]byte, error) bool) {
		buf := make([]byte, min(listBytes, n.geo.Load().space.MaxTransfer))
		var last, from []byte // the latest key, and the first key of the current List
		for news := true; news; {
			news = false
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
				news = true
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
