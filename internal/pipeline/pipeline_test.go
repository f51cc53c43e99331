package pipeline

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

const (
	sec  = int64(1_000_000_000)
	msec = int64(1_000_000)
)

// backlog keeps tenants' queues full and the device infinitely fast.
type backlog struct {
	p    *Pipeline
	ios  []IO // by tag: what is enqueued again and again
	dst  []Tag
	seen func(now int64, io IO)
}

func newBacklog(p *Pipeline, seen func(now int64, io IO), ios ...IO) *backlog {
	b := &backlog{p: p, ios: ios, seen: seen}
	for i := range b.ios {
		b.ios[i].Tag = Tag(i)
		p.Enqueue(0, b.ios[i])
	}
	return b
}

// run drives the pipeline from time from to time to; late is how much later than
// asked for it is woken.
func (b *backlog) run(t *testing.T, from, to int64, late func() int64) {
	t.Helper()
	for now := from; now < to; {
		for {
			b.dst = b.p.Dispatch(now, b.dst[:0])
			if len(b.dst) == 0 {
				break
			}
			for _, tag := range b.dst {
				b.seen(now, b.ios[tag])
				b.p.Complete(now, tag, Result{LatencyNS: 1})
				b.p.Enqueue(now, b.ios[tag])
			}
		}
		at, ok := b.p.NextWake(now)
		if !ok {
			t.Fatal("I/Os are held and the pipeline does not want to be woken")
		}
		if at <= now {
			t.Fatalf("at %d the pipeline had nothing to dispatch and wants to be woken at %d", now, at)
		}
		now = at + late()
	}
}

// perWindow is the least and the most of amounts in any window of one second that
// lies between from and to.
func perWindow(times, amounts []int64, from, to int64) (least, most int64) {
	least = math.MaxInt64
	// Windows that begin just after, or with, an event hold the extremes.
	prefix := make([]int64, len(times)+1)
	for i, a := range amounts {
		prefix[i+1] = prefix[i] + a
	}
	in := func(begin int64) int64 {
		i, _ := slices.BinarySearch(times, begin)
		j, _ := slices.BinarySearch(times, begin+sec)
		return prefix[j] - prefix[i]
	}
	for _, at := range times {
		for _, begin := range []int64{at, at + 1, at - sec, at - sec + 1} {
			if begin >= from && begin+sec <= to {
				n := in(begin)
				least, most = min(least, n), max(most, n)
			}
		}
	}
	return least, most
}

func TestACapHoldsOverAnySecond(t *testing.T) {
	for _, rate := range []int64{10, 33, 1000, 50_000, 1_000_000} {
		t.Run(fmt.Sprint(rate), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(*seed, uint64(rate)))
			t.Logf("-seed %d", *seed)
			p := New(NewFIFO(1 << 20))
			p.SetTenant(0, 1, Settings{Caps: Caps{RWIOsPerSec: rate}})
			var times, ones []int64
			ios := make([]IO, 64)
			for i := range ios {
				ios[i] = IO{Tenant: 1, Op: Op(i % 3), LenBytes: 4096}
			}
			b := newBacklog(p, func(now int64, _ IO) { times, ones = append(times, now), append(ones, 1) }, ios...)
			// A wake-up that comes late loses nothing while a few milliseconds' worth is saved up.
			const lateness = 15 * msec
			until := 3 * sec
			if rate >= 1_000_000 {
				until = sec + sec/2
			}
			b.run(t, 0, until, func() int64 { return rng.Int64N(lateness) })
			burst := rate / burstsPerSec
			least, most := perWindow(times, ones, 0, until-lateness)
			// One more than the burst, for a second may begin and end with a whole token.
			if most > rate+burst+1 || least < rate-burst-1 {
				t.Errorf("%d to %d I/Os in a second, the cap is %d", least, most, rate)
			}
			if total := int64(len(times)); total > rate*until/sec+burst+1 || total < rate*(until-lateness)/sec-1 {
				t.Errorf("%d I/Os in %d ms, the cap is %d a second", total, until/msec, rate)
			}
		})
	}
}

func TestIOsOfAHighCapGoTogether(t *testing.T) {
	p := New(NewFIFO(1 << 20))
	var ios []IO
	for ten := Tenant(1); ten <= 2; ten++ {
		p.SetTenant(0, ten, Settings{Caps: Caps{RWIOsPerSec: 50_000}})
		for range 64 {
			ios = append(ios, IO{Tenant: ten, Op: Read, LenBytes: 4096})
		}
	}
	turns, n, last := 0, 0, int64(-1)
	b := newBacklog(p, func(now int64, _ IO) {
		n++
		if now != last {
			turns++
			last = now
		}
	}, ios...)
	b.run(t, 0, sec, func() int64 { return 0 })
	if n < 99_900 || n > 102_010 || turns > int(sec/releasePeriodNS)+1 {
		t.Errorf("%d I/Os of two tenants with 50,000 a second each were let in at %d times", n, turns)
	}
}

func TestACapOnBytesHoldsForIOsLargerThanItsBurst(t *testing.T) {
	const rate, size = 3 << 20, 1 << 20
	p := New(NewFIFO(8))
	p.SetTenant(0, 1, Settings{Caps: Caps{RWBytesPerSec: rate}})
	var times, sizes []int64
	b := newBacklog(p, func(now int64, io IO) { times, sizes = append(times, now), append(sizes, io.LenBytes) },
		IO{Tenant: 1, Op: Read, LenBytes: size}, IO{Tenant: 1, Op: Write, LenBytes: size})
	b.run(t, 0, 20*sec, func() int64 { return 0 })
	if n := int64(len(times)) * size; n < 20*rate || n > 20*rate+rate/burstsPerSec+size {
		t.Errorf("%d bytes in 20 s, the cap is %d a second", n, rate)
	}
	if least, most := perWindow(times, sizes, 0, 20*sec); least < rate-size || most > rate+size+rate/burstsPerSec {
		t.Errorf("%d to %d bytes in a second, the cap is %d and an I/O has %d", least, most, rate, size)
	}
}

func TestReadsAndWritesHaveCapsOfTheirOwn(t *testing.T) {
	p := New(NewFIFO(64))
	p.SetTenant(0, 1, Settings{Caps: Caps{ReadBytesPerSec: 8 << 20, WriteBytesPerSec: 2 << 20}})
	p.SetTenant(0, 2, Settings{Caps: Caps{RWBytesPerSec: 4 << 20, WriteBytesPerSec: 1 << 20}})
	var bytes [3][Ops]int64
	flushes := 0
	var ios []IO
	for range 16 {
		for ten := Tenant(1); ten <= 2; ten++ {
			ios = append(ios, IO{Tenant: ten, Op: Read, LenBytes: 4096}, IO{Tenant: ten, Op: Write, LenBytes: 4096})
		}
	}
	b := newBacklog(p, func(_ int64, io IO) { bytes[io.Tenant][io.Op] += io.LenBytes }, ios...)
	b.run(t, 0, 10*sec, func() int64 { return 0 })
	about := func(what string, got, rate int64) {
		t.Helper()
		if got < 10*rate*99/100 || got > 10*rate*101/100 {
			t.Errorf("%s: %d bytes in 10 s, want %d a second", what, got, rate)
		}
	}
	about("reads beside capped writes", bytes[1][Read], 8<<20)
	about("writes beside capped reads", bytes[1][Write], 2<<20)
	about("reads and writes together", bytes[2][Read]+bytes[2][Write], 4<<20)
	about("writes below a cap of both", bytes[2][Write], 1<<20)
	// What moves no data does not wait for bytes that are owed.
	p.Enqueue(10*sec, IO{Tag: 1000, Tenant: 1, Op: Flush})
	for _, tag := range p.Dispatch(10*sec, nil) {
		if tag == 1000 {
			flushes++
		}
	}
	if flushes != 1 {
		t.Error("a flush waits for a cap on bytes")
	}
}

func TestHeldIOsGoInTheOrderOfTheirArrival(t *testing.T) {
	p := New(NewFIFO(64))
	p.SetTenant(0, 1, Settings{Caps: Caps{RWIOsPerSec: 1000}})
	for i := range 30 {
		p.Enqueue(0, IO{Tag: Tag(i), Tenant: 1, Op: []Op{Read, Write, Flush, Deallocate}[i%4], LenBytes: 4096})
	}
	if n := p.Held(); n != 10 || p.Queued() != 30 { // a burst of 20 ms is let in
		t.Errorf("%d of %d queued are held", n, p.Queued())
	}
	var got []Tag
	for now, ok := int64(0), true; ok; now, ok = p.NextWake(now) {
		got = p.Dispatch(now, got)
	}
	if n := p.Held(); n != 0 {
		t.Errorf("%d are held in the end", n)
	}
	if !slices.IsSorted(got) || len(got) != 30 {
		t.Errorf("dispatched in the order %v", got)
	}
}

func TestACapChangesLive(t *testing.T) {
	p := New(NewFIFO(1 << 20))
	caps := func(now, rate int64) { p.SetTenant(now, 1, Settings{Weight: 1, Caps: Caps{RWIOsPerSec: rate}}) }
	caps(0, 10)
	n := int64(0)
	ios := make([]IO, 50)
	for i := range ios {
		ios[i] = IO{Tenant: 1, Op: Read, LenBytes: 4096}
	}
	b := newBacklog(p, func(int64, IO) { n++ }, ios...)
	b.run(t, 0, sec, func() int64 { return 0 })
	for i, rate := range []int64{1000, 20, 50_000} {
		from := sec * int64(i+1)
		n = 0
		caps(from, rate)
		b.run(t, from, from+sec, func() int64 { return 0 })
		if n < rate-1-rate*releasePeriodNS/sec || n > rate+rate/burstsPerSec+1 {
			t.Errorf("after a change to %d a second: %d", rate, n)
		}
	}
	// Without a cap all that was held goes at once, and nothing needs a wake-up.
	caps(4*sec, 0)
	if got := p.Dispatch(4*sec, nil); len(got) != len(ios) {
		t.Errorf("%d of %d I/Os go when the cap does", len(got), len(ios))
	}
	if at, ok := p.NextWake(4 * sec); ok {
		t.Errorf("wake-up at %d with nothing held", at)
	}
}

func TestCancelTakesOutHeldAndQueuedIOs(t *testing.T) {
	p := New(NewFIFO(1))
	p.SetTenant(0, 1, Settings{Caps: Caps{RWIOsPerSec: 10}})
	for i := range Tag(4) {
		p.Enqueue(0, IO{Tag: i, Tenant: 1, Op: Read, LenBytes: 4096})
		p.Enqueue(0, IO{Tag: 10 + i, Tenant: 2, Op: Read, LenBytes: 4096})
	}
	if got := p.Dispatch(0, nil); len(got) != 1 || got[0] != 0 {
		t.Fatalf("dispatched %v", got)
	}
	for _, tag := range []Tag{1, 3, 2, 12} { // first, last and only held; queued in the middle
		if !p.Cancel(0, tag) {
			t.Errorf("I/O %d cannot be cancelled", tag)
		}
	}
	if p.Cancel(0, 0) || p.Cancel(0, 12) {
		t.Error("an I/O in flight, or cancelled before, is cancelled")
	}
	if _, ok := p.NextWake(0); ok {
		t.Error("wake-up for a held I/O that was cancelled")
	}
	var got []Tag
	for tag := Tag(0); p.Inflight() > 0; {
		p.Complete(sec, tag, Result{})
		if got = p.Dispatch(sec, got); len(got) > 0 {
			tag = got[len(got)-1]
		}
		if len(got) == 3 {
			p.Complete(sec, tag, Result{})
		}
	}
	if !slices.Equal(got, []Tag{10, 11, 13}) || p.Queued() != 0 {
		t.Errorf("after that %v were dispatched, %d are queued", got, p.Queued())
	}
	// A tag is free again, and the cap goes on as if the cancelled had never been.
	p.Enqueue(sec, IO{Tag: 2, Tenant: 1, Op: Read})
	if got := p.Dispatch(sec, nil); !slices.Equal(got, []Tag{2}) {
		t.Errorf("dispatched %v", got)
	}
}

func TestATenantLeavesWithItsLastIO(t *testing.T) {
	p := New(NewFIFO(1))
	p.SetTenant(0, 3, Settings{Weight: 7, Caps: Caps{RWIOsPerSec: 10}})
	for i := range Tag(3) {
		p.Enqueue(0, IO{Tag: i, Tenant: 3, Op: Read, LenBytes: 1})
	}
	p.Dispatch(0, nil)
	p.RemoveTenant(0, 3)
	p.RemoveTenant(0, 99) // unknown: nothing
	var s TenantStats
	if !p.TenantStats(3, &s) || s.Queued != 2 || s.Inflight != 1 || s.Weight != 7 {
		t.Fatalf("a tenant that leaves with I/Os: %+v", s)
	}
	// Announced again before it is gone, it stays.
	p.SetTenant(0, 3, Settings{Weight: 9})
	if got := p.Dispatch(0, nil); len(got) != 0 {
		t.Fatalf("dispatched %v at a depth of 1", got)
	}
	p.Complete(0, 0, Result{})
	for tag := Tag(1); tag < 3; tag++ {
		if got := p.Dispatch(0, nil); !slices.Equal(got, []Tag{tag}) {
			t.Fatalf("dispatched %v, want %d", got, tag)
		}
		p.Complete(0, tag, Result{})
	}
	if !p.TenantStats(3, &s) || s.Weight != 9 {
		t.Fatalf("a tenant that was announced again is gone: %+v", s)
	}
	p.RemoveTenant(0, 3)
	if p.Known(3) || len(p.Tenants(nil)) != 0 {
		t.Error("a tenant without I/Os does not leave at once")
	}
	// Cancelling its last I/O lets it go, too; and its number begins anew.
	p.SetTenant(0, 3, Settings{Caps: Caps{RWIOsPerSec: 1}})
	p.Enqueue(0, IO{Tag: 1, Tenant: 3, Op: Read, LenBytes: 1})
	p.Enqueue(0, IO{Tag: 2, Tenant: 3, Op: Read, LenBytes: 1})
	p.RemoveTenant(0, 3)
	p.Cancel(0, 1)
	p.Cancel(0, 2)
	if p.Known(3) || p.Queued() != 0 {
		t.Error("a tenant whose I/Os were cancelled does not leave")
	}
	p.Enqueue(0, IO{Tag: 1, Tenant: 3, Op: Read, LenBytes: 1})
	if p.TenantStats(3, &s); s.Weight != 1 || s.Queued != 1 || s.Wait.SumNS != 0 {
		t.Errorf("the next tenant of that number inherits %+v", s)
	}
}

func TestManyTenantsComeAndGoUnderLoad(t *testing.T) {
	t.Logf("-seed %d", *seed)
	rng := rand.New(rand.NewPCG(*seed, 1))
	p := New(NewFIFO(16))
	now := int64(0)
	busy := map[Tag]Tenant{} // queued or in flight
	var device []Tag
	next := Tag(0)
	enqueue := func(ten Tenant) {
		p.Enqueue(now, IO{Tag: next, Tenant: ten, Op: Read, LenBytes: 4096})
		busy[next] = ten
		next++
	}
	for round := range 1000 {
		ten := Tenant(1 + round%50)
		p.SetTenant(now, ten, Settings{Weight: 1 + rng.IntN(9), Caps: Caps{RWIOsPerSec: int64(rng.IntN(3)) * 1000}})
		for range rng.IntN(8) {
			enqueue(ten)
		}
		enqueue(0)
		p.RemoveTenant(now, ten)
		for range rng.IntN(4) {
			now += rng.Int64N(msec)
			device = p.Dispatch(now, device)
			for len(device) > 0 && rng.IntN(3) > 0 {
				p.Complete(now, device[0], Result{LatencyNS: 1})
				delete(busy, device[0])
				device = device[1:]
			}
		}
		for tag := range busy {
			if rng.IntN(8) == 0 && p.Cancel(now, tag) {
				delete(busy, tag)
			}
		}
		if n := p.Queued() + p.Inflight(); n != len(busy) {
			t.Fatalf("%d I/Os in the pipeline, want %d", n, len(busy))
		}
	}
	for len(busy) > 0 {
		if at, ok := p.NextWake(now); ok {
			now = at
		}
		device = p.Dispatch(now, device)
		for _, tag := range device {
			p.Complete(now, tag, Result{})
			delete(busy, tag)
		}
		device = device[:0]
	}
	if left := p.Tenants(nil); !slices.Equal(left, []Tenant{0}) || p.Queued() != 0 || p.Inflight() != 0 || len(p.capped) != 0 {
		t.Errorf("left: tenants %v, %d queued, %d in flight", left, p.Queued(), p.Inflight())
	}
}

func TestLimitedTimeIsWhatATenantWaited(t *testing.T) {
	p := New(NewFIFO(1))
	p.SetTenant(0, 1, Settings{Caps: Caps{RWIOsPerSec: 10}})
	p.SetTenant(0, 2, Settings{})
	limited := func(ten Tenant, l Limit) int64 {
		var s TenantStats
		p.TenantStats(ten, &s)
		return s.LimitedNS[l] / msec
	}
	// Ten seconds in which nobody asks for anything are nobody's wait.
	now := 10 * sec
	p.Enqueue(now, IO{Tag: 0, Tenant: 1, Op: Read, LenBytes: 4096})
	p.Enqueue(now, IO{Tag: 1, Tenant: 1, Op: Read, LenBytes: 4096})
	got := p.Dispatch(now, nil)
	p.Complete(now, got[0], Result{})
	if n := limited(1, LimitCap); n != 0 {
		t.Errorf("%d ms limited after a pause", n)
	}
	// 60 ms later another tenant comes: the wait for the cap is the first one's.
	now += 60 * msec
	p.Enqueue(now, IO{Tag: 2, Tenant: 2, Op: Read, LenBytes: 4096})
	p.Enqueue(now, IO{Tag: 3, Tenant: 2, Op: Read, LenBytes: 4096})
	p.Dispatch(now, nil)
	if a, b := limited(1, LimitCap), limited(2, LimitSSD); a != 60 || b != 0 {
		t.Errorf("limited %d ms by its cap (want 60), the other %d ms by the SSD (want 0)", a, b)
	}
	var s TenantStats
	if p.TenantStats(1, &s); s.Limit != LimitCap {
		t.Errorf("limited by %v now, want its cap", s.Limit)
	}
	// The device has one place and works for 40 ms: the second's other I/O waits for that. The
	// first's was let in after 80 ms, a fifth of its price having been saved up, and waits there too.
	for range 40 {
		now += msec
		p.Dispatch(now, nil)
	}
	if a, b := limited(1, LimitCap), limited(2, LimitSSD); a < 79 || a > 80 || b != 40 {
		t.Errorf("limited %d ms by its cap (want 80), the other %d ms by the SSD (want 40)", a, b)
	}
	if limited(2, LimitCap) != 0 {
		t.Error("a tenant without caps was limited by them")
	}
}

// creditor is a FIFO that gives credit.
type creditor struct {
	*FIFO
	units int
}

func (c creditor) Credit(Tenant) int { return c.units }

func TestACreditThatIsUsedUpLimits(t *testing.T) {
	p := New(creditor{NewFIFO(64), 10})
	now := int64(0)
	limit := func(ten Tenant) Limit {
		var s TenantStats
		p.TenantStats(ten, &s)
		return s.Limit
	}
	enqueue := func(tag Tag, ten Tenant, op Op, length int64, credited bool) {
		p.Enqueue(now, IO{Tag: tag, Tenant: ten, Op: op, LenBytes: length})
		p.KeepsCredit(ten, credited)
		p.Dispatch(now, nil)
	}
	// A standard host is not limited by what it does not know.
	enqueue(0, 1, Read, 64<<10, false)
	if l := limit(1); l != Unlimited {
		t.Errorf("a standard host is limited by %v", l)
	}
	// One that keeps to the credit is from where its next command would exceed it.
	enqueue(1, 2, Read, 16<<10, true)
	if l := limit(2); l != Unlimited {
		t.Errorf("with 4 of 10 units limited by %v", l)
	}
	enqueue(2, 2, Write, 16<<10-1, true)
	if l := limit(2); l != LimitCredit {
		t.Errorf("with 8 of 10 units, and commands of 4, limited by %v", l)
	}
	// A range that is deallocated moves no data.
	enqueue(3, 3, Deallocate, 1<<30, true)
	if l := limit(3); l != Unlimited {
		t.Errorf("after a deallocation limited by %v", l)
	}
	for range 40 {
		now += msec
		p.Dispatch(now, nil)
	}
	var s TenantStats
	if p.TenantStats(2, &s); s.LimitedNS[LimitCredit] != 40*msec {
		t.Errorf("%d ms limited by the credit, want 40", s.LimitedNS[LimitCredit]/msec)
	}
	p.Complete(now, 1, Result{})
	if l := limit(2); l != Unlimited {
		t.Errorf("with room for one more limited by %v", l)
	}
	for _, tag := range []Tag{0, 2, 3} {
		p.Complete(now, tag, Result{})
	}
	for _, ten := range p.Tenants(nil) {
		if u := p.tenants[ten].units; u != 0 {
			t.Errorf("tenant %d has %d units outstanding without an I/O", ten, u)
		}
	}
}

func TestShareIsThePartOfWhatAllUsed(t *testing.T) {
	p := New(NewFIFO(64))
	share := func(ten Tenant) float64 {
		var s TenantStats
		p.TenantStats(ten, &s)
		return s.Share
	}
	tag := Tag(0)
	one := func(now int64, ten Tenant, bytes int64) {
		p.Enqueue(now, IO{Tag: tag, Tenant: ten, Op: Read, LenBytes: bytes})
		for _, d := range p.Dispatch(now, nil) {
			p.Complete(now, d, Result{LatencyNS: 1})
		}
	}
	for i := range int64(300) {
		one(i*msec, 1, 3<<12)
		one(i*msec, 2, 1<<12)
	}
	if a, b := share(1), share(2); a < 0.74 || a > 0.76 || b < 0.24 || b > 0.26 {
		t.Errorf("shares %.3f and %.3f, want 0.75 and 0.25", a, b)
	}
	for i := range int64(300) {
		one((300+i)*msec, 2, 1<<12)
	}
	if a, b := share(1), share(2); a != 0 || b != 1 {
		t.Errorf("shares %.3f and %.3f, want 0 and 1", a, b)
	}
	p.Dispatch(900*msec, nil) // looks after a pause
	p.Dispatch(1100*msec, nil)
	if b := share(2); b != 0 {
		t.Errorf("the share of one who has used nothing since is %.3f", b)
	}
}

func TestWaitsAreCounted(t *testing.T) {
	p := New(NewFIFO(64))
	p.SetTenant(0, 1, Settings{Caps: Caps{RWIOsPerSec: 1000}})
	for i := range Tag(3) {
		p.Enqueue(0, IO{Tag: i, Tenant: 1, Op: Read})
	}
	for now := int64(0); p.Queued() > 0; now, _ = p.NextWake(now) {
		p.Dispatch(now, nil)
	}
	var s TenantStats
	p.TenantStats(1, &s)
	// A bucket of a thousand a second saves up 20: all go at once.
	if s.Wait.Count[0] != 3 || s.Wait.SumNS != 0 {
		t.Errorf("waits %v", s.Wait)
	}
	p.SetTenant(0, 2, Settings{Caps: Caps{RWIOsPerSec: 10}})
	for i := range Tag(3) {
		p.Enqueue(sec, IO{Tag: 10 + i, Tenant: 2, Op: Read})
	}
	for now := sec; p.Queued() > 0; now, _ = p.NextWake(now) {
		p.Dispatch(now, nil)
	}
	p.TenantStats(2, &s)
	// The first goes with a fifth of its price paid; the others 80 ms and 180 ms later, which
	// is below 2^17 and 2^18 µs.
	if s.Wait.Count[0] != 1 || s.Wait.Count[17] != 1 || s.Wait.Count[18] != 1 || s.Wait.SumNS/msec != 260 {
		t.Errorf("waits %v", s.Wait)
	}
	for i := range WaitBuckets - 1 {
		var h WaitHistogram
		h.observe(1000<<i - 1)
		h.observe(1000 << i)
		if h.Count[i] != 1 || h.Count[i+1] != 1 {
			t.Errorf("a wait of %d µs is not on the border of bucket %d: %v", 1<<i, i, h.Count)
		}
	}
}

// modelBucket is a token bucket in billionths of a token.
type modelBucket struct{ rate, capacity, nano, at int64 }

func (b *modelBucket) set(now, rate int64) {
	b.refill(now)
	if b.rate == 0 {
		b.nano, b.at = math.MaxInt64, now
	} else {
		b.nano -= (b.nano%sec + sec) % sec // whole tokens
	}
	b.rate, b.capacity = rate, max(rate/burstsPerSec, 1)*sec
	b.nano = min(b.nano, b.capacity)
}

func (b *modelBucket) refill(now int64) {
	if b.rate > 0 {
		b.nano = min(b.nano+(now-b.at)*b.rate, b.capacity)
	}
	b.at = now
}

func (b *modelBucket) readyAt(now int64) int64 {
	b.refill(now)
	if b.rate == 0 || b.nano >= sec {
		return now
	}
	return now + (sec-b.nano+b.rate-1)/b.rate
}

// TestPipelineAgainstASlowModel compares what is dispatched, counted and asked for
// with a model that has lists and recomputes all of it every time.
func TestPipelineAgainstASlowModel(t *testing.T) {
	t.Logf("-seed %d", *seed)
	rng := rand.New(rand.NewPCG(*seed, 2))
	type modelTenant struct {
		caps     [buckets]modelBucket
		held     []IO
		released []Tag
	}
	for range 60 {
		p := New(NewFIFO(1 << 20))
		p.releaseNS = 1 // the model knows of no grid
		const tenants = 5
		model := make([]modelTenant, tenants)
		now := int64(0)
		var device, freed []Tag
		next := Tag(0)
		set := func(i int) {
			var c Caps
			for _, f := range []*int64{&c.RWIOsPerSec, &c.RWBytesPerSec, &c.ReadBytesPerSec, &c.WriteBytesPerSec} {
				if rng.IntN(2) == 0 {
					*f = 1 + rng.Int64N(1000)
				}
			}
			for k, rate := range []int64{c.RWIOsPerSec * 1000, c.RWBytesPerSec, c.ReadBytesPerSec, c.WriteBytesPerSec} {
				model[i].caps[k].set(now, rate)
			}
			p.SetTenant(now, Tenant(i), Settings{Weight: 1, Caps: c})
		}
		for i := range model {
			set(i)
		}
		readyAt := func(m *modelTenant, op Op) int64 {
			at := m.caps[iosBucket].readyAt(now)
			switch op {
			case Read:
				at = max(at, m.caps[bytesBucket].readyAt(now), m.caps[readBucket].readyAt(now))
			case Write:
				at = max(at, m.caps[bytesBucket].readyAt(now), m.caps[writeBucket].readyAt(now))
			}
			return at
		}
		// release lets in whatever may go now, oldest first.
		release := func(m *modelTenant) {
		again:
			for i, io := range m.held {
				if readyAt(m, io.Op) > now {
					continue
				}
				m.caps[iosBucket].nano -= 1000 * sec
				if io.Op != Flush {
					m.caps[bytesBucket].nano -= io.LenBytes * sec
					if io.Op == Read {
						m.caps[readBucket].nano -= io.LenBytes * sec
					} else {
						m.caps[writeBucket].nano -= io.LenBytes * sec
					}
				}
				m.held = slices.Delete(m.held, i, i+1)
				m.released = append(m.released, io.Tag)
				goto again
			}
		}
		for range 400 {
			switch k := rng.IntN(10); {
			case k < 4:
				tag := next
				if n := len(freed); n > 0 {
					tag, freed = freed[n-1], freed[:n-1]
				} else {
					next++
				}
				io := IO{Tag: tag, Tenant: Tenant(rng.IntN(tenants)), Op: []Op{Read, Write, Flush}[rng.IntN(3)], LenBytes: rng.Int64N(300)}
				m := &model[io.Tenant]
				m.held = append(m.held, io)
				p.Enqueue(now, io)
				if len(m.held) == 1 { // an I/O that finds nobody waiting need not wait for Dispatch
					release(m)
				}
			case k < 5 && len(device) > 0:
				i := rng.IntN(len(device))
				p.Complete(now, device[i], Result{})
				freed = append(freed, device[i])
				device = slices.Delete(device, i, i+1)
			case k < 6:
				i := rng.IntN(tenants)
				set(i)
				if len(model[i].held) > 0 {
					for j := range model { // Pipeline looks at all who are due by then
						release(&model[j])
					}
				}
			case k < 7:
				m := &model[rng.IntN(tenants)]
				if len(m.held) > 0 {
					i := rng.IntN(len(m.held))
					if !p.Cancel(now, m.held[i].Tag) {
						t.Fatal("a held I/O cannot be cancelled")
					}
					freed = append(freed, m.held[i].Tag)
					m.held = slices.Delete(m.held, i, i+1)
				}
			default:
				got := p.Dispatch(now, nil)
				var want []Tag
				for i := range model {
					release(&model[i])
					want = append(want, model[i].released...)
					model[i].released = model[i].released[:0]
				}
				slices.SortStableFunc(got, func(a, b Tag) int { return int(p.ios[a].io.Tenant) - int(p.ios[b].io.Tenant) })
				if !slices.Equal(got, want) {
					t.Fatalf("at %d: dispatched %v, want %v", now, got, want)
				}
				device = append(device, got...)
				at, ok := p.NextWake(now)
				wantAt := int64(math.MaxInt64)
				for i := range model {
					for _, io := range model[i].held {
						wantAt = min(wantAt, readyAt(&model[i], io.Op))
					}
				}
				if ok != (wantAt < math.MaxInt64) || ok && at != wantAt {
					t.Fatalf("at %d: next wake-up at %d (%v), want %d", now, at, ok, wantAt)
				}
				now += rng.Int64N(20 * msec)
				if ok && rng.IntN(2) == 0 {
					now = max(now, at)
				}
			}
			queued := 0
			for i := range model {
				queued += len(model[i].held) + len(model[i].released)
			}
			if p.Queued() != queued || p.Inflight() != len(device) {
				t.Fatalf("%d queued and %d in flight, want %d and %d", p.Queued(), p.Inflight(), queued, len(device))
			}
		}
	}
}

// rounds makes a pipeline of tenants whose I/Os go round and round, and returns a
// function that enqueues, dispatches and completes one.
func rounds(policy Policy, tenants int, caps Caps) func() {
	p := New(policy)
	for i := range tenants {
		p.SetTenant(0, Tenant(i), Settings{Weight: 1, Caps: caps})
	}
	const deep = 4
	dst := make([]Tag, 0, tenants*deep)
	device := make([]Tag, 0, 2*tenants*deep)
	now := int64(0)
	for i := range Tag(tenants * deep) {
		p.Enqueue(now, IO{Tag: i, Tenant: Tenant(int(i) % tenants), Op: Read, LenBytes: 4096})
	}
	return func() {
		now += 2000
		dst = p.Dispatch(now, dst[:0])
		device = append(device, dst...)
		p.NextWake(now)
		if len(device) == 0 {
			return
		}
		tag := device[0]
		device = append(device[:0], device[1:]...)
		p.Complete(now, tag, Result{LatencyNS: 80_000})
		p.Enqueue(now, IO{Tag: tag, Tenant: Tenant(int(tag) % tenants), Op: Read, LenBytes: 4096})
	}
}

func TestAnIOAllocatesNothing(t *testing.T) {
	for _, caps := range []Caps{{}, {RWIOsPerSec: 5000, RWBytesPerSec: 30 << 20}} {
		step := rounds(NewFIFO(32), 64, caps)
		for range 10_000 {
			step()
		}
		if n := testing.AllocsPerRun(10_000, step); n != 0 {
			t.Errorf("caps %+v: %v allocations an I/O, want 0", caps, n)
		}
	}
}

func BenchmarkEnqueueDispatchComplete(b *testing.B) {
	for _, bench := range []struct {
		name string
		caps Caps
	}{{"uncapped", Caps{}}, {"capped", Caps{RWIOsPerSec: 5000, RWBytesPerSec: 30 << 20}}} {
		b.Run("fifo/64tenants/"+bench.name, func(b *testing.B) {
			step := rounds(NewFIFO(32), 64, bench.caps)
			b.ReportAllocs()
			for b.Loop() {
				step()
			}
		})
	}
}
