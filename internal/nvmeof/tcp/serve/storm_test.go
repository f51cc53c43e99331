package serve_test

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"jbofd/internal/nvme"
	"jbofd/internal/ssd/fault"
	"jbofd/internal/ssd/mem"
	"jbofd/internal/units"
	"jbofd/internal/uuid"
)

// TestStormOfEnds lets hosts reset, shut down, lose and disconnect their queues in the middle of writes, on a drive
// that delays some of them, and checks that every block has the newest acknowledged value.
func TestStormOfEnds(t *testing.T) {
	t.Parallel()
	seed := flag.Lookup("seed").Value.(flag.Getter).Get().(uint64) // that of executortest
	t.Logf("-seed %d", seed)
	m, err := mem.Open(mem.Config{Name: "m0", SizeBytes: testBytes})
	if err != nil {
		t.Fatal(err)
	}
	dev, err := fault.New(m, fault.Config{Seed: seed, DelayProbability: 0.2, Delay: 20 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	r := newRigOf(t, nil, dev)
	var hosts sync.WaitGroup
	for i := range 4 {
		hosts.Go(func() {
			h := &stormHost{rawHost: r.rawIdle(t), rng: rand.New(rand.NewPCG(seed, uint64(i))),
				base: uint64(i) * stormBlocks}
			h.nqn, h.id = fmt.Sprintf("nqn.2014-08.org.nvmexpress:uuid:aaaaaaaa-0000-0000-0000-%012d", i),
				uuid.UUID{byte(i)}
			h.run(25)
		})
	}
	hosts.Wait()
	await(t, "the end of all connections", func() bool {
		conns, controllers, _ := r.Service.Counts()
		return conns == 0 && controllers == 0
	})
}

// stormBlocks is how many blocks each host has.
const stormBlocks = 16

type stormHost struct {
	*rawHost
	rng  *rand.Rand
	base uint64
	io   *rawQueue
	gen  byte
}

// connectAgain makes an association, which may have to wait for the end of the previous one.
func (h *stormHost) connectAgain() {
	late := time.Now().Add(testTimeout)
	for s := h.connectAdmin(0); !s.OK(); s = h.connectAdmin(0) {
		if s != nvme.ConnectControllerBusy || time.Now().After(late) {
			h.t.Fatalf("Connect: %v", s)
		}
	}
	h.setCC(rawEnable)
	h.io = h.queue(1)
}

// writeAll writes every block with the next generation and returns the commands' identifiers.
func (h *stormHost) writeAll() (cids []uint16) {
	h.gen++
	for i := range uint64(stormBlocks) {
		cids = append(cids, h.io.writeBlock(units.LBA(h.base+i), h.gen))
	}
	return cids
}

// check compares the blocks with the newest generation.
func (h *stormHost) check() {
	for i := range uint64(stormBlocks) {
		var e nvme.SQE
		e.SetOpcode(nvme.CmdRead)
		e.SetNSID(1)
		e.SetSLBA(units.LBA(h.base + i))
		e.SetNLB(1)
		e.SGL().SetType(nvme.SGLTypeTransportData, nvme.SGLSubtypeTransport)
		e.SGL().SetLength(blockBytes)
		cid := h.io.send(e, nil)
		if c := h.io.wait(cid); !c.Status().OK() {
			h.t.Fatalf("read: %v", c.Status())
		}
		if got := h.io.data[cid][0]; got != h.gen {
			h.t.Errorf("block %d is of generation %d, want %d", h.base+i, got, h.gen)
		}
		delete(h.io.data, cid)
	}
}

func (h *stormHost) run(rounds int) {
	h.connectAgain()
	for range rounds {
		for _, cid := range h.writeAll() {
			if e := h.io.wait(cid); !e.Status().OK() {
				h.t.Fatalf("write: %v", e.Status())
			}
		}
		h.check()
		h.writeAll() // these are not waited for
		switch h.rng.IntN(6) {
		case 0:
			h.setCC(rawEnable.WithEN(false))
			h.awaitCSTS("RDY 0", func(s nvme.CSTS) bool { return !s.RDY() })
			h.setCC(rawEnable)
			h.io = h.queue(1)
		case 1:
			h.lose(h.io)
			h.connectAgain()
		case 2:
			h.setCC(rawEnable.WithSHN(nvme.SHNNormal))
			h.awaitCSTS("SHST 2", func(s nvme.CSTS) bool { return s.SHST() == 2 })
			h.setCC(0)
			h.awaitCSTS("RDY 0", func(s nvme.CSTS) bool { return !s.RDY() })
			h.setCC(rawEnable)
			h.io = h.queue(1)
		case 3:
			h.setCC(rawEnable.WithEN(false)) // and the connection ends before it is done
			h.lose(h.io)
			h.connectAgain()
		case 4: // Connects that are given up while they are held, or about to be answered
			h.lose(h.io)
			for range 3 {
				q := h.dial()
				h.sendConnect(q, 0, 0)
				time.Sleep(time.Duration(h.rng.IntN(20)) * time.Millisecond)
				_ = q.c.Close()
			}
			h.connectAgain()
		case 5:
			var e nvme.SQE
			e.InitDisconnect()
			if c := h.io.do(e); !c.Status().OK() {
				h.t.Fatalf("Disconnect: %v", c.Status())
			}
			h.io = h.queue(1)
		}
	}
	h.lose(h.io)
}
