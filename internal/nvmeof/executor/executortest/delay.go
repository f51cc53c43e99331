package executortest

import (
	"sync"
	"time"

	"jbofd/internal/bufpool"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/executor"
)

// KindDelay is the kind of Delay, for namespaces in tests.
const KindDelay nvmeof.Kind = nvmeof.Kinds - 1

// Delay is an executor of a third kind, the smallest that does everything: blocks in the Go heap, and each command is
// carried out a while after it has what it needs. The host says how long in CDW15, in microseconds. The goroutine that
// carries it out delivers the answer (executor.Port.Deliver).
type Delay struct {
	pool *bufpool.Pool

	mu   sync.Mutex
	data []byte
	shut bool
	// While Delay is shut, started are commands that have started and queued those that wait to; aborted ones are among
	// queued until Open.
	started, queued []*delayed
	contexts        int
}

// delayDepth is how many commands start while Delay is shut.
const delayDepth = 4

var _ executor.Executor = (*Delay)(nil)

// NewDelay makes an executor of so many bytes of blocks.
func NewDelay(pool *bufpool.Pool, size int) *Delay {
	return &Delay{pool: pool, data: make([]byte, size)}
}

// delayed is the context of a command. Its state is guarded by Delay.mu.
type delayed struct {
	d      *Delay
	c      *executor.Command
	waiter bufpool.Waiter
	timer  *time.Timer
	state  delayState
}

type delayState uint8

const (
	delayIdle   delayState = iota // the command is done, waits for memory, or for its data
	delayWaits                    // for its time, or for Delay to open: Abort takes it out
	delayStarts                   // runs to completion
)

// delayOps are the operations.
var delayOps = []string{"delayed_read", "delayed_write"}

// Ops implements executor.Executor.
func (d *Delay) Ops() []string { return delayOps }

// Contexts is how many contexts were made.
func (d *Delay) Contexts() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.contexts
}

// NewContext implements executor.Executor.
func (d *Delay) NewContext(c *executor.Command) any {
	d.mu.Lock()
	d.contexts++
	d.mu.Unlock()
	x := &delayed{d: d, c: c}
	x.waiter.Wake = func() {
		if x.takeBuffer(); c.Port.NeedData(c) {
			go c.Port.Deliver()
		}
	}
	x.timer = time.AfterFunc(time.Hour, x.due)
	x.timer.Stop()
	return x
}

func (x *delayed) takeBuffer() { x.c.Buf, x.waiter.Buf = x.waiter.Buf, bufpool.Buf{} }

// Shut stops commands that have started, until Open. Only a few start meanwhile.
func (d *Delay) Shut() {
	d.mu.Lock()
	d.shut = true
	d.mu.Unlock()
}

// Open lets all commands go on.
func (d *Delay) Open() {
	d.mu.Lock()
	d.shut = false
	start := d.started
	for _, x := range d.queued {
		if x.state == delayWaits {
			x.state = delayStarts
			start = append(start, x)
		}
	}
	d.started, d.queued = nil, nil
	d.mu.Unlock()
	for _, x := range start {
		x.execute()
	}
}

// Started is how many commands have started and are stopped.
func (d *Delay) Started() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.started)
}

// Byte returns what is stored at an offset.
func (d *Delay) Byte(offset int64) byte {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.data[offset]
}

// due says that the command's time has come.
func (x *delayed) due() {
	d := x.d
	d.mu.Lock()
	switch {
	case x.state != delayWaits: // aborted
	case d.shut && len(d.started) == delayDepth:
		d.queued = append(d.queued, x)
	case d.shut:
		x.state = delayStarts
		d.started = append(d.started, x)
	default:
		x.state = delayStarts
		d.mu.Unlock()
		x.execute()
		return
	}
	d.mu.Unlock()
}

// execute carries a command out.
func (x *delayed) execute() {
	c, p := x.c, x.c.Plan
	switch {
	case c.Pass.Stale():
		c.Fail(nvme.AbortedSQDeletion)
	default:
		c.Fail(nvme.Success)
		c.Bytes = int64(p.Len)
		x.d.mu.Lock()
		if place := x.d.data[p.Offset:][:p.Len]; p.ToController > 0 {
			copy(place, c.Buf.B)
			c.Access = executor.AccessWrite
		} else {
			copy(c.Buf.B, place)
			c.Access, c.AnswerBytes = executor.AccessRead, int(p.Len)
		}
		x.d.mu.Unlock()
	}
	x.d.mu.Lock()
	x.state = delayIdle
	x.d.mu.Unlock()
	if c.Port.Done(c) {
		c.Port.Deliver()
	}
}

// Abort implements executor.Executor.
func (d *Delay) Abort(c *executor.Command) bool {
	x := c.Context.(*delayed)
	if !d.pool.Cancel(&x.waiter) {
		d.mu.Lock()
		waits := x.state == delayWaits
		if waits {
			x.state = delayIdle
		}
		d.mu.Unlock()
		if !waits {
			return false
		}
	}
	c.Fail(nvme.AbortRequested)
	if c.Port.Done(c) {
		go c.Port.Kick()
	}
	return true
}

// delayBatch implements executor.Batch.
type delayBatch struct {
	d       *Delay
	ready   []*delayed
	notices executor.Notices
}

// NewBatch implements executor.Executor.
func (d *Delay) NewBatch() executor.Batch { return &delayBatch{d: d} }

// Begin implements executor.Batch.
func (b *delayBatch) Begin(c *executor.Command) {
	x := c.Context.(*delayed)
	if c.Op = 0; c.Plan.ToController > 0 {
		c.Op = 1
	}
	if !c.Buf.IsZero() {
		b.ready = append(b.ready, x)
		return
	}
	x.waiter.Size = int(c.Plan.Len)
	if !b.d.pool.GetOrWait(c.Account, &x.waiter) {
		return
	}
	if x.takeBuffer(); c.Fetch {
		b.notices.NeedData(c)
	} else {
		b.ready = append(b.ready, x)
	}
}

// DataReady implements executor.Batch.
func (b *delayBatch) DataReady(c *executor.Command) {
	if !c.Status.OK() {
		c.Fail(c.Status)
		b.notices.Done(c)
		return
	}
	b.ready = append(b.ready, c.Context.(*delayed))
}

// Submit implements executor.Batch.
func (b *delayBatch) Submit() {
	for i, x := range b.ready {
		b.ready[i] = nil
		x.d.mu.Lock()
		x.state = delayWaits
		x.d.mu.Unlock()
		if us := x.c.SQE.CDW(15); us > 0 {
			x.timer.Reset(time.Duration(us) * time.Microsecond)
		} else {
			x.due()
		}
	}
	b.ready = b.ready[:0]
	b.notices.Send()
}
