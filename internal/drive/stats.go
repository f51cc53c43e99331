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

// count counts one device completion.
func (d *Drive) count(io *IO, c *ssd.Completion) {
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
	d.stats.Requests[op].Add(1)
	d.stats.Bytes[op].Add(n)
	d.stats.TimeNS[op].Add(c.LatencyNS)
}
