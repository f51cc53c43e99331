// Package vfio implements a drive by an NVMe driver of its own, in user space: it owns a PCI function (package pci, by
// VFIO) and talks to its controller through queues in memory (package pcie). In steady state a request makes no system
// call. The exceptions are: the first command after the drive was idle wakes the keeper (one write to an eventfd), and
// so does a command that is retried; a Wait that blocks waits for an interrupt, or is woken, through an eventfd; the
// first use of a region of the pool maps it for the device, and the first uses of bounce buffers allocate them.
//
//	Queue.Submit ──> commands in a pcie.Ring ══> controller
//	Queue.Poll   <── completions in the Ring <══ controller
//	Queue.Wait   <── interrupt, which is masked while the queue is busy <══ controller
//	keeper ── admin commands: rings created and deleted, Aborts, asynchronous events
//
// A request longer than a command may be is carried out in parts, with one command for each. Memory of the bufpool is
// mapped for the device (it gets an IOVA, an address in the device's address space) region by region, when it is first
// used, and the device reads and writes it in place. Data in other memory is copied through bounce buffers.
//
// # Timeouts
//
// Every request ends, whatever the controller does:
//
//   - The keeper checks the outstanding commands every 400 ms, or every quarter of Config.Timeout if that is shorter.
//     A command that has been outstanding for Config.Timeout is aborted, so up to one such interval late.
//   - The keeper sends Abort commands one after the other and waits for each. Meanwhile it checks no other queue, and
//     OpenQueue and Close wait. If the controller refuses an Abort, nothing changes. If it does not answer an Abort
//     within AdminTimeout, it is reset at once. It is also reset if an aborted command is outstanding for AbortTimeout
//     more.
//   - An Abort that works completes the command with the status Command Abort Requested. Like other statuses that say
//     that the command may succeed later, without DNR (parts.MayRetry), it has the command sent again, 100 ms later
//     and with a new Timeout.
//   - After a reset all outstanding commands are sent again at once. Other reasons for a reset are a fatal status
//     (CSTS.CFS) and an invalid answer of the controller.
//   - A command is sent at most four times (parts.MaxTries), whatever ended the earlier ones. After the fourth its
//     request ends with the error of the status, usually ssd.ErrMedia, or with ssd.ErrMedia if a reset ended it. So if
//     a drive completes a command only when it is aborted, the request ends after about four times Timeout.
//   - While the controller activates firmware no command is aborted, for as long as it says that this may take, and for
//     at least Config.Activation. Meanwhile OpenQueue and Close wait, and so does an admin command that is under way.
//     If the activation has not ended then, the controller is reset.
//   - A controller that does not answer the command that reads a certain log page, the SMART log or that of an event,
//     is reset for it three times in a row (maxSilent). After that it is not asked for that page any more.
//   - If the controller cannot be reset, has vanished, or is being removed, the device loses its access to memory
//     first (Revoke). Then all requests end with ssd.ErrGone, and so do later ones.
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
	"jbofd/internal/ssd/parts"
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
	// Timeout is how long a command may be outstanding before it is aborted, 0: 30 s. A command that was aborted may be
	// sent again, so a request may take a multiple of it. AbortTimeout is how much longer the command may be
	// outstanding before the controller is reset, 0: 5 s. AdminTimeout bounds each admin command, 0: 10 s. See
	// "Timeouts" above.
	Timeout, AbortTimeout, AdminTimeout time.Duration
	// Activation is how long an activation of firmware may take at least, whatever the controller says, 0: 10 s.
	Activation time.Duration
	// HealthEvery is how often the drive's SMART log is read, 0: 1 min.
	HealthEvery time.Duration
	// Event is called with each event of the drive, of the controller or of the keeper; may be nil. It must not block.
	// One goroutine calls it.
	Event func(kind ssd.HealthEvent, what string)
}

const (
	defaultTimeout      = 30 * time.Second
	defaultAbortTimeout = 5 * time.Second
	// maxDepth bounds the depth of a queue.
	maxDepth = 4096
)

// ErrConfig: a field of Config, or a depth, is out of its bounds.
var ErrConfig = errors.New("vfio: invalid configuration")

// Device is an open drive.
type Device struct {
	cfg Config
	fn  pcie.Function
	// ctrl is used by Open, and then by the keeper alone, but for PageBytes, which is constant, Alloc, which any
	// goroutine may call, and Free, which Close calls after the keeper has ended.
	ctrl  *pcie.Controller
	info  ssd.Info
	props pcie.Properties
	nsid  uint32
	shift uint8

	// zeroes is memory for writes of zeroes, if the drive has no Write Zeroes command, or nil. zeroesAt is its IOVA.
	zeroes   []byte
	zeroesAt uint64

	// regions has the IOVAs of the regions of the pool.
	regions bufpool.Regions

	// areas are the memory of the controller, constant after Open.
	areas []*area

	gone atomic.Bool
	// health is what the SMART log has said last, or nil. heard counts the drive's events, by kind. attention is the
	// keeper's.
	health    atomic.Pointer[ssd.Health]
	heard     [ssd.HealthEvents]atomic.Uint64
	attention attention
	// idle: the keeper sleeps until it is signalled, or reads the SMART log, because no command is outstanding.
	idle atomic.Bool

	// mu guards what follows.
	mu sync.Mutex
	// why the device is gone; nil: it works.
	why    error
	closed bool
	// jobs are functions that the keeper is to call.
	jobs []func()
	// queues has the open queues, by QID less 1; nil: free. spares are the rings of queues that were closed, each with
	// its memory. Only the keeper uses spares.
	queues []*queue
	spares []ringMemory

	keeper chan struct{} // closed when the keeper has ended
}

// Open enables a controller. It owns the function from then on, and closes it if it fails.
//
// Errors: ErrConfig; those of pcie.NewController, Enable and Namespace; pcie.ErrUnsuited, if the namespace has no
// blocks, or blocks that are longer than a transfer may be; the system's for memory.
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
	if min(cfg.HealthEvery, cfg.Timeout, cfg.AbortTimeout, cfg.AdminTimeout, cfg.Activation) < 0 {
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
	if d.ctrl, err = pcie.NewController(pcie.Config{Function: d.fn, AdminTimeout: d.cfg.AdminTimeout,
		Activation: d.cfg.Activation}); err != nil {
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
	if err := d.firstHealth(); err != nil {
		return err
	}
	d.queues = make([]*queue, d.ctrl.Queues())
	d.regions.Init(d.cfg.Pool, d.fn.Map)
	if !d.props.WriteZeroes {
		if d.zeroes, d.zeroesAt, err = d.ctrl.Alloc(zeroesBytes); err != nil {
			return err
		}
	}
	d.openAreas()
	return nil
}

// zeroesBytes is the length of Device.zeroes.
const zeroesBytes = 128 << 10

// describe keeps the properties of the controller and of a namespace. id has been checked (IdentifyNamespace.Check,
// which pcie.Controller.Namespace calls).
//
// Errors: those of makeInfo.
func (d *Device) describe(nsid uint32, id *nvme.IdentifyNamespace) error {
	d.props, d.nsid = d.ctrl.Properties(), nsid
	info, err := makeInfo(&d.cfg, &d.props, id)
	d.info, d.shift = info, id.Format().Shift()
	return err
}

// makeInfo returns the ssd.Info of a namespace.
//
// Errors: pcie.ErrUnsuited, if the namespace has no blocks, or blocks that are longer than a transfer may be.
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
		AtomicWriteBytes: block * id.AtomicWrites(p.AtomicBlocks).Blocks(), VolatileCache: p.VolatileCache,
		Deallocates:          p.DSM,
		DeallocatedReadsZero: p.DSM && id.DLFEAT()&7 == nvme.DLFEATReadZeroes, Engine: "vfio", Polled: true}
	if id.NSFEAT()&nvme.NSFEATOptPerf != 0 {
		info.OptimalIOBytes = max(info.OptimalIOBytes, block*(int(id.NPWG())+1))
	}
	return info, nil
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

// Fallback returns why data in a region of the pool is copied: the region could not be mapped for the device; and why
// the device sends interrupts while it is busy. It returns nil if no Map has failed and interrupts can be masked.
func (d *Device) Fallback() error {
	return errors.Join(d.regions.Refused(), d.fn.Unmasked())
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

// ringMemory is a ring with the memory that belongs to it. A queue holds one while it is open. Afterwards it is in
// Device.spares for the next queue of the same QID and length: memory that the device was given is not taken back
// before Revoke.
type ringMemory struct {
	id      uint16 // QID
	entries int
	ring    *pcie.Ring
	at      uint64 // the ring's IOVA
	// lists has a page for each slot of the ring: the PRP list of the slot's command, or its range to deallocate.
	// listsAt is its IOVA.
	lists   []byte
	listsAt uint64
	bounces *parts.Bounces
}

// makeQueue makes a queue. The keeper calls it.
func (d *Device) makeQueue(depth int) (*queue, error) {
	if d.gone.Load() {
		return nil, ssd.ErrGone
	}
	// Twice as many entries as requests, because a request may need several commands; and one entry is always free.
	entries := min(max(1<<bits.Len(uint(2*depth)), 64), d.props.Entries)
	i := 0
	for ; i < len(d.queues) && d.queues[i] != nil; i++ {
	}
	if i == len(d.queues) {
		return nil, fmt.Errorf("all %d queues of the controller are in use", i)
	}
	s := ringMemory{id: uint16(i + 1), entries: entries}
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
		s.bounces = parts.NewBounces(d.ctrl.Alloc)
	}
	q := newQueue(d, s, depth)
	d.fn.Mask(q.vector, true) // until a Wait blocks
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

// deleteQueue deletes the controller's queues of a queue that has no outstanding commands. The keeper calls it.
func (d *Device) deleteQueue(q *queue) {
	d.mu.Lock()
	d.queues[q.mem.id-1] = nil // before a reset, which creates the rings of all queues again
	d.mu.Unlock()
	if !d.gone.Load() {
		if err := d.ctrl.DeleteRing(q.ring); err != nil {
			d.reset(err)
		}
	}
	d.spares = append(d.spares, q.mem)
}

// do has the keeper call f, and waits until f has returned. After Close f is not called.
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

// Close implements ssd.Device. It closes the queues, which waits until every request has ended (the keeper ends each,
// see "Timeouts" above), waits for the end of an activation of firmware, shuts the controller down normally (CC.SHN),
// and returns the memory.
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
