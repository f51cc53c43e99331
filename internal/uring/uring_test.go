package uring

import (
	"bytes"
	"errors"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func newRing(t testing.TB, entries int) *Ring {
	t.Helper()
	r, err := New(entries)
	if errors.Is(err, ErrUnavailable) {
		t.Skipf("this machine offers no io_uring: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	return r
}

// reap waits for and returns n results by user data.
func reap(t testing.TB, r *Ring, n int) map[uint64]int32 {
	t.Helper()
	got := make(map[uint64]int32)
	for len(got) < n {
		if err := r.Wait(int64(10 * time.Second)); err != nil && err != unix.EINTR {
			t.Fatal(err)
		}
		for c := r.PeekCQE(); c != nil; c = r.PeekCQE() {
			got[c.UserData] = c.Res
			r.SeenCQE()
		}
	}
	return got
}

func submit(t testing.TB, r *Ring, want int) {
	t.Helper()
	if n, err := r.Submit(); n != want || err != nil {
		t.Fatalf("Submit: %d %v, want %d", n, err, want)
	}
}

func TestNopsCompleteWithTheirUserDataOverManyRounds(t *testing.T) {
	r := newRing(t, 8)
	for round := range 50 {
		for i := range 8 {
			s := r.NextSQE()
			s.PrepNop()
			s.UserData = uint64(round*8 + i)
		}
		if r.NextSQE() != nil {
			t.Fatal("a full ring handed out an entry")
		}
		submit(t, r, 8)
		for ud, res := range reap(t, r, 8) {
			if res != 0 || ud/8 != uint64(round) {
				t.Fatalf("round %d: user data %d result %d", round, ud, res)
			}
		}
	}
	if c := r.PeekCQE(); c != nil {
		t.Fatalf("completion left over: %+v", c)
	}
}

func TestReadsWritesAndSyncsReachTheFilePlainAndRegistered(t *testing.T) {
	f, err := os.Create(t.TempDir() + "/f")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	r := newRing(t, 8)
	mem, err := unix.Mmap(-1, 0, 1<<16, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(mem)
	if err := r.RegisterFile(int(f.Fd())); err != nil {
		t.Fatal(err)
	}
	if err := r.RegisterSparse(4); err != nil {
		t.Fatal(err)
	}
	if err := r.RegisterBuffer(3, mem); err != nil {
		t.Fatal(err)
	}
	one, two := mem[:4096], mem[4096:8192]
	copy(one, bytes.Repeat([]byte{1}, 4096))
	copy(two, bytes.Repeat([]byte{2}, 4096))
	s := r.NextSQE()
	s.PrepWrite(int(f.Fd()), one, 0, unix.RWF_DSYNC)
	s.UserData = 1
	s = r.NextSQE()
	s.PrepWrite(0, two, 4096, 0)
	s.UseFile()
	s.UseBuffer(3)
	s.UserData = 2
	submit(t, r, 2)
	if got := reap(t, r, 2); got[1] != 4096 || got[2] != 4096 {
		t.Fatalf("writes: %v", got)
	}
	back := mem[8192:16384]
	s = r.NextSQE()
	s.PrepRead(0, back, 0)
	s.UseFile()
	s.UseBuffer(3)
	s.UserData = 3
	s = r.NextSQE()
	s.PrepRead(99999, one, 0)
	s.UserData = 4
	submit(t, r, 2)
	if got := reap(t, r, 2); got[3] != 8192 || got[4] != -int32(unix.EBADF) {
		t.Fatalf("read, read of a bad file: %v", got)
	}
	if !bytes.Equal(back, mem[:8192]) {
		t.Fatal("read back other bytes")
	}
}

func TestEventfdTellsOfCompletionsOnlyWhileEnabled(t *testing.T) {
	r := newRing(t, 8)
	fd, err := unix.Eventfd(0, unix.EFD_NONBLOCK|unix.EFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := r.RegisterEventfd(fd); err != nil {
		t.Fatal(err)
	}
	for _, on := range []bool{false, true} {
		r.EnableEventfd(on)
		r.NextSQE().PrepNop()
		submit(t, r, 1)
		reap(t, r, 1)
		_, err := unix.Read(fd, make([]byte, 8))
		if on != (err == nil) {
			t.Errorf("enabled %v: eventfd read says %v", on, err)
		}
	}
}

func TestWaitTimesOut(t *testing.T) {
	r := newRing(t, 8)
	if err := r.Wait(int64(time.Millisecond)); err != unix.ETIME {
		t.Errorf("Wait on an idle ring: %v, want ETIME", err)
	}
}

func TestCloseIsIdempotent(t *testing.T) {
	r := newRing(t, 8)
	for range 2 {
		if err := r.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestSubmitAndReapAllocateNothing(t *testing.T) {
	r := newRing(t, 8)
	if n := testing.AllocsPerRun(100, func() {
		r.NextSQE().PrepNop()
		r.Submit()
		for r.PeekCQE() == nil {
		}
		r.SeenCQE()
	}); n != 0 {
		t.Errorf("%v allocs, want 0", n)
	}
}

func BenchmarkNopBatch32(b *testing.B) {
	r := newRing(b, 32)
	for i := 0; i < b.N; i += 32 {
		for range 32 {
			r.NextSQE().PrepNop()
		}
		r.Submit()
		for range 32 {
			r.PeekCQE()
			r.SeenCQE()
		}
	}
}

// The three ways to wait for one 4 KiB read at queue depth 1, from a real file
// with O_DIRECT; with -cpu 1,2 and beside a goroutine that computes, they decide
// docs/decisions/0002-waiting-for-io-uring.md.
func benchmarkWait(b *testing.B, busy bool, wait func(r *Ring, ev *os.File)) {
	f, err := os.CreateTemp(".", "bench")
	if err != nil {
		b.Fatal(err)
	}
	defer os.Remove(f.Name())
	defer f.Close()
	if _, err := f.Write(make([]byte, 64<<20)); err != nil {
		b.Fatal(err)
	}
	f.Sync()
	d, err := os.OpenFile(f.Name(), os.O_RDWR|unix.O_DIRECT, 0)
	if err != nil {
		b.Fatal(err)
	}
	defer d.Close()
	r := newRing(b, 8)
	fd, _ := unix.Eventfd(0, unix.EFD_NONBLOCK|unix.EFD_CLOEXEC)
	ev := os.NewFile(uintptr(fd), "eventfd")
	defer ev.Close()
	r.RegisterEventfd(fd)
	r.EnableEventfd(false)
	buf, _ := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	defer unix.Munmap(buf)
	stop := make(chan struct{})
	turns := 0
	if busy {
		// A second goroutine, which always has work in slices of about 5 µs, shows what waiting costs the others.
		go func() {
			x := 0
			for {
				select {
				case <-stop:
					return
				default:
					for i := range 10000 {
						x += i
					}
					turns++
				}
			}
		}()
	}
	dfd := int(d.Fd())
	off := int64(0)
	for b.Loop() {
		r.NextSQE().PrepRead(dfd, buf, off)
		r.Submit()
		off = (off + 1<<20 + 4096) % (63 << 20)
		for r.PeekCQE() == nil {
			wait(r, ev)
		}
		if c := r.PeekCQE(); c.Res != 4096 {
			b.Fatalf("read: %d", c.Res)
		}
		r.SeenCQE()
	}
	close(stop)
	if busy {
		b.ReportMetric(float64(turns)/float64(b.Elapsed().Seconds()), "turns/s")
	}
}

func waitEnter(r *Ring, _ *os.File) { r.Wait(-1) }
func waitSpin(*Ring, *os.File)      {}
func waitEventfd(r *Ring, ev *os.File) {
	r.EnableEventfd(true)
	if r.PeekCQE() == nil {
		var b [8]byte
		ev.Read(b[:])
	}
	r.EnableEventfd(false)
}

func BenchmarkWaitEnter(b *testing.B)       { benchmarkWait(b, false, waitEnter) }
func BenchmarkWaitEventfd(b *testing.B)     { benchmarkWait(b, false, waitEventfd) }
func BenchmarkWaitSpin(b *testing.B)        { benchmarkWait(b, false, waitSpin) }
func BenchmarkWaitEnterBusy(b *testing.B)   { benchmarkWait(b, true, waitEnter) }
func BenchmarkWaitEventfdBusy(b *testing.B) { benchmarkWait(b, true, waitEventfd) }
