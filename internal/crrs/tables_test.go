package crrs

import "testing"

// TestOneRangeCannotStarveAnother: of what clients may have of all ranges together, busy ones leave as much as each of
// them has, and each range may always have a few.
func TestOneRangeCannotStarveAnother(t *testing.T) {
	const writes, reads = 60, 90
	tables := NewTables(writes, reads)
	var all []*Replica
	add := func() *Replica {
		var out Actions
		r := New(Config{Window: 32, Reads: 64, Parts: 1, Bits: 64, Tables: tables})
		r.SetRole(Role{Epoch: 1, Member: true, Predecessor: NoPeer, Successor: NoPeer, ChainTail: NoPeer}, &out)
		r.Extend(1 << 60)
		r.Advance(1)
		all = append(all, r)
		return r
	}
	// ask gives it as much as it takes, and returns how much that is. Nothing ends.
	ask := func(r *Replica) (wrote, read int) {
		for i := 0; ; i++ {
			var out Actions
			if r.Write(Write{Op: Put, Key: Key{Bytes: [16]byte{byte(i)}, Len: 1}}, &out); len(out.Replies) > 0 {
				wrote = i
				break
			}
		}
		for i := 0; ; i++ {
			var out Actions
			if r.Read(Read{}, &out); len(out.Replies) > 0 {
				return wrote, i
			}
		}
	}
	for i, want := range [][2]int{{30, 45}, {15, 23}, {8, 11}, {4, 6}, {4, 4}, {4, 4}} {
		if w, r := ask(add()); w != want[0] || r != want[1] {
			t.Errorf("range %d may have %d writes and %d reads, want %v", i, w, r, want)
		}
	}
	// All of it comes back: also of a range that is damaged, and of one that is not served any more.
	for i, r := range all {
		var out Actions
		switch i {
		case 0:
			r.Stored(0, Failed, 0, &out)
		case 1:
			r.SetRole(Role{Epoch: 2, Predecessor: NoPeer, Successor: NoPeer, ChainTail: NoPeer}, &out)
		}
		for slot := range r.writes.End() {
			if r.writes.Has(slot) && r.writes.At(slot).storing {
				r.Stored(slot, Done, r.writes.At(slot).version, &out)
			}
		}
		for slot := range r.reads.End() {
			if r.reads.Has(slot) {
				r.Fetched(slot, Absent, 0, 0, 0, &out)
			}
		}
		if r.Writes() > 0 || r.reads.N() > 0 {
			t.Errorf("range %d still has %d writes and %d reads", i, r.Writes(), r.reads.N())
		}
	}
	if tables.led.used != 0 || tables.asked.used != 0 {
		t.Errorf("%d writes and %d reads are counted when all have ended", tables.led.used, tables.asked.used)
	}
	if w, r := ask(add()); w != 30 || r != 45 {
		t.Errorf("a range may have %d writes and %d reads then", w, r)
	}
}

// TestForwardsAreNotCounted among the writes of clients: they cannot be refused.
func TestForwardsAreNotCounted(t *testing.T) {
	tables := NewTables(0, 0)
	r := New(Config{Window: 16, Reads: 1, Parts: 1, Bits: 64, Tables: tables})
	var out Actions
	r.SetRole(Role{Epoch: 1, Member: true, Predecessor: 1, Successor: NoPeer, ChainTail: NoPeer}, &out)
	for seq := range uint64(16) {
		r.Receive(1, &Message{Kind: Forward, Epoch: 1, Seq: seq + 1, Op: Put, Version: seq + 1}, &out)
	}
	if r.Writes() != 16 || len(out.Stores) != 16 || tables.led.used != 0 {
		t.Errorf("%d writes are taken, %d stored, %d counted", r.Writes(), len(out.Stores), tables.led.used)
	}
}

// marked counts the writes that have marked their key.
func (r *Replica) marked() (n int) {
	for _, i := range r.dirty {
		for ; i != none; i = r.writes.At(i).next {
			n++
		}
	}
	return n
}
