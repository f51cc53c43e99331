package pipeline

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"jbofd/internal/tenant"
)

// backlog keeps the tenants' queues full on an infinitely fast device.
type backlog struct {
	p    *Pipeline
	ios  []IO // by tag: the I/Os that are enqueued repeatedly
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

// run drives the pipeline from time from to time to. late is how much later than requested it is woken.
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

// perWindow returns the minimum and the maximum of the sum of amounts in any window of one second between from and to.
func perWindow(times, amounts []int64, from, to int64) (least, most int64) {
	least = math.MaxInt64
	// The extremes are in windows that begin at an event or just after one.
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
			// A late wake-up loses nothing, because the bucket saves up a few milliseconds' worth of tokens.
			const lateness = 15 * msec
			until := 3 * sec
			if rate >= 1_000_000 {
				until = sec + sec/2
			}
			b.run(t, 0, until, func() int64 { return rng.Int64N(lateness) })
			burst := rate / burstsPerSec
			least, most := perWindow(times, ones, 0, until-lateness)
			// One more than the burst, because a second may begin and end with a whole token.
			if most > rate+burst+1 || least < rate-burst-1 {
				t.Errorf("%d to %d I/Os in a second, the cap is %d", least, most, rate)
			}
			if total := int64(len(times)); total > rate*until/sec+burst+1 || total < rate*(until-lateness)/sec-1 {
				t.Errorf("%d I/Os in %d ms, the cap is %d a second", total, until/msec, rate)
			}
		})
	}
}

func TestIOsOfAHighCapAreReleasedTogether(t *testing.T) {
	p := New(NewFIFO(1 << 20))
	var ios []IO
	for ten := tenant.ID(1); ten <= 2; ten++ {
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
		for ten := tenant.ID(1); ten <= 2; ten++ {
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
	// An I/O without data does not wait for the debt of the byte cap.
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

func TestHeldIOsAreReleasedInOrder(t *testing.T) {
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
	// Without a cap all held I/Os are released at once, and no wake-up is needed.
	caps(4*sec, 0)
	if got := p.Dispatch(4*sec, nil); len(got) != len(ios) {
		t.Errorf("%d of %d I/Os go when the cap does", len(got), len(ios))
	}
	if at, ok := p.NextWake(4 * sec); ok {
		t.Errorf("wake-up at %d with nothing held", at)
	}
}
