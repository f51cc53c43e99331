package cluster

import (
	"encoding/binary"
	"math/rand/v2"

	"jbofd/internal/cluster/view"
	"jbofd/internal/credit"
	"jbofd/internal/crrs"
	"jbofd/internal/flowctl"
	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
	"jbofd/internal/replica"
	"jbofd/internal/replicas"
	"jbofd/internal/tenant"
)

// host is a client: it keeps a number of operations under way, each of which begins when the one before has ended, and
// schedules them as client/cluster does.
type host struct {
	run    *run
	tenant tenant.ID
	m      *flowctl.Machine
	ssds   []*flowctl.SSD // by node
	rng    *rand.Rand
	record func() uint64
}

// op is an operation of a host, used again and again.
type op struct {
	replicas.Request
	flow flowctl.Request
	h    *host
	// nodes are those of flow.Targets.
	nodes [flowctl.MaxTargets]*node
	// bornNS is when the host wanted it, value the memory of its value.
	bornNS int64
	value  []byte
	loads  bool
	// at is the node that has it, nil if none does. orphan: that node has died, and another op has taken its place.
	at     *node
	orphan bool
	number int // in the order in which they were made
}

func (r *run) newHost(id int) *host {
	sc := r.sc
	h := &host{run: r, tenant: hosts + tenant.ID(id), rng: rand.New(rand.NewPCG(r.sc.Seed, uint64(id)+100)),
		m: flowctl.New(flowctl.Config{NoTokens: sc.NoTokens, Choice: sc.Choice})}
	if h.tenant >= background {
		h.tenant++
	}
	for range sc.Nodes {
		h.ssds = append(h.ssds, h.m.NewSSD(h.m.NewLink(1<<16)))
	}
	h.record = sc.chooser(h.rng)
	return h
}

func (h *host) newOp() *op {
	o := &op{h: h, value: make([]byte, h.run.sc.ValueBytes)}
	o.Sink, o.flow.Item, o.Tenant = o, o, h.tenant
	h.run.ops[o], o.number = true, h.run.made
	h.run.made++
	return o
}

// begin makes an operation the next one that the host wants.
func (h *host) begin(o *op) {
	read := h.rng.Float64() < h.run.sc.Reads && !h.run.aging
	o.bornNS = h.run.sim.Now()
	o.wants(read, h.record())
	h.send(o)
}

// wants makes an operation a Get or Put of a record.
func (o *op) wants(read bool, record uint64) {
	o.Key = crrs.Key{Len: 16}
	copy(o.Key.Bytes[:], "user")
	binary.BigEndian.PutUint64(o.Key.Bytes[8:], record)
	o.Kind, o.Op, o.Value = replicas.Read, kvstore.Get, o.value
	if !read {
		o.Kind, o.Op = replicas.Write, kvstore.Put
	}
}

// send gives an operation to the scheduler.
func (h *host) send(o *op) {
	r := h.run
	chain := r.view.Chains[r.view.RangeOf(replica.Position(hashSeed, o.Key.Bytes[:o.Key.Len]))]
	n := 0
	for _, e := range chain {
		if e.State == view.Serving || e.State == view.Leaving {
			at := r.nodes[e.Partition]
			o.nodes[n], o.flow.Targets[n] = at, h.ssds[at.id]
			n++
		}
	}
	if n == 0 {
		r.again(o)
		return
	}
	o.flow.Write = o.Kind == replicas.Write
	if o.Kind == replicas.Read && r.sc.ReadTail {
		o.nodes[0], o.flow.Targets[0] = o.nodes[n-1], o.flow.Targets[n-1]
		n = 1
	}
	o.flow.N, o.flow.Units = n, credit.Units(r.sc.ValueBytes)
	h.m.Add(r.sim.Now(), &o.flow)
	h.pump()
}

// pump sends what the scheduler lets go.
func (h *host) pump() {
	r := h.run
	for f := h.m.Next(r.sim.Now()); f != nil; f = h.m.Next(r.sim.Now()) {
		o := f.Item.(*op)
		to := o.nodes[f.SentTo()]
		r.travel(func() { r.arrive(o, to) })
	}
}

// arrive brings an operation to its node.
func (r *run) arrive(o *op, to *node) {
	if !to.up {
		r.sim.After(deadNS, func() { r.answered(o, nvme.NamespaceNotReady, 0) }) // its connection ends
		return
	}
	o.at = to
	to.begin(&o.Request)
}

// lost ends what hosts had at a node that has died.
func (r *run) lost(n *node) {
	for _, o := range inOrder(r.ops, func(o *op) (int, bool) { return o.number, o.at == n }) {
		o.orphan = true
		delete(r.ops, o)
		o.h.m.Ended(r.sim.Now(), &o.flow, 0)
		next := o.h.newOp()
		next.Key, next.Kind, next.Op, next.bornNS, next.loads = o.Key, o.Kind, o.Op, o.bornNS, o.loads
		next.Value = next.value
		r.retries++
		r.sim.After(deadNS, func() { next.h.send(next) })
		o.h.pump()
	}
}

// deadNS is how long a host does not know that a node has died: its connection is reset at once in most cases.
const deadNS = 1e6

// ReplicaDone implements replicas.Sink.
func (o *op) ReplicaDone(q *replicas.Request) bool {
	r := o.h.run
	to := o.nodes[o.flow.SentTo()]
	if o.orphan {
		return false
	}
	o.at = nil
	r.sim.Go(func() { // not from within a turn
		st, units := q.Status, to.drive.Credit(o.h.tenant)
		r.travel(func() { r.answered(o, st, units) })
	})
	return false
}

// Kick implements replicas.Sink.
func (o *op) Kick() {}

// answered takes an answer to its host.
func (r *run) answered(o *op, st nvme.Status, units int) {
	h := o.h
	h.m.Ended(r.sim.Now(), &o.flow, units)
	switch {
	case st.OK():
		r.count(o)
		r.next(o)
	case st.Code() == nvme.KVWrongView || st.Code() == nvme.NamespaceNotReady || st.Code() == nvme.CommandInterrupted:
		r.retries++
		r.again(o)
	default:
		r.failed++
		r.failure = st
		r.next(o)
	}
	h.pump()
}

// again sends an operation again a little later.
func (r *run) again(o *op) { r.sim.After(retryNS, func() { o.h.send(o) }) }

const retryNS = 1e6

// next begins the next operation, or the next record's loading.
func (r *run) next(o *op) {
	switch {
	case o.loads && r.loaded < uint64(r.sc.Records):
		o.wants(false, r.loaded)
		r.loaded++
		o.h.send(o)
	case o.loads:
		r.loading--
	case !r.over:
		o.h.begin(o)
	default:
		r.underWay--
	}
}
