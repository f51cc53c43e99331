package cluster

import (
	"maps"
	"slices"

	"jbofd/internal/cluster/view"
	"jbofd/internal/invariants"
	"jbofd/internal/uuid"
)

// lead is the state of a node as the manager of a term. Times are by this node's clock.
type lead struct {
	// electedNS is when it became manager.
	electedNS int64
	// unreportedNS is when the authority of every process that has not reported in this term is over: earlier managers
	// may have granted it.
	unreportedNS int64
	// proofNS is until when authority may be granted because etcd has confirmed that this node is the manager.
	proofNS int64
	// stampNS is when the next stamp is due.
	stampNS, count int64
	processes      map[Incarnation]*process
	// acts: the newest view acts.
	acts bool
	// ready: at the last helloNS the newest view acted, and every admitted node had reported within timing.authorityNS
	// that it is Connected.
	ready bool
	// candidates are views whose writes were sent to etcd and may have taken effect, or may do so later.
	candidates []candidate
	// changed: an input of the next view has changed.
	changed bool
	// nextNS is when the next view may be computed, lookNS when the manager checks next for silent nodes, helloNS when
	// it sends the next hellos: Answers without a Report, to nodes that do not report.
	nextNS, lookNS, helloNS int64
	// goneNS is since when nodes are not admitted, by their names.
	goneNS map[string]int64
	// troubles has the partitions whose drive does not work: see trouble.
	troubles map[uuid.UUID]trouble
	record   []byte // of the newest view; nil: not encoded yet
}

// process is a process of a node that has reported in this term.
type process struct {
	Identity
	// firstNS and heardNS are the times of its first and last report, grantedNS that of the last grant of authority.
	// Grants of earlier managers were for reports before its first one of this term.
	firstNS, heardNS, grantedNS int64
	// echoNS is the newest of the manager's stamps that it has echoed.
	echoNS int64
	// connected is Report.Connected of the report seq, the newest one that has come.
	connected bool
	seq       uint64

	seen     view.Epoch
	version  uint64
	ranges   map[rangeOf]view.Report
	unusable map[view.PartitionID]bool
	failing  map[view.PartitionID]bool
}

type rangeOf struct {
	partition view.PartitionID
	number    int
}

// candidate is a view that was sent to etcd and may become the newest.
type candidate struct {
	*Map
	base int64 // the revision of the view that it replaces
	tag  uint64
}

// becomeManager begins a term. sentNS is when the request that has begun it was sent.
func (n *Node) becomeManager(term uint64, sentNS int64, out *Actions) {
	// An earlier manager may have granted authority until timing.proofNS after the last sign of it, and such a grant
	// lasts for timing.authorityNS. last is the latest of: the last sign in etcd, the last stamp by which this node has
	// made a promise, and the start of this process. If this node is eligible by a view that another manager has
	// written, that one relied on promises only before it wrote the view, which was seen later.
	last := max(n.etcd.seenNS, n.stampSeenNS, n.startedNS)
	if n.attempt.blind {
		last = n.now // there may be later stamps than the one that was seen, but none after the takeover
	}
	n.follow(term, n.self())
	// Requests that it has sent as the manager of an earlier term fail now, but their answers may take until the
	// deadline.
	n.etcd.flights[toStamp].busy, n.etcd.flights[toWriteView].busy = false, false
	n.lead = &lead{electedNS: n.now, unreportedNS: last + outlast(n.t.proofNS+n.t.authorityNS),
		proofNS: sentNS + n.t.proofNS, stampNS: n.now, processes: map[Incarnation]*process{}, changed: true,
		goneNS: map[string]int64{}, troubles: map[uuid.UUID]trouble{}, helloNS: n.now}
	out.Changed = true
}

// stamp renews the stamp of the manager.
func (n *Node) stamp(out *Actions) {
	l := n.lead
	if n.ask(toStamp, Request{Kind: Txn, If: []Compare{{keyManager, n.etcd.managerRev}},
		Then: []Put{{Key: keyStamp, Value: encodeStamp(n.term, uint64(l.count))}}}, out) {
		l.count++
		l.stampNS = n.now + n.t.stampNS
	}
}

// stamped handles the outcome of a stamp.
func (n *Node) stamped(f flight, r *Response) {
	l := n.lead
	if l == nil || f.sentNS < l.electedNS {
		return // the stamp is of an earlier term
	}
	if !r.Done {
		n.etcd.synced, n.etcd.retryNS = false, n.now
		return
	}
	l.proofNS = max(l.proofNS, f.sentNS+n.t.proofNS)
	if r.Revision > n.etcd.stampRev {
		n.etcd.stampRev, n.etcd.seenNS = r.Revision, n.now
	}
}

// reported handles a report, and answers it: with a refusal; or with authority, if the node has seen the newest view
// and there is a proof; or with the newest view, if the node has not seen it. The answer to a report of an older term
// has this term.
func (n *Node) reported(r *Report, out *Actions) {
	l := n.lead
	if l == nil {
		n.overheard(r)
		return
	}
	if r.Term > n.term {
		return // a newer term: the watch of etcd will say that this node is not the manager any more
	}
	a := &Answer{Term: n.term, Manager: n.self(), To: r.Incarnation, Stamp: n.now}
	if n.newest != nil {
		a.Epoch, a.Acts, a.Ready = n.newest.Epoch, l.acts, l.ready
	}
	if r.Term < n.term {
		n.send(r.Address, a, out)
		return
	}
	a.Seq = r.Seq
	if a.Refused = n.refuses(r); a.Refused != NotRefused {
		n.send(r.Address, a, out)
		return
	}
	p := l.processes[r.Incarnation]
	if p == nil {
		p = &process{Identity: Identity{Name: r.Name, Incarnation: r.Incarnation}, firstNS: n.now}
		l.processes[r.Incarnation] = p
		l.changed = true
	}
	p.Address, p.heardNS = r.Address, n.now
	if r.Seq >= p.seq {
		p.connected, p.seq = r.Connected, r.Seq
	}
	if r.Echo <= n.now {
		p.echoNS = max(p.echoNS, r.Echo)
	}
	if r.Seen > p.seen {
		p.seen = r.Seen
		l.changed = l.changed || n.newest != nil && !n.newest.admits(r.Incarnation)
	}
	if r.Full && r.Version > p.version {
		p.take(r)
		l.changed = true
	}
	a.Version = p.version
	if n.newest != nil && r.Seen == n.newest.Epoch && n.now-p.roundNS() < n.t.leaseNS && n.mayGrant(r.Incarnation) {
		a.Granted, p.grantedNS = true, n.now
	}
	if n.newest != nil && r.Seen < n.newest.Epoch {
		if l.record == nil {
			l.record = n.newest.Encode()
		}
		a.View = l.record
	}
	n.send(r.Address, a, out)
}

// take stores the Holdings of a report.
func (p *process) take(r *Report) {
	p.version = r.Version
	p.ranges = make(map[rangeOf]view.Report, len(r.Ranges))
	p.unusable, p.failing = map[view.PartitionID]bool{}, map[view.PartitionID]bool{}
	for _, e := range r.Ranges {
		p.ranges[rangeOf{e.Partition, e.Range}] = e.Report
	}
	for _, id := range r.Unusable {
		p.unusable[id] = true
	}
	for _, id := range r.Failing {
		p.failing[id] = true
	}
}

// send sends an answer; one to this node itself is handled at once.
func (n *Node) send(address string, a *Answer, out *Actions) {
	if a.To == n.cfg.Incarnation {
		n.answer(a, out)
		return
	}
	out.Sends = append(out.Sends, Send{To: address, Message: Message{Answer: a}})
}

// refuses returns the reason why a node is refused, or NotRefused.
func (n *Node) refuses(r *Report) Refusal {
	switch {
	case r.Protocol != Protocol:
		return OtherProtocol
	case !r.Cluster.IsZero() && n.etcd.settings != nil && r.Cluster != n.etcd.settings.Cluster:
		return OtherCluster
	case n.newest != nil && !n.newest.admits(r.Incarnation) && n.etcd.settings.forgets(r.Name, r.Seen):
		return NodeForgotten
	}
	p := n.lead.processes[r.Incarnation]
	if p == nil || n.newest == nil {
		return NotRefused
	}
	for _, other := range n.lead.processes {
		if other.Name == r.Name && other != p && n.newest.admits(other.Incarnation) &&
			n.now-other.heardNS < n.t.leaseNS && other.heardNS-p.firstNS > 2*n.t.leaseNS {
			return NameTaken
		}
	}
	return NotRefused
}

// mayGrant reports whether a process may be granted authority now: there is a proof that no other manager makes a view
// without it, and no candidate of this one is without it.
func (n *Node) mayGrant(i Incarnation) bool {
	if !n.newest.admits(i) {
		return false
	}
	for _, c := range n.lead.candidates {
		if !c.admits(i) {
			return false
		}
	}
	return n.now < max(n.lead.proofNS, n.promisedNS())
}

// promisedNS is until when all others that may become managers have promised not to act as such. Those are the
// processes that are admitted by the newest view, or by one that may have become the newest.
func (n *Node) promisedNS() int64 {
	least := n.promisedBy(n.newest, n.now+n.t.proofNS)
	for _, c := range n.lead.candidates {
		least = n.promisedBy(c.Map, least)
	}
	return least
}

func (n *Node) promisedBy(m *Map, least int64) int64 {
	for _, i := range m.Admitted {
		if i == 0 || i == n.cfg.Incarnation {
			continue
		}
		p := n.lead.processes[i]
		if p == nil || p.echoNS == 0 {
			return 0
		}
		least = min(least, p.echoNS+n.t.proofNS)
	}
	return least
}

// authorityOver reports whether the authority of a process is over, if no more is granted.
func (n *Node) authorityOver(i Incarnation) bool {
	if p := n.lead.processes[i]; p != nil {
		return n.now >= max(p.firstNS, p.grantedNS)+outlast(n.t.authorityNS)
	}
	return n.now >= n.lead.unreportedNS
}

// silent reports whether an admitted process is to be given up: its reports do not come, or it does not get the
// answers. Its authority is over then. lease is how long it may be silent, grace how long it has at least since this
// node became the manager, or was paused.
func (n *Node) silent(i Incarnation, lease, grace int64) bool {
	l := n.lead
	until := max(l.electedNS, n.attentiveNS) + grace
	if p := l.processes[i]; p != nil {
		until = max(until, min(p.heardNS+lease, p.roundNS()+2*lease))
	}
	return n.now >= until && n.authorityOver(i)
}

// roundNS is when the newest answer was sent that has certainly reached the process, because it echoes its stamp, or
// the time of its first report.
func (p *process) roundNS() int64 { return max(p.firstNS, p.echoNS) }

// patience returns the lease and the grace for silent. They are longer if most of the processes that have not ended are
// silent: perhaps these are alive, and the manager is cut off. Then one of them takes over before it gives them up.
func (n *Node) patience() (lease, grace int64) {
	alive, silent := 0, 0
	for i, inc := range n.newest.Admitted {
		reg := n.etcd.nodes[n.newest.Nodes[i].Name]
		if inc == 0 || reg != nil && reg.incarnation.follows(inc) {
			continue
		}
		alive++
		if p := n.lead.processes[inc]; inc != n.cfg.Incarnation && (p == nil || n.now-p.heardNS >= n.t.authorityNS) {
			silent++
		}
	}
	if 2*silent > alive {
		return n.t.mostNS, n.t.mostNS
	}
	return n.t.leaseNS, n.t.graceNS
}

// manage does the periodic work of a manager.
func (n *Node) manage(out *Actions) {
	l := n.lead
	l.candidates = slices.DeleteFunc(l.candidates, func(c candidate) bool { return n.etcd.viewRev > c.base })
	if n.newest == nil || n.etcd.settings == nil {
		return
	}
	if !l.acts && n.confirmed() {
		l.acts, l.changed = true, true
		n.tell(out, true)
	}
	if l.acts && n.problem == nil && n.etcd.synced && n.etcd.mapEpoch == n.newest.Epoch && n.now >= n.etcd.retryNS &&
		!n.busy(toWriteView) && n.now >= l.nextNS && (l.changed || n.now >= l.lookNS) {
		l.nextNS, l.lookNS = n.now+n.t.pauseNS, n.now+n.t.tickNS
		n.next(out)
	}
	if n.now >= l.helloNS {
		l.helloNS = n.now + n.t.reportNS
		l.ready = l.acts && n.allConnected()
		n.tell(out, false)
		n.forget()
	}
}

// confirmed reports whether the newest view acts: each process that it admits has seen it, or has no authority.
func (n *Node) confirmed() bool {
	for _, i := range n.newest.Admitted {
		p := n.lead.processes[i]
		if i != 0 && (p == nil || p.seen < n.newest.Epoch) && !n.authorityOver(i) {
			return false
		}
	}
	return true
}

// tell sends hellos: with all, to all nodes, because the view acts; otherwise to nodes that have not reported for
// timing.authorityNS, and may not know of the view or of the manager.
func (n *Node) tell(out *Actions, all bool) {
	l := n.lead
	send := func(i Incarnation, address string) {
		p := l.processes[i]
		if i != n.cfg.Incarnation && address != "" && (all || p == nil || n.now-p.heardNS >= n.t.authorityNS) {
			out.Sends = append(out.Sends, Send{To: address, Message: Message{Answer: n.hello(i)}})
		}
	}
	for _, name := range slices.Sorted(maps.Keys(n.etcd.nodes)) {
		send(n.etcd.nodes[name].incarnation, n.etcd.nodes[name].address)
	}
	for i, process := range n.newest.Admitted {
		if r := n.etcd.nodes[n.newest.Nodes[i].Name]; process != 0 && (r == nil || r.incarnation != process) {
			send(process, n.etcd.addresses[process])
		}
	}
	if all {
		n.answer(n.hello(n.cfg.Incarnation), out)
	}
}

// hello returns an Answer that answers no Report: it tells a process of the manager and the newest view.
func (n *Node) hello(to Incarnation) *Answer {
	return &Answer{Term: n.term, Manager: n.self(), To: to, Stamp: n.now, Epoch: n.newest.Epoch, Acts: n.lead.acts}
}

// allConnected reports whether all processes that the newest view admits say that they are connected to each other.
func (n *Node) allConnected() bool {
	for _, i := range n.newest.Admitted {
		if p := n.lead.processes[i]; i != 0 && (p == nil || !p.connected || p.seen != n.newest.Epoch ||
			n.now-p.heardNS >= n.t.authorityNS) {
			return false
		}
	}
	return true
}

// forget removes the records of processes that are gone.
func (n *Node) forget() {
	for i, p := range n.lead.processes {
		if n.now-p.heardNS > 10*n.t.leaseNS && !n.newest.admits(i) {
			delete(n.lead.processes, i)
		}
	}
}

// next computes the next view, and writes it if it differs. manage calls it while the newest view acts, when something
// has changed, and at each tick, because there is no event when a node becomes silent.
func (n *Node) next(out *Actions) {
	l := n.lead
	m := &Map{Admitted: slices.Clone(n.newest.Admitted)}
	v := *n.newest.View
	v.Nodes, v.Partitions = slices.Clone(v.Nodes), slices.Clone(v.Partitions)
	m.View = &v
	if !n.members(m) && !l.changed {
		return
	}
	l.changed = false
	if n.awaitsOthers(m) {
		return
	}
	same := !n.acceptLosses(m) && slices.Equal(m.Admitted, n.newest.Admitted) && v.Replicas == n.newest.Replicas &&
		slices.Equal(v.Nodes, n.newest.Nodes) && slices.Equal(v.Partitions, n.newest.Partitions)
	next, moved := v.Next(&judgement{l, m})
	switch {
	case !same || moved:
		if !moved {
			next.Epoch++
		}
		m.View = next
		err := m.Check()
		invariants.Check(err == nil, "cluster: the next view is not valid")
	case len(l.candidates) > 0:
		// Nothing is to change any more, but a write of an earlier view may still take effect. It compares the revision
		// of the key, so that it cannot once the present view has been written again.
		m = n.newest
	default:
		return
	}
	l.candidates = append(l.candidates, candidate{Map: m, base: n.etcd.viewRev, tag: n.etcd.serial + 1})
	n.ask(toWriteView, Request{Kind: Txn,
		If:   []Compare{{keyManager, n.etcd.managerRev}, {keyView, n.etcd.viewRev}},
		Then: []Put{{Key: keyView, Value: m.Encode()}}}, out)
}

// firstLeases is for how many leases after its election a manager waits with the first view of a cluster.
const firstLeases = 2

// awaitsOthers reports whether the first view waits for other nodes. Those of a new cluster do not find it at the same
// moment. A view with all of them has each range at all its members at once, and spreads the ChainHeads. Otherwise the
// first node serves all ranges, the others are filled, and the ChainHeads are spread only half a minute later.
func (n *Node) awaitsOthers(m *Map) bool {
	return len(n.newest.Nodes) == 0 && len(m.Nodes) < n.cfg.Nodes && n.now < n.lead.electedNS+firstLeases*n.t.leaseNS
}

// acceptedNS is how long an accepted loss counts: 300 s. When the command is given, the operator knows which nodes are
// away. A node that comes back much later may have all data, and they must not have been given up a moment before.
const acceptedNS = 300e9

// acceptLosses gives up the data of halted ranges, as an operator has commanded. It reports whether m has changed.
func (n *Node) acceptLosses(m *Map) (changed bool) {
	v, cloned := m.View, false
	for _, loss := range n.etcd.settings.Losses {
		if at := n.etcd.lossNS[loss]; at == 0 || n.now-at >= acceptedNS {
			continue
		}
		r := int(loss.Range)
		if r >= len(v.Chains) || v.ChainEpochs[r] != loss.ChainEpoch {
			continue // the chain has changed since the command: the loss was accepted, or a last copy is back
		}
		if !cloned {
			v.Chains, v.ChainEpochs, cloned = slices.Clone(v.Chains), slices.Clone(v.ChainEpochs), true
		}
		changed = v.AcceptLoss(r, &judgement{n.lead, m}) || changed
	}
	return changed
}

// wroteView handles the known outcome of writing a view.
func (n *Node) wroteView(r *Response, out *Actions) {
	l := n.lead
	if l == nil {
		return
	}
	i := slices.IndexFunc(l.candidates, func(c candidate) bool { return c.tag == r.Tag>>8 })
	if i < 0 {
		return // the watch has told of the view before
	}
	c := l.candidates[i]
	if !r.Done {
		l.candidates = slices.Delete(l.candidates, i, i+1)
		l.changed = true
		n.etcd.synced, n.etcd.retryNS = false, n.now
		return
	}
	if r.Revision > n.etcd.viewRev {
		n.etcd.mapEpoch, n.etcd.viewRev, n.etcd.seenNS = c.Epoch, r.Revision, n.now
	}
	n.see(c.Map, out)
}

// members sets in m, a copy of the newest view, who is admitted, which nodes and partitions there are, and which are
// out. It reports whether who is admitted or out differs, which may have changed by the passing of time alone: whatever
// else changes sets lead.changed.
func (n *Node) members(m *Map) (differs bool) {
	l, v := n.lead, m.View
	v.Replicas = n.etcd.settings.Replicas
	lease, grace := n.patience()
	for i, inc := range m.Admitted {
		if inc != 0 && n.silent(inc, lease, grace) {
			m.Admitted[i], differs = 0, true
		}
	}
	for _, name := range slices.Sorted(maps.Keys(n.etcd.nodes)) {
		reg := n.etcd.nodes[name]
		p := l.processes[reg.incarnation]
		if p == nil || p.Name != name || p.seen != n.newest.Epoch || n.now-p.heardNS >= n.t.leaseNS ||
			n.now-p.roundNS() >= n.t.leaseNS || reg.protocol != Protocol {
			continue
		}
		i := slices.IndexFunc(v.Nodes, func(e view.Node) bool { return e.Name == name })
		if i < 0 {
			if len(v.Nodes) == view.MaxNodes {
				continue
			}
			i = len(v.Nodes)
			v.Nodes, m.Admitted = append(v.Nodes, view.Node{Name: name, Domain: reg.domain}), append(m.Admitted, 0)
		}
		// A process is admitted only when the newest view admits no earlier one of its node.
		if i >= len(n.newest.Admitted) || n.newest.Admitted[i] == 0 {
			m.Admitted[i], differs = reg.incarnation, true
		}
		if m.Admitted[i] == reg.incarnation {
			v.Nodes[i].Domain = reg.domain
			for _, p := range reg.partitions {
				if !p.ID.IsZero() {
					v.Add(p.ID, uint16(i), p.Weight)
				}
			}
		}
	}
	differs = n.forgetMembers(m) || differs
	differs = n.setOut(m) || differs
	return n.setPartitionsOut(m) || differs
}

// setOut sets which nodes are to have no ranges: those of the settings, and those that have been gone for too long. It
// reports whether these are others than before.
func (n *Node) setOut(m *Map) (differs bool) {
	for i := range m.Nodes {
		name := m.Nodes[i].Name
		out := slices.Contains(n.etcd.settings.Out, name)
		if m.Admitted[i] != 0 {
			delete(n.lead.goneNS, name)
		} else {
			since, known := n.lead.goneNS[name]
			if !known {
				n.lead.goneNS[name], since = n.now, n.now
			}
			out = out || m.Nodes[i].Out || n.now-since > n.t.awayNS
		}
		differs = differs || m.Nodes[i].Out != out
		m.Nodes[i].Out = out
	}
	return differs
}

// judgement is the manager's knowledge of the nodes when a view is computed: it implements view.Reports.
type judgement struct {
	l *lead
	m *Map
}

// Alive implements view.Reports.
func (j *judgement) Alive(node uint16) bool { return j.m.Admitted[node] != 0 }

// Range implements view.Reports.
func (j *judgement) Range(id view.PartitionID, r int) view.Report {
	p := j.l.processes[j.m.Admitted[j.m.Partitions[id].Node]]
	if p == nil {
		return view.Report{Local: view.Silent}
	}
	if e, known := p.ranges[rangeOf{id, r}]; known {
		return e
	}
	return view.Report{Local: view.Silent}
}

// Usable implements view.Reports.
func (j *judgement) Usable(id view.PartitionID) bool {
	p := j.l.processes[j.m.Admitted[j.m.Partitions[id].Node]]
	return p == nil || !p.unusable[id]
}

// Failing implements view.Reports.
func (j *judgement) Failing(id view.PartitionID) bool {
	p := j.l.processes[j.m.Admitted[j.m.Partitions[id].Node]]
	return p != nil && p.failing[id]
}
