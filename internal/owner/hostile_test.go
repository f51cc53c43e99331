package owner

import (
	"testing"

	"jbofd/internal/pipeline"
)

// TestAbortOfWhatIsNotYetQueued: an IO that is aborted between its Submit and the turn that takes it
// from the inbox does not wait for its place at the device. The turn under way has looked for aborted
// ones already.
func TestAbortOfWhatIsNotYetQueued(t *testing.T) {
	g, dev := newGate(t)
	r := newRig(t, rigConfig{depth: 1}, dev)
	h := r.host("h")
	first, second := h.io(0, pipeline.Verify, 0, 512), h.io(1, pipeline.Verify, 0, 512)
	h.submit(first)
	g.exactly(t, 1)

	r.o.mu.Lock()
	h.submit(second)
	if !r.o.Abort(second) {
		t.Fatal("it cannot be aborted")
	}
	r.o.aborting.Store(false) // as takeAborted does before it looks
	r.o.turn()
	r.o.unlock()
	r.o.run()
	if done := h.finish(1)[0]; done != second || done.Err != ErrAborted {
		t.Errorf("slot %d is done with %v, want slot 1 aborted", done.Slot, done.Err)
	}
	g.let(0, nil)
	h.finish(1)
}

// TestCompositesThatWaitForScratchMemoryLeaveTheDeviceToOthers: four at a time read, and those behind
// them take no place at the device.
func TestCompositesThatWaitForScratchMemoryLeaveTheDeviceToOthers(t *testing.T) {
	g, dev := newGate(t)
	r := newRig(t, rigConfig{depth: laneCount + 2}, dev)
	verifier, reader := r.host("verifier"), r.host("reader")
	const verifies = 20
	for i := range uint32(verifies) {
		verifier.submit(verifier.io(i, pipeline.Verify, 0, 512))
	}
	g.exactly(t, laneCount)
	reader.submit(reader.io(0, pipeline.Read, 0, 512), reader.io(1, pipeline.Read, 512, 512))
	g.exactly(t, laneCount+2)
	stop := make(chan struct{})
	defer close(stop)
	go g.all(stop)
	verifier.finish(verifies)
	reader.put(reader.finish(2)...)
}
