package replica

import (
	"math"
	"slices"
	"testing"

	"jbofd/internal/crrs"
	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
)

// repairRole is that of a ChainTail behind node 0 and node 1, which is the ChainHead.
var repairRole = crrs.Role{Epoch: 3, Member: true, Since: 1, Predecessor: 0, Successor: crrs.NoPeer,
	ChainTail: crrs.NoPeer, NumOthers: 2, Others: [crrs.MaxOthers]crrs.Peer{0, 1}}

// copyRoles are those of a replica that is asked for a copy by node 2: for a repair of the member behind, and to fill
// it.
func copyRoles() map[string]crrs.Role {
	repairs, fills := repairRole, repairRole
	repairs.Successor, repairs.ChainTail, repairs.Others[0] = 2, 2, 2
	fills.Successor = 2
	return map[string]crrs.Role{"repair": repairs, "filling": fills}
}

// askForCopy asks a replica for a copy, by command 55.
func askForCopy(r *Replica) {
	var sqe nvme.SQE
	sqe.SetOpcode(nvme.CmdKVFetch)
	k := sqe.KVReplica()
	k.SetEpoch(3)
	k.SetBits(64)
	k.SetLenBytes(64 << 10)
	r.Receive(2, 55, &sqe, make([]byte, 64<<10), 3)
}

// storeForward forwards a write to a replica, which stores it and does not commit it. It returns the commands that this
// leads to.
func storeForward(t *testing.T, r *Replica) []Command {
	t.Helper()
	out := Actions{}
	forward(r, 1, 10)
	r.Turn(&out)
	if len(out.Requests) != 1 {
		t.Fatalf("%+v", out.Requests)
	}
	r.Stored(&kvstore.Reply{Tag: out.Requests[0].Tag, Version: out.Requests[0].Given})
	return out.Commands
}

// askedForACopy returns a replica that has a write which is not committed, and has read a copy of n bytes.
func askedForACopy(t *testing.T, role crrs.Role) (r *Replica, n int, commands []Command) {
	t.Helper()
	r = alone(t, role)
	askForCopy(r)
	out := Actions{}
	r.Turn(&out)
	if len(out.Requests) != 1 || out.Requests[0].Op != kvstore.CopyOut || !out.Requests[0].Background {
		t.Fatalf("%+v", out.Requests)
	}
	q := out.Requests[0]
	commands = storeForward(t, r)
	b := nvme.NewKVRange(q.Value, nvme.KVCopy, 0, math.MaxUint64, nvme.KVCursorAt(0, nil))
	b.SetTo(nvme.KVLastOf(math.MaxUint64))
	b.SetFlags(nvme.KVComplete)
	b.Seal()
	r.Stored(&kvstore.Reply{Tag: q.Tag, ValueLen: b.LenBytes()})
	return r, b.LenBytes(), commands
}

// TestACopyIsOfWhatIsCommitted: what the store had when it was read may be of a write that is not.
func TestACopyIsOfWhatIsCommitted(t *testing.T) {
	for name, role := range copyRoles() {
		t.Run(name, func(t *testing.T) { copyIsCommitted(t, role) })
	}
}

func copyIsCommitted(t *testing.T, role crrs.Role) {
	r, n, commands := askedForACopy(t, role)
	out := Actions{}
	answered := func() bool {
		out = Actions{}
		r.Turn(&out)
		commands = append(commands, out.Commands...)
		for _, a := range out.Responses {
			if a.Handle == 55 {
				if !a.Status.OK() || len(a.Data) != n {
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

// TestACopyWaitsWithoutABuffer: while writes that came before it are not committed it is not read, because other ranges
// need the buffer. After a second its asker may ask again.
func TestACopyWaitsWithoutABuffer(t *testing.T) {
	for name, role := range copyRoles() {
		t.Run(name, func(t *testing.T) {
			r := alone(t, role)
			storeForward(t, r)
			askForCopy(r)
			for now, turns := int64(1), 0; turns < 200; turns++ {
				out := Actions{}
				r.SetTime(now, testWall)
				if r.Turn(&out); len(out.Requests) > 0 {
					t.Fatalf("%+v", out.Requests)
				}
				for _, a := range out.Responses {
					if a.Handle == 55 {
						if a.Status != nvme.NamespaceNotReady || now < 1e9/2 || now > 2e9 {
							t.Errorf("after %d ns: %+v", now, a)
						}
						return
					}
				}
				if now = out.WakeNS; now == 0 {
					break
				}
			}
			t.Error("a copy that waits for a write has no answer")
		})
	}
}

// TestACopyIsNotHeldForLong: a write may not end for as long as its chain is held up, and a command that has
// no answer would end the connection of all ranges.
func TestACopyIsNotHeldForLong(t *testing.T) {
	r, _, _ := askedForACopy(t, copyRoles()["filling"])
	for now, turns := int64(1), 0; turns < 20; turns++ {
		out := Actions{}
		r.SetTime(now, testWall)
		r.Turn(&out)
		for _, a := range out.Responses {
			if a.Handle != 55 {
				continue
			}
			if a.Status != nvme.NamespaceNotReady || now < 1e9/2 || now > 2e9 {
				t.Errorf("after %d ns: %+v", now, a)
			}
			r.Turn(&out)
			if b := r.cfg.Batches.outs; len(b.free) != len(b.all) {
				t.Error("the buffer is not free")
			}
			return
		}
		if out.WakeNS <= now {
			break
		}
		now = out.WakeNS
	}
	t.Error("it has no answer")
}

// TestWhatAStoreIsAskedForMustBeSound if others can be asked in its place. A member that is left alone counts what it
// has been given since others have served beside it; one that was always alone has nothing else.
func TestWhatAStoreIsAskedForMustBeSound(t *testing.T) {
	for _, others := range [][]uint8{{0}, {1}, {1, 0}, {0, 0}, {1, 0, 0}, {1, 0, 1}, {2, 1}} {
		role := headRole
		role.NumOthers = others[0]
		r, out := alone(t, role), Actions{}
		want, beside := uint64(0), uint64(0)
		for i, n := range others {
			if i > 0 {
				role.Epoch, role.NumOthers = role.Epoch+1, n
				r.Adopt(role, 1)
			}
			switch {
			case n > 0 && want != math.MaxUint64:
				want, beside = math.MaxUint64, r.port.Replica().Version()
			case n == 0 && want == math.MaxUint64:
				want = beside
			}
		}
		r.Turn(&out)
		out = Actions{}
		if last := r.sound(&crrs.StoreOp{Key: testKey("key"), Last: true}); last == math.MaxUint64 ||
			want != math.MaxUint64 && last != want {
			t.Errorf("with %d others, at last what has a version above %d is sound", others, last)
		}
		r.Read(testKey("key"), nil, 0, 1)
		r.Write(&Write{Op: kvstore.Put, Key: testKey("a"), Condition: kvstore.IfAbsent})
		r.Write(&Write{Op: kvstore.Put, Key: testKey("b")})
		r.Turn(&out)
		for i, q := range out.Requests {
			sound := want
			if i == 2 {
				sound = 0
			}
			if q.Sound != sound || len(out.Requests) != 3 || q.Given != 0 && want != math.MaxUint64 && q.Given <= want {
				t.Errorf("with %d others, request %d: %+v, want %d", others, i, q, sound)
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
	if tries < 10 || tries > 50 || now < failingNS || now > 2*failingNS {
		t.Errorf("after %d tries and %d ns the replica is damaged", tries, now)
	}
}

// damagedStore is the store of a replica of which one segment is lost, and another node that has nothing of it.
// Requests get what answer says, if that is not nil.
type damagedStore struct {
	t   *testing.T
	r   *Replica
	out Actions
	now int64
	// asked are the requests that were answered with OK, in their order, events what became of repairs.
	asked  []kvstore.Request
	events []crrs.RepairOutcome
	answer func(q *kvstore.Request) kvstore.Status
	// fetch is the status of a Fetch.
	fetch func(to crrs.Peer) nvme.Status
}

func newDamagedStore(t *testing.T, role crrs.Role) *damagedStore {
	d := &damagedStore{t: t, r: alone(t, role), now: 1}
	d.answer = func(*kvstore.Request) kvstore.Status { return kvstore.OK }
	d.fetch = func(crrs.Peer) nvme.Status { return nvme.Success }
	d.turn()
	d.r.Read(testKey("k"), make([]byte, 100), 5, 77)
	d.r.cfg.FillShare, d.r.cfg.RestoreShare = 25, 25
	return d
}

// turn takes a turn some time later, and answers what it asks for.
func (d *damagedStore) turn() {
	d.now += retryNS
	d.r.SetTime(d.now, testWall)
	d.r.Turn(&d.out)
	o := d.out
	d.out = Actions{}
	for _, q := range o.Requests {
		p := kvstore.Reply{Tag: q.Tag, Status: d.answer(&q)}
		switch {
		case q.Op == kvstore.Get:
			p.Status = kvstore.Corrupt
		case q.Op == kvstore.Settle:
			p.Version, p.ValueLen = 7, 6
		}
		if p.Status == kvstore.OK {
			d.asked = append(d.asked, q)
		}
		d.r.Stored(&p)
	}
	for _, c := range o.Commands {
		st := nvme.NamespaceNotReady
		if c.SQE.Opcode() == nvme.CmdKVFetch {
			if st = d.fetch(c.To); d.r.shareOf(&c) != 100 {
				panic("the batch of a repair rests, while clients wait")
			}
		}
		if !st.OK() {
			d.r.Completed(c.Tag, st, 0, nil)
			continue
		}
		k := c.SQE.KVReplica()
		first := k.First() &^ (1<<k.Bits() - 1)
		last := first + (1<<k.Bits() - 1)
		b := nvme.NewKVRange(c.Buf, nvme.KVCopy, first, last, nvme.KVCursorAt(first, nil))
		b.SetTo(nvme.KVLastOf(last))
		b.SetFlags(nvme.KVComplete)
		b.Seal()
		d.r.Completed(c.Tag, nvme.Success, uint64(b.LenBytes()), c.Buf[:b.LenBytes()])
	}
	for _, e := range o.Repairs {
		d.events = append(d.events, e.Outcome)
	}
}

// did counts the requests of a kind that the store has carried out, Settles with a Version only.
func (d *damagedStore) did(op kvstore.Op) (n int) {
	for _, q := range d.asked {
		if q.Op == op && (op != kvstore.Settle || q.Version != 0) {
			n++
		}
	}
	return n
}

// TestALossIsSettledOnlyIfSomethingWasCopied, whatever keeps the store from taking the copy at first.
func TestALossIsSettledOnlyIfSomethingWasCopied(t *testing.T) {
	for name, st := range map[string]kvstore.Status{"too full": kvstore.OK, "NoMemory": kvstore.NoMemory,
		"Superseded": kvstore.Superseded, "CapacityExceeded": kvstore.CapacityExceeded} {
		t.Run(name, func(t *testing.T) {
			d := newDamagedStore(t, repairRole)
			refuse := true
			d.answer = func(q *kvstore.Request) kvstore.Status {
				if q.Op == kvstore.CopyIn && refuse {
					return st
				}
				return kvstore.OK
			}
			d.r.SetFull(true, name == "too full")
			for range 50 {
				d.turn()
			}
			if d.did(kvstore.Settle) > d.did(kvstore.CopyIn) {
				t.Fatal("the loss was settled, and nothing was copied in")
			}
			refuse = false
			d.r.SetFull(false, false)
			for range 50 {
				d.turn()
			}
			if d.did(kvstore.Settle) != 1 || d.did(kvstore.CopyIn) != 1 ||
				!slices.Equal(d.events, []crrs.RepairOutcome{crrs.RepairBegun, crrs.RepairDone}) {
				t.Errorf("%d Settles, %d CopyIns, repairs %v", d.did(kvstore.Settle), d.did(kvstore.CopyIn), d.events)
			}
			if left := d.r.Left(); left != "" {
				t.Error(left)
			}
		})
	}
}

// TestARepairWithoutRoomEnds: its batch is not stored later, when a Delete may have left no trace any more. In another
// epoch it ends as well, and begins again. A partition that is only too full to be filled takes it.
func TestARepairWithoutRoomEnds(t *testing.T) {
	for _, what := range []string{"time", "epoch", "too full"} {
		d := newDamagedStore(t, repairRole)
		d.answer = func(q *kvstore.Request) kvstore.Status {
			if q.Op == kvstore.CopyIn && what != "too full" {
				return kvstore.CapacityExceeded
			}
			return kvstore.OK
		}
		d.r.SetFull(true, true)
		for range 50 {
			d.turn()
		}
		want := []crrs.RepairOutcome{crrs.RepairBegun, crrs.RepairFailed}
		switch what {
		case "too full":
			want[1] = crrs.RepairDone
		case "time":
			for d.now < 11e9 {
				d.turn()
			}
		default:
			role := repairRole
			role.Epoch++
			d.r.Adopt(role, 1)
			d.answer = func(*kvstore.Request) kvstore.Status { return kvstore.OK }
			fetched := 0
			d.fetch = func(crrs.Peer) nvme.Status {
				fetched++
				return nvme.Success
			}
			for range 50 {
				d.turn()
			}
			if want = append(want[:1], crrs.RepairBegun, crrs.RepairDone); fetched != 1 || d.did(kvstore.CopyIn) != 1 {
				t.Errorf("in another epoch there were %d copies, of which %d were stored", fetched,
					d.did(kvstore.CopyIn))
			}
		}
		if left := d.r.Left(); left != "" || !slices.Equal(d.events, want) {
			t.Errorf("%s: repairs %v; %s", what, d.events, left)
		}
	}
}

// TestWhatTheCopierCannotReadIsAskedForSeldom: the member that is filled wakes for it, and takes what there is besides.
func TestWhatTheCopierCannotReadIsAskedForSeldom(t *testing.T) {
	role := crrs.Role{Epoch: 3, Member: true, Filling: true, Since: 3, Predecessor: 0, Successor: crrs.NoPeer,
		ChainTail: crrs.NoPeer, NumOthers: 1, Others: [crrs.MaxOthers]crrs.Peer{0}}
	r, out := alone(t, role), Actions{}
	var durable nvme.SQE
	durable.SetOpcode(nvme.CmdKVDurable)
	durable.KVReplica().SetEpoch(3)
	durable.KVReplica().SetClock(3 << 40)
	r.Receive(0, 56, &durable, nil, 3)
	compared, fetched := 0, 0
	for now, turns := int64(1), 0; now < 600e9; turns++ {
		r.SetTime(now, testWall)
		r.Turn(&out)
		o := out
		out = Actions{}
		for _, c := range o.Commands {
			st := nvme.Success
			switch c.SQE.Opcode() {
			case nvme.CmdKVCompare:
				compared++
				st = nvme.UnrecoveredReadError | nvme.DNR
			case nvme.CmdKVFetch:
				fetched++
				st = nvme.UnrecoveredReadError | nvme.DNR
			}
			r.Completed(c.Tag, st, 0, nil)
		}
		switch {
		case len(o.Commands) > 0:
		case o.WakeNS <= now:
			t.Fatalf("at %d ns the replica wants to wake at %d", now, o.WakeNS)
		default:
			now = o.WakeNS
		}
		if turns > 10000 {
			t.Fatalf("%d Compares and %d Fetches until %d ns", compared, fetched, now)
		}
	}
	if compared != 1+64 || fetched < 64 || fetched > 64*20 {
		t.Errorf("%d Compares and %d Fetches in ten minutes", compared, fetched)
	}
	if r.Complete() || r.Damaged() {
		t.Errorf("complete %v, damaged %v", r.Complete(), r.Damaged())
	}
}
