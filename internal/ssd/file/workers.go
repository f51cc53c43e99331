package file

import (
	"sync"

	"golang.org/x/sys/unix"

	"jbofd/internal/ssd"
)

// workers is a pool of up to max goroutines that carry out requests by blocking system calls. Goroutines are started
// on demand and run until close.
type workers struct {
	dev *Device
	max int
	wg  sync.WaitGroup

	mu          sync.Mutex
	cond        sync.Cond // L is &mu
	first, last *slot     // FIFO of requests
	n, idle     int
	closed      bool
}

// push hands over a slot. It never blocks.
func (w *workers) push(s *slot) { // hot: 0 allocs
	w.mu.Lock()
	defer w.mu.Unlock()
	s.next = nil
	if w.first == nil {
		w.first = s
	} else {
		w.last.next = s
	}
	w.last = s
	switch {
	case w.idle > 0:
		w.cond.Signal()
	case w.n < w.max:
		w.n++
		w.wg.Go(w.run)
	}
}

func (w *workers) run() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for {
		for w.first == nil {
			if w.closed {
				return
			}
			w.idle++
			w.cond.Wait()
			w.idle--
		}
		s := w.first
		w.first = s.next
		w.mu.Unlock()
		err := w.dev.execute(s)
		s.queue.finish(s, err)
		w.mu.Lock()
	}
}

// raise sets the maximum to at least n workers.
func (w *workers) raise(n int) {
	w.mu.Lock()
	w.max = max(w.max, n)
	w.mu.Unlock()
}

// close ends the workers when the last request is done.
func (w *workers) close() {
	w.mu.Lock()
	w.closed = true
	w.cond.Broadcast()
	w.mu.Unlock()
	w.wg.Wait()
}

// execute carries out what remains of a request.
func (d *Device) execute(s *slot) error { // hot: 0 allocs
	r := &s.req
	switch r.Op {
	case ssd.Read:
		if r.Flags&ssd.FUA != 0 {
			if err := d.sync(r); err != nil {
				return err
			}
		}
		for b := s.rest(); len(b) > 0; b = s.rest() {
			n, err := unix.Pread(d.fd, b, r.Offset+s.pos)
			switch {
			case err == unix.EINTR || err == unix.EAGAIN:
			case err != nil:
				return d.fail(r, errnoOf(err))
			case n == 0:
				return d.failEOF(r, r.Offset+s.pos)
			}
			s.pos += int64(max(n, 0))
		}
		return nil
	case ssd.Write:
		return d.write(s)
	case ssd.Flush:
		return d.sync(r)
	case ssd.Deallocate:
		return d.deallocate(r)
	}
	if err := d.writeZeroes(r); err != nil {
		return err
	}
	if r.Flags&ssd.FUA != 0 {
		return d.sync(r)
	}
	return nil
}

func (d *Device) write(s *slot) error { // hot: 0 allocs
	r := &s.req
	fua := r.Flags&ssd.FUA != 0
	dsync := fua && !d.noDSync.Load()
	for b := s.rest(); len(b) > 0; b = s.rest() {
		var n int
		var err error
		if dsync {
			n, err = pwriteDSync(d.fd, b, r.Offset+s.pos)
		} else {
			n, err = unix.Pwrite(d.fd, b, r.Offset+s.pos)
		}
		switch {
		case err == unix.EINTR || err == unix.EAGAIN:
		case dsync && (err == unix.EOPNOTSUPP || err == unix.ENOSYS):
			d.noDSync.Store(true)
			dsync = false
		case err != nil:
			return d.fail(r, errnoOf(err))
		case n == 0:
			return d.fail(r, unix.EIO)
		}
		s.pos += int64(max(n, 0))
	}
	if fua && !dsync {
		return d.sync(r)
	}
	return nil
}

func (d *Device) sync(r *ssd.Request) error {
	for {
		switch err := unix.Fdatasync(d.fd); err {
		case nil:
			return nil
		case unix.EINTR:
		default:
			return d.fail(r, errnoOf(err))
		}
	}
}

func (d *Device) deallocate(r *ssd.Request) error {
	if !d.info.Deallocates || r.Len == 0 {
		return nil // advice that cannot be taken
	}
	var errno unix.Errno
	if d.block {
		errno = blockRange(d.fd, unix.BLKDISCARD, r.Offset, r.Len)
	} else {
		errno = d.fallocate(unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, r)
	}
	if errno != 0 {
		return d.fail(r, errno)
	}
	return nil
}

// writeZeroes tries the cheapest methods first; the last one writes zeroes.
func (d *Device) writeZeroes(r *ssd.Request) error {
	if r.Len == 0 {
		return nil
	}
	// On block devices the kernel has these as BLKZEROOUT; PUNCH_HOLE succeeds only
	// where the device zeroes what it deallocates.
	if r.Flags&ssd.Unmap != 0 && !d.noPunch.Load() {
		switch errno := d.fallocate(unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, r); errno {
		case 0:
			return nil
		case unix.EOPNOTSUPP, unix.ENOSYS:
			d.noPunch.Store(true)
		default:
			return d.fail(r, errno)
		}
	}
	if !d.noZeroRange.Load() {
		var errno unix.Errno
		if d.block {
			errno = blockRange(d.fd, unix.BLKZEROOUT, r.Offset, r.Len)
		} else {
			errno = d.fallocate(unix.FALLOC_FL_ZERO_RANGE|unix.FALLOC_FL_KEEP_SIZE, r)
		}
		switch errno {
		case 0:
			return nil
		case unix.EOPNOTSUPP, unix.ENOSYS, unix.ENOTTY:
			d.noZeroRange.Store(true)
		default:
			return d.fail(r, errno)
		}
	}
	return d.plainZeroes(r)
}

// plainZeroes writes zeroes from memory.
func (d *Device) plainZeroes(r *ssd.Request) error {
	zeroes, free, err := scratch(int(min(r.Len, 1<<20)))
	if err != nil {
		return d.fail(r, unix.ENOMEM)
	}
	defer free() // of our own anonymous memory: cannot fail
	s := slot{req: ssd.Request{Op: r.Op}}
	for off, end := r.Offset, r.Offset+r.Len; off < end; off += s.req.Len {
		s.pos = 0
		s.req.Offset, s.req.Len = off, min(end-off, int64(len(zeroes)))
		s.req.Buf = zeroes
		if err := d.write(&s); err != nil {
			return err
		}
	}
	return nil
}

func (d *Device) fallocate(mode uint32, r *ssd.Request) unix.Errno {
	for {
		switch err := unix.Fallocate(d.fd, mode, r.Offset, r.Len); err {
		case nil:
			return 0
		case unix.EINTR:
		default:
			return errnoOf(err)
		}
	}
}

func errnoOf(err error) unix.Errno {
	if e, ok := err.(unix.Errno); ok {
		return e
	}
	return unix.EIO
}
