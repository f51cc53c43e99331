package cluster

import (
	"time"

	"jbofd/internal/lab"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/model/flash"
)

// device is an emulated SSD in virtual time: package flash decides when a request completes, memory keeps the data.
type device struct {
	sim   *lab.Sim
	info  ssd.Info
	flash *flash.Drive
	data  []byte
	timer *lab.Timer
	done  []flash.Completion
	queue queue
	// readBytes is what was read.
	readBytes int64
}

// queue is the device's only one.
type queue struct {
	d     *device
	under map[uint64]ssd.Request // by tag
	done  []ssd.Completion
	// notify is told of completions.
	notify func()
}

var (
	_ ssd.Device   = (*device)(nil)
	_ ssd.Notifier = (*queue)(nil)
)

const blockBytes = 512

func newDevice(sim *lab.Sim, name string, d *flash.Drive, sizeBytes int64) *device {
	dev := &device{sim: sim, flash: d, data: make([]byte, sizeBytes), info: ssd.Info{Name: name, Backend: "model",
		Model: "emulated drive in virtual time", SizeBytes: sizeBytes, BlockSize: blockBytes, OptimalIOBytes: 4096,
		AtomicWriteBytes: blockBytes, Deallocates: true, DeallocatedReadsZero: true, Engine: "model"}}
	dev.queue = queue{d: dev, under: map[uint64]ssd.Request{}}
	dev.timer = sim.After(0, dev.advance)
	return dev
}

// Info implements ssd.Device.
func (d *device) Info() ssd.Info { return d.info }

// Healthy implements ssd.Device.
func (d *device) Healthy() error { return nil }

// OpenQueue implements ssd.Device.
func (d *device) OpenQueue(int) (ssd.Queue, error) { return &d.queue, nil }

// Close implements ssd.Device.
func (d *device) Close() error { return nil }

// advance lets the drive's time pass until now.
func (d *device) advance() {
	d.done = d.flash.Advance(d.sim.Now(), d.done[:0])
	q := &d.queue
	for _, c := range d.done {
		r := q.under[c.Tag]
		delete(q.under, c.Tag)
		if r.Op == ssd.Read {
			copy(r.Buf[:r.Len], d.data[r.Offset:])
		}
		q.done = append(q.done, ssd.Completion{Tag: c.Tag, LatencyNS: c.LatencyNS})
	}
	if at, ok := d.flash.NextEvent(); ok {
		d.timer.Reset(max(at-d.sim.Now(), 1))
	}
	if len(d.done) > 0 && q.notify != nil {
		q.notify()
	}
}

// Submit implements ssd.Queue.
func (q *queue) Submit(reqs []ssd.Request) int {
	d := q.d
	for _, r := range reqs {
		switch r.Op {
		case ssd.Read:
			d.readBytes += r.Len
		case ssd.Write:
			copy(d.data[r.Offset:r.Offset+r.Len], r.Buf)
		case ssd.Deallocate, ssd.WriteZeroes:
			clear(d.data[r.Offset : r.Offset+r.Len])
		}
		q.under[r.Tag] = r
		d.flash.Submit(d.sim.Now(), flash.Request{Op: flash.Op(r.Op), OffsetBytes: r.Offset, LenBytes: r.Len,
			FUA: r.Flags&ssd.FUA != 0,
			Tag: r.Tag})
	}
	if at, ok := d.flash.NextEvent(); ok {
		d.timer.Reset(max(at-d.sim.Now(), 1))
	}
	return len(reqs)
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

// Close implements ssd.Queue.
func (q *queue) Close() error {
	q.notify = nil
	return nil
}
