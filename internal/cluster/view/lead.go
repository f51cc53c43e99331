package view

import (
	"math"
	"slices"
)

// Full reports whether the chain has all members that it is to have, as far as the chain tells: all serve.
func (c Chain) Full() bool {
	for _, m := range c {
		if m.State != Serving {
			return false
		}
	}
	return len(c) > 0
}

// Leaders returns which partition is to be the ChainHead of each range. Each partition is to lead as many of its full
// ranges as the other members do: of n members each leads one in n. What is led in the proper proportion stays as it
// is, so that few more ranges change their ChainHead than have to. A range that is not full stays as it is, too. The
// result depends on the view alone.
//
// Deviation from LEED 3.1.2, where the ChainHead of a key is its first partition on the ring, always: chains change
// here without moving data, so that the place of a member says nothing of the ring, and a node that was away is not
// worth more changes than those that spread the writes (TestLeadersAreSpread).
func (v *View) Leaders() []PartitionID {
	leaders := make([]PartitionID, len(v.Chains))
	// excess is how many ranges a partition leads beyond its share.
	excess := make([]float64, len(v.Partitions))
	for r, c := range v.Chains {
		if len(c) == 0 {
			continue
		}
		leaders[r] = c[0].Partition
		if !c.Full() {
			continue
		}
		excess[c[0].Partition]++
		for _, m := range c {
			excess[m.Partition] -= 1 / float64(len(c))
		}
	}
	// First ranges are taken from partitions that lead more than their share, then from others while some partition
	// leads too few. Each change reduces the sum of the squares of excess by more than a hundredth, so that this ends.
	// It takes few passes; more would change little.
	least := 0.5
	for passes := 0; passes < 16; passes++ {
		changed := false
		for r, c := range v.Chains {
			if !c.Full() {
				continue
			}
			from := leaders[r]
			if excess[from] < least {
				continue
			}
			to := slices.MinFunc(c, func(a, b Member) int {
				switch d := excess[a.Partition] - excess[b.Partition]; {
				case d < 0:
					return -1
				case d > 0:
					return 1
				}
				return 0
			}).Partition
			if excess[from]-excess[to] > 1.01 {
				leaders[r], changed = to, true
				excess[from]--
				excess[to]++
			}
		}
		if !changed && least < 0 {
			break
		} else if !changed {
			least = math.Inf(-1)
		}
	}
	return leaders
}
