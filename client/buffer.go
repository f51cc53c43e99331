package client

import (
	"fmt"
	"sync"

	"golang.org/x/sys/unix"
)

// AllocBuffer returns page-aligned memory outside of the Go heap, for data of commands, and a function
// that takes it back, which is idempotent and must be called when no command uses the memory any more. Over
// RDMA the memory is registered: commands of a QPair whose data lies in it, wholly, move it without a copy, and may
// have up to 16 MiB less a byte; the target can reach all of it while the controller is connected. Over TCP it is
// as good as any other.
//
// Errors: ErrInvalid; ErrClosed; the system's, for want of memory or of the right to lock it (RLIMIT_MEMLOCK).
func (c *Controller) AllocBuffer(size int) (b []byte, free func() error, err error) {
	if size <= 0 {
		return nil, nil, fmt.Errorf("%w: buffer of %d bytes", ErrInvalid, size)
	}
	if c.opts.memory != nil {
		return c.opts.memory.Alloc(size)
	}
	if b, err = unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS); err != nil {
		return nil, nil, fmt.Errorf("%d bytes of buffer: %w", size, err)
	}
	return b, sync.OnceValue(func() error { return unix.Munmap(b) }), nil
}
