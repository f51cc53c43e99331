package memverbs

import (
	"errors"
	"net/netip"
	"testing"

	"jbofd/internal/nvmeof/rdma/verbs"
)

func TestSendQueueIsFreedByPollingALaterCompletion(t *testing.T) {
	r := newRig(t, rigConfig{sends: 4})
	h, g := r.host, r.target
	write := func(id uint64, f verbs.Flags) verbs.SendWR { return to(h.send(verbs.OpWrite, id, 0, 8, f), g, 0) }
	full := func(what string) {
		t.Helper()
		if n, err := h.dom.PostSend([]verbs.SendWR{write(99, 0)}); n != 0 || err != verbs.ErrQueueFull {
			t.Fatalf("%s: took %d, %v, want ErrQueueFull", what, n, err)
		}
	}
	if n, err := h.dom.PostSend([]verbs.SendWR{write(1, 0), write(2, 0), write(3, verbs.FlagSignaled), write(4, 0),
		write(5, 0)}); n != 4 || err != verbs.ErrQueueFull {
		t.Fatalf("took %d of 5: %v", n, err)
	}
	full("nothing carried out")
	r.Run()
	full("nothing polled")
	h.wants(h.poll(), ended(3, verbs.StatusOK))
	h.post(write(5, 0), write(6, 0), write(7, 0))
	full("the fourth was not signaled")
	r.Run()
	full("the last completion was of the third")
	r.close()
}

func TestSharedReceivesAreFreedByPolling(t *testing.T) {
	r := newRig(t, rigConfig{srq: 2})
	h, g := r.host, r.target
	g.postRecv(g.recv(1, 0, 64), g.recv(2, 0, 64))
	h.post(h.send(verbs.OpSend, 1, 0, 8, 0))
	r.Run()
	if n, err := g.srq.PostRecv([]verbs.RecvWR{g.recv(3, 0, 64)}); n != 0 || err != verbs.ErrQueueFull {
		t.Errorf("took %d, %v, want ErrQueueFull", n, err)
	}
	g.wants(g.poll(), ended(1, verbs.StatusOK))
	if n, err := g.srq.PostRecv([]verbs.RecvWR{g.recv(3, 0, 64), g.recv(4, 0, 64)}); n != 1 ||
		err != verbs.ErrQueueFull {
		t.Errorf("took %d of 2, %v, want 1 and ErrQueueFull", n, err)
	}
	r.close()
}

func TestCompletionQueueOverflowIsReported(t *testing.T) {
	r := newRig(t, rigConfig{cqes: 2})
	h, g := r.host, r.target
	for i := range uint64(3) {
		h.post(to(h.send(verbs.OpWrite, i, 0, 8, verbs.FlagSignaled), g, 0))
	}
	r.Run()
	if r.Faults() == nil {
		t.Error("nothing is kept of the overflow")
	}
	if len(h.told) == 0 || h.told[0] != verbs.Fatal {
		t.Errorf("events %v, want %v", h.told, verbs.Fatal)
	}
	h.wants(h.poll(), ended(0, verbs.StatusOK), ended(1, verbs.StatusOK))
	if _, err := h.cq.Poll(make([]verbs.WC, 1)); err == nil {
		t.Error("Poll hides it")
	}
	r.closeFaulty()
}

func TestMessageWithoutReceive(t *testing.T) {
	forSeeds(t, 20, func(t *testing.T, seed uint64) {
		// The receiver's count decides.
		p, q := usual, usual
		p.RNRRetryCount = 3
		r := newRig(t, rigConfig{net: Config{Seed: seed}, target: p, host: q})
		h, g := r.host, r.target
		h.post(h.send(verbs.OpSend, 1, 0, 8, 0), h.send(verbs.OpSend, 2, 0, 8, 0))
		r.Run()
		h.wants(h.poll(), ended(1, verbs.StatusRNRExceeded), ended(2, verbs.StatusFlushed))
		if n := h.ep.Stats().RNRs; n != 4 {
			t.Errorf("%d attempts, want 1 and 3 more", n)
		}
		r.close()

		r = newRig(t, rigConfig{net: Config{Seed: seed}})
		h, g = r.host, r.target
		h.post(h.send(verbs.OpSend, 1, 0, 8, verbs.FlagSignaled))
		r.Run()
		h.wants(h.poll())
		g.ep.DropToRNR(2)
		g.postRecv(g.recv(1, 0, 8))
		r.Run()
		h.wants(h.poll(), ended(1, verbs.StatusOK))
		g.wants(g.poll(), ended(1, verbs.StatusOK))
		if n := h.ep.Stats().RNRs; n != 3 {
			t.Errorf("%d attempts met no receive, want 3", n)
		}
		r.close()
	})
}

func TestReadsKeepToTheDepth(t *testing.T) {
	forSeeds(t, 20, func(t *testing.T, seed uint64) {
		p := usual
		p.ResponderResources = 2 // less than the host asked for
		r := newRig(t, rigConfig{net: Config{Seed: seed}, target: p})
		h, g := r.host, r.target
		for i := range uint64(10) {
			h.post(to(h.send(verbs.OpRead, i, 0, 8, verbs.FlagSignaled), g, 0))
		}
		most := uint8(0)
		for r.Step() {
			most = max(most, h.ep.reads)
		}
		if n := len(h.poll()); n != 10 || most > 2 {
			t.Errorf("%d READs, up to %d at a time, want 10, up to 2", n, most)
		}
		r.close()
	})
}

func TestReadsThatThePeerDoesNotServeAreAMistake(t *testing.T) {
	faults := 0
	forSeeds(t, 10, func(t *testing.T, seed uint64) {
		for _, p := range []verbs.Params{
			{RNRRetryCount: 7}, // none are allowed
			{RNRRetryCount: 7, InitiatorDepth: 16, ResponderResources: 16}, // the host serves 4
		} {
			r := newRig(t, rigConfig{net: Config{Seed: seed}, sends: 64, target: p})
			for i := range uint64(64) {
				r.target.post(to(r.target.send(verbs.OpRead, i, 0, 8, 0), r.host, 0))
			}
			r.Run()
			if r.Faults() != nil {
				faults++
				if wcs := r.target.poll(); len(wcs) == 0 || wcs[0].Status != verbs.StatusRemoteInvalid {
					t.Errorf("%+v", wcs)
				}
			}
			r.closeFaulty()
		}
	})
	if *seedFlag == 0 && faults < 11 {
		t.Errorf("%d mistakes found in 20 runs, want those of no READs and some of too many", faults)
	}
}

func TestFenceOrdersAfterReads(t *testing.T) {
	early := 0
	for _, flags := range []verbs.Flags{0, verbs.FlagFence} {
		forSeeds(t, 50, func(t *testing.T, seed uint64) {
			r := newRig(t, rigConfig{net: Config{Seed: seed}})
			h, g := r.host, r.target
			copy(g.mem, "from the target")
			h.post(to(h.send(verbs.OpRead, 1, 0, 15, 0), g, 0), to(h.send(verbs.OpWrite, 2, 0, 15, flags), g, 100))
			r.Run()
			if string(g.mem[100:115]) != "from the target" {
				early++
				if flags != 0 {
					t.Error("a fenced WRITE went before the READ's answer")
				}
			}
			r.close()
		})
	}
	if early == 0 && *seedFlag == 0 {
		t.Error("without a fence, no seed lets a WRITE go before the answer of a READ")
	}
}

func TestDataIsTakenAsLateAsPossible(t *testing.T) {
	r := newRig(t, rigConfig{})
	h, g := r.host, r.target
	copy(h.mem, "first")
	g.postRecv(g.recv(1, 0, 64))
	h.post(h.send(verbs.OpSend, 1, 0, 5, 0), to(h.send(verbs.OpWrite, 2, 0, 5, verbs.FlagInline), g, 100))
	copy(h.mem, "later")
	r.Run()
	if string(g.mem[:5]) != "later" || string(g.mem[100:105]) != "first" {
		t.Errorf("%q, inline %q", g.mem[:5], g.mem[100:105])
	}
	r.close()
}

func TestQueuePairsOvertakeEachOther(t *testing.T) {
	var seen [2]bool
	forSeeds(t, 30, func(t *testing.T, seed uint64) {
		c := rigConfig{net: Config{Seed: seed}}
		r := newRig(t, c)
		h, g := r.host, r.target
		h.mem[0], g.mem[0] = 1, 2
		h.post(to(h.send(verbs.OpWrite, 1, 0, 1, 0), g, 100))
		g.post(g.send(verbs.OpSend, 1, 0, 1, 0))
		h.postRecv(h.recv(1, 200, 1))
		for g.mem[100] == 0 && h.mem[200] == 0 && r.Step() {
		}
		seen[h.mem[200]/2] = true
		r.Run()
		r.close()
	})
	if *seedFlag == 0 && seen != [2]bool{true, true} {
		t.Errorf("orders seen: %v", seen)
	}
}

func TestKeysAndAddresses(t *testing.T) {
	r := newRig(t, rigConfig{})
	seen := map[uint32]bool{}
	last := uint64(0)
	for range 1000 {
		mr := must(r.host.dom.Register(make([]byte, 100), anything))
		if seen[mr.LKey()] || seen[mr.RKey()] || mr.LKey() == mr.RKey() || mr.Addr() < last+100 {
			t.Fatalf("keys %#x, %#x, address %#x after %#x", mr.LKey(), mr.RKey(), mr.Addr(), last)
		}
		seen[mr.LKey()], seen[mr.RKey()], last = true, true, mr.Addr()
		must(0, mr.Close())
	}
	if _, err := r.host.dom.Register(make([]byte, 8), verbs.RemoteWrite); err == nil {
		t.Error("RemoteWrite without LocalWrite")
	}
	// A region of another domain cannot be used.
	other := must(r.host.p.Devices()[0].OpenDomain())
	mr := must(other.Register(make([]byte, 64), anything))
	wr := to(r.host.send(verbs.OpWrite, 1, 0, 8, 0), r.target, 0)
	wr.Addr, wr.LKey = mr.Addr(), mr.LKey()
	r.host.post(wr)
	r.Run()
	r.host.wants(r.host.poll(), ended(1, verbs.StatusLocalProt))
	must(0, mr.Close())
	must(0, other.Close())
	r.close()
}

func TestInvalidatingAnUnknownKeyFailsBothSides(t *testing.T) {
	r := newRig(t, rigConfig{})
	h, g := r.host, r.target
	h.postRecv(h.recv(1, 0, 64), h.recv(2, 0, 64))
	wr := g.send(verbs.OpSendInvalidate, 3, 0, 8, 0)
	wr.RKey = g.mr.RKey() // its own, not the host's
	g.post(wr)
	r.Run()
	h.wants(h.poll(), ended(1, verbs.StatusRemoteInvalid), ended(2, verbs.StatusFlushed))
	g.wants(g.poll(), ended(3, verbs.StatusRemoteInvalid))
	r.close()
}

func TestDeviceLimitsAreErrResources(t *testing.T) {
	r := newRig(t, rigConfig{unconnected: true, device: DeviceConfig{
		Attr: verbs.Attr{MaxQPs: 1, MaxQPWRs: 32, MaxCQEs: 1024, MaxSRQWRs: 8, MaxMRs: 2, MaxMRBytes: 64 << 10,
			MaxResponderResources: 2, MaxInitiatorDepth: 2}}})
	h := r.host
	lacks := func(what string, err error) {
		t.Helper()
		if !errors.Is(err, verbs.ErrResources) {
			t.Errorf("%s: %v, want ErrResources", what, err)
		}
	}
	_, err := h.dom.CreateCQ(1025)
	lacks("entries of a CQ", err)
	_, err = h.dom.CreateSRQ(9)
	lacks("entries of an SRQ", err)
	_, err = h.dom.Register(make([]byte, 64<<10+1), 0)
	lacks("bytes of an MR", err)
	mr := must(h.dom.Register(make([]byte, 1), 0))
	_, err = h.dom.Register(make([]byte, 1), 0)
	lacks("MRs", err)
	must(0, mr.Close())

	resolve := func() verbs.Endpoint { return must(h.p.Resolve(t.Context(), netip.AddrPortFrom(targetIP, 4420))) }
	config := verbs.QPConfig{Domain: h.dom, SendCQ: h.cq, RecvCQ: h.cq, Sends: 33, Recvs: 1}
	e1, e2 := resolve(), resolve()
	_, err = e1.CreateQP(config)
	lacks("requests of a queue pair", err)
	config.Sends = 32
	must(e1.CreateQP(config))
	_, err = e2.CreateQP(config)
	lacks("queue pairs", err)
	lacks("READs to be served", e1.Connect(t.Context(), verbs.Params{ResponderResources: 3}))
	lacks("READs", e1.Connect(t.Context(), verbs.Params{InitiatorDepth: 3}))
	must(0, e1.Close())
	must(e2.CreateQP(config))
	h.p.Devices()[0].SetAttr(func(a *verbs.Attr) { a.MaxQPs = 0 })
	e3 := resolve()
	_, err = e3.CreateQP(config)
	lacks("queue pairs of a device that lost them", err)
	must(0, e2.Close())
	must(0, e3.Close())
	r.close()
}

func TestClosingInTheWrongOrderIsRefused(t *testing.T) {
	r := newRig(t, rigConfig{srq: 4})
	h := r.host
	for what, c := range map[string]interface{ Close() error }{"CQ": h.cq, "SRQ": h.srq, "domain": h.dom,
		"provider": h.p} {
		if c.Close() == nil {
			t.Errorf("a %s was closed that is in use", what)
		}
	}
	r.close()
}

func TestCompletionsOfAClosedQueuePairAreLostOrCome(t *testing.T) {
	came := map[int]bool{}
	forSeeds(t, 20, func(t *testing.T, seed uint64) {
		r := newRig(t, rigConfig{net: Config{Seed: seed}, srq: 4})
		h, g := r.host, r.target
		g.postRecv(g.recv(1, 0, 64), g.recv(2, 0, 64), g.recv(3, 0, 64), g.recv(4, 0, 64))
		h.post(h.send(verbs.OpSend, 1, 0, 8, 0), h.send(verbs.OpSend, 2, 0, 8, 0))
		r.Run()
		must(0, g.ep.Close())
		came[len(g.poll())] = true
		// Whether they are lost or not, their places are free again.
		g.postRecv(g.recv(5, 0, 64), g.recv(6, 0, 64))
		r.close()
	})
	if *seedFlag == 0 && (!came[0] || !came[2] || len(came) != 2) {
		t.Errorf("numbers of completions seen: %v, want 0 and 2", came)
	}
}
