package telemetry

import (
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"jbofd/internal/pipeline"
)

// Scheduling describes how tenants share a drive at the time of a scrape.
type Scheduling struct {
	// SSD and Policy are the names used in the configuration.
	SSD, Policy string
	Stats       pipeline.Stats
	Tenants     []TenantScheduling
}

// TenantScheduling holds the statistics of one tenant at the drive.
type TenantScheduling struct {
	Tenant string
	pipeline.TenantStats
}

// SetScheduling sets the source of the statistics of how drives are shared. Each scrape calls f once.
func (t *Telemetry) SetScheduling(f func() []Scheduling) {
	t.mu.Lock()
	t.scheduling = f
	t.mu.Unlock()
}

var (
	schedInfo = gauge("jbof_scheduler_info", "The policy by which tenants share the drive; always 1.", "ssd",
		"policy")
	schedState = gauge("jbof_scheduler_state", "1 for the congestion state that the class of I/O is in, else 0.",
		"ssd", "class", "state")
	schedLatency = gauge("jbof_scheduler_latency_seconds", "Averaged latency at the drive, by class of I/O.", "ssd",
		"class")
	schedThreshold = gauge("jbof_scheduler_latency_threshold_seconds",
		"Latency above which the class counts as congested.", "ssd", "class")
	schedWriteCost = gauge("jbof_scheduler_write_cost", "What a written byte costs, in read bytes; 0 if the policy "+
		"does not tell them apart.", "ssd")
	schedTarget = gauge("jbof_scheduler_target_bytes_per_second", "Rate at which the policy admits I/O; 0 if it "+
		"has no target rate.", "ssd")
	schedCompleted = gauge("jbof_scheduler_completed_bytes_per_second", "Rate at which the drive has completed I/O "+
		"lately, as measured by the policy.", "ssd")
	schedInflight = gauge("jbof_scheduler_inflight_seconds", "Device time outstanding at the drive, as estimated by "+
		"the policy.", "ssd")
	schedWindow = gauge("jbof_scheduler_window_seconds", "Device time that may be outstanding at the drive; 0 is "+
		"no limit.", "ssd")
	schedActive = gauge("jbof_scheduler_active_tenants", "Tenants with commands waiting or outstanding.", "ssd")

	tenantShare = gauge("jbof_scheduler_share", "Part of the drive that the tenant used lately, 0 to 1.", "tenant",
		"ssd")
	tenantWeight = gauge("jbof_scheduler_weight", "Weight of the tenant.", "tenant", "ssd")
	tenantCredit = gauge("jbof_scheduler_credit", "What the tenant should have outstanding at most, in units of 4 "+
		"KiB; 0 if the policy grants no credit.", "tenant", "ssd")
	tenantQueued = gauge("jbof_scheduler_queued", "Commands of the tenant that wait in the pipeline before "+
		"the drive.", "tenant", "ssd")
	tenantInflight = gauge("jbof_scheduler_inflight", "Commands of the tenant that were admitted and have not "+
		"completed.", "tenant", "ssd")
	tenantDevice = counter("jbof_scheduler_device_seconds_total", "Device time charged to the tenant; with policy "+
		"fifo it is gigabytes.", "tenant", "ssd")
	tenantLimited = counter("jbof_scheduler_limited_seconds_total", "Time in which the tenant had commands waiting, "+
		"by reason: cap, share, ssd_congested or credit.", "tenant", "ssd", "reason")
	tenantWait = newMetric(prometheus.UntypedValue, "jbof_scheduler_wait_seconds",
		"Time from a command's arrival at the pipeline to its admission.", "tenant", "ssd")
)

// schedulerMetrics returns the metric families of this file.
func schedulerMetrics() []metric {
	return []metric{schedInfo, schedState, schedLatency, schedThreshold, schedWriteCost, schedTarget, schedCompleted,
		schedInflight, schedWindow, schedActive,
		tenantShare, tenantWeight, tenantCredit, tenantQueued, tenantInflight, tenantDevice, tenantLimited, tenantWait}
}

// waitStep selects every second bucket of a pipeline's histogram, which is precise enough to distinguish microseconds
// from seconds. Between waitFine and waitCoarse, 8 ms to 2 s, every bucket is reported, because tenants notice waits of
// that length.
const (
	waitStep   = 2
	waitFine   = 13
	waitCoarse = 21
)

// waits converts a histogram to Prometheus' form.
func waits(h *pipeline.WaitHistogram) (count uint64, sumSeconds float64, le map[float64]uint64) {
	le = make(map[float64]uint64, pipeline.WaitBuckets/waitStep)
	for i, n := range h.Count {
		count += uint64(n)
		if i > 0 && (i%waitStep == 0 || i >= waitFine && i <= waitCoarse) && i < pipeline.WaitBuckets-1 {
			le[float64(int64(1000)<<i)/1e9] = count
		}
	}
	return count, float64(h.SumNS) / 1e9, le
}

func collectScheduling(t *Telemetry, all []Scheduling, put func(m metric, v float64, labels ...string),
	ch chan<- prometheus.Metric) {
	for i := range all {
		s := &all[i]
		st := &s.Stats
		put(schedInfo, 1, s.SSD, s.Policy)
		for class := range pipeline.OtherClass {
			c, name := &st.Class[class], class.String()
			put(schedLatency, float64(c.LatencyNS)/1e9, s.SSD, name)
			put(schedThreshold, float64(c.ThresholdNS)/1e9, s.SSD, name)
			for state := range pipeline.States {
				put(schedState, boolValue(c.State == state), s.SSD, name, state.String())
			}
		}
		put(schedWriteCost, st.WriteCost, s.SSD)
		put(schedTarget, st.TargetBytesPerSec, s.SSD)
		put(schedCompleted, st.CompletedBytesPerSec, s.SSD)
		put(schedInflight, float64(st.InflightNS)/1e9, s.SSD)
		put(schedWindow, float64(st.WindowNS)/1e9, s.SSD)
		put(schedActive, float64(st.ActiveTenants), s.SSD)

		// Tenants without their own series are summed up. Their counters are left out, because the sum would decrease
		// whenever such a tenant leaves.
		var other pipeline.TenantStats
		others, seen := false, map[string]bool{}
		for k := range s.Tenants {
			ten := &s.Tenants[k]
			name := t.reportedName(ten.Tenant)
			if name == OtherTenant || seen[name] {
				others = true
				other.Share += ten.Share
				other.Weight += ten.Weight
				other.Credit += ten.Credit
				other.Queued += ten.Queued
				other.Inflight += ten.Inflight
				continue
			}
			seen[name] = true
			putTenant(name, s.SSD, &ten.TenantStats, put)
			put(tenantDevice, float64(ten.CostNS)/1e9, name, s.SSD)
			for l := pipeline.LimitCap; l < pipeline.Limits; l++ {
				put(tenantLimited, float64(ten.LimitedNS[l])/1e9, name, s.SSD, l.String())
			}
			if count, sum, le := waits(&ten.Wait); count > 0 {
				ch <- prometheus.MustNewConstHistogram(tenantWait.desc, count, sum, le,
					strings.ToValidUTF8(name, "\uFFFD"), s.SSD)
			}
		}
		if others {
			putTenant(OtherTenant, s.SSD, &other, put)
		}
	}
}

func putTenant(name, ssd string, s *pipeline.TenantStats, put func(m metric, v float64, labels ...string)) {
	put(tenantShare, s.Share, name, ssd)
	put(tenantWeight, float64(s.Weight), name, ssd)
	put(tenantCredit, float64(s.Credit), name, ssd)
	put(tenantQueued, float64(s.Queued), name, ssd)
	put(tenantInflight, float64(s.Inflight), name, ssd)
}
