package eventfd

import (
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func newEvent(t *testing.T) *Event {
	t.Helper()
	e, err := New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = e.Close() })
	return e
}

// soon is a time that passes if a Wait does not return.
func soon() time.Time { return time.Now().Add(10 * time.Second) }

func TestASignalEndsTheNextWait(t *testing.T) {
	e := newEvent(t)
	for range 3 { // several signals are one
		e.Signal()
	}
	if !e.Wait(soon()) {
		t.Error("the signal was lost")
	}
	if e.Wait(time.Now().Add(time.Millisecond)) {
		t.Error("a signal is left over")
	}
	if n := e.Calls(); n < 5 || n > 8 {
		t.Errorf("%d calls of the system, want 3 writes, a read, and a read before and after the wait", n)
	}
}

func TestTheKernelsSignalEndsAWait(t *testing.T) {
	e := newEvent(t)
	if _, err := unix.Write(e.FD(), one[:]); err != nil {
		t.Fatal(err)
	}
	if !e.Wait(soon()) {
		t.Error("the signal was lost")
	}
}

// A Wait without a limit is not ended by the limit of an earlier one.
func TestALimitEndsItsOwnWaitOnly(t *testing.T) {
	e := newEvent(t)
	if e.Wait(time.Now()) {
		t.Error("signalled by nobody")
	}
	var w sync.WaitGroup
	defer w.Wait()
	w.Go(func() { e.Signal() })
	if !e.Wait(time.Time{}) {
		t.Error("the Wait was ended by the limit of the one before")
	}
}

func TestCloseEndsAWait(t *testing.T) {
	e := newEvent(t)
	ended := make(chan bool)
	go func() { ended <- e.Wait(time.Time{}) }()
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	if !<-ended || !e.Wait(soon()) {
		t.Error("a Wait of a closed event says that its time is over")
	}
	e.Signal() // does nothing
}

func TestSignalAndWaitAllocateNothing(t *testing.T) {
	e := newEvent(t)
	if n := testing.AllocsPerRun(100, func() { e.Signal(); e.Wait(time.Time{}) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
