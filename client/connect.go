package client

import (
	"context"
	"errors"
	"fmt"
	"time"

	"jbofd/client/internal/host"
	"jbofd/client/internal/hostconn"
	"jbofd/client/internal/hosttcp"
	"jbofd/client/internal/hostverbs"
	"jbofd/internal/nvme"
)

// adminInCapsule is how many bytes of data the capsule of an admin or fabrics command may carry over TCP.
const adminInCapsule = 8192

// maxRDMAInCapsule bounds the data in a capsule over RDMA, where a queue has memory for a capsule per command.
const maxRDMAInCapsule = 16 << 10

// openQueue connects queue id for any number of goroutines. The failure of the queue ends the association.
func (a *association) openQueue(ctx context.Context, id uint16, depth int) (*hostconn.SharedQPair, error) {
	w, err := a.openWire(ctx, wire{qid: id, depth: depth})
	if err != nil {
		return nil, err
	}
	q := hostconn.NewSharedQPair(w, id, a.fail)
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

// wire describes the connection of a queue.
type wire struct {
	qid   uint16
	depth int
	// direct: the queue never returns a buffer before its command has completed, so that a device may access it.
	direct bool
}

// openWire opens the connection of a queue. The Connect command must follow.
func (a *association) openWire(ctx context.Context, w wire) (c hostconn.Conn, err error) {
	if a.opts.Transport == RDMA {
		c, err = hostverbs.Dial(ctx, hostverbs.Config{
			Address: a.opts.Address, LocalAddress: a.opts.LocalAddress, QID: w.qid, CNTLID: a.cntlid, Depth: w.depth,
			InCapsuleBytes: a.inCapsuleFor(w.qid),
			Direct:         w.direct, Memory: a.opts.memory,
		})
	} else {
		c, err = a.openTCP(ctx, w)
	}
	if err != nil {
		return nil, fmt.Errorf("queue %d: %w", w.qid, err)
	}
	return c, nil
}

// openTCP opens a TCP connection and exchanges ICReq and ICResp.
func (a *association) openTCP(ctx context.Context, w wire) (*hostconn.TCPConn, error) {
	ho := hosttcp.Options{
		Depth: w.depth, HeaderDigest: a.opts.HeaderDigest, DataDigest: a.opts.DataDigest, MaxR2T: a.opts.MaxR2T,
		InCapsuleBytes: adminInCapsule, // for Connect, on I/O queues too
	}
	if w.qid == 0 {
		ho.RecvBytes = 16 << 10
	}
	c, err := hostconn.DialTCP(ctx, a.opts.Address, a.opts.LocalAddress, ho)
	if err != nil {
		return nil, err
	}
	if err := c.Handshake(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", a.opts.Address, hostconn.Classify(err)), c.Close())
	}
	return c, nil
}

// inCapsuleFor returns how many bytes of data the capsules of queue id may carry.
func (a *association) inCapsuleFor(id uint16) int {
	switch {
	case a.opts.Transport == RDMA && id == 0:
		return 0 // as Linux does: before Identify no size is known
	case a.opts.Transport == RDMA:
		return min(a.inCapsule, maxRDMAInCapsule)
	case id == 0:
		return adminInCapsule
	}
	return a.inCapsule
}

// fabricsConnect sends Connect for queue id through do.
func (a *association) fabricsConnect(ctx context.Context, id uint16, depth int, do func(context.Context,
	*Command) (Completion, error)) error {
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
	e.SetCATTR(nvme.CATTRDeleteQueues) // QPair.Close sends Disconnect
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

// enable reads the controller's capabilities, enables the controller and identifies it.
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
	tctx, cancel := context.WithTimeout(ctx, a.readyTimeout())
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

// waitStatus reads CSTS until ok returns true, the controller fails (CSTS.CFS) or ctx is done.
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

// configureEvents enables the asynchronous events that the host knows.
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
		return nil // the host works without events
	}
	return err
}

// readyTimeout is CAP.TO: how long a controller may take to become ready, or to become not ready.
func (a *association) readyTimeout() time.Duration {
	return time.Duration(max(int(a.cap.TO()), 1)) * 500 * time.Millisecond
}
