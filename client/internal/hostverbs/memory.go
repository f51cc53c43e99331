package hostverbs

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"jbofd/client/internal/host"
	"jbofd/internal/bufpool"
	"jbofd/internal/nvmeof/rdma/verbs"
)

// Sizes in bytes.
const (
	// MaxBounceBytes is the longest data of a command that does not lie in memory of Alloc.
	MaxBounceBytes = 1 << 20
	// MinPoolBytes and DefaultPoolBytes are the least and the usual that commands borrow from.
	MinPoolBytes     = 4 << 20
	DefaultPoolBytes = 64 << 20
	// regionBytes is the unit in which the pool is registered: small enough for the 8 MiB that
	// a process may lock by default.
	regionBytes = 2 << 20
)

// dataAccess is what a device may do with memory for data.
const dataAccess = verbs.LocalWrite | verbs.RemoteRead | verbs.RemoteWrite

// Memory is what one controller has registered: a pool that its queues' commands borrow
// from, and buffers that its user has asked for. It outlives connections and devices: what a new device
// needs to know it is told. All its methods may be called from any goroutine.
type Memory struct {
	provider verbs.Provider // nil: the process's
	pool     *bufpool.Pool
	accounts atomic.Uint64 // for their names

	mu      sync.Mutex
	closed  bool
	buffers []*buffer
	domains []*domain
}

// buffer is memory of Alloc.
type buffer struct{ b []byte }

// domain is a Memory at one device.
type domain struct {
	m    *Memory
	dev  verbs.Device
	d    verbs.Domain
	stop chan struct{} // closed with the domain
	// spans are the buffers by address, replaced as a whole.
	spans atomic.Pointer[[]span]
	// regions are the pool's that were registered.
	regions []atomic.Pointer[span]

	// Below here: guarded by m.mu.
	users   int  // connections
	removed bool // the device is gone
}

// span is memory that a device can reach.
type span struct {
	start, end uintptr
	addr       uint64
	rkey       uint32
	mr         verbs.MR
}

// NewMemory makes the memory of a controller that reaches its devices by p, nil for the process's
// provider. Commands borrow from poolBytes of it.
func NewMemory(p verbs.Provider, poolBytes int64) (*Memory, error) {
	pool, err := bufpool.New(bufpool.Config{TotalBytes: poolBytes, RegionBytes: regionBytes, MaxBytes: MaxBounceBytes})
	if err != nil {
		return nil, err
	}
	return &Memory{provider: p, pool: pool}, nil
}

// pages returns memory straight from the kernel.
func pages(n int) ([]byte, error) {
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, fmt.Errorf("%d bytes of memory: %w", n, err)
	}
	return b, nil
}

func freePages(b []byte) error { return unix.Munmap(b) }

// Alloc returns page-aligned memory that every device of the controller can reach, and a function that
// takes it back, which is idempotent.
//
// Errors: host.ErrClosed; the system's, for want of memory or of the right to lock it.
func (m *Memory) Alloc(size int) ([]byte, func() error, error) {
	b, err := pages(size)
	if err != nil {
		return nil, nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return nil, nil, errors.Join(host.ErrClosed, freePages(b))
	}
	buf := &buffer{b: b}
	for _, d := range m.domains {
		if err := d.add(buf); err != nil {
			for _, d := range m.domains {
				err = errors.Join(err, d.remove(buf))
			}
			return nil, nil, errors.Join(err, freePages(b))
		}
	}
	m.buffers = append(m.buffers, buf)
	return b, func() error { return m.free(buf) }, nil
}

func (m *Memory) free(buf *buffer) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	i := slices.Index(m.buffers, buf)
	if i < 0 {
		return nil
	}
	m.buffers = slices.Delete(m.buffers, i, i+1)
	var errs []error
	for _, d := range m.domains {
		errs = append(errs, d.remove(buf))
	}
	return errors.Join(append(errs, freePages(buf.b))...)
}

// register makes memory known to the device.
func (d *domain) register(b []byte) (span, error) {
	mr, err := d.d.Register(b, dataAccess)
	if err != nil {
		return span{}, fmt.Errorf("register %d bytes with %s: %w", len(b), d.dev.Attr().Name, err)
	}
	start := addrOf(b)
	return span{start: start, end: start + uintptr(len(b)), addr: mr.Addr(), rkey: mr.RKey(), mr: mr}, nil
}

// add registers a buffer. m.mu is held.
func (d *domain) add(buf *buffer) error {
	if d.removed {
		return nil
	}
	s, err := d.register(buf.b)
	if err != nil {
		return err
	}
	old := *d.spans.Load()
	i, _ := slices.BinarySearchFunc(old, s.start, compareSpan)
	fresh := slices.Insert(slices.Clone(old), i, s)
	d.spans.Store(&fresh)
	return nil
}

// remove undoes add. m.mu is held.
func (d *domain) remove(buf *buffer) error {
	old := *d.spans.Load()
	i, ok := slices.BinarySearchFunc(old, addrOf(buf.b), compareSpan)
	if !ok {
		return nil
	}
	mr := old[i].mr
	fresh := slices.Delete(slices.Clone(old), i, i+1)
	d.spans.Store(&fresh)
	return mr.Close()
}

func compareSpan(s span, start uintptr) int {
	switch {
	case s.start < start:
		return -1
	case s.start > start:
		return 1
	}
	return 0
}

// find returns the span that holds b, wholly.
func (d *domain) find(b []byte) (span, bool) { // hot: 0 allocs
	spans := *d.spans.Load()
	start := addrOf(b)
	i, ok := slices.BinarySearchFunc(spans, start, compareSpan)
	if !ok {
		i--
	}
	if i < 0 || start+uintptr(len(b)) > spans[i].end {
		return span{}, false
	}
	return spans[i], true
}

// region returns the pool's region i, registered.
func (d *domain) region(i int, b []byte) (*span, error) { // hot: 0 allocs
	if s := d.regions[i].Load(); s != nil {
		return s, nil
	}
	return d.addRegion(i, b)
}

func (d *domain) addRegion(i int, b []byte) (*span, error) {
	d.m.mu.Lock()
	defer d.m.mu.Unlock()
	if s := d.regions[i].Load(); s != nil {
		return s, nil
	}
	s, err := d.register(b)
	if err != nil {
		return nil, err
	}
	d.regions[i].Store(&s)
	return &s, nil
}

// acquire returns the domain of a device for one more connection.
func (m *Memory) acquire(dev verbs.Device) (*domain, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return nil, host.ErrClosed
	}
	for _, d := range m.domains {
		if d.dev == dev && !d.removed {
			d.users++
			return d, nil
		}
	}
	v, err := dev.OpenDomain()
	if err != nil {
		return nil, err
	}
	d := &domain{m: m, dev: dev, d: v, stop: make(chan struct{}), regions: make([]atomic.Pointer[span], m.pool.Regions())}
	d.spans.Store(&[]span{})
	for _, buf := range m.buffers {
		if err := d.add(buf); err != nil {
			return nil, errors.Join(err, d.close())
		}
	}
	d.users = 1
	m.domains = append(m.domains, d)
	go d.watch()
	return d, nil
}

// watch closes the domain when its device is gone, as soon as no connection uses it: the system
// may be waiting for that.
func (d *domain) watch() {
	select {
	case <-d.stop:
		return
	case <-d.dev.Removed():
	}
	d.m.mu.Lock()
	defer d.m.mu.Unlock()
	d.removed = true
	// The device is gone, and whatever it says of its remains with it.
	_ = d.m.sweep()
}

// release gives up a connection's part in a domain.
func (m *Memory) release(d *domain) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	d.users--
	return m.sweep()
}

// sweep closes what is not needed any more. mu is held.
func (m *Memory) sweep() error {
	var errs []error
	m.domains = slices.DeleteFunc(m.domains, func(d *domain) bool {
		if d.users > 0 || !d.removed && !m.closed {
			return false
		}
		errs = append(errs, d.close())
		return true
	})
	if m.closed && len(m.domains) == 0 {
		errs = append(errs, m.pool.Close())
	}
	return errors.Join(errs...)
}

// close ends all registrations and the domain. m.mu is held.
func (d *domain) close() error {
	close(d.stop)
	var errs []error
	for _, s := range *d.spans.Load() {
		errs = append(errs, s.mr.Close())
	}
	d.spans.Store(&[]span{})
	for i := range d.regions {
		if s := d.regions[i].Swap(nil); s != nil {
			errs = append(errs, s.mr.Close())
		}
	}
	return errors.Join(append(errs, d.d.Close())...)
}

// Close ends the registrations, those of connections that are open when they are closed. Buffers of Alloc stay
// memory until they are given back. Idempotent.
func (m *Memory) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return nil
	}
	m.closed = true
	return m.sweep()
}
