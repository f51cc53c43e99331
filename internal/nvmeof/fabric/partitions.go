package fabric

import (
	"slices"
	"sync"
	"sync/atomic"

	"jbofd/internal/partition"
)

// Partition serves namespaces of keys and values: partition.Partition, or a stand-in.
type Partition interface {
	// Submit hands the batch over and empties it; on return the Requests may be done already. From any
	// goroutine, but not from within a partition.Sink's methods.
	Submit(b *partition.Batch)
}

// partitions are those at work, by the number that namespaces name them with.
type partitions struct {
	mu  sync.Mutex                  // changes
	all atomic.Pointer[[]Partition] // nil where there is none
}

// AddPartition numbers a partition for nvmeof.Namespace.Partition.
func (f *Fabric) AddPartition(p Partition) (number int) {
	f.partitions.mu.Lock()
	defer f.partitions.mu.Unlock()
	all := f.partitions.clone()
	number = slices.Index(all, nil)
	if number < 0 {
		number = len(all)
		all = append(all, nil)
	}
	all[number] = p
	f.partitions.all.Store(&all)
	return number
}

// RemovePartition forgets a partition whose namespaces are gone: after the Apply that has taken them away, it
// gets no more Requests, and only those that it has are to be waited for.
func (f *Fabric) RemovePartition(number int) {
	f.partitions.mu.Lock()
	defer f.partitions.mu.Unlock()
	all := f.partitions.clone()
	all[number] = nil
	f.partitions.all.Store(&all)
}

func (ps *partitions) clone() []Partition {
	if p := ps.all.Load(); p != nil {
		return slices.Clone(*p)
	}
	return nil
}

// Partition returns the partition of that number; nil if there is none.
//
// hot: 0 allocs
func (f *Fabric) Partition(number int) Partition {
	if p := f.partitions.all.Load(); p != nil && uint(number) < uint(len(*p)) {
		return (*p)[number]
	}
	return nil
}
