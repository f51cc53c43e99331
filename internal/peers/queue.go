package peers

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"jbofd/client"
	"jbofd/internal/nvme"
	"jbofd/internal/turn"
)

// A node's queues: see the package comment. The first ones are for writes, each for some ranges: as many of maxWrites
// as are needed.
const (
	maxWrites = 8
	ships     = maxWrites
	fills     = maxWrites + 1
	numQueues = maxWrites + 2
)

// queueFor returns the queue of a command.
func (n *node) queueFor(e *nvme.SQE) *queue { // hot: 0 allocs
	switch e.Opcode() {
	case nvme.CmdKVShip:
		return &n.queues[ships]
	case nvme.CmdKVCompare, nvme.CmdKVFetch:
		return &n.queues[fills]
	}
	return &n.queues[uint32(e.KVReplica().Range())%n.writes.Load()]
}

const (
	// batchLen bounds the commands of one submission, and the completions that are taken together.
	batchLen = 64
	// rounds bounds how often the receiving goroutine receives before others get their turn.
	rounds = 16
	// ticks is how many ticks of the clock Config.Timeout has, driveTicks how many a command may take that waits for a
	// drive: the node answers it long before (replicas.Config.AnswerWithin).
	ticks      = 4
	driveTicks = 8 * ticks
)

// queue is the machine of one of a node's queues. It stays when connections come and go. Without a connection,
// its commands are Lost.
type queue struct {
	node   *node
	driver turn.Driver
	mail   turn.Mailbox[Command]

	// The rest needs ownership.

	// link is the connection; nil: none.
	link *link
	// sent are the commands that the connection has, by tag, since the tick at since. Invariant: a tag is in free, or
	// sent has a command.
	sent  []*Command
	since []uint32
	free  []uint16
	// busyNS is when a command was sent while there was no other one in sent.
	busyNS int64
	// forwards wait until there are fewer than maxForwards of them in sent, others for a free tag only: without the
	// Durables, of which one may be the next, the Forwards that are kept would never be answered.
	forwards, others          fifo
	sentForwards, maxForwards int
	// held are the targets that have commands which wait because they have enough of the queue: see share.go.
	held []*target
	// progress is the tick of the last completion, or of the first command that waits.
	progress uint32

	cmds  [batchLen]client.Command
	comps [batchLen]client.Completion
}

// fifo is a list of commands.
type fifo struct{ first, last *Command }

func (f *fifo) push(c *Command) { // hot: 0 allocs
	if c.next = nil; f.first == nil {
		f.first = c
	} else {
		f.last.next = c
	}
	f.last = c
}

// pop takes the first one; nil: there is none.
func (f *fifo) pop() *Command { // hot: 0 allocs
	c := f.first
	if c != nil {
		f.first, c.next = c.next, nil
	}
	return c
}

// link is a queue's connection and the goroutines that wait for it.
type link struct {
	qp *client.QPair
	// blocked has a value when the connection does not take more. quit is closed when the link has ended.
	blocked, quit chan struct{}
	wg            sync.WaitGroup
}

// Pending implements turn.Machine.
func (q *queue) Pending() bool { return q.mail.Pending() }

// Turn implements turn.Machine.
func (q *queue) Turn() { // hot: 0 allocs
	for n := q.mail.Take(); n != nil; {
		c := n.Item
		n = n.Detach()
		if q.link == nil {
			q.lose(c)
			continue
		}
		if !q.waits() {
			q.progress = q.node.tick.Load()
		}
		if c.SQE.Opcode() == nvme.CmdKVForward {
			q.forwards.push(c)
		} else {
			q.others.push(c)
		}
	}
	q.submit()
}

// waits reports whether commands wait.
func (q *queue) waits() bool {
	return q.forwards.first != nil || q.others.first != nil || len(q.held) > 0
}

// done returns a command, which is the Sink's from then on.
func (q *queue) done(c *Command) { // hot: 0 allocs
	c.target = nil
	if sink := c.Sink; sink.PeerDone(c) {
		q.driver.Kick(sink)
	}
}

// lose returns a command whose outcome is not known.
func (q *queue) lose(c *Command) { // hot: 0 allocs
	c.Lost = true
	q.done(c)
}

// next takes the next command to send; nil: there is none, or no room.
func (q *queue) next() *Command { // hot: 0 allocs
	if len(q.free) == 0 {
		return nil
	}
	if q.forDrives() {
		return q.nextForDrives()
	}
	if c := q.others.pop(); c != nil || q.sentForwards >= q.maxForwards {
		return c
	}
	return q.forwards.pop()
}

// submit sends commands that wait.
func (q *queue) submit() { // hot: 0 allocs
	keep := uint8(min(q.node.keep.Load(), 255))
	for q.link != nil {
		n := 0
		for n < batchLen {
			c := q.next()
			if c == nil {
				break
			}
			nsid := c.target.nsid.Load()
			if nsid == 0 {
				q.lose(c) // the node's goroutine looks for it
				continue
			}
			if len(q.free) == len(q.sent) {
				q.busyNS = q.driver.Now()
			}
			tag := q.free[len(q.free)-1]
			q.free = q.free[:len(q.free)-1]
			q.sent[tag], q.since[tag] = c, q.node.tick.Load()
			q.count(c, 1)
			m := &q.cmds[n]
			m.SQE, m.Data, m.Tag = c.SQE, c.Data, uint64(tag)
			m.SQE.SetNSID(nsid)
			if c.SQE.Opcode() == nvme.CmdKVForward {
				q.sentForwards++
				k := m.SQE.KVReplica()
				k.SetKeep(min(k.Keep(), keep))
			}
			n++
		}
		if n == 0 {
			return
		}
		q.hand(q.cmds[:n])
	}
}

// hand hands commands to the connection.
func (q *queue) hand(cmds []client.Command) { // hot: 0 allocs
	for q.link != nil && len(cmds) > 0 {
		n, err := q.link.qp.Submit(cmds)
		for i := range cmds[:n] {
			cmds[i].Data = nil
		}
		cmds = cmds[n:]
		switch {
		case errors.Is(err, client.ErrInvalid):
			// Its data does not fit its opcode, or is longer than the transport allows.
			q.refuse(&cmds[0])
			cmds = cmds[1:]
		case err != nil:
			q.fail(err)
		case len(cmds) > 0: // there are as many tags as places
			q.fail(errors.New("the queue has fewer places than it says"))
		}
	}
	q.after()
}

// refuse ends a command that cannot be sent.
func (q *queue) refuse(m *client.Command) {
	c := q.put(m.Tag)
	m.Data = nil
	c.Status = nvme.InvalidField | nvme.DNR
	q.done(c)
}

// put frees a tag, and returns its command.
func (q *queue) put(tag uint64) *Command { // hot: 0 allocs
	c := q.sent[tag]
	q.sent[tag] = nil
	q.count(c, -1)
	q.free = append(q.free, uint16(tag))
	if c.SQE.Opcode() == nvme.CmdKVForward {
		q.sentForwards--
	}
	return c
}

// after has to be called after each send: the node may have answered already, and the connection may be full.
func (q *queue) after() { // hot: 0 allocs
	for q.link != nil {
		n := q.link.qp.Completed(q.comps[:])
		if n == 0 {
			break
		}
		q.complete(q.comps[:n])
	}
	if q.link != nil && q.link.qp.Blocked() {
		select {
		case q.link.blocked <- struct{}{}:
		default:
		}
	}
}

// complete ends commands.
func (q *queue) complete(comps []client.Completion) { // hot: 0 allocs
	q.progress = q.node.tick.Load()
	if len(comps) > 0 {
		q.node.heardNS.Store(q.driver.Now())
	}
	for i := range comps {
		m := &comps[i]
		c := q.put(m.Tag)
		if m.Status.Code() == nvme.InvalidNamespaceOrFormat {
			// The namespace has gone, or another one has its number. The partition may come back.
			c.target.nsid.Store(0)
			q.node.look()
			q.lose(c)
			continue
		}
		c.Status, c.Result, c.Received = m.Status, m.Result, int(m.Received)
		q.done(c)
	}
}

// fail ends the connection, and all commands with it.
func (q *queue) fail(err error) {
	l := q.link
	if l == nil {
		return
	}
	select {
	case q.node.failed <- err: // before Shutdown, which makes the other queues fail
	default: // another queue has failed before
	}
	q.link = nil
	l.qp.Shutdown() // from here on nothing reaches the commands' data
	for tag, c := range q.sent {
		if c != nil {
			q.sent[tag] = nil
			q.count(c, -1)
			q.lose(c)
		}
	}
	q.unhold()
	for _, f := range []*fifo{&q.others, &q.forwards} {
		for c := f.pop(); c != nil; c = f.pop() {
			q.lose(c)
		}
	}
}

// receive is the step of the goroutine that waits for completions.
func (q *queue) receive(l *link) (done bool) {
	q.driver.Lock()
	defer q.driver.Unlock()
	for range rounds {
		if q.link != l {
			return true
		}
		n, more, err := l.qp.Receive(q.comps[:])
		q.complete(q.comps[:n])
		if err != nil {
			q.fail(err)
			return true
		}
		q.submit()
		q.after() // also if nothing was submitted: the node may have asked for data
		if !more {
			return q.link != l
		}
	}
	return true
}

// send is the step of the goroutine that continues to send when the connection was full.
func (q *queue) send(l *link) (done bool) {
	q.driver.Lock()
	defer q.driver.Unlock()
	if q.link != l {
		return true
	}
	if _, err := l.qp.Submit(nil); err != nil {
		q.fail(err)
		return true
	}
	for n := l.qp.Completed(q.comps[:]); n > 0; n = l.qp.Completed(q.comps[:]) {
		q.complete(q.comps[:n])
	}
	q.submit()
	return q.link != l || !l.qp.Blocked()
}

// up begins to use a connection.
func (q *queue) up(qp *client.QPair) *link {
	l := &link{qp: qp, blocked: make(chan struct{}, 1), quit: make(chan struct{})}
	q.driver.Lock()
	n := qp.Depth()
	q.sent, q.since, q.free = make([]*Command, n), make([]uint32, n), make([]uint16, n)
	for i := range q.free {
		q.free[i] = uint16(n - 1 - i)
	}
	q.sentForwards, q.maxForwards = 0, n-n/4
	if n > 1 && n < 4 {
		q.maxForwards = n - 1
	}
	q.link = l
	q.driver.Unlock()
	l.wg.Add(2)
	go func() {
		defer l.wg.Done()
		step := func() bool { return q.receive(l) }
		for q.has(l) {
			if err := qp.AwaitRecv(step); err != nil {
				q.end(l, err)
			}
		}
	}()
	go func() {
		defer l.wg.Done()
		step := func() bool { return q.send(l) }
		for {
			select {
			case <-l.blocked:
			case <-l.quit:
				return
			}
			if err := qp.AwaitSend(step); err != nil {
				q.end(l, err)
			}
		}
	}()
	return l
}

// has reports whether l is the connection.
func (q *queue) has(l *link) bool {
	q.driver.Lock()
	defer q.driver.Unlock()
	return q.link == l
}

// end ends a connection, if it has not ended yet.
func (q *queue) end(l *link, err error) {
	q.driver.Lock()
	defer q.driver.Unlock()
	if q.link == l {
		q.fail(err)
	}
}

// down ends a connection and waits for its goroutines.
func (q *queue) down(l *link, err error) {
	q.end(l, err)
	close(l.quit)
	l.wg.Wait()
	// An error says once more that the connection is gone.
	_ = l.qp.Close()
}

// errUnanswered ends a connection on which a command gets no answer, although keep-alives may. errSlow is that of one
// that may wait for a drive of the node.
var (
	errUnanswered = fmt.Errorf("%w: no answer", client.ErrTimeout)
	errSlow       = fmt.Errorf("%w from a drive", errUnanswered)
)

// check ends the connection if the node does not answer. An unanswered command that waits for a drive proves little:
// that drive may be slow, and the other drives of the node may work. A dead connection ends because of its keep-alives,
// and one that loses long packets because of the commands in the queues for writes, which wait for no drive.
func (q *queue) check(now uint32) {
	q.driver.Lock()
	defer q.driver.Unlock()
	if q.link == nil {
		return
	}
	limit, why, times := uint32(ticks), errUnanswered, time.Duration(1)
	if q.forDrives() {
		limit, why, times = driveTicks, errSlow, driveTicks/ticks
	}
	for tag, c := range q.sent {
		// A Forward may be kept until its write is committed.
		if c != nil && c.SQE.Opcode() != nvme.CmdKVForward && now-q.since[tag] > limit {
			q.fail(fmt.Errorf("%w: a command of opcode %#02x got no answer for %s", why, c.SQE.Opcode(),
				times*q.node.p.cfg.Timeout))
			return
		}
	}
	// At most a half of the queue is for Forwards that are kept (node.keep), so that a full queue makes progress.
	if q.waits() && !q.forDrives() && now-q.progress > ticks {
		q.fail(fmt.Errorf("%w: the queue is full of Forwards, none of which got an answer for %s", errUnanswered,
			q.node.p.cfg.Timeout))
	}
}
