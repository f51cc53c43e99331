package serve_test

import (
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"

	"jbofd/internal/nvmeof/rdma/verbs"
	"jbofd/internal/testutil/ioload"
)

// gated is a provider whose completion queues hold completions back until a whole batch is there, and
// that counts what a batch costs.
type gated struct {
	verbs.Provider
	// batch is the number of completions that Poll waits for; 0: none.
	batch atomic.Int32
	// Calls that carried something: of Poll, PostSend and PostRecv, and what they carried.
	polls, sends, recvs          atomic.Int64
	completions, sendWRs, recvWR atomic.Int64

	mu      sync.Mutex
	devices map[verbs.Device]*gatedDevice
}

func (g *gated) Listen(a netip.AddrPort, backlog int) (verbs.Listener, error) {
	l, err := g.Provider.Listen(a, backlog)
	return gatedListener{l, g}, err
}

// device wraps a device, always in the same value.
func (g *gated) device(d verbs.Device) *gatedDevice {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.devices == nil {
		g.devices = map[verbs.Device]*gatedDevice{}
	}
	if g.devices[d] == nil {
		g.devices[d] = &gatedDevice{d, g}
	}
	return g.devices[d]
}

type gatedListener struct {
	verbs.Listener
	g *gated
}

func (l gatedListener) Accept() (verbs.Endpoint, error) {
	e, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return gatedEndpoint{e, l.g}, nil
}

type gatedEndpoint struct {
	verbs.Endpoint
	g *gated
}

func (e gatedEndpoint) Device() verbs.Device { return e.g.device(e.Endpoint.Device()) }

func (e gatedEndpoint) CreateQP(c verbs.QPConfig) (verbs.QP, error) {
	c.Domain = c.Domain.(*gatedDomain).Domain
	c.SendCQ, c.RecvCQ = c.SendCQ.(*gatedCQ).CQ, c.RecvCQ.(*gatedCQ).CQ
	c.SRQ = c.SRQ.(gatedSRQ).SRQ
	return e.Endpoint.CreateQP(c)
}

type gatedDevice struct {
	verbs.Device
	g *gated
}

func (d *gatedDevice) OpenDomain() (verbs.Domain, error) {
	v, err := d.Device.OpenDomain()
	return &gatedDomain{v, d.g}, err
}

type gatedDomain struct {
	verbs.Domain
	g *gated
}

func (d *gatedDomain) CreateCQ(entries int) (verbs.CQ, error) {
	c, err := d.Domain.CreateCQ(entries)
	return &gatedCQ{CQ: c, g: d.g}, err
}

func (d *gatedDomain) CreateSRQ(entries int) (verbs.SRQ, error) {
	s, err := d.Domain.CreateSRQ(entries)
	return gatedSRQ{s, d.g}, err
}

func (d *gatedDomain) PostSend(wrs []verbs.SendWR) (int, error) {
	d.g.sends.Add(1)
	d.g.sendWRs.Add(int64(len(wrs)))
	return d.Domain.PostSend(wrs)
}

type gatedSRQ struct {
	verbs.SRQ
	g *gated
}

func (s gatedSRQ) PostRecv(wrs []verbs.RecvWR) (int, error) {
	s.g.recvs.Add(1)
	s.g.recvWR.Add(int64(len(wrs)))
	return s.SRQ.PostRecv(wrs)
}

// gatedCQ is polled by one goroutine at a time.
type gatedCQ struct {
	verbs.CQ
	g    *gated
	held []verbs.WC
}

func (c *gatedCQ) Poll(dst []verbs.WC) (int, error) {
	var buf [64]verbs.WC
	n, err := c.CQ.Poll(buf[:])
	c.held = append(c.held, buf[:n]...)
	if err != nil || len(c.held) == 0 || len(c.held) < int(c.g.batch.Load()) {
		return 0, err
	}
	k := copy(dst, c.held)
	c.held = append(c.held[:0], c.held[k:]...)
	c.g.polls.Add(1)
	c.g.completions.Add(int64(k))
	return k, nil
}

// cost is what a batch has cost.
type cost struct {
	polls, completions, sends, sendWRs, recvs, recvWRs int64
	doorbells                                          uint64
}

func (r *rig) cost(g *gated) cost {
	return cost{g.polls.Load(), g.completions.Load(), g.sends.Load(), g.sendWRs.Load(), g.recvs.Load(), g.recvWR.Load(),
		r.server.Stats().Doorbells}
}

func (c cost) minus(b cost) cost {
	return cost{c.polls - b.polls, c.completions - b.completions, c.sends - b.sends, c.sendWRs - b.sendWRs,
		c.recvs - b.recvs, c.recvWRs - b.recvWRs, c.doorbells - b.doorbells}
}

// runBatch runs one batch of commands, whose completions come to the target in batches of their
// number, and returns what the target has done for it.
func (r *rig) runBatch(t *testing.T, g *gated, l *ioload.Blocks, rounds int64) cost {
	t.Helper()
	if err := l.Run(len(l.Bufs)); err != nil { // what happens once: registration, metrics
		t.Fatal(err)
	}
	r.settle(t)
	before := r.cost(g)
	g.batch.Store(int32(len(l.Bufs)))
	if err := l.Run(len(l.Bufs)); err != nil {
		t.Fatal(err)
	}
	want := rounds * int64(len(l.Bufs))
	eventually(t, "the completions of the batch", func() bool { return r.cost(g).minus(before).completions == want })
	g.batch.Store(0)
	return r.cost(g).minus(before)
}
