package replicas_test

import (
	"fmt"
	"testing"
	"time"

	"jbofd/internal/cluster/view"
	"jbofd/internal/nvme"
)

// TestWhoeverHasLeftServesWhatIsGivenUp: the only copy of a range moves to another node, which is lost. When its data
// are given up, the node that had the range before serves it, with what it has still, and not one that never had it.
func TestWhoeverHasLeftServesWhatIsGivenUp(t *testing.T) {
	for _, first := range []int{0, 1, 2} {
		g := newRig(t, 3, 1)
		g.full(20 * time.Second)
		h := newHost()
		served := func(key string, ask func()) {
			g.soon(key+" is served", func() bool {
				chain := g.chain([]byte(key))
				if ask(); len(chain) == 0 {
					return false
				}
				h.ask(chain[0])
				return h.Status.OK() || h.Status.Code() == nvme.KeyDoesNotExist
			})
		}
		had, next := g.nodes[first], g.nodes[(first+1)%3]
		g.setOut((first+1)%3, (first+2)%3)
		g.soon("one node has all ranges", func() bool {
			return g.holds(had) == testRanges && g.holds(next)+g.holds(g.nodes[(first+2)%3]) == 0
		})
		for i := range 300 {
			key := fmt.Sprint("key", i)
			served(key, func() { h.put(key, "value of "+key) })
		}
		g.setOut(first, (first+2)%3)
		g.soon("another one has them", func() bool { return g.holds(next) == testRanges && g.holds(had) == 0 })
		next.setAlive(false)
		g.setOut()
		g.soon("the one that has left has counted what it has", func() bool {
			for r := range testRanges {
				if g.Range(view.PartitionID(first), r).Objects == 0 {
					return false
				}
			}
			return true
		})
		g.acceptLosses()
		for i := range 300 {
			key := fmt.Sprint("key", i)
			served(key, func() { h.get(key) })
			if got := string(h.Value[:h.Bytes]); !h.Status.OK() || got != "value of "+key {
				t.Fatalf("%s: %v, %q", key, h.Status, got)
			}
		}
	}
}
