package replica

import (
	"fmt"
	"slices"
	"testing"

	"jbofd/internal/crrs"
	"jbofd/internal/kvstore"
	"jbofd/internal/kvstore/format"
	"jbofd/internal/nvme"
)

const testWall = 1_000_000

// alone returns a replica that is the only member of its chain, or with one behind it.
func alone(tb testing.TB, role crrs.Role) *Replica {
	heap := func(n int) ([]byte, error) { return make([]byte, n), nil }
	m, err := NewMemory(2, 64<<10, heap)
	if err != nil {
		tb.Fatal(err)
	}
	b, err := NewBatches(2, 3, 64<<10, heap)
	if err != nil {
		tb.Fatal(err)
	}
	r := New(Config{Memory: m, Batches: b, TombstoneSeconds: 1000, Alloc: heap,
		PortConfig: crrs.PortConfig{Keep: 4, Requests: 16, Served: 8,
			Config: crrs.Config{Window: 16, Reads: 16, Bits: 64, Parts: 2, Leaf: 4}}})
	if err != nil {
		tb.Fatal(err)
	}
	r.SetTime(1, testWall)
	r.Extend(1 << 60)
	r.Adopt(role, 1)
	return r
}

var headRole = crrs.Role{Epoch: 3, Member: true, Since: 1, Predecessor: crrs.NoPeer, Successor: crrs.NoPeer,
	ChainTail: crrs.NoPeer}

func testKey(s string) (k crrs.Key) {
	k.Len = uint8(copy(k.Bytes[:], s))
	return k
}

// TestWhatTheStoreIsAskedFor: the requests that a ChainHead makes of writes, and what it answers for each reply.
func TestWhatTheStoreIsAskedFor(t *testing.T) {
	const tombstone = testWall + 1000
	id := kvstore.Identity{Client: 5, Seq: 6, KeepUntil: 7}
	kept := kvstore.Identity{Client: 5, Seq: 6, KeepUntil: testWall + minKeepSeconds + keepMargin}
	retry := kvstore.Identity{Client: 5, Seq: 6, KeepUntil: 7, Retry: true}
	key := testKey("key")
	for i, c := range []struct {
		w      Write
		want   kvstore.Request
		st     kvstore.Status
		given  bool // the reply has the version that was given, or 9
		status crrs.Status
		why    kvstore.Status
	}{
		{Write{Op: kvstore.Put, ID: id, Expires: 8}, kvstore.Request{Op: kvstore.Put, ID: kept, Expires: 8}, kvstore.OK,
			true, crrs.OK, 0},
		{Write{Op: kvstore.Put}, kvstore.Request{Op: kvstore.Put}, kvstore.Superseded, false, crrs.OK, 0},
		{Write{Op: kvstore.Put, ID: retry}, kvstore.Request{Op: kvstore.Put, ID: retry}, kvstore.OK, false, crrs.OK, 0},
		{Write{Op: kvstore.Put, ID: retry}, kvstore.Request{Op: kvstore.Put, ID: retry}, kvstore.Indeterminate, false,
			crrs.Refused, kvstore.Indeterminate},
		{Write{Op: kvstore.Put, ID: retry}, kvstore.Request{Op: kvstore.Put, ID: retry}, kvstore.Superseded, false,
			crrs.OK, 0},
		{Write{Op: kvstore.Put, ID: retry}, kvstore.Request{Op: kvstore.Put, ID: retry}, kvstore.CapacityExceeded,
			false, crrs.Refused, kvstore.CapacityExceeded},
		{Write{Op: kvstore.Put, ID: retry}, kvstore.Request{Op: kvstore.Put, ID: retry}, kvstore.Corrupt, false,
			crrs.Refused, kvstore.Indeterminate}, // nobody knows whether it was done
		{Write{Op: kvstore.Put, Condition: kvstore.IfVersion, Version: 4},
			kvstore.Request{Op: kvstore.Put, Condition: kvstore.IfVersion, Version: 4}, kvstore.VersionMismatch, false,
			crrs.Refused, kvstore.VersionMismatch},
		{Write{Op: kvstore.Put, Condition: kvstore.IfVersion, Version: 4},
			kvstore.Request{Op: kvstore.Put, Condition: kvstore.IfVersion, Version: 4}, kvstore.Superseded, false,
			crrs.Refused, kvstore.Superseded},
		{Write{Op: kvstore.Put, Condition: kvstore.IfAbsent},
			kvstore.Request{Op: kvstore.Put, Condition: kvstore.IfAbsent}, kvstore.Exists, false, crrs.Refused,
			kvstore.Exists},
		{Write{Op: kvstore.Delete}, kvstore.Request{Op: kvstore.Delete, Tombstone: true, Expires: tombstone},
			kvstore.OK, true, crrs.OK, 0},
		{Write{Op: kvstore.Delete, Tombstone: true, Expires: testWall + 5},
			kvstore.Request{Op: kvstore.Delete, Tombstone: true, Expires: tombstone}, kvstore.OK, true, crrs.OK, 0},
		{Write{Op: kvstore.Delete, Tombstone: true}, kvstore.Request{Op: kvstore.Delete, Tombstone: true}, kvstore.OK,
			true, crrs.OK, 0},
		{Write{Op: kvstore.Delete, Condition: kvstore.IfPresent},
			kvstore.Request{Op: kvstore.Delete, Condition: kvstore.IfPresent, Tombstone: true, Expires: tombstone},
			kvstore.NotFound, false, crrs.Refused, kvstore.NotFound},
	} {
		r, out := alone(t, headRole), Actions{}
		r.Turn(&out)
		c.w.Key, c.w.Tag, c.w.Tenant, c.want.Tenant = key, 77, 7, 7
		r.Write(&c.w)
		r.Turn(&out)
		if len(out.Requests) != 1 || len(out.Replies) != 0 {
			t.Fatalf("write %d: %+v", i, out)
		}
		q := out.Requests[0]
		p := kvstore.Reply{Tag: q.Tag, Status: c.st, Version: 9}
		if c.given {
			p.Version = q.Given
		}
		if c.want.Tag, c.want.Key, c.want.Given = q.Tag, q.Key, q.Given; q.Given < 3<<40 || string(q.Key) != "key" ||
			fmt.Sprintf("%+v", q) != fmt.Sprintf("%+v", c.want) {
			t.Errorf("write %d: %+v, want %+v", i, q, c.want)
		}
		out = Actions{}
		r.Stored(&p)
		r.Turn(&out)
		if len(out.Replies) != 1 || out.Replies[0].Status != c.status || out.Replies[0].Refusal != c.why ||
			out.Replies[0].Tag != 77 || c.status == crrs.Refused && out.Replies[0].Version != 9 || r.Damaged() {
			t.Errorf("write %d: %+v, want %d, %d", i, out.Replies, c.status, c.why)
		}
		if left := r.Left(); left != "" {
			t.Errorf("write %d: %s", i, left)
		}
	}
}

// TestAWriteThatWasGivenAVersionIsTriedAgain for want of memory or room, as long as it takes, because others have it
// perhaps. If the store fails for two seconds, the replica is of no use any more.
func TestAWriteThatWasGivenAVersionIsTriedAgain(t *testing.T) {
	for _, c := range []struct {
		st      kvstore.Status
		tries   int // at least, before it ends well
		damaged bool
	}{{kvstore.NoMemory, 300, false}, {kvstore.CapacityExceeded, 300, false}, {kvstore.DeviceError, 300, true}} {
		r, out := alone(t, headRole), Actions{}
		r.Write(&Write{Op: kvstore.Put, Key: testKey("key"), Value: []byte("value"), Tag: 1})
		r.Turn(&out)
		now := int64(1)
		for n := 0; n < c.tries && !r.Damaged(); n++ {
			if len(out.Requests) != 1 || string(out.Requests[0].Value) != "value" {
				t.Fatalf("try %d: %+v", n, out.Requests)
			}
			r.Stored(&kvstore.Reply{Tag: out.Requests[0].Tag, Status: c.st})
			out = Actions{}
			if r.Turn(&out); len(out.Requests) > 0 || out.WakeNS == 0 && !r.Damaged() {
				t.Fatalf("try %d is repeated at once, or never: %+v", n, out)
			}
			now = max(now, out.WakeNS)
			r.SetTime(now, testWall)
			r.Turn(&out)
		}
		if r.Damaged() != c.damaged {
			t.Errorf("status %d, %d times: damaged %v", c.st, c.tries, r.Damaged())
		}
		if !c.damaged {
			r.Stored(&kvstore.Reply{Tag: out.Requests[0].Tag, Version: out.Requests[0].Given})
			if r.Turn(&out); len(out.Replies) != 1 || out.Replies[0].Status != crrs.OK {
				t.Errorf("%+v", out.Replies)
			}
		} else if len(out.Replies) != 1 || out.Replies[0].Status != crrs.Unknown {
			t.Errorf("%+v, want an unknown outcome", out.Replies)
		}
		if left := r.Left(); left != "" {
			t.Errorf("status %d, %d times: %s", c.st, c.tries, left)
		}
	}
}

// TestAWriteWithoutRoomIsGivenUpWithTheMembership: nobody waits for it any more, and what it has is free.
func TestAWriteWithoutRoomIsGivenUpWithTheMembership(t *testing.T) {
	r, out := alone(t, headRole), Actions{}
	r.Write(&Write{Op: kvstore.Put, Key: testKey("key"), Value: []byte("value"), Tag: 1})
	r.Turn(&out)
	r.Stored(&kvstore.Reply{Tag: out.Requests[0].Tag, Status: kvstore.CapacityExceeded})
	r.Adopt(crrs.Role{Epoch: 4, Predecessor: crrs.NoPeer, Successor: crrs.NoPeer, ChainTail: crrs.NoPeer}, 0)
	out = Actions{}
	r.SetTime(1+retryFullNS, testWall)
	if r.Turn(&out); len(out.Replies) != 1 || out.Replies[0].Status != crrs.Unknown || len(out.Requests) != 1 {
		t.Fatalf("%+v, want an unknown outcome and one more try", out)
	}
	r.Stored(&kvstore.Reply{Tag: out.Requests[0].Tag, Status: kvstore.CapacityExceeded})
	out = Actions{}
	r.SetTime(1+3*retryFullNS, testWall)
	if r.Turn(&out); len(out.Requests) > 0 || out.WakeNS != 0 || r.Damaged() || r.Left() != "" {
		t.Errorf("%+v, damaged %v, left: %s", out, r.Damaged(), r.Left())
	}
}

// TestOnlyAChainHeadSaysThatThereIsNoRoom: a host with an old map must learn that the range is elsewhere.
func TestOnlyAChainHeadSaysThatThereIsNoRoom(t *testing.T) {
	for _, c := range []struct {
		name      string
		role      crrs.Role
		withdrawn bool
		want      crrs.Status
	}{
		{"a ChainHead", headRole, false, crrs.Refused},
		{"a ChainHead without authority", headRole, true, crrs.Unavailable},
		{"another member", tailRole, false, crrs.WrongView},
		{"no member", crrs.Role{Epoch: 3, Predecessor: crrs.NoPeer, Successor: crrs.NoPeer, ChainTail: crrs.NoPeer},
			false, crrs.WrongView},
	} {
		r, out := alone(t, c.role), Actions{}
		if c.withdrawn {
			r.Withdraw()
		}
		r.SetFull(true, false)
		r.Write(&Write{Op: kvstore.Put, Key: testKey("key")})
		if r.Turn(&out); len(out.Replies) != 1 || out.Replies[0].Status != c.want {
			t.Errorf("%s: %+v, want status %d", c.name, out.Replies, c.want)
		}
	}
}

// TestAWriteThatOthersWouldNotTakeIsRefused, and nobody hears of it: a version of the client's, or an identity that is
// none.
func TestAWriteThatOthersWouldNotTakeIsRefused(t *testing.T) {
	for i, w := range []Write{
		{Op: kvstore.Put, Condition: kvstore.IfNewer, Version: 7},
		{Op: kvstore.Get},
		{Op: kvstore.Put, ID: kvstore.Identity{Client: 1, Seq: 2}},
		{Op: kvstore.Put, ID: kvstore.Identity{Seq: 2}},
		{Op: kvstore.Put, ID: kvstore.Identity{KeepUntil: 2}},
	} {
		r, out := alone(t, headRole), Actions{}
		w.Key = testKey("key")
		r.Write(&w)
		r.Turn(&out)
		if len(out.Requests) != 0 || len(out.Replies) != 1 || out.Replies[0].Refusal != kvstore.InvalidValue {
			t.Errorf("write %d: %+v", i, out)
		}
	}
	r, out := alone(t, headRole), Actions{}
	r.SetFull(true, false)
	r.Write(&Write{Op: kvstore.Put, Key: testKey("key")})
	r.Write(&Write{Op: kvstore.Delete, Key: testKey("key")})
	r.Turn(&out)
	if len(out.Requests) != 1 || len(out.Replies) != 1 || out.Replies[0].Refusal != kvstore.CapacityExceeded {
		t.Errorf("in a full partition: %+v", out)
	}
}

// tailRole is that of a member behind node 0.
var tailRole = crrs.Role{Epoch: 3, Member: true, Since: 1, Predecessor: 0, Successor: crrs.NoPeer,
	ChainTail: crrs.NoPeer}

// forward gives a replica a Forward.
func forward(r *Replica, seq uint64, length int) {
	data := make([]byte, nvme.KVForwardHeaderSize+length)
	h := (*nvme.KVForwardHeader)(data)
	h.SetVersion(3<<40 + seq)
	key := testKey(fmt.Sprint("key", seq))
	h.SetKey(key.Bytes)
	var sqe nvme.SQE
	sqe.SetOpcode(nvme.CmdKVForward)
	k := sqe.KVReplica()
	k.SetEpoch(3)
	k.SetKeyLen(key.Len)
	k.SetSequence(seq)
	k.SetKeep(1)
	k.SetLenBytes(uint32(len(data)))
	r.Receive(0, 100+seq, &sqe, data, 3)
}

// TestTheWriteThatOthersWaitForFindsMemory: writes that come too early have taken all of it. Others are dropped, and
// asked for.
func TestTheWriteThatOthersWaitForFindsMemory(t *testing.T) {
	r, out := alone(t, tailRole), Actions{}
	r.Turn(&out)
	out = Actions{}
	forward(r, 3, 32<<10-frame)
	forward(r, 4, 32<<10-frame)
	forward(r, 5, 10)
	r.Turn(&out)
	if len(out.Requests) != 2 || !r.starved || out.Requests[0].Tenant != 3 {
		t.Fatalf("%d writes are stored, starved %v", len(out.Requests), r.starved)
	}
	out = Actions{}
	forward(r, 2, 30<<10) // 1 is missing, too
	forward(r, 1, 30<<10)
	forward(r, 2, 30<<10)
	r.Turn(&out)
	if len(out.Requests) != 2 || len(out.Requests[0].Value) != 30<<10 {
		t.Fatalf("%d writes are stored: the first ones that are missing are not", len(out.Requests))
	}
	out = Actions{}
	r.SetTime(1+retryNS, testWall)
	if r.Turn(&out); len(out.Commands) != 1 || out.Commands[0].SQE.Opcode() != nvme.CmdKVSync {
		t.Fatalf("%+v: what was dropped is not asked for", out.Commands)
	}
}

// TestAChainHeadHearsThatAMemberIsFull with the completion of a Forward. It refuses Puts, and asks again at the time
// that it has told its driver.
func TestAChainHeadHearsThatAMemberIsFull(t *testing.T) {
	role := headRole
	role.Successor, role.ChainTail = 1, 1
	r, out := alone(t, role), Actions{}
	// complete ends all commands, and returns how many there were.
	complete := func(result uint64) (n int) {
		r.Turn(&out)
		for _, q := range out.Requests {
			r.Stored(&kvstore.Reply{Tag: q.Tag, Version: q.Given})
		}
		n = len(out.Commands)
		for _, c := range out.Commands {
			r.Completed(c.Tag, nvme.Success, result, nil)
		}
		out = Actions{}
		r.Turn(&out)
		return n
	}
	put := func() Reply {
		r.Write(&Write{Op: kvstore.Put, Key: testKey("key"), Tag: 1})
		complete(0)
		if complete(1 | nvme.KVChainFull); len(out.Replies) != 1 {
			t.Fatalf("%+v", out)
		}
		return out.Replies[0]
	}
	if p := put(); p.Status != crrs.OK {
		t.Fatalf("%+v", p)
	}
	for range 3 {
		r.Write(&Write{Op: kvstore.Put, Key: testKey("key"), Tag: 1})
		out = Actions{}
		r.Turn(&out)
		if len(out.Replies) != 1 || out.Replies[0].Refusal != kvstore.CapacityExceeded || out.WakeNS <= r.now {
			t.Fatalf("a member is full: %+v", out)
		}
		r.SetTime(out.WakeNS, testWall)
		if n := complete(1 | nvme.KVChainFull); n != 1 {
			t.Fatalf("%d commands ask whether it still is", n)
		}
	}
	r.SetTime(out.WakeNS, testWall)
	if complete(1); out.WakeNS != 0 {
		t.Errorf("the next turn is at %d, though nobody is full", out.WakeNS)
	}
}

// TestCopiesWaitForRoom: while there is room only for what has begun, no batch is given to the store, nor asked for.
// One that finds no room, or comes too late, is given up, and its buffer is free for others.
func TestCopiesWaitForRoom(t *testing.T) {
	for step := -1; step < 5; step++ {
		copyWithoutRoom(t, step)
	}
}

// copyWithoutRoom has batches be given up. With step the membership ends there; -1: it goes on.
func copyWithoutRoom(t *testing.T, step int) {
	role := tailRole
	role.Filling = true
	r, out := alone(t, role), Actions{}
	now := int64(1)
	turn := func() {
		out = Actions{}
		now += retryFullNS
		r.SetTime(now, testWall)
		r.Turn(&out)
	}
	turn()
	r.Completed(out.Commands[0].Tag, nvme.Success, 0, nil) // a Sync
	var durable nvme.SQE
	durable.SetOpcode(nvme.CmdKVDurable)
	k := durable.KVReplica()
	k.SetEpoch(3)
	k.SetClock(5)
	r.Receive(0, 1, &durable, nil, 3)
	answer := func(opcode uint8, data func(k *nvme.KVReplicaSQE, buf []byte) nvme.KVRange) {
		t.Helper()
		turn()
		i := slices.IndexFunc(out.Commands, func(c Command) bool { return c.SQE.Opcode() == opcode })
		if i < 0 {
			t.Fatalf("no command %#x: %+v", opcode, out)
		}
		c := &out.Commands[i]
		b := data(c.SQE.KVReplica(), c.Buf)
		r.Completed(c.Tag, nvme.Success, uint64(len(b)), b)
	}
	answer(nvme.CmdKVCompare, func(k *nvme.KVReplicaSQE, _ []byte) nvme.KVRange {
		return encodeSums(&crrs.Part{First: k.First(), Bits: k.Bits(), Sums: make([]crrs.Sum, 64), Time: 7})
	})
	turn()
	if len(out.Requests) != 1 || out.Requests[0].Op != kvstore.Digest {
		t.Fatalf("%+v, want a Digest", out.Requests)
	}
	q := out.Requests[0]
	own := nvme.KVRange(encodeSums(&crrs.Part{Bits: 64, Sums: make([]crrs.Sum, 64), Time: 7}))
	own.Sum(0).Add(1, 99) // an object that the copier does not have
	own.Seal()
	r.Stored(&kvstore.Reply{Tag: q.Tag, ValueLen: copy(q.Value, own)})
	batch := func(k *nvme.KVReplicaSQE, buf []byte) nvme.KVRange {
		last := k.Last()
		b := nvme.NewKVRange(buf, nvme.KVCopy, k.First(), last, nvme.KVCursorAt(k.First(), nil))
		b.SetTo(nvme.KVLastOf(last))
		b.SetFlags(nvme.KVComplete)
		b.Seal()
		return b[:b.LenBytes()]
	}
	// Each step begins when the batch may be asked for. With after it comes only then.
	for i, c := range []struct {
		tooFull bool
		after   int64
		status  kvstore.Status // of the store, if it is asked
	}{{true, 0, 0}, {false, 0, kvstore.CapacityExceeded}, {false, crrs.BatchNS, 0}, {false, 0, kvstore.NoMemory},
		{false, 0, kvstore.OK}} {
		r.SetFull(true, false)
		fetch := func() (c *Command) {
			for i := range out.Commands {
				if out.Commands[i].SQE.Opcode() == nvme.CmdKVFetch {
					c = &out.Commands[i]
				}
			}
			return c
		}
		for n := 0; fetch() == nil; n++ {
			if n == 100 {
				t.Fatalf("step %d: no batch is asked for", i)
			}
			if turn(); fetch() == nil && out.WakeNS == 0 {
				t.Fatalf("step %d: nothing wakes the replica", i)
			}
		}
		f := *fetch()
		now += c.after
		r.SetTime(now, testWall)
		r.SetFull(true, c.tooFull)
		b := batch(f.SQE.KVReplica(), f.Buf)
		r.Completed(f.Tag, nvme.Success, uint64(len(b)), b)
		turn()
		stores := !c.tooFull && c.after == 0
		if i == step {
			if again := fetch(); again != nil {
				r.Failed(again.Tag)
			}
			r.Adopt(crrs.Role{Epoch: role.Epoch + 1}, 0)
			if stores {
				r.Stored(&kvstore.Reply{Tag: out.Requests[0].Tag, Status: c.status})
			}
			turn()
			if turn(); !r.Quiet() || r.Left() != "" || len(out.Requests) > 0 {
				t.Errorf("step %d: quiet %t: %s, %+v", step, r.Quiet(), r.Left(), out.Requests)
			}
			return
		}
		if n := len(out.Requests); stores != (n == 1 && out.Requests[0].Op == kvstore.CopyIn) || !stores && n > 0 {
			t.Fatalf("step %d: the store is asked for %+v", i, out.Requests)
		}
		for begun := now; stores && len(out.Requests) > 0; turn() {
			r.Stored(&kvstore.Reply{Tag: out.Requests[0].Tag, Status: c.status})
			if now-begun > crrs.BatchNS+crrs.BatchNS/2 {
				t.Fatalf("a batch is tried for %d ns", now-begun)
			}
		}
		if free := len(r.cfg.Batches.fetched.free); free != len(r.cfg.Batches.fetched.all) && fetch() == nil {
			t.Fatalf("step %d: %d buffers are free", i, free)
		}
	}
	if turn(); !r.Complete() || r.Damaged() || r.Left() != "" {
		t.Errorf("complete %v, damaged %v, %s", r.Complete(), r.Damaged(), r.Left())
	}
}

// TestABatchThatAnswersSomethingElseIsNotStored: the answer to a Fetch is about another part, begins at another place,
// or lacks something.
func TestABatchThatAnswersSomethingElseIsNotStored(t *testing.T) {
	a := asked{opcode: nvme.CmdKVFetch, part: crrs.Part{First: 1 << 40, Bits: 40, From: crrs.Cursor{Position: 1 << 40}}}
	first, last := uint64(1<<40), uint64(2<<40-1)
	batch := func(first, last, from uint64, kind nvme.KVRangeKind, flags uint8) []byte {
		b := nvme.NewKVRange(make([]byte, 1000), kind, first, last, nvme.KVCursorAt(from, nil))
		b.SetTo(nvme.KVLastOf(last))
		b.SetFlags(flags)
		b.Seal()
		return b
	}
	whole := batch(first, last, first, nvme.KVCopy, nvme.KVComplete)
	if p := answerOf(&a, whole); p == nil || !p.Last || p.To.Position != last {
		t.Fatalf("%+v", p)
	}
	for name, b := range map[string][]byte{
		"another part":      batch(0, last, first, nvme.KVCopy, nvme.KVComplete),
		"another end":       batch(first, last-1, first, nvme.KVCopy, nvme.KVComplete),
		"another beginning": batch(first, last, first+1, nvme.KVCopy, nvme.KVComplete),
		"a scan":            batch(first, last, first, nvme.KVScan, nvme.KVComplete),
		"something lost":    batch(first, last, first, nvme.KVCopy, nvme.KVComplete|nvme.KVLost),
		"cut off":           whole[:50],
		"nothing":           nil,
	} {
		if answerOf(&a, b) != nil {
			t.Errorf("%s is taken", name)
		}
	}
}

// TestWritesAndReadsAllocateNothing at a ChainHead that is alone.
func TestWritesAndReadsAllocateNothing(t *testing.T) {
	r, out := alone(t, headRole), Actions{}
	w := Write{Op: kvstore.Put, Key: testKey("key"), Value: make([]byte, 4096), Tag: 1}
	buf := make([]byte, 4096)
	turn := func() {
		r.Turn(&out)
		for i := range out.Requests {
			q := &out.Requests[i]
			r.Stored(&kvstore.Reply{Tag: q.Tag, Version: max(q.Given, 1), ValueLen: len(buf)})
		}
		out.Requests = out.Requests[:0]
		r.Turn(&out)
	}
	run := func() {
		r.Write(&w)
		r.Read(w.Key, buf, 3, 2)
		turn()
		if turn(); len(out.Replies) != 2 {
			t.Fatalf("%+v", out.Replies)
		}
		out.Replies = out.Replies[:0]
	}
	run()
	if n := testing.AllocsPerRun(200, run); n > 0 {
		t.Errorf("%v allocations", n)
	}
}

// TestForwardsAllocateNothing at the ChainHead and at the ChainTail.
func TestForwardsAllocateNothing(t *testing.T) {
	role := headRole
	role.Successor, role.ChainTail = 1, 1
	head, tail := alone(t, role), alone(t, tailRole)
	var out, other Actions
	w := Write{Op: kvstore.Put, Key: testKey("key"), Value: make([]byte, 4096), Tag: 1}
	data := make([]byte, nvme.KVForwardHeaderSize+4096)
	done, handle := 0, uint64(0)
	turn := func(r *Replica, out *Actions) {
		r.Turn(out)
		for i := range out.Requests {
			q := &out.Requests[i]
			r.Stored(&kvstore.Reply{Tag: q.Tag, Version: q.Given})
		}
		out.Requests = out.Requests[:0]
		r.Turn(out)
	}
	run := func() {
		head.Write(&w)
		for range 6 {
			turn(head, &out)
			for i := range out.Commands {
				c := &out.Commands[i]
				if c.SQE.Opcode() == nvme.CmdKVForward {
					copy(data, c.Data)
				}
				handle++
				tail.Receive(0, uint64(c.Tag), &c.SQE, data, 3)
			}
			out.Commands = out.Commands[:0]
			turn(tail, &other)
			for _, a := range other.Responses {
				head.Completed(uint32(a.Handle), a.Status, a.Result, nil)
			}
			for _, c := range other.Commands { // a Sync, at the beginning
				head.Receive(1, 1000, &c.SQE, nil, 3)
				tail.Completed(c.Tag, nvme.Success, 0, nil)
			}
			out.Responses, other.Commands, other.Responses = out.Responses[:0], other.Commands[:0], other.Responses[:0]
		}
		done += len(out.Replies)
		out.Replies = out.Replies[:0]
	}
	run()
	run()
	done = 0
	if n := testing.AllocsPerRun(200, run); n > 0 || done != 201 {
		t.Errorf("%v allocations, %d writes were done", n, done)
	}
}

// TestPositionsAreThoseOfTheStore: a Fetch names a key, and the store its position.
func TestPositionsAreThoseOfTheStore(t *testing.T) {
	r := alone(t, headRole)
	r.cfg.HashSeed = 99
	store := kvstore.Range{FromKey: true}.At(99, []byte("key"))
	if p := r.position([]byte("key")); p != store.From || p == 0 || format.HashKey(99, []byte("key")) == p {
		t.Errorf("%x, want %x", p, store.From)
	}
}
