// Package model is an emulated NVMe drive in real time. The state machine in package flash decides when a request
// completes; memory keeps the data. It shows how the dies, the write buffer and the garbage collection of a drive
// affect several tenants, without such a drive.
//
// Virtual time is the wall clock since Open. A process that wakes up late completes everything that is due at once, so
// the drive's time never lags. Between completions it sleeps.
package model

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"jbofd/internal/ssd"
	"jbofd/internal/ssd/model/flash"
)

// Config describes an emulated drive.
type Config struct {
	// Name is the device's name in the configuration.
	Name string
	// Preset is what is emulated, one of flash.Presets; empty stands for "dct983".
	Preset string
	// SizeBytes is the capacity, a multiple of BlockSize and of 4096. The data take memory as they are written.
	SizeBytes int64
	// BlockSize is 512 (also if 0) or 4096.
	BlockSize int
	// Condition is the state of the flash at the start. All data are zeroes in each.
	Condition flash.Condition
	// Seed seeds the random choices of the drive.
	Seed uint64
	// Slowdown is how many times slower than its preset the drive is, 1 (also if 0) to flash.MaxSlowdown. It lets a
	// machine that is too small for the preset's rate carry the drive's whole load.
	Slowdown int
}

// ErrConfig is wrapped by Open for a Config out of its bounds.
var ErrConfig = errors.New("model: invalid configuration")

const (
	pageBytes = 4096
	// dontNeedBytes is the length from which giving pages back to the kernel is
	// worth a system call; shorter ranges are cleared.
	dontNeedBytes = 64 << 10
	// With more than crowd requests in flight wake-ups are at least gapNS apart, as a drive
	// coalesces its interrupts.
	coalesceAbove = 16
	gapNS         = 20_000
	// notArmed stands for a timer that never fires.
	notArmed = int64(1) << 62
)

// Device is an open emulated drive.
type Device struct {
	info  ssd.Info
	start time.Time
	// timer is a timerfd, because timers of the Go runtime may be a millisecond late in an idle process.
	timer   *os.File
	timerFD int
	stopped sync.WaitGroup

	gone atomic.Bool

	// mapMu is held for reading while data are copied, for writing while Close unmaps.
	mapMu    sync.RWMutex
	mem      []byte
	unmapped bool

	mu      sync.Mutex // of what follows, and of all queues' state
	drive   *flash.Drive
	queues  []*queue // by their number; nil where one was closed
	armedNS int64    // when the timer fires
	wokeNS  int64    // when it last has
	done    []flash.Completion
}

// Open makes a drive in the configured condition, which takes up to a tenth of a second for each GiB.
//
// Errors: ErrConfig, or the kernel's refusal.
func Open(cfg Config) (*Device, error) {
	if cfg.BlockSize == 0 {
		cfg.BlockSize = 512
	}
	if cfg.BlockSize != 512 && cfg.BlockSize != 4096 {
		return nil, fmt.Errorf("%w: BlockSize is %d, want 512 or 4096", ErrConfig, cfg.BlockSize)
	}
	if cfg.Preset == "" {
		cfg.Preset = flash.Presets()[0]
	}
	if cfg.Condition > flash.Fragmented {
		return nil, fmt.Errorf("%w: Condition is %d, want 0 to %d", ErrConfig, cfg.Condition, flash.Fragmented)
	}
	fc, err := flash.Preset(cfg.Preset, cfg.SizeBytes)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrConfig, err)
	}
	fc.Seed, fc.Slowdown = cfg.Seed, cfg.Slowdown
	drive, err := flash.New(fc)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrConfig, err)
	}
	drive.Precondition(cfg.Condition)
	mem, err := unix.Mmap(-1, 0, int(cfg.SizeBytes), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("model: reserve %d bytes: %w", cfg.SizeBytes, err)
	}
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("model: timer: %w", err), unix.Munmap(mem))
	}
	d := &Device{
		mem: mem, drive: drive, start: time.Now(), timer: os.NewFile(uintptr(fd), "timerfd"), timerFD: fd,
		armedNS: notArmed,
		info: ssd.Info{
			Name:                 cfg.Name,
			Backend:              "model",
			Model:                "jbofd emulated " + cfg.Preset,
			SizeBytes:            cfg.SizeBytes,
			BlockSize:            cfg.BlockSize,
			OptimalIOBytes:       pageBytes,
			AtomicWriteBytes:     cfg.BlockSize,
			Deallocates:          true,
			DeallocatedReadsZero: true,
			Engine:               "model",
		},
	}
	d.stopped.Go(d.runTimer)
	return d, nil
}

// Info implements ssd.Device.
func (d *Device) Info() ssd.Info { return d.info }

// Healthy implements ssd.Device.
func (d *Device) Healthy() error {
	if d.gone.Load() {
		return ssd.ErrGone
	}
	return nil
}

// Stats returns the emulated drive's counters.
func (d *Device) Stats() flash.Stats {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.drive.Stats()
}

// OpenQueue implements ssd.Device. Overlapping requests in flight read and leave either content, as on a drive.
func (d *Device) OpenQueue(depth int) (ssd.Queue, error) {
	if depth < 1 {
		return nil, fmt.Errorf("%w: queue depth is %d, want at least 1", ErrConfig, depth)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.gone.Load() {
		return nil, ssd.ErrGone
	}
	q := &queue{dev: d, slots: make([]slot, depth), done: make([]int32, depth), waker: ssd.NewWaker()}
	q.idle.L = &d.mu
	q.free = make([]int32, depth)
	for i := range q.free {
		q.free[i] = int32(i)
	}
	for i := range d.queues {
		if d.queues[i] == nil {
			q.number = i
			d.queues[i] = q
			return q, nil
		}
	}
	q.number = len(d.queues)
	d.queues = append(d.queues, q)
	return q, nil
}

// Close fails what is in flight with ErrGone and gives the memory back; queues answer ErrGone from then on. Idempotent.
func (d *Device) Close() error {
	d.mu.Lock()
	first := !d.gone.Swap(true)
	if first {
		for _, q := range d.queues {
			if q == nil {
				continue
			}
			for i := range q.slots {
				if q.slots[i].busy {
					q.finish(int32(i), ssd.ErrGone, int64(time.Since(q.slots[i].at)))
				}
			}
			q.notify()
		}
	}
	d.mu.Unlock()
	var err error
	if first {
		err = d.timer.Close() // ends runTimer
	}
	d.stopped.Wait()
	d.mapMu.Lock()
	defer d.mapMu.Unlock()
	if d.unmapped {
		return err
	}
	d.unmapped = true
	return errors.Join(err, unix.Munmap(d.mem))
}

// now is the drive's time.
func (d *Device) now() int64 { return int64(time.Since(d.start)) }

// runTimer advances the drive whenever the timer fires.
func (d *Device) runTimer() {
	var buf [8]byte
	for {
		if _, err := d.timer.Read(buf[:]); err != nil {
			return // closed
		}
		d.mu.Lock()
		d.armedNS = notArmed
		d.wokeNS = d.now()
		d.advance(d.wokeNS)
		d.arm()
		d.mu.Unlock()
	}
}

// advance delivers the completions due until now. The caller holds mu.
func (d *Device) advance(now int64) { // hot: 0 allocs
	if d.gone.Load() {
		return
	}
	d.done = d.drive.Advance(now, d.done[:0])
	for _, c := range d.done {
		q := d.queues[c.Tag>>32]
		q.finish(int32(uint32(c.Tag)), nil, c.LatencyNS)
	}
	for _, q := range d.queues {
		if q != nil && q.nDone > 0 && q.fresh {
			q.notify()
		}
	}
}

// arm sets the timer to the next completion unless it fires before that. The caller holds mu.
func (d *Device) arm() { // hot: 0 allocs
	at, ok := d.drive.NextCompletion()
	if !ok || d.gone.Load() {
		return
	}
	if d.drive.InFlight() > coalesceAbove {
		at = max(at, d.wokeNS+gapNS)
	}
	if at >= d.armedNS {
		return
	}
	d.armedNS = at
	after := unix.NsecToTimespec(max(1, at-d.now()))
	if err := unix.TimerfdSettime(d.timerFD, 0, &unix.ItimerSpec{Value: after}, nil); err != nil {
		// Only an invalid descriptor or value can cause this error: it is a bug in this package.
		panic(fmt.Sprintf("model: arm the timer: %v", err))
	}
}

// store changes the data of a write at its submission. The caller holds mapMu for reading.
func (d *Device) store(r *ssd.Request) {
	switch r.Op {
	case ssd.Write:
		copy(d.mem[r.Offset:r.Offset+r.Len], r.Buf)
	case ssd.Deallocate, ssd.WriteZeroes:
		end := r.Offset + r.Len
		first, last := (r.Offset+pageBytes-1)&^(pageBytes-1), end&^(pageBytes-1)
		if last-first < dontNeedBytes {
			clear(d.mem[r.Offset:end])
			return
		}
		clear(d.mem[r.Offset:first])
		clear(d.mem[last:end])
		if err := unix.Madvise(d.mem[first:last], unix.MADV_DONTNEED); err != nil {
			clear(d.mem[first:last])
		}
	}
}

// slot is a request under way, or done and not yet polled.
type slot struct {
	req     ssd.Request
	err     error
	latency int64
	at      time.Time
	busy    bool
}

// queue is a table of requests and a ring of those that are done.
type queue struct {
	dev    *Device
	number int
	waker  ssd.Waker

	// Of dev.mu:
	idle  sync.Cond // signalled when nothing is in flight on a closing queue
	slots []slot
	free  []int32 // slots
	busy  int     // slots of requests at the drive
	done  []int32 // ring of slots
	first int     // index of the oldest
	nDone int
	// fresh: something was done since the last notify.
	fresh, woken, closed bool
}

// Submit implements ssd.Queue.
func (q *queue) Submit(reqs []ssd.Request) int { // hot: 0 allocs
	d := q.dev
	// Data first, outside of the lock: only this goroutine takes slots, and others only add free ones.
	d.mu.Lock()
	if q.closed {
		d.mu.Unlock()
		return 0
	}
	n := min(len(q.free), len(reqs))
	d.mu.Unlock()
	if n == 0 {
		return 0
	}
	d.mapMu.RLock()
	if !d.unmapped {
		for i := range reqs[:n] {
			if r := &reqs[i]; r.Op != ssd.Read && r.Op != ssd.Flush && ssd.Validate(&d.info, r) == nil {
				d.store(r)
			}
		}
	}
	d.mapMu.RUnlock()
	d.mu.Lock()
	defer d.mu.Unlock()
	at := time.Now()
	now := int64(at.Sub(d.start))
	d.advance(now)
	for i := range reqs[:n] {
		r := &reqs[i]
		last := len(q.free) - 1
		s := q.free[last]
		q.free = q.free[:last]
		q.slots[s] = slot{req: *r, at: at, busy: true}
		q.busy++
		err := ssd.Validate(&d.info, r)
		if err == nil && d.gone.Load() {
			err = ssd.ErrGone
		}
		if err != nil {
			q.finish(s, err, 0)
			continue
		}
		d.drive.Submit(now, flash.Request{Op: flash.Op(r.Op), OffsetBytes: r.Offset, LenBytes: r.Len,
			FUA: r.Flags&ssd.FUA != 0,
			Tag: uint64(q.number)<<32 | uint64(uint32(s))})
	}
	if q.fresh {
		q.notify()
	}
	d.arm()
	return n
}

// finish moves a slot to those that are done. The caller holds dev.mu.
func (q *queue) finish(s int32, err error, latencyNS int64) {
	x := &q.slots[s]
	x.busy, x.err, x.latency = false, err, latencyNS
	q.busy--
	q.done[(q.first+q.nDone)%len(q.done)] = s
	q.nDone++
	q.fresh = true
	if q.busy == 0 && q.closed {
		q.idle.Broadcast()
	}
}

// notify wakes a blocked Wait.
func (q *queue) notify() {
	q.fresh = false
	q.waker.Notify()
}

// Poll implements ssd.Queue. Data that were read are copied here, on the caller's time.
func (q *queue) Poll(dst []ssd.Completion) int { // hot: 0 allocs
	d := q.dev
	d.mu.Lock()
	n, first := min(len(dst), q.nDone), q.first
	d.mu.Unlock()
	if n == 0 {
		return 0
	}
	// Only the owner takes from the ring, and nobody touches the slots of what is done.
	d.mapMu.RLock()
	for i := range n {
		x := &q.slots[q.done[(first+i)%len(q.done)]]
		if x.err == nil && x.req.Op == ssd.Read {
			if d.unmapped {
				x.err = ssd.ErrGone
			} else {
				copy(x.req.Buf[:x.req.Len], d.mem[x.req.Offset:])
			}
		}
		dst[i] = ssd.Completion{Tag: x.req.Tag, Err: x.err, LatencyNS: x.latency}
		x.req.Buf = nil
	}
	d.mapMu.RUnlock()
	d.mu.Lock()
	for i := range n {
		q.free = append(q.free, q.done[(first+i)%len(q.done)])
	}
	q.first = (first + n) % len(q.done)
	q.nDone -= n
	d.mu.Unlock()
	return n
}

// Wait implements ssd.Queue.
func (q *queue) Wait(limit time.Duration) bool { return q.waker.Wait(limit, q.ready) } // hot: 0 allocs

// ready reports whether Wait returns.
func (q *queue) ready(bool) bool {
	d := q.dev
	d.mu.Lock()
	defer d.mu.Unlock()
	woken := q.woken
	q.woken = false
	return woken || q.nDone > 0 || q.closed && q.busy == 0 || d.gone.Load()
}

// Wake implements ssd.Queue.
func (q *queue) Wake() {
	q.dev.mu.Lock()
	defer q.dev.mu.Unlock()
	q.woken = true
	q.notify()
}

// Synchronous implements ssd.Queue: false.
func (q *queue) Synchronous() bool { return false }

// Close implements ssd.Queue. Completions not yet polled stay pollable.
func (q *queue) Close() error {
	d := q.dev
	d.mu.Lock()
	defer d.mu.Unlock()
	q.closed = true
	for q.busy > 0 && !d.gone.Load() {
		q.idle.Wait()
	}
	if q.number < len(d.queues) && d.queues[q.number] == q {
		d.queues[q.number] = nil
	}
	q.notify()
	return nil
}
