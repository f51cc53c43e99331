package jbof

import (
	"math"
	"math/rand/v2"
	"testing"

	"jbofd/internal/pipeline"
	"jbofd/internal/tenant"
)

// TestADriveThatWasNotCalibratedIsLearned while reads of two sizes and writes compete, whatever each of them costs. The
// sizes of reads are compared before reads and writes are, so that they are known less exactly.
func TestADriveThatWasNotCalibratedIsLearned(t *testing.T) {
	t.Logf("-seed %d", *seed)
	rng := rand.New(rand.NewPCG(*seed, 0))
	factor := func() float64 { return math.Exp2(2*rng.Float64() - 1) }
	wrong, costs := 0.0, 0
	for i := range 16 {
		d := defaultProfile
		readNS, byteNS := d.ReadNS*factor(), d.ReadByteNS*factor()
		if i == 0 { // a large read costs 31 small ones, not 17
			readNS, byteNS = 20, 0.16
		}
		writeNS := (readNS + byteNS*unit) / unit * (1 + 9*rng.Float64())
		p := New(Config{})
		var ios []pipeline.IO
		for j, io := range []pipeline.IO{{Op: pipeline.Read, LenBytes: 4 << 10},
			{Op: pipeline.Read, LenBytes: 128 << 10}, {Op: pipeline.Write, LenBytes: 16 << 10}} {
			io.Tenant = tenant.ID(j)
			p.SetTenant(0, io.Tenant, 1)
			ios = append(ios, repeat(64, io)...)
		}
		s := newServer(p, func(io pipeline.IO) float64 {
			if io.Op == pipeline.Write {
				return writeNS * float64(io.LenBytes)
			}
			return readNS + byteNS*float64(io.LenBytes)
		})
		s.run(6e9, ios...)
		got, want := p.costs.read(128<<10)/p.costs.UnitNS(), (readNS+byteNS*(128<<10))/(readNS+byteNS*unit)
		if r := got / want; i == 0 && (r < 0.75 || r > 1.33) {
			t.Errorf("a large read costs %.1f small ones, want %.1f", got, want)
		}
		for _, c := range []struct {
			name      string
			got, want float64
		}{
			{"4 KiB read", p.costs.read(4 << 10), readNS + byteNS*(4<<10)},
			{"128 KiB read", p.costs.read(128 << 10), readNS + byteNS*(128<<10)},
			{"written byte", p.costs.writeByteNS, writeNS},
		} {
			wrong, costs = wrong+math.Abs(math.Log(c.got/c.want)), costs+1
			if r := c.got / c.want; r < 0.5 || r > 2 {
				t.Errorf("%s: %.2f ns, want %.2f (%.0f + %.2f a byte, written %.2f)", c.name, c.got, c.want, readNS,
					byteNS, writeNS)
			}
		}
	}
	wrong /= float64(costs)
	if t.Logf("costs are wrong by %.1f %% on average", 100*wrong); wrong > 0.15 {
		t.Error("want at most 15 %")
	}
}

// TestTheWindowOfADriveIsFound: a drive that was not calibrated serves so many reads at once.
func TestTheWindowOfADriveIsFound(t *testing.T) {
	const serviceNS, usual = 100_000, 48
	for _, servers := range []int{12, 48, 96, 200} {
		p := New(Config{})
		p.SetTenant(0, 0, 1)
		p.SetTenant(0, 1, 1)
		var due []int64 // ordered
		var tags []pipeline.Tag
		now, dst := int64(0), []pipeline.Tag(nil)
		free := make([]int64, servers)
		for i := range pipeline.Tag(600) {
			p.Enqueue(0, pipeline.IO{Tag: i, Tenant: tenant.ID(i % 2), Op: pipeline.Read, LenBytes: unit})
		}
		for i := 0; now < 1e9; i++ {
			dst = p.Dispatch(now, dst[:0])
			for j, tag := range dst {
				s := (i + j) % servers
				for k := range free { // the server that is free first
					if free[k] < free[s] {
						s = k
					}
				}
				free[s] = max(free[s], now) + serviceNS
				due, tags = append(due, free[s]), append(tags, tag)
			}
			now = max(now, due[0])
			tag := tags[0]
			p.Complete(now, tag, pipeline.Result{LatencyNS: serviceNS})
			due, tags = due[1:], tags[1:]
			p.Enqueue(now, pipeline.IO{Tag: tag, Tenant: tenant.ID(tag % 2), Op: pipeline.Read, LenBytes: unit})
		}
		if got := int(p.costs.depth); got < servers || got > 2*max(servers, usual) {
			t.Errorf("a drive that serves %d reads at once has a window of %d", servers, got)
		}
	}
}

// interval ends an interval in which the drive was busy with these I/Os, and hosts had more of them for the part queued
// of the time.
func (c *Costs) interval(small, large, written int64, queued float64) {
	for range small {
		c.Completed(pipeline.Read, unit, 300_000)
	}
	for range large {
		c.Completed(pipeline.Read, 128<<10, 300_000)
	}
	c.writeBytes = float64(written)
	c.saturatedNS = int64(queued * tickNS)
	c.Learn([lanes]int64{1, 1}, tickNS)
}

// TestAProbeWithoutEffectChangesNothing, and the next ones become rare: hosts send the same whatever it costs.
func TestAProbeWithoutEffectChangesNothing(t *testing.T) {
	for name, written := range map[string]int64{"sizes": 0, "reads": 4 << 20} {
		c := NewCosts(Profile{})
		c.blank.search.known = true
		c.probe.known, c.probe.wait = true, probeLast
		readNS, byteNS, probes, was := c.readNS, c.readByteNS, 0, false
		for range 2000 {
			if written == 0 { // keep what reads alone teach out of it
				c.readOnly = 0
			}
			c.interval(2000, 100, written, 1)
			if is := c.blank.left > 0; is != was {
				was = is
				if is {
					probes++
				}
			}
		}
		if probes < 2 || probes > 14 || c.readNS != readNS || c.readByteNS != byteNS {
			t.Errorf("%s: %d probes; a read costs %.0f + %.3f a byte, want %.0f + %.3f", name, probes, c.readNS,
				c.readByteNS, readNS, byteNS)
		}
	}
}

// TestAProbeEndsWithItsLoad: nothing is dearer after it, and nothing is learned from it.
func TestAProbeEndsWithItsLoad(t *testing.T) {
	c := NewCosts(Profile{})
	c.probe.known, c.probe.wait = true, probeLast
	for i := 0; c.blank.left == 0; i++ {
		if c.interval(2000, 100, 4<<20, 1); i > 100 {
			t.Fatal("no probe begins")
		}
	}
	unitNS := c.UnitNS()
	c.interval(10, 0, 0, 0)
	if c.Probing() || c.Tilt(readLane, unit) != 1 || c.Tilt(writeLane, unit) != 1 || c.UnitNS() != unitNS {
		t.Errorf("after the load the probe goes on: %+v; a read costs %.0f ns, want %.0f", c.blank, c.UnitNS(), unitNS)
	}
	for range blankRetry - 1 {
		if c.interval(2000, 100, 4<<20, 1); c.Probing() {
			t.Fatal("the next probe comes at once")
		}
	}
}

// TestAWindowThatIsNotWorthItGoes: hosts do not fill it, or the drive does no more, or it does more of what some want
// and less of what others want.
func TestAWindowThatIsNotWorthItGoes(t *testing.T) {
	for _, x := range []struct {
		name         string
		small, large int64
		queued       float64
	}{
		{"not filled", 6000, 200, 0.5},
		{"no gain", 4000, 200, 1},
		{"others lose", 3000, 400, 1},
		{"too small a gain", 4080, 204, 1},
	} {
		c := NewCosts(Profile{})
		c.blank.wait = 1000 // no probe
		depth := c.depth
		wait := func(most int) {
			for i := 0; !c.blank.search.trial; i++ {
				if c.interval(4000, 200, 0, 1); i > most {
					t.Fatalf("%s: no trial begins within %d intervals", x.name, most)
				}
			}
		}
		wait(10)
		if c.depth != 2*depth {
			t.Errorf("%s: a trial has a window of %.0f, want %.0f", x.name, c.depth, 2*depth)
		}
		for i := 0; c.blank.search.trial; i++ {
			if c.interval(x.small, x.large, 0, x.queued); i > searchTicks+1 {
				t.Fatalf("%s: the trial goes on", x.name)
			}
		}
		if c.depth != depth || c.Window() != windowOne {
			t.Errorf("%s: the window is %.0f afterwards, want %.0f", x.name, c.depth, depth)
		}
		for range searchWait - 5 {
			if c.interval(4000, 200, 0, 1); c.blank.search.trial {
				t.Fatalf("%s: the next trial comes at once", x.name)
			}
		}
		wait(20)
	}
}

// TestASlowDriveKeepsItsWindow: a few hundred reads vary by more than what a larger window must bring.
func TestASlowDriveKeepsItsWindow(t *testing.T) {
	t.Logf("-seed %d", *seed)
	rng := rand.New(rand.NewPCG(*seed, 0))
	c := NewCosts(Profile{})
	depth := c.depth
	for range 5000 {
		c.interval(130+rng.Int64N(40)-20, 0, 0, 1)
		if c.depth != depth {
			t.Fatalf("the window becomes %.0f", c.depth)
		}
	}
}

// TestWhatAProbeLeavesBehindIsNotCounted: the intervals after it, in which the drive is still busy with what it
// brought.
func TestWhatAProbeLeavesBehindIsNotCounted(t *testing.T) {
	c := NewCosts(Profile{})
	c.probe.known, c.probe.wait = true, probeLast
	for began := false; !began || c.blank.left > 0; began = began || c.blank.left > 0 {
		c.interval(2000, 100, 4<<20, 1)
	}
	for range blankSettling {
		c.interval(200, 10, 40<<20, 1)
	}
	c.interval(2000, 100, 4<<20, 1)
	if got, want := c.blank.usual[writes].bytes*tickNS, float64(4<<20); math.Abs(got/want-1) > 0.01 {
		t.Errorf("%.0f bytes are usual in an interval, want %.0f", got, want)
	}
}

// TestAProbeOfReadsAsksReadersForMore, and ends with that.
func TestAProbeOfReadsAsksReadersForMore(t *testing.T) {
	p := New(Config{})
	p.SetTenant(0, 0, 1)
	p.SetTenant(0, 1, 1)
	s := newServer(p, func(io pipeline.IO) float64 { return float64(units(io.LenBytes)) * 2500 })
	ios := append(repeat(128, pipeline.IO{Tenant: 0, Op: pipeline.Read, LenBytes: unit}),
		repeat(128, pipeline.IO{Tenant: 1, Op: pipeline.Write, LenBytes: unit})...)
	var before [2]int
	for i := 0; p.costs.blank.left == 0; i++ {
		if before = [2]int{p.Credit(0), p.Credit(1)}; i > 100 {
			t.Fatal("no probe begins")
		}
		s.run(tickNS, ios...)
	}
	if reader, writer := p.Credit(0), p.Credit(1); reader < 3*before[0] || writer > 2*before[1] {
		t.Errorf("credits of %d and %d before a probe become %d and %d", before[0], before[1], reader, writer)
	}
	for i := 0; p.costs.blank.left > 0; i++ {
		if s.run(tickNS, ios...); i > 2*readsTicks {
			t.Fatal("the probe does not end")
		}
	}
	if reader := p.Credit(0); reader > 2*before[0] {
		t.Errorf("a credit of %d before a probe is %d after it", before[0], reader)
	}
}

// TestACalibratedDriveIsNotProbedForReads: its costs of reads change by reads alone.
func TestACalibratedDriveIsNotProbedForReads(t *testing.T) {
	for name, pr := range map[string]Profile{"calibrated": defaultProfile, "within Submit": {Fixed: true}} {
		c := NewCosts(pr)
		depth, unitNS := c.depth, c.UnitNS()
		for range 500 {
			if c.interval(2000, 100, 4<<20, 1); c.blank.left > 0 {
				t.Fatalf("%s: a probe of reads", name)
			}
		}
		if c.UnitNS() != unitNS {
			t.Errorf("%s: a read costs %.0f ns, want %.0f", name, c.UnitNS(), unitNS)
		}
		for range 100 {
			if c.interval(4000, 200, 0, 1); c.depth != depth {
				t.Fatalf("%s: the window is searched", name)
			}
		}
	}
}
