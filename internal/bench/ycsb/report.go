package ycsb

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"jbofd/internal/bench"
)

// Report is the outcome of jbofbench kv: one Phase for each phase that was asked for.
type Report struct {
	APIVersion string    `json:"apiVersion"` // bench.APIVersion
	Kind       string    `json:"kind"`       // "KVReport"
	StartedAt  time.Time `json:"startedAt"`
	Store      string    `json:"store"`

	Workload struct {
		Records          uint64  `json:"recordcount"`
		Operations       uint64  `json:"operationcount"`
		Read             float64 `json:"readproportion"`
		Update           float64 `json:"updateproportion"`
		Insert           float64 `json:"insertproportion"`
		ReadModifyWrite  float64 `json:"readmodifywriteproportion"`
		Distribution     string  `json:"requestdistribution"`
		Theta            float64 `json:"zipfianconstant"`
		ValueBytes       int     `json:"valueBytes"` // of the longest
		Threads          int     `json:"threadcount"`
		Depth            int     `json:"depth"`
		TargetOpsPerSec  float64 `json:"target,omitempty"`
		Seed             uint64  `json:"seed"`
		MaxExecutionSecs float64 `json:"maxexecutiontime,omitempty"`
	} `json:"workload"`

	Load   *Phase `json:"load,omitempty"`
	Run    *Phase `json:"run,omitempty"`
	Verify *Phase `json:"verify,omitempty"`
}

// Phase is the outcome of one phase. CPU percentages refer to one processor.
type Phase struct {
	// Interrupted: the user ended the phase early.
	Interrupted    bool     `json:"interrupted,omitempty"`
	ElapsedSeconds float64  `json:"elapsedSeconds"`
	Operations     uint64   `json:"operations"`
	OpsPerSec      float64  `json:"opsPerSec"`
	Series         []Series `json:"series"`
	// Timeline is the phase in stretches of Workload.Granularity, if that is given.
	Timeline []Interval `json:"timeline,omitempty"`
	// Overdue operations were due, under a target, when the time was over, and had not begun. They are in no Series: a
	// store that cannot keep up with the target is slower than the latencies say.
	Overdue uint64 `json:"overdue,omitempty"`
	// Checked values were verified; Wrong ones were not what they must be.
	Checked uint64 `json:"checked"`
	Wrong   uint64 `json:"wrong"`
	// Failed operations were refused by the store or not done.
	Failed uint64 `json:"failed"`
	// Messages describe the first failures.
	Messages []string `json:"messages,omitempty"`

	// Store holds the counters of a store in this process: what happened in this phase, or how things are at its end.
	Store map[string]int64 `json:"store,omitempty"`

	CPUPercent  float64 `json:"cpuPercent"`
	GCCycles    uint32  `json:"gcCycles"`
	AllocsPerOp float64 `json:"allocsPerOp"`
}

// OK reports that nothing failed and no read returned a wrong value.
func (p *Phase) OK() bool { return p == nil || p.Failed == 0 && p.Wrong == 0 }

// OK reports that all phases are.
func (r *Report) OK() bool { return r.Load.OK() && r.Run.OK() && r.Verify.OK() }

// Series are the results of one kind of operation.
type Series struct {
	// Name is YCSB's: READ, UPDATE, INSERT, READ-MODIFY-WRITE.
	Name string `json:"name"`
	// Results counts by YCSB's names for how they ended: OK, NOT_FOUND, SERVICE_UNAVAILABLE, ERROR.
	Results map[string]uint64 `json:"results"`
	// LatencyNS of those that are OK counts from when they were submitted, IntendedLatencyNS from when
	// they were due, under a target.
	LatencyNS         *bench.LatencyNS `json:"latencyNS,omitempty"`
	IntendedLatencyNS *bench.LatencyNS `json:"intendedLatencyNS,omitempty"`
}

// Progress is the state of a running phase.
type Progress struct {
	// Phase is "load", "run" or "verify".
	Phase   string
	Elapsed time.Duration
	// Ops have ended, of Total (0: unknown) or until MaxElapsed (0: never).
	Ops, Total uint64
	MaxElapsed time.Duration
	// OpsPerSec and Series cover the time since the last call, or with Last the whole phase.
	OpsPerSec float64
	Series    []Series
	Failures  uint64
	// Last: the phase is over.
	Last bool
}

// Share is how much of the phase is done, 0 to 1; ok is false if that is unknown.
func (p *Progress) Share() (share float64, ok bool) {
	if p.Total > 0 {
		share = float64(p.Ops) / float64(p.Total)
	}
	if p.MaxElapsed > 0 {
		share = max(share, p.Elapsed.Seconds()/p.MaxElapsed.Seconds())
	}
	return min(share, 1), p.Total > 0 || p.MaxElapsed > 0
}

// StatusLine is the line that YCSB prints with -s.
func (p *Progress) StatusLine(now time.Time) string {
	var s strings.Builder
	fmt.Fprintf(&s, "%s %d sec: %d operations; ", now.Format("2006-01-02 15:04:05.000"), int(p.Elapsed.Seconds()),
		p.Ops)
	if p.OpsPerSec > 0 {
		fmt.Fprintf(&s, "%.2f current ops/sec; ", p.OpsPerSec)
	}
	if share, ok := p.Share(); ok && share > 0 && !p.Last {
		fmt.Fprintf(&s, "est completion in %s ", time.Duration(float64(p.Elapsed)*(1-share)/share).Round(time.Second))
	}
	for i := range p.Series {
		e := &p.Series[i]
		l := e.latency()
		if l == nil {
			continue
		}
		fmt.Fprintf(&s, "[%s: Count=%d, Max=%s, Min=%s, Avg=%.2f, 90=%s, 99=%s, 99.9=%s, 99.99=%s] ", e.Name,
			e.Results[OK.String()],
			micros(l.Max), micros(l.Min), l.Mean/1e3, micros(l.P90), micros(l.P99), micros(l.P999), micros(l.P9999))
	}
	if p.Failures > 0 {
		fmt.Fprintf(&s, "[FAILURES: Count=%d] ", p.Failures)
	}
	return strings.TrimRight(s.String(), " ")
}

// latency returns what people look at: the corrected one if there is one.
func (s *Series) latency() *bench.LatencyNS {
	if s.IntendedLatencyNS != nil {
		return s.IntendedLatencyNS
	}
	return s.LatencyNS
}

// NewReport begins the report of a Bench; the caller adds the phases.
func (b *Bench) NewReport() *Report {
	w := &b.w
	r := &Report{APIVersion: bench.APIVersion, Kind: "KVReport", StartedAt: time.Now().UTC(), Store: b.db.Name()}
	o := &r.Workload
	o.Records, o.Operations, o.Distribution, o.Theta = w.RecordCount, w.OperationCount, w.Distribution, w.Theta
	o.Read, o.Update, o.Insert, o.ReadModifyWrite = w.Read, w.Update, w.Insert, w.ReadModifyWrite
	o.ValueBytes, o.Threads, o.Depth, o.TargetOpsPerSec, o.Seed = w.ValueBytes(), w.Threads, b.cfg.Depth, w.Target,
		b.cfg.Seed
	o.MaxExecutionSecs = w.MaxExecution.Seconds()
	return r
}

func (b *Bench) newPhase(elapsed time.Duration, from usage) *Phase {
	to := b.takeUsage()
	st := &b.total
	p := &Phase{ElapsedSeconds: elapsed.Seconds(), Operations: st.ops, OpsPerSec: float64(st.ops) / elapsed.Seconds(),
		Series: seriesOf(st), Timeline: b.timeline(elapsed),
		Overdue: st.overdue, Checked: st.checked, Wrong: st.wrong, Failed: st.failed(), Messages: st.first,
		CPUPercent: to.CPUPercentSince(&from.Usage), GCCycles: to.GCs - from.GCs,
		AllocsPerOp: to.AllocsPer(st.ops, &from.Usage)}
	if len(to.store) > 0 {
		p.Store = map[string]int64{}
	}
	for i, c := range to.store {
		if !c.State {
			c.Value -= from.store[i].Value
		}
		p.Store[c.Name] = c.Value
	}
	return p
}

func seriesOf(st *stats) (all []Series) {
	for k := range kinds {
		e := Series{Name: k.String(), Results: map[string]uint64{}}
		for r, n := range st.results[k] {
			if n > 0 {
				e.Results[Result(r).String()] = n
			}
		}
		if len(e.Results) > 0 {
			e.LatencyNS, e.IntendedLatencyNS = latencies(st.raw[k]), latencies(st.corrected[k])
			all = append(all, e)
		}
	}
	return all
}

func latencies(h *hdrhistogram.Histogram) *bench.LatencyNS {
	if h == nil || h.TotalCount() == 0 {
		return nil
	}
	l := bench.Latencies(h)
	return &l
}

// usage is the CPU time and memory that this process and the store in it have used so far.
type usage struct {
	bench.Usage
	store []Counter
}

func (b *Bench) takeUsage() usage {
	u := usage{Usage: bench.TakeUsage()}
	if c, ok := b.db.(Counting); ok {
		u.store = c.Counters()
	}
	return u
}

// WriteYCSB writes the lines that YCSB writes, for each phase.
func (r *Report) WriteYCSB(w io.Writer) error {
	var b strings.Builder
	for _, p := range []struct {
		name string
		p    *Phase
	}{{"LOAD", r.Load}, {"RUN", r.Run}, {"VERIFY", r.Verify}} {
		if p.p != nil {
			p.p.write(&b, p.name)
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func (p *Phase) write(b *strings.Builder, name string) {
	fmt.Fprintf(b, "[OVERALL], Phase, %s\n[OVERALL], RunTime(ms), %.0f\n[OVERALL], Throughput(ops/sec), %s\n", name,
		p.ElapsedSeconds*1e3, strconv.FormatFloat(p.OpsPerSec, 'f', -1, 64))
	fmt.Fprintf(b, "[OVERALL], CPU(%%), %.1f\n[TOTAL_GCs], Count, %d\n", p.CPUPercent, p.GCCycles)
	if p.Overdue > 0 {
		fmt.Fprintf(b, "[OVERALL], Overdue, %d\n", p.Overdue)
	}
	for i := range p.Series {
		e := &p.Series[i]
		e.write(b, e.Name, e.LatencyNS)
		if e.IntendedLatencyNS != nil {
			e.write(b, "Intended-"+e.Name, e.IntendedLatencyNS)
		}
	}
	for _, v := range p.Timeline {
		fmt.Fprintf(b, "[TIMELINE], %.0f, %.1f, %.3f, %s, %d\n", v.AtSeconds*1e3, v.OpsPerSec, v.MeanNS/1e3,
			micros(v.MaxNS), v.Failed)
	}
	for _, name := range slices.Sorted(maps.Keys(p.Store)) {
		fmt.Fprintf(b, "[STORE], %s, %d\n", name, p.Store[name])
	}
	if p.Checked > 0 {
		fmt.Fprintf(b, "[VERIFY], Operations, %d\n[VERIFY], Return=OK, %d\n", p.Checked, p.Checked-p.Wrong)
		if p.Wrong > 0 {
			fmt.Fprintf(b, "[VERIFY], Return=UNEXPECTED_STATE, %d\n", p.Wrong)
		}
	}
}

// write writes one series. Times are in microseconds. As in YCSB, operations that are not OK count as others.
func (s *Series) write(b *strings.Builder, name string, l *bench.LatencyNS) {
	fmt.Fprintf(b, "[%s], Operations, %d\n", name, s.Results[OK.String()])
	if l != nil {
		fmt.Fprintf(b, "[%s], AverageLatency(us), %.3f\n", name, l.Mean/1e3)
		for _, v := range []struct {
			name string
			ns   int64
		}{{"MinLatency", l.Min}, {"MaxLatency", l.Max}, {"50thPercentileLatency", l.P50},
			{"95thPercentileLatency", l.P95},
			{"99thPercentileLatency", l.P99}, {"99.9PercentileLatency", l.P999}, {"99.99PercentileLatency", l.P9999}} {
			fmt.Fprintf(b, "[%s], %s(us), %s\n", name, v.name, micros(v.ns))
		}
	}
	failed := uint64(0)
	for r := OK; r <= Failed; r++ {
		if k := s.Results[r.String()]; k > 0 {
			fmt.Fprintf(b, "[%s], Return=%s, %d\n", name, r, k)
			failed += k
		}
	}
	if failed -= s.Results[OK.String()]; failed > 0 {
		fmt.Fprintf(b, "[%s-FAILED], Operations, %d\n", name, failed)
	}
}

// micros writes whole microseconds, as YCSB does.
func micros(ns int64) string { return strconv.FormatInt((ns+500)/1000, 10) }
