package drive

import (
	"jbofd/internal/bufpool"
	"jbofd/internal/fence"
	"jbofd/internal/invariants"
	"jbofd/internal/pipeline"
	"jbofd/internal/ssd"
)

// enqueue gives io a tag and puts it into the pipeline.
func (d *Drive) enqueue(io *IO, now int64) {
	if len(d.freeTags) == 0 {
		d.moreTags()
	}
	tag := d.freeTags[len(d.freeTags)-1]
	d.freeTags = d.freeTags[:len(d.freeTags)-1]
	io.tag = tag
	d.slab[tag] = io
	lenBytes := io.Len
	if io.composed != nil && !io.Fetch {
		lenBytes = io.composed.admits(io)
	}
	d.pipe.Enqueue(now, pipeline.IO{Tag: pipeline.Tag(tag), Tenant: io.Tenant, Op: io.Op, LenBytes: int64(lenBytes)})
	d.pipe.KeepsCredit(io.Tenant, io.Credited)
}

// moreTags doubles the number of tags. IOs that wait for memory or for their host's data keep theirs, for as long as a
// host takes: a fixed number would let one host stop all others.
func (d *Drive) moreTags() {
	n := len(d.slab)
	d.slab = append(d.slab, make([]*IO, n)...)
	d.freeTags = make([]uint32, n, 2*n)
	for i := range d.freeTags {
		d.freeTags[i] = uint32(2*n - 1 - i)
	}
}

// admit continues an IO that the pipeline has dispatched: it gets its buffer.
func (d *Drive) admit(io *IO, now int64) {
	if n := io.dataBytes(); n > 0 && len(io.Buf.B) == 0 && io.state.Load(io) == stateQueued {
		io.waiter.Size = int(n)
		if !d.pool.GetOrWait(io.Account, &io.waiter) {
			d.stats.BufferWaits.Add(1)
			d.pipe.Pause(now, pipeline.Tag(io.tag))
			return // resubmit takes it back
		}
	}
	d.granted(io, now)
}

// granted continues an IO that has its buffer, or needs none.
func (d *Drive) granted(io *IO, now int64) {
	if !io.waiter.Buf.IsZero() {
		io.Buf, io.waiter.Buf = io.waiter.Buf, bufpool.Buf{}
	}
	if !io.state.CompareAndSwap(io, stateQueued, stateAdmitted) {
		d.finish(io, io.whyAborted(), now)
		return
	}
	if !io.begun {
		io.begun, io.AdmittedNS = true, now
		if io.Fetch {
			d.pipe.Pause(now, pipeline.Tag(io.tag))
			d.noteSink(io.sink, io.sink.Admitted(io))
			return
		}
	}
	d.stage(io, now)
}

// fetched continues an IO that its sink has handed back.
func (d *Drive) fetched(io *IO, now int64) {
	io.fetched = false
	if io.Err != nil {
		d.finish(io, io.Err, now)
		return
	}
	d.stage(io, now)
}

// stage queues io for the device, or lets it wait for what its next request needs. The IO is in stateAdmitted.
func (d *Drive) stage(io *IO, now int64) {
	switch {
	case io.composed != nil:
		if !d.prepare(io, now) {
			return
		}
	case io.Op.Mutates() && !d.claim(io, io.Offset, io.Len, false):
		d.wait(io, waitsForClaim, now)
		return
	}
	if io.paused {
		io.paused = false
		d.pipe.Resume(now, pipeline.Tag(io.tag))
	}
	d.staged.push(io)
}

// submit fills the device queue from the staged list and returns how many IOs have left that list. It is the one
// place where requests go to the device, and so the one where passes are looked at.
func (d *Drive) submit(now int64) (total int) {
	for d.staged.n > 0 {
		d.reqs = d.reqs[:0]
		var stale list
		var prev *IO
		for io := d.staged.first; io != nil && len(d.reqs) < cap(d.reqs); {
			next := io.next
			if io.staleAt(now) {
				d.staged.remove(prev, io)
				stale.push(io)
			} else {
				d.reqs = append(d.reqs, ssd.Request{})
				d.request(&d.reqs[len(d.reqs)-1], io)
				prev = io
			}
			io = next
		}
		n := 0
		if len(d.reqs) > 0 {
			n = d.queue.Submit(d.reqs)
		}
		for range n {
			d.staged.pop()
		}
		d.atDevice += n
		total += n + stale.n
		full := n < len(d.reqs)
		d.refuse(&stale)
		if full || d.sync {
			break
		}
	}
	return total
}

// request makes r, which is zero, the next device request of io. It may be asked again if the device queue is full.
func (d *Drive) request(r *ssd.Request, io *IO) {
	if io.composed != nil {
		*r = io.composed.next(io, d.scratch.of(io))
		io.request.op, io.request.lenBytes = r.Op, r.Len
	} else { // in place: a literal would be made elsewhere and copied, and that waits for it to be written
		r.Op, r.Flags, r.Offset, r.Len, r.Buf = ssd.Op(io.Op), io.Flags, int64(io.Offset), int64(io.Len), io.Buf.B
	}
	r.Tag = uint64(io.tag)
}

// refuse ends IOs whose pass is stale.
func (d *Drive) refuse(stale *list) {
	if stale.n == 0 {
		return
	}
	now := d.driver.Now()
	for io := stale.pop(); io != nil; io = stale.pop() {
		d.stats.Stale.Add(1)
		d.finishOrAbort(io, fence.ErrStale, now)
	}
}

// complete takes the device's completions, at least one, and returns when.
func (d *Drive) complete(comps []ssd.Completion) (now int64) {
	d.atDevice -= len(comps)
	now = d.driver.Now() // once a batch: the clock costs as much as all else here
	d.countAll(comps)    // before any Done: a host that has its answer finds its IO in the counters
	for i := range comps {
		c := &comps[i]
		io := d.slab[c.Tag]
		if io.composed != nil {
			d.requestDone(io, c, now)
			continue
		}
		io.latencyNS = c.LatencyNS
		d.finish(io, c.Err, now)
	}
	return now
}

// finishOrAbort ends an IO with err, or as aborted if Abort has promised that.
func (d *Drive) finishOrAbort(io *IO, err error, now int64) {
	if io.state.Load(io) == stateRunning {
		io.state.CompareAndSwap(io, stateRunning, stateAdmitted)
	}
	if io.state.Load(io) == stateAborted {
		err = io.whyAborted()
	}
	d.finish(io, err, now)
}

// finish ends an IO that the pipeline has dispatched.
func (d *Drive) finish(io *IO, err error, now int64) {
	d.pipe.Complete(now, pipeline.Tag(io.tag), pipeline.Result{LatencyNS: io.latencyNS, Failed: err != nil &&
		err != ErrMismatch})
	d.end(io, err, now)
}

// end ends an IO that has left the pipeline, and lets IOs go on that have waited for what it held.
func (d *Drive) end(io *IO, err error, now int64) {
	invariants.Check(d.slab[io.tag] == io, "drive: io finished without its tag")
	d.slab[io.tag] = nil
	d.freeTags = append(d.freeTags, io.tag)
	io.CreditUnits = 0
	if io.Credited {
		io.CreditUnits = d.pipe.Credit(io.Tenant)
	}
	if io.waits != waitsForNothing {
		d.stopWaiting(io)
	}
	if io.scratch >= 0 {
		d.returnScratch(io, now)
	}
	if io.claimed.active {
		d.unclaim(io, now)
	}
	d.quiescer.End(io.epoch)
	// The state is left as it is. Abort does nothing in it until the IO is submitted again.
	invariants.Check(io.state.Load(io) >= stateAborted, "drive: an IO ends that Abort would still take out")
	io.Err = err
	d.noteSink(io.sink, io.sink.Done(io))
}
