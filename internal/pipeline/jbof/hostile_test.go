package jbof

import (
	"testing"

	"jbofd/internal/pipeline"
)

// TestCreditCountsCommandsAsHostsDo: a command without data is one unit to a host, however large
// its range. Were the range counted, a few large ones would lift all limits of their tenant.
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

// TestVerifyLeavesRoomForReads: a Verify reads its range piece by piece, however large it is.
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

// TestVerifyTellsNothingOfTheLoad: it takes its time because it reads one piece after the other.
func TestVerifyTellsNothingOfTheLoad(t *testing.T) {
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
