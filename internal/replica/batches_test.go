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
