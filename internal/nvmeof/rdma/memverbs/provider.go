package memverbs

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"syscall"

	"jbofd/internal/nvmeof/rdma/verbs"
)

// Provider is a host in the network.
type Provider struct {
	net *Network
	// The network's mu guards the following fields.
	devices   []*Device
	listeners []*listener
	counts    verbs.Counts
	crossings uint64
	stats     Stats
	closed    bool
}

var _ verbs.Provider = (*Provider)(nil)

// NewProvider adds a host with these devices.
func (n *Network) NewProvider(devices ...DeviceConfig) *Provider {
	p := &Provider{net: n}
	n.mu.Lock()
	n.providers = append(n.providers, p)
	n.mu.Unlock()
	for _, cfg := range devices {
		p.AddDevice(cfg)
	}
	return p
}

// deviceAt returns the device with the address, if it is not removed.
func (n *Network) deviceAt(a netip.Addr) *Device {
	for _, p := range n.providers {
		for _, d := range p.devices {
			if d.addr == a.Unmap() {
				return d
			}
		}
	}
	return nil
}

func (n *Network) newPort() uint16 {
	n.lastPort++
	if n.lastPort < 40000 {
		n.lastPort = 40000
	}
	return n.lastPort
}

// Listen implements verbs.Provider.
func (p *Provider) Listen(address netip.AddrPort, backlog int) (verbs.Listener, error) {
	n := p.net
	n.mu.Lock()
	defer n.mu.Unlock()
	l := &listener{provider: p, addr: netip.AddrPortFrom(address.Addr().Unmap(), address.Port()),
		backlog: max(backlog, 1)}
	if p.closed {
		return nil, net.ErrClosed
	}
	if !l.addr.Addr().IsUnspecified() {
		for _, d := range p.devices {
			if d.addr == l.addr.Addr() {
				l.device = d
			}
		}
		if l.device == nil {
			return nil, fmt.Errorf("listen on %v: %w", address, verbs.ErrNoDevice)
		}
	}
	if l.addr.Port() == 0 {
		for l.addr = netip.AddrPortFrom(l.addr.Addr(), n.newPort()); p.taken(l); {
			l.addr = netip.AddrPortFrom(l.addr.Addr(), n.newPort())
		}
	}
	if p.taken(l) {
		return nil, fmt.Errorf("listen on %v: %w", address, syscall.EADDRINUSE)
	}
	p.listeners = append(p.listeners, l)
	p.counts.Listeners++
	return l, nil
}

// taken reports whether another listener has l's port.
func (p *Provider) taken(l *listener) bool {
	for _, o := range p.listeners {
		if o.addr.Port() == l.addr.Port() && (o.device == l.device || o.device == nil || l.device == nil) {
			return true
		}
	}
	return false
}

// listenerFor returns the listener that takes connections for a device and port, or nil.
func (p *Provider) listenerFor(d *Device, port uint16) *listener {
	for _, l := range p.listeners {
		if l.addr.Port() == port && (l.device == d || l.device == nil) && l.err == nil {
			return l
		}
	}
	return nil
}

// Resolve implements verbs.Provider. The route is over the provider's first device.
func (p *Provider) Resolve(ctx context.Context, remote netip.AddrPort) (verbs.Endpoint, error) {
	return p.ResolveFrom(ctx, netip.Addr{}, remote)
}

// ResolveFrom implements verbs.Provider.
func (p *Provider) ResolveFrom(ctx context.Context, local netip.Addr, remote netip.AddrPort) (verbs.Endpoint, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	n := p.net
	n.mu.Lock()
	defer n.mu.Unlock()
	switch {
	case p.closed:
		return nil, net.ErrClosed
	case len(p.devices) == 0:
		return nil, fmt.Errorf("resolve %v: %w", remote, verbs.ErrNoDevice)
	case n.deviceAt(remote.Addr()) == nil:
		return nil, fmt.Errorf("resolve %v: %w", remote, verbs.ErrUnreachable)
	}
	d := p.devices[0]
	if local.IsValid() {
		i := slices.IndexFunc(p.devices, func(d *Device) bool { return d.addr == local.Unmap() })
		if i < 0 {
			return nil, fmt.Errorf("resolve %v from %v: %w", remote, local, verbs.ErrNoDevice)
		}
		d = p.devices[i]
	}
	e := newEndpoint(d, netip.AddrPortFrom(d.addr, n.newPort()),
		netip.AddrPortFrom(remote.Addr().Unmap(), remote.Port()))
	p.counts.Endpoints++
	return e, nil
}

// Counts implements verbs.Provider.
func (p *Provider) Counts() verbs.Counts {
	p.net.mu.Lock()
	defer p.net.mu.Unlock()
	return p.counts
}

// Crossings implements verbs.Provider. It counts the calls that would have crossed into C.
func (p *Provider) Crossings() uint64 {
	p.net.mu.Lock()
	defer p.net.mu.Unlock()
	return p.crossings
}

// Close implements verbs.Provider. Idempotent.
//
// Errors: an error that counts the objects that are still open.
func (p *Provider) Close() error {
	p.net.mu.Lock()
	defer p.net.mu.Unlock()
	p.closed = true
	if p.counts != (verbs.Counts{}) {
		return fmt.Errorf("memverbs: closed with things open: %+v", p.counts)
	}
	return nil
}
