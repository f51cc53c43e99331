package bench

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"jbofd/client"
	"jbofd/internal/bufpool"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/file"
	"jbofd/internal/ssd/mem"
)

// Kind is the kind of an operation.
type Kind uint8

// Kinds of operations.
const (
	Read Kind = iota
	Write
	Flush
)

// String names the kind.
func (k Kind) String() string { return [...]string{"read", "write", "flush"}[k] }

// Op is one I/O to submit.
type Op struct {
	Kind Kind
	FUA  bool
	// Offset is in bytes and a multiple of the target's block size.
	Offset int64
	Buf    []byte
	Tag    uint64
}

// Done is a completed Op.
type Done struct {
	Tag uint64
	Err error
}

// TargetInfo describes a target.
type TargetInfo struct {
	// Name is the target's type and address, for the report.
	Name      string
	SizeBytes int64
	BlockSize int
	// MaxTransferBytes is the maximum size of an I/O; 0 stands for no limit. MaxDepth is the maximum queue depth.
	MaxTransferBytes, MaxDepth int
}

// Target is what the load is generated against: a namespace of an NVMe-oF target, or a device.
type Target interface {
	Info() TargetInfo
	// OpenQueue opens a queue for one job.
	OpenQueue(ctx context.Context, depth int) (Queue, error)
	// Buffer returns page-aligned memory for I/O and a function that releases it. The memory is registered with the
	// transport or the device if that makes I/O faster.
	Buffer(size int) (b []byte, free func() error, err error)
	Close() error
}

// pages returns memory for I/O that is mapped directly from the kernel.
func pages(size int) ([]byte, func() error, error) {
	b, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, nil, fmt.Errorf("%d bytes of buffer: %w", size, err)
	}
	return b, func() error { return unix.Munmap(b) }, nil
}

// Queue is one job's queue to the target. One goroutine calls Submit and Poll.
type Queue interface {
	// Submit submits operations in order and returns how many were accepted.
	Submit(ops []Op) (int, error)
	// Poll returns completed operations. The argument wait has the meaning of that of client.QPair.Poll.
	Poll(dst []Done, wait time.Duration) (int, error)
	// Interrupt makes a blocked Poll return. Any goroutine may call it. The queue cannot be used afterwards.
	Interrupt()
	Close() error
}

// NVMe is a target: a namespace over NVMe/TCP or NVMe/RDMA.
type NVMe struct {
	c    *client.Controller
	ns   *client.Namespace
	info TargetInfo
}

// NewNVMe returns the target for a namespace and takes ownership of c. Options.QPairs of c must be at least the number
// of jobs.
func NewNVMe(ctx context.Context, c *client.Controller, nsid uint32) (*NVMe, error) {
	ns, err := c.Namespace(ctx, nsid)
	if err != nil {
		return nil, err
	}
	id, err := c.Identity(ctx)
	if err != nil {
		return nil, err
	}
	o := c.Options()
	return &NVMe{c: c, ns: ns, info: TargetInfo{
		Name:      fmt.Sprintf("%s %s nsid %d", o.URL(), o.SubNQN, nsid),
		SizeBytes: ns.Size(), BlockSize: ns.BlockSize(), MaxTransferBytes: ns.MaxTransfer(), MaxDepth: id.MaxQueueDepth,
	}}, nil
}

// Info implements Target.
func (n *NVMe) Info() TargetInfo { return n.info }

// Credit returns the credit of the namespace's drive.
func (n *NVMe) Credit() client.Credit { return n.ns.Credit() }

// Close implements Target.
func (n *NVMe) Close() error { return n.c.Close() }

// Buffer implements Target.
func (n *NVMe) Buffer(size int) ([]byte, func() error, error) { return n.c.AllocBuffer(size) }

// OpenQueue implements Target.
func (n *NVMe) OpenQueue(ctx context.Context, depth int) (Queue, error) {
	q, err := n.c.OpenQPair(ctx)
	if err != nil {
		return nil, err
	}
	if q.Depth() < depth {
		return nil, errors.Join(fmt.Errorf("the target's queues take %d commands, --iodepth is %d", q.Depth(), depth),
			q.Close())
	}
	return &nvmeQueue{q: q, nsid: n.ns.NSID(), bs: uint64(n.info.BlockSize), lens: make([]uint32, depth),
		reads: make([]bool, depth),
		cmds:  make([]client.Command, 0, depth), comps: make([]client.Completion, depth)}, nil
}

// nvmeQueue implements Queue with a client.QPair.
type nvmeQueue struct {
	q     *client.QPair
	nsid  uint32
	bs    uint64
	lens  []uint32 // by tag, to detect short reads
	reads []bool
	cmds  []client.Command
	comps []client.Completion
}

func (q *nvmeQueue) Submit(ops []Op) (int, error) { // hot: 0 allocs
	q.cmds = q.cmds[:len(ops)]
	for i := range ops {
		o, c := &ops[i], &q.cmds[i]
		switch o.Kind {
		case Flush:
			c.SQE = client.SQE{}
			c.SQE.SetOpcode(client.OpFlush)
			c.SQE.SetNSID(q.nsid)
		case Read:
			client.SetRW(c, client.OpRead, q.nsid, uint64(o.Offset)/q.bs, uint32(uint64(len(o.Buf))/q.bs))
		case Write:
			client.SetRW(c, client.OpWrite, q.nsid, uint64(o.Offset)/q.bs, uint32(uint64(len(o.Buf))/q.bs))
			if o.FUA {
				c.SQE.SetCDW(12, c.SQE.CDW(12)|client.CDW12FUA)
			}
		}
		c.Data, c.Tag = o.Buf, o.Tag
		q.lens[o.Tag], q.reads[o.Tag] = uint32(len(o.Buf)), o.Kind == Read
	}
	return q.q.Submit(q.cmds)
}

func (q *nvmeQueue) Poll(dst []Done, wait time.Duration) (int, error) { // hot: 0 allocs
	n, err := q.q.Poll(q.comps[:min(len(dst), len(q.comps))], wait)
	for i := range n {
		c := &q.comps[i]
		d := Done{Tag: c.Tag}
		switch {
		case !c.Status.OK():
			d.Err = errors.New(c.Status.String())
		case q.reads[c.Tag] && c.Received != q.lens[c.Tag]:
			d.Err = fmt.Errorf("short read: %d of %d bytes", c.Received, q.lens[c.Tag])
		}
		dst[i] = d
	}
	return n, err
}

func (q *nvmeQueue) Interrupt()   { q.q.Interrupt() }
func (q *nvmeQueue) Close() error { return q.q.Close() }

// Raw is a target: a device that is used without a network.
type Raw struct {
	dev ssd.Device
	// pool provides the buffers, so that the device can register them as it does in the daemon; nil for memory directly
	// from the kernel.
	pool *bufpool.Pool
	acct *bufpool.Account
}

// NewRaw returns the target for a device and takes ownership of dev.
func NewRaw(dev ssd.Device) *Raw { return &Raw{dev: dev} }

// RawConfig describes the device to open.
type RawConfig struct {
	// Path is a regular file or a block device, or mem:SIZE.
	Path string
	// Engine is io_uring or threads, for files and block devices. Empty stands for the best engine available.
	Engine string
	// BlockSize is the block size of mem:SIZE.
	BlockSize int
	// Buffers is the number of buffers of BufferBytes that the load will request.
	Buffers, BufferBytes int
}

// OpenRaw opens a device for use without a network.
//
// Errors: ErrConfig for an invalid configuration; the errors of the device.
func OpenRaw(c RawConfig) (*Raw, error) {
	t := &Raw{}
	var err error
	if s, ok := strings.CutPrefix(c.Path, "mem:"); ok {
		n, perr := ParseSize(s)
		if perr != nil {
			return nil, fmt.Errorf("%w: --raw %s: %w", ErrConfig, c.Path, perr)
		}
		t.dev, err = mem.Open(mem.Config{Name: "raw", SizeBytes: n, BlockSize: c.BlockSize})
	} else {
		if c.BufferBytes > 0 && c.BufferBytes <= bufpool.DefaultMaxBytes {
			// One account may use at most half of a pool, and its blocks are powers of two.
			total := max(4*int64(c.Buffers)*int64(c.BufferBytes), 4*bufpool.DefaultMaxBytes)
			if t.pool, err = bufpool.New(bufpool.Config{TotalBytes: total}); err != nil {
				return nil, err
			}
			t.acct = t.pool.Account("bench")
		}
		t.dev, err = file.Open(file.Config{Name: "raw", Path: c.Path, Engine: c.Engine, Pool: t.pool})
	}
	if errors.Is(err, mem.ErrConfig) || errors.Is(err, file.ErrConfig) {
		err = fmt.Errorf("%w: --raw %s: %w", ErrConfig, c.Path, err)
	}
	if err != nil {
		if t.pool != nil {
			err = errors.Join(err, t.pool.Close())
		}
		return nil, err
	}
	return t, nil
}

// Buffer implements Target.
func (r *Raw) Buffer(size int) ([]byte, func() error, error) {
	if r.pool != nil {
		if b, ok := r.pool.Get(r.acct, size); ok {
			return b.B, func() error { r.pool.Put(b); return nil }, nil
		}
	}
	return pages(size)
}

// Info implements Target.
func (r *Raw) Info() TargetInfo {
	i := r.dev.Info()
	name := "raw " + i.Backend
	if i.Path != "" {
		name += " " + i.Path
	}
	if i.Engine != "" && i.Engine != i.Backend {
		name += " (" + i.Engine + ")"
	}
	return TargetInfo{Name: name, SizeBytes: i.SizeBytes, BlockSize: i.BlockSize}
}

// maxExtents limits the duration of unwritten to some tenths of a second.
const maxExtents = 1 << 17

// unwritten returns how many bytes of a region hold no data, as far as that can be determined quickly.
func (r *Raw) unwritten(start, size int64) int64 {
	holes, at, left := int64(0), start, maxExtents
	for e := range ssd.Data(r.dev) {
		holes += max(min(e.Start, start+size)-at, 0)
		at = max(at, e.End)
		if left--; left == 0 {
			return holes
		}
	}
	return holes + max(start+size-at, 0)
}

// Close implements Target.
func (r *Raw) Close() error {
	err := r.dev.Close()
	if r.pool != nil {
		r.acct.Close()
		err = errors.Join(err, r.pool.Close())
	}
	return err
}

// OpenQueue implements Target.
func (r *Raw) OpenQueue(_ context.Context, depth int) (Queue, error) {
	q, err := r.dev.OpenQueue(depth)
	if err != nil {
		return nil, err
	}
	return &rawQueue{q: q, reqs: make([]ssd.Request, 0, depth), comps: make([]ssd.Completion, depth)}, nil
}

// rawQueue implements Queue with an ssd.Queue.
type rawQueue struct {
	q     ssd.Queue
	reqs  []ssd.Request
	comps []ssd.Completion
}

func (q *rawQueue) Submit(ops []Op) (int, error) { // hot: 0 allocs
	q.reqs = q.reqs[:len(ops)]
	for i := range ops {
		o := &ops[i]
		r := ssd.Request{Op: ssd.Read, Offset: o.Offset, Len: int64(len(o.Buf)), Buf: o.Buf, Tag: o.Tag}
		switch o.Kind {
		case Write:
			r.Op = ssd.Write
			if o.FUA {
				r.Flags = ssd.FUA
			}
		case Flush:
			r = ssd.Request{Op: ssd.Flush, Tag: o.Tag}
		}
		q.reqs[i] = r
	}
	return q.q.Submit(q.reqs), nil
}

func (q *rawQueue) Poll(dst []Done, wait time.Duration) (int, error) { // hot: 0 allocs
	n := ssd.Await(q.q, q.comps[:min(len(dst), len(q.comps))], wait)
	for i := range n {
		dst[i] = Done{Tag: q.comps[i].Tag, Err: q.comps[i].Err}
	}
	return n, nil
}

func (q *rawQueue) Interrupt()   { q.q.Wake() }
func (q *rawQueue) Close() error { return q.q.Close() }
