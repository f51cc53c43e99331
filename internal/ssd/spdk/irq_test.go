//go:build spdk && cgo && spdkstandin

package spdk_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"jbofd/internal/ssd"
)

// SPDK closes the descriptor of a queue pair with it. The queue must not read from it any more: another file may have
// its number.
func TestAQueueOfALostControllerLeavesOtherDescriptorsAlone(t *testing.T) {
	for _, waits := range []bool{false, true} { // when the controller is lost
		t.Run(fmt.Sprint(waits), func(t *testing.T) { leavesOthersAlone(t, waits) })
	}
}

func leavesOthersAlone(t *testing.T, waits bool) {
	r := newRig(t, standin{}, quick(pcie()))
	q := r.queue(4)
	if err := read(r, q); err != nil {
		t.Fatal(err)
	}
	waited := make(chan bool, 1)
	if waits {
		go func() { waited <- q.Wait(-1) }()
	}
	r.raise(removed)
	for end := time.Now().Add(5 * time.Second); r.get(qpairs) != 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("the queue pair was not ended: %v", r.dev.Healthy())
		}
	}
	var pipes [][2]int
	for range 8 { // one of them gets the number
		var p [2]int
		if err := unix.Pipe2(p[:], unix.O_NONBLOCK|unix.O_CLOEXEC); err != nil {
			t.Fatal(err)
		}
		if _, err := unix.Write(p[1], []byte("a host's")); err != nil {
			t.Fatal(err)
		}
		pipes = append(pipes, p)
	}
	if waits {
		q.Wake()
		<-waited
	}
	before := cpuTime(t)
	if q.Wait(100*time.Millisecond) && q.Wait(100*time.Millisecond) { // the first may have been signalled before
		t.Error("a Wait without a cause ends early")
	}
	if used := cpuTime(t) - before; used > 50*time.Millisecond {
		t.Errorf("%v of the processor in 100 ms", used)
	}
	for _, p := range pipes {
		var b [8]byte
		if n, err := unix.Read(p[0], b[:]); n != 8 {
			t.Errorf("the data of another file, descriptor %d, are gone: %d bytes, %v", p[0], n, err)
		}
		_, _ = unix.Close(p[0]), unix.Close(p[1])
	}
	if err := read(r, q); !errors.Is(err, ssd.ErrGone) {
		t.Error(err)
	}
}

// After a reset interrupts end a wait as before, although the queue pair has another descriptor then.
func TestInterruptsAfterAReset(t *testing.T) {
	r := newRig(t, standin{}, pcie())
	q := r.queue(4)
	for round := range uint64(2) {
		waited := make(chan bool)
		go func() { // and polls the descriptor of before
			for !q.Wait(-1) {
			}
			close(waited)
		}()
		r.raise(twice)
		if q.Submit([]ssd.Request{{Op: ssd.Read, Len: 4096, Buf: r.buffer(4096)}}) != 1 {
			t.Fatal("not taken")
		}
		<-waited
		collect(t, q, 1, nil)
		for end := time.Now().Add(5 * time.Second); r.get(resets) != round+1; time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatal("the controller was not reset")
			}
		}
		r.set(delayNS, uint64(time.Millisecond))
		before := r.get(admins)
		for range 20 {
			if err := read(r, q); err != nil {
				t.Fatal(err)
			}
		}
		if n := r.get(admins) - before; n > 10 {
			t.Errorf("20 reads have waited for %d looks of the keeper", n)
		}
	}
}
