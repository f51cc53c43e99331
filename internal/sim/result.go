package sim

import (
	"math"

	"github.com/HdrHistogram/hdrhistogram-go"

	"jbofd/internal/pipeline"
)

// Result is the outcome of a run.
type Result struct {
	Row      string `json:"row"`
	Scenario string `json:"scenario"`
	Policy   string `json:"policy"`
	Preset   string `json:"preset"`
	// Condition is the condition of the drive at the start.
	Condition string        `json:"condition"`
	Seed      uint64        `json:"seed"`
	Phases    []PhaseResult `json:"phases"`
	Series    *Series       `json:"series,omitempty"`
	// Sent, Completed and Cancelled count the I/Os of the whole run. An I/O is cancelled if its client disconnects.
	// Invariant: Sent = Completed + Cancelled.
	Sent      int64 `json:"sent"`
	Completed int64 `json:"completed"`
	Cancelled int64 `json:"cancelled"`
	// Sessions counts disconnects.
	Sessions int `json:"sessions,omitempty"`
	// Violations holds the first violated invariants. ViolationCount counts all of them.
	Violations     []string `json:"violations,omitempty"`
	ViolationCount int      `json:"violationCount"`
	// Events counts the events of the simulation.
	Events int64 `json:"events"`
}

// PhaseResult holds the measurements of one phase.
type PhaseResult struct {
	Name    string         `json:"name"`
	FromNS  int64          `json:"fromNS"`
	ToNS    int64          `json:"toNS"`
	Tenants []TenantResult `json:"tenants"`
	// Utilisation is the sum over tenants of their part of the drive. A tenant's part is its throughput divided by what
	// the same load gets alone.
	Utilisation float64 `json:"utilisation"`
	// FUtilMin, FUtilMean and FUtilMax cover the tenants that were active during the whole phase. Jain is the fairness
	// index of their f-Util.
	FUtilMin  float64 `json:"fUtilMin"`
	FUtilMean float64 `json:"fUtilMean"`
	FUtilMax  float64 `json:"fUtilMax"`
	Jain      float64 `json:"jain"`

	BytesPerSec float64 `json:"bytesPerSec"`
	IOsPerSec   float64 `json:"iosPerSec"`
	// Latency is the time from sending an I/O to receiving its answer at the host. AppLatency starts when the
	// application requests the I/O, so it includes the wait at the host.
	Latency    Latency `json:"latency"`
	AppLatency Latency `json:"appLatency"`
	// DeviceNS is the mean service time at the drive.
	DeviceNS float64 `json:"deviceNS"`
	// SettleNS is the time from the change before the phase until the last tenant has come close to its throughput in
	// the phase's second half; 0 if the scenario has no time series.
	SettleNS int64 `json:"settleNS,omitempty"`
	// CDF holds points of the distribution of Latency.
	CDF []Quantile `json:"cdf,omitempty"`
}

// TenantResult holds the measurements of one tenant in a phase.
type TenantResult struct {
	Name   string `json:"name"`
	Group  string `json:"group"`
	Weight int    `json:"weight"`
	// Active: at least one load of the tenant ran during the whole phase.
	Active      bool    `json:"active"`
	BytesPerSec float64 `json:"bytesPerSec"`
	IOsPerSec   float64 `json:"iosPerSec"`
	// Usage is the tenant's part of the drive: the sum over its loads of their rate divided by the rate that such a
	// load gets alone.
	Usage float64 `json:"usage"`
	// FUtil is Usage divided by the tenant's fair share, which its weight among the active tenants determines.
	FUtil      float64 `json:"fUtil"`
	Latency    Latency `json:"latency"`
	AppLatency Latency `json:"appLatency"`
	DeviceNS   float64 `json:"deviceNS"`
	// CreditMin and CreditMax are the lowest and the highest credit that the tenant got in the phase, in units of 4
	// KiB; Credit is the last one. They are 0 if the policy grants no credits.
	CreditMin int `json:"creditMin"`
	CreditMax int `json:"creditMax"`
	Credit    int `json:"credit"`
}

// Latency summarises a distribution of latencies, in nanoseconds.
type Latency struct {
	Count  int64   `json:"count"`
	MeanNS float64 `json:"meanNS"`
	P50NS  int64   `json:"p50NS"`
	P99NS  int64   `json:"p99NS"`
	P999NS int64   `json:"p999NS"`
	MaxNS  int64   `json:"maxNS"`
}

// Quantile is a point of a distribution.
type Quantile struct {
	NS       int64   `json:"ns"`
	Fraction float64 `json:"fraction"`
}

// Series is the time series of a run in bins that begin at time 0.
type Series struct {
	BinNS int64 `json:"binNS"`
	// Tenants holds the usage of each tenant (see TenantResult) by bin, in the scenario's order.
	Tenants [][]float64 `json:"tenants"`
	Names   []string    `json:"names"`
	Groups  []string    `json:"groups"`
	// BytesPerSec is the throughput of all tenants.
	BytesPerSec []float64 `json:"bytesPerSec"`
	// WriteCost and TargetBytesPerSec are values of the policy at the end of each bin.
	WriteCost         []float64 `json:"writeCost"`
	TargetBytesPerSec []float64 `json:"targetBytesPerSec"`
}

// Histograms hold latencies up to 100 s with three significant digits.
const (
	minLatencyNS = 64
	maxLatencyNS = 100 * Second
)

// histogram records latencies. Its mean is exact, whereas its quantiles are rounded.
type histogram struct {
	h     *hdrhistogram.Histogram
	sumNS float64
	maxNS int64
}

// Latencies records latencies for a Latency.
type Latencies struct{ h histogram }

// NewLatencies returns Latencies without any.
func NewLatencies() Latencies { return Latencies{newHistogram()} }

// Observe records a latency.
func (l *Latencies) Observe(ns int64) { l.h.observe(ns) }

// Sum returns what was recorded.
func (l *Latencies) Sum() Latency { return l.h.sum() }

func newHistogram() histogram {
	return histogram{h: hdrhistogram.New(minLatencyNS, maxLatencyNS, 3)}
}

func (h *histogram) observe(ns int64) {
	h.sumNS += float64(ns)
	h.maxNS = max(h.maxNS, ns)
	// The error can be ignored: min keeps the value within the bounds of the histogram.
	_ = h.h.RecordValue(min(ns, maxLatencyNS))
}

func (h *histogram) reset() {
	h.h.Reset()
	h.sumNS, h.maxNS = 0, 0
}

func (h *histogram) add(o *histogram) {
	h.h.Merge(o.h)
	h.sumNS += o.sumNS
	h.maxNS = max(h.maxNS, o.maxNS)
}

func (h *histogram) sum() Latency {
	n := h.h.TotalCount()
	if n == 0 {
		return Latency{}
	}
	return Latency{Count: n, MeanNS: h.sumNS / float64(n), P50NS: h.h.ValueAtPercentile(50),
		P99NS:  h.h.ValueAtPercentile(99),
		P999NS: h.h.ValueAtPercentile(99.9), MaxNS: h.maxNS}
}

// cdf returns the points of a plot, with more points in the tail.
func (h *histogram) cdf() []Quantile {
	if h.h.TotalCount() == 0 {
		return nil
	}
	var out []Quantile
	for i := range 50 {
		out = append(out, Quantile{h.h.ValueAtPercentile(float64(2*i + 1)), float64(2*i+1) / 100})
	}
	for _, p := range []float64{99.3, 99.5, 99.7, 99.9, 99.95, 99.99} {
		out = append(out, Quantile{h.h.ValueAtPercentile(p), p / 100})
	}
	return out
}

// account accumulates the measurements of a tenant in the current phase and bin.
type account struct {
	sent, app  histogram
	bytes, ios int64
	deviceNS   int64
	// usage is the service time in seconds on a drive that only this load uses.
	usage    float64
	binUsage float64
	// creditMin and creditMax refer to the phase.
	creditMin, creditMax int
}

func (a *account) init() { a.sent, a.app = newHistogram(), newHistogram() }

func (a *account) reset() {
	a.sent.reset()
	a.app.reset()
	a.bytes, a.ios, a.deviceNS, a.usage = 0, 0, 0, 0
	a.creditMin, a.creditMax = 0, 0
}

func newResult(sc *Scenario, set Setup) *Result {
	res := &Result{Row: sc.Row, Scenario: sc.Name, Policy: set.Policy.Name(), Preset: sc.Preset,
		Condition: conditionName(sc.Condition), Seed: set.Seed}
	if set.Parda {
		res.Policy = "parda"
	}
	if sc.BinNS > 0 {
		s := &Series{BinNS: sc.BinNS, Tenants: make([][]float64, len(sc.Tenants))}
		for i := range sc.Tenants {
			s.Names = append(s.Names, sc.Tenants[i].Name)
			s.Groups = append(s.Groups, sc.Tenants[i].Group)
		}
		res.Series = s
	}
	return res
}

// observe accounts for an answer that a client receives at the current time.
func (r *run) observe(t *tenantState, l *load, q *request) {
	a := &t.account
	moved := q.len
	if l.spec.Kinds[q.kind].Op.Class() == pipeline.OtherClass {
		moved = 0 // the command names a range and transfers no data
	}
	if r.result.Series != nil {
		a.binUsage += l.usage(q)
		r.binBytes += moved
	}
	if r.phase == len(r.sc.Phases) || r.now < r.sc.Phases[r.phase].FromNS {
		return
	}
	units := t.window.Credit(r.now)
	if a.ios == 0 {
		a.creditMin, a.creditMax = units, units
	}
	a.creditMin, a.creditMax = min(a.creditMin, units), max(a.creditMax, units)
	a.ios++
	a.bytes += moved
	a.usage += l.usage(q)
	a.deviceNS += q.deviceNS
	a.sent.observe(r.now - q.sentNS)
	a.app.observe(r.now - q.askedNS)
}

// usage returns the drive time that an I/O takes if its load is alone.
func (l *load) usage(q *request) float64 {
	switch {
	case l.standalone == 0:
		return 0
	case l.data:
		return float64(q.len) / l.standalone
	default:
		return 1 / l.standalone
	}
}

// roll closes the bins and phases that have ended by now.
func (r *run) roll(now int64) {
	if s := r.result.Series; s != nil && !r.over {
		for now >= r.nextBin+s.BinNS {
			r.nextBin += s.BinNS
			r.endBin(s)
		}
	}
	for r.phase < len(r.sc.Phases) && now >= r.sc.Phases[r.phase].ToNS {
		r.endPhase(r.sc.Phases[r.phase])
		r.phase++
	}
}

func (r *run) endBin(s *Series) {
	sec := float64(s.BinNS) / 1e9
	for i := range r.tenants {
		a := &r.tenants[i].account
		s.Tenants[i] = append(s.Tenants[i], a.binUsage/sec)
		a.binUsage = 0
	}
	s.BytesPerSec = append(s.BytesPerSec, float64(r.binBytes)/sec)
	r.binBytes = 0
	var st pipeline.Stats
	r.pipe.Stats(&st)
	s.WriteCost = append(s.WriteCost, st.WriteCost)
	s.TargetBytesPerSec = append(s.TargetBytesPerSec, st.TargetBytesPerSec)
}

func (r *run) endPhase(p Phase) {
	sec := float64(p.ToNS-p.FromNS) / 1e9
	pr := PhaseResult{Name: p.Name, FromNS: p.FromNS, ToNS: p.ToNS}
	sent, app := newHistogram(), newHistogram()
	var deviceNS int64
	for i := range r.tenants {
		t := &r.tenants[i]
		a := &t.account
		tr := TenantResult{Name: t.spec.Name, Group: t.spec.Group, Weight: t.spec.weight(), CreditMin: a.creditMin,
			CreditMax: a.creditMax, Credit: t.window.Credit(p.ToNS),
			BytesPerSec: float64(a.bytes) / sec, IOsPerSec: float64(a.ios) / sec, Usage: a.usage / sec,
			Latency: a.sent.sum(), AppLatency: a.app.sum()}
		if a.ios > 0 {
			tr.DeviceNS = float64(a.deviceNS) / float64(a.ios)
		}
		deviceNS += a.deviceNS
		for j := range t.spec.Loads {
			tr.Active = tr.Active || t.spec.UpNS == 0 && t.spec.Loads[j].active(p)
		}
		pr.BytesPerSec += tr.BytesPerSec
		pr.IOsPerSec += tr.IOsPerSec
		sent.add(&a.sent)
		app.add(&a.app)
		pr.Tenants = append(pr.Tenants, tr)
		a.reset()
	}
	pr.Latency, pr.AppLatency, pr.CDF = sent.sum(), app.sum(), sent.cdf()
	if pr.Latency.Count > 0 {
		pr.DeviceNS = float64(deviceNS) / float64(pr.Latency.Count)
	}
	pr.judge()
	r.result.Phases = append(r.result.Phases, pr)
}

// settle computes SettleNS of a phase that follows a change at changeNS.
func (s *Series) settle(changeNS, endNS int64) int64 {
	const (
		together = 3    // average over three bins, because single bins are noisy
		near     = 0.25 // allowed deviation from the share in either direction
	)
	first, end := int(changeNS/s.BinNS), min(int(endNS/s.BinNS), len(s.BytesPerSec))
	half := (first + end) / 2
	settled := first
	for _, usage := range s.Tenants {
		final := 0.0
		for _, u := range usage[half:end] {
			final += u / float64(end-half)
		}
		for b := first; b+together <= end && final > 0; b++ {
			now := 0.0
			for _, u := range usage[b : b+together] {
				now += u / together
			}
			if math.Abs(now/final-1) <= near {
				settled = max(settled, b)
				break
			}
		}
	}
	return int64(settled-first) * s.BinNS
}

// judge computes the f-Util of each tenant and the phase's statistics of it.
func (p *PhaseResult) judge() {
	weights := 0
	p.Utilisation = 0
	for i := range p.Tenants {
		p.Utilisation += p.Tenants[i].Usage
		if p.Tenants[i].Active {
			weights += p.Tenants[i].Weight
		}
	}
	var f []float64
	for i := range p.Tenants {
		t := &p.Tenants[i]
		if t.Active {
			t.FUtil = t.Usage * float64(weights) / float64(t.Weight)
			f = append(f, t.FUtil)
		}
	}
	p.FUtilMin, p.FUtilMean, p.FUtilMax = spread(f)
	p.Jain = Jain(f)
}

func spread(f []float64) (least, mean, most float64) {
	if len(f) == 0 {
		return 0, 0, 0
	}
	least, most = math.Inf(1), math.Inf(-1)
	for _, v := range f {
		least, most = min(least, v), max(most, v)
		mean += v / float64(len(f))
	}
	return least, mean, most
}

// Jain returns the fairness index of Jain, Chiu and Hawe: 1 if all values are equal, 1/n if one value is the whole sum.
// Source: DEC-TR-301, 1984.
func Jain(f []float64) float64 {
	var sum, squares float64
	for _, v := range f {
		sum += v
		squares += v * v
	}
	if squares == 0 {
		return 0
	}
	return sum * sum / (float64(len(f)) * squares)
}

// Phase returns the phase with the given name, or nil.
func (r *Result) Phase(name string) *PhaseResult {
	for i := range r.Phases {
		if r.Phases[i].Name == name {
			return &r.Phases[i]
		}
	}
	return nil
}

// Group returns the tenants of the group with the given name.
func (p *PhaseResult) Group(name string) []TenantResult {
	var out []TenantResult
	for _, t := range p.Tenants {
		if t.Group == name {
			out = append(out, t)
		}
	}
	return out
}
