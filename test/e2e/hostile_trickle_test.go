package e2e

import (
	"fmt"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/tcp/pdu"
	"jbofd/internal/units"
)

// trickle connects an I/O queue, fills it with writes of 1 MiB, and at each tick sends four bytes of the data that the
// target has requested first, until the target closes the connection.
func trickle(d *daemon, host string, ticks <-chan struct{}) (ended <-chan struct{}) {
	d.t.Helper()
	admin := d.rawFrom(evil)
	admin.initialize(false)
	cntlid := admin.admin(login{host: host, sub: nqnA})
	h := d.rawFrom(evil)
	h.initialize(false)
	if c := h.connect(login{host: host, sub: nqnA, qid: 1, cntlid: cntlid, entries: 64}); !c.Status().OK() {
		d.t.Fatal(c.Status())
	}
	var p []byte
	for k := range 60 {
		p = append(p, h.capsule(rw(nvme.CmdWrite, uint16(k), units.LBA(k)*2048, 2048), nil, 1<<20)...)
	}
	h.send(p)
	end := make(chan struct{})
	go func() {
		defer close(end)
		var cid, ttag uint16
		for r2t := false; !r2t; { // it may have to wait for memory, as other hosts may
			p, err := h.next()
			if err != nil {
				return
			}
			if r2t = (*pdu.Common)(p).Type() == pdu.TypeR2T; r2t {
				cid, ttag = (*pdu.Data)(p).CCCID(), (*pdu.Data)(p).TTAG()
			}
		}
		off := uint32(0)
		for range ticks {
			_ = h.c.SetWriteDeadline(time.Now().Add(wait))
			if _, err := h.c.Write(h.frame(pdu.TypeH2CData, 0, h2cData(cid, ttag, off, 4),
				make([]byte, 4))); err != nil {
				return
			}
			off += 4
		}
	}()
	return end
}

// TestHostsThatTrickleDataDoNotHarmOthers: unconfigured hosts send the data of their writes four bytes at a time. They
// are disconnected. Meanwhile a host that holds no memory gets memory at once.
func TestHostsThatTrickleDataDoNotHarmOthers(t *testing.T) {
	t.Parallel()
	s := oneMem
	s.subsystems = openSubsystem
	s.limits = "buffers: 32MiB, stall_timeout: 4s, min_transfer_rate: 1MiB"
	d := start(t, s)
	n := d.namespace(d.options(hostA, nqnA), 1)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	began := time.Now()
	for i := range 40 {
		ticks := make(chan struct{})
		end := trickle(d, fmt.Sprintf("nqn.2026-11.example.invented:%d", i), ticks)
		wg.Go(func() {
			defer close(ticks)
			tick := time.NewTicker(time.Second)
			defer tick.Stop()
			for {
				select {
				case <-stop:
					return
				case <-tick.C:
				}
				select {
				case ticks <- struct{}{}:
				case <-end:
					return
				}
			}
		})
	}
	eventually(t, "they hold memory", func() bool {
		return d.metric("jbof_buffer_pool_bytes", "state",
			"used") >= 16<<20
	})
	t.Logf("%.0f bytes of memory are used", d.metric("jbof_buffer_pool_bytes", "state", "used"))
	for range 10 {
		before := time.Now()
		if _, err := n.ReadAt(ctx(t), make([]byte, 1<<20), 0); err != nil {
			t.Error(err)
		}
		if took := time.Since(before); took > 2*time.Second {
			t.Errorf("a read of 1 MiB took %v beside hosts that trickle", took)
		}
	}
	within(t, 30*time.Second, "they are cut off", func() bool { return d.metric("jbof_connections") <= 2+40 })
	t.Logf("cut off after %v", time.Since(began))
	close(stop)
	wg.Wait()
}

// TestAHostThatReadsTooSlowlyIsCutOff: a host keeps reading the data that it has requested, but so slowly that it would
// hold the buffers almost for ever.
func TestAHostThatReadsTooSlowlyIsCutOff(t *testing.T) {
	t.Parallel()
	s := oneMem
	s.limits = "buffers: 32MiB, stall_timeout: 3s, min_transfer_rate: 64MiB"
	d := start(t, s)
	_, h := d.rawQueue(hostB, nqnA, 0, 64)
	if err := h.c.(*net.TCPConn).SetReadBuffer(64 << 10); err != nil {
		t.Fatal(err)
	}
	var reads []byte
	for i := range 60 {
		reads = append(reads, h.capsule(rw(nvme.CmdRead, uint16(i), 0, 2048), nil, 1<<20)...)
	}
	h.send(reads)
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	piece := make([]byte, 100<<10)
	within(t, 15*time.Second, "the host is cut off", func() bool {
		<-tick.C
		_ = h.c.SetReadDeadline(time.Now().Add(wait))
		_, _ = io.ReadFull(h.c, piece)
		return len(d.log.find("did not read")) > 0 || d.metric("jbof_connections") <= 1
	})
}
