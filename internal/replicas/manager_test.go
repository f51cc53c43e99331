package replicas_test

import (
	"fmt"
	"slices"
	"time"

	"jbofd/internal/cluster"
	"jbofd/internal/cluster/view"
)

// Alive, Range, Usable and Failing implement view.Reports.
func (g *rig) Alive(id uint16) bool { return g.nodes[id].alive.Load() }

func (g *rig) Range(p view.PartitionID, number int) view.Report {
	for _, r := range g.nodes[p].r.Report().Ranges {
		if r.Range == number {
			return r.Report
		}
	}
	return view.Report{Local: view.Silent}
}

func (g *rig) Usable(view.PartitionID) bool { return true }

func (g *rig) Failing(p view.PartitionID) bool {
	return slices.Contains(g.nodes[p].r.Report().Failing, p)
}

// manage computes views, tells the nodes that are alive, and gives them authority.
func (g *rig) manage() {
	var last *cluster.Map
	for {
		select {
		case <-g.stop:
			return
		case <-time.After(10 * time.Millisecond):
		}
		g.mu.Lock()
		if !g.frozen.Load() {
			g.view, _ = g.view.Next(g)
		}
		if g.restless.Load() {
			g.view = g.nextEpoch()
		}
		m := &cluster.Map{View: g.view}
		newest := m
		if g.ahead.Load() {
			newest = &cluster.Map{View: g.nextEpoch()}
		}
		for _, n := range g.nodes {
			if n.alive.Load() {
				if !g.frozen.Load() {
					if g.restless.Load() {
						n.r.SetState(last, m)
					}
					n.r.SetState(m, newest)
				}
				if g.apart.Load() {
					time.Sleep(5 * time.Millisecond)
				}
				n.until.Store(clock() + int64(time.Minute))
			}
		}
		last = m
		if g.freezeAt != nil && g.freezeAt(g.view) {
			g.frozen.Store(true)
			g.freezeAt = nil
		}
		g.mu.Unlock()
	}
}

// full waits until all ranges have all replicas.
func (g *rig) full(within time.Duration) {
	g.t.Helper()
	for end := time.Now().Add(within); ; time.Sleep(10 * time.Millisecond) {
		g.mu.Lock()
		missing := 0
		for _, c := range g.view.Chains {
			serving := 0
			for _, e := range c {
				if e.State == view.Serving {
					serving++
				}
			}
			if serving < g.view.Replicas || len(c) != serving {
				missing++
			}
		}
		chains := fmt.Sprint(g.view.Chains)
		g.mu.Unlock()
		if missing == 0 {
			return
		}
		if time.Now().After(end) {
			g.t.Fatalf("%d ranges are not full after %v: %s", missing, within, chains)
		}
	}
}
