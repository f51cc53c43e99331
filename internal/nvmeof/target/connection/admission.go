package connection

import (
	"errors"
	"fmt"
	"net/netip"
	"sync"

	"jbofd/internal/nvmeof"
	"jbofd/internal/telemetry"
)

// Admission bounds the connections of all transports together. A connection is counted in two stages.
//
//	Enter ──> pending ── Connect ──> established ── Leave
//	             └── Connect to discovery ──> counted by nvmeof.Target as an association
//
// A pending connection has not said who it is, so pending connections have a budget of their own: they cannot use up
// what hosts need that are known. One more than there may be closes the oldest.
type Admission struct {
	limits AdmissionLimits
	tel    *telemetry.Telemetry

	mu sync.Mutex
	// peers are the addresses that have pending connections; pending counts those of all.
	peers   map[netip.Addr]*peer
	pending int
	// established counts connections whose host is known, unnamed those of hosts that the configuration does not name.
	// Invariant: unnamed <= established.
	established, unnamed int
	hosts                map[string]int // established, by host NQN
}

// AdmissionLimits are an Admission's bounds.
type AdmissionLimits struct {
	// Connections bounds established connections, PerHost those of one host NQN.
	Connections, PerHost int
	// Pending bounds connections before their Connect command, PendingPerAddress those of one address.
	Pending, PendingPerAddress int
}

// peer is an address with pending connections.
type peer struct {
	address        netip.Addr
	oldest, newest *Ticket
	n              int
}

// Ticket is one connection's place in an Admission.
type Ticket struct {
	a    *Admission
	shut func(reason string)

	// The rest is guarded by a.mu.
	peer       *peer // nil: it is not pending
	next, prev *Ticket
	// host is set with counted: the connection counts as established.
	host           string
	counted, named bool
}

// NewAdmission returns an Admission without connections.
func NewAdmission(l AdmissionLimits, tel *telemetry.Telemetry) *Admission {
	return &Admission{limits: l, tel: tel, peers: map[netip.Addr]*peer{}, hosts: map[string]int{}}
}

// ErrShuttingDown: the target takes no more connections.
var ErrShuttingDown = errors.New("shutting down")

// PeerOf returns the address that a budget takes a connection to come from: of IPv6 the /64 network, of which one
// machine may have every address.
func PeerOf(a netip.Addr) netip.Addr {
	a = a.Unmap().WithZone("")
	if a.Is6() {
		if p, err := a.Prefix(64); err == nil {
			return p.Addr()
		}
	}
	return a
}

// Enter counts a connection from an address as pending. Leave must be called when the connection has ended. shut
// begins to close it; Enter of another connection may call it, from any goroutine.
func (a *Admission) Enter(from netip.Addr, shut func(reason string)) *Ticket {
	from = PeerOf(from)
	t := &Ticket{a: a, shut: shut}
	a.mu.Lock()
	victim := a.makeRoom(from)
	p := a.peers[from]
	if p == nil {
		p = &peer{address: from}
		a.peers[from] = p
	}
	t.peer, t.prev = p, p.newest
	if p.newest == nil {
		p.oldest = t
	} else {
		p.newest.next = t
	}
	p.newest = t
	p.n++
	a.pending++
	a.mu.Unlock()
	if victim != nil {
		a.tel.ConnectionRefused("pending")
		victim.shut("too many connections without a Connect command: of those of its address, this one was the oldest")
	}
	return t
}

// makeRoom ends a ticket if one more pending connection from an address would be too many. The oldest goes of that
// address, or, if all addresses together have too many, of the one that has most. mu is held.
func (a *Admission) makeRoom(from netip.Addr) *Ticket {
	p := a.peers[from]
	switch {
	case p != nil && p.n >= a.limits.PendingPerAddress:
	case a.pending >= a.limits.Pending:
		p = nil
		for _, o := range a.peers {
			if p == nil || o.n > p.n {
				p = o
			}
		}
	default:
		return nil
	}
	victim := p.oldest
	victim.known()
	return victim
}

// known says that the connection is not pending any more. a.mu is held.
func (t *Ticket) known() {
	p := t.peer
	if p == nil {
		return
	}
	if p.oldest == t {
		p.oldest = t.next
	} else {
		t.prev.next = t.next
	}
	if p.newest == t {
		p.newest = t.prev
	} else {
		t.next.prev = t.prev
	}
	t.peer, t.next, t.prev = nil, nil, nil
	t.a.pending--
	if p.n--; p.n == 0 {
		delete(t.a.peers, p.address)
	}
}

// admit counts a connection as established before its Connect command is executed, or says which limit is reached and
// why. named and nobody are what nvmeof.Target.Named says of the host. refused follows if the command fails, accepted
// if it succeeds.
func (t *Ticket) admit(hostNQN string, named, nobody bool) (label, reason string) {
	a := t.a
	a.mu.Lock()
	defer a.mu.Unlock()
	if t.counted { // a second Connect on the heels of the first
		return "", ""
	}
	if a.hosts[hostNQN] >= a.limits.PerHost {
		return "host_connections", fmt.Sprintf("%d connections of this host, the limit (limits.connections_per_host)",
			a.limits.PerHost)
	}
	if a.established >= a.limits.Connections || !named && a.unnamed >= nvmeof.BudgetOf(a.limits.Connections, false,
		nobody) {
		return "connections", fmt.Sprintf("%d connections, %d of them of hosts without a name in the configuration; "+
			"the limit is %d (limits.connections)",
			a.established, a.unnamed, a.limits.Connections)
	}
	t.host, t.named, t.counted = hostNQN, named, true
	a.hosts[hostNQN]++
	a.established++
	if !named {
		a.unnamed++
	}
	return "", ""
}

// accepted says that the Connect command has succeeded.
func (t *Ticket) accepted() {
	t.a.mu.Lock()
	t.known()
	t.a.mu.Unlock()
}

// refused says that the Connect command has failed. The connection is pending still.
func (t *Ticket) refused() {
	t.a.mu.Lock()
	t.forget()
	t.a.mu.Unlock()
}

// forget ends what admit has counted. a.mu is held.
func (t *Ticket) forget() {
	if !t.counted {
		return
	}
	t.counted = false
	a := t.a
	a.established--
	if !t.named {
		a.unnamed--
	}
	if a.hosts[t.host]--; a.hosts[t.host] == 0 {
		delete(a.hosts, t.host)
	}
}

// Close says that the connection has ended.
func (t *Ticket) Close() {
	t.a.mu.Lock()
	t.known()
	t.forget()
	t.a.mu.Unlock()
}
