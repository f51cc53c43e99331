package drive

import (
	"testing"

	"jbofd/internal/bufpool"
	"jbofd/internal/pipeline"
	"jbofd/internal/turn"
)

// TestAbortOfAnIOInTheInbox: an IO that is aborted between its Submit and the turn that takes it from the inbox ends
// without waiting for the device. The turn in progress has looked for aborted IOs already.
func TestAbortOfAnIOInTheInbox(t *testing.T) {
	g, dev := newGate(t)
	r := newRig(t, rigConfig{depth: 1}, dev)
	h := r.host("h")
	first, second := h.io(0, pipeline.Verify, 0, 512), h.io(1, pipeline.Verify, 0, 512)
	h.submit(first)
	g.exactly(t, 1)

	r.o.driver.Lock()
	h.submit(second)
	if !r.o.Abort(second) {
		t.Fatal("it cannot be aborted")
	}
	r.o.wants.Store(0) // as takeWants does before it looks
	r.o.turn()
	r.o.driver.Unlock()
	if done := h.finish(1)[0]; done != second || done.Err != ErrAborted {
		t.Errorf("slot %d is done with %v, want slot 1 aborted", done.Slot, done.Err)
	}
	g.let(0, nil)
	h.finish(1)
}

// TestCompositesThatWaitForScratchMemoryLeaveTheDeviceToOthers: four at a time read, and those behind them do not
// occupy the device.
func TestCompositesThatWaitForScratchMemoryLeaveTheDeviceToOthers(t *testing.T) {
	g, dev := newGate(t)
	r := newRig(t, rigConfig{depth: scratchCount + 2}, dev)
	verifier, reader := r.host("verifier"), r.host("reader")
	const verifies = 20
	for i := range uint32(verifies) {
		verifier.submit(verifier.io(i, pipeline.Verify, 0, 512))
	}
	g.exactly(t, scratchCount)
	reader.submit(reader.io(0, pipeline.Read, 0, 512), reader.io(1, pipeline.Read, 512, 512))
	g.exactly(t, scratchCount+2)
	stop := make(chan struct{})
	defer close(stop)
	go g.all(stop)
	verifier.finish(verifies)
	reader.put(reader.finish(2)...)
}

// forward is a policy that detects time that goes backwards.
type forward struct {
	pipeline.Policy
	t   *testing.T
	now int64
}

func (f *forward) at(now int64) {
	if now < f.now {
		f.t.Errorf("time goes back by %d", f.now-now)
	}
	f.now = now
}

func (f *forward) Enqueue(now int64, io pipeline.IO) {
	f.at(now)
	f.Policy.Enqueue(now, io)
}

func (f *forward) Dispatch(now int64, dst []pipeline.Tag) []pipeline.Tag {
	f.at(now)
	return f.Policy.Dispatch(now, dst)
}

func (f *forward) Complete(now int64, tag pipeline.Tag, r pipeline.Result) {
	f.at(now)
	f.Policy.Complete(now, tag, r)
}

// ticking is an Env whose clock advances by a nanosecond each time it is read.
type ticking struct {
	turn.Env
	now int64
}

func (t *ticking) Now() int64 {
	t.now++
	return t.now
}

// TestTheTimeOfThePipelineNeverGoesBack: also if a device completes within a turn, and the turn continues.
func TestTheTimeOfThePipelineNeverGoesBack(t *testing.T) {
	pool, err := bufpool.New(bufpool.Config{TotalBytes: 8 << 20})
	if err != nil {
		t.Fatal(err)
	}
	dev, err := memory(pool)
	if err != nil {
		t.Fatal(err)
	}
	o, err := New(Config{Device: dev, Pool: pool, Policy: &forward{Policy: pipeline.NewFIFO(4), t: t},
		Env: &ticking{Env: turn.Real}})
	if err != nil {
		t.Fatal(err)
	}
	h := (&rig{t: t, pool: pool, dev: dev, o: o}).host("h")
	for range 3 {
		ios := make([]*IO, 10)
		for i := range ios {
			ios[i] = h.io(uint32(i), pipeline.Verify, 0, 512)
		}
		h.submit(ios...)
		h.finish(len(ios))
	}
	if err := o.Close(); err != nil {
		t.Error(err)
	}
	if err := dev.Close(); err != nil {
		t.Error(err)
	}
}
