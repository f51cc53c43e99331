package ycsb

import (
	"github.com/HdrHistogram/hdrhistogram-go"

	"jbofd/internal/bench"
)

// kind is the kind of an operation. A read-modify-write is also counted as a read and an update.
type kind uint8

const (
	read kind = iota
	update
	insert
	readModifyWrite

	kinds
)

// String names the kind as YCSB does.
func (k kind) String() string {
	return [...]string{"READ", "UPDATE", "INSERT", "READ-MODIFY-WRITE"}[k]
}

// stats are the counters of one stretch of time.
type stats struct {
	// raw counts from when an operation was submitted, corrected from when it was due. They are nil until
	// there is something to count.
	raw, corrected [kinds]*hdrhistogram.Histogram
	results        [kinds][Failed + 1]uint64
	// ops are the operations that ended, however they did.
	ops uint64
	// overdue operations were due when the run was stopped, and had not begun.
	overdue uint64
	// checked values were verified, wrong ones were not what they must be.
	checked, wrong uint64
	first          []string // messages of the first failures
}

// maxMessages bounds stats.first.
const maxMessages = 8

func record(h **hdrhistogram.Histogram, ns int64) {
	if *h == nil {
		*h = bench.NewHistogram()
	}
	// The only error is a value out of bounds, which this one is not.
	_ = (*h).RecordValue(min(max(ns, 1), bench.MaxLatencyNS))
}

func (s *stats) reset() {
	for _, hs := range []*[kinds]*hdrhistogram.Histogram{&s.raw, &s.corrected} {
		for _, h := range hs {
			if h != nil && h.TotalCount() != 0 {
				h.Reset()
			}
		}
	}
	*s = stats{raw: s.raw, corrected: s.corrected}
}

func (s *stats) merge(o *stats) {
	merge := func(to, from *[kinds]*hdrhistogram.Histogram) {
		for k, h := range from {
			if h == nil || h.TotalCount() == 0 {
				continue
			}
			if to[k] == nil {
				to[k] = bench.NewHistogram()
			}
			to[k].Merge(h) // equal bounds: nothing is dropped
		}
	}
	merge(&s.raw, &o.raw)
	merge(&s.corrected, &o.corrected)
	for k := range s.results {
		for r := range s.results[k] {
			s.results[k][r] += o.results[k][r]
		}
	}
	s.ops += o.ops
	s.overdue += o.overdue
	s.checked += o.checked
	s.wrong += o.wrong
	for _, m := range o.first {
		s.note(m)
	}
}

func (s *stats) note(m string) {
	if len(s.first) < maxMessages {
		s.first = append(s.first, m)
	}
}

// failed is how many reads and writes were refused or failed. Those of a read-modify-write are among them.
func (s *stats) failed() (n uint64) {
	for k, r := range s.results {
		if kind(k) != readModifyWrite {
			n += r[Refused] + r[Failed]
		}
	}
	return n
}
