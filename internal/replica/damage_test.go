package replica

import (
	"testing"

	"jbofd/internal/crrs"
	"jbofd/internal/kvstore"
)

// damage lets the store of a replica fail a write, one of which it still has, until the replica is damaged. It returns
// the time, and the request that the store has.
func damage(t *testing.T, r *Replica, role crrs.Role, now int64) (int64, kvstore.Request) {
	t.Helper()
	out := Actions{}
	r.SetTime(now, testWall)
	r.Extend(1 << 62)
	r.Adopt(role, 0)
	r.Turn(&out)
	out = Actions{}
	for _, key := range []string{"a", "b"} {
		r.Write(&Write{Op: kvstore.Put, Key: testKey(key), Value: []byte("value"), Tag: 1})
	}
	r.Turn(&out)
	if len(out.Requests) != 2 {
		t.Fatalf("%+v", out)
	}
	stays, fails := out.Requests[0], out.Requests[1]
	for !r.Damaged() {
		r.Stored(&kvstore.Reply{Tag: fails.Tag, Status: kvstore.DeviceError})
		out = Actions{}
		if r.Turn(&out); !r.Damaged() {
			now = out.WakeNS
			r.SetTime(now, testWall)
			r.Turn(&out)
		}
		if now > 1e15 {
			t.Fatal("the replica is not damaged")
		}
	}
	return now, stays
}

// TestADamagedReplicaRevives when no view has it as a member, its store has nothing of it and does a write again, and
// the outcome of all that has failed is known. When it fails again soon, that takes longer.
func TestADamagedReplicaRevives(t *testing.T) {
	r, now, epoch := alone(t, headRole), int64(1), headRole.Epoch
	pause := int64(reviveNS)
	for range 9 {
		role := headRole
		epoch++
		role.Epoch, role.Since = epoch, epoch
		damaged, stays := damage(t, r, role, now)
		now = damaged
		var out Actions
		// next returns the next request of the replica, and when it comes, if there is one within an hour.
		next := func() (q kvstore.Request, ok bool) {
			for end := now + 3600e9; now < end; {
				out = Actions{}
				r.SetTime(now, testWall)
				if r.Turn(&out); len(out.Requests) > 0 {
					return out.Requests[0], true
				}
				if out.WakeNS == 0 {
					return q, false
				}
				now = max(now+1, out.WakeNS)
			}
			return q, false
		}
		if q, ok := next(); ok {
			t.Fatalf("a member asks its store for %+v", q)
		}
		epoch++
		role.Epoch = epoch // the view has not seen the damage
		r.Adopt(role, 0)
		if q, ok := next(); ok {
			t.Fatalf("a member asks its store for %+v", q)
		}
		epoch++
		r.Adopt(crrs.Role{Epoch: epoch, Predecessor: crrs.NoPeer, Successor: crrs.NoPeer, ChainTail: crrs.NoPeer}, 0)
		if q, ok := next(); ok {
			t.Fatalf("the store has something of the replica, and is asked for %+v", q)
		}
		r.Stored(&kvstore.Reply{Tag: stays.Tag, Status: kvstore.OK, Version: stays.Given})
		answer := func(op kvstore.Op, st kvstore.Status) {
			t.Helper()
			q, ok := next()
			if !ok || q.Op != op || !r.Damaged() ||
				op == kvstore.Delete && (q.Expires != 1 || !q.Tombstone || q.Given != 1) {
				t.Fatalf("%+v, want %v; damaged %t", q, op, r.Damaged())
			}
			r.Stored(&kvstore.Reply{Tag: q.Tag, Status: st, Version: q.Given})
		}
		answer(kvstore.Delete, kvstore.DeviceError)
		if now < damaged+pause || now > damaged+pause+1e9 {
			t.Errorf("the first write is tried after %d s, want %d", (now-damaged)/1e9, pause/1e9)
		}
		failed := now
		answer(kvstore.Delete, kvstore.Superseded)
		if now < failed+pause {
			t.Errorf("the second write is tried after %d ns", now-failed)
		}
		answer(kvstore.Delete, kvstore.OK)
		answer(kvstore.Certain, kvstore.DeviceError)
		answer(kvstore.Certain, kvstore.NoMemory)
		answer(kvstore.Certain, kvstore.OK)
		if r.Damaged() {
			t.Fatal("the store works, and the replica is damaged")
		}
		if _, ok := next(); ok || r.Left() != "" || !r.Quiet() {
			t.Errorf("%+v; %s", out, r.Left())
		}
		pause = min(2*pause, reviveNS<<mostSetbacks)
	}
	// It takes part again.
	role := headRole
	epoch++
	role.Epoch, role.Since = epoch, epoch
	r.Adopt(role, 0)
	out := Actions{}
	r.Write(&Write{Op: kvstore.Put, Key: testKey("c"), Value: []byte("value"), Tag: 9})
	r.Turn(&out)
	q := out.Requests[0]
	r.Stored(&kvstore.Reply{Tag: q.Tag, Version: q.Given})
	if r.Turn(&out); len(out.Replies) != 1 || out.Replies[0].Status != crrs.OK || q.Given>>40 < epoch {
		t.Errorf("%+v with version %d", out.Replies, q.Given)
	}
}

// TestAFilledMemberDoesNotRevive: a damaged replica asks its store whether all is known, and before the answer a view
// fills it: the range had left the partition, and comes back. It is damaged still, and says so, and revives when it is
// no member any more.
func TestAFilledMemberDoesNotRevive(t *testing.T) {
	r, now, epoch := alone(t, headRole), int64(1), headRole.Epoch
	role := headRole
	epoch++
	role.Epoch, role.Since = epoch, epoch
	now, stays := damage(t, r, role, now)
	none := func() {
		epoch++
		r.Adopt(crrs.Role{Epoch: epoch, Predecessor: crrs.NoPeer, Successor: crrs.NoPeer, ChainTail: crrs.NoPeer}, 0)
	}
	none()
	r.Stored(&kvstore.Reply{Tag: stays.Tag, Status: kvstore.OK, Version: stays.Given})
	next := func() kvstore.Request {
		for {
			out := Actions{}
			r.SetTime(now, testWall)
			if r.Turn(&out); len(out.Requests) > 0 {
				return out.Requests[0]
			}
			if out.WakeNS == 0 {
				t.Fatalf("nothing is tried; damaged %t", r.Damaged())
			}
			now = max(now+1, out.WakeNS)
		}
	}
	q := next()
	r.Stored(&kvstore.Reply{Tag: q.Tag, Version: q.Given})
	if q = next(); q.Op != kvstore.Certain {
		t.Fatalf("%+v", q)
	}
	epoch++
	filling := crrs.Role{Epoch: epoch, Member: true, Filling: true, Since: epoch, Predecessor: 1, ChainTail: 1,
		Successor: crrs.NoPeer}
	r.Adopt(filling, 0)
	r.Stored(&kvstore.Reply{Tag: q.Tag})
	r.Turn(&Actions{})
	if !r.Damaged() {
		t.Error("a member that is filled and does nothing says that it is not damaged: the others wait for it for ever")
	}
	none()
	if q = next(); q.Op != kvstore.Delete {
		t.Errorf("%+v", q)
	}
}
