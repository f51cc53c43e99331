package memverbs

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"testing"

	"jbofd/internal/nvmeof/rdma/verbs"
)

func (s *side) was(v verbs.Event) bool { return slices.Contains(s.told, v) }

func TestCutIsReportedToBothSides(t *testing.T) {
	seen := map[verbs.WCStatus]bool{}
	forSeeds(t, 40, func(t *testing.T, seed uint64) {
		r := newRig(t, rigConfig{net: Config{Seed: seed}})
		r.Run()
		h, g := r.host, r.target
		h.post(to(h.send(verbs.OpWrite, 1, 0, 8, 0), g, 0), h.send(verbs.OpSend, 2, 0, 8, 0))
		r.host.ep.Cut()
		r.Run()
		wcs := h.poll()
		if len(wcs) != 2 {
			t.Fatalf("%+v", wcs)
		}
		seen[wcs[0].Status] = true
		h.wants(wcs, ended(1, wcs[0].Status), ended(2, verbs.StatusFlushed))
		if !h.was(verbs.Disconnected) || !g.was(verbs.Disconnected) {
			t.Errorf("events of the host %v, of the target %v", h.told, g.told)
		}
		r.close()
	})
	if *seedFlag == 0 && (!seen[verbs.StatusFlushed] || !seen[verbs.StatusRetryExceeded] || len(seen) != 2) {
		t.Errorf("outcomes seen: %v", seen)
	}
}

func TestSilenceIsNoticedByTheSender(t *testing.T) {
	r := newRig(t, rigConfig{})
	r.Run()
	h, g := r.host, r.target
	g.told = nil
	h.ep.Silence()
	r.Run()
	h.wants(h.poll())
	h.post(h.send(verbs.OpSend, 1, 0, 8, 0))
	r.Run()
	h.wants(h.poll(), ended(1, verbs.StatusRetryExceeded))
	must(0, h.ep.Disconnect())
	r.Run()
	if len(g.told) > 0 || h.was(verbs.Disconnected) {
		t.Errorf("events of the host %v, of the target %v", h.told, g.told)
	}
	r.close()
}

func TestBreakIsFatal(t *testing.T) {
	r := newRig(t, rigConfig{})
	g := r.target
	g.postRecv(g.recv(1, 0, 8))
	g.ep.Break()
	r.Run()
	g.wants(g.poll(), ended(1, verbs.StatusFlushed))
	if !g.was(verbs.Fatal) {
		t.Errorf("events %v", g.told)
	}
	r.host.post(r.host.send(verbs.OpSend, 1, 0, 8, 0))
	r.Run()
	r.host.wants(r.host.poll(), ended(1, verbs.StatusRetryExceeded)) // a queue pair in the error state does not answer
	r.close()
}

func TestHeldEventsDoNotDelayData(t *testing.T) {
	r := newRig(t, rigConfig{})
	r.Run()
	g := r.target
	if !g.ep.Passive() || r.host.ep.Passive() {
		t.Error("the target's end is the passive one")
	}
	g.told = nil
	g.ep.HoldEvents()
	must(0, r.host.ep.Disconnect())
	r.Run()
	if len(g.told) > 0 {
		t.Errorf("events %v while they are held", g.told)
	}
	select {
	case <-g.ep.Drained():
	default:
		t.Error("the disconnected queue pair is not drained")
	}
	g.ep.ReleaseEvents()
	r.Run()
	if !g.was(verbs.Disconnected) {
		t.Errorf("events %v after that", g.told)
	}
	r.close()
}

func TestHoldAndPauseKeepDataBack(t *testing.T) {
	r := newRig(t, rigConfig{})
	r.Run()
	h, g := r.host, r.target
	for _, stop := range []struct{ stop, start func() }{{h.ep.Hold, h.ep.Release}, {g.ep.Hold, g.ep.Release},
		{r.Pause, r.Resume}} {
		g.postRecv(g.recv(1, 0, 8))
		stop.stop()
		h.post(h.send(verbs.OpSend, 2, 0, 8, verbs.FlagSignaled))
		r.Run()
		g.wants(g.poll())
		h.wants(h.poll())
		stop.start()
		r.Run()
		g.wants(g.poll(), ended(1, verbs.StatusOK))
		h.wants(h.poll(), ended(2, verbs.StatusOK))
	}
	r.close()
}

func TestRemovedDevice(t *testing.T) {
	flushed := map[int]bool{}
	forSeeds(t, 30, func(t *testing.T, seed uint64) {
		r := newRig(t, rigConfig{net: Config{Seed: seed}, bound: seed%2 == 0, srq: int(seed % 3)})
		r.Run()
		h, g := r.host, r.target
		dev := g.p.Devices()[0]
		g.post(g.send(verbs.OpSend, 1, 0, 8, 0))
		g.p.RemoveDevice(dev)
		r.Run()
		select {
		case <-dev.Removed():
		default:
			t.Error("Removed is not closed")
		}
		if !g.was(verbs.Removed) || !h.was(verbs.Disconnected) {
			t.Errorf("events of the target %v, of the host %v", g.told, h.told)
		}
		flushed[len(g.poll())] = true
		_, err1 := g.dom.PostSend([]verbs.SendWR{g.send(verbs.OpSend, 2, 0, 8, 0)})
		_, err2 := g.dom.CreateCQ(1)
		_, err3 := dev.OpenDomain()
		for _, err := range []error{err1, err2, err3} {
			if !errors.Is(err, verbs.ErrDeviceRemoved) {
				t.Errorf("%v, want ErrDeviceRemoved", err)
			}
		}
		_, err := h.p.Resolve(context.Background(), netip.AddrPortFrom(targetIP, 4420))
		if !errors.Is(err, verbs.ErrUnreachable) {
			t.Errorf("resolve: %v", err)
		}
		if seed%2 == 0 {
			if _, err := r.lis.Accept(); !errors.Is(err, verbs.ErrDeviceRemoved) {
				t.Errorf("accept of a listener bound to the device: %v", err)
			}
		} else {
			d := g.p.AddDevice(DeviceConfig{Addr: targetIP})
			e := must(h.p.Resolve(context.Background(), netip.AddrPortFrom(targetIP, 4420)))
			must(e.CreateQP(verbs.QPConfig{Domain: h.dom, SendCQ: h.cq, RecvCQ: h.cq, Sends: 1, Recvs: 1}))
			must(0, e.(*Endpoint).Begin(usual))
			te := must(r.lis.Accept())
			if te.Device() != verbs.Device(d) {
				t.Error("not over the new device")
			}
			must(0, te.Close())
			must(0, e.Close())
		}
		r.close()
	})
	if *seedFlag == 0 && (!flushed[0] || !flushed[1]) {
		t.Errorf("numbers of requests flushed: %v", flushed)
	}
}

func TestDeviceRemovedWhileConnecting(t *testing.T) {
	forSeeds(t, 40, func(t *testing.T, seed uint64) {
		r := newRig(t, rigConfig{net: Config{Seed: seed}, unconnected: true})
		h, g := r.host, r.target
		c := rigConfig{sends: 1, recvs: 1}
		h.endpoint(must(h.p.Resolve(context.Background(), netip.AddrPortFrom(targetIP, 4420))), c)
		must(0, h.ep.Begin(usual))
		for range seed % 5 {
			r.Step()
		}
		of := []*side{h, g}[seed/5%2]
		of.p.RemoveDevice(of.p.Devices()[0])
		err := h.ep.Connect(context.Background(), usual)
		want := verbs.ErrUnreachable
		if of == h {
			want = verbs.ErrDeviceRemoved
		}
		if !errors.Is(err, want) {
			t.Errorf("connect: %v, want %v", err, want)
		}
		if e, err := r.lis.Accept(); err == nil {
			g.endpointOf(e)
			r.Run()
			if len(g.told) == 0 {
				t.Error("the request's user learns nothing")
			}
		}
		r.close()
	})
}

// endpointOf watches an endpoint that gets no queue pair.
func (s *side) endpointOf(e verbs.Endpoint) {
	s.ep = e.(*Endpoint)
	e.OnEvent(func(v verbs.Event) { s.told = append(s.told, v) })
}

func TestRequestsBeyondTheBacklogAreRefused(t *testing.T) {
	r := newRig(t, rigConfig{unconnected: true})
	h := r.host
	var all []*Endpoint
	for range 10 { // 8 wait
		e := must(h.p.Resolve(context.Background(), netip.AddrPortFrom(targetIP, 4420))).(*Endpoint)
		must(e.CreateQP(verbs.QPConfig{Domain: h.dom, SendCQ: h.cq, RecvCQ: h.cq, Sends: 1, Recvs: 1}))
		must(0, e.Begin(usual))
		all = append(all, e)
	}
	r.Run()
	refused := 0
	for _, e := range all {
		var no *verbs.RejectedError
		if err := e.Connect(context.Background(), usual); errors.As(err, &no) {
			refused++
		} else if err != ErrQuiet {
			t.Errorf("connect: %v", err)
		}
	}
	if refused != 2 {
		t.Errorf("%d of 10 refused, want 2", refused)
	}
	must(0, r.lis.Close())
	for _, e := range all {
		if err := e.Connect(context.Background(), usual); err == nil {
			t.Error("connected to a listener that has closed")
		}
		must(0, e.Close())
	}
	r.close()
}
