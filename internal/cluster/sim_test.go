package cluster

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"jbofd/internal/cluster/view"
	"jbofd/internal/lab"
	"jbofd/internal/uuid"
)

// The simulated cluster: processes of nodes with an etcd, in virtual time.
//
// Fault model. Processes die, and come back as new ones, with their stores. They are paused for any time, also in the
// midst of a turn, and go on. Messages between nodes take any time, overtake each other and come twice; links are cut
// in one direction or both. Nodes are cut off from etcd; etcd stalls for all; watches break; old revisions are
// compacted; leases are revoked; the state of etcd is set back and then put right (see lab.Etcd). Stores lose a range
// that others have; drives fail writes. Clocks run at rates that differ, but by less than driftPerMille.
//
// The data of a range is a number: how many writes were acknowledged. A write takes effect at an instant, if all
// members of the chain that its head sees are there and are at the same version of the chain.
const (
	ms     = int64(1e6)
	lease  = 1000 * ms
	ranges = 16
)

type world struct {
	t    testing.TB
	sim  *lab.Sim
	rng  *rand.Rand
	etcd *lab.Etcd
	// nodes are all nodes; cut are the links that lose everything.
	nodes []*node
	cut   map[[2]int]bool
	uuid  uuid.UUID
	// written is the number of acknowledged writes of each range.
	written [ranges]int
	// epoch is that of the last view that was written, views all of them.
	views map[view.Epoch]*Map
	epoch view.Epoch
	// acted is the newest view that some node has acted on.
	acted *Map
	// wentBack: etcd is in an earlier state, and nobody may change the view.
	wentBack          bool
	changes, takeover int
	forgot            int
	yields            bool // ChainHeads yield
	handed            int  // views in which only ChainHeads differ
	healed            bool // no node leaves any more
	losses            int
	configured        int  // Config.Nodes
	slow              bool // messages may take long
	hasty             bool // nodes take over, and give up others, as soon as they may
}

// copyOf is what a partition has of a range.
type copyOf struct {
	since    view.Epoch // of the membership that it belongs to
	complete bool
	has      int
	// lost: the data was damaged, and comes back at the end of the history.
	lost bool
}

type node struct {
	w    *world
	id   int
	name string
	// address is where others reach it; cluster is what its drives say.
	address string
	cluster uuid.UUID
	clock   *lab.Clock
	client  *lab.EtcdClient
	parts   []Partition
	store   map[uuid.UUID]*[ranges]copyOf
	// What the process before has left in the state directory.
	number uint64
	lives  uint32
	seen   view.Epoch

	proc  *lab.Process
	n     *Node
	watch *lab.EtcdWatch
	wake  interface{ Reset(int64) }
	// pause: the process is to be paused at a bad moment.
	pause    moment
	reported string
	drives   drives
	// yields are what the node says of ranges that it leads.
	yields map[int]view.Yield
}

// moment is when a process is paused.
type moment uint8

const (
	notPaused moment = iota
	// inATurn: before the actions of the next turn are carried out.
	inATurn
	// reporting: behind the next report, so that the answer comes during the pause.
	reporting
)

type watched struct {
	events []KeyValue
	ended  bool
}

func newWorld(t testing.TB, seed uint64, nodes, replicas int) *world {
	s := lab.NewSim(seed)
	w := &world{t: t, sim: s, rng: s.Rand("world"), cut: map[[2]int]bool{}, uuid: uuid.UUID{7},
		views: map[view.Epoch]*Map{}}
	w.etcd = lab.NewEtcd(s, lab.EtcdConfig{MinDelayNS: ms / 2, MaxDelayNS: 10 * ms, TimeoutNS: 2 * lease})
	w.etcd.Changed = w.etcdChanged
	compare, put, err := Init(Settings{Cluster: w.uuid, Replicas: replicas}, 1, ranges)
	if err != nil {
		t.Fatal(err)
	}
	w.etcd.Apply(etcdRequest(&Request{Kind: Txn, If: compare, Then: put}))
	for i := range nodes {
		w.addNode(i)
	}
	return w
}

func (w *world) addNode(i int) *node {
	n := &node{w: w, id: i, name: fmt.Sprintf("node-%d", i), address: fmt.Sprint("address ", i), cluster: w.uuid,
		number: uint64(i + 1), client: w.etcd.NewClient(),
		clock: w.sim.NewClock(fmt.Sprint(i), lab.ClockConfig{Skew: 0.004}), store: map[uuid.UUID]*[ranges]copyOf{}}
	for p := range 1 + w.rng.IntN(2) {
		id := uuid.UUID{9, byte(i), byte(p)}
		n.parts = append(n.parts, Partition{ID: id, Weight: 100})
		n.store[id] = &[ranges]copyOf{}
	}
	w.nodes = append(w.nodes, n)
	n.start()
	return n
}

// start begins a process.
func (n *node) start() {
	w := n.w
	n.lives++
	n.proc = w.sim.NewProcess(n.clock)
	n.n = New(Config{Cluster: n.cluster, Name: n.name, Address: n.address,
		Incarnation: NewIncarnation(n.number, n.lives), Seen: n.seen, Partitions: n.parts, LeaseNS: lease,
		Nodes: w.configured})
	n.pause = notPaused
	if w.hasty {
		n.hurry()
	}
	life := n.proc
	timer, err := n.proc.NewTimer(0, func() { n.on(life, n.n.Wake) })
	if err != nil {
		w.t.Fatal(err)
	}
	n.wake = timer
	n.proc.Go(func() { n.on(life, n.n.Wake) })
}

func (n *node) kill() {
	n.proc.Kill()
	if n.watch != nil {
		n.watch.Close()
	}
}

// on runs a call of the node's machine, in a process.
func (n *node) on(life *lab.Process, call func(now int64, out *Actions)) {
	if n.proc != life || life.Dead() {
		return
	}
	var out Actions
	call(life.Now(), &out)
	if n.n.Newest() != nil {
		n.seen = max(n.seen, n.n.Newest().Epoch)
	}
	if n.pause == inATurn {
		n.pause = notPaused
		life.Stop()
		n.w.trace("node %d pauses in a turn", n.id)
	}
	life.Deliver(func() { n.carryOut(life, &out) })
	if n.pause == reporting && len(out.Sends) > 0 && out.Sends[0].Message.Report != nil {
		n.pause = notPaused
		life.Stop()
		n.w.trace("node %d pauses after a report", n.id)
	}
}

// hurry makes the times of a node that only liveness depends on as short as they can be, so that they do not hide what
// safety depends on.
func (n *node) hurry() {
	t, rng := &n.n.t, n.w.rng
	t.takeoverNS, t.takeoverLateNS = 1+rng.Int64N(300*ms), 1+rng.Int64N(300*ms)
	t.graceNS, t.leaseNS, t.mostNS = 1+rng.Int64N(200*ms), t.authorityNS, t.authorityNS
	t.unservedNS, t.replaceNS = 1+rng.Int64N(300*ms), 50*ms+rng.Int64N(300*ms)
}

func (n *node) carryOut(life *lab.Process, out *Actions) {
	w := n.w
	if out.Changed {
		n.adopt(life)
		w.checkNode(n)
	}
	if out.Problem {
		w.trace("node %d: %v", n.id, n.n.Problem())
	}
	if out.Watch != nil {
		if n.watch != nil {
			n.watch.Close()
		}
		id := out.Watch.ID
		var queue []watched // a watch keeps its order, also when the process was paused
		n.watch = n.client.Watch(out.Watch.From, func(changes []lab.EtcdKey, ended bool) {
			queue = append(queue, watched{fromEtcd(changes), ended})
			life.Deliver(func() {
				next := queue[0]
				queue = queue[1:]
				n.on(life, func(now int64, out *Actions) { n.n.Watched(now, id, next.events, next.ended, out) })
			})
		})
	}
	for i := range out.Requests {
		r := &out.Requests[i]
		tag := r.Tag
		n.client.Do(etcdRequest(r), func(e lab.EtcdResponse) {
			resp := &Response{Tag: tag, Err: e.Err, Revision: e.Revision, Done: e.Done, Keys: fromEtcd(e.Keys),
				Lease: e.Lease}
			life.Deliver(func() {
				n.on(life, func(now int64, out *Actions) { n.n.Answered(now, resp, out) })
			})
		})
	}
	for _, s := range out.Sends {
		w.send(n, s)
	}
	n.wake.Reset(out.WakeNS - life.Now())
}

// send carries a message.
func (w *world) send(from *node, s Send) {
	var to *node
	for _, n := range w.nodes {
		if n.address == s.To {
			to = n
		}
	}
	if to == nil {
		return
	}
	link := [2]int{from.id, to.id}
	if w.cut[link] {
		return
	}
	arrive := func() {
		if life := to.proc; !w.cut[link] && !life.Dead() {
			life.Deliver(func() {
				to.on(life, func(now int64, out *Actions) { to.n.Receive(now, &s.Message, out) })
			})
		}
	}
	delay := ms/10 + w.rng.Int64N(2*ms)
	if w.slow && w.rng.IntN(8) == 0 {
		delay = w.rng.Int64N(1500 * ms)
	}
	w.sim.After(delay, arrive)
	if w.rng.IntN(20) == 0 {
		w.sim.After(delay+w.rng.Int64N(300*ms), arrive)
	}
}

func etcdRequest(r *Request) lab.EtcdRequest {
	e := lab.EtcdRequest{Txn: r.Kind == Txn}
	switch r.Kind {
	case Lease:
		e.TTLNS = r.TTLNS
	case KeepAlive:
		e.Renew = r.Lease
	}
	for _, c := range r.If {
		e.If = append(e.If, lab.EtcdKey{Key: c.Key, Revision: c.Revision})
	}
	for _, p := range r.Then {
		e.Then = append(e.Then, lab.EtcdKey{Key: p.Key, Value: p.Value, Lease: p.Lease})
	}
	return e
}

func fromEtcd(keys []lab.EtcdKey) (out []KeyValue) {
	for _, k := range keys {
		out = append(out, KeyValue{Key: k.Key, Value: k.Value, Revision: k.Revision, Deleted: k.Deleted})
	}
	return out
}

func (w *world) trace(format string, args ...any) { w.sim.Tracef(format, args...) }

// etcdChanged checks each view at the instant at which it is written.
func (w *world) etcdChanged(k lab.EtcdKey) {
	switch k.Key {
	case keyManager:
		w.takeover++
		m, err := decodeManager(k.Value)
		w.trace("manager %+v %v", m, err)
		return
	case keyView:
	default:
		return
	}
	m, err := DecodeMap(k.Value)
	if err != nil {
		w.t.Fatal(err)
	}
	if w.wentBack && m.Epoch != w.epoch {
		w.t.Fatalf("a view of epoch %d is written while etcd is in an earlier state", m.Epoch)
	}
	if last := w.views[m.Epoch]; last != nil && m.Epoch == w.epoch && bytes.Equal(last.Encode(), k.Value) {
		return // the same again, so that no earlier request takes effect any more
	}
	if m.Epoch != w.epoch+1 {
		w.t.Fatalf("epoch %d is written after %d", m.Epoch, w.epoch)
	}
	if last := w.views[w.epoch]; last != nil {
		for i, process := range last.Admitted {
			at := slices.IndexFunc(m.Nodes, func(e view.Node) bool { return e.Name == last.Nodes[i].Name })
			if at < 0 {
				if process != 0 {
					w.t.Fatalf("epoch %d forgets process %d, which no view has seen go", m.Epoch, process)
				}
				continue
			}
			if now := m.Admitted[at]; process != 0 && now != 0 && now != process {
				w.t.Fatalf("epoch %d admits process %d in the place of %d, which no view has seen go", m.Epoch, now,
					process)
			}
		}
	}
	w.lookForYields(m)
	w.epoch, w.views[m.Epoch] = m.Epoch, m
	w.changes++
	w.trace("epoch %d admits %v: %v", m.Epoch, m.Admitted, m.Chains)
	for _, n := range w.nodes {
		if n.authority() && !m.admits(n.n.cfg.Incarnation) {
			w.t.Fatalf("epoch %d is written without node %d, which has authority for %d ms", m.Epoch, n.id,
				(n.n.Authority()-n.clock.Now())/ms)
		}
	}
}

// authority reports whether the node's process has authority, by its own clock. One that is paused may have it.
func (n *node) authority() bool {
	return !n.proc.Dead() && n.n.Active() != nil && n.clock.Now() < n.n.Authority()
}

// own calls f with the node's partitions in a view.
func (n *node) own(m *Map, f func(id view.PartitionID, store *[ranges]copyOf)) {
	for i := range m.Partitions {
		if store := n.store[m.Partitions[i].ID]; store != nil {
			f(view.PartitionID(i), store)
		}
	}
}

// adopt makes the stores what the views say, and reports what they have.
func (n *node) adopt(life *lab.Process) {
	w := n.w
	newest := n.n.Newest()
	if a := n.n.Active(); a != nil && (w.acted == nil || a.Epoch > w.acted.Epoch) {
		w.acted = a
	}
	n.own(newest, func(id view.PartitionID, store *[ranges]copyOf) {
		for r, c := range newest.Chains {
			if memberOf(c, id) == nil {
				store[r] = copyOf{}
			}
		}
	})
	if a := n.n.Active(); a != nil {
		n.own(a, func(id view.PartitionID, store *[ranges]copyOf) {
			for r, c := range a.Chains {
				m, e := memberOf(c, id), &store[r]
				switch {
				case m == nil || m.Since == e.since || memberOf(newest.Chains[r], id) == nil:
				case m.State == view.Serving || m.State == view.Leaving: // a new chain
					*e = copyOf{since: m.Since, complete: true}
				case m.State == view.Filling:
					*e = copyOf{since: m.Since}
					n.fillLater(life, id, r, m.Since)
				}
			}
		})
	}
	n.report(life)
}

// report tells the machine what the stores have, if that has changed.
func (n *node) report(life *lab.Process) {
	if now := fmt.Sprint(n.lives, n.holdings()); now != n.reported {
		n.reported = now
		n.proc.Go(func() {
			n.on(life, func(now int64, out *Actions) {
				n.n.SetReport(now, n.holdings(), out)
			})
		})
	}
}

func (n *node) rangeReports() (out []RangeReport) {
	newest := n.n.Newest()
	n.own(newest, func(id view.PartitionID, store *[ranges]copyOf) {
		for r, c := range newest.Chains {
			m := memberOf(c, id)
			// Nothing is reported of a new chain that the node does not act on yet.
			if m != nil && (m.State > view.Leaving || m.Since == store[r].since) {
				report := view.Report{Local: view.Incomplete, Epoch: newest.Epoch, Yield: n.yields[r]}
				if store[r].complete && store[r].since == m.Since {
					report.Local = view.Complete
				}
				out = append(out, RangeReport{Partition: id, Range: r, Report: report})
			}
		}
	})
	return out
}

func memberOf(c view.Chain, id view.PartitionID) *view.Member {
	for i := range c {
		if c[i].Partition == id {
			return &c[i]
		}
	}
	return nil
}

// fillLater copies a range from a member that serves it, some time later.
func (n *node) fillLater(life *lab.Process, id view.PartitionID, r int, since view.Epoch) {
	w := n.w
	w.sim.After(w.rng.Int64N(400*ms), func() {
		life.Deliver(func() {
			a := n.n.Active()
			if a == nil || n.proc != life {
				return
			}
			m := memberOf(a.Chains[r], id)
			store := n.store[a.Partitions[id].ID] // nil: it was forgotten, and another one has the entry
			if m == nil || store == nil || m.State != view.Filling || m.Since != since || store[r].since != since ||
				store[r].complete {
				return
			}
			source := w.there(a, a.Chains[r][0], r)
			if source == nil {
				n.fillLater(life, id, r, since)
				return
			}
			store[r].has, store[r].complete = source.has, true
			n.report(life)
		})
	})
}

// there returns what a member of a chain has, if its node acts on the same version of the chain and is reached.
func (w *world) there(m *Map, e view.Member, r int) *copyOf {
	id := m.Partitions[e.Partition].ID
	for _, n := range w.nodes {
		store := n.store[id]
		if store == nil || n.proc.Dead() || n.proc.Stopped() || n.n.Active() == nil ||
			n.n.Active().ChainEpochs[r] != m.ChainEpochs[r] {
			continue
		}
		if c := &store[r]; c.since == e.Since && (c.complete || e.State == view.Filling) {
			return c
		}
	}
	return nil
}

// write tries to write to a range, as a client of some node that believes to be its head.
func (w *world) write() {
	r := w.rng.IntN(ranges)
	n := w.nodes[w.rng.IntN(len(w.nodes))]
	if !n.authority() || n.proc.Stopped() {
		return
	}
	a := n.n.Active()
	chain := a.Chains[r]
	if chain.Halted() || n.store[a.Partitions[chain[0].Partition].ID] == nil || !n.n.Serves(chain[0].Partition, r) {
		return
	}
	var copies []*copyOf
	for _, m := range chain {
		if m.State == view.Waiting {
			continue
		}
		c := w.there(a, m, r)
		if c == nil || w.failsWrites(a, m, r) {
			return
		}
		copies = append(copies, c)
	}
	w.written[r]++
	for _, c := range copies {
		if c.complete {
			c.has++
		}
	}
	w.check()
}

// check verifies that whoever has authority has all acknowledged writes, and serves what the newest view that acts
// says.
func (w *world) check() {
	for _, n := range w.nodes {
		w.checkNode(n)
	}
}

func (w *world) checkNode(n *node) {
	if !n.authority() {
		return
	}
	a := n.n.Active()
	n.own(a, func(id view.PartitionID, store *[ranges]copyOf) {
		for r := range a.Chains {
			if !n.n.Serves(id, r) || !store[r].complete {
				continue
			}
			if store[r].has != w.written[r] {
				w.t.Fatalf("node %d serves range %d with %d of %d writes, by epoch %d while %d acts", n.id, r,
					store[r].has, w.written[r], a.Epoch, w.acted.Epoch)
			}
			// A process that was stopped in a turn has not acted on the newest view yet.
			since, _ := a.holds(id, r)
			if s, ok := w.acted.holds(id, r); a.Epoch <= w.acted.Epoch && (!ok || s != since) {
				w.t.Fatalf("node %d serves range %d by epoch %d, but not by epoch %d, which acts", n.id, r, a.Epoch,
					w.acted.Epoch)
			}
		}
	})
}

// run lets time pass, with writes and checks.
func (w *world) run(ns int64) {
	end := w.sim.Now() + ns
	for w.sim.Now() < end && !w.t.Failed() {
		step := 2*ms + w.rng.Int64N(6*ms)
		w.sim.After(step, func() {}) // time passes also if no process is left
		w.sim.Run(step, func() bool { return false })
		w.write()
		w.yield()
		w.check()
	}
}

func (w *world) traceTo(t *testing.T) {
	if *traceFlag {
		w.sim.Trace(func(line string) { fmt.Println(strings.TrimSpace(line)) })
	}
}
