package crrs

import (
	"slices"
	"testing"
)

// TestEachRepairAsksInARoundOfItsOwn, and so does one that begins again because more was lost. What is asked for again
// in one repair is asked for in the same round, so that what was begun for it is of use.
func TestEachRepairAsksInARoundOfItsOwn(t *testing.T) {
	d := newRepairRig(t)
	now, seen := int64(1), map[uint16]bool{}
	ask := func() *Send {
		t.Helper()
		d.look()
		s := d.fetch()
		if s == nil || seen[s.Round] {
			t.Fatalf("%+v, in a round of before", s)
		}
		seen[s.Round] = true
		return s
	}
	s := ask()
	for range 5 {
		d.r.repairRefused(s.Tag, false, &d.out)
		now += repairAgainNS
		d.r.Advance(now)
		again := d.fetch()
		if again == nil || again.Round != s.Round {
			t.Fatalf("%+v, want one in round %d", again, s.Round)
		}
		s = again
	}
	d.r.Ranged(d.batch(s, true), Done, &d.out)
	d.r.Ranged(d.op(Settle), Superseded, &d.out)
	now += repairAgainNS
	d.r.Advance(now)
	ask()
	d.r.endRepair(RepairFailed, &d.out)
	now += repairPauseNS
	d.r.Advance(now)
	d.r.Repair(1<<40, &d.out)
	ask()
}

// TestAPassThatBeginsAgainAsksInAnotherRound: the digests for the last one may lack what the store has lost since.
func TestAPassThatBeginsAgainAsksInAnotherRound(t *testing.T) {
	for _, known := range []bool{true, false} {
		d := &repairRig{t: t, r: New(Config{Window: 8, Reads: 4, Parts: 1, Bits: 64})}
		role := middle
		role.Filling, role.Successor, role.ChainTail = true, NoPeer, NoPeer
		d.r.SetRole(role, &d.out)
		d.r.Advance(1)
		d.r.Receive(1, &Message{Kind: Durable, Epoch: 2, Clock: 100}, &d.out)
		compare := func() Send {
			t.Helper()
			d.out.Sends = nil
			d.r.Flush(&d.out)
			i := slices.IndexFunc(d.out.Sends, func(s Send) bool { return s.Kind == Compare })
			if i < 0 {
				t.Fatalf("%+v", d.out.Sends)
			}
			return d.out.Sends[i]
		}
		first := compare()
		d.r.noteLost(first.Tag, &d.out)
		d.r.askLost()
		again := compare()
		if again.Round != first.Round {
			t.Errorf("what was lost on the way is asked for in round %d, want %d", again.Round, first.Round)
		}
		d.r.Receive(1, &Message{Kind: Sums, Epoch: 2, Tag: again.Tag, Part: &Part{Sums: make([]Sum, 64)}}, &d.out)
		op := d.op(Digest)
		op.Lost, op.LostAt = known, 1<<40
		d.r.Ranged(op, StoreUnreadable, &d.out)
		if known {
			d.look()
			op = d.op(Settle)
			op.Width = 6
			d.r.Ranged(op, Done, &d.out)
		}
		if s := compare(); s.Round == first.Round {
			t.Errorf("it is known where the loss is: %t; the pass begins again in round %d", known, s.Round)
		}
	}
}
