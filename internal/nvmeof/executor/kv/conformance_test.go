package kv_test

import (
	"encoding/binary"
	"testing"
	"time"

	"jbofd/internal/bufpool"
	"jbofd/internal/drive"
	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/executor"
	"jbofd/internal/nvmeof/executor/executortest"
	"jbofd/internal/nvmeof/executor/kv"
	"jbofd/internal/partition"
	"jbofd/internal/ssd/mem"
	"jbofd/internal/turn"
)

// asker sends Exist requests to a partition.
type asker struct {
	partition.Request
	done chan struct{}
}

func (a *asker) KVDone(*partition.Request) bool {
	a.done <- struct{}{}
	return false
}

func (a *asker) Kick() {}

// rig is an executor with one partition, on a drive whose device is controlled by a gate.
type rig struct {
	executortest.Subject
	ns *nvmeof.Namespace
}

// storeRequests is how many Requests the store of a rig processes at once.
const storeRequests = 16

func newRig(t testing.TB) *rig {
	pool, err := bufpool.New(bufpool.Config{TotalBytes: executortest.PoolBytes})
	if err != nil {
		t.Fatal(err)
	}
	const size = 256 << 20
	dev, err := mem.Open(mem.Config{Name: "m0", SizeBytes: size})
	if err != nil {
		t.Fatal(err)
	}
	gate := executortest.NewGate(dev)
	d, err := drive.New(drive.Config{Device: gate, Pool: pool})
	if err != nil {
		t.Fatal(err)
	}
	p, err := partition.Open(partition.Config{Drive: d, Background: 9,
		Store: kvstore.Config{PartitionBytes: size, Format: true, Requests: storeRequests}})
	if err != nil {
		t.Fatal(err)
	}
	e := kv.New(turn.Real, pool)
	ns := &nvmeof.Namespace{NSID: 1, CSI: nvme.CSIKV, SizeBytes: size, Partition: e.Add(p), MaxValueBytes: 1 << 20,
		ANAState: nvme.ANAStateOptimized}
	t.Cleanup(func() {
		e.Remove(ns.Partition) // idempotent
		if err := p.Close(30 * time.Second); err != nil {
			t.Error(err)
		}
		if err := d.Close(); err != nil {
			t.Error(err)
		}
		if err := gate.Close(); err != nil {
			t.Error(err)
		}
		pool.CloseTest(t)
	})
	table := nvmeof.NewNamespaceTable([]*nvmeof.Namespace{ns}, "")
	plan := func(opcode uint8) func(c *executor.Command, place int) {
		return func(c *executor.Command, place int) {
			c.SQE.SetOpcode(opcode)
			c.SQE.SetNSID(1)
			c.SQE.SetPSDT(nvme.PSDTSGL)
			var key [4]byte
			binary.BigEndian.PutUint32(key[:], uint32(place))
			c.SQE.KV().SetKey(key[:])
			c.SQE.KV().SetLenBytes(executortest.Bytes)
			if st := nvmeof.PlanIO(c.SQE, table, nvmeof.Limits{MDTSBytes: 1 << 20, FusedBytes: 1 << 20},
				c.Plan); !st.OK() {
				t.Fatal(st)
			}
		}
	}
	written := func(place int) bool {
		a := &asker{done: make(chan struct{}, 1)}
		a.Op, a.Tenant, a.Sink = kvstore.Exist, 1, a
		a.KeyLen = 4
		binary.BigEndian.PutUint32(a.Key[:], uint32(place))
		var b partition.Batch
		b.Add(&a.Request)
		p.Submit(&b)
		<-a.done
		return a.Status == kvstore.OK
	}
	return &rig{ns: ns, Subject: executortest.Subject{Executor: e, Pool: pool, Write: plan(nvme.CmdKVStore),
		Read: plan(nvme.CmdKVRetrieve), Written: written, Shut: gate.Shut, Open: gate.Open, Started: gate.Held}}
}

func subject(t testing.TB) *executortest.Subject { return &newRig(t).Subject }

func TestConformance(t *testing.T) { executortest.Conformance(t, subject) }

func TestCommandsAllocateNothing(t *testing.T) { executortest.AllocatesNothing(t, subject(t)) }
