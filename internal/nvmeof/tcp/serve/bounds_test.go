package serve_test

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"runtime"
	"testing"
	"time"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/tcp/pdu"
	"jbofd/internal/nvmeof/tcp/serve"
	"jbofd/internal/ssd/fault"
	"jbofd/internal/ssd/mem"
	"jbofd/internal/units"
)

// misbehaviours are ways in which a host connects and leaves. i is different each time.
var misbehaviours = map[string]func(h *rawHost, i int){
	"connects and closes": func(h *rawHost, _ int) { h.bare(nil) },
	"closes after half an ICReq": func(h *rawHost, _ int) {
		var ic pdu.IC
		ic.Common().Set(pdu.TypeICReq, 0, pdu.ICLen, 0, pdu.ICLen)
		h.bare(ic[:40])
	},
	"closes after ICReq": func(h *rawHost, _ int) { _ = h.dial().c.Close() },
	"sends rubbish":      func(h *rawHost, i int) { h.bare(bytes.Repeat([]byte{byte(i)}, 200)) },
	"does not wait for Connect": func(h *rawHost, _ int) {
		q := h.dial()
		h.sendConnect(q, 0, 0)
		_ = q.c.Close()
	},
	"invents a name": func(h *rawHost, i int) {
		h.nqn = fmt.Sprintf("nqn.2014-08.org.example:%d", i)
		h.connectAdmin(0)
		h.lose()
	},
	"asks for a queue that is not": func(h *rawHost, _ int) {
		q := h.dial()
		h.cntlid = 77
		q.wait(h.sendConnect(q, 3, 0))
		_ = q.c.Close()
	},
	"leaves event requests": func(h *rawHost, _ int) {
		h.connectAdmin(0)
		h.setCC(rawEnable)
		for range 6 {
			var e nvme.SQE
			e.SetOpcode(nvme.AdminAsyncEvent)
			h.admin.send(e, nil)
		}
		h.lose()
	},
	"shuts down and leaves": func(h *rawHost, _ int) {
		h.connectAdmin(0)
		h.setCC(rawEnable)
		h.setCC(rawEnable.WithSHN(nvme.SHNNormal))
		h.lose()
	},
	"leaves a write and half a write": func(h *rawHost, i int) {
		h.connectAdmin(0)
		h.setCC(rawEnable)
		q := h.queue(1)
		q.writeBlock(units.LBA(i%100), 'x')
		q.sendToFetch(half(nvme.FuseNone, 1), blockBytes)
		if i%2 == 0 {
			q.receive()
		}
		h.lose(q)
	},
	"leaves the first half of a pair": func(h *rawHost, _ int) {
		h.connectAdmin(0)
		h.setCC(rawEnable)
		q := h.queue(1)
		var e nvme.SQE
		e.SetOpcode(nvme.CmdCompare)
		e.SetNSID(1)
		e.SetNLB(1)
		e.SetFuse(nvme.FuseFirst)
		q.send(e, make([]byte, blockBytes))
		h.lose(q)
	},
	"disconnects and leaves the rest": func(h *rawHost, _ int) {
		h.connectAdmin(0)
		h.setCC(rawEnable)
		q := h.queue(1)
		var e nvme.SQE
		e.InitDisconnect()
		q.send(e, nil)
		h.lose(q)
	},
	"resets without end": func(h *rawHost, i int) {
		h.connectAdmin(0)
		h.setCC(rawEnable)
		q := h.queue(1)
		q.writeBlock(units.LBA(i%100), 'x')
		h.setCC(0)
		h.lose(q)
	},
}

// bare opens a connection, sends what is given and closes it.
func (h *rawHost) bare(b []byte) {
	h.t.Helper()
	c, err := net.Dial("tcp", h.r.address)
	if err != nil {
		h.t.Fatal(err)
	}
	_, _ = c.Write(b)
	_ = c.Close()
}

// TestMisbehavioursLeaveNothing: after hundreds of connections of a kind the process has the goroutines, file
// descriptors and, but for what is bounded, the memory that it had before.
func TestMisbehavioursLeaveNothing(t *testing.T) {
	const rounds = 200
	const bounded = 512 << 10 // receive buffers, and a thousand series of hosts
	r := newRig(t, func(c *serve.Config) { c.ReceiveBytes = 4 << 10 })
	for name, f := range misbehaviours {
		t.Run(name, func(t *testing.T) {
			run := func(n int) {
				t.Run("", func(t *testing.T) { // at its end the host's connections are forgotten
					for i := range n {
						f(r.rawIdle(t), i)
					}
					last := r.rawIdle(t) // behind it, all connections have been accepted
					last.connectAdmin(0)
					last.lose()
				})
				await(t, "the end of all connections", func() bool {
					conns, _, _ := r.Service.Counts()
					return conns == 0
				})
			}
			run(50)
			goroutines, files, heap := runtime.NumGoroutine(), openFiles(t), heapBytes()
			run(rounds)
			await(t, "the end of goroutines, files and memory", func() bool {
				return runtime.NumGoroutine() <= goroutines && openFiles(t) <= files && heapBytes() <= heap+bounded
			})
		})
	}
}

func heapBytes() int {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int(m.HeapAlloc)
}

func openFiles(t testing.TB) int {
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}

// TestTheDeadlineOfAWriteEndsWithIt: how long a host may take to read a response that the writer sends does not bound
// when the reader may send the next one.
func TestTheDeadlineOfAWriteEndsWithIt(t *testing.T) {
	t.Parallel()
	const stall = 100 * time.Millisecond
	m, err := mem.Open(mem.Config{Name: "m0", SizeBytes: testBytes})
	if err != nil {
		t.Fatal(err)
	}
	dev, err := fault.New(m, fault.Config{DelayProbability: 1, Delay: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	r := newRigOf(t, func(c *serve.Config) { c.StallTimeout = stall }, dev)
	q := r.raw(t).queue(1)
	var unknown nvme.SQE // the reader answers it
	unknown.SetOpcode(0x7F)
	unknown.SetNSID(1)
	for range 3 {
		if e := q.wait(q.writeBlock(0, 'x')); !e.Status().OK() { // the writer answers it
			t.Fatal(e.Status())
		}
		for until := time.Now().Add(2 * stall); time.Now().Before(until); {
			if e := q.do(unknown); e.Status().OK() {
				t.Fatal("a command of an unknown opcode succeeds")
			}
		}
	}
}
