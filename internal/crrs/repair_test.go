package crrs

import (
	"slices"
	"testing"
)

// middle is a member between a ChainHead, 1, and a ChainTail, 3.
var middle = Role{Epoch: 2, Member: true, Since: 1, Predecessor: 1, Successor: 3, ChainTail: 3, NumOthers: 2,
	Others: [MaxOthers]Peer{3, 1}}

func newMiddle(out *Actions) *Replica {
	r := New(Config{Window: 8, Reads: 4, Parts: 1, Bits: 64})
	r.SetRole(middle, out)
	r.Extend(1 << 60)
	r.Advance(1)
	*out = Actions{}
	return r
}

// TestAReadThatTheStoreCannotDoIsAnsweredByOthers, one after the other.
func TestAReadThatTheStoreCannotDoIsAnsweredByOthers(t *testing.T) {
	for _, c := range []struct {
		answers []Status
		want    Status
	}{
		{[]Status{OK}, OK},
		{[]Status{NotFound}, NotFound},
		{[]Status{WrongView}, WrongView},
		{[]Status{Unreadable, OK}, OK},
		{[]Status{Unavailable, OK}, OK},
		{[]Status{Unavailable, Unreadable}, Unavailable},
		{[]Status{Unreadable, Unavailable}, Unavailable},
	} {
		var out Actions
		r := newMiddle(&out)
		r.Read(Read{Key: Key{Len: 1}, Tag: 9}, &out)
		r.Fetched(out.Stores[0].Slot, StoreUnreadable, 0, 0, 0, &out)
		for i, st := range c.answers {
			if len(out.Replies) > 0 || len(out.Sends) != i+1 || out.Sends[i].Kind != Ship ||
				out.Sends[i].To != middle.Others[i] {
				t.Fatalf("%v: %+v", c.answers, out)
			}
			r.Receive(middle.Others[i], &Message{Kind: Answer, Epoch: 2, Tag: out.Sends[i].Tag, Status: st}, &out)
		}
		if len(out.Replies) != 1 || out.Replies[0].Status != c.want || out.Replies[0].Tag != 9 || out.Damaged {
			t.Errorf("%v: %+v, want %d", c.answers, out.Replies, c.want)
		}
	}
}

// TestWhatADriveMayReturnLaterIsNotSaidToBeLost: neither to a client, if nobody else has it, nor to another member.
func TestWhatADriveMayReturnLaterIsNotSaidToBeLost(t *testing.T) {
	for _, c := range []struct {
		others []Status
		want   Status
	}{{nil, Failing}, {[]Status{Unreadable, Unreadable}, Failing}, {[]Status{Unreadable, Unavailable}, Unavailable},
		{[]Status{Unreadable, OK}, OK}} {
		var out Actions
		r := newMiddle(&out)
		if c.others == nil {
			r.SetRole(Role{Epoch: 3, Member: true, Since: 1, Predecessor: NoPeer, Successor: NoPeer, ChainTail: NoPeer},
				&out)
			out = Actions{}
		}
		r.Read(Read{Key: Key{Len: 1}, Tag: 9}, &out)
		r.Fetched(out.Stores[0].Slot, StoreFailing, 0, 0, 0, &out)
		for i, st := range c.others {
			r.Receive(middle.Others[i], &Message{Kind: Answer, Epoch: 2, Tag: out.Sends[i].Tag, Status: st}, &out)
		}
		if len(out.Replies) != 1 || out.Replies[0].Status != c.want {
			t.Errorf("%v: %+v, want %d", c.others, out.Replies, c.want)
		}
	}
	var out Actions
	r := newMiddle(&out)
	r.Receive(3, &Message{Kind: Ship, Epoch: 2, Tag: 7, Key: Key{Len: 1}}, &out)
	r.Fetched(out.Stores[0].Slot, StoreFailing, 0, 0, 0, &out)
	if len(out.Sends) != 1 || out.Sends[0].Status != Unavailable {
		t.Errorf("%+v", out.Sends)
	}
}

// TestAMemberAnswersOthersWhileTheKeyIsClean: a value that is not committed is the ChainTail's to answer with.
func TestAMemberAnswersOthersWhileTheKeyIsClean(t *testing.T) {
	for _, dirty := range []string{"", "before", "meanwhile"} {
		var out Actions
		r := newMiddle(&out)
		write := func() {
			r.Receive(1, &Message{Kind: Forward, Epoch: 2, Seq: 1, Op: Put, Version: 5, Key: Key{Len: 1}}, &out)
		}
		if dirty == "before" {
			write()
		}
		out = Actions{}
		r.Receive(3, &Message{Kind: Ship, Epoch: 2, Tag: 7, Key: Key{Len: 1}}, &out)
		want := OK
		if dirty != "" {
			want = Unavailable
		}
		if len(out.Stores) > 0 && dirty == "before" {
			t.Error("the store is asked for what may not be given")
		}
		if len(out.Stores) == 1 {
			slot := out.Stores[0].Slot
			if dirty == "meanwhile" {
				write()
			}
			out.Sends = out.Sends[:0]
			r.Fetched(slot, Done, 4, 0, 0, &out)
		}
		if len(out.Sends) != 1 || out.Sends[0].Kind != Answer || out.Sends[0].To != 3 || out.Sends[0].Status != want {
			t.Errorf("dirty %q: %+v, want %d", dirty, out.Sends, want)
		}
	}
}

// repairRig drives the repair of position 1<<40 by hand. The store has lost its segment, of 2^58 positions, with token
// 7.
type repairRig struct {
	t   *testing.T
	r   *Replica
	out Actions
}

func newRepairRig(t *testing.T) *repairRig {
	d := &repairRig{t: t}
	d.r = newMiddle(&d.out)
	d.r.Repair(1<<40, &d.out)
	return d
}

// op flushes and returns the only RangeOp, which is of a kind.
func (d *repairRig) op(kind RangeKind) *RangeOp {
	d.t.Helper()
	d.r.Flush(&d.out)
	if len(d.out.Ranges) != 1 || d.out.Ranges[0].Kind != kind {
		d.t.Fatalf("%+v, want one of kind %d", d.out.Ranges, kind)
	}
	op := d.out.Ranges[0]
	d.out.Ranges = nil
	return &op
}

// look answers the question how far the loss reaches.
func (d *repairRig) look() {
	d.t.Helper()
	op := d.op(Settle)
	if op.First != 1<<40 && op.First != 0 || op.Clock != 0 {
		d.t.Fatalf("%+v", op)
	}
	op.Clock, op.Width = 7, 6
	d.r.Ranged(op, Done, &d.out)
}

// fetch flushes and returns the only request for a batch, nil if there is none.
func (d *repairRig) fetch() *Send {
	d.r.Flush(&d.out)
	i := slices.IndexFunc(d.out.Sends, func(s Send) bool { return s.Kind == Fetch })
	if i < 0 {
		return nil
	}
	s := d.out.Sends[i]
	d.out.Sends = nil
	return &s
}

// batch answers a Fetch.
func (d *repairRig) batch(s *Send, last bool) *RangeOp {
	d.t.Helper()
	p := *s.Part
	p.To, p.Last = Cursor{Position: 1 << 41}, last
	d.r.Receive(s.To, &Message{Kind: Batch, Epoch: 2, Tag: s.Tag, Part: &p, Mem: 5}, &d.out)
	op := d.op(CopyIn)
	if op.Clock != 0 || op.Mem != 5 {
		d.t.Fatalf("%+v: a repair replaces what is newer", op)
	}
	return op
}

func (d *repairRig) outcomes() (all []RepairOutcome) {
	for _, e := range d.out.Repairs {
		all = append(all, e.Outcome)
	}
	return all
}

// TestALostSegmentIsCopiedAndSettled when what the member had under way has ended, and everything was copied.
func TestALostSegmentIsCopiedAndSettled(t *testing.T) {
	d := newRepairRig(t)
	d.r.Receive(1, &Message{Kind: Forward, Epoch: 2, Seq: 1, Op: Put, Version: 5, Key: Key{Len: 1}}, &d.out)
	d.r.Stored(d.out.Stores[0].Slot, Done, 5, &d.out)
	d.look()
	if d.fetch() != nil {
		t.Fatal("it asks before its writes have ended, which the loss may have had")
	}
	d.r.Receive(1, &Message{Kind: Durable, Epoch: 2, Seq: 1}, &d.out)
	d.r.Receive(3, &Message{Kind: Ack, Epoch: 2, Seq: 1}, &d.out)
	s := d.fetch()
	if s == nil || s.To != 3 || s.Part.First != 0 || s.Part.Bits != 58 {
		t.Fatalf("%+v", s)
	}
	d.r.Ranged(d.batch(s, false), Done, &d.out)
	if s = d.fetch(); s == nil || s.Part.From.Position != 1<<41 {
		t.Fatalf("%+v: it does not go on", s)
	}
	d.r.Ranged(d.batch(s, true), Done, &d.out)
	op := d.op(Settle)
	if op.Clock != 7 || op.Width != 6 || op.First != 0 {
		t.Fatalf("%+v", op)
	}
	op.Width = 7 // it was split meanwhile
	d.r.Ranged(op, Done, &d.out)
	if op = d.op(Settle); op.First != 1<<57 || op.Clock != 7 {
		t.Fatalf("%+v: the other half is not settled", op)
	}
	op.Width = 7
	d.r.Ranged(op, Done, &d.out)
	if got := d.outcomes(); !slices.Equal(got, []RepairOutcome{RepairBegun, RepairDone}) || d.r.repairing() {
		t.Fatalf("%v", got)
	}
}

// TestARepairBeginsAgain when more was lost meanwhile, in another epoch, and from the next member if one cannot help.
func TestARepairBeginsAgain(t *testing.T) {
	d := newRepairRig(t)
	d.look()
	s := d.fetch()
	d.r.repairRefused(s.Tag, true, &d.out)
	if s = d.fetch(); s == nil || s.To != 1 {
		t.Fatalf("%+v: the next one is not asked", s)
	}
	d.r.Ranged(d.batch(s, true), Done, &d.out)
	d.r.Ranged(d.op(Settle), Superseded, &d.out)
	d.r.Advance(repairAgainNS + 1)
	d.look()
	late := d.fetch()
	next := middle
	next.Epoch++
	d.r.SetRole(next, &d.out)
	d.out = Actions{}
	d.r.Receive(3, &Message{Kind: Batch, Epoch: 3, Tag: late.Tag, Part: late.Part, Mem: 6}, &d.out)
	if !slices.Equal(d.out.Released, []uint32{6}) || len(d.out.Ranges) > 0 {
		t.Fatalf("what an earlier epoch has asked for is stored: %+v", d.out)
	}
	d.look()
	for range 2 {
		d.r.repairRefused(d.fetch().Tag, true, &d.out)
	}
	if d.fetch() != nil || d.outcomes()[len(d.outcomes())-1] != RepairNoSource || d.out.Damaged {
		t.Fatalf("%v: nobody has it", d.outcomes())
	}
	// While a batch is stored the membership ends: nothing follows.
	d = newRepairRig(t)
	d.look()
	op := d.batch(d.fetch(), false)
	next.Since, next.Filling, next.Successor, next.ChainTail = 9, true, NoPeer, NoPeer
	d.r.SetRole(next, &d.out)
	d.r.Ranged(op, Done, &d.out)
	if d.r.Flush(&d.out); d.r.repairing() || d.fetch() != nil {
		t.Error("a repair goes on in another membership")
	}
}

// TestASegmentWiderThanTheRangeIsSplitFirst: the member asks for that, and again after a while, and copies nothing
// before. If it takes too long, the repair is given up for a while.
func TestASegmentWiderThanTheRangeIsSplitFirst(t *testing.T) {
	for _, filling := range []bool{false, true} {
		d := &repairRig{t: t, r: New(Config{Window: 8, Reads: 4, Parts: 1, Bits: 56})}
		role := middle
		if role.Filling = filling; filling {
			role.Successor, role.ChainTail = NoPeer, NoPeer
		}
		d.r.SetRole(role, &d.out)
		d.out = Actions{}
		now := int64(1)
		d.r.Advance(now)
		d.r.queueRepair(1<<40, &d.out)
		look := func(width uint8) {
			t.Helper()
			op := d.op(Settle)
			if op.Clock != 0 || op.Width != 8 || op.First != 1<<40 {
				t.Fatalf("%+v", op)
			}
			op.Clock, op.Width = 7, width
			d.r.Ranged(op, Done, &d.out)
			if d.fetch() != nil || len(d.out.Ranges) > 0 {
				t.Fatalf("%+v", d.out)
			}
		}
		for range 3 {
			look(6)
			now += repairAgainNS
			d.r.Advance(now)
		}
		if op := d.op(Settle); filling {
			op.Clock, op.Width = 7, 9
			d.r.Ranged(op, Done, &d.out)
			if op = d.op(Settle); op.Clock != 7 || op.Width != 9 {
				t.Fatalf("%+v: it is not settled", op)
			}
			continue
		} else {
			op.Clock, op.Width = 7, 9
			d.r.Ranged(op, Done, &d.out)
		}
		if s := d.fetch(); s == nil || s.Part.Bits != 55 {
			t.Fatalf("%+v: its own part is not copied", s)
		}

		d.r.Repair(1<<55, &d.out)
		d.r.endRepair(RepairDone, &d.out)
		d.out = Actions{}
		asked := 0
		for begin := now; now < begin+3*repairNS; now += repairAgainNS {
			d.r.Advance(now)
			d.r.Repair(1<<55, &d.out)
			if d.r.Flush(&d.out); len(d.out.Ranges) > 0 {
				op := d.out.Ranges[0]
				op.Clock, op.Width = 7, 7
				d.out.Ranges = nil
				d.r.Ranged(&op, Done, &d.out)
				asked++
			}
		}
		if got := d.outcomes(); len(got) < 4 || len(got) > 6 || got[1] != RepairFailed ||
			asked > 3*repairNS/repairAgainNS {
			t.Errorf("%v, and the store was asked %d times", got, asked)
		}
	}
}

// TestASourceThatDoesNotAnswerHidesNoOther: all are asked in turn, from where the copy is, and those that cannot read
// it not again. The repair ends when none can.
func TestASourceThatDoesNotAnswerHidesNoOther(t *testing.T) {
	d := newRepairRig(t)
	d.look()
	asks := func(to Peer, from uint64) *Send {
		t.Helper()
		s := d.fetch()
		if s == nil || s.To != to || s.Part.From.Position != from {
			t.Fatalf("%+v, want one to %d from %x on", s, to, from)
		}
		return s
	}
	d.r.repairRefused(asks(3, 0).Tag, false, &d.out)
	d.r.repairRefused(asks(1, 0).Tag, true, &d.out)
	if s := d.fetch(); s != nil {
		t.Fatalf("%+v at once after all were asked", s)
	}
	d.r.Advance(1 + repairAgainNS)
	d.r.Ranged(d.batch(asks(3, 0), false), Done, &d.out)
	d.r.repairRefused(asks(3, 1<<41).Tag, true, &d.out)
	d.r.Advance(1 + 2*repairAgainNS)
	d.r.repairRefused(asks(1, 1<<41).Tag, false, &d.out)
	d.r.Advance(1 + 3*repairAgainNS)
	d.r.repairRefused(asks(1, 1<<41).Tag, true, &d.out)
	if d.fetch() != nil || !slices.Equal(d.outcomes(), []RepairOutcome{RepairBegun, RepairNoSource}) {
		t.Fatalf("%v when all lack it", d.outcomes())
	}
	// While nobody answers it is not said that nobody has it.
	d = newRepairRig(t)
	d.look()
	for now := int64(1); now < 2*repairNS && d.r.repairing(); now += repairAgainNS {
		d.r.Advance(now)
		for s := d.fetch(); s != nil; s = d.fetch() {
			d.r.repairRefused(s.Tag, s.To == 3, &d.out)
		}
	}
	if !slices.Equal(d.outcomes(), []RepairOutcome{RepairBegun, RepairFailed}) {
		t.Errorf("%v when one does not answer", d.outcomes())
	}
}

// TestARepairDoesNotWaitForWritesForEver: others of the range can be repaired meanwhile. A member that is filled waits,
// because it has nothing else to do.
func TestARepairDoesNotWaitForWritesForEver(t *testing.T) {
	d := newRepairRig(t)
	d.r.Receive(1, &Message{Kind: Forward, Epoch: 2, Seq: 1, Op: Put, Version: 5, Key: Key{Len: 1}}, &d.out)
	d.look()
	d.r.Flush(&d.out)
	if due := d.r.DueNS(); due <= repairNS || due > repairNS+1e9 {
		t.Fatalf("it wants a turn at %d", due)
	}
	d.r.Advance(d.r.DueNS())
	d.r.Flush(&d.out)
	if !slices.Equal(d.outcomes(), []RepairOutcome{RepairBegun, RepairFailed}) || d.out.Damaged {
		t.Errorf("%v", d.outcomes())
	}
}

// TestAFillingMemberTriesToSettleForAWhile: its drive may read again later. In the end it is damaged.
func TestAFillingMemberTriesToSettleForAWhile(t *testing.T) {
	for _, again := range []bool{false, true} {
		d := &repairRig{t: t, r: New(Config{Window: 8, Reads: 4, Parts: 1, Bits: 64})}
		role := middle
		role.Filling, role.Successor, role.ChainTail = true, NoPeer, NoPeer
		d.r.SetRole(role, &d.out)
		d.r.Advance(1)
		d.r.queueRepair(1<<40, &d.out)
		settled := false
		for now := int64(1); now < 10*repairNS && !d.r.damaged; now += repairAgainNS {
			d.r.Advance(now)
			d.r.Flush(&d.out)
			for len(d.out.Ranges) > 0 {
				op := d.out.Ranges[0]
				d.out.Ranges = d.out.Ranges[1:]
				st := StoreUnreadable
				if op.Kind == Settle && again && now > 2*repairNS {
					st, settled = Done, settled || op.Clock != 0
					op.Clock, op.Width = 7, 6
				}
				d.r.Ranged(&op, st, &d.out)
				d.r.Flush(&d.out)
			}
		}
		if d.r.damaged == again || settled != again || d.r.repairing() && again {
			t.Errorf("again %v: damaged %v, settled %v: %v", again, d.r.damaged, settled, d.outcomes())
		}
		if n := len(d.outcomes()); !again && (d.r.nowNS < 3*repairNS || n < 6 || n > 10) {
			t.Errorf("it is damaged after %d ns: %v", d.r.nowNS, d.outcomes())
		}
	}
}

// TestAPauseOfRepairsDoesNotKeepAMemberFromBeingFilled: a repair that had no source is not begun again at once, but in
// another epoch it may have one. A member that is filled needs none, and waits for the end of a pause.
func TestAPauseOfRepairsDoesNotKeepAMemberFromBeingFilled(t *testing.T) {
	d := newRepairRig(t)
	d.r.Flush(&d.out)
	d.r.endRepair(RepairNoSource, &d.out)
	filling := middle
	filling.Epoch, filling.Since, filling.Filling, filling.Successor, filling.ChainTail = 3, 3, true, NoPeer, NoPeer
	d.r.SetRole(filling, &d.out)
	d.out = Actions{}
	d.r.Receive(1, &Message{Kind: Durable, Epoch: 3, Clock: 100}, &d.out)
	for range 2 * passRestarts {
		d.r.Flush(&d.out)
		for len(d.out.Sends) > 0 { // its own store has lost what it compares
			if s := d.out.Sends[0]; s.Kind == Compare {
				d.r.Receive(1, &Message{Kind: Sums, Epoch: 3, Tag: s.Tag, Part: &Part{Sums: make([]Sum, 64)}}, &d.out)
			}
			d.out.Sends = d.out.Sends[1:]
		}
		for _, op := range d.out.Ranges {
			if op.Kind == Settle {
				return
			}
			op.Lost, op.LostAt = true, 1<<40
			d.r.Ranged(&op, StoreUnreadable, &d.out)
		}
		d.out.Ranges = nil
	}
	t.Errorf("the loss is not settled; damaged %v", d.r.damaged)
}
