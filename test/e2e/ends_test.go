package e2e

import (
	"testing"
	"time"

	"jbofd/internal/nvme"
)

// TestTheQuiesceTimeIsConfigured: with a drive that does not answer, a reset and a Connect of the host fail after
// limits.quiesce_timeout, which Identify Controller announces. Another host connects.
func TestTheQuiesceTimeIsConfigured(t *testing.T) {
	t.Parallel()
	const quiesce = 500 * time.Millisecond
	s := oneMem
	s.ssds = "  - {name: ssd0, backend: mem, size: 128MiB, fault: {delay: 10m, delay_probability: 1}}\n"
	s.limits = "quiesce_timeout: 500ms, drain_timeout: 0s"
	d := start(t, s)
	id := make([]byte, nvme.IdentifySize)
	if err := d.connect(d.options(hostB, nqnA)).Identify(ctx(t), nvme.CNSController, 0, id); err != nil {
		t.Fatal(err)
	}
	if cqt := (*nvme.IdentifyController)(id).CQT(); cqt != 500 {
		t.Errorf("CQT %d, want 500", cqt)
	}
	admin, io := d.rawQueue(hostA, nqnA, 0, 32)
	io.send(io.capsule(rw(nvme.CmdWrite, 1, 0, 1), make([]byte, 512), 512))
	eventually(t, "the write is with the drive", func() bool { return d.metric("jbof_ssd_io_now") == 1 })
	csts := func() nvme.CSTS {
		var e nvme.SQE
		e.Property().Init(nvme.FabricsPropertyGet, nvme.PropCSTS)
		c := admin.do(e)
		return nvme.CSTS(c.Result64())
	}
	began := time.Now()
	if c := admin.do(propertySet(nvme.PropCC, enable&^1, 2)); !c.Status().OK() {
		t.Fatal(c.Status())
	}
	eventually(t, "CFS", func() bool { return csts().CFS() })
	if took := time.Since(began); took < quiesce {
		t.Errorf("CFS after %v, want %v or more", took, quiesce)
	}
	admin.close()
	io.close()
	began = time.Now()
	again := d.raw()
	again.initialize(false)
	if c := again.connect(login{host: hostA, sub: nqnA}); c.Status() != nvme.ConnectControllerBusy {
		t.Errorf("Connect while a write of before is at the drive: %v", c.Status())
	} else if took := time.Since(began); took > quiesce+stopLimit {
		t.Errorf("Connect was answered after %v, want about %v", took, quiesce)
	}
	d.connect(d.options(hostB+"-2", nqnA))
	if took := d.term(); took > stopLimit {
		t.Errorf("stopped after %v", took)
	}
	if n := len(d.log.find("commands that a drive has do not end", hostA)); n != 2 {
		t.Errorf("%d lines of the log say that commands do not end, want those of the reset and of the association", n)
	}
}
