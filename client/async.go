package client

import (
	"context"
	"errors"
	"fmt"

	"jbofd/client/internal/hostconn"
	"jbofd/internal/nvme"
)

// ErrCancelled is the error of an Async that IOQueue.Cancel has ended.
var ErrCancelled = hostconn.ErrCancelled

// Async is a command for which no goroutine waits: its end is told to its Sink. It belongs to the queue from
// IOQueue.Send until its end.
type Async = hostconn.Async

// Sink is told of the end of Asyncs.
type Sink = hostconn.Sink

// IOQueue is an I/O queue that Controller shares among all callers, for programs that keep many commands outstanding
// without a goroutine for each. It ends with its association: then each outstanding command ends with an error, and
// IOQueues returns others. What a command that was outstanding may still do at the target is over when the next
// association begins: see Controller.
type IOQueue struct {
	a *association
	q *hostconn.SharedQPair
}

// IOQueues returns the I/O queues of the current association: Options.Queues of them.
//
// Errors: ErrUnsupported if the Controller itself keeps within credits: see Options.ReportCredits; ErrConnectionLost,
// ErrClosed; the context's.
func (c *Controller) IOQueues(ctx context.Context) ([]*IOQueue, error) {
	a, err := c.current(ctx)
	if err != nil {
		return nil, err
	}
	if a.gate != nil {
		return nil, fmt.Errorf("%w: IOQueues without Options.ReportCredits", ErrUnsupported)
	}
	qs := make([]*IOQueue, len(a.io))
	for i, q := range a.io {
		qs[i] = &IOQueue{a, q}
	}
	return qs, nil
}

// Depth returns how many commands may be outstanding. Those beyond that wait.
func (q *IOQueue) Depth() int { return q.a.depth }

// Err returns why the queue has ended, or nil.
//
// Cost: 0 allocs.
func (q *IOQueue) Err() error { return q.q.Err() } // hot: 0 allocs

// Send sends a list of commands in order as one batch. Async.Prepare must have been called for each. It returns a list
// of commands that have ended, also of other callers of Send, in place of calls of their Sinks.
//
// Cost: one system call, 0 allocs.
func (q *IOQueue) Send(list *Async) (ended *Async) { return q.q.Send(list) } // hot: 0 allocs

// Cancel ends a command with ErrCancelled, unless it has ended; its buffer is the caller's again. True: it has ended
// with this call, and its Sink is not told. Otherwise its end was told, or will be. The target is asked to abort the
// command, but may still carry it out. The caller must make sure that the Async was not used again.
func (q *IOQueue) Cancel(a *Async) (ended bool) {
	if !q.q.Cancel(a) {
		return false
	}
	if a.Sent {
		q.a.abort(q.q.ID(), a.CID())
	}
	return true
}

// ReportedCredit returns the units of the credit that a completion has brought for a drive, 0 for none, in commands of
// an opcode. It is for Controllers with Options.ReportCredits.
func ReportedCredit(opcode uint8, ssd uint16, c *Completion) (units int) { // hot: 0 allocs
	if nvme.KVVersioned(opcode) {
		return int(c.SQID)
	}
	cr := nvme.Credit(c.Result >> 32)
	if cr.SSD() != ssd {
		return 0
	}
	return cr.Units()
}

// QueryCredit asks for the units of the credit of a drive: see Options.ReportCredits. 0: it is not known, because the
// target has not granted credits, or none of the Controller's namespaces is on that drive.
//
// Errors: ErrConnectionLost, ErrClosed; the context's.
func (c *Controller) QueryCredit(ctx context.Context, ssd uint16) (units int, err error) {
	a, err := c.current(ctx)
	if err != nil || a.granted&nvme.ExtCredits == 0 {
		return 0, err
	}
	var e SQE
	e.SetOpcode(nvme.AdminGetFeatures)
	e.Features().SetFID(nvme.FIDExtensions)
	e.Features().SetValue(uint32(ssd))
	comp, err := c.admin(ctx, "Get Features (extensions)", e, nil)
	var st *StatusError
	if errors.As(err, &st) {
		return 0, nil // the first completion brings a credit
	}
	if cr := nvme.Credit(comp.Result >> 32); err == nil && cr.SSD() == ssd {
		units = cr.Units()
	}
	return units, err
}
