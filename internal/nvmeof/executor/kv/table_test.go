package kv

import (
	"testing"

	"jbofd/internal/partition"
	"jbofd/internal/turn"
)

// idle is a Partition without requests.
type idle struct{ name string }

func (*idle) Submit(*partition.Batch) {}

func TestPartitionNumbersAreReused(t *testing.T) {
	e := New(turn.Real, nil)
	if e.partitions.get(0) != nil || e.partitions.get(-1) != nil {
		t.Error("there is one before any was added")
	}
	var all []*idle
	for i := range 3 {
		p := &idle{string(rune('a' + i))}
		all = append(all, p)
		if n := e.Add(p); n != i {
			t.Errorf("partition %d has number %d", i, n)
		}
	}
	e.Remove(1)
	if e.partitions.get(0) != all[0] || e.partitions.get(1) != nil || e.partitions.get(2) != all[2] ||
		e.partitions.get(3) != nil {
		t.Error("with one removed, others are found")
	}
	again := &idle{"again"}
	if n := e.Add(again); n != 1 || e.partitions.get(1) != again {
		t.Errorf("a new one has number %d, want that of the one that went", n)
	}
	if n := testing.AllocsPerRun(100, func() { e.partitions.get(2) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
