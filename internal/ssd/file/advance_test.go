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
		if next, err := s.advance(-int32(errno)); next != nextRing || err != nil || s.pos != 0 {
			t.Errorf("%v: next %d, %v, at %d", errno, next, err, s.pos)
		}
	}
}

// A write with FUA whose flag the file does not know is for a worker, also while another one finds that out.
func TestWritesWithFUAThatTheRingDoesNotKnowAreForWorkers(t *testing.T) {
	for _, known := range []bool{false, true} {
		d := &Device{}
		d.noDSync.Store(known)
		s := &slot{req: ssd.Request{Op: ssd.Write, Flags: ssd.FUA, Len: 4096}, queue: &queue{dev: d}}
		if next, err := s.advance(-int32(unix.EOPNOTSUPP)); next != nextWorker || err != nil {
			t.Errorf("known %v: next %d, %v", known, next, err)
		}
		if d.forRing(&s.req) == known {
			t.Errorf("known %v: the next one is for the ring: %v", known, !known)
		}
	}
}
