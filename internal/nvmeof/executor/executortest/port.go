package executortest

import (
	"sync"
	"testing"
	"time"

	"jbofd/internal/bufpool"
	"jbofd/internal/fence"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/executor"
)

// eventTimeout is how long a test waits for what must happen.
const eventTimeout = 30 * time.Second

// stage is where a command is.
type stage uint8

const (
	idle      stage = iota
	executing       // the executor has it
	fetching        // the executor wants its data
	done
)

// slot is a command and what has become of it.
type slot struct {
	executor.Command
	sqe  nvme.SQE
	plan nvmeof.Plan
	// place is what the command writes or reads. writes: it brings data.
	place  int
	writes bool

	// Guarded by port.mu. asked and ended count the calls of NeedData and Done; out: Abort has taken the command out.
	stage        stage
	asked, ended int
	out          bool
}

// port is a connection that checks what an executor does.
type port struct {
	t       testing.TB
	s       *Subject
	batch   executor.Batch
	account *bufpool.Account
	share   fence.Share
	slots   []*slot

	// lock is the connection's: held while Begin, DataReady and Abort are called. Kick takes it.
	lock sync.Mutex

	mu     sync.Mutex
	events []*slot // commands with calls that wait has not returned
	taken  []*slot // what wait has returned, to be used again
	owed   bool    // the executor was told to kick, and has not yet
	faults []string
	kicked chan struct{}
	late   *time.Timer // wait's
}

var _ executor.Port = (*port)(nil)

func newPort(t testing.TB, s *Subject, n int) *port {
	p := &port{t: t, s: s, batch: s.Executor.NewBatch(), kicked: make(chan struct{}, 1),
		account: s.Pool.Account("tenant"), late: time.NewTimer(eventTimeout)}
	for i := range n {
		c := &slot{}
		c.Command = executor.Command{SQE: &c.sqe, Plan: &c.plan, Port: p, Slot: uint32(i)}
		c.Context = s.Executor.NewContext(&c.Command)
		p.slots = append(p.slots, c)
	}
	return p
}

// close ends the port; all of its commands are done, and each has been Done once.
func (p *port) close() {
	p.t.Helper()
	for p.mu.Lock(); p.owed; p.mu.Lock() {
		p.mu.Unlock()
		select {
		case <-p.kicked:
		case <-time.After(eventTimeout):
			p.t.Fatal("a Kick is owed")
		}
	}
	for _, c := range p.slots {
		if c.ended > 1 || c.stage == executing || c.stage == fetching {
			p.t.Errorf("command %d was done %d times", c.Slot, c.ended)
		}
	}
	for _, f := range p.faults {
		p.t.Error(f)
	}
	p.mu.Unlock()
	for _, c := range p.slots {
		p.drop(c)
	}
	p.late.Stop()
	p.account.Close()
}

// NeedData implements executor.Port.
func (p *port) NeedData(c *executor.Command) (kick bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.slots[c.Slot]
	if s.stage != executing || s.out {
		p.faults = append(p.faults, "NeedData of a command that the executor does not have")
	}
	if len(c.Buf.B) < int(c.Plan.ToController) {
		p.faults = append(p.faults, "NeedData without a buffer for the data")
	}
	s.asked++
	s.stage = fetching
	p.events = append(p.events, s)
	return p.kick()
}

// kick returns whether an event must be followed by a Kick. mu is held.
func (p *port) kick() bool {
	p.owed = p.owed || len(p.events) == 1
	return len(p.events) == 1
}

// Done implements executor.Port.
func (p *port) Done(c *executor.Command) (kick bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.slots[c.Slot]
	switch {
	case s.stage != executing:
		p.faults = append(p.faults, "Done of a command that the executor does not have")
	case c.Status.OK() && c.AnswerBytes > len(c.Buf.B):
		p.faults = append(p.faults, "an answer that is longer than its buffer")
	case !c.Status.OK() && (c.Bytes != 0 || c.AnswerBytes != 0 || c.Access != executor.AccessOther):
		p.faults = append(p.faults, "a failed command that counts as data moved")
	case int(c.Op) >= len(p.s.Executor.Ops()):
		p.faults = append(p.faults, "an operation without a name")
	}
	s.ended++
	s.stage = done
	p.events = append(p.events, s)
	return p.kick()
}

// Kick implements executor.Port. As a connection's may, it takes the connection's lock: an executor that kicks from
// within Abort never returns.
func (p *port) Kick() {
	p.lock.Lock()
	p.mu.Lock()
	p.owed = false
	p.mu.Unlock()
	select {
	case p.kicked <- struct{}{}:
	default:
	}
	p.lock.Unlock()
}

// Deliver implements executor.Port.
func (p *port) Deliver() { p.Kick() }

// wait returns the commands that were done or want data since the last call. If there are none, it waits for a Kick; it
// also does if the executor owes one.
func (p *port) wait() []*slot {
	p.t.Helper()
	p.late.Reset(eventTimeout)
	for {
		p.mu.Lock()
		faults, owed := p.faults, p.owed
		p.faults = nil
		if len(p.events) > 0 && !owed {
			p.events, p.taken = p.taken[:0], p.events
			p.mu.Unlock()
			return p.taken
		}
		p.mu.Unlock()
		for _, f := range faults {
			p.t.Fatal(f)
		}
		select {
		case <-p.kicked:
		case <-p.late.C:
			p.t.Fatalf("a command is neither done nor wants data; a Kick is owed: %v", owed)
		}
	}
}

// at returns the stage of a command.
func (p *port) at(c *slot) stage {
	p.mu.Lock()
	defer p.mu.Unlock()
	return c.stage
}

func (p *port) set(c *slot, s stage) {
	p.mu.Lock()
	c.stage = s
	p.mu.Unlock()
}

// begin begins commands: writes whose data is with the host, or reads.
func (p *port) begin(write bool, slots ...*slot) {
	p.lock.Lock()
	for _, c := range slots {
		p.prepare(c, write)
		c.Fetch = write
		p.batch.Begin(&c.Command)
	}
	p.lock.Unlock()
	p.batch.Submit()
}

func (p *port) prepare(c *slot, write bool) {
	p.drop(c)
	c.plan, c.sqe, c.writes, c.Fetch = nvmeof.Plan{}, nvme.SQE{}, write, false
	if write {
		p.s.Write(&c.Command, c.place)
	} else {
		p.s.Read(&c.Command, c.place)
	}
	c.Payer = executor.Payer{Account: p.account, Tenant: 1}
	c.Pass = p.share.Pass()
	p.mu.Lock()
	c.stage, c.asked, c.ended, c.out = executing, 0, 0, false
	p.mu.Unlock()
}

// dataReady returns a command that wants data, which has come or, if status says so, will not.
func (p *port) dataReady(status nvme.Status, c *slot) {
	p.lock.Lock()
	if c.Status = status; status.OK() && c.writes {
		fill(c.Buf.B[:c.plan.ToController], c.place)
	}
	p.set(c, executing)
	p.batch.DataReady(&c.Command)
	p.lock.Unlock()
	p.batch.Submit()
}

// fill makes the data of a place.
func fill(b []byte, place int) {
	for i := range b {
		b[i] = byte(i*7+i>>8+place) | 1
	}
}

// abort calls Abort as a connection does, and reports whether it has succeeded.
func (p *port) abort(c *slot) bool {
	p.lock.Lock()
	defer p.lock.Unlock()
	p.mu.Lock()
	asked := c.asked
	p.mu.Unlock()
	ok := p.s.Executor.Abort(&c.Command)
	p.mu.Lock()
	defer p.mu.Unlock()
	if c.out = ok; ok && c.asked != asked {
		p.faults = append(p.faults, "NeedData of a command that Abort has taken out")
	}
	return ok
}

// drop returns a command's buffer, which is the port's after Done.
func (p *port) drop(c *slot) {
	p.s.Pool.Put(c.Buf)
	c.Buf = bufpool.Buf{}
}

// finish waits until all of slots are done; those that want data get it, or status if that is not Success.
func (p *port) finish(status nvme.Status, slots ...*slot) {
	p.t.Helper()
	for {
		left := 0
		for _, c := range slots {
			switch p.at(c) {
			case fetching:
				left++
				p.dataReady(status, c)
			case executing:
				left++
			case done:
				p.drop(c) // others may wait for its memory
			}
		}
		if left == 0 {
			return
		}
		p.wait()
	}
}

// await waits until all of slots are at a stage.
func (p *port) await(s stage, slots ...*slot) {
	p.t.Helper()
	for {
		n := 0
		for _, c := range slots {
			if p.at(c) == s {
				n++
			}
		}
		if n == len(slots) {
			return
		}
		p.wait()
	}
}
