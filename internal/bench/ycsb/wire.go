package ycsb

import (
	"context"
	"errors"
	"fmt"
	"time"

	"jbofd/client"
	"jbofd/client/cluster"
	"jbofd/client/kv"
)

// Wire is a key value namespace over NVMe/TCP or NVMe/RDMA.
type Wire struct {
	c  *client.Controller
	ns *kv.Namespace
}

// ErrPartition: the namespace has some of the keys of a cluster, and other nodes take writes of the rest.
var ErrPartition = errors.New("the namespace is a partition of a cluster")

// NewWire takes over c, which must have been connected with Options.QPairs for every thread. exactlyOnce gives PUTs
// identities: see kv.Options.AtLeastOnce.
//
// Errors: those of kv.Open; ErrPartition; ErrConfig for keys that are too short, and for exactlyOnce with a target that
// has no extended key-value. c is still the caller's then.
func NewWire(ctx context.Context, c *client.Controller, nsid uint32, exactlyOnce bool) (*Wire, error) {
	ns, err := kv.Open(ctx, c, nsid, kv.Options{AtLeastOnce: !exactlyOnce})
	if err != nil {
		return nil, err
	}
	if exactlyOnce && !ns.Info().Extended {
		return nil, fmt.Errorf("%w: PUTs are to be carried out exactly once, and the target has no extended key-value",
			ErrConfig)
	}
	if n := ns.Info().MaxKey; n < KeyBytes {
		return nil, fmt.Errorf("%w: keys of namespace %d have at most %d bytes, YCSB's have %d", ErrConfig, nsid, n,
			KeyBytes)
	}
	if d, err := c.Describe(ctx, nsid); err == nil {
		if n, err := cluster.LedElsewhere(ctx, c, d.UUID); err == nil && n > 0 {
			return nil, ErrPartition
		}
	}
	return &Wire{c: c, ns: ns}, nil
}

// Name implements DB.
func (w *Wire) Name() string {
	o := w.c.Options()
	return fmt.Sprintf("%s %s nsid %d", o.URL(), o.SubNQN, w.ns.NSID())
}

// MaxValueBytes implements DB.
func (w *Wire) MaxValueBytes() int { return w.ns.Info().MaxValue }

// Buffer implements DB.
func (w *Wire) Buffer(size int) ([]byte, func() error, error) { return w.c.AllocBuffer(size) }

// Close implements DB.
func (w *Wire) Close() error { return w.c.Close() }

// OpenQueue implements DB.
func (w *Wire) OpenQueue(ctx context.Context, depth int) (Queue, error) {
	q, err := w.ns.OpenQueue(ctx)
	if err != nil {
		return nil, err
	}
	if q.Depth() < depth {
		return nil, errors.Join(fmt.Errorf("%w: the target's queues take %d commands, depth is %d", ErrConfig,
			q.Depth(), depth), q.Close())
	}
	return &wireQueue{q: q, ops: make([]kv.Op, 0, depth), results: make([]kv.Result, depth)}, nil
}

// wireQueue is a kv.OpQueue in the engine's terms.
type wireQueue struct {
	q       *kv.OpQueue
	ops     []kv.Op
	results []kv.Result
}

func (q *wireQueue) Submit(ops []Op) (int, error) { // hot: 0 allocs
	q.ops = kvOps(q.ops, ops)
	return q.q.Submit(q.ops)
}

func (q *wireQueue) Poll(dst []Done, wait time.Duration) (int, error) { // hot: 0 allocs
	n, err := q.q.Poll(q.results[:min(len(dst), len(q.results))], wait)
	for i := range n {
		dst[i] = doneOf(&q.results[i])
	}
	return n, err
}

func (q *wireQueue) Interrupt()   { q.q.Interrupt() }
func (q *wireQueue) Close() error { return q.q.Close() }
