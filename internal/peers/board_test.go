package peers_test

import (
	"slices"
	"sync"
	"sync/atomic"

	"jbofd/internal/bufpool"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/executor"
)

// ask is a command that came to a box.
type ask struct {
	e      *board
	c      *executor.Command
	waiter bufpool.Waiter
	kept   bool
}

// arrival is what a board remembers of a command.
type arrival struct {
	opcode uint8
	nsid   uint32
	seq    uint64
	data   int
	keep   uint8
	sum    byte
}

// board is the executor of a node: it answers messages, keeps them or loses them. The mark of a Forward is its
// sequence, and what a Ship or a Fetch gets is 7, 7, 7...
type board struct {
	pool *bufpool.Pool
	// quiet: what arrives is not remembered.
	quiet atomic.Bool

	mu       sync.Mutex
	arrivals []arrival
	// keep says which commands are not answered; nil: none.
	keep func(*nvme.SQE) bool
	kept []*ask
}

func (e *board) Ops() []string            { return []string{"message"} }
func (e *board) NewBatch() executor.Batch { return &boardBatch{e: e} }
func (e *board) NewContext(c *executor.Command) any {
	x := &ask{e: e, c: c}
	x.waiter.Wake = func() {
		if x.takeBuffer(); c.Port.NeedData(c) {
			go c.Port.Kick()
		}
	}
	return x
}

func (x *ask) takeBuffer() { x.c.Buf, x.waiter.Buf = x.waiter.Buf, bufpool.Buf{} }

func (e *board) Abort(c *executor.Command) bool {
	x := c.Context.(*ask)
	if !e.pool.Cancel(&x.waiter) {
		e.mu.Lock()
		kept := x.kept
		if kept {
			x.kept = false
			e.kept = slices.DeleteFunc(e.kept, func(o *ask) bool { return o == x })
		}
		e.mu.Unlock()
		if !kept {
			return false
		}
	}
	c.Fail(nvme.AbortRequested)
	if c.Port.Done(c) {
		go c.Port.Kick()
	}
	return true
}

type boardBatch struct {
	e       *board
	ready   []*ask
	notices executor.Notices
}

func (b *boardBatch) Begin(c *executor.Command) {
	x := c.Context.(*ask)
	n := max(c.Plan.ToController, c.Plan.AnswerBytes)
	if n == 0 || !c.Buf.IsZero() {
		b.ready = append(b.ready, x)
		return
	}
	x.waiter.Size = int(n)
	if !b.e.pool.GetOrWait(c.Account, &x.waiter) {
		return
	}
	if x.takeBuffer(); c.Fetch {
		b.notices.NeedData(c)
	} else {
		b.ready = append(b.ready, x)
	}
}

func (b *boardBatch) DataReady(c *executor.Command) {
	if !c.Status.OK() {
		c.Fail(c.Status)
		b.notices.Done(c)
		return
	}
	b.ready = append(b.ready, c.Context.(*ask))
}

func (b *boardBatch) Submit() {
	for i, x := range b.ready {
		b.ready[i] = nil
		b.e.arrive(x, &b.notices)
	}
	b.ready = b.ready[:0]
	b.notices.Send()
}

func (e *board) arrive(x *ask, n *executor.Notices) {
	c := x.c
	k := c.SQE.KVReplica()
	a := arrival{opcode: k[0], nsid: c.SQE.NSID(), seq: k.Sequence(), data: int(c.Plan.ToController), keep: k.Keep()}
	for _, b := range c.Buf.B[:min(len(c.Buf.B), a.data)] {
		a.sum += b
	}
	e.mu.Lock()
	if !e.quiet.Load() {
		e.arrivals = append(e.arrivals, a)
	}
	if e.keep != nil && e.keep(c.SQE) && !c.Pass.Stale() {
		x.kept = true
		e.kept = append(e.kept, x)
		e.mu.Unlock()
		return
	}
	e.mu.Unlock()
	x.answer()
	n.Done(c)
}

func (x *ask) answer() {
	c := x.c
	if c.Pass.Stale() {
		c.Fail(nvme.AbortedSQDeletion)
		return
	}
	c.Fail(nvme.Success)
	switch c.SQE.Opcode() {
	case nvme.CmdKVForward:
		c.Result = c.SQE.KVReplica().Sequence()
	case nvme.CmdKVShip, nvme.CmdKVFetch:
		c.AnswerBytes = int(c.Plan.AnswerBytes)
		for i := range c.Buf.B[:c.AnswerBytes] {
			c.Buf.B[i] = 7
		}
		c.Result = uint64(c.AnswerBytes)
	}
}

// keeps sets what is kept from now on.
func (e *board) keeps(keep func(*nvme.SQE) bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.keep = keep
}

// release answers what is kept, and keeps nothing from then on.
func (e *board) release() {
	e.mu.Lock()
	kept := e.kept
	e.kept, e.keep = nil, nil
	for _, x := range kept {
		x.kept = false
	}
	e.mu.Unlock()
	for _, x := range kept {
		if x.answer(); x.c.Port.Done(x.c) {
			x.c.Port.Kick()
		}
	}
}

func (e *board) keeping() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.kept)
}

func (e *board) arrived() []arrival {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.arrivals)
}

func isForward(e *nvme.SQE) bool { return e.Opcode() == nvme.CmdKVForward }
func everything(*nvme.SQE) bool  { return true }
