package replicas_test

import (
	"sync/atomic"
	"testing"

	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
	"jbofd/internal/partition"
	"jbofd/internal/replicas"
)

// keeper is the store of a partition that keeps back the replies to Gets.
type keeper struct {
	replicas.Store
	// keep: that is to be done. kept has the replies.
	keep atomic.Bool
	kept chan *keptReply
}

type keptReply struct {
	k  *keeper
	q  *partition.Request
	to partition.Sink
}

func (k *keeper) Submit(b *partition.Batch) {
	var all partition.Batch
	for q := b.Take(); q != nil; {
		next := q.Next
		if q.Op == kvstore.Get && k.keep.Load() {
			q.Sink = &keptReply{k: k, q: q, to: q.Sink}
		}
		all.Add(q)
		q = next
	}
	k.Store.Submit(&all)
}

// KVDone implements partition.Sink.
func (r *keptReply) KVDone(q *partition.Request) bool {
	q.Sink = r.to
	r.k.kept <- r
	return false
}

// Kick implements partition.Sink.
func (r *keptReply) Kick() {}

// authorityRig is a node whose clock and authority stand still, and whose store may keep replies back.
type authorityRig struct {
	*node
	store      *keeper
	now, until atomic.Int64
	// reading is called, once, when the clock has been read and before the caller knows what it says: after so many
	// earlier ones.
	reading atomic.Pointer[func()]
	earlier atomic.Int64
}

func newAuthorityRig(t *testing.T, atOnce bool) *authorityRig {
	a := &authorityRig{store: &keeper{kept: make(chan *keptReply, 8)}}
	a.now.Store(1)
	a.until.Store(1000)
	g, m := setup{ranges: 1, atOnce: atOnce, clock: a.clock, authority: a.until.Load,
		store: func(p *partition.Partition) replicas.Store {
			a.store.Store = p
			return a.store
		}}.oneNode(t)
	a.node = g.nodes[0]
	a.r.SetState(m, m)
	h := newHost()
	for _, key := range []string{"key", "another"} {
		h.put(key, "value")
		h.want(a.node, nvme.Success, "")
		h.get(key)
		h.want(a.node, nvme.Success, "value")
	}
	return a
}

func (a *authorityRig) clock() int64 {
	now := a.now.Load()
	if f := a.reading.Load(); f != nil && a.earlier.Add(-1) < 0 && a.reading.CompareAndSwap(f, nil) {
		(*f)()
	}
	return now
}

// fetch begins a read, and returns when the store has the value and has not told so.
func (a *authorityRig) fetch() (*host, *keptReply) {
	h := newHost()
	h.get("key")
	a.store.keep.Store(true)
	a.submit(h)
	reply := <-a.store.kept
	a.store.keep.Store(false)
	return h, reply
}

func (a *authorityRig) submit(h *host) {
	h.Sink, h.Tenant = h, 3
	var b replicas.Batch
	b.Add(&h.Request)
	a.r.Submit(&b)
}

// wantNothing waits for the end of a read that authority does not cover.
func (a *authorityRig) wantNothing(h *host) {
	a.rig.t.Helper()
	if <-h.done; h.Status != nvme.NamespaceNotReady {
		a.rig.t.Errorf("a read that ends after authority: %v, %q", h.Status, h.Value[:h.Bytes])
	}
}

// TestNoReadIsAnsweredAfterAuthority: it ends while the store has the read, and before the next one begins. Reads are
// answered again as soon as there is authority.
func TestNoReadIsAnsweredAfterAuthority(t *testing.T) {
	a := newAuthorityRig(t, false)
	h, reply := a.fetch()
	a.now.Store(a.until.Load())
	if reply.to.KVDone(reply.q) {
		reply.to.Kick()
	}
	a.wantNothing(h)
	h.get("key")
	a.submit(h)
	a.wantNothing(h)
	a.until.Add(1)
	h.get("key")
	h.want(a.node, nvme.Success, "value")
}

// TestAuthorityIsLookedAtAfterTheValueWasFetched: a reply of the store comes, and authority ends, just after a turn has
// read the clock. The value is not answered by what the clock said before.
func TestAuthorityIsLookedAtAfterTheValueWasFetched(t *testing.T) {
	for earlier := range int64(2) {
		for _, atOnce := range []bool{false, true} {
			a := newAuthorityRig(t, atOnce)
			h, reply := a.fetch()
			end := func() {
				a.now.Store(a.until.Load())
				reply.to.KVDone(reply.q) // the turn that goes on looks into its mailboxes again
			}
			a.earlier.Store(earlier)
			a.reading.Store(&end)
			for a.reading.Load() != nil {
				another := newHost()
				another.get("another")
				a.submit(another)
				<-another.done
			}
			a.wantNothing(h)
		}
	}
}
