package client

import (
	"context"
	"errors"
	"fmt"
	"time"

	"jbofd/internal/nvme"
)

// closeTimeout bounds QPair.Close.
const closeTimeout = 2 * time.Second

// qidState is the state of an I/O queue identifier.
type qidState struct {
	used     bool   // a queue of this host has it
	released uint64 // ordinal of its latest release; 0: it was never used
}

// takeQID takes the free I/O queue identifier that was released first, or never used. reused: it was used before.
func (a *association) takeQID() (id uint16, reused bool, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	best := -1
	for i := range a.qids {
		if s := &a.qids[i]; !s.used && (best < 0 || s.released < a.qids[best].released) {
			best = i
		}
	}
	if best < 0 {
		return 0, false, fmt.Errorf("%w: all %d I/O queues that the target grants are in use", ErrUnsupported,
			len(a.qids))
	}
	a.qids[best].used = true
	return uint16(best + 1), a.qids[best].released > 0, nil
}

func (a *association) putQID(id uint16) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.releases++
	a.qids[id-1] = qidState{released: a.releases}
}

// qidTimeout bounds how long a target may take to free the identifier of a queue that this host has closed.
const qidTimeout = 2 * time.Second

// openQPair connects an I/O queue for one goroutine.
//
// A target may free a queue identifier only when it has seen the end of the queue's connection, which is after this
// host has closed it. A Connect that is refused because the queue exists is repeated for that reason, with an
// identifier that was used before, and for no other.
func (a *association) openQPair(ctx context.Context) (*QPair, error) {
	id, reused, err := a.takeQID()
	if err != nil {
		return nil, err
	}
	begin := time.Now()
	for pause := time.Millisecond; ; pause = min(2*pause, 50*time.Millisecond) {
		p, err := a.connectQPair(ctx, id)
		if err == nil {
			return p, nil
		}
		if !reused || !isQIDTaken(err) || time.Since(begin) > qidTimeout || !sleep(ctx, pause) {
			a.putQID(id)
			return nil, err
		}
	}
}

// isQIDTaken reports whether a target has refused Connect because the queue exists: Linux and jbofd say Command
// Sequence Error, SPDK says Invalid Queue Identifier.
func isQIDTaken(err error) bool {
	var st *StatusError
	return errors.As(err, &st) && (st.Status.Code() == nvme.CommandSequenceError ||
		st.Status.Code() == nvme.InvalidQueueID)
}

// one sends the only command of the queue and waits for its completion.
func (p *QPair) one(c *Command) (Completion, error) {
	if _, err := p.Submit([]Command{*c}); err != nil {
		return Completion{}, err
	}
	var comps [1]Completion
	_, err := p.Poll(comps[:], -1)
	return comps[0], err
}

// connectQPair connects I/O queue id for one goroutine.
func (a *association) connectQPair(ctx context.Context, id uint16) (*QPair, error) {
	w, err := a.openWire(ctx, wire{qid: id, depth: a.depth, direct: true})
	if err != nil {
		return nil, err
	}
	p := &QPair{id: id, w: w, spin: a.opts.Spin, base: time.Now(), closeTimeout: closeTimeout,
		canDisconnect: a.id.OFCS()&nvme.OFCSDisconnect != 0}
	a.mu.Lock()
	a.qpairs[p] = struct{}{}
	dead := a.ctx.Err() != nil
	a.mu.Unlock()
	forget := func() {
		a.mu.Lock()
		delete(a.qpairs, p)
		a.mu.Unlock()
	}
	if dead {
		forget()
		return nil, errors.Join(context.Cause(a.ctx), p.Close())
	}
	err = a.fabricsConnect(ctx, id, a.depth, func(ctx context.Context, c *Command) (Completion, error) {
		stop := context.AfterFunc(ctx, func() { p.shutDown(ctx.Err()) })
		comp, err := p.one(c)
		if !stop() {
			err = ctx.Err()
		}
		return comp, err
	})
	if err != nil {
		forget()
		return nil, errors.Join(err, p.Close())
	}
	w.Machine().SetInCapsuleBytes(a.inCapsuleFor(id))
	p.setGate(a.gate)
	p.orderly, p.onLoss = true, a.fail
	p.onClose = func(p *QPair) {
		forget()
		a.putQID(p.id)
	}
	return p, nil
}
