package replicas_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"jbofd/internal/nvme"
)

// TestANodeThatComesBackGetsTheDifferenceOnly: while it was away a fiftieth of all objects has changed. It is sent
// those, and a tenth more at most. Digests are counted apart: each is some 1 KiB for up to 64 parts of a range.
func TestANodeThatComesBackGetsTheDifferenceOnly(t *testing.T) {
	g := setup{nodes: 3, copies: 3, ranges: 4}.rig(t)
	g.full(20 * time.Second)
	const objects, changed, size = 2000, 40, 4000
	h := newHost()
	put := func(i int, fill string) {
		t.Helper()
		key := fmt.Sprint("key", i)
		h.put(key, strings.Repeat(fill, size))
		h.want(g.chain([]byte(key))[0], nvme.Success, "")
	}
	for i := range objects {
		put(i, "a")
	}
	away := g.nodes[2]
	away.setAlive(false)
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		left := 0
		for i := range objects {
			if len(g.chain(fmt.Append(nil, "key", i))) == 2 {
				left++
			}
		}
		if left == objects {
			break
		}
		if time.Now().After(end) {
			t.Fatal("the view keeps a node that is away")
		}
	}
	for i := range changed {
		put(i*objects/changed, "b")
	}
	g.moved.Store(0)
	before := g.carried[nvme.CmdKVCompare].Load()
	away.setAlive(true)
	g.full(20 * time.Second)
	moved, compared := g.moved.Load(), g.carried[nvme.CmdKVCompare].Load()-before
	t.Logf("%d values of %d bytes have changed: %d bytes were moved, %d digests compared", changed, size, moved,
		compared)
	if most := int64(changed * size * 11 / 10); moved < changed*size || moved > most {
		t.Errorf("%d bytes were moved, want %d to %d", moved, changed*size, most)
	}
	if most := int64(4 * changed); compared > most {
		t.Errorf("%d digests were compared, want at most %d", compared, most)
	}
	for i := range changed {
		g.same(fmt.Append(nil, "key", i*objects/changed))
	}
}
