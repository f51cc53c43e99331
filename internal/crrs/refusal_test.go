package crrs

import "testing"

// TestARefusalShowsNothingThatIsNotCommitted: a condition that was judged by a write tells its client of that write.
// Like a read, it must wait until the write is committed: otherwise the client sees a key that a failover takes back.
func TestARefusalShowsNothingThatIsNotCommitted(t *testing.T) {
	r := chain(t, 2, nil)
	head, tail := r.nodes[0], r.nodes[1]
	tail.deaf = true // the connection to it is broken, and the manager hears both
	key := Key{Bytes: [16]byte{1}, Len: 1}
	head.p.r.Write(Write{Op: Put, Key: key, Tag: 1}, &head.out)
	r.settle() // durable at the ChainHead, not at the ChainTail
	if len(r.replies) != 0 || head.p.r.Committed() != 0 {
		t.Fatalf("replies %+v, committed %d", r.replies, head.p.r.Committed())
	}
	for tag, w := range []Write{2: {Conditional: true}, 3: {Retry: true}} {
		if tag < 2 {
			continue
		}
		w.Op, w.Key, w.Tag = Put, key, uint64(tag)
		head.p.r.Write(w, &head.out)
		for _, op := range head.out.Stores {
			head.p.r.Stored(op.Slot, Declined, 0, &head.out)
		}
		head.out.Stores = nil
		r.settle()
	}
	if len(r.replies) != 0 {
		t.Errorf("clients are told %+v of a write that is not committed", r.replies)
	}
}

// TestARefusalNeedsAuthority: a ChainHead that was paused while the store judged a condition may have been replaced,
// and its client may have heard of what others have written since.
func TestARefusalNeedsAuthority(t *testing.T) {
	var out Actions
	r := New(Config{Window: 4, Reads: 1, Parts: 1, Bits: 64})
	r.SetRole(Role{Epoch: 1, Member: true, Since: 1, Predecessor: NoPeer, Successor: 7, ChainTail: 7}, &out)
	refuse := func(until, judged int64, want Status) {
		t.Helper()
		r.Extend(until)
		r.Write(Write{Op: Put, Conditional: true}, &out)
		r.Advance(judged)
		if len(out.Stores) != 1 {
			t.Fatalf("asked of the store: %+v", out.Stores)
		}
		r.Stored(out.Stores[0].Slot, Declined, 0, &out)
		if len(out.Replies) != 1 || out.Replies[0].Status != want {
			t.Errorf("judged at %d, with authority until %d: %+v, want %v", judged, until, out.Replies, want)
		}
		out = Actions{}
	}
	refuse(100, 99, Refused)
	refuse(200, 200, Unavailable)
}

// TestALoneChainHeadAcknowledgesWithAuthority: one that was paused may have been given up, and an operator may have
// accepted the loss of what it alone has. One that others have acknowledged a write to needs none.
func TestALoneChainHeadAcknowledgesWithAuthority(t *testing.T) {
	alone := Role{Epoch: 1, Member: true, Since: 1, Predecessor: NoPeer, Successor: NoPeer, ChainTail: NoPeer}
	beside := alone
	beside.Successor, beside.ChainTail, beside.NumOthers, beside.Others[0] = 7, 7, 1, 7
	fills := alone
	fills.Successor = 7
	for _, c := range []struct {
		role    Role
		durable int64
		want    Status
	}{{alone, 99, OK}, {alone, 100, Unknown}, {beside, 100, OK}, {fills, 99, OK}, {fills, 100, Unknown}} {
		var out Actions
		r := New(Config{Window: 4, Reads: 1, Parts: 1, Bits: 64})
		r.SetRole(c.role, &out)
		r.Extend(100)
		r.Write(Write{Op: Put}, &out)
		r.Advance(c.durable)
		r.Stored(out.Stores[0].Slot, Done, out.Stores[0].Version, &out)
		r.Receive(7, &Message{Kind: Ack, Epoch: 1, Seq: 1}, &out)
		if len(out.Replies) != 1 || out.Replies[0].Status != c.want {
			t.Errorf("%+v, durable at %d: %+v, want %v", c.role, c.durable, out.Replies, c.want)
		}
		if r.Writes() != 0 || r.Committed() != 1 {
			t.Errorf("%+v: %d writes are under way, %d is committed", c.role, r.Writes(), r.Committed())
		}
	}
}
