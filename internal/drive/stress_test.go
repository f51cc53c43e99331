package drive

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"jbofd/internal/bufpool"
	"jbofd/internal/buildtags"
	"jbofd/internal/pipeline"
	"jbofd/internal/ssd"
	"jbofd/internal/tenant"
	"jbofd/internal/units"
)

// Sizes of the stress test. Every slot of every worker has a region of its own, so that its content is known.
const (
	workers     = 4
	workerSlots = 16
	slotBytes   = deviceBytes / workers / workerSlots
)

var errReturned = errors.New("the host is gone")

// slotWork is one slot of a worker and what its region must hold.
type slotWork struct {
	io      *IO
	base    units.DriveOffset
	model   []byte
	data    []byte // what the IO writes or compares
	aborted bool
	lost    bool // Return was called
	// open: after an error, the region's content is unknown until it is written as a whole.
	open bool
}

// worker drives its slots until n IOs are done.
type worker struct {
	h     *host
	rng   *rand.Rand
	slots []*slotWork
	// exact: the device does not fail requests.
	exact bool
	// zeroes: what was deallocated reads as zeroes.
	zeroes bool
}

// next submits a random operation in a slot and sometimes aborts it.
func (w *worker) next(s *slotWork) {
	const block = 4096
	io := s.io
	*s = slotWork{io: io, base: s.base, model: s.model, open: s.open}
	n := block * (1 + w.rng.Int64N(slotBytes/block/2))
	off := block * w.rng.Int64N((slotBytes-n)/block+1)
	if s.open { // find out what the region holds
		n, off = slotBytes, 0
	}
	io.Offset, io.Len = s.base.Add(units.Bytes(off)), units.Bytes(n)
	io.Op, io.Fetch, io.Ranges, io.Flags = pipeline.Op(w.rng.IntN(int(pipeline.Ops))), false, nil, 0
	if s.open {
		io.Op = pipeline.Write
	}
	have := s.model[off : off+n]
	random := func() []byte {
		b := make([]byte, n)
		for i := 0; i < len(b); i += 8 {
			binary.LittleEndian.PutUint64(b[i:], w.rng.Uint64())
		}
		return b
	}
	switch io.Op {
	case pipeline.Write:
		s.data = random()
		io.Flags = ssd.Flags(w.rng.IntN(2)) // FUA
	case pipeline.Compare:
		s.data = bytes.Clone(have)
		if w.rng.IntN(2) == 0 {
			s.data[w.rng.Int64N(n)] ^= 1
		}
	case pipeline.CompareWrite:
		s.data = append(bytes.Clone(have), random()...)
		if w.rng.IntN(4) == 0 {
			s.data[w.rng.Int64N(n)] ^= 1
		}
	case pipeline.DeallocateRanges:
		for range 1 + w.rng.IntN(4) {
			at := units.Bytes(block * w.rng.Int64N(slotBytes/block))
			io.Ranges = append(io.Ranges, pipeline.Range{Offset: s.base.Add(at), Len: block})
		}
	}
	if s.data != nil {
		b, ok := bufpool.Buf{}, false
		if w.rng.IntN(2) == 0 {
			b, ok = w.h.r.pool.Get(w.h.account, len(s.data))
		}
		if io.Buf = b; ok {
			copy(b.B, s.data)
		} else {
			io.Fetch = true
		}
	}
	w.h.submit(io)
	if w.rng.IntN(8) == 0 {
		s.aborted = w.h.r.o.Abort(io)
	}
}

// over checks a finished IO.
func (w *worker) over(s *slotWork) {
	io := s.io
	have := s.model[io.Offset.Sub(s.base):][:io.Len]
	bad := func(format string, args ...any) {
		w.h.t.Errorf("slot %d, %v of %d bytes at %d: %s", io.Slot, io.Op, io.Len, io.Offset,
			fmt.Sprintf(format, args...))
	}
	switch {
	case errors.Is(io.Err, ErrAborted) != s.aborted:
		bad("Abort said %v, it ended with %v", s.aborted, io.Err)
	case s.aborted, s.lost:
		if s.lost && io.Err != errReturned {
			bad("returned, it ended with %v", io.Err)
		}
		// A list of ranges that was aborted may have been deallocated in part.
		s.open = s.open || s.aborted && io.Op == pipeline.DeallocateRanges
	case errors.Is(io.Err, ssd.ErrMedia) && !w.exact:
		s.open = s.open || io.Op.Mutates()
	case io.Err != nil && !errors.Is(io.Err, ErrMismatch):
		bad("%v", io.Err)
	default:
		equal := s.data != nil && bytes.Equal(s.data[:io.Len], have)
		switch io.Op {
		case pipeline.Write:
			copy(have, s.data)
			s.open = false
		case pipeline.Read:
			if !bytes.Equal(io.Buf.B, have) {
				bad("read something else than was written")
			}
		case pipeline.Compare, pipeline.CompareWrite:
			if equal != (io.Err == nil) {
				bad("equal is %v, it ended with %v", equal, io.Err)
			}
			if equal && io.Op == pipeline.CompareWrite {
				copy(have, s.data[io.Len:])
			}
		case pipeline.WriteZeroes:
			clear(have)
		case pipeline.Deallocate:
			clear(have)
			s.open = !w.zeroes
		case pipeline.DeallocateRanges:
			for _, r := range io.Ranges {
				clear(s.model[r.Offset.Sub(s.base):][:r.Len])
			}
			s.open = !w.zeroes
		}
	}
	w.h.put(io)
}

func (w *worker) run(n int) {
	late := time.After(testTimeout)
	left := n
	for _, s := range w.slots {
		w.next(s)
	}
	for out := len(w.slots); out > 0; {
		admitted, done, ok := w.h.wait(late)
		if !ok {
			w.h.t.Errorf("%s: %d IOs are still out after %v", w.h.account.Name(), out, testTimeout)
			return
		}
		for _, io := range admitted {
			s := w.slots[io.Slot]
			if len(io.Buf.B) != len(s.data) {
				w.h.t.Errorf("%v: admitted with a buffer of %d bytes, want %d", io.Op, len(io.Buf.B), len(s.data))
			}
			if w.rng.IntN(16) == 0 {
				s.lost = true
				io.Return(errReturned)
				continue
			}
			copy(io.Buf.B, s.data)
			var b Batch
			b.Add(io)
			w.h.r.o.Fetched(&b)
		}
		for _, io := range done {
			s := w.slots[io.Slot]
			w.over(s)
			out--
			if left > 0 {
				left--
				w.next(s)
				out++
			}
		}
	}
}

func TestEveryIOIsDoneOnceAndDoesWhatItSays(t *testing.T) {
	rng := newRand(t)
	n := 400
	if testing.Short() || buildtags.Race {
		n = 150
	}
	for _, errorProbability := range []float64{0, 0.05} {
		for name, dev := range devices(t, errorProbability) {
			for _, c := range []rigConfig{{}, {depth: 3, poolBytes: 4 << 20}} {
				t.Run(fmt.Sprintf("%s, errors %v, depth %d", name, errorProbability, c.depth), func(t *testing.T) {
					r := newRig(t, c, dev)
					r.zero(t)
					var wg sync.WaitGroup
					for i := range workers {
						w := &worker{h: r.host(fmt.Sprintf("w%d", i)), rng: rand.New(rand.NewPCG(rng.Uint64(), 0)),
							exact: errorProbability == 0, zeroes: r.dev.Info().DeallocatedReadsZero}
						w.h.tenant = tenant.ID(i)
						for k := range workerSlots {
							w.slots = append(w.slots,
								&slotWork{io: w.h.io(uint32(k), 0, 0, 0),
									base:  units.DriveOffset(i*workerSlots+k) * slotBytes,
									model: make([]byte, slotBytes), open: errorProbability > 0})
						}
						wg.Go(func() { w.run(n) })
					}
					wg.Wait()
				})
			}
		}
	}
}

// zero makes sure that the device holds zeroes: a new one does.
func (r *rig) zero(t *testing.T) {
	t.Helper()
	if !r.dev.Info().DeallocatedReadsZero {
		t.Skip("the device's content is not known after a deallocation")
	}
}

func TestCompareWriteLosesNoIncrement(t *testing.T) {
	rng := newRand(t)
	const (
		counters = 2
		block    = 4096
		each     = 150
	)
	for name, dev := range devices(t, 0) {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, rigConfig{}, dev)
			var wg sync.WaitGroup
			for i := range workers {
				h := r.host(fmt.Sprintf("w%d", i))
				rng := rand.New(rand.NewPCG(rng.Uint64(), 0))
				wg.Go(func() {
					read, cw := h.io(1, pipeline.Read, 0, block), h.io(2, pipeline.CompareWrite, 0, block)
					for done := 0; done < each; {
						at := block * rng.Int64N(counters)
						read.Offset, cw.Offset = units.DriveOffset(at), units.DriveOffset(at)
						h.submit(read)
						h.finish(1)
						old := binary.LittleEndian.Uint64(read.Buf.B)
						image := append(bytes.Clone(read.Buf.B), read.Buf.B...)
						h.put(read)
						binary.LittleEndian.PutUint64(image[block:], old+1)
						switch err := h.run(h.with(cw, image)); {
						case err == nil:
							done++
						case !errors.Is(err, ErrMismatch):
							t.Error(err)
							return
						}
					}
				})
			}
			wg.Wait()
			h := r.host("reader")
			sum := uint64(0)
			for i := range int64(counters) {
				sum += binary.LittleEndian.Uint64(h.read(units.DriveOffset(i*block), block))
			}
			if sum != workers*each {
				t.Errorf("the counters say %d after %d increments", sum, workers*each)
			}
		})
	}
}

// Every writer has values of its own, so each value is on the device at most once: if two CompareWrites both found it,
// they were not atomic.
func TestNoValueIsReplacedTwice(t *testing.T) {
	rng := newRand(t)
	const (
		region = 300 << 10 &^ 4095 // three scratch buffers
		each   = 25
	)
	for name, dev := range devices(t, 0) {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, rigConfig{}, dev)
			uniform := func(v uint64) []byte {
				b := make([]byte, region)
				for i := 0; i < region; i += 8 {
					binary.LittleEndian.PutUint64(b[i:], v)
				}
				return b
			}
			var mu sync.Mutex
			replaced := map[uint64]bool{}
			var wg sync.WaitGroup
			for i := range workers {
				h := r.host(fmt.Sprintf("w%d", i))
				rng := rand.New(rand.NewPCG(rng.Uint64(), 0))
				wg.Go(func() {
					for k := range each {
						mine := uint64(i+1)<<32 | uint64(k+1)
						switch rng.IntN(6) {
						case 0:
							h.write(0, uniform(mine))
						case 1:
							io := h.io(3, pipeline.DeallocateRanges, 0, 0)
							io.Ranges = []pipeline.Range{{Offset: region / 2 &^ 4095, Len: 4096},
								{Offset: 0, Len: 4096}}
							if err := h.run(io); err != nil {
								t.Error(err)
							}
						default:
							found := h.read(0, region)
							v := binary.LittleEndian.Uint64(found[region-8:])
							cw := h.with(h.io(2, pipeline.CompareWrite, 0, region),
								append(bytes.Clone(found), uniform(mine)...))
							if err := h.run(cw); err == nil && v != 0 {
								mu.Lock()
								if replaced[v] {
									t.Errorf("value %#x was replaced twice", v)
								}
								replaced[v] = true
								mu.Unlock()
							} else if err != nil && !errors.Is(err, ErrMismatch) {
								t.Error(err)
							}
						}
					}
				})
			}
			wg.Wait()
			if len(replaced) == 0 {
				t.Error("nothing was replaced: the test tests nothing")
			}
		})
	}
}
