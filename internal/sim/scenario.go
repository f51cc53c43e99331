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

// Kind is one sort of I/O of a load.
type Kind struct {
	Op        pipeline.Op
	SizeBytes int64
	// Sequential I/Os follow each other, others fall anywhere in the region.
	Sequential bool
	// Parts is how often this kind comes among the load's, relative to the others'.
	Parts int
}

// String returns the kind as tables write it, for example "4K random read".
func (k Kind) String() string {
	if k.Op == pipeline.Flush {
		return "flush"
	}
	order := "random"
	if k.Sequential {
		order = "sequential"
	}
	return fmt.Sprintf("%s %s %s", SizeString(k.SizeBytes), order, k.Op)
}

// SizeString writes a size in K.
func SizeString(n int64) string {
	return strings.TrimSuffix(fmt.Sprintf("%.1f", float64(n)/1024), ".0") + "K"
}

// Load is a stream of I/Os that a client's application asks for.
type Load struct {
	Kinds []Kind
	// Depth is how many I/Os the application has under way at once; a paced load waits
	// for one to complete before it asks for more.
	Depth int
	// IOsPerSec paces the load; 0 is a closed loop.
	IOsPerSec float64
	// StartNS and StopNS bound it; a StopNS of 0 is never.
	StartNS, StopNS int64
	// OnNS and OffNS make it come in bursts from StartNS on, if OnNS is not 0.
	OnNS, OffNS int64
}

// Tenant is one client and what the target knows of it.
type Tenant struct {
	Name string
	// Group names tenants of the same sort, for tables and plots.
	Group string
	// Weight is its share, 0 is 1.
	Weight int
	Caps   pipeline.Caps
	Loads  []Load
	// IgnoresCredits: a host that does not know the wire extension.
	IgnoresCredits bool
	// UpNS and DownNS make the client connect and disconnect again and again with all
	// its I/Os under way, if UpNS is not 0: each time it stays for something between half and
	// one and a half of UpNS and away for that much of DownNS.
	UpNS, DownNS int64
}

// Phase is a stretch of a run that is measured by itself.
type Phase struct {
	Name         string
	FromNS, ToNS int64
}

// Scenario is one experiment: clients, a network, one SSD.
type Scenario struct {
	// Row is the row of the workload matrix, Name the experiment in it.
	Row, Name string
	// Preset, SizeBytes and Condition say which drive, see flash.
	Preset    string
	SizeBytes int64
	Condition flash.Condition
	// Slowdown is how many times slower than its preset the drive is; 0 is 1.
	Slowdown int
	Tenants  []Tenant
	// Phases are what is measured. The run ends with the last one.
	Phases []Phase
	// NetworkNS is the way from a host to the target, and back again.
	NetworkNS int64
	// TargetCPUNS is what each I/O costs of the target's one core, before its pipeline.
	TargetCPUNS int64
	// BinNS is the grain of the time series; 0: there is none.
	BinNS int64
	// Sessions ends the connects and disconnects of tenants with an UpNS after so many.
	Sessions int
}

// EndNS is when the last phase ends.
func (s *Scenario) EndNS() int64 {
	var end int64
	for _, p := range s.Phases {
		end = max(end, p.ToNS)
	}
	return end
}

// changedNS is when a load last began or ended before a time.
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

// String returns row and name.
func (s *Scenario) String() string { return s.Row + "/" + s.Name }

// id names what the load asks of a drive.
func (l *Load) id() string {
	var b strings.Builder
	for _, k := range l.Kinds {
		fmt.Fprintf(&b, "%v x%d;", k, k.Parts)
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

// data reports whether the load moves data only; what others do is counted in I/Os.
func (l *Load) data() bool {
	for _, k := range l.Kinds {
		if k.Op.Class() == pipeline.OtherClass {
			return false
		}
	}
	return true
}

// weight is the tenant's share.
func (t *Tenant) weight() int { return max(t.Weight, 1) }

// active reports whether any of the tenant's loads runs in all of the phase.
func (l *Load) active(p Phase) bool {
	return l.StartNS <= p.FromNS && (l.StopNS == 0 || l.StopNS >= p.ToNS)
}
