package daemon

import (
	"errors"
	"sort"
	"time"

	"jbofd/internal/admin"
	"jbofd/internal/config"
	"jbofd/internal/nvmeof/fabric"
	"jbofd/internal/owner"
	"jbofd/internal/pipeline"
	"jbofd/internal/pipeline/policies"
	"jbofd/internal/ssd"
	"jbofd/internal/telemetry"
)

// newPolicy makes the policy that a drive's configuration names. jbof is told what the
// drive does: it is measured here, before anybody uses it.
//
// Errors: none has that name.
func (n *Node) newPolicy(dev ssd.Device, sc config.SSD) (pipeline.Policy, error) {
	cfg := policies.Config{Depth: sc.QueueDepth}
	if sc.Policy == "jbof" && sc.Calibrate && sc.Fault == nil {
		var err error
		cfg.Profile, err = owner.Calibrate(dev, n.pool)
		switch p := cfg.Profile; {
		case errors.Is(err, owner.ErrBlank):
			n.log.Info("drive is too empty to be measured; its policy starts from what is common", "ssd", sc.Name)
		case err != nil:
			n.log.Warn("drive could not be measured; its policy starts from what is common", "ssd", sc.Name, "error", err)
		case p.LatencyNS > 0:
			n.log.Info("drive measured", "ssd", sc.Name, "read_4k", time.Duration(p.ReadNS+4096*p.ReadByteNS).String(),
				"read_128k", time.Duration(p.ReadNS+131072*p.ReadByteNS).String(), "latency", time.Duration(p.LatencyNS).String(), "depth", p.Depth, "depth_128k", p.LargeDepth)
		}
	}
	return policies.New(sc.Policy, cfg)
}

// megabyte is SPDK's unit of caps on bytes.
const megabyte = 1024 * 1024

// tenantConfigs are the tenants as fabric wants them.
func tenantConfigs(cfg *config.Config) []fabric.TenantConfig {
	all := make([]fabric.TenantConfig, len(cfg.Tenants))
	for i, t := range cfg.Tenants {
		l := t.Limits
		all[i] = fabric.TenantConfig{Name: t.Name, Hosts: t.Hosts, Settings: pipeline.Settings{Weight: t.Weight, Caps: pipeline.Caps{
			RWIOsPerSec: l.RWIOsPerSec, RWBytesPerSec: l.RWMBytesPerSec * megabyte,
			ReadBytesPerSec: l.RMBytesPerSec * megabyte, WriteBytesPerSec: l.WMBytesPerSec * megabyte}}}
	}
	return all
}

// sharing is how one drive is shared.
type sharing struct {
	drive string
	owner.Snapshot
}

// shared looks at every drive that serves, and says who the tenants are.
func (n *Node) shared() (all []sharing, tenants map[pipeline.Tenant]fabric.TenantInfo) {
	before := n.fab.Tenants()
	for _, d := range n.ssds {
		if d.owner != nil {
			s := sharing{drive: d.name}
			d.owner.Snapshot(&s.Snapshot)
			all = append(all, s)
		}
	}
	tenants = map[pipeline.Tenant]fabric.TenantInfo{}
	for _, t := range n.fab.Tenants() {
		tenants[t.Number] = t
	}
	// A number that has changed hands meanwhile is nobody's this time.
	for _, t := range before {
		if tenants[t.Number].Name != t.Name {
			delete(tenants, t.Number)
		}
	}
	tenants[fabric.Background] = fabric.TenantInfo{Name: config.Background, Number: fabric.Background}
	return all, tenants
}

// scheduling reports how every drive is shared.
func (n *Node) scheduling() (all []telemetry.Scheduling) {
	drives, tenants := n.shared()
	for _, s := range drives {
		one := telemetry.Scheduling{SSD: s.drive, Policy: s.Policy, Stats: s.Stats}
		for i := range s.Tenants {
			if t, ok := tenants[s.Tenants[i].Tenant]; ok {
				one.Tenants = append(one.Tenants, telemetry.TenantScheduling{Tenant: t.Name, TenantStats: s.Tenants[i].TenantStats})
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
			a := admin.Tenant{Name: t.Name, SSD: s.drive, Configured: t.Configured, Hosts: list(hosts[t.Name]), Connections: t.Connections,
				Weight: st.Weight, RWIOsPerSec: c.RWIOsPerSec, RWMBytesPerSec: c.RWBytesPerSec / megabyte, RMBytesPerSec: c.ReadBytesPerSec / megabyte,
				WMBytesPerSec: c.WriteBytesPerSec / megabyte, Share: st.Share, Credit: st.Credit, Queued: st.Queued, Inflight: st.Inflight,
				LimitedBy: st.Limit.String()}
			if !t.Configured && t.Number != fabric.Background {
				a.Hosts = []string{t.Name}
			}
			l.Items = append(l.Items, a)
		}
	}
	sort.SliceStable(l.Items, func(i, j int) bool { return l.Items[i].Name < l.Items[j].Name })
	return l
}

// schedulingOf fills in how a drive is shared.
func schedulingOf(a *admin.SSD, o *owner.Owner) {
	var s owner.Snapshot
	o.Snapshot(&s)
	a.Policy, a.WriteCost, a.CongestionState = s.Policy, s.Stats.WriteCost, s.Stats.Worst().String()
	a.ActiveTenants = s.Stats.ActiveTenants
}
