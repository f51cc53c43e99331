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
	"jbofd/client/internal/hosttcp"
	"jbofd/client/internal/hostverbs"
	"jbofd/client/internal/window"
	"jbofd/internal/nvme"
)

// adminInCapsule is how much data an admin or fabrics command may carry in its capsule
// over TCP.
const adminInCapsule = 8192

// maxRDMAInCapsule bounds the data in a capsule over RDMA, where each command that a queue can have
// outstanding has a capsule of its own.
const maxRDMAInCapsule = 16 << 10

// maxAborts bounds the Aborts outstanding, whatever the target allows; adminUsers is how many
// of the admin queue's commands are left to callers when Aborts, the Keep Alive and the
// Asynchronous Event Request have theirs.
const (
	maxAborts  = 4
	adminUsers = adminDepth - maxAborts - 2
)

// association is one life of a controller: from Connect on the admin queue to the loss of any
// of its connections.
type association struct {
	opts   Options
	cntlid uint16
	cap    nvme.CAP
	vs     nvme.VS
	cc     nvme.CC
	id     nvme.IdentifyController
	// depth is what an I/O queue may have outstanding; inCapsule what its commands may carry.
	depth, inCapsule int
	// ioQueues is how many I/O queues the target grants.
	ioQueues int

	// gate keeps the host within its credits; nil: the target grants none.
	gate *window.Gate

	admin *hostconn.Queue
	io    []*hostconn.Queue
	next  atomic.Uint32 // the I/O queue for the next operation
	// aborts, of capacity ACL+1, bounds the Aborts outstanding.
	aborts chan struct{}

	// users, of capacity adminUsers, is held by callers' admin commands, so that Keep
	// Alive never waits for a place.
	users chan struct{}

	ctx    context.Context // ends with the association
	cancel context.CancelCauseFunc
	wg     sync.WaitGroup

	mu     sync.Mutex
	qpairs map[*QPair]struct{}
	qids   []bool // I/O queue identifiers in use, qids[0] is QID 1
}

// connectAssociation builds an association: connections, Connect, controller enabled, I/O
// queues connected. known, if not nil, is the gate of the association before. ctx bounds the
// attempt.
func connectAssociation(ctx context.Context, o Options, known *window.Gate) (a *association, err error) {
	actx, cancel := context.WithCancelCause(context.Background())
	a = &association{opts: o, ctx: actx, cancel: cancel, qpairs: map[*QPair]struct{}{}, users: make(chan struct{}, adminUsers)}
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
	if err := a.askForCredits(ctx, known); err != nil {
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
	a.qids = make([]bool, a.ioQueues)
	if err := a.configureEvents(ctx); err != nil {
		return a, err
	}
	for range min(o.Queues, a.ioQueues-o.QPairs) {
		id, err := a.takeQID()
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

// openQueue connects queue id and starts its goroutines. Its failure ends the association.
func (a *association) openQueue(ctx context.Context, id uint16, depth int) (*hostconn.Queue, error) {
	w, err := a.openWire(ctx, wire{qid: id, depth: depth})
	if err != nil {
		return nil, err
	}
	q := hostconn.NewQueue(w, id, a.fail)
	if err := a.fabricsConnect(ctx, id, depth, func(ctx context.Context, c *Command) (Completion, error) {
		var comps [1]Completion
		err := q.Do(ctx, []Command{*c}, comps[:])
		return comps[0], err
	}); err != nil {
		return nil, errors.Join(err, q.Close(ErrClosed))
	}
	q.SetInCapsule(a.inCapsuleFor(id))
	if id != 0 {
		q.SetGate(a.gate)
	}
	return q, nil
}

// wire is a connection to open for a queue.
type wire struct {
	qid   uint16
	depth int
	// direct: the queue never gives a buffer back before its command has completed.
	direct bool
}

// openWire connects for a queue, up to its Connect command.
func (a *association) openWire(ctx context.Context, w wire) (c host.Conn, err error) {
	if a.opts.Transport == RDMA {
		c, err = hostverbs.Dial(ctx, hostverbs.Config{
			Address: a.opts.Address, QID: w.qid, CNTLID: a.cntlid, Depth: w.depth, InCapsuleBytes: a.inCapsuleFor(w.qid),
			Direct: w.direct, Memory: a.opts.memory,
		})
	} else {
		c, err = a.openTCP(ctx, w)
	}
	if err != nil {
		return nil, fmt.Errorf("queue %d: %w", w.qid, err)
	}
	return c, nil
}

// openTCP dials and exchanges ICReq and ICResp.
func (a *association) openTCP(ctx context.Context, w wire) (*hostconn.Conn, error) {
	ho := hosttcp.Options{
		Depth: w.depth, HeaderDigest: a.opts.HeaderDigest, DataDigest: a.opts.DataDigest, MaxR2T: a.opts.MaxR2T,
		InCapsuleBytes: adminInCapsule, // Connect is a fabrics command on every queue
	}
	if w.qid == 0 {
		ho.RecvBytes = 16 << 10
	}
	c, err := hostconn.Dial(ctx, a.opts.Address, ho)
	if err != nil {
		return nil, err
	}
	if err := c.Handshake(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", a.opts.Address, hostconn.Classify(err)), c.Close())
	}
	return c, nil
}

// inCapsuleFor is how much data commands on queue id may carry in their capsules.
func (a *association) inCapsuleFor(id uint16) int {
	switch {
	case a.opts.Transport == RDMA && id == 0:
		return 0 // as Linux has it: the specification names no size before Identify
	case a.opts.Transport == RDMA:
		return min(a.inCapsule, maxRDMAInCapsule)
	case id == 0:
		return adminInCapsule
	}
	return a.inCapsule
}

// fabricsConnect sends Connect for queue id through do.
func (a *association) fabricsConnect(ctx context.Context, id uint16, depth int, do func(context.Context, *Command) (Completion, error)) error {
	var d nvme.ConnectData
	d.SetHostID(a.opts.HostID)
	d.SetHostNQN(a.opts.HostNQN)
	d.SetSubNQN(a.opts.SubNQN)
	d.SetCNTLID(nvme.CNTLIDDynamic)
	c := Command{Data: d[:]}
	e := c.SQE.Connect()
	e.Init()
	e.SetQID(id)
	// One entry of a queue always stays free, and SQSIZE is 0-based.
	e.SetSQSIZE(uint16(depth))
	if id == 0 {
		if a.opts.KATO > 0 {
			e.SetKATO(uint32(a.opts.KATO.Milliseconds()))
		}
	} else {
		d.SetCNTLID(a.cntlid)
	}
	comp, err := do(ctx, &c)
	if err != nil {
		return fmt.Errorf("Connect of queue %d: %w", id, err)
	}
	var cqe nvme.CQE
	cqe.SetResult64(comp.Result)
	if comp.Status.Code() == nvme.ConnectInvalidParameters {
		f := cqe.ConnectFault()
		return fmt.Errorf("%w (%s)", &StatusError{Command: "Connect to " + a.opts.SubNQN, Status: comp.Status}, f.What)
	}
	if err := host.CheckStatus("Connect to "+a.opts.SubNQN, comp.Status); err != nil {
		return err
	}
	if id != 0 {
		return nil
	}
	a.cntlid = cqe.ConnectCNTLID()
	if cqe.DW0()&(nvme.AUTHREQATR|nvme.AUTHREQASCR) != 0 {
		return fmt.Errorf("%w: the target demands authentication", ErrUnsupported)
	}
	return nil
}

// enable reads the controller's capabilities, enables it and identifies it.
func (a *association) enable(ctx context.Context) error {
	v, err := a.property(ctx, nvme.PropCAP)
	if err != nil {
		return err
	}
	a.cap = nvme.CAP(v)
	a.cc = nvme.CC(0).WithEN(true).WithIOSQES(nvme.CCIOSQES64).WithIOCQES(nvme.CCIOCQES16)
	switch css := a.cap.CSS(); {
	case css&nvme.CAPCSSIOCS != 0:
		a.cc = a.cc.WithCSS(nvme.CCCSSIOCS)
	case css&nvme.CAPCSSNVM == 0 && css&nvme.CAPCSSAdmin != 0:
		a.cc = a.cc.WithCSS(nvme.CCCSSAdmin)
	}
	if err := a.setProperty(ctx, nvme.PropCC, uint64(a.cc)); err != nil {
		return err
	}
	// CAP.TO is in units of 500 ms.
	to := time.Duration(max(int(a.cap.TO()), 1)) * 500 * time.Millisecond
	tctx, cancel := context.WithTimeout(ctx, to)
	defer cancel()
	if err := a.waitStatus(tctx, "CSTS.RDY", func(s nvme.CSTS) bool { return s.RDY() }); err != nil {
		return err
	}
	if v, err = a.property(ctx, nvme.PropVS); err != nil {
		return err
	}
	a.vs = nvme.VS(v)
	var e SQE
	e.SetOpcode(nvme.AdminIdentify)
	e.Identify().SetCNS(nvme.CNSController)
	if _, err := a.adminRead(ctx, "Identify Controller", e, a.id[:]); err != nil {
		return err
	}
	a.aborts = make(chan struct{}, min(int(a.id.ACL())+1, maxAborts))
	if a.opts.discovery {
		return nil
	}
	if err := a.id.Check(); err != nil {
		return fmt.Errorf("%w: %w", ErrProtocol, err)
	}
	a.depth = max(min(a.opts.QueueDepth, int(a.cap.MQES())), 1)
	if m := int(a.id.MAXCMD()); m > 0 {
		a.depth = min(a.depth, m)
	}
	if a.id.ICDOFF() == 0 {
		a.inCapsule = max(int(min(a.id.IOCCSZ(), 1<<20)*16)-nvme.SQESize, 0)
	}
	return nil
}

// waitStatus reads CSTS until ok says so, the controller fails or ctx is done.
func (a *association) waitStatus(ctx context.Context, what string, ok func(nvme.CSTS) bool) error {
	t := time.NewTimer(0)
	defer t.Stop()
	for wait := time.Millisecond; ; wait = min(2*wait, 100*time.Millisecond) {
		v, err := a.property(ctx, nvme.PropCSTS)
		if err != nil {
			return err
		}
		if s := nvme.CSTS(v); s.CFS() {
			return fmt.Errorf("controller fatal status while waiting for %s (CSTS %#x)", what, v)
		} else if ok(s) {
			return nil
		}
		t.Reset(wait)
		select {
		case <-t.C:
		case <-ctx.Done():
			return fmt.Errorf("waiting for %s (CSTS %#x): %w", what, v, ctx.Err())
		}
	}
}

// configureEvents asks for those asynchronous events that the host knows.
func (a *association) configureEvents(ctx context.Context) error {
	mask := a.id.OAES() & (nvme.AECNamespace | nvme.AECANA | nvme.AECDiscovery)
	if mask == 0 {
		return nil
	}
	var e SQE
	e.SetOpcode(nvme.AdminSetFeatures)
	e.Features().SetFID(nvme.FIDAsyncEvent)
	e.Features().SetValue(mask)
	_, err := a.adminCommand(ctx, "Set Features (Asynchronous Event Configuration)", e, nil)
	var st *StatusError
	if errors.As(err, &st) {
		return nil // events are a convenience
	}
	return err
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

// adminRead is adminCommand for one that must fill data.
func (a *association) adminRead(ctx context.Context, name string, e SQE, data []byte) (Completion, error) {
	c, err := a.adminCommand(ctx, name, e, data)
	if err == nil && int(c.Received) != len(data) {
		err = fmt.Errorf("%w: %s: %d bytes of data, want %d", ErrProtocol, name, c.Received, len(data))
	}
	return c, err
}

// run is Queue.Do, plus an Abort for a command whose caller left.
func (a *association) run(ctx context.Context, q *hostconn.Queue, cmds []Command, comps []Completion) error {
	err := q.Do(ctx, cmds, comps)
	var d *hostconn.DetachedError
	if errors.As(err, &d) {
		a.abort(q.ID(), d.CID)
		return d.Cause
	}
	return err
}

// abort sends an Abort if the controller's limit leaves room, and does not wait for it. The aborted
// command completes one way or the other; nothing depends on which.
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
		// Aborting is a favour asked of the target: no outcome changes anything here.
		_ = a.admin.Do(a.ctx, []Command{{SQE: e}}, comps[:])
	}()
}

// pick returns an I/O queue.
func (a *association) pick() *hostconn.Queue {
	if len(a.io) == 1 {
		return a.io[0]
	}
	return a.io[int(a.next.Add(1))%len(a.io)]
}

// takeQID takes a free I/O queue identifier.
func (a *association) takeQID() (uint16, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for i, used := range a.qids {
		if !used {
			a.qids[i] = true
			return uint16(i + 1), nil
		}
	}
	return 0, fmt.Errorf("%w: all %d I/O queues that the target grants are in use", ErrUnsupported, len(a.qids))
}

func (a *association) putQID(id uint16) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.qids[id-1] = false
}

// openQPair connects an I/O queue for one goroutine.
func (a *association) openQPair(ctx context.Context) (p *QPair, err error) {
	id, err := a.takeQID()
	if err != nil {
		return nil, err
	}
	w, err := a.openWire(ctx, wire{qid: id, depth: a.depth, direct: true})
	if err != nil {
		a.putQID(id)
		return nil, err
	}
	p = &QPair{id: id, w: w, spin: a.opts.Spin, base: time.Now(), onClose: a.dropQPair}
	a.mu.Lock()
	a.qpairs[p] = struct{}{}
	dead := a.ctx.Err() != nil
	a.mu.Unlock()
	if dead {
		return nil, errors.Join(context.Cause(a.ctx), p.Close())
	}
	err = a.fabricsConnect(ctx, id, a.depth, func(ctx context.Context, c *Command) (Completion, error) {
		stop := context.AfterFunc(ctx, func() { p.interrupt(ctx.Err()) })
		defer stop()
		if _, err := p.Submit([]Command{*c}); err != nil {
			return Completion{}, err
		}
		var comps [1]Completion
		_, err := p.Poll(comps[:], -1)
		return comps[0], err
	})
	if err != nil {
		return nil, errors.Join(err, p.Close())
	}
	w.Machine().SetInCapsuleBytes(a.inCapsuleFor(id))
	p.passGate(a.gate)
	return p, nil
}

func (a *association) dropQPair(p *QPair) {
	a.mu.Lock()
	delete(a.qpairs, p)
	a.mu.Unlock()
	a.putQID(p.id)
}

// fail ends the association; the first cause stays. It does not wait.
func (a *association) fail(err error) { a.cancel(err) }

// close ends the association with why, unless it has ended, and waits for its
// goroutines.
func (a *association) close(why error) error {
	a.mu.Lock()
	a.cancel(why)
	for p := range a.qpairs {
		p.interrupt(fmt.Errorf("%w: %w", ErrConnectionLost, context.Cause(a.ctx)))
	}
	a.mu.Unlock()
	cause := context.Cause(a.ctx)
	var errs []error
	for _, q := range a.io {
		errs = append(errs, q.Close(cause))
	}
	if a.admin != nil {
		errs = append(errs, a.admin.Close(cause))
	}
	a.wg.Wait()
	return errors.Join(errs...)
}

// shutdown tells the controller that the host leaves, as an orderly end of the
// association.
func (a *association) shutdown(ctx context.Context) error {
	if err := a.setProperty(ctx, nvme.PropCC, uint64(a.cc.WithSHN(nvme.SHNNormal))); err != nil {
		return err
	}
	return a.waitStatus(ctx, "shutdown (CSTS.SHST)", func(s nvme.CSTS) bool { return s.SHST() == 2 })
}

// maintain keeps the association alive until it ends: Keep Alives and command timeouts.
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
			_, err := a.adminCommand(ctx, "Keep Alive", e, nil)
			cancel()
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
func nameUUID(name string) nvme.UUID {
	h := sha256.Sum256([]byte("jbofd host " + name))
	u := nvme.UUID(h[:16])
	u[6] = u[6]&0x0f | 0x80
	u[8] = u[8]&0x3f | 0x80
	return u
}
