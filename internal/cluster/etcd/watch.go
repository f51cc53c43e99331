package etcd

import (
	"context"
	"sync/atomic"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"jbofd/internal/cluster"
)

// Watch begins a watch, which replaces an earlier one, and calls f with its events, in their order, on a goroutine of
// its own. All changes of one revision come in one call. ended: the watch has ended and f is not called any more. An
// earlier watch may still call f with its own ID meanwhile. f must not wait longer than for its own work, because the
// library keeps what comes meanwhile. After Close it does nothing.
func (c *Client) Watch(w cluster.Watch, f func(id uint64, events []cluster.KeyValue, ended bool)) {
	// Without a leader the server would keep the watch and tell nothing.
	ctx, cancel := context.WithCancel(clientv3.WithRequireLeader(c.ctx))
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		cancel()
		return
	}
	c.wait.Add(1)
	if c.endWatch != nil {
		c.endWatch()
	}
	c.endWatch = cancel
	c.mu.Unlock()
	go func() {
		defer c.wait.Done()
		defer cancel()
		c.watch(ctx, w, f)
		if c.ctx.Err() == nil {
			f(w.ID, nil, true)
		}
	}()
}

// watch returns when the watch has ended.
func (c *Client) watch(ctx context.Context, w cluster.Watch, f func(uint64, []cluster.KeyValue, bool)) {
	ctx, cancel := context.WithCancel(ctx)
	within, stop := context.WithTimeout(ctx, c.cfg.Timeout)
	conn, err := c.connected(within)
	stop()
	if err != nil {
		cancel()
		return
	}
	var signs atomic.Int64 // of life, since the watch began
	probes := make(chan struct{})
	go func() {
		defer close(probes)
		defer cancel()
		c.probe(ctx, conn, &signs)
	}()
	defer func() {
		cancel()
		<-probes
	}()
	// This waits for a connection, too.
	for resp := range conn.Watch(ctx, c.prefix, clientv3.WithPrefix(), clientv3.WithRev(w.From)) {
		if resp.Err() != nil {
			return
		}
		signs.Add(1)
		if len(resp.Events) == 0 {
			continue
		}
		events := make([]cluster.KeyValue, len(resp.Events))
		for i, e := range resp.Events {
			events[i] = cluster.KeyValue{Key: string(e.Kv.Key[len(c.prefix):]), Value: e.Kv.Value,
				Revision: e.Kv.ModRevision, Deleted: e.Type == clientv3.EventTypeDelete}
		}
		f(w.ID, events, false)
	}
}

// probe asks for signs of progress, and returns when none has come for the timeout.
func (c *Client) probe(ctx context.Context, conn *clientv3.Client, signs *atomic.Int64) {
	tick := time.NewTicker(c.cfg.Timeout / 4)
	defer tick.Stop()
	var last int64
	for quiet := 0; quiet < 4; quiet++ {
		// The request waits while there is no connection.
		within, stop := context.WithTimeout(ctx, c.cfg.Timeout/4)
		if conn.RequestProgress(within) != nil && ctx.Err() != nil {
			stop()
			return
		}
		stop()
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		if now := signs.Load(); now != last {
			last, quiet = now, 0
		}
	}
}
