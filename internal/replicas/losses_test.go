package replicas_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
)

// TestDamageThatNobodyReadsIsRepaired: values that the scrub comes across, and segments that an audit finds, as it does
// after a restart. What two of three members have lost is repaired, too.
func TestDamageThatNobodyReadsIsRepaired(t *testing.T) {
	g := setup{nodes: 3, copies: 3, ranges: 16}.rig(t)
	g.full(20 * time.Second)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	h := newHost()
	values := map[string]string{}
	key := func(i int) string { return fmt.Sprintf("a-key-%03d", i) }
	for i := range 250 { // so that many chunks are sealed
		value := make([]byte, 32<<10)
		for i := range value {
			value[i] = byte(rng.Uint32())
		}
		values[key(i)] = string(value)
		h.put(key(i), string(value))
		h.want(g.chain([]byte(key(i)))[0], nvme.Success, "")
	}
	type damage struct {
		n    *node
		what string
	}
	var all []damage
	for i := range 6 {
		chain := g.chain([]byte(key(i)))
		for _, n := range []*node{chain[i%3], chain[(i+1)%3]} {
			lost := values[key(i)][1000:1100]
			if n.flip([]byte(lost)) == 0 {
				t.Fatal("the value is not on the drive")
			}
			all = append(all, damage{n, lost})
		}
	}
	for _, n := range g.nodes {
		n.part.SetScrubRate(64 << 20)
	}
	for _, d := range all {
		g.soon("a value is repaired that nobody reads", func() bool { return len(d.n.find([]byte(d.what))) > 0 })
	}
	// All is repaired that was found, and nothing is under way that keeps segments in memory.
	whole := func() bool {
		for _, n := range g.nodes {
			if n.part.AuditState().Running {
				return false
			}
			if known, _ := n.r.Losses(); known > 0 {
				return false
			}
		}
		return true
	}
	g.soon("all values are repaired", whole)
	for i := range 6 { // of which the records are in chunks that are not full
		n := g.chain([]byte(key(10 + i)))[i%3]
		if n.flip([]byte(key(10+i))) == 0 {
			t.Fatal("the key is not on the drive")
		}
	}
	for _, n := range g.nodes {
		n.part.LookForLosses()
	}
	g.soon("segments are repaired that nobody reads", whole)
	for i := range 250 {
		for _, n := range g.nodes {
			if st, value := n.stored(key(i)); st != kvstore.OK || value != values[key(i)][:len(value)] {
				t.Errorf("%s of node %d: %v", key(i), n.id, st)
			}
		}
	}
}
