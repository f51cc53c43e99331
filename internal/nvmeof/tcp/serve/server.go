// Package serve drives NVMe/TCP connections with sockets: it listens, reads,
// hands commands to the drives and sends their answers.
package serve

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"strconv"
	"sync"
	"time"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/target"
	"jbofd/internal/nvmeof/target/connection"
	"jbofd/internal/nvmeof/tcp"
	"jbofd/internal/telemetry"
)

// Config bounds a Server.
type Config struct {
	Machine tcp.Config
	// Admission bounds the connections of all transports. MaxSockets is how many there may be of TCP, with those that
	// are being closed; further ones are refused.
	Admission  *connection.Admission
	MaxSockets int
	// ReceiveBytes is the size of the receive buffer that a busy connection has.
	ReceiveBytes int
	// BacklogBytes of unsent answers stop a connection from taking commands.
	BacklogBytes int
	// HandshakeTimeout is how long a connection may take until Connect.
	HandshakeTimeout time.Duration
	// StallTimeout is how long a host may not read, or not send the rest of what it has
	// begun or was asked for, before it is cut off; 0: for ever.
	StallTimeout time.Duration
	// MinBytesPerSec is the least rate at which a host sends what it was asked for and reads what it has asked for,
	// measured over no less than StallTimeout; 0: any.
	MinBytesPerSec int64
	// SpinFor is how long a reader asks for more before it sleeps; 0: not at all.
	SpinFor time.Duration
}

// Server serves NVMe/TCP on any number of addresses.
type Server struct {
	cfg     Config
	service *target.Service
	tel     *telemetry.Telemetry
	log     *slog.Logger
	watch   *watch
	rx      rxPool
	wg      sync.WaitGroup
	done    chan struct{} // closed by Close

	mu        sync.Mutex
	listeners []net.Listener
	conns     map[*conn]struct{}
	closed    bool
}

// New makes a server without listeners.
func New(cfg Config, f *target.Service, tel *telemetry.Telemetry, log *slog.Logger) (*Server, error) {
	w, err := newWatch(cfg.MaxSockets)
	if err != nil {
		return nil, err
	}
	s := &Server{
		cfg: cfg, service: f, tel: tel, log: log, watch: w,
		rx:    rxPool{size: cfg.ReceiveBytes, free: make(chan []byte, 64)},
		conns: map[*conn]struct{}{}, done: make(chan struct{}),
	}
	if cfg.StallTimeout > 0 {
		s.wg.Go(s.sweep)
	}
	return s, nil
}

// PortFor describes the address of a listener as discovery reports it.
func PortFor(id uint16, l net.Listener, discovery bool) nvmeof.Port {
	a := l.Addr().(*net.TCPAddr)
	ip, _ := netip.AddrFromSlice(a.IP)
	ip = ip.Unmap()
	p := nvmeof.Port{ID: id, TRTYPE: nvme.TRTYPETCP, ADRFAM: nvme.ADRFAMIPv4, Address: ip.String(),
		Service:  strconv.Itoa(a.Port),
		Wildcard: ip.IsUnspecified(), Discovery: discovery}
	if ip.Is6() && !ip.IsUnspecified() {
		p.ADRFAM = nvme.ADRFAMIPv6
	}
	return p
}

// Serve accepts connections from l until Close.
func (s *Server) Serve(l net.Listener, port nvmeof.Port) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.listeners = append(s.listeners, l)
	s.wg.Go(func() { s.accept(l, port) })
}

// acceptPause is waited after an error that will pass, such as too many open
// files.
const acceptPause = 50 * time.Millisecond

func (s *Server) accept(l net.Listener, port nvmeof.Port) {
	for {
		nc, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			s.tel.ConnectionRefused("accept")
			s.log.Warn("accept failed", "address", l.Addr().String(), "error", err)
			time.Sleep(acceptPause)
			continue
		}
		if err := s.start(nc.(*net.TCPConn), port); err != nil {
			s.log.Warn("connection refused", "remote", nc.RemoteAddr().String(), "reason", err)
			_ = nc.Close()
		}
	}
}

// start begins to serve a connection.
func (s *Server) start(nc *net.TCPConn, port nvmeof.Port) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return connection.ErrShuttingDown
	}
	_ = nc.SetNoDelay(true)
	c, err := newConn(s, nc, port)
	if err != nil {
		return err
	}
	if err = s.watch.add(c); err != nil {
		c.Release(c.resume)
		c.ticket.Close()
		s.tel.ConnectionRefused("sockets")
		return err
	}
	s.conns[c] = struct{}{}
	s.wg.Go(func() {
		c.serve()
		s.forget(c)
	})
	return nil
}

func (s *Server) forget(c *conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, c)
	c.ticket.Close()
}

// Drain stops accepting and waits until no connection has commands in flight or
// ctx ends.
func (s *Server) Drain(ctx context.Context) {
	s.mu.Lock()
	s.closed = true
	for _, l := range s.listeners {
		_ = l.Close()
	}
	s.mu.Unlock()
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
	defer s.mu.Unlock()
	for c := range s.conns {
		c.mu.Lock()
		b := c.InFlight() > 0 || c.sending || c.m.Pending() > 0
		c.mu.Unlock()
		if b {
			return true
		}
	}
	return false
}

// Close ends all connections and waits for them. Idempotent.
func (s *Server) Close() {
	s.mu.Lock()
	s.closed = true
	select {
	case <-s.done:
	default:
		close(s.done)
	}
	for _, l := range s.listeners {
		_ = l.Close()
	}
	for c := range s.conns {
		c.shut("the target is shutting down")
	}
	s.mu.Unlock()
	s.wg.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.watch != nil {
		s.watch.close()
		s.watch = nil
	}
}
