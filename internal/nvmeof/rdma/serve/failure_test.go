package serve_test

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/rdma/rawhost"
	"jbofd/internal/nvmeof/rdma/serve"
	"jbofd/internal/nvmeof/rdma/verbs"
)

// A host that was idle for longer than the stall timeout has the full timeout for its next response.
func TestStallTimeoutBeginsWithTheResponse(t *testing.T) {
	t.Parallel()
	const limit = 600 * time.Millisecond
	r := newRig(t, func(s *setup) { s.serve.StallTimeout = limit })
	h := r.ioQueue(t, r.client(t))
	<-time.After(limit + limit/4)
	e := rawhost.RW(nvme.CmdRead, 5, 1)
	h.Keyed(&e, nvme.SGLSubtypeAddress, blockBytes)
	if err := h.Send(e[:]); err != nil {
		t.Fatal(err)
	}
	<-time.After(limit/4 + limit/8) // the target looks at its connections in the meantime
	h.Receive(1)
	if cqe := h.Response(h.Next()); !cqe.Status().OK() || cqe.CID() != 5 {
		t.Errorf("the response is %v of command %d", cqe.Status(), cqe.CID())
	}
}

// A device whose completion queues fail, although it was not removed, ends its connections. Later connections use a
// reopened device that works.
func TestDeviceThatFailsIsOpenedAnew(t *testing.T) {
	var p tap
	r := newRig(t, func(s *setup) { s.wrap = p.wrap; s.serve.SpinFor = 0 })
	o := r.options()
	o.ReconnectDelay, o.KATO, o.CommandTimeout = 10*time.Millisecond, -1, -1 // the host does not notice by itself
	c := r.connect(t, o)
	ns, err := c.Namespace(t.Context(), 1)
	if err != nil {
		t.Fatal(err)
	}
	read := func() { // also over a new connection, if need be
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		if _, err := ns.ReadAt(ctx, make([]byte, blockBytes), 0); err != nil {
			t.Fatal(err)
		}
	}
	for range 3 {
		before := c.Losses()
		p.breakQueues()
		eventually(t, "the loss of the connection", func() bool {
			read() // a goroutine that sleeps already is woken once more, and notices
			return c.Losses() > before
		})
		read()
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the end of all but one device",
		func() bool { return r.target.Counts().Domains <= 1 && r.server.Stats().Devices <= 1 })
}

// Receives that could not be posted are not counted, and posted when the next connection wants more.
func TestReceivesThatCannotBePostedAreNotLost(t *testing.T) {
	var p tap
	p.short.Store(1 + 40)
	r := newRig(t, func(s *setup) { s.wrap = p.wrap; s.serve.Receives = 200 })
	check := func(want int) {
		t.Helper()
		r.settle(t)
		if posted := int(r.target.Stats().RecvsPosted) - int(p.received.Load()); r.server.Stats().Receives != want ||
			posted != want {
			t.Errorf("the server counts %d receives, %d are posted, want %d", r.server.Stats().Receives, posted, want)
		}
	}
	h := r.resolve(t)
	first := rawhost.Request(0)
	if err := h.Connect(first[:], 16); err != nil {
		t.Fatal(err)
	}
	check(40)
	o := r.options()
	o.QPairs, o.QueueDepth, o.KATO = 1, 128, -1
	l := newLoad(t, r.connect(t, o), client.OpWrite, 4096, 128)
	if err := l.Run(2000); err != nil {
		t.Fatal(err)
	}
	check(200)
}

// A failure to register buffers is logged once, not for every command.
func TestFailedRegistrationIsLoggedOnce(t *testing.T) {
	r := newRig(t, nil)
	o := r.options()
	o.MaxRetries = -1
	c := r.connect(t, o)
	ns, err := c.Namespace(t.Context(), 1)
	if err != nil {
		t.Fatal(err)
	}
	d := r.target.Devices()[0]
	before := d.Attr()
	d.SetAttr(func(a *verbs.Attr) { a.MaxMRs = 1 })
	large := make([]byte, 1<<20) // not of a region that is registered by now
	for range 10 {
		var status *client.StatusError
		if _, err := ns.ReadAt(t.Context(), large, 0); !errors.As(err, &status) ||
			status.Status.Code() != nvme.TransientTransportError {
			t.Fatalf("a read into memory that the device cannot reach: %v", err)
		}
		if _, err := ns.WriteAt(t.Context(), large, 0, 0); !errors.As(err, &status) ||
			status.Status.Code() != nvme.TransientTransportError {
			t.Fatalf("a write from memory that the device cannot reach: %v", err)
		}
	}
	d.SetAttr(func(a *verbs.Attr) { *a = before })
	if _, err := ns.ReadAt(t.Context(), large, 0); err != nil {
		t.Fatal(err)
	}
	lines := 0
	for len(r.log.lines) > 0 {
		if strings.Contains(<-r.log.lines, "cannot be registered") {
			lines++
		}
	}
	if lines != 1 {
		t.Errorf("%d lines say that buffers cannot be registered, want 1", lines)
	}
}

// Doorbells are a counter: those of a device that is gone stay counted.
func TestDoorbellsOfDevicesThatAreGoneStayCounted(t *testing.T) {
	r := newRig(t, nil)
	c := r.client(t)
	serves(t, c)
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the end of all queue pairs", func() bool { return r.target.Counts().QPs == 0 })
	before := r.server.Stats().Doorbells
	r.target.RemoveDevice(r.target.Devices()[0])
	eventually(t, "the end of the device", func() bool { return r.server.Stats().Devices == 0 })
	if after := r.server.Stats().Doorbells; before == 0 || after < before {
		t.Errorf("%d doorbells, %d before the device went", after, before)
	}
}

// A listener that comes when the server stops is closed.
func TestServeAfterCloseClosesTheListener(t *testing.T) {
	r := newRig(t, nil)
	l, err := r.server.Listen(netip.AddrPortFrom(targetAddr, 4421))
	if err != nil {
		t.Fatal(err)
	}
	r.server.Close()
	r.server.Serve(l, serve.PortFor(2, l.Addr()))
	if n := r.target.Counts().Listeners; n != 0 {
		t.Errorf("%d listeners are left", n)
	}
}
