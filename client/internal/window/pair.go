package window

import (
	"sync/atomic"

	"jbofd/client/internal/host"
	"jbofd/internal/nvme"
)

// Pair applies the gate to a queue pair of one goroutine. It accepts commands as the machine does, and holds back those
// that must wait for credit. They are sent when a completion, of this queue pair or of another one, has made room.
//
// Only the goroutine of the queue pair may call its methods.
type Pair struct {
	g *Gate
	m host.Machine
	// sent has the tickets of outstanding commands by slot; units 0: none.
	sent  []Ticket
	bySSD []*heldCommands // by the number of the window; nil if no command was held back there yet
	held  int             // number of commands held back, for all SSDs
	// verdicts has, for each command of a batch, its window and whether it is held back.
	verdicts []verdict
	out      []outgoing // commands that are no longer held back

	// granted: a waiter has got its units. parked: the goroutine sleeps, so that waking is called when granted is set.
	granted, parked atomic.Bool
	waking          func()
}

// verdict says what Submit does with a command.
type verdict struct {
	window uint16
	hold   bool
}

type outgoing struct {
	cmd    host.Command
	window uint16
}

// heldCommands has the commands that a Pair holds back for one SSD, in a ring. Its waiter stands for the first command
// or fused pair.
type heldCommands struct {
	waiter  waiter
	cmds    []host.Command
	since   []int64
	head, n int
}

// NewPair returns the Pair of machine m. wake is called, by any goroutine and with the gate's mutex held, when the
// goroutine of the queue pair sleeps (Park) and should call Advance.
func (g *Gate) NewPair(m host.Machine, wake func()) *Pair {
	return &Pair{g: g, m: m, sent: make([]Ticket, m.Depth()), verdicts: make([]verdict, m.Depth()),
		out: make([]outgoing, 0, m.Depth()), waking: wake}
}

// Held returns how many commands are held back.
func (p *Pair) Held() int { return p.held }

// Submit accepts commands in order and returns how many: fewer than all if the queue is full, commands that are held
// back included. Those that need not wait have been submitted to the machine.
//
// Errors: the machine's, for the first command that was not accepted.
//
// Cost: 0 allocs, except for the first command held back for an SSD.
func (p *Pair) Submit(cmds []host.Command) (taken int, err error) { // hot: 0 allocs
	free := p.m.Free() - p.held
	g := p.g
	g.mu.Lock()
	now := g.now()
	for taken < len(cmds) {
		group := cmds[taken : taken+groupLen(cmds[taken:])]
		if len(group) > free {
			if free <= 0 {
				err = host.ErrQueueFull
			}
			break
		}
		if err = p.check(group); err != nil {
			break
		}
		free -= len(group)
		v := verdict{window: g.windowOf(group[0].SQE.NSID())}
		sw := g.windows[v.window]
		u := unitsOf(group)
		h := p.heldFor(v.window)
		if (h == nil || h.n == 0) && sw.mayPass(now, u) {
			sw.sent(u)
		} else {
			v.hold = true
			p.hold(v.window, group, u, now)
		}
		for range group {
			p.verdicts[taken] = v
			taken++
		}
	}
	g.mu.Unlock()
	for i := range taken {
		if v := p.verdicts[i]; !v.hold {
			p.send(&cmds[i], v.window)
		}
	}
	return taken, err
}

// groupLen returns 2 if cmds begins with a fused pair, or else 1.
func groupLen(cmds []host.Command) int {
	if len(cmds) > 1 && cmds[0].SQE.Fuse() == nvme.FuseFirst {
		return 2
	}
	return 1
}

func (p *Pair) check(group []host.Command) error {
	for i := range group {
		if err := p.m.Check(&group[i]); err != nil {
			return err
		}
	}
	return nil
}

// heldFor returns what is held back for the SSD of window n; nil if nothing was yet.
func (p *Pair) heldFor(n uint16) *heldCommands {
	if int(n) < len(p.bySSD) {
		return p.bySSD[n]
	}
	return nil
}

// hold holds a command or a fused pair back. The gate's mu is held.
func (p *Pair) hold(n uint16, group []host.Command, u [2]int, now int64) {
	for int(n) >= len(p.bySSD) {
		p.bySSD = append(p.bySSD, nil)
	}
	h := p.bySSD[n]
	if h == nil {
		d := p.m.Depth()
		h = &heldCommands{cmds: make([]host.Command, d), since: make([]int64, d)}
		h.waiter.wake = func() {
			p.granted.Store(true)
			if p.parked.Load() {
				p.waking()
			}
		}
		p.bySSD[n] = h
	}
	sw := p.g.windows[n]
	if h.n == 0 {
		h.waiter.units = u
		p.g.enqueue(sw, &h.waiter)
	}
	for i := range group {
		k := (h.head + h.n) % len(h.cmds)
		h.cmds[k], h.since[k] = group[i], now
		h.n++
	}
	p.held += len(group)
	sw.waiting += len(group)
	sw.waits += uint64(len(group))
}

// send submits a command to the machine.
func (p *Pair) send(c *host.Command, window uint16) {
	t := Ticket{nsid: c.SQE.NSID(), units: uint32(unitsOf1(c)), window: window, wide: nvme.KVVersioned(c.SQE.Opcode())}
	cid, err := p.m.Submit(c)
	if err != nil {
		// Submit has checked the command and counted free slots: the queue has failed since.
		p.g.Release(t, 0)
		return
	}
	p.sent[host.SlotOf(cid)] = t
}

// Completed accounts for completions of this queue pair, and submits the commands that may be sent now to the machine.
// The caller must then send.
//
// Cost: 0 allocs.
func (p *Pair) Completed(comps []host.Completion) { // hot: 0 allocs
	g := p.g
	g.mu.Lock()
	now := g.now()
	for i := range comps {
		t := &p.sent[host.SlotOf(comps[i].CID)]
		if t.units == 0 {
			continue // a command that was sent before there was a gate
		}
		g.done(now, *t, g.credit(*t, &comps[i]))
		*t = Ticket{}
	}
	p.advance(now)
	g.mu.Unlock()
	p.flush()
}

// Advance submits the commands that may be sent now to the machine. It is to be called if Granted returns true.
func (p *Pair) Advance() { // hot: 0 allocs
	p.g.mu.Lock()
	p.advance(p.g.now())
	p.g.mu.Unlock()
	p.flush()
}

// Granted reports whether Advance has something to do.
func (p *Pair) Granted() bool { return p.granted.Load() }

// Park announces that the goroutine is about to sleep. It returns true if the goroutine must call Advance instead.
// Unpark must follow.
func (p *Pair) Park() (granted bool) {
	p.parked.Store(true)
	return p.granted.Load()
}

// Unpark ends Park.
func (p *Pair) Unpark() { p.parked.Store(false) }

// advance moves held commands to out. The gate's mu is held.
func (p *Pair) advance(now int64) {
	p.granted.Store(false)
	if p.held == 0 {
		return
	}
	for n, h := range p.bySSD {
		if h == nil || h.n == 0 {
			continue
		}
		sw := p.g.windows[n]
		for h.n > 0 {
			if h.waiter.queued {
				break
			}
			k := 1
			first := &h.cmds[h.head]
			if h.n > 1 && first.SQE.Fuse() == nvme.FuseFirst {
				k = 2
			}
			if h.waiter.granted {
				h.waiter.granted = false
			} else {
				u := [2]int{unitsOf1(first)}
				if k == 2 {
					u[1] = unitsOf1(&h.cmds[(h.head+1)%len(h.cmds)])
				}
				if !sw.mayPass(now, u) {
					// Queue behind waiters that have come meanwhile: queue pairs take turns.
					h.waiter.units = u
					p.g.enqueue(sw, &h.waiter)
					break
				}
				sw.sent(u)
			}
			for range k {
				c := &h.cmds[h.head]
				p.out = append(p.out, outgoing{*c, uint16(n)})
				*c = host.Command{}
				sw.waited += now - h.since[h.head]
				h.head = (h.head + 1) % len(h.cmds)
				h.n--
			}
			p.held -= k
			sw.waiting -= k
		}
	}
}

// flush submits the commands that advance has moved to out.
func (p *Pair) flush() {
	for i := range p.out {
		p.send(&p.out[i].cmd, p.out[i].window)
		p.out[i] = outgoing{}
	}
	p.out = p.out[:0]
}

// Close drops the commands that are held back, and returns the credit of those that are outstanding.
func (p *Pair) Close() {
	g := p.g
	g.mu.Lock()
	defer g.mu.Unlock()
	now := g.now()
	for n, h := range p.bySSD {
		if h == nil {
			continue
		}
		sw := g.windows[n]
		switch {
		case h.waiter.queued:
			sw.remove(&h.waiter)
		case h.waiter.granted:
			h.waiter.granted = false
			sw.undoSent(now, h.waiter.units)
		}
		sw.waiting -= h.n
		p.held -= h.n
		h.n = 0
		sw.pump(now)
	}
	for i, t := range p.sent {
		if t.units > 0 {
			g.done(now, t, 0)
			p.sent[i] = Ticket{}
		}
	}
}
