package daemon

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// stop drains the connections, ends the associations and closes stores and drives.
func (n *Node) stop() {
	n.beginStop()
	drainTimeout := n.config().Limits.DrainTimeout
	n.log.Info("stopping: new connections are refused, outstanding commands complete", "drain_timeout",
		drainTimeout.String())
	n.tel.Health().Block("daemon", "draining")
	// Returning keys from swap areas takes what is left of the drain timeout.
	extendTimeout(drainTimeout + closeTimeout + n.publisher.CheckpointTime() + stoppingMargin)
	ctx, cancel := context.WithTimeout(context.Background(), drainTimeout)
	defer cancel()
	changed := n.awaitChange()
	var drained sync.WaitGroup
	if n.rdma != nil {
		drained.Go(func() { n.rdma.Drain(ctx) })
	}
	n.tcp.Drain(ctx)
	drained.Wait()
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		n.log.Warn("commands have not completed within drain_timeout; closing their connections")
	}
	// A change that is under way may take as long as connections may. It uses the stores and drives.
	select {
	case <-changed:
	case <-ctx.Done():
	}
	// What is left of the drain timeout is for returning keys from swap areas.
	returning := time.Duration(0)
	if end, ok := ctx.Deadline(); ok && n.swappedKeys() > 0 {
		returning = max(time.Until(end), 0)
	}
	writing := n.publisher.CheckpointTime()
	extendTimeout(returning + closeTimeout + writing + stoppingMargin)
	closed, stores := make(chan struct{}), make(chan time.Time, 1)
	var closingStores atomic.Bool
	go func() {
		defer close(closed)
		// The admin API ends first: its requests use the stores, and a daemon that takes this one's place must find the
		// socket free even if a drive keeps the rest from being closed in time.
		n.endAdmin()
		<-changed
		n.service.Stop("the target is shutting down")
		n.tcp.Close()
		if n.rdma != nil {
			n.rdma.Close()
		}
		if n.cluster != nil {
			// The authority ends before the stores do: nothing is served, or counts as stored, that they do not keep.
			n.cluster.end()
			n.cluster.endServer()
		}
		closingStores.Store(true)
		n.publisher.CloseAll(returning + closeStoresTimeout)
		stores <- time.Now()
		n.flushDrives()
		n.close()
	}()
	if !within(returning+cmp.Or(n.opts.CloseTimeout, closeTimeout), closed) && closingStores.Load() {
		// The stores may be writing long checkpoints. One that is too slow is given up before.
		select {
		case at := <-stores:
			within(flushTimeout-time.Since(at), closed)
		case <-time.After(writing):
		}
	}
	if within(0, closed) {
		n.log.Info("stopped")
		return
	}
	busy := n.busyDrives()
	select {
	case <-changed:
		// A drive that does not answer keeps its queue from closing. The process can end nevertheless: a write was
		// acknowledged only once it was as durable as promised.
		if len(busy) > 0 {
			n.leave(busy)
			n.log.Error("a drive has not answered within the time limit; stopped without closing it", "ssds", busy)
		} else {
			n.log.Error("connections or the membership of the cluster have not ended within the time limit; stopped " +
				"without closing what is left")
		}
	default:
		n.log.Error("a change of the configuration has not ended within the time limit; stopped without closing the " +
			"drives")
	}
}

// leave closes what does not wait for the busy drives. The kernel does not end the process before they have answered
// the threads that wait for them, and until then it would keep all that is open from the next daemon.
func (n *Node) leave(busy []string) {
	var all sync.WaitGroup
	all.Go(n.endMetrics)
	for _, d := range n.drives() {
		if d.drive != nil && !slices.Contains(busy, d.name) {
			// Its writes are durable, or have no answer.
			all.Go(func() { _ = errors.Join(d.drive.Close(), d.dev.Close()) })
		}
	}
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		all.Wait()
	}()
	within(leaveTimeout, closed)
}

// busyDrives returns the names of the drives that have requests.
func (n *Node) busyDrives() (names []string) {
	for _, d := range n.drives() {
		if d.drive != nil && d.drive.Stats().Inflight.Load() > 0 {
			names = append(names, d.name)
		}
	}
	return names
}

// closeTimeout is how long closing may take after draining, besides the time for the bytes of the last checkpoints.
// Together with leaveTimeout and the default of limits.drain_timeout it is less than 5 s. flushTimeout of it is what is
// left for the drives when the stores have taken all of their time. leaveTimeout is for leaving drives that have not
// answered.
const (
	closeTimeout = 900 * time.Millisecond
	leaveTimeout = 50 * time.Millisecond
	flushTimeout = closeTimeout - closeStoresTimeout
)

// within waits until done is closed, for a limited time, and reports whether it is.
func within(limit time.Duration, done <-chan struct{}) bool {
	select {
	case <-done:
	case <-time.After(limit):
	}
	select {
	case <-done:
		return true
	default:
		return false
	}
}
