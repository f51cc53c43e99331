// Package window keeps a host within its credits: at every SSD, no more is outstanding than the target has granted
// credit for, counted over all queue pairs and namespaces of an association. Commands beyond that wait at the host, in
// order, and each waits for its own SSD only.
//
//	SharedQPair.Do ──> Acquire ──┐                      ┌──> completion ──> Release
//	                             ├── lane of the SSD ───┤
//	QPair ───────────> Pair ─────┘   window, waiters    └──> Pair.Completed
//
// Package credit has the rules of docs/wire-extensions.md; this package has the locks and the queues.
package window

import (
	"context"
	"errors"
	"sync"
	"time"

	"jbofd/client/internal/host"
	"jbofd/internal/credit"
	"jbofd/internal/nvme"
)

// ErrDead: the queue of a waiting command has failed.
var ErrDead = errors.New("the queue has failed")

// maxNSID bounds the namespaces whose SSD is recorded. Commands to others are not limited.
const maxNSID = 1 << 16

// unlimitedLane is the lane of namespaces whose SSD is not known. It never has a credit, and so does not limit
// anything.
const unlimitedLane = 0

// stallTime is how long a lane with waiters may be without a completion before its first waiter proceeds nevertheless.
// The window may be full of commands whose completions were not collected, because the goroutine that should collect
// them waits here.
const stallTime = 100 * time.Millisecond

// Gate has the windows of one association, for any number of goroutines.
type Gate struct {
	base   time.Time // origin of the clock
	parked sync.Pool

	mu     sync.Mutex
	lanes  []*lane // by number; the number of a lane does not change
	byNSID []uint16
	bySSD  map[uint16]uint16
	// valve calls relieve when it expires; armed: it is running.
	valve *time.Timer
	armed bool
}

// lane is the window and the waiters of one SSD.
type lane struct {
	ssd uint16
	win credit.Window
	// first and last are the ends of the list of waiters. Invariant: if there are waiters, something is outstanding,
	// whose completion lets waiters proceed.
	first, last *waiter
	// waiting is the number of commands that wait, those behind the waiter of a Pair included.
	waiting int
	// completions counts completions; seen is its value when relieve looked last.
	completions, seen uint64

	waits  uint64 // number of commands that have waited
	waited int64  // sum of their waiting times in ns
}

// waiter is a command, or the first command of a Pair, that has found the window of a lane full.
type waiter struct {
	// units of a command, or of both of a fused pair.
	units      [2]int
	next, prev *waiter
	queued     bool
	// granted: it was taken off the list, and its units count as outstanding.
	granted bool
	probe   bool // it waits for room but takes no units
	wake    func()
}

// New returns a gate without credits, which does not limit anything.
func New() *Gate {
	return &Gate{base: time.Now(), parked: sync.Pool{New: newParked}, lanes: []*lane{{}}, bySSD: map[uint16]uint16{}}
}

func (g *Gate) now() int64 { return int64(time.Since(g.base)) }

// Map records the SSD of a namespace. It reports whether that SSD has no credit yet, so that the caller should ask for
// one.
func (g *Gate) Map(nsid uint32, ssd uint16) (news bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.lanes[g.mapTo(nsid, ssd)].win.Credit(g.now()) == 0
}

// mapTo is Map with mu held; it returns the lane.
func (g *Gate) mapTo(nsid uint32, ssd uint16) uint16 {
	i := g.laneOfSSD(ssd)
	if nsid < maxNSID {
		for uint32(len(g.byNSID)) <= nsid {
			g.byNSID = append(g.byNSID, unlimitedLane)
		}
		g.byNSID[nsid] = i
	}
	return i
}

func (g *Gate) laneOfSSD(ssd uint16) uint16 {
	i, ok := g.bySSD[ssd]
	if !ok && len(g.lanes) < 1<<16 { // else it shares the lane unknown
		i = uint16(len(g.lanes))
		g.lanes = append(g.lanes, &lane{ssd: ssd})
		g.bySSD[ssd] = i
	}
	return i
}

// Grant applies a credit that has come with an admin completion.
func (g *Gate) Grant(c nvme.Credit) {
	if c.Units() == 0 {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	now := g.now()
	l := g.lanes[g.laneOfSSD(c.SSD())]
	l.win.Grant(now, c.Units())
	l.pump(now)
}

// Namespaces calls f for every namespace whose SSD is known.
func (g *Gate) Namespaces(f func(nsid uint32, ssd uint16)) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for nsid, i := range g.byNSID {
		if i != unlimitedLane {
			f(uint32(nsid), g.lanes[i].ssd)
		}
	}
}

// State describes a lane.
type State struct {
	SSD uint16
	// Units is the credit; 0: no limit. Outstanding is in units too, Waiting is in commands.
	Units, Outstanding, Waiting int
	// Waits is the number of commands that have waited, Waited the sum of their waiting times.
	Waits  uint64
	Waited time.Duration
}

// State describes the lane of a namespace.
func (g *Gate) State(nsid uint32) State {
	g.mu.Lock()
	defer g.mu.Unlock()
	l := g.lanes[g.laneOf(nsid)]
	_, units := l.win.Outstanding()
	return State{SSD: l.ssd, Units: l.win.Credit(g.now()), Outstanding: units, Waiting: l.waiting, Waits: l.waits,
		Waited: time.Duration(l.waited)}
}

// laneOf returns the number of the lane of a namespace. mu is held.
func (g *Gate) laneOf(nsid uint32) uint16 {
	if nsid < uint32(len(g.byNSID)) {
		return g.byNSID[nsid]
	}
	return unlimitedLane
}

// mayPass reports whether a command may be sent at once: there is credit, and no waiter to queue behind.
func (l *lane) mayPass(now int64, units [2]int) bool {
	return l.first == nil && l.win.MaySend(now, units[0]+units[1])
}

func (l *lane) sent(units [2]int) {
	l.win.Sent(units[0])
	if units[1] > 0 {
		l.win.Sent(units[1])
	}
}

func (l *lane) push(w *waiter) {
	w.queued, w.next, w.prev = true, nil, l.last
	if l.last == nil {
		l.first = w
	} else {
		l.last.next = w
	}
	l.last = w
}

func (l *lane) remove(w *waiter) {
	if w.prev == nil {
		l.first = w.next
	} else {
		w.prev.next = w.next
	}
	if w.next == nil {
		l.last = w.prev
	} else {
		w.next.prev = w.prev
	}
	w.queued, w.next, w.prev = false, nil, nil
}

// pump lets waiters proceed, in order, as far as the window allows.
func (l *lane) pump(now int64) {
	for w := l.first; w != nil && l.win.MaySend(now, w.units[0]+w.units[1]); w = l.first {
		l.grant(w)
	}
}

func (l *lane) grant(w *waiter) {
	l.remove(w)
	w.granted = true
	if !w.probe {
		l.sent(w.units)
	}
	w.wake()
}

// enqueue makes w wait. mu is held.
func (g *Gate) enqueue(l *lane, w *waiter) {
	l.push(w)
	switch {
	case g.armed:
	case g.valve == nil:
		g.valve = time.AfterFunc(stallTime, g.releaseStalled)
	default:
		g.valve.Reset(stallTime)
	}
	g.armed = true
}

// releaseStalled lets the first waiter proceed in lanes where nothing has completed since its last call.
func (g *Gate) releaseStalled() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.armed = false
	for _, l := range g.lanes {
		if l.first != nil && l.seen == l.completions {
			l.grant(l.first)
		}
		l.seen = l.completions
		if l.first != nil && !g.armed {
			g.armed = true
			g.valve.Reset(stallTime)
		}
	}
}

// done accounts for a completion. mu is held.
func (g *Gate) done(now int64, t Ticket, c nvme.Credit) {
	l := g.lanes[t.lane]
	l.completions++
	if c.Units() > 0 && (t.lane == unlimitedLane || l.ssd != c.SSD()) {
		// The namespace is on another SSD than recorded: the credit belongs to that one.
		o := g.lanes[g.mapTo(t.nsid, c.SSD())]
		o.win.Grant(now, c.Units())
		o.pump(now)
		c = 0
	}
	l.win.Completed(now, int(t.units), c.Units())
	if l.first != nil {
		l.pump(now)
	}
}

// Ticket is the share of a window that an outstanding command holds.
type Ticket struct {
	nsid, units uint32
	lane        uint16
}

func unitsOf(cmds []host.Command) (u [2]int) {
	for i := range cmds {
		u[i] = unitsOf1(&cmds[i])
	}
	return u
}

func unitsOf1(c *host.Command) int { return credit.Units(len(c.Data)) }

// parked is a waiter that a goroutine waits for.
type parked struct {
	waiter
	ready chan struct{}
}

func newParked() any {
	p := &parked{ready: make(chan struct{}, 1)}
	p.wake = func() { p.ready <- struct{}{} }
	return p
}

// Acquire waits until the commands (one, or a fused pair) may be sent, and writes a ticket for each. The caller must
// pass each ticket to Release.
//
// Errors: the context's; ErrDead if dead is closed first.
//
// Cost: 0 allocs if the commands need not wait.
func (g *Gate) Acquire(ctx context.Context, dead <-chan struct{}, cmds []host.Command,
	tickets []Ticket) error { // hot: 0 allocs
	u := unitsOf(cmds)
	g.mu.Lock()
	nsid := cmds[0].SQE.NSID()
	n := g.laneOf(nsid)
	for i := range cmds {
		tickets[i] = Ticket{nsid: nsid, units: uint32(u[i]), lane: n}
	}
	l := g.lanes[n]
	now := g.now()
	if l.mayPass(now, u) {
		l.sent(u)
		g.mu.Unlock()
		return nil
	}
	return g.wait(ctx, dead, l, u, len(cmds), false, now)
}

// Wait returns when a command with lenBytes of data could be sent. It takes no credit.
//
// Errors: the context's; ErrDead.
func (g *Gate) Wait(ctx context.Context, dead <-chan struct{}, nsid uint32, lenBytes int) error {
	u := [2]int{credit.Units(lenBytes)}
	g.mu.Lock()
	l := g.lanes[g.laneOf(nsid)]
	now := g.now()
	if l.mayPass(now, u) {
		g.mu.Unlock()
		return nil
	}
	return g.wait(ctx, dead, l, u, 0, true, now)
}

// wait waits in the list of l. mu is held at the call and not at the return.
func (g *Gate) wait(ctx context.Context, dead <-chan struct{}, l *lane, u [2]int, commands int, probe bool,
	since int64) error {
	p := g.parked.Get().(*parked)
	p.units, p.granted, p.probe = u, false, probe
	g.enqueue(l, &p.waiter)
	l.waiting += commands
	l.waits += uint64(commands)
	g.mu.Unlock()
	var err error
	select {
	case <-p.ready:
	case <-ctx.Done():
		err = ctx.Err()
	case <-dead:
		err = ErrDead
	}
	g.mu.Lock()
	now := g.now()
	l.waiting -= commands
	l.waited += int64(commands) * (now - since)
	switch {
	case err == nil:
	case p.granted: // after ctx or dead
		<-p.ready
		if !probe {
			l.undoSent(now, u)
		}
	default:
		l.remove(&p.waiter)
		l.pump(now)
	}
	g.mu.Unlock()
	g.parked.Put(p)
	return err
}

// undoSent undoes sent.
func (l *lane) undoSent(now int64, units [2]int) {
	for _, u := range units {
		if u > 0 {
			l.win.Completed(now, u, 0)
		}
	}
	l.pump(now)
}

// Release returns the ticket of a command that has completed with credit c, or that was not sent (c is 0).
//
// Cost: 0 allocs.
func (g *Gate) Release(t Ticket, c nvme.Credit) { // hot: 0 allocs
	g.mu.Lock()
	g.done(g.now(), t, c)
	g.mu.Unlock()
}
