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
	lanes []*pairLane // by number; nil if no command was held back there yet
	held  int         // number of commands held back, in all lanes
	// verdicts has, for each command of a batch, its lane and whether it is held back.
	verdicts []verdict
	out      []outgoing // commands that are no longer held back

	// granted: a waiter has got its units. parked: the goroutine sleeps, so that waking is called when granted is set.
	granted, parked atomic.Bool
	waking          func()
}

type verdict struct {
	lane uint16
	hold bool
}

type outgoing struct {
	cmd  host.Command
	lane uint16
}

// pairLane has the commands that a Pair holds back for one SSD, in a ring. Its waiter stands for the first command or
// fused pair.
type pairLane struct {
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
		v := verdict{lane: g.laneOf(group[0].SQE.NSID())}
		l := g.lanes[v.lane]
		u := unitsOf(group)
		pl := p.lane(v.lane)
		if (pl == nil || pl.n == 0) && l.mayPass(now, u) {
			l.sent(u)
		} else {
			v.hold = true
			p.hold(v.lane, group, u, now)
		}
		for range group {
			p.verdicts[taken] = v
			taken++
		}
	}
	g.mu.Unlock()
	for i := range taken {
		if v := p.verdicts[i]; !v.hold {
			p.send(&cmds[i], v.lane)
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

func (p *Pair) lane(n uint16) *pairLane {
	if int(n) < len(p.lanes) {
		return p.lanes[n]
	}
	return nil
}

// hold holds a command or a fused pair back. The gate's mu is held.
func (p *Pair) hold(n uint16, group []host.Command, u [2]int, now int64) {
	for int(n) >= len(p.lanes) {
		p.lanes = append(p.lanes, nil)
	}
	pl := p.lanes[n]
	if pl == nil {
		d := p.m.Depth()
		pl = &pairLane{cmds: make([]host.Command, d), since: make([]int64, d)}
		pl.waiter.wake = func() {
			p.granted.Store(true)
			if p.parked.Load() {
				p.waking()
			}
		}
		p.lanes[n] = pl
	}
	l := p.g.lanes[n]
	if pl.n == 0 {
		pl.waiter.units = u
		p.g.enqueue(l, &pl.waiter)
	}
	for i := range group {
		k := (pl.head + pl.n) % len(pl.cmds)
		pl.cmds[k], pl.since[k] = group[i], now
		pl.n++
	}
	p.held += len(group)
	l.waiting += len(group)
	l.waits += uint64(len(group))
}

// send submits a command to the machine.
func (p *Pair) send(c *host.Command, lane uint16) {
	t := Ticket{nsid: c.SQE.NSID(), units: uint32(unitsOf1(c)), lane: lane}
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
		g.done(now, *t, nvme.Credit(comps[i].Result>>32))
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
	for n, pl := range p.lanes {
		if pl == nil || pl.n == 0 {
			continue
		}
		l := p.g.lanes[n]
		for pl.n > 0 {
			if pl.waiter.queued {
				break
			}
			k := 1
			first := &pl.cmds[pl.head]
			if pl.n > 1 && first.SQE.Fuse() == nvme.FuseFirst {
				k = 2
			}
			if pl.waiter.granted {
				pl.waiter.granted = false
			} else {
				u := [2]int{unitsOf1(first)}
				if k == 2 {
					u[1] = unitsOf1(&pl.cmds[(pl.head+1)%len(pl.cmds)])
				}
				if !l.mayPass(now, u) {
					// Queue behind waiters that have come meanwhile: queue pairs take turns.
					pl.waiter.units = u
					p.g.enqueue(l, &pl.waiter)
					break
				}
				l.sent(u)
			}
			for range k {
				c := &pl.cmds[pl.head]
				p.out = append(p.out, outgoing{*c, uint16(n)})
				*c = host.Command{}
				l.waited += now - pl.since[pl.head]
				pl.head = (pl.head + 1) % len(pl.cmds)
				pl.n--
			}
			p.held -= k
			l.waiting -= k
		}
	}
}

// flush submits the commands that advance has moved to out.
func (p *Pair) flush() {
	for i := range p.out {
		p.send(&p.out[i].cmd, p.out[i].lane)
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
	for n, pl := range p.lanes {
		if pl == nil {
			continue
		}
		l := g.lanes[n]
		switch {
		case pl.waiter.queued:
			l.remove(&pl.waiter)
		case pl.waiter.granted:
			pl.waiter.granted = false
			l.undoSent(now, pl.waiter.units)
		}
		l.waiting -= pl.n
		p.held -= pl.n
		pl.n = 0
		l.pump(now)
	}
	for i, t := range p.sent {
		if t.units > 0 {
			g.done(now, t, 0)
			p.sent[i] = Ticket{}
		}
	}
}
