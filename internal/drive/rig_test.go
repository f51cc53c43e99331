package drive

import (
	"flag"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"jbofd/internal/bufpool"
	"jbofd/internal/pipeline"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/mem"
	"jbofd/internal/tenant"
	"jbofd/internal/turn"
	"jbofd/internal/units"
)

var seed = flag.Uint64("seed", uint64(time.Now().UnixNano()), "seed of the random tests")

// newRand returns the test's generator after saying its seed.
func newRand(t *testing.T) *rand.Rand {
	t.Helper()
	t.Logf("-seed %d", *seed)
	return rand.New(rand.NewPCG(*seed, 0))
}

// testTimeout bounds how long a test waits for an event.
const testTimeout = 20 * time.Second

// rig is a Drive on a device, with a pool of its own. At the end of the test everything is closed and checked for
// leaks.
type rig struct {
	t    testing.TB
	pool *bufpool.Pool
	dev  ssd.Device
	o    *Drive
}

type rigConfig struct {
	depth     int
	poolBytes int64
	env       turn.Env
}

const deviceBytes = 16 << 20

func newRig(t testing.TB, c rigConfig, device func(*bufpool.Pool) (ssd.Device, error)) *rig {
	t.Helper()
	if c.poolBytes == 0 {
		c.poolBytes = 64 << 20
	}
	pool, err := bufpool.New(bufpool.Config{TotalBytes: c.poolBytes})
	if err != nil {
		t.Fatal(err)
	}
	dev, err := device(pool)
	if err != nil {
		t.Fatal(err)
	}
	o, err := New(Config{Device: dev, Pool: pool, Depth: c.depth, Env: c.env})
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{t: t, pool: pool, dev: dev, o: o}
	t.Cleanup(func() {
		for range 2 {
			if err := o.Close(); err != nil {
				t.Errorf("close owner: %v", err)
			}
		}
		if err := dev.Close(); err != nil {
			t.Errorf("close device: %v", err)
		}
		pool.CloseTest(t)
	})
	return r
}

func memory(*bufpool.Pool) (ssd.Device, error) {
	return mem.Open(mem.Config{Name: "ssd0", SizeBytes: deviceBytes})
}

// host is a sink like a connection of one tenant, which records what happens.
type host struct {
	t       testing.TB
	r       *rig
	account *bufpool.Account
	tenant  tenant.ID
	kicked  chan struct{}

	mu       sync.Mutex
	admitted []*IO
	done     []*IO
	// busy says which slots are with the drive.
	busy map[uint32]bool
	// asked: a call has announced a kick that has not come.
	asked bool
}

func (r *rig) host(name string) *host {
	h := &host{t: r.t, r: r, account: r.pool.Account(name), kicked: make(chan struct{}, 1), busy: map[uint32]bool{}}
	r.t.Cleanup(func() { h.account.Close() })
	return h
}

func (h *host) Admitted(io *IO) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.busy[io.Slot] {
		h.t.Errorf("slot %d admitted without having been submitted", io.Slot)
	}
	h.admitted = append(h.admitted, io)
	h.asked = true
	return true
}

func (h *host) Done(io *IO) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.busy[io.Slot] {
		h.t.Errorf("slot %d done twice, or without having been submitted", io.Slot)
	}
	delete(h.busy, io.Slot)
	h.done = append(h.done, io)
	h.asked = true
	return true
}

func (h *host) Kick() {
	select {
	case h.kicked <- struct{}{}:
	default:
	}
}

// io makes an IO of the host.
func (h *host) io(slot uint32, op pipeline.Op, offset units.DriveOffset, length units.Bytes) *IO {
	io := &IO{Op: op, Offset: offset, Len: length, Account: h.account, Tenant: h.tenant}
	io.Init(h, slot)
	return io
}

// with gives io a buffer that holds data, which the host fills itself.
func (h *host) with(io *IO, data []byte) *IO {
	b, ok := h.r.pool.Get(h.account, len(data))
	if !ok {
		h.t.Fatal("no buffer for the host's own data")
	}
	copy(b.B, data)
	io.Buf = b
	return io
}

// submit hands IOs over as one batch.
func (h *host) submit(ios ...*IO) {
	var b Batch
	h.mu.Lock()
	for _, io := range ios {
		if h.busy[io.Slot] {
			h.t.Errorf("the test submits slot %d twice", io.Slot)
		}
		h.busy[io.Slot] = true
		b.Add(io)
	}
	h.mu.Unlock()
	h.r.o.Submit(&b)
}

// take returns what has happened so far.
func (h *host) take() (admitted, done []*IO) {
	h.mu.Lock()
	defer h.mu.Unlock()
	admitted, done = h.admitted, h.done
	h.admitted, h.done = nil, nil
	return admitted, done
}

// wait waits for a kick and returns what happened; late is when to give up.
func (h *host) wait(late <-chan time.Time) (admitted, done []*IO, ok bool) {
	for {
		admitted, done = h.take()
		if len(admitted)+len(done) > 0 {
			return admitted, done, true
		}
		select {
		case <-h.kicked:
		case <-late:
			return nil, nil, false
		}
	}
}

// finish waits until n IOs are done and returns them in order; none may be
// admitted with Fetch meanwhile.
func (h *host) finish(n int) []*IO {
	h.t.Helper()
	var all []*IO
	late := time.After(testTimeout)
	for len(all) < n {
		admitted, done, ok := h.wait(late)
		if !ok {
			h.t.Fatalf("%d of %d IOs done after %v", len(all), n, testTimeout)
		}
		if len(admitted) > 0 {
			h.t.Fatal("an IO without Fetch was admitted to its sink")
		}
		all = append(all, done...)
	}
	if len(all) > n {
		h.t.Fatalf("%d IOs done, want %d", len(all), n)
	}
	return all
}

// admit waits until n IOs are admitted and returns them.
func (h *host) admit(n int) []*IO {
	h.t.Helper()
	var all []*IO
	late := time.After(testTimeout)
	for len(all) < n {
		admitted, done, ok := h.wait(late)
		if !ok {
			h.t.Fatalf("%d of %d IOs admitted after %v", len(all), n, testTimeout)
		}
		if len(done) > 0 {
			h.t.Fatalf("an IO is done (%v) instead of admitted", done[0].Err)
		}
		all = append(all, admitted...)
	}
	return all
}

// put returns the buffers of finished IOs.
func (h *host) put(ios ...*IO) {
	for _, io := range ios {
		h.r.pool.Put(io.Buf)
		io.Buf = bufpool.Buf{}
	}
}

// run does one IO, returns its outcome and frees its buffer.
func (h *host) run(io *IO) error {
	h.t.Helper()
	h.submit(io)
	h.finish(1)
	h.put(io)
	return io.Err
}

// read returns the content of the device.
func (h *host) read(offset units.DriveOffset, length units.Bytes) []byte {
	h.t.Helper()
	io := h.io(1<<20, pipeline.Read, offset, length)
	h.submit(io)
	h.finish(1)
	if io.Err != nil {
		h.t.Fatalf("read: %v", io.Err)
	}
	data := append([]byte(nil), io.Buf.B...)
	h.put(io)
	return data
}

// write writes data and waits for it.
func (h *host) write(offset units.DriveOffset, data []byte) {
	h.t.Helper()
	if err := h.run(h.with(h.io(1<<20, pipeline.Write, offset, units.Bytes(len(data))), data)); err != nil {
		h.t.Fatalf("write: %v", err)
	}
}
