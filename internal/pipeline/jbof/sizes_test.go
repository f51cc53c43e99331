package jbof

import (
	"testing"

	"jbofd/internal/pipeline"
	"jbofd/internal/tenant"
)

// TestAReadOfLessThanFourKiBIsChargedForWhatItTakes: a sector costs little less than 4 KiB, as calibration finds. On a
// drive that was not calibrated it costs as much.
func TestAReadOfLessThanFourKiBIsChargedForWhatItTakes(t *testing.T) {
	for _, c := range []struct {
		part      float64
		len       int64
		wantOf4Ki float64
	}{{0, 512, 1}, {0, 2048, 1}, {0.7, 512, 0.7}, {0.7, 2304, 0.85}, {0.7, 4096, 1}, {7, 512, 1}} {
		costs := NewCosts(Profile{SmallPart: c.part})
		got, _ := costs.Of(pipeline.Read, c.len)
		whole, _ := costs.Of(pipeline.Read, 4096)
		if part := float64(got) / float64(whole); part < c.wantOf4Ki-0.01 || part > c.wantOf4Ki+0.01 {
			t.Errorf("part %.1f: a read of %d bytes costs %.3f of one of 4 KiB, want %.2f", c.part, c.len, part,
				c.wantOf4Ki)
		}
	}
	// What is learned from intervals is in proportion to what is charged.
	p := New(Config{Profile: Profile{ReadNS: 1200, ReadByteNS: 0.31, SmallPart: 0.8}})
	p.SetTenant(0, 0, 1)
	p.SetTenant(0, 1, 1)
	s := newServer(p, func(io pipeline.IO) float64 {
		if io.LenBytes == 512 {
			return 2 * 2000
		}
		return 2 * 2500
	})
	s.run(4e9, append(repeat(64, pipeline.IO{Tenant: 0, Op: pipeline.Read, LenBytes: 512}),
		repeat(64, pipeline.IO{Tenant: 1, Op: pipeline.Read, LenBytes: 4096})...)...)
	if got := p.costs.UnitNS(); got < 4800 || got > 5200 {
		t.Errorf("a read of 4 KiB costs %.0f ns on a drive that takes 5000", got)
	}
	if got := s.served[0] / s.served[1]; got < 0.95 || got > 1.05 {
		t.Errorf("the reader of sectors has %.2f of the other's time", got)
	}
}

// TestAVeryLongReadTakesThePlaceOfALargeOne in the window: its parts keep the drive busy one after the other.
func TestAVeryLongReadTakesThePlaceOfALargeOne(t *testing.T) {
	costs := NewCosts(Profile{})
	_, large := costs.Of(pipeline.Read, 128<<10)
	if _, place := costs.Of(pipeline.Read, 1<<20); place != large {
		t.Errorf("a read of 1 MiB takes a place of %d, one of 128 KiB %d", place, large)
	}
}

// TestWhoComesBackDoesNotKeepOthersWaitingForLong: a tenant that was away may catch up with a few windows, and not with
// as much as the most expensive I/O of somebody else.
func TestWhoComesBackDoesNotKeepOthersWaitingForLong(t *testing.T) {
	p := New(Config{})
	for i := range tenant.ID(3) {
		p.SetTenant(0, i, 1)
	}
	p.Enqueue(0, pipeline.IO{Tag: 0, Tenant: 0, Op: pipeline.Write, LenBytes: 64 << 20})
	p.Enqueue(0, pipeline.IO{Tag: 1, Tenant: 1, Op: pipeline.Read, LenBytes: 4096})
	p.Dispatch(0, nil)
	if p.maxCost() < 100*p.costs.WindowNS() {
		t.Fatalf("a write of 64 MiB costs %d ns, a window is %d", p.maxCost(), p.costs.WindowNS())
	}
	p.virtual = 1 << 50
	p.Enqueue(1000, pipeline.IO{Tag: 2, Tenant: 2, Op: pipeline.Read, LenBytes: 4096})
	if got, most := (p.virtual-p.tenants[2].virtual)/weightOne, 16*p.costs.WindowNS(); got > most || got < most/8 {
		t.Errorf("it may catch up with %d ns, want at most %d", got, most)
	}
	// Its own I/Os are what it must be able to catch up with.
	p.tenants[0].queues[writeLane].n = 0
	if got, least := p.slack(&p.tenants[0])/weightOne, int64(p.tenants[0].ioNS); got < least {
		t.Errorf("who writes 64 MiB at a time may catch up with %d ns, an I/O costs %d", got, least)
	}
}

// TestAHeavyReaderThatReadsLittleDoesNotMakeProbesHarsh: the tilt of a probe follows what reads get, not the weight of
// those who read.
func TestAHeavyReaderThatReadsLittleDoesNotMakeProbesHarsh(t *testing.T) {
	p := New(Config{})
	p.SetTenant(0, 0, 1000)
	p.SetTenant(0, 1, 1)
	p.SetTenant(0, 2, 1)
	ios := append(repeat(1, pipeline.IO{Tenant: 0, Op: pipeline.Read, LenBytes: 4096}),
		append(repeat(64, pipeline.IO{Tenant: 1, Op: pipeline.Read, LenBytes: 4096}),
			repeat(64, pipeline.IO{Tenant: 2, Op: pipeline.Write, LenBytes: 4096})...)...)
	s := newServer(p, func(io pipeline.IO) float64 { return 2500 })
	most, probes := int64(0), 0
	for range 400 {
		s.run(2e6, ios...)
		if p.costs.Probing() {
			probes++
			most = max(most, p.costs.Tilt(readLane, unit))
		}
	}
	if probes == 0 || most > 100 {
		t.Errorf("%d times a probe was found running; it made reads dearer by up to %d", probes, most)
	}
}

// TestATenantDoesNotFillTheWindow: however much its hosts send, while others are active. Alone it has all of it.
func TestATenantDoesNotFillTheWindow(t *testing.T) {
	p := New(Config{})
	p.SetTenant(0, 0, 1)
	p.SetTenant(0, 1, 1)
	s := newServer(p, func(io pipeline.IO) float64 { return 2500 })
	s.run(100e6, append(repeat(512, pipeline.IO{Tenant: 0, Op: pipeline.Read, LenBytes: 4096}),
		repeat(32, pipeline.IO{Tenant: 1, Op: pipeline.Read, LenBytes: 4096})...)...)
	if got, credit := p.tenants[0].unitsAtDrive, int64(p.Credit(0)); got > credit || got == 0 {
		t.Errorf("%d units at the drive, the credit is %d", got, credit)
	}
	alone := New(Config{})
	alone.SetTenant(0, 0, 1)
	s = newServer(alone, func(io pipeline.IO) float64 { return 2500 })
	s.run(100e6, repeat(512, pipeline.IO{Tenant: 0, Op: pipeline.Read, LenBytes: 4096})...)
	if got := alone.windows[readLane].taken; got < alone.limit*99/100 {
		t.Errorf("alone it has taken %d of a window of %d", got, alone.limit)
	}
}

// TestALongRangeIsCharged: on a drive that does nothing else while it zeroes, for 2 ms a MiB, a tenant that zeroes has
// its share of the time and not whatever it asks for.
func TestALongRangeIsCharged(t *testing.T) {
	for _, length := range []int64{128 << 10, 512 << 10, 1 << 20} {
		p := New(Config{})
		for i := range tenant.ID(3) {
			p.SetTenant(0, i, 1)
		}
		s := newServer(p, func(io pipeline.IO) float64 {
			if io.Op == pipeline.WriteZeroes {
				return 2e6 * float64(io.LenBytes) / (1 << 20)
			}
			return p.costs.UnitNS()
		})
		ios := append(repeat(1, pipeline.IO{Tenant: 0, Op: pipeline.WriteZeroes, LenBytes: length}),
			append(repeat(64, pipeline.IO{Tenant: 1, Op: pipeline.Read, LenBytes: 4096}),
				repeat(64, pipeline.IO{Tenant: 2, Op: pipeline.Read, LenBytes: 4096})...)...)
		s.run(1e9, ios...)
		before := s.served[0]
		s.run(1e9, ios...)
		if part := (s.served[0] - before) / 1e9; part < 0.2 || part > 0.45 {
			t.Errorf("who zeroes %d KiB at a time has %.2f of the time of a drive with two readers", length>>10, part)
		}
	}
}
