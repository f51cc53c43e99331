// Package file implements a drive on a regular file or a block device, opened with O_DIRECT if the file system allows
// it.
//
//	                  ┌─ read, write ──> io_uring, one ring a queue ────────┐
//	Queue.Submit ─────┤                                                     ├──> Queue.Poll
//	                  └─ flush, deallocate, zeroes ──> workers (syscalls) ──┘
//
// With Engine "threads", where io_uring is not permitted (as in many containers), and on file systems where whoever
// submits to it would wait (FUSE, NFS, tmpfs), the workers do everything. Buffers from the bufpool are registered with
// the kernel, region by region when they are first used. Other aligned memory is read and written in place, unaligned
// memory through a copy.
//
// The device is locked against a second daemon by flock, a block device by
// O_EXCL as well.
package file

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"jbofd/internal/bufpool"
	"jbofd/internal/ssd"
	"jbofd/internal/uring"
)

// The engines.
const (
	EngineURing   = "io_uring"
	EngineThreads = "threads"
)

// Default numbers of workers: for everything, and for what io_uring is not used for.
const threadsWorkers, uringWorkers = 16, 4

// Config describes a file device.
type Config struct {
	// Name is the device's name in the configuration.
	Name string
	// Path is a regular file or a block device.
	Path string
	// Create makes a regular file if there is none; it needs SizeBytes.
	Create bool
	// ReadOnly opens it for reading. Others that read only may have it open, too.
	ReadOnly bool
	// SizeBytes is the capacity, a multiple of the block size. 0: the present size. With Create
	// a smaller regular file grows (sparse); without Create it is refused, because a file that
	// is shorter than expected may be another file, or have lost data. A larger file is always
	// refused. For a block device SizeBytes must be 0 or the size of the device.
	SizeBytes int64
	// Engine is EngineURing, EngineThreads, or "": io_uring if the kernel lets us. With EngineURing Open fails if the
	// kernel refuses io_uring, but file systems that are not fit for it have threads all the same.
	Engine string
	// Workers is how many threads carry out system calls at most. 0: 16 for the
	// engine "threads", else 4.
	Workers int
	// Pool is where buffers usually come from; they are registered with io_uring.
	// May be nil.
	Pool *bufpool.Pool
}

// The errors of Open besides those of the system.
var (
	// ErrConfig: a field of Config is out of its bounds.
	ErrConfig = errors.New("file: invalid configuration")
	// ErrSize: the file or device has another size than configured, and may not get it.
	ErrSize = errors.New("file: size differs from the configuration")
	// ErrInUse: another process has the device.
	ErrInUse = errors.New("file: device is in use")
	// ErrWaits: with io_uring already the submission of a request might wait; see Device.Fallback.
	ErrWaits = errors.New("file: requests cannot be submitted without waiting")
)

// Device is an open file or block device.
type Device struct {
	info  ssd.Info
	pool  *bufpool.Pool
	file  *os.File
	fd    int
	block bool // a block device
	// memAlign is what buffer addresses must be multiples of.
	memAlign int
	uring    bool
	strict   bool // io_uring was requested by name: do not fall back to workers

	gone      atomic.Bool // the device reported that it is gone, or was closed
	truncated atomic.Bool // reads have met the end of the file
	// Operations that the device or file system has turned out not to support.
	noDSync, noPunch, noZeroRange atomic.Bool

	workers workers

	// health is what the drive has said last, or nil. watch reads it; nil: nobody does.
	health atomic.Pointer[ssd.Health]
	watch  *watch

	mu       sync.Mutex
	queues   map[*queue]struct{}
	fallback error // why io_uring is not used, or not on every queue
	closed   bool
	// mapping are calls of NextData under way, which use fd without mu: a file system may take long to answer them.
	mapping sync.WaitGroup
}

// Open opens, locks and if need be creates the device.
//
// Errors: ErrConfig, ErrSize, ErrInUse (says who holds it, if that can be found);
// and the system's, such as os.ErrNotExist.
func Open(cfg Config) (*Device, error) {
	switch cfg.Engine {
	case "", EngineURing, EngineThreads:
	default:
		return nil, fmt.Errorf("%w: Engine is %q, want %q, %q or nothing", ErrConfig, cfg.Engine, EngineURing,
			EngineThreads)
	}
	if cfg.SizeBytes < 0 || cfg.Workers < 0 {
		return nil, fmt.Errorf("%w: SizeBytes is %d and Workers is %d, want neither negative", ErrConfig, cfg.SizeBytes,
			cfg.Workers)
	}
	d := &Device{pool: cfg.Pool, queues: make(map[*queue]struct{})}
	d.info = ssd.Info{Name: cfg.Name, Backend: "file", Path: cfg.Path, Engine: EngineThreads}
	err := d.open(&cfg)
	if err == nil {
		err = d.chooseEngine(cfg.Engine)
	}
	if err != nil {
		if d.file != nil {
			err = errors.Join(err, d.file.Close())
		}
		return nil, err
	}
	d.watchHealth()
	d.workers.dev, d.workers.cond.L = d, &d.workers.mu
	d.workers.max = cfg.Workers
	if d.workers.max == 0 {
		d.workers.max = threadsWorkers
		if d.uring {
			d.workers.max = uringWorkers
		}
	}
	return d, nil
}

// kind names what is at a path that cannot be a drive.
func kind(m os.FileMode) string {
	switch {
	case m.IsDir():
		return "a directory"
	case m&os.ModeCharDevice != 0:
		return "a character device"
	}
	return "of type " + m.Type().String()
}

func (d *Device) open(cfg *Config) error {
	flags := os.O_RDWR | unix.O_CLOEXEC | unix.O_DIRECT
	if cfg.ReadOnly {
		flags = os.O_RDONLY | unix.O_CLOEXEC | unix.O_DIRECT
	}
	st, err := os.Stat(cfg.Path)
	created := false
	switch {
	case err == nil && st.Mode()&os.ModeDevice != 0 && st.Mode()&os.ModeCharDevice == 0:
		d.block = true
		flags |= os.O_EXCL
	case err == nil && !st.Mode().IsRegular():
		return fmt.Errorf("%w: %s is %s, want a regular file or a block device, as /dev/nvme0n1", ErrConfig, cfg.Path,
			kind(st.Mode()))
	case errors.Is(err, os.ErrNotExist) && cfg.Create:
		if cfg.SizeBytes == 0 {
			return fmt.Errorf("%w: SizeBytes is 0, but %s does not exist and is to be created", ErrConfig, cfg.Path)
		}
		flags |= os.O_CREATE
		created = true
	case err != nil:
		return fmt.Errorf("open device %q: %w", cfg.Name, err)
	}
	d.file, err = openFile(cfg.Path, flags)
	direct := true
	if errors.Is(err, unix.EINVAL) {
		direct = false
		d.file, err = openFile(cfg.Path, flags&^unix.O_DIRECT)
	}
	for deadline := time.Now().Add(lockPatience); errors.Is(err, unix.EBUSY); d.file, err = openFile(cfg.Path, flags) {
		if holder, alive := blockHolder(cfg.Path); alive || time.Now().After(deadline) {
			return fmt.Errorf("%w: %s is %s", ErrInUse, cfg.Path, holder)
		}
		time.Sleep(5 * time.Millisecond)
	}
	if err != nil {
		return fmt.Errorf("open device %q: %w", cfg.Name, err)
	}
	d.fd = int(d.file.Fd())
	how := unix.LOCK_EX
	if cfg.ReadOnly {
		how = unix.LOCK_SH
	}
	if err := d.lock(cfg.Path, how); err != nil {
		return err
	}
	if d.block {
		err = d.measureBlockDevice()
		if err == nil && cfg.SizeBytes != 0 && cfg.SizeBytes != d.info.SizeBytes {
			err = fmt.Errorf("%w: %s has %d bytes, configured are %d", ErrSize, cfg.Path, d.info.SizeBytes,
				cfg.SizeBytes)
		}
	} else {
		err = d.measureFile(direct, cfg.SizeBytes, cfg.Create)
	}
	if err == nil && created {
		err = syncDir(filepath.Dir(cfg.Path))
	}
	return err
}

// openFile opens a file without Go's poller, which os.OpenFile gives it to: a file on a file system in user space can
// be polled, and if nobody answers there the poller hangs, and with it the process.
func openFile(path string, flags int) (*os.File, error) {
	for {
		fd, err := unix.Open(path, flags|unix.O_LARGEFILE, 0o600)
		if err == nil {
			return os.NewFile(uintptr(fd), path), nil
		}
		if err != unix.EINTR {
			return nil, &os.PathError{Op: "open", Path: path, Err: err}
		}
	}
}

// lockPatience is how long Open waits for the lock, or the block device, of a process that has ended. After kill -9 the
// kernel closes a process's files only when it has torn down the process's io_uring, which happens after its end.
const lockPatience = 2 * time.Second

// lock takes the file's lock.
//
// Errors: ErrInUse at once if a living process has it.
func (d *Device) lock(path string, how int) error {
	for deadline := time.Now().Add(lockPatience); ; time.Sleep(5 * time.Millisecond) {
		err := unix.Flock(d.fd, how|unix.LOCK_NB)
		if err == nil {
			return nil
		}
		if err != unix.EWOULDBLOCK {
			return fmt.Errorf("lock %s: %w", path, err)
		}
		if holder, alive := lockHolder(d.fd); alive || time.Now().After(deadline) {
			return fmt.Errorf("%w: %s is locked by %s", ErrInUse, path, holder)
		}
	}
}

// syncDir makes a new file's name durable.
func syncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

func (d *Device) chooseEngine(want string) error {
	if want == EngineThreads {
		return nil
	}
	d.strict = want == EngineURing
	if err := d.probeNowait(); err != nil {
		d.fallback = err
		return nil
	}
	ring, err := uring.New(1)
	if err == nil {
		d.uring, d.info.Engine = true, EngineURing
		return ring.Close()
	}
	if d.strict {
		return fmt.Errorf("device %q: %w", d.info.Name, err)
	}
	d.fallback = err
	return nil
}

// Fallback returns the last reason why the device is slower than it could be, or nil: its engine is "threads", or a
// queue uses the workers, or buffers are not registered, although io_uring was preferred. It wraps
// uring.ErrUnavailable if the kernel refuses io_uring, ErrWaits if the file system is not fit for it, ENOMEM if
// RLIMIT_MEMLOCK is used up. The device serves anyway.
func (d *Device) Fallback() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.fallback
}

func (d *Device) noteFallback(err error) {
	d.mu.Lock()
	d.fallback = err
	d.mu.Unlock()
}

// Info implements ssd.Device.
func (d *Device) Info() ssd.Info { return d.info }

// Healthy implements ssd.Device.
//
// It asks for what the kernel knows of the file: a server of a file system (FUSE, NFS) that hangs is not waited for.
// What is deleted or truncated there is noticed when requests fail, or the kernel asks the server for another reason.
//
// Errors: ErrGone if the drive vanished, the device was closed, or the file was
// deleted beneath us; ErrMedia if it was truncated.
func (d *Device) Healthy() error {
	if d.gone.Load() {
		return ssd.ErrGone
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed || d.vanished() {
		return ssd.ErrGone
	}
	if d.block {
		return nil
	}
	var st unix.Statx_t
	if err := unix.Statx(d.fd, "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, unix.STATX_NLINK|unix.STATX_SIZE,
		&st); err != nil {
		return fmt.Errorf("%w: %s: %w", ssd.ErrGone, d.info.Path, err)
	}
	if st.Nlink == 0 {
		return fmt.Errorf("%w: %s was deleted", ssd.ErrGone, d.info.Path)
	}
	if int64(st.Size) < d.info.SizeBytes || d.truncated.Load() {
		return fmt.Errorf("%w: %s was truncated to %d bytes, %d expected", ssd.ErrMedia, d.info.Path, st.Size,
			d.info.SizeBytes)
	}
	return nil
}

// MaxDepth bounds the depth of a queue.
const MaxDepth = 4096

// OpenQueue implements ssd.Device.
func (d *Device) OpenQueue(depth int) (ssd.Queue, error) {
	if depth < 1 || depth > MaxDepth {
		return nil, fmt.Errorf("%w: queue depth is %d, want 1 to %d", ErrConfig, depth, MaxDepth)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil, ssd.ErrGone
	}
	q, err := newQueue(d, depth)
	if err != nil {
		return nil, fmt.Errorf("queue on %q: %w", d.info.Name, err)
	}
	d.queues[q] = struct{}{}
	return q, nil
}

// Close implements ssd.Device. It waits for requests in flight, then closes the queues, the workers and the file, which
// releases the lock. A block device stays claimed (O_EXCL) until it has answered for its SMART log.
func (d *Device) Close() error {
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		return nil
	}
	d.closed = true
	queues := make([]*queue, 0, len(d.queues))
	for q := range d.queues {
		queues = append(queues, q)
	}
	d.mu.Unlock()

	var errs []error
	for _, q := range queues {
		errs = append(errs, q.Close())
	}
	d.gone.Store(true)
	d.unwatchHealth()
	for _, q := range queues {
		q.Wake()
	}
	d.workers.close()
	d.mapping.Wait()
	// The kernel may keep the file open for a moment after the rings are closed.
	errs = append(errs, unix.Flock(d.fd, unix.LOCK_UN))
	errs = append(errs, d.file.Close())
	return errors.Join(errs...)
}

// vanished reports whether it is a block device that was pulled: the kernel gives it a capacity of 0, and fails
// requests as if there were no space, or behind its end. It asks no device.
func (d *Device) vanished() bool {
	if !d.block {
		return false
	}
	n, err := blockDeviceBytes(d.fd)
	if err != nil || n > 0 {
		return false
	}
	d.gone.Store(true)
	return true
}

// fail returns the completion error for an errno.
func (d *Device) fail(r *ssd.Request, errno unix.Errno) error {
	if d.vanished() {
		return fmt.Errorf("%w: %v of %d bytes at %d: %w", ssd.ErrGone, r.Op, r.Len, r.Offset, errno)
	}
	kind := ssd.ErrMedia // EIO and every errno not listed below
	switch errno {
	case unix.ENOSPC, unix.EDQUOT:
		kind = ssd.ErrNoSpace
	case unix.ENODEV, unix.ENXIO, unix.EBADF, unix.ESHUTDOWN, unix.ESTALE:
		kind = ssd.ErrGone
		d.gone.Store(true)
	case unix.EOPNOTSUPP, unix.ENOSYS, unix.ENOTTY:
		kind = ssd.ErrUnsupported
	}
	return fmt.Errorf("%w: %v of %d bytes at %d: %w", kind, r.Op, r.Len, r.Offset, errno)
}

// failEOF returns the error of a read that met the end of the file.
func (d *Device) failEOF(r *ssd.Request, at int64) error {
	if d.vanished() {
		return fmt.Errorf("%w: %v of %d bytes at %d", ssd.ErrGone, r.Op, r.Len, r.Offset)
	}
	d.truncated.Store(true)
	return fmt.Errorf("%w: %v of %d bytes at %d: the file ends at or before %d, because it has been truncated",
		ssd.ErrMedia, r.Op, r.Len, r.Offset, at)
}
