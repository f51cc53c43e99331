// Package vfio implements a drive by an NVMe driver of its own, in user space: it owns a PCI function (package pci, by
// VFIO) and talks to its controller through queues in memory (package pcie). No call of the kernel is on the path of a
// request; the kernel is asked only to wait for an interrupt when there is nothing to do.
//
//	Queue.Submit ──> commands in a pcie.Ring ══> controller
//	Queue.Poll   <── completions in the Ring <══ controller ──> interrupt ──> the Poll that waits
//	keeper ── admin commands: rings made and deleted, timeouts, events
//
// A request longer than a command may be is carried out in parts. Memory of the bufpool is mapped for the device region
// by region, when it is first used, and read and written in place; data in other memory is copied.
//
// Every request is answered. A command that is not completed within Config.Timeout is aborted. If that does not help
// within AbortTimeout, or the controller says what cannot be, the controller is reset, and commands that were under way
// are sent again, a few times. If it cannot be reset, or is being removed, the device loses its access to all memory
// first, and then all requests end with ssd.ErrGone.
package vfio

import (
	"errors"
	"fmt"
	"math/bits"
	"sync"
	"sync/atomic"
	"time"

	"jbofd/internal/bufpool"
	"jbofd/internal/nvme"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/vfio/pci"
	"jbofd/internal/ssd/vfio/pcie"
	"jbofd/internal/units"
)

// Config describes a device.
type Config struct {
	// Name is the device's name in the configuration, Address that of its function.
	Name, Address string
	// NSID is the namespace; 0: the first active one.
	NSID uint32
	// Pool is where buffers usually come from. May be nil.
	Pool *bufpool.Pool
	// Timeout is how long a command may take until it is aborted, 0: 30 s. AbortTimeout is how long it may take then
	// until the controller is reset, 0: 5 s. AdminTimeout bounds each admin command, 0: 10 s.
	Timeout, AbortTimeout, AdminTimeout time.Duration
	// HealthEvery is how often the drive's SMART log is read, 0: 1 min.
	HealthEvery time.Duration
	// Event is told what the drive reports of its own accord; nil: nobody is. It must not block. One goroutine calls
	// it.
	Event func(kind ssd.HealthEvent, what string)
}

const (
	defaultTimeout      = 30 * time.Second
	defaultAbortTimeout = 5 * time.Second
	// maxTries is how often a command is sent, if it ends because the controller was reset, or with a status that says
	// that it may be tried again.
	maxTries = 4
	// retryDelay is how long such a command waits after such a status.
	retryDelay = 100 * time.Millisecond
	// maxDepth bounds the depth of a queue.
	maxDepth = 4096
)

// ErrConfig: a field of Config, or a depth, is out of its bounds.
var ErrConfig = errors.New("vfio: invalid configuration")

// Device is an open drive.
type Device struct {
	cfg   Config
	fn    pcie.Function
	ctrl  *pcie.Controller // used by Open, and then by the keeper alone
	info  ssd.Info
	props pcie.Properties
	nsid  uint32
	shift uint8

	// zeroes is memory for writes of zeroes, if the drive has no command for that, or nil.
	zeroes   []byte
	zeroesAt uint64

	// regions are where the device sees the regions of the pool, plus 1; 0: they are not mapped, refused: they cannot
	// be, because of unmapped.
	regions  []atomic.Uint64
	mapping  sync.Mutex
	unmapped error

	gone atomic.Bool
	// health is what the drive has said last, or nil; its Events are in heard.
	health    atomic.Pointer[ssd.Health]
	heard     [ssd.HealthEvents]atomic.Uint64
	attention attention // the keeper's
	// idle: the keeper sleeps until it is signalled, because no command is under way.
	idle atomic.Bool

	mu sync.Mutex
	// why the device is gone; nil: it works.
	why    error
	closed bool
	jobs   []func()
	// queues are by their number, less 1; nil: free. spares are rings, with their memory, of queues that were closed.
	queues []*queue
	spares []spare

	keeper chan struct{} // closed when the keeper has ended
}

// refused is in Device.regions for what cannot be mapped.
const refused = ^uint64(0)

// Open brings a controller up. It owns the function from then on, also if it fails.
//
// Errors: those of pcie.Controller.
func Open(cfg Config, fn pcie.Function) (*Device, error) {
	if cfg.Timeout == 0 {
		cfg.Timeout = defaultTimeout
	}
	if cfg.AbortTimeout == 0 {
		cfg.AbortTimeout = defaultAbortTimeout
	}
	if cfg.HealthEvery == 0 {
		cfg.HealthEvery = defaultHealthEvery
	}
	if cfg.HealthEvery < 0 || cfg.Timeout < 0 || cfg.AbortTimeout < 0 || cfg.AdminTimeout < 0 {
		return nil, errors.Join(fmt.Errorf("%w: a timeout is negative", ErrConfig), fn.Close())
	}
	d := &Device{cfg: cfg, fn: fn, keeper: make(chan struct{})}
	if err := d.open(); err != nil {
		fn.Revoke()
		if d.ctrl != nil {
			err = errors.Join(err, d.ctrl.Free())
		}
		return nil, errors.Join(fmt.Errorf("device %q: %w", cfg.Name, err), fn.Close())
	}
	go d.keep()
	return d, nil
}

// OpenAddress opens the controller at an address, which has the driver vfio-pci.
//
// Errors: those of pci.Bus.Open, which say what to do; and of Open.
func OpenAddress(cfg Config) (*Device, error) {
	f, err := pci.Bus{}.Open(cfg.Address)
	if err != nil {
		return nil, fmt.Errorf("device %q: %w", cfg.Name, err)
	}
	return Open(cfg, f)
}

// NSID is the namespace.
func (d *Device) NSID() uint32 { return d.nsid }

func (d *Device) open() error {
	var err error
	if d.ctrl, err = pcie.NewController(pcie.Config{Function: d.fn, AdminTimeout: d.cfg.AdminTimeout}); err != nil {
		return err
	}
	if err = d.ctrl.Enable(); err != nil {
		return err
	}
	nsid, id, err := d.ctrl.Namespace(d.cfg.NSID)
	if err != nil {
		return err
	}
	if err := d.describe(nsid, id); err != nil {
		return err
	}
	if err := d.readHealth(); err != nil {
		return err
	}
	d.queues = make([]*queue, d.ctrl.Queues())
	if p := d.cfg.Pool; p != nil {
		d.regions = make([]atomic.Uint64, p.Regions())
	}
	if !d.props.WriteZeroes {
		d.zeroes, d.zeroesAt, err = d.ctrl.Alloc(zeroesBytes)
	}
	return err
}

// zeroesBytes is the length of Device.zeroes, and bounceBytes that of a buffer for a copy.
const zeroesBytes, bounceBytes = 128 << 10, 128 << 10

// describe takes what the controller has said of itself and of a namespace, which Check has found to be possible.
//
// Errors: pcie.ErrUnsuited.
func (d *Device) describe(nsid uint32, id *nvme.IdentifyNamespace) error {
	d.props, d.nsid = d.ctrl.Properties(), nsid
	info, err := makeInfo(&d.cfg, &d.props, id)
	d.info, d.shift = info, id.Format().Shift()
	return err
}

// makeInfo is what package ssd wants to know.
func makeInfo(cfg *Config, p *pcie.Properties, id *nvme.IdentifyNamespace) (ssd.Info, error) {
	block := 1 << id.Format().Shift()
	size, _ := id.NSZE().Bytes(id.Format().Shift())
	switch {
	case size == 0:
		return ssd.Info{}, fmt.Errorf("%w: the namespace has no blocks", pcie.ErrUnsuited)
	case block > min(p.MaxTransfer, zeroesBytes):
		return ssd.Info{}, fmt.Errorf("%w: its blocks of %d bytes are longer than a transfer, %d", pcie.ErrUnsuited,
			block, min(p.MaxTransfer, zeroesBytes))
	}
	info := ssd.Info{Name: cfg.Name, Backend: "nvme", Path: cfg.Address, Model: p.Model, Serial: p.Serial,
		SizeBytes: int64(size), BlockSize: block, OptimalIOBytes: max(block, 4096),
		AtomicWriteBytes: block * atomicBlocks(p.AtomicBlocks, id), VolatileCache: p.VolatileCache,
		Deallocates:          p.DSM,
		DeallocatedReadsZero: p.DSM && id.DLFEAT()&7 == nvme.DLFEATReadZeroes, Engine: "vfio"}
	if id.NSFEAT()&nvme.NSFEATOptPerf != 0 {
		info.OptimalIOBytes = max(info.OptimalIOBytes, block*(int(id.NPWG())+1))
	}
	return info, nil
}

// atomicBlocks is what a power loss does not tear: an aligned write of so many blocks. A namespace may have boundaries
// that writes must not cross for that; it is a power of two that divides them.
func atomicBlocks(n int, id *nvme.IdentifyNamespace) int {
	if id.NSFEAT()&nvme.NSFEATAtomics != 0 {
		if u := int(id.NAWUPF()); u > 0 {
			n = u + 1
		}
		if b := int(id.NABSPF()); b > 0 {
			n = min(n, (b+1)&-(b+1))
		}
		if id.NABO() != 0 {
			n = 1
		}
	}
	return 1 << (bits.Len(uint(n)) - 1)
}

// Info implements ssd.Device.
func (d *Device) Info() ssd.Info { return d.info }

// Healthy implements ssd.Device.
func (d *Device) Healthy() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.why != nil {
		return d.why
	}
	if d.closed {
		return ssd.ErrGone
	}
	return nil
}

// address returns where the device sees memory of the pool, or false.
//
// hot: 0 allocs
func (d *Device) address(b []byte) (uint64, bool) {
	if d.cfg.Pool == nil {
		return 0, false
	}
	i, base, ok := d.cfg.Pool.RegionOf(b)
	if !ok {
		return 0, false
	}
	at := d.regions[i].Load()
	if at == 0 {
		at = d.mapRegion(i, base)
	}
	if at == refused {
		return 0, false
	}
	return at - 1 + uint64(bufpool.OffsetIn(base, b)), true
}

// mapRegion maps a region of the pool.
func (d *Device) mapRegion(i int, base []byte) uint64 {
	d.mapping.Lock()
	defer d.mapping.Unlock()
	if at := d.regions[i].Load(); at != 0 {
		return at
	}
	address, err := d.fn.Map(base)
	at := address + 1
	if err != nil {
		at, d.unmapped = refused, fmt.Errorf("data is copied: %w", err)
	}
	d.regions[i].Store(at)
	return at
}

// Fallback returns why data is copied, or nil: a region of the pool could not be mapped for the device.
func (d *Device) Fallback() error {
	d.mapping.Lock()
	defer d.mapping.Unlock()
	return d.unmapped
}

// OpenQueue implements ssd.Device.
func (d *Device) OpenQueue(depth int) (ssd.Queue, error) {
	if depth < 1 || depth > maxDepth {
		return nil, fmt.Errorf("%w: queue depth is %d, want 1 to %d", ErrConfig, depth, maxDepth)
	}
	var q *queue
	err := ssd.ErrGone
	d.do(func() { q, err = d.makeQueue(depth) })
	if err != nil {
		return nil, fmt.Errorf("queue on %q: %w", d.info.Name, err)
	}
	return q, nil
}

// spare is a ring that no queue uses.
type spare struct {
	id      uint16
	entries int
	ring    *pcie.Ring
	at      uint64
	// lists has a page of PRPs, or a range to deallocate, for each command, seen by the device at listsAt.
	lists   []byte
	listsAt uint64
	bounces *bounces
}

// makeQueue makes a queue. It is a job of the keeper.
func (d *Device) makeQueue(depth int) (*queue, error) {
	if d.gone.Load() {
		return nil, ssd.ErrGone
	}
	// Twice as many as requests, because those may be of several commands; and one entry is always free.
	entries := min(max(1<<bits.Len(uint(2*depth)), 64), d.props.Entries)
	i := 0
	for ; i < len(d.queues) && d.queues[i] != nil; i++ {
	}
	if i == len(d.queues) {
		return nil, fmt.Errorf("all %d queues of the controller are in use", i)
	}
	s := spare{id: uint16(i + 1), entries: entries}
	for k, have := range d.spares {
		if have.id == s.id && have.entries == entries {
			s = have
			d.spares = append(d.spares[:k], d.spares[k+1:]...)
			break
		}
	}
	var err error
	if s.ring == nil {
		if s.ring, s.at, err = d.ctrl.NewRing(s.id, entries); err != nil {
			return nil, err
		}
		if s.lists, s.listsAt, err = d.ctrl.Alloc(s.ring.Places() * d.ctrl.PageBytes()); err != nil {
			return nil, err
		}
		s.bounces = &bounces{alloc: d.ctrl.Alloc}
	}
	q := newQueue(d, s, depth)
	if err = d.ctrl.CreateRing(s.ring, s.at, q.vector); err != nil {
		d.spares = append(d.spares, s)
		var status pcie.StatusError
		if !errors.As(err, &status) {
			d.reset(err)
		}
		return nil, err
	}
	d.mu.Lock()
	d.queues[i] = q
	d.mu.Unlock()
	return q, nil
}

// deleteQueue takes the ring of a queue, on which nothing is under way, away from the controller. It is a job of the
// keeper.
func (d *Device) deleteQueue(q *queue) {
	d.mu.Lock()
	d.queues[q.mem.id-1] = nil // before a reset, which gives rings back to the controller
	d.mu.Unlock()
	if !d.gone.Load() {
		if err := d.ctrl.DeleteRing(q.ring); err != nil {
			d.reset(err)
		}
	}
	d.spares = append(d.spares, q.mem)
}

// do has the keeper do something, and waits for it. Nothing happens after Close.
func (d *Device) do(f func()) {
	done := make(chan struct{})
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		return
	}
	d.jobs = append(d.jobs, func() { f(); close(done) })
	d.mu.Unlock()
	d.fn.Vector(0).Signal()
	<-done
}

// Close implements ssd.Device: it waits for requests under way, as long as their timeouts allow, and has the controller
// save what it has cached.
func (d *Device) Close() error {
	d.mu.Lock()
	queues := append([]*queue(nil), d.queues...)
	d.mu.Unlock()
	for _, q := range queues {
		if q != nil {
			_ = q.Close()
		}
	}
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		<-d.keeper
		return nil
	}
	d.closed = true
	d.mu.Unlock()
	d.fn.Vector(0).Signal()
	<-d.keeper // it has revoked the access to memory
	return errors.Join(d.ctrl.Free(), d.fn.Close())
}

// blocks returns an offset or a length in blocks.
func (d *Device) blocks(n int64) units.Blocks { return units.Bytes(n).Blocks(d.shift) }
