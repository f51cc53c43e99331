package mem

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"jbofd/internal/ssd"
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

func TestConformance(t *testing.T) {
	for _, bs := range []int{512, 4096} {
		ssdtest.Conformance(t, func(t *testing.T) ssd.Device {
			return open(t, Config{Name: "m", SizeBytes: 8 << 20, BlockSize: bs})
		})
	}
}

func TestConfigOutOfBoundsIsRefused(t *testing.T) {
	for _, cfg := range []Config{{}, {SizeBytes: -512}, {SizeBytes: 1000}, {SizeBytes: 1 << 20, BlockSize: 100},
		{SizeBytes: 1 << 20, BlockSize: 3000}} {
		if _, err := Open(cfg); !errors.Is(err, ErrConfig) {
			t.Errorf("Open(%+v): %v", cfg, err)
		}
	}
}

// resident counts the pages of memory behind the device.
func resident(t *testing.T, d *Device) (n int) {
	t.Helper()
	vec := make([]byte, len(d.mem)/pageBytes)
	if err := mincore(d.mem, vec); err != nil {
		t.Fatal(err)
	}
	for _, v := range vec {
		n += int(v & 1)
	}
	return n
}

func TestUnwrittenAndDeallocatedMemoryCostsNothing(t *testing.T) {
	d := open(t, Config{SizeBytes: 64 << 20})
	q, err := d.OpenQueue(4)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Madvise(d.mem, unix.MADV_NOHUGEPAGE); err != nil && !errors.Is(err, unix.EINVAL) {
		t.Fatal(err)
	}
	if n := resident(t, d); n != 0 {
		t.Fatalf("%d pages before the first write", n)
	}
	ssdtest.Write(t, q, 512, bytes.Repeat([]byte{1}, 4<<20), 0)
	if n := resident(t, d); n != 1025 {
		t.Fatalf("%d pages after 4 MiB, want 1025", n)
	}
	if err := ssdtest.Do(t, q, ssd.Request{Op: ssd.Deallocate, Offset: 512, Len: 4 << 20}); err != nil {
		t.Fatal(err)
	}
	if n := resident(t, d); n != 2 { // the two pages that the range only touches
		t.Fatalf("%d pages after Deallocate, want 2", n)
	}
}

func TestCloseWhileQueuesAreBusyNeitherCrashesNorBlocks(t *testing.T) {
	d := open(t, Config{SizeBytes: 4 << 20})
	var wg sync.WaitGroup
	started := make(chan struct{}, 4)
	for range 4 {
		q, err := d.OpenQueue(8)
		if err != nil {
			t.Fatal(err)
		}
		wg.Go(func() {
			buf := make([]byte, 4096)
			var c [8]ssd.Completion
			for i := 0; ; i++ {
				q.Submit([]ssd.Request{{Op: ssd.Write, Len: 4096, Buf: buf}})
				if n := q.Poll(c[:]); n > 0 && errors.Is(c[n-1].Err, ssd.ErrGone) {
					return
				}
				if i == 10 {
					started <- struct{}{}
				}
			}
		})
	}
	for range 4 {
		<-started
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
	wg.Wait()
}

func TestIOAllocatesNothing(t *testing.T) {
	d := open(t, Config{SizeBytes: 4 << 20})
	q, _ := d.OpenQueue(4)
	reqs := []ssd.Request{{Op: ssd.Write, Len: 4096, Buf: make([]byte, 4096)},
		{Op: ssd.Read, Len: 4096, Buf: make([]byte, 4096)},
		{Op: ssd.Flush}, {Op: ssd.WriteZeroes, Len: 1 << 20}}
	c := make([]ssd.Completion, 4)
	if n := testing.AllocsPerRun(100, func() {
		q.Submit(reqs)
		q.Poll(c)
	}); n != 0 {
		t.Errorf("%v allocs per batch, want 0", n)
	}
}

func benchmark(b *testing.B, op ssd.Op, size, batch int) {
	d := open(b, Config{SizeBytes: 64 << 20})
	q, _ := d.OpenQueue(batch)
	reqs := make([]ssd.Request, batch)
	for i := range reqs {
		reqs[i] = ssd.Request{Op: op, Len: int64(size), Buf: make([]byte, size)}
	}
	c := make([]ssd.Completion, batch)
	b.SetBytes(int64(size))
	b.ReportAllocs()
	off := int64(0)
	for i := 0; i < b.N; i += batch {
		for k := range reqs {
			reqs[k].Offset = off
			off = (off + 1<<20 + int64(size)) % (63 << 20)
		}
		q.Submit(reqs)
		q.Poll(c)
	}
}

func BenchmarkRead4K(b *testing.B)        { benchmark(b, ssd.Read, 4096, 1) }
func BenchmarkRead4KBatch32(b *testing.B) { benchmark(b, ssd.Read, 4096, 32) }
func BenchmarkWrite4KBatch32(b *testing.B) {
	benchmark(b, ssd.Write, 4096, 32)
}
func BenchmarkFlushBatch32(b *testing.B) { benchmark(b, ssd.Flush, 512, 32) } // the queue's own cost

// TestWritesOfAnyLengthLeaveTheirNeighboursAlone: long writes go another way than short ones.
func TestWritesOfAnyLengthLeaveTheirNeighboursAlone(t *testing.T) {
	const size = 1 << 20
	d := open(t, Config{Name: "d", SizeBytes: size})
	q, err := d.OpenQueue(4)
	if err != nil {
		t.Fatal(err)
	}
	want := make([]byte, size)
	random := make([]byte, size+64)
	rand.NewChaCha8([32]byte{1}).Read(random)
	done := make([]ssd.Completion, 4)
	do := func(r ssd.Request) {
		t.Helper()
		if q.Submit([]ssd.Request{r}) != 1 || ssd.Await(q, done, -1) != 1 || done[0].Err != nil {
			t.Fatalf("%v of %d bytes at %d: %v", r.Op, r.Len, r.Offset, done[0].Err)
		}
	}
	got := make([]byte, size)
	for i, n := range []int{512, 3584, 4096, 4608, 8192, 65536 - 512, 65536, 131072, size / 2} {
		offset := 512 * (3*i + 1)
		data := random[i+1 : i+1+n] // at any alignment
		copy(want[offset:], data)
		do(ssd.Request{Op: ssd.Write, Offset: int64(offset), Len: int64(n), Buf: data})
		do(ssd.Request{Op: ssd.Read, Offset: 0, Len: size, Buf: got})
		if !bytes.Equal(got, want) {
			t.Fatalf("after a write of %d bytes at %d, the drive differs", n, offset)
		}
	}
}
