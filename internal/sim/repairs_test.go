package sim

import (
	"fmt"
	"testing"

	"jbofd/internal/pipeline"
	"jbofd/internal/ssd/model/flash"
)

// repair is a weak point of the paper's policy that the default one does not have.
type repair struct {
	// name states the property of the default policy.
	name     string
	scenario Scenario
	// faster changes the drive, slow delays some of its I/Os.
	faster func(*flash.Config)
	slow   bool
	// holds checks a run and describes the result. fifo is the result under policy fifo, for repairs that are compared
	// with it.
	compared bool
	holds    func(r, fifo *Result) (ok bool, saw string)
}

// found returns a scenario of the matrix, on a small drive and for a short time.
func found(name string) Scenario {
	for _, s := range Matrix() {
		if s.String() == name {
			s.SizeBytes = repairBytes
			if s.Phases[0].FromNS == warmNS && len(s.Phases) == 1 {
				s.Phases = short
			}
			return s
		}
	}
	panic("there is no " + name)
}

// made makes a scenario that the matrix does not have.
func made(name string, c flash.Condition, tenants ...[]Tenant) Scenario {
	s := scenario("repair", name, c, join(tenants...))
	s.SizeBytes, s.Phases = repairBytes, short
	return s
}

const repairBytes = 1 << 30

var short = []Phase{{"steady", 400 * Millisecond, 800 * Millisecond}}

// apart checks the spread of the tenants' f-Util.
func apart(most float64) func(r, _ *Result) (bool, string) {
	return func(r, _ *Result) (bool, string) {
		p := &r.Phases[0]
		return p.FUtilMax <= most*p.FUtilMin, fmt.Sprintf("f-Util %.3f to %.3f, allowed is a factor of %.2f",
			p.FUtilMin, p.FUtilMax, most)
	}
}

// keeps compares the rate of all tenants with that under fifo.
func keeps(part float64) func(r, fifo *Result) (bool, string) {
	return func(r, fifo *Result) (bool, string) {
		mine, his := r.Phases[0].BytesPerSec, fifo.Phases[0].BytesPerSec
		return mine >= part*his, fmt.Sprintf("%.0f MB/s, fifo has %.0f", mine/1e6, his/1e6)
	}
}

func repairs() []repair {
	lone := clients(1, "reader", 1, stream(pipeline.Read, size4K, false, 1))
	writing := clients(8, "writer", 1, stream(pipeline.Write, size128K, false, 32))
	drift := made("drift", flash.Clean, lone)
	drift.BinNS, drift.Phases = 100*Millisecond, []Phase{{"steady", Second, 3 * Second}}

	return []repair{
		{name: "room that light tenants do not use is lent", scenario: found("light-heavy/128K-read-clean"),
			holds: func(r, _ *Result) (bool, string) {
				heavy := r.Phases[0].Group("heavy")[0].Usage
				return heavy >= 0.9, fmt.Sprintf("a heavy tenant has %.3f of what it has alone", heavy)
			}},
		{name: "sizes that fit badly win nothing", scenario: found("size/read-127.5K-128K-clean"), holds: apart(1.1)},
		{name: "small and large reads cost what they take", scenario: found("size/read-4K-128K-clean"),
			holds: apart(1.25)},
		{name: "a large write pays for all of it", scenario: found("size/write-4K-128K-clean"), holds: apart(1.25)},
		{name: "reads and writes share the drive's time", scenario: found("read-write/4K-fragmented"),
			holds: apart(1.5)},
		{name: "tenants have weights", scenario: found("weights/128K-read-clean"), holds: apart(1.1)},
		{name: "flushes cost something", scenario: found("special/flush-fragmented"),
			holds: func(r, _ *Result) (bool, string) {
				f := r.Phases[0].Group("4K read")[0].FUtil
				return f >= 0.85, fmt.Sprintf("f-Util of a reader among flushes is %.3f", f)
			}},
		{name: "a read does not wait behind a write that must wait",
			scenario: made("reader", flash.Fragmented, lone, writing),
			holds: func(r, fifo *Result) (bool, string) {
				const alone = 110_000 // the drive's latency and the network's
				mean := r.Phases[0].Tenants[0].Latency.MeanNS
				return mean < 3*alone, fmt.Sprintf("a depth 1 reader's mean latency is %.0f µs beside writers",
					mean/1e3)
			}},
		{name: "the rate does not grow while the application is the limit", scenario: drift,
			holds: func(r, _ *Result) (bool, string) {
				rates := r.Series.TargetBytesPerSec
				first, last := rates[len(rates)/3], rates[len(rates)-1]
				return last <= 1.1*first, fmt.Sprintf("target rate %.0f, then %.0f MB/s, for a reader of 42 MB/s",
					first/1e6, last/1e6)
			}},
		{name: "a burst after idling is served as any other", scenario: found("burst/after-10s-idle-fragmented"),
			holds: func(r, _ *Result) (bool, string) {
				steady, burst := r.Phases[0].Latency.P99NS, r.Phases[1].Latency.P99NS
				return burst <= 2*steady, fmt.Sprintf("p99 %d µs, before it %d µs", burst/1000, steady/1000)
			}},
		{name: "one slow I/O in a thousand does not throttle all",
			scenario: made("slow", flash.Clean, readers(16, size4K)), slow: true, compared: true, holds: keeps(0.95)},
		{name: "limits are the drive's", scenario: made("fast", flash.Clean, readers(16, size128K)), compared: true,
			holds: keeps(0.95),
			faster: func(c *flash.Config) {
				c.Channels, c.DiesPerChannel, c.ChannelBytesPerSec = 16, 4, 2000e6
				c.ReadNS, c.ReadOpNS, c.ReadBytesPerSec = 40_000, 300, 14e9
			}},
	}
}

// sluggish is a drive on which one I/O in slowEvery is slow.
type sluggish struct {
	Drive
	n    int
	held []flash.Completion
}

const (
	slowEvery = 2000
	slowNS    = 6 * Millisecond
)

func (s *sluggish) NextEvent() (int64, bool) {
	at, ok := s.Drive.NextEvent()
	if len(s.held) > 0 && (!ok || s.held[0].AtNS < at) {
		return s.held[0].AtNS, true
	}
	return at, ok
}

func (s *sluggish) Advance(now int64, dst []flash.Completion) []flash.Completion {
	n := len(dst)
	dst = s.Drive.Advance(now, dst)
	kept := dst[:n]
	for _, c := range dst[n:] {
		if s.n++; s.n%slowEvery == 0 {
			c.AtNS += slowNS
			c.LatencyNS += slowNS
			s.held = append(s.held, c)
			continue
		}
		kept = append(kept, c)
	}
	for len(s.held) > 0 && s.held[0].AtNS <= now {
		kept = append(kept, s.held[0])
		s.held = s.held[1:]
	}
	return kept
}

// prepare returns a drive and a policy's setup for it.
func (r *repair) prepare(lab *Lab) (func(policy string) (*Result, error), error) {
	sc := &r.scenario
	key := sc.drive()
	proto := lab.drives[key]
	standalone := func(l *Load) float64 { return *lab.standalone[standaloneKey{key, l.id()}] }
	if r.faster != nil {
		cfg, err := flash.Preset(sc.Preset, sc.SizeBytes)
		if err != nil {
			return nil, err
		}
		r.faster(&cfg)
		d, err := flash.New(cfg)
		if err != nil {
			return nil, err
		}
		d.Precondition(sc.Condition)
		proto, standalone = &prototype{drive: d, profile: Calibrate(d.Clone(), cfg.SizeBytes, 1)}, nil
	}
	return func(policy string) (*Result, error) {
		set := Setup{SizeBytes: sc.SizeBytes, Seed: 1, Drive: proto.drive.Clone(), Standalone: standalone}
		if r.slow {
			set.Drive = &sluggish{Drive: set.Drive}
		}
		var err error
		if set.Policy, err = newPolicy(policy, proto); err != nil {
			return nil, err
		}
		return Run(sc, set), nil
	}, nil
}

// TestRepairs shows each weak point of the paper's policy that the default one repairs: the property holds under the
// default policy and not under the paper's.
func TestRepairs(t *testing.T) {
	plainOnly(t)
	lab, all := NewLab(1), repairs()
	var scenarios []Scenario
	for _, r := range all {
		scenarios = append(scenarios, r.scenario)
	}
	stages, _, err := lab.Plan(scenarios, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, steps := range stages {
		if err := both(steps); err != nil {
			t.Fatal(err)
		}
	}
	runs := make([]map[string]*Result, len(all))
	var steps []Step
	for i := range all {
		runs[i] = map[string]*Result{}
		steps = append(steps, Step{all[i].name, func() error {
			run, err := all[i].prepare(lab)
			if err != nil {
				return err
			}
			for _, policy := range []string{"gimbal", "jbof", "fifo"} {
				if policy == "fifo" && !all[i].compared {
					continue
				}
				if runs[i][policy], err = run(policy); err != nil {
					return err
				}
			}
			return nil
		}})
	}
	if err := both(steps); err != nil {
		t.Fatal(err)
	}
	for i, r := range all {
		t.Run(r.name, func(t *testing.T) {
			for policy, res := range runs[i] {
				for _, v := range res.Violations {
					t.Errorf("%s: %s", policy, v)
				}
			}
			ok, saw := r.holds(runs[i]["gimbal"], runs[i]["fifo"])
			t.Logf("gimbal: %s", saw)
			if ok {
				t.Error("gimbal needs no repair here")
			}
			ok, saw = r.holds(runs[i]["jbof"], runs[i]["fifo"])
			t.Logf("jbof: %s", saw)
			if !ok {
				t.Error("jbof does not hold it")
			}
		})
	}
}
