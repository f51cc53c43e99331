package file

import (
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"jbofd/internal/ssd"
	"jbofd/internal/uring"
)

// TestRequestsThatTheKernelRefusesForNowComplete: io_uring_enter fails when the kernel is short of memory. A Poll that
// has blocked before must notice, because no completion will ever wake it.
func TestRequestsThatTheKernelRefusesForNowComplete(t *testing.T) {
	if engines(t)[0] != EngineURing {
		t.Skip("this machine offers no io_uring")
	}
	for _, blocked := range []bool{true, false} {
		d := open(t, Config{})
		q := openQueue(t, d, 4).(*queue)
		var refusals atomic.Int32
		refusals.Store(3)
		q.submit = func(r *uring.Ring) (int, error) {
			if refusals.Add(-1) >= 0 {
				return 0, unix.EAGAIN
			}
			return r.Submit()
		}
		buf, free, err := scratch(4096)
		if err != nil {
			t.Fatal(err)
		}
		write := []ssd.Request{{Op: ssd.Write, Flags: ssd.FUA, Len: 4096, Buf: buf, Tag: 7}}
		polled := make(chan ssd.Completion, 1)
		poll := func() {
			var done [4]ssd.Completion
			if ssd.Await(q, done[:], -1) == 1 {
				polled <- done[0]
			}
			close(polled)
		}
		if blocked {
			go poll()
			for !q.waiting.Load() {
				runtime.Gosched()
			}
		}
		if n := q.Submit(write); n != 1 {
			t.Fatalf("%d requests taken", n)
		}
		if !blocked {
			go poll()
		}
		select {
		case c := <-polled:
			if c.Tag != 7 || c.Err != nil {
				t.Errorf("completion %+v", c)
			}
		case <-time.After(10 * time.Second):
			t.Fatalf("Poll blocked before Submit: %v. The write does not complete", blocked)
		}
		if n := refusals.Load(); n >= 0 {
			t.Errorf("%d refusals are left", n)
		}
		if err := q.Close(); err != nil {
			t.Error(err)
		}
		if err := free(); err != nil {
			t.Error(err)
		}
	}
}
