package e2e

import (
	"bytes"
	"encoding/binary"
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
)

// reasons are the metric's words for fatal error statuses.
var reasons = map[pdu.FES]string{
	pdu.InvalidHeaderField: "header_field", pdu.SequenceError: "sequence", pdu.HeaderDigestError: "header_digest",
	pdu.DataTransferOutOfRange: "data_out_of_range", pdu.R2TLimitExceeded: "transfer_limit", pdu.UnsupportedParameter: "unsupported_parameter",
}

// TestAProtocolViolationIsAnsweredByTheRightTermReq: fatal error status and offset as the
// specification names them, then the connection is closed, counted and logged.
//
// Source: NVMe/TCP Transport 1.0, sections 3.5 and 3.6.2.
func TestAProtocolViolationIsAnsweredByTheRightTermReq(t *testing.T) {
	t.Parallel()
	s := oneMem
	s.log = "level: info, peer_lines_per_sec: 10000"
	d := start(t, s)
	const digestFEI = 0xffffffff // whatever digest was sent
	patch := func(p []byte, at int, v ...byte) []byte {
		p = bytes.Clone(p)
		copy(p[at:], v)
		return p
	}
	var none pdu.Format
	keepAlive := func() (e nvme.SQE) { e.SetOpcode(nvme.AdminKeepAlive); return e }()
	small := make([]byte, 512)
	for _, c := range []struct {
		name string
		// ic: after ICReq and ICResp. io: on a connected I/O queue. Otherwise as the first PDU.
		ic, io, digests bool
		frame           func(h *rawHost) []byte
		fes             pdu.FES
		fei             uint32
	}{
		{name: "command before ICReq", frame: func(*rawHost) []byte { return connectCapsule(none, login{host: hostA, sub: nqnA}) }, fes: pdu.SequenceError},
		{name: "second ICReq", ic: true, frame: func(*rawHost) []byte { return icreq()[:] }, fes: pdu.SequenceError},
		{name: "PFV", frame: func(*rawHost) []byte { return patch(icreq()[:], 8, 1) }, fes: pdu.UnsupportedParameter, fei: 8},
		{name: "HPDA", frame: func(*rawHost) []byte { return patch(icreq()[:], 10, 32) }, fes: pdu.InvalidHeaderField, fei: 10},
		{name: "HLEN of the ICReq", frame: func(*rawHost) []byte { return patch(icreq()[:], 2, 64) }, fes: pdu.InvalidHeaderField, fei: 2},
		{name: "PLEN of the ICReq", frame: func(*rawHost) []byte { return patch(icreq()[:], 4, 0, 1) }, fes: pdu.InvalidHeaderField, fei: 4},
		{name: "unknown type", io: true, frame: func(h *rawHost) []byte { return h.frame(0x0f, 0, make([]byte, 16), nil) }, fes: pdu.InvalidHeaderField},
		{name: "a controller's type", io: true, frame: func(h *rawHost) []byte { return h.frame(pdu.TypeCapsuleResp, 0, make([]byte, 16), nil) }, fes: pdu.InvalidHeaderField},
		{name: "HLEN", io: true, frame: func(h *rawHost) []byte { return patch(h.capsule(keepAlive, nil, 0), 2, 73) }, fes: pdu.InvalidHeaderField, fei: 2},
		{name: "PDO", io: true, frame: func(h *rawHost) []byte { return patch(h.capsule(rw(nvme.CmdWrite, 9, 0, 1), small, 0), 3, 70) }, fes: pdu.InvalidHeaderField, fei: 3},
		{name: "PLEN less than the header", io: true, frame: func(h *rawHost) []byte { return patch(h.capsule(keepAlive, nil, 0), 4, 8) }, fes: pdu.InvalidHeaderField, fei: 4},
		{name: "a PDU of 4 GiB", io: true, frame: func(h *rawHost) []byte {
			return patch(h.capsule(rw(nvme.CmdWrite, 9, 0, 1), small, 0), 4, 0xff, 0xff, 0xff, 0xff)
		}, fes: pdu.InvalidHeaderField, fei: 4},
		{name: "H2CData that nobody asked for", io: true, frame: func(h *rawHost) []byte {
			return h.frame(pdu.TypeH2CData, pdu.FlagLast, h2cData(1, 77, 0, 512), small)
		}, fes: pdu.InvalidHeaderField, fei: 10},
		{name: "H2CData for another command", io: true, frame: func(h *rawHost) []byte {
			h.send(h.capsule(rw(nvme.CmdWrite, 5, 0, 32), nil, 32*512))
			return h.frame(pdu.TypeH2CData, pdu.FlagLast, h2cData(6, h.r2t(), 0, 512), small)
		}, fes: pdu.InvalidHeaderField, fei: 8},
		{name: "H2CData out of its range", io: true, frame: func(h *rawHost) []byte {
			h.send(h.capsule(rw(nvme.CmdWrite, 5, 0, 32), nil, 32*512))
			return h.frame(pdu.TypeH2CData, pdu.FlagLast, h2cData(5, h.r2t(), 32*512, 512), small)
		}, fes: pdu.DataTransferOutOfRange},
		{name: "H2CData out of order", io: true, frame: func(h *rawHost) []byte {
			h.send(h.capsule(rw(nvme.CmdWrite, 5, 0, 32), nil, 32*512))
			return h.frame(pdu.TypeH2CData, 0, h2cData(5, h.r2t(), 512, 512), small)
		}, fes: pdu.DataTransferOutOfRange},
		{name: "more H2CData than MAXH2CDATA", io: true, frame: func(h *rawHost) []byte {
			h.send(h.capsule(rw(nvme.CmdWrite, 5, 0, 32), nil, 32*512))
			n := h.maxH2C + 4
			return h.frame(pdu.TypeH2CData, pdu.FlagLast, h2cData(5, h.r2t(), 0, n), make([]byte, n))
		}, fes: pdu.R2TLimitExceeded},
		{name: "more data in the capsule than announced", io: true, frame: func(h *rawHost) []byte {
			return h.capsule(rw(nvme.CmdWrite, 5, 0, 64), make([]byte, 32<<10), 0)
		}, fes: pdu.InvalidHeaderField, fei: 4},
		{name: "header digest", ic: true, digests: true, frame: func(h *rawHost) []byte {
			p := connectCapsule(h.format, login{host: hostA, sub: nqnA})
			p[pdu.CapsuleCmdLen]++
			return p
		}, fes: pdu.HeaderDigestError, fei: digestFEI},
		{name: "no header digest though agreed on", ic: true, digests: true, frame: func(*rawHost) []byte {
			return connectCapsule(none, login{host: hostA, sub: nqnA})
		}, fes: pdu.InvalidHeaderField, fei: 1},
	} {
		t.Run(strings.ReplaceAll(c.name, " ", "-"), func(t *testing.T) {
			d := *d
			d.t = t
			before := d.metric("jbof_protocol_errors_total", "reason", reasons[c.fes])
			lines := len(d.log.find("protocol error", "fes"))
			var h *rawHost
			switch {
			case c.io:
				_, h = d.rawQueue(hostB, nqnA, 0, 32)
			default:
				h = d.raw()
				if c.ic {
					h.initialize(c.digests)
				}
			}
			h.send(c.frame(h))
			term := h.ended()
			h.close()
			switch {
			case term == nil:
				t.Fatal("closed without a TermReq")
			case term.FES() != c.fes:
				t.Errorf("FES %v, want %v", term.FES(), c.fes)
			case c.fei == digestFEI:
			case term.FEI() != c.fei:
				t.Errorf("FEI %#x, want %#x", term.FEI(), c.fei)
			}
			eventually(t, "the violation is counted and logged", func() bool {
				return d.metric("jbof_protocol_errors_total", "reason", reasons[c.fes]) == before+1 && len(d.log.find("protocol error", "fes")) == lines+1
			})
		})
	}
}

// TestAHostsTermReqIsNotAnswered: it ends the connection and is counted.
func TestAHostsTermReqIsNotAnswered(t *testing.T) {
	t.Parallel()
	d := start(t, oneMem)
	h := d.raw()
	h.initialize(false)
	h.send(pdu.AppendTerm(nil, pdu.TypeH2CTermReq, &pdu.FatalError{FES: pdu.DataTransferOutOfRange}, nil))
	term := h.ended()
	h.close()
	if term != nil {
		t.Errorf("answered with a TermReq, %v", term.FES())
	}
	eventually(t, "it is counted", func() bool { return d.metric("jbof_protocol_errors_total", "reason", "reported_by_host") == 1 })
}

// TestACommandOnTheHeelsOfConnectEndsTheConnection: the queue is not one until Connect has succeeded.
func TestACommandOnTheHeelsOfConnectEndsTheConnection(t *testing.T) {
	t.Parallel()
	d := start(t, oneMem)
	h := d.raw()
	h.initialize(false)
	h.send(connectCapsule(h.format, login{host: hostA, sub: nqnA}), h.capsule(propertySet(nvme.PropCC, enable, 1), nil, 0))
	term := h.ended()
	h.close()
	if term == nil || term.FES() != pdu.SequenceError {
		t.Errorf("ended with %x, want a PDU sequence error", term)
	}
	d.namespace(d.options(hostA, nqnA), 1)
}

// TestCommandsBeforeConnectFail with a status, and the connection stays.
func TestCommandsBeforeConnectFail(t *testing.T) {
	t.Parallel()
	d := start(t, oneMem)
	h := d.raw()
	h.initialize(false)
	if c := h.do(rw(nvme.CmdFlush, 3, 0, 1)); c.Status().Code() != nvme.CommandSequenceError || !c.Status().DNR() || c.CID() != 3 {
		t.Errorf("Flush before Connect: %v for command %d", c.Status(), c.CID())
	}
	if c := h.connect(login{host: hostA, sub: nqnA, cid: 4}); !c.Status().OK() {
		t.Errorf("Connect thereafter: %v", c.Status())
	}
}

// timers are short, for tests of what they bound.
const timers = "handshake_timeout: 500ms, stall_timeout: 700ms"

// TestASilentHostIsClosed: whoever says nothing, or stops in the middle of a PDU or of a data
// transfer, is closed when its time is over, and its resources are free.
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
		{"half in-capsule data", connected(func(h *rawHost) { h.send(h.capsule(rw(nvme.CmdWrite, 5, 0, 8), make([]byte, 4096), 0)[:1000]) })},
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

// TestAnIdleQueueIsNotStalled: stall_timeout is for hosts in the middle of something.
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

// TestAHostThatStopsReadingHarmsNobodyElse: it is cut off after stall_timeout, it holds no more memory
// than its share meanwhile, and another host works on.
func TestAHostThatStopsReadingHarmsNobodyElse(t *testing.T) {
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

// TestAHostThatHoardsBuffersHarmsNobodyElse: it asks for writes on many queues and never sends their data. All
// it gets is its share; another host works on, until the hoarder is closed.
func TestAHostThatHoardsBuffersHarmsNobodyElse(t *testing.T) {
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
		if c := h.connect(login{host: hostB, sub: nqnA, qid: uint16(i + 1), cntlid: cntlid, entries: 64}); !c.Status().OK() {
			t.Fatal(c.Status())
		}
		var p []byte
		for k := range 60 {
			p = append(p, h.capsule(rw(nvme.CmdWrite, uint16(k), 0, 2048), nil, 1<<20)...)
		}
		h.send(p)
		queues[i] = h
	}
	eventually(t, "the hoarder has buffers", func() bool { return d.metric("jbof_buffer_pool_bytes", "state", "used") >= 1<<20 })
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

// TestConnectionsAreLimited in total and per host; who is turned away is told or closed, and counted.
func TestConnectionsAreLimited(t *testing.T) {
	t.Parallel()
	s := oneMem
	s.limits = "connections: 8, connections_per_host: 4"
	d := start(t, s)

	o := d.options(hostA, nqnA)
	o.Queues = 3
	d.connect(o) // 4 connections
	o.Queues, o.CtrlLossTimeout = 1, -1
	if c, err := client.Connect(ctx(t), o); err == nil {
		t.Error("a fifth connection of one host was accepted")
		_ = c.Close()
	}
	eventually(t, "the refusal is counted", func() bool { return d.metric("jbof_connect_failures_total", "reason", "host_connections") >= 1 })

	var hosts []*rawHost
	for range 4 {
		h := d.raw()
		h.initialize(false)
		hosts = append(hosts, h)
	}
	h := d.raw()
	h.send(icreq()[:])
	term := h.ended()
	h.close()
	if term != nil {
		t.Error("a TermReq")
	}
	if n := d.metric("jbof_connections_refused_total", "reason", "connections"); n != 1 {
		t.Errorf("%v refused connections are counted, want 1", n)
	}
	for _, h := range hosts {
		h.close()
	}
	eventually(t, "the others are gone", func() bool { return d.metric("jbof_connections") == 4 })
	o.HostNQN = hostB
	d.connect(o)
}

// TestAConnectStormLeavesNothing: a thousand hosts come and go, in order or not.
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
// the other half of their pair, or that somebody reads the answers.
func TestHostsThatVanishWithCommandsUnderWayLeaveNothing(t *testing.T) {
	t.Parallel()
	rng := random(t)
	d := start(t, setup{ssds: `  - {name: ssd0, backend: file, path: "@DIR@/ssd0.img", size: 64MiB, create: true, fault: {delay: 5ms, delay_probability: 0.5}}
`, subsystems: strings.Replace(openSubsystem, "64MiB", "32MiB", 1) + hostileSubsystem, limits: "buffers: 8MiB"})
	d.laneBytes, d.workers = 4*128<<10, 8
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
	c, err := exchange(admin, icreq()[:], connectCapsule(pdu.Format{}, login{host: host, sub: nqnHostile, katoMS: 1000}))
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
	if _, err := exchange(h, icreq()[:], connectCapsule(pdu.Format{}, login{host: host, sub: nqnHostile, qid: 1, cntlid: c.ConnectCNTLID(), entries: 128})); err != nil {
		t.Errorf("connecting: %v", err)
		return
	}
	var out []byte
	for i := range uint16(1 + rng.IntN(100)) {
		nlb := uint32(1 + rng.IntN(2048))
		at := rng.Uint64N(30 << 10)
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
	// Part of what comes is read; some R2Ts are answered, one of them by half.
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
		p := h.frame(pdu.TypeH2CData, pdu.FlagLast, h2cData(r.CCCID(), r.TTAG(), r.Offset(), r.Length()), make([]byte, r.Length()))
		if rng.IntN(10) == 0 {
			h.send(p[:len(p)/2])
			break
		}
		h.send(p)
	}
}

// victim is a well-behaved host at work: writes and reads with verification.
type victim struct {
	t    testing.TB
	done chan struct{}
	wg   sync.WaitGroup
	ops  atomic.Int64
	mu   sync.Mutex
	lat  []time.Duration
}

// startVictim runs workers that each write, read and compare in a part of namespace 1.
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

// progress waits for so many further operations.
func (v *victim) progress(n int64) {
	v.t.Helper()
	goal := v.ops.Load() + n
	eventually(v.t, fmt.Sprintf("the well-behaved host has done %d operations more", n), func() bool { return v.ops.Load() >= goal || v.t.Failed() })
}

// p99 returns the 99th percentile since the last call.
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

// stop ends the host's work. Idempotent.
func (v *victim) stop() {
	select {
	case <-v.done:
	default:
		close(v.done)
	}
	v.wg.Wait()
}

// mutants is how many mutated PDUs TestAMillionMutatedPDUs sends.
const mutants = 1_000_000

// nqnHostile is a subsystem of its own: what mutated commands write is nobody's loss.
const (
	nqnHostile       = "nqn.2026-11.example.jbofd:the-place-for-hostile-hosts"
	hostileSubsystem = "  - nqn: " + nqnHostile + "\n    allow_any_host: true\n    namespaces:\n      - {nsid: 1, ssd: ssd0, size: 16MiB, block_size: 512}\n"
)

// TestAMillionMutatedPDUs does the live daemon no harm, and a well-behaved host sees no error and
// no delay to speak of. Golden frames are mutated a bit, a byte, a field or a length at a time,
// truncated, doubled, swapped and cut, on connections in every phase: before ICReq, before Connect,
// admin queue, I/O queue, with and without digests.
func TestAMillionMutatedPDUs(t *testing.T) {
	rng := random(t)
	s := oneMem
	s.ssds = "  - {name: ssd0, backend: mem, size: 256MiB}\n"
	s.subsystems += hostileSubsystem
	s.limits = "handshake_timeout: 1s, stall_timeout: 1s"
	d := start(t, s)
	d.laneBytes = 4 * 128 << 10 // Compare and Verify among the mutants
	good := startVictim(t, d, d.options(hostA, nqnA), 2)
	good.progress(2000)
	calm := good.p99()

	total := int64(mutants)
	if raceEnabled {
		total /= 2
	}
	began := time.Now()
	var sent, closed atomic.Int64
	var wg sync.WaitGroup
	for w := range 3 {
		luck := rand.New(rand.NewPCG(rng.Uint64(), uint64(w)))
		wg.Go(func() {
			for sent.Load() < total && !t.Failed() {
				n, ended := attack(d, luck, w)
				sent.Add(int64(n))
				if ended {
					closed.Add(1)
				}
			}
		})
	}
	wg.Wait()
	took := time.Since(began)
	busy := good.p99()
	good.progress(100)
	good.stop()
	t.Logf("%d mutated PDUs in %v; the daemon closed %d connections; the other host's p99 %v, before %v", sent.Load(), took, closed.Load(), busy, calm)
	if limit := 100*time.Millisecond + 20*calm; busy > limit {
		t.Errorf("the other host's p99 is %v, before the attack it was %v", busy, calm)
	}
	if closed.Load() < 100 {
		t.Errorf("only %d connections were closed by the daemon: the mutants are too tame", closed.Load())
	}
	if n := d.metric("jbof_protocol_errors_total"); n < float64(closed.Load())/4 {
		t.Errorf("%v protocol errors are counted, %d connections were closed", n, closed.Load())
	}
	// 5 lines a second for each of a dozen kinds of message.
	if lines, limit := strings.Count(d.log.String(), "\n"), int(took.Seconds()+2)*5*12+50; lines > limit {
		t.Errorf("%d lines in the log after %v, want at most %d", lines, took, limit)
	}
	if d.metric("jbof_log_messages_dropped_total") == 0 {
		t.Error("no log messages were suppressed")
	}
}

// attack opens a connection in some phase, sends a stream of mutants, and returns how many the daemon
// took before it closed the connection, if it did. What it could not know of is not counted.
func attack(d *daemon, rng *rand.Rand, worker int) (n int, closed bool) {
	me := login{host: fmt.Sprintf("%s-%d", hostB, worker), sub: nqnHostile}
	var f pdu.Format
	if rng.IntN(4) == 0 {
		f = pdu.Format{HeaderDigest: true, DataDigest: true}
	}
	ic := icreq()
	if f.HeaderDigest {
		ic.SetDGST(3)
	}
	connect := connectCapsule(f, me)
	phase := rng.IntN(12)
	switch phase {
	case 0: // before ICReq
		return shoot(d, nil, func(int) []byte { return mutateHard(rng, ic[:]) }, 1+rng.IntN(3))
	case 1: // before Connect
		return shoot(d, ic[:], func(int) []byte { return mutateHard(rng, connect) }, 1+rng.IntN(3))
	}
	cc := capsule(f, propertySet(nvme.PropCC, enable, 1), nil, 0)
	if phase < 6 { // admin queue
		frames := adminFrames(f)
		return shootAfter(d, stream(rng, f, frames), 200, ic[:], connect, cc)
	}
	// An I/O queue needs an association.
	if rng.IntN(20) == 0 { // impatient: what follows Connect at once ends the connection
		return shoot(d, slices.Concat(ic[:], connect), func(int) []byte { return cc }, 1)
	}
	admin, err := dialRaw(d.t, d.addr)
	if err != nil {
		d.t.Error(err)
		return 0, false
	}
	defer admin.close()
	p, err := exchange(admin, ic[:], connect)
	if err != nil {
		d.t.Errorf("Connect: %v", err)
		return 0, false
	}
	me.cntlid, me.qid, me.entries = p.ConnectCNTLID(), 1, 64
	if _, err := exchange(admin, cc); err != nil {
		d.t.Errorf("enabling: %v", err)
		return 0, false
	}
	return shootAfter(d, stream(rng, f, ioFrames(f)), 200, ic[:], connectCapsule(f, me))
}

// exchange sends PDUs, each after the answer to the one before, and returns the last one's completion,
// which must be a good one.
func exchange(h *rawHost, pdus ...[]byte) (last nvme.CQE, err error) {
	for _, p := range pdus {
		h.send(p)
		q, err := h.next()
		if err != nil {
			return last, err
		}
		if (*pdu.Common)(q).Type() == pdu.TypeCapsuleResp {
			if last = *(*pdu.CapsuleResp)(q).CQE(); !last.Status().OK() {
				return last, fmt.Errorf("status %v", last.Status())
			}
		}
	}
	return last, nil
}

// adminFrames and ioFrames are the golden frames of the mutants.
func adminFrames(f pdu.Format) (all [][]byte) {
	for i, op := range []uint8{nvme.AdminKeepAlive, nvme.AdminIdentify, nvme.AdminGetLogPage, nvme.AdminGetFeatures, nvme.AdminSetFeatures, nvme.AdminAbort, nvme.AdminAsyncEvent} {
		var e nvme.SQE
		e.SetOpcode(op)
		e.SetCID(uint16(i + 10))
		n := 0
		switch op {
		case nvme.AdminIdentify:
			e.Identify().SetCNS(nvme.CNSController)
			n = 4096
		case nvme.AdminGetLogPage:
			e.GetLog().SetLID(nvme.LIDSMART)
			e.GetLog().SetLenBytes(512)
			e.SetNSID(nvme.NSIDBroadcast)
			n = 512
		case nvme.AdminGetFeatures, nvme.AdminSetFeatures:
			e.Features().SetFID(nvme.FIDNumberOfQueues)
		}
		all = append(all, capsule(f, e, nil, n))
	}
	var get nvme.SQE
	get.Property().Init(nvme.FabricsPropertyGet, nvme.PropCSTS)
	return append(all, capsule(f, get, nil, 0))
}

func ioFrames(f pdu.Format) (all [][]byte) {
	all = append(all,
		capsule(f, rw(nvme.CmdRead, 1, 8, 8), nil, 4096),
		capsule(f, rw(nvme.CmdRead, 2, 100, 1), nil, 512),
		capsule(f, rw(nvme.CmdWrite, 3, 8, 8), make([]byte, 4096), 0),
		capsule(f, rw(nvme.CmdWrite, 4, 64, 1), make([]byte, 512), 0),
		capsule(f, rw(nvme.CmdFlush, 5, 0, 1), nil, 0),
		capsule(f, rw(nvme.CmdWriteZeroes, 6, 9, 3), nil, 0),
		capsule(f, rw(nvme.CmdCompare, 7, 9, 1), make([]byte, 512), 0),
		capsule(f, rw(nvme.CmdVerify, 8, 9, 9), nil, 0),
		frame(f, pdu.TypeH2CData, pdu.FlagLast, h2cData(3, 0, 0, 512), make([]byte, 512)))
	var dsm nvme.SQE
	dsm.SetOpcode(nvme.CmdDSM)
	dsm.SetNSID(1)
	dsm.SetCID(9)
	dsm.SetDSMRanges(1)
	dsm.SetCDW(11, nvme.DSMDeallocate)
	r := make([]byte, 16)
	binary.LittleEndian.PutUint32(r[4:], 8)
	return append(all, capsule(f, dsm, r, 0))
}

// stream makes mutants of the frames: most are wrong behind the common header, where a command fails and
// the connection stays; one in 40 anywhere.
func stream(rng *rand.Rand, f pdu.Format, frames [][]byte) func(int) []byte {
	return func(i int) []byte {
		k := rng.IntN(len(frames))
		if frames[k][0] == byte(pdu.TypeH2CData) && rng.IntN(20) > 0 {
			k = 0 // hardly ever survived
		}
		if rng.IntN(40) == 0 {
			return mutateHard(rng, frames[k])
		}
		p := bytes.Clone(frames[k])
		for range 1 + rng.IntN(3) {
			at := pdu.CommonLen + rng.IntN(nvme.SQESize)
			if rng.IntN(2) == 0 {
				p[at] ^= 1 << rng.IntN(8)
			} else {
				p[at] = interesting[rng.IntN(len(interesting))]
			}
		}
		binary.LittleEndian.PutUint16(p[pdu.CommonLen+2:], uint16(i)) // CIDs differ, else hardly one lives long
		if f.HeaderDigest {
			pdu.PutDigest(p[pdu.CapsuleCmdLen:], pdu.Digest(p[:pdu.CapsuleCmdLen]))
		}
		return p
	}
}

var interesting = []byte{0, 1, 2, 3, 0x7f, 0x80, 0xfe, 0xff, 0x10, 0x40, 0x5a}

// mutateHard changes a frame anywhere, in every way.
func mutateHard(rng *rand.Rand, p []byte) []byte {
	p = bytes.Clone(p)
	for range 1 + rng.IntN(2) {
		switch rng.IntN(8) {
		case 0:
			p[rng.IntN(len(p))] ^= 1 << rng.IntN(8)
		case 1:
			p[rng.IntN(min(len(p), pdu.CommonLen))] = interesting[rng.IntN(len(interesting))]
		case 2:
			p[rng.IntN(min(len(p), 80))] = byte(rng.Uint32())
		case 3: // truncated
			p = p[:1+rng.IntN(len(p))]
		case 4: // oversized
			if len(p) >= pdu.CommonLen {
				binary.LittleEndian.PutUint32(p[4:], rng.Uint32()>>rng.IntN(30))
			}
		case 5: // doubled, or with something behind
			p = append(p, p[:rng.IntN(len(p))+1]...)
		case 6: // two parts swapped
			k := rng.IntN(len(p))
			p = append(bytes.Clone(p[k:]), p[:k]...)
		case 7: // noise
			for i := range min(len(p), 1+rng.IntN(64)) {
				p[i] = byte(rng.Uint32())
			}
		}
	}
	return p
}

// shootAfter is shoot with a prologue that awaits its answers.
func shootAfter(d *daemon, next func(i int) []byte, count int, prologue ...[]byte) (n int, closed bool) {
	h, err := dialRaw(d.t, d.addr)
	if err != nil {
		d.t.Error(err)
		return 0, false
	}
	defer h.close()
	if _, err := exchange(h, prologue...); err != nil {
		d.t.Errorf("the prologue: %v", err)
		return 0, false
	}
	return h.shoot(next, count)
}

// shoot sends a prologue and count mutants in batches until the daemon closes the connection. Batches are small
// and each waits for the answers to the one before, so that hardly anything is sent that is not looked at.
func shoot(d *daemon, prologue []byte, next func(i int) []byte, count int) (n int, closed bool) {
	h, err := dialRaw(d.t, d.addr)
	if err != nil {
		d.t.Error(err)
		return 0, false
	}
	defer h.close()
	h.send(prologue)
	return h.shoot(next, count)
}

func (h *rawHost) shoot(next func(i int) []byte, count int) (n int, closed bool) {
	const batch = 25
	for n < count {
		var out []byte
		for range min(batch, count-n) {
			out = append(out, next(n)...)
			n++
		}
		_ = h.c.SetWriteDeadline(time.Now().Add(wait))
		if _, err := h.c.Write(out); err != nil {
			return n, true
		}
		// Whatever comes: answers, a TermReq, the end. A mutant may also have left the daemon waiting for more.
		_ = h.c.SetReadDeadline(time.Now().Add(2 * time.Millisecond))
		for {
			k, err := h.c.Read(h.in[:])
			if isTimeout(err) {
				break
			}
			if err != nil {
				return n, true
			}
			if k < len(h.in)/8 {
				break
			}
		}
	}
	return n, false
}
