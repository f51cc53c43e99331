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
	"jbofd/internal/nvme"
)

// Controller is a connection to a subsystem: an admin queue, I/O queues, and what is needed to keep them. All its
// methods may be called from any goroutine.
//
// # Losses of the connection
//
// When the connection of any queue is lost, the controller ends the association and builds a new one: it tries every
// ReconnectDelay for up to CtrlLossTimeout. Operations wait meanwhile. Those that were outstanding are treated by what
// they do:
//
//   - Read, Compare, Verify, Flush, and admin commands that only read are repeated.
//   - Write, WriteZeroes and Deallocate are repeated, but only behind the fence described below.
//   - CompareAndWrite, the passthrough commands and the Set commands are not repeated. They fail with
//     ErrConnectionLost, and with ErrIndeterminate if they were sent: whether they took effect is unknown.
//
// The fence is the admin Connect of the new association. A command that was outstanding may still be on its way to a
// drive when its connection has ended, and could overwrite data that was written and acknowledged later. A jbofd target
// therefore answers the admin Connect of a host with Controller Busy until nothing of that host's ended associations is
// under way; the controller repeats Connect then. Before it connects, the controller makes sure that the old
// association has ended at the target: by a controller reset (CC.EN = 0, wait for CSTS.RDY = 0, for up to CAP.TO, at
// most 10 s) where the admin queue still works; by the end of the connection where the target has closed it; otherwise
// by waiting for the keep-alive timeout, after which a target ends the association by itself. Without a keep-alive
// timeout (Options.KATO < 0) there is nothing to wait for, and the last case is not fenced. For targets other than
// jbofd, which do not hold Connect, the controller waits for the command quiesce time (CQT) that they announce. Linux
// and SPDK announce none: there the fence is as good as their controller reset.
//
// A write that is repeated may be carried out twice, with the same data: another host, or another goroutine, that
// writes to the same place meanwhile may see its data replaced by the data of the repeated write. Order writes to one
// place by waiting for the first, as with the Linux host.
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
	// latest is the latest association, which may have ended.
	latest *association
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
	a, err := c.connectFirst(ctx)
	if err != nil {
		c.cancel()
		return nil, errors.Join(fmt.Errorf("connecting to %s: %w", o.URL(), err), c.closeMemory())
	}
	c.a, c.latest = a, a
	go c.supervise(a)
	return c, nil
}

// connectFirst builds the first association. An earlier process of this host may have left commands behind, for which
// the target answers Controller Busy: Connect is repeated then, within ConnectTimeout.
func (c *Controller) connectFirst(ctx context.Context) (*association, error) {
	ctx, cancel := context.WithTimeout(ctx, c.opts.ConnectTimeout)
	defer cancel()
	notice := newSlowNotice(&c.opts)
	defer notice.end()
	var busy error
	for pause := busyPause; ; pause *= 2 {
		a, err := c.connectOnce(ctx)
		switch {
		case err == nil:
			return a, nil
		case isBusy(err):
			busy = err
			notice.because("Controller Busy: commands of an earlier association of this host are still under way")
		case busy != nil && ctx.Err() != nil:
			return nil, busy // rather than that there was no time for another attempt
		default:
			return nil, err
		}
		if !sleep(ctx, min(pause, maxBusyPause)) {
			return nil, busy
		}
	}
}

// A Connect that was answered Controller Busy is repeated after busyPause, then after twice that, and so on up to
// maxBusyPause or ReconnectDelay.
const (
	busyPause    = 50 * time.Millisecond
	maxBusyPause = time.Second
)

// isBusy reports whether a target has refused Connect for now.
func isBusy(err error) bool {
	var st *StatusError
	return errors.As(err, &st) && st.Status.Code() == nvme.ConnectControllerBusy && !st.Status.DNR()
}

// connectOnce builds one association and starts its goroutines.
func (c *Controller) connectOnce(ctx context.Context) (*association, error) {
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

// supervise waits for the association to end and replaces it with a new one, again and again, until Close is called or
// reconnect gives up after CtrlLossTimeout. It is the controller's goroutine; at its end it closes stopped.
func (c *Controller) supervise(a *association) {
	defer close(c.stopped)
	for a != nil {
		select {
		case <-a.ctx.Done():
		case <-c.ctx.Done():
			c.set(nil, ErrClosed)
			if a.ctx.Err() != nil { // it has ended as well: a shutdown might wait for a target that does not answer
				a.end(c.ctx)
				return
			}
			c.closeErr = c.endAssociation(a)
			return
		}
		cause := context.Cause(a.ctx)
		begin := time.Now()
		c.mu.Lock()
		c.losses++
		c.mu.Unlock()
		c.set(nil, nil)
		c.opts.Logger.Warn("connection lost", "address", c.opts.URL(), "subnqn", c.opts.SubNQN, "cause", cause)
		mayGoOn := a.end(c.ctx)
		a = c.reconnect(begin, mayGoOn, cause)
	}
}

// reconnect builds a new association after one that was lost at the time begin, and makes it the current one. mayGoOn
// is how long the target may keep executing commands of the lost association, from now; reconnect waits that long
// before it connects. cause is why the association was lost.
//
// It returns nil if Close was called (operations then fail with ErrClosed) or if CtrlLossTimeout has passed
// (ErrConnectionLost).
func (c *Controller) reconnect(begin time.Time, mayGoOn time.Duration, cause error) *association {
	giveUp := begin.Add(c.opts.CtrlLossTimeout)
	try := c.opts.CtrlLossTimeout >= 0
	if try && mayGoOn > 0 {
		if try = time.Now().Add(mayGoOn).Before(giveUp); try {
			c.opts.Logger.Info("waiting until the target has ended the lost association", "address", c.opts.URL(),
				"for",
				mayGoOn)
			sleep(c.ctx, mayGoOn)
		} else {
			cause = fmt.Errorf("%w (and the target may go on with the association for %s)", cause, mayGoOn)
		}
	}
	busy := busyPause
	for n := 1; try && c.ctx.Err() == nil; n++ {
		a, err := c.connectOnce(c.ctx)
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
		pause := c.opts.ReconnectDelay
		if isBusy(err) {
			pause, busy = min(pause, busy), 2*busy
		}
		if try = time.Now().Add(pause).Before(giveUp); try {
			sleep(c.ctx, pause)
		}
	}
	if c.ctx.Err() != nil {
		c.set(nil, ErrClosed)
		return nil
	}
	err := fmt.Errorf("%w: %s: gave up after %s: %w", ErrConnectionLost, c.opts.URL(),
		time.Since(begin).Round(time.Millisecond), cause)
	c.opts.Logger.Error("connection given up", "address", c.opts.URL(), "subnqn", c.opts.SubNQN, "cause", cause)
	c.set(nil, err)
	return nil
}

// shutdownTimeout bounds the orderly end of an association by Close.
const shutdownTimeout = 5 * time.Second

// endAssociation shuts the controller down at the target and closes the association's connections.
func (c *Controller) endAssociation(a *association) error {
	ctx, cancel := context.WithTimeout(context.Background(), shutdownTimeout)
	defer cancel()
	// A target that does not answer in time is left without an orderly end. What was outstanding fails with ErrClosed
	// and ErrIndeterminate.
	_ = a.shutdown(ctx)
	return a.close(ErrClosed)
}

// set makes a the current association, and wakes goroutines that wait for one. With nil, operations wait for the next
// one, or fail with err if it is not nil: then there will be none.
func (c *Controller) set(a *association, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.a = a; a != nil {
		c.latest = a
	}
	if err != nil {
		c.err = err
	}
	close(c.changed)
	c.changed = make(chan struct{})
}

// current returns the current association, waiting for one while the controller reconnects.
//
// Errors: the context's; ErrClosed; ErrConnectionLost when the controller has given up.
func (c *Controller) current(ctx context.Context) (*association, error) {
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

// Close ends the association in order: it shuts the controller down (CC.SHN) and waits, for at most 5 s, until the
// target has completed the shutdown, so that nothing of the association can reach a drive afterwards. Then it closes
// all connections and waits for the goroutines of the controller. Operations that have not completed by then fail with
// ErrClosed. QPairs fail; their owners must still close them. Idempotent.
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

// Err returns why the controller has ended: ErrClosed, or the error with which it has given up to reconnect. It returns
// nil while the controller is connected or reconnects.
func (c *Controller) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// Connected reports whether there is an association now, so that operations do not wait for one.
func (c *Controller) Connected() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.a != nil && c.a.ctx.Err() == nil
}

// Losses returns how many associations were lost so far.
func (c *Controller) Losses() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.losses
}

// KeepAliveUnanswered returns how long ago the Keep Alive was sent that the target has not answered, of the association
// that there is or, after its loss, of the last one; 0: it has answered all. A target that is alive answers at once.
func (c *Controller) KeepAliveUnanswered() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	if sent := c.latest.unanswered.Load(); sent != nil {
		return time.Since(*sent)
	}
	return 0
}

// OpenQPair connects an I/O queue pair for one goroutine; Options.QPairs must have reserved it. The QPair ends with the
// current association: after a loss, close it and open another one, which belongs to a new association.
//
// Errors: ErrUnsupported when no queue is left; otherwise as Connect.
func (c *Controller) OpenQPair(ctx context.Context) (*QPair, error) {
	a, err := c.current(ctx)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, c.opts.ConnectTimeout)
	defer cancel()
	return a.openQPair(ctx)
}

// op describes an operation.
type op struct {
	name string
	// admin: its command goes to the admin queue.
	admin bool
	// repeat: the operation may be carried out twice, so that it is repeated after a loss of the connection and after a
	// status of a transient nature.
	repeat bool
	// resend, if set, is called when a command that was sent and not answered is about to be sent again. It may change
	// the command's data. With an error the operation fails as one that is not repeated.
	resend func() error
}

// do runs the commands of an operation (one, or a fused pair) and repeats them as o allows. A nil error means that all
// of them have completed, with whatever status.
//
// Errors: ErrConnectionLost, ErrClosed, ErrInvalid, ErrUnsupported; the context's. ErrIndeterminate besides if commands
// that change something were sent and not answered.
func (c *Controller) do(ctx context.Context, o op, cmds []Command, comps []Completion) error {
	unanswered := false
	fail := func(err error) error {
		if unanswered && modifies(o, &cmds[0].SQE) {
			return fmt.Errorf("%s: %w: %w", o.name, ErrIndeterminate, err)
		}
		return fmt.Errorf("%s: %w", o.name, err)
	}
	for attempt := 0; ; attempt++ {
		// After a loss, live returns an association only when its admin Connect has succeeded: this is what keeps a
		// repeated write behind the fence. A queue that has failed ends its association before it reports the failure.
		a, err := c.current(ctx)
		if err != nil {
			return fail(err)
		}
		if unanswered && o.resend != nil {
			if err := o.resend(); err != nil {
				return fail(err)
			}
		}
		if err := c.try(ctx, a, o, cmds, comps); err != nil {
			var sent *host.SentError
			unanswered = unanswered || errors.As(err, &sent)
			if o.repeat && errors.Is(err, ErrConnectionLost) && ctx.Err() == nil {
				continue
			}
			return fail(err)
		}
		// Command Interrupted may leave open what was done: the next copy is a retry, if there can be one.
		unanswered = o.resend != nil && comps[0].Status.Code() == nvme.CommandInterrupted
		if !o.repeat || attempt >= c.opts.MaxRetries || !host.Passing(comps[0].Status) {
			return nil
		}
		if !sleep(ctx, time.Duration(attempt+1)*50*time.Millisecond) {
			return fail(ctx.Err())
		}
	}
}

// modifies reports whether a command may change something at the target.
func modifies(o op, e *SQE) bool {
	op := e.Opcode()
	switch {
	case op == nvme.OpFabrics:
		return e.FCTYPE() != nvme.FabricsPropertyGet
	case o.admin:
		return op != nvme.AdminIdentify && op != nvme.AdminGetLogPage && op != nvme.AdminGetFeatures
	}
	switch op {
	case nvme.CmdRead, nvme.CmdCompare, nvme.CmdVerify, nvme.CmdFlush, nvme.CmdKVList, nvme.CmdKVExist,
		nvme.CmdKVXRetrieve, nvme.CmdKVScan, nvme.CmdKVCopyOut, nvme.CmdKVCount, nvme.CmdKVDigest:
		return e.Fuse() != 0 // a fused Compare comes with a Write
	}
	return true // nvme.CmdKVRetrieve has the opcode of Read
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

// sleep returns true after d, or false when ctx is done.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
