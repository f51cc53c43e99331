package cluster

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"

	"jbofd/internal/cluster/view"
)

// etcd is what the node knows of etcd, and what it is asking for.
type etcd struct {
	// synced: everything was read, and a watch tells of changes since.
	synced bool
	watch  uint64 // ID of the last watch
	// revision is the newest that was read or watched. What the node has written itself may be newer.
	revision int64
	// settings, manager and view are the records as far as the watch has brought them.
	settings *Settings
	manager  *managerRecord
	mapEpoch view.Epoch
	// lossNS is since when each of the settings' Losses counts: the last time at which the node knew that the settings
	// did not have it; 0: they had it when the process read them first, so that it cannot know since when.
	lossNS map[Loss]int64
	// syncedNS is when synced was true last; 0: never.
	syncedNS int64
	// managerRev, stampRev and viewRev are the revisions of the records, 0: absent. A new revision of one of them is a
	// sign of the manager. seenNS is the time of the last sign (it was written before that); signsNS is the time since
	// which no two signs were timing.takeoverNS or more apart.
	managerRev, stampRev, viewRev int64
	seenNS                        int64
	signsNS                       int64
	nodes                         map[string]*registration
	// addresses are the last known addresses of processes. A node that is cut off from etcd has no registration any
	// more.
	addresses map[Incarnation]string
	// steadyNS is since when etcd has answered without errors.
	steadyNS int64
	// lease is that of the registration, 0: none; renewNS when it is renewed next. takenNS is since when another
	// process has had the node's name.
	lease, renewNS, takenNS int64

	serial  uint64
	flights [purposes]flight
	retryNS int64 // no request but stamps is sent before that
	// asked has the epoch and the term that were known when the outstanding Read was sent.
	asked struct {
		epoch view.Epoch
		term  uint64
	}
}

type registration struct {
	nodeRecord
	revision int64
}

// flight is an outstanding request.
type flight struct {
	tag    uint64
	sentNS int64
	// revision is the newest that was known when the request was sent. The response has no lower one.
	revision int64
	busy     bool
}

// purpose is what a request is for. One of each is under way at a time.
type purpose uint8

const (
	toRead purpose = iota
	toLease
	toRegister
	toRenew
	toStamp
	toTakeOver
	toWriteView
	purposes
)

// ask sends a request, unless one of its purpose is under way.
func (n *Node) ask(p purpose, r Request, out *Actions) bool {
	f := &n.etcd.flights[p]
	if f.busy {
		return false
	}
	n.etcd.serial++
	r.Tag = n.etcd.serial<<8 | uint64(p)
	*f = flight{tag: r.Tag, sentNS: n.now, revision: n.etcd.revision, busy: true}
	out.Requests = append(out.Requests, r)
	return true
}

func (n *Node) busy(p purpose) bool { return n.etcd.flights[p].busy }

// answered takes a response. One to a request that is not under way any more is ignored. After an error the outcome of
// the request is unknown.
func (n *Node) answered(r *Response, out *Actions) {
	p := purpose(r.Tag & 0xFF)
	if p >= purposes || !n.etcd.flights[p].busy || n.etcd.flights[p].tag != r.Tag {
		return
	}
	f := n.etcd.flights[p]
	n.etcd.flights[p].busy = false
	e := &n.etcd
	if r.Err != nil {
		e.steadyNS = n.now
		e.retryNS = n.now + n.t.retryNS
		if p == toTakeOver || p == toWriteView {
			e.synced = false // everything is read again, which shows whether the request has taken effect
		}
		if p == toWriteView && n.lead != nil {
			n.lead.changed = true
		}
		if e.revision == 0 && errors.Is(n.problem, ErrUnreachable) {
			n.setProblem(fmt.Errorf("%w: %w", ErrUnreachable, r.Err), out)
		}
		return
	}
	if p != toRead && p != toLease && p != toRenew && r.Revision < f.revision {
		e.synced, e.retryNS = false, n.now // it has gone back: what it says is not believed
		return
	}
	switch p {
	case toRead:
		n.read(r, out)
	case toLease:
		e.lease, e.renewNS = r.Lease, n.now+n.t.registrationNS/3
	case toRenew:
		e.renewNS = n.now + n.t.registrationNS/3
		if !r.Done {
			e.synced, e.lease = false, 0 // the watch tells of the registration, too, but later
		}
	case toRegister:
		if !r.Done {
			// The key has changed, perhaps by this node itself, or the lease is gone, which its renewal tells. It must
			// not be given up before: the registration may be on it already, and would end with it.
			e.synced, e.renewNS = false, n.now
		}
	case toStamp:
		n.stamped(f, r)
	case toTakeOver:
		n.tookOver(f, r, out)
	case toWriteView:
		n.wroteView(r, out)
	}
}

// read takes all records.
func (n *Node) read(r *Response, out *Actions) {
	e := &n.etcd
	var next content
	if err := n.checkRead(r, &next); err != nil {
		e.synced, e.retryNS = false, n.now+n.t.rereadNS
		n.setProblem(err, out)
		return
	}
	n.setProblem(nil, out)
	e.synced, e.revision = true, r.Revision
	e.nodes = map[string]*registration{}
	for _, kv := range r.Keys {
		n.apply(&kv, out)
	}
	if !next.stamped {
		e.stampRev = 0
	}
	if n.lead != nil {
		n.lead.changed = true
	}
	e.watch++
	out.Watch = &Watch{ID: e.watch, From: r.Revision + 1}
}

// content is what checkRead has found.
type content struct {
	settings *Settings
	term     uint64
	stamped  bool
}

// checkRead decides whether what was read is this cluster's, and not older than what was known when the request was
// sent.
func (n *Node) checkRead(r *Response, next *content) error {
	e := &n.etcd
	var m *Map
	for _, kv := range r.Keys {
		var err error
		switch kv.Key {
		case keyConfig:
			next.settings, err = DecodeSettings(kv.Value)
		case keyView:
			m, err = DecodeMap(kv.Value)
		case keyManager:
			var rec *managerRecord
			if rec, err = decodeManager(kv.Value); err == nil {
				next.term = rec.term
			}
		case keyStamp:
			next.stamped = true
		default:
			if name, ok := strings.CutPrefix(kv.Key, keyNodes); !ok || name == "" || len(name) > view.MaxName {
				err = fmt.Errorf("%w: key %q", ErrForeign, kv.Key)
			}
		}
		if err != nil {
			return err
		}
	}
	switch {
	case next.settings == nil || m == nil:
		return errNoRecords
	case !n.cfg.Cluster.IsZero() && next.settings.Cluster != n.cfg.Cluster:
		return fmt.Errorf("%w: the cluster has UUID %s, the drives of this node belong to %s", ErrForeign,
			next.settings.Cluster, n.cfg.Cluster)
	case m.Cluster != next.settings.Cluster || e.settings != nil && e.settings.Cluster != m.Cluster:
		return fmt.Errorf("%w: the view is of cluster %s", ErrForeign, m.Cluster)
	case n.forgotten(next.settings, m) != nil:
		return n.forgotten(next.settings, m)
	case r.Revision < e.revision:
		return fmt.Errorf("%w: revision %d after %d", ErrWentBack, r.Revision, e.revision)
	case m.Epoch < max(e.asked.epoch, n.cfg.Seen):
		return fmt.Errorf("%w: epoch %d after %d", ErrWentBack, m.Epoch, max(e.asked.epoch, n.cfg.Seen))
	case next.term < e.asked.term:
		return fmt.Errorf("%w: term %d of the manager after %d", ErrWentBack, next.term, e.asked.term)
	case n.newest != nil && m.Epoch == n.newest.Epoch && !bytes.Equal(m.Encode(), n.newest.Encode()):
		return fmt.Errorf("%w: another view of epoch %d", ErrWentBack, m.Epoch)
	}
	return nil
}

// watched takes changes.
func (n *Node) watched(id uint64, events []KeyValue, ended bool, out *Actions) {
	e := &n.etcd
	if id != e.watch || !e.synced {
		return
	}
	known := e.revision // of a transaction with several keys, all have one revision
	for i := range events {
		kv := &events[i]
		if kv.Revision > known && kv.Revision >= e.revision {
			e.revision = kv.Revision
			n.apply(kv, out)
		}
		if !e.synced {
			return
		}
	}
	if ended {
		e.synced, e.steadyNS = false, n.now
	}
}

// apply takes the value of a key.
func (n *Node) apply(kv *KeyValue, out *Actions) {
	e := &n.etcd
	if kv.Deleted && !strings.HasPrefix(kv.Key, keyNodes) {
		e.synced = false // read again: that says what is the matter
		return
	}
	switch kv.Key {
	case keyConfig:
		s, err := DecodeSettings(kv.Value)
		if err != nil || e.settings != nil && s.Cluster != e.settings.Cluster || n.forgotten(s, n.newest) != nil {
			e.synced = false
			return
		}
		lossNS := make(map[Loss]int64, len(s.Losses))
		for _, l := range s.Losses {
			at, known := e.lossNS[l]
			if !known {
				at = e.syncedNS
			}
			lossNS[l] = at
		}
		e.settings, e.lossNS = s, lossNS
	case keyStamp:
		if kv.Revision > e.stampRev {
			e.stampRev = kv.Revision
			n.sign()
		}
	case keyManager:
		m, err := decodeManager(kv.Value)
		if err != nil || e.manager != nil && m.term < e.manager.term {
			e.synced = false
			return
		}
		n.elected(m, out) // before seenNS is set: becomeManager needs the last sign of the manager before
		if kv.Revision > e.managerRev {
			e.manager, e.managerRev = m, kv.Revision
			n.sign()
		}
	case keyView:
		m, err := DecodeMap(kv.Value)
		if err != nil || m.Epoch < e.mapEpoch {
			e.synced = false
			return
		}
		if kv.Revision > e.viewRev {
			e.mapEpoch, e.viewRev = m.Epoch, kv.Revision
			n.sign()
		}
		n.see(m, out)
	default:
		n.applyNode(kv)
	}
	if n.lead != nil {
		n.lead.changed = n.lead.changed || kv.Key != keyStamp
	}
}

// sign notes a sign of the manager: a new revision of its record, its stamp or the view.
func (n *Node) sign() {
	if n.now-n.etcd.seenNS >= n.t.takeoverNS {
		n.etcd.signsNS = n.now
	}
	n.etcd.seenNS = n.now
}

// applyNode handles a change of the registration of a node. One that cannot be decoded counts as absent.
func (n *Node) applyNode(kv *KeyValue) {
	name := strings.TrimPrefix(kv.Key, keyNodes)
	delete(n.etcd.nodes, name)
	if kv.Deleted {
		if name == n.cfg.Name {
			n.etcd.lease = 0 // the lease of the registration has ended
		}
		return
	}
	if rec, err := decodeNode(kv.Value); err == nil {
		n.etcd.nodes[name] = &registration{*rec, kv.Revision}
		n.etcd.addresses[rec.incarnation] = rec.address
	}
}

// elected takes who is the manager.
func (n *Node) elected(m *managerRecord, out *Actions) {
	if m.term <= n.term {
		return
	}
	if m.id.Incarnation == n.cfg.Incarnation {
		// Its answer was lost.
		if n.attempt.term == m.term {
			n.becomeManager(m.term, n.attempt.sentNS, out)
		}
		return
	}
	n.follow(m.term, m.id)
}

// tendEtcd keeps what is known of etcd up to date, and what the node has there.
func (n *Node) tendEtcd(out *Actions) {
	e := &n.etcd
	if e.synced {
		e.syncedNS = n.now
	}
	if n.lead != nil && n.now >= n.lead.stampNS && n.problem == nil {
		n.stamp(out)
	}
	if n.now < e.retryNS {
		return
	}
	if !e.synced {
		e.asked.term = n.term
		if n.newest != nil {
			e.asked.epoch = n.newest.Epoch
		}
		n.ask(toRead, Request{Kind: Read}, out)
		return
	}
	if n.problem != nil {
		// A problem that the manager has told of. What it depends on is read again.
		e.synced, e.retryNS = false, n.now+n.t.rereadNS
		return
	}
	n.register(out)
	n.campaign(out)
}

// register keeps the registration of the node.
func (n *Node) register(out *Actions) {
	e := &n.etcd
	key := keyNodes + n.cfg.Name
	own := e.nodes[n.cfg.Name]
	switch {
	case own != nil && own.incarnation != n.cfg.Incarnation && !n.cfg.Incarnation.follows(own.incarnation):
		// Its lease ends soon if that process has ended.
		if e.takenNS == 0 {
			e.takenNS = n.now
		}
		e.takenNS = max(e.takenNS, e.steadyNS)
		if n.now-e.takenNS > outlast(2*n.t.registrationNS) {
			n.setProblem(fmt.Errorf("%w: %s, at %s", ErrDuplicateName, n.cfg.Name, own.address), out)
		}
		return
	case e.lease == 0:
		n.ask(toLease, Request{Kind: Lease, TTLNS: n.t.registrationNS}, out)
		return
	case n.now >= e.renewNS:
		n.ask(toRenew, Request{Kind: KeepAlive, Lease: e.lease}, out)
	}
	e.takenNS = 0
	if own != nil && own.incarnation == n.cfg.Incarnation {
		return
	}
	rec := nodeRecord{protocol: Protocol, incarnation: n.cfg.Incarnation,
		domain: n.cfg.Domain, address: n.cfg.Address, partitions: n.cfg.Partitions}
	var at int64
	if own != nil {
		at = own.revision
	}
	n.ask(toRegister, Request{Kind: Txn, If: []Compare{{key, at}},
		Then: []Put{{Key: key, Value: rec.encode(), Lease: e.lease}}}, out)
}

// campaign takes over if there is no manager, or it does not stamp, or most nodes do not get its answers (outvoted).
func (n *Node) campaign(out *Actions) {
	e := &n.etcd
	if n.lead != nil || n.busy(toTakeOver) || n.newest == nil || e.mapEpoch != n.newest.Epoch || !n.eligible() ||
		e.nodes[n.cfg.Name] == nil || e.nodes[n.cfg.Name].incarnation != n.cfg.Incarnation {
		return
	}
	blind := false
	if e.manager != nil {
		patience := n.t.takeoverNS
		if n.now-n.grantedNS < n.t.unansweredNS && n.grantedNS != 0 {
			patience = n.t.takeoverLateNS
		}
		if n.now-max(e.seenNS, e.steadyNS, n.attentiveNS) < patience {
			if blind = n.outvoted(); !blind {
				return
			}
		}
	}
	term := n.term + 1
	if n.attempt.term != term { // otherwise the first attempt may have succeeded
		n.attempt.term, n.attempt.sentNS, n.attempt.blind = term, n.now, false
	}
	compare := []Compare{{keyManager, e.managerRev}, {keyView, e.viewRev}}
	if blind { // with the next stamp, which is about to come, it would fail
		n.attempt.blind = true
	} else {
		compare = append(compare, Compare{keyStamp, e.stampRev})
	}
	rec := managerRecord{term: term, id: n.self()}
	n.ask(toTakeOver, Request{Kind: Txn,
		If:   compare,
		Then: []Put{{Key: keyManager, Value: rec.encode()}, {Key: keyStamp, Value: encodeStamp(term, 0)}}}, out)
}

// eligible reports whether the newest view allows the node to be the manager: it admits the process, or an earlier one
// of the node, which has ended. So a manager that relies on the promises of all admitted nodes relies on this one's,
// too. If an operator says that all of them have ended, no promise is relied on.
func (n *Node) eligible() bool {
	if n.newest.admits(n.cfg.Incarnation) || n.newest.admitsEarlier(n.cfg.Incarnation) {
		return true
	}
	return !slices.ContainsFunc(n.newest.Admitted, func(i Incarnation) bool {
		return i != 0 && !slices.Contains(n.etcd.settings.Lost, i)
	})
}

// tookOver handles the outcome of a takeover.
func (n *Node) tookOver(f flight, r *Response, out *Actions) {
	e := &n.etcd
	if !r.Done {
		e.synced, e.retryNS = false, n.now // another node has taken over before
		return
	}
	if n.attempt.term <= n.term {
		return // a newer manager has become known meanwhile, or the watch has told of this takeover before
	}
	n.becomeManager(n.attempt.term, f.sentNS, out)
	e.manager = &managerRecord{term: n.term, id: n.self()}
	e.managerRev, e.stampRev, e.seenNS = r.Revision, r.Revision, n.now
}
