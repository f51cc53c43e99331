package owner

import "jbofd/internal/pipeline"

// SetTenant announces a tenant to the SSD or changes its weight and caps, from now on.
// From any goroutine, but not from within a Sink's methods.
func (o *Owner) SetTenant(t pipeline.Tenant, s pipeline.Settings) {
	o.mu.Lock()
	o.pipe.SetTenant(o.clock(), t, s)
	o.turn() // a cap may be gone
	o.unlock()
	o.run()
}

// RemoveTenant forgets a tenant, at once or when its last IO is done, and reports
// whether it is forgotten. To ask again does no harm. From any goroutine, but not from
// within a Sink's methods.
func (o *Owner) RemoveTenant(t pipeline.Tenant) (gone bool) {
	o.mu.Lock()
	o.pipe.RemoveTenant(o.clock(), t)
	gone = !o.pipe.Known(t)
	o.unlock()
	o.run()
	return gone
}

// Snapshot is how an SSD is shared at one moment.
type Snapshot struct {
	// Policy is the policy's name in the configuration.
	Policy  string
	Stats   pipeline.Stats
	Tenants []TenantSnapshot
	numbers []pipeline.Tenant
}

// TenantSnapshot is one tenant's account.
type TenantSnapshot struct {
	Tenant pipeline.Tenant
	pipeline.TenantStats
}

// snapshotTenants is how many tenants are looked at before others may have the SSD.
const snapshotTenants = 64

// Snapshot writes how the SSD is shared now; s is used again. From any goroutine, but
// not from within a Sink's methods.
func (o *Owner) Snapshot(s *Snapshot) {
	o.mu.Lock()
	o.turn() // brings shares up to date
	s.Policy = o.pipe.Policy().Name()
	o.pipe.Stats(&s.Stats)
	s.numbers = o.pipe.Tenants(s.numbers[:0])
	s.Tenants = s.Tenants[:0]
	for i, t := range s.numbers {
		if i > 0 && i%snapshotTenants == 0 {
			o.unlock()
			o.run()
			o.mu.Lock()
		}
		one := TenantSnapshot{Tenant: t}
		if o.pipe.TenantStats(t, &one.TenantStats) {
			s.Tenants = append(s.Tenants, one)
		}
	}
	o.unlock()
	o.run()
}
