package serve_test

import (
	"testing"
	"time"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/rdma/rawhost"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/fault"
	"jbofd/internal/ssd/mem"
	"jbofd/internal/units"
)

// A host whose writes wait for memory cannot hold all receives: beyond its share its connections end. No queue has more
// commands outstanding than its size allows, so nothing else ends them.
func TestOneTenantCannotHoldAllReceives(t *testing.T) {
	const receives, queues, reads, readBytes = 32, 24, 5, 64 << 10
	inner, err := mem.Open(mem.Config{Name: "m0", SizeBytes: testBytes})
	if err != nil {
		t.Fatal(err)
	}
	dev, err := fault.New(inner, fault.Config{})
	if err != nil {
		t.Fatal(err)
	}
	r := newRig(t, func(s *setup) {
		s.devices = []ssd.Device{dev}
		s.serve.Receives = receives
		s.serve.StallTimeout = time.Hour
		// A tenant gets at most half: memory for 32 reads.
		s.buffers = 4 << 20
	})
	release := func() {
		dev.SetRules()
		dev.Release()
	}
	defer release()
	dev.SetRules(fault.Rule{Ops: []ssd.Op{ssd.Write}, Hold: true})
	good := r.options()
	good.HostNQN = "nqn.2026-11.example.host:good"
	c := r.connect(t, good)
	bad := r.options()
	bad.HostNQN = "nqn.2026-11.example.host:bad"
	bad.Queues, bad.QPairs, bad.QueueDepth = 1, queues+2, 8
	b := r.connect(t, bad)
	var hosts []*rawhost.Host
	for qid := range uint16(queues) {
		h := r.resolve(t)
		h.Join(association(t, b), qid+2)
		hosts = append(hosts, h)
	}
	// The hosts have no receives for responses, so each read keeps the memory of its data. When a connection ends,
	// reads of the others that have waited for longer than any write take its memory.
	for cid := range uint16(reads) {
		for _, h := range hosts {
			e := rawhost.RW(nvme.CmdRead, cid, readBytes/blockBytes)
			h.Keyed(&e, nvme.SGLSubtypeAddress, readBytes)
			if !h.Deliver(e[:]) {
				t.Fatal("a connection has ended")
			}
		}
	}
	eventually(t, "reads that wait for memory", func() bool { return r.Pool.Stats().Waits > 0 })
	// In-capsule data stays in its receive until there is memory. A connection gets memory for one such command at a
	// time beyond its share; the drive does not finish that one.
	for cid := uint16(reads); cid < rawhost.Entries-1; cid++ {
		e := rawhost.RW(nvme.CmdWrite, cid, 1)
		e.SetPSDT(nvme.PSDTSGL)
		e.SGL().SetType(nvme.SGLTypeDataBlock, nvme.SGLSubtypeOffset)
		e.SGL().SetLength(blockBytes)
		for i, h := range hosts {
			// Writes that do not overlap: the drive has one of each connection.
			e.SetSLBA(units.LBA(i))
			h.Deliver(append(e[:], make([]byte, blockBytes)...)) // or its connection has ended
		}
	}
	eventually(t, "writes that hold half of the receives", func() bool {
		return r.server.Stats().Held == receives/2
	})
	for range 50 {
		serves(t, c)
	}
	if held := r.server.Stats().Held; held > receives/2 {
		t.Errorf("%d of %d receives are held by one host", held, receives)
	}
	release() // the ends of connections wait for the writes that the drive has
	eventually(t, "the ends of the greediest", func() bool {
		return r.metric(t, "jbof_protocol_errors_total", "rdma_receives") > 0
	})
	if n := r.metric(t, "jbof_protocol_errors_total", "rdma_queue_size"); n > 0 {
		t.Errorf("%v connections have ended for more commands than their queue's entries", n)
	}
}
