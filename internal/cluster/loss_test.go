package cluster

import (
	"slices"
	"testing"
)

// TestAnAcceptedLossExpires: nobody could take a range when its data were given up. A node that comes back long after
// that is not given it, unless the command is repeated.
func TestAnAcceptedLossExpires(t *testing.T) {
	for name, c := range map[string]struct {
		after  int64
		repeat bool
		given  bool
		ends   bool // the manager ends, and its next process does not know since when the data are given up
		other  bool // just before the node is back, another range is given up
		cut    bool // the command comes just after etcd was cut off from the manager, which hears of it when it is back
	}{
		"soon":                            {after: acceptedNS / 5, given: true},
		"too late":                        {after: acceptedNS * 11 / 10},
		"too late, but again":             {after: acceptedNS * 11 / 10, repeat: true, given: true},
		"a new manager":                   {after: acceptedNS / 20, ends: true},
		"too late, another loss is given": {after: acceptedNS * 11 / 10, other: true},
		"heard of when it is too late":    {after: acceptedNS * 11 / 10, cut: true},
	} {
		t.Run(name, func(t *testing.T) {
			w := healthyWorld(t, 3, 1)
			manager := w.leader()
			w.drain(manager)
			w.until("the manager has no ranges", func() bool { return w.empty(manager) })
			var others []*node
			for _, n := range w.nodes {
				if n != manager {
					n.kill()
					others = append(others, n)
				}
			}
			now := func() *Map { return w.views[w.epoch] }
			wait := func(what string, ns int64, is func() bool) bool {
				for end := w.sim.Now() + ns; w.sim.Now() < end; {
					if w.sim.Run(lease/4, func() bool { return false }); is != nil && is() {
						return true
					}
				}
				if is != nil && what != "" {
					t.Fatalf("not yet: %s", what)
				}
				return false
			}
			wait("all is halted", 20*lease, func() bool {
				for _, c := range now().Chains {
					if !c.Halted() {
						return false
					}
				}
				return manager.n.Manages()
			})
			// What others[0] has is given up, and others[1] comes back.
			var lost []int
			for r, c := range now().Chains {
				if others[0].store[now().Partitions[c[0].Partition].ID] != nil {
					lost = append(lost, r)
				}
			}
			versions := map[int]uint32{}
			accept := func() {
				_ = w.change(func(r *Records) error {
					for _, n := range lost {
						w.written[n] = 0
						versions[n] = r.Map.ChainEpochs[n]
						r.Settings.AcceptLoss(uint32(n), r.Map.ChainEpochs[n])
					}
					return nil
				})
			}
			if c.cut {
				w.cutFromEtcd(manager, c.after)
				wait("", 5*lease, nil)
			}
			accept()
			if wait("", c.after, nil); c.ends {
				manager.kill()
				manager.revive()
				wait("the manager is back", 20*lease, func() bool { return manager.n.Manages() && manager.authority() })
			}
			// Another change of the settings does not make it count again.
			_ = w.change(func(r *Records) error { r.Settings.ValueBytes++; return nil })
			if c.other {
				_ = w.change(func(r *Records) error {
					for n, c := range r.Map.Chains {
						if !slices.Contains(lost, n) && c.Halted() {
							w.written[n] = 0
							r.Settings.AcceptLoss(uint32(n), r.Map.ChainEpochs[n])
							break
						}
					}
					return nil
				})
			}
			others[1].revive()
			// served counts the ranges that are served, other those whose chains have changed otherwise, to which the
			// command says nothing any more.
			served := func() (n, other int) {
				for _, r := range lost {
					switch {
					case !now().Chains[r].Halted():
						n++
					case now().ChainEpochs[r] != versions[r]:
						other++
					}
				}
				return n, other
			}
			wait("others[1] serves what it had", 20*lease, func() bool {
				return now().Admitted[w.indexOf(others[1])] != 0
			})
			wait("", 5*lease, nil)
			if c.repeat {
				if n, _ := served(); n > 0 {
					t.Fatal("they were given before the command was repeated")
				}
				accept()
				wait("", 5*lease, nil)
			}
			if n, other := served(); (n+other < len(lost) || c.repeat && other > 0) && c.given || n > 0 && !c.given ||
				len(lost) == 0 {
				t.Errorf("%d of %d ranges that were given up are served, %d have changed", n, len(lost), other)
			}
		})
	}
}
