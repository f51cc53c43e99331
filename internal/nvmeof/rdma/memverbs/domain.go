package memverbs

import (
	"errors"
	"fmt"
	"net"
	"sync"

	"jbofd/internal/nvmeof/rdma/verbs"
)

// domain implements verbs.Domain.
type domain struct {
	dev *Device
	net *Network
	// The network's mu guards the following fields.
	doorbells uint64
	// regions is sorted by address.
	regions []*region
	// users is the number of objects that must be closed before the domain.
	users  int
	closed bool
}

// usable returns the reason why nothing more can be created in the domain, or nil.
func (d *domain) usable() error {
	switch {
	case d.closed:
		return net.ErrClosed
	case d.dev.gone:
		return verbs.ErrDeviceRemoved
	}
	return nil
}

func (d *domain) CreateCQ(entries int) (verbs.CQ, error) {
	d.net.mu.Lock()
	defer d.net.mu.Unlock()
	if err := d.usable(); err != nil {
		return nil, err
	}
	if entries > d.dev.attr.MaxCQEs {
		return nil, limit("entries of a completion queue", entries, d.dev.attr.MaxCQEs)
	}
	q := &cq{domain: d, ring: make([]entry, max(entries, 1))}
	q.noticed = sync.Cond{L: &d.net.mu}
	d.users++
	d.dev.provider.counts.CQs++
	return q, nil
}

func (d *domain) CreateSRQ(entries int) (verbs.SRQ, error) {
	d.net.mu.Lock()
	defer d.net.mu.Unlock()
	if err := d.usable(); err != nil {
		return nil, err
	}
	if entries > d.dev.attr.MaxSRQWRs {
		return nil, limit("entries of a shared receive queue", entries, d.dev.attr.MaxSRQWRs)
	}
	d.users++
	d.dev.provider.counts.SRQs++
	return &srq{recvQueue: newRecvQueue(d, max(entries, 1))}, nil
}

var (
	errNotConnected = errors.New("memverbs: the queue pair is not connected")
	errOtherDomain  = errors.New("memverbs: the queue pair is of another domain")
	errInlineLong   = errors.New("memverbs: more inline data than the queue pair takes")
	errInlineAddr   = errors.New("memverbs: inline data at an address where no region is")
	errOp           = errors.New("memverbs: not an operation of a send queue")
)

func (d *domain) PostSend(wrs []verbs.SendWR) (int, error) { // hot: 0 allocs
	if len(wrs) == 0 {
		return 0, nil
	}
	d.net.mu.Lock()
	defer d.net.mu.Unlock()
	d.dev.provider.crossings++
	var last *Endpoint
	for i := range wrs {
		e := d.net.qps[wrs[i].QP]
		if e == nil {
			return i, net.ErrClosed
		}
		if e.domain != d {
			return i, errOtherDomain
		}
		if err := e.post(&wrs[i]); err != nil {
			return i, err
		}
		if e != last {
			last = e
			d.ring(e)
		}
	}
	return len(wrs), nil
}

// ring counts a doorbell.
func (d *domain) ring(e *Endpoint) {
	d.doorbells++
	d.dev.provider.stats.Doorbells++
	if e != nil {
		e.stats.Doorbells++
	}
}

func (d *domain) Doorbells() uint64 {
	d.net.mu.Lock()
	defer d.net.mu.Unlock()
	return d.doorbells
}

func (d *domain) Close() error {
	d.net.mu.Lock()
	defer d.net.mu.Unlock()
	if d.closed {
		return nil
	}
	if d.users > 0 {
		return fmt.Errorf("memverbs: %d objects use the domain", d.users)
	}
	d.closed = true
	d.dev.provider.counts.Domains--
	return nil
}
