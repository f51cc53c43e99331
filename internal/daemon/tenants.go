package daemon

import (
	"errors"
	"sort"
	"time"

	"jbofd/internal/admin"
	"jbofd/internal/config"
	"jbofd/internal/drive"
	"jbofd/internal/nvmeof/target"
	"jbofd/internal/pipeline"
	"jbofd/internal/pipeline/policies"
	"jbofd/internal/ssd"
	"jbofd/internal/telemetry"
	"jbofd/internal/tenant"
	"jbofd/internal/turn"
)

// newPolicy makes the policy that a drive's configuration names. Policy jbof needs to know the drive's speed, which is
// measured here, before the drive serves any I/O.
//
// Errors: no policy has that name.
func (n *Node) newPolicy(dev ssd.Device, sc config.SSD) (pipeline.Policy, error) {
	cfg := policies.Config{Depth: sc.QueueDepth}
	if sc.Policy == "jbof" && sc.Calibrate && sc.Fault == nil {
		var err error
		cfg.Profile, err = drive.Calibrate(turn.Real, dev, n.pool)
		switch p := cfg.Profile; {
		case errors.Is(err, drive.ErrBlank):
			n.log.Info("drive holds too little data to be calibrated; the policy starts with typical values", "ssd",
				sc.Name)
		case err != nil:
			n.log.Warn("drive could not be calibrated; the policy starts with typical values", "ssd", sc.Name, "error",
				err)
		case p.LatencyNS > 0:
			n.log.Info("drive calibrated", "ssd", sc.Name, "read_4k",
				time.Duration(p.ReadNS+4096*p.ReadByteNS).String(),
				"read_128k", time.Duration(p.ReadNS+131072*p.ReadByteNS).String(), "latency",
				time.Duration(p.LatencyNS).String(), "depth", p.Depth, "depth_128k", p.LargeDepth)
		}
	}
	return policies.New(sc.Policy, cfg)
}

// megabyte is the unit of caps on bytes, as in SPDK.
const megabyte = 1024 * 1024

// tenantConfigs converts the tenants of the configuration for the target service.
func tenantConfigs(cfg *config.Config) []target.TenantConfig {
	all := make([]target.TenantConfig, len(cfg.Tenants))
	for i, t := range cfg.Tenants {
		l := t.Limits
		all[i] = target.TenantConfig{Name: t.Name, Hosts: t.Hosts,
			Settings: pipeline.Settings{Weight: t.Weight, Caps: pipeline.Caps{
				RWIOsPerSec: l.RWIOsPerSec, RWBytesPerSec: l.RWMBytesPerSec * megabyte,
				ReadBytesPerSec: l.RMBytesPerSec * megabyte, WriteBytesPerSec: l.WMBytesPerSec * megabyte}}}
	}
	return all
}

// sharing is how one drive is shared between tenants.
type sharing struct {
	ssd string
	drive.Snapshot
}

// shared returns the sharing of every served drive, and the names of the tenants by number.
func (n *Node) shared() (all []sharing, tenants map[tenant.ID]target.TenantInfo) {
	before := n.service.Tenants()
	for _, d := range n.drives() {
		if d.drive != nil {
			s := sharing{ssd: d.name}
			d.drive.Snapshot(&s.Snapshot)
			all = append(all, s)
		}
	}
	tenants = map[tenant.ID]target.TenantInfo{}
	for _, t := range n.service.Tenants() {
		tenants[t.Number] = t
	}
	// A tenant number that was reused between the two reads is left out of this answer.
	for _, t := range before {
		if tenants[t.Number].Name != t.Name {
			delete(tenants, t.Number)
		}
	}
	tenants[target.Background] = target.TenantInfo{Name: config.Background, Number: target.Background}
	return all, tenants
}

// scheduling reports how every drive is shared.
func (n *Node) scheduling() (all []telemetry.Scheduling) {
	drives, tenants := n.shared()
	for _, s := range drives {
		one := telemetry.Scheduling{SSD: s.ssd, Policy: s.Policy, Stats: s.Stats}
		for i := range s.Tenants {
			if t, ok := tenants[s.Tenants[i].Tenant]; ok {
				one.Tenants = append(one.Tenants,
					telemetry.TenantScheduling{Tenant: t.Name, TenantStats: s.Tenants[i].TenantStats})
			}
		}
		all = append(all, one)
	}
	return all
}

// listTenants answers the admin API.
func (n *Node) listTenants() any {
	l := admin.List[admin.Tenant]{APIVersion: admin.Version, Items: []admin.Tenant{}}
	hosts := map[string][]string{}
	for _, t := range n.config().Tenants {
		hosts[t.Name] = t.Hosts
	}
	drives, tenants := n.shared()
	for _, s := range drives {
		for i := range s.Tenants {
			st := &s.Tenants[i]
			t, ok := tenants[st.Tenant]
			if !ok {
				continue
			}
			c := t.Settings.Caps
			a := admin.Tenant{Name: t.Name, SSD: s.ssd, Configured: t.Configured, Hosts: list(hosts[t.Name]),
				Connections: t.Connections,
				Weight:      st.Weight, RWIOsPerSec: c.RWIOsPerSec, RWMBytesPerSec: c.RWBytesPerSec / megabyte,
				RMBytesPerSec: c.ReadBytesPerSec / megabyte,
				WMBytesPerSec: c.WriteBytesPerSec / megabyte, RWBytesPerSec: c.RWBytesPerSec,
				RBytesPerSec: c.ReadBytesPerSec,
				WBytesPerSec: c.WriteBytesPerSec, Share: st.Share, Credit: st.Credit,
				CreditBytes: int64(st.Credit) * 4096, Queued: st.Queued, Inflight: st.Inflight,
				LimitedBy: st.Limit.String()}
			if !t.Configured && t.Number != target.Background {
				a.Hosts = []string{t.Name}
			}
			l.Items = append(l.Items, a)
		}
	}
	sort.SliceStable(l.Items, func(i, j int) bool { return l.Items[i].Name < l.Items[j].Name })
	return l
}

// schedulingOf fills in the fields of an SSD that describe its pipeline.
func schedulingOf(a *admin.SSD, o *drive.Drive) {
	var s drive.Snapshot
	o.Snapshot(&s)
	a.Policy, a.WriteCost, a.CongestionState = s.Policy, s.Stats.WriteCost, s.Stats.Worst().String()
	a.ActiveTenants = s.Stats.ActiveTenants
}
