package replicas

import (
	"time"

	"jbofd/internal/cluster/view"
	"jbofd/internal/kvstore"
	"jbofd/internal/replica"
)

// DefaultDropAfter is much longer than it takes until the manager gives up a lost node: data are not dropped here while
// the members of the range may be lost without the manager having noticed.
const DefaultDropAfter = time.Minute

// drops frees the space of ranges that were given to other partitions.
type drops struct {
	*replica.Drops
	acts replica.DropActions
	// seen: there is something new since the last Turn. authority is what that was told.
	seen, authority bool
}

// busy reports whether the replica of a range must wait.
func (d *drops) busy(number int) bool { return d.Drops != nil && d.Busy(number) }

// beginDrops begins with the first view.
func (g *Replicas) beginDrops() {
	d := &g.drops
	d.Drops = replica.NewDrops(replica.DropsConfig{Ranges: len(g.active.Chains), Bits: rangeBits(g.active),
		AfterNS: int64(g.cfg.DropAfter)})
	if g.cfg.Store.Dropping(0, 1<<64-1, false) { // of an earlier process
		for number := range g.active.Chains {
			if first, last := g.active.Range(number); g.cfg.Store.Dropping(first, last, false) {
				d.Resume(number)
			}
		}
	}
}

// seeDrop tells what the views say of a range.
func (g *Replicas) seeDrop(number int) {
	s := replica.Standing{Version: g.active.ChainEpochs[number]}
	s.Full = g.joined && isFull(g.active.Chains[number], g.active.Replicas)
	for _, e := range g.active.Chains[number] {
		s.Member = s.Member || g.joined && e.Partition == g.self
	}
	g.drops.See(g.clockNS, number, s)
	g.drops.seen = true
}

// isFull reports whether a chain has all members that it is to have, and all of them serve.
func isFull(c view.Chain, replicas int) bool {
	for _, e := range c {
		if e.State != view.Serving {
			return false
		}
	}
	return len(c) >= max(replicas, 1)
}

// turnDrops does what is due, and returns when it wants the next turn. It reports whether replicas were let go on.
//
// hot: 0 allocs
func (g *Replicas) turnDrops() (freed bool, wakeNS int64) {
	d := &g.drops
	if d.Drops == nil || g.closed {
		return false, 0
	}
	// A newer view that does not act yet may take members away: nothing is asked for meanwhile.
	authority := g.untilNS > g.clockNS && g.newest != nil && g.newest.Epoch == g.active.Epoch
	if !d.seen && authority == d.authority && (d.acts.WakeNS == 0 || g.clockNS < d.acts.WakeNS) {
		return false, d.acts.WakeNS
	}
	d.seen, d.authority = false, authority
	for again := true; again; {
		again = false
		d.Turn(g.clockNS, authority, &d.acts)
		if d.acts.Asks {
			d.acts.Asks = false
			if m := g.ranges[d.acts.Number]; m != nil && !m.r.Quiet() {
				d.Postpone(g.clockNS)
				again = true
			} else {
				g.store(nil, &d.acts.Request)
			}
		}
		for _, l := range d.acts.Looks {
			d.Looked(g.clockNS, l.Number, g.cfg.Store.Dropping(l.First, l.Last, l.Hurry), &d.acts)
			again = again || !d.Busy(l.Number)
		}
		d.acts.Looks = d.acts.Looks[:0]
		for _, number := range d.acts.Free {
			if m := g.ranges[number]; m != nil && m.held {
				g.adopt(m, g.placeIn(g.active.Chains[number]))
			}
			freed = true
		}
		d.acts.Free = d.acts.Free[:0]
	}
	return freed, d.acts.WakeNS
}

// dropAnswered takes the store's answer to a request of drops.
func (g *Replicas) dropAnswered(p *kvstore.Reply) {
	g.drops.seen = true
	if n := g.drops.Answered(g.clockNS, p); n.Ranges > 0 {
		g.cfg.Log.Info("dropped what the partition had of a range that is others' now", "partition",
			g.cfg.ID.String(), "range", g.drops.acts.Number, "objects", n.Objects, "bytes", n.Bytes)
	}
}

// Dropped returns what was dropped of ranges that are others' now, and how many there are of which something may be
// left.
func (g *Replicas) Dropped() (s replica.DropStats) {
	g.driver.Lock()
	defer g.driver.Unlock()
	if g.drops.Drops != nil {
		s = g.drops.Stats()
	}
	return s
}
