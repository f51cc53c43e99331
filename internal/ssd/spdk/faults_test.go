//go:build spdk && cgo && spdkstandin

package spdk_test

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"jbofd/internal/ssd"
	"jbofd/internal/ssd/spdk"
	"jbofd/internal/ssd/ssdtest"
)

var seedFlag = flag.Uint64("seed", 0, "the random tests' seed; 0: a new one")

// quick are limits of time for drives that do not answer.
func quick(c spdk.Config) spdk.Config {
	c.Timeout, c.AbortTimeout = 60*time.Millisecond, 30*time.Millisecond
	return c
}

func read(r *rig, q ssd.Queue) error {
	r.Helper()
	return ssdtest.Do(r.T, q, ssd.Request{Op: ssd.Read, Len: 4096, Buf: r.buffer(4096)})
}

// What the controller answers is what a request ends with, as the kinds of package ssd.
func TestErrorsAreResultsOfRequests(t *testing.T) {
	r := newRig(t, standin{}, pcie())
	q := r.queue(4)
	for status, want := range map[uint64]error{0x281: ssd.ErrMedia, 0x81: ssd.ErrNoSpace, 0x80: ssd.ErrRange,
		0x4001: ssd.ErrUnsupported, 0x4006: ssd.ErrMedia, 0x4082: ssd.ErrMedia} {
		r.set(failStatus, status)
		r.set(fail, 1)
		if err := read(r, q); !errors.Is(err, want) {
			t.Errorf("status %#x: %v, want %v", status, err, want)
		}
		if err := read(r, q); err != nil {
			t.Errorf("after status %#x: %v", status, err)
		}
	}
	if n := r.get(resets); n != 0 {
		t.Errorf("%d resets because of errors of the medium", n)
	}
}

// A part that fails fails its request, once, and the rest of it is not sent for ever.
func TestOneOfManyPartsFails(t *testing.T) {
	r := newRig(t, standin{transfer: 4096}, pcie())
	q := r.queue(2)
	for _, fails := range []uint64{1, 3, 1000} {
		r.set(failStatus, 0x281)
		r.set(fail, fails)
		b := r.buffer(1 << 20)
		if err := ssdtest.Do(t, q, ssd.Request{Op: ssd.Read, Len: 1 << 20, Buf: b}); !errors.Is(err, ssd.ErrMedia) {
			t.Errorf("%d parts fail: %v", fails, err)
		}
		r.set(fail, 0)
	}
	if err := read(r, q); err != nil {
		t.Error(err)
	}
}

// A status that says that the command may succeed later has it sent again, at most four times in all.
func TestStatusesThatAllowARetry(t *testing.T) {
	r := newRig(t, standin{}, pcie())
	q := r.queue(4)
	r.set(failStatus, 0x82) // Namespace Not Ready
	r.set(fail, 3)
	if err := read(r, q); err != nil || r.get(submits) != 4 {
		t.Errorf("three times not ready: %v after %d commands, want 4", err, r.get(submits))
	}
	r.set(fail, 4)
	if err := read(r, q); !errors.Is(err, ssd.ErrMedia) || r.get(fail) != 0 {
		t.Errorf("four times not ready: %v, %d are left", err, r.get(fail))
	}
}

// SPDK has no memory for commands for a while: they are sent later, and complete.
func TestSubmissionsWithoutMemory(t *testing.T) {
	overBoth(t, func(t *testing.T, cfg spdk.Config) {
		r := newRig(t, standin{}, cfg)
		q := r.queue(8)
		for _, n := range []uint64{1, 5, 100} {
			r.set(noMemory, n)
			reqs := make([]ssd.Request, 8)
			for i := range reqs {
				reqs[i] = ssd.Request{Op: ssd.Write, Offset: int64(i) * 4096, Len: 4096, Buf: r.buffer(4096),
					Tag: uint64(i)}
			}
			if q.Submit(reqs) != 8 {
				t.Fatal("not all were taken")
			}
			collect(t, q, 8, nil)
			if r.get(noMemory) != 0 {
				t.Errorf("%d refusals are left", r.get(noMemory))
			}
		}
	})
}

// collect waits for n completions, each of its own tag, with an error of the kind that is wanted.
func collect(t *testing.T, q ssd.Queue, n int, want error) {
	t.Helper()
	seen := map[uint64]bool{}
	var done [16]ssd.Completion
	for end := time.Now().Add(20 * time.Second); len(seen) < n; {
		for _, c := range done[:ssd.Await(q, done[:], time.Second)] {
			if seen[c.Tag] || !errors.Is(c.Err, want) {
				t.Errorf("request %d: %v, want %v; before: %v", c.Tag, c.Err, want, seen[c.Tag])
			}
			seen[c.Tag] = true
		}
		if time.Now().After(end) {
			t.Fatalf("%d of %d requests have ended", len(seen), n)
		}
	}
}

// If SPDK never has memory, requests end all the same.
func TestMemoryThatNeverComes(t *testing.T) {
	r := newRig(t, standin{}, quick(pcie()))
	q := r.queue(4)
	r.set(noMemory, 1<<60)
	if err := read(r, q); !errors.Is(err, ssd.ErrMedia) || !errors.Is(err, unix.ENOMEM) {
		t.Errorf("%v", err)
	}
	r.set(noMemory, 0)
	if err := read(r, q); err != nil {
		t.Error(err)
	}
}

// A command that SPDK refuses ends its request, and no other.
func TestARefusedCommand(t *testing.T) {
	r := newRig(t, standin{}, pcie())
	q := r.queue(4)
	r.set(refuse, uint64(unix.EINVAL))
	if err := read(r, q); !errors.Is(err, unix.EINVAL) || !errors.Is(err, ssd.ErrMedia) {
		t.Errorf("%v", err)
	}
	if err := read(r, q); err != nil {
		t.Error(err)
	}
}

// counted counts events.
func counted(c spdk.Config, n *[ssd.HealthEvents]atomic.Int64) spdk.Config {
	c.Event = func(kind ssd.HealthEvent, what string) { n[kind].Add(1) }
	return c
}

// A command that hangs is aborted, and sent again.
func TestAbortsEndCommandsThatHang(t *testing.T) {
	overBoth(t, func(t *testing.T, cfg spdk.Config) {
		var events [ssd.HealthEvents]atomic.Int64
		r := newRig(t, standin{}, counted(quick(cfg), &events))
		q := r.queue(4)
		r.set(hang, 2)
		if err := read(r, q); err != nil || r.get(aborts) != 2 || r.get(resets) != 0 || r.get(submits) != 3 {
			t.Errorf("%v; %d aborts, %d resets, %d commands, want 2, 0, 3", err, r.get(aborts), r.get(resets),
				r.get(submits))
		}
		if n := events[ssd.EventTimeout].Load(); n != 2 {
			t.Errorf("%d timeouts were told, want 2", n)
		}
		r.set(hang, 1<<60)
		if err := read(r, q); !errors.Is(err, ssd.ErrMedia) {
			t.Errorf("a drive that never answers: %v", err)
		}
	})
}

// If an Abort does nothing, the controller is reset, and what was under way is done.
func TestAResetEndsWhatAnAbortDoesNot(t *testing.T) {
	overBoth(t, func(t *testing.T, cfg spdk.Config) {
		var events [ssd.HealthEvents]atomic.Int64
		r := newRig(t, standin{flags: abortIgnored}, counted(quick(cfg), &events))
		q, other := r.queue(8), r.queue(1)
		r.set(hang, 3)
		reqs := make([]ssd.Request, 8)
		for i := range reqs {
			b := r.buffer(4096)
			b[0] = byte(i + 1)
			reqs[i] = ssd.Request{Op: ssd.Write, Offset: int64(i) * 4096, Len: 4096, Buf: b, Tag: uint64(i)}
		}
		if q.Submit(reqs) != 8 {
			t.Fatal("not all were taken")
		}
		collect(t, q, 8, nil)
		for i := range reqs {
			if r.data[i*4096] != byte(i+1) {
				t.Errorf("block %d was not written", i)
			}
		}
		if n := events[ssd.EventReset].Load(); n != 1 || r.get(resets) != 1 {
			t.Errorf("%d resets, %d were told, want 1", r.get(resets), n)
		}
		if err := read(r, other); err != nil {
			t.Errorf("another queue after the reset: %v", err)
		}
	})
}

// gone checks that requests end with ErrGone, now and later, and that the device says so.
func gone(r *rig, q ssd.Queue) {
	r.Helper()
	for range 2 {
		if err := read(r, q); !errors.Is(err, ssd.ErrGone) {
			r.Errorf("%v, want %v", err, ssd.ErrGone)
		}
	}
	if err := r.dev.Healthy(); !errors.Is(err, ssd.ErrGone) {
		r.Errorf("Healthy: %v", err)
	}
	if _, err := r.dev.OpenQueue(1); !errors.Is(err, ssd.ErrGone) {
		r.Errorf("OpenQueue: %v", err)
	}
}

// A controller that is removed ends what is under way within a second, and the waiter is told.
func TestARemovedController(t *testing.T) {
	overBoth(t, func(t *testing.T, cfg spdk.Config) {
		cfg.AbortTimeout = 100 * time.Millisecond // for which a target that does not answer is tried
		r := newRig(t, standin{}, cfg)
		q := r.queue(8)
		r.set(hang, 8)
		reqs := make([]ssd.Request, 8)
		for i := range reqs {
			reqs[i] = ssd.Request{Op: ssd.Write, Len: 4096, Buf: r.buffer(4096),
				Tag: uint64(i)}
		}
		if q.Submit(reqs) != 8 {
			t.Fatal("not all were taken")
		}
		waited := make(chan bool)
		go func() { waited <- q.Wait(-1) }()
		start := time.Now()
		r.raise(removed)
		if !<-waited {
			t.Error("Wait returned false")
		}
		collect(t, q, 8, ssd.ErrGone)
		if took := time.Since(start); took > 2*time.Second {
			t.Errorf("the requests have ended after %v", took)
		}
		gone(r, q)
	})
}

// An idle controller that is removed is found out, too.
func TestAnIdleControllerIsRemoved(t *testing.T) {
	r := newRig(t, standin{}, pcie())
	q := r.queue(1)
	r.raise(removed)
	for end := time.Now().Add(5 * time.Second); r.dev.Healthy() == nil; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("nobody has noticed")
		}
	}
	gone(r, q)
}

// A connection that is lost is made again, and what was under way is done. If that fails, the drive is gone.
func TestALostConnection(t *testing.T) {
	r := newRig(t, standin{delay: 200 * time.Microsecond}, quick(tcp()))
	q := r.queue(8)
	for round := range 5 {
		reqs := make([]ssd.Request, 8)
		for i := range reqs {
			reqs[i] = ssd.Request{Op: ssd.Read, Len: 4096, Buf: r.buffer(4096),
				Tag: uint64(i)}
		}
		if q.Submit(reqs) != 8 {
			t.Fatal("not all were taken")
		}
		r.raise(cut)
		collect(t, q, 8, nil)
		if n := r.get(resets); n != uint64(round+1) {
			t.Errorf("round %d: %d resets", round, n)
		}
	}
	r.raise(resetFails | cut)
	gone(r, q)
}

// A namespace that is another one after a reset is given up.
func TestAnotherNamespaceAfterAReset(t *testing.T) {
	for _, f := range []uint64{shrunk, otherUUID, otherNGUID, otherEUI64, noUUID} {
		r := newRig(t, standin{}, quick(tcp()))
		q := r.queue(8)
		r.raise(f | cut)
		gone(r, q)
	}
}

// A completion that comes twice ends nothing twice, and the controller is reset.
func TestACompletionThatComesTwice(t *testing.T) {
	r := newRig(t, standin{}, pcie())
	q := r.queue(4)
	r.raise(twice)
	if err := read(r, q); err != nil {
		t.Error(err)
	}
	if err := read(r, q); err != nil {
		t.Error(err)
	}
	for end := time.Now().Add(5 * time.Second); r.get(resets) == 0; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the controller was not reset")
		}
	}
}

// Closing waits for what hangs until the keeper has ended it.
func TestCloseWithCommandsThatHang(t *testing.T) {
	overBoth(t, func(t *testing.T, cfg spdk.Config) {
		r := newRig(t, standin{flags: abortIgnored | resetFails}, quick(cfg))
		q := r.queue(4)
		r.set(hang, 1<<60)
		if q.Submit([]ssd.Request{{Op: ssd.Read, Len: 4096, Buf: r.buffer(4096)}}) != 1 {
			t.Fatal("not taken")
		}
		if err := r.dev.Close(); err != nil {
			t.Error(err)
		}
		collect(t, q, 1, ssd.ErrGone)
	})
}

// Controllers and configurations that cannot be used are refused, by the reason.
func TestWhatCannotBeOpened(t *testing.T) {
	for want, s := range map[string]standin{"metadata": {flags: metadata}, "connect() to": {flags: refusedConnect},
		"longer than a transfer": {shift: 12, transfer: 2048}} {
		_, err := newController(t, s).open(pcie())
		if !errors.Is(err, spdk.ErrAttach) || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	c := pcie()
	c.NSID = 7
	if _, err := newController(t, standin{}).open(c); !errors.Is(err, spdk.ErrAttach) {
		t.Errorf("namespace 7: %v", err)
	}
	for _, id := range []spdk.TransportID{{}, {Transport: "fc", Address: "x"}, {Transport: "pcie", Address: "1.2.3.4"},
		{Transport: "pcie", Address: "0000:03:00.0", SubNQN: "n"}, {Transport: "tcp", Address: "host", Service: "1"},
		{Transport: "tcp", Address: "::1", Service: "0", SubNQN: "n"}, {Transport: "tcp", Address: "::1", Service: "1"},
		{Transport: "tcp", Address: "::1", Service: "1", SubNQN: "a b"}} {
		if _, err := newController(t, standin{}).open(spdk.Config{TransportID: id}); !errors.Is(err, spdk.ErrConfig) {
			t.Errorf("%+v: %v", id, err)
		}
	}
	r := newRig(t, standin{}, pcie())
	for _, depth := range []int{0, -1, 4097} {
		if _, err := r.dev.OpenQueue(depth); !errors.Is(err, spdk.ErrConfig) {
			t.Errorf("a depth of %d: %v", depth, err)
		}
	}
}

// Memory that is registered, but for which there is no address, is not given to the device, and a log can say why.
func TestMemoryThatTheDeviceDoesNotReach(t *testing.T) {
	for f, want := range map[uint64]error{0: nil, noTranslation: unix.EFAULT, noRegister: unix.ENOMEM} {
		t.Run(fmt.Sprint(want), func(t *testing.T) {
			r := newRig(t, standin{flags: f}, pcie())
			if err := read(r, r.queue(1)); err != nil {
				t.Error(err)
			}
			if err := r.dev.(*spdk.Device).Fallback(); !errors.Is(err, want) {
				t.Errorf("%v, want %v", err, want)
			}
			if n := r.get(registered); (n == 0) != (f != 0) {
				t.Errorf("%d regions are registered", n)
			}
		})
	}
}

// A target refuses a queue pair while it has not noticed that the one before is closed.
func TestQueuePairsThatATargetRefuses(t *testing.T) {
	r := newRig(t, standin{}, tcp())
	r.set(noQueue, 3)
	if err := read(r, r.queue(1)); err != nil {
		t.Error(err)
	}
	r.set(noQueue, 1000)
	if _, err := r.dev.OpenQueue(1); err == nil {
		t.Error("a queue was opened that the target refuses")
	}
}

// A target that is started again is connected to again, and what was under way is done.
func TestATargetThatIsStartedAgain(t *testing.T) {
	r := newRig(t, standin{}, tcp())
	q := r.queue(1)
	r.raise(resetFails | cut)
	if q.Submit([]ssd.Request{{Op: ssd.Read, Len: 4096, Buf: r.buffer(4096)}}) != 1 {
		t.Fatal("not taken")
	}
	for r.get(resets) < 2 {
		time.Sleep(time.Millisecond)
	}
	r.lower(resetFails)
	collect(t, q, 1, nil)
}

// Whatever happens, each request ends once, and what was written is there.
func TestRandomFaults(t *testing.T) {
	seed := *seedFlag
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	t.Logf("-seed=%d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	overBoth(t, func(t *testing.T, cfg spdk.Config) {
		const depth = 8
		r := newRig(t, standin{transfer: 4096, delay: 20 * time.Microsecond}, quick(cfg))
		q := r.queue(depth)
		var buffers [depth][]byte
		for i := range buffers {
			buffers[i] = r.buffer(16384)
		}
		for round := range 40 {
			switch rng.IntN(5) {
			case 0:
				r.set(noMemory, uint64(rng.IntN(4))) // each takes a nap, and Timeout is short
			case 1:
				if cfg.Transport == "tcp" {
					r.raise(cut)
				}
			case 2:
				r.set(hang, uint64(rng.IntN(2)))
			case 3:
				r.raise([]uint64{backwards, twice, abortIgnored}[rng.IntN(3)])
			case 4:
				r.set(failStatus, 0x82)
				r.set(fail, uint64(rng.IntN(2)))
			}
			reqs := make([]ssd.Request, depth)
			for i := range reqs {
				for k := range buffers[i] {
					buffers[i][k] = byte(round*depth + i)
				}
				reqs[i] = ssd.Request{Op: ssd.Write, Offset: int64(i) * 16384, Len: 16384, Buf: buffers[i],
					Tag: uint64(i)}
			}
			if n := q.Submit(reqs); n != depth {
				t.Fatalf("round %d: %d were taken", round, n)
			}
			collect(t, q, depth, nil)
			for i := range depth * 16384 {
				if r.data[i] != byte(round*depth+i/16384) {
					t.Fatalf("round %d: byte %d was not written", round, i)
				}
			}
			r.lower(backwards | abortIgnored)
		}
	})
}
