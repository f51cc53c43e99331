package ssdtest

import (
	"errors"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"time"

	"jbofd/internal/ssd"
)

// late is when a test gives up.
const late = 30 * time.Second

// wakes: each Wake ends one Wait, the one that is under way or the next one, and nothing else ends the Wait of an idle
// queue.
func wakes(t *testing.T, d ssd.Device, q ssd.Queue) {
	idle := func() {
		t.Helper()
		var c [4]ssd.Completion
		start := time.Now()
		if q.Wait(0) || q.Wait(5*time.Millisecond) || time.Since(start) < 4*time.Millisecond {
			t.Fatalf("Wait on an idle queue has ended after %v, want false after 5 ms", time.Since(start))
		}
		if n := q.Poll(c[:]); n != 0 {
			t.Fatalf("Poll on an idle queue returned %d", n)
		}
	}
	idle()
	for range 50 {
		got := make(chan bool)
		go func() { got <- q.Wait(-1) }()
		q.Wake()
		if !<-got {
			t.Fatal("Wait was woken, and returned false")
		}
	}
	idle()
	q.Wake()
	if !q.Wait(0) {
		t.Error("a Wait that does not block has missed Wake")
	}
	idle()
}

// waitTells: a completion that has arrived ends a Wait at once, with any limit, until it is polled.
func waitTells(t *testing.T, d ssd.Device, q ssd.Queue) {
	b := make([]byte, 4096)
	for range 30 {
		if n := q.Submit([]ssd.Request{{Op: ssd.Read, Len: 4096, Buf: b}}); n != 1 {
			t.Fatalf("Submit took %d", n)
		}
		for end := time.Now().Add(late); !q.Wait(0); runtime.Gosched() {
			if time.Now().After(end) {
				t.Fatal("a queue that is only looked at never tells of a completion")
			}
		}
		for _, limit := range []time.Duration{-1, time.Hour, 0} {
			if !q.Wait(limit) {
				t.Fatalf("Wait(%v) returned false, and there is a completion", limit)
			}
		}
		var c [4]ssd.Completion
		if n := q.Poll(c[:]); n != 1 || c[0].Err != nil {
			t.Fatalf("Poll returned %d: %v", n, c[0].Err)
		}
		if q.Wait(0) {
			t.Fatal("Wait tells of a completion that was polled")
		}
	}
}

// waiterMissesNothing has an owner and a waiter, which becomes the owner after each Wait. The owner polls only now and
// then, so that everything ends only if the waiter is told of each completion that it does not take.
func waiterMissesNothing(t *testing.T, d ssd.Device, q ssd.Queue) {
	const depth, total = 8, 3000
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	var owner sync.Mutex
	var seen [total]bool
	var buffer [total]int // of a request
	var free []int        // buffers
	b := make([]byte, depth*4096)
	for i := range depth {
		free = append(free, i)
	}
	ended, underWay := 0, 0
	room := make(chan struct{}, 1)
	take := func() { // with ownership
		var c [depth]ssd.Completion
		for _, c := range c[:q.Poll(c[:])] {
			if c.Err != nil || c.Tag >= total || seen[c.Tag] {
				t.Errorf("bad completion %+v", c)
				continue
			}
			seen[c.Tag] = true
			free = append(free, buffer[c.Tag])
			ended++
			underWay--
		}
		select {
		case room <- struct{}{}:
		default:
		}
	}
	waiter := make(chan struct{})
	go func() {
		defer close(waiter)
		for over := false; !over; {
			q.Wait(-1)
			owner.Lock()
			take()
			over = ended == total
			owner.Unlock()
		}
	}()
	gaveUp := time.After(late)
	for sent := 0; sent < total; {
		owner.Lock()
		n := min(depth-underWay, 1+rng.IntN(depth), total-sent)
		var reqs [depth]ssd.Request
		for i := range n {
			at := 4096 * int64(free[len(free)-1])
			buffer[sent+i], free = free[len(free)-1], free[:len(free)-1]
			reqs[i] = ssd.Request{Op: ssd.Read, Offset: at, Len: 4096, Buf: b[at:][:4096], Tag: uint64(sent + i)}
		}
		if took := q.Submit(reqs[:n]); took != n {
			t.Fatalf("Submit took %d of %d with %d under way", took, n, underWay)
		}
		sent += n
		underWay += n
		for range rng.IntN(3) {
			runtime.Gosched()
			take()
		}
		full := underWay == depth
		owner.Unlock()
		if !full {
			continue
		}
		select {
		case <-room:
		case <-gaveUp:
			t.Fatalf("the waiter was not told: %d of %d have ended, %d are under way", ended, sent, underWay)
		}
	}
	owner.Lock()
	if ended == total { // the owner has taken the last one
		q.Wake()
	}
	owner.Unlock()
	select {
	case <-waiter:
	case <-gaveUp:
		t.Fatal("the waiter was not told of the last completions")
	}
}

// closeWaits: Close waits for what is under way, and ends a Wait. All of it can be polled afterwards; what the device
// did not have yet, because it was delayed on the way, may end with ErrGone.
func closeWaits(t *testing.T, d ssd.Device, q ssd.Queue) {
	const n = 8
	var reqs [n]ssd.Request
	for i := range reqs {
		reqs[i] = ssd.Request{Op: ssd.Write, Offset: int64(i) * 4096, Len: 4096, Buf: make([]byte, 4096),
			Tag: uint64(i)}
	}
	if took := q.Submit(reqs[:]); took != n {
		t.Fatalf("Submit took %d", took)
	}
	waiter := make(chan bool)
	go func() { waiter <- q.Wait(-1) }()
	if err := q.Close(); err != nil {
		t.Fatal(err)
	}
	if !<-waiter || !q.Wait(-1) {
		t.Error("Wait on a closed queue returned false")
	}
	if took := q.Submit(reqs[:1]); took != 0 {
		t.Errorf("a closed queue took %d requests", took)
	}
	var c [2 * n]ssd.Completion
	if got := q.Poll(c[:]); got != n {
		t.Errorf("%d completions can be polled after Close, want %d", got, n)
	}
	for _, c := range c[:n] {
		if c.Err != nil && !errors.Is(c.Err, ssd.ErrGone) {
			t.Errorf("request %d: %v", c.Tag, c.Err)
		}
	}
}
