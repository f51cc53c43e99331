// Package serve drives NVMe/RDMA connections with verbs: it listens, answers connection requests,
// polls completion queues, hands commands to the drives and posts their answers.
//
//	Listener ──> Server ──> conn ── qpair, connection.Conn
//	                          │ belongs to
//	device ── group ── CQ ────┘   one goroutine polls and sleeps; any that brings work may take a turn
//	   ├── receives (SRQ, shared by all connections of the device)
//	   └── memory   (the buffer pool, registered region by region, once)
package serve

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"strconv"
	"sync"
	"time"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/rdma/cm"
	"jbofd/internal/nvmeof/rdma/verbs"
	"jbofd/internal/nvmeof/target"
	"jbofd/internal/nvmeof/target/connection"
	"jbofd/internal/telemetry"
)

// Config bounds a Server.
type Config struct {
	Limits nvmeof.Limits
	// InCapsuleBytes is the largest in-capsule data, MaxEntries the largest queue, MaxIOQueues how
	// many I/O queues a controller has.
	InCapsuleBytes, MaxEntries, MaxIOQueues int
	// Receives bounds the shared receive queue of each device.
	Receives int
	// Pollers is how many completion queues a device has as long as they suffice, each with a
	// goroutine.
	Pollers int
	// Admission bounds the connections of all transports.
	Admission *connection.Admission
	// HandshakeTimeout is how long a connection may take until Connect.
	HandshakeTimeout time.Duration
	// StallTimeout is how long a host may take no responses before it is cut off; 0: for ever.
	StallTimeout time.Duration
	// MinBytesPerSec is the least rate at which a host's memory is read, measured over no less than StallTimeout; 0:
	// any.
	MinBytesPerSec int64
	// SpinFor is how long a completion queue is polled in vain before its goroutine sleeps.
	SpinFor time.Duration
}

// Server serves NVMe/RDMA on any number of addresses.
type Server struct {
	cfg      Config
	provider verbs.Provider
	service  *target.Service
	tel      *telemetry.Telemetry
	log      *slog.Logger
	wg       sync.WaitGroup
	done     chan struct{} // closed by Close or Drain: no more connections
	ended    chan struct{} // closed by Close

	mu        sync.Mutex
	listeners map[verbs.Listener]struct{}
	devices   map[verbs.Device]*device
	conns     map[*conn]struct{}
	// doorbells are those of devices that are gone.
	doorbells uint64
	stopping  bool
	closed    bool
}

// New makes a server without listeners. It does not own the provider.
func New(cfg Config, p verbs.Provider, f *target.Service, tel *telemetry.Telemetry, log *slog.Logger) *Server {
	s := &Server{
		cfg: cfg, provider: p, service: f, tel: tel, log: log, done: make(chan struct{}), ended: make(chan struct{}),
		listeners: map[verbs.Listener]struct{}{}, devices: map[verbs.Device]*device{}, conns: map[*conn]struct{}{},
	}
	if cfg.StallTimeout > 0 {
		s.wg.Go(s.sweep)
	}
	return s
}

// PortFor describes the address of a listener as discovery reports it.
func PortFor(id uint16, a netip.AddrPort) nvmeof.Port {
	ip := a.Addr().Unmap()
	p := nvmeof.Port{ID: id, TRTYPE: nvme.TRTYPERDMA, ADRFAM: nvme.ADRFAMIPv4, Address: ip.WithZone("").String(),
		Service: strconv.Itoa(int(a.Port())), Wildcard: ip.IsUnspecified()}
	if ip.Is6() && !ip.IsUnspecified() {
		p.ADRFAM = nvme.ADRFAMIPv6
	}
	return p
}

// backlog is how many connection requests may wait to be looked at.
const backlog = 128

// Listen opens a listener on the provider's devices, for Serve. There need be no Server yet.
func Listen(p verbs.Provider, address netip.AddrPort) (verbs.Listener, error) {
	return p.Listen(address, backlog)
}

// Listen is the function Listen for the server's provider.
func (s *Server) Listen(address netip.AddrPort) (verbs.Listener, error) {
	return Listen(s.provider, address)
}

// Serve accepts connections from l, which it takes over, until Drain or Close.
func (s *Server) Serve(l verbs.Listener, port nvmeof.Port) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopping {
		_ = l.Close() // nobody has used it
		return
	}
	s.listeners[l] = struct{}{}
	s.wg.Go(func() { s.accept(l, port) })
}

// acceptPause is waited after an error that may pass.
const acceptPause = time.Second

func (s *Server) accept(l verbs.Listener, port nvmeof.Port) {
	for {
		ep, err := l.Accept()
		switch {
		case err == nil:
			s.answer(ep, port)
		case errors.Is(err, net.ErrClosed):
			return
		case errors.Is(err, verbs.ErrDeviceRemoved):
			if l = s.listenAgain(l); l == nil {
				return
			}
		default:
			s.tel.ConnectionRefused("accept")
			s.log.Warn("accept failed", "transport", "rdma", "address", l.Addr().String(), "error", err)
			if s.pause() {
				return
			}
		}
	}
}

// pause waits for a moment and reports whether the server takes no more connections.
func (s *Server) pause() (over bool) {
	t := time.NewTimer(acceptPause)
	defer t.Stop()
	select {
	case <-t.C:
		return false
	case <-s.done:
		return true
	}
}

// listenAgain replaces a listener whose device is gone as soon as the address has a device again; nil:
// the server takes no more connections.
func (s *Server) listenAgain(old verbs.Listener) verbs.Listener {
	address := old.Addr()
	s.log.Warn("the RDMA device of a listener is gone; listening again when it is back", "address", address.String())
	_ = old.Close() // it has ended already
	s.mu.Lock()
	delete(s.listeners, old)
	s.mu.Unlock()
	for {
		if s.pause() {
			return nil
		}
		l, err := s.Listen(address)
		if err != nil {
			continue
		}
		s.mu.Lock()
		stopping := s.stopping
		if !stopping {
			s.listeners[l] = struct{}{}
		}
		s.mu.Unlock()
		if stopping {
			_ = l.Close() // nobody has used it
			return nil
		}
		s.log.Info("listening", "transport", "rdma", "address", address.String())
		return l
	}
}

// answer judges a connection request and starts to serve it, or rejects it.
func (s *Server) answer(ep verbs.Endpoint, port nvmeof.Port) {
	peer := ep.Peer()
	req, fault := cm.Parse(peer.PrivateData, peer.ResponderResources,
		cm.Limits{MaxEntries: s.cfg.MaxEntries, MaxQID: uint16(s.cfg.MaxIOQueues)})
	if fault != nil {
		s.tel.ProtocolError("private_data")
		s.reject(ep, fault)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopping {
		s.wg.Go(func() { s.reject(ep, cm.NoRoom("%v", connection.ErrShuttingDown)) })
		return
	}
	c := newConn(s, ep, req, port)
	s.conns[c] = struct{}{}
	s.wg.Go(func() {
		c.serve()
		c.ticket.Close()
		s.mu.Lock()
		delete(s.conns, c)
		s.mu.Unlock()
	})
}

// reject refuses a request and says why.
func (s *Server) reject(ep verbs.Endpoint, f *cm.Fault) {
	s.log.Warn("connection refused", "transport", "rdma", "remote", ep.Remote().String(), "status", f.Status.String(),
		"reason", f.What)
	if err := errors.Join(ep.Reject(f.Reject()), ep.Close()); err != nil {
		s.log.Debug("reject", "remote", ep.Remote().String(), "error", err)
	}
}

// enter counts a connection on its device, which is opened for the first of them. connClosed must
// follow.
func (s *Server) enter(d verbs.Device) (*device, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, connection.ErrShuttingDown
	}
	v := s.devices[d]
	if v == nil || v.removed.Load() {
		// One that has failed without being removed ends with its connections; a new one must not
		// become one of them.
		if v != nil && s.removeIfUnused(v) {
			s.wg.Go(v.close)
		}
		var err error
		if v, err = openDevice(s, d); err != nil {
			return nil, fmt.Errorf("RDMA device %s: %w", d.Attr().Name, err)
		}
		s.devices[d] = v
		s.wg.Go(func() { s.watch(v) })
	}
	v.conns++
	return v, nil
}

// watch ends a device that was removed while it had no connections: with some, the last one does.
func (s *Server) watch(v *device) {
	select {
	case <-v.device.Removed():
		v.removed.Store(true)
		s.releaseConns(v, 0)
	case <-v.closed:
	case <-s.ended:
	}
}

// connClosed counts one connection less; a device that is gone ends with its last one.
func (s *Server) connClosed(v *device) { s.releaseConns(v, 1) }

// releaseConns counts so many connections less, and closes a device that is gone and has none left.
func (s *Server) releaseConns(v *device, leaving int) {
	s.mu.Lock()
	v.conns -= leaving
	over := s.removeIfUnused(v)
	s.mu.Unlock()
	if over {
		v.close()
	}
}

// removeIfUnused takes a device out that is gone and has no connections, once; the caller is to close it
// then. mu is held.
func (s *Server) removeIfUnused(v *device) bool {
	if v.over || v.conns > 0 || !v.removed.Load() {
		return false
	}
	v.over = true
	if s.devices[v.device] == v { // else it was opened anew
		delete(s.devices, v.device)
	}
	s.doorbells += v.domain.Doorbells()
	return true
}

// sweep closes connections whose hosts take no responses: they hold buffers.
func (s *Server) sweep() {
	tick := time.NewTicker(max(s.cfg.StallTimeout/4, 10*time.Millisecond))
	defer tick.Stop()
	for {
		select {
		case <-s.ended:
			return
		case <-tick.C:
		}
		now := s.service.Clock()
		s.mu.Lock()
		conns := make([]*conn, 0, len(s.conns))
		for c := range s.conns {
			conns = append(conns, c)
		}
		s.mu.Unlock()
		for _, c := range conns {
			if c.stuck(now) {
				c.shut(fmt.Sprintf("the host took no responses, or sent no data, for %v", s.cfg.StallTimeout))
			}
		}
	}
}

// stop takes no more connections.
func (s *Server) stop() {
	s.mu.Lock()
	if !s.stopping {
		s.stopping = true
		close(s.done)
	}
	listeners := s.listeners
	s.listeners = nil
	s.mu.Unlock()
	for l := range listeners {
		_ = l.Close() // ends Accept
	}
}

// Drain stops accepting and waits until no connection has commands in flight or
// ctx ends.
func (s *Server) Drain(ctx context.Context) {
	s.stop()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for s.busy() {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// busy reports whether a connection has commands with an SSD or answers to send.
func (s *Server) busy() bool {
	s.mu.Lock()
	conns := make([]*conn, 0, len(s.conns))
	for c := range s.conns {
		conns = append(conns, c)
	}
	s.mu.Unlock()
	for _, c := range conns {
		if c.InFlight() > 0 || c.unsent() > 0 {
			return true
		}
	}
	return false
}

// Close ends all connections and waits for them. Idempotent.
func (s *Server) Close() {
	s.stop()
	s.mu.Lock()
	if !s.closed {
		s.closed = true
		close(s.ended)
	}
	for c := range s.conns {
		c.shut("the target is shutting down")
	}
	s.mu.Unlock()
	s.wg.Wait()
	s.mu.Lock()
	devices := s.devices
	s.devices = map[verbs.Device]*device{}
	s.mu.Unlock()
	for _, d := range devices {
		d.close()
	}
}

// Stats are a server's figures at one moment.
type Stats struct {
	// Devices that have connections or had some; CompletionQueues of them all.
	Devices, CompletionQueues int
	// Receives are posted to shared receive queues or taken by capsules; Held are those of
	// commands that wait for memory.
	Receives, Held int
	// RegisteredBytes is the memory that devices can reach, over all devices.
	RegisteredBytes int64
	// Doorbells and Crossings count how often devices were told of work, and how often C was
	// called to post or to poll.
	Doorbells, Crossings uint64
}

// Stats returns the server's figures.
func (s *Server) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := Stats{Devices: len(s.devices), RegisteredBytes: s.provider.Counts().RegisteredBytes, Doorbells: s.doorbells,
		Crossings: s.provider.Crossings()}
	for _, d := range s.devices {
		groups, receives, held := d.stats()
		t.CompletionQueues += groups
		t.Receives += receives
		t.Held += held
		t.Doorbells += d.domain.Doorbells()
	}
	return t
}
