package serve_test

import (
	"bytes"
	"context"
	"testing"
	"time"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/target"
	"jbofd/internal/nvmeof/tcp/pdu"
	"jbofd/internal/pipeline"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/fault"
	"jbofd/internal/ssd/mem"
	"jbofd/internal/units"
)

// oldBlocks is the number of blocks that the tests write twice.
const oldBlocks = 32

// heldRig is a target whose drive holds some writes until the test releases them.
func heldRig(t *testing.T, rules ...fault.Rule) (*rig, *fault.Device) {
	t.Helper()
	m, err := mem.Open(mem.Config{Name: "m0", SizeBytes: testBytes})
	if err != nil {
		t.Fatal(err)
	}
	dev, err := fault.New(m, fault.Config{})
	if err != nil {
		t.Fatal(err)
	}
	r := newRigOf(t, nil, dev)
	t.Cleanup(func() {
		dev.SetRules()
		dev.Release()
	})
	dev.SetRules(rules...)
	return r, dev
}

// everyOther holds writes of the even blocks among the first n.
func everyOther(n int) (rules []fault.Rule) {
	for i := 0; i < n; i += 2 {
		rules = append(rules, fault.Rule{Ops: []ssd.Op{ssd.Write}, Offset: int64(i) * blockBytes, Len: blockBytes,
			Hold: true})
	}
	return rules
}

func awaitHeld(t *testing.T, dev *fault.Device, n int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
	defer cancel()
	if err := dev.AwaitHeld(ctx, n); err != nil {
		t.Fatal(err)
	}
}

// writeAll writes the blocks and returns the commands' identifiers.
func writeAll(q *rawQueue, fill byte) (cids []uint16) {
	for i := range units.LBA(oldBlocks) {
		cids = append(cids, q.writeBlock(i, fill))
	}
	return cids
}

// newWritesStay writes all blocks on a new queue. They keep what was written when the drive lets go of all writes.
func (h *rawHost) newWritesStay(dev *fault.Device) {
	h.t.Helper()
	q := h.queue(1)
	for _, cid := range writeAll(q, 'n') {
		if e := q.wait(cid); !e.Status().OK() {
			h.t.Fatalf("write: %v", e.Status())
		}
	}
	dev.Release()
	if got := h.r.blocks(h.t, oldBlocks); !bytes.Equal(got, bytes.Repeat([]byte{'n'}, oldBlocks)) {
		h.t.Errorf("blocks read %q: earlier writes have overwritten newer ones", got)
	}
}

// TestOldWritesNeverLandAfterAReset: RDY becomes 0 only when no earlier write can overwrite what the host writes after
// it has enabled the controller again.
func TestOldWritesNeverLandAfterAReset(t *testing.T) {
	t.Parallel()
	r, dev := heldRig(t, everyOther(oldBlocks)...)
	h := r.raw(t)
	writeAll(h.queue(1), 'o')
	awaitHeld(t, dev, oldBlocks/2)
	h.setCC(rawEnable.WithEN(false))
	if got := h.csts(); !got.RDY() || got.CFS() {
		t.Errorf("CSTS %#x while writes are at the drive, want RDY", uint32(got))
	}
	dev.SetRules()
	time.AfterFunc(100*time.Millisecond, dev.Release)
	h.awaitCSTS("RDY 0", func(s nvme.CSTS) bool { return !s.RDY() })
	h.setCC(rawEnable)
	h.newWritesStay(dev)
}

// TestOldWritesNeverLandAfterALostConnection: a host that has lost its connections cannot connect again while its old
// writes are at the drive.
func TestOldWritesNeverLandAfterALostConnection(t *testing.T) {
	t.Parallel()
	r, dev := heldRig(t, everyOther(oldBlocks)...)
	h := r.raw(t)
	io := h.queue(1)
	writeAll(io, 'o')
	awaitHeld(t, dev, oldBlocks/2)
	h.lose(io)
	dev.SetRules()
	time.AfterFunc(100*time.Millisecond, dev.Release)
	if s := h.connectAdmin(0); !s.OK() {
		t.Fatalf("Connect after the loss: %v", s)
	}
	h.setCC(rawEnable)
	h.newWritesStay(dev)
}

// TestShutdownDrainsAndFlushes: SHST is 01b until the writes at the drive are done and the drive is flushed, and the
// old queue accepts no more writes.
func TestShutdownDrainsAndFlushes(t *testing.T) {
	t.Parallel()
	r, dev := heldRig(t, fault.Rule{Ops: []ssd.Op{ssd.Write}, Len: blockBytes, Hold: true},
		fault.Rule{Ops: []ssd.Op{ssd.Flush}, Hold: true})
	h := r.raw(t)
	q := h.queue(1)
	first := q.writeBlock(0, 'a')
	awaitHeld(t, dev, 1)
	h.setCC(rawEnable.WithSHN(nvme.SHNNormal))
	if got := h.csts(); got.SHST() != 1 {
		t.Errorf("SHST %d while a write is at the drive, want 1", got.SHST())
	}
	if e := q.wait(q.writeBlock(1, 'b')); e.Status() != nvme.AbortedSQDeletion {
		t.Errorf("a write after SHN: %v, want %v", e.Status(), nvme.AbortedSQDeletion)
	}
	dev.Release()
	if e := q.wait(first); !e.Status().OK() {
		t.Errorf("the write at the drive: %v", e.Status())
	}
	awaitHeld(t, dev, 1) // the flush
	if got := h.csts(); got.SHST() != 1 {
		t.Errorf("SHST %d before the drive is flushed, want 1", got.SHST())
	}
	dev.SetRules()
	dev.Release()
	h.awaitCSTS("SHST 2", func(s nvme.CSTS) bool { return s.SHST() == 2 })
	if e := q.wait(q.writeBlock(2, 'c')); e.Status() != nvme.AbortedSQDeletion {
		t.Errorf("a write after the shutdown: %v, want %v", e.Status(), nvme.AbortedSQDeletion)
	}
	if got := r.blocks(t, 3); got[0] != 'a' || got[1] != 0 || got[2] != 0 {
		t.Errorf("blocks %q, want a and two zeroes", got)
	}
}

// TestDisconnectIsAnsweredAfterTheDrain: a host that has received the response may use the queue's number again at
// once.
func TestDisconnectIsAnsweredAfterTheDrain(t *testing.T) {
	t.Parallel()
	r, dev := heldRig(t, fault.Rule{Ops: []ssd.Op{ssd.Write}, Len: blockBytes, Hold: true})
	h := r.raw(t)
	q := h.queue(1)
	first := q.writeBlock(0, 'a')
	awaitHeld(t, dev, 1)
	var e nvme.SQE
	e.InitDisconnect()
	bye := q.send(e, nil)
	// The write sent after Disconnect may have begun before it. It must not hang.
	if e := q.wait(q.writeBlock(1, 'b')); !e.Status().OK() && e.Status() != nvme.AbortedSQDeletion {
		t.Errorf("a write behind Disconnect: %v", e.Status())
	}
	if q.answeredByNow(bye) {
		t.Error("Disconnect is answered while a write is at the drive")
	}
	dev.SetRules()
	dev.Release()
	if e := q.wait(bye); !e.Status().OK() {
		t.Errorf("Disconnect: %v", e.Status())
	}
	if !q.answered(first) {
		t.Error("Disconnect is answered before the write")
	}
	h.queue(1)
	q.ended()
}

// TestEachDisconnectIsAnswered: a second one, while the first waits for the drive, is out of sequence, and does not
// keep the first from being answered.
func TestEachDisconnectIsAnswered(t *testing.T) {
	t.Parallel()
	r, dev := heldRig(t, fault.Rule{Ops: []ssd.Op{ssd.Write}, Hold: true})
	host := r.raw(t)
	q := host.queue(1)
	w := q.writeBlock(0, 'a')
	awaitHeld(t, dev, 1)
	var e nvme.SQE
	e.InitDisconnect()
	first, second := q.send(e, nil), q.send(e, nil)
	if e := q.wait(second); e.Status().Code() != nvme.CommandSequenceError {
		t.Errorf("the second Disconnect: %v, want %v", e.Status(), nvme.CommandSequenceError)
	}
	if q.answeredByNow(first) {
		t.Error("Disconnect is answered while a write is at the drive")
	}
	dev.SetRules()
	dev.Release()
	if e := q.wait(w); !e.Status().OK() {
		t.Errorf("the write: %v", e.Status())
	}
	if e := q.wait(first); !e.Status().OK() {
		t.Errorf("the first Disconnect: %v", e.Status())
	}
}

// TestADriveThatNeverAnswers: a reset that cannot complete sets CFS after its bound, the next Connect of the host is
// answered Controller Busy, other hosts are served, and the host can connect again once the drive answers.
func TestADriveThatNeverAnswers(t *testing.T) {
	t.Parallel()
	r, dev := heldRig(t, fault.Rule{Ops: []ssd.Op{ssd.Write}, Len: blockBytes, Hold: true})
	h := r.raw(t)
	io := h.queue(1)
	io.writeBlock(0, 'o')
	awaitHeld(t, dev, 1)
	h.setCC(rawEnable.WithEN(false))
	h.awaitCSTS("CFS 1", nvme.CSTS.CFS)
	if !h.csts().RDY() {
		t.Error("RDY is 0 while a write is at the drive")
	}
	h.lose(io)
	if s := h.connectAdmin(0); s != nvme.ConnectControllerBusy {
		t.Errorf("Connect while the write is at the drive: %v, want %v", s, nvme.ConnectControllerBusy)
	}
	r.blocks(t, 1) // another host
	dev.SetRules()
	dev.Release()
	late := time.Now().Add(testTimeout)
	for s := h.connectAdmin(0); !s.OK(); s = h.connectAdmin(0) {
		if s != nvme.ConnectControllerBusy || time.Now().After(late) {
			t.Fatalf("Connect after the drive has answered: %v", s)
		}
	}
	h.setCC(rawEnable)
	q := h.queue(1)
	if e := q.wait(q.writeBlock(0, 'n')); !e.Status().OK() {
		t.Errorf("write: %v", e.Status())
	}
	if got := r.blocks(t, 1); got[0] != 'n' {
		t.Errorf("block reads %q, want n", got)
	}
}

// TestAHeldConnectEndsWithItsConnection: a host that gives up leaves nothing behind.
func TestAHeldConnectEndsWithItsConnection(t *testing.T) {
	t.Parallel()
	r, dev := heldRig(t, fault.Rule{Ops: []ssd.Op{ssd.Write}, Len: blockBytes, Hold: true})
	h := r.raw(t)
	io := h.queue(1)
	io.writeBlock(0, 'o')
	awaitHeld(t, dev, 1)
	h.lose(io)
	for range 20 { // more than can be held for one host at a time
		q := h.dial()
		h.sendConnect(q, 0, 0)
		_ = q.c.Close()
	}
	await(t, "the end of those that have given up",
		func() bool { conns, _, _ := r.Service.Counts(); return conns == 1 })
	last := h.dial()
	cid := h.sendConnect(last, 0, 0)
	await(t, "one connection that waits, and the one that drains", func() bool {
		conns, controllers, _ := r.Service.Counts()
		return conns == 2 && controllers == 0
	})
	dev.SetRules()
	dev.Release()
	if e := last.wait(cid); !e.Status().OK() {
		t.Errorf("the Connect that was held: %v", e.Status())
	}
	await(t, "one connection", func() bool {
		conns, controllers, _ := r.Service.Counts()
		return conns == 1 && controllers == 1
	})
}

// TestAssociationsOnOtherPathsContinue: the end of one association of a host does not touch another.
func TestAssociationsOnOtherPathsContinue(t *testing.T) {
	t.Parallel()
	r, dev := heldRig(t, fault.Rule{Ops: []ssd.Op{ssd.Write}, Len: blockBytes, Hold: true})
	one, two := r.raw(t), r.raw(t)
	io, other := one.queue(1), two.queue(1)
	io.writeBlock(0, 'o')
	awaitHeld(t, dev, 1)
	one.lose(io)
	if e := other.wait(other.writeBlock(1, 'x')); !e.Status().OK() {
		t.Errorf("a write on the other path: %v", e.Status())
	}
	q := two.queue(2)
	if e := q.wait(q.writeBlock(2, 'x')); !e.Status().OK() {
		t.Errorf("a write on a new queue of the other path: %v", e.Status())
	}
	if s := two.csts(); !s.RDY() || s.CFS() {
		t.Errorf("the other path's CSTS is %#x", uint32(s))
	}
}

// TestAnExpiredAssociationIsFenced: the host is silent on both queues while its write is at the drive.
func TestAnExpiredAssociationIsFenced(t *testing.T) {
	t.Parallel()
	r, dev := heldRig(t, everyOther(oldBlocks)...)
	h := r.rawIdle(t)
	if s := h.connectAdmin(1000); !s.OK() {
		t.Fatal(s)
	}
	h.setCC(rawEnable)
	io := h.queue(1)
	writeAll(io, 'o')
	awaitHeld(t, dev, oldBlocks/2)
	h.admin.ended() // the keep alive timer
	cid, q := uint16(0), h.dial()
	cid = h.sendConnect(q, 0, 0)
	dev.SetRules()
	time.AfterFunc(50*time.Millisecond, dev.Release)
	e := q.wait(cid)
	if !e.Status().OK() {
		t.Fatalf("Connect: %v", e.Status())
	}
	h.admin, h.cntlid = q, e.ConnectCNTLID()
	h.setCC(rawEnable)
	h.newWritesStay(dev)
}

// TestDisconnectIsAnsweredWhenAShutdownComes: it waits for a write whose data the host has not sent. After the shutdown
// this write can no longer reach the drive, so there is nothing to wait for.
func TestDisconnectIsAnsweredWhenAShutdownComes(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	h := r.raw(t)
	q := h.queue(1)
	q.sendToFetch(half(nvme.FuseNone, 0), blockBytes)
	for len(q.r2ts) == 0 {
		if err := q.receive(); err != nil {
			t.Fatal(err)
		}
	}
	var e nvme.SQE
	e.InitDisconnect()
	bye, sent := q.send(e, nil), time.Now()
	for e := q.wait(q.writeBlock(1, 'b')); e.Status() != nvme.AbortedSQDeletion; e = q.wait(q.writeBlock(1, 'b')) {
		if !e.Status().OK() {
			t.Fatalf("a write behind Disconnect: %v", e.Status())
		}
	}
	if q.answeredByNow(bye) {
		t.Error("Disconnect is answered while the host owes data")
	}
	h.setCC(rawEnable.WithSHN(nvme.SHNNormal))
	if e := q.wait(bye); !e.Status().OK() || time.Since(sent) >= quiesceMS*time.Millisecond {
		t.Errorf("Disconnect: %v after %v, which is the bound", e.Status(), time.Since(sent))
	}
	q.ended()
}

// TestAFlushThatFailsFailsTheShutdown: SHST never says that the shutdown is complete.
func TestAFlushThatFailsFailsTheShutdown(t *testing.T) {
	t.Parallel()
	r, dev := heldRig(t, fault.Rule{Ops: []ssd.Op{ssd.Flush}, Err: ssd.ErrMedia})
	h := r.raw(t)
	h.setCC(rawEnable.WithSHN(nvme.SHNAbrupt))
	h.awaitCSTS("CFS 1", nvme.CSTS.CFS)
	if s := h.csts(); s.SHST() != 1 {
		t.Errorf("SHST %d", s.SHST())
	}
	dev.SetRules()
	h.setCC(0)
	h.setCC(rawEnable)
	if s := h.csts(); s != nvme.CSTSRDY {
		t.Errorf("CSTS %#x after a reset", uint32(s))
	}
}

// TestADisconnectThatCannotEndIsAnsweredAfterTheBound: with an error, and the write completes later.
func TestADisconnectThatCannotEndIsAnsweredAfterTheBound(t *testing.T) {
	t.Parallel()
	r, dev := heldRig(t, fault.Rule{Ops: []ssd.Op{ssd.Write}, Len: blockBytes, Hold: true})
	h := r.raw(t)
	q := h.queue(1)
	q.writeBlock(0, 'a')
	awaitHeld(t, dev, 1)
	var e nvme.SQE
	e.InitDisconnect()
	if e := q.do(e); e.Status() != nvme.InternalError {
		t.Errorf("Disconnect: %v, want %v", e.Status(), nvme.InternalError)
	}
	q.ended()
	dev.SetRules()
	dev.Release()
	await(t, "the queue's end", func() bool { conns, _, _ := r.Service.Counts(); return conns == 1 })
	h.queue(1)
}

// TestRemovalAbortsWaitingCommands: a namespace is removed while one of its writes is at the drive and others wait for
// a tenant's cap. The waiting ones end at once with Invalid Namespace or Format. The drive has drained when the first
// one is done.
func TestRemovalAbortsWaitingCommands(t *testing.T) {
	t.Parallel()
	r, dev := heldRig(t, fault.Rule{Ops: []ssd.Op{ssd.Write}, Len: blockBytes, Hold: true})
	h := r.raw(t)
	q := h.queue(1)
	first := q.writeBlock(0, 'o')
	awaitHeld(t, dev, 1)
	r.Service.SetTenants([]target.TenantConfig{{Name: "capped", Hosts: []string{rawNQN},
		Settings: pipeline.Settings{Weight: 1, Caps: pipeline.Caps{RWIOsPerSec: 1}}}})
	var waiting []uint16
	for i := range units.LBA(8) {
		waiting = append(waiting, q.writeBlock(1+i, 'x'))
	}
	await(t, "writes that wait", func() bool { return r.Service.SSD(0).Stats().Queued.Load() >= 4 })
	r.State.Subsystems[0].Namespaces = nil
	r.Service.Apply(r.State)
	for _, cid := range waiting {
		if e := q.wait(cid); !e.Status().OK() && e.Status() != nvme.InvalidNamespaceOrFormat|nvme.DNR {
			t.Errorf("a write that waited: %v", e.Status())
		}
	}
	stop := make(chan struct{})
	close(stop)
	if err := r.Service.DrainDrive(r.Service.SSD(0), stop); err != target.ErrStopped {
		t.Errorf("drained with a write at the drive: %v", err)
	}
	dev.SetRules()
	dev.Release()
	if err := r.Service.DrainDrive(r.Service.SSD(0), nil); err != nil {
		t.Error(err)
	}
	if e := q.wait(first); !e.Status().OK() {
		t.Errorf("the write at the drive: %v", e.Status())
	}
}

// TestAReconnectWaitsForTheStoresInFlight: a Store that a partition has begun is waited for, like a write that the
// drive has. What the host stores afterwards is not overwritten.
func TestAReconnectWaitsForTheStoresInFlight(t *testing.T) {
	t.Parallel()
	r, dev := heldRig(t)
	r.realKV(t)
	t.Cleanup(func() { // before the partition's end
		dev.SetRules()
		dev.Release()
	})
	kvCC := rawEnable.WithCSS(nvme.CCCSSIOCS)
	h := r.rawIdle(t)
	store := func(q *rawQueue, value byte) uint16 {
		var e nvme.SQE
		e.SetOpcode(nvme.CmdKVStore)
		e.SetNSID(kvNSID)
		e.KV().SetKey([]byte("key"))
		e.KV().SetLenBytes(100)
		data := bytes.Repeat([]byte{value}, 100)
		return q.send(e, data)
	}
	if s := h.connectAdmin(0); !s.OK() {
		t.Fatal(s)
	}
	h.setCC(kvCC)
	q := h.queue(1)
	dev.SetRules(fault.Rule{Ops: []ssd.Op{ssd.Write}, Hold: true})
	store(q, 'o')
	awaitHeld(t, dev, 1)
	h.lose(q)
	again := h.dial()
	cid := h.sendConnect(again, 0, 0)
	await(t, "the end of the association",
		func() bool { _, controllers, _ := r.Service.Counts(); return controllers == 0 })
	if again.answeredByNow(cid) {
		t.Error("the host is let in while its Store is under way")
	}
	dev.SetRules()
	dev.Release()
	e := again.wait(cid)
	if !e.Status().OK() {
		t.Fatalf("Connect: %v", e.Status())
	}
	h.admin, h.cntlid = again, e.ConnectCNTLID()
	h.setCC(kvCC)
	q = h.queue(1)
	if e := q.wait(store(q, 'n')); !e.Status().OK() {
		t.Errorf("Store: %v", e.Status())
	}
	var get nvme.SQE
	get.SetOpcode(nvme.CmdKVRetrieve)
	get.SetNSID(kvNSID)
	get.KV().SetKey([]byte("key"))
	get.SGL().SetType(nvme.SGLTypeTransportData, nvme.SGLSubtypeTransport)
	get.SGL().SetLength(100)
	get.KV().SetLenBytes(100)
	cid = q.send(get, nil)
	if e := q.wait(cid); !e.Status().OK() || len(q.data[cid]) == 0 || q.data[cid][0] != 'n' {
		t.Errorf("Retrieve: %v, %q", e.Status(), q.data[cid])
	}
}

// TestAShutdownDoesNotWaitForDataOfTheHost: a write whose data was requested from the host, and may never come, can no
// longer reach a drive.
func TestAShutdownDoesNotWaitForDataOfTheHost(t *testing.T) {
	t.Parallel()
	r, _ := heldRig(t)
	h := r.raw(t)
	q := h.queue(1)
	var e nvme.SQE
	e.SetOpcode(nvme.CmdWrite)
	e.SetNSID(1)
	e.SetNLB(1)
	e.SGL().SetType(nvme.SGLTypeTransportData, nvme.SGLSubtypeTransport)
	e.SGL().SetLength(blockBytes)
	cid := q.send(e, nil)
	p, err := q.next()
	if err != nil || (*pdu.Common)(p).Type() != pdu.TypeR2T {
		t.Fatalf("instead of an R2T: %x, %v", p, err)
	}
	ttag := (*pdu.Data)(p).TTAG()
	h.setCC(rawEnable.WithSHN(nvme.SHNNormal))
	h.awaitCSTS("SHST 2", func(s nvme.CSTS) bool { return s.SHST() == 2 })

	var d pdu.Data // the data comes later
	d.Common().Set(pdu.TypeH2CData, pdu.FlagLast, uint8(len(d)), uint8(len(d)), uint32(len(d)+blockBytes))
	d.SetCCCID(cid)
	d.SetTTAG(ttag)
	d.SetLength(blockBytes)
	q.write(append(d[:], bytes.Repeat([]byte{'x'}, blockBytes)...))
	if c := q.wait(cid); c.Status() != nvme.AbortedSQDeletion {
		t.Errorf("the write ends with %v, want %v", c.Status(), nvme.AbortedSQDeletion)
	}
	if got := r.blocks(t, 1); got[0] != 0 {
		t.Errorf("the block reads %q", got)
	}
}

// TestWritesThatFailAfterAnEndAreCounted: a drive fails writes after a reset or the loss of the connections that they
// came over. No host can be told of them. Those that succeed are not counted.
func TestWritesThatFailAfterAnEndAreCounted(t *testing.T) {
	t.Parallel()
	for _, lost := range []bool{false, true} {
		rules := everyOther(oldBlocks)
		for i := range rules[:len(rules)/2] {
			rules[i].Err = ssd.ErrMedia
		}
		r, dev := heldRig(t, rules...)
		h := r.raw(t)
		io := h.queue(1)
		writeAll(io, 'o')
		awaitHeld(t, dev, oldBlocks/2)
		left := 0
		if lost {
			h.lose(io)
		} else {
			h.setCC(rawEnable.WithEN(false))
			io.ended()
			left = 1
		}
		dev.SetRules()
		dev.Release()
		await(t, "the end of the connections", func() bool { return len(r.Service.Conns()) == left })
		if n := r.Telemetry.UnreportedWrites(); n != oldBlocks/4 {
			t.Errorf("connections lost %v: %d writes have failed and no host was told, want %d", lost, n, oldBlocks/4)
		}
	}
}
