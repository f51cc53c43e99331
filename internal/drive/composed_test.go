package drive

import (
	"bytes"
	"errors"
	"fmt"
	"testing"
	"time"

	"jbofd/internal/bufpool"
	"jbofd/internal/pipeline"
	"jbofd/internal/ssd"
	"jbofd/internal/units"
)

func TestCompareWriteExcludesOthersFromItsRange(t *testing.T) {
	const at, n = 1 << 20, 8 << 10
	for _, c := range []struct {
		name string
		make func(h *host) *IO
		held bool
	}{
		{"write of the same range", func(h *host) *IO { return h.with(h.io(2, pipeline.Write, at, n), fill(n, 9)) },
			true},
		{"write of its last block", func(h *host) *IO {
			return h.with(h.io(2, pipeline.Write, at+n-512, 512),
				fill(512, 9))
		}, true},
		{"write across its beginning", func(h *host) *IO {
			return h.with(h.io(2, pipeline.Write, at-512, 1024),
				fill(1024, 9))
		}, true},
		{"write just before", func(h *host) *IO { return h.with(h.io(2, pipeline.Write, at-512, 512), fill(512, 9)) },
			false},
		{"write just behind", func(h *host) *IO { return h.with(h.io(2, pipeline.Write, at+n, 512), fill(512, 9)) },
			false},
		{"write zeroes", func(h *host) *IO { return h.io(2, pipeline.WriteZeroes, 0, deviceBytes) }, true},
		{"deallocate", func(h *host) *IO { return h.io(2, pipeline.Deallocate, at, 512) }, true},
		{"deallocate ranges around it", func(h *host) *IO {
			io := h.io(2, pipeline.DeallocateRanges, at, n) // Offset and Len are not used here
			io.Ranges = []pipeline.Range{{Offset: at - 512, Len: 512}, {Offset: at + n, Len: 512}}
			return io
		}, false},
		{"compare and write", func(h *host) *IO {
			return h.with(h.io(2, pipeline.CompareWrite, at+n-512, 512),
				fill(1024, 7))
		}, true},
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
				// Only IOs that change the range wait for it, or it for them.
				if c.held {
					g.exactly(t, 1)
				} else {
					g.exactly(t, 2)
				}
				stop := make(chan struct{})
				defer close(stop)
				// All requests of the second follow those of the first.
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
					if io.Err != nil && !(io == other && errors.Is(io.Err, ErrMismatch)) &&
						!(io == cw && order == "before" && errors.Is(io.Err, ErrMismatch)) {
						t.Errorf("slot %d: %v", io.Slot, io.Err)
					}
					h.put(io)
				}
			})
		}
	}
}

// TestARangeOfADeallocationWaitsForACompareWriteOfIt: and a compare-and-write waits for a range whose deallocation is
// at the device. The ranges before it do not wait, and their claims end with them.
func TestARangeOfADeallocationWaitsForACompareWriteOfIt(t *testing.T) {
	const at, n = 1 << 20, 8 << 10
	for _, order := range []string{"before", "between", "after"} {
		t.Run(order, func(t *testing.T) {
			g, dev := newGate(t)
			h := newRig(t, rigConfig{}, dev).host("a")
			cw := h.with(h.io(1, pipeline.CompareWrite, at, n), append(fill(n, 0), fill(n, 5)...))
			ranges := h.io(2, pipeline.DeallocateRanges, 0, 0)
			ranges.Ranges = []pipeline.Range{{Offset: 0, Len: 512}, {Offset: at + 512, Len: 512},
				{Offset: 8192, Len: 512}}
			switch order {
			case "before":
				h.submit(cw)
				h.submit(ranges)
			case "between":
				h.submit(ranges)
				h.submit(cw)
			case "after":
				h.submit(ranges)
				g.exactly(t, 1)
				g.let(0, nil) // the first range
				g.here(t, 1)
				h.submit(cw)
				if reqs := g.exactly(t, 1); reqs[0].Offset != at+512 {
					t.Fatalf("at the device: %s, want the second range", describe(reqs))
				}
				g.let(0, nil) // the second range
				if reqs := g.here(t, 2); len(reqs) != 2 {
					t.Errorf("at the device: %s, want the compare and the third range", describe(reqs))
				}
			}
			if order != "after" {
				reqs := g.here(t, 2) // the compare and the first range
				first := 0
				if reqs[0].Op != ssd.Deallocate {
					first = 1
				}
				g.let(first, nil)
				h.settled(t)
				if reqs := g.exactly(t, 1); reqs[0].Op != ssd.Read {
					t.Fatalf("at the device: %s, want the compare alone", describe(reqs))
				}
				g.let(0, nil)
				if reqs := g.here(t, 1); reqs[0].Op != ssd.Write || len(reqs) != 1 {
					t.Fatalf("at the device: %s, want the write alone", describe(reqs))
				}
				g.let(0, nil)
				if reqs := g.here(t, 1); reqs[0].Op != ssd.Deallocate || reqs[0].Offset != at+512 {
					t.Fatalf("at the device: %s, want the second range", describe(reqs))
				}
			}
			stop := make(chan struct{})
			defer close(stop)
			go g.all(stop)
			for _, io := range h.finish(2) {
				if io.Err != nil {
					t.Errorf("slot %d: %v", io.Slot, io.Err)
				}
				h.put(io)
			}
		})
	}
}

// settled waits until the drive has taken all completions of the device.
func (h *host) settled(t *testing.T) {
	t.Helper()
	g := h.r.dev.(*gate)
	for begin := time.Now(); time.Since(begin) < testTimeout; {
		h.r.o.driver.Lock()
		g.mu.Lock()
		settled := h.r.o.atDevice == len(g.waiting)
		g.mu.Unlock()
		h.r.o.driver.Unlock()
		if settled {
			return
		}
	}
	t.Fatal("the drive does not take a completion")
}

// peek waits until the drive has processed the last completion: either an IO is done, or another request is at the
// device.
func (h *host) peek() (admitted, done int) {
	g := h.r.dev.(*gate)
	begin := time.Now()
	for time.Since(begin) < testTimeout {
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
		ios = append(ios, h.with(h.io(uint32(i), pipeline.CompareWrite, 0, 512),
			append(fill(512, byte(i)), fill(512, byte(i+1))...)))
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
	if done[0] != a || !errors.Is(a.Err, ssd.ErrMedia) || a.Writing() || done[1] != b ||
		!errors.Is(b.Err, ssd.ErrMedia) || !b.Writing() || done[2] != c || c.Err != nil {
		t.Errorf("a %v, b %v, c %v", a.Err, b.Err, c.Err)
	}
	h.put(done...)
}

func TestCompareFindsTheDifferenceWhereverItIs(t *testing.T) {
	h := newRig(t, rigConfig{}, memory).host("a")
	const at = 1 << 20
	rng := newRand(t)
	for _, n := range []int64{512, 4 << 10, scratchBytes - 512, scratchBytes, scratchBytes + 512, 3 * scratchBytes,
		1<<20 - 512, 1 << 20} {
		data := make([]byte, n)
		for i := range data {
			data[i] = byte(rng.Uint32())
		}
		h.write(at, data)
		if err := h.run(h.with(h.io(1, pipeline.Compare, at, units.Bytes(n)), data)); err != nil {
			t.Errorf("%d bytes, equal: %v", n, err)
		}
		if err := h.run(h.io(1, pipeline.Verify, at, units.Bytes(n))); err != nil {
			t.Errorf("verify %d bytes: %v", n, err)
		}
		places := []int64{0, 1, n - 1, rng.Int64N(n)}
		for k := int64(scratchBytes); k < n; k += scratchBytes {
			places = append(places, k-1, k)
		}
		for _, p := range places {
			data[p] ^= 1
			if err := h.run(h.with(h.io(1, pipeline.Compare, at, units.Bytes(n)), data)); !errors.Is(err, ErrMismatch) {
				t.Errorf("%d bytes, difference at %d: %v, want ErrMismatch", n, p, err)
			}
			if n <= 512<<10 {
				cw := h.with(h.io(1, pipeline.CompareWrite, at, units.Bytes(n)),
					append(append([]byte(nil), data...), fill(n, 0xEE)...))
				if err := h.run(cw); !errors.Is(err, ErrMismatch) || cw.Writing() {
					t.Errorf("compare and write of %d bytes, difference at %d: %v, want ErrMismatch", n, p, err)
				}
			}
			data[p] ^= 1
		}
		if !bytes.Equal(h.read(at, units.Bytes(n)), data) {
			t.Errorf("%d bytes: a compare changed the data", n)
		}
		if n <= 512<<10 {
			cw := h.with(h.io(1, pipeline.CompareWrite, at, units.Bytes(n)),
				append(append([]byte(nil), data...), fill(n, 0xEE)...))
			if err := h.run(cw); err != nil || !cw.Writing() {
				t.Errorf("compare and write of %d bytes, equal: %v", n, err)
			}
			if !bytes.Equal(h.read(at, units.Bytes(n)), fill(n, 0xEE)) {
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
	const n = 3 * scratchCount
	var ios []*IO
	for i := range n {
		ios = append(ios, h.io(uint32(i), pipeline.Verify, 0, scratchBytes+512))
	}
	h.submit(ios...)
	g.exactly(t, scratchCount)
	stop := make(chan struct{})
	defer close(stop)
	go g.all(stop)
	for _, io := range h.finish(n) {
		if io.Err != nil {
			t.Error(io.Err)
		}
	}
}

func TestCompareContinuesWhenThePoolIsExhausted(t *testing.T) {
	r := newRig(t, rigConfig{poolBytes: 4 << 20}, memory)
	h := r.host("a")
	compare := h.with(h.io(1, pipeline.Compare, 0, 4096), fill(4096, 0))
	// Many tenants together take all buffers.
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
	if s := h.r.o.Stats(); s.NoSpace.Load() != 1 || s.Errors.Load() != 1 || s.Requests[ssd.Deallocate].Load() != 1 ||
		s.Bytes[ssd.Deallocate].Load() != 512 {
		t.Errorf("counted %d without space, %d errors, %d deallocations, %d bytes", s.NoSpace.Load(), s.Errors.Load(),
			s.Requests[ssd.Deallocate].Load(), s.Bytes[ssd.Deallocate].Load())
	}
}
