//go:build rdma && cgo

package verbs

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// device is a device as opened by librdmacm: an ibv_context. A device that returns after its removal is a new device
// value.
//
// The device keeps an RDMA CM identifier bound to one of its addresses. The identifier reports the removal of the
// device even if no connection exists, and prevents librdmacm from closing the context in the meantime.
type device struct {
	p        *provider
	ctx      handle
	keeper   handle
	attr     Attr
	file     *os.File      // file descriptor of the device's event queue
	removed  chan struct{} // closed by remove
	watched  chan struct{} // closed when the goroutine that reads the device's events has ended
	releases sync.Once

	mu        sync.Mutex
	users     int  // number of endpoints and domains
	gone      bool // the device is removed
	endpoints map[*endpoint]struct{}
}

// newDevice allocates a device's resources.
//
// Deviation: a connection request from an IPv6 link-local address does not name its interface. Such an address
// therefore cannot be the first one through which a device is found.
func newDevice(p *provider, ctx handle, local netip.AddrPort) (*device, error) {
	d := &device{p: p, ctx: ctx, removed: make(chan struct{}), watched: make(chan struct{}),
		endpoints: map[*endpoint]struct{}{}}
	var err error
	if d.keeper, err = p.newID(d); err != nil {
		return nil, err
	}
	fail := func(what string, err error) (*device, error) {
		return nil, errors.Join(fmt.Errorf("open the RDMA device of %v: %s: %w", local.Addr(), what, err),
			p.dropID(d.keeper))
	}
	if e := idBind(d.keeper, netip.AddrPortFrom(local.Addr(), 0)); e != 0 {
		return fail("bind", e)
	}
	if got := idContext(d.keeper); got != ctx {
		return fail("bind", ErrNoDevice)
	}
	var e unix.Errno
	if d.attr, e = contextAttr(ctx); e != 0 {
		return fail("query", e)
	}
	fd, e := contextAsyncFD(ctx)
	if e != 0 {
		return fail("events", e)
	}
	d.file = os.NewFile(uintptr(fd), "rdma-events")
	raw, err := d.file.SyscallConn()
	if err != nil {
		return fail("events", errors.Join(err, d.file.Close()))
	}
	p.wg.Go(func() {
		defer close(d.watched)
		readEvents(raw, d.drain)
	})
	return d, nil
}

// get adds a user of the device and put removes one. The last put of a removed device frees it.
func (d *device) get() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.gone {
		return ErrDeviceRemoved
	}
	d.users++
	return nil
}

func (d *device) put() {
	d.mu.Lock()
	d.users--
	last := d.gone && d.users == 0
	d.mu.Unlock()
	if last {
		d.p.wg.Go(d.release)
	}
}

// join adds an endpoint to those that learn of the device's events. leave takes it out and ends its use of the device.
func (d *device) join(e *endpoint) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.endpoints[e] = struct{}{}
}

func (d *device) leave(e *endpoint) {
	d.mu.Lock()
	delete(d.endpoints, e)
	d.mu.Unlock()
	d.put()
}

// present returns the endpoints that have joined and not left.
func (d *device) present() []*endpoint {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Collect(maps.Keys(d.endpoints))
}

// remove marks the device as removed and tells its users: it closes the channel that Removed returns, and reports the
// event Removed to each endpoint. From then on get returns ErrDeviceRemoved. Only the first call has an effect. There
// are several, because the keeper, each endpoint's identifier and the device's event queue all report the removal.
//
// A device with users is freed by the last put, one without users here. That takes a goroutine of its own: release
// waits for the goroutine that reads the device's events, and remove may be running on it.
func (d *device) remove() {
	d.mu.Lock()
	if d.gone {
		d.mu.Unlock()
		return
	}
	d.gone = true
	unused := d.users == 0
	d.mu.Unlock()
	close(d.removed)
	for _, e := range d.present() {
		e.onRemoved()
	}
	if unused {
		d.p.wg.Go(d.release)
	}
}

// release stops the device's goroutine and frees the device's resources.
func (d *device) release() {
	d.releases.Do(func() {
		d.p.deviceMu.Lock()
		if d.p.devices[d.ctx] == d {
			delete(d.p.devices, d.ctx)
		}
		d.p.deviceMu.Unlock()
		// The file was opened by newDevice and is closed here only.
		_ = d.file.Close()
		<-d.watched
		d.mu.Lock()
		gone := d.gone
		d.mu.Unlock()
		if gone {
			contextLetGo(d.ctx)
		}
		// The device has no user left to whom an error of the system could be returned.
		_ = d.p.dropID(d.keeper)
	})
}

// onCM implements cmTarget for the keeper identifier.
func (d *device) onCM(ev cmEvent) {
	if ev.kind == cmDeviceRemoval {
		d.remove()
	}
}

// drain dispatches the device's pending events. It returns true once no more can follow, because the device is removed.
func (d *device) drain() (last bool) {
	for {
		ev, err := contextAsync(d.ctx)
		switch err {
		case 0:
		case unix.EAGAIN, unix.EINTR:
			return false
		default: // the event queue of a removed device has ended
			d.remove()
			return true
		}
		var e *endpoint
		if ev.kind == asyncQP || ev.kind == asyncLast || ev.kind == asyncComm {
			e, _ = d.p.target(ev.object).(*endpoint)
		}
		contextAck(ev)
		switch {
		case ev.kind == asyncLast && e != nil:
			e.drain()
			e.event(Fatal)
		case ev.kind == asyncQP && e != nil:
			e.event(Fatal)
		case ev.kind == asyncComm && e != nil:
			e.heard()
		case ev.kind == asyncCQ || ev.kind == asyncSRQ:
			for _, e := range d.present() {
				if e.uses(ev.object) {
					e.event(Fatal)
				}
			}
		case ev.kind == asyncDevice:
			d.remove()
		}
	}
}

// Attr implements Device.
func (d *device) Attr() Attr { return d.attr }

// Removed implements Device.
func (d *device) Removed() <-chan struct{} { return d.removed }

// OpenDomain implements Device.
func (d *device) OpenDomain() (Domain, error) {
	if err := d.get(); err != nil {
		return nil, err
	}
	h, err := domainOpen(d.ctx)
	if err != 0 {
		d.put()
		return nil, resourceError("open a protection domain", err)
	}
	d.p.count(func(c *Counts) { c.Domains++ })
	m := &domain{dev: d}
	m.h.Store(uint64(h))
	return m, nil
}

// object is a C object that can be destroyed once nothing uses it.
type object struct {
	mu    sync.Mutex // also held over C calls that must not run concurrently with the destruction
	h     atomic.Uint64
	users int
}

// handle returns 0 after the object was destroyed.
func (o *object) handle() handle { return handle(o.h.Load()) }

func (o *object) use() (handle, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	h := o.handle()
	if h == 0 {
		return 0, net.ErrClosed
	}
	o.users++
	return h, nil
}

func (o *object) unuse() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.users--
}

// end destroys the object. It reports whether this call destroyed it.
func (o *object) end(what string, destroy func(handle) unix.Errno) (bool, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	h := o.handle()
	switch {
	case h == 0:
		return false, nil
	case o.users > 0:
		return false, fmt.Errorf("close a %s: still used by %d others", what, o.users)
	}
	if err := destroyed("close a "+what, destroy(h)); err != nil {
		return false, err
	}
	o.h.Store(0)
	return true, nil
}

// domain is a protection domain. Its memory regions, queues and queue pairs count as its users.
type domain struct {
	object
	dev       *device
	doorbells atomic.Uint64
}

// Close implements Domain.
func (d *domain) Close() error {
	ended, err := d.end("protection domain", domainClose)
	if ended {
		d.dev.p.count(func(c *Counts) { c.Domains-- })
		d.dev.put()
	}
	return err
}

// Doorbells implements Domain.
func (d *domain) Doorbells() uint64 { return d.doorbells.Load() }

// PostSend implements Domain.
//
// hot: 0 allocs
func (d *domain) PostSend(wrs []SendWR) (int, error) {
	h := d.handle()
	if h == 0 {
		return 0, net.ErrClosed
	}
	if len(wrs) == 0 {
		return 0, nil
	}
	return d.took(postSend(h, wrs))
}

// took accounts for a posted batch.
//
// hot: 0 allocs
func (d *domain) took(r posted) (int, error) {
	d.dev.p.crossings.Add(1)
	d.doorbells.Add(uint64(r.doorbells))
	switch r.err {
	case 0:
		return r.n, nil
	case unix.ENOMEM, unix.EAGAIN, unix.ENOSPC:
		return r.n, ErrQueueFull
	case unix.ESHUTDOWN: // the error that rdma.c returns for a destroyed handle
		return r.n, net.ErrClosed
	}
	return r.n, fmt.Errorf("post: %w", r.err)
}

// Register implements Domain.
func (d *domain) Register(b []byte, a Access) (MR, error) {
	if len(b) == 0 {
		return nil, errors.New("register memory: it is empty")
	}
	h, err := d.use()
	if err != nil {
		return nil, fmt.Errorf("register memory: %w", err)
	}
	m := &region{domain: d, bytes: int64(len(b))}
	var mr handle
	var e unix.Errno
	if mr, m.addr, m.lkey, m.rkey, e = mrRegister(h, b, a); e != 0 {
		d.unuse()
		return nil, registerError(len(b), e)
	}
	m.h.Store(uint64(mr))
	d.dev.p.count(func(c *Counts) { c.MRs++; c.RegisteredBytes += m.bytes })
	return m, nil
}

// registerError explains why a registration failed. The usual cause is the limit of locked memory.
func registerError(n int, e unix.Errno) error {
	what := fmt.Sprintf("register %d bytes", n)
	var lim unix.Rlimit
	if (e == unix.ENOMEM || e == unix.EPERM) && unix.Getrlimit(unix.RLIMIT_MEMLOCK, &lim) == nil &&
		lim.Cur != unix.RLIM_INFINITY {
		return fmt.Errorf("%s: %w: %w; the memlock limit is %d bytes (ulimit -l, LimitMEMLOCK=)", what, ErrResources, e,
			lim.Cur)
	}
	return resourceError(what, e)
}

// region is a memory region.
type region struct {
	object
	domain     *domain
	bytes      int64
	addr       uint64
	lkey, rkey uint32
}

// Addr implements MR.
func (m *region) Addr() uint64 { return m.addr }

// LKey implements MR.
func (m *region) LKey() uint32 { return m.lkey }

// RKey implements MR.
func (m *region) RKey() uint32 { return m.rkey }

// Close implements MR.
func (m *region) Close() error {
	ended, err := m.end("memory region", mrClose)
	if ended {
		m.domain.unuse()
		m.domain.dev.p.count(func(c *Counts) { c.MRs--; c.RegisteredBytes -= m.bytes })
	}
	return err
}
