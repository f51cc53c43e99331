package telemetry

import (
	"math/bits"
	"sync/atomic"
	"time"
)

// boundsNS are the upper bounds of the latency buckets in nanoseconds; with the
// last one, which has no bound, there are 14.
var boundsNS = [...]int64{
	10_000, 25_000, 50_000, 100_000, 250_000, 500_000,
	1_000_000, 2_500_000, 5_000_000, 10_000_000, 50_000_000, 250_000_000, 2_000_000_000,
}

const buckets = len(boundsNS) + 1

// firstBucket holds, for the number of bits of a latency, the first bucket it can
// belong to. Bounds at least double, so the right one is at most two further.
var firstBucket = func() (first [65]uint8) {
	for n := range first {
		least := int64(0)
		if n > 0 {
			least = 1 << min(n-1, 62)
		}
		for int(first[n]) < len(boundsNS) && least > boundsNS[first[n]] {
			first[n]++
		}
	}
	return first
}()

// IOSeries counts the operations of one kind of one tenant on one SSD. Any number
// of goroutines may observe at once.
type IOSeries struct {
	bucket [buckets]atomic.Uint64
	sumNS  atomic.Int64
	bytes  atomic.Int64
	_      [64]byte // keeps the next series off this one's last cache line
}

// Observe counts n completed commands of bytes together that took latency each.
//
// hot: 0 allocs
//
// Cost: three atomic adds, two without bytes; 10 to 20 ns.
func (s *IOSeries) Observe(n int, bytes int64, latency time.Duration) {
	ns := max(int64(latency), 0)
	b := int(firstBucket[bits.Len64(uint64(ns))])
	for b < len(boundsNS) && ns > boundsNS[b] {
		b++
	}
	s.bucket[b].Add(uint64(n))
	s.sumNS.Add(ns * int64(n))
	if bytes != 0 {
		s.bytes.Add(bytes)
	}
}

// Completed is how many commands were observed.
func (s *IOSeries) Completed() uint64 {
	var n uint64
	for i := range s.bucket {
		n += s.bucket[i].Load()
	}
	return n
}

// Bytes is how many bytes they moved.
func (s *IOSeries) Bytes() int64 { return s.bytes.Load() }

// histogram returns what the series holds in Prometheus' form: cumulative counts
// by upper bound in seconds.
func (s *IOSeries) histogram() (count uint64, sumSeconds float64, le map[float64]uint64) {
	le = make(map[float64]uint64, len(boundsNS))
	for i, b := range boundsNS {
		count += s.bucket[i].Load()
		le[float64(b)/1e9] = count
	}
	count += s.bucket[len(boundsNS)].Load()
	return count, float64(s.sumNS.Load()) / 1e9, le
}

// ErrorSeries counts one tenant's commands by the status they failed with.
type ErrorSeries struct {
	// byType is made when the first error of a status code type comes.
	byType [8]atomic.Pointer[[256]atomic.Uint64]
}

// Inc counts a command that completed with status code type sct (0 to 7) and
// status code sc.
func (s *ErrorSeries) Inc(sct, sc uint8) {
	p := &s.byType[sct&7]
	codes := p.Load()
	if codes == nil {
		p.CompareAndSwap(nil, new([256]atomic.Uint64))
		codes = p.Load()
	}
	codes[sc].Add(1)
}

func (s *ErrorSeries) each(f func(sct, sc uint8, n uint64)) {
	for sct := range s.byType {
		codes := s.byType[sct].Load()
		if codes == nil {
			continue
		}
		for sc := range codes {
			if n := codes[sc].Load(); n > 0 {
				f(uint8(sct), uint8(sc), n)
			}
		}
	}
}
