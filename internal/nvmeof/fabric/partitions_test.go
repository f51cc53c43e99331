package fabric

import (
	"testing"

	"jbofd/internal/partition"
)

// idle is a Partition that nobody asks.
type idle struct{ name string }

func (*idle) Submit(*partition.Batch) {}

func TestNumbersOfPartitionsAreUsedAgain(t *testing.T) {
	f := &Fabric{}
	if f.Partition(0) != nil || f.Partition(-1) != nil {
		t.Error("there is one before any was added")
	}
	var all []*idle
	for i := range 3 {
		p := &idle{string(rune('a' + i))}
		all = append(all, p)
		if n := f.AddPartition(p); n != i {
			t.Errorf("partition %d has number %d", i, n)
		}
	}
	f.RemovePartition(1)
	if f.Partition(0) != all[0] || f.Partition(1) != nil || f.Partition(2) != all[2] || f.Partition(3) != nil {
		t.Error("with one removed, others are found")
	}
	again := &idle{"again"}
	if n := f.AddPartition(again); n != 1 || f.Partition(1) != again {
		t.Errorf("a new one has number %d, want that of the one that went", n)
	}
	if n := testing.AllocsPerRun(100, func() { f.Partition(2) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
