package fabric

import (
	"cmp"
	"maps"
	"slices"
	"sync"

	"jbofd/internal/bufpool"
	"jbofd/internal/nvmeof"
	"jbofd/internal/pipeline"
)

// Tenant is who pays for a connection's I/O: a configured tenant that its host belongs
// to, else the host itself.
type Tenant struct {
	Name string
	// Number is the pipelines' name for it.
	Number pipeline.Tenant
	// Account pays for buffers. All of a tenant's I/O queues have one together. Those of
	// admin queues are their hosts' own, so that a host whose I/O has taken all that it may
	// have can still be identified, and its Keep Alive waits for nothing.
	Account *bufpool.Account
	// Windows are shared by all of the tenant's controllers.
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
	Number pipeline.Tenant
	// Configured: it is in the configuration; otherwise it is a connected host.
	Configured bool
	Settings   pipeline.Settings
	// Connections are how many its hosts have.
	Connections int
}

// tenants knows who pays for what. Configured tenants are announced to the drives while
// they are configured, hosts on their own while they are connected.
type tenants struct {
	// mu guards what follows. It is held while drives and connections are told, so that
	// they hear of changes in their order, and never together with Fabric.mu.
	mu         sync.Mutex
	configured map[string]*tenant
	// member is the configured tenant of a host NQN; alone are the connected hosts that
	// have none.
	member, alone map[string]*tenant
	open          map[nvmeof.ConnID]*openConn
	// last is the highest number given out, free those that are nobody's, leaving those
	// that drives may still have I/O of.
	last          pipeline.Tenant
	free, leaving []pipeline.Tenant
}

// tenant is one that the drives know.
type tenant struct {
	TenantInfo
	account string
	windows Windows
}

// openConn is a connection that a tenant pays for.
type openConn struct {
	conn    Conn
	host    string
	admin   bool
	tenant  *tenant
	account *bufpool.Account
}

// Background is the number of the tenant that compaction, checkpoints and recovery of key-value stores
// belong to, at each drive. 0 is the daemon's own.
const Background pipeline.Tenant = 1

func newTenants() tenants {
	return tenants{last: Background, configured: map[string]*tenant{}, member: map[string]*tenant{}, alone: map[string]*tenant{}, open: map[nvmeof.ConnID]*openConn{}}
}

// announceTenant tells every drive.
func (f *Fabric) announceTenant(t *tenant) {
	for _, o := range f.cfg.SSDs {
		if o != nil {
			o.SetTenant(t.Number, t.Settings)
		}
	}
}

// forgotten asks every drive to forget a number and reports whether all have.
func (f *Fabric) forgotten(n pipeline.Tenant) bool {
	all := true
	for _, o := range f.cfg.SSDs {
		if o != nil && !o.RemoveTenant(n) {
			all = false
		}
	}
	return all
}

// newTenant announces a tenant under a number of its own.
func (f *Fabric) newTenant(t *tenant) *tenant {
	ts := &f.tenants
	ts.leaving = slices.DeleteFunc(ts.leaving, func(n pipeline.Tenant) bool {
		gone := f.forgotten(n)
		if gone {
			ts.free = append(ts.free, n)
		}
		return gone
	})
	if n := len(ts.free); n > 0 {
		t.Number, ts.free = ts.free[n-1], ts.free[:n-1]
	} else {
		ts.last++
		t.Number = ts.last
	}
	f.announceTenant(t)
	return t
}

// dropTenant forgets a tenant.
func (f *Fabric) dropTenant(t *tenant) {
	if f.forgotten(t.Number) {
		f.tenants.free = append(f.tenants.free, t.Number)
	} else {
		f.tenants.leaving = append(f.tenants.leaving, t.Number)
	}
}

// tenantOf returns the tenant that a host belongs to.
func (f *Fabric) tenantOf(host string) *tenant {
	if t := f.tenants.member[host]; t != nil {
		return t
	}
	t := f.tenants.alone[host]
	if t == nil {
		t = f.newTenant(&tenant{TenantInfo: TenantInfo{Name: host, Settings: pipeline.Settings{Weight: 1}}, account: host})
		f.tenants.alone[host] = t
	}
	return t
}

// assign makes t pay for a connection from now on. I/O under way stays the former
// tenant's until it is done, and so do the buffers that the connection holds.
func (f *Fabric) assign(c *openConn, t *tenant) {
	before, account := c.tenant, c.account
	c.tenant = t
	t.Connections++
	name := t.account
	if c.admin {
		name = "admin of " + c.host
	}
	c.account = f.cfg.Pool.Account(name)
	c.conn.SetTenant(Tenant{Name: t.Name, Number: t.Number, Account: c.account, Windows: &t.windows})
	if before != nil {
		account.Close()
		f.abandonTenant(before, c.host)
	}
}

// abandonTenant takes a connection of host from a tenant.
func (f *Fabric) abandonTenant(t *tenant, host string) {
	if t.Connections--; t.Connections == 0 && !t.Configured {
		delete(f.tenants.alone, host)
		f.dropTenant(t)
	}
}

// OpenTenant finds who pays for a host's new connection and tells the connection, and
// again when that changes, until CloseTenant.
func (f *Fabric) OpenTenant(id nvmeof.ConnID, c Conn, hostNQN string, admin bool) {
	f.tenants.mu.Lock()
	defer f.tenants.mu.Unlock()
	o := &openConn{conn: c, host: hostNQN, admin: admin}
	f.tenants.open[id] = o
	f.assign(o, f.tenantOf(hostNQN))
}

// CloseTenant ends what OpenTenant began. The connection has no I/O under way.
func (f *Fabric) CloseTenant(id nvmeof.ConnID) {
	f.tenants.mu.Lock()
	defer f.tenants.mu.Unlock()
	o := f.tenants.open[id]
	delete(f.tenants.open, id)
	o.account.Close()
	f.abandonTenant(o.tenant, o.host)
}

// SetTenants replaces the configured tenants: weights, caps and members change for I/O
// that comes from now on, caps also for what waits for them. No connection is closed.
func (f *Fabric) SetTenants(all []TenantConfig) {
	ts := &f.tenants
	ts.mu.Lock()
	defer ts.mu.Unlock()
	before := maps.Clone(ts.configured)
	clear(ts.member)
	for _, c := range all {
		t := ts.configured[c.Name]
		delete(before, c.Name)
		switch {
		case t == nil:
			t = f.newTenant(&tenant{TenantInfo: TenantInfo{Name: c.Name, Configured: true, Settings: c.Settings}, account: "tenant " + c.Name})
			ts.configured[c.Name] = t
		case t.Settings != c.Settings:
			t.Settings = c.Settings
			f.announceTenant(t)
		}
		for _, h := range c.Hosts {
			ts.member[h] = t
		}
	}
	for _, o := range ts.open {
		if t := f.tenantOf(o.host); t != o.tenant {
			f.assign(o, t)
		}
	}
	for name, t := range before {
		delete(ts.configured, name)
		f.dropTenant(t)
	}
}

// Tenants returns all tenants that the drives know, in the order of their names.
func (f *Fabric) Tenants() []TenantInfo {
	f.tenants.mu.Lock()
	defer f.tenants.mu.Unlock()
	all := make([]TenantInfo, 0, len(f.tenants.configured)+len(f.tenants.alone))
	for _, t := range f.tenants.configured {
		all = append(all, t.TenantInfo)
	}
	for _, t := range f.tenants.alone {
		all = append(all, t.TenantInfo)
	}
	slices.SortFunc(all, func(a, b TenantInfo) int { return cmp.Compare(a.Name, b.Name) })
	return all
}
