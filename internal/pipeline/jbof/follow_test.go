package jbof

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"testing"

	"jbofd/internal/pipeline"
)

// follower is a load whose writes follow its reads, as in a key-value store. Some requests (Gets) are two reads, one
// after the other. The others (Puts) are a read, then a part of a write of one log, then of a write of another log.
// Each log has one write in flight at a time, for all requests that have come meanwhile. The drive has several servers.
// A read, or each unit of a write, occupies one of them for unitNS times their number, and a write completes durableNS
// later. It may stand still now and then. The host processes one completion at a time.
type follower struct {
	policy            pipeline.Policy
	unitNS, durableNS int64
	slow              int64 // factor by which everything is slowed down now
	putPercent        int
	hostNS, hostFree  int64 // for each completion; when the host becomes free
	stalls            stalls
	now               int64
	servers           []int64 // when each becomes free
	due               []due
	rng               *rand.Rand
	left              []int // reads, by request
	puts              []bool
	logs              [2]struct{ waiting, writing []int }
	done              int
	written           int64 // bytes
}

type due struct {
	atNS, sinceNS int64
	tag           pipeline.Tag
	host          bool // the host has processed it
}

// stalls are times at which a drive stands still. The stalls and the times between them are uniformly random, with
// these means.
type stalls struct {
	meanNS, betweenNS int64
	fromNS, toNS      int64 // the current one, or the next
	rng               *rand.Rand
}

// goesOn returns when a drive that is to work from at on can do so. Calls must not go back in time.
func (s *stalls) goesOn(at int64) int64 {
	if s.meanNS == 0 {
		return at
	}
	for s.toNS <= at {
		s.fromNS = s.toNS + s.rng.Int64N(2*s.betweenNS)
		s.toNS = s.fromNS + s.rng.Int64N(2*s.meanNS)
	}
	if at < s.fromNS {
		return at
	}
	return s.toNS
}

const followers = 256

func newFollower(p pipeline.Policy, servers int, durableNS int64) *follower {
	p.SetTenant(0, 0, 1)
	f := &follower{policy: p, unitNS: 19_000, durableNS: durableNS, slow: 1, putPercent: 50,
		servers: make([]int64, servers),
		rng:     rand.New(rand.NewPCG(1, 2)),
		left:    make([]int, followers), puts: make([]bool, followers)}
	for i := range f.left {
		f.begin(i)
	}
	return f
}

// begin begins a new request.
func (f *follower) begin(i int) {
	f.puts[i] = f.rng.IntN(100) < f.putPercent
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
		if d.host {
			f.ended(int(d.tag))
			continue
		}
		f.policy.Complete(f.now, d.tag, pipeline.Result{LatencyNS: d.atNS - d.sinceNS})
		f.hostFree = max(f.hostFree, f.now) + f.hostNS
		f.add(due{atNS: f.hostFree, tag: d.tag, host: true})
	}
	return f.done
}

// serve starts an I/O at the drive.
func (f *follower) serve(tag pipeline.Tag) {
	n, later := int64(1), int64(100_000)
	if l := int(tag) - followers; l >= 0 {
		n, later = units(f.lenBytes(l)), f.durableNS
		f.written += n * unit
	}
	s := slices.Index(f.servers, slices.Min(f.servers))
	f.servers[s] = f.stalls.goesOn(max(f.servers[s], f.now)) + n*f.unitNS*f.slow*int64(len(f.servers))
	f.add(due{atNS: f.servers[s] + later, sinceNS: f.now, tag: tag})
}

func (f *follower) add(d due) {
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

// TestStallsDoNotMakeWritesExpensive: a drive stands still for some ms again and again, as a virtual disk does. After a
// time of Puts only, Gets and Puts must still get nearly all that they get under fifo.
func TestStallsDoNotMakeWritesExpensive(t *testing.T) {
	for _, c := range []struct {
		servers                      int
		durableNS, latencyNS, hostNS int64
		stallNS, betweenNS           int64
	}{
		{1, 2_500_000, 119_000, 20_000, 8e6, 10e6},
		{1, 2_500_000, 119_000, 0, 30e6, 10e6},
		{48, 300_000, 1_012_000, 0, 30e6, 10e6},
		{48, 2_500_000, 1_012_000, 0, 30e6, 10e6},
		{48, 2_500_000, 1_012_000, 40_000, 30e6, 10e6},
	} {
		profile := Profile{ReadNS: 14_500, ReadByteNS: 1.1, LatencyNS: c.latencyNS, Depth: 128, LargeDepth: 24}
		var got, want [3]int
		for seed := range uint64(2) {
			run := func(p pipeline.Policy, done *[3]int) {
				f := newFollower(p, c.servers, c.durableNS)
				f.hostNS = c.hostNS
				f.stalls = stalls{meanNS: c.stallNS, betweenNS: c.betweenNS, rng: rand.New(rand.NewPCG(seed, 1))}
				done[0] += f.run(2e9)
				f.putPercent = 100
				done[1] += f.run(4e9)
				f.putPercent = 50
				done[2] += f.run(4e9)
			}
			run(pipeline.NewFIFO(256), &want)
			run(New(Config{Profile: profile}), &got)
		}
		for i, phase := range []string{"from the start", "with Puts only", "after Puts only"} {
			percent := 100 * got[i] / want[i]
			if percent < 93 {
				t.Errorf("%+v: %s: %d %% of fifo's requests, want 93", c, phase, percent)
			}
		}
	}
}

// TestAWrongWriteCostCorrectsItself: an estimate that is far too high is soon no higher than what the drive does
// allows, whatever the load and however busy the drive is, and holds nobody up.
func TestAWrongWriteCostCorrectsItself(t *testing.T) {
	profile := Profile{ReadNS: 14_500, ReadByteNS: 1.1, LatencyNS: 119_000, Depth: 128, LargeDepth: 24}
	for _, percent := range []int{20, 50, 100} {
		for _, hostNS := range []int64{0, 40_000} {
			run := func(policy pipeline.Policy, p *Policy) (done int, part float64) {
				f := newFollower(policy, 1, 300_000)
				f.putPercent, f.hostNS = percent, hostNS
				f.run(5e8)
				if p != nil {
					p.costs.writeByteNS, p.costs.probe.wait = p.costs.bound(1e9), probeLast
				}
				f.run(2e9)
				before := f.written
				done = f.run(5e8)
				if p != nil {
					part = float64(f.written-before) * p.costs.writeByteNS / 5e8
				}
				return done, part
			}
			want, _ := run(pipeline.NewFIFO(256), nil)
			p := New(Config{Profile: profile})
			got, part := run(p, p)
			most := 1.4
			if hostNS == 0 && percent < 100 { // reads and writes compete, so that a probe finds the cost
				most = 0.4
			}
			if got < 95*want/100 || part > most {
				t.Errorf("%d %% Puts, %d ns at the host: 2 s later %d %% of fifo's requests, want 95; writes cost "+
					"%.2f of the time, want at most %.1f", percent, hostNS, 100*got/want, part, most)
			}
		}
	}
}
