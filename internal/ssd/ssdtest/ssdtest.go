// Package ssdtest checks that a device keeps the promises of package ssd. Every
// implementation's tests run Conformance.
package ssdtest

import (
	"bytes"
	"errors"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"jbofd/internal/bufpool"
	"jbofd/internal/ssd"
)

// OpenQueue opens a queue.
func OpenQueue(t testing.TB, d ssd.Device, depth int) ssd.Queue {
	t.Helper()
	q, err := d.OpenQueue(depth)
	if err != nil {
		t.Fatal(err)
	}
	return q
}

// Buffer returns n bytes of a pool, which stay taken.
func Buffer(t testing.TB, p *bufpool.Pool, a *bufpool.Account, n int) []byte {
	t.Helper()
	b, ok := p.Get(a, n)
	if !ok {
		t.Fatal("no buffer")
	}
	return b.B[:n]
}

// Do submits one request on an otherwise idle queue and waits for its answer.
func Do(t testing.TB, q ssd.Queue, r ssd.Request) error {
	t.Helper()
	r.Tag = 0xD0
	if n := q.Submit([]ssd.Request{r}); n != 1 {
		t.Fatalf("Submit of %v took %d, want 1", r.Op, n)
	}
	var c [1]ssd.Completion
	for deadline := time.Now().Add(20 * time.Second); ; {
		if ssd.Await(q, c[:], time.Second) == 1 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%v of %d bytes at %d was never answered", r.Op, r.Len, r.Offset)
		}
	}
	if c[0].Tag != r.Tag {
		t.Fatalf("answer to tag %#x, want %#x", c[0].Tag, r.Tag)
	}
	return c[0].Err
}

// Write stores b at off.
func Write(t testing.TB, q ssd.Queue, off int64, b []byte, flags ssd.Flags) {
	t.Helper()
	if err := Do(t, q, ssd.Request{Op: ssd.Write, Flags: flags, Offset: off, Len: int64(len(b)), Buf: b}); err != nil {
		t.Fatalf("write of %d bytes at %d: %v", len(b), off, err)
	}
}

// Read returns n bytes at off.
func Read(t testing.TB, q ssd.Queue, off int64, n int) []byte {
	t.Helper()
	b := bytes.Repeat([]byte{0xEE}, n)
	if err := Do(t, q, ssd.Request{Op: ssd.Read, Offset: off, Len: int64(n), Buf: b}); err != nil {
		t.Fatalf("read of %d bytes at %d: %v", n, off, err)
	}
	return b
}

// Flush makes all writes durable.
func Flush(t testing.TB, q ssd.Queue) {
	t.Helper()
	if err := Do(t, q, ssd.Request{Op: ssd.Flush}); err != nil {
		t.Fatalf("flush: %v", err)
	}
}

// Conformance runs the whole suite against devices that open returns: fresh ones
// of at least 4 MiB whose content reads as zeroes.
func Conformance(t *testing.T, open func(t *testing.T) ssd.Device) {
	withQueue := func(depth int, f func(t *testing.T, d ssd.Device, q ssd.Queue)) func(*testing.T) {
		return func(t *testing.T) {
			d := open(t)
			q, err := d.OpenQueue(depth)
			if err != nil {
				t.Fatal(err)
			}
			f(t, d, q)
			for range 2 { // idempotent
				if err := q.Close(); err != nil {
					t.Errorf("queue close: %v", err)
				}
			}
			for range 2 {
				if err := d.Close(); err != nil {
					t.Errorf("device close: %v", err)
				}
			}
		}
	}
	t.Run("InfoIsWellFormed", withQueue(1, func(t *testing.T, d ssd.Device, q ssd.Queue) {
		i := d.Info()
		if i.BlockSize < 512 || i.BlockSize&(i.BlockSize-1) != 0 || i.SizeBytes <= 0 ||
			i.SizeBytes%int64(i.BlockSize) != 0 ||
			i.OptimalIOBytes < i.BlockSize || i.AtomicWriteBytes < i.BlockSize || i.Backend == "" || i.Engine == "" {
			t.Errorf("%+v", i)
		}
		if err := d.Healthy(); err != nil {
			t.Errorf("Healthy: %v", err)
		}
	}))
	t.Run("ReadsReturnWhatWasLastWritten", withQueue(4, readsReturnWrites))
	t.Run("QueueTakesUpToItsDepthAndAnswersEachOnce", withQueue(8, depthIsRespected))
	t.Run("InvalidRequestsAreAnsweredWithErrors", withQueue(16, invalidRequests))
	t.Run("ZeroLengthDoesNothing", withQueue(4, func(t *testing.T, d ssd.Device, q ssd.Queue) {
		for op := range ssd.Ops {
			if err := Do(t, q, ssd.Request{Op: op, Offset: 0, Len: 0, Buf: []byte{}}); err != nil {
				t.Errorf("%v of 0 bytes: %v", op, err)
			}
		}
	}))
	t.Run("WakeEndsOneWait", withQueue(4, wakes))
	t.Run("WaitTellsOfWhatHasArrived", withQueue(4, waitTells))
	t.Run("AWaiterMissesNothing", withQueue(8, waiterMissesNothing))
	t.Run("CompletionsArePolledInPieces", withQueue(8, pollsInPieces))
	t.Run("QueuesAreApart", withQueue(4, queuesAreApart))
	t.Run("CloseWaitsForWhatIsUnderWay", withQueue(8, closeWaits))
	t.Run("CloseEndsAWaitAndLaterRequestsSayGone", withQueue(4, func(t *testing.T, d ssd.Device, q ssd.Queue) {
		got := make(chan bool)
		go func() { got <- q.Wait(-1) }()
		if err := d.Close(); err != nil {
			t.Fatal(err)
		}
		if !<-got || !q.Wait(-1) || !q.Wait(0) {
			t.Error("Wait on a closed queue returned false")
		}
		var none [1]ssd.Completion
		if n := q.Poll(none[:]); n != 0 {
			t.Errorf("Poll returned %d", n)
		}
		if err := d.Healthy(); !errors.Is(err, ssd.ErrGone) {
			t.Errorf("Healthy after Close: %v", err)
		}
		if _, err := d.OpenQueue(1); !errors.Is(err, ssd.ErrGone) {
			t.Errorf("OpenQueue after Close: %v", err)
		}
		b := make([]byte, 4096)
		if q.Submit([]ssd.Request{{Op: ssd.Read, Len: 4096, Buf: b, Tag: 9}}) == 1 {
			var c [1]ssd.Completion
			if n := ssd.Await(q, c[:], -1); n != 1 || !errors.Is(c[0].Err, ssd.ErrGone) {
				t.Errorf("read after Close: %d %v", n, c[0].Err)
			}
		}
	}))
}

// readsReturnWrites plays random operations against a plain byte slice.
func readsReturnWrites(t *testing.T, d ssd.Device, q ssd.Queue) {
	info := d.Info()
	bs := int64(info.BlockSize)
	span := min(info.SizeBytes, 4<<20)
	model := make([]byte, span)
	rng := rand.New(rand.NewPCG(1, 2))
	for i := range 200 {
		n := bs * (1 + rng.Int64N(32))
		if i%16 == 0 {
			n = min(span/2, 1<<20)
		}
		off := bs * rng.Int64N((span-n)/bs+1)
		want := model[off : off+n]
		switch rng.IntN(8) {
		case 0, 1, 2:
			for j := range want {
				want[j] = byte(rng.Uint32())
			}
			Write(t, q, off, bytes.Clone(want), ssd.Flags(rng.IntN(2))*ssd.FUA)
		case 3:
			clear(want)
			flags := ssd.Flags(rng.IntN(2))*ssd.Unmap | ssd.Flags(rng.IntN(2))*ssd.FUA
			if err := Do(t, q, ssd.Request{Op: ssd.WriteZeroes, Flags: flags, Offset: off, Len: n}); err != nil {
				t.Fatalf("write zeroes: %v", err)
			}
		case 4:
			if !info.Deallocates {
				continue
			}
			if err := Do(t, q, ssd.Request{Op: ssd.Deallocate, Offset: off, Len: n}); err != nil {
				t.Fatalf("deallocate: %v", err)
			}
			if info.DeallocatedReadsZero {
				clear(want)
			} else {
				copy(want, Read(t, q, off, int(n)))
			}
		case 5:
			Flush(t, q)
		default:
			if got := Read(t, q, off, int(n)); !bytes.Equal(got, want) {
				t.Fatalf("step %d: read of %d bytes at %d differs from what was written", i, n, off)
			}
		}
	}
	for off := int64(0); off < span; off += 1 << 20 {
		n := min(1<<20, span-off)
		if !bytes.Equal(Read(t, q, off, int(n)), model[off:off+n]) {
			t.Fatalf("at the end: content at %d differs", off)
		}
	}
}

func depthIsRespected(t *testing.T, d ssd.Device, q ssd.Queue) {
	const depth = 8
	reqs := make([]ssd.Request, depth+3)
	for i := range reqs {
		reqs[i] = ssd.Request{Op: ssd.Write, Offset: int64(i) * 4096, Len: 4096,
			Buf: bytes.Repeat([]byte{byte(i)}, 4096), Tag: uint64(i)}
	}
	for round := range 20 {
		if n := q.Submit(reqs); n != depth {
			t.Fatalf("round %d: Submit took %d, want %d", round, n, depth)
		}
		if n := q.Submit(reqs[depth:]); n != 0 {
			t.Fatalf("round %d: a full queue took %d more", round, n)
		}
		seen := make(map[uint64]bool)
		var c [3]ssd.Completion
		for len(seen) < depth {
			n := ssd.Await(q, c[:], -1)
			for _, c := range c[:n] {
				if c.Err != nil || seen[c.Tag] || c.Tag >= depth || c.LatencyNS < 0 {
					t.Fatalf("round %d: bad completion %+v", round, c)
				}
				seen[c.Tag] = true
			}
		}
		if n := q.Poll(c[:]); n != 0 {
			t.Fatalf("round %d: %d completions too many", round, n)
		}
	}
	if n := q.Submit(nil); n != 0 {
		t.Errorf("Submit(nil) = %d", n)
	}
}

func invalidRequests(t *testing.T, d ssd.Device, q ssd.Queue) {
	i := d.Info()
	bs, size := int64(i.BlockSize), i.SizeBytes
	buf := make([]byte, 2*bs)
	for _, tc := range []struct {
		r    ssd.Request
		want error
	}{
		{ssd.Request{Op: ssd.Read, Offset: size, Len: bs, Buf: buf}, ssd.ErrRange},
		{ssd.Request{Op: ssd.Read, Offset: size - bs, Len: 2 * bs, Buf: buf}, ssd.ErrRange},
		{ssd.Request{Op: ssd.Write, Offset: -bs, Len: bs, Buf: buf}, ssd.ErrRange},
		{ssd.Request{Op: ssd.Write, Offset: 1, Len: bs, Buf: buf}, ssd.ErrRange},
		{ssd.Request{Op: ssd.Write, Offset: 0, Len: bs - 1, Buf: buf}, ssd.ErrRange},
		{ssd.Request{Op: ssd.Write, Offset: 0, Len: 4 * bs, Buf: buf}, ssd.ErrRange},
		{ssd.Request{Op: ssd.Write, Offset: math.MaxInt64 - bs + 1, Len: bs, Buf: buf}, ssd.ErrRange},
		{ssd.Request{Op: ssd.Deallocate, Offset: 0, Len: size + bs}, ssd.ErrRange},
		{ssd.Request{Op: ssd.WriteZeroes, Offset: 0, Len: -bs}, ssd.ErrRange},
		{ssd.Request{Op: 99}, ssd.ErrUnsupported},
	} {
		if err := Do(t, q, tc.r); !errors.Is(err, tc.want) {
			t.Errorf("%v of %d bytes at %d: %v, want %v", tc.r.Op, tc.r.Len, tc.r.Offset, err, tc.want)
		}
	}
}
