package serve_test

import (
	"sync"
	"testing"
	"time"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/rdma/rawhost"
)

// A host whose commands wait because it takes no responses cannot hold all receives: beyond its share its connections
// end.
func TestOneTenantCannotHoldAllReceives(t *testing.T) {
	r := newRig(t, func(s *setup) {
		s.serve.Receives = 32
		s.serve.StallTimeout = time.Hour
	})
	good := r.options()
	good.HostNQN = "nqn.2026-11.example.host:good"
	c := r.connect(t, good)
	bad := r.options()
	bad.HostNQN = "nqn.2026-11.example.host:bad"
	bad.Queues, bad.QPairs, bad.QueueDepth = 1, 12, 8
	b := r.connect(t, bad)
	var hosts []*rawhost.Host
	for qid := range uint16(10) {
		h := r.resolve(t)
		h.Join(association(t, b), qid+2)
		hosts = append(hosts, h)
	}
	// Each takes no response. After as many as there is room for, its commands wait.
	var wg sync.WaitGroup
	for _, h := range hosts {
		wg.Go(func() {
			e := rawhost.RW(nvme.CmdFlush, 1, 1)
			e.SetPSDT(nvme.PSDTSGL)
			for range 5 * rawhost.Entries {
				if h.Send(e[:]) != nil {
					return // its connection has ended
				}
			}
		})
	}
	wg.Wait()
	eventually(t, "the ends of the greediest", func() bool {
		return r.server.Stats().Held <= 16 && r.metric(t, "jbof_protocol_errors_total", "rdma_receives") > 0
	})
	for range 50 {
		serves(t, c)
	}
	if held := r.server.Stats().Held; held > 16 {
		t.Errorf("%d of 32 receives are held by one host", held)
	}
}
