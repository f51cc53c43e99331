package e2e

import (
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/tcp/pdu"
	"jbofd/internal/units"
)

// timers are short time limits for the tests that check them.
const timers = "handshake_timeout: 500ms, stall_timeout: 700ms"

// TestASilentHostIsClosed: a host that sends nothing, or stops in the middle of a PDU or of a data transfer, is
// disconnected after its time limit, and its resources are released.
func TestASilentHostIsClosed(t *testing.T) {
	t.Parallel()
	s := oneMem
	s.limits = timers
	d := start(t, s)
	var none pdu.Format
	connected := func(frames func(h *rawHost)) func() *rawHost {
		return func() *rawHost {
			_, h := d.rawQueue(hostB, nqnA, 0, 32)
			frames(h)
			return h
		}
	}
	plain := func(b []byte) func() *rawHost {
		return func() *rawHost { h := d.raw(); h.send(b); return h }
	}
	write := rw(nvme.CmdWrite, 5, 0, 64)
	for _, c := range []struct {
		name string
		host func() *rawHost
	}{
		{"nothing", plain(nil)},
		{"half an ICReq", plain(icreq()[:100])},
		{"an ICReq only", plain(icreq()[:])},
		{"half a Connect", plain(append(icreq()[:], connectCapsule(none, login{host: hostA, sub: nqnA})[:500]...))},
		{"half a header", connected(func(h *rawHost) { h.send(h.capsule(write, nil, 32<<10)[:40]) })},
		{"half in-capsule data", connected(
			func(h *rawHost) { h.send(h.capsule(rw(nvme.CmdWrite, 5, 0, 8), make([]byte, 4096), 0)[:1000]) })},
		{"no data after an R2T", connected(func(h *rawHost) {
			h.send(h.capsule(write, nil, 32<<10))
			h.r2t()
		})},
		{"half the data after an R2T", connected(func(h *rawHost) {
			h.send(h.capsule(write, nil, 32<<10))
			h.send(h.frame(pdu.TypeH2CData, 0, h2cData(5, h.r2t(), 0, 16<<10), make([]byte, 16<<10)))
		})},
		{"half an H2CData", connected(func(h *rawHost) {
			h.send(h.capsule(write, nil, 32<<10))
			h.send(h.frame(pdu.TypeH2CData, 0, h2cData(5, h.r2t(), 0, 32<<10), make([]byte, 32<<10))[:20000])
		})},
		{"no data for one half of a fused pair", connected(func(h *rawHost) {
			first, second := rw(nvme.CmdCompare, 6, 0, 64), rw(nvme.CmdWrite, 7, 0, 64)
			first.SetFuse(nvme.FuseFirst)
			second.SetFuse(nvme.FuseSecond)
			h.send(h.capsule(first, nil, 32<<10), h.capsule(second, nil, 32<<10))
			h.send(h.frame(pdu.TypeH2CData, pdu.FlagLast, h2cData(6, h.r2t(), 0, 32<<10), make([]byte, 32<<10)))
		})},
	} {
		t.Run(strings.ReplaceAll(c.name, " ", "-"), func(t *testing.T) {
			t.Parallel()
			began := time.Now()
			h := c.host()
			h.t = t
			h.ended()
			if took := time.Since(began); took < 400*time.Millisecond || took > 5*time.Second {
				t.Errorf("closed after %v, want somewhat more than its timeout of 0.5 or 0.7 s", took)
			}
		})
	}
}

// TestAnIdleQueueIsNotStalled: stall_timeout applies only in the middle of a PDU or of a transfer.
func TestAnIdleQueueIsNotStalled(t *testing.T) {
	t.Parallel()
	s := oneMem
	s.limits = timers
	d := start(t, s)
	_, h := d.rawQueue(hostB, nqnA, 0, 32)
	_ = h.c.SetReadDeadline(time.Now().Add(2 * time.Second))
	if n, err := h.c.Read(h.in[:]); n != 0 || !isTimeout(err) {
		t.Fatalf("an idle queue pair got %d bytes, %v", n, err)
	}
	if c := h.do(rw(nvme.CmdFlush, 1, 0, 1)); !c.Status().OK() {
		t.Error(c.Status())
	}
}

func isTimeout(err error) bool {
	ne, ok := err.(net.Error)
	return ok && ne.Timeout()
}

// TestAHostThatStopsReadingDoesNotHarmOthers: the host is disconnected after stall_timeout and until then holds no more
// memory than its share. Another host continues its I/O.
func TestAHostThatStopsReadingDoesNotHarmOthers(t *testing.T) {
	t.Parallel()
	s := oneMem
	s.limits = "stall_timeout: 1500ms, buffers: 8MiB"
	d := start(t, s)
	good := startVictim(t, d, d.options(hostA, nqnA), 4)
	good.progress(20) // it runs
	_, h := d.rawQueue(hostB, nqnA, 0, 128)
	var reads []byte
	for i := range 127 {
		reads = append(reads, h.capsule(rw(nvme.CmdRead, uint16(i), 0, 2048), nil, 1<<20)...)
	}
	began := time.Now()
	h.send(reads)
	peak := 0.0
	eventually(t, "the host that does not read is cut off", func() bool {
		peak = max(peak, d.metric("jbof_buffer_pool_bytes", "state", "used"))
		return len(d.log.find("did not read")) > 0 || d.metric("jbof_connections") <= 3
	})
	if took := time.Since(began); took < time.Second || took > 10*time.Second {
		t.Errorf("cut off after %v, stall_timeout is 1.5 s", took)
	}
	if peak > 8<<20 {
		t.Errorf("%.0f bytes of buffers in use, limits.buffers is 8 MiB", peak)
	}
	good.progress(20)
	h.close()
	good.stop()
}

// TestAHostThatHoardsBuffersDoesNotHarmOthers: a host submits writes on many queues and never sends their data. It gets
// no more than its share of the buffers. Another host continues its I/O until the first one is disconnected.
func TestAHostThatHoardsBuffersDoesNotHarmOthers(t *testing.T) {
	t.Parallel()
	s := oneMem
	s.limits = "stall_timeout: 2s, buffers: 8MiB"
	d := start(t, s)
	good := startVictim(t, d, d.options(hostA, nqnA), 2)
	good.progress(20)
	good.p99()
	admin := d.raw()
	admin.initialize(false)
	cntlid := admin.admin(login{host: hostB, sub: nqnA})
	queues := make([]*rawHost, 2)
	for i := range queues {
		h := d.raw()
		h.initialize(false)
		if c := h.connect(login{host: hostB, sub: nqnA, qid: uint16(i + 1), cntlid: cntlid,
			entries: 64}); !c.Status().OK() {
			t.Fatal(c.Status())
		}
		var p []byte
		for k := range 60 {
			p = append(p, h.capsule(rw(nvme.CmdWrite, uint16(k), 0, 2048), nil, 1<<20)...)
		}
		h.send(p)
		queues[i] = h
	}
	eventually(t, "the hoarder has buffers",
		func() bool { return d.metric("jbof_buffer_pool_bytes", "state", "used") >= 1<<20 })
	for n := 0; n < 5; n++ {
		good.progress(20)
		if used := d.metric("jbof_buffer_pool_bytes", "state", "used"); used > 8<<20 {
			t.Errorf("%.0f bytes of buffers in use, limits.buffers is 8 MiB", used)
		}
	}
	for _, h := range queues {
		h.ended()
	}
	if worst := good.p99(); worst > time.Second {
		t.Errorf("p99 of the other host beside the hoarder: %v", worst)
	}
	good.progress(20)
	good.stop()
}

// TestAConnectStormLeavesNothing: a thousand hosts connect and leave, with and without a shutdown.
func TestAConnectStormLeavesNothing(t *testing.T) {
	t.Parallel()
	d := start(t, oneMem)
	var wg sync.WaitGroup
	var n atomic.Int32
	for w := range 8 {
		wg.Go(func() {
			for {
				i := n.Add(1)
				if i > 1000 {
					return
				}
				if i%5 == 0 {
					o := d.options(fmt.Sprintf("%s-%d", hostB, w), nqnA)
					c, err := client.Connect(ctx(t), o)
					if err != nil {
						t.Errorf("connection %d: %v", i, err)
						return
					}
					if err := c.Close(); err != nil {
						t.Logf("connection %d: %v", i, err)
					}
					continue
				}
				h, err := dialRaw(t, d.addr)
				if err != nil {
					t.Error(err)
					return
				}
				switch i % 5 {
				case 2:
					h.send(icreq()[:])
				case 3:
					h.send(icreq()[:], connectCapsule(pdu.Format{}, login{host: hostA, sub: nqnA}))
				case 4:
					h.send(icreq()[:], connectCapsule(pdu.Format{}, login{host: hostA, sub: nqnA}))
					_, _ = h.next()
					_, _ = h.next()
				}
				h.close()
			}
		})
	}
	wg.Wait()
	n1 := d.namespace(d.options(hostA, nqnA), 1)
	if _, err := n1.ReadAt(ctx(t), make([]byte, 4096), 0); err != nil {
		t.Error(err)
	}
}

// TestHostsThatVanishWithCommandsUnderWayLeaveNothing, whatever the commands wait for: the drive, memory, their data,
// the other half of a fused pair, or a host that reads the responses.
func TestHostsThatVanishWithCommandsUnderWayLeaveNothing(t *testing.T) {
	t.Parallel()
	rng := random(t)
	d := start(t, setup{
		ssds: `  - {name: ssd0, backend: file, path: "@DIR@/ssd0.img", size: 64MiB, create: true,
      fault: {delay: 5ms, delay_probability: 0.5}}
`,
		subsystems: strings.Replace(openSubsystem, "64MiB", "32MiB", 1) + hostileSubsystem,
		limits:     "buffers: 8MiB",
	})
	d.laneBytes = 4 * 128 << 10
	good := startVictim(t, d, d.options(hostA, nqnA), 1)
	var wg sync.WaitGroup
	for w := range 3 {
		luck := rand.New(rand.NewPCG(rng.Uint64(), uint64(w)))
		wg.Go(func() {
			for range 60 {
				vanish(t, d, luck, fmt.Sprintf("%s-%d", hostB, w))
			}
		})
	}
	wg.Wait()
	good.progress(50)
	good.stop()
}

// vanish connects a host, sends commands of all kinds, answers some R2Ts, and closes.
func vanish(t *testing.T, d *daemon, rng *rand.Rand, host string) {
	admin, err := dialRaw(t, d.addr)
	if err != nil {
		t.Error(err)
		return
	}
	defer admin.close()
	c, err := exchange(admin, icreq()[:],
		connectCapsule(pdu.Format{}, login{host: host, sub: nqnHostile, katoMS: 1000}))
	if err == nil {
		_, err = exchange(admin, capsule(pdu.Format{}, propertySet(nvme.PropCC, enable, 1), nil, 0))
	}
	if err != nil {
		t.Errorf("connecting: %v", err)
		return
	}
	h, err := dialRaw(t, d.addr)
	if err != nil {
		t.Error(err)
		return
	}
	defer h.close()
	if _, err := exchange(h, icreq()[:], connectCapsule(pdu.Format{},
		login{host: host, sub: nqnHostile, qid: 1, cntlid: c.ConnectCNTLID(), entries: 128})); err != nil {
		t.Errorf("connecting: %v", err)
		return
	}
	var out []byte
	for i := range uint16(1 + rng.IntN(100)) {
		nlb := units.Blocks(1 + rng.IntN(2048))
		at := units.LBA(rng.Uint64N(30 << 10))
		switch rng.IntN(8) {
		case 0, 1:
			out = append(out, h.capsule(rw(nvme.CmdRead, i, at, nlb), nil, int(nlb)*512)...)
		case 2, 3:
			out = append(out, h.capsule(rw(nvme.CmdWrite, i, at, nlb), nil, int(nlb)*512)...)
		case 4:
			out = append(out, h.capsule(rw(nvme.CmdWrite, i, at, 8), make([]byte, 4096), 0)...)
		case 5:
			out = append(out, h.capsule(rw(nvme.CmdCompare, i, at, 64), nil, 64*512)...)
		case 6:
			out = append(out, h.capsule(rw(nvme.CmdVerify, i, at, 1024), nil, 0)...)
		case 7:
			first, second := rw(nvme.CmdCompare, i, at, 8), rw(nvme.CmdWrite, i|0x8000, at, 8)
			first.SetFuse(nvme.FuseFirst)
			second.SetFuse(nvme.FuseSecond)
			out = append(out, h.capsule(first, make([]byte, 4096), 0)...)
			if rng.IntN(2) == 0 {
				out = append(out, h.capsule(second, nil, 4096)...)
			}
		}
	}
	h.send(out)
	// Read a part of the PDUs. Answer some R2Ts, one of them only in part.
	for range rng.IntN(30) {
		_ = h.c.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
		if _, err := io.ReadFull(h.c, h.in[:pdu.CommonLen]); err != nil {
			break
		}
		n := int((*pdu.Common)(h.in[:]).PLEN())
		if (*pdu.Common)(h.in[:]).Type() != pdu.TypeR2T {
			if _, err := io.CopyN(io.Discard, h.c, int64(n-pdu.CommonLen)); err != nil {
				break
			}
			continue
		}
		if _, err := io.ReadFull(h.c, h.in[pdu.CommonLen:n]); err != nil {
			break
		}
		r := (*pdu.Data)(h.in[:])
		p := h.frame(pdu.TypeH2CData, pdu.FlagLast, h2cData(r.CCCID(), r.TTAG(), r.Offset(), r.Length()),
			make([]byte, r.Length()))
		if rng.IntN(10) == 0 {
			h.send(p[:len(p)/2])
			break
		}
		h.send(p)
	}
}

// victim is a well-behaved host that writes, reads and verifies.
type victim struct {
	t    testing.TB
	done chan struct{}
	wg   sync.WaitGroup
	ops  atomic.Int64
	mu   sync.Mutex
	lat  []time.Duration
}

// startVictim starts workers that each write, read and compare in their own part of namespace 1.
func startVictim(t testing.TB, d *daemon, o client.Options, workers int) *victim {
	t.Helper()
	n := d.namespace(o, 1)
	v := &victim{t: t, done: make(chan struct{})}
	part := n.Size() / int64(workers) &^ (1<<20 - 1)
	for w := range workers {
		v.wg.Go(func() {
			rng := rand.New(rand.NewPCG(*seed, uint64(w)))
			for generation := uint64(1); ; generation++ {
				select {
				case <-v.done:
					return
				default:
				}
				size := 512 << rng.IntN(6)
				off := int64(w)*part + rng.Int64N((part-int64(size))/512)*512
				p, q := make([]byte, size), make([]byte, size)
				fill(p, off, generation)
				began := time.Now()
				if _, err := n.WriteAt(ctx(t), p, off, 0); err != nil {
					t.Errorf("the well-behaved host: %v", err)
					return
				}
				between := time.Now()
				if _, err := n.ReadAt(ctx(t), q, off); err != nil {
					t.Errorf("the well-behaved host: %v", err)
					return
				}
				if !bytes.Equal(p, q) {
					t.Errorf("the well-behaved host read something else than it wrote at %d", off)
					return
				}
				v.ops.Add(2)
				v.mu.Lock()
				v.lat = append(v.lat, between.Sub(began), time.Since(between))
				v.mu.Unlock()
			}
		})
	}
	t.Cleanup(v.stop)
	return v
}

// progress waits for n further operations.
func (v *victim) progress(n int64) {
	v.t.Helper()
	goal := v.ops.Load() + n
	eventually(v.t, fmt.Sprintf("the well-behaved host has done %d operations more", n),
		func() bool { return v.ops.Load() >= goal || v.t.Failed() })
}

// p99 returns the 99th percentile of the latencies since the previous call.
func (v *victim) p99() time.Duration {
	v.mu.Lock()
	lat := v.lat
	v.lat = nil
	v.mu.Unlock()
	if len(lat) == 0 {
		return 0
	}
	slices.Sort(lat)
	return lat[len(lat)*99/100]
}

// stop stops the host. Idempotent.
func (v *victim) stop() {
	select {
	case <-v.done:
	default:
		close(v.done)
	}
	v.wg.Wait()
}

// mutants is the number of mutated PDUs that TestAMillionMutatedPDUs sends.
const mutants = 1_000_000

// nqnHostile is a separate subsystem, so that the writes of mutated commands destroy no data of other tests.
const (
	nqnHostile       = "nqn.2026-11.example.jbofd:the-place-for-hostile-hosts"
	hostileSubsystem = "  - nqn: " + nqnHostile + "\n    allow_any_host: true\n    namespaces:\n      - {nsid: 1, " +
		"ssd: ssd0, size: 16MiB, block_size: 512}\n"
)
