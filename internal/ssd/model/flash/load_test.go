package flash

import (
	"fmt"
	"slices"
	"testing"
)

// stream is a closed loop of commands of one kind and size at a constant depth.
type stream struct {
	op    Op
	bytes int64
	depth int
	// readPercent of the commands are reads, if it is given.
	readPercent uint32
	sequential  bool
	// periodNS makes the loop open: a command each period instead of at a depth.
	periodNS int64
	// first and span bound the range in bytes; span 0 is the whole drive.
	first, span int64

	at, dueNS int64
	ops       int64
	latencies []int64
}

func (s *stream) request(d *Drive, r *random, tag uint64) Request {
	span := s.span
	if span == 0 {
		span = d.cfg.SizeBytes
	}
	slots := uint32(span / s.bytes)
	off := s.at
	if !s.sequential {
		off = int64(r.below(slots)) * s.bytes
	}
	s.at = (s.at + s.bytes) % (int64(slots) * s.bytes)
	op := s.op
	if s.readPercent > 0 {
		op = Write
		if r.below(100) < s.readPercent {
			op = Read
		}
	}
	return Request{Op: op, OffsetBytes: s.first + off, LenBytes: s.bytes, Tag: tag}
}

// mbps is the stream's rate in MB/s over ns.
func (s *stream) mbps(ns int64) float64 { return float64(s.ops*s.bytes) * 1e3 / float64(ns) }

func (s *stream) mean() float64 {
	sum := int64(0)
	for _, l := range s.latencies {
		sum += l
	}
	return float64(sum) / float64(max(1, len(s.latencies)))
}

func (s *stream) quantile(q float64) int64 {
	if len(s.latencies) == 0 {
		return 0
	}
	slices.Sort(s.latencies)
	return s.latencies[int(q*float64(len(s.latencies)-1))]
}

// run drives streams for warmNS and then measures them for ns.
func run(t testing.TB, d *Drive, warmNS, ns int64, streams ...*stream) {
	t.Helper()
	r := newRandom(d.cfg.Seed + 77)
	now := d.nowNS
	start := now + warmNS
	end := start + ns
	// The first commands come one after the other, 1 µs apart.
	for i, s := range streams {
		s.ops, s.latencies, s.dueNS = 0, s.latencies[:0], now
		for range s.depth {
			d.Submit(now, s.request(d, &r, uint64(i)))
		}
	}
	var done []Completion
	for {
		at, ok := d.NextEvent()
		if !ok {
			t.Fatal("the drive has stopped with commands in flight")
		}
		for i, s := range streams {
			for s.periodNS > 0 && s.dueNS <= at {
				d.Advance(s.dueNS-1, nil)
				d.Submit(s.dueNS, s.request(d, &r, uint64(i)))
				s.dueNS += s.periodNS
			}
		}
		if at, _ = d.NextEvent(); at > end {
			return
		}
		done = d.Advance(at, done[:0])
		for _, c := range done {
			s := streams[c.Tag]
			if c.AtNS >= start {
				s.ops++
				s.latencies = append(s.latencies, c.LatencyNS)
			}
			if s.periodNS == 0 {
				d.Submit(c.AtNS, s.request(d, &r, c.Tag))
			}
		}
	}
}

// prepared drives, to be cloned.
var prepared = map[string]*Drive{}

// dct983 is a preconditioned drive of 4 GiB. Not for parallel tests.
func dct983(t testing.TB, c Condition) *Drive {
	t.Helper()
	key := fmt.Sprint(c)
	if prepared[key] == nil {
		prepared[key] = preset(t, "dct983", 4<<30, c)
	}
	return prepared[key].Clone()
}

func preset(t testing.TB, name string, size int64, c Condition) *Drive {
	t.Helper()
	cfg, err := Preset(name, size)
	if err != nil {
		t.Fatal(err)
	}
	d, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	d.Precondition(c)
	return d
}
