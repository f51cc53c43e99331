package sim

import (
	"fmt"
	"slices"
	"strings"

	"jbofd/internal/pipeline"
	"jbofd/internal/pipeline/baseline"
	"jbofd/internal/pipeline/jbof"
	"jbofd/internal/pipeline/policies"
	"jbofd/internal/ssd/model/flash"
)

// pardaName names the policy that runs at the hosts, in front of a vanilla target.
const pardaName = "parda"

// Policies returns the names of the policies that can be compared, the vanilla target first.
func Policies() []string {
	names := []string{"fifo", "gimbal", "jbof"}
	for _, n := range policies.Names() {
		if !slices.Contains(names, n) {
			names = append(names, n)
		}
	}
	return append(names, pardaName)
}

// fifoDepth is the queue depth of the vanilla target: that of an NVMe queue.
const fifoDepth = 1024

// Lab holds what runs share: preconditioned drives, and the throughput of each load alone on its drive. A Lab has no
// lock: one goroutine calls Plan, after which several goroutines may execute the steps of a stage.
type Lab struct {
	seed       uint64
	drives     map[driveKey]*prototype
	standalone map[standaloneKey]*float64
}

// NewLab returns a Lab whose runs all use this seed.
func NewLab(seed uint64) *Lab {
	return &Lab{seed, map[driveKey]*prototype{}, map[standaloneKey]*float64{}}
}

type driveKey struct {
	preset    string
	sizeBytes int64
	condition flash.Condition
	slowdown  int
	unmapNS   int64
}

// drive returns the key of the scenario's drive.
func (s *Scenario) drive() driveKey {
	return driveKey{s.Preset, s.SizeBytes, s.Condition, max(s.Slowdown, 1), s.UnmapNSPerMiB}
}

type standaloneKey struct {
	driveKey
	load string
}

// prototype is a preconditioned drive that runs clone, with its calibration and its loads' throughput alone.
type prototype struct {
	drive   *flash.Drive
	profile jbof.Profile
}

// Step is a unit of work for one goroutine.
type Step struct {
	Name string
	Do   func() error
}

// Plan returns the steps that run each scenario under each policy. Stages run one after the other; the steps of one
// stage may run in any order or concurrently. The results are valid after the last stage, ordered by scenario and then
// by policy.
func (l *Lab) Plan(scenarios []Scenario, names []string) (stages [][]Step, results []*Result, err error) {
	for _, name := range names {
		if !slices.Contains(Policies(), name) {
			return nil, nil, fmt.Errorf("policy is %q, must be one of %s", name, strings.Join(Policies(), ", "))
		}
	}
	stages = make([][]Step, 3)
	for i := range scenarios {
		sc := &scenarios[i]
		key := sc.drive()
		proto := l.drives[key]
		if proto == nil {
			proto = &prototype{}
			l.drives[key] = proto
			stages[0] = append(stages[0], Step{fmt.Sprintf("%s drive, %s", conditionName(key.condition), key.preset),
				func() error { return proto.make(key, l.seed) }})
			stages[1] = append(stages[1], Step{fmt.Sprintf("calibration, %s drive", conditionName(key.condition)),
				func() error { proto.calibrate(key, l.seed); return nil }})
		}
		for t := range sc.Tenants {
			for j := range sc.Tenants[t].Loads {
				load := &sc.Tenants[t].Loads[j]
				sk := standaloneKey{key, load.id()}
				if l.standalone[sk] != nil {
					continue
				}
				rate := new(float64)
				l.standalone[sk] = rate
				stages[1] = append(stages[1], Step{load.Kinds[0].String() + " alone",
					func() error { *rate = l.alone(proto, key, load); return nil }})
			}
		}
	}
	results = make([]*Result, len(scenarios)*len(names))
	for i := range scenarios {
		for j, name := range names {
			sc, at := &scenarios[i], i*len(names)+j
			stages[2] = append(stages[2], Step{sc.String() + " " + name, func() (err error) {
				results[at], err = l.run(sc, name)
				return err
			}})
		}
	}
	return stages, results, nil
}

// Run runs one scenario under one policy, including all preparation.
func (l *Lab) Run(sc Scenario, policy string) (*Result, error) {
	stages, results, err := l.Plan([]Scenario{sc}, []string{policy})
	if err != nil {
		return nil, err
	}
	for _, s := range stages {
		for _, step := range s {
			if err := step.Do(); err != nil {
				return nil, fmt.Errorf("%s: %w", step.Name, err)
			}
		}
	}
	return results[0], nil
}

func (p *prototype) make(key driveKey, seed uint64) error {
	cfg, err := flash.Preset(key.preset, key.sizeBytes)
	if err != nil {
		return err
	}
	cfg.Seed, cfg.Slowdown = seed, key.slowdown
	if key.unmapNS > 0 {
		cfg.UnmapNSPerMiB = key.unmapNS
	}
	if p.drive, err = flash.New(cfg); err != nil {
		return err
	}
	p.drive.Precondition(key.condition)
	return nil
}

// run runs a scenario that is already prepared.
func (l *Lab) run(sc *Scenario, policy string) (*Result, error) {
	key := sc.drive()
	proto := l.drives[key]
	known := *proto
	if sc.Blank {
		known.profile = jbof.Profile{}
	}
	p, err := newPolicy(policy, &known)
	if err != nil {
		return nil, err
	}
	return Run(sc, Setup{SizeBytes: sc.SizeBytes, Drive: newPaced(proto.drive.Clone(), sc.Pace), Policy: p,
		Parda: policy == pardaName, Seed: l.seed,
		Standalone: func(load *Load) float64 { return *l.standalone[standaloneKey{key, load.id()}] }}), nil
}

// newPolicy returns the policy of a drive.
func newPolicy(name string, p *prototype) (pipeline.Policy, error) {
	cfg := policies.Config{Depth: fifoDepth}
	switch name {
	case "jbof":
		return jbof.New(jbof.Config{Profile: p.profile}), nil
	case "flashfq":
		// The policy throttles by its depth D, which is set to the depth that keeps the drive busy.
		cfg.Depth = max(p.profile.Depth, 1)
	case "iocost":
		// The targets were chosen so that most rows of the matrix are fair and the drive is used: shorter ones slow
		// down writes on a fragmented drive, longer ones are fair to nobody.
		cfg.IOCost.ReadTargetNS, cfg.IOCost.WriteTargetNS = 1e6, 20e6
		if r := p.profile; r.ReadNS > 0 {
			read := baseline.LinearCost{FixedNS: int64(r.ReadNS), PerMiBNS: int64(r.ReadByteNS * (1 << 20))}
			cfg.IOCost.Read = read
			cfg.IOCost.Write = baseline.LinearCost{FixedNS: 2 * read.FixedNS, PerMiBNS: 2 * read.PerMiBNS}
		}
	case pardaName:
		name = "fifo"
	}
	return policies.New(name, cfg)
}

// alone measures the throughput that the load gets if it has the drive to itself, at a depth that saturates the drive
// and with a vanilla target.
func (l *Lab) alone(p *prototype, key driveKey, load *Load) float64 {
	const enoughBytes, least, most = 8 << 20, 32, 256
	only := Load{Kinds: load.Kinds, Depth: most, RegionBytes: load.RegionBytes}
	for _, k := range load.Kinds {
		only.Depth = min(only.Depth, int(max(least, enoughBytes/max(k.SizeBytes, 1))))
	}
	from, to := warmNS, warmNS+measuredNS
	if alone := (Tenant{Loads: []Load{only}}); !alone.mutates() {
		from, to = from/5, to/5 // reads do not change the state of the drive
	}
	sc := Scenario{Row: "standalone", Name: load.id(), Preset: key.preset, SizeBytes: key.sizeBytes,
		Condition: key.condition, Slowdown: key.slowdown,
		Tenants: []Tenant{{Name: "alone", Loads: []Load{only}}}, NetworkNS: defaultNetworkNS,
		Phases: []Phase{{"alone", from, to}}}
	res := Run(&sc, Setup{SizeBytes: key.sizeBytes, Drive: p.drive.Clone(), Policy: pipeline.NewFIFO(fifoDepth),
		Seed: l.seed})
	if ph := &res.Phases[0]; load.data() {
		return ph.BytesPerSec
	} else {
		return ph.IOsPerSec
	}
}

// calibrate measures the drive. A slowed-down drive still collects garbage from its preconditioning when it is first
// read, for about as long as a calibration takes. The daemon has read a drive before it calibrates it, to find its
// label.
func (p *prototype) calibrate(key driveKey, seed uint64) {
	d, now := p.drive.Clone(), int64(0)
	if key.slowdown > 1 {
		_, now = calibrateFrom(d, 0, key.sizeBytes, seed)
	}
	p.profile, _ = calibrateFrom(d, now, key.sizeBytes, seed)
}

// Calibrate measures a drive in the way the daemon does when it starts.
func Calibrate(d Drive, sizeBytes int64, seed uint64) jbof.Profile {
	p, _ := calibrateFrom(d, 0, sizeBytes, seed)
	return p
}

// calibrateFrom measures a drive from time now on, and returns the time at which the measurement ended.
func calibrateFrom(d Drive, now, sizeBytes int64, seed uint64) (jbof.Profile, int64) {
	var c jbof.Calibration
	var done []flash.Completion
	r := newRNG(seed, -2)
	for !c.Done() {
		for {
			n, ok := c.Next(now)
			if !ok {
				break
			}
			d.Submit(now, flash.Request{Op: flash.Read, OffsetBytes: r.below((sizeBytes-n)/unitBytes+1) * unitBytes,
				LenBytes: n})
		}
		at, ok := d.NextEvent()
		if !ok {
			return jbof.Profile{}, now // the drive does not answer
		}
		now = max(now, at)
		done = d.Advance(now, done[:0])
		for _, x := range done {
			c.Complete(now, x.LatencyNS)
		}
	}
	return c.Profile(), now
}

// conditionName returns the name of a condition in tables.
func conditionName(c flash.Condition) string {
	switch c {
	case flash.Clean:
		return "clean"
	case flash.Fragmented:
		return "fragmented"
	}
	return "empty"
}
