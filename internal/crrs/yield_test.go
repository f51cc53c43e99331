package crrs

import "testing"

// yieldingHead returns the ChainHead of two members, with a write under way.
func yieldingHead(t *testing.T, out *Actions) (r *Replica, w StoreOp) {
	t.Helper()
	r = New(Config{Window: 8, Reads: 4, Bits: 64, Parts: 1})
	r.Advance(1)
	r.Extend(1 << 60)
	r.SetRole(headOfTwo, out)
	r.Write(Write{Op: Put, Key: Key{Len: 1}, Tag: 1}, out)
	return r, out.Stores[0]
}

var (
	headOfTwo = Role{Epoch: 2, Member: true, Since: 1, Predecessor: NoPeer, Successor: 7, ChainTail: 7,
		Others: [MaxOthers]Peer{7}, NumOthers: 1}
	tailOfTwo = Role{Epoch: 3, Member: true, Since: 1, Predecessor: 7, Successor: NoPeer, ChainTail: NoPeer,
		Others: [MaxOthers]Peer{7}, NumOthers: 1}
)

// TestAChainHeadYieldsWhenItsWritesAreCommitted: those that come meanwhile wait, and end with WrongView when another
// member is ChainHead: nothing was done. The replica stays a member.
func TestAChainHeadYieldsWhenItsWritesAreCommitted(t *testing.T) {
	var out Actions
	r, w := yieldingHead(t, &out)
	r.Yield(100)
	r.Write(Write{Op: Put, Key: Key{Len: 2}, Tag: 2, Mem: 5}, &out)
	r.Stored(w.Slot, Done, w.Version, &out)
	if r.Flush(&out); r.Yielded() || len(out.Stores) != 1 {
		t.Fatalf("with a write that is not committed it has yielded: %t; %+v", r.Yielded(), out.Stores)
	}
	r.Receive(7, &Message{Kind: Ack, Epoch: 2, Seq: 1}, &out)
	if r.Flush(&out); !r.Yielded() || len(out.Stores) != 1 || len(out.Replies) != 1 || out.Replies[0].Status != OK {
		t.Fatalf("it has yielded: %t; %+v", r.Yielded(), out)
	}
	out = Actions{}
	r.SetRole(tailOfTwo, &out)
	if len(out.Replies) != 1 || out.Replies[0].Tag != 2 || out.Replies[0].Status != WrongView ||
		len(out.Released) != 1 || r.Lacks(1) || r.Yields() || r.Writes() != 0 || !r.Complete() {
		t.Errorf("%+v, lacks %t", out, r.Lacks(1))
	}
}

// TestAChainHeadThatDoesNotLeadHasNotYielded: without authority it does not know whether it still is the ChainHead.
func TestAChainHeadThatDoesNotLeadHasNotYielded(t *testing.T) {
	var out Actions
	r := New(Config{Window: 8, Reads: 4, Bits: 64, Parts: 1})
	r.SetRole(headOfTwo, &out)
	r.Extend(50)
	r.Advance(1)
	r.Yield(100)
	if !r.Yielded() {
		t.Fatal("it has not yielded, without a write")
	}
	if r.Advance(50); r.Yielded() || !r.Yields() {
		t.Errorf("without authority: yielded %t, yields %t", r.Yielded(), r.Yields())
	}
}

// TestWritesGoOnWhenNoViewComes, at the time that was set, or when the ChainHead stays one in another view.
func TestWritesGoOnWhenNoViewComes(t *testing.T) {
	for name, end := range map[string]func(r *Replica, out *Actions){
		"time": func(r *Replica, out *Actions) {
			if due := r.DueNS(); due != 100 {
				t.Errorf("the next turn is due at %d", due)
			}
			r.Advance(100)
		},
		"end": func(r *Replica, out *Actions) { r.Yield(1) },
		"view": func(r *Replica, out *Actions) {
			next := headOfTwo
			next.Epoch = 3
			r.SetRole(next, out)
		},
	} {
		t.Run(name, func(t *testing.T) {
			var out Actions
			r, _ := yieldingHead(t, &out)
			r.Yield(100)
			r.Write(Write{Op: Put, Key: Key{Len: 2}, Tag: 2}, &out)
			out = Actions{}
			end(r, &out)
			r.Flush(&out)
			if r.Yields() || len(out.Stores) != 1 || out.Stores[0].Tag != 2 {
				t.Errorf("%+v", out.Stores)
			}
		})
	}
}

// TestALateViewLeavesNoWriteBehind: a view with another ChainHead comes when one of its members has a write that the
// new ChainHead does not have. It acts as no member any more as soon as that is known, and can serve alone afterwards.
func TestALateViewLeavesNoWriteBehind(t *testing.T) {
	for _, clock := range []uint64{5, 6} {
		var out Actions
		r := New(Config{Window: 8, Reads: 4, Bits: 64, Parts: 1})
		r.Advance(1)
		r.Extend(1 << 60)
		r.SetRole(tailOfTwo, &out)
		r.Receive(7, &Message{Kind: Forward, Epoch: 3, Seq: 1, Op: Put, Key: Key{Len: 1}, Version: 6}, &out)
		w := out.Stores[0]
		r.Stored(w.Slot, Done, w.Version, &out)
		// Its Predecessor has not stored the write, and another one leads the range from now on.
		next := tailOfTwo
		next.Epoch, next.Predecessor, next.Others = 4, 8, [MaxOthers]Peer{8}
		r.SetRole(next, &out)
		r.Read(Read{Key: Key{Len: 1}, Value: make([]byte, 8), Tag: 3}, &out)
		out = Actions{}
		r.Receive(8, &Message{Kind: Durable, Epoch: 4, Clock: clock}, &out)
		if late := clock == 6; r.Lacks(1) != late || r.Role().Member == late || r.Sufficient() != late {
			t.Fatalf("clock %d: lacks %t, member %t, sufficient %t", clock, r.Lacks(1), r.Role().Member, r.Sufficient())
		} else if !late {
			continue
		}
		next.Epoch = 5
		if r.SetRole(next, &out); !r.Lacks(1) {
			t.Error("it serves beside others")
		}
		alone := Role{Epoch: 6, Member: true, Since: 1, Predecessor: NoPeer, Successor: NoPeer, ChainTail: NoPeer}
		if r.SetRole(alone, &out); r.Lacks(1) || !r.Leads() {
			t.Error("it does not serve alone")
		}
	}
}
