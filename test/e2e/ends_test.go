package e2e

import (
	"fmt"
	"syscall"
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
	// Until the kernel has delivered the end of the admin queue's connection, its association lives, on another path.
	eventually(t, "the association ends", func() bool { return len(d.log.find("connection closed", hostA)) > 0 })
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

// freeze stops the process for so long (SIGSTOP), as a debugger or a frozen container does, and lets it go on. midway
// is called in the middle of that time.
func (d *daemon) freeze(period time.Duration, midway func()) {
	d.t.Helper()
	half, over := time.NewTimer(period/2), time.NewTimer(period)
	d.signal(syscall.SIGSTOP)
	<-half.C
	midway()
	<-over.C
	d.signal(syscall.SIGCONT)
}

// TestAStoppedDaemonDoesNotExpireItsHosts: the process is stopped for longer than the keep alive timeout of its hosts.
// Their Keep Alives came meanwhile and wait in its sockets, so they were not silent and no association expires. A host
// that was silent expires.
func TestAStoppedDaemonDoesNotExpireItsHosts(t *testing.T) {
	t.Parallel()
	const kato, stopped = 3 * time.Second, 4 * time.Second
	d := start(t, oneMem)
	var admins, ios []*rawHost
	for i := range 8 {
		admin, io := d.rawQueue(fmt.Sprintf("%s-%d", hostB, i), nqnA, uint32(kato.Milliseconds()), 32)
		admins, ios = append(admins, admin), append(ios, io)
	}
	silent, _ := d.rawQueue(hostA, nqnA, uint32(kato.Milliseconds()), 32)
	var alive nvme.SQE
	alive.SetOpcode(nvme.AdminKeepAlive)
	alive.SetCID(9)
	d.freeze(stopped, func() {
		for i, h := range admins {
			if i%2 == 0 {
				h.send(h.capsule(alive, nil, 0))
			} else { // I/O is a sign of life, too
				ios[i].send(ios[i].capsule(rw(nvme.CmdFlush, 9, 0, 1), nil, 0))
			}
		}
	})
	for i := range admins {
		h := admins[i]
		if i%2 == 1 {
			h = ios[i]
		}
		if c := h.response(); c.CID() != 9 || !c.Status().OK() {
			t.Errorf("host %d: command %d: %v", i, c.CID(), c.Status())
		}
		if c := ios[i].do(rw(nvme.CmdFlush, 10, 0, 1)); !c.Status().OK() {
			t.Errorf("host %d: %v", i, c.Status())
		}
	}
	silent.ended()
	eventually(t, "the silent host is counted", func() bool { return d.metric("jbof_keepalive_timeouts_total") == 1 })
	for i := range admins {
		ios[i].close()
		admins[i].close()
	}
}

// TestHostsComeBackToADaemonThatWasStopped for longer than they wait for the answer to a Keep Alive: they connect
// again, go on, and read what was acknowledged.
func TestHostsComeBackToADaemonThatWasStopped(t *testing.T) {
	t.Parallel()
	d := start(t, setup{ssds: fileSSD, subsystems: openSubsystem})
	o := d.options(hostA, nqnA)
	o.KATO = time.Second
	busy := startVictim(t, d, o, 4)
	busy.progress(100)
	d.freeze(4*time.Second, func() {})
	busy.progress(100)
	busy.stop()
}
