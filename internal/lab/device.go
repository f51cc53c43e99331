package lab

import (
	"errors"
	"time"

	"jbofd/internal/ssd"
)

// Fault model of Device: that of its Drive. The queue takes at most as many requests as it was opened for and may take
// fewer of a batch; completions come one by one, at their time. Some requests complete within Submit (AtOnceOneIn), and
// then the queue's user is notified while it still submits, as by another processor that was faster. The process that
// has opened the device may die (Kill): then nothing completes any more, and the drive may still do what was under way.

// Device is a Drive as an ssd.Device in a Sim's time. Its queue never blocks: it is an ssd.Notifier.
type Device struct {
	sim   *Sim
	drive *Drive
	info  ssd.Info
	queue *queue
	// AtOnceOneIn is one request in how many that completes within Submit, unless the drive holds it; 0: none.
	AtOnceOneIn int
}

// NewDevice opens the drive for one process.
func NewDevice(sim *Sim, name string, d *Drive) *Device {
	return &Device{sim: sim, drive: d, info: ssd.Info{
		Name: name, Backend: "lab", Model: "simulated drive", SizeBytes: int64(len(d.Visible)), BlockSize: d.block,
		OptimalIOBytes: max(4096, d.block), AtomicWriteBytes: d.block, VolatileCache: d.Volatile, Deallocates: true,
		Engine: "lab",
	}}
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

// OpenQueue implements ssd.Device; there is one queue.
func (d *Device) OpenQueue(depth int) (ssd.Queue, error) {
	if d.queue != nil {
		return nil, errors.New("a simulated device has one queue")
	}
	d.queue = &queue{d: d, depth: depth}
	d.queue.timer = &Timer{sim: d.sim, f: d.queue.ended, index: -1}
	return d.queue, nil
}

// Close implements ssd.Device.
func (d *Device) Close() error { return nil }

// Kill is the end of the process; with power, the drive loses its power, too.
func (d *Device) Kill(power bool) {
	if d.queue != nil {
		d.queue.timer.Stop()
		d.queue.notify, d.queue.dead = nil, true
	}
	if power {
		d.drive.PowerLoss()
	} else {
		d.drive.Kill()
	}
}

// queue is a Device's only queue.
type queue struct {
	d      *Device
	depth  int
	timer  *Timer
	done   []ssd.Completion
	began  map[uint64]int64 // by tag, when it was submitted
	notify func()
	dead   bool
}

// Submit implements ssd.Queue.
func (q *queue) Submit(reqs []ssd.Request) (n int) {
	if q.began == nil {
		q.began = map[uint64]int64{}
	}
	for n < len(reqs) && len(q.d.drive.Flights)+len(q.done) < q.depth {
		r := reqs[n]
		if q.d.sim.Tracing() {
			q.d.sim.Tracef("%s: %v %d bytes at %d, tag %d", q.d.info.Name, r.Op, r.Len, r.Offset, r.Tag)
		}
		q.began[r.Tag] = q.d.sim.nowNS
		q.d.drive.Submit(q.d.sim.nowNS, r)
		n++
		if f := &q.d.drive.Flights[len(q.d.drive.Flights)-1]; q.d.AtOnceOneIn > 0 && f.DueNS < q.d.sim.nowNS+atOnceNS &&
			q.d.drive.rng.IntN(q.d.AtOnceOneIn) == 0 {
			q.end(len(q.d.drive.Flights) - 1)
		}
	}
	q.arm()
	return n
}

// atOnceNS is the longest that a request may take that completes at once instead.
const atOnceNS = 100_000

// arm sets the timer to the next end of a request.
func (q *queue) arm() {
	if i := q.d.drive.Next(); i >= 0 && !q.dead {
		q.timer.Reset(q.d.drive.Flights[i].DueNS - q.d.sim.nowNS)
	}
}

// ended ends the request that is due.
func (q *queue) ended() {
	i := q.d.drive.Next()
	if i < 0 || q.dead {
		return
	}
	if q.d.drive.Flights[i].DueNS > q.d.sim.nowNS {
		q.arm()
		return
	}
	q.end(i)
}

// end ends the flight of that index.
func (q *queue) end(i int) {
	r, err := q.d.drive.End(i)
	q.d.sim.Tracef("%s: %v at %d ends, tag %d: %v", q.d.info.Name, r.Op, r.Offset, r.Tag, err)
	q.done = append(q.done, ssd.Completion{Tag: r.Tag, Err: err, LatencyNS: q.d.sim.nowNS - q.began[r.Tag]})
	delete(q.began, r.Tag)
	q.arm()
	if q.notify != nil {
		q.notify()
	}
}

// Poll implements ssd.Queue. It does not wait.
func (q *queue) Poll(dst []ssd.Completion, _ time.Duration) int {
	n := copy(dst, q.done)
	q.done = append(q.done[:0], q.done[n:]...)
	return n
}

// Notify implements ssd.Notifier.
func (q *queue) Notify(f func()) { q.notify = f }

// Wake implements ssd.Queue; nobody waits.
func (q *queue) Wake() {}

// Synchronous implements ssd.Queue.
func (q *queue) Synchronous() bool { return false }

// Close implements ssd.Queue. Requests under way end as in Kill.
func (q *queue) Close() error {
	if !q.dead {
		q.d.Kill(false)
	}
	return nil
}
