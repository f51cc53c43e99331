package jbof

import (
	"testing"

	"jbofd/internal/pipeline"
	"jbofd/internal/tenant"
)

// enqueue queues n I/Os of a tenant with tags from the given one on.
func enqueue(p *Policy, now int64, from pipeline.Tag, n int, io pipeline.IO) {
	for i := range n {
		io.Tag = from + pipeline.Tag(i)
		p.Enqueue(now, io)
	}
}

// TestReadsThatMayCatchUpDoNotWaitForWritesAtTheDrive: a host was off its processor while another one wrote. The writes
// that the drive still has do not take its turn.
func TestReadsThatMayCatchUpDoNotWaitForWritesAtTheDrive(t *testing.T) {
	const size = 128 << 10
	read := pipeline.IO{Tenant: 0, Op: pipeline.Read, LenBytes: unit}
	write := pipeline.IO{Tenant: 1, Op: pipeline.Write, LenBytes: size}
	p := New(Config{})
	p.costs.writeByteNS, p.costs.storm = 20*p.costs.UnitNS()/unit, 1
	p.SetTenant(0, 0, 1)
	p.SetTenant(0, 1, 1)
	// atTheDrive writes for a while, and returns how many of 32 reads that come then go to the drive beside writes.
	atTheDrive := func(written int) (reads int) {
		now := p.tickedNS
		for range written {
			p.Enqueue(now, pipeline.IO{Tag: 100, Tenant: 1, Op: pipeline.Write, LenBytes: size})
			p.Dispatch(now, nil)
			p.Complete(now, 100, pipeline.Result{LatencyNS: 1})
		}
		enqueue(p, now, 200, 8, write)
		p.Dispatch(now, nil)
		if w := p.windows[writeLane]; w.taken < p.limit {
			t.Fatalf("writes fill %d of the window, %d", w.taken, p.limit)
		}
		enqueue(p, now, 0, 32, read)
		for _, tag := range p.Dispatch(now, nil) {
			if tag < 32 {
				reads++
			}
		}
		return reads
	}
	if got := atTheDrive(10); got != 32 {
		t.Errorf("%d of 32 reads go to the drive after 10 writes", got)
	}
	p = New(Config{})
	p.costs.writeByteNS, p.costs.storm = 20*p.costs.UnitNS()/unit, 1
	p.SetTenant(0, 0, 1)
	p.SetTenant(0, 1, 1)
	cost, _ := p.costs.Of(pipeline.Write, size)
	p.tenants[0].virtual = 2 * cost * weightOne // as much as the writer will have had
	if got := atTheDrive(0); got > minInflight {
		t.Errorf("%d reads go to a drive that is full of writes, although their tenant is not behind", got)
	}
}

// TestReadsCatchUpAsFarAsWritesMayBeAhead counts the reads that go to a drive full of writes: those that begin before
// their tenant is no more behind the writer than the window, or the most expensive I/O, costs. It does not matter
// whether writes are queued, nor whether virtual times were reset meanwhile.
func TestReadsCatchUpAsFarAsWritesMayBeAhead(t *testing.T) {
	const behind, reads, firstRead = 10, 32, 100
	for _, c := range []struct {
		name     string
		lenBytes int64
		// units is the cost of 4 KiB written, in 4 KiB reads. n writes fill the window.
		units float64
		n     int
		// queued are writes beyond that. reset lets the virtual times reach their limit.
		queued int
		reset  bool
	}{
		{name: "cheap writes, none queued", lenBytes: 64 << 10, units: 1, n: 7},
		{name: "cheap writes, some queued", lenBytes: 64 << 10, units: 1, n: 7, queued: 3},
		{name: "dear writes, none queued", lenBytes: 128 << 10, units: 20, n: minInflight},
		{name: "dear writes, some queued", lenBytes: 128 << 10, units: 20, n: minInflight, queued: 3},
		{name: "none queued, virtual times reset", lenBytes: 64 << 10, units: 1, n: 7, reset: true},
		{name: "some queued, virtual times reset", lenBytes: 64 << 10, units: 1, n: 7, queued: 3, reset: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := New(Config{})
			p.costs.writeByteNS, p.costs.storm = c.units*p.costs.UnitNS()/unit, 1
			p.SetTenant(0, 0, 1)
			p.SetTenant(0, 1, 1)
			now := int64(0)
			if c.reset {
				p.virtual = rebase + 12345
				p.tenants[0].virtual, p.tenants[1].virtual = p.virtual, p.virtual
			}
			cost, _ := p.costs.Of(pipeline.Write, c.lenBytes)
			enqueue(p, now, 0, c.n+c.queued, pipeline.IO{Tenant: 1, Op: pipeline.Write, LenBytes: c.lenBytes})
			p.tenants[1].creditUnits = maxCredit
			if got := len(p.Dispatch(now, nil)); got != c.n {
				t.Fatalf("%d writes go to the drive, want %d", got, c.n)
			}
			if c.reset {
				now = tickNS
				if p.Dispatch(now, nil); p.virtual != 0 {
					t.Fatal("the virtual times were not reset")
				}
				p.windows[writeLane].movedNS = now // the writes do not stall
			}
			read, _ := p.costs.Of(pipeline.Read, unit)
			ahead := max(p.costs.WindowNS(), cost) * weightOne
			p.tenants[0].virtual = p.tenants[1].virtual - ahead - behind*read*weightOne
			enqueue(p, now, firstRead, reads, pipeline.IO{Tenant: 0, Op: pipeline.Read, LenBytes: unit})
			p.tenants[0].creditUnits = maxCredit
			got := 0
			for _, tag := range p.Dispatch(now, nil) {
				if tag >= firstRead {
					got++
				}
			}
			if got != behind {
				t.Errorf("%d reads go to the drive, want %d", got, behind)
			}
		})
	}
}

// TestWritesThatWaitForCreditShowThatTheDriveIsBusy: the writes of a host that knows no credits wait here beyond its
// credit, not for the window. What they cost is learned all the same, but not what reads cost: those may be for one
// die.
func TestWritesThatWaitForCreditShowThatTheDriveIsBusy(t *testing.T) {
	for _, op := range []pipeline.Op{pipeline.Write, pipeline.Read} {
		p := New(Config{})
		for i := range tenant.ID(2) {
			p.SetTenant(0, i, 1)
		}
		p.limit = 1 << 40 // only credits hold I/Os back
		enqueue(p, 0, 0, 1, pipeline.IO{Tenant: 0, Op: op, LenBytes: unit})
		p.tenants[1].creditUnits = 8
		enqueue(p, 0, 1, 16, pipeline.IO{Tenant: 1, Op: op, LenBytes: unit})
		if got := len(p.Dispatch(0, nil)); got != 9 {
			t.Fatalf("%d I/Os go to the drive, want 8 of one tenant and 1 of the other", got)
		}
		p.Dispatch(tickNS/2, nil)
		want := int64(tickNS / 2)
		if op == pipeline.Read {
			want = 0
		}
		if got := p.costs.saturatedNS; got != want {
			t.Errorf("%v: the drive has been busy for %d ns, want %d", op, got, want)
		}
		p.Cancel(tickNS/2, 16)
		for tag := pipeline.Tag(9); tag < 16; tag++ {
			p.Cancel(tickNS/2, tag)
		}
		if p.held != [lanes]int{} {
			t.Errorf("%v: nothing waits, %v are held", op, p.held)
		}
	}
}
