package view

import "testing"

// failingOne are reports of nodes that are alive and do what the view says. The drive of one partition fails, and the
// manager is told so of the ranges that it has: of others nothing is known.
type failingOne struct {
	allWell
	failing PartitionID
}

func (f failingOne) Failing(p PartitionID) bool { return p == f.failing }

// TestAFailingDriveIsNotFilled: a partition that fails is to have ranges, which it does not have. It is not filled, and
// nobody waits for it.
func TestAFailingDriveIsNotFilled(t *testing.T) {
	v := settle(t, cluster(3, 1, 2, 64))
	v.addNode("late", "", 1, 100)
	late := PartitionID(len(v.Partitions) - 1)
	for range 20 {
		v, _ = v.Next(failingOne{allWell{v, nil}, late})
		for r, c := range v.Chains {
			if i := c.find(late); i >= 0 && c[i].State != Waiting {
				t.Fatalf("the chain of range %d is %v, and the drive of partition %d fails", r, c, late)
			}
		}
	}
	v = settle(t, v)
	n := 0
	for _, c := range v.Chains {
		if c.find(late) >= 0 {
			n++
		}
	}
	if n < 64*2/4/2 {
		t.Errorf("the drive works, and has %d ranges", n)
	}
}
