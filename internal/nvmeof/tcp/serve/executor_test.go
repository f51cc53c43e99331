package serve_test

import (
	"bytes"
	"net"
	"sync"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/executor"
	"jbofd/internal/nvmeof/executor/executortest"
	"jbofd/internal/nvmeof/target"
	"jbofd/internal/pipeline"
)

// delayNSID is a namespace whose commands a third executor carries out.
const delayNSID = 7

func delayRig(t *testing.T) (*rig, *executortest.Delay) {
	t.Helper()
	const size = 1 << 20
	r := newRig(t, nil)
	d := executortest.NewDelay(r.Pool, size)
	r.Service.Register(executortest.KindDelay, d)
	r.State.Subsystems[0].Namespaces = append(r.State.Subsystems[0].Namespaces,
		&nvmeof.Namespace{NSID: delayNSID, Executor: executortest.KindDelay,
			SizeBytes: size, BlockShift: 12, ANAGroup: 1, ANAState: nvme.ANAStateOptimized})
	r.Service.Apply(r.State)
	return r, d
}

// delayCommand reads or writes blocks, delayUS microseconds after the command has its buffer and data.
func delayCommand(opcode uint8, lba uint64, blocks, delayUS uint32) nvme.SQE {
	var c client.Command
	client.SetRW(&c, opcode, delayNSID, lba, blocks)
	c.SQE.SetCDW(15, delayUS)
	return c.SQE
}

// TestAThirdExecutorServesAConnection, whose code does not know it: data in-capsule, by R2T and to the host, beside
// blocks.
func TestAThirdExecutorServesAConnection(t *testing.T) {
	r, d := delayRig(t)
	c := connect(t, client.Options{Address: r.address})
	n := namespace(t, c, 1)
	blocks := bytes.Repeat([]byte{9}, blockBytes)
	if _, err := n.WriteAt(t.Context(), blocks, 0, 0); err != nil {
		t.Fatal(err)
	}
	if n := d.Contexts(); n != 0 {
		t.Errorf("a connection that has never used the executor has %d contexts of it", n)
	}
	host := kvHost(t, c)
	for _, x := range []struct {
		lba    uint64
		blocks uint32
	}{{0, 1}, {3, 16}, {100, 100}} {
		want := bytes.Repeat([]byte{byte(x.blocks)}, int(x.blocks)*blockBytes)
		const delay = 20_000
		began := time.Now()
		if _, st := host(delayCommand(nvme.CmdWrite, x.lba, x.blocks, delay), want); !st.OK() {
			t.Fatal(st)
		}
		if took := time.Since(began); took < delay*time.Microsecond {
			t.Errorf("a write took %v, less than it was asked to", took)
		}
		got := make([]byte, len(want))
		if _, st := host(delayCommand(nvme.CmdRead, x.lba, x.blocks, 0), got); !st.OK() || !bytes.Equal(got, want) {
			t.Errorf("%d blocks: %v, or other data than was written", x.blocks, st)
		}
		if d.Byte(int64(x.lba)*blockBytes) != byte(x.blocks) {
			t.Error("the executor has other data")
		}
	}
	got := make([]byte, blockBytes)
	if _, err := n.ReadAt(t.Context(), got, 0); err != nil || !bytes.Equal(got, blocks) {
		t.Errorf("the drive's own blocks: %v", err)
	}
	if _, st := host(delayCommand(nvme.CmdRead, 256, 1, 0), got); st.Code() != nvme.LBAOutOfRange {
		t.Errorf("beyond the end: %v", st)
	}
}

// TestCommandsOfAThirdExecutorAreAborted, or complete, as all others do.
func TestCommandsOfAThirdExecutorAreAborted(t *testing.T) {
	r, d := delayRig(t)
	d.Shut()
	c, q, err := open(r.address, 32)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	var cmds []client.Command
	for i := range 32 {
		cmds = append(cmds, client.Command{SQE: delayCommand(nvme.CmdRead, 0, 1, 1), Data: make([]byte, blockBytes),
			Tag: uint64(i)})
	}
	if n, err := q.Submit(cmds); n != len(cmds) {
		t.Fatalf("submitted %d: %v", n, err)
	}
	await(t, "some have started", func() bool { return d.Started() == 4 })
	aborted := 0
	for i := range uint16(4 * len(cmds)) { // the client's identifiers: six bits of generation, ten of slot
		var e nvme.SQE
		e.SetOpcode(nvme.AdminAbort)
		e.Abort().SetSQID(1)
		e.Abort().SetCID(i%4<<10 | i/4)
		comp, err := c.AdminPassthru(t.Context(), e, nil)
		if err != nil {
			t.Fatal(err)
		}
		if comp.Result&nvme.AbortNotDone == 0 {
			aborted++
		}
	}
	if aborted != len(cmds)-4 {
		t.Errorf("%d are aborted, all but 4 wait", aborted)
	}
	d.Open()
	comps := make([]client.Completion, len(cmds))
	seen := map[nvme.Status]int{}
	for done := 0; done < len(cmds); {
		n, err := q.Poll(comps, 10*time.Second)
		if err != nil || n == 0 {
			t.Fatalf("%d of %d are done: %v", done, len(cmds), err)
		}
		done += n
		for _, c := range comps[:n] {
			seen[c.Status.Code()]++
		}
	}
	if seen[nvme.AbortRequested] != aborted || seen[nvme.Success] != len(cmds)-aborted {
		t.Errorf("answers: %v, %d were aborted", seen, aborted)
	}
}

// TestAConnectionWaitsForAThirdExecutor: a connection closes with commands in flight.
func TestAConnectionWaitsForAThirdExecutor(t *testing.T) {
	r, d := delayRig(t)
	d.Shut()
	c, q, err := open(r.address, 32)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	var cmds []client.Command
	for range 32 {
		cmds = append(cmds, client.Command{SQE: delayCommand(nvme.CmdRead, 0, 1, 0), Data: make([]byte, blockBytes)})
	}
	if n, err := q.Submit(cmds); n != len(cmds) {
		t.Fatalf("submitted %d: %v", n, err)
	}
	await(t, "some have started", func() bool { return d.Started() == 4 })
	closed := make(chan struct{})
	go func() {
		r.server.Close()
		close(closed)
	}()
	await(t, "what has not started has given its memory back",
		func() bool { return inUse(r.Pool) <= 4*blockBytes+128<<10 })
	select {
	case <-closed:
		t.Error("the server is closed while the executor has commands")
	default:
	}
	d.Open()
	<-closed
}

// TestAKindWithoutItsExecutor: its commands fail.
func TestAKindWithoutItsExecutor(t *testing.T) {
	r := newRig(t, nil)
	r.State.Subsystems[0].Namespaces = append(r.State.Subsystems[0].Namespaces,
		&nvmeof.Namespace{NSID: delayNSID, Executor: executortest.KindDelay,
			SizeBytes: 1 << 20, BlockShift: 12, ANAGroup: 1, ANAState: nvme.ANAStateOptimized})
	r.Service.Apply(r.State)
	host := kvHost(t, connect(t, client.Options{Address: r.address, MaxRetries: -1}))
	for _, blocks := range []uint32{1, 64} {
		if _, st := host(delayCommand(nvme.CmdWrite, 0, blocks, 0),
			make([]byte, blocks*blockBytes)); st != nvme.InvalidOpcode|nvme.DNR {
			t.Errorf("a write of %d blocks: %v", blocks, st)
		}
	}
}

// TestAWriteIsValidatedAgainWhenItsDataArrives: its namespace has been removed meanwhile.
func TestAWriteIsValidatedAgainWhenItsDataArrives(t *testing.T) {
	r := newRig(t, nil)
	q := r.raw(t).queue(1)
	var e nvme.SQE
	e.SetOpcode(nvme.CmdWrite)
	e.SetNSID(1)
	e.SetNLB(1)
	cid := q.sendToFetch(e, blockBytes)
	if err := q.receive(); err != nil || len(q.r2ts) != 1 {
		t.Fatalf("%d R2Ts, %v", len(q.r2ts), err)
	}
	all := r.State.Subsystems[0].Namespaces
	r.State.Subsystems[0].Namespaces = nil
	r.Service.Apply(r.State)
	q.answer(9)
	if e := q.wait(cid); e.Status().Code() != nvme.InvalidNamespaceOrFormat {
		t.Errorf("a write to a namespace that is gone: %v", e.Status())
	}
	r.State.Subsystems[0].Namespaces = all
	r.Service.Apply(r.State)
	if got := r.blocks(t, 1); got[0] != 0 {
		t.Errorf("the block is %d", got[0])
	}
}

// slowToSubmit is a third executor whose first Submit closes entered and waits for goOn.
type slowToSubmit struct {
	*executortest.Delay
	once          sync.Once
	entered, goOn chan struct{}
}

func (s *slowToSubmit) NewBatch() executor.Batch { return &slowBatch{s.Delay.NewBatch(), s} }

type slowBatch struct {
	executor.Batch
	s *slowToSubmit
}

func (b *slowBatch) Submit() {
	b.s.once.Do(func() {
		close(b.s.entered)
		<-b.s.goOn
	})
	b.Batch.Submit()
}

// corked is a connection that collects what the host sends until send is called.
type corked struct {
	net.Conn
	b []byte
}

func (c *corked) Write(b []byte) (int, error) {
	c.b = append(c.b, b...)
	return len(b), nil
}

// TestAShutdownAbortsCommandsBeingHandedOver: the commands have begun, and their drive does not have them yet. They
// must not then wait for their tenant's cap.
func TestAShutdownAbortsCommandsBeingHandedOver(t *testing.T) {
	const size = 1 << 20
	r := newRig(t, nil)
	s := &slowToSubmit{Delay: executortest.NewDelay(r.Pool, size), entered: make(chan struct{}),
		goOn: make(chan struct{})}
	r.Service.Register(executortest.KindDelay, s)
	r.State.Subsystems[0].Namespaces = append(r.State.Subsystems[0].Namespaces,
		&nvmeof.Namespace{NSID: delayNSID, Executor: executortest.KindDelay,
			SizeBytes: size, BlockShift: 12, ANAGroup: 1, ANAState: nvme.ANAStateOptimized})
	r.Service.Apply(r.State)
	r.Service.SetTenants([]target.TenantConfig{{Name: "capped", Hosts: []string{rawNQN},
		Settings: pipeline.Settings{Weight: 1, Caps: pipeline.Caps{RWIOsPerSec: 1}}}})
	h := r.raw(t)
	q := h.queue(1)
	cork := &corked{Conn: q.c}
	q.c = cork
	q.send(delayCommand(nvme.CmdVerify, 0, 1, 0), nil)
	for range 40 {
		e := half(nvme.FuseNone, 0)
		e.SetOpcode(nvme.CmdVerify)
		q.send(e, nil)
	}
	q.c = cork.Conn
	q.write(cork.b) // in one piece, so that the target hands them over together
	<-s.entered
	shut := make(chan struct{})
	go func() {
		h.setCC(rawEnable.WithSHN(nvme.SHNNormal))
		close(shut)
	}()
	select {
	case <-shut:
	case <-time.After(50 * time.Millisecond): // the shutdown may wait until they are handed over
	}
	close(s.goOn)
	<-shut
	h.awaitCSTS("the end of the shutdown", func(s nvme.CSTS) bool { return s.SHST() == 2 || s.CFS() })
	if got := h.csts(); got.CFS() {
		t.Errorf("CSTS %#x: the shutdown has waited for a cap", uint32(got))
	}
}
