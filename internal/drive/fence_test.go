package drive

import (
	"bytes"
	"errors"
	"testing"

	"jbofd/internal/fence"
	"jbofd/internal/pipeline"
	"jbofd/internal/ssd"
	"jbofd/internal/units"
)

// TestAStalePassNeverReachesTheDevice: IOs that are in the pipeline when their holder's epoch is raised end with
// fence.ErrStale, and those of the next epoch take their place.
func TestAStalePassNeverReachesTheDevice(t *testing.T) {
	g, dev := newGate(t)
	r := newRig(t, rigConfig{depth: 1}, dev)
	h := r.host("h")
	holder := fence.NewHolder(func() {})
	var old, young fence.Share
	holder.Join(&old)

	fetching := h.io(4, pipeline.Write, 4*4096, 4096)
	fetching.Fetch, fetching.Pass = true, old.Pass()
	h.submit(fetching)
	h.admit(1)
	write := func(slot uint32, fill byte, p fence.Pass) *IO {
		io := h.with(h.io(slot, pipeline.Write, units.DriveOffset(slot)*4096, 4096), bytes.Repeat([]byte{fill}, 4096))
		io.Pass = p
		return io
	}
	atDevice, waits, waitsToo := write(0, 1, old.Pass()), write(1, 1, old.Pass()), write(2, 1, old.Pass())
	h.submit(atDevice)
	h.submit(waits, waitsToo)
	g.exactly(t, 1)

	holder.Raise()
	holder.Join(&young)
	next := write(3, 2, young.Pass())
	h.submit(next)
	fetching.Return(nil) // the data came later

	g.let(0, nil)
	for _, io := range h.finish(4) {
		want := fence.ErrStale
		if io == atDevice {
			want = nil // the device had it: it completes
		}
		if !errors.Is(io.Err, want) {
			t.Errorf("slot %d: %v, want %v", io.Slot, io.Err, want)
		}
		h.put(io)
	}
	if reqs := g.exactly(t, 1); reqs[0].Offset != int64(next.Offset) {
		t.Errorf("at the device: %s, want the write of the next epoch", describe(reqs))
	}
	g.let(0, nil)
	h.put(h.finish(1)...)
	if got := r.o.Stats().Stale.Load(); got != 3 {
		t.Errorf("%d IOs counted as stale, want 3", got)
	}
}

// TestACompareWriteIsFencedBetweenItsRequests: the compare was at the device, the write must not follow, and IOs that
// wait for the range proceed.
func TestACompareWriteIsFencedBetweenItsRequests(t *testing.T) {
	g, dev := newGate(t)
	r := newRig(t, rigConfig{depth: 4}, dev)
	h := r.host("h")
	holder := fence.NewHolder(func() {})
	var old fence.Share
	holder.Join(&old)
	cw := h.with(h.io(0, pipeline.CompareWrite, 0, 512), append(make([]byte, 512), bytes.Repeat([]byte{7}, 512)...))
	cw.Pass = old.Pass()
	h.submit(cw)
	g.exactly(t, 1)
	blocked := h.with(h.io(1, pipeline.Write, 0, 512), make([]byte, 512))
	h.submit(blocked)
	holder.Raise()
	g.let(0, nil)
	if done := h.finish(1)[0]; done != cw || !errors.Is(done.Err, fence.ErrStale) {
		t.Fatalf("slot %d is done with %v, want slot 0 stale", done.Slot, done.Err)
	}
	if reqs := g.exactly(t, 1); reqs[0].Op != ssd.Write || reqs[0].Buf[0] != 0 {
		t.Errorf("at the device: %s, want the write that was blocked", describe(reqs))
	}
	g.let(0, nil)
	h.finish(1)
	h.put(cw, blocked)
}

// TestAbortStaleRemovesWaitingIOs: IOs whose extent was revoked end at once, and not when the pipeline dispatches them,
// also those that nobody can abort otherwise.
func TestAbortStaleRemovesWaitingIOs(t *testing.T) {
	for _, unabortable := range []bool{false, true} {
		abortStale(t, unabortable)
	}
}

func abortStale(t *testing.T, unabortable bool) {
	t.Helper()
	g, dev := newGate(t)
	r := newRig(t, rigConfig{depth: 1}, dev)
	h := r.host("h")
	holder := fence.NewHolder(func() {})
	first, waits, other := h.io(0, pipeline.Read, 0, 512), h.io(1, pipeline.Read, 512, 512),
		h.io(2, pipeline.Read, 1024, 512)
	for _, io := range []*IO{first, waits, other} {
		io.Unabortable = unabortable
	}
	first.Extent, waits.Extent = holder.Pass(), holder.Pass()
	h.submit(first)
	h.submit(waits, other)
	g.exactly(t, 1)
	holder.Raise()
	r.o.AbortStale()
	if done := h.finish(1)[0]; done != waits || !errors.Is(done.Err, fence.ErrStale) {
		t.Errorf("slot %d is done with %v, want slot 1 stale while the device is busy", done.Slot, done.Err)
	}
	g.let(0, nil)
	if done := h.finish(1)[0]; done != first || done.Err != nil {
		t.Errorf("slot %d is done with %v, want slot 0, which the device had", done.Slot, done.Err)
	}
	g.let(0, nil)
	if done := h.finish(1)[0]; done != other || done.Err != nil {
		t.Errorf("slot %d is done with %v, want slot 2", done.Slot, done.Err)
	}
	h.put(first, waits, other)
}

// TestAStaleOperationEndsAsStaleBetweenItsRequests, and not as aborted.
func TestAStaleOperationEndsAsStaleBetweenItsRequests(t *testing.T) {
	for _, op := range []pipeline.Op{pipeline.Verify, pipeline.CompareWrite} {
		g, dev := newGate(t)
		h := newRig(t, rigConfig{}, dev).host("a")
		holder := fence.NewHolder(func() {})
		io := h.io(0, op, 0, 2*scratchBytes)
		if io.Pass = holder.Pass(); op == pipeline.CompareWrite {
			h.with(io, make([]byte, 4*scratchBytes))
		}
		h.submit(io)
		g.exactly(t, 1)
		holder.Raise()
		h.r.o.AbortStale()
		h.r.o.Quiesce() // takes a turn
		g.let(0, nil)
		if done := h.finish(1)[0]; done.Err != fence.ErrStale {
			t.Errorf("%v: %v, want %v", op, done.Err, fence.ErrStale)
		}
		h.put(io)
	}
}
