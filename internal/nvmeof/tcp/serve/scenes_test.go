package serve_test

import (
	"bytes"
	"testing"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/fault"
	"jbofd/internal/testutil/hangup"
	"jbofd/internal/units"
)

// Tests in which two or three things that the other tests cover one by one happen together.

// TestShutdownsShareFlushes: a host that shuts its controller down, resets and enables it again and again without
// waiting does not pile up flushes at a slow drive. Another host's shutdown waits for two flushes at most.
func TestShutdownsShareFlushes(t *testing.T) {
	r, dev := heldRig(t, fault.Rule{Ops: []ssd.Op{ssd.Flush}, Hold: true})
	h, other := r.raw(t), r.raw(t)
	const rounds = 100
	for range rounds {
		h.setCC(rawEnable.WithSHN(nvme.SHNNormal))
		h.setCC(0)
		h.setCC(rawEnable)
	}
	awaitHeld(t, dev, 1)
	other.setCC(rawEnable.WithSHN(nvme.SHNNormal))
	if n := r.Service.SSD(0).Stats().Inflight.Load() + r.Service.SSD(0).Stats().Queued.Load(); n > 1 {
		t.Errorf("%d flushes are at the drive after %d shutdowns", n, rounds)
	}
	h.setCC(rawEnable.WithSHN(nvme.SHNNormal))
	dev.Release()
	awaitHeld(t, dev, 1) // of the second flush
	if s := other.csts(); s.SHST() != 1 {
		t.Errorf("SHST %d before a flush that began after the shutdown has ended", s.SHST())
	}
	dev.Release()
	done := func(s nvme.CSTS) bool { return s.SHST() == 2 && !s.CFS() }
	other.awaitCSTS("SHST 2", done)
	h.awaitCSTS("SHST 2", done)
}

// TestAConnectionWhoseHeldConnectFailedTakesNoOther: the target closes it a moment later. If a second Connect were
// accepted in that moment, its association would end with the connection.
func TestAConnectionWhoseHeldConnectFailedTakesNoOther(t *testing.T) {
	r, dev := heldRig(t, fault.Rule{Ops: []ssd.Op{ssd.Write}, Len: blockBytes, Hold: true})
	h := r.raw(t)
	io := h.queue(1)
	io.writeBlock(0, 'o')
	awaitHeld(t, dev, 1)
	h.lose(io)
	q := h.dial()
	if e := q.wait(h.sendConnect(q, 0, 0)); e.Status() != nvme.ConnectControllerBusy {
		t.Fatalf("Connect while the write is at the drive: %v", e.Status())
	}
	dev.SetRules()
	dev.Release()
	await(t, "the drain", func() bool { conns, _, _ := r.Service.Counts(); return conns == 1 })
	if e := q.wait(h.sendConnect(q, 0, 0)); e.Status().OK() {
		h.admin = q
		h.setCC(rawEnable)
		q.ended()
		t.Error("a Connect that has succeeded was for nothing: the target has closed the connection")
	}
}

// TestAHostWhoseQueuesAreLostOneByOne: each queue has a write at the drive, and they are lost at different times, some
// before and some while the host comes back, the admin queue in between. The host is let in when all of them are done.
func TestAHostWhoseQueuesAreLostOneByOne(t *testing.T) {
	const queues = 16
	r, dev := heldRig(t, everyOther(2*queues)...)
	h := r.raw(t)
	var all []*rawQueue
	for i := range units.LBA(queues) {
		q := h.queue(uint16(i + 1))
		q.writeBlock(2*i, 'o')
		all = append(all, q)
	}
	awaitHeld(t, dev, queues)
	admin := h.admin
	again := h.dial()
	var cid uint16
	for i, q := range all {
		hangup.Close(t, q.c)
		switch i {
		case queues / 4:
			cid = h.sendConnect(again, 0, 0)
		case queues / 2:
			_ = admin.c.Close()
		}
	}
	await(t, "the end of the association", func() bool { _, n, _ := r.Service.Counts(); return n == 0 })
	if again.answeredByNow(cid) {
		t.Error("the host is let in while its writes are at the drive")
	}
	dev.SetRules()
	dev.Release()
	e := again.wait(cid)
	if !e.Status().OK() {
		t.Fatalf("Connect: %v", e.Status())
	}
	h.admin, h.cntlid = again, e.ConnectCNTLID()
	h.setCC(rawEnable)
	q := h.queue(1)
	for i := range units.LBA(2 * queues) {
		q.wait(q.writeBlock(i, 'n'))
	}
	if got := r.blocks(t, 2*queues); !bytes.Equal(got, bytes.Repeat([]byte{'n'}, 2*queues)) {
		t.Errorf("blocks read %q", got)
	}
}

// TestANamespaceComesAndGoesWhileAConnectIsHeld: the Connect waits for a write to that namespace.
func TestANamespaceComesAndGoesWhileAConnectIsHeld(t *testing.T) {
	r, dev := heldRig(t, everyOther(2)...)
	h := r.raw(t)
	io := h.queue(1)
	io.writeBlock(0, 'o')
	awaitHeld(t, dev, 1)
	h.lose(io)
	q := h.dial()
	cid := h.sendConnect(q, 0, 0)
	await(t, "the end of the association", func() bool { _, n, _ := r.Service.Counts(); return n == 0 })
	all := r.State.Subsystems[0].Namespaces
	for _, namespaces := range [][]*nvmeof.Namespace{nil, all, nil, all} {
		r.State.Subsystems[0].Namespaces = namespaces
		r.Service.Apply(r.State)
	}
	dev.SetRules()
	dev.Release()
	e := q.wait(cid)
	if !e.Status().OK() {
		t.Fatalf("Connect: %v", e.Status())
	}
	h.admin, h.cntlid = q, e.ConnectCNTLID()
	h.setCC(rawEnable)
	io = h.queue(1)
	if e := io.wait(io.writeBlock(0, 'n')); !e.Status().OK() {
		t.Errorf("write: %v", e.Status())
	}
	if got := r.blocks(t, 1); got[0] != 'n' {
		t.Errorf("the block reads %q", got)
	}
}

// TestAResetWhileAPairIsHalfReceived: the first half is in its capsule, of the second half the capsule has come or
// nothing has. Nothing of the pair is executed, and its memory comes back.
func TestAResetWhileAPairIsHalfReceived(t *testing.T) {
	r, _ := heldRig(t)
	before := inUse(r.Pool)
	for _, second := range []bool{false, true} {
		h := r.raw(t)
		q := h.queue(1)
		var e nvme.SQE
		e.SetOpcode(nvme.CmdCompare)
		e.SetNSID(1)
		e.SetNLB(1)
		e.SetFuse(nvme.FuseFirst)
		q.send(e, make([]byte, blockBytes))
		if second {
			e.SetOpcode(nvme.CmdWrite)
			e.SetFuse(nvme.FuseSecond)
			q.sendToFetch(e, blockBytes)
			for len(q.r2ts) == 0 {
				if err := q.receive(); err != nil {
					t.Fatal(err)
				}
			}
		}
		h.setCC(0)
		h.awaitCSTS("RDY 0", func(s nvme.CSTS) bool { return !s.RDY() })
		q.ended()
		h.setCC(rawEnable)
		q = h.queue(1)
		if e := q.wait(q.writeBlock(1, 'n')); !e.Status().OK() {
			t.Errorf("a write after the reset: %v", e.Status())
		}
		h.lose(q)
	}
	if got := r.blocks(t, 2); got[0] != 0 || got[1] != 'n' {
		t.Errorf("blocks read %q", got)
	}
	await(t, "the memory to be back", func() bool { return inUse(r.Pool) <= before })
}
