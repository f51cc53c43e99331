//go:build rdma && cgo

package verbs

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// listener is a listening RDMA CM identifier. Requests wait in its queue; requests that arrive while the queue is full
// are rejected.
type listener struct {
	p     *provider
	id    handle
	addr  netip.AddrPort
	queue chan *endpoint
	done  chan struct{} // closed when err is set

	mu     sync.Mutex
	closed bool
	err    error // the reason why done is closed
}

func (l *listener) start(address netip.AddrPort, backlog int) error {
	if e := idBind(l.id, address); e != 0 {
		if e == unix.ENODEV || e == unix.EADDRNOTAVAIL {
			return fmt.Errorf("%w: %w", ErrNoDevice, e)
		}
		return e
	}
	if e := idListen(l.id, backlog); e != 0 {
		return e
	}
	l.addr, _ = idAddrs(l.id)
	// Watch a device from the moment that a listener is bound to it, so that its removal is noticed.
	if ctx := idContext(l.id); ctx != 0 {
		d, err := l.p.device(ctx, l.addr)
		if err != nil {
			return err
		}
		d.put()
	}
	return nil
}

// onCM implements cmTarget.
func (l *listener) onCM(ev cmEvent) {
	switch ev.kind {
	case cmConnectRequest:
		l.request(ev)
	case cmDeviceRemoval:
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.err == nil {
			l.err = ErrDeviceRemoved
			close(l.done)
		}
	}
}

func (l *listener) request(ev cmEvent) {
	e := newEndpoint(l.p)
	e.id, e.peer = ev.id, ev.peer
	e.local, e.remote = idAddrs(ev.id)
	d, err := l.p.device(idContext(ev.id), e.local)
	if err != nil {
		l.p.refuse(ev.id)
		return
	}
	e.dev = d
	d.join(e)
	l.p.name(ev.id, e)
	l.mu.Lock()
	queued := false
	if !l.closed {
		select {
		case l.queue <- e:
			queued = true
		default:
		}
	}
	l.mu.Unlock()
	if !queued {
		e.refuse()
	}
}

// Addr implements Listener.
func (l *listener) Addr() netip.AddrPort { return l.addr }

// Accept implements Listener.
func (l *listener) Accept() (Endpoint, error) {
	select {
	case <-l.done:
	default:
		select {
		case e := <-l.queue:
			l.p.count(func(c *Counts) { c.Endpoints++ })
			return e, nil
		case <-l.done:
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return nil, fmt.Errorf("accept on %v: %w", l.addr, l.err)
}

// Close implements Listener.
func (l *listener) Close() error {
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return nil
	}
	l.closed = true
	if l.err == nil {
		close(l.done)
	}
	l.err = net.ErrClosed
	l.mu.Unlock()
	err := l.p.dropID(l.id)
	for {
		select {
		case e := <-l.queue:
			e.refuse()
			continue
		default:
		}
		break
	}
	l.p.count(func(c *Counts) { c.Listeners-- })
	return err
}

// endpoint is the RDMA CM identifier of a connection.
type endpoint struct {
	p             *provider
	active        bool // made by Resolve
	local, remote netip.AddrPort

	// eventMu is held while the user's function runs; Close waits for it.
	eventMu sync.Mutex
	fn      func(Event)
	told    [Removed + 1]bool // events that were already reported
	// either side has disconnected, so a failure of the queue pair is expected and not reported
	down    bool
	drained chan struct{} // closed by drain
	drain   func()

	// mu is held over C calls that must not run concurrently with Close.
	mu   sync.Mutex
	id   handle // 0 after Close
	dev  *device
	qp   *queuePair
	peer Params
	wait chan cmEvent // receives the answer that a Resolve or Connect waits for; buffers one event
}

func newEndpoint(p *provider) *endpoint {
	e := &endpoint{p: p, drained: make(chan struct{})}
	e.drain = sync.OnceFunc(func() { close(e.drained) })
	return e
}

// Drained implements Endpoint.
func (e *endpoint) Drained() <-chan struct{} { return e.drained }

// ask sends a request to the connection manager and waits for its answer, which must be an event of kind want.
func (e *endpoint) ask(ctx context.Context, want int32, request func(id handle) unix.Errno) (cmEvent, error) {
	answer := make(chan cmEvent, 1)
	e.mu.Lock()
	if e.id == 0 {
		e.mu.Unlock()
		return cmEvent{}, net.ErrClosed
	}
	e.wait = answer
	err := request(e.id)
	e.mu.Unlock()
	defer func() {
		e.mu.Lock()
		e.wait = nil
		e.mu.Unlock()
	}()
	if err != 0 {
		return cmEvent{}, routeError(err)
	}
	select {
	case ev := <-answer:
		if ev.kind == want {
			return ev, nil
		}
		return ev, ev.err()
	case <-ctx.Done():
		return cmEvent{}, ctx.Err()
	}
}

// answer passes the event to the goroutine that waits in ask.
func (e *endpoint) answer(ev cmEvent) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.wait == nil {
		return false
	}
	e.wait <- ev
	e.wait = nil
	return true
}

// routeError converts the system's error to the reason why a peer cannot be reached.
func routeError(e unix.Errno) error {
	switch e {
	case unix.ENODEV, unix.EADDRNOTAVAIL:
		return fmt.Errorf("%w: %w", ErrNoDevice, e)
	case unix.EHOSTUNREACH, unix.ENETUNREACH, unix.ETIMEDOUT, unix.EHOSTDOWN:
		return fmt.Errorf("%w: %w", ErrUnreachable, e)
	}
	return e
}

// rejectNoListener is the reject reason of a peer that does not listen: IB_CM_REJ_INVALID_SERVICE_ID.
const rejectNoListener = 8

// err returns the error that an unexpected answer stands for.
func (ev *cmEvent) err() error {
	switch ev.kind {
	case cmDeviceRemoval:
		return ErrDeviceRemoved
	case cmRejected:
		if ev.status == rejectNoListener {
			return fmt.Errorf("%w: nobody listens there", ErrUnreachable)
		}
		return &RejectedError{Reason: int(ev.status), PrivateData: ev.peer.PrivateData}
	case cmAddrError, cmRouteError:
		if ev.status < 0 {
			return routeError(unix.Errno(-ev.status))
		}
	}
	return fmt.Errorf("%w: CM event %d, status %d", ErrUnreachable, ev.kind, ev.status)
}

// resolve resolves the endpoint's device and route.
func (e *endpoint) resolve(ctx context.Context) error {
	limit := resolveTimeout
	if t, ok := ctx.Deadline(); ok {
		limit = max(time.Millisecond, min(limit, time.Until(t)))
	}
	ms := int(limit.Milliseconds())
	from := e.local
	_, err := e.ask(ctx, cmAddrResolved, func(id handle) unix.Errno { return idResolveAddr(id, from, e.remote, ms) })
	if err != nil {
		return err
	}
	e.local, _ = idAddrs(e.id)
	d, err := e.p.device(idContext(e.id), e.local)
	if err != nil {
		return err
	}
	e.mu.Lock()
	e.dev = d
	e.mu.Unlock()
	d.join(e)
	_, err = e.ask(ctx, cmRouteResolved, func(id handle) unix.Errno { return idResolveRoute(id, ms) })
	return err
}

// onCM implements cmTarget.
func (e *endpoint) onCM(ev cmEvent) {
	switch ev.kind {
	case cmDeviceRemoval:
		e.mu.Lock()
		d := e.dev
		e.mu.Unlock()
		if d != nil {
			d.remove()
		}
		e.onRemoved()
	case cmAddrResolved, cmAddrError, cmRouteResolved, cmRouteError:
		e.answer(ev)
	case cmEstablished:
		if !e.answer(ev) && !e.active {
			e.event(Established)
		}
	case cmConnectError, cmUnreachable, cmRejected, cmDisconnected:
		if !e.answer(ev) {
			// Disconnect answers the peer and flushes the queue pair. The user may have called it already.
			_ = e.Disconnect()
			e.event(Disconnected)
		}
	}
}

// onRemoved handles the removal of the device.
func (e *endpoint) onRemoved() {
	e.answer(cmEvent{kind: cmDeviceRemoval})
	e.event(Removed)
}

// heard handles the first message on a queue pair whose connection is not established yet.
func (e *endpoint) heard() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.id != 0 {
		// The call fails if the connection manager has established the connection in the meantime.
		_ = idNotify(e.id)
	}
}

// event reports an event to the user, each kind once.
func (e *endpoint) event(ev Event) {
	e.eventMu.Lock()
	defer e.eventMu.Unlock()
	if e.told[ev] || ev == Fatal && e.down {
		return
	}
	e.told[ev] = true
	if e.fn != nil {
		e.fn(ev)
	}
}

// uses reports whether the endpoint's queue pair uses the queue.
func (e *endpoint) uses(queue handle) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	q := e.qp
	return q != nil && (q.sendCQ.handle() == queue || q.recvCQ.handle() == queue || q.srq != nil &&
		q.srq.handle() == queue)
}

// Device implements Endpoint.
func (e *endpoint) Device() Device { return e.dev }

// Local implements Endpoint.
func (e *endpoint) Local() netip.AddrPort { return e.local }

// Remote implements Endpoint.
func (e *endpoint) Remote() netip.AddrPort { return e.remote }

// Peer implements Endpoint.
func (e *endpoint) Peer() Params { return e.peer }

// OnEvent implements Endpoint.
func (e *endpoint) OnEvent(fn func(Event)) {
	e.eventMu.Lock()
	defer e.eventMu.Unlock()
	e.fn = fn
}

// call makes a C call for the endpoint if it is open.
func (e *endpoint) call(what string, f func(id handle) unix.Errno) error {
	select {
	case <-e.dev.removed:
		return fmt.Errorf("%s: %w", what, ErrDeviceRemoved)
	default:
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.id == 0 {
		return fmt.Errorf("%s: %w", what, net.ErrClosed)
	}
	if err := f(e.id); err != 0 {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

// CreateQP implements Endpoint.
func (e *endpoint) CreateQP(c QPConfig) (QP, error) {
	var q *queuePair
	var err error
	cerr := e.call("create a queue pair", func(id handle) unix.Errno {
		if e.qp != nil {
			err = errors.New("create a queue pair: the endpoint has one")
		} else if q, err = newQueuePair(e.dev, id, c); err == nil {
			e.qp = q
		}
		return 0
	})
	if err = errors.Join(cerr, err); err != nil {
		return nil, err
	}
	return q, nil
}

// checkPrivate returns an error if private data exceeds the limit of the message.
func checkPrivate(what string, private []byte, limit int) error {
	if len(private) > limit {
		return fmt.Errorf("%s: %d bytes of private data, at most %d", what, len(private), limit)
	}
	return nil
}

var errNoQP = errors.New("the endpoint has no queue pair")

// Accept implements Endpoint.
func (e *endpoint) Accept(p Params) error {
	if err := checkPrivate("accept", p.PrivateData, MaxAcceptData); err != nil {
		return err
	}
	if e.qp == nil {
		return fmt.Errorf("accept: %w", errNoQP)
	}
	return e.call("accept", func(id handle) unix.Errno { return idAccept(id, p) })
}

// Reject implements Endpoint.
func (e *endpoint) Reject(private []byte) error {
	if err := checkPrivate("reject", private, MaxRejectData); err != nil {
		return err
	}
	return e.call("reject", func(id handle) unix.Errno { return idReject(id, private) })
}

// Connect implements Endpoint.
func (e *endpoint) Connect(ctx context.Context, p Params) error {
	if err := checkPrivate("connect", p.PrivateData, MaxRequestData); err != nil {
		return err
	}
	if e.qp == nil {
		return fmt.Errorf("connect: %w", errNoQP)
	}
	ev, err := e.ask(ctx, cmEstablished, func(id handle) unix.Errno { return idConnect(id, p) })
	if err != nil {
		return fmt.Errorf("connect to %v: %w", e.remote, err)
	}
	e.peer = ev.peer
	return nil
}

// Disconnect implements Endpoint.
func (e *endpoint) Disconnect() error {
	e.eventMu.Lock()
	done := e.down
	e.down = true
	e.eventMu.Unlock()
	e.mu.Lock()
	defer e.mu.Unlock()
	if done || e.id == 0 {
		return nil
	}
	switch err := idDisconnect(e.id); err {
	case 0, unix.EINVAL, unix.ENOTCONN, unix.EIO, unix.ENODEV: // not connected, or not connected any more
		return nil
	default:
		return fmt.Errorf("disconnect: %w", err)
	}
}

// drop frees the endpoint. Only the first call has an effect.
func (e *endpoint) drop() (bool, error) {
	e.eventMu.Lock()
	e.fn = nil
	e.eventMu.Unlock()
	e.mu.Lock()
	id := e.id
	e.id = 0
	e.mu.Unlock()
	if id == 0 {
		return false, nil
	}
	e.p.name(id, nil)
	var err error
	if e.qp != nil {
		err = e.qp.close(id)
	}
	err = errors.Join(err, e.p.dropID(id))
	if e.dev != nil {
		e.dev.leave(e)
	}
	return true, err
}

// refuse rejects a request that no user has accepted.
func (e *endpoint) refuse() {
	// The error is dropped because this request has no user. If the reject fails, the peer's connect times out.
	_ = e.Reject(nil)
	_, _ = e.drop()
}

// Close implements Endpoint.
func (e *endpoint) Close() error {
	closed, err := e.drop()
	if closed {
		e.p.count(func(c *Counts) { c.Endpoints-- })
	}
	return err
}
