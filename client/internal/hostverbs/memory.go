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
	// MaxBounceBytes bounds the data of a command that is copied, because it does not lie in memory of Alloc.
	MaxBounceBytes = 1 << 20
	// MinPoolBytes and DefaultPoolBytes are the minimum and the default of the pool.
	MinPoolBytes     = 4 << 20
	DefaultPoolBytes = 64 << 20
	// regionBytes is the unit in which the pool is registered. It is small compared with the 8 MiB that a process may
	// lock by default.
	regionBytes = 2 << 20
)

// dataAccess is the access that devices have to memory for data.
const dataAccess = verbs.LocalWrite | verbs.RemoteRead | verbs.RemoteWrite

// Memory is the registered memory of a controller: a pool for the data of commands, and the buffers of Alloc. It
// outlives connections and devices: it is registered with each device on demand. Any goroutine may call its methods.
type Memory struct {
	provider verbs.Provider // nil: that of the process
	pool     *bufpool.Pool
	accounts atomic.Uint64 // number of accounts, for their names

	mu      sync.Mutex
	closed  bool
	buffers []*buffer
	domains []*domain
}

// buffer is memory of Alloc.
type buffer struct{ b []byte }

// domain is the registration of a Memory with one device.
type domain struct {
	m    *Memory
	dev  verbs.Device
	d    verbs.Domain
	stop chan struct{} // closed with the domain
	// spans has the buffers, sorted by address. It is replaced, never modified.
	spans atomic.Pointer[[]span]
	// regions has the regions of the pool that were registered, by number.
	regions []atomic.Pointer[span]

	// Below here: guarded by m.mu.
	users   int  // number of connections
	removed bool // the device was removed
}

// span is memory that is registered with a device.
type span struct {
	start, end uintptr
	addr       uint64
	rkey       uint32
	mr         verbs.MR
}

// NewMemory returns the memory of a controller, with a pool of poolBytes. p is the provider of its devices; nil: that
// of the process.
func NewMemory(p verbs.Provider, poolBytes int64) (*Memory, error) {
	pool, err := bufpool.New(bufpool.Config{TotalBytes: poolBytes, RegionBytes: regionBytes, MaxBytes: MaxBounceBytes})
	if err != nil {
		return nil, err
	}
	return &Memory{provider: p, pool: pool}, nil
}

// pages maps anonymous memory.
func pages(n int) ([]byte, error) {
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, fmt.Errorf("%d bytes of memory: %w", n, err)
	}
	return b, nil
}

func freePages(b []byte) error { return unix.Munmap(b) }

// Alloc returns page-aligned memory that is registered with every device of the controller, and a function that frees
// it. That function is idempotent.
//
// Errors: host.ErrClosed; those of the system if there is not enough memory, or if the process may not lock it.
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

// register registers memory with the device.
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

// find returns the span that contains all of b.
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

// region returns region i of the pool, and registers it if necessary.
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
	d := &domain{m: m, dev: dev, d: v, stop: make(chan struct{}),
		regions: make([]atomic.Pointer[span], m.pool.Regions())}
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

// watch closes the domain when its device was removed and no connection uses it any more. The system may wait for that
// before it completes the removal.
func (d *domain) watch() {
	select {
	case <-d.stop:
		return
	case <-d.dev.Removed():
	}
	d.m.mu.Lock()
	defer d.m.mu.Unlock()
	d.removed = true
	// The device was removed: errors of freeing its resources do not matter.
	_ = d.m.sweep()
}

// release ends the use of a domain by a connection.
func (m *Memory) release(d *domain) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	d.users--
	return m.sweep()
}

// sweep closes the domains that are not needed any more. mu is held.
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

// close closes all registrations and the domain. m.mu is held.
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

// Close ends the registrations; those that open connections use end with these. Buffers of Alloc remain mapped until
// they are freed. Idempotent.
func (m *Memory) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return nil
	}
	m.closed = true
	return m.sweep()
}
