package serve

import (
	"errors"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"jbofd/internal/nvmeof/rdma"
	"jbofd/internal/nvmeof/rdma/verbs"
	"jbofd/internal/nvmeof/rdma/wr"
	"jbofd/internal/nvmeof/target/connection"
	"jbofd/internal/turn"
)

// pollBatch is how many completions one crossing takes.
const pollBatch = 128

// group is a completion queue and the connections whose queue pairs complete there. A turn.Driver drives it: a
// goroutine that brings work, a drive's completions for instance, takes a turn if the group is free, and posts the
// answers without a goroutine switch. The group has a goroutine of its own besides, which polls for completions and
// sleeps on the completion channel when there are none; what others hand over is handed over to it.
type group struct {
	dev      *device
	srv      *Server
	cq       verbs.CQ
	stopped  chan struct{} // closed when the goroutine has ended
	stopping atomic.Bool
	// over: the goroutine has ended by itself, because the device does not work any more.
	over atomic.Bool
	// room is how many work requests of connections the queue has places for, promised how many
	// they may post. Guarded by device.mu.
	room, promised int
	driver         turn.Driver
	// resume: commands that wait for memory try again in the next turn.
	resume atomic.Bool
	outbox connection.Outbox
	spin   connection.Spinner

	// creating is held while a queue pair is made, or destroyed and its completions cleared
	// away: a new one may have the same number.
	creating sync.Mutex

	// Everything below, and the machines and Queues of all connections, belong to the driver's owner.
	conns   table
	batches *connection.Batches
	out     rdma.Out
	reposts []wr.Recv
	wcs     [pollBatch]wr.Completion
	touched []*conn // in this turn
	stalled []*conn // with commands that wait
	now     int64   // of this turn
	// worked and drained are the result of the last turn: there was something to do; every completion was taken that
	// was there when the turn began.
	worked, drained bool
	// unfinished: the last owner has left work requests to be posted, or completions to be polled.
	unfinished atomic.Bool
}

func newGroup(d *device, entries int) (*group, error) {
	cq, err := d.domain.CreateCQ(entries)
	if err != nil {
		return nil, err
	}
	g := &group{dev: d, srv: d.srv, cq: cq, stopped: make(chan struct{}), room: entries - d.receives.bound,
		batches: connection.NewBatches(d.srv.service)}
	if err := g.init(); err != nil {
		return nil, errors.Join(err, cq.Close())
	}
	turn.Real.Go(g.loop)
	return g, nil
}

// init prepares a group without its goroutine.
func (g *group) init() error {
	g.conns.init()
	return g.driver.Init(turn.Config{Machine: (*machine)(g), HandOver: g.handOver})
}

// handOver lets the group's goroutine take a turn, or another one if that has ended.
func (g *group) handOver() {
	if g.over.Load() {
		g.driver.Env().Go(g.driver.Run)
		return
	}
	g.wakeUp()
}

// releasePlace gives back what place has promised.
func (g *group) releasePlace(sends int) {
	g.dev.mu.Lock()
	g.promised -= sends
	g.dev.mu.Unlock()
}

// turnLock is ownership of the group for code that works on one connection. It leaves posting to the turn that follows.
type turnLock struct{ g *group }

// Lock implements sync.Locker.
func (l turnLock) Lock() { l.g.driver.Lock() }

// Unlock implements sync.Locker.
func (l turnLock) Unlock() {
	g := l.g
	if len(g.out.Sends) > 0 || len(g.reposts) > 0 {
		g.unfinished.Store(true)
	}
	g.driver.Unlock()
}

// machine is the group as its driver sees it.
type machine group

// Pending implements turn.Machine: there is work besides completions, for which the group's goroutine waits.
func (m *machine) Pending() bool {
	return m.unfinished.Load() || m.outbox.Pending() || m.resume.Load()
}

// Turn implements turn.Machine.
func (m *machine) Turn() { (*group)(m).turn() }

// takeTurn takes a turn and looks into no mailbox afterwards: the caller takes more turns or calls driver.Run.
func (g *group) takeTurn() (worked, drained bool) {
	g.driver.Lock()
	g.turn()
	worked, drained = g.worked, g.drained
	g.driver.Release()
	return worked, drained
}

// wakeUp ends the goroutine's sleep, also the next one if it does not sleep now.
func (g *group) wakeUp() {
	_ = g.cq.SetDeadline(time.Unix(1, 0)) // fails only when the queue is closed, and nobody sleeps there
}

// maxRounds is how often a turn polls before it ends, so that others can have ownership.
const maxRounds = 8

// turn takes completions and what drives and partitions have finished, and posts what follows from them. Needs
// ownership.
func (g *group) turn() {
	g.unfinished.Store(false)
	g.worked, g.drained = false, false
	for range maxRounds {
		n, err := g.cq.Poll(g.wcs[:])
		if err != nil {
			g.deviceGone(err)
		}
		g.drained = g.drained || n < len(g.wcs)
		g.now = g.srv.service.Clock()
		for i := range g.wcs[:n] {
			g.complete(&g.wcs[i])
		}
		if g.resume.Swap(false) {
			g.retry()
		}
		g.outbox.Claim()
		g.batches.HandOver()
		finished := g.outbox.EmptyLocked(g.srv.service, g.finished)
		g.batches.HandOver() // what was waiting for memory, and what lacks only data that cannot be had
		g.post()
		if n == 0 && !finished {
			return
		}
		g.worked = true
	}
	g.unfinished.Store(true)
}

// complete takes one completion.
//
// hot: 0 allocs
func (g *group) complete(w *wr.Completion) {
	c := g.conns.get(w.QPNum)
	if w.ID&recvKind != recvKind {
		if c == nil {
			return // of a queue pair that is gone
		}
		c.progress++
		c.m.Completed(w)
		g.touch(c)
		if c.waiting.n > 0 {
			c.retry()
		}
		return
	}
	i := int(uint32(w.ID))
	if c == nil || w.Status != wr.StatusOK {
		if c != nil {
			c.receiveFailed(w)
			g.touch(c)
		}
		g.repost(i)
		return
	}
	c.NoteActivity(g.now)
	c.received(i, int(w.Len))
	g.touch(c)
}

func (g *group) repost(i int) { g.reposts = append(g.reposts, g.dev.receives.request(i)) }

// touch notes that something has happened to c in this turn.
func (g *group) touch(c *conn) {
	if !c.touched {
		c.touched = true
		g.touched = append(g.touched, c)
	}
}

// retry offers commands that wait for memory to their machines again.
func (g *group) retry() {
	stalled := g.stalled
	g.stalled = nil
	for _, c := range stalled {
		c.stalled = false
		c.retry()
		g.touch(c)
	}
}

// finished notes that a command of a connection has left the outbox.
//
// hot: 0 allocs
func (g *group) finished(c *connection.Conn) { g.touch(c.Transport().(*conn)) }

// post posts receives and work requests, a crossing each, and sees to the connections that the
// turn has touched.
func (g *group) post() {
	for i, c := range g.touched {
		c.afterTurn()
		c.touched = false
		g.touched[i] = nil
	}
	g.touched = g.touched[:0]
	if len(g.reposts) > 0 {
		if err := g.dev.receives.post(g.reposts); err != nil {
			g.deviceGone(err)
		}
		g.reposts = g.reposts[:0]
	}
	for sends := g.out.Sends; len(sends) > 0; {
		n, err := g.dev.domain.PostSend(sends)
		sends = sends[n:]
		if len(sends) == 0 {
			break
		}
		sends = g.refused(sends, err)
	}
	g.out.Reset()
}

// refused ends the connection whose work request was not taken and returns the batch without
// its.
func (g *group) refused(sends []wr.Send, err error) []wr.Send {
	qp := sends[0].QP
	g.conns.each(func(c *conn) {
		if c.qp.Handle() == qp {
			c.m.Close()
			c.shut("the queue pair takes no work requests: " + errText(err))
		}
	})
	return without(sends, qp)
}

// without takes a queue pair's work requests out of a batch.
func without(sends []wr.Send, qp uint64) []wr.Send {
	k := 0
	for _, w := range sends {
		if w.QP != qp {
			sends[k] = w
			k++
		}
	}
	return sends[:k]
}

func errText(err error) string {
	if err == nil {
		return "no reason given"
	}
	return err.Error()
}

// forget takes a connection out of everything. Needs ownership.
func (g *group) forget(c *conn) {
	g.conns.remove(c.qp.Num())
	g.out.Sends = without(g.out.Sends, c.qp.Handle())
	if c.stalled { // the list would keep it until another command's wait is over
		g.stalled = slices.DeleteFunc(g.stalled, func(o *conn) bool { return o == c })
	}
}

// deviceGone notes that the device does not work any more and ends the connections: no event of the device may tell
// them. Needs ownership.
func (g *group) deviceGone(err error) {
	if !g.dev.removed.Swap(true) {
		g.srv.log.Warn("RDMA device does not work any more", "device", g.dev.name, "error", err)
	}
	g.conns.each(func(c *conn) { c.shut("the device does not work any more") })
}

// giveUp ends the group's goroutine, which cannot sleep any more. From now on the goroutines that bring work take all
// turns.
func (g *group) giveUp(err error) {
	g.driver.Lock()
	g.deviceGone(err)
	g.driver.Release()
	g.over.Store(true)
	g.driver.Run() // after over: work may just have been handed over to this goroutine
}

// loop is the group's goroutine.
func (g *group) loop() {
	defer close(g.stopped)
	for !g.stopping.Load() {
		if g.step() || g.srv.cfg.SpinFor > 0 && g.spin.ShouldSpin() && g.spinPoll() {
			continue
		}
		if err := g.cq.Arm(); err != nil {
			g.giveUp(err)
			return
		}
		if g.step() || g.stopping.Load() { // completions that came before Arm bring no notice
			continue
		}
		err := g.cq.Wait()
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			// wakeUp. A wakeUp that comes now, and whose deadline this clears, is not lost: the work that
			// it was for is looked at in the next step.
			_ = g.cq.SetDeadline(time.Time{})
		case err != nil:
			g.giveUp(err)
			return
		}
	}
}

// step takes a turn and reports whether there was something to do.
func (g *group) step() bool {
	worked, _ := g.takeTurn()
	return worked || (*machine)(g).Pending()
}

// spinPoll asks for completions until there are some or time is up.
func (g *group) spinPoll() bool {
	until := g.srv.service.Clock() + int64(g.srv.cfg.SpinFor)
	for !g.stopping.Load() {
		if g.step() {
			g.spin.Result(true)
			return true
		}
		if g.srv.service.Clock() > until {
			break
		}
		runtime.Gosched()
	}
	g.spin.Result(false)
	return false
}

// stop ends the goroutine; there are no connections any more.
func (g *group) stop() {
	g.stopping.Store(true)
	g.wakeUp()
	<-g.stopped
	g.driver.Close()
}

// clear takes all completions that are there now. That nothing is pending is no proof that there are none: another
// goroutine's turn may be in the middle of them.
func (g *group) clear() {
	drained := false
	for seen := 0; !drained && seen <= g.room+g.dev.receives.bound; seen += maxRounds * pollBatch {
		_, drained = g.takeTurn()
	}
	g.driver.Run() // for work that came meanwhile and was left to these turns
}
