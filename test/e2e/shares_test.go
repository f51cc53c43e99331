package e2e

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/internal/nvme"
	"jbofd/internal/pipeline"
	"jbofd/internal/pipeline/jbof"
	"jbofd/internal/sim"
	"jbofd/internal/ssd/model/flash"
)

// group is a number of equal tenants: each is a host that keeps depth commands outstanding at random offsets.
type group struct {
	name             string
	n, weight, depth int
	op               pipeline.Op
	size             int64
	// rests: the group stops between rounds; the others work all the time.
	rests bool
	// standard: the hosts do not observe credits.
	standard bool
}

// round is a part of an experiment, from the time from to the time to, at whose end some groups rest. The shares are
// measured from the time measured on, if that is before its end.
type round struct{ from, measured, to time.Duration }

// experiment is a row of the simulation's matrix, scaled down for a small machine.
type experiment struct {
	name      string
	condition flash.Condition
	sizeMiB   int64
	// slowdown slows the drive down. The drive must be the bottleneck, although a process that waits for a processor is
	// late by milliseconds.
	slowdown int
	groups   []group
	rounds   []round
}

const ms = time.Millisecond

var steadily = []round{{0, 1000 * ms, 3000 * ms}}

var experiments = []experiment{
	// Without credits a command of each host always waits at the daemon, even if the host is late.
	{"4K-128K-readers", flash.Clean, 64, 30, []group{
		{"4K", 4, 1, 32, pipeline.Read, 4 << 10, false, true},
		{"128K", 4, 1, 4, pipeline.Read, 128 << 10, false, true},
	}, steadily},
	{"weights", flash.Clean, 128, 20, []group{
		{"weight 1", 1, 1, 64, pipeline.Read, 4 << 10, false, false},
		{"weight 2", 1, 2, 64, pipeline.Read, 4 << 10, false, false},
		{"weight 4", 1, 4, 128, pipeline.Read, 4 << 10, false, false},
	}, steadily},
	// The policy learns the cost of writes within some intervals of 20 ms when writes are alone and always wait at the
	// daemon, as those of hosts without credits do, and by a probe early in the first mix. On a slow drive few writes
	// fit into these intervals, so the estimate varies by a tenth. Therefore writes are alone more than once, and the
	// shares are those of all rounds. 16K keeps the load on the processors low.
	{"readers-writers", flash.Fragmented, 64, 15, []group{
		{"reader", 4, 1, 16, pipeline.Read, 16 << 10, true, true},
		{"writer", 4, 1, 16, pipeline.Write, 16 << 10, false, true},
	}, []round{{1000 * ms, 1600 * ms, 1600 * ms}, {2100 * ms, 2400 * ms, 3400 * ms}, {3900 * ms, 4200 * ms, 5200 * ms},
		{5700 * ms, 6000 * ms, 7000 * ms}}},
	{"heavy-light", flash.Clean, 64, 50, []group{
		{"heavy", 1, 1, 128, pipeline.Read, 4 << 10, false, false},
		{"light", 8, 1, 1, pipeline.Read, 4 << 10, false, false},
	}, steadily},
}

const (
	// sharesWithin is how far a group's share may be from the simulation's.
	sharesWithin = 0.10
	// simulations is the number of simulations that are averaged: their estimates of the cost of writes differ by up to
	// a tenth.
	simulations = 8
	// keptUp is the fraction of the simulation's bandwidth below which the machine, not the drive, is the bottleneck.
	keptUp = 0.93
	// attempts is how often an experiment is made, at most, while other work keeps the drive from being busy.
	attempts = 4
	// maxBytes is the largest command, a power of two.
	maxBytes = 128 << 10
)

// TestTheDaemonSharesAsTheSimulation repeats over NVMe/TCP, with an emulated drive, what package sim does in virtual
// time: each group gets the same share of the bandwidth.
func TestTheDaemonSharesAsTheSimulation(t *testing.T) {
	if raceEnabled {
		t.Skip("under the race detector processors are the bottleneck, not the drive; the plain build runs this")
	}
	luck := random(t)
	for i := range experiments {
		x := &experiments[i]
		t.Run(x.name, func(t *testing.T) { x.test(t, luck) })
	}
}

// test compares the shares of the groups. If the machine was busy with other work and could not keep the drive busy,
// the result says nothing about the daemon, and the test repeats the experiment for longer.
func (x *experiment) test(t *testing.T, luck *rand.Rand) {
	var got, want result
	t.Run("first", func(t *testing.T) { got, want = x.attempt(t, luck) })
	again := *x
	again.rounds = slices.Clone(x.rounds)
	again.rounds[len(again.rounds)-1].to += 1500 * ms
	for n := 1; n < attempts && !t.Failed() && got.bytesPerSec < keptUp*want.bytesPerSec; n++ {
		t.Logf("the machine was too busy for the drive: once more, for longer")
		t.Run("again", func(t *testing.T) { got, want = again.attempt(t, luck) })
	}
	if t.Failed() {
		return
	}
	for i, g := range x.groups {
		if off := got.share[i]/want.share[i] - 1; math.Abs(off) > sharesWithin {
			t.Errorf("%s: %.1f %% of the bandwidth, in the simulation %.1f %%: %+.1f %%", g.name, 100*got.share[i],
				100*want.share[i], 100*off)
		}
	}
}

// attempt does the experiment with a daemon and in the simulation.
func (x *experiment) attempt(t *testing.T, luck *rand.Rand) (got, want result) {
	tenants, writers := "", int64(0)
	for _, g := range x.groups {
		for i := range g.n {
			tenants += tenant(fmt.Sprintf("%s-%d", strings.ReplaceAll(g.name, " ", "-"), i), hostNQN(g, i),
				fmt.Sprintf(", weight: %d", g.weight))
		}
		if g.op == pipeline.Write {
			writers += int64(g.n)
		}
	}
	condition := "clean"
	if x.condition == flash.Fragmented {
		condition = "fragmented"
	}
	d := start(t, setup{
		ssds: fmt.Sprintf("  - {name: ssd0, backend: model, preset: dct983, condition: %s, size: %dMiB, "+
			"slowdown: %d, policy: jbof}\n", condition, x.sizeMiB, x.slowdown),
		subsystems: fmt.Sprintf("  - nqn: %s\n    allow_any_host: true\n    namespaces:\n      - {nsid: 1, ssd: ssd0, "+
			"size: %dMiB}\n", nqnA, x.sizeMiB-4),
		tenants: tenants,
	})
	want = x.simulate(t, d.profile())
	hosts, writer := make([][]*steady, len(x.groups)), int64(0)
	for k, g := range x.groups {
		for i := range g.n {
			h := newSteady(t, d, g, hostNQN(g, i), luck.Uint64())
			if g.op == pipeline.Write { // each in its own part of the drive, as in the simulation
				h.span /= writers
				h.from = writer * h.span &^ (maxBytes - 1)
				writer++
			}
			hosts[k] = append(hosts[k], h)
		}
	}
	got = x.run(d, hosts)
	x.log(t, got, want)
	return got, want
}

// run lets the hosts work and adds up what they get in the measured parts. At the end they rest.
func (x *experiment) run(d *daemon, hosts [][]*steady) (res result) {
	each := func(resting bool, do func(h *steady)) {
		for k, g := range x.groups {
			if g.rests == resting {
				for _, h := range hosts[k] {
					do(h)
				}
			}
		}
	}
	res.share = make([]float64, len(x.groups))
	began, measured := time.Now(), time.Duration(0)
	each(false, (*steady).start)
	for _, r := range x.rounds {
		pass(r.from - time.Since(began))
		each(true, (*steady).start)
		pass(r.measured - time.Since(began))
		if r.to > r.measured {
			measured += res.measure(d, hosts, r.to-time.Since(began))
		}
		each(true, (*steady).rest)
	}
	each(false, (*steady).rest)
	for _, bytes := range res.share {
		res.bytesPerSec += bytes
	}
	for i := range res.share {
		res.share[i] /= res.bytesPerSec
	}
	res.bytesPerSec /= measured.Seconds()
	res.daemon /= measured.Seconds()
	res.hosts /= measured.Seconds()
	return res
}

func (x *experiment) log(t *testing.T, got, want result) {
	t.Helper()
	for i, g := range x.groups {
		t.Logf("%-8s %5.1f %% of the bandwidth, in the simulation %5.1f %% (%+.1f %%)", g.name, 100*got.share[i],
			100*want.share[i], 100*(got.share[i]/want.share[i]-1))
	}
	t.Logf("%.1f MB/s, in the simulation %.1f; processors: daemon %.2f, hosts %.2f; late by up to %v",
		got.bytesPerSec/1e6, want.bytesPerSec/1e6, got.daemon, got.hosts, got.late)
}

func hostNQN(g group, i int) string {
	return fmt.Sprintf("nqn.2026-11.example.host:%s-%d", strings.ReplaceAll(g.name, " ", "-"), i)
}

// result has what the groups got.
type result struct {
	share       []float64 // of 1; bytes while it is measured
	bytesPerSec float64
	// daemon and hosts are the numbers of processors that they used. late is the longest delay with which the measuring
	// goroutine woke up.
	daemon, hosts float64
	late          time.Duration
}

// profile is the result of the daemon's calibration of the drive, which determines what its policy does.
func (d *daemon) profile() (p jbof.Profile) {
	d.t.Helper()
	lines := d.log.find("drive calibrated")
	if len(lines) != 1 {
		d.t.Fatalf("the drive was measured %d times", len(lines))
	}
	value := func(key string) (v string) {
		for f := range strings.FieldsSeq(lines[0]) {
			if after, ok := strings.CutPrefix(f, key+"="); ok {
				v = after
			}
		}
		return v
	}
	ns := func(key string) float64 {
		v, err := time.ParseDuration(value(key))
		if err != nil {
			d.t.Fatalf("%v in %q", err, lines[0])
		}
		return float64(v)
	}
	depth := func(key string) int {
		n, err := strconv.Atoi(value(key))
		if err != nil {
			d.t.Fatalf("%v in %q", err, lines[0])
		}
		return n
	}
	const small, large = 4 << 10, 128 << 10
	p.ReadByteNS = (ns("read_128k") - ns("read_4k")) / (large - small)
	p.ReadNS = ns("read_4k") - small*p.ReadByteNS
	p.LatencyNS, p.Depth, p.LargeDepth = int64(ns("latency")), depth("depth"), depth("depth_128k")
	return p
}

// simulate runs the experiment in virtual time, several times, with a policy that has the daemon's measurement of the
// drive.
func (x *experiment) simulate(t *testing.T, p jbof.Profile) (res result) {
	t.Helper()
	size := x.sizeMiB << 20
	cfg, err := flash.Preset("dct983", size)
	if err != nil {
		t.Fatal(err)
	}
	cfg.Slowdown = x.slowdown
	drive, err := flash.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	drive.Precondition(x.condition)
	sc := sim.Scenario{Row: "e2e", Name: x.name, NetworkNS: 50 * sim.Microsecond}
	for _, r := range x.rounds {
		if r.to > r.measured {
			sc.Phases = append(sc.Phases, sim.Phase{FromNS: int64(r.measured), ToNS: int64(r.to)})
		}
	}
	for _, g := range x.groups {
		one := sim.Load{Kinds: []sim.Kind{{Op: g.op, SizeBytes: g.size}}, Depth: g.depth}
		var loads []sim.Load
		if !g.rests {
			loads = []sim.Load{one}
		} else {
			for _, r := range x.rounds {
				one.StartNS, one.StopNS = int64(r.from), int64(r.to)
				loads = append(loads, one)
			}
		}
		for i := range g.n {
			sc.Tenants = append(sc.Tenants, sim.Tenant{Name: fmt.Sprint(g.name, " ", i), Group: g.name,
				Weight: g.weight, Loads: loads, IgnoresCredits: g.standard})
		}
	}
	res.share = make([]float64, len(x.groups))
	spanNS := int64(0)
	for seed := range uint64(simulations) {
		r := sim.Run(&sc, sim.Setup{SizeBytes: size, Drive: drive.Clone(), Policy: jbof.New(jbof.Config{Profile: p}),
			Seed: seed})
		if r.ViolationCount > 0 {
			t.Fatal(r.Violations)
		}
		total, groups := 0.0, make([]float64, len(x.groups))
		for _, ph := range r.Phases {
			for i, g := range x.groups {
				for _, ten := range ph.Group(g.name) {
					bytes := ten.BytesPerSec * float64(ph.ToNS-ph.FromNS) / 1e9
					groups[i] += bytes
					total += bytes
				}
			}
			spanNS += ph.ToNS - ph.FromNS
		}
		for i := range groups {
			res.share[i] += groups[i] / total / simulations
		}
		res.bytesPerSec += total
	}
	res.bytesPerSec /= float64(spanNS) / 1e9
	return res
}

// steady is a host that keeps its depth outstanding, as a load generator does. Only the test's goroutine calls its
// methods.
type steady struct {
	t       *testing.T
	g       group
	q       *client.QPair
	from    int64 // bytes
	span    int64
	rng     *rand.Rand
	ops     atomic.Int64
	resting atomic.Bool
	wg      sync.WaitGroup
}

func newSteady(t *testing.T, d *daemon, g group, nqn string, seed uint64) *steady {
	t.Helper()
	o := d.options(nqn, nqnA)
	o.QPairs, o.QueueDepth, o.Credits, o.Spin = 1, 128, client.CreditsOn, -1
	if g.standard {
		o.Credits = client.CreditsOff
	}
	c := d.connect(o)
	n := open(t, c, 1)
	q, err := c.OpenQPair(ctx(t))
	if err != nil {
		t.Fatal(err)
	}
	if q.Depth() < g.depth {
		t.Fatalf("the queue takes %d commands, want %d", q.Depth(), g.depth)
	}
	h := &steady{t: t, g: g, q: q, span: n.Size(), rng: rand.New(rand.NewPCG(seed, 0))}
	t.Cleanup(func() {
		h.q.Interrupt() // still working if the test has failed
		h.wg.Wait()
		if err := h.q.Close(); err != nil {
			t.Errorf("%s: closing its queue: %v", g.name, err)
		}
	})
	return h
}

// start lets the host work until rest.
func (s *steady) start() {
	s.resting.Store(false)
	s.wg.Go(func() {
		if err := s.work(); err != nil && !s.t.Failed() {
			s.t.Errorf("%s: %v", s.g.name, err)
		}
	})
}

// rest stops the host and waits until all its commands have completed.
func (s *steady) rest() {
	s.resting.Store(true)
	s.wg.Wait()
}

func (s *steady) work() error {
	opcode := uint8(nvme.CmdRead)
	if s.g.op == pipeline.Write {
		opcode = nvme.CmdWrite
	}
	const block = 4096
	buffers := make([][]byte, s.g.depth)
	cmds := make([]client.Command, 0, s.g.depth)
	comps := make([]client.Completion, s.g.depth)
	ask := func(tag uint64) {
		at := s.from + s.rng.Int64N(s.span/s.g.size)*s.g.size
		cmds = append(cmds, client.Command{Data: buffers[tag], Tag: tag})
		client.SetRW(&cmds[len(cmds)-1], opcode, 1, uint64(at/block), uint32(s.g.size/block))
	}
	for i := range buffers {
		buffers[i] = make([]byte, s.g.size)
		ask(uint64(i))
	}
	for outstanding := 0; ; {
		n, err := s.q.Submit(cmds)
		if err != nil {
			return err
		}
		if n < len(cmds) {
			return errors.New("the queue takes less than its depth")
		}
		outstanding += n
		if outstanding == 0 {
			return nil
		}
		cmds = cmds[:0]
		if n, err = s.q.Poll(comps, -1); err != nil {
			return err
		}
		outstanding -= n
		s.ops.Add(int64(n))
		resting := s.resting.Load()
		for _, c := range comps[:n] {
			if !c.Status.OK() {
				return fmt.Errorf("status %v", c.Status)
			}
			if !resting {
				ask(c.Tag)
			}
		}
	}
}

// pass sleeps and returns the longest delay with which it woke up.
func pass(span time.Duration) (late time.Duration) {
	const grain = 10 * ms
	tick := time.NewTicker(grain)
	defer tick.Stop()
	for began := time.Now(); time.Since(began) < span; {
		before := time.Now()
		<-tick.C
		late = max(late, time.Since(before)-grain)
	}
	return late
}

// measure adds the bytes that the groups move during a span to share, and the processor time.
func (r *result) measure(d *daemon, hosts [][]*steady, span time.Duration) (took time.Duration) {
	count := func(sign float64) {
		for i, hs := range hosts {
			for _, h := range hs {
				r.share[i] += sign * float64(h.ops.Load()*h.g.size)
			}
		}
		r.daemon += sign * d.cpuTime().Seconds()
		r.hosts += sign * ownTime(d.t).Seconds()
	}
	began := time.Now()
	count(-1)
	r.late = max(r.late, pass(span))
	took = time.Since(began)
	count(1)
	return took
}

// ownTime is the processor time that this process has used.
func ownTime(t testing.TB) time.Duration {
	t.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
