package daemon

import (
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"runtime"

	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/qpair"
	rdmaserve "jbofd/internal/nvmeof/rdma/serve"
	"jbofd/internal/nvmeof/rdma/verbs"
	"jbofd/internal/nvmeof/target/connection"
	"jbofd/internal/nvmeof/tcp/serve"
	"jbofd/internal/telemetry"
)

// maxPollers bounds the goroutines that poll an RDMA device on a machine with many processors.
const maxPollers = 8

// openRDMA opens the machine's RDMA devices.
func (n *Node) openRDMA() error {
	if n.provider = n.opts.RDMA; n.provider != nil {
		return nil
	}
	p, err := verbs.Open()
	if err != nil {
		return fmt.Errorf("transport rdma: %w", err)
	}
	n.provider = p
	n.closing(func() {
		if err := p.Close(); err != nil {
			n.log.Error("closing the RDMA devices failed", "error", err)
		}
	})
	return nil
}

// startRDMA makes the RDMA server if there are RDMA listeners.
func (n *Node) startRDMA(limits nvmeof.Limits, admission *connection.Admission, log *slog.Logger) {
	if n.provider == nil {
		return
	}
	cfg := n.cfg.Limits
	n.rdma = rdmaserve.New(rdmaserve.Config{
		Limits:           limits,
		InCapsuleBytes:   int(cfg.InCapsuleBytes),
		MaxEntries:       min(cfg.QueueDepth+1, qpair.MaxEntries),
		MaxIOQueues:      cfg.IOQueues,
		Receives:         cfg.RDMAReceives,
		Pollers:          min(runtime.GOMAXPROCS(0), maxPollers),
		Admission:        admission,
		HandshakeTimeout: cfg.HandshakeTimeout,
		StallTimeout:     cfg.StallTimeout,
		MinBytesPerSec:   int64(cfg.MinTransferRate),
		SpinFor:          spinFor,
	}, n.provider, n.service, n.tel, log)
	n.closing(n.rdma.Close)
	n.tel.SetRDMA(func() telemetry.RDMAStats { return telemetry.RDMAStats(n.rdma.Stats()) })
}

// listener is an address where hosts connect.
type listener struct {
	transport, address string
	serve              func()
}

// listen binds the addresses of the listeners. Nothing is accepted before serve, which is called after apply: a host
// that was let in earlier would be told that its subsystem does not exist, and not try again.
func (n *Node) listen() error {
	for i, l := range n.cfg.Listeners {
		open := n.listenTCP
		if l.Transport == "rdma" {
			open = n.listenRDMA
		}
		address, err := open(l.Address, false)
		if err != nil {
			return fmt.Errorf("listeners[%d]: %w", i, err)
		}
		n.addrs.Listeners = append(n.addrs.Listeners, address)
	}
	if a := n.cfg.Discovery.Address; a != "" {
		address, err := n.listenTCP(a, true)
		if err != nil {
			return fmt.Errorf("discovery.address: %w", err)
		}
		n.addrs.Discovery = address
	}
	return nil
}

// listenTCP opens a TCP listener and returns its address.
func (n *Node) listenTCP(address string, discovery bool) (string, error) {
	l, err := net.Listen("tcp", address)
	if err != nil {
		return "", fmt.Errorf("listen on %s: %w", address, err)
	}
	n.closing(func() { _ = l.Close() })
	port := serve.PortFor(uint16(len(n.ports)+1), l, discovery)
	n.ports = append(n.ports, port)
	n.listeners = append(n.listeners, listener{"tcp", l.Addr().String(), func() { n.tcp.Serve(l, port) }})
	return l.Addr().String(), nil
}

// listenRDMA opens an RDMA listener and returns its address, as a URL.
func (n *Node) listenRDMA(address string, _ bool) (string, error) {
	a, err := netip.ParseAddrPort(address)
	if err != nil {
		return "", err
	}
	if n.provider == nil {
		if err := n.openRDMA(); err != nil {
			return "", err
		}
	}
	l, err := rdmaserve.Listen(n.provider, a)
	if err != nil {
		return "", fmt.Errorf("listen on rdma://%s: %w", address, err)
	}
	n.closing(func() { _ = l.Close() })
	port := rdmaserve.PortFor(uint16(len(n.ports)+1), l.Addr())
	n.ports = append(n.ports, port)
	n.listeners = append(n.listeners, listener{"rdma", l.Addr().String(), func() { n.rdma.Serve(l, port) }})
	return "rdma://" + l.Addr().String(), nil
}

// serve lets hosts connect.
func (n *Node) serve() {
	for _, l := range n.listeners {
		l.serve()
		n.log.Info("listening", "transport", l.transport, "address", l.address)
	}
}
