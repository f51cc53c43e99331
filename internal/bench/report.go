package bench

import (
	"fmt"
	"io"
	"math"
	"runtime"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// APIVersion is the version of Report's JSON. Fields may be added but are never renamed or removed.
const APIVersion = "jbofd.bench/v1"

// Report is the outcome of a run. The names of its fields state the units of time. CPU percentages refer to one
// processor.
type Report struct {
	APIVersion string    `json:"apiVersion"`
	Kind       string    `json:"kind"` // "BlockReport"
	StartedAt  time.Time `json:"startedAt"`
	// Interrupted: the user ended the run early.
	Interrupted bool `json:"interrupted,omitempty"`

	Target struct {
		Name           string `json:"name"`
		SizeBytes      int64  `json:"sizeBytes"`
		BlockSizeBytes int    `json:"blockSizeBytes"`
		// UnwrittenBytes is the part of the region that held no data when the run began. Such parts are read without an
		// access to the drive, so a sparse file appears to be fast.
		UnwrittenBytes int64 `json:"unwrittenBytes,omitempty"`
	} `json:"target"`
	Workload struct {
		Pattern        string  `json:"rw"`
		ReadPercent    int     `json:"rwmixread"`
		BlockBytes     int     `json:"bsBytes"`
		IODepth        int     `json:"iodepth"`
		Jobs           int     `json:"numjobs"`
		RuntimeSeconds float64 `json:"runtimeSeconds"`
		RampSeconds    float64 `json:"rampSeconds"`
		OffsetBytes    int64   `json:"offsetBytes"`
		SizeBytes      int64   `json:"sizeBytes"`
		RateIOPS       float64 `json:"rateIOPS,omitempty"`
		Verify         bool    `json:"verify"`
		Seed           uint64  `json:"seed"`
	} `json:"workload"`

	ElapsedSeconds float64        `json:"elapsedSeconds"`
	Read           *Direction     `json:"read,omitempty"`
	Write          *Direction     `json:"write,omitempty"`
	Flush          *Direction     `json:"flush,omitempty"`
	Verify         *VerifyOutcome `json:"verify,omitempty"`
	Errors         ErrorCounts    `json:"errors"`

	Self struct {
		CPUPercent  float64 `json:"cpuPercent"`
		GCCycles    uint32  `json:"gcCycles"`
		AllocsPerIO float64 `json:"allocsPerIO"`
		GOMAXPROCS  int     `json:"gomaxprocs"`
		GoVersion   string  `json:"goVersion"`
	} `json:"self"`
	TargetProcess *ProcessUsage `json:"targetProcess,omitempty"`
	Credit        *CreditUse    `json:"credit,omitempty"`
}

// CreditUse describes the effect of the target's credits, if it grants any.
type CreditUse struct {
	SSD uint16 `json:"ssd"`
	// Units is how many units of 4 KiB may be outstanding at the end of the run, and Bytes the same in bytes; 0 if the
	// policy of the drive sets no limit.
	Units int   `json:"units"`
	Bytes int64 `json:"bytes"`
	// Waits is the number of I/Os that waited at the host for credit. MeanWaitNS is the mean of their waits. The
	// reported latencies include these waits.
	Waits      uint64  `json:"waits"`
	MeanWaitNS float64 `json:"meanWaitNS"`
}

// Direction holds the results of one kind of I/O.
type Direction struct {
	IOs         int64     `json:"ios"`
	Bytes       uint64    `json:"bytes"`
	IOPS        float64   `json:"iops"`
	BytesPerSec float64   `json:"bytesPerSec"`
	LatencyNS   LatencyNS `json:"latencyNS"`
}

// LatencyNS holds latencies in nanoseconds.
type LatencyNS struct {
	Min    int64   `json:"min"`
	Mean   float64 `json:"mean"`
	StdDev float64 `json:"stddev"`
	P50    int64   `json:"p50"`
	P90    int64   `json:"p90"`
	P95    int64   `json:"p95"`
	P99    int64   `json:"p99"`
	P999   int64   `json:"p99_9"`
	P9999  int64   `json:"p99_99"`
	Max    int64   `json:"max"`
}

// VerifyOutcome states how much data was verified during and after the run.
type VerifyOutcome struct {
	CheckedBytes   uint64  `json:"checkedBytes"`
	ElapsedSeconds float64 `json:"readBackSeconds"`
	Failures       uint64  `json:"failures"`
}

// ErrorCounts counts failures. Messages holds the first ones.
type ErrorCounts struct {
	IO       uint64   `json:"io"`
	Verify   uint64   `json:"verify"`
	Messages []string `json:"messages,omitempty"`
}

// ProcessUsage is the resource usage of the target's process.
type ProcessUsage struct {
	PID        int     `json:"pid"`
	CPUPercent float64 `json:"cpuPercent"`
}

func (r *run) newReport() *Report {
	rep := &Report{APIVersion: APIVersion, Kind: "BlockReport", StartedAt: r.begin.UTC()}
	c := &r.cfg
	rep.Target.Name, rep.Target.SizeBytes, rep.Target.UnwrittenBytes = r.info.Name, r.info.SizeBytes, r.unwritten
	rep.Target.BlockSizeBytes = r.info.BlockSize
	w := &rep.Workload
	w.Pattern, w.ReadPercent, w.BlockBytes, w.IODepth, w.Jobs = c.Pattern, c.ReadPercent, c.BlockBytes, c.IODepth,
		c.Jobs
	switch c.Pattern {
	case "read", "randread":
		w.ReadPercent = 100
	case "write", "randwrite":
		w.ReadPercent = 0
	}
	w.RuntimeSeconds, w.RampSeconds = c.Runtime.Seconds(), c.RampTime.Seconds()
	w.OffsetBytes, w.SizeBytes, w.RateIOPS, w.Verify, w.Seed = c.OffsetBytes, c.SizeBytes, c.RateIOPS, c.Verify, c.Seed
	rep.Self.GOMAXPROCS, rep.Self.GoVersion = runtime.GOMAXPROCS(0), runtime.Version()
	r.total = newStats()
	return rep
}

// fill sets the results of the main phase.
func (rep *Report) fill(r *run, elapsed time.Duration, from usage) {
	to := r.takeUsage()
	rep.ElapsedSeconds = elapsed.Seconds()
	st := &r.total
	rep.Read, rep.Write, rep.Flush = st.direction(Read, elapsed), st.direction(Write, elapsed),
		st.direction(Flush, elapsed)
	rep.Self.CPUPercent = to.CPUPercentSince(&from.Usage)
	rep.Self.GCCycles = to.GCs - from.GCs
	rep.Self.AllocsPerIO = to.AllocsPer(uint64(st.ios()), &from.Usage)
	if from.targetOK && to.targetOK {
		rep.TargetProcess = &ProcessUsage{PID: r.cfg.TargetPID,
			CPUPercent: percent(to.target-from.target, to.At.Sub(from.At))}
	}
	if c := to.credit; c.On {
		rep.Credit = &CreditUse{SSD: c.SSD, Units: c.Units, Bytes: int64(c.Units) * 4096,
			Waits: c.Waits - from.credit.Waits}
		if n := rep.Credit.Waits; n > 0 {
			rep.Credit.MeanWaitNS = math.Round(float64(c.WaitTime-from.credit.WaitTime) / float64(n))
		}
	}
	if r.cfg.Verify {
		rep.Verify = &VerifyOutcome{CheckedBytes: st.checked, Failures: st.wrong}
	}
	rep.addErrors(st)
}

// fillVerify sets the results of the final verification.
func (rep *Report) fillVerify(r *run, elapsed time.Duration) {
	st := &r.total
	if rep.Verify == nil {
		rep.Verify = &VerifyOutcome{}
	}
	rep.Verify.CheckedBytes += st.checked
	rep.Verify.Failures += st.wrong
	rep.Verify.ElapsedSeconds = elapsed.Seconds()
	if r.cfg.VerifyOnly {
		rep.ElapsedSeconds = elapsed.Seconds()
		rep.Read = st.direction(Read, elapsed)
	}
	rep.addErrors(st)
}

func (rep *Report) addErrors(st *stats) {
	rep.Errors.IO += st.failed[Read] + st.failed[Write] + st.failed[Flush]
	rep.Errors.Verify += st.wrong
	for _, m := range st.first {
		if len(rep.Errors.Messages) < 2*maxMessages {
			rep.Errors.Messages = append(rep.Errors.Messages, m)
		}
	}
}

// OK reports that no I/O and no verification failed.
func (rep *Report) OK() bool { return rep.Errors.IO == 0 && rep.Errors.Verify == 0 }

func (s *stats) direction(k Kind, elapsed time.Duration) *Direction {
	h := s.hist[k]
	if h.TotalCount() == 0 {
		return nil
	}
	sec := elapsed.Seconds()
	return &Direction{IOs: h.TotalCount(), Bytes: s.bytes[k], IOPS: float64(h.TotalCount()) / sec,
		BytesPerSec: float64(s.bytes[k]) / sec,
		LatencyNS:   Latencies(h)}
}

// Latencies summarises a histogram of nanoseconds.
func Latencies(h *hdrhistogram.Histogram) LatencyNS {
	return LatencyNS{Min: h.Min(), Mean: math.Round(h.Mean()), StdDev: math.Round(h.StdDev()),
		P50: h.ValueAtPercentile(50), P90: h.ValueAtPercentile(90),
		P95: h.ValueAtPercentile(95), P99: h.ValueAtPercentile(99), P999: h.ValueAtPercentile(99.9),
		P9999: h.ValueAtPercentile(99.99), Max: h.Max()}
}

// WriteTable writes the report as text.
func (rep *Report) WriteTable(w io.Writer) error {
	var b strings.Builder
	wl := &rep.Workload
	fmt.Fprintf(&b, "%s, %s in blocks of %s\n", rep.Target.Name, FormatSize(rep.Target.SizeBytes),
		FormatSize(int64(rep.Target.BlockSizeBytes)))
	fmt.Fprintf(&b, "%s bs=%s iodepth=%d numjobs=%d", wl.Pattern, FormatSize(int64(wl.BlockBytes)), wl.IODepth, wl.Jobs)
	if wl.Pattern == "rw" || wl.Pattern == "randrw" {
		fmt.Fprintf(&b, " rwmixread=%d", wl.ReadPercent)
	}
	if wl.RateIOPS > 0 {
		fmt.Fprintf(&b, " rate_iops=%.0f", wl.RateIOPS)
	}
	if rep.Interrupted {
		fmt.Fprintf(&b, ", interrupted: the figures are of the %.2f s until then\n\n", rep.ElapsedSeconds)
	} else {
		fmt.Fprintf(&b, ", %.2f s\n\n", rep.ElapsedSeconds)
	}
	t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "\tI/Os\tIOPS\tMB/s\tmean\tp50\tp90\tp99\tp99.9\tp99.99\tmax\t")
	for _, d := range []struct {
		name string
		d    *Direction
	}{{"read", rep.Read}, {"write", rep.Write}, {"flush", rep.Flush}} {
		if d.d == nil {
			continue
		}
		l := &d.d.LatencyNS
		fmt.Fprintf(t, "%s\t%d\t%.0f\t%.1f\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t\n", d.name, d.d.IOs, d.d.IOPS,
			d.d.BytesPerSec/1e6,
			FormatNS(l.Mean), FormatNS(float64(l.P50)), FormatNS(float64(l.P90)), FormatNS(float64(l.P99)),
			FormatNS(float64(l.P999)), FormatNS(float64(l.P9999)), FormatNS(float64(l.Max)))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	b.WriteByte('\n')
	if n := rep.Target.UnwrittenBytes; n > 0 && rep.Read != nil {
		fmt.Fprintf(&b, "of the region %.0f %% were not written before: reads there do not reach a drive, and the "+
			"figures are not the drive's\n", 100*float64(n)/float64(wl.SizeBytes))
	}
	fmt.Fprintf(&b, "jbofbench: %.0f %% of a CPU, %d GC cycles, %.4f allocs/IO\n", rep.Self.CPUPercent,
		rep.Self.GCCycles, rep.Self.AllocsPerIO)
	if p := rep.TargetProcess; p != nil {
		fmt.Fprintf(&b, "target process %d: %.0f %% of a CPU\n", p.PID, p.CPUPercent)
	}
	if c := rep.Credit; c != nil && c.Units > 0 {
		fmt.Fprintf(&b, "credit: %d units of 4 KiB at drive %d; %d I/Os waited at the host, %s on average\n", c.Units,
			c.SSD, c.Waits, FormatNS(c.MeanWaitNS))
	} else if c != nil {
		fmt.Fprintf(&b, "credit: no limit at drive %d\n", c.SSD)
	}
	if v := rep.Verify; v != nil {
		fmt.Fprintf(&b, "verify: %.1f MB checked, %d failures\n", float64(v.CheckedBytes)/1e6, v.Failures)
	}
	if !rep.OK() {
		fmt.Fprintf(&b, "ERRORS: %d failed I/Os, %d verification failures\n", rep.Errors.IO, rep.Errors.Verify)
		for _, m := range rep.Errors.Messages {
			fmt.Fprintf(&b, "  %s\n", m)
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// FormatNS formats a time in nanoseconds with three digits and a suitable unit.
func FormatNS(ns float64) string {
	switch {
	case ns < 1e3:
		return fmt.Sprintf("%.0fns", ns)
	case ns < 1e6:
		return threeDigits(ns/1e3) + "µs"
	case ns < 1e9:
		return threeDigits(ns/1e6) + "ms"
	}
	return threeDigits(ns/1e9) + "s"
}

func threeDigits(v float64) string {
	switch {
	case v < 10:
		return fmt.Sprintf("%.2f", v)
	case v < 100:
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.0f", v)
}
