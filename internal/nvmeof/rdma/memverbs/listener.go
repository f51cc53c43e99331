package memverbs

import (
	"net"
	"net/netip"
	"slices"

	"jbofd/internal/nvmeof/rdma/verbs"
)

// listener implements verbs.Listener.
type listener struct {
	provider *Provider
	addr     netip.AddrPort
	// device is the device that the listener is bound to; nil for all devices.
	device  *Device
	backlog int
	// queue holds the requests that wait for Accept.
	queue []*Endpoint
	// err is the error that Accept returns after the listener has ended.
	err error
}

func (l *listener) Addr() netip.AddrPort { return l.addr }

func (l *listener) Accept() (verbs.Endpoint, error) {
	n := l.provider.net
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.await(&n.changed, func() bool { return l.err != nil || len(l.queue) > 0 }) {
		return nil, ErrQuiet
	}
	if l.err != nil {
		return nil, l.err
	}
	e := l.queue[0]
	l.queue = l.queue[1:]
	e.counted = true
	l.provider.counts.Endpoints++
	return e, nil
}

func (l *listener) Close() error {
	n := l.provider.net
	n.mu.Lock()
	defer n.mu.Unlock()
	if l.err == net.ErrClosed {
		return nil
	}
	l.end(net.ErrClosed)
	l.provider.counts.Listeners--
	l.provider.listeners = slices.DeleteFunc(l.provider.listeners, func(o *listener) bool { return o == l })
	return nil
}

// end rejects the requests that were not accepted.
func (l *listener) end(err error) {
	l.err = err
	for _, e := range l.queue {
		e.close()
	}
	l.queue = nil
	l.provider.net.changed.Broadcast()
}
