package crrs

import (
	"slices"
	"testing"
)

// TestAuthorityIsLookedAtBehindTheFetch lets the authority of a replica end while its store fetches a value.
func TestAuthorityIsLookedAtBehindTheFetch(t *testing.T) {
	for _, c := range []struct {
		fetched int64
		want    Status
	}{{99, OK}, {100, Unavailable}} {
		var out Actions
		r := New(Config{Window: 8, Reads: 1, Parts: 1})
		r.SetRole(Role{Epoch: 1, Member: true, Predecessor: NoPeer, Successor: NoPeer, ChainTail: NoPeer}, &out)
		r.Extend(100)
		r.Advance(50)
		r.Read(Read{}, &out)
		r.Advance(c.fetched)
		r.Fetched(out.Stores[0].Slot, Done, 1, 0, 0, &out)
		if len(out.Replies) != 1 || out.Replies[0].Status != c.want {
			t.Errorf("fetched at %d: %+v, want status %d", c.fetched, out.Replies, c.want)
		}
	}
}

// TestAMemberThatHasMissedViewsHasAnExit: it sees itself in a place that it has not come to, and that no rule leads to
// from the last one that it knows of. Nothing that may be old is served then, and it needs no restart: it is out, says
// that it lacks data, and is filled again. Only a replica that has the range alone in another membership serves what it
// has: a loss was accepted.
func TestAMemberThatHasMissedViewsHasAnExit(t *testing.T) {
	head := Role{Epoch: 2, Member: true, Since: 4, Predecessor: NoPeer, Successor: 7, ChainTail: 7}
	alone := Role{Epoch: 5, Member: true, Since: 4, Predecessor: NoPeer, Successor: NoPeer, ChainTail: NoPeer}
	member := Role{Epoch: 5, Member: true, Since: 4, Predecessor: 8, Successor: NoPeer, ChainTail: NoPeer}
	filled := Role{Epoch: 2, Member: true, Filling: true, Since: 4, Predecessor: 8, Successor: NoPeer,
		ChainTail: NoPeer}
	since := func(r Role, since uint64) Role {
		r.Since = since
		return r
	}
	for _, c := range []struct {
		name         string
		was, next    Role
		lacks, keeps bool // keeps: the write that is under way goes on
	}{
		{"serves after a halt that it has not seen", head, alone, false, true},
		{"serves alone, as a loss was accepted, and was filled before that", filled, since(alone, 9), false, false},
		{"the same, and served", head, since(alone, 9), false, false},
		{"the same, and another one is filled already", head, Role{Epoch: 5, Member: true, Since: 9,
			Predecessor: NoPeer, Successor: 3, ChainTail: NoPeer}, false, false},
		{"serves beside others, and was filled", filled, since(member, 9), true, false},
		{"serves, and was filled, and has not reported that it is complete", filled, member, true, false},
		{"serves beside others in a membership that it has not seen", head, since(member, 9), true, false},
		{"is ChainHead in such a membership, before others", head, Role{Epoch: 5, Member: true, Since: 9,
			Predecessor: NoPeer, Successor: 3, ChainTail: 3}, true, false},
		{"is no ChainHead any more, with a write under way", head, member, true, false},
	} {
		var out Actions
		r := New(Config{Window: 8, Reads: 8, Parts: 1, Bits: 64})
		r.SetRole(c.was, &out)
		r.Extend(1 << 60)
		r.Advance(1)
		writes := c.was.head()
		if writes {
			r.Write(Write{Op: Put, Tag: 1}, &out)
			r.Stored(out.Stores[0].Slot, Done, out.Stores[0].Version, &out)
		}
		out = Actions{}
		r.SetRole(c.next, &out)
		if r.Lacks(c.next.Since) != c.lacks || r.Complete() == c.lacks || out.Damaged {
			t.Errorf("%s: lacks data %v, complete %v, damaged %v", c.name, r.Lacks(c.next.Since), r.Complete(),
				out.Damaged)
		}
		if writes && !c.keeps && (len(out.Replies) != 1 || out.Replies[0].Tag != 1 ||
			out.Replies[0].Status != Unknown) {
			t.Errorf("%s: the write ends with %+v", c.name, out.Replies)
		}
		next := c.next
		for range 2 { // also when the chain changes once more
			out = Actions{}
			r.Read(Read{Tag: 2}, &out)
			refused := len(out.Replies) == 1 && out.Replies[0].Status == WrongView
			if refused != c.lacks || !refused && len(out.Stores) != 1 {
				t.Errorf("%s: a read: %+v", c.name, out)
			}
			next.Epoch++
			r.SetRole(next, &out)
		}
		if !c.lacks {
			continue
		}
		if r.Writes() != 0 {
			t.Errorf("%s: %d writes are left", c.name, r.Writes())
		}
		again := since(filled, 20)
		again.Epoch = next.Epoch + 1
		r.SetRole(again, &out)
		if r.Lacks(20) || r.Complete() || !r.Role().Filling {
			t.Errorf("%s: it is filled again: %+v", c.name, r.Role())
		}
	}
}

// TestTheClockWaitsForAWriteThatIsGone: the ChainHead has lost its membership while its store had a write. When it has
// the range again, who is filled must get what the store does with that write.
func TestTheClockWaitsForAWriteThatIsGone(t *testing.T) {
	var out Actions
	alone := Role{Epoch: 1, Member: true, Since: 1, Predecessor: NoPeer, Successor: NoPeer, ChainTail: NoPeer}
	r := New(Config{Window: 8, Reads: 1, Parts: 1, Bits: 64})
	r.SetRole(alone, &out)
	r.Extend(1 << 60)
	r.Advance(1)
	r.Write(Write{Op: Put, Tag: 1}, &out)
	slot := out.Stores[0].Slot
	if r.Gone(slot) {
		t.Error("a write that is under way is gone")
	}
	r.SetRole(Role{Epoch: 2, Predecessor: NoPeer, Successor: NoPeer, ChainTail: NoPeer}, &out)
	alone.Epoch = 3
	r.SetRole(alone, &out)
	r.Flush(&out)
	if !r.Gone(slot) || r.clock != 0 {
		t.Errorf("gone %v, the clock is %d while the store has the write", r.Gone(slot), r.clock)
	}
	r.Stored(slot, Superseded, 0, &out)
	if r.Flush(&out); r.clock == 0 || r.clock != r.base {
		t.Errorf("the clock is %d, want %d", r.clock, r.base)
	}
}

// TestALateAnswerIsForNobody: a read that was shipped has ended, and its place is another one's.
func TestALateAnswerIsForNobody(t *testing.T) {
	var out Actions
	r := New(Config{Window: 8, Reads: 1, Parts: 1})
	r.SetRole(Role{Epoch: 1, Member: true, Predecessor: 5, Successor: 7, ChainTail: 7}, &out)
	r.Extend(100)
	r.Receive(5, &Message{Kind: Forward, Epoch: 1, Seq: 1, Op: Put, Version: 1}, &out) // the key is dirty
	ship := func(tag uint64) uint64 {
		out = Actions{}
		if r.Read(Read{Tag: tag}, &out); len(out.Sends) != 1 || out.Sends[0].Kind != Ship {
			t.Fatalf("%+v", out)
		}
		return out.Sends[0].Tag
	}
	first := ship(1)
	r.Reconnected(7, &out)
	second := ship(2)
	out = Actions{}
	if r.Receive(7, &Message{Kind: Answer, Epoch: 1, Tag: first}, &out); len(out.Replies) > 0 {
		t.Errorf("the answer to another read: %+v", out.Replies)
	}
	r.Receive(7, &Message{Kind: Answer, Epoch: 1, Tag: second}, &out)
	if len(out.Replies) != 1 || out.Replies[0].Tag != 2 {
		t.Errorf("%+v", out.Replies)
	}
}

// TestQueuedWritesOfAKeyKeepTheirOrder while the window is full and another key's write begins before them: a retry
// must not come before the first try, which would be done once more behind it.
func TestQueuedWritesOfAKeyKeepTheirOrder(t *testing.T) {
	var out Actions
	r := New(Config{Window: 4, Reads: 1, Parts: 1, Bits: 64})
	r.SetRole(Role{Epoch: 1, Member: true, Since: 1, Predecessor: NoPeer, Successor: 7, ChainTail: 7}, &out)
	r.Extend(1 << 60)
	r.Advance(1)
	write := func(key byte, w Write) {
		w.Op, w.Key = Put, Key{Bytes: [16]byte{key}, Len: 1}
		r.Write(w, &out)
	}
	write('a', Write{Tag: 1, Conditional: true})
	for tag, key := range []byte{2: 'b', 'b', 'b', 'a', 'c', 'a'} {
		if tag >= 2 {
			write(key, Write{Tag: uint64(tag)})
		}
	}
	versions := map[uint64]uint64{}
	for len(versions) < 7 && len(out.Stores) > 0 {
		n := min(1, len(out.Stores)-1) // the conditional one is last
		s := out.Stores[n]
		versions[s.Tag] = s.Version
		out.Stores = slices.Delete(out.Stores, n, n+1)
		r.Stored(s.Slot, Done, s.Version, &out)
		r.Receive(7, &Message{Kind: Ack, Epoch: 1, Seq: r.applied}, &out)
	}
	if v := versions; len(v) != 7 || v[6] > v[5] || v[5] > v[7] {
		t.Errorf("writes get the versions %v", versions)
	}
}

// TestALockedKeyHasOneWriteInItsChain at a time, and others have theirs meanwhile.
func TestALockedKeyHasOneWriteInItsChain(t *testing.T) {
	for _, locked := range []bool{false, true} {
		var out Actions
		r := New(Config{Window: 8, Reads: 1, Parts: 1, Bits: 64, LockKeys: locked})
		r.SetRole(Role{Epoch: 1, Member: true, Since: 1, Predecessor: NoPeer, Successor: 7, ChainTail: 7}, &out)
		r.Extend(1 << 60)
		r.Advance(1)
		forwards := func() (tags []byte) {
			for i := range out.Sends {
				if m := &out.Sends[i].Message; m.Kind == Forward {
					tags = append(tags, m.Value...)
				}
			}
			return tags
		}
		for i, key := range "aaba" {
			r.Write(Write{Op: Put, Tag: uint64(i), Key: Key{Bytes: [16]byte{byte(key)}, Len: 1},
				Value: []byte{byte('0' + i)}}, &out)
		}
		if got, want := string(forwards()), map[bool]string{false: "0123", true: "02"}[locked]; got != want {
			t.Errorf("locked %v: forwarded at once: %s, want %s", locked, got, want)
		}
		for seq := uint64(1); len(out.Stores) > 0; seq++ { // one after the other is stored, and committed
			s := out.Stores[0]
			out.Stores = out.Stores[1:]
			r.Stored(s.Slot, Done, s.Version, &out)
			r.Receive(7, &Message{Kind: Ack, Epoch: 1, Seq: seq}, &out)
			if n := len(forwards()); locked && n != []int{3, 3, 4, 4}[seq-1] {
				t.Errorf("%d writes were forwarded when %d are committed", n, seq)
			}
		}
		if got := string(forwards()); len(out.Replies) != 4 || len(got) != 4 || locked && got != "0213" {
			t.Errorf("locked %v: %d answers, forwarded in the order %s", locked, len(out.Replies), got)
		}
	}
}
