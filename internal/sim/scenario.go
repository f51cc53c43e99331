package sim

import (
	"fmt"
	"strings"

	"jbofd/internal/pipeline"
	"jbofd/internal/ssd/model/flash"
)

// Units of time, in nanoseconds.
const (
	Microsecond int64 = 1_000
	Millisecond int64 = 1_000_000
	Second      int64 = 1_000_000_000
)

// Kind describes one kind of I/O of a load.
type Kind struct {
	Op        pipeline.Op
	SizeBytes int64
	// Sequential I/Os follow each other; others have random offsets in the region.
	Sequential bool
	// FUA: writes complete when their data is durable.
	FUA bool
	// Parts is the relative frequency of this kind among the kinds of the load.
	Parts int
}

// String returns the name of the kind in tables, for example "4K random read".
func (k Kind) String() string {
	if k.Op == pipeline.Flush {
		return "flush"
	}
	order := "random"
	if k.Sequential {
		order = "sequential"
	}
	if k.FUA {
		order += " FUA"
	}
	return fmt.Sprintf("%s %s %s", SizeString(k.SizeBytes), order, k.Op)
}

// SizeString returns a size in K.
func SizeString(n int64) string {
	return strings.TrimSuffix(fmt.Sprintf("%.1f", float64(n)/1024), ".0") + "K"
}

// Load is a stream of I/Os that an application requests from its client.
type Load struct {
	Kinds []Kind
	// Depth is the number of I/Os that the application keeps outstanding. A paced load with so many I/Os outstanding
	// waits for a completion before it requests another one.
	Depth int
	// IOsPerSec is the rate of a paced load; 0 stands for a closed loop.
	IOsPerSec float64
	// StartNS and StopNS are the times at which the load starts and stops. A StopNS of 0 stands for never.
	StartNS, StopNS int64
	// OnNS and OffNS make the load alternate between on and off from StartNS on, if OnNS is not 0.
	OnNS, OffNS int64
	// RegionBytes limits the load to so many bytes at the start of its tenant's region; 0 stands for all of it. A clean
	// drive has each 32 KiB on one die.
	RegionBytes int64
}

// Tenant describes a client and its configuration at the target.
type Tenant struct {
	Name string
	// Group is a common name of similar tenants, for tables and plots.
	Group string
	// Weight is the tenant's weight; 0 stands for 1.
	Weight int
	Caps   pipeline.Caps
	Loads  []Load
	// IgnoresCredits models a host that does not implement the credit extension.
	IgnoresCredits bool
	// Core, if not 0, is the processor core on which the client polls. Clients with one core take turns on it.
	Core int
	// UpNS and DownNS, if UpNS is not 0, make the client connect and disconnect repeatedly, with I/Os outstanding. It
	// stays connected for 0.5 to 1.5 times UpNS and disconnected for 0.5 to 1.5 times DownNS.
	UpNS, DownNS int64
}

// Phase is a part of a run that is measured separately.
type Phase struct {
	Name         string
	FromNS, ToNS int64
}

// Scenario is one experiment: clients, a network, one SSD.
type Scenario struct {
	// Row is a row of the workload matrix. Name is the experiment within the row.
	Row, Name string
	// Preset, SizeBytes and Condition describe the drive; see package flash.
	Preset    string
	SizeBytes int64
	Condition flash.Condition
	// Slowdown is the factor by which the drive is slower than its preset; 0 stands for 1.
	Slowdown int
	// UnmapNSPerMiB, if not 0, replaces the preset's time to deallocate or zero 1 MiB.
	UnmapNSPerMiB int64
	// Pace changes the drive's speed during the run; see Pace.
	Pace []Pace
	// Blank drives hold no data when they are configured, so they are not calibrated: policies start with typical
	// values.
	Blank   bool
	Tenants []Tenant
	// TurnNS is how long a client polls before the next one has their core: 0.5 to 1.5 times as long, at random.
	TurnNS int64
	// Phases are the measured parts of the run, which ends with the last one.
	Phases []Phase
	// NetworkNS is the latency of the network in one direction.
	NetworkNS int64
	// TargetCPUNS is the processor time that the target's single core spends on each I/O before the pipeline.
	TargetCPUNS int64
	// BinNS is the bin width of the time series; 0 stands for no time series.
	BinNS int64
	// Sessions limits the number of disconnects of the tenants that have an UpNS.
	Sessions int
}

// EndNS returns the time at which the last phase ends.
func (s *Scenario) EndNS() int64 {
	var end int64
	for _, p := range s.Phases {
		end = max(end, p.ToNS)
	}
	return end
}

// changedNS returns the last time before the given one at which a load began or ended.
func (s *Scenario) changedNS(before int64) (last int64) {
	for i := range s.Tenants {
		for _, l := range s.Tenants[i].Loads {
			for _, at := range []int64{l.StartNS, l.StopNS} {
				if at <= before {
					last = max(last, at)
				}
			}
		}
	}
	return last
}

// String returns the row and the name.
func (s *Scenario) String() string { return s.Row + "/" + s.Name }

// id returns a key for the I/O pattern of the load.
func (l *Load) id() string {
	var b strings.Builder
	for _, k := range l.Kinds {
		fmt.Fprintf(&b, "%v x%d;", k, k.Parts)
	}
	if l.RegionBytes > 0 {
		fmt.Fprintf(&b, " in %d", l.RegionBytes)
	}
	return b.String()
}

// mutates reports whether the tenant writes.
func (t *Tenant) mutates() bool {
	for _, l := range t.Loads {
		for _, k := range l.Kinds {
			if k.Op.Mutates() {
				return true
			}
		}
	}
	return false
}

// data reports whether all kinds of the load transfer data. Other loads are measured in I/Os.
func (l *Load) data() bool {
	for _, k := range l.Kinds {
		if k.Op.Class() == pipeline.OtherClass {
			return false
		}
	}
	return true
}

// weight returns the effective weight of the tenant.
func (t *Tenant) weight() int { return max(t.Weight, 1) }

// active reports whether the load runs during the whole phase.
func (l *Load) active(p Phase) bool {
	return l.StartNS <= p.FromNS && (l.StopNS == 0 || l.StopNS >= p.ToNS)
}
