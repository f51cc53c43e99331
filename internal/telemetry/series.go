package telemetry

import (
	"math/bits"
	"sync/atomic"
	"time"
)

// boundsNS are the upper bounds of the latency buckets in nanoseconds; above the last one is a bucket without a bound.
// A bound is at most 2.5 times the one before it, so that a quantile is off by at most that; a bucket costs a series
// per tenant, drive and operation.
var boundsNS = [...]int64{
	10_000, 25_000, 50_000, 100_000, 250_000, 500_000,
	1_000_000, 2_500_000, 5_000_000, 10_000_000, 20_000_000, 50_000_000,
	100_000_000, 200_000_000, 500_000_000, 1_000_000_000, 2_000_000_000,
}

const buckets = len(boundsNS) + 1

// firstBucket maps the bit length of a latency to the first bucket that the latency can belong to. Each bound is at
// least twice the previous one, so the right bucket is at most two further.
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

// IOSeries counts one tenant's operations of one kind on one SSD. Any number of goroutines may call Observe
// concurrently.
type IOSeries struct {
	bucket [buckets]atomic.Uint64
	sumNS  atomic.Int64
	bytes  atomic.Int64
	_      [64]byte // keeps the next series off the last cache line of this one
}

// Observe counts n completed commands that together transferred so many bytes and each had the given latency.
//
// hot: 0 allocs
//
// Cost: three atomic adds, two without bytes; 10 to 20 ns.
func (s *IOSeries) Observe(n int, bytes int64, latency time.Duration) {
	ns := max(int64(latency), 0)
	s.add(bucketOf(ns), uint64(n), ns*int64(n), bytes)
}

// bucketOf is the number of the bucket of a latency.
func bucketOf(ns int64) int {
	b := int(firstBucket[bits.Len64(uint64(ns))])
	for b < len(boundsNS) && ns > boundsNS[b] {
		b++
	}
	return b
}

func (s *IOSeries) add(bucket int, n uint64, ns, bytes int64) {
	s.bucket[bucket].Add(n)
	s.sumNS.Add(ns)
	if bytes != 0 {
		s.bytes.Add(bytes)
	}
}

// Tally collects what one goroutine at a time observes, so that commands which end together cost the atomic additions
// of one. The zero Tally is empty.
type Tally struct {
	series *IOSeries
	bucket int
	n      uint64
	// ns and bytes are sums.
	ns, bytes int64
}

// Observe is IOSeries.Observe for one command. It counts when Flush is called, or a command of another series or bucket
// is observed.
//
// hot: 0 allocs
func (t *Tally) Observe(s *IOSeries, bytes int64, latency time.Duration) {
	ns := max(int64(latency), 0)
	b := bucketOf(ns)
	if s != t.series || b != t.bucket {
		t.Flush()
		t.series, t.bucket = s, b
	}
	t.n++
	t.ns += ns
	t.bytes += bytes
}

// Flush counts what was observed.
//
// hot: 0 allocs
func (t *Tally) Flush() {
	if t.n > 0 {
		t.series.add(t.bucket, t.n, t.ns, t.bytes)
		t.n, t.ns, t.bytes = 0, 0, 0
	}
}

// Completed returns the number of commands observed.
func (s *IOSeries) Completed() uint64 {
	var n uint64
	for i := range s.bucket {
		n += s.bucket[i].Load()
	}
	return n
}

// Bytes returns the number of bytes that these commands transferred.
func (s *IOSeries) Bytes() int64 { return s.bytes.Load() }

// histogram returns the series in Prometheus' form: cumulative counts by upper bound in seconds.
func (s *IOSeries) histogram() (count uint64, sumSeconds float64, le map[float64]uint64) {
	le = make(map[float64]uint64, len(boundsNS))
	for i, b := range boundsNS {
		count += s.bucket[i].Load()
		le[float64(b)/1e9] = count
	}
	count += s.bucket[len(boundsNS)].Load()
	return count, float64(s.sumNS.Load()) / 1e9, le
}

// ErrorSeries counts one tenant's failed commands by status.
type ErrorSeries struct {
	// byType is allocated at the first error of a status code type.
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

// mediaErrors are the status codes of type mediaType that are reported with 0 before they first occur, so that an alert
// on an increase sees the first error: Write Fault and Unrecovered Read Error.
var mediaErrors = [...]uint8{0x80, 0x81}

const mediaType = 2

func (s *ErrorSeries) each(f func(sct, sc uint8, n uint64)) {
	for sct := range s.byType {
		codes := s.byType[sct].Load()
		if sct == mediaType {
			for _, sc := range mediaErrors {
				if codes == nil || codes[sc].Load() == 0 {
					f(mediaType, sc, 0)
				}
			}
		}
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
