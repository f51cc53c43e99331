package kv

import (
	"slices"
	"sync"
	"sync/atomic"

	"jbofd/internal/partition"
)

// Partition serves namespaces of keys and values: partition.Partition, or a stand-in in tests.
type Partition interface {
	// Submit hands the batch over and empties it; on return the Requests may be done already. From any goroutine, but
	// not from within a partition.Sink's methods.
	Submit(b *partition.Batch)
}

var _ Partition = (*partition.Partition)(nil)

// table holds the partitions by the number that namespaces name them with.
type table struct {
	mu  sync.Mutex                  // changes
	all atomic.Pointer[[]Partition] // nil where there is none
}

// Add numbers a partition for nvmeof.Namespace.Partition.
func (e *Executor) Add(p Partition) (number int) {
	t := &e.partitions
	t.mu.Lock()
	defer t.mu.Unlock()
	all := t.clone()
	number = slices.Index(all, nil)
	if number < 0 {
		number = len(all)
		all = append(all, nil)
	}
	all[number] = p
	t.all.Store(&all)
	return number
}

// Remove forgets a partition whose namespaces are gone. After the nvmeof.Target.Apply that has removed them, the
// partition gets no more Requests, and only those that it has are to be waited for.
func (e *Executor) Remove(number int) {
	t := &e.partitions
	t.mu.Lock()
	defer t.mu.Unlock()
	all := t.clone()
	all[number] = nil
	t.all.Store(&all)
}

func (t *table) clone() []Partition {
	if p := t.all.Load(); p != nil {
		return slices.Clone(*p)
	}
	return nil
}

// get returns the partition of that number; nil if there is none.
//
// hot: 0 allocs
func (t *table) get(number int) Partition {
	if p := t.all.Load(); p != nil && uint(number) < uint(len(*p)) {
		return (*p)[number]
	}
	return nil
}
