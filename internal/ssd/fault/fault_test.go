package fault

import (
	"bytes"
	"errors"
	"flag"
	"math/rand/v2"
	"testing"
	"time"

	"jbofd/internal/ssd"
	"jbofd/internal/ssd/file"
	"jbofd/internal/ssd/mem"
	"jbofd/internal/ssd/ssdtest"
)

var seed = flag.Uint64("seed", uint64(time.Now().UnixNano()), "seed of the random tests")

func newMem(t testing.TB) *mem.Device {
	t.Helper()
	d, err := mem.Open(mem.Config{Name: "m", SizeBytes: 8 << 20})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

func wrap(t testing.TB, inner ssd.Device, cfg Config) (*Device, ssd.Queue) {
	t.Helper()
	d, err := New(inner, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	q, err := d.OpenQueue(8)
	if err != nil {
		t.Fatal(err)
	}
	return d, q
}

func TestConformanceWithoutFaults(t *testing.T) {
	for name, cfg := range map[string]Config{"passing": {}, "overlay": {LoseUnflushed: true},
		"delayed": {DelayProbability: 0.5, Delay: 100 * time.Microsecond}} {
		t.Run(name, func(t *testing.T) {
			ssdtest.Conformance(t, func(t *testing.T) ssd.Device {
				d, err := New(newMem(t), cfg)
				if err != nil {
					t.Fatal(err)
				}
				return d
			})
		})
	}
	t.Run("file", func(t *testing.T) {
		ssdtest.Conformance(t, func(t *testing.T) ssd.Device {
			f, err := file.Open(file.Config{Path: t.TempDir() + "/ssd.img", Create: true, SizeBytes: 8 << 20})
			if err != nil {
				t.Fatal(err)
			}
			d, err := New(f, Config{})
			if err != nil {
				t.Fatal(err)
			}
			return d
		})
	})
}

func TestConfigOutOfBoundsIsRefused(t *testing.T) {
	for _, cfg := range []Config{{ReadErrorProbability: 1.5}, {WriteErrorProbability: -1}, {DelayProbability: 2},
		{Delay: -1}} {
		if _, err := New(newMem(t), cfg); !errors.Is(err, ErrConfig) {
			t.Errorf("%+v: %v", cfg, err)
		}
	}
}

func TestRulesFireByOperationRangeAndCount(t *testing.T) {
	d, q := wrap(t, newMem(t), Config{})
	custom := ssd.ErrNoSpace
	d.SetRules(
		Rule{Ops: []ssd.Op{ssd.Write}, Offset: 8192, Len: 4096, Err: custom},
		Rule{Ops: []ssd.Op{ssd.Flush}, Nth: 2, Err: errInjected},
	)
	b := make([]byte, 4096)
	for i, tc := range []struct {
		r    ssd.Request
		want error
	}{
		{ssd.Request{Op: ssd.Write, Offset: 4096, Len: 4096, Buf: b}, nil},
		{ssd.Request{Op: ssd.Write, Offset: 8192 + 512, Len: 512, Buf: b}, custom},
		{ssd.Request{Op: ssd.Read, Offset: 8192, Len: 4096, Buf: b}, nil},
		{ssd.Request{Op: ssd.Flush}, nil},
		{ssd.Request{Op: ssd.Flush}, ssd.ErrMedia},
		{ssd.Request{Op: ssd.Flush}, nil},
	} {
		if err := ssdtest.Do(t, q, tc.r); !errors.Is(err, tc.want) {
			t.Errorf("%d: %v, want %v", i, err, tc.want)
		}
	}
	if n := d.Injected(); n != 2 {
		t.Errorf("%d injected, want 2", n)
	}
}

func TestSameSeedSameFaults(t *testing.T) {
	run := func() (pattern []bool) {
		_, q := wrap(t, newMem(t), Config{Seed: *seed, ReadErrorProbability: 0.3})
		for range 100 {
			err := ssdtest.Do(t, q, ssd.Request{Op: ssd.Read, Len: 512, Buf: make([]byte, 512)})
			pattern = append(pattern, err != nil)
		}
		return pattern
	}
	a, b := run(), run()
	failed := 0
	for i := range a {
		if a[i] != b[i] {
			t.Fatalf("-seed %d: request %d differs between two runs", *seed, i)
		}
		if a[i] {
			failed++
		}
	}
	if failed < 5 || failed > 70 {
		t.Errorf("-seed %d: %d of 100 failed at probability 0.3", *seed, failed)
	}
}

func TestDelaysByPollsAndByTime(t *testing.T) {
	for _, cfg := range []Config{{}, {LoseUnflushed: true}} {
		d, q := wrap(t, newMem(t), cfg)
		d.SetRules(Rule{DelayPolls: 3})
		var c [4]ssd.Completion
		q.Submit([]ssd.Request{{Op: ssd.Flush}})
		for i := range 2 {
			if n := q.Poll(c[:]); n != 0 {
				t.Fatalf("completed at poll %d, want the third", i+1)
			}
		}
		if n := q.Poll(c[:]) + q.Poll(c[:]); n != 1 {
			t.Fatal("not completed at the third poll")
		}
		q.Submit([]ssd.Request{{Op: ssd.Flush}})
		if n := ssd.Await(q, c[:], -1); n != 1 {
			t.Fatal("a blocking poll did not count by itself")
		}
		d.SetRules(Rule{Delay: 20 * time.Millisecond})
		q.Submit([]ssd.Request{{Op: ssd.Flush}})
		if n := ssd.Await(q, c[:], time.Millisecond); n != 0 {
			t.Fatal("completed too early")
		}
		if n := ssd.Await(q, c[:], -1); n != 1 || c[0].LatencyNS < int64(20*time.Millisecond) {
			t.Fatalf("%d completions, latency %v, want one of at least 20 ms", n, time.Duration(c[0].LatencyNS))
		}
	}
}

func TestVanishedDeviceIsGoneUntilItReturns(t *testing.T) {
	d, q := wrap(t, newMem(t), Config{})
	ssdtest.Write(t, q, 0, bytes.Repeat([]byte{7}, 512), 0)
	d.SetRules(Rule{Delay: time.Hour})
	q.Submit([]ssd.Request{{Op: ssd.Flush, Tag: 5}})
	got := make(chan error)
	go func() {
		var c [1]ssd.Completion
		for ssd.Await(q, c[:], -1) == 0 { // Vanish wakes it
		}
		got <- c[0].Err
	}()
	d.Vanish()
	if err := <-got; !errors.Is(err, ssd.ErrGone) {
		t.Errorf("in flight: %v, want ErrGone", err)
	}
	if err := ssdtest.Do(t, q, ssd.Request{Op: ssd.Flush}); !errors.Is(err, ssd.ErrGone) ||
		!errors.Is(d.Healthy(), ssd.ErrGone) {
		t.Errorf("while gone: %v, Healthy %v", err, d.Healthy())
	}
	d.SetRules()
	d.Return()
	if b := ssdtest.Read(t, q, 0, 512); b[0] != 7 || d.Healthy() != nil {
		t.Errorf("after Return: byte %d, Healthy %v", b[0], d.Healthy())
	}
}

// TestCrashKeepsTheFlushedAndTearsTheRestBetweenBlocks is the contract of the
// overlay, over many seeds: flushed and FUA content survives; every other block
// holds one whole version of what it was given since; and both fates occur.
func TestCrashKeepsTheFlushedAndTearsTheRestBetweenBlocks(t *testing.T) {
	const blocks = 16
	lost, kept, torn := 0, 0, 0
	for s := range uint64(50) {
		inner := newMem(t)
		d, q := wrap(t, inner, Config{Seed: *seed + s, LoseUnflushed: true})
		whole := func(v byte) []byte { return bytes.Repeat([]byte{v}, blocks*512) }
		ssdtest.Write(t, q, 0, whole(1), 0)
		ssdtest.Flush(t, q)                           // durable: 1
		ssdtest.Write(t, q, 0, whole(2), 0)           // may be lost
		ssdtest.Write(t, q, 0, whole(3), 0)           // may be lost
		ssdtest.Write(t, q, 1<<20, whole(9), ssd.FUA) // durable
		d.SetRules(Rule{DelayPolls: 1000})
		q.Submit([]ssd.Request{{Op: ssd.Write, Offset: 2 << 20, Len: blocks * 512, Buf: whole(4)}}) // in flight
		if err := d.Crash(); err != nil {
			t.Fatal(err)
		}
		var c [1]ssd.Completion
		if n := ssd.Await(q, c[:], -1); n == 0 { // woken by the crash
			ssd.Await(q, c[:], -1)
		}
		if !errors.Is(c[0].Err, ssd.ErrGone) {
			t.Fatalf("the write in flight: %v, want ErrGone", c[0].Err)
		}
		if err := ssdtest.Do(t, q, ssd.Request{Op: ssd.Flush}); !errors.Is(err, ssd.ErrGone) {
			t.Fatalf("after Crash: %v, want ErrGone", err)
		}
		d.Close()
		iq, err := inner.OpenQueue(1)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(ssdtest.Read(t, iq, 1<<20, blocks*512), whole(9)) {
			t.Fatalf("-seed %d: a FUA write was lost", *seed)
		}
		unflushed, inFlight := ssdtest.Read(t, iq, 0, blocks*512), ssdtest.Read(t, iq, 2<<20, blocks*512)
		written := 0
		for i := range blocks {
			a, b := unflushed[i*512:][:512], inFlight[i*512:][:512]
			for _, half := range [][]byte{a, b} {
				if !bytes.Equal(half, bytes.Repeat(half[:1], 512)) {
					t.Fatalf("-seed %d: torn within a block", *seed)
				}
			}
			switch a[0] {
			case 1:
				lost++
			case 2, 3:
				kept++
			default:
				t.Fatalf("-seed %d: block holds %d, never written there", *seed, a[0])
			}
			if b[0] == 4 {
				written++
			} else if b[0] != 0 {
				t.Fatalf("-seed %d: block in flight holds %d", *seed, b[0])
			}
		}
		if written > 0 && written < blocks {
			torn++
		}
	}
	if lost == 0 || kept == 0 || torn == 0 {
		t.Errorf("-seed %d: lost %d, kept %d blocks, tore %d writes: want some of each", *seed, lost, kept, torn)
	}
}

// NVM Command Set 1.0, section 3.2.4: what a Read with FUA returns is on non-volatile media.
func TestWhatAReadWithFUAReturnsSurvivesACrash(t *testing.T) {
	for seed := range uint64(20) {
		inner := newMem(t)
		d, q := wrap(t, inner, Config{Seed: seed, LoseUnflushed: true})
		want := bytes.Repeat([]byte{7}, 8192)
		ssdtest.Write(t, q, 4096, want, 0)
		got := make([]byte, 8192)
		if err := ssdtest.Do(t, q, ssd.Request{Op: ssd.Read, Flags: ssd.FUA, Offset: 4096, Len: 8192,
			Buf: got}); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Error("the read returned something else than was written")
		}
		if err := d.Crash(); err != nil {
			t.Fatal(err)
		}
		after, err := inner.OpenQueue(1)
		if err != nil {
			t.Fatal(err)
		}
		if got := ssdtest.Read(t, after, 4096, 8192); !bytes.Equal(got, want) {
			t.Errorf("seed %d: after the crash the range reads as something else than the read with FUA returned", seed)
		}
		if err := after.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestRuleCrashesAtTheNthWriteAndOrderlyCloseLosesNothing(t *testing.T) {
	inner := newMem(t)
	d, q := wrap(t, inner, Config{Seed: *seed, LoseUnflushed: true})
	d.SetRules(Rule{Ops: []ssd.Op{ssd.Write}, Nth: 2, Crash: true})
	b := make([]byte, 512)
	if err := ssdtest.Do(t, q, ssd.Request{Op: ssd.Write, Len: 512, Buf: b}); err != nil || d.Crashed() {
		t.Fatalf("first write: %v, crashed %v", err, d.Crashed())
	}
	if err := ssdtest.Do(t, q, ssd.Request{Op: ssd.Write, Len: 512, Buf: b}); !errors.Is(err, ssd.ErrGone) ||
		!d.Crashed() {
		t.Fatalf("second write: %v, crashed %v", err, d.Crashed())
	}
	d.Close()

	f, err := file.Open(file.Config{Path: t.TempDir() + "/f", Create: true, SizeBytes: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	path := f.Info().Path
	fd, fq := wrap(t, f, Config{LoseUnflushed: true})
	ssdtest.Write(t, fq, 4096, bytes.Repeat([]byte{8}, 512), 0)
	if err := fd.Close(); err != nil {
		t.Fatal(err)
	}
	f, err = file.Open(file.Config{Path: path})
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	rq, _ := f.OpenQueue(1)
	if got := ssdtest.Read(t, rq, 4096, 512); got[0] != 8 {
		t.Error("an orderly Close lost an unflushed write")
	}
}

func TestOverlayReadsItsOwnWritesAtRandom(t *testing.T) {
	_, q := wrap(t, newMem(t), Config{Seed: *seed, LoseUnflushed: true})
	rng := rand.New(rand.NewPCG(*seed, 1))
	model := make([]byte, 64*512)
	for range 500 {
		n, at := 1+rng.IntN(8), 0
		at = rng.IntN(64 - n + 1)
		part := model[at*512 : (at+n)*512]
		switch rng.IntN(4) {
		case 0:
			for i := range part {
				part[i] = byte(rng.Uint32())
			}
			ssdtest.Write(t, q, int64(at)*512, bytes.Clone(part), ssd.Flags(rng.IntN(2))*ssd.FUA)
		case 1:
			ssdtest.Flush(t, q)
		default:
			if !bytes.Equal(ssdtest.Read(t, q, int64(at)*512, n*512), part) {
				t.Fatalf("-seed %d: read differs", *seed)
			}
		}
	}
}

func TestHeldRequestsWaitForRelease(t *testing.T) {
	d, q := wrap(t, newMem(t), Config{})
	d.SetRules(Rule{Ops: []ssd.Op{ssd.Write}, Nth: 1, Hold: true})
	one, two := bytes.Repeat([]byte{1}, 4096), bytes.Repeat([]byte{2}, 4096)
	if n := q.Submit([]ssd.Request{{Op: ssd.Write, Len: 4096, Buf: one, Tag: 9}}); n != 1 {
		t.Fatalf("%d taken", n)
	}
	if err := d.AwaitHeld(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := ssdtest.Do(t, q, ssd.Request{Op: ssd.Write, Len: 4096, Buf: two}); err != nil {
			t.Fatal(err)
		}
	}
	d.Release()
	var c [4]ssd.Completion
	n := 0
	for n == 0 {
		n = ssd.Await(q, c[:], -1)
	}
	if n != 1 || c[0].Tag != 9 || c[0].Err != nil {
		t.Fatalf("%d completions, the first %+v", n, c[0])
	}
	got := make([]byte, 4096)
	if err := ssdtest.Do(t, q, ssd.Request{Op: ssd.Read, Len: 4096, Buf: got}); err != nil || !bytes.Equal(got, one) {
		t.Errorf("%v; block begins with %d: the held write is carried out when it is released", err, got[0])
	}
}
