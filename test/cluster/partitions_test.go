package cluster

import (
	"fmt"
	"testing"
)

// TestRangesMoveWithinANode: nodes get a second partition each, which takes half of what the first one has. Both are in
// one chain meanwhile, as neighbours.
func TestRangesMoveWithinANode(t *testing.T) {
	t.Parallel()
	all := startBoxes(t, layout{nodes: 3, copies: 3})
	l := startStores(t, all, 4)
	for _, b := range all {
		b.kill()
		b.second = true
		b.start()
		all.full()
	}
	all.eventually("the second partitions have their share", func() error {
		chains, err := all[0].admin.Chains(t.Context(), -1)
		if err != nil {
			return err
		}
		has := map[string]int{}
		for _, c := range chains.Items {
			for _, m := range c.Members {
				if m.State == "serving" {
					has[m.UUID]++
				}
			}
		}
		for _, n := range has {
			if len(has) != 6 || n < len(chains.Items)/2-1 {
				return fmt.Errorf("ranges of the partitions: %v", has)
			}
		}
		return nil
	})
	all.copies(3)
	l.allWritten()
	l.stop()
}
