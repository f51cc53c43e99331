package target

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"

	"jbofd/internal/bufpool"
	"jbofd/internal/nvmeof"
	"jbofd/internal/pipeline"
	"jbofd/internal/tenant"
)

// Tenant is the tenant to which a connection's I/O is charged: the configured tenant that its host belongs to, or the
// host itself.
type Tenant struct {
	// Name is empty for discovery, which has no tenant.
	Name string
	// Number identifies the tenant in pipelines.
	Number tenant.ID
	// Account is charged for buffers. All I/O queues of a tenant share one account. The admin queues of a host have an
	// account of their own, so that admin commands do not wait when I/O has used up the tenant's share.
	Account *bufpool.Account
	// Windows counts the tenant's controllers among which credits are divided.
	Windows *Windows
}

// TenantConfig is a configured tenant.
type TenantConfig struct {
	Name string
	// Hosts are the NQNs of the hosts that belong to it; each to one tenant at most.
	Hosts []string
	// Settings hold at every drive.
	Settings pipeline.Settings
}

// TenantInfo describes a tenant.
type TenantInfo struct {
	Name   string
	Number tenant.ID
	// Configured: it is in the configuration; otherwise it is a connected host.
	Configured bool
	Settings   pipeline.Settings
	// Connections are how many its hosts have.
	Connections int
}

// tenants maps connections to tenants. Drives know a configured tenant while it is configured, and a host that is a
// tenant of its own while the host is connected.
type tenants struct {
	// mu guards the fields below. It is held while drives and connections are told of a change, so that all of them
	// hear of changes in the same order. Service.mu may be taken with mu held, since drives do that in their turns, but
	// not the other way round.
	mu         sync.Mutex
	configured map[string]*tenantState
	// member maps a host NQN to the host's configured tenant, alone a connected host without one to its own tenant.
	member, alone map[string]*tenantState
	open          map[nvmeof.ConnID]*openConn
	// last is the highest number in use so far. free are numbers that no tenant has, leaving those of former tenants
	// of which commands may still be under way.
	last          tenant.ID
	free, leaving []tenant.ID
	// holders counts the open connections that have been charged to a number, also to a former one: partitions and
	// drives may have commands from that time.
	holders map[tenant.ID]int
}

// tenantState is a tenant that the drives know.
type tenantState struct {
	TenantInfo
	account string
	windows Windows
}

// openConn is a connection and the tenant to which it is charged; tenant is nil for a connection to discovery.
type openConn struct {
	conn    Conn
	host    string
	from    string // the source of its buffers, unless they are a configured tenant's
	admin   bool
	tenant  *tenantState
	account *bufpool.Account
	// numbers are those of all tenants that the connection has been charged to.
	numbers []tenant.ID
}

// Background is the number of the tenant that compaction, checkpoints and recovery of key-value stores
// belong to, at each drive. 0 is the daemon's own.
const Background tenant.ID = 1

func newTenants() tenants {
	return tenants{last: Background, configured: map[string]*tenantState{}, member: map[string]*tenantState{},
		alone: map[string]*tenantState{}, open: map[nvmeof.ConnID]*openConn{}, holders: map[tenant.ID]int{}}
}

// announceTenant tells every drive the tenant's settings.
func (s *Service) announceTenant(t *tenantState) {
	for _, o := range s.SSDs() {
		if o != nil {
			o.SetTenant(t.Number, t.Settings)
		}
	}
}

// forgetOnDrives asks every drive to forget a tenant's number, and reports whether all have: a drive that still has I/O
// of the tenant forgets it later.
func (s *Service) forgetOnDrives(n tenant.ID) bool {
	all := true
	for _, o := range s.SSDs() {
		if o != nil && !o.RemoveTenant(n) {
			all = false
		}
	}
	return all
}

// newTenant gives t a number, announces it to the drives, and returns t. tenants.mu is held.
func (s *Service) newTenant(t *tenantState) *tenantState {
	ts := &s.tenants
	s.freeNumbers()
	if n := len(ts.free); n > 0 {
		t.Number, ts.free = ts.free[n-1], ts.free[:n-1]
	} else {
		ts.last++
		t.Number = ts.last
	}
	s.announceTenant(t)
	return t
}

// dropTenant makes the drives forget a tenant. tenants.mu is held.
func (s *Service) dropTenant(t *tenantState) {
	s.forgetOnDrives(t.Number)
	s.tenants.leaving = append(s.tenants.leaving, t.Number)
	s.freeNumbers()
}

// freeNumbers frees the numbers of former tenants to which nothing is charged any more: no drive has I/O of them, and
// the connections are closed whose commands may wait for a partition. tenants.mu is held.
func (s *Service) freeNumbers() {
	ts := &s.tenants
	ts.leaving = slices.DeleteFunc(ts.leaving, func(n tenant.ID) bool {
		gone := ts.holders[n] == 0 && s.forgetOnDrives(n)
		if gone {
			ts.free = append(ts.free, n)
		}
		return gone
	})
}

// Anonymous is the name of the tenant that hosts belong to which connect with an empty host NQN.
const Anonymous = "anonymous"

// hostName is the name of a host that is a tenant of its own. No configured tenant has such a name, so that a host
// cannot choose an NQN that makes its I/O count as a tenant's.
func hostName(hostNQN string) string {
	switch {
	case hostNQN == "":
		return Anonymous
	case !strings.HasPrefix(hostNQN, "nqn."):
		return "host:" + hostNQN
	}
	return hostNQN
}

// tenantOf returns the tenant that a host belongs to. A host in no configured tenant gets a tenant of its own.
// tenants.mu is held.
func (s *Service) tenantOf(host string) *tenantState {
	if t := s.tenants.member[host]; t != nil {
		return t
	}
	t := s.tenants.alone[host]
	if t == nil {
		t = s.newTenant(&tenantState{TenantInfo: TenantInfo{Name: hostName(host),
			Settings: pipeline.Settings{Weight: 1}}, account: "host " + host})
		s.tenants.alone[host] = t
	}
	return t
}

// assign charges a connection to t from now on, and tells it. I/O in flight and the buffers that the connection holds
// stay charged to the former tenant, which is dropped if it was a host's own and this was its last connection.
// tenants.mu is held.
func (s *Service) assign(c *openConn, t *tenantState) {
	before, account := c.tenant, c.account
	c.tenant = t
	t.Connections++
	if !slices.Contains(c.numbers, t.Number) {
		c.numbers = append(c.numbers, t.Number)
		s.tenants.holders[t.Number]++
	}
	name, from := t.account, ""
	if !t.Configured {
		from = c.from
	}
	if c.admin {
		name, from = "admin of "+c.host, c.from
	}
	c.account = s.cfg.Pool.AccountFrom(name, from)
	c.conn.SetTenant(Tenant{Name: t.Name, Number: t.Number, Account: c.account, Windows: &t.windows})
	if before != nil {
		account.Close()
		s.abandonTenant(before, c.host)
	}
}

// abandonTenant uncounts a connection of host from t, and drops t if it was the host's own and has no connection left.
// tenants.mu is held.
func (s *Service) abandonTenant(t *tenantState, host string) {
	if t.Connections--; t.Connections == 0 && !t.Configured {
		delete(s.tenants.alone, host)
		s.dropTenant(t)
	}
}

// OpenTenant finds the tenant of a host's new connection and tells the connection, also when the tenant changes, until
// CloseTenant. peer is the address that the host connects from.
func (s *Service) OpenTenant(id nvmeof.ConnID, c Conn, hostNQN string, peer netip.Addr, admin bool) {
	s.tenants.mu.Lock()
	defer s.tenants.mu.Unlock()
	o := &openConn{conn: c, host: hostNQN, from: peer.String(), admin: admin}
	s.tenants.open[id] = o
	s.assign(o, s.tenantOf(hostNQN))
}

// OpenDiscovery is OpenTenant for a connection to the discovery subsystem. Discovery has no I/O, so it has no tenant:
// anybody may use it under any name, and names take numbers at the drives and series in metrics. Buffers are charged to
// the address that it comes from.
func (s *Service) OpenDiscovery(id nvmeof.ConnID, c Conn, peer netip.Addr) {
	s.tenants.mu.Lock()
	defer s.tenants.mu.Unlock()
	o := &openConn{conn: c, account: s.cfg.Pool.AccountFrom("discovery from "+peer.String(), peer.String())}
	s.tenants.open[id] = o
	c.SetTenant(Tenant{Account: o.account, Windows: &Windows{}})
}

// CloseTenant ends what OpenTenant or OpenDiscovery began. The connection has no I/O under way.
func (s *Service) CloseTenant(id nvmeof.ConnID) {
	s.tenants.mu.Lock()
	defer s.tenants.mu.Unlock()
	o := s.tenants.open[id]
	delete(s.tenants.open, id)
	o.account.Close()
	for _, n := range o.numbers {
		if s.tenants.holders[n]--; s.tenants.holders[n] == 0 {
			delete(s.tenants.holders, n)
		}
	}
	s.freeNumbers()
	if o.tenant != nil {
		s.abandonTenant(o.tenant, o.host)
	}
}

// SetTenants replaces the configured tenants: weights, caps and members change for I/O
// that comes from now on, caps also for what waits for them. No connection is closed.
func (s *Service) SetTenants(all []TenantConfig) {
	ts := &s.tenants
	ts.mu.Lock()
	defer ts.mu.Unlock()
	before := maps.Clone(ts.configured)
	clear(ts.member)
	for _, c := range all {
		t := ts.configured[c.Name]
		delete(before, c.Name)
		switch {
		case t == nil:
			t = s.newTenant(&tenantState{TenantInfo: TenantInfo{Name: c.Name, Configured: true, Settings: c.Settings},
				account: "tenant " + c.Name})
			ts.configured[c.Name] = t
		case t.Settings != c.Settings:
			t.Settings = c.Settings
			s.announceTenant(t)
		}
		for _, h := range c.Hosts {
			ts.member[h] = t
		}
	}
	for _, o := range ts.open {
		if o.tenant == nil {
			continue
		}
		if t := s.tenantOf(o.host); t != o.tenant {
			s.assign(o, t)
		}
	}
	for name, t := range before {
		delete(ts.configured, name)
		s.dropTenant(t)
	}
}

// Tenants returns all tenants that the drives know, in the order of their names.
func (s *Service) Tenants() []TenantInfo {
	s.tenants.mu.Lock()
	defer s.tenants.mu.Unlock()
	all := make([]TenantInfo, 0, len(s.tenants.configured)+len(s.tenants.alone))
	for _, t := range s.tenants.configured {
		all = append(all, t.TenantInfo)
	}
	for _, t := range s.tenants.alone {
		all = append(all, t.TenantInfo)
	}
	slices.SortFunc(all, func(a, b TenantInfo) int { return cmp.Compare(a.Name, b.Name) })
	return all
}
