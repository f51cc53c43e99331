// Package mem is a drive in DRAM: sparse anonymous memory, which takes space when it is first written, 2 MiB at a time
// if the kernel has huge pages. Submit copies the data itself. Benchmarks use it to measure the rest of the program.
// The content is lost when the process ends.
package mem

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"jbofd/internal/ssd"
)

// Config describes a memory device.
type Config struct {
	// Name is the device's name in the configuration.
	Name string
	// SizeBytes is the capacity, a positive multiple of BlockSize.
	SizeBytes int64
	// BlockSize is 512 (also if 0) or a larger power of two up to 64 KiB.
	BlockSize int
}

// epoch is where this package's clock begins. time.Since reads one clock and time.Now two.
var epoch = time.Now()

// ErrConfig is wrapped by Open for a Config out of its bounds.
var ErrConfig = errors.New("mem: invalid configuration")

const (
	pageBytes = 4096
	// dontNeedBytes is the length from which pages are given back to the kernel. Shorter ranges are cleared: to give
	// back a part of a page of 2 MiB splits it, which makes it slow for good.
	dontNeedBytes = 2 << 20
	// streamBytes is the length from which a write bypasses the cache; see write.
	streamBytes = 4 << 10
)

// Device is an open memory drive.
type Device struct {
	info ssd.Info
	mem  []byte

	gone atomic.Bool

	// mapMu is held for reading while a Submit copies, for writing while Close unmaps.
	mapMu    sync.RWMutex
	unmapped bool

	mu     sync.Mutex
	queues map[*queue]struct{}
}

// Open reserves the memory.
//
// Errors: ErrConfig, or the kernel's refusal.
func Open(cfg Config) (*Device, error) {
	if cfg.BlockSize == 0 {
		cfg.BlockSize = 512
	}
	if cfg.BlockSize < 512 || cfg.BlockSize > 64<<10 || cfg.BlockSize&(cfg.BlockSize-1) != 0 {
		return nil, fmt.Errorf("%w: BlockSize is %d, want a power of two in [512, 65536]", ErrConfig, cfg.BlockSize)
	}
	if cfg.SizeBytes <= 0 || cfg.SizeBytes%int64(cfg.BlockSize) != 0 {
		return nil, fmt.Errorf("%w: SizeBytes is %d, want a positive multiple of BlockSize (%d)", ErrConfig,
			cfg.SizeBytes, cfg.BlockSize)
	}
	mem, err := unix.Mmap(-1, 0, int(cfg.SizeBytes), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("mem: reserve %d bytes: %w", cfg.SizeBytes, err)
	}
	// With pages of 2 MiB, a random access hardly ever misses the TLB. It is only a wish: without them the drive is
	// slower.
	_ = unix.Madvise(mem, unix.MADV_HUGEPAGE)
	return &Device{
		mem:    mem,
		queues: make(map[*queue]struct{}),
		info: ssd.Info{
			Name:                 cfg.Name,
			Backend:              "mem",
			Model:                "jbofd DRAM",
			SizeBytes:            cfg.SizeBytes,
			BlockSize:            cfg.BlockSize,
			OptimalIOBytes:       max(cfg.BlockSize, pageBytes),
			AtomicWriteBytes:     cfg.BlockSize,
			Deallocates:          true,
			DeallocatedReadsZero: true,
			Engine:               "mem",
		},
	}, nil
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

// OpenQueue implements ssd.Device. Queues are independent: if overlapping requests are in flight on two queues, reads
// return and writes leave the data of either, as on a drive.
func (d *Device) OpenQueue(depth int) (ssd.Queue, error) {
	if depth < 1 {
		return nil, fmt.Errorf("%w: queue depth is %d, want at least 1", ErrConfig, depth)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.gone.Load() {
		return nil, ssd.ErrGone
	}
	q := &queue{dev: d, done: make([]ssd.Completion, depth), waker: ssd.NewWaker()}
	d.queues[q] = struct{}{}
	return q, nil
}

// Close gives the memory back; queues answer ErrGone from then on. Idempotent.
func (d *Device) Close() error {
	d.mu.Lock()
	d.gone.Store(true)
	for q := range d.queues {
		q.Wake()
	}
	d.mu.Unlock()
	d.mapMu.Lock()
	defer d.mapMu.Unlock()
	if d.unmapped {
		return nil
	}
	d.unmapped = true
	return unix.Munmap(d.mem)
}

// do carries out one request. The caller holds mapMu for reading.
func (d *Device) do(r *ssd.Request) error { // hot: 0 allocs
	if err := ssd.Validate(&d.info, r); err != nil {
		return err
	}
	if d.unmapped {
		return ssd.ErrGone
	}
	switch r.Op {
	case ssd.Read:
		copy(r.Buf[:r.Len], d.mem[r.Offset:])
	case ssd.Write:
		write(d.mem[r.Offset:r.Offset+r.Len], r.Buf[:r.Len])
	case ssd.Deallocate, ssd.WriteZeroes:
		return d.zero(r.Offset, r.Len)
	}
	return nil
}

// write copies data onto the drive. An ordinary store first reads the cache line that it replaces, and leaves it in the
// cache, where it displaces the buffers of the requests that follow. A drive is too large for the cache, so that both
// are wasted. Bypassing the cache halves the time of a copy (128 KiB: 8 instead of 16 µs).
func write(dst, src []byte) { // hot: 0 allocs
	if len(dst) >= streamBytes {
		streamBlocks(dst, src)
		return
	}
	copy(dst, src)
}

// zero clears a range, giving whole pages of long ranges back to the kernel.
func (d *Device) zero(off, n int64) error {
	end := off + n
	first, last := (off+pageBytes-1)&^(pageBytes-1), end&^(pageBytes-1)
	if last-first < dontNeedBytes {
		clear(d.mem[off:end])
		return nil
	}
	clear(d.mem[off:first])
	clear(d.mem[last:end])
	if err := unix.Madvise(d.mem[first:last], unix.MADV_DONTNEED); err != nil {
		clear(d.mem[first:last])
	}
	return nil
}

// queue is a ring of completions: Submit appends, Poll takes.
type queue struct {
	dev   *Device
	waker ssd.Waker

	mu     sync.Mutex
	done   []ssd.Completion // ring
	first  int              // index of the oldest
	n      int              // how many
	woken  bool             // Wake was called and no Wait has returned for it
	closed bool
	// waiting: a Wait is about to block, or blocks.
	waiting bool
}

// Submit implements ssd.Queue.
func (q *queue) Submit(reqs []ssd.Request) int { // hot: 0 allocs
	q.mu.Lock()
	if q.closed {
		q.mu.Unlock()
		return 0
	}
	room := min(len(q.done)-q.n, len(reqs))
	at := q.first + q.n
	q.mu.Unlock()
	if room == 0 {
		return 0
	}
	// Only this goroutine adds completions, and Poll reads only the first n, so the slots behind them can be filled
	// without the lock.
	start := time.Since(epoch)
	q.dev.mapMu.RLock()
	for i := range room {
		q.done[(at+i)%len(q.done)] = ssd.Completion{Tag: reqs[i].Tag, Err: q.dev.do(&reqs[i])}
	}
	q.dev.mapMu.RUnlock()
	latency := int64(time.Since(epoch) - start)
	q.mu.Lock()
	for i := range room {
		q.done[(at+i)%len(q.done)].LatencyNS = latency
	}
	q.n += room
	waiting := q.waiting
	q.mu.Unlock()
	if waiting {
		q.waker.Notify()
	}
	return room
}

// Poll implements ssd.Queue.
func (q *queue) Poll(dst []ssd.Completion) int { // hot: 0 allocs
	q.mu.Lock()
	defer q.mu.Unlock()
	n := min(len(dst), q.n)
	for i := range n {
		dst[i] = q.done[q.first]
		q.first = (q.first + 1) % len(q.done)
	}
	q.n -= n
	return n
}

// Wait implements ssd.Queue. It is rare: no caller needs to wait on a synchronous queue.
func (q *queue) Wait(limit time.Duration) bool { return q.waker.Wait(limit, q.ready) }

// ready reports whether a Wait returns. block: it blocks otherwise.
func (q *queue) ready(block bool) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	r := q.woken || q.n > 0 || q.closed || q.dev.gone.Load()
	q.woken = false
	q.waiting = block && !r
	return r
}

// Wake implements ssd.Queue.
func (q *queue) Wake() {
	q.mu.Lock()
	q.woken = true
	q.mu.Unlock()
	q.waker.Notify()
}

// Synchronous implements ssd.Queue: true.
func (q *queue) Synchronous() bool { return true }

// Close implements ssd.Queue. Completions not yet polled stay pollable.
func (q *queue) Close() error {
	q.dev.mu.Lock()
	delete(q.dev.queues, q)
	q.dev.mu.Unlock()
	q.mu.Lock()
	q.closed = true
	q.mu.Unlock()
	q.Wake()
	return nil
}
