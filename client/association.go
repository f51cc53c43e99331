package client

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"jbofd/client/internal/host"
	"jbofd/client/internal/hostconn"
	"jbofd/client/internal/window"
	"jbofd/internal/nvme"
	"jbofd/internal/uuid"
)

// maxAborts bounds the outstanding Aborts, whatever the target allows. adminUsers is the number of callers' commands on
// the admin queue: the rest of its depth is reserved for Aborts, the Keep Alive and the Asynchronous Event Request.
const (
	maxAborts  = 4
	adminUsers = adminDepth - maxAborts - 2
)

// association is an association in the sense of NVMe over Fabrics: it begins with Connect on the admin queue and ends
// with the loss of any of its connections, with a reset or with a shutdown.
type association struct {
	opts   Options
	cntlid uint16
	cap    nvme.CAP
	vs     nvme.VS
	cc     nvme.CC
	id     nvme.IdentifyController
	// depth is the number of commands that an I/O queue may have outstanding, inCapsule the bytes of data in a capsule.
	depth, inCapsule int
	// ioQueues is the number of I/O queues that the target grants.
	ioQueues int

	// granted are the extensions that the target has granted: nvme.Ext bits.
	granted uint32
	// gate keeps the host within its credits; nil if the target grants none.
	gate *window.Gate

	admin *hostconn.SharedQPair
	io    []*hostconn.SharedQPair
	next  atomic.Uint32 // selects the I/O queue of the next operation
	// aborts, of capacity ACL+1, bounds the outstanding Aborts.
	aborts chan struct{}

	// users, of capacity adminUsers, bounds callers' admin commands, so that Keep Alive never waits for a slot.
	users chan struct{}

	// unanswered is when the Keep Alive was sent that has no answer; nil: none.
	unanswered atomic.Pointer[time.Time]

	ctx    context.Context // ends with the association
	cancel context.CancelCauseFunc
	wg     sync.WaitGroup

	mu     sync.Mutex
	qpairs map[*QPair]struct{}
	// qids are the I/O queue identifiers, qids[0] that of queue 1; releases counts putQID.
	qids     []qidState
	releases uint64
}

// connectAssociation builds an association: it connects the admin queue, enables the controller and connects the I/O
// queues. known is the gate of the previous association, or nil. ctx bounds the attempt.
func connectAssociation(ctx context.Context, o Options, known *window.Gate) (a *association, err error) {
	actx, cancel := context.WithCancelCause(context.Background())
	a = &association{opts: o, ctx: actx, cancel: cancel, qpairs: map[*QPair]struct{}{}, users: make(chan struct{},
		adminUsers)}
	defer func() {
		if err != nil {
			err = errors.Join(err, a.close(ErrClosed))
		}
	}()
	a.admin, err = a.openQueue(ctx, 0, adminDepth)
	if err != nil {
		return a, err
	}
	if err := a.enable(ctx); err != nil {
		return a, err
	}
	if o.discovery {
		return a, a.configureEvents(ctx)
	}
	if err := a.askForExtensions(ctx, known); err != nil {
		return a, err
	}
	want := o.Queues + o.QPairs
	var e SQE
	e.SetOpcode(nvme.AdminSetFeatures)
	e.Features().SetFID(nvme.FIDNumberOfQueues)
	e.Features().SetValue(nvme.NumberOfQueues(uint16(want), uint16(want)))
	res, err := a.adminCommand(ctx, "Set Features (Number of Queues)", e, nil)
	if err != nil {
		return a, err
	}
	sqs, cqs := nvme.ParseNumberOfQueues(uint32(res.Result))
	a.ioQueues = min(sqs, cqs, want)
	if a.ioQueues <= o.QPairs && o.Queues > 0 {
		return a, fmt.Errorf("%w: the target grants %d I/O queues, %d are wanted", ErrUnsupported, a.ioQueues, want)
	}
	a.qids = make([]qidState, a.ioQueues)
	if err := a.configureEvents(ctx); err != nil {
		return a, err
	}
	for range min(o.Queues, a.ioQueues-o.QPairs) {
		id, _, err := a.takeQID()
		if err != nil {
			return a, err
		}
		q, err := a.openQueue(ctx, id, a.depth)
		if err != nil {
			return a, err
		}
		a.io = append(a.io, q)
	}
	return a, nil
}

// property reads a controller property.
func (a *association) property(ctx context.Context, off uint32) (uint64, error) {
	var e SQE
	e.Property().Init(nvme.FabricsPropertyGet, off)
	c, err := a.adminCommand(ctx, fmt.Sprintf("Property Get %#x", off), e, nil)
	return c.Result, err
}

func (a *association) setProperty(ctx context.Context, off uint32, v uint64) error {
	var e SQE
	e.Property().Init(nvme.FabricsPropertySet, off)
	e.Property().SetVALUE(v)
	_, err := a.adminCommand(ctx, fmt.Sprintf("Property Set %#x", off), e, nil)
	return err
}

// adminCommand runs one command on the admin queue.
func (a *association) adminCommand(ctx context.Context, name string, e SQE, data []byte) (Completion, error) {
	cmds := [1]Command{{SQE: e, Data: data}}
	var comps [1]Completion
	if err := a.run(ctx, a.admin, cmds[:], comps[:]); err != nil {
		return Completion{}, fmt.Errorf("%s: %w", name, err)
	}
	return comps[0], host.CheckStatus(name, comps[0].Status)
}

// adminRead is adminCommand for a command that must fill all of data.
func (a *association) adminRead(ctx context.Context, name string, e SQE, data []byte) (Completion, error) {
	c, err := a.adminCommand(ctx, name, e, data)
	if err == nil && int(c.Received) != len(data) {
		err = fmt.Errorf("%w: %s: %d bytes of data, want %d", ErrProtocol, name, c.Received, len(data))
	}
	return c, err
}

// run is SharedQPair.Do, and sends an Abort for a command whose caller has stopped waiting.
func (a *association) run(ctx context.Context, q *hostconn.SharedQPair, cmds []Command, comps []Completion) error {
	err := q.Do(ctx, cmds, comps)
	if err == nil {
		return nil // before d is allocated
	}
	var d *hostconn.DetachedError
	if errors.As(err, &d) {
		a.abort(q.ID(), d.CID)
		return &host.SentError{Err: d.Cause}
	}
	return err
}

// abort sends an Abort, if the controller's limit allows one more, and does not wait for it. The command completes in
// any case; the Abort only makes it complete earlier.
func (a *association) abort(sqid, cid uint16) {
	select {
	case a.aborts <- struct{}{}:
	default:
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.ctx.Err() != nil {
		return
	}
	a.wg.Add(1)
	go func() {
		defer a.wg.Done()
		defer func() { <-a.aborts }()
		var e SQE
		e.SetOpcode(nvme.AdminAbort)
		e.Abort().SetSQID(sqid)
		e.Abort().SetCID(cid)
		var comps [1]Completion
		// A target need not abort anything: the outcome does not matter.
		_ = a.admin.Do(a.ctx, []Command{{SQE: e}}, comps[:])
	}()
}

// pick returns an I/O queue, each in turn.
func (a *association) pick() *hostconn.SharedQPair {
	if len(a.io) == 1 {
		return a.io[0]
	}
	return a.io[int(a.next.Add(1))%len(a.io)]
}

// maintain sends Keep Alives and checks for command timeouts until the association ends.
func (a *association) maintain() {
	defer a.wg.Done()
	seconds := time.NewTicker(time.Second)
	defer seconds.Stop()
	var keepAlive <-chan time.Time
	if a.opts.KATO > 0 {
		t := time.NewTicker(a.opts.KATO / 2)
		defer t.Stop()
		keepAlive = t.C
	}
	var limit uint32
	if a.opts.CommandTimeout > 0 {
		limit = uint32(max((a.opts.CommandTimeout+time.Second-1)/time.Second, 1))
	}
	for {
		select {
		case <-a.ctx.Done():
			return
		case <-seconds.C:
			a.admin.Tick(limit)
			for _, q := range a.io {
				q.Tick(limit)
			}
		case <-keepAlive:
			var e SQE
			e.SetOpcode(nvme.AdminKeepAlive)
			ctx, cancel := context.WithTimeout(a.ctx, a.opts.KATO)
			sent := time.Now()
			a.unanswered.Store(&sent)
			_, err := a.adminCommand(ctx, "Keep Alive", e, nil)
			cancel()
			if err == nil {
				a.unanswered.Store(nil)
			}
			if err != nil && a.ctx.Err() == nil {
				if errors.Is(err, context.DeadlineExceeded) {
					err = fmt.Errorf("%w: no answer within %s", ErrTimeout, a.opts.KATO)
				}
				a.fail(fmt.Errorf("%w: Keep Alive: %w", ErrConnectionLost, err))
				return
			}
		}
	}
}

// nameUUID derives a UUID (version 8, SHA-256) from a name.
func nameUUID(name string) uuid.UUID {
	h := sha256.Sum256([]byte("jbofd host " + name))
	u := uuid.UUID(h[:16])
	u[6] = u[6]&0x0f | 0x80
	u[8] = u[8]&0x3f | 0x80
	return u
}
