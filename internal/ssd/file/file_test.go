package file

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"jbofd/internal/bufpool"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/ssdtest"
	"jbofd/internal/uring"
)

// engines are those available on this machine.
func engines(t testing.TB) []string {
	r, err := uring.New(1)
	if errors.Is(err, uring.ErrUnavailable) {
		t.Logf("testing without io_uring: %v", err)
		return []string{EngineThreads}
	}
	if err != nil {
		t.Fatal(err)
	}
	r.Close()
	return []string{EngineURing, EngineThreads}
}

func forEachEngine(t *testing.T, f func(t *testing.T, engine string)) {
	for _, e := range engines(t) {
		t.Run(e, func(t *testing.T) { f(t, e) })
	}
}

func open(t testing.TB, cfg Config) *Device {
	t.Helper()
	if cfg.Path == "" {
		cfg.Path = filepath.Join(t.TempDir(), "ssd.img")
	}
	if cfg.SizeBytes == 0 {
		cfg.SizeBytes = 8 << 20
	}
	cfg.Name, cfg.Create = "t", true
	d, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

func openQueue(t testing.TB, d *Device, depth int) ssd.Queue {
	t.Helper()
	q, err := d.OpenQueue(depth)
	if err != nil {
		t.Fatal(err)
	}
	return q
}

func newPool(t testing.TB) *bufpool.Pool {
	t.Helper()
	p, err := bufpool.New(bufpool.Config{TotalBytes: 32 << 20})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestConformance(t *testing.T) {
	forEachEngine(t, func(t *testing.T, engine string) {
		ssdtest.Conformance(t, func(t *testing.T) ssd.Device { return open(t, Config{Engine: engine}) })
	})
}

func TestConformanceOnTmpfsWithoutZeroRange(t *testing.T) {
	dir, err := os.MkdirTemp("/dev/shm", "jbofd-test")
	if err != nil {
		t.Skipf("no tmpfs on /dev/shm: %v", err)
	}
	defer os.RemoveAll(dir)
	n := 0
	ssdtest.Conformance(t, func(t *testing.T) ssd.Device {
		n++
		return open(t, Config{Path: fmt.Sprintf("%s/%d", dir, n)})
	})
}

func TestSecondDaemonIsRefusedAndToldWhoHoldsTheFile(t *testing.T) {
	d := open(t, Config{})
	_, err := Open(Config{Path: d.info.Path})
	if !errors.Is(err, ErrInUse) || !strings.Contains(err.Error(), fmt.Sprintf("process %d (", os.Getpid())) {
		t.Errorf("second Open: %v, want ErrInUse and our process number", err)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	again, err := Open(Config{Path: d.info.Path})
	if err != nil {
		t.Fatalf("Open after Close: %v", err)
	}
	again.Close()
}

func TestFilesGrowOnlyWithCreateAndNeverShrink(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ssd.img")
	try := func(cfg Config) (int64, error) {
		cfg.Path = path
		d, err := Open(cfg)
		if err != nil {
			return 0, err
		}
		defer d.Close()
		return d.Info().SizeBytes, nil
	}
	if _, err := try(Config{}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("absent without Create: %v", err)
	}
	if _, err := try(Config{Create: true}); !errors.Is(err, ErrConfig) {
		t.Errorf("Create without a size: %v", err)
	}
	for _, tc := range []struct {
		cfg  Config
		want int64
	}{
		{Config{Create: true, SizeBytes: 1 << 20}, 1 << 20},
		{Config{}, 1 << 20},
		{Config{Create: true, SizeBytes: 2 << 20}, 2 << 20},
		{Config{Create: true, SizeBytes: 3 << 20}, 3 << 20},
		{Config{SizeBytes: 3 << 20}, 3 << 20},
	} {
		if got, err := try(tc.cfg); err != nil || got != tc.want {
			t.Errorf("%+v: %d %v, want %d", tc.cfg, got, err, tc.want)
		}
	}
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil || st.Blocks != 0 {
		t.Errorf("new file takes %d sectors, want a sparse one: %v", st.Blocks, err)
	}
	_, err := try(Config{SizeBytes: 4 << 20})
	if !errors.Is(err, ErrSize) || !strings.Contains(err.Error(), "3145728") ||
		!strings.Contains(err.Error(), "4194304") {
		t.Errorf("growing without Create: %v, want ErrSize with both sizes", err)
	}
	if got, err := try(Config{}); err != nil || got != 3<<20 {
		t.Errorf("a refused size has left the file with %d bytes, %v", got, err)
	}
	_, err = try(Config{SizeBytes: 1 << 20})
	if !errors.Is(err, ErrSize) || !strings.Contains(err.Error(), "3145728") ||
		!strings.Contains(err.Error(), "1048576") {
		t.Errorf("shrinking: %v, want ErrSize with both sizes", err)
	}
	if _, err := try(Config{SizeBytes: 3<<20 + 1}); !errors.Is(err, ErrConfig) {
		t.Errorf("odd size: %v, want ErrConfig", err)
	}
	if err := os.Truncate(path, 3<<20+100); err != nil {
		t.Fatal(err)
	}
	if got, err := try(Config{}); err != nil || got != 3<<20 {
		t.Errorf("odd existing size: %d %v, want it rounded down", got, err)
	}
	if err := os.Truncate(path, 0); err != nil {
		t.Fatal(err)
	}
	if _, err := try(Config{}); !errors.Is(err, ErrSize) {
		t.Errorf("empty file: %v, want ErrSize", err)
	}
}

// TestOpeningAFileChangesNothingInIt, also not what is behind its last whole block.
func TestOpeningAFileChangesNothingInIt(t *testing.T) {
	for _, n := range []int{7066, 4097, 8192, 1<<20 + 511} {
		path := filepath.Join(t.TempDir(), "some.file")
		want := bytes.Repeat([]byte("x"), n)
		if err := os.WriteFile(path, want, 0o600); err != nil {
			t.Fatal(err)
		}
		for _, cfg := range []Config{{}, {ReadOnly: true}, {Create: true}} {
			cfg.Path = path
			d, err := Open(cfg)
			if err == nil {
				err = d.Close()
			}
			if err != nil {
				t.Errorf("%d bytes, %+v: %v", n, cfg, err)
			}
			if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, want) {
				t.Errorf("%d bytes, %+v: the file has changed, %v", n, cfg, err)
			}
		}
	}
}

// TestDataIsWhatWasWritten: ranges that were only allocated, or deallocated, do not count as data.
func TestDataIsWhatWasWritten(t *testing.T) {
	d := open(t, Config{})
	q := openQueue(t, d, 1)
	const written = 256 << 10
	buf := make([]byte, written)
	do := func(op ssd.Op, offset int64) {
		t.Helper()
		if n := q.Submit([]ssd.Request{{Op: op, Offset: offset, Len: written, Buf: buf}}); n != 1 {
			t.Fatal("not taken")
		}
		var c [1]ssd.Completion
		if ssd.Await(q, c[:], 10*time.Second) != 1 || c[0].Err != nil {
			t.Fatalf("%v at %d: %v", op, offset, c[0].Err)
		}
	}
	check := func(want ...ssd.Extent) {
		t.Helper()
		if got := slices.Collect(ssd.Data(d)); !slices.Equal(got, want) {
			t.Errorf("data is in %v, want %v", got, want)
		}
	}
	at := func(offset int64) ssd.Extent { return ssd.Extent{Start: offset, End: offset + written} }
	check()
	do(ssd.Write, 1<<20)
	do(ssd.Write, 8<<20-written)
	do(ssd.Write, 4<<20)
	do(ssd.Flush, 0)
	check(at(1<<20), at(4<<20), at(8<<20-written))
	do(ssd.Deallocate, 4<<20)
	check(at(1<<20), at(8<<20-written))
	if got := d.NextData(1<<20 + 4096); got.Start != 1<<20+4096 || got.End != 1<<20+written {
		t.Errorf("from within an extent: %v", got)
	}
}

func TestWrongKindsOfPathAndEngineAreRefused(t *testing.T) {
	for _, cfg := range []Config{{Path: t.TempDir()}, {Path: "/dev/null"}, {Path: "x", Engine: "magic"},
		{Path: "x", SizeBytes: -1}} {
		if _, err := Open(cfg); !errors.Is(err, ErrConfig) {
			t.Errorf("%+v: %v, want ErrConfig", cfg, err)
		}
	}
}

// TestAPathThatIsNoDriveIsNamed: /dev/nvme0, which is a controller, is easily written for /dev/nvme0n1.
func TestAPathThatIsNoDriveIsNamed(t *testing.T) {
	for path, want := range map[string]string{t.TempDir(): "is a directory", "/dev/null": "is a character device"} {
		if _, err := Open(Config{Path: path}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", path, err, want)
		}
	}
}

func TestAllKindsOfMemoryAreReadAndWritten(t *testing.T) {
	forEachEngine(t, func(t *testing.T, engine string) {
		p := newPool(t)
		d := open(t, Config{Engine: engine, Pool: p})
		q := openQueue(t, d, 8)
		acct := p.Account("t")
		rng := rand.New(rand.NewPCG(3, 4))
		for i, size := range []int{4096, 128 << 10, 1 << 20, 4096} {
			pooled, ok := p.Get(acct, size)
			if !ok {
				t.Fatal("pool")
			}
			for j := range pooled.B {
				pooled.B[j] = byte(rng.Uint32())
			}
			off := int64(i) << 20
			ssdtest.Write(t, q, off, pooled.B, ssd.FUA*ssd.Flags(i&1))
			odd := make([]byte, size+8)[3 : size+3] // surely unaligned
			if err := ssdtest.Do(t, q, ssd.Request{Op: ssd.Read, Offset: off, Len: int64(size), Buf: odd}); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(odd, pooled.B) {
				t.Fatal("read into unaligned memory differs")
			}
			odd[0]++
			ssdtest.Write(t, q, off, odd, 0)
			if err := ssdtest.Do(t, q, ssd.Request{Op: ssd.Read, Offset: off, Len: int64(size),
				Buf: pooled.B}); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(odd, pooled.B) {
				t.Fatal("read into registered memory differs")
			}
			p.Put(pooled)
		}
		if engine == EngineURing && !slices.Contains(q.(*queue).registered, regionRegistered) {
			if !errors.Is(d.Fallback(), unix.ENOMEM) {
				t.Errorf("no region was registered with io_uring: %v", d.Fallback())
			}
			t.Logf("RLIMIT_MEMLOCK allows no registered buffers; tested without: %v", d.Fallback())
		}
		if err := d.Close(); err != nil {
			t.Fatal(err)
		}
		p.CloseTest(t)
	})
}

func TestTruncatedOrDeletedFileAnswersErrors(t *testing.T) {
	forEachEngine(t, func(t *testing.T, engine string) {
		d := open(t, Config{Engine: engine})
		q := openQueue(t, d, 4)
		ssdtest.Write(t, q, 0, make([]byte, 1<<20), 0)
		if err := d.Healthy(); err != nil {
			t.Fatal(err)
		}
		if err := os.Truncate(d.info.Path, 4096); err != nil {
			t.Fatal(err)
		}
		for _, off := range []int64{0, 4096, 1 << 20} { // across the end, at it, behind it
			err := ssdtest.Do(t, q, ssd.Request{Op: ssd.Read, Offset: off, Len: 8192, Buf: make([]byte, 8192)})
			if !errors.Is(err, ssd.ErrMedia) {
				t.Errorf("read at %d of a truncated file: %v, want ErrMedia", off, err)
			}
		}
		if err := d.Healthy(); !errors.Is(err, ssd.ErrMedia) {
			t.Errorf("Healthy of a truncated file: %v, want ErrMedia", err)
		}
		if err := os.Remove(d.info.Path); err != nil {
			t.Fatal(err)
		}
		if err := d.Healthy(); !errors.Is(err, ssd.ErrGone) {
			t.Errorf("Healthy of a deleted file: %v, want ErrGone", err)
		}
		ssdtest.Flush(t, q) // it still answers
	})
}

func TestFullFileSystemIsNoSpaceAndReadOnlyOneAnError(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=256k"); err != nil {
		t.Skipf("this machine lets us mount no tmpfs: %v", err)
	}
	defer unix.Unmount(dir, unix.MNT_DETACH)
	for i, engine := range engines(t) {
		d, err := Open(Config{Path: fmt.Sprintf("%s/%d", dir, i), Create: true, SizeBytes: 4 << 20, Engine: engine})
		if err != nil {
			t.Fatal(err)
		}
		q := openQueue(t, d, 4)
		var got error
		for off := int64(0); off < 1<<20 && got == nil; off += 64 << 10 {
			got = ssdtest.Do(t, q, ssd.Request{Op: ssd.Write, Offset: off, Len: 64 << 10, Buf: make([]byte, 64<<10)})
		}
		if !errors.Is(got, ssd.ErrNoSpace) {
			t.Errorf("%s: writing more than fits: %v, want ErrNoSpace", engine, got)
		}
		if err := d.Healthy(); err != nil {
			t.Errorf("%s: Healthy: %v", engine, err)
		}
		d.Close()
	}
}

func TestQueueFallsBackToWorkersWhenNoRingCanBeHadUnlessAskedForByName(t *testing.T) {
	if len(engines(t)) == 1 {
		t.Skip("this machine offers no io_uring")
	}
	for _, engine := range []string{"", EngineURing} {
		d := open(t, Config{Engine: engine})
		// No descriptor left for the ring; the eventfd takes the last one.
		fds := exhaustFDs(t, 1)
		q, err := d.OpenQueue(4)
		for _, fd := range fds {
			unix.Close(fd)
		}
		if engine == EngineURing {
			if err == nil {
				t.Error("Engine io_uring fell back")
			}
			continue
		}
		if err != nil || d.Fallback() == nil {
			t.Fatalf("automatic engine: %v, Fallback %v", err, d.Fallback())
		}
		ssdtest.Write(t, q, 4096, bytes.Repeat([]byte{1}, 4096), ssd.FUA)
		if b := ssdtest.Read(t, q, 4096, 4096); b[0] != 1 {
			t.Error("read differs")
		}
	}
}

// exhaustFDs takes all file descriptors but some, under a low limit.
func exhaustFDs(t *testing.T, left int) (fds []int) {
	t.Helper()
	var old unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &old); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 256, Max: old.Max}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Setrlimit(unix.RLIMIT_NOFILE, &old) })
	for {
		fd, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			break
		}
		fds = append(fds, fd)
	}
	for range left {
		unix.Close(fds[len(fds)-1])
		fds = fds[:len(fds)-1]
	}
	return fds
}

func TestErrnosMapToTheSentinels(t *testing.T) {
	d := &Device{}
	r := &ssd.Request{}
	for errno, want := range map[unix.Errno]error{
		unix.EIO: ssd.ErrMedia, unix.EILSEQ: ssd.ErrMedia, unix.EINVAL: ssd.ErrMedia, unix.EREMOTEIO: ssd.ErrMedia,
		unix.ENOSPC: ssd.ErrNoSpace, unix.EDQUOT: ssd.ErrNoSpace,
		unix.ENODEV: ssd.ErrGone, unix.ENXIO: ssd.ErrGone, unix.EBADF: ssd.ErrGone,
		unix.EOPNOTSUPP: ssd.ErrUnsupported,
	} {
		d.gone.Store(false)
		err := d.fail(r, errno)
		if !errors.Is(err, want) || !errors.Is(err, errno) {
			t.Errorf("%v: %v, want %v", errno, err, want)
		}
		if d.gone.Load() != errors.Is(err, ssd.ErrGone) {
			t.Errorf("%v: gone is %v", errno, d.gone.Load())
		}
	}
}

func TestDeviceThatVanishedAnswersGoneToEverything(t *testing.T) {
	forEachEngine(t, func(t *testing.T, engine string) {
		d := open(t, Config{Engine: engine})
		q := openQueue(t, d, 4)
		d.fail(&ssd.Request{}, unix.ENODEV)
		for op := range ssd.Ops {
			if err := ssdtest.Do(t, q, ssd.Request{Op: op, Len: 4096, Buf: make([]byte, 4096)}); !errors.Is(err,
				ssd.ErrGone) {
				t.Errorf("%v: %v, want ErrGone", op, err)
			}
		}
		if err := d.Healthy(); !errors.Is(err, ssd.ErrGone) {
			t.Errorf("Healthy: %v, want ErrGone", err)
		}
	})
}

func TestFallbacksReachTheSameResult(t *testing.T) {
	forEachEngine(t, func(t *testing.T, engine string) {
		d := open(t, Config{Engine: engine})
		q := openQueue(t, d, 4)
		d.noDSync.Store(true)
		d.noPunch.Store(true)
		d.noZeroRange.Store(true)
		ones := bytes.Repeat([]byte{1}, 3<<20)
		ssdtest.Write(t, q, 0, ones, ssd.FUA)
		for _, flags := range []ssd.Flags{0, ssd.Unmap, ssd.Unmap | ssd.FUA} {
			if err := ssdtest.Do(t, q, ssd.Request{Op: ssd.WriteZeroes, Flags: flags, Offset: 4096,
				Len: 2<<20 + 4096}); err != nil {
				t.Fatal(err)
			}
			got := ssdtest.Read(t, q, 0, 3<<20)
			want := bytes.Clone(ones)
			clear(want[4096 : 4096+2<<20+4096])
			if !bytes.Equal(got, want) {
				t.Errorf("flags %v: plain zeroes went elsewhere", flags)
			}
			ssdtest.Write(t, q, 0, ones, 0)
		}
	})
}

func TestCloseWaitsForWhatIsInFlightAndLeaksNothing(t *testing.T) {
	forEachEngine(t, func(t *testing.T, engine string) {
		goroutines, fds := runtime.NumGoroutine(), countFDs(t)
		path := filepath.Join(t.TempDir(), "ssd.img")
		for range 3 {
			d, err := Open(Config{Path: path, Create: true, SizeBytes: 8 << 20, Engine: engine})
			if err != nil {
				t.Fatal(err)
			}
			q := openQueue(t, d, 32)
			reqs := make([]ssd.Request, 32)
			for i := range reqs {
				op := ssd.Op(i) % ssd.Ops
				reqs[i] = ssd.Request{Op: op, Offset: int64(i) * 65536, Len: 65536, Buf: make([]byte, 65536),
					Tag: uint64(i)}
			}
			if n := q.Submit(reqs); n != 32 {
				t.Fatal(n)
			}
			if err := d.Close(); err != nil {
				t.Fatal(err)
			}
			c := make([]ssd.Completion, 64)
			if n := ssd.Await(q, c, -1); n != 32 {
				t.Errorf("%d completions after Close, want 32", n)
			}
			for _, c := range c[:32] {
				if c.Err != nil {
					t.Errorf("request %d: %v", c.Tag, c.Err)
				}
			}
		}
		deadline := time.Now().Add(5 * time.Second)
		for runtime.NumGoroutine() > goroutines && time.Now().Before(deadline) {
			runtime.Gosched()
		}
		if n := runtime.NumGoroutine(); n > goroutines {
			t.Errorf("%d goroutines, before %d", n, goroutines)
		}
		if n := countFDs(t); n > fds {
			t.Errorf("%d file descriptors, before %d", n, fds)
		}
	})
}

func countFDs(t *testing.T) int {
	e, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(e)
}

func TestManyQueuesAndSplitSubmitAndPollKeepTheirTags(t *testing.T) {
	forEachEngine(t, func(t *testing.T, engine string) {
		d := open(t, Config{Engine: engine})
		errs := make(chan error, 3)
		for k := range 3 {
			q := openQueue(t, d, 16)
			const total = 500
			tokens := make(chan struct{}, 16)
			go func() { // submits
				for i := range uint64(total) {
					tokens <- struct{}{}
					b := make([]byte, 4096)
					if q.Submit([]ssd.Request{{Op: ssd.Op(i % 2), Offset: int64(k)<<20 + int64(i%16)*4096, Len: 4096,
						Buf: b, Tag: i}}) != 1 {
						panic("a queue with room took nothing")
					}
				}
			}()
			go func() { // polls
				var seen [total]bool
				var c [5]ssd.Completion
				for got := 0; got < total; {
					n := ssd.Await(q, c[:], -1)
					for _, c := range c[:n] {
						if c.Err != nil || seen[c.Tag] {
							errs <- fmt.Errorf("completion %+v, seen %v", c, seen[c.Tag])
							return
						}
						seen[c.Tag] = true
						<-tokens
					}
					got += n
				}
				errs <- nil
			}()
		}
		for range 3 {
			if err := <-errs; err != nil {
				t.Error(err)
			}
		}
	})
}

// The device against a bare loop on io_uring: what the queue costs.

const benchBytes = 256 << 20
