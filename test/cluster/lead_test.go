package cluster

import (
	"fmt"
	"slices"
	"testing"
	"time"
)

// spread says what is missing until each node leads its share of the ranges, within a quarter; nil: nothing.
func (all boxes) spread() error {
	if err := all.missing(); err != nil {
		return err
	}
	a, err := all[0].admin.Cluster(all[0].t.Context())
	if err != nil {
		return err
	}
	share := a.Ranges.Total / len(a.Nodes)
	for _, n := range a.Nodes {
		if n.Led < share*3/4 || n.Led > share*5/4 {
			return fmt.Errorf("%s leads %d of %d ranges", n.Name, n.Led, a.Ranges.Total)
		}
	}
	return nil
}

// memberships returns since when each partition is a member of each range.
func (all boxes) memberships() (since []string) {
	all[0].t.Helper()
	chains, err := all[0].admin.Chains(all[0].t.Context(), -1)
	if err != nil {
		all[0].t.Fatal(err)
	}
	for _, c := range chains.Items {
		for _, m := range c.Members {
			since = append(since, fmt.Sprint(c.Range, m.UUID, m.Since))
		}
	}
	slices.Sort(since)
	return since
}

// TestANodeThatWasKilledLeadsItsShareAgain: it is the ChainTail of all its ranges when it is back. Then ChainHeads
// change under load, without a copy, and writes take little longer meanwhile.
func TestANodeThatWasKilledLeadsItsShareAgain(t *testing.T) {
	all := newBoxes(t, 3, 3)
	all.eventually("each node leads its share", all.spread)
	l := startLoad(t, all, 6)
	l.allWritten()
	for _, b := range few(all, 2) {
		b.kill()
		l.allWritten()
		b.start()
		all.full()
		before, usual := all.memberships(), l.longest.Swap(0)
		begin := time.Now()
		all.eventually("each node leads its share again", all.spread)
		t.Logf("%s leads its share again %v after all ranges were full; the longest write took %v meanwhile, %v before",
			b.name, time.Since(begin).Round(time.Millisecond), time.Duration(l.longest.Swap(0)), time.Duration(usual))
		if after := all.memberships(); !slices.Equal(before, after) {
			t.Log("members were filled meanwhile")
		}
	}
	l.stop()
}
