package jbof

import (
	"math"
	"math/rand/v2"
	"testing"

	"jbofd/internal/pipeline"
)

// pacedServer is a drive whose reads and writes are slower by these factors than they were calibrated.
type pacedServer struct {
	*server
	slower [lanes]float64
	ios    []pipeline.IO
}

// newPacedServer returns a drive with a reader and a writer that have saturated it for a second. Its costs are random.
func newPacedServer(rng *rand.Rand, calibratedWrong float64) *pacedServer {
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
	s := &pacedServer{slower: [lanes]float64{1, 1}}
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
func (s *pacedServer) readersPart() float64 {
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
		s := newPacedServer(rng, 1)
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
		s := newPacedServer(rng, 2)
		s.run(1e9, s.ios...)
		if got := s.readersPart(); got < 0.45 || got > 0.55 {
			t.Errorf("readers have %.2f of the time, want half", got)
		}
	}
}
