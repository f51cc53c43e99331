package serve

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"jbofd/internal/nvmeof/rdma"
	"jbofd/internal/nvmeof/rdma/cm"
	"jbofd/internal/nvmeof/rdma/verbs"
)

// device is an open RDMA device.
type device struct {
	srv      *Server
	name     string
	device   verbs.Device
	attr     verbs.Attr
	domain   verbs.Domain
	memory   *memory
	receives *receives
	control  *slab
	removed  atomic.Bool
	closed   chan struct{} // closed by close
	// conns is how many connections there are, over that somebody closes the device. Guarded by Server.mu.
	conns int
	over  bool

	mu     sync.Mutex // guards groups and what they have promised
	groups []*group
}

// openDevice prepares a device for connections.
func openDevice(s *Server, v verbs.Device) (d *device, err error) {
	d = &device{srv: s, device: v, attr: v.Attr(), name: v.Attr().Name, closed: make(chan struct{})}
	if d.domain, err = v.OpenDomain(); err != nil {
		return nil, err
	}
	d.memory = newMemory(d.domain, s.service.Pool(), s.log)
	d.control = newSlab(d.domain, rdma.ResponseBytes(s.cfg.MaxEntries)+connectBytes)
	if d.receives, err = newReceives(d.domain, min(s.cfg.Receives, d.attr.MaxSRQWRs),
		s.cfg.InCapsuleBytes); err != nil {
		return nil, errors.Join(err, d.domain.Close())
	}
	return d, nil
}

// Completion queues have room for all receives of the device and for the work requests of
// connections: as many as fit into cqRoom.
const cqRoom = 16384

// place finds a completion queue with room for a connection's work requests, and makes another one
// where there are fewer than Config.Pollers or none has room. releasePlace gives the room back.
func (d *device) place(sends int) (*group, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var best *group
	for _, g := range d.groups {
		if g.promised+sends <= g.room && (best == nil || g.promised < best.promised) {
			best = g
		}
	}
	if best == nil || len(d.groups) < d.srv.cfg.Pollers && best.promised > 0 {
		entries := min(d.receives.bound+max(cqRoom, sends), d.attr.MaxCQEs)
		if entries-d.receives.bound < sends {
			return nil, fmt.Errorf("%w: completion queues of %d entries are too small for %d receives and %d work "+
				"requests", verbs.ErrResources, d.attr.MaxCQEs, d.receives.bound, sends)
		}
		g, err := newGroup(d, entries)
		if err != nil && best == nil {
			return nil, fmt.Errorf("completion queue of %d entries: %w", entries, err)
		}
		if err == nil {
			d.groups = append(d.groups, g)
			best = g
		}
	}
	best.promised += sends
	return best, nil
}

// stats returns the number of completion queues, of receives, and of those held by commands that wait.
func (d *device) stats() (groups, receives, held int) {
	d.mu.Lock()
	groups = len(d.groups)
	d.mu.Unlock()
	return groups, d.receives.count(), d.receives.heldCount()
}

// close frees everything. There are no connections any more.
func (d *device) close() {
	close(d.closed)
	var errs []error
	d.mu.Lock()
	groups := d.groups
	d.mu.Unlock()
	for _, g := range groups {
		g.stop()
	}
	errs = append(errs, d.receives.close())
	for _, g := range groups {
		errs = append(errs, g.cq.Close())
	}
	errs = append(errs, d.receives.free(), d.control.close(), d.memory.close(), d.domain.Close())
	if err := errors.Join(errs...); err != nil && !d.removed.Load() {
		d.srv.log.Error("RDMA device: closing", "device", d.name, "error", err)
	}
}

// noResources makes a reject of an error.
func noResources(err error) *cm.Fault { return cm.NoRoom("%v", err) }
