package client

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"jbofd/client/internal/hostconn"
	"jbofd/client/internal/hostverbs"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/rdma/verbs"
)

// openRDMAQPair connects to s and opens a queue pair.
func openRDMAQPair(t testing.TB, s *script, o Options) (*Controller, *QPair) {
	t.Helper()
	o.QPairs = max(o.QPairs, 1)
	c, _ := connect(t, o)
	q, err := c.OpenQPair(testContext(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { q.Close() })
	return c, q
}

func allocBuffer(t testing.TB, c *Controller, n int) []byte {
	t.Helper()
	b, free, err := c.AllocBuffer(n)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := free(); err != nil {
			t.Error(err)
		}
		if err := free(); err != nil {
			t.Errorf("second free: %v", err)
		}
	})
	return b
}

// TestRDMAQPairReadsBackWhatItWrote for every way of transferring data: in the capsule, through bounce buffers, in
// place; and for buffers at odd addresses in registered memory.
func TestRDMAQPairReadsBackWhatItWrote(t *testing.T) {
	s := newRDMAScript(t, 32<<20)
	c, q := openRDMAQPair(t, s, quick(s))
	region := allocBuffer(t, c, 24<<20)
	rng := rand.New(rand.NewPCG(1, *seed))
	for _, size := range []int{512, 4096, 8192, 8704, 128 << 10, 1 << 20, 2 << 20} {
		for _, direct := range []bool{false, true} {
			if size > 1<<20 && !direct {
				continue
			}
			const n = 8
			var cmds []Command
			want := make([][]byte, n)
			used := 0
			buffer := func() []byte {
				if !direct {
					return make([]byte, size)
				}
				used += size + 4
				return region[used-size-4+3:][:size]
			}
			for i := range n {
				if direct && i == n/2 && size > 1<<20 {
					break
				}
				b := buffer()
				for k := 0; k < size; k += 8 {
					binary.LittleEndian.PutUint64(b[k:], rng.Uint64())
				}
				want[i] = bytes.Clone(b)
				c := Command{Data: b, Tag: uint64(i)}
				SetRW(&c, OpWrite, 1, uint64(i*size/512), uint32(size/512))
				cmds = append(cmds, c)
			}
			run(t, q, cmds)
			used = 0
			for i := range cmds {
				cmds[i].Data = buffer()
				clear(cmds[i].Data)
				cmds[i].SQE.SetOpcode(OpRead)
			}
			run(t, q, cmds)
			for i := range cmds {
				if !bytes.Equal(cmds[i].Data, want[i]) {
					t.Fatalf("size %d, direct %t, command %d: data differ", size, direct, i)
				}
			}
		}
	}
	long := Command{Data: make([]byte, 1<<20+512)}
	SetRW(&long, OpRead, 1, 0, 2049)
	if _, err := q.Submit([]Command{long}); !errors.Is(err, ErrInvalid) {
		t.Errorf("1 MiB and a block of ordinary memory: %v, want ErrInvalid", err)
	}
}

// TestRDMAWithoutMemoryCommandsWait: commands that get no bounce buffer wait and proceed later. None is lost, and none
// waits for ever.
func TestRDMAWithoutMemoryCommandsWait(t *testing.T) {
	s := newRDMAScript(t, 32<<20)
	o := quick(s)
	o.BounceBytes = 4 << 20
	o.QPairs, o.Queues, o.QueueDepth = 2, 1, 32
	c, n := connect(t, o)
	ctx := testContext(t)
	var q [2]*QPair
	for i := range q {
		var err error
		if q[i], err = c.OpenQPair(ctx); err != nil {
			t.Fatal(err)
		}
		defer q[i].Close()
	}
	batch := func(op uint8) []Command {
		cmds := make([]Command, 24)
		for i := range cmds {
			cmds[i] = Command{Data: bytes.Repeat([]byte{byte(i + 1)}, 1<<20), Tag: uint64(i)}
			SetRW(&cmds[i], op, 1, uint64(i)*2048, 2048)
		}
		return cmds
	}
	run(t, q[0], batch(OpWrite))
	reads := batch(OpRead)
	for i := range reads {
		clear(reads[i].Data)
	}
	run(t, q[0], reads)
	for i := range reads {
		if reads[i].Data[0] != byte(i+1) || reads[i].Data[1<<20-1] != byte(i+1) {
			t.Errorf("read %d brought %d", i, reads[i].Data[0])
		}
	}
	// One queue pair holds all the memory that it can get and is not polled. The others proceed.
	if k, err := q[0].Submit(batch(OpRead)); k != 24 || err != nil {
		t.Fatal(k, err)
	}
	run(t, q[1], batch(OpWrite))
	var wg sync.WaitGroup
	for g := range 16 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			b := make([]byte, 1<<20)
			if _, err := n.ReadAt(ctx, b, int64(g)<<20); err != nil || b[0] != byte(g+1) {
				t.Errorf("read: %d, %v", b[0], err)
			}
		}()
	}
	wg.Wait()
	// A fused pair needs two buffers, and gets them.
	if err := n.CompareAndWrite(ctx, bytes.Repeat([]byte{1}, 1<<20), bytes.Repeat([]byte{9}, 1<<20), 0); err != nil {
		t.Error(err)
	}
	if s.disk[0] != 9 {
		t.Error("nothing was written")
	}
	comps := make([]Completion, 24)
	for done := 0; done < 24; {
		k, err := q[0].Poll(comps, 5*time.Second)
		if err != nil || k == 0 {
			t.Fatal(k, err)
		}
		done += k
	}
}

// TestRDMAMemoryEndsWithTheController, whatever is closed first.
func TestRDMAMemoryEndsWithTheController(t *testing.T) {
	s := newRDMAScript(t, 1<<20)
	o := quick(s)
	o.QPairs = 1
	c, _ := connect(t, o)
	b, free, err := c.AllocBuffer(4096)
	if err != nil {
		t.Fatal(err)
	}
	q, err := c.OpenQPair(testContext(t))
	if err != nil {
		t.Fatal(err)
	}
	cmd := Command{Data: make([]byte, 512)}
	SetRW(&cmd, OpRead, 1, 0, 1)
	run(t, q, []Command{cmd})
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if _, _, err := c.AllocBuffer(4096); !errors.Is(err, ErrClosed) {
		t.Errorf("AllocBuffer after Close: %v, want ErrClosed", err)
	}
	b[0] = 1 // still memory
	if err := errors.Join(free(), q.Close(), q.Close(), c.Close()); err != nil {
		t.Error(err)
	}
	if k := s.rdma.host.Counts(); k != (verbs.Counts{}) {
		t.Errorf("left open: %+v", k)
	}
}

func TestRDMAPollWaitsForTheGivenTime(t *testing.T) {
	s := newRDMAScript(t, 1<<20)
	_, p := openRDMAQPair(t, s, quick(s))
	p.closeTimeout = time.Millisecond // for the read is never answered
	defer s.stall("read")()
	checkPollTimes(t, p)
}

// TestRDMACancelledReadInRegisteredMemory: not even memory that the target could reach changes after a call of
// a Namespace has returned.
func TestRDMACancelledReadInRegisteredMemory(t *testing.T) {
	s := newRDMAScript(t, 1<<20)
	for i := range s.disk {
		s.disk[i] = 1
	}
	c, n := connect(t, quick(s))
	b := allocBuffer(t, c, 1<<20)
	late := make(chan func(), 1)
	s.mu.Lock()
	s.answer = func(c *scriptConn, e *nvme.SQE) bool {
		if c.qid == 0 || e.Opcode() != nvme.CmdRead {
			return false
		}
		cp := *e
		late <- func() { c.io(&cp, nil) }
		return true
	}
	s.mu.Unlock()
	ctx, cancel := context.WithCancel(context.Background())
	got := make(chan error, 1)
	go func() {
		_, err := n.ReadAt(ctx, b, 0)
		got <- err
	}()
	write := <-late
	cancel()
	if err := <-got; !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	before := s.rdma.target.Stats().Writes
	s.mu.Lock()
	s.answer = nil
	write()
	s.mu.Unlock()
	if _, err := n.ReadAt(testContext(t), make([]byte, 4096), 0); err != nil {
		t.Fatal(err)
	}
	if s.rdma.target.Stats().Writes < before+1 {
		t.Fatal("the target wrote nothing")
	}
	if !bytes.Equal(b, make([]byte, len(b))) {
		t.Error("the buffer changed after the call had returned")
	}
}

// TestAllocBufferOverTCP: the buffer is ordinary memory.
func TestAllocBufferOverTCP(t *testing.T) {
	s := newScript(t, 1<<20)
	c, n := connect(t, quick(s))
	b := allocBuffer(t, c, 4096)
	if _, err := n.WriteAt(testContext(t), b, 0, 0); err != nil {
		t.Error(err)
	}
	if _, _, err := c.AllocBuffer(0); !errors.Is(err, ErrInvalid) {
		t.Errorf("%v, want ErrInvalid", err)
	}
}

var _ hostconn.Conn = (*hostverbs.Conn)(nil)
