package sim

import (
	"math"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"jbofd/internal/pipeline"
	"jbofd/internal/pipeline/jbof"
	"jbofd/internal/ssd/model/flash"
	"jbofd/internal/tenant"
)

// busy is a short scenario with loads of every kind, on a small drive.
func busy() Scenario {
	s := scenario("test", "busy", flash.Fragmented, join(readers(4, size4K), writers(4, size4K, flash.Fragmented),
		readers(2, size128K)))
	for _, x := range []Scenario{churn()[0], special()[0], special()[1]} {
		s.Tenants = append(s.Tenants, x.Tenants[len(x.Tenants)-2:]...)
	}
	s.SizeBytes = 512 << 20
	s.BinNS = binNS
	s.Phases = []Phase{{"steady", 30 * Millisecond, 100 * Millisecond}}
	return s
}

var prototypes = map[driveKey]*prototype{}

// direct runs a scenario without the runs of each load alone.
func direct(t *testing.T, sc Scenario, policy string, seed uint64) *Result {
	t.Helper()
	key := sc.drive()
	proto := prototypes[key]
	if proto == nil {
		proto = &prototype{}
		if err := proto.make(key, 1); err != nil {
			t.Fatal(err)
		}
		proto.profile = Calibrate(proto.drive.Clone(), key.sizeBytes, 1)
		prototypes[key] = proto
	}
	p, err := newPolicy(policy, proto)
	if err != nil {
		t.Fatal(err)
	}
	return whole(t, &sc, Setup{SizeBytes: sc.SizeBytes, Drive: proto.drive.Clone(), Policy: p,
		Parda: policy == pardaName, Seed: seed})
}

// whole runs a scenario and checks that no invariant is broken.
func whole(t *testing.T, sc *Scenario, set Setup) *Result {
	t.Helper()
	res := Run(sc, set)
	for _, v := range res.Violations {
		t.Errorf("%v, %s: %s", sc, res.Policy, v)
	}
	return res
}

func TestARunIsDeterminedByItsSeed(t *testing.T) {
	for _, policy := range Policies() {
		a, b := direct(t, busy(), policy, 7), direct(t, busy(), policy, 7)
		if !reflect.DeepEqual(a, b) {
			t.Errorf("%s: two runs with one seed differ", policy)
		}
		c := direct(t, busy(), policy, 8)
		if c.Seed = a.Seed; reflect.DeepEqual(a, c) {
			t.Errorf("%s: two seeds give the same", policy)
		}
	}
}

func TestEveryIOEndsOnce(t *testing.T) {
	for _, policy := range Policies() {
		res := direct(t, busy(), policy, 1)
		if res.Sent != res.Completed+res.Cancelled || res.Completed < 1000 || res.Cancelled == 0 {
			t.Errorf("%s: %d sent, %d completed, %d cancelled", policy, res.Sent, res.Completed, res.Cancelled)
		}
	}
}

func TestPhasesAndBinsCountTheSame(t *testing.T) {
	sc := busy()
	sc.Phases = []Phase{{"all", 0, 100 * Millisecond}}
	res := direct(t, sc, "fifo", 1)
	var bins float64
	for _, b := range res.Series.BytesPerSec {
		bins += b * float64(sc.BinNS) / 1e9
	}
	phase := res.Phases[0].BytesPerSec * 0.1
	if len(res.Series.BytesPerSec) != 10 || math.Abs(bins-phase) > 1 {
		t.Errorf("%d bins hold %.0f bytes, the phase %.0f", len(res.Series.BytesPerSec), bins, phase)
	}
}

// both does steps on two processors.
func both(steps []Step) error {
	var next atomic.Int64
	var workers sync.WaitGroup
	errs := make([]error, len(steps))
	for range 2 {
		workers.Go(func() {
			for i := int(next.Add(1)) - 1; i < len(steps); i = int(next.Add(1)) - 1 {
				errs[i] = steps[i].Do()
			}
		})
	}
	workers.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// server is a drive that serves one I/O after the other, each in the same time.
type server struct {
	serviceNS int64
	freeNS    int64
	pending   []flash.Completion
}

func (s *server) Submit(now int64, r flash.Request) {
	s.freeNS = max(now, s.freeNS) + s.serviceNS
	s.pending = append(s.pending, flash.Completion{Tag: r.Tag, AtNS: s.freeNS, LatencyNS: s.freeNS - now})
}

func (s *server) NextEvent() (int64, bool) {
	if len(s.pending) == 0 {
		return 0, false
	}
	return s.pending[0].AtNS, true
}

func (s *server) Advance(now int64, dst []flash.Completion) []flash.Completion {
	for len(s.pending) > 0 && s.pending[0].AtNS <= now {
		dst = append(dst, s.pending[0])
		s.pending = s.pending[1:]
	}
	return dst
}

// TestClosedLoopsMatchOperationalAnalysis: n I/Os go round between a constant delay Z and a server of constant
// time S. Its throughput is min(n/(S+Z), 1/S), the cycle n over that (Denning and Buzen,
// "The operational analysis of queueing network models", 1978).
func TestClosedLoopsMatchOperationalAnalysis(t *testing.T) {
	const service, network = 10 * Microsecond, 45 * Microsecond
	for _, c := range []struct {
		tenants, depth int
		cpuNS          int64
	}{{1, 1, 0}, {1, 4, 0}, {2, 5, 0}, {4, 8, 0}, {1, 64, 0}, {2, 8, 20 * Microsecond}} {
		sc := scenario("test", "loop", flash.Empty,
			clients(c.tenants, "r", 1, stream(pipeline.Read, size4K, false, c.depth)))
		sc.NetworkNS, sc.TargetCPUNS = network, c.cpuNS
		sc.Phases = []Phase{{"steady", 10 * Millisecond, 110 * Millisecond}}
		res := whole(t, &sc, Setup{SizeBytes: 1 << 30, Drive: &server{serviceNS: service},
			Policy: pipeline.NewFIFO(1000), Seed: 1,
			Standalone: func(*Load) float64 { return size4K * 1e9 / float64(service) }})
		n := float64(c.tenants * c.depth)
		rate := min(n*1e9/float64(service+2*network+c.cpuNS), 1e9/float64(max(service, c.cpuNS)))
		p := &res.Phases[0]
		if math.Abs(p.IOsPerSec/rate-1) > 0.001 {
			t.Errorf("%+v: %.0f IOPS, want %.0f", c, p.IOsPerSec, rate)
		}
		if want := n * 1e9 / rate; math.Abs(p.Latency.MeanNS/want-1) > 0.001 ||
			math.Abs(float64(p.Latency.P50NS)/want-1) > 0.002 {
			t.Errorf("%+v: latency is %.0f ns, median %d ns, want %.0f", c, p.Latency.MeanNS, p.Latency.P50NS, want)
		}
		if want := rate * float64(service) / 1e9; math.Abs(p.Utilisation/want-1) > 0.001 ||
			math.Abs(p.FUtilMean/want-1) > 0.001 {
			t.Errorf("%+v: utilisation %.3f, mean f-Util %.3f, want %.3f", c, p.Utilisation, p.FUtilMean, want)
		}
	}
}

func TestPacedLoadsKeepTheirPace(t *testing.T) {
	tenants := clients(3, "r", 1, stream(pipeline.Read, size4K, false, 1))
	for i := range tenants {
		tenants[i].Loads[0].IOsPerSec = float64(1000 * (i + 1))
	}
	tenants[2].Loads[0].OnNS, tenants[2].Loads[0].OffNS = 10*Millisecond, 30*Millisecond
	sc := scenario("test", "pace", flash.Empty, tenants)
	res := whole(t, &sc, Setup{SizeBytes: 1 << 30, Drive: &server{serviceNS: 10_000}, Policy: pipeline.NewFIFO(1000),
		Seed: 1})
	for i, want := range []float64{1000, 2000, 3000.0 / 4} {
		if got := res.Phases[0].Tenants[i].IOsPerSec; math.Abs(got/want-1) > 0.01 {
			t.Errorf("tenant %d: %.0f IOPS, want %.0f", i, got, want)
		}
	}
}

func TestFUtilIsUsageByFairShare(t *testing.T) {
	p := PhaseResult{Tenants: []TenantResult{
		{Weight: 1, Usage: 0.1, Active: true},
		{Weight: 2, Usage: 0.5, Active: true},
		{Weight: 1, Usage: 0.25, Active: true},
		{Weight: 5, Usage: 0.1}, // arrived and left
	}}
	p.judge()
	for i, want := range []float64{0.4, 1, 1, 0} {
		if got := p.Tenants[i].FUtil; math.Abs(got-want) > 1e-12 {
			t.Errorf("tenant %d: f-Util %v, want %v", i, got, want)
		}
	}
	if math.Abs(p.Utilisation-0.95) > 1e-12 || p.FUtilMin != 0.4 || math.Abs(p.FUtilMean-0.8) > 1e-12 ||
		p.FUtilMax != 1 || math.Abs(p.Jain-2.4*2.4/(3*2.16)) > 1e-12 {
		t.Errorf("got %+v", p)
	}
}

func TestSettlingIsUntilTheLastTenantIsNear(t *testing.T) {
	s := &Series{BinNS: 10, BytesPerSec: make([]float64, 20),
		Tenants: [][]float64{make([]float64, 20), make([]float64, 20), make([]float64, 20)}}
	for b := range 20 {
		// One tenant is present all the time, one has its share at once, and one reaches its share within 5 bins after
		// the change at bin 4.
		s.Tenants[0][b] = 0.5
		if b >= 4 {
			s.Tenants[1][b] = 1
			s.Tenants[2][b] = min(float64(b-4)/5, 1)
		}
	}
	// Bins 7 to 9 hold 0.6, 0.8 and 1: the first three within a quarter of 1.
	if got := s.settle(40, 200); got != 30 {
		t.Errorf("settled after %d ns, want 30", got)
	}
}

func TestJain(t *testing.T) {
	for _, c := range []struct {
		f    []float64
		want float64
	}{{nil, 0}, {[]float64{0, 0}, 0}, {[]float64{3, 3, 3}, 1}, {[]float64{1, 0, 0, 0}, 0.25}, {[]float64{1, 2}, 0.9}} {
		if got := Jain(c.f); math.Abs(got-c.want) > 1e-12 {
			t.Errorf("Jain(%v) is %v, want %v", c.f, got, c.want)
		}
	}
}

// stingy is a FIFO that gives credits and counts what hosts have outstanding.
type stingy struct {
	*pipeline.FIFO
	credit      int
	units, most map[tenant.ID]int
	ios         map[pipeline.Tag]pipeline.IO
}

func (s *stingy) Credit(tenant.ID) int { return s.credit }

func (s *stingy) Enqueue(now int64, io pipeline.IO) {
	s.ios[io.Tag] = io
	s.units[io.Tenant] += int((io.LenBytes + 4095) / 4096)
	s.most[io.Tenant] = max(s.most[io.Tenant], s.units[io.Tenant])
	s.FIFO.Enqueue(now, io)
}

func (s *stingy) Complete(now int64, tag pipeline.Tag, r pipeline.Result) {
	io := s.ios[tag]
	s.units[io.Tenant] -= int((io.LenBytes + 4095) / 4096)
	s.FIFO.Complete(now, tag, r)
}

func TestHostsKeepToTheirCredit(t *testing.T) {
	odd := clients(1, "odd", 1, stream(pipeline.Read, size4K+1, false, 64))
	large := clients(1, "large", 1, stream(pipeline.Read, size128K, false, 64))
	deaf := clients(1, "deaf", 1, stream(pipeline.Read, size4K, false, 64))
	deaf[0].IgnoresCredits = true
	sc := scenario("test", "credit", flash.Empty, join(readers(1, size4K), odd, large, deaf))
	sc.Phases = []Phase{{"steady", 10 * Millisecond, 60 * Millisecond}}
	s := &stingy{pipeline.NewFIFO(1000), 7, map[tenant.ID]int{}, map[tenant.ID]int{}, map[pipeline.Tag]pipeline.IO{}}
	res := whole(t, &sc, Setup{SizeBytes: 1 << 30, Drive: &server{serviceNS: 5000}, Policy: s, Seed: 1})
	// 7 units; 3 I/Os of 2 units; 1 I/O although it is too large; all.
	for i, want := range []int{7, 6, 32, 64} {
		if got := s.most[tenant.ID(i)]; got != want {
			t.Errorf("%s: at most %d units outstanding, want %d", sc.Tenants[i].Name, got, want)
		}
	}
	first := res.Phases[0].Tenants[0]
	if n := first.AppLatency.MeanNS / first.Latency.MeanNS; math.Abs(n-32.0/7) > 0.1 {
		t.Errorf("the application waits %.2f times as long as its I/Os, want 32/7", n)
	}
}

func TestParda(t *testing.T) {
	for _, c := range []struct {
		serviceNS int64
		want      float64
	}{
		// Far below the threshold: everything that the application requests. Far above: the window at which Lth/L w +
		// beta = w.
		{1000, 64}, {200_000, 0},
	} {
		sc := scenario("test", "parda", flash.Empty, clients(2, "r", 1, stream(pipeline.Read, size4K, false, 64)))
		res := whole(t, &sc, Setup{SizeBytes: 1 << 30, Drive: &server{serviceNS: c.serviceNS},
			Policy: pipeline.NewFIFO(1000), Parda: true, Seed: 1})
		p := &res.Phases[0]
		outstanding := p.IOsPerSec * p.Latency.MeanNS / 1e9 / 2 // Little
		want := c.want
		if want == 0 {
			// L = 2 w S + 2 x network; w (1 - Lth/L) = beta.
			for w := 1.0; w < 64; w += 0.01 {
				if l := 2*w*float64(c.serviceNS) + 2*float64(sc.NetworkNS); w*(1-pardaThresholdNS/l) >= pardaBeta {
					want = w
					break
				}
			}
		}
		if math.Abs(outstanding-want) > 1 {
			t.Errorf("service %d ns: %.2f outstanding each, want %.2f", c.serviceNS, outstanding, want)
		}
	}
}

// late has a defect: it sometimes forgets an I/O.
type late struct {
	*pipeline.FIFO
	n int
}

func (l *late) Dispatch(now int64, dst []pipeline.Tag) []pipeline.Tag {
	l.n++
	if l.n > 1000 {
		return dst
	}
	return l.FIFO.Dispatch(now, dst)
}

func TestAStallIsFound(t *testing.T) {
	sc := scenario("test", "stall", flash.Empty, readers(2, size4K))
	res := Run(&sc, Setup{SizeBytes: 1 << 30, Drive: &server{serviceNS: 5000},
		Policy: &late{FIFO: pipeline.NewFIFO(1000)}, Seed: 1})
	if res.ViolationCount == 0 {
		t.Error("a policy that stops dispatching breaks no invariant")
	}
}

// leaky has another defect: it does not forget tenants.
type leaky struct {
	*pipeline.FIFO
	active int
}

func (l *leaky) SetTenant(now int64, t tenant.ID, weight int) {
	l.active++
	l.FIFO.SetTenant(now, t, weight)
}

func (l *leaky) Stats(s *pipeline.Stats) { *s = pipeline.Stats{ActiveTenants: l.active} }

func TestALeakIsFound(t *testing.T) {
	sc := busy()
	res := Run(&sc, Setup{SizeBytes: sc.SizeBytes, Drive: &server{serviceNS: 5000},
		Policy: &leaky{FIFO: pipeline.NewFIFO(1000)}, Seed: 1})
	if res.Sessions == 0 || res.ViolationCount == 0 {
		t.Errorf("%d disconnects from a policy that forgets no tenant break %d invariants", res.Sessions,
			res.ViolationCount)
	}
}

func TestTheMatrixHasEveryRow(t *testing.T) {
	var rows []string
	seen := map[string]bool{}
	for _, s := range Matrix() {
		if !slices.Contains(rows, s.Row) {
			rows = append(rows, s.Row)
		}
		if seen[s.String()] {
			t.Errorf("%v is there twice", &s)
		}
		seen[s.String()] = true
		for i, p := range s.Phases {
			if p.ToNS <= p.FromNS || i > 0 && p.FromNS < s.Phases[i-1].ToNS {
				t.Errorf("%v: phase %s does not follow", &s, p.Name)
			}
		}
	}
	if want := []string{"utilisation", "size", "weights", "read-write", "depth", "order", "dynamic", "churn", "special",
		"light-heavy", "burst", "cpu", "application", "p4800x", "ablation",
		"hostile"}; !slices.Equal(rows, want) {
		t.Errorf("rows are %q, want %q", rows, want)
	}
}

// TestASlowDriveIsMeasuredAndSharedAlike: on a drive that is slower by a factor, the measured costs are larger by that
// factor, and the tenants get less by it.
func TestASlowDriveIsMeasuredAndSharedAlike(t *testing.T) {
	const slower = 20
	run := func(slowdown int) (*Result, jbof.Profile) {
		sc := scenario("slow", "read-4K-128K-clean", flash.Clean, join(readers(4, size4K), readers(4, size128K)))
		sc.SizeBytes, sc.Slowdown = 128<<20, slowdown
		lab := NewLab(1)
		res, err := lab.Run(sc, "jbof")
		if err != nil {
			t.Fatal(err)
		}
		return res, lab.drives[sc.drive()].profile
	}
	fast, quick := run(1)
	slow, profile := run(slower)
	for _, c := range []struct {
		what      string
		got, want float64
	}{
		{"what a 4K read costs", profile.ReadNS + size4K*profile.ReadByteNS,
			slower * (quick.ReadNS + size4K*quick.ReadByteNS)},
		{"what a 128K read costs", profile.ReadNS + size128K*profile.ReadByteNS,
			slower * (quick.ReadNS + size128K*quick.ReadByteNS)},
		{"a lone read's latency", float64(profile.LatencyNS), slower * float64(quick.LatencyNS)},
		{"the 4K readers' rate", slow.Phases[0].Group("4K read")[0].BytesPerSec,
			fast.Phases[0].Group("4K read")[0].BytesPerSec / slower},
		{"the 128K readers' rate", slow.Phases[0].Group("128K read")[0].BytesPerSec,
			fast.Phases[0].Group("128K read")[0].BytesPerSec / slower},
	} {
		if math.Abs(c.got/c.want-1) > 0.1 {
			t.Errorf("%s is %.0f, want %.0f", c.what, c.got, c.want)
		}
	}
}
