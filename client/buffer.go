package client

import (
	"fmt"
	"sync"

	"golang.org/x/sys/unix"
)

// AllocBuffer returns page-aligned memory outside of the Go heap for the data of commands, and a function that frees
// it. That function is idempotent; it must be called when no command uses the memory any more.
//
// Over RDMA the memory is registered. Commands of a QPair whose data lies entirely in such memory transfer it without a
// copy, and may transfer up to 16 MiB less one byte. The target can access all of it while the controller is
// connected. Over TCP the memory has no special properties.
//
// Errors: ErrInvalid; ErrClosed; those of the system if there is not enough memory, or if the process may not lock it
// (RLIMIT_MEMLOCK).
func (c *Controller) AllocBuffer(size int) (b []byte, free func() error, err error) {
	if size <= 0 {
		return nil, nil, fmt.Errorf("%w: buffer of %d bytes", ErrInvalid, size)
	}
	if c.opts.memory != nil {
		return c.opts.memory.Alloc(size)
	}
	if b, err = unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS); err != nil {
		return nil, nil, fmt.Errorf("%d bytes of buffer: %w", size, err)
	}
	return b, sync.OnceValue(func() error { return unix.Munmap(b) }), nil
}
