package crrs

import "testing"

// filled returns a member that is filled and has asked for a batch, and the Fetch.
func filled(t *testing.T, out *Actions) (*Replica, *Message) {
	t.Helper()
	r := New(Config{Window: 8, Reads: 4, Bits: 64, Parts: 1, Leaf: 1})
	r.Advance(1)
	r.SetRole(Role{Epoch: 1, Member: true, Filling: true, Since: 1, Predecessor: 0, Successor: NoPeer,
		ChainTail: NoPeer}, out)
	r.Receive(0, &Message{Kind: Durable, Epoch: 1, Clock: 100}, out)
	r.Flush(out)
	compare := out.Sends[len(out.Sends)-1].Message
	r.Receive(0, &Message{Kind: Sums, Epoch: 1, Tag: compare.Tag, Part: &Part{}}, out) // it copies without digests
	r.Flush(out)
	m := out.Sends[len(out.Sends)-1].Message
	if m.Kind != Fetch {
		t.Fatalf("%+v", m)
	}
	return r, &m
}

// TestABatchIsStoredInTimeOrCountsForNothing: the tombstone of what was deleted since it was asked for may be over.
func TestABatchIsStoredInTimeOrCountsForNothing(t *testing.T) {
	for name, c := range map[string]struct {
		comes, ends              int64
		wanted, damaged, refused bool
	}{
		"in time":              {comes: 1e9, ends: 2e9, wanted: true},
		"long in the store":    {comes: 1e9, ends: LateNS - 2e9, wanted: false},
		"too long":             {comes: 1e9, ends: LateNS + 2e9, wanted: false, damaged: true},
		"on its way for long":  {comes: BatchNS + 1e9, refused: true},
		"on its way for hours": {comes: 10000e9, refused: true},
	} {
		t.Run(name, func(t *testing.T) {
			var out Actions
			r, m := filled(t, &out)
			out = Actions{}
			r.Advance(c.comes)
			r.Receive(0, &Message{Kind: Batch, Epoch: 1, Tag: m.Tag, Part: &Part{Last: true}, Value: []byte{1}, Mem: 7},
				&out)
			if c.refused {
				r.Flush(&out)
				if len(out.Ranges) > 0 || len(out.Released) != 1 || len(out.Sends) != 1 || out.Sends[0].Kind != Fetch {
					t.Errorf("%+v", out)
				}
				return
			}
			op := out.Ranges[0]
			r.Advance(c.ends)
			if r.Wants(&op) != c.wanted {
				t.Errorf("the batch is wanted: %t", !c.wanted)
			}
			out = Actions{}
			r.Ranged(&op, Done, &out)
			r.Flush(&out)
			if out.Damaged != c.damaged || r.Complete() == c.damaged {
				t.Errorf("damaged %t, complete %t", out.Damaged, r.Complete())
			}
		})
	}
}

// TestAWriteThatComesLateDoesNotUndoADelete: the store has held a Put for want of room. The Delete behind it was done
// meanwhile, and its tombstone is over: the Put is not superseded. The Delete is not acknowledged yet.
func TestAWriteThatComesLateDoesNotUndoADelete(t *testing.T) {
	var out Actions
	r := New(Config{Window: 8, Reads: 4, Bits: 64, Parts: 1, Leaf: 1})
	r.Advance(1)
	r.SetRole(Role{Epoch: 1, Member: true, Since: 1, Predecessor: 0, Successor: NoPeer, ChainTail: NoPeer,
		NumOthers: 1}, &out)
	key, other := Key{Bytes: [16]byte{1}, Len: 1}, Key{Bytes: [16]byte{2}, Len: 1}
	for i, m := range []Message{{Op: Put, Key: key}, {Op: Delete, Key: key}, {Op: Delete, Key: other}} {
		m.Kind, m.Epoch, m.Seq, m.Version, m.Mark = Forward, 1, uint64(i+1), uint64(i+101), 3
		r.Receive(0, &m, &out)
	}
	stores := out.Stores
	out = Actions{}
	r.Stored(stores[1].Slot, Done, 102, &out)
	r.Stored(stores[2].Slot, Done, 103, &out)
	r.Stored(stores[0].Slot, Done, 101, &out)
	if len(out.Stores) != 1 || out.Stores[0].Op != Delete || out.Stores[0].Key != key || out.Stores[0].Version != 102 {
		t.Fatalf("%+v", out.Stores)
	}
	if r.Committed() != 1 {
		t.Errorf("%d writes are committed, and the Delete is not done", r.Committed())
	}
	r.Stored(out.Stores[0].Slot, Done, 102, &out)
	if r.Committed() != 3 {
		t.Errorf("%d writes are committed", r.Committed())
	}
}
