package drive

import (
	"jbofd/internal/pipeline"
	"jbofd/internal/tenant"
)

// SetTenant announces a tenant to the drive or changes its weight and caps. From any goroutine, but not from within a
// Sink's methods.
func (d *Drive) SetTenant(t tenant.ID, s pipeline.Settings) {
	d.driver.Lock()
	d.pipe.SetTenant(d.driver.Now(), t, s)
	d.turn() // IOs that an old cap held may go now
	d.driver.Unlock()
}

// RemoveTenant forgets a tenant, at once or when its last IO is done, and reports whether it is forgotten. It may be
// called again. From any goroutine, but not from within a Sink's methods.
func (d *Drive) RemoveTenant(t tenant.ID) (gone bool) {
	d.driver.Lock()
	d.pipe.RemoveTenant(d.driver.Now(), t)
	gone = !d.pipe.Known(t)
	d.driver.Unlock()
	return gone
}

// Snapshot is how a drive is shared at one moment.
type Snapshot struct {
	// Policy is the policy's name in the configuration.
	Policy  string
	Stats   pipeline.Stats
	Tenants []TenantSnapshot
	numbers []tenant.ID
}

// TenantSnapshot is a tenant's part of a Snapshot.
type TenantSnapshot struct {
	Tenant tenant.ID
	pipeline.TenantStats
}

// snapshotTenants is how many tenants Snapshot copies before it lets go of the drive for a moment.
const snapshotTenants = 64

// Snapshot fills s with how the drive is shared now, and uses the memory of s again. From any goroutine, but not from
// within a Sink's methods.
func (d *Drive) Snapshot(s *Snapshot) {
	d.driver.Lock()
	d.turn() // for shares that are up to date
	s.Policy = d.pipe.Policy().Name()
	d.pipe.Stats(&s.Stats)
	s.numbers = d.pipe.Tenants(s.numbers[:0])
	s.Tenants = s.Tenants[:0]
	for i, t := range s.numbers {
		if i > 0 && i%snapshotTenants == 0 {
			d.driver.Unlock()
			d.driver.Lock()
		}
		one := TenantSnapshot{Tenant: t}
		if d.pipe.TenantStats(t, &one.TenantStats) {
			s.Tenants = append(s.Tenants, one)
		}
	}
	d.driver.Unlock()
}
