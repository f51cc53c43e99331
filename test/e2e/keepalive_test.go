package e2e

import (
	"fmt"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/internal/nvme"
)

// TestASilentAssociationExpires: the association is closed with all its queues after its keep alive timeout and not
// before. The log names the host, the idle time and the last command. Other associations stay.
func TestASilentAssociationExpires(t *testing.T) {
	t.Parallel()
	d := start(t, oneMem)
	c := d.connect(d.options(hostA, nqnA))
	admin, io := d.rawQueue(hostB, nqnA, 1000, 32)
	began := time.Now()
	if c := io.do(rw(nvme.CmdFlush, 1, 0, 1)); !c.Status().OK() {
		t.Fatal(c.Status())
	}
	if term := admin.ended(); term != nil {
		t.Errorf("a TermReq, %v", term.FES())
	}
	took := time.Since(began)
	io.ended()
	if took < 900*time.Millisecond || took > 5*time.Second {
		t.Errorf("closed after %v, the keep alive timeout is 1 s", took)
	}
	eventually(t, "it is counted", func() bool { return d.metric("jbof_keepalive_timeouts_total") == 1 })
	if n := len(d.log.find("keep alive timeout", hostB, "idle=", "last_command=")); n != 1 {
		t.Errorf("%d lines with host, idle time and last command, want 1", n)
	}
	if _, err := open(t, c, 1).ReadAt(ctx(t), make([]byte, 4096), 0); err != nil || c.Losses() != 0 {
		t.Errorf("the other host: %v, %d losses", err, c.Losses())
	}
}

// TestAnAssociationThatSpeaksLives beyond its keep alive timeout. Keep Alive commands are sufficient.
func TestAnAssociationThatSpeaksLives(t *testing.T) {
	t.Parallel()
	d := start(t, oneMem)
	o := d.options(hostA, nqnA)
	o.KATO = time.Second
	c := d.connect(o)
	idle := time.NewTimer(3 * time.Second)
	<-idle.C
	if n := c.Losses(); n != 0 || d.metric("jbof_keepalive_timeouts_total") != 0 {
		t.Errorf("%d losses", n)
	}
}

// TestKeepAliveDoesNotWaitBehindData: with a drive that takes seconds and with full queues, Keep Alive and other admin
// commands complete at once.
func TestKeepAliveDoesNotWaitBehindData(t *testing.T) {
	t.Parallel()
	s := oneMem
	s.ssds = "  - {name: ssd0, backend: mem, size: 128MiB, fault: {delay: 2s, delay_probability: 1}}\n"
	s.limits = "buffers: 8MiB" // the queue uses them up
	d := start(t, s)
	admin, io := d.rawQueue(hostA, nqnA, 1000, 128)
	var p []byte
	for i := range 120 {
		p = append(p, io.capsule(rw(nvme.CmdRead, uint16(i), 0, 256), nil, 128<<10)...)
	}
	io.send(p)
	eventually(t, "the queue is full", func() bool {
		return d.metric("jbof_ssd_io_now")+
			d.metric("jbof_ssd_io_queued") > 0
	})
	var e nvme.SQE
	e.SetOpcode(nvme.AdminKeepAlive)
	var identify nvme.SQE // also needs memory for its data
	identify.SetOpcode(nvme.AdminIdentify)
	identify.Identify().SetCNS(nvme.CNSController)
	worst := time.Duration(0)
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for began := time.Now(); time.Since(began) < 1800*time.Millisecond; <-tick.C {
		sent := time.Now()
		if c := admin.do(e); !c.Status().OK() {
			t.Fatal(c.Status())
		}
		worst = max(worst, time.Since(sent))
		sent = time.Now()
		admin.send(admin.capsule(identify, nil, nvme.IdentifySize))
		if c := admin.response(); !c.Status().OK() {
			t.Fatal(c.Status())
		}
		worst = max(worst, time.Since(sent))
	}
	if limit := 300 * time.Millisecond; worst > limit {
		t.Errorf("a Keep Alive or Identify was answered after %v", worst)
	}
	t.Logf("the slowest Keep Alive or Identify took %v", worst)
	io.close()
	admin.close()
}

// TestAForgottenDiscoveryConnectionIsClosed: a connection without a keep alive timer is closed after
// discovery_idle_timeout without a command.
func TestAForgottenDiscoveryConnectionIsClosed(t *testing.T) {
	t.Parallel()
	s := oneMem
	s.limits = "discovery_idle_timeout: 1s"
	d := start(t, s)
	h := d.raw()
	h.initialize(false)
	h.admin(login{host: hostA, sub: nvme.DiscoveryNQN})
	began := time.Now()
	h.ended()
	if took := time.Since(began); took < 800*time.Millisecond || took > 5*time.Second {
		t.Errorf("closed after %v, the limit is 1 s", took)
	}
}

// TestIdleCostsNothing checks the figures of docs/benchmarks.md: less than 0.5 % of a core without connections, and
// less than 1 % and 200 MiB in total with 512 idle queue pairs.
func TestIdleCostsNothing(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector's own cost is measured here")
	}
	const period = 4 * time.Second
	s := setup{ssds: fileSSD, subsystems: openSubsystem, limits: "connections_per_host: 2000"}
	d := start(t, s)
	measure := func() (share float64) {
		before := d.cpuTime()
		timer := time.NewTimer(period)
		<-timer.C
		return float64(d.cpuTime()-before) / float64(period)
	}
	if share := measure(); share >= 0.005 {
		t.Errorf("without connections %.3f %% of a core", 100*share)
	} else {
		t.Logf("without connections %.3f %% of a core, RSS %d MiB", 100*share, d.rss()>>20)
	}
	var all []*client.Controller
	for i := range 8 {
		o := d.options(fmt.Sprintf("%s-%d", hostA, i), nqnA)
		o.Queues = 64
		all = append(all, d.connect(o))
	}
	// Each queue pair has been used once.
	for _, c := range all {
		n := open(t, c, 1)
		for range 2 * 64 {
			if _, err := n.WriteAt(ctx(t), make([]byte, 16<<10), 0, 0); err != nil {
				t.Fatal(err)
			}
		}
	}
	if n := d.metric("jbof_connections"); n < 512 {
		t.Fatalf("%v queue pairs", n)
	}
	share, rss := measure(), d.rss()
	t.Logf("with %v queue pairs %.3f %% of a core, RSS %d MiB", d.metric("jbof_connections"), 100*share, rss>>20)
	if share >= 0.01 {
		t.Errorf("512 idle queue pairs cost %.3f %% of a core", 100*share)
	}
	if rss >= 200<<20 {
		t.Errorf("512 idle queue pairs: RSS %d MiB", rss>>20)
	}
}
