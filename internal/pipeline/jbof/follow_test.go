package jbof

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"testing"

	"jbofd/internal/pipeline"
)

// follower is a load whose writes follow its reads, as in a key-value store. Half of the requests are two reads, one
// after the other. The other half are a read, then a part of a write of one log, then of a write of another log. Each
// log has one write in flight at a time, for all requests that have come meanwhile. The drive has several servers. A
// read, or each unit of a write, occupies one of them for unitNS times their number, and a write completes durableNS
// later.
type follower struct {
	policy            pipeline.Policy
	unitNS, durableNS int64
	slow              int64 // factor by which everything is slowed down now
	now               int64
	servers           []int64 // when each becomes free
	due               []due
	rng               *rand.Rand
	left              []int // reads, by request
	puts              []bool
	logs              [2]struct{ waiting, writing []int }
	done              int
}

type due struct {
	atNS, sinceNS int64
	tag           pipeline.Tag
}

const followers = 256

func newFollower(p pipeline.Policy, servers int, durableNS int64) *follower {
	p.SetTenant(0, 0, 1)
	f := &follower{policy: p, unitNS: 19_000, durableNS: durableNS, slow: 1, servers: make([]int64, servers),
		rng:  rand.New(rand.NewPCG(1, 2)),
		left: make([]int, followers), puts: make([]bool, followers)}
	for i := range f.left {
		f.begin(i)
	}
	return f
}

// begin begins a new request.
func (f *follower) begin(i int) {
	f.puts[i] = f.rng.IntN(2) == 0
	f.left[i] = 2
	if f.puts[i] {
		f.left[i] = 1
	}
	f.read(i)
}

func (f *follower) read(i int) {
	f.policy.Enqueue(f.now, pipeline.IO{Tag: pipeline.Tag(i), Op: pipeline.Read, LenBytes: unit})
}

// write writes the waiting parts to a log, if the log has no write in flight.
func (f *follower) write(l int) {
	if g := &f.logs[l]; len(g.writing) == 0 && len(g.waiting) > 0 {
		g.writing, g.waiting = g.waiting, nil
		f.policy.Enqueue(f.now, pipeline.IO{Tag: pipeline.Tag(followers + l), Op: pipeline.Write,
			LenBytes: f.lenBytes(l)})
	}
}

func (f *follower) lenBytes(l int) int64 { return int64(len(f.logs[l].writing)) * 1024 >> l }

// run continues for ns and returns how many requests were done.
func (f *follower) run(ns int64) int {
	f.done = 0
	for end := f.now + ns; f.now < end; {
		for _, tag := range f.policy.Dispatch(f.now, nil) {
			f.serve(tag)
		}
		if at, ok := f.policy.NextWake(); ok && at < f.due[0].atNS {
			f.now = max(f.now, at)
			continue
		}
		d := f.due[0]
		f.due = f.due[1:]
		f.now = d.atNS
		f.policy.Complete(f.now, d.tag, pipeline.Result{LatencyNS: d.atNS - d.sinceNS})
		f.ended(int(d.tag))
	}
	return f.done
}

// serve starts an I/O at the drive.
func (f *follower) serve(tag pipeline.Tag) {
	n, later := int64(1), int64(100_000)
	if l := int(tag) - followers; l >= 0 {
		n, later = units(f.lenBytes(l)), f.durableNS
	}
	s := slices.Index(f.servers, slices.Min(f.servers))
	f.servers[s] = max(f.servers[s], f.now) + n*f.unitNS*f.slow*int64(len(f.servers))
	d := due{atNS: f.servers[s] + later, sinceNS: f.now, tag: tag}
	at, _ := slices.BinarySearchFunc(f.due, d, func(a, b due) int { return cmp.Compare(a.atNS, b.atNS) })
	f.due = slices.Insert(f.due, at, d)
}

// ended continues the request of a completed I/O.
func (f *follower) ended(i int) {
	if l := i - followers; l >= 0 {
		g := &f.logs[l]
		for _, i := range g.writing {
			if l == 0 {
				f.logs[1].waiting = append(f.logs[1].waiting, i)
			} else {
				f.done++
				f.begin(i)
			}
		}
		g.writing = nil
		f.write(1)
		f.write(0)
		return
	}
	switch f.left[i]--; {
	case f.left[i] > 0:
		f.read(i)
	case f.puts[i]:
		f.logs[0].waiting = append(f.logs[0].waiting, i)
		f.write(0)
	default:
		f.done++
		f.begin(i)
	}
}

// TestWritesThatFollowReadsAreNotOverpriced: another load takes most of the drive for a while. Then there is a probe,
// during which the number of writes cannot grow, because they follow reads. The cost of writes must not then be
// overestimated so much that they keep the reads out permanently.
func TestWritesThatFollowReadsAreNotOverpriced(t *testing.T) {
	for _, c := range []struct {
		name           string
		servers        int
		durableNS      int64
		latencyNS      int64
		depth, percent int
	}{
		{"one server", 1, 2_500_000, 119_000, 128, 95},
		{"many servers and a window of too few reads", 48, 2_500_000, 1_012_000, 16, 80},
	} {
		t.Run(c.name, func(t *testing.T) {
			run := func(p pipeline.Policy) int {
				f := newFollower(p, c.servers, c.durableNS)
				f.run(2e9)
				f.slow = 4
				f.run(3e9)
				f.slow = 1
				f.run(2e9)
				return f.run(2e9)
			}
			want := run(pipeline.NewFIFO(256))
			p := New(Config{Profile: Profile{ReadNS: 14_500, ReadByteNS: 1.1, LatencyNS: c.latencyNS, Depth: c.depth,
				LargeDepth: 24}})
			if got := 100 * run(p) / want; got < c.percent {
				t.Errorf("two seconds after: %d %% of fifo's requests, want %d; write cost %.1f", got, c.percent,
					p.costs.written()*unit/p.costs.UnitNS())
			}
		})
	}
}
