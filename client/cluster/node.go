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
	"jbofd/internal/uuid"
)

// nodeKey identifies a node of the map. One that has another address is another node.
type nodeKey struct{ name, address, nqn string }

// node is a node of the map, and the connection to it, which is made when it is needed first.
type node struct {
	s   *Store
	key nodeKey
	// asked: its map is being read.
	asked atomic.Bool
	// ready is the connection, as long as the partitions are known that came with it; nil: there is none.
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
}

// link is a controller whose partitions are known.
type link struct {
	*client.Controller
	losses uint64 // Controller.Losses when they were listed
}

// member is a partition. It may serve some ranges.
type member struct {
	node *node
	id   uuid.UUID
	// space is its namespace, nil as long as the node has not listed it.
	space atomic.Pointer[kvop.Space]
	// outstanding is how many commands of the Store are at it.
	outstanding atomic.Int32
}

// Bounds of node.pause.
const (
	minConnectPause = 50 * time.Millisecond
	maxConnectPause = time.Second
	// listPause is the shortest time between two listings.
	listPause = 50 * time.Millisecond
)

func newNode(s *Store, k nodeKey) *node {
	n := &node{s: s, key: k, members: map[uuid.UUID]*member{}}
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
		if sp := m.space.Load(); sp != nil && (longest == 0 || sp.MaxValue < longest) {
			longest = sp.MaxValue
		}
	}
	return longest
}

// connected returns the connection if commands can be sent over it now; otherwise nil.
func (n *node) connected() *client.Controller { // hot: 0 allocs
	c := n.ready.Load()
	if c == nil || !c.Connected() || c.Losses() != c.losses {
		return nil
	}
	return c.Controller
}

// connect sees to it that the node is connected and its partitions are known, and does not wait for that.
func (n *node) connect() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed || n.busy || n.key.address == "" || n.s.now() < n.due {
		return
	}
	n.busy = true
	n.wg.Go(n.bring)
}

// relist lists the partitions again, because one was not found where it was.
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
		n.s.wake()
	}
}

func (n *node) tryBring() error {
	n.mu.Lock()
	c := n.c
	n.mu.Unlock()
	if c != nil && c.Err() != nil { // it has given up
		n.setController(nil)
		if err := c.Close(); err != nil {
			return err
		}
		c = nil
	}
	if c == nil {
		o := n.s.o.Connection
		o.Address, o.SubNQN = n.key.address, n.key.nqn
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

// setController reports whether the node is still to have a connection.
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
	losses := c.Losses()
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
	found := map[uuid.UUID]*kvop.Space{}
	for _, nsid := range ids {
		ns, err := kv.Open(ctx, c, nsid, kv.Options{})
		if errors.Is(err, client.ErrUnsupported) || errors.Is(err, client.ErrNamespaceGone) {
			continue // one for blocks, or it was removed meanwhile
		}
		if err != nil {
			return err
		}
		i := ns.Info()
		found[i.UUID] = &kvop.Space{NSID: nsid, MaxKey: i.MaxKey, MaxValue: i.MaxValue,
			MaxTransfer: id.MaxTransferBytes,
			Counted:     c.Options().Transport != client.RDMA, Extended: i.Extended}
	}
	for u, sp := range found {
		if sp.MaxTransfer == 0 {
			sp.MaxTransfer = maxTransfer
		}
		n.member(u).space.Store(sp)
	}
	n.mu.Lock()
	for u, m := range n.members {
		if found[u] == nil {
			m.space.Store(nil)
		}
	}
	n.why = nil
	n.mu.Unlock()
	n.ready.Store(&link{c, losses})
	return nil
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
