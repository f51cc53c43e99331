package replicas_test

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"jbofd/internal/crrs"
	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
	"jbofd/internal/partition"
	"jbofd/internal/replicas"
)

// copyKeeper is a store whose drive is slow with the last block of each CopyOut: what it has read it keeps back.
type copyKeeper struct {
	replicas.Store
	keep  atomic.Bool
	begun atomic.Int64 // the CopyOuts that it has been asked for
	mu    sync.Mutex   // guards kept
	kept  []*keptCopy
}

// keptCopy is a CopyOut. It is the Sink of the store's Request.
type keptCopy struct {
	k  *copyKeeper
	to partition.Sink
	q  *partition.Request
}

func (k *copyKeeper) Submit(b *partition.Batch) {
	var all partition.Batch
	for q := b.Take(); q != nil; {
		next := q.Next
		if q.Op == kvstore.CopyOut && k.keep.Load() {
			q.Sink = &keptCopy{k, q.Sink, q}
			k.begun.Add(1)
		}
		all.Add(q)
		q = next
	}
	k.Store.Submit(&all)
}

func (c *keptCopy) KVDone(*partition.Request) bool {
	c.k.mu.Lock()
	defer c.k.mu.Unlock()
	c.k.kept = append(c.k.kept, c)
	return false
}

func (c *keptCopy) Kick() {}

// release gives what was kept back, and keeps nothing any more.
func (k *copyKeeper) release() {
	k.keep.Store(false)
	k.mu.Lock()
	all := k.kept
	k.kept = nil
	k.mu.Unlock()
	for _, c := range all {
		c.q.Sink = c.to
		if c.to.KVDone(c.q) {
			c.to.Kick()
		}
	}
}

// TestARepairIsNotGivenWhatAnEarlierOneHasBegun: a member asks the other one, whose drive is slow, for what it has
// lost, and gives the repair up. The keys are put anew, at both, and the member loses them as well. The next repair is
// not given what was read before the Puts.
func TestARepairIsNotGivenWhatAnEarlierOneHasBegun(t *testing.T) {
	var ahead atomic.Int64
	var stores []*copyKeeper
	g := setup{nodes: 2, copies: 2, ranges: 2, answerWithin: testAnswer,
		clock:     func() int64 { return clock() + ahead.Load() },
		authority: func() int64 { return clock() + ahead.Load() + int64(time.Minute) },
		store: func(p *partition.Partition) replicas.Store {
			stores = append(stores, &copyKeeper{Store: p})
			return stores[len(stores)-1]
		}}.rig(t)
	g.full(20 * time.Second)
	h := newHost()
	const key = "a-key-007"
	var near []string // of the segment, as far as it can be told
	for i := range 300 {
		k := fmt.Sprintf("a-key-%03d", i)
		h.put(k, "value")
		h.want(g.chain([]byte(k))[0], nvme.Success, "")
		if position([]byte(k))>>59 == position([]byte(key))>>59 {
			near = append(near, k)
		}
	}
	g.frozen.Store(true)
	chain := g.chain([]byte(key))
	head, tail := chain[0], chain[1]
	slow := stores[head.id]
	slow.keep.Store(true)
	defer slow.release()
	await := func(what string, f func() bool) {
		t.Helper()
		for end := time.Now().Add(20 * time.Second); !f(); time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatal("it is waited too long for ", what)
			}
		}
	}
	lose := func(value string) {
		t.Helper()
		if tail.flip([]byte(key)) == 0 {
			t.Fatal("the key is not on the drive")
		}
		h.get(key)
		h.want(tail, nvme.Success, value) // by the other member
	}

	lose("value")
	await("the answer to the first Fetch", func() bool { return head.r.Late() > 0 })
	ahead.Add(11e9) // longer than a repair may take, and less than crrs.JoinNS
	await("the end of the repair", func() bool { return g.repairs[crrs.RepairFailed].Load() > 0 })
	begun, late := slow.begun.Load(), head.r.Late()
	for _, k := range near {
		h.put(k, "newer")
		h.want(head, nvme.Success, "")
	}
	ahead.Add(2e9) // another repair may begin
	lose("newer")
	await("the next Fetch", func() bool { return slow.begun.Load() > begun || head.r.Late() < late })
	slow.release()
	await("the repair", func() bool { return g.repairs[crrs.RepairDone].Load() > 0 })
	for _, k := range near {
		h.get(k)
		h.want(tail, nvme.Success, "newer")
	}
}
