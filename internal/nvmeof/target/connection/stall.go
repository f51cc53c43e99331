package connection

import "time"

// StallLimits are how long a host may owe data that it was asked for: data that has been asked for holds a buffer.
type StallLimits struct {
	// Timeout is how long the host may send nothing of it.
	Timeout time.Duration
	// BytesPerSec is the least rate at which the host sends it, measured over no less than Timeout; 0: any.
	BytesPerSec int64
}

// Allows is how long sending so many bytes may take.
func (l StallLimits) Allows(bytes int) time.Duration {
	if l.BytesPerSec == 0 {
		return 1<<63 - 1
	}
	return l.Timeout + time.Duration(float64(bytes)/float64(l.BytesPerSec)*float64(time.Second))
}

// dueData is what a host owes at one moment.
type dueData struct {
	// slot and askedNS identify the oldest transfer: of those that are not complete, the one asked for first. got is
	// how many of its bytes have come, left how many have not. slot is -1 if the host owes nothing.
	slot, got, left int
	requestedNS     int64
	// came counts the bytes of all transfers that have come so far, bytes those that are awaited.
	came  uint64
	bytes int
}

// stall decides whether a host sends the data that it owes too slowly. The zero stall is ready for use.
type stall struct {
	// last is what the host owed at the last call of check. oldest is what it owed at sinceNS, when the transfer became
	// the oldest. Data of that transfer came last at progressNS.
	last, oldest        dueData
	sinceNS, progressNS int64
	// window is what the host owed at windowNS. The rate of all transfers together is measured from then on.
	window   dueData
	windowNS int64
	owes     bool
}

// check reports whether the host sends too slowly. Each of these is too slow: nothing of the oldest transfer for
// l.Timeout; the oldest transfer at less than l.BytesPerSec; all transfers together at less than l.BytesPerSec, because
// a host can send a little of many.
func (s *stall) check(now int64, l StallLimits, o dueData) bool {
	if o.slot < 0 {
		*s = stall{}
		return false
	}
	if !s.owes {
		s.owes, s.window, s.windowNS = true, o, now
		s.oldest, s.sinceNS, s.progressNS = o, now, now
	}
	if o.slot != s.oldest.slot || o.requestedNS != s.oldest.requestedNS {
		s.oldest, s.sinceNS, s.progressNS = o, now, now
	} else if o.got != s.last.got {
		s.progressNS = now
	}
	s.last = o
	if now-s.progressNS > int64(l.Timeout) || now-s.sinceNS > int64(l.Allows(s.oldest.left)) {
		return true
	}
	if window := now - s.windowNS; window > int64(l.Timeout) {
		due := min(float64(s.window.bytes), float64(l.BytesPerSec)*float64(window)/float64(time.Second))
		if float64(o.came-s.window.came) < due {
			return true
		}
		s.window, s.windowNS = o, now
	}
	return false
}

// Stuck reports whether the host owes data that it was asked for and sends it too slowly. The lock is held.
func (c *Conn) Stuck(now int64, l StallLimits) bool {
	o := dueData{slot: -1, came: c.m.ReceivedBytes(), bytes: c.m.AwaitedBytes()}
	c.m.Awaited(func(i, got int) {
		if asked := c.slots[i].requestedNS; o.slot < 0 || asked < o.requestedNS {
			o.slot, o.got, o.left, o.requestedNS = i, got, len(c.m.Slot(i).Data)-got, asked
		}
	})
	return c.stall.check(now, l, o)
}
