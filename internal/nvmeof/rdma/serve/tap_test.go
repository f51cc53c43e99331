package serve_test

import (
	"errors"
	"net/netip"
	"sync"
	"sync/atomic"

	"jbofd/internal/nvmeof/rdma/verbs"
)

// tap wraps the server's provider. It counts the messages that the server receives and injects failures.
type tap struct {
	received atomic.Int64
	// short is how many receives the next PostRecv takes at most, less one; 0: all.
	short atomic.Int32

	mu      sync.Mutex
	devices map[verbs.Device]*tappedDevice
	queues  []*tappedCQ
}

var errTap = errors.New("the test wants it so")

// breakQueues makes the existing completion queues fail when they are armed or waited for.
func (t *tap) breakQueues() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, q := range t.queues {
		q.broken.Store(true)
	}
	t.queues = nil
}

func (t *tap) wrap(v verbs.Provider) verbs.Provider { return tappedProvider{v, t} }

type tappedProvider struct {
	verbs.Provider
	p *tap
}

func (t tappedProvider) Listen(a netip.AddrPort, backlog int) (verbs.Listener, error) {
	l, err := t.Provider.Listen(a, backlog)
	return tappedListener{l, t.p}, err
}

type tappedListener struct {
	verbs.Listener
	p *tap
}

func (l tappedListener) Accept() (verbs.Endpoint, error) {
	e, err := l.Listener.Accept()
	return tappedEndpoint{e, l.p}, err
}

type tappedEndpoint struct {
	verbs.Endpoint
	p *tap
}

// Device returns the same wrapper every time.
func (e tappedEndpoint) Device() verbs.Device {
	e.p.mu.Lock()
	defer e.p.mu.Unlock()
	if e.p.devices == nil {
		e.p.devices = map[verbs.Device]*tappedDevice{}
	}
	d := e.Endpoint.Device()
	if e.p.devices[d] == nil {
		e.p.devices[d] = &tappedDevice{d, e.p}
	}
	return e.p.devices[d]
}

func (e tappedEndpoint) CreateQP(c verbs.QPConfig) (verbs.QP, error) {
	c.Domain = c.Domain.(tappedDomain).Domain
	c.SendCQ, c.RecvCQ = c.SendCQ.(*tappedCQ).CQ, c.RecvCQ.(*tappedCQ).CQ
	c.SRQ = c.SRQ.(tappedSRQ).SRQ
	return e.Endpoint.CreateQP(c)
}

type tappedDevice struct {
	verbs.Device
	p *tap
}

func (d *tappedDevice) OpenDomain() (verbs.Domain, error) {
	v, err := d.Device.OpenDomain()
	return tappedDomain{v, d.p}, err
}

type tappedDomain struct {
	verbs.Domain
	p *tap
}

func (d tappedDomain) CreateCQ(entries int) (verbs.CQ, error) {
	c, err := d.Domain.CreateCQ(entries)
	q := &tappedCQ{CQ: c, p: d.p}
	d.p.mu.Lock()
	defer d.p.mu.Unlock()
	d.p.queues = append(d.p.queues, q)
	return q, err
}

func (d tappedDomain) CreateSRQ(entries int) (verbs.SRQ, error) {
	s, err := d.Domain.CreateSRQ(entries)
	return tappedSRQ{s, d.p}, err
}

type tappedSRQ struct {
	verbs.SRQ
	p *tap
}

func (s tappedSRQ) PostRecv(wrs []verbs.RecvWR) (int, error) {
	if k := int(s.p.short.Swap(0)); k > 0 && k <= len(wrs) {
		n, err := s.SRQ.PostRecv(wrs[:k-1])
		return n, errors.Join(err, errTap)
	}
	return s.SRQ.PostRecv(wrs)
}

type tappedCQ struct {
	verbs.CQ
	p      *tap
	broken atomic.Bool
}

func (c *tappedCQ) Poll(dst []verbs.WC) (int, error) {
	n, err := c.CQ.Poll(dst)
	for i := range dst[:n] {
		if w := &dst[i]; w.ID>>32 == 3 && w.Status == verbs.StatusOK {
			c.p.received.Add(1)
		}
	}
	return n, err
}

func (c *tappedCQ) Arm() error {
	if c.broken.Load() {
		return errTap
	}
	return c.CQ.Arm()
}
