package cluster

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"jbofd/client"
	"jbofd/client/internal/kvop"
	"jbofd/client/kv"
	"jbofd/internal/flowctl"
	"jbofd/internal/uuid"
)

// nodeKey identifies a node of the map. One that has another address is another node.
type nodeKey struct{ name, address, nqn string }

// node is a node of the map, and the connection to it, which is made when it is first needed.
type node struct {
	s   *Store
	key nodeKey
	// asked: its map is being read.
	asked atomic.Bool
	// ready is the last association whose partitions were listed. It may be lost: use connected. nil: there was none
	// yet.
	ready  atomic.Pointer[link]
	ctx    context.Context // ends with close
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu sync.Mutex
	// c is the connection of ready, or one whose partitions are not known yet.
	c *client.Controller
	// busy: a goroutine connects, or lists partitions. The next one may begin at due; pause grows with each failure.
	busy   bool
	due    time.Duration
	pause  time.Duration
	closed bool
	// why is how the latest attempt has failed.
	why     error
	members map[uuid.UUID]*member

	// out and ssds are the node for flowctl, guarded by engine.mu: its connection, and its drives by number.
	out  *flowctl.Link
	ssds map[uint16]*flowctl.SSD
}

// link is an association whose partitions are known.
type link struct {
	c *client.Controller
	// queues are its I/O queues.
	queues []*ioQueue
}

// member is a partition. It may serve some ranges.
type member struct {
	node *node
	id   uuid.UUID
	// place is its namespace and drive, nil before the node has listed it.
	place atomic.Pointer[place]
}

// place has the namespace of a partition, and its drive, by the number of that in the node.
type place struct {
	space kvop.Space
	drive uint16
	ssd   *flowctl.SSD
}

// Bounds of node.pause.
const (
	minConnectPause = 50 * time.Millisecond
	maxConnectPause = time.Second
	// listPause is the shortest time between two listings.
	listPause = 50 * time.Millisecond
)

func newNode(s *Store, k nodeKey) *node {
	n := &node{s: s, key: k, members: map[uuid.UUID]*member{}, ssds: map[uint16]*flowctl.SSD{}}
	n.ctx, n.cancel = context.WithCancel(s.ctx)
	return n
}

// member returns a partition of the node.
func (n *node) member(id uuid.UUID) *member {
	n.mu.Lock()
	defer n.mu.Unlock()
	m := n.members[id]
	if m == nil {
		m = &member{node: n, id: id}
		n.members[id] = m
	}
	return m
}

// maxValue is the longest value of its namespaces, 0 if none is known.
func (n *node) maxValue() (longest int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, m := range n.members {
		if p := m.place.Load(); p != nil && (longest == 0 || p.space.MaxValue < longest) {
			longest = p.space.MaxValue
		}
	}
	return longest
}

// connected returns the connection if commands can be sent over it now; otherwise nil.
func (n *node) connected() *link { // hot: 0 allocs
	l := n.ready.Load()
	if l == nil {
		return nil
	}
	for _, q := range l.queues {
		if q.Err() != nil {
			return nil
		}
	}
	return l
}

// connect has a goroutine connect the node and list its partitions, and does not wait for that. It does nothing if that
// is under way already, or before due.
func (n *node) connect() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed || n.busy || n.key.address == "" || n.s.now() < n.due {
		return
	}
	n.busy = true
	n.wg.Go(n.bring)
}

// relist lists the partitions again, because one was not found in its namespace. Like connect it does nothing before
// due.
func (n *node) relist() { n.connect() }

// bring connects, if there is no connection, and lists the partitions.
func (n *node) bring() {
	err := n.tryBring()
	n.mu.Lock()
	n.busy = false
	if err != nil {
		n.pause = min(max(2*n.pause, minConnectPause), maxConnectPause)
		n.why = err
	} else {
		n.pause = 0
	}
	n.due = n.s.now() + max(n.pause, listPause)
	n.mu.Unlock()
	if err == nil {
		n.s.engine.wake()
	}
}

func (n *node) tryBring() error {
	n.mu.Lock()
	c := n.c
	n.mu.Unlock()
	if c != nil && c.Err() != nil { // the association is lost
		n.setController(nil)
		if err := c.Close(); err != nil {
			return err
		}
		c = nil
	}
	if c == nil {
		o := n.s.o.connection(n.key.address)
		o.SubNQN = n.key.nqn
		var err error
		if c, err = client.Connect(n.ctx, o); err != nil {
			return err
		}
		if !n.setController(c) {
			return c.Close()
		}
	}
	return n.list(c)
}

// setController sets c, and reports whether it has: it has not if the node is closed.
func (n *node) setController(c *client.Controller) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return false
	}
	n.c = c
	return true
}

// listTimeout bounds the listing of partitions.
const listTimeout = 5 * time.Second

// list finds the namespaces of the partitions.
func (n *node) list(c *client.Controller) error {
	ctx, cancel := context.WithTimeout(n.ctx, listTimeout)
	defer cancel()
	queues, err := c.IOQueues(ctx)
	if err != nil {
		return err
	}
	l := &link{c: c}
	depth := 0
	for _, q := range queues {
		l.queues = append(l.queues, &ioQueue{IOQueue: q})
		depth += q.Depth()
	}
	id, err := c.Identity(ctx)
	if err != nil {
		return err
	}
	if !id.ExtendedKV {
		return fmt.Errorf("%w: %s has no extended key-value", client.ErrUnsupported, n.key.address)
	}
	ids, err := c.NamespaceIDs(ctx)
	if err != nil {
		return err
	}
	found, credits := map[uuid.UUID]*place{}, map[uint16]int{}
	for _, nsid := range ids {
		ns, err := kv.Open(ctx, c, nsid, kv.Options{})
		if errors.Is(err, client.ErrUnsupported) || errors.Is(err, client.ErrNamespaceGone) {
			continue // one for blocks, or it was removed meanwhile
		}
		if err != nil {
			return err
		}
		i := ns.Info()
		p := &place{space: kvop.Space{NSID: nsid, MaxKey: i.MaxKey, MaxValue: i.MaxValue,
			MaxTransfer: id.MaxTransferBytes,
			Counted:     c.Options().Transport != client.RDMA, Extended: i.Extended}, drive: i.SSD}
		if p.space.MaxTransfer == 0 {
			p.space.MaxTransfer = maxTransfer
		}
		if _, ok := credits[i.SSD]; !ok {
			if credits[i.SSD], err = c.QueryCredit(ctx, i.SSD); err != nil {
				return err
			}
		}
		found[i.UUID] = p
	}
	n.place(found, credits, depth)
	n.mu.Lock()
	n.why = nil
	n.mu.Unlock()
	n.ready.Store(l)
	return nil
}

// place says where the partitions of the node are.
func (n *node) place(found map[uuid.UUID]*place, credits map[uint16]int, depth int) {
	e := n.s.engine
	e.mu.Lock()
	if n.out == nil {
		n.out = e.flow.NewLink(depth)
	}
	e.flow.SetDepth(n.out, depth)
	for drive, units := range credits {
		ssd := n.ssds[drive]
		if ssd == nil {
			ssd = e.flow.NewSSD(n.out)
			n.ssds[drive] = ssd
		}
		e.flow.Grant(int64(n.s.now()), ssd, units)
	}
	for _, p := range found {
		p.ssd = n.ssds[p.drive]
	}
	e.leave()
	for u, p := range found {
		n.member(u).place.Store(p)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	for u, m := range n.members {
		if found[u] == nil {
			m.place.Store(nil)
		}
	}
}

// maxTransfer is the most data of a command where the target sets no limit.
const maxTransfer = 1 << 30

// problem says why the node is not connected.
func (n *node) problem() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.why != nil {
		return fmt.Errorf("node %s: %w", n.key.name, n.why)
	}
	return fmt.Errorf("node %s is not connected", n.key.name)
}

// close ends the connection.
func (n *node) close() error {
	n.mu.Lock()
	n.closed = true
	n.mu.Unlock()
	n.cancel()
	n.wg.Wait()
	n.ready.Store(nil)
	n.mu.Lock()
	c := n.c
	n.c = nil
	n.mu.Unlock()
	if c == nil {
		return nil
	}
	return c.Close()
}
