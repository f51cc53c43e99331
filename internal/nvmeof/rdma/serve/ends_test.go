package serve_test

import (
	"context"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/rdma/memverbs"
	"jbofd/internal/nvmeof/rdma/rawhost"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/fault"
	"jbofd/internal/ssd/mem"
)

// heldRig is a target whose drive holds the first write to block 0 until the test releases it.
func heldRig(t *testing.T) (*rig, *fault.Device) {
	t.Helper()
	m, err := mem.Open(mem.Config{Name: "m0", SizeBytes: testBytes})
	if err != nil {
		t.Fatal(err)
	}
	dev, err := fault.New(m, fault.Config{})
	if err != nil {
		t.Fatal(err)
	}
	r := newRig(t, func(s *setup) { s.devices = []ssd.Device{dev} })
	t.Cleanup(func() {
		dev.SetRules()
		dev.Release()
	})
	dev.SetRules(fault.Rule{Ops: []ssd.Op{ssd.Write}, Len: blockBytes, Nth: 1, Hold: true})
	return r, dev
}

func awaitHeld(t *testing.T, dev *fault.Device) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if err := dev.AwaitHeld(ctx, 1); err != nil {
		t.Fatal(err)
	}
}

// adminOptions are those of a host without I/O queues, which are left to raw ones, and without a keep alive timer.
func (r *rig) adminOptions() client.Options {
	o := r.options()
	o.Queues, o.QPairs, o.QueueDepth, o.KATO = 0, 2, 8, -1
	return o
}

// adminOnly connects a host with adminOptions.
func (r *rig) adminOnly(t *testing.T) *client.Controller { return r.connect(t, r.adminOptions()) }

func csts(t *testing.T, c *client.Controller) nvme.CSTS {
	t.Helper()
	v, err := c.Property(t.Context(), nvme.PropCSTS)
	if err != nil {
		t.Fatal(err)
	}
	return nvme.CSTS(v)
}

func setCC(t *testing.T, c *client.Controller, cc nvme.CC) {
	t.Helper()
	if err := c.SetProperty(t.Context(), nvme.PropCC, uint64(cc)); err != nil {
		t.Fatal(err)
	}
}

var enabled = nvme.CC(0).WithEN(true).WithIOSQES(6).WithIOCQES(4)

// write sends a write of block 0 filled with a byte, and does not wait.
func write(t *testing.T, h *rawhost.Host, fill byte) {
	t.Helper()
	h.Fill(fill, blockBytes)
	e := rawhost.RW(nvme.CmdWrite, uint16(fill), 1)
	h.Keyed(&e, nvme.SGLSubtypeAddress, blockBytes)
	h.Receive(1)
	if err := h.Send(e[:]); err != nil {
		t.Fatal(err)
	}
}

// heldWrite is a heldRig, whose drive has a write of block 0, filled with a byte, from queue h of association c.
func heldWrite(t *testing.T, fill byte) (r *rig, dev *fault.Device, c *client.Controller, h *rawhost.Host) {
	t.Helper()
	r, dev = heldRig(t)
	c = r.adminOnly(t)
	h = r.resolve(t)
	h.Join(association(t, c), 2)
	write(t, h, fill)
	awaitHeld(t, dev)
	return r, dev, c, h
}

// first reads the first byte of block 0 through a host of its own.
func (r *rig) first(t *testing.T) byte {
	t.Helper()
	o := r.options()
	o.Queues = 1
	ns, err := r.connect(t, o).Namespace(t.Context(), 1)
	if err != nil {
		t.Fatal(err)
	}
	b := make([]byte, blockBytes)
	if _, err := ns.ReadAt(t.Context(), b, 0); err != nil {
		t.Fatal(err)
	}
	return b[0]
}

// newWriteStays writes block 0 on a new queue of an association, and reads it.
func (r *rig) newWriteStays(t *testing.T, c *client.Controller) {
	t.Helper()
	q := r.resolve(t)
	q.Join(association(t, c), 2)
	write(t, q, 'n')
	if e := q.Response(q.Next()); !e.Status().OK() {
		t.Errorf("write: %v", e.Status())
	}
	if got := r.first(t); got != 'n' {
		t.Errorf("the block reads %q, want n", got)
	}
}

func TestOldWritesNeverLandAfterAReset(t *testing.T) {
	t.Parallel()
	r, dev, c, _ := heldWrite(t, 'o')
	setCC(t, c, 0)
	if s := csts(t, c); !s.RDY() || s.CFS() {
		t.Errorf("CSTS %#x while a write is at the drive, want RDY", uint32(s))
	}
	dev.Release()
	eventually(t, "the end of the reset", func() bool { return !csts(t, c).RDY() })
	setCC(t, c, enabled)
	r.newWriteStays(t, c)
}

func TestOldWritesNeverLandAfterALostConnection(t *testing.T) {
	t.Parallel()
	r, dev, c, _ := heldWrite(t, 'o')
	_ = c.Close()
	eventually(t, "the end of the association",
		func() bool { _, controllers, _ := r.Service.Counts(); return controllers == 0 })

	connected := make(chan *client.Controller)
	go func() {
		c, err := client.Connect(context.WithoutCancel(t.Context()), r.adminOptions())
		if err != nil {
			t.Errorf("Connect: %v", err)
		}
		connected <- c
	}()
	eventually(t, "a Connect that waits", func() bool { conns, _, _ := r.Service.Counts(); return conns == 2 })
	if _, controllers, _ := r.Service.Counts(); controllers != 0 {
		t.Error("the host is let in while a write of its old association is at the drive")
	}
	dev.Release()
	again := <-connected
	if again == nil {
		return
	}
	defer again.Close()
	r.newWriteStays(t, again)
}

// TestAConnectBeforeTheLossIsReportedWaits: the host has lost its admin queue, but the provider has not reported that
// to the target yet when the host connects again.
func TestAConnectBeforeTheLossIsReportedWaits(t *testing.T) {
	r, dev, c, _ := heldWrite(t, 'o')
	var hosts, targets []*memverbs.Endpoint
	for _, e := range r.net.Endpoints() {
		if e.Passive() {
			e.HoldEvents()
			targets = append(targets, e)
		} else {
			hosts = append(hosts, e)
		}
	}
	controllers := func() int {
		_, n, _ := r.Service.Counts()
		return n
	}
	if err := hosts[0].Disconnect(); err != nil { // the admin queue's; the host connects again by itself
		t.Fatal(err)
	}
	eventually(t, "the end of the old association, by the new Connect", func() bool {
		n := controllers()
		if n == 2 {
			t.Fatal("the host is let in while a write of its old association is at the drive")
		}
		return n == 0
	})
	dev.Release()
	eventually(t, "the new association", func() bool { return controllers() == 1 })
	for _, e := range targets {
		e.ReleaseEvents()
	}
	r.newWriteStays(t, c)
}

func TestShutdownDrainsAndFlushes(t *testing.T) {
	t.Parallel()
	r, dev, c, h := heldWrite(t, 'a')
	setCC(t, c, enabled.WithSHN(nvme.SHNNormal))
	if s := csts(t, c); s.SHST() != 1 {
		t.Errorf("SHST %d while a write is at the drive, want 1", s.SHST())
	}
	dev.Release()
	if e := h.Response(h.Next()); !e.Status().OK() {
		t.Errorf("the write at the drive: %v", e.Status())
	}
	eventually(t, "the end of the shutdown", func() bool { return csts(t, c).SHST() == 2 })
	write(t, h, 'b')
	if e := h.Response(h.Next()); e.Status() != nvme.AbortedSQDeletion {
		t.Errorf("a write after the shutdown: %v, want %v", e.Status(), nvme.AbortedSQDeletion)
	}
	if got := r.first(t); got != 'a' {
		t.Errorf("the block reads %q, want a", got)
	}
}

func TestDisconnectIsAnsweredAfterTheDrain(t *testing.T) {
	t.Parallel()
	r, dev, c, h := heldWrite(t, 'a')
	var e nvme.SQE
	e.InitDisconnect()
	e.SetCID(99)
	h.Receive(1)
	if err := h.Send(e[:]); err != nil {
		t.Fatal(err)
	}
	time.AfterFunc(50*time.Millisecond, dev.Release)
	if e := h.Response(h.Next()); e.CID() != 'a' || !e.Status().OK() {
		t.Errorf("the first answer is of command %d: %v, want the write's", e.CID(), e.Status())
	}
	if e := h.Response(h.Next()); e.CID() != 99 || !e.Status().OK() {
		t.Errorf("the second answer is of command %d: %v, want Disconnect's", e.CID(), e.Status())
	}
	again := r.resolve(t)
	again.Join(association(t, c), 2) // the number is free
}
