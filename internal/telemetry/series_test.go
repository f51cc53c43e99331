package telemetry

import (
	"math/rand/v2"
	"testing"
	"time"
)

// TestATallyCountsAsObserveDoes: commands of several series, sizes and latencies, flushed now and then.
func TestATallyCountsAsObserveDoes(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	var tallied, observed [3]IOSeries
	var tally Tally
	for range 10000 {
		i, bytes := rng.IntN(3), int64(rng.IntN(2)*rng.IntN(4096))
		latency := time.Duration(rng.Int64N(1<<rng.IntN(34)) - 1)
		tally.Observe(&tallied[i], bytes, latency)
		observed[i].Observe(1, bytes, latency)
		if rng.IntN(8) > 0 {
			continue
		}
		tally.Flush()
		for i := range tallied {
			got, want := &tallied[i], &observed[i]
			for b := range got.bucket {
				if g, w := got.bucket[b].Load(), want.bucket[b].Load(); g != w {
					t.Fatalf("series %d has %d commands in bucket %d, want %d", i, g, b, w)
				}
			}
			if got.sumNS.Load() != want.sumNS.Load() || got.Bytes() != want.Bytes() {
				t.Fatalf("series %d: %d ns, %d bytes; want %d, %d", i, got.sumNS.Load(), got.Bytes(),
					want.sumNS.Load(), want.Bytes())
			}
		}
	}
}

// TestACommandWithoutATimeIsNoDuration, but its data counts.
func TestACommandWithoutATimeIsNoDuration(t *testing.T) {
	var s PeerSeries
	s.Observe(0, 1024, time.Millisecond, false)
	s.Observe(0, 512, -1, false)
	s.Observe(0, 0, -1, true)
	if count, sum, _ := s.ended[0].histogram(); count != 1 || sum != 1e-3 || s.ended[0].Bytes() != 1536 {
		t.Errorf("%d durations, %v s, %d bytes, want 1, 0.001 and 1536", count, sum, s.ended[0].Bytes())
	}
}
