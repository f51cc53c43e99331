package bench

import "github.com/HdrHistogram/hdrhistogram-go"

// MaxLatencyNS is the highest latency that histograms record, 10 min. Longer latencies count as MaxLatencyNS.
const MaxLatencyNS = 600e9

// NewHistogram returns a histogram for latencies from 1 ns to MaxLatencyNS with three significant digits.
func NewHistogram() *hdrhistogram.Histogram { return hdrhistogram.New(1, MaxLatencyNS, 3) }

// stats holds the counters of an interval of time, indexed by Kind.
type stats struct {
	hist   [3]*hdrhistogram.Histogram
	bytes  [3]uint64
	failed [3]uint64
	wrong  uint64 // verification failures
	// checked is the number of verified bytes.
	checked uint64
	first   []string // messages of the first failures
}

// maxMessages limits the length of stats.first.
const maxMessages = 8

func newStats() stats {
	var s stats
	for k := range s.hist {
		s.hist[k] = NewHistogram()
	}
	return s
}

func (s *stats) reset() {
	for k := range s.hist {
		if s.hist[k].TotalCount() != 0 {
			s.hist[k].Reset()
		}
	}
	s.bytes, s.failed, s.wrong, s.checked, s.first = [3]uint64{}, [3]uint64{}, 0, 0, nil
}

func (s *stats) merge(o *stats) {
	for k := range s.hist {
		if o.hist[k].TotalCount() != 0 {
			s.hist[k].Merge(o.hist[k]) // equal bounds: nothing is dropped
		}
		s.bytes[k] += o.bytes[k]
		s.failed[k] += o.failed[k]
	}
	s.wrong += o.wrong
	s.checked += o.checked
	for _, m := range o.first {
		s.note(m)
	}
}

func (s *stats) note(m string) {
	if len(s.first) < maxMessages {
		s.first = append(s.first, m)
	}
}

func (s *stats) errors() uint64 { return s.failed[Read] + s.failed[Write] + s.failed[Flush] + s.wrong }

func (s *stats) ios() (n int64) {
	for _, h := range s.hist {
		n += h.TotalCount()
	}
	return n
}

// interval summarises one kind of I/O over an interval of so many seconds.
func (s *stats) interval(k Kind, seconds float64) Interval {
	h := s.hist[k]
	if h.TotalCount() == 0 || seconds <= 0 {
		return Interval{}
	}
	return Interval{IOPS: float64(h.TotalCount()) / seconds, BytesPerSec: float64(s.bytes[k]) / seconds,
		MeanNS: h.Mean(), P99NS: h.ValueAtPercentile(99)}
}
