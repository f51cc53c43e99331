package jbof

import (
	"math"
	"math/bits"
	"math/rand/v2"
	"testing"

	"jbofd/internal/pipeline"
	"jbofd/internal/tenant"
)

// TestCreditCountsCommandsAsHostsDo: a command without data is one unit to a host, however large its range. If the
// policy counted the range, a few large commands would remove all limits of their tenant.
func TestCreditCountsCommandsAsHostsDo(t *testing.T) {
	for _, op := range []pipeline.Op{pipeline.WriteZeroes, pipeline.Deallocate, pipeline.Verify} {
		credit := func(large bool) int {
			p := New(Config{})
			p.SetTenant(0, 0, 1)
			ios := repeat(128, pipeline.IO{Op: pipeline.Read, LenBytes: 4096})
			if large {
				ios = append(ios, repeat(2, pipeline.IO{Op: op, LenBytes: 256 << 20})...)
			}
			s := newServer(p, func(pipeline.IO) float64 { return p.costs.UnitNS() })
			s.run(500e6, ios...)
			return p.Credit(0)
		}
		if alone, with := credit(false), credit(true); with > 4*alone {
			t.Errorf("with a few large commands of %v a tenant may have %d units outstanding, else %d", op, with, alone)
		}
	}
}

// TestVerifyLeavesRoomForReads: a Verify reads its range piece by piece, however large the range is.
func TestVerifyLeavesRoomForReads(t *testing.T) {
	p := New(Config{})
	p.SetTenant(0, 0, 1)
	p.SetTenant(0, 1, 1)
	const verifies, reads = 4, 32
	for i := range pipeline.Tag(verifies) {
		p.Enqueue(0, pipeline.IO{Tag: i, Tenant: 0, Op: pipeline.Verify, LenBytes: 256 << 20})
	}
	if n := len(p.Dispatch(0, nil)); n != verifies {
		t.Fatalf("%d of %d dispatched", n, verifies)
	}
	for i := range pipeline.Tag(reads) {
		p.Enqueue(1000, pipeline.IO{Tag: verifies + i, Tenant: 1, Op: pipeline.Read, LenBytes: 4096})
	}
	if n := len(p.Dispatch(1000, nil)); n != reads {
		t.Errorf("beside %d Verifies that take half a second, %d of %d reads go to the drive", verifies, n, reads)
	}
}

// TestVerifyDoesNotChangeEstimates: its latency is long only because it reads one piece after the other.
func TestVerifyDoesNotChangeEstimates(t *testing.T) {
	p := New(Config{})
	p.SetTenant(0, 0, 1)
	before := p.costs.UnitNS()
	for i := range int64(100) {
		now := i * 400e6
		p.Enqueue(now, pipeline.IO{Op: pipeline.Verify, LenBytes: 256 << 20})
		for _, tag := range p.Dispatch(now, nil) {
			p.Complete(now+300e6, tag, pipeline.Result{LatencyNS: 300e6})
		}
	}
	var st pipeline.Stats
	if p.Stats(&st); st.Worst() != pipeline.Underutilised {
		t.Errorf("a drive that verifies at its ease is %v", st.Worst())
	}
	if now := p.costs.UnitNS(); now != before {
		t.Errorf("a read cost %.0f ns and seems to cost %.0f after 100 lone Verifies", before, now)
	}
}

// TestEveryIOIsDispatched drives a policy only by its events, as a drive does: every queued I/O is dispatched, whatever
// the drive, the hosts and the clock do, and no tenant waits for ever.
func TestEveryIOIsDispatched(t *testing.T) {
	t.Logf("-seed %d", *seed)
	leaveNothingBehind(t, *seed)
}

// TestADriveThatCostsNothingHasCredits: its most expensive I/O, divided by the cost of one, was 0/0.
func TestADriveThatCostsNothingHasCredits(t *testing.T) { leaveNothingBehind(t, 1795323171532055813) }

func leaveNothingBehind(t *testing.T, seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 2))
	log := func(most int64) int64 { return rng.Int64N(1 << rng.IntN(bits.Len64(uint64(most)))) }
	for run := range 150 {
		var profile Profile
		if rng.IntN(2) == 0 {
			profile = Profile{ReadNS: float64(log(1 << 24)), ReadByteNS: float64(1+log(1<<20)) / 1000,
				LatencyNS: log(1 << 30), Depth: 1 + rng.IntN(192), LargeDepth: 1 + rng.IntN(24)}
		}
		p := New(Config{Profile: profile, Depth: 1 + rng.IntN(1<<rng.IntN(9))})
		const ios = 200
		tenants := 1 + rng.IntN(9)
		for i := range tenants {
			p.SetTenant(0, tenant.ID(i), 1+rng.IntN(10_000))
		}
		type event struct {
			at  int64
			tag pipeline.Tag
			op  int // 0 enqueue, 1 resume, 2 complete
		}
		var (
			now, unit int64
			events    []event
			queued    = map[pipeline.Tag]bool{}
			lens      = int64(1) << rng.IntN(29)
			slow      = log(1 << 31)
			dst       []pipeline.Tag
			free      int64
			left      = 4000
		)
		unit = 1 + slow
		for tag := range pipeline.Tag(ios) {
			events = append(events, event{log(1 << 30), tag, 0})
		}
		for idle := 0; len(events) > 0 || len(queued) > 0; {
			// The next event.
			next, at := -1, int64(math.MaxInt64)
			for i := range events {
				if events[i].at < at {
					next, at = i, events[i].at
				}
			}
			if wake, ok := p.NextWake(); ok && wake < at {
				if wake <= now {
					if idle++; idle > 3 {
						t.Fatalf("run %d: it asks to be woken at %d again and again, it is %d", run, wake, now)
					}
				}
				next, at = -1, wake
			}
			if at == math.MaxInt64 {
				t.Fatalf("run %d: %d I/Os wait, nothing happens any more", run, len(queued))
			}
			now = max(now, at)
			if next >= 0 {
				idle = 0
				e := events[next]
				events[next] = events[len(events)-1]
				events = events[:len(events)-1]
				switch e.op {
				case 0:
					p.Enqueue(now, pipeline.IO{Tag: e.tag, Tenant: tenant.ID(rng.IntN(tenants)),
						Op: pipeline.Op(rng.IntN(int(pipeline.Ops))), LenBytes: 1 + rng.Int64N(lens)})
					queued[e.tag] = true
					if rng.IntN(50) == 0 {
						p.Cancel(now, e.tag)
						delete(queued, e.tag)
					}
				case 1:
					p.Resume(now, e.tag)
					free = max(free, now) + log(unit)
					events = append(events, event{free + log(unit), e.tag, 2})
				case 2:
					p.Complete(now, e.tag, pipeline.Result{LatencyNS: log(1 << 40), Failed: rng.IntN(8) == 0})
					if left > 0 {
						left--
						pause := int64(0)
						if rng.IntN(100) == 0 {
							pause = log(1 << 43)
						}
						events = append(events, event{now + pause, e.tag, 0})
					}
				}
			}
			dst = p.Dispatch(now, dst[:0])
			for _, tag := range dst {
				if !queued[tag] {
					t.Fatalf("run %d: %d is dispatched and was not queued", run, tag)
				}
				delete(queued, tag)
				if rng.IntN(3) == 0 {
					p.Pause(now, tag)
					events = append(events, event{now + log(1<<30), tag, 1})
					continue
				}
				free = max(free, now) + log(unit)
				events = append(events, event{free + log(unit), tag, 2})
			}
			for i := range p.tenants {
				ten := &p.tenants[i]
				if c := p.Credit(tenant.ID(i)); c < 1 || c > maxCredit {
					t.Fatalf("run %d: a credit of %d: %+v", run, c, ten)
				}
				if ten.units < 0 || ten.costNS < 0 || math.IsNaN(ten.ioNS+ten.ioPlace+ten.ioUnits) {
					t.Fatalf("run %d: tenant %+v", run, ten)
				}
			}
			if v := p.costs.readNS + p.costs.readByteNS + p.costs.writeByteNS + p.costs.storm +
				p.costs.width; !(v > 0) || math.IsInf(v, 0) {
				t.Fatalf("run %d: costs %+v", run, p.costs)
			}
		}
	}
}

// TestWriteCostIsLearnedDespiteAFewReads: the cost of writes that nearly saturate a drive is learned, also beside
// occasional reads, which would otherwise wait behind too many writes.
func TestWriteCostIsLearnedDespiteAFewReads(t *testing.T) {
	p := New(Config{})
	p.SetTenant(0, 0, 1)
	p.SetTenant(0, 1, 1)
	s := newServer(p, func(io pipeline.IO) float64 {
		if io.Op == pipeline.Write {
			return 6 * p.costs.UnitNS()
		}
		return p.costs.UnitNS()
	})
	s.run(1e9, append(repeat(128, pipeline.IO{Tenant: 0, Op: pipeline.Write, LenBytes: 4096}),
		pipeline.IO{Tenant: 1, Op: pipeline.Read, LenBytes: 4096})...)
	var st pipeline.Stats
	if p.Stats(&st); st.WriteCost < 5 || st.WriteCost > 7 {
		t.Errorf("write cost is %.2f, want 6", st.WriteCost)
	}
}

// TestOnlyRatiosOfWeightsMatter, also for credits.
func TestOnlyRatiosOfWeightsMatter(t *testing.T) {
	credits := func(scale int) (c [3]int) {
		p := New(Config{})
		var ios []pipeline.IO
		for i := range c {
			p.SetTenant(0, tenant.ID(i), scale<<i)
			ios = append(ios, repeat(64, pipeline.IO{Tenant: tenant.ID(i), Op: pipeline.Op(i % 2),
				LenBytes: 4096 << (2 * i)})...)
		}
		newServer(p, func(io pipeline.IO) float64 { return 2500 + float64(io.LenBytes)/2 }).run(200e6, ios...)
		for i := range c {
			c[i] = p.Credit(tenant.ID(i))
		}
		return c
	}
	if one, many := credits(1), credits(1000); one != many {
		t.Errorf("weights of 1:2:4 give credits of %d, those of 1000:2000:4000 %d", one, many)
	}
}

// TestVirtualTimeBeginsAnewInOrder: with all tenants in order, however far behind they are, and any number of times.
func TestVirtualTimeBeginsAnewInOrder(t *testing.T) {
	p := New(Config{Depth: 1})
	const tenants = 20
	for i := range tenant.ID(tenants) {
		p.SetTenant(0, i, 1)
		p.Enqueue(0, pipeline.IO{Tag: pipeline.Tag(i), Tenant: i, Op: pipeline.Write, LenBytes: 4096})
	}
	for range 20 {
		p.virtual += rebase + 1
		for i := range p.tenants { // those that came last are furthest behind
			p.tenants[i].virtual = -int64(i) * 2 * p.slack(&p.tenants[i])
		}
		for i := len(p.heaps[writeLane]) - 1; i >= 0; i-- {
			p.down(writeLane, i)
		}
		p.check(t)
		p.tick(p.tickedNS + tickNS)
		p.check(t)
		if p.virtual != 0 || p.readVirtual < -slackWindows*p.ahead() || p.readVirtual > 0 {
			t.Fatalf("virtual time is %d, that of reads %d", p.virtual, p.readVirtual)
		}
	}
}

// TestAnIdleDriveIsNotCongested: however slow its last I/Os were.
func TestAnIdleDriveIsNotCongested(t *testing.T) {
	p := New(Config{})
	p.SetTenant(0, 0, 1)
	state := func() pipeline.State {
		var st pipeline.Stats
		p.Stats(&st)
		return st.Worst()
	}
	for i := range pipeline.Tag(100) {
		p.Enqueue(0, pipeline.IO{Tag: i, Op: pipeline.Write, LenBytes: 4096})
	}
	for now := int64(0); p.queued+p.windows[writeLane].inflight > 0; now += 1e6 {
		for _, tag := range p.Dispatch(now, nil) {
			if p.Complete(now, tag, pipeline.Result{LatencyNS: 1e9}); p.queued > 0 && tag > 50 &&
				state() != pipeline.Overloaded {
				t.Fatalf("a drive that takes a second for everything is %v", state())
			}
		}
	}
	if got := state(); got != pipeline.Underutilised {
		t.Errorf("an idle drive is %v", got)
	}
}
