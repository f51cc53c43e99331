package replicas_test

import (
	"fmt"
	"testing"
	"time"

	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
)

// TestWhatIsStoredAfterALossIsRead: all members have lost the same segment. Then a key of it is stored, and from then
// on each member reads it, and conditions on it are judged. When one of them has lost it again, it is still read
// through each. All the time members look whether somebody has the rest.
func TestWhatIsStoredAfterALossIsRead(t *testing.T) {
	for _, first := range []string{"Get", "Store"} {
		t.Run(first, func(t *testing.T) {
			g := setup{nodes: 2, copies: 2, ranges: 2}.rig(t)
			g.full(20 * time.Second)
			h := newHost()
			for i := range 300 {
				key := fmt.Sprintf("a-key-%03d", i)
				h.put(key, "value of "+key)
				h.want(g.chain([]byte(key))[0], nvme.Success, "")
			}
			const key = "a-key-007"
			chain := g.chain([]byte(key))
			for _, n := range g.nodes {
				if n.flip([]byte(key)) == 0 {
					t.Fatal("the key is not on the drive")
				}
			}
			if first == "Get" {
				h.get(key)
				h.want(chain[0], nvme.UnrecoveredReadError, "")
			}
			h.put(key, "new")
			h.want(chain[0], nvme.Success, "")
			version := h.Result
			for range 20 {
				for _, n := range chain {
					h.get(key)
					h.want(n, nvme.Success, "new")
				}
			}
			h.put(key, "newer")
			h.Condition, h.Version = kvstore.IfVersion, version
			h.want(chain[0], nvme.Success, "")
			// One of them loses it again: the other one has it.
			again := chain[0]
			if first == "Get" {
				again = chain[1]
			}
			if again.flip([]byte(key)) == 0 {
				t.Fatal("the key is not on the drive")
			}
			for _, n := range []*node{again, chain[0], chain[1]} {
				h.get(key)
				h.want(n, nvme.Success, "newer")
			}
			h.get("a-key-008")
			if h.ask(chain[0]); h.Status != nvme.Success && h.Status != nvme.UnrecoveredReadError {
				t.Errorf("another key: %v", h.Status)
			}
		})
	}
}
