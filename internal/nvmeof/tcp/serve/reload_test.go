package serve_test

import (
	"sync/atomic"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/internal/nvme"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/mem"
)

// gate is a device that counts requests and, while closed, holds them.
type gate struct {
	ssd.Device
	requests atomic.Int64
	reached  chan struct{} // closed by the first request
	open     chan struct{}
}

func newGate(t *testing.T, name string) *gate {
	t.Helper()
	dev, err := mem.Open(mem.Config{Name: name, SizeBytes: testBytes})
	if err != nil {
		t.Fatal(err)
	}
	return &gate{Device: dev, reached: make(chan struct{}), open: make(chan struct{})}
}

func (g *gate) OpenQueue(depth int) (ssd.Queue, error) {
	q, err := g.Device.OpenQueue(depth)
	return &gateQueue{Queue: q, g: g}, err
}

type gateQueue struct {
	ssd.Queue
	g *gate
}

func (q *gateQueue) Submit(reqs []ssd.Request) int {
	if q.g.requests.Add(int64(len(reqs))) == int64(len(reqs)) {
		close(q.g.reached)
	}
	<-q.g.open
	return q.Queue.Submit(reqs)
}

// TestNoCommandReachesTheExtentOfARemovedNamespace after the drive has drained: when the extent is erased and reused,
// no delayed write may change it.
func TestNoCommandReachesTheExtentOfARemovedNamespace(t *testing.T) {
	for name, change := range map[string]func(r *rig){
		"namespace removed": func(r *rig) {
			r.State.Subsystems[0].Namespaces = r.State.Subsystems[0].Namespaces[:1]
		},
		"subsystem removed": func(r *rig) { r.State.Subsystems = nil },
	} {
		t.Run(name, func(t *testing.T) {
			slow, fast := newGate(t, "slow"), newGate(t, "fast")
			close(fast.open)
			r := newRigOf(t, nil, slow, fast)
			c, q, err := open(r.address, 8)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			// Both come in one batch, and the first drive is slow.
			cmds := []client.Command{{Data: make([]byte, blockBytes)}, {Data: make([]byte, blockBytes), Tag: 1}}
			for i := range cmds {
				client.SetRW(&cmds[i], nvme.CmdWrite, uint32(i+1), 0, 1)
			}
			if n, err := q.Submit(cmds); err != nil || n != len(cmds) {
				t.Fatalf("submitted %d: %v", n, err)
			}
			<-slow.reached
			before := int64(-1)
			applied := make(chan struct{})
			go func() {
				defer close(applied)
				change(r)
				r.Service.Apply(r.State)
				<-r.Service.SSD(1).Quiesce()
				before = fast.requests.Load()
			}()
			select {
			case <-applied:
			case <-time.After(100 * time.Millisecond): // it waits for the slow drive
			}
			close(slow.open)
			<-applied
			if err := c.Close(); err != nil {
				t.Log(err) // the target may have closed first
			}
			r.server.Close() // after which nothing is in flight
			if n := fast.requests.Load(); n != before {
				t.Errorf("%d requests when the drive was quiet, %d now", before, n)
			}
		})
	}
}
