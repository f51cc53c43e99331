package cluster

import (
	"fmt"
	"maps"
	"time"

	"jbofd/internal/cluster/view"
	"jbofd/internal/invariants"
)

// timing has the durations that follow from the lease, in nanoseconds of this node's clock, with the reason for each.
type timing struct {
	// leaseNS is how long a node may be silent before the manager gives it up.
	leaseNS int64
	// authorityNS is how long a grant of authority lasts, proofNS how long after a proof (a confirmed stamp, or
	// promises) a manager may grant authority. They are half a lease each, so that the next manager can give up a node
	// that does not report to it one lease after the last sign of the manager before it.
	authorityNS, proofNS int64
	// reportNS and stampNS are the intervals of reports and stamps. They are short, because several may be lost.
	reportNS, stampNS int64
	// takeoverNS is how long a stamp may be unchanged before others take over, if the manager has granted no authority
	// for a report that was sent within the last unansweredNS; takeoverLateNS is that time if it has. takeoverNS and
	// unansweredNS are shorter than authorityNS, so that nodes still have authority when the next manager grants it.
	// takeoverLateNS is longer: the manager still answers and is only cut off from etcd, so that nothing is urgent.
	// Nothing else depends on them: how long a manager waits for nodes that do not report is counted from the last sign
	// of the one before it.
	takeoverNS, takeoverLateNS, unansweredNS int64
	// unservedNS is how long a node gets no authority from a manager that stamps before it reports that to other nodes,
	// and replaceNS how long before it takes over if most of them report the same (unserved.go). mostNS is how long a
	// manager waits before it gives up most of the nodes: long enough that they can replace it before, if it is the one
	// that is cut off.
	unservedNS, replaceNS, mostNS int64
	// graceNS is how long a node has at least to find a new manager, or one that was paused, before it counts as
	// silent.
	graceNS int64
	// retryNS is the time between attempts of a request that etcd has not answered, rereadNS that between attempts to
	// read everything again while there is a problem.
	retryNS, rereadNS int64
	// registrationNS is the lease of a registration in etcd.
	registrationNS int64
	// pauseNS is the time between two computations of a view: all changes within it are one change of the map.
	pauseNS int64
	// tickNS is the longest time between two calls of Wake. gapNS: if two calls are further apart, the process counts
	// as having been paused.
	tickNS, gapNS int64
	// awayNS is how long a node may be gone before its ranges are given to others for good.
	awayNS int64
}

func newTiming(lease, away int64) timing {
	return timing{leaseNS: lease, authorityNS: lease / 2, proofNS: lease / 2, reportNS: lease / 10, stampNS: lease / 8,
		takeoverNS: lease * 35 / 100, takeoverLateNS: 3 * lease, unansweredNS: lease * 3 / 10,
		unservedNS: lease / 2, replaceNS: lease * 6 / 10, mostNS: lease * 3 / 2, graceNS: lease / 2,
		retryNS: lease / 5, rereadNS: 2 * lease, registrationNS: 5 * lease, pauseNS: lease / 100, tickNS: lease / 20,
		gapNS: lease / 4, awayNS: away}
}

// outlast returns a duration on this node's clock, in nanoseconds, after which the duration ns has certainly passed on
// another node's clock, whatever their drift.
func outlast(ns int64) int64 { return ns + ns*driftPerMille/1000 + 1 }

// DefaultLease is the lease of a Config that has none.
const DefaultLease = time.Second

const defaultAwayNS = 600e9

// Node is the membership of one process of a node, and the manager while the node is the manager. All calls are made by
// one goroutine at a time. now is CLOCK_MONOTONIC_RAW in nanoseconds, as are all times here. The driver reads it after
// the input of the call has arrived, and before anything is done about it. It never goes back.
type Node struct {
	cfg Config
	t   timing
	now int64
	// startedNS is the time of the first call. Earlier processes of the node have made no promise after it.
	startedNS int64
	// attentiveNS is the time of the first call after the last pause of the process (timing.gapNS).
	attentiveNS int64
	problem     error
	etcd        etcd

	// term is that of the newest manager that the node knows, manager the identity of that. term never goes back.
	term    uint64
	manager Identity
	// newest is the newest view, active the one that the node acts on, nil if it is not admitted.
	// Invariant: active.Epoch <= newest.Epoch.
	newest, active *Map
	// untilNS is when authority ends.
	untilNS int64

	// seq numbers the reports, sent are the times of the last ones.
	seq  uint64
	sent [64]sentReport
	// echo is the newest stamp of the manager of the present term, by that manager's clock.
	echo int64
	// stampSeenNS is when the last stamp of another manager has come. The promise of this node's reports (see Report)
	// ends timing.proofNS after the stamp that they echo, which was not later.
	stampSeenNS int64
	// grantedNS is when the newest report that was answered with authority was sent. An answer may come late, or twice.
	grantedNS int64
	reportNS  int64 // when the next report is due
	// version counts the changes of holdings; known is the version that the manager has.
	version, known uint64
	holdings       Holdings
	// connected is the epoch of the last SetConnected.
	connected view.Epoch
	// ready is Answer.Ready of the manager's last answer about the newest view, which was to the report readySeq.
	ready    bool
	readySeq uint64

	unserved unserved
	// lead is the state of the node as the manager, nil if it is not the manager.
	lead *lead
	// attempt is the takeover that was sent to etcd and has no known outcome. blind: it does not compare the stamp.
	attempt struct {
		term   uint64
		sentNS int64
		blind  bool
	}
}

type sentReport struct {
	seq uint64
	at  int64
}

// New returns a node that has done nothing so far. The first call of Wake begins.
func New(cfg Config) *Node {
	if cfg.LeaseNS == 0 {
		cfg.LeaseNS = int64(DefaultLease)
	}
	if cfg.AwayNS == 0 {
		cfg.AwayNS = defaultAwayNS
	}
	n := &Node{cfg: cfg, t: newTiming(cfg.LeaseNS, cfg.AwayNS), problem: ErrUnreachable, version: 1}
	n.etcd.nodes, n.etcd.addresses = map[string]*registration{}, map[Incarnation]string{}
	n.unserved.others = map[Incarnation]int64{}
	return n
}

// Wake lets time pass. It is to be called at Actions.WakeNS at the latest.
func (n *Node) Wake(now int64, out *Actions) {
	n.advance(now)
	n.turn(out)
}

// Answered takes the response to a Request.
func (n *Node) Answered(now int64, r *Response, out *Actions) {
	n.advance(now)
	n.answered(r, out)
	n.turn(out)
}

// Watched takes events of a watch, in their order. They may come twice. ended: the watch has ended, for whatever
// reason: lost, or compacted.
func (n *Node) Watched(now int64, id uint64, events []KeyValue, ended bool, out *Actions) {
	n.advance(now)
	n.watched(id, events, ended, out)
	n.turn(out)
}

// Receive takes a message of another node. It keeps nothing of the message but the Holdings of a Report.
func (n *Node) Receive(now int64, m *Message, out *Actions) {
	n.advance(now)
	switch {
	case m.Report != nil:
		n.reported(m.Report, out)
	case m.Answer != nil:
		n.answer(m.Answer, out)
	}
	n.turn(out)
}

// SetReport sets what the node has. The slices of has belong to the Node. A range that is reported as incomplete is not
// served any more.
//
// If the active view has the node serve a range since an epoch that it does not know, the chain is a new one, and
// empty: members get there otherwise only by a report of their own. Nothing is to be reported of it before the view is
// active.
func (n *Node) SetReport(now int64, has Holdings, out *Actions) {
	n.advance(now)
	n.holdings = has
	n.version++
	n.reportNS = n.now
	n.turn(out)
}

// SetConnected says that the node acts on the view of an epoch, and is connected to all nodes that it admits, in both
// directions; 0: it is not.
func (n *Node) SetConnected(now int64, epoch view.Epoch, out *Actions) {
	n.advance(now)
	if n.connected != epoch {
		n.connected, n.reportNS = epoch, n.now
	}
	n.turn(out)
}

// Ready reports whether all nodes that the newest view admits act on it and are connected to each other, as the manager
// has said last.
func (n *Node) Ready() bool { return n.ready }

// Newest is the newest view that the node has seen, nil if there is none.
func (n *Node) Newest() *Map { return n.newest }

// Active is the view that the node acts on, nil if it is not admitted.
func (n *Node) Active() *Map { return n.active }

// Authority is until when the node may serve what Serves allows, on its own clock. It is to be looked at after a value
// was fetched and before it is sent.
func (n *Node) Authority() int64 { return n.untilNS }

// Manager is the newest manager that the node knows of, zero if there is none.
func (n *Node) Manager() Identity { return n.manager }

// LastSign is when etcd has told last that there is a manager, and 0 if it never has.
func (n *Node) LastSign() int64 { return n.etcd.seenNS }

// Settings are those of the cluster that the node knows, nil if it has not read them. They are never changed.
func (n *Node) Settings() *Settings { return n.etcd.settings }

// Manages reports whether the node is the manager.
func (n *Node) Manages() bool { return n.lead != nil }

// Problem is what keeps the node from taking part, or, while it has authority, what keeps the map from changing; nil if
// nothing does. It ends by itself when its reason does: etcd answers (ErrUnreachable); the cluster is made with its
// settings (ErrNoCluster); the right cluster is named (ErrForeign, ErrProtocol); the other node is gone
// (ErrDuplicateName); the newest state is restored (ErrWentBack); the node may join again (ErrForgotten).
func (n *Node) Problem() error { return n.problem }

// Serves reports whether the node may serve range r with a partition of its own while it has authority: it has it in
// the view that acts, and a newer view does not take it away.
func (n *Node) Serves(p view.PartitionID, r int) bool { return Serves(n.active, n.newest, p, r) }

// Serves is Node.Serves of a node with these views, either of which may be nil.
func Serves(active, newest *Map, p view.PartitionID, r int) bool {
	since, ok := active.holds(p, r)
	if !ok || active == newest {
		return ok
	}
	newer, ok := newest.holds(p, r)
	return ok && newer == since
}

// holds reports whether a partition serves a range under this view, and since which epoch.
func (m *Map) holds(p view.PartitionID, r int) (since view.Epoch, ok bool) {
	if m == nil {
		return 0, false
	}
	for _, e := range m.Chains[r] {
		if e.Partition == p {
			return e.Since, e.State == view.Serving || e.State == view.Leaving
		}
	}
	return 0, false
}

func (n *Node) advance(now int64) {
	invariants.Check(now >= n.now, "cluster: the time goes back")
	if n.startedNS == 0 {
		n.startedNS, n.attentiveNS, n.etcd.steadyNS = now, now, now
	}
	if now-n.now > n.t.gapNS {
		n.attentiveNS = now
	}
	n.now = now
}

// turn does what is due.
func (n *Node) turn(out *Actions) {
	n.tendEtcd(out)
	if n.lead != nil {
		n.manage(out)
	}
	if n.now >= n.reportNS {
		n.report(out)
		n.reportNS = n.now + n.t.reportNS
	}
	out.WakeNS = min(n.now+n.t.tickNS, n.reportNS)
	if n.lead != nil && n.lead.changed && n.lead.nextNS > n.now {
		out.WakeNS = min(out.WakeNS, n.lead.nextNS)
	}
}

// self is the node's identity.
func (n *Node) self() Identity {
	return Identity{Name: n.cfg.Name, Address: n.cfg.Address, Incarnation: n.cfg.Incarnation}
}

// report sends a report to the manager.
func (n *Node) report(out *Actions) {
	if n.term == 0 || n.problem != nil && n.newest == nil {
		return
	}
	n.seq++
	n.sent[n.seq%uint64(len(n.sent))] = sentReport{n.seq, n.now}
	r := &Report{Term: n.term, Seq: n.seq, Echo: n.echo, Cluster: n.cfg.Cluster, Protocol: Protocol, Name: n.cfg.Name,
		Address: n.cfg.Address, Incarnation: n.cfg.Incarnation, Version: n.version}
	if n.newest != nil {
		r.Seen = n.newest.Epoch
		r.Connected = n.connected == r.Seen
	}
	if n.known != n.version {
		r.Full, r.Holdings = true, n.holdings
	}
	if n.lead != nil {
		n.reported(r, out)
		return
	}
	out.Sends = append(out.Sends, Send{To: n.manager.Address, Message: Message{Report: r}})
	if n.unservedNS() >= n.t.unservedNS {
		n.tellOthers(r, out)
	}
}

// follow takes the manager of a newer term.
func (n *Node) follow(term uint64, id Identity) {
	invariants.Check(term > n.term, "cluster: the term goes back")
	n.unserved.follow(n.now, n.grantedNS)
	n.term, n.manager, n.echo, n.known, n.reportNS = term, id, 0, 0, n.now
	n.lead, n.ready = nil, false
}

// answer takes an answer of the manager.
func (n *Node) answer(a *Answer, out *Actions) {
	if a.To != n.cfg.Incarnation || a.Term < n.term || n.etcd.settings == nil {
		return
	}
	switch {
	case a.Term > n.term:
		n.follow(a.Term, a.Manager)
	case a.Manager.Incarnation != n.manager.Incarnation:
		return // a term that was given twice, because etcd has gone back
	}
	if len(a.View) > 0 {
		// What another node has sent is checked like what etcd has. A record that cannot be used is left alone: the
		// node then has no authority, and etcd has the record, too.
		if m, err := DecodeMap(a.View); err == nil && m.Cluster == n.etcd.settings.Cluster {
			n.see(m, out)
		}
	}
	if a.Stamp > n.echo {
		n.echo = a.Stamp
		if n.lead == nil {
			n.stampSeenNS = n.now
		}
	}
	if a.Seq != 0 {
		n.answeredReport(a, out)
	}
	if a.Acts && n.newest != nil && a.Epoch == n.newest.Epoch && n.newest != n.active &&
		n.newest.admits(n.cfg.Incarnation) {
		n.active, out.Changed = n.newest, true
	}
}

// answeredReport takes what concerns the report that is answered.
func (n *Node) answeredReport(a *Answer, out *Actions) {
	sent := n.sent[a.Seq%uint64(len(n.sent))]
	if sent.seq != a.Seq {
		return
	}
	n.known = a.Version
	if a.Seq >= n.readySeq { // an earlier answer may come later
		n.ready, n.readySeq = a.Ready && n.newest != nil && n.newest.Epoch == a.Epoch, a.Seq
	}
	switch a.Refused {
	case OtherCluster:
		n.setProblem(fmt.Errorf("%w: the manager %s has another cluster than this node, %s", ErrForeign,
			a.Manager.Name, n.cfg.Cluster), out)
	case OtherProtocol:
		n.setProblem(fmt.Errorf("%w: that of the manager %s is not %d", ErrProtocol, a.Manager.Name, Protocol), out)
	case NodeForgotten:
		n.setProblem(fmt.Errorf("%w: %s, as the manager %s knows", ErrForgotten, n.cfg.Name, a.Manager.Name), out)
	case NameTaken:
		n.setProblem(fmt.Errorf("%w: %s, as the manager %s knows", ErrDuplicateName, n.cfg.Name, a.Manager.Name), out)
	}
	if a.Granted && n.newest != nil && n.newest.admits(n.cfg.Incarnation) {
		n.untilNS, out.Changed = max(n.untilNS, sent.at+n.t.authorityNS), true
		n.grantedNS = max(n.grantedNS, sent.at)
	}
}

// see takes a view. What it takes from the node is not served from now on, and the next report says so.
func (n *Node) see(m *Map, out *Actions) {
	if n.newest != nil && m.Epoch <= n.newest.Epoch {
		return
	}
	if n.newest == nil || !n.newest.admits(n.cfg.Incarnation) {
		n.unserved.admittedNS = n.now
	}
	n.newest, out.Changed = m, true
	n.ready = false
	if addresses := n.etcd.addresses; len(addresses) > 2*max(len(m.Admitted), len(n.etcd.nodes))+16 {
		keep := map[Incarnation]bool{} // who is registered may be admitted later
		for _, i := range m.Admitted {
			keep[i] = true
		}
		for _, reg := range n.etcd.nodes {
			keep[reg.incarnation] = true
		}
		maps.DeleteFunc(addresses, func(i Incarnation, _ string) bool { return !keep[i] })
	}
	if !m.admits(n.cfg.Incarnation) {
		n.active, n.untilNS = nil, 0
	}
	n.reportNS = n.now
	if l := n.lead; l != nil {
		l.acts, l.ready, l.record, l.changed = false, false, nil, true
	}
}

func (n *Node) setProblem(err error, out *Actions) {
	if (err == nil) == (n.problem == nil) && (err == nil || err.Error() == n.problem.Error()) {
		return
	}
	n.problem, out.Problem = err, true
}
