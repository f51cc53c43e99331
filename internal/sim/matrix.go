package sim

import (
	"fmt"

	"jbofd/internal/pipeline"
	"jbofd/internal/ssd/model/flash"
)

// Defaults of the matrix.
const (
	defaultNetworkNS = 5 * Microsecond
	defaultPreset    = "dct983"
	defaultSizeBytes = 4 << 30
	warmNS           = Second
	measuredNS       = 2 * Second
	// learnNS is the warm-up for policies that must learn how reads and writes load the drive.
	learnNS = 2500 * Millisecond
)

// Queue depths of clients by I/O size, as in the paper.
const (
	smallDepth = 32
	largeDepth = 4
)

// Sizes of I/Os.
const (
	size4K    = 4 << 10
	size12K   = 12 << 10
	size16K   = 16 << 10
	size100K  = 100 << 10
	size127K5 = 255 << 9
	size128K  = 128 << 10
)

// depthOf returns the usual queue depth for an I/O size.
func depthOf(size int64) int {
	switch {
	case size <= size4K:
		return smallDepth
	case size <= size16K:
		return smallDepth / 2
	}
	return largeDepth
}

// stream returns a load of one kind.
func stream(op pipeline.Op, size int64, sequential bool, depth int) Load {
	return Load{Kinds: []Kind{{Op: op, SizeBytes: size, Sequential: sequential, Parts: 1}}, Depth: depth}
}

// clients returns n tenants of one group, each with one load.
func clients(n int, group string, weight int, l Load) []Tenant {
	out := make([]Tenant, n)
	for i := range out {
		out[i] = Tenant{Name: fmt.Sprintf("%s %d", group, i+1), Group: group, Weight: weight, Loads: []Load{l}}
	}
	return out
}

func readers(n int, size int64) []Tenant {
	return clients(n, SizeString(size)+" read", 1, stream(pipeline.Read, size, false, depthOf(size)))
}

// writers returns n writers. They write sequentially to a clean drive, because random writes would fragment it, and at
// random to a fragmented drive.
func writers(n int, size int64, c flash.Condition) []Tenant {
	return clients(n, SizeString(size)+" write", 1, stream(pipeline.Write, size, c == flash.Clean, depthOf(size)))
}

func join(groups ...[]Tenant) (all []Tenant) {
	for _, g := range groups {
		all = append(all, g...)
	}
	return all
}

// scenario returns a scenario with the default times: a warm-up followed by one phase.
func scenario(row, name string, c flash.Condition, tenants []Tenant) Scenario {
	return Scenario{Row: row, Name: name, Preset: defaultPreset, SizeBytes: defaultSizeBytes, Condition: c,
		Tenants:   tenants,
		NetworkNS: defaultNetworkNS, Phases: []Phase{{"steady", warmNS, warmNS + measuredNS}}}
}

// Matrix returns all experiments, row by row. The first scenario of a row is the most significant one.
func Matrix() []Scenario {
	var m []Scenario
	for _, row := range []func() []Scenario{utilisation, sizes, weights, readWrite, depths, order, dynamic, churn,
		special, lightHeavy, burst, curve, application, generality, ablation, hostile} {
		m = append(m, row()...)
	}
	return m
}

var bothConditions = []flash.Condition{flash.Clean, flash.Fragmented}

func utilisation() []Scenario {
	return []Scenario{
		scenario("utilisation", "4K-read-fragmented", flash.Fragmented, readers(16, size4K)),
		scenario("utilisation", "4K-write-fragmented", flash.Fragmented, writers(16, size4K, flash.Fragmented)),
		scenario("utilisation", "128K-read-clean", flash.Clean, readers(16, size128K)),
		scenario("utilisation", "128K-write-clean", flash.Clean, writers(16, size128K, flash.Clean)),
	}
}

func sizes() []Scenario {
	var m []Scenario
	for _, c := range bothConditions {
		add := func(name string, tenants ...[]Tenant) {
			m = append(m, scenario("size", name+"-"+conditionName(c), c, join(tenants...)))
		}
		add("read-4K-128K", readers(8, size4K), readers(8, size128K))
		add("write-4K-128K", writers(8, size4K, c), writers(8, size128K, c))
		add("read-odd", readers(4, size4K), readers(4, size12K), readers(4, size100K), readers(4, size127K5))
		add("write-odd", writers(4, size4K, c), writers(4, size12K, c), writers(4, size100K, c),
			writers(4, size127K5, c))
		add("read-127.5K-128K", readers(8, size127K5), readers(8, size128K))
	}
	return m
}

// weighted returns n readers or writers of each of the weights 1, 2 and 4.
func weighted(n int, size int64, op pipeline.Op, sequential bool) (all []Tenant) {
	for _, w := range []int{1, 2, 4} {
		all = append(all, clients(n, fmt.Sprintf("weight %d", w), w, stream(op, size, sequential, 2*depthOf(size)))...)
	}
	return all
}

func weights() []Scenario {
	mixed := join(clients(2, "weight 4, 4K", 4, stream(pipeline.Read, size4K, false, 2*smallDepth)),
		clients(2, "weight 1, 4K", 1, stream(pipeline.Read, size4K, false, 2*smallDepth)),
		clients(2, "weight 2, 128K", 2, stream(pipeline.Read, size128K, false, 2*largeDepth)),
		clients(2, "weight 4, 128K", 4, stream(pipeline.Read, size128K, false, 2*largeDepth)))
	return []Scenario{
		scenario("weights", "4K-read-fragmented", flash.Fragmented, weighted(4, size4K, pipeline.Read, false)),
		scenario("weights", "128K-read-clean", flash.Clean, weighted(4, size128K, pipeline.Read, false)),
		scenario("weights", "128K-write-clean", flash.Clean, weighted(4, size128K, pipeline.Write, true)),
		scenario("weights", "4K-write-fragmented", flash.Fragmented, weighted(4, size4K, pipeline.Write, false)),
		scenario("weights", "mixed-read-clean", flash.Clean, mixed),
	}
}

func readWrite() []Scenario {
	var m []Scenario
	for _, c := range bothConditions {
		add := func(name string, tenants ...[]Tenant) {
			s := scenario("read-write", name+"-"+conditionName(c), c, join(tenants...))
			s.Phases = []Phase{{"steady", learnNS, learnNS + 2*Second}}
			m = append(m, s)
		}
		add("4K", readers(8, size4K), writers(8, size4K, c))
		add("128K", readers(8, size128K), writers(8, size128K, c))
		add("4K-few-writers", readers(12, size4K), writers(4, size4K, c))
		add("128K-many-writers", readers(4, size128K), writers(12, size128K, c))
		add("4K-read-128K-write", readers(8, size4K), writers(8, size128K, c))
	}
	return m
}

func depths() []Scenario {
	mix := func(n int, op pipeline.Op, size int64, sequential bool) (all []Tenant) {
		for _, d := range []int{1, 8, 32, 128} {
			all = append(all, clients(n, fmt.Sprintf("depth %d", d), 1, stream(op, size, sequential, d))...)
		}
		return all
	}
	// The scenario needs 96 readers of 4 KiB: with fewer readers, the fair share exceeds what depth 1 can get from a
	// loaded drive.
	return []Scenario{
		scenario("depth", "4K-read-fragmented", flash.Fragmented, mix(24, pipeline.Read, size4K, false)),
		scenario("depth", "128K-read-clean", flash.Clean, mix(4, pipeline.Read, size128K, false)),
		scenario("depth", "128K-write-clean", flash.Clean, mix(4, pipeline.Write, size128K, true)),
		scenario("depth", "4K-write-fragmented", flash.Fragmented, mix(4, pipeline.Write, size4K, false)),
	}
}

func order() []Scenario {
	pair := func(size int64) []Tenant {
		return join(clients(8, "sequential", 1, stream(pipeline.Write, size, true, depthOf(size))),
			clients(8, "random", 1, stream(pipeline.Write, size, false, depthOf(size))))
	}
	return []Scenario{
		scenario("order", "4K-write-fragmented", flash.Fragmented, pair(size4K)),
		scenario("order", "128K-write-clean", flash.Clean, pair(size128K)),
	}
}

// stepNS is the time between changes in the dynamic rows.
const (
	stepNS   = 500 * Millisecond
	settleNS = 200 * Millisecond
	binNS    = 10 * Millisecond
)

func dynamic() []Scenario {
	// steps makes tenants arrive and leave one after the other.
	steps := func(name string, c flash.Condition, tenants []Tenant) Scenario {
		s := scenario("dynamic", name, c, tenants)
		s.BinNS, s.Phases = binNS, nil
		n := len(tenants)
		for i := range tenants {
			l := &tenants[i].Loads[0]
			l.StartNS, l.StopNS = int64(i)*stepNS, int64(n+i)*stepNS
		}
		for i := range 2*n - 1 {
			at := int64(i) * stepNS
			s.Phases = append(s.Phases, Phase{fmt.Sprintf("step %d", i+1), at + settleNS, at + stepNS})
		}
		return s
	}
	alternate := func(n int, a, b Tenant) (all []Tenant) {
		for i := range n {
			t := a
			if i%2 == 1 {
				t = b
			}
			t.Name = fmt.Sprintf("%d: %s", i+1, t.Group)
			t.Loads = []Load{t.Loads[0]}
			all = append(all, t)
		}
		return all
	}
	read, write := readers(1, size128K)[0], writers(1, size128K, flash.Clean)[0]
	read.Loads[0].Depth, write.Loads[0].Depth = 32, 32

	// Half of the tenants write for a second; then all of them read again.
	var turn []Tenant
	for i := range 8 {
		l := stream(pipeline.Read, size128K, false, 8)
		t := Tenant{Name: fmt.Sprintf("reader %d", i+1), Group: "reader", Loads: []Load{l}}
		if i%2 == 1 {
			w, again := stream(pipeline.Write, size128K, true, 8), l
			l.StopNS, w.StartNS, w.StopNS, again.StartNS = Second, Second, 2*Second, 2*Second
			t = Tenant{Name: fmt.Sprintf("switcher %d", i+1), Group: "switcher", Loads: []Load{l, w, again}}
		}
		turn = append(turn, t)
	}
	turning := scenario("dynamic", "switch-clean", flash.Clean, turn)
	turning.BinNS = binNS
	turning.Phases = []Phase{{"reads", settleNS, Second}, {"half writes", Second + settleNS, 2 * Second},
		{"reads again", 2*Second + settleNS, 3 * Second}}

	// Writers start on a drive that received only few writes before.
	heavy := clients(8, "4K write", 1, stream(pipeline.Write, size4K, false, smallDepth))
	for i := range heavy {
		heavy[i].Loads[0].StartNS, heavy[i].Loads[0].StopNS = 2*Second, 4*Second
	}
	light := clients(1, "light write", 1, stream(pipeline.Write, size4K, false, 1))
	light[0].Loads[0].IOsPerSec = 500
	cost := scenario("dynamic", "write-cost-fragmented", flash.Fragmented, join(readers(8, size4K), heavy, light))
	cost.BinNS = binNS
	cost.Phases = []Phase{{"light writes", Second, 2 * Second}, {"heavy writes", 2500 * Millisecond, 4 * Second},
		{"light writes again", 5 * Second, 6500 * Millisecond}}

	return []Scenario{
		steps("arrive-leave-clean", flash.Clean, alternate(8, read, read)),
		steps("arrive-leave-read-write-clean", flash.Clean, alternate(6, read, write)),
		turning,
		cost,
	}
}

func churn() []Scenario {
	come := join(clients(4, "coming reader", 1, stream(pipeline.Read, size4K, false, smallDepth)),
		clients(4, "coming writer", 1, stream(pipeline.Write, size4K, false, smallDepth)))
	for i := range come {
		come[i].UpNS, come[i].DownNS = 10*Millisecond, 5*Millisecond
	}
	s := scenario("churn", "1000-sessions-fragmented", flash.Fragmented,
		join(readers(4, size4K), writers(4, size4K, flash.Fragmented), come))
	s.Sessions = 1000
	s.Phases = []Phase{{"churn", 500 * Millisecond, 1700 * Millisecond}, {"after", 2500 * Millisecond, 3 * Second}}
	return []Scenario{s}
}

func special() []Scenario {
	storm := func(name string, c flash.Condition, l Load) Scenario {
		return scenario("special", name+"-"+conditionName(c), c,
			join(readers(6, size4K), writers(6, size4K, c), clients(4, name, 1, l)))
	}
	return []Scenario{
		storm("trim", flash.Fragmented, stream(pipeline.Deallocate, size128K, false, smallDepth)),
		storm("flush", flash.Fragmented, stream(pipeline.Flush, 0, false, smallDepth)),
		storm("write-zeroes", flash.Fragmented, stream(pipeline.WriteZeroes, size128K, false, smallDepth)),
	}
}

func lightHeavy() []Scenario {
	light := clients(8, "light", 1, stream(pipeline.Read, size4K, false, 1))
	paced := clients(8, "light", 1, stream(pipeline.Read, size4K, false, 1))
	for i := range paced {
		paced[i].Loads[0].IOsPerSec = 1000
	}
	heavy := func(op pipeline.Op, size int64, sequential bool, depth int) []Tenant {
		return clients(1, "heavy", 1, stream(op, size, sequential, depth))
	}
	return []Scenario{
		scenario("light-heavy", "128K-read-clean", flash.Clean, join(heavy(pipeline.Read, size128K, false, 64), paced)),
		scenario("light-heavy", "128K-read-clean-closed", flash.Clean,
			join(heavy(pipeline.Read, size128K, false, 64), light)),
		scenario("light-heavy", "4K-read-fragmented", flash.Fragmented,
			join(heavy(pipeline.Read, size4K, false, 256), paced)),
		scenario("light-heavy", "128K-write-clean", flash.Clean,
			join(heavy(pipeline.Write, size128K, true, 64), paced)),
	}
}

func burst() []Scenario {
	onOff := func(name string, ns int64) Scenario {
		b := clients(4, "burst", 1, stream(pipeline.Read, size4K, false, smallDepth))
		for i := range b {
			b[i].Loads[0].OnNS, b[i].Loads[0].OffNS = ns, ns
			b[i].Loads[0].StartNS = int64(i) * ns / 4
		}
		return scenario("burst", name, flash.Fragmented, join(readers(6, size4K), writers(6, size4K, flash.Fragmented),
			b))
	}
	t := join(readers(8, size4K), writers(8, size4K, flash.Fragmented))
	for i := range t {
		again := t[i].Loads[0]
		t[i].Loads[0].StopNS = 2 * Second
		again.StartNS = 12 * Second
		t[i].Loads = []Load{t[i].Loads[0], again}
	}
	after := scenario("burst", "after-10s-idle-fragmented", flash.Fragmented, t)
	after.Phases = []Phase{{"steady", warmNS, 2 * Second}, {"burst", 12 * Second, 12100 * Millisecond},
		{"later", 12100 * Millisecond, 12600 * Millisecond}}
	return []Scenario{after, onOff("on-off-10ms-fragmented", 10*Millisecond),
		onOff("on-off-100ms-fragmented", 100*Millisecond)}
}

func curve() []Scenario {
	var m []Scenario
	for _, us := range []int64{1, 5, 20, 80, 320} {
		s := scenario("cpu", fmt.Sprintf("4K-read-%dus", us), flash.Clean, readers(8, size4K))
		s.TargetCPUNS = us * Microsecond
		m = append(m, s)
	}
	return m
}

func application() []Scenario {
	// A key-value store as the drive sees it: point reads, log appends and compaction.
	store := func(c flash.Condition) Scenario {
		var t []Tenant
		for i := range 8 {
			t = append(t, Tenant{Name: fmt.Sprintf("store %d", i+1), Group: "store", Loads: []Load{
				stream(pipeline.Read, size4K, false, 16),
				stream(pipeline.Write, size16K, true, 1),
				stream(pipeline.Read, size128K, true, 2),
				stream(pipeline.Write, size128K, true, 2),
			}})
		}
		// Two of the stores compact as fast as they can.
		for i := range 2 {
			t[i].Name, t[i].Group = fmt.Sprintf("compacting store %d", i+1), "compacting store"
			t[i].Loads[2].Depth, t[i].Loads[3].Depth = 8, 8
		}
		return scenario("application", "kv-stores-"+conditionName(c), c, t)
	}
	return []Scenario{store(flash.Fragmented), store(flash.Clean)}
}

func generality() []Scenario {
	// A drive for which no policy was tuned: it does not collect garbage and has a tenth of the latency.
	var m []Scenario
	add := func(name string, tenants ...[]Tenant) {
		s := scenario("p4800x", name, flash.Clean, join(tenants...))
		s.Preset = "p4800x"
		m = append(m, s)
	}
	add("4K-read-write", readers(8, size4K),
		clients(8, "4K write", 1, stream(pipeline.Write, size4K, false, smallDepth)))
	add("4K-128K-read", readers(8, size4K), readers(8, size128K))
	add("4K-read", readers(16, size4K))
	return m
}

func ablation() []Scenario {
	bare := func(s Scenario) Scenario {
		s.Row, s.Name = "ablation", "no-credits-"+s.Row+"-"+s.Name
		for i := range s.Tenants {
			s.Tenants[i].IgnoresCredits = true
		}
		return s
	}
	return []Scenario{
		bare(scenario("read-write", "4K-fragmented", flash.Fragmented,
			join(readers(8, size4K), writers(8, size4K, flash.Fragmented)))),
		bare(scenario("size", "read-4K-128K-clean", flash.Clean, join(readers(8, size4K), readers(8, size128K)))),
	}
}
