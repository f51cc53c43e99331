package drive

import (
	"bytes"
	"errors"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"jbofd/internal/bufpool"
	"jbofd/internal/buildtags"
	"jbofd/internal/pipeline"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/fault"
	"jbofd/internal/ssd/file"
	"jbofd/internal/ssd/mem"
	"jbofd/internal/units"
)

func fill(n int64, b byte) []byte { return bytes.Repeat([]byte{b}, int(n)) }

func TestAbortRemovesOnlyQueuedIOs(t *testing.T) {
	g, dev := newGate(t)
	h := newRig(t, rigConfig{depth: 1}, dev).host("a")
	a := h.with(h.io(1, pipeline.Write, 0, 512), fill(512, 1))
	b := h.with(h.io(2, pipeline.Write, 0, 512), fill(512, 2))
	c := h.io(3, pipeline.Read, 0, 512)
	h.submit(a, b, c)
	g.exactly(t, 1)
	if h.r.o.Abort(a) {
		t.Error("aborted what is at the device")
	}
	if !h.r.o.Abort(b) {
		t.Error("could not abort what is queued")
	}
	if h.r.o.Abort(b) {
		t.Error("aborted twice")
	}
	g.let(0, nil)
	g.here(t, 1)
	g.let(0, nil)
	for i, io := range h.finish(3) {
		if want := []error{nil, ErrAborted, nil}[io.Slot-1]; io.Err != want {
			t.Errorf("place %d, slot %d: %v, want %v", i, io.Slot, io.Err, want)
		}
	}
	if !bytes.Equal(c.Buf.B, fill(512, 1)) {
		t.Errorf("read %d: the aborted write took place", c.Buf.B[0])
	}
	if h.r.o.Abort(a) {
		t.Error("aborted what is done")
	}
	if got := h.r.o.Stats().Aborted.Load(); got != 1 {
		t.Errorf("%d counted as aborted, want 1", got)
	}
	h.put(a, b, c)
}

func TestTenantWithoutBuffersDoesNotStopAnother(t *testing.T) {
	r := newRig(t, rigConfig{depth: 16, poolBytes: 4 << 20}, memory)
	greedy, modest := r.host("greedy"), r.host("modest")
	modest.tenant = 1
	const n = 200
	var ios []*IO
	for i := range n {
		ios = append(ios, greedy.io(uint32(i), pipeline.Read, 0, 128<<10))
	}
	greedy.submit(ios...) // and returns none: its host does not read
	if err := modest.run(modest.io(0, pipeline.Read, 0, 4096)); err != nil {
		t.Error(err)
	}
	if err := modest.run(modest.with(modest.io(0, pipeline.Write, 0, 4096), fill(4096, 1))); err != nil {
		t.Error(err)
	}
	if r.o.Stats().BufferWaits.Load() == 0 {
		t.Error("nobody waited: the test tests nothing")
	}
	// When it returns buffers, the rest is served.
	late := time.After(testTimeout)
	for done := 0; done < n; {
		_, ios, ok := greedy.wait(late)
		if !ok {
			t.Fatalf("%d of %d served", done, n)
		}
		done += len(ios)
		greedy.put(ios...)
	}
}

func TestHostThatSendsNoDataDoesNotStopAnother(t *testing.T) {
	r := newRig(t, rigConfig{depth: 16}, memory)
	silent, modest := r.host("silent"), r.host("modest")
	const n = 200
	var ios []*IO
	for i := range n {
		io := silent.io(uint32(i), pipeline.Write, 0, 4096)
		io.Fetch = true
		ios = append(ios, io)
	}
	silent.submit(ios...)
	if err := modest.run(modest.io(0, pipeline.Read, 0, 4096)); err != nil {
		t.Error(err)
	}
	if err := modest.run(modest.with(modest.io(0, pipeline.Write, 0, 4096), fill(4096, 1))); err != nil {
		t.Error(err)
	}
	lost := errors.New("lost")
	late := time.After(testTimeout)
	for done := 0; done < n; {
		admitted, ios, ok := silent.wait(late)
		if !ok {
			t.Fatalf("%d of %d over", done, n)
		}
		for _, io := range admitted {
			io.Return(lost)
		}
		for _, io := range ios {
			if io.Err != lost {
				t.Errorf("slot %d: %v, want what Return said", io.Slot, io.Err)
			}
		}
		done += len(ios)
		silent.put(ios...)
	}
	if got := modest.read(0, 4096); !bytes.Equal(got, fill(4096, 1)) {
		t.Error("a returned write took place")
	}
}

func TestAbortRemovesAnIOThatWaitsForABuffer(t *testing.T) {
	r := newRig(t, rigConfig{depth: 8, poolBytes: 4 << 20}, memory)
	h := r.host("a")
	const n = 64
	var ios []*IO
	for i := range n {
		ios = append(ios, h.io(uint32(i), pipeline.Read, 0, 128<<10))
	}
	h.submit(ios...)
	aborted := map[*IO]bool{}
	for _, io := range ios {
		aborted[io] = r.o.Abort(io)
	}
	if !aborted[ios[n-1]] {
		t.Fatal("the last one has a buffer: the test tests nothing")
	}
	late := time.After(testTimeout)
	for done := 0; done < n; {
		_, ios, ok := h.wait(late)
		if !ok {
			t.Fatalf("%d of %d over", done, n)
		}
		for _, io := range ios {
			if got := errors.Is(io.Err, ErrAborted); got != aborted[io] {
				t.Errorf("slot %d: Abort said %v, but it ended with %v", io.Slot, aborted[io], io.Err)
			}
		}
		done += len(ios)
		h.put(ios...)
	}
}

func TestDeviceQueueSmallerThanTheLoadIsNeverOverfilled(t *testing.T) {
	for _, depth := range []int{1, 2, 7} {
		g, dev := newGate(t)
		h := newRig(t, rigConfig{depth: depth}, dev).host("a")
		const n = 200
		var ios []*IO
		for i := range n {
			io := h.io(uint32(i), pipeline.Write, units.DriveOffset(i)*4096, 4096)
			if i%3 == 0 {
				io = h.io(uint32(i), pipeline.Verify, units.DriveOffset(i)*4096, 512<<10)
			} else {
				h.with(io, fill(4096, byte(i)))
			}
			ios = append(ios, io)
		}
		h.submit(ios...)
		stop := make(chan struct{})
		go g.all(stop)
		for _, io := range h.finish(n) {
			if io.Err != nil {
				t.Error(io.Err)
			}
			h.put(io)
		}
		close(stop)
		if g.most > depth {
			t.Errorf("depth %d: %d requests at the device", depth, g.most)
		}
	}
}

func TestIOsBeginInTheOrderOfTheirSubmission(t *testing.T) {
	g, dev := newGate(t)
	h := newRig(t, rigConfig{depth: 3}, dev).host("a")
	const n = 50
	for i := 0; i < n; i += 10 {
		var ios []*IO
		for k := i; k < i+10; k++ {
			ios = append(ios, h.io(uint32(k), pipeline.WriteZeroes, units.DriveOffset(k)*4096, 4096))
		}
		h.submit(ios...)
	}
	for i := range n {
		reqs := g.here(t, 1)
		if reqs[0].Offset != int64(i)*4096 {
			t.Fatalf("place %d: offset %d", i, reqs[0].Offset)
		}
		g.let(0, nil)
	}
	h.finish(n)
}

func TestDeviceThatVanishesAnswersEverything(t *testing.T) {
	var f *fault.Device
	r := newRig(t, rigConfig{depth: 16}, func(p *bufpool.Pool) (ssd.Device, error) {
		inner, err := memory(p)
		if err != nil {
			return nil, err
		}
		f, err = fault.New(inner, fault.Config{Seed: 1})
		return f, err
	})
	h := r.host("a")
	f.SetRules(fault.Rule{Delay: time.Hour}) // stays at the device until that vanishes
	const n = 40
	ops := []pipeline.Op{pipeline.Read, pipeline.Write, pipeline.Compare, pipeline.CompareWrite, pipeline.Verify,
		pipeline.Flush, pipeline.DeallocateRanges, pipeline.WriteZeroes}
	var ios []*IO
	for i := range n {
		io := h.io(uint32(i), ops[i%len(ops)], 0, 4096)
		switch io.Op {
		case pipeline.Write, pipeline.Compare:
			h.with(io, fill(4096, 0))
		case pipeline.CompareWrite:
			h.with(io, fill(8192, 0))
		case pipeline.DeallocateRanges:
			io.Ranges = []pipeline.Range{{Offset: 0, Len: 512}, {Offset: 4096, Len: 512}}
		}
		ios = append(ios, io)
	}
	h.submit(ios...)
	f.Vanish()
	for _, io := range h.finish(n) {
		if !errors.Is(io.Err, ssd.ErrGone) {
			t.Errorf("slot %d (%v): %v, want ErrGone", io.Slot, io.Op, io.Err)
		}
		h.put(io)
	}
	if got := r.o.Stats().Gone.Load(); got < n/2 {
		t.Errorf("%d counted as gone, of %d", got, n)
	}
	f.SetRules()
	f.Return()
	if err := h.run(h.io(0, pipeline.Read, 0, 4096)); err != nil {
		t.Errorf("after its return: %v", err)
	}
}

func TestFetchedDataIsWhatIsWritten(t *testing.T) {
	for _, op := range []pipeline.Op{pipeline.Write, pipeline.Compare, pipeline.CompareWrite} {
		h := newRig(t, rigConfig{}, memory).host("a")
		io := h.io(1, op, 4096, 4096)
		io.Fetch = true
		h.submit(io)
		h.admit(1)
		want := 4096
		if op == pipeline.CompareWrite {
			want = 8192
		}
		if len(io.Buf.B) != want {
			t.Fatalf("%v: a buffer of %d bytes, want %d", op, len(io.Buf.B), want)
		}
		if h.r.o.Abort(io) {
			t.Errorf("%v: aborted after it was admitted", op)
		}
		clear(io.Buf.B[:4096])
		copy(io.Buf.B[want-4096:], fill(4096, 7))
		var b Batch
		b.Add(io)
		h.r.o.Fetched(&b)
		h.finish(1)
		if want := map[bool]error{true: ErrMismatch, false: nil}[op == pipeline.Compare]; io.Err != want {
			t.Errorf("%v: %v, want %v", op, io.Err, want)
		}
		h.put(io)
		if got := h.read(4096, 4096); op != pipeline.Compare && !bytes.Equal(got, fill(4096, 7)) {
			t.Errorf("%v: wrote %d", op, got[0])
		}
	}
}

func TestQuiesceWaitsForEarlierIOsOnly(t *testing.T) {
	g, dev := newGate(t)
	r := newRig(t, rigConfig{depth: 1}, dev)
	h := r.host("a")
	quiet := func(c <-chan struct{}) bool {
		select {
		case <-c:
			return true
		default:
			return false
		}
	}
	if !quiet(r.o.Quiesce()) {
		t.Error("an idle drive is not quiet")
	}
	fetching := h.io(1, pipeline.Write, 0, 4096)
	fetching.Fetch = true
	h.submit(fetching)
	h.admit(1)
	queued := []*IO{h.io(2, pipeline.Flush, 0, 0), h.io(3, pipeline.Flush, 0, 0)}
	h.submit(queued...)
	g.exactly(t, 1)
	before := r.o.Quiesce()
	h.submit(h.io(4, pipeline.Flush, 0, 0)) // later: not waited for
	for range queued {
		g.here(t, 1)
		g.let(0, nil)
	}
	g.here(t, 1)
	h.finish(2)
	if quiet(before) {
		t.Error("quiet although a host still owes its data")
	}
	after := r.o.Quiesce() // waits for the later one, too
	fetching.Return(errReturned)
	h.finish(1)
	if !quiet(before) {
		t.Error("not quiet although all that was there is done")
	}
	if quiet(after) || quiet(r.o.Quiesce()) {
		t.Error("quiet with an IO at the device")
	}
	g.let(0, nil)
	h.finish(1)
	<-after
	h.put(fetching)
}

func TestStatsCountWhatTheDeviceDid(t *testing.T) {
	h := newRig(t, rigConfig{}, memory).host("a")
	h.write(0, fill(8192, 0))
	h.read(0, 4096)
	for _, io := range []*IO{
		h.with(h.io(1, pipeline.Compare, 0, 4096), fill(4096, 0)),
		h.io(1, pipeline.Verify, 0, 1<<20),
		h.with(h.io(1, pipeline.CompareWrite, 0, 512), fill(1024, 0)),
		h.io(1, pipeline.Flush, 0, 0),
		h.io(1, pipeline.WriteZeroes, 0, 512),
		h.io(1, pipeline.Deallocate, 0, 1024),
	} {
		if err := h.run(io); err != nil {
			t.Fatal(err)
		}
	}
	s := h.r.o.Stats()
	type pair struct{ n, bytes int64 }
	for op, want := range map[ssd.Op]pair{
		ssd.Read: {1 + 1 + 8 + 1, 4096 + 4096 + 1<<20 + 512}, ssd.Write: {2, 8192 + 512}, ssd.Flush: {1, 0},
		ssd.WriteZeroes: {1, 512}, ssd.Deallocate: {1, 1024},
	} {
		if got := (pair{s.Requests[op].Load(), s.Bytes[op].Load()}); got != want {
			t.Errorf("%v: %v, want %v", op, got, want)
		}
	}
	if s.Inflight.Load() != 0 || s.Queued.Load() != 0 || s.Errors.Load() != 0 {
		t.Errorf("%d in flight, %d queued, %d errors when idle", s.Inflight.Load(), s.Queued.Load(), s.Errors.Load())
	}
}

// devices are all kinds of devices, for the stress tests.
func devices(t *testing.T, errorProbability float64) map[string]func(*bufpool.Pool) (ssd.Device, error) {
	faulty := func(c fault.Config) func(*bufpool.Pool) (ssd.Device, error) {
		return func(p *bufpool.Pool) (ssd.Device, error) {
			inner, err := memory(p)
			if err != nil {
				return nil, err
			}
			c.Seed, c.ReadErrorProbability, c.WriteErrorProbability, c.FlushErrorProbability = *seed, errorProbability,
				errorProbability, errorProbability
			return fault.New(inner, c)
		}
	}
	disk := func(engine string) func(*bufpool.Pool) (ssd.Device, error) {
		return func(p *bufpool.Pool) (ssd.Device, error) {
			return file.Open(file.Config{Name: "ssd0", Path: filepath.Join(t.TempDir(), "ssd.img"), Create: true,
				SizeBytes: deviceBytes, Engine: engine, Pool: p})
		}
	}
	all := map[string]func(*bufpool.Pool) (ssd.Device, error){
		"fault": faulty(fault.Config{}),
		"delay": faulty(fault.Config{DelayProbability: 0.2, Delay: 100 * time.Microsecond}),
	}
	if errorProbability == 0 {
		all["mem"], all["io_uring or threads"], all["threads"] = memory, disk(""), disk(file.EngineThreads)
	}
	return all
}

func TestCloseEndsAnIdleDrive(t *testing.T) {
	for name, dev := range devices(t, 0) {
		t.Run(name, func(t *testing.T) {
			h := newRig(t, rigConfig{}, dev).host("a")
			h.write(0, fill(4096, 3))
			if got := h.read(0, 4096); !bytes.Equal(got, fill(4096, 3)) {
				t.Error("read something else than was written")
			}
			if err := h.run(h.io(0, pipeline.Verify, 0, 1<<20)); err != nil {
				t.Error(err)
			}
		}) // the rig's end closes twice and looks for leaks
	}
}

func TestAReadAllocatesNothing(t *testing.T) {
	r := newRig(t, rigConfig{}, memory)
	if buildtags.Race {
		t.Skip("the race detector makes sync.Pool forget at random")
	}
	s := newBenchSink(r, 128) // each of which asks for a kick
	if n := testing.AllocsPerRun(200, s.round); n != 0 {
		t.Errorf("%v allocations a batch of %d reads, want 0", n, len(s.ios))
	}
}

// benchSink reads the device over and over with a fixed queue depth, on one
// goroutine.
type benchSink struct {
	r    *rig
	acct *bufpool.Account
	ios  []*IO
	done int
}

func newBenchSink(r *rig, depth int) *benchSink {
	s := &benchSink{r: r, acct: r.pool.Account("bench")}
	r.t.Cleanup(func() { s.acct.Close() })
	for i := range depth {
		io := &IO{Op: pipeline.Read, Len: 4096, Offset: units.DriveOffset(i) * 4096, Account: s.acct}
		io.Init(s, uint32(i))
		s.ios = append(s.ios, io)
	}
	return s
}

func (s *benchSink) Admitted(*IO) bool { return false }
func (s *benchSink) Done(io *IO) bool {
	s.r.pool.Put(io.Buf)
	io.Buf = bufpool.Buf{}
	s.done++
	return true
}
func (s *benchSink) Kick() {}

// round submits all IOs; a synchronous device has done them when Submit returns.
func (s *benchSink) round() {
	var b Batch
	for _, io := range s.ios {
		b.Add(io)
	}
	s.r.o.Submit(&b)
}

// BenchmarkRead gives the time of a 4 KiB read from Submit to Done on memory;
// BenchmarkCopy that of the copy alone, of the same places.
func BenchmarkRead(b *testing.B) {
	for _, depth := range []int{1, 32, 128} {
		b.Run(fmt.Sprintf("qd%d", depth), func(b *testing.B) {
			s := newBenchSink(newRig(b, rigConfig{}, memory), depth)
			b.ReportAllocs()
			b.ResetTimer()
			for i := 0; i < b.N; i += depth {
				s.round()
			}
			b.StopTimer()
			if s.done < b.N {
				b.Fatalf("%d of %d done", s.done, b.N)
			}
		})
	}
}

// BenchmarkCopy is the base of BenchmarkRead: the same device without a Drive.
func BenchmarkCopy(b *testing.B) {
	for _, depth := range []int{1, 32, 128} {
		b.Run(fmt.Sprintf("qd%d", depth), func(b *testing.B) {
			dev, err := mem.Open(mem.Config{Name: "ssd0", SizeBytes: deviceBytes})
			if err != nil {
				b.Fatal(err)
			}
			defer dev.Close()
			q, err := dev.OpenQueue(depth)
			if err != nil {
				b.Fatal(err)
			}
			pool, err := bufpool.New(bufpool.Config{TotalBytes: 64 << 20})
			if err != nil {
				b.Fatal(err)
			}
			acct := pool.Account("bench")
			reqs, comps, bufs := make([]ssd.Request, depth), make([]ssd.Completion, depth), make([]bufpool.Buf, depth)
			b.ResetTimer()
			for i := 0; i < b.N; i += depth {
				for k := range reqs {
					bufs[k], _ = pool.Get(acct, 4096)
					reqs[k] = ssd.Request{Op: ssd.Read, Offset: int64(k) * 4096, Len: 4096, Buf: bufs[k].B,
						Tag: uint64(k)}
				}
				q.Submit(reqs)
				q.Poll(comps)
				for k := range bufs {
					pool.Put(bufs[k])
				}
			}
			b.StopTimer()
			acct.Close()
			pool.CloseTest(b)
		})
	}
}
