//go:build rdma && cgo

package verbs

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// provider implements Provider with the machine's RDMA stack.
//
// One goroutine handles the events of the connection manager, and one goroutine per device handles that device's
// events. All of them sleep in Go's netpoller. An event is read, its object is looked up, and the event is acknowledged
// before the object's user is informed. Destroying an object waits for the acknowledgement of its events, so it never
// waits for a callback.
type provider struct {
	channel handle
	file    *os.File // file descriptor of the event channel
	wg      sync.WaitGroup

	crossings atomic.Uint64

	// cmMu is held while an event is read and acknowledged, and while a queue pair is destroyed. librdmacm changes the
	// state of an identifier's queue pair when it reads some events.
	cmMu sync.Mutex

	// deviceMu is held while a device is looked up or created.
	deviceMu sync.Mutex
	devices  map[handle]*device // by ibv_context

	mu     sync.Mutex
	ids    map[handle]cmTarget // by rdma_cm_id; C holds no Go pointers
	counts Counts
	closed bool
}

// cmTarget receives the events of an identifier. It is an endpoint, a listener, or a device, which keeps an identifier
// to learn of its own removal.
type cmTarget interface{ onCM(cmEvent) }

// Events of the connection manager: enum rdma_cm_event_type.
const (
	cmAddrResolved = iota
	cmAddrError
	cmRouteResolved
	cmRouteError
	cmConnectRequest
	cmConnectResponse
	cmConnectError
	cmUnreachable
	cmRejected
	cmEstablished
	cmDisconnected
	cmDeviceRemoval
)

// resolveTimeout limits each of the two steps of Resolve if the context has no deadline.
const resolveTimeout = 5 * time.Second

// BuiltIn reports whether the binary supports RDMA devices.
const BuiltIn = true

// Open opens the machine's RDMA stack.
//
// Errors: ErrUnavailable.
func Open() (Provider, error) {
	ch, fd, err := channelOpen()
	switch err {
	case 0:
	case unix.ENOENT, unix.ENXIO:
		return nil, fmt.Errorf("%w: no /dev/infiniband/rdma_cm (is the kernel module rdma_ucm loaded?): %w",
			ErrUnavailable, err)
	case unix.ENODEV, unix.ENOSYS:
		return nil, fmt.Errorf("%w: the machine has no RDMA device (ibv_devices lists them): %w", ErrUnavailable, err)
	case unix.EACCES, unix.EPERM:
		return nil, fmt.Errorf("%w: no right to open /dev/infiniband/rdma_cm: %w", ErrUnavailable, err)
	default:
		return nil, fmt.Errorf("%w: open the connection manager: %w", ErrUnavailable, err)
	}
	p := &provider{
		channel: ch, file: os.NewFile(uintptr(fd), "rdma_cm"),
		devices: map[handle]*device{}, ids: map[handle]cmTarget{},
	}
	raw, rerr := p.file.SyscallConn()
	if rerr != nil {
		channelClose(ch)
		return nil, errors.Join(fmt.Errorf("%w: %w", ErrUnavailable, rerr), p.file.Close())
	}
	p.wg.Go(func() { readEvents(raw, p.drain) })
	return p, nil
}

// readEvents calls take whenever the descriptor may be readable, until take reports the last event or the file is
// closed.
func readEvents(raw syscall.RawConn, take func() (last bool)) {
	// The error says that the file was closed, which is how these goroutines are stopped.
	_ = raw.Read(func(uintptr) bool { return take() })
}

// drain dispatches all pending events.
func (p *provider) drain() bool {
	for {
		p.cmMu.Lock()
		ev, err := cmGet(p.channel)
		if err != 0 {
			p.cmMu.Unlock()
			return false // EAGAIN; or an event that could not be read, which the next attempt reports again
		}
		named := ev.id
		if ev.kind == cmConnectRequest {
			named = ev.listener
		}
		target := p.target(named)
		cmAck(ev.event)
		p.cmMu.Unlock()
		switch {
		case target != nil:
			target.onCM(ev)
		case ev.kind == cmConnectRequest: // a request for a listener that was just closed
			p.refuse(ev.id)
		}
	}
}

func (p *provider) target(id handle) cmTarget {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.ids[id]
}

// name makes t the target of an identifier's events; nil removes the target.
func (p *provider) name(id handle, t cmTarget) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if t == nil {
		delete(p.ids, id)
	} else {
		p.ids[id] = t
	}
}

// newID creates an identifier whose events go to t.
func (p *provider) newID(t cmTarget) (handle, error) {
	p.mu.Lock()
	closed := p.closed
	p.mu.Unlock()
	if closed {
		return 0, fmt.Errorf("provider: %w", os.ErrClosed)
	}
	id, err := idCreate(p.channel)
	if err != 0 {
		return 0, resourceError("create a connection identifier", err)
	}
	p.name(id, t)
	return id, nil
}

// dropID destroys an identifier. It waits until the identifier's events are acknowledged.
func (p *provider) dropID(id handle) error {
	p.name(id, nil)
	return destroyed("destroy a connection identifier", idDestroy(id))
}

// refuse rejects a request that has no endpoint.
func (p *provider) refuse(id handle) {
	// The error is dropped because this request has no user. If the reject fails, the peer's connect times out.
	_ = idReject(id, nil)
	_ = p.dropID(id)
}

func (p *provider) count(change func(*Counts)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	change(&p.counts)
}

// Counts implements Provider.
func (p *provider) Counts() Counts {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.counts
}

// Crossings implements Provider.
func (p *provider) Crossings() uint64 { return p.crossings.Load() }

// Close implements Provider. It closes nothing and returns an error if objects are still open.
func (p *provider) Close() error {
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return nil
	}
	if p.counts != (Counts{}) {
		defer p.mu.Unlock()
		return fmt.Errorf("close the RDMA provider: still open: %+v", p.counts)
	}
	p.closed = true
	p.mu.Unlock()
	p.deviceMu.Lock()
	devices := p.devices
	p.devices = map[handle]*device{}
	p.deviceMu.Unlock()
	for _, d := range devices {
		d.release()
	}
	err := p.file.Close()
	p.wg.Wait()
	channelClose(p.channel)
	return err
}

// Listen implements Provider.
func (p *provider) Listen(address netip.AddrPort, backlog int) (Listener, error) {
	if backlog < 1 {
		return nil, fmt.Errorf("listen on %v: backlog %d, want at least 1", address, backlog)
	}
	l := &listener{p: p, queue: make(chan *endpoint, backlog), done: make(chan struct{})}
	id, err := p.newID(l)
	if err != nil {
		return nil, err
	}
	l.id = id
	if err := l.start(address, backlog); err != nil {
		return nil, errors.Join(fmt.Errorf("listen on %v: %w", address, err), p.dropID(id))
	}
	p.count(func(c *Counts) { c.Listeners++ })
	return l, nil
}

// Resolve implements Provider.
func (p *provider) Resolve(ctx context.Context, remote netip.AddrPort) (Endpoint, error) {
	return p.ResolveFrom(ctx, netip.Addr{}, remote)
}

// ResolveFrom implements Provider.
func (p *provider) ResolveFrom(ctx context.Context, local netip.Addr, remote netip.AddrPort) (Endpoint, error) {
	e := newEndpoint(p)
	e.active, e.remote = true, remote
	if local.IsValid() {
		e.local = netip.AddrPortFrom(local, 0)
	}
	id, err := p.newID(e)
	if err != nil {
		return nil, err
	}
	e.id = id
	if err := e.resolve(ctx); err != nil {
		_, derr := e.drop()
		return nil, errors.Join(fmt.Errorf("resolve %v: %w", remote, err), derr)
	}
	p.count(func(c *Counts) { c.Endpoints++ })
	return e, nil
}

// device returns the device with the context ctx, to which an identifier with the address local is bound. The caller
// counts as a user of the device until it calls device.put.
func (p *provider) device(ctx handle, local netip.AddrPort) (*device, error) {
	if ctx == 0 {
		return nil, ErrNoDevice
	}
	p.deviceMu.Lock()
	defer p.deviceMu.Unlock()
	if d := p.devices[ctx]; d != nil {
		return d, d.get()
	}
	d, err := newDevice(p, ctx, local)
	if err != nil {
		return nil, err
	}
	p.devices[ctx] = d
	return d, d.get()
}

// resourceError returns the error of a failed creation.
func resourceError(what string, err unix.Errno) error {
	switch err {
	case unix.ENOMEM, unix.ENOSPC, unix.EMFILE, unix.ENFILE, unix.EAGAIN:
		return fmt.Errorf("%s: %w: %w", what, ErrResources, err)
	case unix.ENODEV, unix.EIO:
		return fmt.Errorf("%s: %w: %w", what, ErrDeviceRemoved, err)
	}
	return fmt.Errorf("%s: %w", what, err)
}

// destroyed returns the error of a failed destruction. A removed device has destroyed its objects already, so its
// errors are ignored.
func destroyed(what string, err unix.Errno) error {
	switch err {
	case 0, unix.EIO, unix.ENODEV:
		return nil
	}
	return fmt.Errorf("%s: %w", what, err)
}
