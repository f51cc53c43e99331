package crrs

import "testing"

// unjudgedRig is a ChainHead before a ChainTail, 3. Its store has lost what it has of a segment, the first 2^58
// positions, so that it can judge no condition there.
type unjudgedRig struct {
	t   *testing.T
	r   *Replica
	now int64
	out Actions
	// stored counts the Puts that the store was asked for, by tag; replies are those of clients.
	stored  map[uint64]int
	replies map[uint64]Status
	// whole: the loss is settled. answer is how the member behind answers a Fetch: a Batch if Done, or that it has lost
	// the same.
	// known: the store has the keys all the same, as far as that counts.
	whole  bool
	known  bool
	answer StoreStatus
	// done: the store knows that what is repeated was done.
	done bool
	// value: what is lost is a value, and not a segment. settle is how the store answers a Settle.
	value  bool
	settle StoreStatus
	fetch  int
}

func newUnjudgedRig(t *testing.T) *unjudgedRig {
	d := &unjudgedRig{t: t, r: New(Config{Window: 32, Reads: 4, Parts: 1, Bits: 64}), now: 1, stored: map[uint64]int{},
		replies: map[uint64]Status{}, answer: GivenUp}
	d.r.SetRole(Role{Epoch: 2, Member: true, Since: 1, Predecessor: NoPeer, Successor: 3, ChainTail: 3, NumOthers: 1,
		Others: [MaxOthers]Peer{3}}, &d.out)
	d.r.Extend(1 << 60)
	d.turn()
	return d
}

// put asks for a Put of a key at a position.
func (d *unjudgedRig) put(tag uint64, position uint64, w Write) {
	w.Op, w.Key, w.Tag, w.Position = Put, Key{Bytes: [16]byte{byte(tag)}, Len: 1}, tag, position
	d.r.Write(w, &d.out)
	d.turn()
}

// turn takes turns until there is nothing to do at that time.
func (d *unjudgedRig) turn() {
	d.r.Advance(d.now)
	for range 100 {
		d.r.Flush(&d.out)
		o := d.out
		d.out = Actions{}
		for _, s := range o.Stores {
			d.stored[s.Tag]++
			st := Done
			if s.Retry && d.done {
				st = Repeated
			} else if (s.Conditional || s.Retry) && !d.whole && !(s.Last && d.known) {
				st = Unjudged
			}
			d.r.Stored(s.Slot, st, s.Version, &d.out)
		}
		for _, op := range o.Ranges {
			st := Done
			switch {
			case op.Kind != Settle:
			case d.settle != Done:
				st = d.settle
			case op.Clock == 0 && d.value:
			case op.Clock == 0:
				op.Clock, op.Width = 7, 6
			default:
				d.whole = true
			}
			d.r.Ranged(&op, st, &d.out)
		}
		for _, s := range o.Sends {
			switch s.Kind {
			case Forward:
				d.r.Receive(3, &Message{Kind: Ack, Epoch: 2, Seq: s.Seq}, &d.out)
			case Fetch:
				d.fetch++
				switch d.answer {
				case Done:
					p := *s.Part
					p.Last = true
					d.r.Receive(3, &Message{Kind: Batch, Epoch: 2, Tag: s.Tag, Part: &p}, &d.out)
				case StoreUnreadable:
					d.r.repairRefused(s.Tag, true, &d.out)
				default:
					d.r.repairRefused(s.Tag, false, &d.out)
				}
			}
		}
		for _, p := range o.Replies {
			if _, twice := d.replies[p.Tag]; twice {
				d.t.Fatalf("write %d has two replies", p.Tag)
			}
			d.replies[p.Tag] = p.Status
		}
		if len(o.Stores)+len(o.Ranges)+len(o.Sends)+len(o.Replies)+len(d.out.Stores) == 0 {
			return
		}
	}
	d.t.Fatal("it does not come to rest")
}

// run lets time pass, up to a time.
func (d *unjudgedRig) run(until int64) {
	for d.now < until {
		due := d.r.DueNS()
		if due == 0 || due > until {
			due = until
		}
		d.now = max(due, d.now+1)
		d.turn()
	}
}

// left tests that nothing is left of the writes.
func (d *unjudgedRig) left() {
	d.t.Helper()
	if r := d.r; r.Writes() > 0 || r.unjudged.N > 0 || r.tables.unjudgedBytes != 0 || r.deciding > 0 || r.marks > 0 ||
		r.led > 0 || r.damaged {
		d.t.Errorf("left: %d writes, %d that wait, with %d bytes, %d are decided, %d marks", r.Writes(), r.unjudged.N,
			r.tables.unjudgedBytes, r.deciding, r.marks)
	}
}

// TestWritesThatNobodyCanJudgeHoldUpNoOthers: a few wait, and their values are not written again. All others go on,
// also of the same key.
func TestWritesThatNobodyCanJudgeHoldUpNoOthers(t *testing.T) {
	d := newUnjudgedRig(t)
	const many = 200
	for i := range uint64(many) {
		d.put(i, i, Write{Conditional: i%2 == 0, Retry: i%2 == 1})
	}
	waiting := many - len(d.replies)
	if waiting != 32/unjudgedShare {
		t.Errorf("%d of a window of 32 wait", waiting)
	}
	for tag, st := range d.replies {
		if st != Unavailable {
			t.Errorf("write %d ends as %d, and was not done", tag, st)
		}
	}
	for i := range uint64(many) {
		d.replies = map[uint64]Status{}
		if d.put(1000+i, i, Write{}); len(d.replies) != 1 || d.replies[1000+i] != OK {
			t.Fatalf("another write: %v", d.replies)
		}
	}
	d.run(9e9)
	for tag, n := range d.stored {
		if n > 1 {
			t.Errorf("the value of write %d was written %d times", tag, n)
		}
	}
	d.replies = map[uint64]Status{}
	d.run(20e9)
	for tag, st := range d.replies {
		if st != Unavailable {
			t.Errorf("after a long time write %d ends as %d", tag, st)
		}
	}
	if len(d.replies) != waiting {
		t.Errorf("%d of %d have a reply after a long time", len(d.replies), waiting)
	}
	d.left()
}

// TestAWriteIsJudgedWhenTheLossIsRepaired, at once, and its value is written once more.
func TestAWriteIsJudgedWhenTheLossIsRepaired(t *testing.T) {
	for _, w := range []Write{{Conditional: true}, {Retry: true}, {Conditional: true, Retry: true}} {
		d := newUnjudgedRig(t)
		d.put(1, 77, w)
		d.put(2, 1<<60, w) // in another segment, which is whole when the other one is
		d.run(2e9)
		if len(d.replies) > 0 {
			t.Fatalf("%+v: %v before the repair", w, d.replies)
		}
		d.answer = Done
		d.run(2e9 + 2*repairAgainNS)
		if d.replies[1] != OK || d.stored[1] != 2 || len(d.replies) != 2 {
			t.Errorf("%+v: %v after the repair, and %v were stored", w, d.replies, d.stored)
		}
		d.left()
	}
}

// TestARetryThatTheStoreKnowsWaitsForNoRepair: what was done is known, whatever else is lost.
func TestARetryThatTheStoreKnowsWaitsForNoRepair(t *testing.T) {
	for _, answer := range []StoreStatus{GivenUp, StoreUnreadable} {
		for _, conditional := range []bool{false, true} {
			d := newUnjudgedRig(t)
			d.answer = answer
			d.put(1, 1, Write{Conditional: true}) // its repair is under way, or has found that nobody has it
			d.done = true
			d.put(2, 2, Write{Conditional: conditional, Retry: true})
			if st, ok := d.replies[2]; !ok || st != OK {
				t.Errorf("answer %d, conditional %v: %v", answer, conditional, d.replies)
			}
			d.run(d.now + 2*unjudgedNS)
			d.left()
		}
	}
}

// TestAWriteIsToldSoonThatNobodyHasWhatItIsAbout, when the store has said that it does not know either, and so are
// those that come behind it, of each kind. When there is somebody who has it, in another view, it is judged again.
func TestAWriteIsToldSoonThatNobodyHasWhatItIsAbout(t *testing.T) {
	d := newUnjudgedRig(t)
	d.answer = StoreUnreadable
	for tag := range uint64(20) {
		d.put(tag, tag, Write{Conditional: tag%3 != 1, Retry: tag%3 < 2})
		if st, ok := d.replies[tag]; !ok || st != Unreadable {
			t.Errorf("write %d: %v", tag, d.replies)
		}
	}
	for tag, n := range d.stored {
		if want := map[bool]int{true: 2, false: 1}[tag == 0]; n != want {
			t.Errorf("the value of write %d was written %d times, want %d", tag, n, want)
		}
	}
	if d.fetch != 1 {
		t.Errorf("%d Fetches asked", d.fetch)
	}
	d.left()
	// Later it is looked whether somebody has it.
	d.run(d.now + 3*repairPauseNS)
	d.answer = Done
	d.put(30, 30, Write{Conditional: true})
	if d.replies[30] != OK {
		t.Errorf("%v after the repair", d.replies)
	}
	d.left()
}

// TestAnotherViewJudgesAgain those that wait: it may have another member, or none.
func TestAnotherViewJudgesAgain(t *testing.T) {
	for _, how := range []string{"others", "alone", "gone"} {
		d := newUnjudgedRig(t)
		d.put(1, 1, Write{Conditional: true, Value: make([]byte, 100), Mem: 3})
		role := d.r.role
		role.Epoch++
		want := Status(OK)
		switch how {
		case "others":
			d.whole = true
		case "alone":
			role.Successor, role.ChainTail, role.NumOthers = NoPeer, NoPeer, 0
			want = Unreadable
		default:
			role, want = Role{Epoch: 3, Predecessor: NoPeer, Successor: NoPeer, ChainTail: NoPeer}, WrongView
		}
		d.r.SetRole(role, &d.out)
		if how == "others" { // which acknowledges in the new epoch
			d.turn()
			d.r.Receive(3, &Message{Kind: Ack, Epoch: 3, Seq: 1}, &d.out)
		}
		d.turn()
		if st, ok := d.replies[1]; !ok || st != want {
			t.Errorf("%s: %v, want %d", how, d.replies, want)
		}
		d.left()
	}
}

// TestWhatWaitsIsBoundedByItsLength, of all ranges together.
func TestWhatWaitsIsBoundedByItsLength(t *testing.T) {
	d := newUnjudgedRig(t)
	d.put(1, 1, Write{Conditional: true, Value: make([]byte, maxUnjudgedBytes-10)})
	d.put(2, 2, Write{Conditional: true, Value: make([]byte, 11)})
	d.put(3, 3, Write{Conditional: true, Value: make([]byte, 10)})
	if _, ok := d.replies[1]; ok || d.replies[2] != Unavailable || len(d.replies) != 1 {
		t.Errorf("%v", d.replies)
	}
}

// TestWhatHasWaitedForTooLongGivesItsLengthBack: the others could not wait otherwise, for as long as the process lives.
func TestWhatHasWaitedForTooLongGivesItsLengthBack(t *testing.T) {
	d := newUnjudgedRig(t)
	d.put(1, 1, Write{Conditional: true, Value: make([]byte, 1000)})
	if d.r.tables.unjudgedBytes != 1000 {
		t.Errorf("%d bytes wait", d.r.tables.unjudgedBytes)
	}
	if d.run(2 * unjudgedNS); d.replies[1] != Unavailable {
		t.Errorf("%v", d.replies)
	}
	d.left()
}

// TestALostValueSaysNothingOfAWrite that waits: it is judged again, so many times.
func TestALostValueSaysNothingOfAWrite(t *testing.T) {
	d := newUnjudgedRig(t)
	d.answer, d.value = StoreUnreadable, true
	d.put(1, 1, Write{Conditional: true})
	d.run(unjudgedNS / 2)
	if st, ok := d.replies[1]; !ok || st != Unavailable || d.stored[1] != unjudgedTries+1 {
		t.Errorf("after %d tries: %v", d.stored[1], d.replies)
	}
	d.left()
}

// TestAFailedRepairJudgesNothing: each time the value would be written.
func TestAFailedRepairJudgesNothing(t *testing.T) {
	d := newUnjudgedRig(t)
	d.settle = GivenUp
	d.put(1, 1, Write{Conditional: true})
	if d.run(5 * repairPauseNS); d.stored[1] != 1 || len(d.replies) > 0 {
		t.Errorf("the value was written %d times; %v", d.stored[1], d.replies)
	}
	d.settle, d.answer = Done, Done
	if d.run(8 * repairPauseNS); d.stored[1] != 2 || d.replies[1] != OK {
		t.Errorf("after the repair the value was written %d times; %v", d.stored[1], d.replies)
	}
	d.left()
}

// TestAnotherViewMayHaveWhatNobodyHad: a write waits for a repair again.
func TestAnotherViewMayHaveWhatNobodyHad(t *testing.T) {
	d := newUnjudgedRig(t)
	d.answer = StoreUnreadable
	if d.put(1, 1, Write{Conditional: true}); d.replies[1] != Unreadable {
		t.Fatalf("%v", d.replies)
	}
	role := d.r.role
	role.Epoch++
	d.r.SetRole(role, &d.out)
	d.answer = GivenUp
	if d.put(2, 2, Write{Conditional: true}); len(d.replies) != 1 || d.r.unjudged.N != 1 {
		t.Errorf("%v, %d wait", d.replies, d.r.unjudged.N)
	}
}
