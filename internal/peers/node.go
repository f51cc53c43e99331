package peers

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"jbofd/client"
	"jbofd/internal/cluster"
	"jbofd/internal/nvme"
	"jbofd/internal/turn"
	"jbofd/internal/uuid"
)

// node is another node and the connection to it.
type node struct {
	Node
	p      *Peers
	log    *slog.Logger
	queues [numQueues]queue
	// ctx ends with that of Peers, and when the node is not one of the others any more.
	ctx    context.Context
	cancel context.CancelFunc
	// writes is how many queues for writes there are, 1 to maxWrites. It does not get less, so that a command that was
	// put into one of them before a loss is not left there.
	writes atomic.Uint32
	// keep is how many Forwards of a range may be kept, at least 1: see the package comment.
	keep atomic.Uint32
	// tick counts quarters of Config.Timeout while the node is connected.
	tick atomic.Uint32
	// heardNS is when the node has answered a command last, or was connected.
	heardNS atomic.Int64
	// asked has a value when the node's goroutine has work: another view, or namespaces to look up.
	asked chan struct{}
	// looks: the namespaces are to be looked up. changed: they are, because the node says that they have changed. more:
	// SetView has found partitions among them that it had not asked for before.
	looks, changed, more atomic.Bool
	// hurry has a value when the node may be reached again, or is needed: it is to be connected to at once.
	hurry chan struct{}
	// failed has why a queue of the present connection has ended.
	failed chan error

	// telling guards calls of Connected and Disconnected. retired: there are no more, because the name is that of
	// another node, or of none.
	telling sync.Mutex
	retired bool

	mu sync.Mutex
	// targets are the node's partitions in the present view.
	targets map[uuid.UUID]*target
	// admitted is the node's process that the view admits; 0: none.
	admitted cluster.Incarnation
	// ranges are those of which this node sends Forwards to the other.
	ranges []uint16
	// depth is that of the present queues; 0: there are none.
	depth int
	// spaces are the namespaces of the present connection; nil: there is none.
	spaces map[uuid.UUID]uint32
}

func newNode(p *Peers, cfg Node) (*node, error) {
	n := &node{Node: cfg, p: p, log: p.cfg.Log.With("peer", cfg.Name, "address", cfg.Address),
		asked: make(chan struct{}, 1), hurry: make(chan struct{}, 1),
		failed: make(chan error, 1)}
	n.ctx, n.cancel = context.WithCancel(p.ctx)
	n.writes.Store(1)
	n.keep.Store(1)
	for i := range n.queues {
		q := &n.queues[i]
		q.node = n
		if err := q.driver.Init(turn.Config{Machine: q}); err != nil {
			for k := range i {
				n.queues[k].driver.Close()
			}
			n.cancel()
			return nil, err
		}
	}
	return n, nil
}

// closeQueues ends the drivers of the queues, which still return the commands of those that have found the node before
// it was removed. The node's goroutine ends, or never ran.
func (n *node) closeQueues() {
	n.cancel()
	for i := range n.queues {
		n.queues[i].driver.Close()
	}
}

// ask wakes the node's goroutine.
func (n *node) ask() {
	select {
	case n.asked <- struct{}{}:
	default:
	}
}

// redial has the node's goroutine connect at once, if it has no connection.
func (n *node) redial() {
	select {
	case n.hurry <- struct{}{}:
	default:
	}
}

// calm cancels a redial.
func (n *node) calm() {
	select {
	case <-n.hurry:
	default:
	}
}

// look asks for the namespaces to be looked up.
func (n *node) look() { // hot: 0 allocs
	if !n.looks.Swap(true) {
		n.ask()
	}
}

// target returns the target of a partition: the one that there is, or another one, which setTargets is to add.
func (n *node) target(id uuid.UUID) *target {
	n.mu.Lock()
	defer n.mu.Unlock()
	if t := n.targets[id]; t != nil {
		return t
	}
	t := &target{node: n, id: id}
	t.nsid.Store(n.spaces[id])
	return t
}

// setTargets sets the partitions of a view, the ranges of which this node sends them Forwards, and the node's process.
func (n *node) setTargets(targets map[uuid.UUID]*target, ranges []uint16, admitted cluster.Incarnation) {
	n.mu.Lock()
	n.ranges, n.admitted = ranges, admitted
	n.shareLocked()
	for id, t := range targets {
		if n.targets[id] != t && n.spaces[id] != 0 {
			n.more.Store(true)
		}
	}
	n.targets = targets
	missing := n.resolveLocked() > 0
	n.mu.Unlock()
	if missing {
		n.looks.Store(true)
	}
	n.redial()
	n.ask()
}

// writesLocked returns how many queues for writes there should be, so that each range may keep two Forwards or more.
func (n *node) writesLocked() int {
	half := max(n.depth/2, 1)
	return min(max((2*len(n.ranges)+half-1)/half, 1), maxWrites)
}

// shareLocked sets keep, and returns whether there is a queue with more ranges than it can keep Forwards.
func (n *node) shareLocked() (short bool) {
	if n.depth == 0 {
		return false
	}
	var count [maxWrites]int
	for _, r := range n.ranges {
		count[uint32(r)%n.writes.Load()]++
	}
	most, half := slices.Max(count[:]), max(n.depth/2, 1)
	n.keep.Store(uint32(max(half/max(most, 1), 1)))
	return most > half
}

// outgrown reports whether the view has so many ranges that more queues for writes are needed than there are.
func (n *node) outgrown() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.shareLocked() && uint32(n.writesLocked()) > n.writes.Load()
}

// resolveLocked sets the namespaces of the targets, and returns how many have none. The caller holds mu.
func (n *node) resolveLocked() (missing int) {
	for id, t := range n.targets {
		nsid := n.spaces[id]
		if t.nsid.Store(nsid); nsid == 0 {
			missing++
		}
	}
	return missing
}

// setSpaces sets the namespaces that the node has, or none with nil. It returns how many targets have been found that
// had no namespace before, and how many have none.
func (n *node) setSpaces(spaces map[uuid.UUID]uint32) (found, missing int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for id, t := range n.targets {
		if t.nsid.Load() == 0 && spaces[id] != 0 {
			found++
		}
	}
	n.spaces = spaces
	return found, n.resolveLocked()
}

// wanted reports whether the view has partitions of the node.
func (n *node) wanted() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.targets) > 0
}

// association is a connection to the node.
type association struct {
	c      *client.Controller
	qpairs [numQueues]*client.QPair
	links  [numQueues]*link
}

// run is the node's goroutine.
func (n *node) run() {
	defer n.p.wg.Done()
	defer n.closeQueues()
	pause := n.p.cfg.MinPause
	said := "" // what was logged last of why the node cannot be reached
	cutShort := false
	var stuck stuck
	for n.awaitWanted() {
		process := n.process()
		var a *association
		var err error
		// Of two attempts in a row, one may take its time.
		if a, cutShort, err = n.attempt(!cutShort); cutShort {
			n.disconnected(Loss{})
			continue
		}
		if err == nil {
			n.log.Info("connected to a node")
			said = ""
			began := time.Now()
			err = n.serve(a)
			if n.ctx.Err() == nil && !errors.Is(err, errUnwanted) && !errors.Is(err, errOutgrown) {
				n.disconnected(n.loss(a, err)) // the end may take long
			}
			n.end(a, err)
			if n.ctx.Err() != nil {
				return
			}
			n.calm() // a redial from the time when there was a connection
			if errors.Is(err, errUnwanted) {
				n.log.Info("disconnected from a node, which is not in the view")
				continue
			}
			if errors.Is(err, errOutgrown) {
				n.log.Info("connecting to a node again, with more queues for more ranges")
				continue
			}
			n.log.Warn("connection to a node lost", "cause", err)
			if hold := stuck.after(err, time.Since(began), n.p.cfg.Hold); hold > 0 {
				n.log.Error("commands to a node get no answer, although it can be connected to: it counts as out of "+
					"reach (is there a part of the network that drops long packets?)", "for", hold.String())
				if n.hold(hold, process) {
					stuck.reset()
				}
				continue
			}
			if time.Since(began) > n.p.cfg.MaxPause {
				pause = n.p.cfg.MinPause
			}
		} else if n.ctx.Err() == nil {
			if why := reason(err); why != said {
				said = why
				n.log.Warn("a node cannot be reached", "cause", err)
			}
			n.disconnected(Loss{})
		}
		if n.sleep(pause/2 + rand.N(pause/2+1)) {
			pause = n.p.cfg.MinPause
		} else {
			pause = min(2*pause, n.p.cfg.MaxPause)
		}
	}
}

// attempt connects. With mayCut, an attempt that takes long is cut short when another one should begin at once: its
// first packets may have been lost while the node was away, and TCP takes up to seconds until it sends them again.
func (n *node) attempt(mayCut bool) (a *association, cutShort bool, err error) {
	ctx, cancel := context.WithTimeout(n.ctx, n.p.cfg.Timeout)
	defer cancel()
	n.calm() // this attempt is what a redial before it has asked for
	over := make(chan struct{})
	var watching sync.WaitGroup
	if mayCut {
		watching.Go(func() {
			long := time.NewTimer(n.p.cfg.KATO / 2)
			defer long.Stop()
			select {
			case <-long.C:
			case <-over:
				return
			}
			select {
			case <-n.hurry:
				cutShort = true
				cancel()
			case <-over:
			}
		})
	}
	a, err = n.connect(ctx)
	close(over)
	watching.Wait()
	return a, cutShort && err != nil, err
}

// errUnwanted ends the connection to a node that is not in the view.
var errUnwanted = errors.New("the view has no partitions of the node")

// errOutgrown ends a connection that has too few queues.
var errOutgrown = errors.New("the view has more ranges than the queues can keep Forwards of")

// awaitWanted waits until the view has the node; false: Close was called.
func (n *node) awaitWanted() bool {
	for !n.wanted() {
		select {
		case <-n.asked:
		case <-n.ctx.Done():
			return false
		}
	}
	return n.ctx.Err() == nil
}

// redialPause is how soon after an attempt the next one may begin.
const redialPause = 50 * time.Millisecond

// sleep waits before the next attempt. hurry: it is to begin soon.
func (n *node) sleep(d time.Duration) (hurry bool) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return false
	case <-n.ctx.Done():
		return false
	case <-n.hurry:
		t.Reset(min(d, redialPause))
	}
	select {
	case <-t.C:
	case <-n.ctx.Done():
	}
	return true
}

// reason tells errors of connecting apart, without what differs from one attempt to the next.
func reason(err error) string {
	var st *client.StatusError
	var errno syscall.Errno
	switch {
	case errors.As(err, &st):
		return st.Status.String()
	case errors.As(err, &errno):
		return errno.Error()
	}
	for _, e := range []error{client.ErrUnsupported, client.ErrInvalid, client.ErrProtocol, client.ErrTimeout,
		context.DeadlineExceeded, client.ErrConnectionLost} {
		if errors.Is(err, e) {
			return e.Error()
		}
	}
	return "other"
}

// connect builds an association and its queues.
func (n *node) connect(ctx context.Context) (a *association, err error) {
	cfg := &n.p.cfg
	n.looks.Store(false)
	n.changed.Store(false)
	a = &association{}
	local := cfg.LocalAddress
	if strings.HasPrefix(n.Address, "rdma://") {
		local = cfg.LocalRDMA
	}
	a.c, err = client.Connect(ctx, client.Options{
		Address: n.Address, LocalAddress: local, SubNQN: n.SubNQN, HostNQN: cfg.HostNQN,
		Replication: true, NoExtendedKV: true,
		// A Forward that is kept would hold credit that the Durable which ends it may need.
		Credits: client.CreditsOff,
		QPairs:  numQueues, QueueDepth: cfg.QueueDepth, KATO: cfg.KATO, ConnectTimeout: cfg.Timeout,
		CommandTimeout: cfg.Timeout,
		// The node's goroutine reconnects: see "Losses" above.
		CtrlLossTimeout: -1,
		RDMA:            cfg.RDMA, BounceBytes: cfg.BounceBytes,
		OnEvent: func(e client.Event) {
			if e.Kind == client.EventNamespaces {
				n.changed.Store(true)
				n.ask()
			}
		},
	})
	if err != nil {
		return nil, err
	}
	for _, i := range []int{ships, fills, 0} {
		if a.qpairs[i], err = a.c.OpenQPair(ctx); err != nil {
			return nil, errors.Join(err, a.close())
		}
	}
	n.mu.Lock()
	n.depth = a.qpairs[0].Depth()
	want := max(n.writesLocked(), int(n.writes.Load()))
	n.mu.Unlock()
	for i := 1; i < want; i++ {
		if a.qpairs[i], err = a.c.OpenQPair(ctx); err != nil {
			return nil, errors.Join(err, a.close())
		}
	}
	n.mu.Lock()
	n.writes.Store(uint32(want))
	short := n.shareLocked()
	n.mu.Unlock()
	if short {
		n.log.Warn("too few commands may be outstanding at a node for the ranges that are sent there: writes may "+
			"stall for a while (limits.queue_depth of the node)", "queues", want, "depth", a.qpairs[0].Depth())
	}
	// Before commands are sent, which need it.
	if _, err := n.lookUp(a); err != nil {
		n.setSpaces(nil)
		return nil, errors.Join(err, a.close())
	}
	return a, nil
}

// close closes an association without links.
func (a *association) close() error {
	for _, qp := range a.qpairs {
		if qp != nil {
			qp.Shutdown()
			_ = qp.Close() // an error says that the connection is gone
		}
	}
	return a.c.Close()
}

// serve uses an association until it ends, and returns why: an error of a queue or of the node; errUnwanted or
// errOutgrown; client.ErrClosed. It begins to use the queues, calls Connected, checks the queues with each tick, and
// looks the namespaces up as long as partitions of the view are missing: connect has done that once.
func (n *node) serve(a *association) error {
	cfg := &n.p.cfg
	select {
	case <-n.failed: // the end of the last association
	default:
	}
	n.more.Store(false) // Connected is called anyway
	n.heardNS.Store(n.queues[0].driver.Now())
	for i, qp := range a.qpairs {
		if qp != nil {
			a.links[i] = n.queues[i].up(qp)
		}
	}
	n.connected()

	clock := time.NewTicker(max(cfg.Timeout/ticks, time.Millisecond))
	defer clock.Stop()
	// looking runs while the namespaces are to be looked up. There is a pause between two look-ups, so that a node
	// whose partitions are not there is asked from time to time, however many commands are for them.
	looking := time.NewTimer(0)
	looking.Stop()
	pause, last := cfg.MinPause, time.Now()
	if n.missing() {
		n.looks.Store(true)
	}
	for {
		if n.changed.Swap(false) {
			pause = cfg.MinPause
			n.looks.Store(true)
		}
		if n.looks.Swap(false) {
			looking.Reset(max(time.Until(last.Add(pause)), 0))
		}
		select {
		case <-n.ctx.Done():
			return client.ErrClosed
		case err := <-n.failed:
			return err
		case <-n.asked:
			if !n.wanted() {
				return errUnwanted
			}
			if n.outgrown() {
				return errOutgrown
			}
			if n.more.Swap(false) {
				n.connected()
			}
		case <-clock.C:
			now := n.tick.Add(1)
			for i := range n.queues {
				n.queues[i].check(now)
			}
		case <-looking.C:
			found, err := n.lookUp(a)
			if err != nil {
				return err
			}
			last, pause = time.Now(), min(2*pause, cfg.MaxPause)
			if found {
				pause = cfg.MinPause
				n.connected()
			}
			if n.missing() {
				n.looks.Store(true)
			}
		}
	}
}

// end ends an association. All commands have ended when it returns.
func (n *node) end(a *association, err error) {
	n.setSpaces(nil)
	for i, l := range a.links {
		if l != nil {
			n.queues[i].end(l, err) // first all, then wait
		}
	}
	for i, l := range a.links {
		if l != nil {
			n.queues[i].down(l, err)
			a.qpairs[i] = nil
		}
	}
	if err := a.close(); err != nil {
		n.log.Debug("end of a connection to a node", "cause", err)
	}
}

// missing reports whether some partition of the view has no known namespace.
func (n *node) missing() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, t := range n.targets {
		if t.nsid.Load() == 0 {
			return true
		}
	}
	return false
}

// lookUp finds the partitions among the node's namespaces. found: there are some that were not known before.
//
// Errors: that of an association that has ended; that of a node that does not answer.
func (n *node) lookUp(a *association) (found bool, err error) {
	ctx, cancel := context.WithTimeout(n.ctx, n.p.cfg.Timeout)
	defer cancel()
	ids, err := a.c.NamespaceIDs(ctx)
	if err != nil {
		return false, fmt.Errorf("namespaces: %w", err)
	}
	spaces := make(map[uuid.UUID]uint32, len(ids))
	for _, id := range ids {
		d, err := a.c.Describe(ctx, id)
		var st *client.StatusError
		switch {
		case errors.As(err, &st), errors.Is(err, client.ErrNamespaceGone):
			continue // it was removed meanwhile
		case err != nil:
			return false, fmt.Errorf("namespace %d: %w", id, err)
		}
		if u := uuid.UUID(d.UUID); d.CSI == uint8(nvme.CSIKV) && !u.IsZero() {
			spaces[u] = id
		}
	}
	more, _ := n.setSpaces(spaces)
	return more > 0, nil
}
