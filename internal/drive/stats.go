package drive

import (
	"errors"
	"sync/atomic"

	"jbofd/internal/pipeline"
	"jbofd/internal/ssd"
)

// Stats are a drive's counters since the start. All are read and written atomically.
type Stats struct {
	// Requests and Bytes count what the device completed without error, by ssd.Op; TimeNS sums their latencies.
	Requests, Bytes, TimeNS [ssd.Ops]atomic.Int64
	// Errors counts device requests that failed.
	Errors atomic.Int64
	// NoSpace counts those that failed for want of space; Gone those to a device that vanished.
	NoSpace, Gone atomic.Int64
	// Inflight is what is outstanding at the device, Queued what waits before it, Held the part of Queued that only
	// waits for the caps of its tenants.
	Inflight, Queued, Held atomic.Int64
	// Aborted counts IOs that Abort has taken out; Stale those refused because their pass was stale; BufferWaits those
	// that had to wait for a buffer.
	Aborted, Stale, BufferWaits atomic.Int64
}

// tally collects what Stats counts of one batch of completions. Three atomic additions for each completion would be a
// good part of what a turn costs.
type tally [ssd.Ops]struct{ requests, bytes, timeNS int64 }

// countAll counts a batch of device completions.
func (d *Drive) countAll(comps []ssd.Completion) {
	var t tally
	for i := range comps {
		d.count(&t, d.slab[comps[i].Tag], &comps[i])
	}
	for op := range t {
		if n := &t[op]; n.requests > 0 {
			d.stats.Requests[op].Add(n.requests)
			d.stats.Bytes[op].Add(n.bytes)
			d.stats.TimeNS[op].Add(n.timeNS)
		}
	}
}

// count counts one device completion.
func (d *Drive) count(t *tally, io *IO, c *ssd.Completion) {
	if c.Err != nil {
		d.stats.Errors.Add(1)
		switch {
		case errors.Is(c.Err, ssd.ErrNoSpace):
			d.stats.NoSpace.Add(1)
		case errors.Is(c.Err, ssd.ErrGone):
			d.stats.Gone.Add(1)
		}
		if d.failed != nil {
			d.failed(io.Op, c.Err)
		}
		return
	}
	op, n := ssd.Op(io.Op), int64(io.Len)
	switch {
	case io.composed != nil:
		op, n = io.request.op, io.request.lenBytes
	case io.Op == pipeline.Flush:
		n = 0
	}
	t[op].requests++
	t[op].bytes += n
	t[op].timeNS += c.LatencyNS
}
