package cluster

import (
	"flag"
	"math/rand/v2"
	"testing"

	"jbofd/internal/cluster/view"
	"jbofd/internal/invariants"
	"jbofd/internal/lab"
)

var (
	seedFlag  = flag.Uint64("seed", 0, "seed of the random histories; 0: a new one")
	runsFlag  = flag.Uint64("runs", runs(), "number of random histories")
	traceFlag = flag.Bool("trace", false, "print what happens")
)

// runs is how many histories there are unless -runs says so: most where each invariant is checked.
func runs() uint64 {
	if invariants.Enabled {
		return 200
	}
	return 12
}

// TestRandomHistories disturbs clusters of one to five nodes, and checks that authority excludes each other, that
// epochs grow by one, and that everybody serves in the end.
func TestRandomHistories(t *testing.T) {
	seed := *seedFlag
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("-seed %d", seed)
	changes, takeovers, writes, forgot, handed := 0, 0, 0, 0, 0
	for i := range *runsFlag {
		w := history(t, seed+i)
		if t.Failed() {
			t.Fatalf("repeat with -seed %d -runs 1", seed+i)
		}
		changes, takeovers = changes+w.changes, takeovers+w.takeover
		for _, n := range w.written {
			writes += n
		}
		forgot, handed = forgot+w.forgot, handed+w.handed
	}
	t.Logf("%d views, %d managers, %d writes, %d nodes forgotten, %d ChainHeads changed", changes, takeovers, writes,
		forgot, handed)
	if handed == 0 && *runsFlag > 10 {
		t.Error("no ChainHead has changed")
	}
}

func history(t *testing.T, seed uint64) *world {
	rng := rand.New(rand.NewPCG(seed, 99))
	w := newWorld(t, seed, 1+rng.IntN(5), 1+rng.IntN(3))
	w.traceTo(t)
	defer func() {
		if t.Failed() {
			t.Logf("repeat with -seed %d -runs 1", seed)
		}
	}()
	w.settle(20 * lease)
	w.slow, w.yields = rng.IntN(2) == 0, true
	w.etcd.Late = rng.IntN(2) == 0
	if rng.IntN(4) == 0 {
		for _, n := range w.nodes {
			n.n.t.awayNS = 2 * lease
		}
	}
	if w.hasty = rng.IntN(2) == 0; w.hasty {
		for _, n := range w.nodes {
			n.hurry()
		}
	}
	goBack := rng.IntN(4) == 0
	for range 10 + rng.IntN(20) {
		w.disturb()
		w.run(w.rng.Int64N(2 * lease))
		if goBack && w.rng.IntN(8) == 0 {
			w.goBack()
			goBack = false
		}
	}
	w.heal()
	w.run(5 * lease) // what was under way ends
	w.settle(40 * lease)
	before := w.epoch
	w.run(5 * lease)
	w.settle(lease)
	if w.epoch != before {
		t.Fatalf("epoch %d in peace, then %d", before, w.epoch)
	}
	return w
}

// duration is short, or longer than every lease.
func (w *world) duration() int64 {
	if w.rng.IntN(2) == 0 {
		return w.rng.Int64N(300 * ms)
	}
	return w.rng.Int64N(4 * lease)
}

// disturb does something bad, and ends it some time later.
func (w *world) disturb() {
	n := w.nodes[w.rng.IntN(len(w.nodes))]
	other := w.nodes[w.rng.IntN(len(w.nodes))]
	if w.rng.IntN(3) == 0 { // managers in particular
		for _, m := range w.nodes {
			if m.n.Manages() {
				n = m
			}
		}
	}
	for_ := w.duration()
	switch w.rng.IntN(17) {
	case 0, 1:
		w.trace("node %d dies", n.id)
		n.kill()
		w.sim.After(for_, n.revive)
	case 2, 3:
		if n.proc.Dead() || n.proc.Stopped() {
			return
		}
		life := n.proc
		if n.pause = moment(w.rng.IntN(3)); n.pause == notPaused {
			w.trace("node %d pauses", n.id)
			life.Stop()
		}
		w.sim.After(for_, func() { w.goOn(n, life) })
	case 4, 5:
		if n == other {
			return
		}
		links := [][2]int{{n.id, other.id}, {other.id, n.id}}
		if w.rng.IntN(2) == 0 {
			links = links[:1]
		}
		w.cutFor(for_, links...)
	case 6:
		var links [][2]int
		for _, o := range w.nodes {
			if o != n {
				links = append(links, [2]int{n.id, o.id}, [2]int{o.id, n.id})
			}
		}
		w.cutFor(for_, links...)
		if w.rng.IntN(2) == 0 {
			w.cutFromEtcd(n, for_)
		}
	case 7:
		w.cutFromEtcd(n, for_)
	case 8:
		w.trace("etcd stalls for %d ms", for_/ms)
		w.etcd.Stall(for_)
	case 9:
		w.etcd.Compact()
		if n.watch != nil {
			n.watch.Break()
		}
	case 10:
		w.trace("leases are revoked")
		w.etcd.RevokeAll()
	case 11:
		w.damage(n)
	case 12: // one node has etcd for itself
		var links [][2]int
		for _, o := range w.nodes {
			if o != n {
				links = append(links, [2]int{n.id, o.id}, [2]int{o.id, n.id})
				w.cutFromEtcd(o, for_)
			}
		}
		w.cutFor(for_, links...)
	case 14:
		w.leave(n, for_)
	case 16:
		w.failDrives(n, for_)
	case 15: // what has just left comes back, perhaps while it is being forgotten
		for _, o := range w.nodes {
			o.revive()
		}
	case 13: // a manager that reaches etcd, and few of the nodes
		if m := w.leader(); m != nil {
			w.cutFor(for_, w.linksOf(m, w.rng.IntN(len(w.nodes)), w.rng.IntN(3))...)
		}
	}
}

// linksOf returns the links between a node and so many others: both directions (0), those from it (1) or to it (2).
func (w *world) linksOf(n *node, count, direction int) (links [][2]int) {
	for _, i := range w.rng.Perm(len(w.nodes)) {
		if o := w.nodes[i]; o != n && count > 0 {
			count--
			if direction != 2 {
				links = append(links, [2]int{n.id, o.id})
			}
			if direction != 1 {
				links = append(links, [2]int{o.id, n.id})
			}
		}
	}
	return links
}

// leave drains a node, has it end some time later, and tries to have it forgotten.
func (w *world) leave(n *node, ns int64) {
	if len(w.nodes) == 1 {
		return
	}
	w.trace("node %d leaves", n.id)
	w.drain(n)
	w.sim.After(ns, func() {
		if !n.proc.Dead() && !w.healed {
			n.kill()
		}
	})
	var try func(int)
	try = func(left int) {
		if w.healed {
			return
		}
		done := false
		names := []string{n.name}
		err := w.change(func(r *Records) error { return r.Forget(names) })
		_ = w.change(func(r *Records) error { done, _ = r.Forgot(names); return nil })
		if done && err == nil {
			w.trace("node %d is forgotten", n.id)
			w.forgot++
		} else if left > 0 {
			w.sim.After(lease, func() { try(left - 1) })
		}
	}
	w.sim.After(ns+w.rng.Int64N(8*lease), func() { try(10) })
}

func (n *node) revive() {
	if n.proc.Dead() {
		n.w.trace("node %d is back", n.id)
		n.start()
	}
}

func (w *world) goOn(n *node, life *lab.Process) {
	n.pause = notPaused
	if life.Stopped() && n.proc == life && !life.Dead() {
		w.trace("node %d goes on", n.id)
		life.Continue()
	}
}

func (w *world) cutFor(ns int64, links ...[2]int) {
	w.trace("cut %v", links)
	for _, l := range links {
		w.cut[l] = true
	}
	w.sim.After(ns, func() {
		for _, l := range links {
			delete(w.cut, l)
		}
	})
}

func (w *world) cutFromEtcd(n *node, ns int64) {
	w.trace("node %d is cut off from etcd", n.id)
	n.client.Cut(true)
	w.sim.After(ns, func() { n.client.Cut(false) })
}

// damage loses a range in a store, if another node that serves it is alive.
func (w *world) damage(n *node) {
	a := n.n.Active()
	if a == nil || n.proc.Dead() || n.proc.Stopped() {
		return
	}
	r := w.rng.IntN(ranges)
	for _, e := range a.Chains[r] {
		store := n.store[a.Partitions[e.Partition].ID]
		if store == nil || !store[r].complete || e.State != view.Serving {
			continue
		}
		for _, o := range a.Chains[r] {
			c := w.there(a, o, r)
			if o.Partition != e.Partition && o.State == view.Serving && c != nil && c.complete {
				w.trace("node %d loses range %d", n.id, r)
				store[r].complete, store[r].lost = false, true
				w.losses++
				n.report(n.proc)
				return
			}
		}
	}
}

// goBack sets etcd back to what it is now, some time later, and puts that right in the end. All nodes have seen a newer
// view then: one that has not cannot know (docs/decisions/0014).
func (w *world) goBack() {
	old, epoch := w.etcd.Backup(), w.epoch
	for range 3 {
		w.disturb()
		w.run(w.duration())
	}
	for _, n := range w.nodes {
		if n.seen <= epoch {
			return
		}
	}
	now := w.etcd.Backup()
	w.trace("etcd goes back")
	w.etcd.Restore(old)
	w.wentBack = true
	w.run(w.duration())
	w.trace("etcd is put right")
	w.etcd.Restore(now)
	w.wentBack = false
}

// heal ends all that is bad.
func (w *world) heal() {
	w.trace("heal")
	w.slow, w.hasty, w.etcd.Late, w.healed = false, false, false, true
	clear(w.cut)
	w.etcd.Resume()
	_ = w.change(func(r *Records) error {
		for _, n := range w.nodes {
			if r.forgotten(n.name) != nil && w.rng.IntN(2) == 0 && n.proc.Dead() {
				n.number, n.lives, n.seen = n.number+100, 0, 0
			}
			_ = r.Join(n.name)
		}
		return nil
	})
	for _, n := range w.nodes {
		n.client.Cut(false)
		n.pause = notPaused
		n.n.t = newTiming(lease, defaultAwayNS)
		if n.proc.Dead() {
			n.revive()
		} else if n.proc.Stopped() {
			n.proc.Continue()
		}
		n.setFailing(false)
		// What was lost while others had it, but were given up before the manager knew, is only there.
		for _, p := range n.parts {
			for r := range n.store[p.ID] {
				if c := &n.store[p.ID][r]; c.lost {
					c.lost, c.complete = false, true
				}
			}
		}
		if n.n.Newest() != nil {
			n.report(n.proc)
		}
	}
}
