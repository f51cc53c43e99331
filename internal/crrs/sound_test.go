package crrs

import (
	"math"
	"testing"
)

// TestWhatWasStoredSinceALossIsRead when no other member can read the key: the store is asked once more. While it may
// still be given writes of an earlier epoch, the client is to try again.
func TestWhatWasStoredSinceALossIsRead(t *testing.T) {
	for _, c := range []struct {
		orderly, dirty bool
		st             StoreStatus
		want           Status
	}{
		{false, false, Done, Unavailable},
		{true, false, Done, OK},
		{true, false, Absent, NotFound},
		{true, false, StoreUnreadable, Unreadable},
		{true, false, StoreFailing, Failing},
		{true, true, Done, Unavailable},
	} {
		var out Actions
		r := newMiddle(&out)
		if c.orderly {
			r.Receive(1, &Message{Kind: Durable, Epoch: 2, Clock: 7}, &out)
		}
		r.Read(Read{Key: Key{Len: 1}, Tag: 9}, &out)
		if op := out.Stores[0]; op.Last {
			t.Errorf("%+v: the store is asked first for what counts at last", c)
		}
		r.Fetched(out.Stores[0].Slot, StoreUnreadable, 0, 0, 0, &out)
		for i := range 2 {
			r.Receive(middle.Others[i], &Message{Kind: Answer, Epoch: 2, Tag: out.Sends[i].Tag, Status: Unreadable},
				&out)
		}
		if c.orderly {
			if len(out.Stores) != 2 || !out.Stores[1].Last {
				t.Fatalf("%+v: %+v", c, out)
			}
			if c.dirty {
				r.Receive(1, &Message{Kind: Forward, Epoch: 2, Seq: 1, Op: Put, Version: 9, Key: Key{Len: 1}}, &out)
			}
			r.Fetched(out.Stores[1].Slot, c.st, 8, 0, 0, &out)
		}
		if len(out.Replies) != 1 || out.Replies[0].Status != c.want || r.reads.N() != 0 {
			t.Errorf("%+v: %+v", c, out.Replies)
		}
	}
}

// TestNothingIsSoundForAReadBeforeTheEpochIsOrderly: the store may have older writes for a while than were read. A
// write of which the store decides has waited for those of its key.
func TestNothingIsSoundForAReadBeforeTheEpochIsOrderly(t *testing.T) {
	var out Actions
	r := newMiddle(&out)
	sound := func(op Op) uint64 { return r.Sound(&StoreOp{Op: op, Last: true}, 1<<40) }
	if get, put := sound(Get), sound(Put); get != math.MaxUint64 || put == math.MaxUint64 {
		t.Errorf("before: what is above %d counts for a Get, %d for a Put", get, put)
	}
	r.Receive(1, &Message{Kind: Durable, Epoch: 2, Clock: 7}, &out)
	if get, put := sound(Get), sound(Put); get != put || get == math.MaxUint64 {
		t.Errorf("then: what is above %d counts for a Get, %d for a Put", get, put)
	}
}

// TestWhatWasStoredSinceALossIsToldToOthers, which may have lost it again.
func TestWhatWasStoredSinceALossIsToldToOthers(t *testing.T) {
	for _, c := range []struct {
		orderly, dirty bool
		st             StoreStatus
		want           Status
	}{
		{false, false, Done, Unavailable},
		{true, false, Done, OK},
		{true, false, Absent, NotFound},
		{true, false, StoreUnreadable, Unreadable},
		{true, false, StoreFailing, Unavailable},
		{true, true, Done, Unavailable},
	} {
		var out Actions
		r := newMiddle(&out)
		if c.orderly {
			r.Receive(1, &Message{Kind: Durable, Epoch: 2, Clock: 7}, &out)
		}
		r.Receive(3, &Message{Kind: Ship, Epoch: 2, Tag: 5, Key: Key{Len: 1}}, &out)
		r.Fetched(out.Stores[0].Slot, StoreUnreadable, 0, 0, 0, &out)
		if c.orderly {
			if len(out.Stores) != 2 || out.Stores[0].Last || !out.Stores[1].Last || len(out.Sends) > 0 {
				t.Fatalf("%+v: %+v", c, out)
			}
			if c.dirty {
				r.Receive(1, &Message{Kind: Forward, Epoch: 2, Seq: 1, Op: Put, Version: 9, Key: Key{Len: 1}}, &out)
				out.Sends = nil
			}
			r.Fetched(out.Stores[1].Slot, c.st, 8, 0, 0, &out)
		}
		if len(out.Sends) != 1 || out.Sends[0].Kind != Answer || out.Sends[0].Status != c.want || r.reads.N() != 0 {
			t.Errorf("%+v: %+v", c, out.Sends)
		}
	}
}

// TestAConditionIsJudgedByWhatWasStoredSinceALoss when nobody has what was lost, also while that is known.
func TestAConditionIsJudgedByWhatWasStoredSinceALoss(t *testing.T) {
	for _, w := range []Write{{Conditional: true}, {Retry: true}, {Conditional: true, Retry: true}} {
		d := newUnjudgedRig(t)
		d.answer, d.known = StoreUnreadable, true
		for tag := range uint64(3) {
			d.put(tag, tag, w)
		}
		d.run(d.now + 5*repairPauseNS)
		for tag := range uint64(3) {
			if st, ok := d.replies[tag]; !ok || st != OK {
				t.Errorf("%+v: %v", w, d.replies)
			}
		}
		d.left()
	}
}

// TestCopiesMayBeOlderThanWhatWasLost: what a member was given before it served, or others beside it, and in the
// parts of the range into which a repair copies. A member that is left alone keeps what it knows of that.
func TestCopiesMayBeOlderThanWhatWasLost(t *testing.T) {
	const far = uint64(15) << 60
	var out Actions
	r := New(Config{Window: 8, Reads: 4, Parts: 1, Bits: 64})
	role := middle
	want := func(when string, at, elsewhere uint64) {
		t.Helper()
		op := &StoreOp{Op: Put, Last: true}
		a, b := r.Sound(op, 1<<40), r.Sound(op, far)
		if a != at || b != elsewhere || r.RepairsHaveCopied() != (a != b) {
			t.Errorf("%s: sound above %d, and above %d elsewhere; want %d and %d", when, a, b, at, elsewhere)
		}
	}
	hear := func(version uint64) {
		r.Receive(1, &Message{Kind: Durable, Epoch: role.Epoch, Clock: version}, &out)
	}
	role.Filling, role.Successor = true, NoPeer
	r.SetRole(role, &out)
	r.Advance(1)
	hear(10)
	r.pass.clock, r.pass.complete = 10, true
	role.Epoch, role.Filling, role.Successor = 3, false, 3
	r.SetRole(role, &out)
	want("when it begins to serve", 10, 10)
	hear(20)
	want("while it serves", 10, 10)
	role.Epoch = 4
	r.SetRole(role, &out)
	want("in another view", 10, 10)

	d := &repairRig{t: t, r: r}
	r.Repair(1<<40, &d.out)
	d.look()
	r.Flush(&d.out)
	for _, m := range d.out.Sends {
		if m.Kind == Fetch {
			p := *m.Part
			p.Last = true
			r.Receive(m.To, &Message{Kind: Batch, Epoch: 4, Tag: m.Tag, Part: &p}, &d.out)
		}
	}
	want("when a repair has copied", 20, 10)
	hear(30)
	want("and later", 20, 10)
	role = Role{Epoch: 5, Since: role.Since, Member: true, Predecessor: NoPeer, Successor: NoPeer, ChainTail: NoPeer}
	r.SetRole(role, &d.out)
	want("alone", 20, 10)
	role.Epoch, role.NumOthers, role.Successor, role.ChainTail = 6, 1, 3, 3
	r.SetRole(role, &d.out)
	if at := r.Sound(&StoreOp{Op: Put, Last: true}, far); at != r.base || at < 30 {
		t.Errorf("with another one: sound above %d", at)
	}
	role.Epoch, role.Since = 7, 7
	role.NumOthers, role.Successor, role.ChainTail = 0, NoPeer, NoPeer
	r.SetRole(role, &d.out)
	want("alone from the beginning", 0, 0)
}

// TestAnotherViewMayHaveWhatAWriteDependsOn that was to be judged by what the store here knows: it waits again.
func TestAnotherViewMayHaveWhatAWriteDependsOn(t *testing.T) {
	d := newUnjudgedRig(t)
	d.answer = StoreUnreadable
	d.put(1, 1, Write{Conditional: true})
	d.r.Write(Write{Op: Put, Key: Key{Len: 1}, Position: 2, Conditional: true, Tag: 2}, &d.out)
	op := d.out.Stores[0]
	if !op.Last {
		t.Fatalf("%+v: it is known that nobody has it", op)
	}
	role := d.r.role
	role.Epoch++
	d.out = Actions{}
	d.r.SetRole(role, &d.out)
	d.r.Stored(op.Slot, Unjudged, 0, &d.out)
	if len(d.out.Replies) > 0 || d.r.unjudged.N != 1 {
		t.Errorf("%+v, %d wait", d.out.Replies, d.r.unjudged.N)
	}
}

// TestPartsOfSmallRangesAreNoted, and a list, which has no position, has some version, too.
func TestPartsOfSmallRangesAreNoted(t *testing.T) {
	for _, width := range []uint8{0, 1, 4, 5, 48, 64} {
		var out Actions
		first := uint64(3) << min(width, 62)
		if width == 64 {
			first = 0
		}
		r := New(Config{Window: 8, Reads: 4, Parts: 1, First: first, Bits: width, Version: 9})
		r.noteCopy(&Part{First: first, Bits: width})
		for _, at := range []uint64{first, first + 1<<width/2, first + (1<<width - 1)} {
			if v := r.Sound(&StoreOp{Op: Put}, at); v != 9 {
				t.Errorf("%d bits, position %x: %d", width, at-first, v)
			}
		}
		for _, at := range []uint64{0, 1 << 63, 1<<64 - 1} {
			r.Sound(&StoreOp{}, at)
		}
		r.SetRole(middle, &out)
		r.noteCopy(&Part{First: first})
	}
}
