package replica

import (
	"math"
	"testing"

	"jbofd/internal/crrs"
	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
)

// repairRole is that of a ChainTail behind node 0 and node 1, which is the ChainHead.
var repairRole = crrs.Role{Epoch: 3, Member: true, Since: 1, Predecessor: 0, Successor: crrs.NoPeer,
	ChainTail: crrs.NoPeer, NumOthers: 2, Others: [crrs.MaxOthers]crrs.Peer{0, 1}}

// TestACopyForARepairIsOfWhatIsCommitted: what the store had when it was read may be of a write that is not.
func TestACopyForARepairIsOfWhatIsCommitted(t *testing.T) {
	role := repairRole
	role.Successor, role.ChainTail, role.Others[0] = 2, 2, 2
	role.Predecessor = 0
	r, out := alone(t, role), Actions{}
	forward(r, 1, 10)
	r.Turn(&out)
	if len(out.Requests) != 1 {
		t.Fatalf("%+v", out.Requests)
	}
	r.Stored(&kvstore.Reply{Tag: out.Requests[0].Tag, Version: out.Requests[0].Given})
	var sqe nvme.SQE
	sqe.SetOpcode(nvme.CmdKVFetch)
	k := sqe.KVReplica()
	k.SetEpoch(3)
	k.SetBits(64)
	k.SetLenBytes(64 << 10)
	r.Receive(2, 55, &sqe, make([]byte, 64<<10), 3)
	out = Actions{}
	r.Turn(&out)
	if len(out.Requests) != 1 || out.Requests[0].Op != kvstore.CopyOut || !out.Requests[0].Background {
		t.Fatalf("%+v", out.Requests)
	}
	q := out.Requests[0]
	b := nvme.NewKVRange(q.Value, nvme.KVCopy, 0, math.MaxUint64, nvme.KVCursorAt(0, nil))
	b.SetTo(nvme.KVLastOf(math.MaxUint64))
	b.SetFlags(nvme.KVComplete)
	b.Seal()
	r.Stored(&kvstore.Reply{Tag: q.Tag, ValueLen: b.LenBytes()})
	var commands []Command
	answered := func() bool {
		out = Actions{}
		r.Turn(&out)
		commands = append(commands, out.Commands...)
		for _, a := range out.Responses {
			if a.Handle == 55 {
				if !a.Status.OK() || len(a.Data) != b.LenBytes() {
					t.Fatalf("%+v", a)
				}
				return true
			}
		}
		return false
	}
	if answered() || answered() {
		t.Fatal("a copy has a write that is not committed")
	}
	var durable nvme.SQE
	durable.SetOpcode(nvme.CmdKVDurable)
	durable.KVReplica().SetEpoch(3)
	durable.KVReplica().SetMark(1)
	r.Receive(0, 56, &durable, nil, 3)
	if answered() {
		t.Fatal("a copy has a write that is not committed")
	}
	for _, c := range commands {
		r.Completed(c.Tag, nvme.Success, 1, nil)
	}
	commands = nil
	if !answered() {
		t.Fatal("all is committed, and nothing is answered")
	}
}

// TestWhatAStoreIsAskedForMustBeSound if others can be asked in its place.
func TestWhatAStoreIsAskedForMustBeSound(t *testing.T) {
	role := headRole
	for n := range uint8(2) {
		role.NumOthers = n
		r, out := alone(t, role), Actions{}
		r.Read(testKey("key"), nil, 0, 1)
		r.Write(&Write{Op: kvstore.Put, Key: testKey("a"), Condition: kvstore.IfAbsent})
		r.Write(&Write{Op: kvstore.Put, Key: testKey("b")})
		r.Turn(&out)
		for i, q := range out.Requests {
			if want := n > 0 && i < 2; q.Sound != want || len(out.Requests) != 3 {
				t.Errorf("with %d others, request %d: %+v", n, i, q)
			}
		}
	}
}

// TestAWriteThatTheStoreCannotDoIsTriedAgain for a while: the store may know soon that something is lost. Until then
// the replica is no worse than before.
func TestAWriteThatTheStoreCannotDoIsTriedAgain(t *testing.T) {
	r, out := alone(t, repairRole), Actions{}
	forward(r, 1, 10)
	r.Turn(&out)
	now, tries := int64(1), 0
	for ; !r.Damaged() && now < 100*failingNS; now += retryNS {
		for _, q := range out.Requests {
			st := kvstore.OK
			if q.Op == kvstore.Put {
				st = kvstore.DeviceError
				tries++
			}
			r.Stored(&kvstore.Reply{Tag: q.Tag, Status: st})
		}
		out = Actions{}
		r.SetTime(now, testWall)
		r.Turn(&out)
	}
	if tries < 10 || now < failingNS || now > 2*failingNS {
		t.Errorf("after %d tries and %d ns the replica is damaged", tries, now)
	}
}
