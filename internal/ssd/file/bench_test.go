package file

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"jbofd/internal/ssd"
	"jbofd/internal/uring"
)

func TestSteadyStateIOAllocatesNothing(t *testing.T) {
	forEachEngine(t, func(t *testing.T, engine string) {
		p := newPool(t)
		d := open(t, Config{Engine: engine, Pool: p})
		q := openQueue(t, d, 8)
		acct := p.Account("t")
		a, _ := p.Get(acct, 4096)
		b, _ := p.Get(acct, 4096)
		reqs := []ssd.Request{{Op: ssd.Write, Offset: 4096, Len: 4096, Buf: a.B}, {Op: ssd.Read, Len: 4096, Buf: b.B},
			{Op: ssd.Write, Flags: ssd.FUA, Offset: 8192, Len: 4096, Buf: a.B}, {Op: ssd.Flush},
			{Op: ssd.WriteZeroes, Len: 8192}}
		c := make([]ssd.Completion, 8)
		round := func() {
			q.Submit(reqs)
			for got := 0; got < len(reqs); {
				got += ssd.Await(q, c, time.Second)
			}
		}
		for range 20 { // workers start, regions are registered
			round()
		}
		if n := testing.AllocsPerRun(50, round); n != 0 {
			t.Errorf("%v allocs per batch, want 0", n)
		}
		p.Put(a)
		p.Put(b)
		d.Close()
		p.CloseTest(t)
	})
}

func benchFile(b *testing.B) string {
	b.Helper()
	path := filepath.Join(".", "bench.img") // the working folder: O_DIRECT, unlike a tmpfs /tmp
	b.Cleanup(func() { os.Remove(path) })
	f, err := os.Create(path)
	if err != nil {
		b.Fatal(err)
	}
	chunk := bytes.Repeat([]byte{0x5A}, 1<<20)
	for range benchBytes >> 20 {
		if _, err := f.Write(chunk); err != nil {
			b.Fatal(err)
		}
	}
	if err := errors.Join(f.Sync(), f.Close()); err != nil {
		b.Fatal(err)
	}
	return path
}

func benchmarkRandomRead(b *testing.B, engine string, depth int) {
	p := newPool(b)
	d, err := Open(Config{Path: benchFile(b), Engine: engine, Pool: p, Workers: depth})
	if err != nil {
		b.Fatal(err)
	}
	defer d.Close()
	q := openQueue(b, d, depth)
	acct := p.Account("b")
	reqs := make([]ssd.Request, depth)
	for i := range reqs {
		buf, _ := p.Get(acct, 4096)
		reqs[i] = ssd.Request{Op: ssd.Read, Len: 4096, Buf: buf.B, Tag: uint64(i)}
	}
	rng := rand.New(rand.NewPCG(5, 6))
	c := make([]ssd.Completion, depth)
	batch := make([]ssd.Request, 0, depth)
	b.ReportAllocs()
	b.ResetTimer()
	issued, done := 0, 0
	for i := range reqs {
		c[i].Tag = uint64(i)
	}
	for n := min(depth, b.N); done < b.N; {
		batch = batch[:0]
		for i := 0; i < n && issued < b.N; i++ {
			r := reqs[c[i].Tag]
			r.Offset = rng.Int64N(benchBytes/4096) * 4096
			batch = append(batch, r)
			issued++
		}
		if len(batch) > 0 && q.Submit(batch) != len(batch) {
			b.Fatal("queue full")
		}
		n = ssd.Await(q, c, -1)
		done += n
	}
	b.StopTimer()
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "IOPS")
}

func BenchmarkRandomRead4KQD1URing(b *testing.B)    { benchmarkRandomRead(b, EngineURing, 1) }
func BenchmarkRandomRead4KQD32URing(b *testing.B)   { benchmarkRandomRead(b, EngineURing, 32) }
func BenchmarkRandomRead4KQD32Threads(b *testing.B) { benchmarkRandomRead(b, EngineThreads, 32) }

func BenchmarkRandomRead4KQD32RawLoop(b *testing.B) {
	const depth = 32
	f, err := os.OpenFile(benchFile(b), os.O_RDWR|unix.O_DIRECT, 0)
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	r, err := uring.New(depth)
	if err != nil {
		b.Fatal(err)
	}
	defer r.Close()
	mem, free, err := scratch(depth * 4096)
	if err != nil {
		b.Fatal(err)
	}
	defer free()
	if err := errors.Join(r.RegisterFile(int(f.Fd())), r.RegisterSparse(1), r.RegisterBuffer(0, mem)); err != nil {
		b.Fatal(err)
	}
	rng := rand.New(rand.NewPCG(5, 6))
	b.ResetTimer()
	issued, done := 0, 0
	issue := func(i uint64) {
		if issued < b.N {
			s := r.NextSQE()
			s.PrepRead(0, mem[i*4096:][:4096], rng.Int64N(benchBytes/4096)*4096)
			s.UseFile()
			s.UseBuffer(0)
			s.UserData = i
			issued++
		}
	}
	for i := range uint64(depth) {
		issue(i)
	}
	for done < b.N {
		if _, err := r.Submit(); err != nil {
			b.Fatal(err)
		}
		if r.PeekCQE() == nil {
			r.Wait(-1)
		}
		for c := r.PeekCQE(); c != nil; c = r.PeekCQE() {
			i := c.UserData
			r.SeenCQE()
			done++
			issue(i)
		}
	}
	b.StopTimer()
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "IOPS")
}
