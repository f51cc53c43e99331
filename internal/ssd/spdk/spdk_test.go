//go:build spdk && cgo && spdkstandin

package spdk_test

import (
	"bytes"
	"os"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"jbofd/internal/ssd"
	"jbofd/internal/ssd/spdk"
	"jbofd/internal/ssd/ssdtest"
)

// The drive keeps the promises of package ssd, over each transport and whatever its controller can do.
func TestConformance(t *testing.T) {
	all := writeZeroes | dsm | readsZero | cache
	for name, c := range map[string]struct {
		standin
		cfg spdk.Config
	}{
		"PCIe":                {standin{flags: all}, pcie()},
		"PCIe, slow":          {standin{flags: all, delay: 50 * time.Microsecond}, pcie()},
		"PCIe, no interrupts": {standin{flags: noInterrupts | dsm | backwards, transfer: 4 << 10}, pcie()},
		"PCIe, few entries":   {standin{entries: 2}, pcie()},
		"PCIe, 4096":          {standin{shift: 12, transfer: 16 << 10}, pcie()},
		"PCIe, unregistered":  {standin{flags: noRegister, transfer: 64 << 10}, pcie()},
		"PCIe, untranslated":  {standin{flags: noTranslation | writeZeroes}, pcie()},
		"TCP":                 {standin{flags: all}, tcp()},
		"TCP, slow": {standin{flags: all | backwards, delay: 50 * time.Microsecond,
			transfer: 8 << 10}, tcp()},
	} {
		t.Run(name, func(t *testing.T) {
			ssdtest.Conformance(t, func(t *testing.T) ssd.Device { return newRig(t, c.standin, c.cfg).dev })
		})
	}
}

// SPDK's environment pins the thread that initialises it; all threads may use all processors afterwards.
func TestNoThreadIsPinned(t *testing.T) {
	newRig(t, standin{}, tcp()) // the environment is made at the first Open of the process
	var all unix.CPUSet
	if err := unix.SchedGetaffinity(unix.Getpid(), &all); err != nil {
		t.Fatal(err)
	}
	if all.Count() < 2 {
		t.Skip("there is one processor")
	}
	threads, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	for _, thread := range threads {
		id, _ := strconv.Atoi(thread.Name())
		var may unix.CPUSet
		if err := unix.SchedGetaffinity(id, &may); err == nil && may != all {
			t.Errorf("thread %d may use %d of %d processors", id, may.Count(), all.Count())
		}
	}
}

// Data in the pool is accessed in place: a batch is one call into C, and one send.
func TestABatchIsOneCrossing(t *testing.T) {
	const n = 32
	overBoth(t, func(t *testing.T, cfg spdk.Config) {
		r := newRig(t, standin{flags: noInterrupts, delay: time.Millisecond}, cfg)
		q := r.queue(n)
		b := r.buffer(n * 4096)
		for i := range b {
			b[i] = byte(i / 4096)
		}
		reqs := make([]ssd.Request, n)
		for i := range reqs {
			reqs[i] = ssd.Request{Op: ssd.Write, Offset: int64(i) * 4096, Len: 4096, Buf: b[i*4096:], Tag: uint64(i)}
		}
		for looked := ^uint64(0); looked != r.get(admins) && !t.Failed(); { // the keeper looks at the queue, too
			looked = r.get(admins)
			sent, taken := r.get(sends), r.get(submits)
			before := spdk.Crossings(q)
			if q.Submit(reqs) != n {
				t.Fatal("not all were taken")
			}
			submit, sent, taken := spdk.Crossings(q)-before, r.get(sends)-sent, r.get(submits)-taken
			for end := time.Now().Add(2 * time.Millisecond); time.Now().Before(end); {
			}
			var done [n]ssd.Completion
			before = spdk.Crossings(q)
			got := q.Poll(done[:])
			poll := spdk.Crossings(q) - before
			if before += poll; q.Poll(done[:]) != 0 || spdk.Crossings(q) != before {
				t.Error("a Poll of an idle queue crosses")
			}
			if got != n || looked == r.get(admins) && (submit != 1 || sent != 1 || taken != n || poll != 1) {
				t.Errorf("%d crossings and %d sends for %d commands, and %d crossings for %d completions, want 1",
					submit, sent, taken, poll, got)
			}
		}
		if !bytes.Equal(r.data[:n*4096], b) {
			t.Error("other data was written")
		}
	})
}

// overBoth runs a test on the PCI bus and over TCP.
func overBoth(t *testing.T, f func(t *testing.T, cfg spdk.Config)) {
	for _, cfg := range []spdk.Config{pcie(), tcp()} {
		t.Run(cfg.Transport, func(t *testing.T) { f(t, cfg) })
	}
}

func TestSubmitPollAndWaitAllocateNothing(t *testing.T) {
	overBoth(t, func(t *testing.T, cfg spdk.Config) {
		r := newRig(t, standin{}, cfg)
		q := r.queue(8)
		reqs := []ssd.Request{{Op: ssd.Read, Len: 4096, Buf: r.buffer(4096)}}
		for _, delay := range []time.Duration{0, 30 * time.Microsecond} {
			r.set(delayNS, uint64(delay))
			var done [1]ssd.Completion
			n := testing.AllocsPerRun(200, func() {
				q.Submit(reqs)
				for q.Poll(done[:]) == 0 {
					q.Wait(-1)
				}
				q.Wait(0)
			})
			if n != 0 {
				t.Errorf("%v: %v allocations", delay, n)
			}
		}
	})
}

// An idle queue, and the keeper beside it, do nearly nothing.
func TestIdleCostsNothing(t *testing.T) {
	overBoth(t, func(t *testing.T, cfg spdk.Config) {
		r := newRig(t, standin{}, cfg)
		q := r.queue(8)
		ssdtest.Read(t, q, 0, 4096)
		got := make(chan bool)
		go func() { got <- q.Wait(-1) }()
		before, admin, used := r.get(turns), r.get(admins), cpuTime(t)
		time.Sleep(time.Second) // that nothing happens has no event
		if n := r.get(turns) - before; n > 1 {
			t.Errorf("%s: %d looks in a second without requests", cfg.Transport, n)
		}
		if n := r.get(admins) - admin; n < 1 || n > 4 {
			t.Errorf("%s: %d looks at the controller in a second, want 2 or 3", cfg.Transport, n)
		}
		if used = cpuTime(t) - used; used > 200*time.Millisecond {
			t.Errorf("%s: %v of the processor in a second", cfg.Transport, used)
		}
		q.Wake()
		<-got
	})
}

// A wait for a slow drive without interrupts is late by a quarter at most, or 1 ms, and takes few looks.
func TestWithoutInterruptsAWaitNaps(t *testing.T) {
	r := newRig(t, standin{delay: 50 * time.Millisecond}, tcp())
	q := r.queue(8)
	ssdtest.Read(t, q, 0, 4096)
	if n := r.get(turns); n > 120 {
		t.Errorf("%d looks for a completion after 50 ms", n)
	}
}

// A wait with interrupts does not look before there is something.
func TestInterruptsEndAWait(t *testing.T) {
	cfg := pcie()
	cfg.Timeout = time.Hour
	r := newRig(t, standin{delay: 50 * time.Millisecond}, cfg)
	q := r.queue(8)
	ssdtest.Read(t, q, 0, 4096)
	if n := r.get(turns); n > 6 {
		t.Errorf("%d looks for a completion that an interrupt tells", n)
	}
}

// What a request says reaches the drive: FUA, the permission to deallocate, flushes and deallocations.
func TestFlagsReachTheDrive(t *testing.T) {
	do := func(q ssd.Queue, req ssd.Request) {
		t.Helper()
		if err := ssdtest.Do(t, q, req); err != nil {
			t.Fatal(err)
		}
	}
	r := newRig(t, standin{flags: writeZeroes | dsm}, pcie())
	q, b := r.queue(2), r.buffer(4096)
	do(q, ssd.Request{Op: ssd.Write, Flags: ssd.FUA, Len: 4096, Buf: b})
	do(q, ssd.Request{Op: ssd.Read, Flags: ssd.FUA, Len: 4096, Buf: b})
	do(q, ssd.Request{Op: ssd.WriteZeroes, Flags: ssd.FUA | ssd.Unmap, Len: 4096})
	do(q, ssd.Request{Op: ssd.WriteZeroes, Len: 4096})
	do(q, ssd.Request{Op: ssd.Flush})
	do(q, ssd.Request{Op: ssd.Deallocate, Len: 8192})
	if f, d, fl, ds := r.get(fuas), r.get(deacs), r.get(flushes), r.get(dsms); f != 3 || d != 1 || fl != 1 || ds != 1 {
		t.Errorf("%d FUA, %d DEAC, %d Flush, %d DSM; want 3, 1, 1, 1", f, d, fl, ds)
	}
}

// Without Write Zeroes, FUA is that of the writes in its place, and there is no DEAC.
func TestZeroesAreWrittenWithoutACommandForThem(t *testing.T) {
	r := newRig(t, standin{}, pcie())
	if err := ssdtest.Do(t, r.queue(2), ssd.Request{Op: ssd.WriteZeroes, Flags: ssd.FUA | ssd.Unmap,
		Len: 4096}); err != nil {
		t.Fatal(err)
	}
	if f, d := r.get(fuas), r.get(deacs); f != 1 || d != 0 {
		t.Errorf("%d FUA, %d DEAC; want 1, 0", f, d)
	}
}

func TestInfoSaysWhatTheControllerSays(t *testing.T) {
	for _, tc := range []struct {
		standin
		atomic          int
		cache, dsm, rz0 bool
	}{
		{standin{}, 512, false, false, false},
		{standin{flags: cache | dsm, atomics: 7}, 4096, true, true, false},
		{standin{flags: dsm | readsZero, atomics: 6}, 2048, false, true, true},
		{standin{flags: readsZero, atomics: 15<<16 | 7}, 8192, false, false, false},
		{standin{atomics: 7<<32 | 15<<16}, 4096, false, false, false},
		{standin{atomics: 1<<48 | 15<<16}, 512, false, false, false},
	} {
		i := newRig(t, tc.standin, pcie()).dev.Info()
		if i.AtomicWriteBytes != tc.atomic || i.VolatileCache != tc.cache || i.Deallocates != tc.dsm ||
			i.DeallocatedReadsZero != tc.rz0 || i.SizeBytes != 8<<20 || i.Model != "Stand-in" || i.Serial != "S1" ||
			i.Backend != "spdk" || i.Engine != "spdk-pcie" || !i.Polled {
			t.Errorf("%+v: %+v", tc.standin, i)
		}
	}
}
