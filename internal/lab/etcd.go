package lab

import (
	"errors"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
)

// Fault model of Etcd:
//
//   - A request takes effect at one instant between its sending and its response, or never. It is linearizable: its
//     response tells the state of that instant. Requests and responses take any time and overtake each other. After a
//     deadline the client is told that the outcome is unknown; the request may still take effect later.
//   - A client is cut off: its requests and their responses are lost, and its watch tells nothing until it ends.
//   - All of etcd is away, or stalls, as behind a slow disk: requests wait, and take effect when it goes on. Leases
//     that ran out meanwhile are revoked, also those whose renewal was waiting.
//   - A watch tells of changes in their order, some time later; it ends now and then, and a new one repeats what was
//     told before. Old changes are compacted: a watch from before ends at once.
//   - The state is set back to that of a backup, revision included.
//
// A response is never wrong, and a revision of one key is never told before an earlier one by the same watch.

// ErrEtcdTimeout tells a client that the outcome of its request is unknown.
var ErrEtcdTimeout = errors.New("etcd: deadline exceeded")

// EtcdConfig is how fast an Etcd is.
type EtcdConfig struct {
	MinDelayNS, MaxDelayNS int64 // of a message to it or from it
	TimeoutNS              int64 // after which a client gives up a request
}

// Etcd is a model of etcd: keys with revisions, transactions, leases, and watches.
type Etcd struct {
	sim *Sim
	rng *rand.Rand
	cfg EtcdConfig

	revision  int64
	compacted int64 // changes up to this revision are gone
	keys      map[string]EtcdKey
	history   []EtcdKey
	leases    map[int64]*etcdLease
	nextLease int64
	watches   []*EtcdWatch
	// stalledUntil: nothing takes effect before that.
	stalledUntil int64
	// restored counts the calls of Restore.
	restored int
	// Late: now and then a request, or what a watch tells, comes seconds late.
	Late bool
	// Changed, if set, is told of every change at its instant.
	Changed func(EtcdKey)
}

// EtcdKey is a key, or a change of it.
type EtcdKey struct {
	Key      string
	Value    []byte
	Revision int64
	Lease    int64
	Deleted  bool
}

type etcdLease struct{ ttlNS, endNS int64 }

// EtcdRequest is a read of all keys (no Then), a transaction, a new lease (TTLNS), or the renewal of one (Renew).
type EtcdRequest struct {
	If    []EtcdKey // the Revision of each key, 0: absent
	Then  []EtcdKey
	Txn   bool
	TTLNS int64
	Renew int64
}

// EtcdResponse is the outcome of an EtcdRequest.
type EtcdResponse struct {
	Err      error
	Revision int64
	Done     bool
	Keys     []EtcdKey
	Lease    int64
}

// NewEtcd returns an etcd without keys.
func NewEtcd(sim *Sim, cfg EtcdConfig) *Etcd {
	return &Etcd{sim: sim, rng: sim.Rand("etcd"), cfg: cfg, revision: 1, keys: map[string]EtcdKey{},
		leases: map[int64]*etcdLease{}}
}

func (e *Etcd) delay() int64 {
	return e.cfg.MinDelayNS + e.rng.Int64N(max(e.cfg.MaxDelayNS-e.cfg.MinDelayNS, 1))
}

// late is by how much something is late.
func (e *Etcd) late() int64 {
	if !e.Late || e.rng.IntN(30) > 0 {
		return 0
	}
	return e.rng.Int64N(2 * e.cfg.TimeoutNS)
}

// EtcdClient is a connection to an Etcd.
type EtcdClient struct {
	etcd *Etcd
	cut  bool
	slow int64
}

// NewClient returns a connection.
func (e *Etcd) NewClient() *EtcdClient { return &EtcdClient{etcd: e} }

// Cut cuts the client off, or ends that.
func (c *EtcdClient) Cut(cut bool) { c.cut = cut }

// Slow makes each message to this client or from it take so much longer, as if its server of etcd was slow.
func (c *EtcdClient) Slow(ns int64) { c.slow = ns }

// IsCut reports whether the client is cut off.
func (c *EtcdClient) IsCut() bool { return c.cut }

// Do carries out a request and calls done once.
func (c *EtcdClient) Do(r EtcdRequest, done func(EtcdResponse)) {
	e := c.etcd
	over := false
	finish := func(resp EtcdResponse) {
		if !over {
			over = true
			done(resp)
		}
	}
	e.sim.After(e.cfg.TimeoutNS, func() { finish(EtcdResponse{Err: ErrEtcdTimeout}) })
	if c.cut {
		return
	}
	restored := e.restored
	e.sim.After(e.delay()+e.late()+c.slow, func() {
		if e.restored == restored {
			e.effect(c, r, finish)
		}
	})
}

// effect lets a request take effect, now or when etcd goes on.
func (e *Etcd) effect(c *EtcdClient, r EtcdRequest, done func(EtcdResponse)) {
	if wait := e.stalledUntil - e.sim.Now(); wait > 0 {
		// It looks again soon, because Resume may end the stall.
		restored := e.restored
		e.sim.After(min(wait, 2*e.cfg.MaxDelayNS)+e.rng.Int64N(e.cfg.MaxDelayNS), func() {
			if e.restored == restored {
				e.effect(c, r, done)
			}
		})
		return
	}
	resp := e.apply(r)
	if !c.cut {
		e.sim.After(e.delay()+c.slow, func() {
			if !c.cut {
				done(resp)
			}
		})
	}
}

// Apply carries out a request at once.
func (e *Etcd) Apply(r EtcdRequest) EtcdResponse { return e.apply(r) }

func (e *Etcd) apply(r EtcdRequest) EtcdResponse {
	switch {
	case r.TTLNS > 0:
		e.nextLease++
		e.leases[e.nextLease] = &etcdLease{r.TTLNS, e.sim.Now() + r.TTLNS}
		e.expireLater(e.nextLease)
		return EtcdResponse{Revision: e.revision, Lease: e.nextLease, Done: true}
	case r.Renew > 0:
		l := e.leases[r.Renew]
		if l != nil {
			l.endNS = e.sim.Now() + l.ttlNS
		}
		return EtcdResponse{Revision: e.revision, Done: l != nil}
	case !r.Txn:
		resp := EtcdResponse{Revision: e.revision, Done: true}
		for _, k := range slices.Sorted(maps.Keys(e.keys)) {
			resp.Keys = append(resp.Keys, e.keys[k])
		}
		return resp
	}
	for _, k := range r.If {
		if e.keys[k.Key].Revision != k.Revision {
			return EtcdResponse{Revision: e.revision}
		}
	}
	for _, k := range r.Then {
		if k.Lease != 0 && e.leases[k.Lease] == nil {
			return EtcdResponse{Revision: e.revision}
		}
	}
	e.write(r.Then)
	return EtcdResponse{Revision: e.revision, Done: true}
}

// write makes changes of one revision.
func (e *Etcd) write(changes []EtcdKey) {
	e.revision++
	for _, k := range changes {
		k.Revision = e.revision
		if k.Deleted {
			delete(e.keys, k.Key)
		} else {
			k.Value = slices.Clone(k.Value)
			e.keys[k.Key] = k
		}
		e.history = append(e.history, k)
		if e.Changed != nil {
			e.Changed(k)
		}
	}
	for _, w := range e.watches {
		w.poke()
	}
}

func (e *Etcd) expireLater(id int64) {
	l := e.leases[id]
	e.sim.After(max(l.endNS-e.sim.Now(), 1), func() {
		switch {
		case e.leases[id] != l:
		case e.sim.Now() < l.endNS:
			e.expireLater(id)
		case e.sim.Now() < e.stalledUntil:
			e.sim.After(e.stalledUntil-e.sim.Now()+e.rng.Int64N(2*e.cfg.MaxDelayNS), func() {
				if e.leases[id] == l {
					e.Revoke(id)
				}
			})
		default:
			e.Revoke(id)
		}
	})
}

// Revoke ends a lease and removes its keys.
func (e *Etcd) Revoke(id int64) {
	delete(e.leases, id)
	for _, k := range slices.Sorted(maps.Keys(e.keys)) {
		if e.keys[k].Lease == id {
			e.write([]EtcdKey{{Key: k, Deleted: true}})
		}
	}
}

// RevokeAll ends all leases.
func (e *Etcd) RevokeAll() {
	for _, id := range slices.Sorted(maps.Keys(e.leases)) {
		e.Revoke(id)
	}
}

// Stall lets nothing take effect for so long.
func (e *Etcd) Stall(ns int64) { e.stalledUntil = max(e.stalledUntil, e.sim.Now()+ns) }

// Stalled reports whether nothing takes effect now.
func (e *Etcd) Stalled() bool { return e.sim.Now() < e.stalledUntil }

// Resume ends a stall.
func (e *Etcd) Resume() { e.stalledUntil = 0 }

// Compact removes all old changes, which ends the watches that have not told of them.
func (e *Etcd) Compact() { e.compacted, e.history = e.revision, nil }

// Revision is that of the last change.
func (e *Etcd) Revision() int64 { return e.revision }

// Key returns a key; its Revision is 0 if there is none.
func (e *Etcd) Key(key string) EtcdKey { return e.keys[key] }

// EtcdBackup is a state to go back to.
type EtcdBackup struct {
	revision int64
	keys     map[string]EtcdKey
}

// Backup returns the present state.
func (e *Etcd) Backup() EtcdBackup { return EtcdBackup{e.revision, maps.Clone(e.keys)} }

// Restore goes back to a state. All watches end, and all leases, and all requests that have not taken effect.
func (e *Etcd) Restore(b EtcdBackup) {
	e.restored++
	e.revision, e.compacted, e.history, e.keys = b.revision, b.revision, nil, maps.Clone(b.keys)
	for _, w := range slices.Clone(e.watches) {
		w.finish()
	}
	e.RevokeAll()
	for k, v := range e.keys {
		if v.Lease != 0 {
			delete(e.keys, k)
		}
	}
}

// EtcdWatch tells of changes.
type EtcdWatch struct {
	c      *EtcdClient
	next   int64 // revision to tell of
	events func(changes []EtcdKey, ended bool)
	poked  bool
	over   bool
}

// Watch tells of all changes from a revision on, until it has ended, which it tells as well.
func (c *EtcdClient) Watch(from int64, events func(changes []EtcdKey, ended bool)) *EtcdWatch {
	w := &EtcdWatch{c: c, next: from, events: events}
	c.etcd.watches = append(c.etcd.watches, w)
	w.poke()
	return w
}

// Close ends a watch, which tells nothing any more.
func (w *EtcdWatch) Close() {
	w.over = true
	e := w.c.etcd
	e.watches = slices.DeleteFunc(e.watches, func(o *EtcdWatch) bool { return o == w })
}

// Break ends a watch as a lost connection does.
func (w *EtcdWatch) Break() { w.finish() }

// finish ends the watch and tells that.
func (w *EtcdWatch) finish() {
	if w.over {
		return
	}
	w.Close()
	w.c.etcd.sim.After(w.c.etcd.delay(), func() { w.events(nil, true) })
}

// poke tells of what is new, some time later. A client that is cut off learns of the end of its watch after a deadline.
func (w *EtcdWatch) poke() {
	if w.poked || w.over {
		return
	}
	w.poked = true
	w.c.etcd.sim.After(w.c.etcd.delay()+w.c.etcd.late()+w.c.slow, w.tell)
}

func (w *EtcdWatch) tell() {
	w.poked = false
	e := w.c.etcd
	switch {
	case w.over:
		return
	case w.c.cut:
		e.sim.After(e.cfg.TimeoutNS, w.finish)
		return
	case w.next <= e.compacted:
		w.finish()
		return
	}
	var changes []EtcdKey
	// Now and then changes are told again, as far back as there are any.
	if e.rng.IntN(8) == 0 {
		w.next = max(w.next-2, e.compacted+1)
	}
	for _, k := range e.history {
		if k.Revision >= w.next && k.Revision <= e.revision {
			changes = append(changes, k)
		}
	}
	w.next = e.revision + 1
	if len(changes) > 0 {
		w.events(changes, false)
	}
}

// Names returns the keys that begin with a prefix.
func (e *Etcd) Names(prefix string) (names []string) {
	for _, k := range slices.Sorted(maps.Keys(e.keys)) {
		if strings.HasPrefix(k, prefix) {
			names = append(names, k)
		}
	}
	return names
}
