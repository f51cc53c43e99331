// Package block executes commands for the blocks of drives: it makes drive.IOs of them.
//
//	Command ──> Batch ──> drive.Drive ──> pipeline ──> device
//	   ^                      │
//	   └── NeedData, Done <───┘
package block

import (
	"errors"
	"slices"
	"sync/atomic"

	"jbofd/internal/drive"
	"jbofd/internal/fence"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/executor"
	"jbofd/internal/pipeline"
	"jbofd/internal/ssd"
	"jbofd/internal/units"
)

// Executor executes commands on drives.
type Executor struct {
	// drives are replaced as a whole. Their number does not change.
	drives atomic.Pointer[[]*drive.Drive]
}

var _ executor.Executor = (*Executor)(nil)

// New makes the executor of the drives, by the number that namespaces name them with.
func New(drives []*drive.Drive) *Executor {
	e := &Executor{}
	e.drives.Store(&drives)
	return e
}

// Drives returns the drives, by number; nil: there is none. The caller must not change the slice.
func (e *Executor) Drives() []*drive.Drive { return *e.drives.Load() }

// Replace puts a drive in place of the one of that number, to which no command may be under way. One goroutine at a
// time calls it. A command that has begun, and is not submitted yet, goes to the new drive: its right to the extent
// must have ended.
func (e *Executor) Replace(number int, d *drive.Drive) {
	all := slices.Clone(e.Drives())
	all[number] = d
	e.drives.Store(&all)
}

// ops are the names of pipeline.Op.
var ops = func() []string {
	names := make([]string, pipeline.Ops)
	for i := range names {
		names[i] = pipeline.Op(i).String()
	}
	return names
}()

// Ops implements executor.Executor.
func (e *Executor) Ops() []string { return ops }

// command is the IO of a slot.
type command struct {
	drive.IO
	c      *executor.Command
	ranges []pipeline.Range
	// status is how a command ends whose IO has ended with errNotExecuted.
	status nvme.Status
}

var _ drive.Sink = (*command)(nil)

// errNotExecuted is the outcome of an IO that was returned to its drive without data, or has nothing to do.
var errNotExecuted = errors.New("the command is not executed")

// NewContext implements executor.Executor.
func (e *Executor) NewContext(c *executor.Command) any {
	x := &command{c: c}
	x.Init(x, c.Slot)
	return x
}

// Abort implements executor.Executor. It takes out a command that the pipeline has not admitted.
func (e *Executor) Abort(c *executor.Command) bool {
	return e.Drives()[c.Plan.Namespace.SSD].Abort(&c.Context.(*command).IO)
}

// Admitted implements drive.Sink.
func (x *command) Admitted(*drive.IO) (kick bool) {
	x.c.Buf = x.Buf
	return x.c.Port.NeedData(x.c)
}

// Done implements drive.Sink.
//
// hot: 0 allocs
func (x *command) Done(*drive.IO) (kick bool) {
	c := x.c
	c.Buf = x.Buf
	c.Access, c.Bytes, c.AnswerBytes, c.Result, c.CreditUnits = executor.AccessOther, 0, 0, 0, x.CreditUnits
	if x.Err == nil {
		c.Status, c.FirstStatus, c.Bytes = nvme.Success, nvme.Success, int64(c.Plan.Len)
		switch x.Op {
		case pipeline.Read:
			c.Access, c.AnswerBytes = executor.AccessRead, int(c.Plan.Len)
		case pipeline.Write, pipeline.CompareWrite:
			c.Access = executor.AccessWrite
		}
		return c.Port.Done(c)
	}
	c.Status = status(x.Op, x.Err)
	switch {
	case x.Err == errNotExecuted:
		c.Status = x.status
	case x.Err == fence.ErrStale && c.Plan.Namespace.Extent.Stale():
		c.Status = nvme.InvalidNamespaceOrFormat | nvme.DNR // as if the command had come after the removal
	}
	c.FirstStatus = c.Status
	if x.Op == pipeline.CompareWrite {
		switch {
		case x.Writing(): // the Compare has succeeded, the Write has failed
			c.FirstStatus = nvme.Success
		case x.Err != drive.ErrAborted:
			c.Status = nvme.AbortedFailedFused | nvme.DNR
		}
	}
	return c.Port.Done(c)
}

// Kick implements drive.Sink.
func (x *command) Kick() { x.c.Port.Kick() }

// setRanges decodes the ranges of a Dataset Management command. If there is nothing to do it reports false; status
// says why.
func (x *command) setRanges() bool {
	p := x.c.Plan
	if x.ranges == nil {
		x.ranges = make([]pipeline.Range, 0, nvme.MaxDSMRanges)
	}
	x.ranges, x.status = p.AppendRanges(x.Buf.B, x.ranges[:0])
	x.Ranges = x.ranges
	return x.status.OK() && len(x.ranges) > 0 && !p.NoOp
}

// status is the NVMe status of an IO's outcome. An error that a retry may cure comes without DNR.
//
// Source: NVMe Base 2.0, figures 94 to 98.
func status(op pipeline.Op, err error) nvme.Status {
	switch {
	case err == nil:
		return nvme.Success
	case errors.Is(err, drive.ErrMismatch):
		return nvme.CompareFailure | nvme.DNR
	case errors.Is(err, drive.ErrAborted):
		return nvme.AbortRequested
	case errors.Is(err, fence.ErrStale):
		return nvme.AbortedSQDeletion
	case errors.Is(err, ssd.ErrNoSpace):
		return nvme.CapacityExceeded | nvme.DNR
	case errors.Is(err, ssd.ErrRange):
		return nvme.LBAOutOfRange | nvme.DNR
	case errors.Is(err, ssd.ErrUnsupported):
		return nvme.InvalidOpcode | nvme.DNR
	case op == pipeline.Read || op == pipeline.Verify || op == pipeline.Compare:
		return nvme.UnrecoveredReadError | nvme.DNR
	}
	return nvme.WriteFault | nvme.DNR
}

// batch collects IOs, a drive.Batch for each drive.
type batch struct {
	e        *Executor
	begun    []drive.Batch // by drive
	returned []drive.Batch // with the host's data
	touched  []int         // drives with something in begun or returned
	notices  executor.Notices
}

// NewBatch implements executor.Executor.
func (e *Executor) NewBatch() executor.Batch {
	n := len(e.Drives())
	return &batch{e: e, begun: make([]drive.Batch, n), returned: make([]drive.Batch, n), touched: make([]int, 0, n)}
}

// Begin implements executor.Batch.
//
// hot: 0 allocs
func (b *batch) Begin(c *executor.Command) {
	x, p := c.Context.(*command), c.Plan
	x.Op, x.Offset, x.Len, x.Flags = p.Op, p.Offset, p.Len, 0
	if p.FUA {
		x.Flags |= ssd.FUA
	}
	if p.Unmap {
		x.Flags |= ssd.Unmap
	}
	c.Op = uint8(p.Op)
	x.Buf, x.Fetch = c.Buf, c.Fetch
	x.Account, x.Tenant, x.Credited, x.Pass = c.Account, c.Tenant, c.Credited, c.Pass
	x.Extent = p.Namespace.Extent
	if p.Op == pipeline.DeallocateRanges {
		x.Len = units.Bytes(p.ToController)
		if !c.Fetch && !x.setRanges() {
			c.Fail(x.status)
			b.notices.Done(c)
			return
		}
	}
	b.add(b.begun, x)
}

// DataReady implements executor.Batch.
//
// hot: 0 allocs
func (b *batch) DataReady(c *executor.Command) {
	x := c.Context.(*command)
	x.Err = nil
	if x.status = c.Status; !x.status.OK() || x.Op == pipeline.DeallocateRanges && !x.setRanges() {
		x.Err = errNotExecuted
	}
	b.add(b.returned, x)
}

func (b *batch) add(to []drive.Batch, x *command) {
	n := x.c.Plan.Namespace.SSD
	if b.begun[n].Empty() && b.returned[n].Empty() {
		b.touched = append(b.touched, n)
	}
	to[n].Add(&x.IO)
}

// Submit implements executor.Batch.
//
// hot: 0 allocs
func (b *batch) Submit() {
	drives := b.e.Drives()
	for _, n := range b.touched {
		d := drives[n]
		d.Fetched(&b.returned[n])
		d.Submit(&b.begun[n])
	}
	b.touched = b.touched[:0]
	b.notices.Send()
}
