package model

import (
	"bytes"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"jbofd/internal/ssd"
	"jbofd/internal/ssd/model/flash"
	"jbofd/internal/ssd/ssdtest"
)

func open(t testing.TB, cfg Config) *Device {
	t.Helper()
	d, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

func openQueue(t testing.TB, d *Device, depth int) *queue {
	t.Helper()
	q, err := d.OpenQueue(depth)
	if err != nil {
		t.Fatal(err)
	}
	return q.(*queue)
}

func TestConformance(t *testing.T) {
	for _, cfg := range []Config{
		{BlockSize: 512, Condition: flash.Empty},
		{BlockSize: 4096, Condition: flash.Fragmented},
		{BlockSize: 512, Preset: "p4800x"},
	} {
		ssdtest.Conformance(t, func(t *testing.T) ssd.Device {
			cfg.Name, cfg.SizeBytes = "m", 32<<20
			return open(t, cfg)
		})
	}
}

func TestConfigOutOfBoundsIsRefused(t *testing.T) {
	for _, cfg := range []Config{{}, {SizeBytes: 32 << 20, Preset: "floppy"}, {SizeBytes: 32<<20 + 512},
		{SizeBytes: 32 << 20, BlockSize: 1024}, {SizeBytes: 32 << 20, Condition: 9},
		{SizeBytes: 32 << 20, Slowdown: -1}, {SizeBytes: 32 << 20, Slowdown: 1001}} {
		if _, err := Open(cfg); !errors.Is(err, ErrConfig) {
			t.Errorf("Open(%+v): %v", cfg, err)
		}
	}
}

// loop keeps depth reads of 4 KiB in flight until n are done and returns how long that took and their latencies.
func loop(t testing.TB, q *queue, depth, n int) (took time.Duration, latencies []int64) {
	t.Helper()
	reqs := make([]ssd.Request, depth)
	for i := range reqs {
		reqs[i] = ssd.Request{Op: ssd.Read, Len: 4096, Buf: make([]byte, 4096), Tag: uint64(i)}
	}
	blocks := q.dev.info.SizeBytes / 4096
	at := int64(0)
	again := make([]ssd.Request, 0, depth)
	start := time.Now()
	for i := range reqs {
		at = (at*5 + 7919) % blocks
		reqs[i].Offset = at * 4096
	}
	if k := q.Submit(reqs); k != depth {
		t.Fatalf("Submit took %d of %d", k, depth)
	}
	c := make([]ssd.Completion, depth)
	for done := 0; done < n; {
		k := ssd.Await(q, c, -1)
		again = again[:0]
		for _, c := range c[:k] {
			if c.Err != nil {
				t.Fatal(c.Err)
			}
			latencies = append(latencies, c.LatencyNS)
			r := &reqs[c.Tag]
			at = (at*5 + 7919) % blocks
			r.Offset = at * 4096
			again = append(again, *r)
		}
		if done += k; q.Submit(again) != k {
			t.Fatal("Submit did not take as many as were done")
		}
	}
	return time.Since(start), latencies
}

// The drive's own latencies are those of the emulation whatever the machine does; the wall clock can only be later.
func TestLatencyIsThatOfTheDrive(t *testing.T) {
	d := open(t, Config{SizeBytes: 64 << 20, Condition: flash.Clean, Seed: 1})
	q := openQueue(t, d, 64)
	took, latencies := loop(t, q, 1, 300)
	slices.Sort(latencies)
	mid := latencies[len(latencies)/2]
	t.Logf("drive's median %v, loop's mean %v", time.Duration(mid), took/300)
	if mid < 75_000 || mid > 100_000 {
		t.Errorf("the median latency of single reads is %v, want 75 to 100 µs", time.Duration(mid))
	}
	if took < 300*75*time.Microsecond {
		t.Errorf("300 reads one after the other took %v: faster than the drive", took)
	}
}

// A slow drive's latencies are so many times longer, to the last digit.
func TestASlowDriveTakesLonger(t *testing.T) {
	d := open(t, Config{SizeBytes: 64 << 20, Condition: flash.Clean, Seed: 1, Slowdown: 50})
	took, latencies := loop(t, openQueue(t, d, 64), 1, 30)
	for _, ns := range latencies {
		if ns < 50*75_000 || ns > 50*100_000 || ns%50 != 0 {
			t.Errorf("a read has a latency of %v, want 50 times 75 to 100 µs", time.Duration(ns))
		}
	}
	if took < 30*50*75*time.Microsecond {
		t.Errorf("30 reads one after the other took %v: faster than the drive", took)
	}
}

func TestRateIsAtMostThatOfTheDrive(t *testing.T) {
	d := open(t, Config{SizeBytes: 64 << 20, Condition: flash.Clean, Seed: 1})
	q := openQueue(t, d, 256)
	took, _ := loop(t, q, 256, 30_000)
	iops := 30_000 / took.Seconds()
	t.Logf("%.0f IOPS", iops)
	if iops > 430_000 {
		t.Errorf("%.0f IOPS, the drive has 403,000", iops)
	}
}

// A late wake-up completes all that is due, and none of the drive's latencies show that it was late.
func TestTimeDoesNotSlip(t *testing.T) {
	d := open(t, Config{SizeBytes: 64 << 20, Condition: flash.Clean, Seed: 1})
	q := openQueue(t, d, 32)
	reqs := make([]ssd.Request, 32)
	for i := range reqs {
		reqs[i] = ssd.Request{Op: ssd.Read, Offset: int64(i) << 20, Len: 4096, Buf: make([]byte, 4096), Tag: uint64(i)}
	}
	q.Submit(reqs)
	start := time.Now()
	d.mu.Lock() // nobody gets at the drive
	for time.Since(start) < 20*time.Millisecond {
	}
	d.advance(d.now())
	n := q.nDone
	d.mu.Unlock()
	if n != len(reqs) {
		t.Errorf("20 ms after 32 reads %d are done", n)
	}
	c := make([]ssd.Completion, 32)
	if ssd.Await(q, c, -1) != 32 {
		t.Fatal("not all were polled at once")
	}
	for _, c := range c {
		if c.LatencyNS > 2e6 {
			t.Errorf("a read has a latency of %v", time.Duration(c.LatencyNS))
		}
	}
}

// An idle device arms no timer: nothing wakes up.
func TestAnIdleDeviceSleeps(t *testing.T) {
	d := open(t, Config{SizeBytes: 64 << 20, Condition: flash.Fragmented, Seed: 1})
	q := openQueue(t, d, 32)
	ssdtest.Write(t, q, 0, bytes.Repeat([]byte{1}, 8<<20), 0)
	loop(t, q, 16, 100)
	for got := 0; got < 16; {
		got += ssd.Await(q, make([]ssd.Completion, 16), -1)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, ok := d.drive.NextCompletion(); ok {
		t.Error("the drive still expects something")
	}
	// At most the firing that is under way is left.
	if d.armedNS != notArmed && d.armedNS > d.now() {
		t.Errorf("the timer is to fire in %v", time.Duration(d.armedNS-d.now()))
	}
}

func TestQueuesOfOneDriveShareIt(t *testing.T) {
	d := open(t, Config{SizeBytes: 64 << 20, Condition: flash.Clean, Seed: 1})
	var wg sync.WaitGroup
	for range 4 {
		q := openQueue(t, d, 64)
		wg.Go(func() {
			loop(t, q, 64, 4000)
			if err := q.Close(); err != nil { // waits for what is in flight
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if s := d.Stats(); s.HostReadBytes < 4*4000*4096 || s.InFlight != 0 {
		t.Errorf("%+v", s)
	}
}

func TestCloseFailsWhatIsInFlight(t *testing.T) {
	d := open(t, Config{SizeBytes: 64 << 20, Condition: flash.Clean})
	q := openQueue(t, d, 64)
	reqs := make([]ssd.Request, 64)
	for i := range reqs {
		reqs[i] = ssd.Request{Op: ssd.Read, Len: 1 << 20, Buf: make([]byte, 1<<20), Tag: uint64(i)}
	}
	q.Submit(reqs) // takes the drive 20 ms
	if err := d.Close(); err != nil {
		t.Error(err)
	}
	gone := 0
	c := make([]ssd.Completion, 64)
	for n := 0; n < 64; {
		k := ssd.Await(q, c, -1)
		for _, c := range c[:k] {
			if errors.Is(c.Err, ssd.ErrGone) {
				gone++
			}
		}
		n += k
	}
	if gone == 0 {
		t.Error("Close failed none of 64 MiB of reads")
	}
}

func TestIOAllocatesNothing(t *testing.T) {
	d := open(t, Config{SizeBytes: 64 << 20, Preset: "p4800x"})
	q := openQueue(t, d, 64)
	reqs := make([]ssd.Request, 16)
	for i := range reqs {
		reqs[i] = ssd.Request{Op: ssd.Op(i % 2), Offset: int64(i) << 14, Len: 16 << 10, Buf: make([]byte, 16<<10)}
	}
	c := make([]ssd.Completion, 16)
	if n := testing.AllocsPerRun(200, func() {
		q.Submit(reqs)
		for n := 0; n < len(reqs); {
			n += ssd.Await(q, c, -1)
		}
	}); n != 0 {
		t.Errorf("%v allocs per 16 requests, want 0", n)
	}
}

func BenchmarkRead4KDepth256(b *testing.B) {
	d := open(b, Config{SizeBytes: 1 << 30, Condition: flash.Clean, Seed: 1})
	q := openQueue(b, d, 256)
	b.ResetTimer()
	loop(b, q, 256, b.N)
}

func BenchmarkRead4KDepth1(b *testing.B) {
	d := open(b, Config{SizeBytes: 1 << 30, Condition: flash.Clean, Seed: 1})
	q := openQueue(b, d, 1)
	b.ResetTimer()
	loop(b, q, 1, b.N)
}
