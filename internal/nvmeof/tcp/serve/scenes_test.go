package serve_test

import (
	"testing"

	"jbofd/internal/nvme"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/fault"
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
	if n := r.service.SSD(0).Stats().Inflight.Load() + r.service.SSD(0).Stats().Queued.Load(); n > 1 {
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
	await(t, "the drain", func() bool { conns, _, _ := r.service.Counts(); return conns == 1 })
	if e := q.wait(h.sendConnect(q, 0, 0)); e.Status().OK() {
		h.admin = q
		h.setCC(rawEnable)
		q.ended()
		t.Error("a Connect that has succeeded was for nothing: the target has closed the connection")
	}
}
