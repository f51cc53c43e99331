package target

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"testing"

	"jbofd/internal/drive"
	"jbofd/internal/nvmeof"
	"jbofd/internal/pipeline"
	"jbofd/internal/tenant"
)

// open opens a connection of a host and returns its tenant.
func (r *rig) open(host string, admin bool) *fakeConn {
	c := &fakeConn{f: r.Service}
	c.id = r.Add(c)
	r.OpenTenant(c.id, c, host, netip.Addr{}, admin)
	return c
}

func (r *rig) done(c *fakeConn) {
	r.CloseTenant(c.id)
	r.Remove(c.id, nil, 0, nvmeof.Usage{})
}

// known returns the tenants that drive 0 knows: weights and caps by number.
func (r *rig) known() map[tenant.ID]int {
	var s drive.Snapshot
	r.SSD(0).Snapshot(&s)
	m := map[tenant.ID]int{}
	for _, t := range s.Tenants {
		m[t.Tenant] = t.Weight
	}
	return m
}

func TestAllConnectionsOfATenantsHostsShareIt(t *testing.T) {
	r := newRigWith(t, 1)
	const hostC = hostB + "c"
	r.SetTenants([]TenantConfig{{Name: "gold", Hosts: []string{hostA, hostB}, Settings: pipeline.Settings{Weight: 4}}})
	a, a2, b, c, c2, admin := r.open(hostA, false), r.open(hostA, false), r.open(hostB, false), r.open(hostC, false),
		r.open(hostC, false), r.open(hostC, true)
	gold, own := a.payer(), c.payer()
	if gold.Name != "gold" || a2.payer() != gold || b.payer() != gold {
		t.Errorf("the hosts of a tenant have %+v, %+v, %+v", gold, a2.payer(), b.payer())
	}
	if own.Name != hostC || own.Number == gold.Number || own.Account == gold.Account || c2.payer() != own {
		t.Errorf("an unlisted host has %+v and %+v", own, c2.payer())
	}
	if p := admin.payer(); p.Number != own.Number || p.Account == own.Account {
		t.Errorf("its admin queue has %+v", p)
	}
	if got := r.known(); len(got) != 2 || got[gold.Number] != 4 || got[own.Number] != 1 {
		t.Errorf("the drive knows weights %v", got)
	}
	for _, conn := range []*fakeConn{a, a2, b, c, c2} {
		r.done(conn)
	}
	if got := r.known(); len(got) != 2 {
		t.Errorf("with an admin queue left the drive knows %v", got)
	}
	r.done(admin)
	if got := r.known(); len(got) != 1 || got[gold.Number] != 4 {
		t.Errorf("with all connections gone the drive knows %v", got)
	}
	if all := r.Tenants(); len(all) != 1 || all[0].Name != "gold" || all[0].Connections != 0 || !all[0].Configured {
		t.Errorf("left: %+v", all)
	}
}

// A tenant's metrics have its name, so no host may choose the name of a tenant as its NQN.
func TestAHostCannotTakeTheNameOfAConfiguredTenant(t *testing.T) {
	r := newRigWith(t, 1)
	r.SetTenants([]TenantConfig{{Name: "gold", Hosts: []string{hostA}, Settings: pipeline.Settings{Weight: 4}}})
	names := map[string]bool{}
	var conns []*fakeConn
	for _, nqn := range []string{hostA, hostB, "gold", "tenant gold", "", "other"} {
		c := r.open(nqn, false)
		conns = append(conns, c)
		p := c.payer()
		if names[p.Name] || names["account "+p.Account.Name()] {
			t.Errorf("host %q shares the name %q or the account %q with another", nqn, p.Name, p.Account.Name())
		}
		names[p.Name], names["account "+p.Account.Name()] = true, true
	}
	for _, c := range conns {
		r.done(c)
	}
}

func TestTenantsChangeWhileTheirHostsAreConnected(t *testing.T) {
	r := newRigWith(t, 2)
	a, admin, b := r.open(hostA, false), r.open(hostA, true), r.open(hostB, false)
	alone := a.payer()
	set := func(all ...TenantConfig) { r.SetTenants(all) }
	weight := func(name string, w int, hosts ...string) TenantConfig {
		return TenantConfig{Name: name, Hosts: hosts, Settings: pipeline.Settings{Weight: w}}
	}
	set(weight("gold", 4, hostA), weight("tin", 1, hostB))
	gold := a.payer()
	if gold.Name != "gold" || admin.payer().Name != "gold" || b.payer().Name != "tin" || gold.Account == alone.Account {
		t.Errorf("after joining: %+v, %+v, %+v", gold, admin.payer(), b.payer())
	}
	if got := r.known(); len(got) != 2 || got[gold.Number] != 4 {
		t.Errorf("the drive knows %v", got)
	}
	// A new weight does not affect the connections.
	set(weight("gold", 9, hostA), weight("tin", 1, hostB))
	if a.payer() != gold || r.known()[gold.Number] != 9 {
		t.Errorf("after another weight: %+v, the drive knows %v", a.payer(), r.known())
	}
	// A host moves to another tenant, and a tenant is removed.
	set(weight("tin", 1, hostA, hostB))
	if a.payer() != b.payer() || a.payer().Name != "tin" || admin.payer().Name != "tin" {
		t.Errorf("after moving: %+v, %+v", a.payer(), b.payer())
	}
	if got := r.known(); len(got) != 1 {
		t.Errorf("the drive knows %v", got)
	}
	set()
	if a.payer().Name != hostA || b.payer().Name != hostB || a.payer().Number == b.payer().Number {
		t.Errorf("without tenants: %+v, %+v", a.payer(), b.payer())
	}
	for _, c := range []*fakeConn{a, b, admin} {
		r.done(c)
	}
	if got, all := r.known(), r.Tenants(); len(got) != 0 || len(all) != 0 {
		t.Errorf("left: %v, %+v", got, all)
	}
}

func TestTenantNumbersAreReused(t *testing.T) {
	r := newRigWith(t, 1)
	r.SetTenants([]TenantConfig{{Name: "gold", Hosts: []string{hostA}, Settings: pipeline.Settings{Weight: 4}}})
	stays := r.open(hostB, false)
	for i := range 1000 {
		c := r.open(fmt.Sprint(hostB, i%10), false)
		if n := c.payer().Number; n == stays.payer().Number || n > Background+3 {
			t.Fatalf("the third tenant has number %d", n)
		}
		r.done(c)
	}
	r.done(stays)
	if got := r.known(); len(got) != 1 {
		t.Errorf("left: %v", got)
	}
}

// TestANumberIsNotReusedWhileItsCommandsMayWait: a host leaves a tenant that is removed. Its earlier commands may still
// wait for a partition, which knows them by the tenant's number, until the connection is closed.
func TestANumberIsNotReusedWhileItsCommandsMayWait(t *testing.T) {
	r := newRigWith(t, 1)
	gold := func(name string) []TenantConfig {
		return []TenantConfig{{Name: name, Hosts: []string{hostA}, Settings: pipeline.Settings{Weight: 4}}}
	}
	r.SetTenants(gold("gold"))
	a := r.open(hostA, false)
	was := a.payer().Number
	r.SetTenants(nil)
	if n := a.payer().Number; n == was {
		t.Fatalf("the host on its own has the tenant's number %d", n)
	}
	for i := range 10 {
		b := r.open(fmt.Sprint(hostB, i), false)
		if n := b.payer().Number; n == was {
			t.Fatalf("another host gets number %d while a connection of the former tenant is open", n)
		}
		r.done(b)
	}
	for range 10 { // numbers that the connection has used are bounded by the tenants that it was in
		r.SetTenants(gold("gold"))
		r.SetTenants(gold("silver"))
	}
	if n := r.tenants.last; n > Background+25 {
		t.Errorf("%d numbers are in use", n)
	}
	r.done(a)
	r.SetTenants(nil)
	if len(r.tenants.leaving) > 0 || len(r.tenants.holders) > 0 || len(r.known()) > 0 {
		t.Errorf("left: %v, held %v, the drive knows %v", r.tenants.leaving, r.tenants.holders, r.known())
	}
}

// Connections of many hosts come and go while tenants change; afterwards nothing is left.
func TestTenantsAreConsistentUnderConcurrentChanges(t *testing.T) {
	r := newRigWith(t, 1)
	host := func(i int) string { return fmt.Sprint(hostA, i) }
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			var mine []*fakeConn
			for n := range 300 {
				mine = append(mine, r.open(host(rand.IntN(8)), n%5 == 0))
				if len(mine) > 3 {
					r.done(mine[0])
					mine = mine[1:]
				}
			}
			for _, c := range mine {
				r.done(c)
			}
		})
	}
	wg.Go(func() {
		for n := range 100 {
			var all []TenantConfig
			for i := range rand.IntN(4) {
				all = append(all, TenantConfig{Name: fmt.Sprint("t", i),
					Hosts: []string{host(2 * i), host(2*i + n%2)}[:1+n%2], Settings: pipeline.Settings{Weight: 1 + n}})
			}
			r.SetTenants(all)
			r.Tenants()
		}
	})
	wg.Wait()
	for _, info := range r.Tenants() {
		if !info.Configured || info.Connections != 0 {
			t.Errorf("left: %+v", info)
		}
	}
	r.SetTenants(nil)
	if got := r.known(); len(got) != 0 {
		t.Errorf("the drive still knows %v", got)
	}
	used := append(slices.Clone(r.tenants.free), r.tenants.leaving...)
	slices.Sort(used)
	if len(used) != int(r.tenants.last-Background) || len(slices.Compact(used)) != len(used) ||
		len(r.tenants.leaving) != 0 {
		t.Errorf("of %d numbers %v are free and %v leaving", r.tenants.last, r.tenants.free, r.tenants.leaving)
	}
}
