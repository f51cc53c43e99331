package drive

import "jbofd/internal/pipeline"

// What an IO waits for after the pipeline has dispatched it. While it waits it does not occupy the policy's window at
// the device, and it can be aborted.
const (
	waitsForNothing uint8 = iota
	// waitsForClaim: another IO has claimed the range before. The IO is in no list: its own claim counts those before
	// it.
	waitsForClaim
	// waitsForScratch: the IO is in the queue of Drive.scratch.
	waitsForScratch
)

// wait makes an admitted IO wait for what, until proceed or stopWaiting. The pipeline gives its place at the device to
// others meanwhile.
func (d *Drive) wait(io *IO, what uint8, now int64) {
	if !io.paused {
		io.paused = true
		d.pipe.Pause(now, pipeline.Tag(io.tag))
	}
	d.waiting++
	io.waits = what
	if what == waitsForScratch {
		d.scratch.push(io)
	}
	io.state.Store(io, stateQueued) // nobody else changes stateAdmitted
}

// proceed continues an IO that has waited, or ends it if it was aborted meanwhile. The caller has taken the IO out of
// the queue for scratch buffers.
func (d *Drive) proceed(io *IO, now int64) {
	io.waits = waitsForNothing
	d.waiting--
	if !io.state.CompareAndSwap(io, stateQueued, stateAdmitted) {
		d.finish(io, io.whyAborted(), now)
		return
	}
	d.stage(io, now)
}

// stopWaiting is called for an IO that ends while it waits: it takes the IO out of the queue for scratch buffers.
func (d *Drive) stopWaiting(io *IO) {
	if io.waits == waitsForScratch {
		d.scratch.remove(io)
	}
	io.waits = waitsForNothing
	d.waiting--
}
