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

// Cluster is the keys and values of a cluster of nodes.
type Cluster struct {
	s        *cluster.Store
	maxValue int
}

// connectTime is how long a cluster may take at first, also if its operations may take less: its nodes are only being
// connected then.
const connectTime = 10 * time.Second

// NewCluster takes over s. It asks for a key, so that it is known whether the cluster answers.
//
// Errors: those of cluster.Store. s is still the caller's then.
func NewCluster(ctx context.Context, s *cluster.Store) (*Cluster, error) {
	for begin := time.Now(); ; {
		_, err := s.Exists(ctx, []byte("jbofbench"))
		if err == nil {
			return &Cluster{s, s.MaxValue()}, nil
		}
		if !errors.Is(err, cluster.ErrUnavailable) || ctx.Err() != nil || time.Since(begin) > connectTime {
			return nil, err
		}
		time.Sleep(10 * time.Millisecond) // it may be known at once
	}
}

// Name implements DB.
func (c *Cluster) Name() string { return c.s.Name() }

// MaxValueBytes implements DB.
func (c *Cluster) MaxValueBytes() int { return c.maxValue }

// Buffer implements DB.
func (c *Cluster) Buffer(size int) ([]byte, func() error, error) {
	return make([]byte, size), func() error { return nil }, nil
}

// Close implements DB.
func (c *Cluster) Close() error { return c.s.Close() }

// Counters implements Counting.
func (c *Cluster) Counters() []Counter {
	st := c.s.Stats()
	return []Counter{
		{"Epoch", int64(st.Epoch), true},
		{"Maps", int64(st.Maps), false},
		{"Tries", int64(st.Tries), false},
		{"Retries", int64(st.Retries), false},
		{"WrongViews", int64(st.WrongViews), false},
		{"Hedged", int64(st.Hedged), false},
		{"Unavailable", int64(st.Unavailable), false},
		{"Indeterminate", int64(st.Indeterminate), false},
		{"Waits", int64(st.Waits), false},
	}
}

// OpenQueue implements DB.
func (c *Cluster) OpenQueue(_ context.Context, depth int) (Queue, error) {
	q, err := c.s.OpenQueue(depth)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrConfig, err)
	}
	return &clusterQueue{q: q, ops: make([]kv.Op, 0, depth), results: make([]kv.Result, depth)}, nil
}

// clusterQueue is a cluster.OpQueue in the engine's terms.
type clusterQueue struct {
	q       *cluster.OpQueue
	ops     []kv.Op
	results []kv.Result
}

func (q *clusterQueue) Submit(ops []Op) (int, error) { // hot: 0 allocs
	q.ops = kvOps(q.ops, ops)
	return q.q.Submit(q.ops)
}

func (q *clusterQueue) Poll(dst []Done, wait time.Duration) (int, error) { // hot: 0 allocs
	n, err := q.q.Poll(q.results[:min(len(dst), len(q.results))], wait)
	for i := range n {
		dst[i] = doneOf(&q.results[i])
	}
	return n, err
}

func (q *clusterQueue) Interrupt()   { q.q.Interrupt() }
func (q *clusterQueue) Close() error { return q.q.Close() }

// kvOps translates operations.
func kvOps(dst []kv.Op, ops []Op) []kv.Op { // hot: 0 allocs
	dst = dst[:len(ops)]
	for i := range ops {
		o := &ops[i]
		kind := kv.Get
		if o.Put {
			kind = kv.Put
		}
		dst[i] = kv.Op{Kind: kind, Key: o.Key[:], Value: o.Value, Tag: uint64(o.Tag)}
	}
	return dst
}

// doneOf translates a result.
func doneOf(r *kv.Result) Done { // hot: 0 allocs
	d := Done{Tag: uint32(r.Tag), ValueLen: r.Size, Err: r.Err}
	switch {
	case r.Err == nil:
	case errors.Is(r.Err, client.ErrIndeterminate):
		d.Result = Failed
	case errors.Is(r.Err, kv.ErrKeyNotFound):
		d.Result = NotFound
	case errors.Is(r.Err, kv.ErrCapacityExceeded), errors.Is(r.Err, kv.ErrValueTooLarge),
		errors.Is(r.Err, cluster.ErrUnavailable):
		d.Result = Refused
	default:
		d.Result = Failed
	}
	return d
}
