package drive

import (
	"testing"
	"time"

	"jbofd/internal/pipeline"
	"jbofd/internal/ssd"
	"jbofd/internal/units"
)

// TestAComposedOperationCanBeAbortedBetweenItsRequests: it ends with the request that is in flight. A compare-and-write
// whose write is at the device completes.
func TestAComposedOperationCanBeAbortedBetweenItsRequests(t *testing.T) {
	for _, op := range []pipeline.Op{pipeline.Verify, pipeline.Compare, pipeline.CompareWrite,
		pipeline.DeallocateRanges} {
		t.Run(op.String(), func(t *testing.T) {
			g, dev := newGate(t)
			h := newRig(t, rigConfig{}, dev).host("a")
			const n = 3 * scratchBytes
			io := h.io(0, op, 0, n)
			switch op {
			case pipeline.Compare:
				h.with(io, make([]byte, n))
			case pipeline.CompareWrite:
				h.with(io, make([]byte, 2*n))
			case pipeline.DeallocateRanges:
				io.Ranges = []pipeline.Range{{Offset: 0, Len: 512}, {Offset: 512, Len: 512}, {Offset: 1024, Len: 512}}
			}
			h.submit(io)
			g.exactly(t, 1)
			g.let(0, nil)
			g.here(t, 1)
			if !h.r.o.Abort(io) || h.r.o.Abort(io) {
				t.Fatal("it cannot be aborted once while its second request is at the device")
			}
			g.exactly(t, 1)
			g.let(0, nil)
			if h.finish(1); io.Err != ErrAborted {
				t.Errorf("it ends with %v", io.Err)
			}
			g.exactly(t, 0)
			h.put(io)
		})
	}
	t.Run("write of a compare-and-write", func(t *testing.T) {
		g, dev := newGate(t)
		h := newRig(t, rigConfig{}, dev).host("a")
		io := h.with(h.io(0, pipeline.CompareWrite, 0, 512), make([]byte, 1024))
		h.submit(io)
		g.exactly(t, 1)
		g.let(0, nil)
		if reqs := g.here(t, 1); reqs[0].Op != ssd.Write {
			t.Fatalf("at the device: %s, want the write", describe(reqs))
		}
		if h.r.o.Abort(io) {
			t.Error("it was aborted with its write at the device")
		}
		g.let(0, nil)
		if h.finish(1); io.Err != nil {
			t.Error(io.Err)
		}
		h.put(io)
	})
}

// TestIOsThatWaitForAClaimOrAScratchBufferCanBeAborted, and the IOs behind them proceed.
func TestIOsThatWaitForAClaimOrAScratchBufferCanBeAborted(t *testing.T) {
	g, dev := newGate(t)
	h := newRig(t, rigConfig{}, dev).host("a")
	var verifies []*IO
	for i := range uint32(scratchCount + 2) {
		verifies = append(verifies, h.io(i, pipeline.Verify, 0, 512))
	}
	h.submit(verifies...)
	g.exactly(t, scratchCount)
	aborted := func(io *IO) {
		t.Helper()
		if !h.r.o.Abort(io) {
			t.Error("it waits and cannot be aborted")
		}
		if done := h.finish(1)[0]; done != io || io.Err != ErrAborted {
			t.Errorf("slot %d is done with %v, want slot %d aborted", done.Slot, done.Err, io.Slot)
		}
		h.put(io)
	}
	aborted(verifies[scratchCount])
	for range scratchCount + 1 {
		g.here(t, 1)
		g.let(0, nil)
	}
	h.finish(scratchCount + 1)

	first := h.with(h.io(20, pipeline.CompareWrite, 0, 512), make([]byte, 1024))
	second := h.with(h.io(21, pipeline.CompareWrite, 0, 1024), make([]byte, 2048))
	write := h.with(h.io(22, pipeline.Write, 512, 512), make([]byte, 512)) // overlaps the second alone
	h.submit(first, second, write)
	g.exactly(t, 1)
	if got := h.r.o.Stats().Queued.Load(); got != 2 {
		t.Errorf("%d are said to wait, want 2", got)
	}
	aborted(second)
	if reqs := g.here(t, 2); reqs[1].Op != ssd.Write {
		t.Errorf("at the device: %s, want the write that waited for the aborted one", describe(reqs))
	}
	third := h.with(h.io(23, pipeline.Write, 0, 512), make([]byte, 512))
	h.submit(third)
	aborted(third)
	stop := make(chan struct{})
	defer close(stop)
	go g.all(stop)
	h.put(h.finish(2)...)
}

// TestAnAbortedWaiterDoesNotUseUpAScratchBuffer: a scratch buffer is returned while the first IOs in the queue for
// scratch buffers were aborted and have not been removed yet. The IO behind them gets it.
func TestAnAbortedWaiterDoesNotUseUpAScratchBuffer(t *testing.T) {
	g, dev := newGate(t)
	h := newRig(t, rigConfig{}, dev).host("a")
	var verifies []*IO
	for i := range uint32(2*scratchCount + 1) {
		verifies = append(verifies, h.io(i, pipeline.Verify, units.DriveOffset(i)*512, 512))
	}
	h.submit(verifies...)
	g.exactly(t, scratchCount)
	for _, io := range verifies[scratchCount : 2*scratchCount] {
		if !io.state.CompareAndSwap(io, stateQueued, stateAborted) { // the first step of Abort
			t.Fatal("it does not wait")
		}
	}
	for range scratchCount {
		g.let(0, nil)
	}
	g.here(t, 1)
	g.let(0, nil)
	for _, io := range h.finish(len(verifies)) {
		var want error
		if io.Slot >= scratchCount && io.Slot < 2*scratchCount {
			want = ErrAborted
		}
		if io.Err != want {
			t.Errorf("slot %d is done with %v, want %v", io.Slot, io.Err, want)
		}
	}
}

// TestScratchBuffersGoRoundByTenant: a tenant with many Verifys does not keep another's Compare from a scratch buffer
// for more than the requests that are at the device.
func TestScratchBuffersGoRoundByTenant(t *testing.T) {
	g, dev := newGate(t)
	r := newRig(t, rigConfig{}, dev)
	many, one := r.host("many"), r.host("one")
	many.tenant, one.tenant = 1, 2
	for i := range uint32(20) {
		many.submit(many.io(i, pipeline.Verify, 0, 3*scratchBytes))
	}
	g.exactly(t, scratchCount)
	one.submit(one.with(one.io(0, pipeline.Compare, 8<<20, 512), make([]byte, 512)))
	for i := range 2 { // it may be second: the first scratch buffer that is returned may be assigned already
		g.let(0, nil)
		if reqs := g.here(t, scratchCount); reqs[scratchCount-1].Offset == 8<<20 {
			g.let(scratchCount-1, nil)
			one.put(one.finish(1)...)
			break
		} else if i == 1 {
			t.Errorf("at the device: %s, want the Compare among them", describe(reqs))
		}
	}
	stop := make(chan struct{})
	defer close(stop)
	go g.all(stop)
	many.finish(20)
}

// TestBlockedWritesLeaveTheWindowToOthers: writes that wait for a compare-and-write of their range do not count in the
// policy's window.
func TestBlockedWritesLeaveTheWindowToOthers(t *testing.T) {
	g, dev := newGate(t)
	const depth = 4
	r := newRig(t, rigConfig{depth: depth}, dev)
	h, reader := r.host("a"), r.host("reader")
	cw := h.with(h.io(0, pipeline.CompareWrite, 0, 512), make([]byte, 1024))
	h.submit(cw)
	const writes = 3 * depth
	for i := range uint32(writes) {
		h.submit(h.with(h.io(i+1, pipeline.Write, 0, 512), make([]byte, 512)))
	}
	g.exactly(t, 1)
	for i := range uint32(depth - 1) {
		reader.submit(reader.io(i, pipeline.Read, 0, 512))
	}
	g.exactly(t, depth)
	stop := make(chan struct{})
	defer close(stop)
	go g.all(stop)
	reader.put(reader.finish(depth - 1)...)
	h.put(h.finish(writes + 1)...)
}

// TestARemovedTenantIsForgottenWithItsLastRequest: also if that request belongs to a composed operation.
func TestARemovedTenantIsForgottenWithItsLastRequest(t *testing.T) {
	g, dev := newGate(t)
	r := newRig(t, rigConfig{}, dev)
	h := r.host("a")
	h.tenant = 3
	r.o.SetTenant(3, pipeline.Settings{Weight: 7})
	h.submit(h.io(0, pipeline.Verify, 0, 2*scratchBytes))
	g.exactly(t, 1)
	if r.o.RemoveTenant(3) {
		t.Error("a tenant with an operation under way is forgotten")
	}
	g.let(0, nil)
	g.here(t, 1)
	if r.o.RemoveTenant(3) {
		t.Error("a tenant is forgotten between two requests of its operation")
	}
	var s Snapshot
	if r.o.Snapshot(&s); len(s.Tenants) != 1 || s.Tenants[0].Weight != 7 {
		t.Errorf("between two requests of its operation a tenant that leaves is known as %+v, want weight 7", s.Tenants)
	}
	g.let(0, nil)
	h.finish(1)
	if !r.o.RemoveTenant(3) {
		t.Error("the tenant is not forgotten")
	}
}

// turnObserver is a sink that uses its drive whenever it is kicked.
type turnObserver struct{ *host }

func (o turnObserver) Kick() {
	o.r.o.Credit(0) // waits for ownership
	o.host.Kick()
}

// TestSinksAreKickedAfterOwnershipEnds: a Kick may use the drive.
func TestSinksAreKickedAfterOwnershipEnds(t *testing.T) {
	h := newRig(t, rigConfig{}, memory).host("a")
	io := h.io(0, pipeline.Read, 0, 4096)
	io.Init(turnObserver{h}, 0)
	done := make(chan struct{})
	go func() {
		defer close(done)
		h.submit(io)
	}()
	select {
	case <-done:
	case <-time.After(testTimeout):
		t.Fatal("a Kick that looks at its drive never ends")
	}
	h.finish(1)
	h.put(io)
}
