package serve

import (
	"errors"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"jbofd/internal/nvmeof/fabric/queue"
	"jbofd/internal/nvmeof/rdma"
	"jbofd/internal/nvmeof/rdma/verbs"
	"jbofd/internal/nvmeof/rdma/wr"
)

// pollBatch is how many completions one crossing takes.
const pollBatch = 128

// group is a completion queue and the connections whose queue pairs complete there. All of its
// connections' state is touched by one goroutine at a time, but none is bound to it: whoever
// brings work, an SSD's completions for instance, takes a turn if nobody else does, and whoever
// has taken one looks for more work before it goes. The group's own goroutine polls, and sleeps
// on the completion channel when there is nothing.
type group struct {
	dev      *device
	srv      *Server
	cq       verbs.CQ
	stopped  chan struct{} // closed when the goroutine has ended
	stopping atomic.Bool
	// over: the goroutine has ended by itself, for the device does not work any more.
	over atomic.Bool
	// room is how many work requests of connections the queue has places for, promised how many
	// they may post. Guarded by device.mu.
	room, promised int
	// resume: connections that have stopped are to try again.
	resume atomic.Bool
	outbox queue.Outbox
	spin   queue.Spinner

	// creating is held while a queue pair is made, or destroyed and its completions cleared
	// away: a new one may have the same number.
	creating sync.Mutex

	// mu is the turn: everything below, and the machines and Queues of all connections, belong
	// to who has it.
	mu      sync.Mutex
	conns   table
	batches *queue.Batches
	out     rdma.Out
	reposts []wr.Recv
	wcs     [pollBatch]wr.Completion
	touched []*conn // in this turn
	stalled []*conn // with commands that wait
	now     int64   // of this turn
	// left: somebody who had the lock, a turn that has become long for instance, has left work.
	left atomic.Bool
}

func newGroup(d *device, entries int) (*group, error) {
	cq, err := d.domain.CreateCQ(entries)
	if err != nil {
		return nil, err
	}
	g := &group{dev: d, srv: d.srv, cq: cq, stopped: make(chan struct{}), room: entries - d.receives.bound, batches: queue.NewBatches(d.srv.fabric)}
	g.conns.init()
	go g.loop()
	return g, nil
}

// leave gives back what place has promised.
func (g *group) leave(sends int) {
	g.dev.mu.Lock()
	g.promised -= sends
	g.dev.mu.Unlock()
}

// turnLock is the group's lock for those who have something to do with one connection. Work that
// they leave is done by the turn that follows.
type turnLock struct{ g *group }

// Lock implements sync.Locker.
func (l turnLock) Lock() { l.g.mu.Lock() }

// Unlock implements sync.Locker.
func (l turnLock) Unlock() {
	g := l.g
	if len(g.out.Sends) > 0 || len(g.reposts) > 0 {
		g.left.Store(true)
	}
	g.mu.Unlock()
	g.run()
}

// pending reports that there is work for a turn beside completions, which the goroutine is told of.
func (g *group) pending() bool { return g.left.Load() || g.outbox.Pending() || g.resume.Load() }

// maxTurns is how many turns one takes in a row who has something else to do.
const maxTurns = 4

// run takes turns until there is nothing left to do or somebody else has the group: that one
// looks for work after letting go, so nothing is left behind.
func (g *group) run() {
	for turns := 0; g.pending(); turns++ {
		if turns >= maxTurns && !g.over.Load() {
			g.wakeUp()
			return
		}
		if !g.mu.TryLock() {
			return
		}
		g.takeTurn()
	}
}

// takeTurn takes a turn and gives up mu, which the caller has.
func (g *group) takeTurn() (worked, drained bool) {
	worked, drained = g.turn()
	g.mu.Unlock()
	return worked, drained
}

// wakeUp lets the goroutine take a turn; for those who have locks that a turn takes.
func (g *group) wakeUp() {
	_ = g.cq.SetDeadline(time.Unix(1, 0)) // fails only when the queue is closed, and nobody sleeps there
}

// maxRounds is how often a turn polls before it ends, so that others can have the lock.
const maxRounds = 8

// turn does everything that there is to do. It reports whether there was anything, and whether
// it has taken every completion that was there when it began. mu is held.
func (g *group) turn() (worked, drained bool) {
	g.left.Store(false)
	for range maxRounds {
		n, err := g.cq.Poll(g.wcs[:])
		if err != nil {
			g.deviceGone(err)
		}
		drained = drained || n < len(g.wcs)
		g.now = g.srv.fabric.Clock()
		for i := range g.wcs[:n] {
			g.complete(&g.wcs[i])
		}
		if g.resume.Swap(false) {
			g.retry()
		}
		g.outbox.Claim()
		g.batches.HandOver()
		finished := g.finish()
		g.batches.HandOver() // what was waiting for memory, and what lacks only data that cannot be had
		g.post()
		if n == 0 && !finished {
			return worked, drained
		}
		worked = true
	}
	g.left.Store(true)
	return worked, drained
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
	c.Saw(g.now)
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

// retry offers commands that wait to their machines again.
func (g *group) retry() {
	stalled := g.stalled
	g.stalled = nil
	for _, c := range stalled {
		c.stalled = false
		c.retry()
		g.touch(c)
	}
}

// finish takes what the SSDs and partitions have left in the outbox, and reports whether there was
// anything.
//
// hot: 0 allocs
func (g *group) finish() (any bool) {
	for {
		if s := g.outbox.Take(); s != nil {
			any = true
			now := g.srv.fabric.Clock()
			for s != nil {
				next := s.Next()
				c := s.Queue().Transport().(*conn)
				if c.Finish(s, now) {
					c.Later(s, now)
				}
				g.touch(c)
				s = next
			}
		}
		if g.outbox.Leave() {
			return any
		}
	}
}

// post posts receives and work requests, a crossing each, and sees to the connections that the
// turn has touched.
func (g *group) post() {
	for i, c := range g.touched {
		c.look()
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

// forget takes a connection out of everything. mu is held.
func (g *group) forget(c *conn) {
	g.conns.remove(c.qp.Num())
	g.out.Sends = without(g.out.Sends, c.qp.Handle())
	if c.stalled { // or the list would keep it until somebody else's wait is over
		g.stalled = slices.DeleteFunc(g.stalled, func(o *conn) bool { return o == c })
	}
}

// deviceGone notes that the device does not work any more, and ends the connections: they may not
// hear of it otherwise. mu is held.
func (g *group) deviceGone(err error) {
	if !g.dev.removed.Swap(true) {
		g.srv.log.Warn("RDMA device does not work any more", "device", g.dev.name, "error", err)
	}
	g.conns.each(func(c *conn) { c.shut("the device does not work any more") })
}

// giveUp ends the group's goroutine, which can sleep no more. From now on who brings work does all
// of it.
func (g *group) giveUp(err error) {
	g.mu.Lock()
	g.deviceGone(err)
	g.mu.Unlock()
	g.over.Store(true)
	g.run() // for whoever has just left something to the goroutine
}

// loop is the group's goroutine.
func (g *group) loop() {
	defer close(g.stopped)
	for !g.stopping.Load() {
		if g.step() || g.srv.cfg.SpinFor > 0 && g.spin.Worthwhile() && g.spinPoll() {
			continue
		}
		if err := g.cq.Arm(); err != nil {
			g.giveUp(err)
			return
		}
		if g.step() || g.stopping.Load() { // what came before the notice was asked for
			continue
		}
		err := g.cq.Wait()
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			// Woken. Clearing the deadline must not undo a later one: what it was set for is
			// looked at after.
			_ = g.cq.SetDeadline(time.Time{})
		case err != nil:
			g.giveUp(err)
			return
		}
	}
}

// step takes a turn and reports whether there was something to do.
func (g *group) step() bool {
	g.mu.Lock()
	worked, _ := g.takeTurn()
	return worked || g.pending()
}

// spinPoll asks for completions until there are some or time is up.
func (g *group) spinPoll() bool {
	until := g.srv.fabric.Clock() + int64(g.srv.cfg.SpinFor)
	for !g.stopping.Load() {
		if g.step() {
			g.spin.Result(true)
			return true
		}
		if g.srv.fabric.Clock() > until {
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
}

// clear takes all completions that are there now. That nobody has left work does not say so: another
// turn may be in the middle of them.
func (g *group) clear() {
	drained := false
	for seen := 0; !drained && seen <= g.room+g.dev.receives.bound; seen += maxRounds * pollBatch {
		g.mu.Lock()
		_, drained = g.takeTurn()
	}
	g.run() // what came meanwhile was left to these turns
}
