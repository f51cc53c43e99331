package lab

import (
	"time"

	"jbofd/internal/ssd"
)

// Fault model of Device: that of its Drive. A queue takes at most as many requests as it was opened for and may take
// fewer of a batch; completions come one by one, at their time. Some requests complete within Submit (AtOnceOneIn), and
// then the queue's user is notified while it still submits, as by another processor that was faster. The process that
// has opened the device may die (Kill): then nothing completes any more, and the drive may still do what was under way.

// Device is a Drive as an ssd.Device in a Sim's time. Its queues never block: each is an ssd.Notifier.
type Device struct {
	sim   *Sim
	drive *Drive
	info  ssd.Info
	// queues are those that were opened. timer runs ended when the next request of any of them ends.
	queues []*queue
	timer  *Timer
	// AtOnceOneIn is one request in how many that completes within Submit, unless the drive holds it; 0: none.
	AtOnceOneIn int
	// Deliver runs what tells the process of completions; nil: it runs at once.
	Deliver func(f func())
}

// NewDevice opens the drive for one process.
func NewDevice(sim *Sim, name string, d *Drive) *Device {
	dev := &Device{sim: sim, drive: d, info: ssd.Info{
		Name: name, Backend: "lab", Model: "simulated drive", SizeBytes: int64(len(d.Visible)), BlockSize: d.block,
		OptimalIOBytes: max(4096, d.block), AtomicWriteBytes: d.block, VolatileCache: d.Volatile, Deallocates: true,
		Engine: "lab",
	}}
	dev.timer = &Timer{sim: sim, f: dev.ended, index: -1}
	return dev
}

var (
	_ ssd.Device   = (*Device)(nil)
	_ ssd.Notifier = (*queue)(nil)
)

// Info implements ssd.Device.
func (d *Device) Info() ssd.Info { return d.info }

// Healthy implements ssd.Device.
func (d *Device) Healthy() error {
	if d.drive.gone {
		return ssd.ErrGone
	}
	return nil
}

// Drive is the simulated drive under the device.
func (d *Device) Drive() *Drive { return d.drive }

// OpenQueue implements ssd.Device.
func (d *Device) OpenQueue(depth int) (ssd.Queue, error) {
	q := &queue{d: d, depth: depth, began: map[uint64]int64{}}
	d.queues = append(d.queues, q)
	return q, nil
}

// Close implements ssd.Device.
func (d *Device) Close() error { return nil }

// Kill is the end of the process; with power, the drive loses its power, too.
func (d *Device) Kill(power bool) {
	d.timer.Stop()
	for _, q := range d.queues {
		q.notify, q.dead = nil, true
	}
	if power {
		d.drive.PowerLoss()
	} else {
		d.drive.Kill()
	}
}

// queue is a Device's queue.
type queue struct {
	d      *Device
	depth  int
	done   []ssd.Completion
	began  map[uint64]int64 // by tag, when it was submitted
	notify func()
	dead   bool
}

// Submit implements ssd.Queue.
func (q *queue) Submit(reqs []ssd.Request) (n int) {
	for n < len(reqs) && len(q.began)+len(q.done) < q.depth {
		r := reqs[n]
		if q.d.sim.Tracing() {
			q.d.sim.Tracef("%s: %v %d bytes at %d, tag %d", q.d.info.Name, r.Op, r.Len, r.Offset, r.Tag)
		}
		q.began[r.Tag] = q.d.sim.nowNS
		q.d.drive.Submit(q.d.sim.nowNS, r)
		n++
		f := &q.d.drive.Flights[len(q.d.drive.Flights)-1]
		f.queue = q
		if q.d.AtOnceOneIn > 0 && f.DueNS < q.d.sim.nowNS+atOnceNS &&
			q.d.drive.rng.IntN(q.d.AtOnceOneIn) == 0 {
			q.d.end(len(q.d.drive.Flights) - 1)
		}
	}
	q.d.arm()
	return n
}

// atOnceNS is the longest that a request may take that completes at once instead.
const atOnceNS = 100_000

// arm sets the timer to the next end of a request.
func (d *Device) arm() {
	if i := d.drive.Next(); i >= 0 {
		d.timer.Reset(d.drive.Flights[i].DueNS - d.sim.nowNS)
	}
}

// ended ends the request that is due.
func (d *Device) ended() {
	i := d.drive.Next()
	if i < 0 {
		return
	}
	if d.drive.Flights[i].DueNS > d.sim.nowNS {
		d.arm()
		return
	}
	d.end(i)
}

// end ends the flight of that index.
func (d *Device) end(i int) {
	q := d.drive.Flights[i].queue
	r, err := d.drive.End(i)
	d.sim.Tracef("%s: %v at %d ends, tag %d: %v", d.info.Name, r.Op, r.Offset, r.Tag, err)
	q.done = append(q.done, ssd.Completion{Tag: r.Tag, Err: err, LatencyNS: d.sim.nowNS - q.began[r.Tag]})
	delete(q.began, r.Tag)
	d.arm()
	switch {
	case q.notify == nil:
	case d.Deliver != nil:
		d.Deliver(q.notify)
	default:
		q.notify()
	}
}

// Poll implements ssd.Queue.
func (q *queue) Poll(dst []ssd.Completion) int {
	n := copy(dst, q.done)
	q.done = append(q.done[:0], q.done[n:]...)
	return n
}

// Wait implements ssd.Queue. It only looks: virtual time passes in events.
func (q *queue) Wait(time.Duration) bool { return len(q.done) > 0 }

// Notify implements ssd.Notifier.
func (q *queue) Notify(f func()) { q.notify = f }

// Wake implements ssd.Queue; nobody waits.
func (q *queue) Wake() {}

// Synchronous implements ssd.Queue.
func (q *queue) Synchronous() bool { return false }

// Close implements ssd.Queue. If requests are under way, all of the device's end as in Kill.
func (q *queue) Close() error {
	if !q.dead && len(q.began) > 0 {
		q.d.Kill(false)
	}
	q.notify, q.dead = nil, true
	return nil
}
