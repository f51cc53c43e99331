package replica

import (
	"testing"

	"jbofd/internal/crrs"
	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
)

// TestAnAnsweredFetchKeepsNoBuffer: each of two ranges has answered a Fetch, and nothing else happens there. They have
// both buffers of their partition. Another range is asked for a batch.
func TestAnAnsweredFetchKeepsNoBuffer(t *testing.T) {
	heap := func(n int) ([]byte, error) { return make([]byte, n), nil }
	const batch = 64 << 10
	memory, err := NewMemory(2, batch, heap)
	if err != nil {
		t.Fatal(err)
	}
	batches, err := NewBatches(2, 3, batch, heap)
	if err != nil {
		t.Fatal(err)
	}
	tables := NewTables(64, 64)
	role := tailRole
	role.Others[0], role.NumOthers = 0, 1
	var all [3]*Replica
	var outs [3]Actions
	for i := range all {
		r, out := New(Config{Memory: memory, Batches: batches, Tables: tables, TombstoneSeconds: 1000, Alloc: heap,
			PortConfig: crrs.PortConfig{Keep: 4, Requests: 16, Served: 8,
				Config: crrs.Config{Window: 16, Reads: 16, Bits: 64, Parts: 2, Leaf: 4}}}), &outs[i]
		r.SetTime(1, testWall)
		r.Extend(1 << 60)
		r.Adopt(role, 0)
		r.Turn(out)
		for _, c := range out.Commands {
			r.Completed(c.Tag, nvme.Success, 0, nil) // a Sync
		}
		*out = Actions{}
		r.Turn(out)
		all[i] = r
	}
	// ask has another member ask a range for a batch, for a repair. It returns the request that the store gets.
	ask := func(i int) []kvstore.Request {
		var sqe nvme.SQE
		sqe.SetOpcode(nvme.CmdKVFetch)
		k := sqe.KVReplica()
		k.SetEpoch(uint32(role.Epoch))
		k.SetBits(64)
		k.SetLenBytes(batch)
		outs[i] = Actions{}
		all[i].Receive(0, 7, &sqe, make([]byte, batch), 3)
		all[i].Turn(&outs[i])
		return outs[i].Requests
	}
	for i := range 2 {
		q := ask(i)
		if len(q) != 1 || q[0].Op != kvstore.CopyOut {
			t.Fatalf("range %d: %+v", i, outs[i])
		}
		v := nvme.NewKVRange(q[0].Value, nvme.KVCopy, 0, 1<<64-1, nvme.KVCursorAt(0, nil))
		v.SetTo(nvme.KVLastOf(1<<64 - 1))
		v.SetFlags(nvme.KVComplete)
		v.Seal()
		all[i].Stored(&kvstore.Reply{Tag: q[0].Tag, ValueLen: v.LenBytes()})
		outs[i] = Actions{}
		if all[i].Turn(&outs[i]); len(outs[i].Responses) != 1 || !outs[i].Responses[0].Status.OK() {
			t.Fatalf("range %d: %+v", i, outs[i])
		}
	}
	if len(ask(2)) > 0 {
		t.Fatal("there was a third buffer")
	}
	now := int64(1)
	for range 10 {
		now += retryNS
		for i, r := range all { // a turn for each that wants one
			if at := outs[i].WakeNS; at != 0 && at <= now {
				r.SetTime(now, testWall)
				outs[i] = Actions{}
				r.Turn(&outs[i])
			}
		}
		if len(outs[2].Requests) > 0 {
			return
		}
	}
	t.Errorf("a range waits for a buffer: %d are free, and the others want their next turn at %d and %d",
		len(batches.outs.free), outs[0].WakeNS, outs[1].WakeNS)
}

// TestABufferRestsInProportion: a buffer that had a batch for a while is not taken again for as long as the share says,
// but never longer than restMostNS. A pass of another share may take it sooner.
func TestABufferRestsInProportion(t *testing.T) {
	const ms = 1e6
	for _, c := range []struct {
		busy   int64
		share  Share
		rested int64
	}{{10 * ms, 100, 0}, {10 * ms, 50, 10 * ms}, {10 * ms, 25, 30 * ms}, {60000 * ms, 1, restMostNS},
		{0, 1, 0}} {
		b, err := NewBatches(1, 2, 64<<10, func(n int) ([]byte, error) { return make([]byte, n), nil })
		if err != nil {
			t.Fatal(err)
		}
		const began = 5
		first, _ := b.fetch(began, c.share)
		second, _ := b.fetch(began, c.share)
		if i, again := b.fetch(began, 100); i != noBuffer || again != began+retryNS || first == second {
			t.Fatalf("a third buffer: %d, again at %d; buffers %d and %d", i, again, first, second)
		}
		ended := began + c.busy
		b.putFetched(first, ended)
		if c.rested > 0 {
			if i, again := b.fetch(ended+c.rested-1, c.share); i != noBuffer || again != ended+c.rested {
				t.Errorf("%d ms of %d %%: buffer %d before it has rested, again at %d", c.busy/ms, c.share, i, again)
			}
			if i, _ := b.fetch(ended, 100); i != first {
				t.Errorf("%d ms of %d %%: no buffer for a pass that does not rest", c.busy/ms, c.share)
			}
			b.putFetched(first, ended)
			b.busyNS[first] = c.busy
		}
		if i, _ := b.fetch(ended+c.rested, c.share); i != first {
			t.Errorf("%d ms of %d %%: no buffer %d ms later", c.busy/ms, c.share, c.rested/ms)
		}
	}
}

// TestAPassWaitsQuietlyForABuffer: while buffers rest, the member that is filled sends nothing, and goes on when they
// have rested; at once if copies are missing.
func TestAPassWaitsQuietlyForABuffer(t *testing.T) {
	const busy = 10e6
	for _, c := range []struct {
		short       bool
		after, most int64
	}{{false, 3 * busy, 3 * busy}, {true, 0, 0}} {
		role := tailRole
		role.Filling = true
		r, out := alone(t, role), Actions{}
		r.cfg.FillShare, r.cfg.RestoreShare = 25, 100
		r.SetShort(c.short)
		now := int64(1)
		turn := func() (fetches []Command) {
			t.Helper()
			out = Actions{}
			r.SetTime(now, testWall)
			r.Turn(&out)
			for _, cmd := range out.Commands {
				switch cmd.SQE.Opcode() {
				case nvme.CmdKVFetch:
					fetches = append(fetches, cmd)
				case nvme.CmdKVCompare:
				default:
					t.Errorf("short %t, at %d ns: command %#x", c.short, now, cmd.SQE.Opcode())
				}
			}
			return fetches
		}
		out = Actions{}
		r.Turn(&out)
		r.Completed(out.Commands[0].Tag, nvme.Success, 0, nil) // a Sync
		var durable nvme.SQE
		durable.SetOpcode(nvme.CmdKVDurable)
		durable.KVReplica().SetEpoch(3)
		durable.KVReplica().SetClock(5)
		r.Receive(0, 1, &durable, nil, 3)
		turn()
		compare := out.Commands[0]
		many := &crrs.Part{Bits: 64, Sums: make([]crrs.Sum, 64), Time: 7}
		for i := range many.Sums {
			many.Sums[i] = crrs.Sum{Count: 1000, Hash: 1}
		}
		b := encodeSums(many)
		r.Completed(compare.Tag, nvme.Success, uint64(len(b)), b)
		turn()
		digest := out.Requests[0]
		own := encodeSums(&crrs.Part{Bits: 64, Sums: make([]crrs.Sum, 64), Time: 7})
		r.Stored(&kvstore.Reply{Tag: digest.Tag, ValueLen: copy(digest.Value, own)})
		under := turn()
		if len(under) != 2 { // as many as there are parts; there are three buffers
			t.Fatalf("%d batches are asked for", len(under))
		}
		now += busy
		for _, cmd := range under {
			batch := nvme.NewKVRange(cmd.Buf, nvme.KVCopy, cmd.SQE.KVReplica().First(), cmd.SQE.KVReplica().Last(),
				nvme.KVCursorAt(cmd.SQE.KVReplica().First(), nil))
			batch.SetTo(nvme.KVLastOf(cmd.SQE.KVReplica().Last()))
			batch.SetFlags(nvme.KVComplete)
			batch.Seal()
			r.Completed(cmd.Tag, nvme.Success, uint64(batch.LenBytes()), batch[:batch.LenBytes()])
		}
		turn()
		for _, q := range out.Requests {
			r.Stored(&kvstore.Reply{Tag: q.Tag})
		}
		ended, asked := now, len(turn())
		for asked < 2 {
			if out.WakeNS <= now {
				t.Fatalf("short %t: at %d ns the replica wants to wake at %d", c.short, now, out.WakeNS)
			}
			now = out.WakeNS
			asked += len(turn())
		}
		if took := now - ended; took < c.after || took > c.most {
			t.Errorf("short %t: two batches more are asked for after %d ns, want %d", c.short, took, c.after)
		}
	}
}
