package nvmeof

import (
	"fmt"
	"net/netip"
)

// namedShare is the part of every limit that is kept for hosts that the configuration names: one in namedShare. A peer
// can invent any number of hosts that a subsystem with AllowAnyHost accepts, but they cannot fill the target.
const namedShare = 4

// BudgetOf is what hosts may use of a limit: all of it if the configuration names them or names nobody, else all but
// the part that is kept for those that it names.
func BudgetOf(limit int, named, nobodyNamed bool) int {
	if named || nobodyNamed {
		return limit
	}
	return limit - limit/namedShare
}

// budgets count the associations with subsystems other than discovery.
type budgets struct {
	// named are the hosts that the configuration names: those that a subsystem or a namespace admits by their NQN, and
	// State.Hosts.
	named map[string]struct{}
	// hosts are those that have controllers.
	hosts map[string]hostBudget
	// ctrls counts controllers, unnamedCtrls and unnamedHosts those of hosts that were not named when they connected.
	// Invariant: unnamedCtrls <= ctrls, unnamedHosts <= len(hosts).
	ctrls, unnamedCtrls, unnamedHosts int
}

// hostBudget is what one host has.
type hostBudget struct {
	ctrls int
	named bool // when its first controller came
}

func newBudgets() budgets {
	return budgets{named: map[string]struct{}{}, hosts: map[string]hostBudget{}}
}

// setNamed finds the hosts that a configuration names.
func (b *budgets) setNamed(s *State) {
	clear(b.named)
	add := func(hosts []string) {
		for _, h := range hosts {
			b.named[h] = struct{}{}
		}
	}
	add(s.Hosts)
	for i := range s.Subsystems {
		add(s.Subsystems[i].Hosts)
		for _, n := range s.Subsystems[i].Nodes {
			b.named[n.NQN] = struct{}{}
		}
		for _, ns := range s.Subsystems[i].Namespaces {
			add(ns.Hosts)
		}
	}
}

// Named reports whether the configuration names a host, and whether it names nobody.
func (t *Target) Named(hostNQN string) (named, nobody bool) {
	_, named = t.budgets.named[hostNQN]
	return named, len(t.budgets.named) == 0
}

// admit counts a new controller, or says which limit is reached and why.
func (b *budgets) admit(c *Controller, cfg *Config) (label, reason string) {
	_, c.named = b.named[c.HostNQN]
	nobody := len(b.named) == 0
	over := func(all, unnamed, limit int) bool {
		return all >= limit || !c.named && unnamed >= BudgetOf(limit, false, nobody)
	}
	if over(b.ctrls, b.unnamedCtrls, cfg.MaxControllers) {
		return "controllers", fmt.Sprintf("%d controllers exist, %d of them of hosts without a name in the "+
			"configuration; the limit is %d", b.ctrls, b.unnamedCtrls, cfg.MaxControllers)
	}
	h, known := b.hosts[c.HostNQN]
	if !known && over(len(b.hosts), b.unnamedHosts, cfg.MaxHosts) {
		return "hosts", fmt.Sprintf("%d hosts are connected, %d of them without a name in the configuration; the "+
			"limit is %d", len(b.hosts), b.unnamedHosts, cfg.MaxHosts)
	}
	if !known {
		h.named = c.named
		if !h.named {
			b.unnamedHosts++
		}
	}
	h.ctrls++
	b.hosts[c.HostNQN] = h
	b.ctrls++
	if !c.named {
		b.unnamedCtrls++
	}
	return "", ""
}

// release ends what enter has counted.
func (b *budgets) release(c *Controller) {
	b.ctrls--
	if !c.named {
		b.unnamedCtrls--
	}
	h := b.hosts[c.HostNQN]
	if h.ctrls--; h.ctrls > 0 {
		b.hosts[c.HostNQN] = h
		return
	}
	delete(b.hosts, c.HostNQN)
	if !h.named {
		b.unnamedHosts--
	}
}

// makeRoomInDiscovery ends an association if one more of peer would be too many. Anybody may use discovery, so no
// one is refused for what others have: if an address has too many associations, its idlest goes; if all addresses
// together have, the idlest of those that have most.
func (t *Target) makeRoomInDiscovery(peer netip.Addr) {
	ctrls := t.discovery.ctrls
	have := map[netip.Addr]int{}
	most := 0
	for _, c := range ctrls {
		have[c.peer]++
		most = max(most, have[c.peer])
	}
	var candidate func(c *Controller) bool
	switch {
	case have[peer] >= t.cfg.MaxDiscoveryPerPeer:
		candidate = func(c *Controller) bool { return c.peer == peer }
	case len(ctrls) >= t.cfg.MaxDiscovery:
		candidate = func(c *Controller) bool { return have[c.peer] == most }
	default:
		return
	}
	var idlest *Controller
	for _, c := range ctrls {
		if candidate(c) && (idlest == nil || c.seenNS < idlest.seenNS) {
			idlest = c
		}
	}
	t.drop(idlest, "too many discovery associations: of those of its address, this one was silent longest")
}
