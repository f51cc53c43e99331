package serve_test

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/rdma/cm"
	"jbofd/internal/nvmeof/rdma/rawhost"
	"jbofd/internal/nvmeof/rdma/verbs"
	"jbofd/internal/units"
)

func TestBadPrivateDataIsRejectedWithItsStatus(t *testing.T) {
	r := newRig(t, func(s *setup) { s.network.ExactPrivateData = true })
	c := r.client(t)
	n := rawhost.CheckPrivateData(func() *rawhost.Host { return r.resolve(t) }, true)
	if got := r.metric(t, "jbof_protocol_errors_total", "private_data"); got != float64(n) {
		t.Errorf("%v protocol errors are counted, want %d", got, n)
	}
	serves(t, c)
}

func TestConnectIsHeldToTheConnection(t *testing.T) {
	r := newRig(t, nil)
	c := r.client(t)
	for _, tc := range []struct {
		name        string
		qid, sqsize uint16
		offset      uint16
	}{{"another queue", 1, rawhost.Entries - 1, nvme.ConnectOffQID},
		{"a larger queue", 2, rawhost.Entries, nvme.ConnectOffSQSIZE}} {
		h := r.resolve(t)
		p := rawhost.Request(2)
		if err := h.Connect(p[:], 16); err != nil {
			t.Fatal(err)
		}
		e := h.ConnectCommand(association(t, c), tc.qid, tc.sqsize)
		cqe := h.Do(e[:])
		if f := cqe.ConnectFault(); cqe.Status().Code() != nvme.ConnectInvalidParameters || f.InData ||
			f.Offset != tc.offset {
			t.Errorf("%s: %v at %d, want Connect Invalid Parameters at %d", tc.name, cqe.Status(), f.Offset, tc.offset)
		}
	}
}

func TestBadSGLFailsItsCommandOnly(t *testing.T) {
	r := newRig(t, nil)
	r.ioQueue(t, r.client(t)).CheckSGLs()
}

// A key, an address or a length that the host's device refuses ends that connection: after it a queue pair can send
// nothing. The command is in the error log. Other connections continue.
func TestWrongKeyEndsItsConnectionOnly(t *testing.T) {
	for _, tc := range rawhost.WrongKeys {
		t.Run(tc.Name, func(t *testing.T) {
			r := newRig(t, nil)
			c := r.client(t)
			r.ioQueue(t, c).SendSpoiled(tc.Opcode, 0x1234, tc.Spoil)
			r.logged(t, "protocol error", "memory key, address or length is wrong")
			eventually(t, "the metric", func() bool {
				return r.metric(t, "jbof_protocol_errors_total",
					"rdma_remote_access") == 1
			})
			if tc.Opcode == nvme.CmdWrite {
				b := make([]byte, 64)
				if err := c.GetLogPage(t.Context(), client.LogPage{LID: nvme.LIDError}, b); err != nil {
					t.Fatal(err)
				}
				if l := (*nvme.ErrorLogEntry)(b); l.Status().Code() != nvme.DataTransferError || l.CID() != 0x1234 ||
					l.SQID() != 2 {
					t.Errorf("the error log says %v of command %#x in queue %d", l.Status(), l.CID(), l.SQID())
				}
			}
			serves(t, c)
			r.ioQueue(t, c) // the queue can be connected again
		})
	}
}

// If the host asks for it, the response invalidates its key, whether the command succeeds or fails.
func TestResponsesInvalidateKeysWhenAsked(t *testing.T) {
	r := newRig(t, nil)
	h := r.ioQueue(t, r.client(t))
	for _, tc := range []struct {
		opcode uint8
		slba   units.LBA
		ok     bool
	}{{nvme.CmdRead, 0, true}, {nvme.CmdWrite, 0, true}, {nvme.CmdRead, 1 << 40, false}} {
		mr, err := h.Domain.Register(make([]byte, 16384), verbs.LocalWrite|verbs.RemoteRead|verbs.RemoteWrite)
		if err != nil {
			t.Fatal(err)
		}
		e := rawhost.RW(tc.opcode, 3, 4)
		e.SetSLBA(tc.slba)
		e.SetPSDT(nvme.PSDTSGL)
		e.SGL().SetKeyed(nvme.SGLSubtypeInvalidateRK, mr.Addr(), 16384, mr.RKey())
		h.Receive(1)
		if err := h.Send(e[:]); err != nil {
			t.Fatal(err)
		}
		w := h.Next()
		if cqe := h.Response(w); cqe.Status().OK() != tc.ok {
			t.Errorf("opcode %#x: %v", tc.opcode, cqe.Status())
		}
		if !w.Invalidated || w.RKey != mr.RKey() {
			t.Errorf("opcode %#x: invalidated %t, key %#x, want %#x", tc.opcode, w.Invalidated, w.RKey, mr.RKey())
		}
		if err := mr.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestGarbageEndsItsConnectionOnly(t *testing.T) {
	for _, tc := range []struct {
		name string
		send func(h *rawhost.Host)
		want string
	}{
		{"a short capsule", func(h *rawhost.Host) { _ = h.Send(make([]byte, 63)) }, "a capsule of 63 bytes"},
		{"an empty capsule", func(h *rawhost.Host) { _ = h.Send(nil) }, "a capsule of 0 bytes"},
		{"a capsule that is too long", func(h *rawhost.Host) { _ = h.Send(make([]byte, 64+8192+64)) },
			"capsule longer"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := newRig(t, nil)
			c := r.client(t)
			h := r.ioQueue(t, c)
			tc.send(h)
			r.logged(t, "connection closed", tc.want)
			serves(t, c)
		})
	}
}

// More queue pairs than the device has are refused with the status for it, and all resources taken until then are
// released: a later host can connect.
func TestWithoutResourcesAConnectionIsRefusedCleanly(t *testing.T) {
	r := newRig(t, func(s *setup) { s.attr.MaxQPs = 3 })
	c := r.client(t) // two queue pairs
	h := r.ioQueue(t, c)
	more := rawhost.Request(1)
	for range 3 {
		if got := rawhost.Rejected(r.resolve(t).Connect(more[:], 16)); got != cm.NoResources.String() {
			t.Fatalf("a fourth queue pair: %s", got)
		}
	}
	before := r.target.Counts()
	h.Close()
	eventually(t, "the queue pair's end", func() bool { return r.target.Counts().QPs == before.QPs-1 })
	r.ioQueue(t, c)
	serves(t, c)
}

func TestLimitsOfConnectionsHold(t *testing.T) {
	r := newRig(t, func(s *setup) { s.perHost = 2 })
	c := r.client(t)
	h := r.resolve(t)
	p := rawhost.Request(2)
	if err := h.Connect(p[:], 16); err != nil {
		t.Fatal(err)
	}
	e := h.ConnectCommand(association(t, c), 2, rawhost.Entries-1)
	if cqe := h.Do(e[:]); cqe.Status().Code() != nvme.ConnectControllerBusy {
		t.Errorf("a third connection of the host: %v", cqe.Status())
	}
	serves(t, c)
}

// With fewer receives than commands, hosts have to retry (receiver not ready), and all are served.
func TestReceiveQueueExhausted(t *testing.T) {
	// Commands may wait a moment until the network has acknowledged earlier responses. Half of the receives have to be
	// enough for those, because these hosts are one tenant.
	const receives, depth = 128, 128
	r := newRig(t, func(s *setup) { s.serve.Receives = receives })
	var wg sync.WaitGroup
	for range 3 {
		o := r.options()
		o.QPairs, o.QueueDepth = 1, depth
		l := newLoad(t, r.connect(t, o), client.OpWrite, 4096, depth)
		wg.Go(func() {
			// How often messages meet an empty queue depends on how the hosts and the target run beside each other.
			for range 50 {
				if err := l.Run(2000); err != nil {
					t.Error(err)
					return
				}
				if r.host.Stats().RNRs > 0 {
					return
				}
			}
		})
	}
	wg.Wait()
	if s := r.host.Stats(); s.RNRs == 0 {
		t.Error("no message has met an empty receive queue: the test shows nothing")
	}
	if s := r.server.Stats(); s.Receives != receives || s.Held != 0 {
		t.Errorf("%d receives, %d held, want %d and 0", s.Receives, s.Held, receives)
	}
}

// A host that posts no receives cannot hold buffers for ever.
func TestHostThatTakesNoResponsesIsCutOff(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(s *setup) { s.serve.StallTimeout = 200 * time.Millisecond })
	c := r.client(t)
	h := r.ioQueue(t, c)
	e := rawhost.RW(nvme.CmdRead, 1, 4)
	h.Keyed(&e, nvme.SGLSubtypeAddress, 4*blockBytes)
	if err := h.Send(e[:]); err != nil {
		t.Fatal(err)
	}
	r.logged(t, "connection closed", "took no responses")
	serves(t, c)
}

// A host that connects and sends nothing is disconnected, too.
func TestSilentHostIsCutOff(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(s *setup) { s.serve.HandshakeTimeout = 200 * time.Millisecond })
	h := r.resolve(t)
	p := rawhost.Request(0)
	if err := h.Connect(p[:], 16); err != nil {
		t.Fatal(err)
	}
	r.logged(t, "connection closed", "handshake timeout")
	eventually(t, "the end of its queue pair", func() bool { return r.target.Counts().QPs == 0 })
}

// Many hosts at once, more than may be connected: those that can connect are served, the others get the reason. It may
// be all of them, if the admin queues leave no queue pair for I/O. Those are served when they try again after the
// storm, and nothing is left behind.
func TestConnectStorm(t *testing.T) {
	r := newRig(t, func(s *setup) { s.attr.MaxQPs = 24 })
	var wg sync.WaitGroup
	var out atomic.Int32
	// use connects a host that reads a block, and reports whether it was let in.
	use := func() (in bool) {
		o := r.options()
		o.QueueDepth, o.CtrlLossTimeout = 4, -1
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		c, err := client.Connect(ctx, o)
		if err == nil {
			ns, err := c.Namespace(ctx, 1)
			if err == nil {
				_, err = ns.ReadAt(ctx, make([]byte, 4096), 0)
			}
			if err := errors.Join(err, c.Close()); err != nil {
				t.Error(err)
			}
			return true
		}
		if rej := (*verbs.RejectedError)(nil); !errors.As(err, &rej) {
			t.Errorf("refused otherwise than by a reject: %v", err)
		}
		return false
	}
	for range 30 {
		wg.Go(func() {
			if !use() {
				out.Add(1)
			}
		})
	}
	wg.Wait()
	if out.Load() == 0 {
		t.Error("nobody was refused: the test shows nothing")
	}
	none := func() bool { return r.target.Counts().QPs == 0 }
	for range out.Load() {
		eventually(t, "the end of all queue pairs", none)
		if !use() {
			t.Fatal("a host is refused that comes alone")
		}
	}
	eventually(t, "the end of all queue pairs", none)
	serves(t, r.client(t))
}

// Removing a device ends its connections. When it is back, hosts find the target again.
func TestDeviceGoesAndComesBack(t *testing.T) {
	t.Parallel()
	for _, wildcard := range []bool{false, true} {
		r := newRig(t, func(s *setup) {
			if wildcard {
				s.listen = wildcardAddr
			}
		})
		o := r.options()
		o.ReconnectDelay, o.KATO = 20*time.Millisecond, 500*time.Millisecond
		c := r.connect(t, o)
		serves(t, c)
		r.target.RemoveDevice(r.target.Devices()[0])
		eventually(t, "the end of all queue pairs", func() bool { return r.target.Counts().QPs == 0 })
		r.target.AddDevice(r.device)
		serves(t, c)
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// A device without connections is closed when it is removed: nothing of it may stay open.
func TestIdleDeviceIsClosed(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(s *setup) { s.listen = wildcardAddr })
	c := r.client(t)
	serves(t, c)
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the end of the connections", func() bool { return r.target.Counts().QPs == 0 })
	r.target.RemoveDevice(r.target.Devices()[0])
	eventually(t, "the end of the device", func() bool { return r.target.Counts() == verbs.Counts{Listeners: 1} })
	r.target.AddDevice(r.device)
	serves(t, r.client(t))
}

// Stop in the middle of everything.
func TestCloseUnderLoadLeavesNothing(t *testing.T) {
	t.Parallel()
	for range 5 {
		r := newRig(t, nil)
		var wg sync.WaitGroup
		for range 3 {
			o := r.options()
			o.QPairs, o.QueueDepth, o.CtrlLossTimeout = 1, 16, -1
			l := newLoad(t, r.connect(t, o), client.OpWrite, 16384, 16)
			wg.Go(func() {
				if err := l.Run(1 << 30); err == nil {
					t.Error("the load has ended by itself")
				}
			})
		}
		eventually(t, "load", func() bool { return r.target.Stats().Reads > 200 })
		ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
		r.server.Drain(ctx)
		cancel()
		r.server.Close()
		wg.Wait()
	}
}
