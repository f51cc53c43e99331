package client

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"jbofd/client/internal/host"
	"jbofd/client/internal/hostverbs"
	"jbofd/client/internal/window"
)

// Controller is a connection to a subsystem: an admin queue, I/O queues, and whatever it
// takes to keep them. All its methods may be called from any goroutine.
//
// When a connection is lost, the controller builds all of them anew, every
// ReconnectDelay for up to CtrlLossTimeout. Meanwhile operations wait. Those that were
// outstanding and may be repeated (reads, writes, flushes, ...) are; CompareAndWrite and
// passthrough commands fail with ErrConnectionLost. A write that is repeated may thus be carried out
// twice, with the same data: as with the Linux host, order writes to one place by
// waiting for the first.
type Controller struct {
	opts Options
	// ctx ends when the controller is closed; stopped is closed when the supervisor has ended.
	ctx      context.Context
	cancel   context.CancelFunc
	stopped  chan struct{}
	closeErr error

	mu sync.Mutex
	// a is the current association, nil while there is none; err is why there will never be
	// another. changed is closed and replaced whenever one of them changes.
	a *association
	// gate is that of the latest association that has one.
	gate    *window.Gate
	err     error
	changed chan struct{}
	losses  uint64
}

// Connect connects to a subsystem and returns when its controller is ready. ctx bounds this
// call only. Close must be called.
//
// Errors: ErrInvalid for bad Options; *StatusError where the target refuses;
// ErrUnsupported; ErrProtocol; network errors.
func Connect(ctx context.Context, o Options) (*Controller, error) {
	o, err := o.withDefaults()
	if err != nil {
		return nil, err
	}
	c := &Controller{opts: o, stopped: make(chan struct{}), changed: make(chan struct{})}
	if o.Transport == RDMA {
		if c.opts.memory, err = hostverbs.NewMemory(o.RDMA, o.BounceBytes); err != nil {
			return nil, fmt.Errorf("connecting to %s: %w", o.URL(), err)
		}
	}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	a, err := c.attempt(ctx)
	if err != nil {
		c.cancel()
		return nil, errors.Join(fmt.Errorf("connecting to %s: %w", o.URL(), err), c.closeMemory())
	}
	c.a = a
	go c.supervise(a)
	return c, nil
}

// attempt builds one association and starts its goroutines.
func (c *Controller) attempt(ctx context.Context) (*association, error) {
	ctx, cancel := context.WithTimeout(ctx, c.opts.ConnectTimeout)
	defer cancel()
	c.mu.Lock()
	known := c.gate
	c.mu.Unlock()
	a, err := connectAssociation(ctx, c.opts, known)
	if err != nil {
		return nil, err
	}
	if a.gate != nil {
		c.mu.Lock()
		c.gate = a.gate
		c.mu.Unlock()
	}
	a.wg.Add(1)
	go a.maintain()
	if a.id.OAES() != 0 {
		a.wg.Add(1)
		go c.events(a)
	}
	return a, nil
}

// supervise replaces associations that end until the controller is closed or given up.
func (c *Controller) supervise(a *association) {
	defer close(c.stopped)
	for a != nil {
		select {
		case <-a.ctx.Done():
		case <-c.ctx.Done():
			c.set(nil, ErrClosed)
			c.closeErr = c.leave(a)
			return
		}
		cause := context.Cause(a.ctx)
		c.mu.Lock()
		c.losses++
		c.mu.Unlock()
		c.set(nil, nil)
		c.opts.Logger.Warn("connection lost", "address", c.opts.URL(), "subnqn", c.opts.SubNQN, "cause", cause)
		// Its errors say once more that the connection is gone.
		_ = a.close(cause)
		a = c.reconnect(cause)
	}
}

// reconnect tries until there is an association (or nil: the controller is done).
func (c *Controller) reconnect(cause error) *association {
	begin := time.Now()
	if c.opts.CtrlLossTimeout >= 0 {
		for n := 1; ; n++ {
			a, err := c.attempt(c.ctx)
			if err == nil {
				c.opts.Logger.Info("connection restored", "address", c.opts.URL(), "subnqn", c.opts.SubNQN,
					"attempts", n, "after", time.Since(begin).Round(time.Millisecond))
				c.set(a, nil)
				if c.opts.onReconnect != nil {
					c.opts.onReconnect()
				}
				return a
			}
			cause = err
			if time.Since(begin)+c.opts.ReconnectDelay > c.opts.CtrlLossTimeout {
				break
			}
			t := time.NewTimer(c.opts.ReconnectDelay)
			select {
			case <-t.C:
			case <-c.ctx.Done():
			}
			t.Stop()
			if c.ctx.Err() != nil {
				break
			}
		}
	}
	if c.ctx.Err() != nil {
		c.set(nil, ErrClosed)
	} else {
		err := fmt.Errorf("%w: %s: gave up after %s: %w", ErrConnectionLost, c.opts.URL(), time.Since(begin).Round(time.Millisecond), cause)
		c.opts.Logger.Error("connection given up", "address", c.opts.URL(), "subnqn", c.opts.SubNQN, "cause", cause)
		c.set(nil, err)
	}
	return nil
}

// leave ends an association in order.
func (c *Controller) leave(a *association) error {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	// A target that does not answer is left without a goodbye.
	_ = a.shutdown(ctx)
	return a.close(ErrClosed)
}

// set publishes a new state.
func (c *Controller) set(a *association, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.a = a
	if err != nil {
		c.err = err
	}
	close(c.changed)
	c.changed = make(chan struct{})
}

// live returns the current association, waiting for one while the controller reconnects.
//
// Errors: the context's; ErrClosed; ErrConnectionLost when the controller has given up.
func (c *Controller) live(ctx context.Context) (*association, error) {
	for {
		c.mu.Lock()
		a, err, changed := c.a, c.err, c.changed
		c.mu.Unlock()
		if a != nil && a.ctx.Err() == nil {
			return a, nil
		}
		if err != nil {
			return nil, err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// Close tells the target goodbye if it listens, ends all connections, fails outstanding
// operations with ErrClosed and waits for the controller's goroutines. QPairs fail; closing them
// remains their owners'. Idempotent.
func (c *Controller) Close() error {
	c.cancel()
	<-c.stopped
	return errors.Join(c.closeErr, c.closeMemory())
}

func (c *Controller) closeMemory() error {
	if c.opts.memory == nil {
		return nil
	}
	return c.opts.memory.Close()
}

// Options returns the options with defaults filled in.
func (c *Controller) Options() Options { return c.opts }

// Err returns why the controller has ended for good, by Close or because it has given up; nil while it is
// connected or reconnects.
func (c *Controller) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// Losses returns how often the connection was lost so far.
func (c *Controller) Losses() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.losses
}

// OpenQPair connects an I/O queue pair for one goroutine; Options.QPairs must have
// reserved it. It ends with the current association: after a loss, close it and open
// another.
//
// Errors: ErrUnsupported when no queue is left; otherwise as Connect.
func (c *Controller) OpenQPair(ctx context.Context) (*QPair, error) {
	a, err := c.live(ctx)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, c.opts.ConnectTimeout)
	defer cancel()
	return a.openQPair(ctx)
}

// op describes an operation to do.
type op struct {
	name string
	// admin: on the admin queue. repeat: it may be carried out twice.
	admin, repeat bool
}

// do runs commands (one, or a fused pair) and repeats them as op allows. A nil error means
// that all have completed, with whatever status.
func (c *Controller) do(ctx context.Context, o op, cmds []Command, comps []Completion) error {
	for attempt := 0; ; attempt++ {
		a, err := c.live(ctx)
		if err != nil {
			return fmt.Errorf("%s: %w", o.name, err)
		}
		if err := c.try(ctx, a, o, cmds, comps); err != nil {
			if o.repeat && errors.Is(err, ErrConnectionLost) && ctx.Err() == nil {
				continue
			}
			return fmt.Errorf("%s: %w", o.name, err)
		}
		if !o.repeat || attempt >= c.opts.MaxRetries || !host.Passing(comps[0].Status) {
			return nil
		}
		t := time.NewTimer(time.Duration(attempt+1) * 50 * time.Millisecond)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return fmt.Errorf("%s: %w", o.name, ctx.Err())
		}
	}
}

// try runs commands on one association.
func (c *Controller) try(ctx context.Context, a *association, o op, cmds []Command, comps []Completion) error {
	if !o.admin {
		if len(a.io) == 0 {
			return fmt.Errorf("%w: the controller was connected without I/O queues (Options.Queues)", ErrUnsupported)
		}
		return a.run(ctx, a.pick(), cmds, comps)
	}
	select {
	case a.users <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	case <-a.ctx.Done():
		return context.Cause(a.ctx)
	}
	defer func() { <-a.users }()
	return a.run(ctx, a.admin, cmds, comps)
}
