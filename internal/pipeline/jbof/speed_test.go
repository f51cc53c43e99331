package jbof

import (
	"math"
	"math/rand/v2"
	"testing"

	"jbofd/internal/pipeline"
)

// changingServer is a drive whose reads and writes are slower by these factors than they were calibrated.
type changingServer struct {
	*server
	slower [lanes]float64
	ios    []pipeline.IO
}

// newChangingServer returns a drive with a reader and a writer that have saturated it for a second. Its costs are
// random.
func newChangingServer(rng *rand.Rand, calibratedWrong float64) *changingServer {
	profile := defaultProfile
	profile.LatencyNS = 1 // a lone read takes no longer than it costs
	profile.ReadNS *= math.Exp2(1 + 2*rng.Float64())
	profile.ReadByteNS *= math.Exp2(1 + 2*rng.Float64())
	written := (profile.ReadNS/unit + profile.ReadByteNS) * (1 + 7*rng.Float64())
	readNS, readByteNS := profile.ReadNS, profile.ReadByteNS
	profile.ReadNS, profile.ReadByteNS = profile.ReadNS/calibratedWrong, profile.ReadByteNS/calibratedWrong
	p := New(Config{Profile: profile})
	p.SetTenant(0, 0, 1)
	p.SetTenant(0, 1, 1)
	s := &changingServer{slower: [lanes]float64{1, 1}}
	s.ios = append(repeat(128, pipeline.IO{Tenant: 0, Op: pipeline.Read, LenBytes: 4 << 10}),
		repeat(128, pipeline.IO{Tenant: 1, Op: pipeline.Write, LenBytes: 16 << 10})...)
	s.server = newServer(p, func(io pipeline.IO) float64 {
		if io.Op == pipeline.Write {
			return s.slower[writeLane] * written * float64(io.LenBytes)
		}
		return s.slower[readLane] * (readNS + readByteNS*float64(io.LenBytes))
	})
	s.run(1.2e9, s.ios...)
	return s
}

// readersPart returns the readers' part of the drive's time in the next half second.
func (s *changingServer) readersPart() float64 {
	read, wrote := s.served[0], s.served[1]
	s.run(0.5e9, s.ios...)
	read, wrote = s.served[0]-read, s.served[1]-wrote
	return read / (read + wrote)
}

// TestADriveThatChangesItsSpeedIsKnownAgainAfterTwoSeconds, whether reads and writes become slower or faster, or one of
// them slower. That one of them becomes faster, so that both do a third more, passes for a change of the load.
func TestADriveThatChangesItsSpeedIsKnownAgainAfterTwoSeconds(t *testing.T) {
	t.Logf("-seed %d", *seed)
	rng := rand.New(rand.NewPCG(*seed, 3))
	same := [lanes]float64{1, 1}
	for _, changes := range [][][lanes]float64{{{2, 2}, same}, {{3, 3}, same}, {{0.5, 0.5}, same}, {{2, 1}}, {{1, 2}}} {
		s := newChangingServer(rng, 1)
		for _, s.slower = range append([][lanes]float64{same}, changes...) {
			s.run(2e9, s.ios...)
			if got := s.readersPart(); got < 0.45 || got > 0.55 {
				t.Errorf("%v, now %v: readers have %.2f of the time, want half", changes[0], s.slower, got)
			}
		}
	}
}

// TestACalibrationThatWasTooFastCorrectsItself: reads take twice as long as they did when the drive was calibrated.
func TestACalibrationThatWasTooFastCorrectsItself(t *testing.T) {
	t.Logf("-seed %d", *seed)
	rng := rand.New(rand.NewPCG(*seed, 4))
	for range 5 {
		s := newChangingServer(rng, 2)
		s.run(1e9, s.ios...)
		if got := s.readersPart(); got < 0.45 || got > 0.55 {
			t.Errorf("readers have %.2f of the time, want half", got)
		}
	}
}

// TestWhatAProbeOfWritesTellsOfReads: usual and in the probe are the parts of the time of reads and writes by their
// old costs.
func TestWhatAProbeOfWritesTellsOfReads(t *testing.T) {
	type mix struct{ read, written float64 }
	for _, c := range []struct {
		name         string
		change       int
		usual, probe mix
		// grown is what a written byte costs now, by what it cost before.
		grown float64
		// factor is that of the cost of reads; again whether reads are probed.
		factor float64
		again  bool
	}{
		{"half the speed", -1, mix{0.25, 0.25}, mix{0.1, 0.4}, 2, 2, true},
		{"half the speed, and the line is steep", -1, mix{0.25, 0.25}, mix{0.1, 0.35}, 2, 2, true},
		{"reads alone are slower", -1, mix{1.0 / 3, 1.0 / 3}, mix{0.1, 0.8}, 1, 2, true},
		{"a first probe says so", 0, mix{0.25, 0.25}, mix{0.1, 0.4}, 1, 2, true},
		{"far too slow", -1, mix{0.05, 0.05}, mix{0.02, 0.08}, 10, speedMost, true},
		{"more writes in the probe, but no fewer reads", -1, mix{0.25, 0.25}, mix{0.25, 0.3}, 2, 1, true},
		{"fewer reads in the probe, but no more writes", -1, mix{0.25, 0.25}, mix{0.1, 0.25}, 2, 1, true},
		{"fewer of both in the probe", -1, mix{0.25, 0.25}, mix{0.1, 0.2}, 2, 1, true},
		{"the probe has no effect", -1, mix{0.25, 0.25}, mix{0.25, 0.25}, 1.1, 1, true},
		{"writes alone are slower, or the line is flat", -1, mix{0.5, 0.5}, mix{0.2, 0.7}, 2, 1, true},
		{"pauses", -1, mix{0.6, 0.6}, mix{0.2, 0.75}, 1.25, 1, false},
		{"nothing has changed", 0, mix{0.5, 0.5}, mix{0.2, 0.8}, 1, 1, false},
		{"nothing has changed, and the probe has no effect", 0, mix{0.5, 0.5}, mix{0.5, 0.5}, 1, 1, false},
		{"twice the speed", 1, mix{1.1, 1.1}, mix{0.4, 1.6}, 0.5, 0.5, true},
		{"far faster", 1, mix{5, 5}, mix{2, 8}, 0.1, 1.0 / speedMost, true},
		{"the buffer takes more writes", 1, mix{0.6, 0.7}, mix{0.3, 1}, 0.7, 1, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			k := NewCosts(Profile{ReadNS: 1000, ReadByteNS: 0.25, LatencyNS: 1, Depth: 96, LargeDepth: 8})
			p := &k.probe
			p.change, p.measured = c.change, 0.5
			p.read, p.written = c.usual.read, c.usual.written/p.measured
			again := k.checkSpeed(c.probe.read, c.probe.written/p.measured, c.grown*p.measured)
			if got := k.readNS / 1000; math.Abs(got-c.factor) > 1e-9 || k.readByteNS/0.25 != got {
				t.Errorf("reads cost %.3f of before, and for a byte %.3f, want %.3f", got, k.readByteNS/0.25, c.factor)
			}
			if again != c.again || k.blank.learning != again || k.blank.again != again || p.change != 0 {
				t.Errorf("reads are probed: %v, %+v", again, k.blank)
			}
		})
	}
}

// TestAProbeOfReadsKeepsACostThatItDoesNotRefute. Otherwise it corrects it, and writes are probed again.
func TestAProbeOfReadsKeepsACostThatItDoesNotRefute(t *testing.T) {
	for _, c := range []struct {
		usual, most, left float64 // of reads and writes before, of reads and of writes in the probe
		factor            float64
	}{
		{0.5, 0.8, 0.2, 1}, {0.6, 0.95, 0.25, 1}, {0.25, 0.4, 0.1, 1 / math.Sqrt(0.4*0.5)},
		{1, 1.6, 0.4, 1 / math.Sqrt(1.6*2)},
	} {
		k := NewCosts(Profile{ReadNS: 1000, ReadByteNS: 0.25, LatencyNS: 1, Depth: 96, LargeDepth: 8})
		b := &k.blank
		*b = blank{learning: true, again: true, known: [probes]bool{probeSizes: true}, kind: probeReads, left: 1}
		k.probe.known = true
		reads := func(part float64) amount { return amount{part / k.UnitNS(), part / k.UnitNS() * unit} }
		b.usual = rates{smallReads: reads(c.usual), writes: {0, c.usual / k.writeByteNS}}
		n := float64(readsTicks - readsSettle)
		b.during = rates{smallReads: reads(c.most * (n - 1) / n), writes: {0, c.left / k.writeByteNS * (n - 1) / n}}
		k.probing(&rates{smallReads: reads(c.most), writes: {0, c.left / k.writeByteNS}})
		if got := k.readNS / 1000; math.Abs(got-c.factor) > 1e-6 {
			t.Errorf("%.2f of the time with %.2f for writes: reads cost %.3f of before, want %.3f", c.most, c.left, got,
				c.factor)
		}
		if b.known[probeReads] != (c.factor == 1) || k.probe.known != (c.factor == 1) {
			t.Errorf("%.2f: reads known %v, writes %v", c.most, b.known[probeReads], k.probe.known)
		}
	}
}

// TestWritesAloneSayWhatTheyCost, so that a later probe does not take what has changed since for the drive's speed.
func TestWritesAloneSayWhatTheyCost(t *testing.T) {
	for _, measured := range []float64{0, 1} {
		k := NewCosts(Profile{ReadNS: 1000, ReadByteNS: 0.25, LatencyNS: 1, Depth: 96, LargeDepth: 8})
		k.probe.measured = measured
		for range writeOnlyIntervals {
			k.interval(0, 0, 8<<20, 1)
		}
		if want := measured * k.writeByteNS; k.probe.measured != want {
			t.Errorf("a written byte cost %.2f ns, and %.2f by the last measurement, want %.2f", k.writeByteNS,
				k.probe.measured, want)
		}
	}
}

// TestOnlyADriveThatIsKnownChanges: what it does before the first probe says nothing.
func TestOnlyADriveThatIsKnownChanges(t *testing.T) {
	for _, c := range []struct {
		measured float64
		more     bool
		want     int
	}{{0, true, 0}, {0, false, 0}, {1, true, 1}, {1, false, -1}} {
		p := probe{measured: c.measured}
		if p.changed(c.more); p.change != c.want {
			t.Errorf("%+v: %d", c, p.change)
		}
	}
}
