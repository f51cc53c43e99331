package block_test

import (
	"errors"
	"testing"

	"jbofd/internal/bufpool"
	"jbofd/internal/drive"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/executor"
	"jbofd/internal/nvmeof/executor/block"
	"jbofd/internal/nvmeof/executor/executortest"
	"jbofd/internal/pipeline"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/fault"
	"jbofd/internal/ssd/mem"
	"jbofd/internal/units"
)

func subject(t testing.TB) *executortest.Subject {
	pool, err := bufpool.New(bufpool.Config{TotalBytes: executortest.PoolBytes})
	if err != nil {
		t.Fatal(err)
	}
	const size = executortest.Places * executortest.Bytes
	dev, err := mem.Open(mem.Config{Name: "m0", SizeBytes: size})
	if err != nil {
		t.Fatal(err)
	}
	gate := executortest.NewGate(dev)
	d, err := drive.New(drive.Config{Device: gate, Pool: pool, Depth: 4})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
		if err := gate.Close(); err != nil {
			t.Error(err)
		}
		pool.CloseTest(t)
	})
	ns := &nvmeof.Namespace{NSID: 1, SizeBytes: size, BlockShift: 9, ANAState: nvme.ANAStateOptimized}
	table := nvmeof.NewNamespaceTable([]*nvmeof.Namespace{ns}, "")
	plan := func(opcode uint8) func(c *executor.Command, place int) {
		return func(c *executor.Command, place int) {
			const blocks = executortest.Bytes >> 9
			c.SQE.SetOpcode(opcode)
			c.SQE.SetNSID(1)
			c.SQE.SetPSDT(nvme.PSDTSGL)
			c.SQE.SetSLBA(units.LBA(place * blocks))
			c.SQE.SetNLB(blocks)
			if st := nvmeof.PlanIO(c.SQE, table, nvmeof.Limits{MDTSBytes: 1 << 20, FusedBytes: 1 << 20},
				c.Plan); !st.OK() {
				t.Fatal(st)
			}
		}
	}
	written := func(place int) bool {
		q, err := dev.OpenQueue(1)
		if err != nil {
			t.Fatal(err)
		}
		defer q.Close()
		buf := make([]byte, executortest.Bytes)
		q.Submit([]ssd.Request{{Op: ssd.Read, Offset: int64(place * executortest.Bytes), Len: executortest.Bytes,
			Buf: buf}})
		var done [1]ssd.Completion
		if n := q.Poll(done[:]); n != 1 || done[0].Err != nil {
			t.Fatalf("%d reads, %v", n, done[0].Err)
		}
		return buf[0] != 0
	}
	return &executortest.Subject{Executor: block.New([]*drive.Drive{d}), Pool: pool, Write: plan(nvme.CmdWrite),
		Read:    plan(nvme.CmdRead),
		Written: written, Shut: gate.Shut, Open: gate.Open, Started: gate.Held}
}

func TestConformance(t *testing.T) { executortest.Conformance(t, subject) }

func TestCommandsAllocateNothing(t *testing.T) { executortest.AllocatesNothing(t, subject(t)) }

// outcome is a Port that reports when its command is done.
type outcome chan struct{}

func (o outcome) NeedData(*executor.Command) bool { panic("all data is here") }

func (o outcome) Done(*executor.Command) bool {
	close(o)
	return false
}

func (o outcome) Kick()    {}
func (o outcome) Deliver() {}

// TestAPairEndsWithTheStatusesOfBoth, in whichever half it fails.
func TestAPairEndsWithTheStatusesOfBoth(t *testing.T) {
	pool, err := bufpool.New(bufpool.Config{TotalBytes: executortest.PoolBytes})
	if err != nil {
		t.Fatal(err)
	}
	inner, err := mem.Open(mem.Config{Name: "m0", SizeBytes: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	dev, err := fault.New(inner, fault.Config{})
	if err != nil {
		t.Fatal(err)
	}
	d, err := drive.New(drive.Config{Device: dev, Pool: pool})
	if err != nil {
		t.Fatal(err)
	}
	account := pool.Account("tenant")
	e := block.New([]*drive.Drive{d})
	ns := &nvmeof.Namespace{NSID: 1, SizeBytes: 1 << 20, BlockShift: 9}
	failing := func(op ssd.Op) []fault.Rule { return []fault.Rule{{Ops: []ssd.Op{op}, Err: ssd.ErrMedia}} }
	for _, x := range []struct {
		name          string
		rules         []fault.Rule
		compare       byte
		first, second nvme.Status
	}{
		{"both succeed", nil, 0, nvme.Success, nvme.Success},
		{"the comparison differs", nil, 1, nvme.CompareFailure | nvme.DNR, nvme.AbortedFailedFused | nvme.DNR},
		{"the read fails", failing(ssd.Read), 0, nvme.WriteFault | nvme.DNR, nvme.AbortedFailedFused | nvme.DNR},
		{"the write fails", failing(ssd.Write), 0, nvme.Success, nvme.WriteFault | nvme.DNR},
	} {
		dev.SetRules(x.rules...)
		o := make(outcome)
		c := executor.Command{SQE: new(nvme.SQE), Plan: &nvmeof.Plan{Op: pipeline.CompareWrite, Namespace: ns, Len: 512,
			ToController: 512}, Port: o}
		c.Account, c.Context = account, e.NewContext(&c)
		c.Buf, _ = pool.Get(account, 1024)
		clear(c.Buf.B)
		c.Buf.B[3] = x.compare
		b := e.NewBatch()
		b.Begin(&c)
		b.Submit()
		<-o
		if c.FirstStatus != x.first || c.Status != x.second {
			t.Errorf("%s: the Compare %v, the Write %v; want %v, %v", x.name, c.FirstStatus, c.Status, x.first,
				x.second)
		}
		pool.Put(c.Buf)
	}
	account.Close()
	if err := errors.Join(d.Close(), dev.Close()); err != nil {
		t.Error(err)
	}
	pool.CloseTest(t)
}
