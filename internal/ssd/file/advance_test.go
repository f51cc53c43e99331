package file

import (
	"testing"

	"golang.org/x/sys/unix"

	"jbofd/internal/ssd"
)

// What the kernel has not begun, for a signal or for want of a thread, is asked for again.
func TestRequestsCancelledByTheKernelAreRepeated(t *testing.T) {
	for _, errno := range []unix.Errno{unix.EAGAIN, unix.EINTR, unix.ECANCELED} {
		s := &slot{req: ssd.Request{Op: ssd.Write, Len: 4096}, queue: &queue{dev: &Device{}}}
		if finished, err := s.advance(-int32(errno)); finished || err != nil || s.pos != 0 {
			t.Errorf("%v: finished %t, %v, at %d", errno, finished, err, s.pos)
		}
	}
}
