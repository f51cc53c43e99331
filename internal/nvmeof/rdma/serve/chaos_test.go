package serve_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/rdma/memverbs"
	"jbofd/internal/nvmeof/rdma/verbs"
	"jbofd/internal/nvmeof/target/kvtest"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/mem"
	"jbofd/internal/ssd/model"
)

var (
	chaosSeeds  = flag.Int("chaos-seeds", 3, "how many seeds TestChaos tries, from -seed on, beside a new one")
	chaosFaults = flag.Int("chaos-faults", 25, "how many faults each of them has")
)

// TestChaos injects every fault of connections at random, with well-behaved hosts that check what they read, and with
// misbehaving hosts. Afterwards the former are served again and find their data, and nothing is left behind.
func TestChaos(t *testing.T) {
	seeds := make([]uint64, *chaosSeeds, *chaosSeeds+1)
	for i := range seeds {
		seeds[i] = *seed + uint64(i)
	}
	for _, s := range append(seeds, rand.Uint64()) {
		t.Run(fmt.Sprint("seed ", s), func(t *testing.T) { runChaos(t, s) })
	}
}

// chaos is one run.
type chaos struct {
	*rig
	t   *testing.T
	rng *rand.Rand
	// strangers is the network of the misbehaving hosts.
	strangers *memverbs.Provider
	hosts     []*client.Controller
	workers   []*chaosWorker
	// done counts the operations of the workers.
	done    atomic.Int64
	stop    chan struct{}
	held    []*memverbs.Endpoint
	removed bool // the target's device was, at least once
	store   *kvtest.Store
	tap     *tap
	seen    map[string]int
}

// oneOf picks one of the values.
func oneOf[T any](rng *rand.Rand, values ...T) T { return values[rng.IntN(len(values))] }

func runChaos(t *testing.T, seed uint64) {
	goroutines := runtime.NumGoroutine()
	t.Cleanup(func() {
		eventually(t, "the end of all goroutines", func() bool { return runtime.NumGoroutine() <= goroutines })
	})
	watchdog := time.AfterFunc(2*time.Minute, func() {
		stacks := make([]byte, 4<<20)
		panic(fmt.Sprintf("TestChaos hangs, -seed %d\n%s", seed, stacks[:runtime.Stack(stacks, true)]))
	})
	t.Cleanup(func() { watchdog.Stop() })

	c := newChaos(t, seed)
	strangers := c.startStrangers(seed)
	workers := c.startWorkers()
	for range *chaosFaults {
		c.await(int64(c.rng.IntN(40)))
		c.fault()
	}
	c.calm()
	close(c.stop)
	strangers.Wait()
	workers.Wait()
	c.checkHosts()
	c.end()
	t.Logf("%d operations, faults %v", c.done.Load(), c.seen)
}

func newChaos(t *testing.T, seed uint64) *chaos {
	rng := rand.New(rand.NewPCG(seed, 1))
	c := &chaos{t: t, rng: rng, stop: make(chan struct{}), tap: &tap{}, seen: map[string]int{}}
	fast, err := mem.Open(mem.Config{Name: "m0", SizeBytes: testBytes})
	if err != nil {
		t.Fatal(err)
	}
	slow, err := model.Open(model.Config{Name: "m1", Preset: "p4800x", SizeBytes: testBytes, BlockSize: blockBytes,
		Seed: seed})
	if err != nil {
		t.Fatal(err)
	}
	c.rig = newRig(t, func(s *setup) {
		s.network = memverbs.Config{Seed: seed, Live: true, RNRDelay: 200 * time.Microsecond}
		s.devices = []ssd.Device{fast, slow}
		s.buffers = oneOf[int64](rng, 4<<20, 8<<20, 64<<20)
		s.serve.Receives = oneOf(rng, 3, 20, 150, 1024)
		s.serve.Pollers = 1 + rng.IntN(3)
		s.serve.SpinFor = oneOf(rng, 0, 20*time.Microsecond)
		s.serve.MaxEntries = oneOf(rng, 33, 129)
		s.serve.HandshakeTimeout = 500 * time.Millisecond
		s.serve.StallTimeout = 500 * time.Millisecond
		s.attr = verbs.Attr{MaxQPWRs: oneOf(rng, 3, 12, 0), MaxInitiatorDepth: oneOf[uint8](rng, 1, 4, 16),
			MaxQPs: oneOf(rng, 12, 40, 0)}
		if rng.IntN(3) > 0 {
			s.listen = netip.AddrPortFrom(netip.IPv4Unspecified(), 4420)
		}
		s.wrap = c.tap.wrap
	})
	c.store = kvtest.NewStore()
	c.AddKV(kvNSID, c.store)
	c.strangers = c.net.NewProvider(memverbs.DeviceConfig{Addr: netip.MustParseAddr("10.0.0.3")})
	for i := range 3 {
		o := c.options()
		o.HostNQN = fmt.Sprintf("nqn.2026-11.example.jbofd:chaos%d", i)
		o.Queues, o.QueueDepth, o.BounceBytes = 1+i%2, oneOf(rng, 2, 16, 128), 4<<20
		o.KATO, o.CommandTimeout, o.ConnectTimeout = time.Second, time.Second, 2*time.Second
		o.ReconnectDelay, o.CtrlLossTimeout, o.MaxRetries = 10*time.Millisecond, time.Minute, 50
		h, err := client.Connect(t.Context(), o)
		if err != nil {
			t.Fatal(err)
		}
		c.hosts = append(c.hosts, h)
		for nsid := range uint32(2) {
			ns, err := h.Namespace(t.Context(), nsid+1)
			if err != nil {
				t.Fatal(err)
			}
			c.workers = append(c.workers, &chaosWorker{c: c, host: h, ns: ns, id: uint64(len(c.workers) + 1),
				base: int64(i) * chaosBlocks * blockBytes,
				rng:  rand.New(rand.NewPCG(seed, uint64(100+len(c.workers)))), latest: make([]uint64, chaosBlocks),
				acked: make([]uint64, chaosBlocks)})
		}
	}
	return c
}

// await waits until the workers have done n more operations, but only for a moment.
func (c *chaos) await(n int64) {
	until, end := c.done.Load()+n, time.After(30*time.Millisecond)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for c.done.Load() < until {
		select {
		case <-tick.C:
		case <-end:
			return
		}
	}
}

// fault injects a random fault.
func (c *chaos) fault() {
	all := c.net.Endpoints()
	if len(all) == 0 {
		return
	}
	e := all[c.rng.IntN(len(all))]
	what := ""
	switch n := c.rng.IntN(100); {
	case n < 20:
		what = "cut"
		e.Cut()
	case n < 35:
		what = "break"
		e.Break()
	case n < 38:
		what = "silence"
		e.Silence()
	case n < 50:
		what = "hold"
		e.Hold()
		c.held = append(c.held, e)
	case n < 65:
		what = "release"
		c.release()
	case n < 75:
		what = "no receive"
		e.DropToRNR(1 + c.rng.IntN(50))
	case n < 82:
		what = "standstill"
		c.net.Pause()
		c.await(1)
		c.net.Resume()
	case n < 88:
		what = "no queue pairs"
		c.limit(func(a *verbs.Attr) { a.MaxQPs = 1 })
	case n < 94:
		what = "no regions"
		c.limit(func(a *verbs.Attr) { a.MaxMRs = 1 })
	case n < 96:
		what = "slow partition"
		c.store.Hold()
		c.await(20)
		c.store.Release()
	case n < 98:
		what = "table"
		c.State.Subsystems[0].Model = fmt.Sprint("test", n)
		c.Service.Apply(c.State)
	default:
		what = "removal"
		c.removed = true
		c.target.RemoveDevice(c.target.Devices()[0])
		c.await(int64(c.rng.IntN(10)))
		c.target.AddDevice(c.device)
	}
	c.seen[what]++
}

func (c *chaos) release() {
	for _, e := range c.held {
		e.Release()
	}
	c.held = c.held[:0]
}

// limit changes the limits of the target's device for a moment.
func (c *chaos) limit(change func(*verbs.Attr)) {
	d := c.target.Devices()[0]
	before := d.Attr()
	d.SetAttr(change)
	c.await(20)
	d.SetAttr(func(a *verbs.Attr) { *a = before })
}

// calm ends all faults that last.
func (c *chaos) calm() {
	c.net.Resume()
	c.release()
}

// checkHosts waits until only the well-behaved hosts are connected, and then checks their data.
func (c *chaos) checkHosts() {
	want := 0
	for _, h := range c.hosts {
		want += 1 + h.Options().Queues
	}
	var wg sync.WaitGroup
	for _, w := range c.workers {
		wg.Go(func() { w.revive() })
	}
	wg.Wait()
	// Commands of a connection that the host has given up may be executed until the target has ended it, too.
	eventually(c.t, "the end of all other connections",
		func() bool { return len(c.Service.Conns()) == want && c.server.Stats().Held == 0 })
	for _, w := range c.workers {
		wg.Go(func() { w.check() })
	}
	wg.Wait()
}

// end stops hosts and server, in one of three orders.
func (c *chaos) end() {
	t := c.t
	closeHosts := func() {
		for _, h := range c.hosts {
			_ = h.Close() // a stopped target does not disconnect in order
		}
	}
	var wg sync.WaitGroup
	if order := c.rng.IntN(3); order > 0 {
		c.stop = make(chan struct{})
		for _, w := range c.workers {
			w.rng = rand.New(rand.NewPCG(uint64(order), w.id))
		}
		busy := c.startWorkers()
		c.await(200)
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		if order == 1 {
			c.server.Drain(ctx)
		} else {
			for range 5 {
				c.fault()
			}
		}
		cancel()
		wg.Go(c.server.Close)
		wg.Go(c.server.Close)
		wg.Wait()
		close(c.stop)
		c.calm()
		closeHosts()
		busy.Wait()
	} else {
		closeHosts()
		eventually(t, "the end of all connections",
			func() bool { return len(c.Service.Conns()) == 0 && c.target.Counts().QPs == 0 })
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		c.server.Drain(ctx)
		if ctx.Err() != nil {
			t.Error("without connections the server does not drain")
		}
		if got, want := c.tap.received.Load(), c.target.Stats().Recvs; !c.removed && uint64(got) != want {
			t.Errorf("the device has received %d messages, the server seen %d: %d receives are lost", want, got,
				int64(want)-got)
		}
	}
	c.server.Close()
	if got := c.strangers.Counts(); got != (verbs.Counts{}) {
		t.Errorf("the strangers leave %+v", got)
	}
}

// chaosBlocks is how many blocks a worker has.
const chaosBlocks = 512

// chaosWorker writes and reads blocks of its own, and a value.
type chaosWorker struct {
	c    *chaos
	host *client.Controller
	ns   *client.Namespace
	id   uint64
	base int64
	rng  *rand.Rand
	// latest is the newest version of each block that was written, acked the newest that was acknowledged.
	latest, acked []uint64
	// latestKV and ackedKV are the same for the value.
	latestKV, ackedKV uint64
}

func (c *chaos) startWorkers() *sync.WaitGroup {
	var wg sync.WaitGroup
	for _, w := range c.workers {
		wg.Go(func() {
			for !w.stopped() {
				w.step()
				c.done.Add(1)
			}
		})
	}
	return &wg
}

func (w *chaosWorker) stopped() bool {
	select {
	case <-w.c.stop:
		return true
	default:
		return false
	}
}

// step writes or reads a few blocks. It may fail.
func (w *chaosWorker) step() {
	if w.rng.IntN(4) == 0 {
		if w.rng.IntN(2) == 0 {
			_ = w.storeKV(oneOf(w.rng, 16, 1000, 8192, 8200, 70_000, 300_000))
		} else if v, err := w.retrieveKV(oneOf(w.rng, 16, 4096, 300_000)); err == nil &&
			(v > w.latestKV || v == 0 && w.ackedKV != 0) {
			w.c.t.Errorf("the value of worker %d has version %d, between 1 and %d were stored, %d is confirmed", w.id,
				v, w.latestKV, w.ackedKV)
		}
		return
	}
	n := oneOf(w.rng, 1, 1, 1, 2, 2, 3, 16, 64, 256)
	first := w.rng.IntN(chaosBlocks - n + 1)
	if w.rng.IntN(2) == 0 {
		_ = w.write(first, n)
		return
	}
	buf, err := w.read(first, n)
	if err != nil {
		return
	}
	for i := range n {
		b := first + i
		// A write of a lost connection may take effect after one of the next connection, so any version is valid.
		if v := w.version(buf[i*blockBytes:][:blockBytes], b); v > w.latest[b] || v == 0 && w.acked[b] != 0 {
			w.c.t.Errorf("block %d of worker %d has version %d, between 1 and %d were written, %d is confirmed", b,
				w.id, v, w.latest[b], w.acked[b])
		}
	}
}

// storeKV stores the next version of the worker's value, n bytes.
func (w *chaosWorker) storeKV(n int) error {
	w.latestKV++
	v := make([]byte, (n+7)&^7)
	w.fill(v, n>>3, w.latestKV)
	_, err := w.host.IOPassthru(context.Background(),
		kvtest.Command(nvme.CmdKVStore, kvNSID, fmt.Sprint("worker", w.id), len(v)), v)
	if err == nil {
		w.ackedKV = w.latestKV
	}
	return err
}

// retrieveKV returns the version of the worker's value, of which there is room for n bytes; 0: there is none.
func (w *chaosWorker) retrieveKV(n int) (version uint64, err error) {
	got := make([]byte, n)
	comp, err := w.host.IOPassthru(context.Background(),
		kvtest.Command(nvme.CmdKVRetrieve, kvNSID, fmt.Sprint("worker", w.id), n), got)
	if comp.Status.Code() == nvme.KeyDoesNotExist {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	version = binary.LittleEndian.Uint64(got) >> 32
	want := make([]byte, min(int(uint32(comp.Result)), n)&^7)
	w.fill(want, int(uint32(comp.Result))>>3, version)
	if !bytes.Equal(got[:len(want)], want) {
		w.c.t.Errorf("the value of worker %d is not of one piece", w.id)
	}
	return version, nil
}

func (w *chaosWorker) write(first, n int) error {
	buf := make([]byte, n*blockBytes)
	for i := range n {
		w.latest[first+i]++
		w.fill(buf[i*blockBytes:][:blockBytes], first+i, w.latest[first+i])
	}
	_, err := w.ns.WriteAt(context.Background(), buf, w.base+int64(first)*blockBytes, 0)
	if err != nil {
		return err
	}
	copy(w.acked[first:first+n], w.latest[first:])
	return nil
}

func (w *chaosWorker) read(first, n int) ([]byte, error) {
	buf := make([]byte, n*blockBytes)
	_, err := w.ns.ReadAt(context.Background(), buf, w.base+int64(first)*blockBytes)
	return buf, err
}

// revive repeats a write and a read until they succeed.
func (w *chaosWorker) revive() {
	deadline := time.Now().Add(30 * time.Second)
	for {
		_, err := w.read(0, chaosBlocks/2)
		if err = errors.Join(err, w.write(0, chaosBlocks/2)); err == nil {
			return
		}
		if time.Now().After(deadline) || errors.Is(err, client.ErrClosed) {
			w.c.t.Errorf("worker %d is not served again: %v", w.id, err)
			return
		}
	}
}

// check writes all blocks and a value, and reads them again.
func (w *chaosWorker) check() {
	if err := w.storeKV(100_000); err != nil {
		w.c.t.Errorf("worker %d: store: %v", w.id, err)
		return
	}
	if v, err := w.retrieveKV(100_000); err != nil || v != w.latestKV {
		w.c.t.Errorf("the value of worker %d has version %d, want %d: %v", w.id, v, w.latestKV, err)
	}
	for first := 0; first < chaosBlocks; first += 64 {
		if err := w.write(first, 64); err != nil {
			w.c.t.Errorf("worker %d: write: %v", w.id, err)
			return
		}
	}
	for first := 0; first < chaosBlocks; first += 128 {
		buf, err := w.read(first, 128)
		if err != nil {
			w.c.t.Errorf("worker %d: read: %v", w.id, err)
			return
		}
		for i := range 128 {
			if v := w.version(buf[i*blockBytes:][:blockBytes], first+i); v != w.latest[first+i] {
				w.c.t.Errorf("block %d of worker %d has version %d, want %d", first+i, w.id, v, w.latest[first+i])
			}
		}
	}
}

// fill makes the content of a block's version: each word is different.
func (w *chaosWorker) fill(b []byte, block int, version uint64) {
	for i := 0; i < len(b); i += 8 {
		binary.LittleEndian.PutUint64(b[i:], version<<32|uint64(block)<<16|w.id<<12|uint64(i/8))
	}
}

// version returns a block's version; 0 if it was never written. A torn block is an error.
func (w *chaosWorker) version(b []byte, block int) uint64 {
	v := binary.LittleEndian.Uint64(b) >> 32
	want := make([]byte, len(b))
	if v != 0 {
		w.fill(want, block, v)
	}
	if string(want) != string(b) {
		w.c.t.Errorf("block %d of worker %d is not what was written: % x", block, w.id, b[:32])
	}
	return v
}
