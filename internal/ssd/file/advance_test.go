package file

import (
	"testing"

	"golang.org/x/sys/unix"

	"jbofd/internal/ssd"
)

// A request that the kernel has not begun, because of a signal or for lack of a thread, is submitted again.
func TestRequestsCancelledByTheKernelAreRepeated(t *testing.T) {
	for _, errno := range []unix.Errno{unix.EAGAIN, unix.EINTR, unix.ECANCELED} {
		s := &slot{req: ssd.Request{Op: ssd.Write, Len: 4096}, queue: &queue{dev: &Device{}}}
		if finished, err := s.advance(-int32(errno)); finished || err != nil || s.pos != 0 {
			t.Errorf("%v: finished %t, %v, at %d", errno, finished, err, s.pos)
		}
	}
}
