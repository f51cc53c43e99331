package replica

import (
	"testing"

	"jbofd/internal/crrs"
	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
)

// TestClocksOfNodesNeedNotAgree: the time of day of the ChainHead is hours behind or ahead. A member keeps the identity
// of a write, and the tombstone of a Delete, for as long as they are needed by its own.
func TestClocksOfNodesNeedNotAgree(t *testing.T) {
	const rest = minKeepSeconds + keepMargin // that the ChainHead has given
	for name, ahead := range map[string]int{"agree": 0, "nearly agree": -keepMargin, "four minutes behind": -240,
		"hours behind": -9 * 3600, "hours ahead": 9 * 3600} {
		t.Run(name, func(t *testing.T) {
			r, out := alone(t, tailRole), Actions{}
			head := uint32(testWall + ahead)
			for seq := uint64(1); seq <= 2; seq++ {
				data := make([]byte, nvme.KVForwardHeaderSize)
				h, key := (*nvme.KVForwardHeader)(data), testKey("key")
				h.SetVersion(3<<40 + seq)
				h.SetKey(key.Bytes)
				h.SetClient(7)
				h.SetSequence(seq)
				h.SetKeepUntil(head + rest)
				var sqe nvme.SQE
				sqe.SetOpcode(nvme.CmdKVForward)
				k := sqe.KVReplica()
				k.SetEpoch(3)
				k.SetKeyLen(key.Len)
				k.SetSequence(seq)
				k.SetKeep(1)
				k.SetLenBytes(uint32(len(data)))
				if seq == 2 {
					k.SetFlags(nvme.KVForwardDelete)
					h.SetExpires(head + r.cfg.TombstoneSeconds)
				}
				r.Receive(0, 100+seq, &sqe, data, 3)
			}
			r.Turn(&out)
			if len(out.Requests) != 2 {
				t.Fatalf("%+v", out.Requests)
			}
			for _, q := range out.Requests {
				want := max(head+rest, testWall+minKeepSeconds)
				if q.ID.KeepUntil != want {
					t.Errorf("the identity is kept for %d s", int(q.ID.KeepUntil)-testWall)
				}
				if q.Op == kvstore.Delete && (q.Expires < testWall+r.cfg.TombstoneSeconds ||
					q.Expires < head+r.cfg.TombstoneSeconds) {
					t.Errorf("the tombstone lasts for %d s", int(q.Expires)-testWall)
				}
			}
			// The store has no room for the Delete for a day.
			del := out.Requests[1]
			if del.Op != kvstore.Delete {
				del = out.Requests[0]
			}
			r.Stored(&kvstore.Reply{Tag: del.Tag, Status: kvstore.CapacityExceeded})
			r.Turn(&out)
			out = Actions{}
			r.SetTime(86400e9, testWall+86400)
			r.Turn(&out)
			if len(out.Requests) != 1 || out.Requests[0].Expires < testWall+86400+r.cfg.TombstoneSeconds {
				t.Errorf("the Delete is tried again with %+v", out.Requests)
			}
		})
	}
}

// TestABatchIsKeptForAsLongAsByItsCopier: the store learns how much the time of day of this node is ahead of that of
// the copier, unless they nearly agree.
func TestABatchIsKeptForAsLongAsByItsCopier(t *testing.T) {
	for _, c := range []struct{ ahead, want int64 }{{0, 0}, {keepMargin, 0}, {-keepMargin, 0},
		{keepMargin + 1, keepMargin + 1}, {-240, -240}, {9 * 3600, 9 * 3600}} {
		role := tailRole
		role.Filling = true
		r, out := alone(t, role), Actions{}
		r.SetTime(1, testWall)
		b := nvme.NewKVRange(make([]byte, 1000), nvme.KVCopy, 0, 1<<64-1, nvme.KVCursorAt(0, nil))
		b.SetTime(uint32(testWall - c.ahead))
		b.Seal()
		r.acts.Ranges = append(r.acts.Ranges, crrs.RangeOp{Kind: crrs.CopyIn, Data: b[:b.LenBytes()]},
			crrs.RangeOp{Kind: crrs.CopyIn, Data: b[:3]})
		r.beginRanges(&out)
		if len(out.Requests) != 2 || out.Requests[0].AheadSeconds != c.want || out.Requests[1].AheadSeconds != 0 {
			t.Errorf("ahead by %d s: %+v", c.ahead, out.Requests)
		}
	}
}
