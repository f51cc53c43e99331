package telemetry

import (
	"strings"
	"time"
	"unicode/utf8"
)

// OtherTenant is the name under which tenants without their own series are counted.
const OtherTenant = "other"

// unusedFor is how long series without users are kept.
const unusedFor = time.Hour

// Tenant holds the series of one tenant. Telemetry.Tenant returns it.
//
// A configured tenant always has its own series. Hosts that belong to no configured tenant get their own series up to
// Options.MaxTenants; further hosts are counted as OtherTenant. Host names can be invented without limit, so a host
// does not keep its series for ever. Series without connections are replaced by those of other hosts, the longest
// unused first, and expire after an hour.
type Tenant struct {
	t    *Telemetry
	name string // as valid UTF-8

	// t.mu guards the following fields.
	refs       int
	configured bool
	unused     time.Time // since when refs is 0
	io         map[ioKey]*IOSeries
	errors     ErrorSeries
}

// ioKey names a series of one tenant.
type ioKey struct{ ssd, op string }

// labelValue converts a name to a label value that Prometheus accepts.
func labelValue(name string) string {
	if !utf8.ValidString(name) {
		return strings.ToValidUTF8(name, "\uFFFD")
	}
	return strings.Clone(name)
}

// Tenant returns the series of a tenant: its own or those of OtherTenant. The caller must call Close when it no longer
// uses them.
func (t *Telemetry) Tenant(name string) *Tenant {
	name = labelValue(name)
	t.mu.Lock()
	defer t.mu.Unlock()
	x := t.tenants[name]
	switch {
	case x != nil:
	case t.makeRoom():
		x = t.addTenant(name)
	default:
		t.tenantsOther.Add(1)
		x = t.tenants[OtherTenant]
	}
	x.refs++
	return x
}

// addTenant creates the series of a tenant. The caller holds mu.
func (t *Telemetry) addTenant(name string) *Tenant {
	x := &Tenant{t: t, name: name, io: map[ioKey]*IOSeries{}}
	t.tenants[name] = x
	return x
}

// makeRoom reports whether another host can get its own series. If the limit is reached, it first removes the series
// that have been unused longest. The caller holds mu.
func (t *Telemetry) makeRoom() bool {
	hosts := 0
	var oldest *Tenant
	for _, x := range t.tenants {
		if x.configured {
			continue
		}
		hosts++
		if x.refs == 0 && (oldest == nil || x.unused.Before(oldest.unused)) {
			oldest = x
		}
	}
	if hosts < t.opts.MaxTenants {
		return true
	}
	if oldest != nil {
		delete(t.tenants, oldest.name)
	}
	return oldest != nil
}

// SetTenants sets the names of the configured tenants.
func (t *Telemetry) SetTenants(names []string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, x := range t.tenants {
		if x.configured && x.refs == 0 {
			x.unused = time.Now()
		}
		x.configured = x.name == OtherTenant
	}
	for _, name := range names {
		name = labelValue(name)
		x := t.tenants[name]
		if x == nil {
			x = t.addTenant(name)
		}
		x.configured = true
	}
}

// expire removes series that have been unused for too long. The caller holds mu.
func (t *Telemetry) expire(now time.Time) {
	for name, x := range t.tenants {
		if !x.configured && x.refs == 0 && now.Sub(x.unused) > unusedFor {
			delete(t.tenants, name)
		}
	}
}

// reportedName returns the name under which a tenant is reported.
func (t *Telemetry) reportedName(tenant string) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	if x := t.tenants[labelValue(tenant)]; x != nil {
		return x.name
	}
	return OtherTenant
}

// IO returns the series of the tenant's operations of one kind on one SSD. The same arguments always return the same
// series. A connection requests it once and keeps it until Close.
func (t *Tenant) IO(ssd, op string) *IOSeries {
	t.t.mu.Lock()
	defer t.t.mu.Unlock()
	k := ioKey{ssd, op}
	s := t.io[k]
	if s == nil {
		s = &IOSeries{}
		t.io[k] = s
	}
	return s
}

// Errors returns the series of the tenant's failed commands. It may be used until Close.
func (t *Tenant) Errors() *ErrorSeries { return &t.errors }

// Close tells that one user of the series has stopped using them.
func (t *Tenant) Close() {
	t.t.mu.Lock()
	defer t.t.mu.Unlock()
	if t.refs--; t.refs == 0 {
		t.unused = time.Now()
	}
}
