package vfio

import (
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"jbofd/internal/ssd"
	"jbofd/internal/ssd/vfio/pcietest"
)

// fullFunction is a function for which no more memory can be mapped from some time on.
type fullFunction struct {
	*pcietest.Controller
	full atomic.Bool
}

func (f *fullFunction) Map(b []byte) (uint64, error) {
	if f.full.Load() {
		return 0, unix.ENOMEM
	}
	return f.Controller.Map(b)
}

// TestARequestThatEndsInSubmitWakesTheWaiter: a request ends without a command if there is no memory for a copy of its
// data. Nothing else would wake a goroutine that waits for its completion.
func TestARequestThatEndsInSubmitWakesTheWaiter(t *testing.T) {
	c, err := pcietest.New(pcietest.Config{SizeBytes: 8 << 20})
	if err != nil {
		t.Fatal(err)
	}
	f := &fullFunction{Controller: c}
	d, err := Open(Config{Name: "test", Timeout: 40 * time.Millisecond}, f)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	}()
	opened, err := d.OpenQueue(1)
	if err != nil {
		t.Fatal(err)
	}
	f.full.Store(true)
	// Otherwise the keeper wakes it.
	for end := time.Now().Add(10 * time.Second); !d.idle.Load(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the keeper does not sleep")
		}
	}
	q := opened.(*queue)
	q.waiting.Store(true)
	if n := q.Submit([]ssd.Request{{Op: ssd.Read, Len: 4096, Buf: make([]byte, 4096)}}); n != 1 {
		t.Fatalf("Submit takes %d requests, want 1", n)
	}
	if !q.event.Wait(time.Now().Add(time.Second)) {
		t.Error("the waiter is not woken")
	}
	q.waiting.Store(false)
	if dst := make([]ssd.Completion, 1); q.requests.Poll(dst) != 1 || dst[0].Err == nil {
		t.Errorf("the request ends with %v, want an error", dst[0].Err)
	}
}
