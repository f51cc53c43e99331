// Package window keeps a host within its credits: at every SSD, no more is outstanding than the target has granted
// credit for, counted over all queue pairs and namespaces of an association. Commands beyond that wait at the host, in
// order, and each waits for its own SSD only.
//
//	SharedQPair.Do ──> Acquire ──┐                      ┌──> completion ──> Release
//	                             ├── one for each SSD ──┤
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

// unlimited is the number of the window of namespaces whose SSD is not known. It never has a credit, and so does not
// limit anything.
const unlimited = 0

// stallTime is how long a window with waiters may be without a completion before its first waiter proceeds
// nevertheless. The window may be full of commands whose completions were not collected, because the goroutine that
// should collect them waits here.
const stallTime = 100 * time.Millisecond

// Gate has the windows of one association, for any number of goroutines.
type Gate struct {
	base   time.Time // origin of the clock
	parked sync.Pool

	mu      sync.Mutex
	windows []*ssdWindow // by number; the number of a window does not change
	// byNSID and bySSD have the numbers of the windows.
	byNSID []uint16
	bySSD  map[uint16]uint16
	// valve calls releaseStalled when it expires; armed: it is running.
	valve *time.Timer
	armed bool
}

// ssdWindow is the window and the waiters of one SSD.
type ssdWindow struct {
	ssd uint16
	win credit.Window
	// first and last are the ends of the list of waiters. Invariant: if there are waiters, something is outstanding,
	// whose completion lets waiters proceed.
	first, last *waiter
	// waiting is the number of commands that wait, those behind the waiter of a Pair included.
	waiting int
	// overdrawn counts the units that releaseStalled has sent beyond the credit.
	overdrawn uint64
	// completions counts completions; seen is its value when releaseStalled looked last.
	completions, seen uint64

	waits  uint64 // number of commands that have waited
	waited int64  // sum of their waiting times in ns
}

// waiter is a command, or the first command of a Pair, that has found the window of its SSD full.
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
	return &Gate{base: time.Now(), parked: sync.Pool{New: newParked}, windows: []*ssdWindow{{}},
		bySSD: map[uint16]uint16{}}
}

func (g *Gate) now() int64 { return int64(time.Since(g.base)) }

// Map records the SSD of a namespace. It reports whether that SSD has no credit yet, so that the caller should ask for
// one.
func (g *Gate) Map(nsid uint32, ssd uint16) (news bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.windows[g.mapTo(nsid, ssd)].win.Credit(g.now()) == 0
}

// mapTo is Map with mu held; it returns the number of the SSD's window.
func (g *Gate) mapTo(nsid uint32, ssd uint16) uint16 {
	i := g.windowOfSSD(ssd)
	if nsid < maxNSID {
		for uint32(len(g.byNSID)) <= nsid {
			g.byNSID = append(g.byNSID, unlimited)
		}
		g.byNSID[nsid] = i
	}
	return i
}

// windowOfSSD returns the number of the window of an SSD, which it makes if there is none. mu is held.
func (g *Gate) windowOfSSD(ssd uint16) uint16 {
	i, ok := g.bySSD[ssd]
	if !ok && len(g.windows) < 1<<16 { // otherwise the SSD is not limited
		i = uint16(len(g.windows))
		g.windows = append(g.windows, &ssdWindow{ssd: ssd})
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
	sw := g.windows[g.windowOfSSD(c.SSD())]
	sw.win.Grant(now, c.Units())
	sw.pump(now)
}

// Namespaces calls f for every namespace whose SSD is known.
func (g *Gate) Namespaces(f func(nsid uint32, ssd uint16)) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for nsid, i := range g.byNSID {
		if i != unlimited {
			f(uint32(nsid), g.windows[i].ssd)
		}
	}
}

// State describes the window of an SSD.
type State struct {
	SSD uint16
	// Units is the credit; 0: no limit. Outstanding is in units too, Waiting is in commands.
	Units, Outstanding, Waiting int
	// Waits is the number of commands that have waited, Waited the sum of their waiting times.
	Waits  uint64
	Waited time.Duration
	// Overdrawn counts the units that were sent beyond the credit because nothing had completed for 100 ms.
	Overdrawn uint64
}

// State describes the window of a namespace's SSD.
func (g *Gate) State(nsid uint32) State {
	g.mu.Lock()
	defer g.mu.Unlock()
	sw := g.windows[g.windowOf(nsid)]
	_, units := sw.win.Outstanding()
	return State{SSD: sw.ssd, Units: sw.win.Credit(g.now()), Outstanding: units, Waiting: sw.waiting, Waits: sw.waits,
		Overdrawn: sw.overdrawn,
		Waited:    time.Duration(sw.waited)}
}

// windowOf returns the number of the window of a namespace's SSD. mu is held.
func (g *Gate) windowOf(nsid uint32) uint16 {
	if nsid < uint32(len(g.byNSID)) {
		return g.byNSID[nsid]
	}
	return unlimited
}

// mayPass reports whether a command may be sent at once: there is credit, and no waiter to queue behind.
func (sw *ssdWindow) mayPass(now int64, units [2]int) bool {
	return sw.first == nil && sw.win.MaySend(now, units[0]+units[1])
}

// sent counts a command, or a fused pair, as outstanding.
func (sw *ssdWindow) sent(units [2]int) {
	sw.win.Sent(units[0])
	if units[1] > 0 {
		sw.win.Sent(units[1])
	}
}

func (sw *ssdWindow) push(w *waiter) {
	w.queued, w.next, w.prev = true, nil, sw.last
	if sw.last == nil {
		sw.first = w
	} else {
		sw.last.next = w
	}
	sw.last = w
}

func (sw *ssdWindow) remove(w *waiter) {
	if w.prev == nil {
		sw.first = w.next
	} else {
		w.prev.next = w.next
	}
	if w.next == nil {
		sw.last = w.prev
	} else {
		w.next.prev = w.prev
	}
	w.queued, w.next, w.prev = false, nil, nil
}

// pump lets waiters proceed, in order, as far as the window allows.
func (sw *ssdWindow) pump(now int64) {
	for w := sw.first; w != nil && sw.win.MaySend(now, w.units[0]+w.units[1]); w = sw.first {
		sw.grant(w)
	}
}

// grant lets w proceed: its units are outstanding from now on, unless it is a probe.
func (sw *ssdWindow) grant(w *waiter) {
	sw.remove(w)
	w.granted = true
	if !w.probe {
		sw.sent(w.units)
	}
	w.wake()
}

// enqueue makes w wait. mu is held.
func (g *Gate) enqueue(sw *ssdWindow, w *waiter) {
	sw.push(w)
	switch {
	case g.armed:
	case g.valve == nil:
		g.valve = time.AfterFunc(stallTime, g.releaseStalled)
	default:
		g.valve.Reset(stallTime)
	}
	g.armed = true
}

// releaseStalled lets the first waiter proceed at SSDs where nothing has completed since its last call.
func (g *Gate) releaseStalled() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.armed = false
	for _, sw := range g.windows {
		if w := sw.first; w != nil && sw.seen == sw.completions {
			if !w.probe {
				sw.overdrawn += uint64(w.units[0] + w.units[1])
			}
			sw.grant(w)
		}
		sw.seen = sw.completions
		if sw.first != nil && !g.armed {
			g.armed = true
			g.valve.Reset(stallTime)
		}
	}
}

// done accounts for a completion. mu is held.
func (g *Gate) done(now int64, t Ticket, c nvme.Credit) {
	sw := g.windows[t.window]
	sw.completions++
	if c.Units() > 0 && (t.window == unlimited || sw.ssd != c.SSD()) {
		// The namespace is on another SSD than recorded: the credit belongs to that one.
		o := g.windows[g.mapTo(t.nsid, c.SSD())]
		o.win.Grant(now, c.Units())
		o.pump(now)
		c = 0
	}
	sw.win.Completed(now, int(t.units), c.Units())
	if sw.first != nil {
		sw.pump(now)
	}
}

// Ticket is the share of a window that an outstanding command holds.
type Ticket struct {
	nsid, units uint32
	window      uint16
	// wide: the completion's result takes DW0 and DW1, and the units of the credit are in SQID.
	wide bool
}

// credit returns the credit in the completion of the ticket's command. mu is held.
func (g *Gate) credit(t Ticket, c *host.Completion) nvme.Credit {
	switch {
	case !t.wide:
		return nvme.Credit(c.Result >> 32)
	case t.window == unlimited: // it is not known which SSD the credit is for
		return 0
	}
	return nvme.MakeCredit(g.windows[t.window].ssd, int(c.SQID))
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
	n := g.windowOf(nsid)
	for i := range cmds {
		tickets[i] = Ticket{nsid: nsid, units: uint32(u[i]), window: n, wide: nvme.KVVersioned(cmds[i].SQE.Opcode())}
	}
	sw := g.windows[n]
	now := g.now()
	if sw.mayPass(now, u) {
		sw.sent(u)
		g.mu.Unlock()
		return nil
	}
	return g.wait(ctx, dead, sw, u, len(cmds), false, now)
}

// Wait returns when a command with lenBytes of data could be sent. It takes no credit.
//
// Errors: the context's; ErrDead.
func (g *Gate) Wait(ctx context.Context, dead <-chan struct{}, nsid uint32, lenBytes int) error {
	u := [2]int{credit.Units(lenBytes)}
	g.mu.Lock()
	sw := g.windows[g.windowOf(nsid)]
	now := g.now()
	if sw.mayPass(now, u) {
		g.mu.Unlock()
		return nil
	}
	return g.wait(ctx, dead, sw, u, 0, true, now)
}

// wait waits in the list of waiters of sw. mu is held at the call and not at the return.
func (g *Gate) wait(ctx context.Context, dead <-chan struct{}, sw *ssdWindow, u [2]int, commands int, probe bool,
	since int64) error {
	p := g.parked.Get().(*parked)
	p.units, p.granted, p.probe = u, false, probe
	g.enqueue(sw, &p.waiter)
	sw.waiting += commands
	sw.waits += uint64(commands)
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
	sw.waiting -= commands
	sw.waited += int64(commands) * (now - since)
	switch {
	case err == nil:
	case p.granted: // after ctx or dead
		<-p.ready
		if !probe {
			sw.undoSent(now, u)
		}
	default:
		sw.remove(&p.waiter)
		sw.pump(now)
	}
	g.mu.Unlock()
	g.parked.Put(p)
	return err
}

// undoSent undoes sent.
func (sw *ssdWindow) undoSent(now int64, units [2]int) {
	for _, u := range units {
		if u > 0 {
			sw.win.Completed(now, u, 0)
		}
	}
	sw.pump(now)
}

// Completed returns the ticket of a command that has completed.
//
// Cost: 0 allocs.
func (g *Gate) Completed(t Ticket, c *host.Completion) { // hot: 0 allocs
	g.mu.Lock()
	g.done(g.now(), t, g.credit(t, c))
	g.mu.Unlock()
}

// Release returns the ticket of a command that has completed with credit c, or that was not sent (c is 0).
//
// Cost: 0 allocs.
func (g *Gate) Release(t Ticket, c nvme.Credit) { // hot: 0 allocs
	g.mu.Lock()
	g.done(g.now(), t, c)
	g.mu.Unlock()
}
