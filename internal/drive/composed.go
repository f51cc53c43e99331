package drive

import (
	"jbofd/internal/pipeline"
	"jbofd/internal/ssd"
	"jbofd/internal/units"
)

// composed is an operation that takes more than one device request, as a state machine: it forms the next device
// request and processes its completion. Its state is IO.done, IO.nextRange and IO.writing. It does not know the
// pipeline, claims or scratch buffers. The Drive runs it by these rules:
//
//   - Each device request passes the pipeline separately, under the IO's tenant and with the request's own length.
//     Between two requests the operation queues there like any other command. The exception is compareWrite.
//   - A request that reads has a scratch buffer of the drive from just before it goes to the device until it
//     completes. So an operation never holds one while it waits.
//   - An operation can be aborted until its last request has completed; compareWrite until its write goes to the
//     device.
type composed interface {
	// admits returns the length in bytes that the pipeline charges for the next request.
	admits(io *IO) units.Bytes
	// reads reports whether the next request needs a scratch buffer.
	reads(io *IO) bool
	// next forms the next device request, without its tag. scratch is scratchBytes long, or nil if the request needs no
	// scratch buffer.
	next(io *IO, scratch []byte) ssd.Request
	// completed is called when that request has succeeded. It reports whether the operation is over, and its error.
	completed(io *IO, scratch []byte) (over bool, err error)
}

// composedOps are the composed operations; nil for operations of one device request.
var composedOps = [pipeline.Ops]composed{
	pipeline.Verify:           verify{},
	pipeline.Compare:          compare{},
	pipeline.CompareWrite:     compareWrite{},
	pipeline.DeallocateRanges: deallocateRanges{},
}

// prepare acquires the scratch buffer and the claim that the next request of a composed operation needs, and reports
// whether the IO holds both. Otherwise the IO waits, and prepare is called again later.
//
// The scratch buffer is taken first: an IO that claimed its range and then waited for a scratch buffer would block
// other IOs of that range for nothing. If the claim has to wait, the scratch buffer is returned. When the range becomes
// free, the IO holds its claim and takes precedence over IOs that wait for a scratch buffer without one.
func (d *Drive) prepare(io *IO, now int64) bool {
	reads := io.composed.reads(io)
	if reads && !d.takeScratch(io) {
		d.wait(io, waitsForScratch, now)
		return false
	}
	if io.Op.Mutates() && !io.claimed.active {
		offset, length, exclusive := io.Offset, io.Len, true
		if io.Op == pipeline.DeallocateRanges {
			r := io.Ranges[io.nextRange]
			offset, length, exclusive = r.Offset, r.Len, false
		}
		if !d.claim(io, offset, length, exclusive) {
			d.wait(io, waitsForClaim, now)
			if io.scratch >= 0 {
				d.returnScratch(io, now)
			}
			return false
		}
	}
	if !io.writing {
		io.state.Store(io, stateRunning) // no CompareAndSwap: no other goroutine changes stateAdmitted
	}
	return true
}

// requestDone processes the completion of a device request of a composed operation, and starts the next request, if
// any.
func (d *Drive) requestDone(io *IO, c *ssd.Completion, now int64) {
	io.latencyNS = c.LatencyNS
	if c.Err != nil {
		d.finishOrAbort(io, c.Err, now)
		return
	}
	over, err := io.composed.completed(io, d.scratch.of(io))
	if over {
		d.finishOrAbort(io, err, now)
		return
	}
	if io.scratch >= 0 {
		d.returnScratch(io, now)
	}
	if io.Op == pipeline.CompareWrite {
		if !io.state.CompareAndSwap(io, stateRunning, stateAdmitted) {
			d.finish(io, io.whyAborted(), now)
			return
		}
		d.stage(io, now)
		return
	}
	if io.claimed.active {
		d.unclaim(io, now)
	}
	if !io.state.CompareAndSwap(io, stateRunning, stateQueued) {
		d.finish(io, io.whyAborted(), now)
		return
	}
	next := pipeline.IO{Tag: pipeline.Tag(io.tag), Tenant: io.Tenant, Op: io.Op,
		LenBytes: int64(io.composed.admits(io))}
	d.pipe.Continue(now, pipeline.Result{LatencyNS: c.LatencyNS}, next)
	d.pipe.KeepsCredit(io.Tenant, io.Credited)
}
