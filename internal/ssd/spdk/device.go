//go:build spdk && cgo

package spdk

import (
	"errors"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"jbofd/internal/bufpool"
	"jbofd/internal/eventfd"
	"jbofd/internal/ssd"
)

// BuiltIn reports whether the binary has SPDK's driver.
const BuiltIn = true

const (
	defaultTimeout      = 30 * time.Second
	defaultAbortTimeout = 5 * time.Second
	// openTries and openDelay are how often a queue pair over a fabric is made, and the time between.
	openTries, openDelay = 10, 50 * time.Millisecond
	// maxDepth bounds the depth of a queue.
	maxDepth = 4096
	// zeroesBytes is the length of Device.zeroes.
	zeroesBytes = 128 << 10
	// defaultMemoryMiB is Environment.MemoryMiB.
	defaultMemoryMiB = 64
)

// Device is an open drive.
type Device struct {
	cfg  Config
	info ssd.Info
	id   identity
	// inPlace: the device, or SPDK, accesses data itself. registers: that needs memory to be registered.
	registers bool
	zeroes    []byte // for writes of zeroes, if the drive has no Write Zeroes command

	// regions are the regions of the pool, and mine those that this device has registered. environment guards mine.
	regions bufpool.Regions
	mine    [][]byte

	gone  atomic.Bool
	event *eventfd.Event // wakes the keeper

	// admin is held while a function of the controller is called. It is taken before a queue's mu.
	admin sync.Mutex
	ctrl  handle // 0: detached

	// mu guards what follows.
	mu     sync.Mutex
	why    error // why the device is gone; nil: it works
	closed bool
	queues map[*queue]struct{}

	keeper chan struct{} // closed when the keeper has ended
}

// environment is the process's, of which there is one. DPDK cannot be initialised twice.
var environment struct {
	sync.Mutex
	made bool
	with Environment
	err  error
	// users counts the devices that have registered a region, by the region's address.
	users map[uint64]int
}

// makeEnvironment initialises SPDK's environment, or checks that it has what a device needs.
//
// Errors: ErrEnvironment.
func makeEnvironment(want Environment) error {
	e := &environment
	e.Lock()
	defer e.Unlock()
	if e.made {
		if e.err == nil && want.PCI && !e.with.PCI {
			return fmt.Errorf("%w was made without the PCI bus, and cannot be made again", ErrEnvironment)
		}
		return e.err
	}
	if want.MemoryMiB == 0 {
		want.MemoryMiB = defaultMemoryMiB
	}
	// DPDK takes a processor for its main thread; it has to be one that this process may use.
	var may unix.CPUSet
	cpu := 0
	if err := unix.SchedGetaffinity(0, &may); err == nil {
		for !may.IsSet(cpu) && cpu < 1023 {
			cpu++
		}
	}
	e.made, e.with, e.users = true, want, map[uint64]int{}
	if err := envInit("jbofd", "0@"+strconv.Itoa(cpu), want.MemoryMiB, want.PCI); err != nil {
		e.err = fmt.Errorf("%w cannot be made, standard error says why: %w", ErrEnvironment, err)
	}
	return e.err
}

// Open connects to a controller.
//
// Errors: ErrConfig, ErrEnvironment, ErrAttach; the system's for memory.
func Open(cfg Config) (ssd.Device, error) {
	d, err := open(cfg)
	if err != nil {
		return nil, fmt.Errorf("device %q: %w", cfg.Name, err)
	}
	return d, nil
}

func open(cfg Config) (*Device, error) {
	if cfg.Timeout == 0 {
		cfg.Timeout = defaultTimeout
	}
	if cfg.AbortTimeout == 0 {
		cfg.AbortTimeout = defaultAbortTimeout
	}
	if min(cfg.Timeout, cfg.AbortTimeout) < 0 || cfg.Environment.MemoryMiB < 0 {
		return nil, fmt.Errorf("%w: a timeout or the memory is negative", ErrConfig)
	}
	if err := cfg.TransportID.Check(); err != nil {
		return nil, err
	}
	pcie := cfg.Transport == "pcie"
	cfg.Environment.PCI = cfg.Environment.PCI || pcie
	if err := makeEnvironment(cfg.Environment); err != nil {
		return nil, err
	}
	d := &Device{cfg: cfg, registers: cfg.Transport != "tcp", queues: map[*queue]struct{}{},
		keeper: make(chan struct{})}
	var why string
	// SPDK's TCP initiator has no interrupts.
	if d.ctrl, d.id, why = attach(cfg.TransportID.String(), cfg.HostNQN, cfg.NSID, d.registers); d.ctrl == 0 {
		return nil, fmt.Errorf("%w at %s: %s", ErrAttach, cfg.Address, why)
	}
	if err := d.open(); err != nil {
		detach(d.ctrl)
		return nil, err
	}
	go d.keep()
	return d, nil
}

func (d *Device) open() (err error) {
	if d.info, err = makeInfo(&d.cfg, &d.id); err != nil {
		return err
	}
	d.regions.Init(d.cfg.Pool, d.register)
	if d.event, err = eventfd.New(); err != nil {
		return err
	}
	if !d.id.hasZeroes {
		if d.zeroes = alloc(zeroesBytes); d.zeroes == nil {
			return errors.Join(fmt.Errorf("no memory of SPDK for zeroes: %w", unix.ENOMEM), d.event.Close())
		}
	}
	return nil
}

// makeInfo returns the ssd.Info of a namespace.
//
// Errors: ErrAttach, if the namespace has no blocks, blocks with metadata, or blocks that are longer than a transfer.
func makeInfo(cfg *Config, id *identity) (ssd.Info, error) {
	most := min(id.maxTransfer, zeroesBytes)
	switch {
	case id.blocks == 0 || id.blockBytes < 512 || id.blockBytes&(id.blockBytes-1) != 0 ||
		id.blocks > 1<<62/uint64(id.blockBytes):
		return ssd.Info{}, fmt.Errorf("%w: its namespace has %d blocks of %d bytes", ErrAttach, id.blocks,
			id.blockBytes)
	case id.metadataBytes != 0:
		return ssd.Info{}, fmt.Errorf("%w: its blocks have metadata; format it without", ErrAttach)
	case id.blockBytes > most:
		return ssd.Info{}, fmt.Errorf("%w: its blocks of %d bytes are longer than a transfer, %d", ErrAttach,
			id.blockBytes, most)
	}
	return ssd.Info{Name: cfg.Name, Backend: "spdk", Path: cfg.Address, Model: id.model, Serial: id.serial,
		SizeBytes: int64(id.blocks) * int64(id.blockBytes), BlockSize: id.blockBytes,
		OptimalIOBytes:   max(id.blockBytes*max(id.optimalBlocks, 1), 4096),
		AtomicWriteBytes: id.blockBytes * id.atomics.Blocks(), VolatileCache: id.volatileCache,
		Deallocates: id.deallocates, DeallocatedReadsZero: id.deallocates && id.readsZero,
		Engine: "spdk-" + cfg.Transport,
		Polled: cfg.Transport != "tcp"}, nil
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

// Fallback returns why data in a region of the pool is copied: the region could not be registered; or nil.
func (d *Device) Fallback() error {
	return d.regions.Refused()
}

// register registers a region of the pool if need be, and returns its address.
func (d *Device) register(base []byte) (uint64, error) {
	at := addressOf(base)
	if !d.registers {
		return at, nil
	}
	e := &environment
	e.Lock()
	defer e.Unlock()
	if e.users[at] == 0 {
		if err := memRegister(base); err != nil {
			return 0, fmt.Errorf("a region cannot be registered with SPDK: %w", err)
		}
	}
	e.users[at]++
	d.mine = append(d.mine, base)
	return at, nil
}

// unregister gives up the regions, before their memory may be given back to the system.
func (d *Device) unregister() (err error) {
	e := &environment
	e.Lock()
	defer e.Unlock()
	for _, base := range d.mine {
		at := addressOf(base)
		if e.users[at]--; e.users[at] == 0 {
			delete(e.users, at)
			err = errors.Join(err, memUnregister(base))
		}
	}
	d.mine = nil
	return err
}

// OpenQueue implements ssd.Device.
func (d *Device) OpenQueue(depth int) (ssd.Queue, error) {
	if depth < 1 || depth > maxDepth {
		return nil, fmt.Errorf("%w: queue depth is %d, want 1 to %d", ErrConfig, depth, maxDepth)
	}
	d.admin.Lock()
	defer d.admin.Unlock()
	q, err := d.openQueue(depth)
	if err != nil {
		return nil, fmt.Errorf("queue on %q: %w", d.info.Name, err)
	}
	return q, nil
}

func (d *Device) openQueue(depth int) (*queue, error) {
	d.mu.Lock()
	closed := d.closed
	d.mu.Unlock()
	if closed || d.gone.Load() {
		return nil, ssd.ErrGone
	}
	event, err := eventfd.New()
	if err != nil {
		return nil, err
	}
	// Twice as many places as requests, because a request may need several commands.
	most := min(max(2*depth, 16), maxDepth)
	h, places, fd, err := queueOpen(d.ctrl, most)
	// SPDK closes the connection of a queue pair and does not wait for the target, which refuses another one of the
	// same QID until it has noticed.
	for tries := 1; err != nil && d.cfg.Transport != "pcie" && tries < openTries; tries++ {
		time.Sleep(openDelay)
		h, places, fd, err = queueOpen(d.ctrl, most)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("no more queue pairs: %w", err), event.Close())
	}
	irq := -1
	if fd >= 0 {
		if irq, err = unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0); err != nil {
			queueClose(h)
			return nil, errors.Join(fmt.Errorf("the descriptor of its interrupt: %w", err), event.Close())
		}
	}
	q := newQueue(d, h, irq, event, depth, places)
	d.mu.Lock()
	d.queues[q] = struct{}{}
	d.mu.Unlock()
	return q, nil
}

// Close implements ssd.Device. It closes the queues, which waits until every request has ended (the keeper ends each,
// see "Timeouts" in the package comment).
func (d *Device) Close() error {
	for _, q := range d.openQueues() {
		_ = q.Close()
	}
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		<-d.keeper
		return nil
	}
	d.closed = true
	d.mu.Unlock()
	d.event.Signal()
	<-d.keeper
	for _, q := range d.openQueues() { // opened meanwhile
		_ = q.Close()
	}
	d.admin.Lock()
	defer d.admin.Unlock()
	detach(d.ctrl)
	d.ctrl = 0
	if d.zeroes != nil {
		free(d.zeroes)
	}
	return errors.Join(d.unregister(), d.event.Close())
}

func (d *Device) openQueues() []*queue {
	d.mu.Lock()
	defer d.mu.Unlock()
	all := make([]*queue, 0, len(d.queues))
	for q := range d.queues {
		all = append(all, q)
	}
	return all
}
