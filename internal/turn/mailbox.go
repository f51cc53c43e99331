package turn

import (
	"sync"
	"sync/atomic"
)

// Node links an item into a Chain or a Mailbox. It is a field of the item; Item points to the item itself and is set
// once. A Node is in one Chain or Mailbox at a time.
type Node[T any] struct {
	Item *T
	next *Node[T]
}

// Detach takes the Node out of a list that Take has returned, and returns the one after it.
func (n *Node[T]) Detach() (next *Node[T]) {
	next, n.next = n.next, nil
	return next
}

// Chain is a list of Nodes for one PushChain. The zero Chain is empty.
type Chain[T any] struct{ newest, oldest *Node[T] }

// Add appends n. // hot: 0 allocs
func (c *Chain[T]) Add(n *Node[T]) {
	n.next = c.newest
	if c.newest == nil {
		c.oldest = n
	}
	c.newest = n
}

// Empty reports whether there is nothing in the Chain.
func (c *Chain[T]) Empty() bool { return c.newest == nil }

// Newest returns the Node that was added last, or nil; Older leads from there to the one added before.
func (c *Chain[T]) Newest() *Node[T] { return c.newest }

// Older returns the Node that was added to the Chain before n, or nil.
func (n *Node[T]) Older() *Node[T] { return n.next }

// Take empties the Chain and returns its Nodes, oldest first.
func (c *Chain[T]) Take() *Node[T] {
	n := reverse(c.newest)
	*c = Chain[T]{}
	return n
}

// Mailbox brings items to a machine: a lock-free stack that any goroutine may push to and that the machine's owner
// empties as a whole. The zero Mailbox is empty.
type Mailbox[T any] struct{ head atomic.Pointer[Node[T]] }

// Push adds an item and reports whether the Mailbox was empty. If it was not, the one who pushed before has seen to it
// that the machine will run.
//
// hot: 0 allocs
func (m *Mailbox[T]) Push(n *Node[T]) (first bool) {
	for {
		old := m.head.Load()
		n.next = old
		if m.head.CompareAndSwap(old, n) {
			return old == nil
		}
	}
}

// PushChain adds the Chain's items, in their order, and empties the Chain.
//
// hot: 0 allocs
func (m *Mailbox[T]) PushChain(c *Chain[T]) {
	newest, oldest := c.newest, c.oldest
	if newest == nil {
		return
	}
	*c = Chain[T]{}
	for {
		old := m.head.Load()
		oldest.next = old
		if m.head.CompareAndSwap(old, newest) {
			return
		}
	}
}

// Pending reports whether there are items.
func (m *Mailbox[T]) Pending() bool { return m.head.Load() != nil }

// Take empties the Mailbox and returns its Nodes, oldest first; Detach leads from each to the next.
//
// hot: 0 allocs
func (m *Mailbox[T]) Take() *Node[T] {
	if m.head.Load() == nil { // spares the exchange, which costs a locked instruction
		return nil
	}
	return reverse(m.head.Swap(nil))
}

func reverse[T any](n *Node[T]) (first *Node[T]) {
	for n != nil {
		n.next, first, n = first, n, n.next
	}
	return first
}

// Messages is a Mailbox of values, for messages that have no object of their own. It takes a lock for as long as a
// message is copied. The zero Messages is empty.
type Messages[T any] struct {
	any atomic.Bool
	// mu guards items.
	mu    sync.Mutex
	items []T
}

// Put adds a message and reports whether there was none.
func (m *Messages[T]) Put(item T) (first bool) {
	m.mu.Lock()
	first = len(m.items) == 0
	m.items = append(m.items, item)
	m.mu.Unlock()
	m.any.Store(true)
	return first
}

// Pending reports whether there are messages.
func (m *Messages[T]) Pending() bool { return m.any.Load() }

// Take empties Messages and appends what it held to dst, oldest first.
func (m *Messages[T]) Take(dst []T) []T {
	if !m.any.Load() || !m.any.Swap(false) {
		return dst
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	dst = append(dst, m.items...)
	clear(m.items)
	m.items = m.items[:0]
	return dst
}
