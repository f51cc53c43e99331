package kv_test

import (
	"fmt"
	"math"
	"testing"
	"time"

	"jbofd/internal/bufpool"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/executor"
	"jbofd/internal/nvmeof/executor/kv"
)

// issuer runs commands of one slot.
type issuer struct {
	*rig
	t       *testing.T
	e       *kv.Executor
	c       *executor.Command
	batch   executor.Batch
	port    *port
	table   *nvmeof.NamespaceTable
	account *bufpool.Account
}

func newIssuer(t *testing.T) *issuer {
	r := newRig(t)
	i := &issuer{rig: r, t: t, e: r.Executor.(*kv.Executor), port: &port{done: make(chan *executor.Command, 1)},
		table:   nvmeof.NewNamespaceTable([]*nvmeof.Namespace{r.ns}, ""),
		account: r.Pool.Account("tenant")}
	i.batch = i.e.NewBatch()
	i.c = &executor.Command{SQE: new(nvme.SQE), Plan: new(nvmeof.Plan), Port: i.port}
	i.c.Payer = executor.Payer{Account: i.account, Tenant: 1}
	i.c.Context = i.e.NewContext(i.c)
	t.Cleanup(i.account.Close)
	return i
}

// begin begins a command, whose data comes in the capsule.
func (i *issuer) begin(sqe nvme.SQE, data []byte) {
	i.t.Helper()
	sqe.SetNSID(1)
	sqe.SetPSDT(nvme.PSDTSGL)
	*i.c.SQE = sqe
	toController, toHost := nvme.DataDirection(sqe.Opcode())
	if nvme.KVExtended(sqe.Opcode()) { // as PlanIO does for a host to which they are granted
		n := sqe.KV().LenBytes()
		*i.c.Plan = nvmeof.Plan{Kind: nvmeof.KindKV, Namespace: i.ns, Wide: nvme.KVVersioned(sqe.Opcode())}
		if toController {
			i.c.Plan.ToController = n
		} else if toHost {
			i.c.Plan.ToHost, i.c.Plan.AnswerBytes = n, n
		}
	} else if st := nvmeof.PlanIO(i.c.SQE, i.table, nvmeof.Limits{MDTSBytes: 1 << 20, FusedBytes: 1 << 20},
		i.c.Plan); !st.OK() {
		i.t.Fatal(st)
	}
	if len(data) > 0 {
		i.c.Buf, _ = i.Pool.Get(i.account, len(data))
		copy(i.c.Buf.B, data)
	}
	i.batch.Begin(i.c)
	i.batch.Submit()
}

// end waits for the end of the command and returns its data.
func (i *issuer) end() (data []byte) {
	i.t.Helper()
	select {
	case <-i.port.done:
	case <-time.After(30 * time.Second):
		i.t.Fatal("the command does not end")
	}
	if !i.c.Buf.IsZero() {
		data = append(data, i.c.Buf.B[:i.c.AnswerBytes]...)
		i.Pool.Put(i.c.Buf)
		i.c.Buf = bufpool.Buf{}
	}
	return data
}

// read is a Scan, CopyOut, Count or Digest of all positions.
func read(opcode uint8, from nvme.KVCursor, n int) (e nvme.SQE) {
	e.SetOpcode(opcode)
	e.KVRange().SetFrom(from)
	e.KVRange().SetLast(math.MaxUint64)
	e.KVRange().SetLenBytes(uint32(n))
	return e
}

// TestAnAbortedRangeCommandEndsEarly with what it has read until then, so that neither an Abort nor the end of an
// association waits for all of it. Whoever goes on from there misses nothing.
func TestAnAbortedRangeCommandEndsEarly(t *testing.T) {
	i := newIssuer(t)
	const keys = 2000
	for n := range keys {
		var e nvme.SQE
		e.SetOpcode(nvme.CmdKVStore)
		e.KV().SetKey(fmt.Append(nil, "key", n))
		i.begin(e, nil)
		if i.end(); !i.c.Status.OK() {
			t.Fatal(i.c.Status)
		}
	}
	i.Shut()
	i.begin(read(nvme.CmdKVScan, nvme.KVCursor{}, 1<<20), nil)
	for deadline := time.Now().Add(30 * time.Second); i.Started() == 0; {
		if time.Now().After(deadline) {
			t.Fatal("nothing is read")
		}
	}
	if i.e.Abort(i.c) {
		t.Error("a Scan that is reading is taken out")
	}
	i.Open()
	b := nvme.KVRange(i.end())
	if err := b.Check(); !i.c.Status.OK() || err != nil || b.Complete() || b.Items() > keys/4 {
		t.Fatalf("%v, %v, %d objects, complete %t", i.c.Status, err, b.Items(), b.Complete())
	}
	found, requests := b.Items(), 1
	for !b.Complete() {
		i.begin(read(nvme.CmdKVScan, b.To(), 1<<20), nil)
		if b = i.end(); !i.c.Status.OK() || b.Check() != nil || i.c.Result != uint64(len(b)) {
			t.Fatalf("%v, %v", i.c.Status, b.Check())
		}
		found += b.Items()
		requests++
	}
	if found != keys || requests > 3 {
		t.Errorf("%d of %d keys in %d requests", found, keys, requests)
	}
}

// TestCommandsAfterARangeCommandForgetIt: a slot's state is that of its present command.
func TestCommandsAfterARangeCommandForgetIt(t *testing.T) {
	i := newIssuer(t)
	store := func(value string) {
		t.Helper()
		var e nvme.SQE
		e.SetOpcode(nvme.CmdKVStore)
		e.KV().SetKey([]byte("key"))
		e.KV().SetLenBytes(uint32(len(value)))
		i.begin(e, []byte(value))
		if i.end(); !i.c.Status.OK() {
			t.Fatal(i.c.Status)
		}
	}
	count := func() uint64 {
		t.Helper()
		i.begin(read(nvme.CmdKVCount, nvme.KVCursor{}, 128), nil)
		b := nvme.KVRange(i.end())
		if !i.c.Status.OK() || b.Check() != nil {
			t.Fatalf("%v, %v", i.c.Status, b.Check())
		}
		return b.Totals().Objects()
	}
	store("one")
	i.begin(read(nvme.CmdKVCopyOut, nvme.KVCursor{}, 4096), nil)
	batch := i.end()
	var drop nvme.SQE
	drop.SetOpcode(nvme.CmdKVDrop)
	drop.KVRange().SetLast(math.MaxUint64)
	drop.KVRange().SetClock(1 << 40)
	i.begin(drop, nil)
	if i.end(); !i.c.Status.OK() || i.c.Result != 1<<40 {
		t.Fatalf("%v, clock %#x", i.c.Status, i.c.Result)
	}
	if n := count(); n != 0 {
		t.Errorf("%d objects after a Drop", n)
	}
	store("two") // without the clock of the Drop as its version
	if n := count(); n != 1 {
		t.Errorf("%d objects after a Store", n)
	}
	var in nvme.SQE
	in.SetOpcode(nvme.CmdKVCopyIn)
	in.KV().SetLenBytes(uint32(len(batch)))
	i.begin(in, batch)
	if i.end(); i.c.Status != nvme.KVSuperseded|nvme.DNR || i.c.Result != 0 {
		t.Errorf("a copy of what was dropped: %v, %d applied", i.c.Status, i.c.Result)
	}
	batch[20] ^= 1
	i.begin(in, batch)
	if i.end(); i.c.Status != nvme.InvalidField|nvme.DNR {
		t.Errorf("a damaged batch: %v", i.c.Status)
	}
}
