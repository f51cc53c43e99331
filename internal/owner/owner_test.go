package owner

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
)

func fill(n int64, b byte) []byte { return bytes.Repeat([]byte{b}, int(n)) }

func TestCompareWriteKeepsOthersOffItsRangeUntilItIsDone(t *testing.T) {
	const at, n = 1 << 20, 8 << 10
	for _, c := range []struct {
		name string
		make func(h *host) *IO
		held bool
	}{
		{"write of the same range", func(h *host) *IO { return h.with(h.io(2, pipeline.Write, at, n), fill(n, 9)) }, true},
		{"write of its last block", func(h *host) *IO { return h.with(h.io(2, pipeline.Write, at+n-512, 512), fill(512, 9)) }, true},
		{"write across its beginning", func(h *host) *IO { return h.with(h.io(2, pipeline.Write, at-512, 1024), fill(1024, 9)) }, true},
		{"write just before", func(h *host) *IO { return h.with(h.io(2, pipeline.Write, at-512, 512), fill(512, 9)) }, false},
		{"write just behind", func(h *host) *IO { return h.with(h.io(2, pipeline.Write, at+n, 512), fill(512, 9)) }, false},
		{"write zeroes", func(h *host) *IO { return h.io(2, pipeline.WriteZeroes, 0, deviceBytes) }, true},
		{"deallocate", func(h *host) *IO { return h.io(2, pipeline.Deallocate, at, 512) }, true},
		{"deallocate ranges, the second overlaps", func(h *host) *IO {
			io := h.io(2, pipeline.DeallocateRanges, 0, 0)
			io.Ranges = []pipeline.Range{{Offset: 0, Len: 512}, {Offset: at + 512, Len: 512}}
			return io
		}, true},
		{"deallocate ranges around it", func(h *host) *IO {
			io := h.io(2, pipeline.DeallocateRanges, at, n) // Offset and Len say nothing here
			io.Ranges = []pipeline.Range{{Offset: at - 512, Len: 512}, {Offset: at + n, Len: 512}}
			return io
		}, false},
		{"compare and write", func(h *host) *IO { return h.with(h.io(2, pipeline.CompareWrite, at+n-512, 512), fill(1024, 7)) }, true},
		{"read", func(h *host) *IO { return h.io(2, pipeline.Read, at, n) }, false},
		{"compare", func(h *host) *IO { return h.with(h.io(2, pipeline.Compare, at, n), fill(n, 0)) }, false},
		{"flush", func(h *host) *IO { return h.io(2, pipeline.Flush, 0, 0) }, false},
	} {
		for _, order := range []string{"after", "before"} {
			t.Run(c.name+" "+order, func(t *testing.T) {
				g, dev := newGate(t)
				h := newRig(t, rigConfig{}, dev).host("a")
				cw := h.with(h.io(1, pipeline.CompareWrite, at, n), append(fill(n, 0), fill(n, 5)...))
				other := c.make(h)
				first, second := cw, other
				if order == "before" {
					first, second = other, cw
				}
				h.submit(first)
				g.exactly(t, 1)
				h.submit(second)
				// Only what changes the range must wait for it, or it for that.
				if c.held {
					g.exactly(t, 1)
				} else {
					g.exactly(t, 2)
				}
				stop := make(chan struct{})
				defer close(stop)
				// While the first is at work nothing of the second may be: its requests all
				// follow those of the first.
				firstRequests := 0
				for c.held {
					g.let(0, nil)
					firstRequests++
					if _, done := h.peek(); done > 0 {
						break
					}
					g.exactly(t, 1)
				}
				go g.all(stop)
				for _, io := range h.finish(2) {
					if io.Err != nil && !(io == other && errors.Is(io.Err, ErrMismatch)) && !(io == cw && order == "before" && errors.Is(io.Err, ErrMismatch)) {
						t.Errorf("slot %d: %v", io.Slot, io.Err)
					}
					h.put(io)
				}
			})
		}
	}
}

// peek waits until the owner has looked at the last completion: either something
// is done, or another request is at the device.
func (h *host) peek() (admitted, done int) {
	g := h.r.dev.(*gate)
	begin := time.Now()
	for time.Since(begin) < patience {
		h.mu.Lock()
		admitted, done = len(h.admitted), len(h.done)
		h.mu.Unlock()
		g.mu.Lock()
		waiting := len(g.waiting)
		g.mu.Unlock()
		if done > 0 || waiting > 0 {
			return admitted, done
		}
	}
	h.t.Fatal("neither done nor at the device")
	return 0, 0
}

func TestCompareWritesOfOnePlaceGoOneByOneInOrder(t *testing.T) {
	const n = 10
	g, dev := newGate(t)
	h := newRig(t, rigConfig{}, dev).host("a")
	var ios []*IO
	for i := range n {
		ios = append(ios, h.with(h.io(uint32(i), pipeline.CompareWrite, 0, 512), append(fill(512, byte(i)), fill(512, byte(i+1))...)))
	}
	h.submit(ios...)
	g.exactly(t, 1)
	stop := make(chan struct{})
	defer close(stop)
	go g.all(stop)
	for i, io := range h.finish(n) {
		if io != ios[i] || io.Err != nil || !io.Writing() {
			t.Errorf("place %d: slot %d, %v", i, io.Slot, io.Err)
		}
		h.put(io)
	}
	if got := h.read(0, 512); !bytes.Equal(got, fill(512, n)) {
		t.Errorf("the last one left %d, want %d", got[0], n)
	}
}

func TestFailedCompareWriteLetsTheNextGoOn(t *testing.T) {
	g, dev := newGate(t)
	h := newRig(t, rigConfig{}, dev).host("a")
	a := h.with(h.io(1, pipeline.CompareWrite, 0, 512), append(fill(512, 0), fill(512, 1)...))
	b := h.with(h.io(2, pipeline.CompareWrite, 0, 512), append(fill(512, 0), fill(512, 2)...))
	c := h.with(h.io(3, pipeline.Write, 0, 512), fill(512, 3))
	h.submit(a, b, c)
	g.exactly(t, 1)
	g.let(0, ssd.ErrMedia) // a's read
	g.here(t, 1)
	g.let(0, nil) // b's read
	g.here(t, 1)
	g.let(0, ssd.ErrMedia) // b's write
	g.here(t, 1)
	g.let(0, nil)
	done := h.finish(3)
	if done[0] != a || !errors.Is(a.Err, ssd.ErrMedia) || a.Writing() || done[1] != b || !errors.Is(b.Err, ssd.ErrMedia) || !b.Writing() || done[2] != c || c.Err != nil {
		t.Errorf("a %v, b %v, c %v", a.Err, b.Err, c.Err)
	}
	h.put(done...)
}

func TestCompareFindsTheDifferenceWhereverItIs(t *testing.T) {
	h := newRig(t, rigConfig{}, memory).host("a")
	const at = 1 << 20
	rng := newRand(t)
	for _, n := range []int64{512, 4 << 10, laneBytes - 512, laneBytes, laneBytes + 512, 3 * laneBytes, 1<<20 - 512, 1 << 20} {
		data := make([]byte, n)
		for i := range data {
			data[i] = byte(rng.Uint32())
		}
		h.write(at, data)
		if err := h.run(h.with(h.io(1, pipeline.Compare, at, n), data)); err != nil {
			t.Errorf("%d bytes, equal: %v", n, err)
		}
		if err := h.run(h.io(1, pipeline.Verify, at, n)); err != nil {
			t.Errorf("verify %d bytes: %v", n, err)
		}
		places := []int64{0, 1, n - 1, rng.Int64N(n)}
		for k := int64(laneBytes); k < n; k += laneBytes {
			places = append(places, k-1, k)
		}
		for _, p := range places {
			data[p] ^= 1
			if err := h.run(h.with(h.io(1, pipeline.Compare, at, n), data)); !errors.Is(err, ErrMismatch) {
				t.Errorf("%d bytes, difference at %d: %v, want ErrMismatch", n, p, err)
			}
			if n <= 512<<10 {
				cw := h.with(h.io(1, pipeline.CompareWrite, at, n), append(append([]byte(nil), data...), fill(n, 0xEE)...))
				if err := h.run(cw); !errors.Is(err, ErrMismatch) || cw.Writing() {
					t.Errorf("compare and write of %d bytes, difference at %d: %v, want ErrMismatch", n, p, err)
				}
			}
			data[p] ^= 1
		}
		if !bytes.Equal(h.read(at, n), data) {
			t.Errorf("%d bytes: a compare changed the data", n)
		}
		if n <= 512<<10 {
			cw := h.with(h.io(1, pipeline.CompareWrite, at, n), append(append([]byte(nil), data...), fill(n, 0xEE)...))
			if err := h.run(cw); err != nil || !cw.Writing() {
				t.Errorf("compare and write of %d bytes, equal: %v", n, err)
			}
			if !bytes.Equal(h.read(at, n), fill(n, 0xEE)) {
				t.Errorf("compare and write of %d bytes did not write", n)
			}
		}
	}
	if err := h.run(h.io(1, pipeline.Compare, at, 0)); err != nil {
		t.Errorf("compare of nothing: %v", err)
	}
}

func TestComparesTakeTurnsWithTheScratchMemory(t *testing.T) {
	g, dev := newGate(t)
	h := newRig(t, rigConfig{}, dev).host("a")
	const n = 3 * laneCount
	var ios []*IO
	for i := range n {
		ios = append(ios, h.io(uint32(i), pipeline.Verify, 0, laneBytes+512))
	}
	h.submit(ios...)
	g.exactly(t, laneCount)
	stop := make(chan struct{})
	defer close(stop)
	go g.all(stop)
	for _, io := range h.finish(n) {
		if io.Err != nil {
			t.Error(io.Err)
		}
	}
}

func TestCompareGoesOnWhenThePoolIsExhausted(t *testing.T) {
	r := newRig(t, rigConfig{poolBytes: 4 << 20}, memory)
	h := r.host("a")
	compare := h.with(h.io(1, pipeline.Compare, 0, 4096), fill(4096, 0))
	// Many tenants together take everything.
	var taken []bufpool.Buf
	for i := 0; ; i++ {
		a := r.pool.Account(fmt.Sprintf("greedy%d", i))
		b, ok := r.pool.Get(a, 64<<10)
		a.Close()
		if !ok {
			break
		}
		taken = append(taken, b)
	}
	h.submit(compare)
	h.finish(1)
	if compare.Err != nil {
		t.Error(compare.Err)
	}
	for _, b := range taken {
		r.pool.Put(b)
	}
	h.put(compare)
}

func TestAbortTakesOutWhatIsQueuedAndNothingElse(t *testing.T) {
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
	greedy.submit(ios...) // and it gives nothing back: its host does not read
	if err := modest.run(modest.io(0, pipeline.Read, 0, 4096)); err != nil {
		t.Error(err)
	}
	if err := modest.run(modest.with(modest.io(0, pipeline.Write, 0, 4096), fill(4096, 1))); err != nil {
		t.Error(err)
	}
	if r.o.Stats().BufferWaits.Load() == 0 {
		t.Error("nobody waited: the test tests nothing")
	}
	// When it gives back, the rest is served.
	late := time.After(patience)
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
	late := time.After(patience)
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

func TestAbortReachesWhatWaitsForABuffer(t *testing.T) {
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
	late := time.After(patience)
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
			io := h.io(uint32(i), pipeline.Write, int64(i)*4096, 4096)
			if i%3 == 0 {
				io = h.io(uint32(i), pipeline.Verify, int64(i)*4096, 512<<10)
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
			ios = append(ios, h.io(uint32(k), pipeline.WriteZeroes, int64(k)*4096, 4096))
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
	f.SetRules(fault.Rule{Delay: time.Hour}) // stands until the device vanishes
	const n = 40
	ops := []pipeline.Op{pipeline.Read, pipeline.Write, pipeline.Compare, pipeline.CompareWrite, pipeline.Verify, pipeline.Flush, pipeline.DeallocateRanges, pipeline.WriteZeroes}
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

func TestOneErrorEndsAComposedOperation(t *testing.T) {
	g, dev := newGate(t)
	h := newRig(t, rigConfig{}, dev).host("a")
	io := h.io(1, pipeline.DeallocateRanges, 0, 0)
	io.Ranges = []pipeline.Range{{Offset: 0, Len: 512}, {Offset: 4096, Len: 512}, {Offset: 8192, Len: 512}}
	h.submit(io)
	g.exactly(t, 1)
	g.let(0, nil)
	g.here(t, 1)
	g.let(0, ssd.ErrNoSpace)
	h.finish(1)
	if !errors.Is(io.Err, ssd.ErrNoSpace) {
		t.Error(io.Err)
	}
	g.exactly(t, 0)
	if s := h.r.o.Stats(); s.NoSpace.Load() != 1 || s.Errors.Load() != 1 || s.Requests[ssd.Deallocate].Load() != 1 || s.Bytes[ssd.Deallocate].Load() != 512 {
		t.Errorf("counted %d without space, %d errors, %d deallocations, %d bytes", s.NoSpace.Load(), s.Errors.Load(), s.Requests[ssd.Deallocate].Load(), s.Bytes[ssd.Deallocate].Load())
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

func TestQuiesceWaitsForWhatWasThereAndNothingElse(t *testing.T) {
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
		t.Error("an idle owner is not quiet")
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
	if r.o.Quiesce() != before {
		t.Error("a second channel while the first is open")
	}
	fetching.Return(errReturned)
	h.finish(1)
	if !quiet(before) {
		t.Error("not quiet although all that was there is done")
	}
	after := r.o.Quiesce()
	if quiet(after) {
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
		ssd.Read: {1 + 1 + 8 + 1, 4096 + 4096 + 1<<20 + 512}, ssd.Write: {2, 8192 + 512}, ssd.Flush: {1, 0}, ssd.WriteZeroes: {1, 512}, ssd.Deallocate: {1, 1024},
	} {
		if got := (pair{s.Requests[op].Load(), s.Bytes[op].Load()}); got != want {
			t.Errorf("%v: %v, want %v", op, got, want)
		}
	}
	if s.Inflight.Load() != 0 || s.Queued.Load() != 0 || s.Errors.Load() != 0 {
		t.Errorf("%d in flight, %d queued, %d errors when idle", s.Inflight.Load(), s.Queued.Load(), s.Errors.Load())
	}
}

// devices are all kinds, as the stress tests use them.
func devices(t *testing.T, errorProbability float64) map[string]func(*bufpool.Pool) (ssd.Device, error) {
	faulty := func(c fault.Config) func(*bufpool.Pool) (ssd.Device, error) {
		return func(p *bufpool.Pool) (ssd.Device, error) {
			inner, err := memory(p)
			if err != nil {
				return nil, err
			}
			c.Seed, c.ReadErrorProbability, c.WriteErrorProbability, c.FlushErrorProbability = *seed, errorProbability, errorProbability, errorProbability
			return fault.New(inner, c)
		}
	}
	disk := func(engine string) func(*bufpool.Pool) (ssd.Device, error) {
		return func(p *bufpool.Pool) (ssd.Device, error) {
			return file.Open(file.Config{Name: "ssd0", Path: filepath.Join(t.TempDir(), "ssd.img"), Create: true, SizeBytes: deviceBytes, Engine: engine, Pool: p})
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

func TestCloseEndsAnIdleOwner(t *testing.T) {
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

func TestReadThroughTheOwnerAllocatesNothing(t *testing.T) {
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
		io := &IO{Op: pipeline.Read, Len: 4096, Offset: int64(i) * 4096, Account: s.acct}
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

// BenchmarkCopy is the base of BenchmarkRead: the same device without an owner.
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
					reqs[k] = ssd.Request{Op: ssd.Read, Offset: int64(k) * 4096, Len: 4096, Buf: bufs[k].B, Tag: uint64(k)}
				}
				q.Submit(reqs)
				q.Poll(comps, 0)
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
