// Package kv is the key value side of the host: a namespace of the NVMe Key Value command set as Get, Put
// and Delete.
//
//	client.Connect ───> Controller
//	kv.Open ──────────>   ├── Namespace   Get, Put, PutIfAbsent, PutIfPresent, Delete, Exists, Keys
//	                      │               for any number of goroutines, with contexts
//	Namespace.OpenQueue ─>└── Queue       the same, many outstanding, for one goroutine, nothing allocated
//
// Credits, buffers, transports and reconnecting are as package client has them.
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

// Namespace is a key value namespace of a controller: values of any size up to a limit, found by
// keys of 1 to 16 bytes, or of up to 64 KiB with Options.LongKeys. All its methods may be called from
// any goroutine; Queue is for one that wants many operations outstanding.
//
// An operation is atomic, and as durable when it has returned as the target promises. When the connection
// is lost while one is outstanding, it is repeated on the next one, but for PutIfAbsent, which fails with
// client.ErrConnectionLost. A Put or Delete that is repeated may thus be carried out twice: who
// puts a key from two places at once has to expect either to be the last.
//
// A method whose context ends returns at once and its buffers are the caller's again. The target is asked
// to abort the command, but it may still be carried out.
//
// Errors of all of them: those of this package where they apply; other *client.StatusErrors;
// client.ErrInvalid, ErrConnectionLost, ErrClosed, ErrProtocol, ErrUnsupported, ErrNamespaceGone; the context's.
type Namespace struct {
	c    *client.Controller
	nsid uint32
	hash func([]byte) [nvme.MaxKVKey]byte // nil: keys are as they are
	geo  atomic.Pointer[geometry]
	ops  sync.Pool // of *kvop.Op
}

// geometry is what Identify says of a namespace.
type geometry struct {
	info  Info
	space kvop.Space
}

// Options say how a namespace is used.
type Options struct {
	// LongKeys allows keys of up to 64 KiB: the target gets a hash of each, the first 128 bits of its
	// SHA-256, and the key itself in front of the value (integers are little endian):
	//
	//	0 magic "JKVL" | 4 version u16, 1 | 6 zero u16 | 8 key length u32 | 12 key | value
	//
	// It is compared on every operation, so that a value is never taken for another key's: two keys
	// of one hash are ErrKeyCollision for who puts the second one. All keys are hashed then, short ones too, so that
	// none can be taken for the hash of another; whoever uses the namespace must do so, or else finds, and
	// makes, values that are ErrForeignValue. Put of a key that exists takes three commands instead of one,
	// PutIfPresent and Delete take two.
	LongKeys bool

	hash func([]byte) [nvme.MaxKVKey]byte // of tests
}

// Info describes a namespace.
type Info struct {
	NSID uint32
	// SizeBytes is the capacity, UsedBytes what is in use.
	SizeBytes, UsedBytes uint64
	// MaxKey is the longest key and MaxValue the longest value in bytes: the least of what the
	// namespace and a command take. With long keys a value shares MaxValue with its key and 12 bytes.
	MaxKey, MaxValue int
	// MaxKeys is the largest number of keys; 0: none is named.
	MaxKeys uint32
	// UUID, NGUID and EUI64 are zero where the target names none.
	UUID, NGUID [16]byte
	EUI64       [8]byte
	// ANAGroup is the group whose state ANA reports; 0 none.
	ANAGroup uint32
	// ReadOnly: write protected.
	ReadOnly bool
	// SSD is the number of the drive in a jbofd node; 0 elsewhere.
	SSD uint16
}

// Open identifies a key value namespace.
//
// Errors: client.ErrNamespaceGone if there is none of this NSID; client.ErrUnsupported if it is of another
// kind; those of Namespace.
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

// maxValue bounds what the host believes of a namespace's limit of values.
const maxValue = 1 << 30

// Refresh identifies the namespace anew: after a client.EventNamespaces, or to know what is in use now.
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
		return fmt.Errorf("%w: namespace %d has command set %d, not keys and values", client.ErrUnsupported, n.nsid, d.CSI)
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
		return fmt.Errorf("%w: keys of namespace %d have up to %d bytes, long keys need %d", client.ErrUnsupported, n.nsid, f.KVKML(), nvme.MaxKVKey)
	}
	g := geometry{
		space: kvop.Space{NSID: n.nsid, MaxKey: int(f.KVKML()), MaxValue: int(min(f.KVVML(), maxValue)), MaxTransfer: who.MaxTransferBytes,
			Hash: n.hash, Counted: n.c.Options().Transport != client.RDMA},
		info: Info{NSID: n.nsid, SizeBytes: id.NSZE(), UsedBytes: id.NUSE(), MaxKeys: f.MNKS(), UUID: d.UUID, NGUID: id.NGUID(), EUI64: id.EUI64(),
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

// Info returns what the latest Refresh found.
func (n *Namespace) Info() Info { return n.geo.Load().info }

// NSID returns the namespace identifier.
func (n *Namespace) NSID() uint32 { return n.nsid }

// Controller returns the controller, for credits and the like.
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

// Get writes the value of key to dst, as much as fits, and returns the size of all of it, which may be more than
// len(dst).
//
// Errors: ErrKeyNotFound; ErrValueTooLarge if one command cannot move as much of it as fits.
func (n *Namespace) Get(ctx context.Context, key, dst []byte) (size int, err error) {
	return n.run(ctx, Get, key, dst)
}

// firstGet is the size of the buffer with which Value tries first.
const firstGet = 4096

// Value returns the value of key in memory of its own.
//
// Errors: ErrKeyNotFound; ErrValueTooLarge if one command cannot move all of it.
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
			return nil, fmt.Errorf("%w: Value of %d bytes: a command moves %d (MDTS)", ErrValueTooLarge, size, limit)
		}
		b = make([]byte, size) // it may have grown again when it comes
	}
}

// Put stores value under key, whether there is one or not.
//
// Errors: ErrValueTooLarge, ErrCapacityExceeded; with long keys ErrKeyCollision.
func (n *Namespace) Put(ctx context.Context, key, value []byte) error {
	_, err := n.run(ctx, Put, key, value)
	return err
}

// PutIfAbsent stores value under key if there is none. It is never repeated: client.ErrConnectionLost leaves
// open whether it took place.
//
// Errors: ErrKeyExists; those of Put.
func (n *Namespace) PutIfAbsent(ctx context.Context, key, value []byte) error {
	_, err := n.run(ctx, PutIfAbsent, key, value)
	return err
}

// PutIfPresent stores value under key if there is one.
//
// Errors: ErrKeyNotFound; those of Put.
func (n *Namespace) PutIfPresent(ctx context.Context, key, value []byte) error {
	_, err := n.run(ctx, PutIfPresent, key, value)
	return err
}

// Delete removes key and its value. That there is none is no error.
func (n *Namespace) Delete(ctx context.Context, key []byte) error {
	_, err := n.run(ctx, Delete, key, nil)
	return err
}

// Exists reports whether there is a value under key.
func (n *Namespace) Exists(ctx context.Context, key []byte) (bool, error) {
	_, err := n.run(ctx, Exists, key, nil)
	if errors.Is(err, ErrKeyNotFound) {
		return false, nil
	}
	return err == nil, err
}

// listBytes is the buffer of a List, firstLook that of a look at the key in front of a value.
const (
	listBytes = 64 << 10
	firstLook = 512
)

// Keys yields all keys, in an order of the target's, as one List command after the other brings them. Keys that are
// put or deleted meanwhile may come or not; one that is there all the time comes, and may come again if others are
// deleted. A key is the loop's until its next turn. After an error, which comes with a nil key, it ends.
//
// With long keys each key takes a Retrieve besides; values that were not stored with long keys are passed
// over.
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

// deviceKeys yields the keys as the target has them.
func (n *Namespace) deviceKeys(ctx context.Context) iter.Seq2[[]byte, error] {
	return func(yield func([]byte, error) bool) {
		buf := make([]byte, min(listBytes, n.geo.Load().space.MaxTransfer))
		var last, from []byte // the key before, and the one that the present List begins with
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

// list runs one List from a key on.
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

// longKey fetches the key in front of the value that the target has under dev; nil if there is
// none any more, or it is not a long key's.
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
