package ssdtest

import (
	"testing"
	"time"

	"jbofd/internal/ssd"
)

// pollsInPieces: completions that do not fit are there for the next Poll, in any number of pieces, also for another
// goroutine that has become the owner. A synchronous queue has all of them when Submit returns.
func pollsInPieces(t *testing.T, d ssd.Device, q ssd.Queue) {
	const n = 8
	var reqs [n]ssd.Request
	b := make([]byte, n*4096)
	for i := range reqs {
		reqs[i] = ssd.Request{Op: ssd.Read, Offset: int64(i) * 4096, Len: 4096, Buf: b[i*4096:][:4096], Tag: uint64(i)}
	}
	for round := range 20 {
		if took := q.Submit(reqs[:]); took != n {
			t.Fatalf("Submit took %d, want %d", took, n)
		}
		var seen [n]bool
		if q.Synchronous() && round%2 == 1 {
			var c [n + 1]ssd.Completion
			if got := q.Poll(c[:]); got != n {
				t.Fatalf("the queue is synchronous, and has %d completions after Submit, want %d", got, n)
			}
			continue
		}
		for polled := 0; polled < n; {
			if got := q.Poll(nil); got != 0 {
				t.Fatalf("Poll into nothing returned %d", got)
			}
			got := make(chan ssd.Completion, 2)
			ended := make(chan struct{})
			go func() { // the owner for now
				defer close(ended)
				var c [2]ssd.Completion
				for _, c := range c[:ssd.Await(q, c[:1+polled%2], late)] {
					got <- c
				}
			}()
			<-ended
			close(got)
			before := polled
			for c := range got {
				if c.Err != nil || c.Tag >= n || seen[c.Tag] {
					t.Fatalf("bad completion %+v", c)
				}
				seen[c.Tag] = true
				polled++
			}
			if polled == before {
				t.Fatalf("%d of %d requests have ended", polled, n)
			}
		}
		if q.Wait(0) {
			t.Fatal("Wait tells of completions that were polled")
		}
	}
}

// queuesAreApart: what ends on a queue, wakes it or closes it, is nothing to another queue of the device.
func queuesAreApart(t *testing.T, d ssd.Device, q ssd.Queue) {
	other, err := d.OpenQueue(4)
	if err != nil {
		t.Logf("there is no second queue: %v", err) // a controller may have one only
		return
	}
	waiter := make(chan bool)
	go func() { waiter <- other.Wait(time.Hour) }()
	b := make([]byte, 4096)
	for range 20 {
		if err := Do(t, q, ssd.Request{Op: ssd.Read, Len: 4096, Buf: b}); err != nil {
			t.Fatal(err)
		}
		q.Wake()
		if !q.Wait(-1) {
			t.Fatal("Wait was woken, and returned false")
		}
	}
	if err := q.Close(); err != nil {
		t.Fatal(err)
	}
	select {
	case <-waiter:
		t.Fatal("a Wait has ended because of another queue")
	default:
	}
	other.Wake()
	if !<-waiter {
		t.Fatal("Wait was woken, and returned false")
	}
	if err := Do(t, other, ssd.Request{Op: ssd.Read, Len: 4096, Buf: b}); err != nil {
		t.Errorf("a read after another queue was closed: %v", err)
	}
	if err := other.Close(); err != nil {
		t.Error(err)
	}
}
