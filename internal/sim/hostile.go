package sim

import (
	"slices"

	"jbofd/internal/pipeline"
	"jbofd/internal/ssd/model/flash"
)

// Sizes of large I/Os.
const (
	size512 = 512
	size1M  = 1 << 20
	size16M = 16 << 20
	size32M = 32 << 20
)

// slowUnmapNS is the time that slow drives take to deallocate or zero 1 MiB.
const slowUnmapNS = 2 * Millisecond

// withoutCredits is the end of the names of scenarios whose hosts do not implement the credit extension, as most
// hosts do not.
const withoutCredits = "-no-credits"

// hostile returns the row of loads, hosts and drives that have broken the sharing of a drive, or may. Each scenario is
// there twice: with hosts that keep to credits, and with hosts that do not.
func hostile() (m []Scenario) {
	for _, s := range slices.Concat(foreignDrives(), changingDrives(), rangeCommands(), unusualSizes(), unusualLoads(),
		pollingHosts()) {
		without := s
		without.Name += withoutCredits
		without.Tenants = slices.Clone(s.Tenants)
		for i := range without.Tenants {
			without.Tenants[i].IgnoresCredits = true
		}
		m = append(m, s, without)
	}
	return m
}

// quick shortens the scenario, for drives that do much in a second.
func (s Scenario) quick() Scenario {
	s.Phases = []Phase{{"steady", 700 * Millisecond, 1200 * Millisecond}}
	return s
}

// hostileScenario returns a scenario on a drive of 1 GiB: 0.9 s to learn, and 0.8 s that are measured.
func hostileScenario(name string, c flash.Condition, tenants ...[]Tenant) Scenario {
	s := scenario("hostile", name, c, join(tenants...))
	s.SizeBytes = 1 << 30
	s.Phases = []Phase{{"steady", 900 * Millisecond, 1700 * Millisecond}}
	return s
}

// on returns the scenario on another drive.
func (s Scenario) on(preset string) Scenario {
	s.Preset = preset
	return s
}

// blank returns the scenario on a drive that was not calibrated.
func (s Scenario) blank() Scenario {
	s.Blank = true
	return s
}

// foreignDrives are drives for which no policy was tuned, calibrated or not.
func foreignDrives() (m []Scenario) {
	for _, preset := range []string{"sata", "qlc", "gen4", "gen5", "p4800x", defaultPreset} {
		c := flash.Fragmented
		s := hostileScenario(preset, c, readers(6, size4K), readers(2, size128K), writers(4, size4K, c),
			writers(4, size128K, c)).on(preset)
		reads := hostileScenario("blank-reads-"+preset, c, readers(4, size4K), readers(4, size128K)).on(preset).blank()
		if preset == "gen4" || preset == "gen5" {
			s, reads = s.quick(), reads.quick()
		}
		blank := s.blank()
		blank.Name = "blank-" + s.Name
		m = append(m, s, blank, reads)
	}
	return m
}

// changingDrives change their speed while they serve.
func changingDrives() []Scenario {
	mix := func(name string, pace ...Pace) Scenario {
		s := hostileScenario(name, flash.Fragmented, readers(4, size4K), readers(4, size128K),
			writers(4, size4K, flash.Fragmented), writers(4, size128K, flash.Fragmented))
		s.Pace = pace
		return s
	}
	// Two seconds after a change, the drive must be known again.
	slows := mix("slows-by-2", Pace{1500 * Millisecond, 2}, Pace{4500 * Millisecond, 1})
	slows.Phases = []Phase{{"before", Second, 1500 * Millisecond}, {"slow", 3500 * Millisecond, 4500 * Millisecond},
		{"recovered", 6500 * Millisecond, 7500 * Millisecond}}
	again := mix("slows-and-recovers", Pace{Second, 3}, Pace{2 * Second, 1})
	again.Phases = []Phase{{"slow", 1500 * Millisecond, 2 * Second},
		{"recovered", 2500 * Millisecond, 3500 * Millisecond}}
	faster := mix("doubles-its-speed", Pace{1500 * Millisecond, 0.5})
	faster.Phases = []Phase{slows.Phases[0], {"fast", 3500 * Millisecond, 4500 * Millisecond}}
	return []Scenario{slows, again, faster, mix("stalls", stalls(100*Millisecond, 10*Millisecond, 2*Second)...)}
}

// rangeCommands transfer no data, and take the longer the longer their range is.
func rangeCommands() []Scenario {
	beside := func(name string, op pipeline.Op, size int64, depth int) Scenario {
		s := hostileScenario(name, flash.Fragmented, readers(8, size4K),
			clients(1, name, 1, stream(op, size, false, depth)))
		s.UnmapNSPerMiB = slowUnmapNS
		return s
	}
	mixed := hostileScenario("trims-beside-read-write", flash.Fragmented, readers(4, size4K),
		writers(4, size4K, flash.Fragmented), clients(2, "trim", 1, stream(pipeline.Deallocate, size1M, false, 4)))
	mixed.UnmapNSPerMiB = slowUnmapNS
	verify := hostileScenario("verify-16M", flash.Clean, readers(8, size4K),
		clients(1, "verify", 1, stream(pipeline.Verify, size16M, false, 1)))
	return []Scenario{beside("write-zeroes-32M", pipeline.WriteZeroes, size32M, 1),
		beside("deallocate-32M", pipeline.Deallocate, size32M, 1), mixed, verify}
}

// unusualSizes are reads below 4 KiB and above 128 KiB.
func unusualSizes() []Scenario {
	return []Scenario{
		hostileScenario("read-512-beside-4K", flash.Fragmented, clients(8, "512 read", 1,
			stream(pipeline.Read, size512, false, smallDepth)), readers(8, size4K)),
		hostileScenario("read-512-beside-128K", flash.Clean, clients(8, "512 read", 1,
			stream(pipeline.Read, size512, false, smallDepth)), readers(8, size128K)),
		hostileScenario("read-1M", flash.Clean, readers(16, size1M)),
		hostileScenario("read-1M-beside-4K", flash.Clean, readers(8, size4K), readers(8, size1M)),
	}
}

// unusualLoads are weights, depths and mixes at their extremes.
func unusualLoads() []Scenario {
	const c = flash.Fragmented
	reader := func(name string, weight, depth int) []Tenant {
		return clients(1, name, weight, stream(pipeline.Read, size4K, false, depth))
	}
	writer := func(n int, name string, kinds ...Kind) []Tenant {
		return clients(n, name, 1, Load{Kinds: kinds, Depth: 8})
	}
	small := Kind{Op: pipeline.Write, SizeBytes: size4K, Parts: 1}
	durable := small
	durable.FUA = true
	flush := Kind{Op: pipeline.Flush, Parts: 1}
	// With a first second in which the policy begins to learn.
	heavy := func(name string, weight int) Scenario {
		s := hostileScenario(name, c, reader("heavy", weight, 256), readers(7, size4K), writers(8, size4K, c))
		s.Phases = []Phase{{"first second", 0, Second}, {"steady", Second, 1800 * Millisecond}}
		return s
	}
	switching := hostileScenario("on-off-100ms", c, readers(4, size4K), writers(4, size128K, c))
	onOff := join(clients(2, "reads now and then", 1, stream(pipeline.Read, size128K, false, 8)),
		clients(2, "writes now and then", 1, stream(pipeline.Write, size4K, false, smallDepth)))
	for i := range onOff {
		l := &onOff[i].Loads[0]
		l.OnNS, l.OffNS, l.StartNS = 100*Millisecond, 100*Millisecond, int64(i)*50*Millisecond
	}
	switching.Tenants = join(switching.Tenants, onOff)
	hot := clients(4, "reads one die", 1, stream(pipeline.Read, size4K, false, smallDepth))
	for i := range hot {
		hot[i].Loads[0].RegionBytes = 32 << 10
	}
	// A reader that comes back after a pause may catch up, beside the most expensive writes that there are.
	burst := reader("comes back", 1, 256)
	burst[0].Loads[0].OnNS, burst[0].Loads[0].OffNS = 30*Millisecond, 70*Millisecond
	return []Scenario{
		hostileScenario("catch-up-beside-1M-writes", c, burst, clients(4, "4K read", 1,
			stream(pipeline.Read, size4K, false, 8)), clients(1, "1M write", 1,
			stream(pipeline.Write, size1M, false, 1))),
		hostileScenario("flush-beside-reads", flash.Clean, readers(8, size4K),
			clients(8, "flush", 1, stream(pipeline.Flush, 0, false, smallDepth))),
		hostileScenario("depth-256-beside-1", c, reader("depth 256", 1, 256),
			clients(31, "depth 1", 1, stream(pipeline.Read, size4K, false, 1))),
		heavy("weight-100", 100), heavy("weight-1000", 1000),
		switching,
		hostileScenario("hot-die", flash.Clean, hot, readers(4, size4K)),
		hostileScenario("flush-heavy", c, writer(8, "4K write and flush", small, flush), writer(8, "4K write", small)),
		hostileScenario("flush-heavy-sata", c, writer(8, "4K write and flush", small, flush),
			writer(8, "4K write", small)).on("sata"),
		hostileScenario("fua-sata", c, writer(4, "4K FUA write", durable), writer(4, "4K write", small),
			readers(4, size4K)).on("sata"),
	}
}

// pollingHosts are two load generators that poll on one core.
func pollingHosts() []Scenario {
	pair := func(name string, slowdown int) Scenario {
		s := hostileScenario(name, flash.Fragmented,
			clients(1, "4K read", 1, stream(pipeline.Read, size4K, false, 64)),
			clients(1, "128K write", 1, stream(pipeline.Write, size128K, false, 16)))
		s.Slowdown, s.TurnNS = slowdown, 4*Millisecond
		for i := range s.Tenants {
			s.Tenants[i].Core = 1
		}
		return s
	}
	long := pair("two-on-a-core-slow-drive-long-turns", 10)
	long.TurnNS = 20 * Millisecond
	return []Scenario{pair("two-on-a-core", 1), pair("two-on-a-core-slow-drive", 10), long}
}
