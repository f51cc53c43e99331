package node

import (
	"math/rand/v2"

	"jbofd/internal/lab"
	"jbofd/internal/nvme"
	"jbofd/internal/uuid"
)

// Virtual times of a host.
const (
	katoMS         = 8000
	keepAliveNS    = 2e9
	pollNS         = 1e6  // between two looks at CSTS, at first
	maxPollNS      = 50e6 // and later
	connectPauseNS = 50e6 // before another try
	// resetPatienceNS is how long a host waits for RDY to follow EN before it gives the association up.
	resetPatienceNS = 30e9
	// answerNS is how long a target may take to answer when it lives and its drives do: any more is a violation.
	answerNS = 60e9
	// deadNS is after how long the target has certainly ended an association that it has not heard of, and all that
	// belonged to it.
	deadNS = katoMS*1e6 + 60e9
)

// Host is a simulated host: one association at a time, which it makes again whenever that ends, and processes that
// read and write.
type Host struct {
	lab    *Lab
	name   string
	nqn    string
	id     uuid.UUID
	rng    *rand.Rand
	a      *association
	queues []*hostQueue // of all associations whose connections may live
	// lost are the writes that have no answer and no fence yet.
	lost  []lostWrite
	procs []*lab.Proc
	// waiting are processes that wait for the association.
	waiting []func()
	// stop: the load ends.
	stop bool
	// busy counts the processes of the load that are at a command.
	busy int

	connects, resets, shutdowns, cuts, aborts, aborted, lostCommands, commands int
	// capWindows are by drive.
	capWindows [drives]capWindow
	// abortsOut are Abort commands outstanding; a controller takes few.
	abortsOut int
}

// lostWrite is a write that was lost with its connection.
type lostWrite struct {
	w    *write
	r    *register
	a    *association
	end  *lab.End // the target's end of the connection
	atNS int64
}

// association is a host's admin queue and I/O queues.
type association struct {
	h      *Host
	admin  *hostQueue
	io     []*hostQueue
	cntlid uint16
	// ready: commands may be sent. over: it is given up.
	ready, over bool
	digests     bool
	noInCapsule bool
	// cutNS is when the network silently lost all its connections for good; 0: it has not.
	cutNS int64
}

func newHost(l *Lab, name string) *Host {
	h := &Host{lab: l, name: name, nqn: "nqn.2026-11.example.jbofd:" + name, rng: l.Sim.Rand(name)}
	copy(h.id[:], name+"----------------")
	return h
}

// start begins the host's processes.
func (h *Host) start(workers int) {
	h.procs = append(h.procs, h.lab.Sim.Spawn(h.control))
	for range workers {
		h.procs = append(h.procs, h.lab.Sim.Spawn(h.work))
	}
}

// run sends a command and waits for its outcome.
func (h *Host) run(p *lab.Proc, q *hostQueue, sqe nvme.SQE, data []byte, toHost bool) (o outcome) {
	if !q.free() {
		return outcome{lost: true}
	}
	p.Wait(func(wake func()) {
		q.submit(sqe, data, toHost, func(got outcome) { o = got; wake() })
	})
	return o
}

// watch demands that each command is answered within answerNS, as long as the network carries it.
func (h *Host) watch() {
	live := h.queues[:0]
	for _, q := range h.queues {
		if q.over {
			continue
		}
		live = append(live, q)
		if q.end.Lossy() {
			continue
		}
		for cid, c := range q.commands {
			event := q.qid == 0 && c.sqe.Opcode() == nvme.AdminAsyncEvent
			patience := int64(answerNS)
			if h.lab.healthy() && !h.lab.traits.capped {
				patience = overdueNS
			}
			if h.lab.Sim.Now()-max(c.startNS, h.lab.frozenNS) > patience && !event {
				h.lab.Violation("%s, qid %d: no answer to opcode %#x, CID %#x, within %v s", h.name, q.qid,
					c.sqe.Opcode(), cid, patience/1e9)
			}
		}
	}
	h.queues = live
}

// property runs a Property Get or Set.
func (a *association) property(p *lab.Proc, fctype uint8, offset uint32, value uint64) outcome {
	var sqe nvme.SQE
	sqe.Property().Init(fctype, offset)
	if fctype == nvme.FabricsPropertySet {
		sqe.Property().SetVALUE(value)
	}
	return a.h.run(p, a.admin, sqe, nil, false)
}

// csts polls CSTS until done says so of it; false: the association is over, or that takes too long.
func (a *association) csts(p *lab.Proc, done func(c nvme.CSTS) bool) bool {
	pause := int64(pollNS)
	for end := a.h.lab.Sim.Now() + resetPatienceNS; a.h.lab.Sim.Now() < end; pause = min(2*pause, maxPollNS) {
		o := a.property(p, nvme.FabricsPropertyGet, nvme.PropCSTS, 0)
		if !o.ok() {
			return false
		}
		c := nvme.CSTS(o.result)
		if done(c) {
			return true
		}
		if c.CFS() {
			return false
		}
		p.Sleep(pause)
	}
	return false
}

// connect makes one queue of the association; nil: it cannot be had.
func (a *association) connect(p *lab.Proc, qid uint16, depth int) *hostQueue {
	h := a.h
	var q *hostQueue
	p.Wait(func(wake func()) { q = a.dial(qid, depth, wake) })
	if q.over {
		return nil
	}
	var sqe nvme.SQE
	c := sqe.Connect()
	c.Init()
	c.SetQID(qid)
	c.SetSQSIZE(uint16(depth))
	if qid == 0 {
		c.SetKATO(katoMS)
	}
	if h.rng.IntN(2) == 0 {
		c.SetCATTR(nvme.CATTRDisableSQFlow)
	}
	data := make([]byte, nvme.ConnectDataSize)
	d := (*nvme.ConnectData)(data)
	d.SetHostID(h.id)
	d.SetCNTLID(nvme.CNTLIDDynamic)
	if qid != 0 {
		d.SetCNTLID(a.cntlid)
	}
	d.SetSubNQN(SubNQN)
	d.SetHostNQN(h.nqn)
	ended, healthy := h.endedOnTarget(), h.lab.healthy()
	o := h.run(p, q, sqe, data, false)
	if !o.ok() {
		if !o.lost && o.status.Code() == nvme.ConnectControllerBusy && healthy && h.lab.healthy() &&
			!h.lab.stopping() {
			h.lab.Violation("%s: Connect of queue %d: %v, although the drives are healthy", h.name, qid, o.status)
		}
		if !o.lost && o.status.Code() != nvme.ConnectControllerBusy && !h.lab.mayRefuse(o.status) {
			h.lab.Violation("%s: Connect of queue %d: %v", h.name, qid, o.status)
		}
		q.close("Connect failed")
		return nil
	}
	if qid == 0 {
		a.cntlid = uint16(o.result)
		h.fence(func(l *lostWrite) bool { return ended[l.end] })
	}
	return q
}

// endedOnTarget are the connections whose end the target knows, whether or not it knows that the rest of their
// association has ended. Only for those it can wait when the host connects again; of others it cannot know that the
// host has given them up.
func (h *Host) endedOnTarget() map[*lab.End]bool {
	ended := map[*lab.End]bool{}
	for _, l := range h.lost {
		if l.end.Over() {
			ended[l.end] = true
		}
	}
	return ended
}

// fence gives an end to the lost writes that are concerned.
func (h *Host) fence(concerned func(l *lostWrite) bool) {
	keep := h.lost[:0]
	for i := range h.lost {
		l := &h.lost[i]
		if concerned(l) || h.lab.Sim.Now()-l.atNS > deadNS {
			l.r.fail(l.w, h.lab.Sim.Now())
			h.lab.Sim.Tracef("%s: %#x of %s is fenced", h.name, l.w.stamp, l.r.name)
		} else {
			keep = append(keep, *l)
		}
	}
	h.lost = keep
}

// enable sets CC.EN and makes the I/O queues.
func (a *association) enable(p *lab.Proc) bool {
	cc := nvme.CC(0).WithEN(true).WithCSS(nvme.CCCSSIOCS).WithIOSQES(nvme.CCIOSQES64).WithIOCQES(nvme.CCIOCQES16)
	if !a.property(p, nvme.FabricsPropertySet, nvme.PropCC, uint64(cc)).ok() || !a.csts(p, nvme.CSTS.RDY) {
		return false
	}
	a.io = nil
	for qid := uint16(1); qid <= ioQueues; qid++ {
		q := a.connect(p, qid, ioDepth)
		if q == nil {
			return false
		}
		a.io = append(a.io, q)
	}
	a.ready = true
	a.h.wakeAll()
	return true
}

func (h *Host) wakeAll() {
	for _, wake := range h.waiting {
		wake()
	}
	h.waiting = nil
}

// end gives the association up.
func (a *association) end(reason string) {
	a.ready, a.over = false, true
	for _, q := range append([]*hostQueue{a.admin}, a.io...) {
		if q != nil {
			q.close(reason)
		}
	}
}

// control keeps an association, and disturbs it.
func (h *Host) control(p *lab.Proc) {
	for !h.stop {
		a := &association{h: h, digests: h.rng.IntN(3) == 0, noInCapsule: h.rng.IntN(4) == 0}
		h.a = a
		if a.admin = a.connect(p, 0, 32); a.admin == nil || !a.enable(p) {
			a.end("not connected")
			p.Sleep(connectPauseNS + h.rng.Int64N(connectPauseNS))
			continue
		}
		h.connects++
		h.lab.Sim.Tracef("%s: associated, controller %d", h.name, a.cntlid)
		for !h.stop && h.useAssociation(p, a) {
		}
		if !a.over && h.stop {
			for h.busy > 0 && !a.admin.over {
				if h.keepAlive(p, a); h.busy > 0 {
					p.Sleep(100e6)
				}
			}
		}
		a.end("given up by the host")
		if h.rng.IntN(3) == 0 {
			p.Sleep(h.rng.Int64N(100e6))
		}
	}
}

func (h *Host) keepAlive(p *lab.Proc, a *association) bool {
	var sqe nvme.SQE
	sqe.SetOpcode(nvme.AdminKeepAlive)
	return h.run(p, a.admin, sqe, nil, false).ok()
}

// useAssociation lets an association live for a while and then does something to it. False: it is over.
func (h *Host) useAssociation(p *lab.Proc, a *association) bool {
	p.Sleep(20e6 + h.rng.Int64N(keepAliveNS))
	for _, q := range append([]*hostQueue{a.admin}, a.io...) {
		if q.over {
			return false
		}
	}
	if h.stop {
		return false
	}
	if !h.lab.disturb {
		return h.keepAlive(p, a)
	}
	switch h.rng.IntN(9) {
	case 0, 1:
		return h.reset(p, a)
	case 2:
		return h.shutdown(p, a)
	case 3: // the network ends a connection, or all of them
		h.cuts++
		all := append([]*hostQueue{a.admin}, a.io...)
		if h.rng.IntN(2) == 0 {
			all = []*hostQueue{all[h.rng.IntN(len(all))]}
		}
		for _, q := range all {
			q.end.Cut(20e6)
		}
	case 4: // a direction dies without a word; the host connects again while the target serves the old association
		h.cuts++
		for _, q := range append([]*hostQueue{a.admin}, a.io...) {
			if h.rng.IntN(2) == 0 {
				q.end.Peer().CutOneWay()
			} else {
				q.end.CutOneWay()
			}
		}
		p.Sleep(h.rng.Int64N(500e6))
		return false
	case 5:
		q := a.io[h.rng.IntN(len(a.io))]
		q.end.HoldUp(h.rng.Int64N(1e9))
		q.end.Peer().HoldUp(h.rng.Int64N(1e9))
	case 6: // the host closes all connections at once
		return false
	default:
		return h.keepAlive(p, a)
	}
	return true
}

// reset resets the controller and enables it again.
func (h *Host) reset(p *lab.Proc, a *association) bool {
	h.resets++
	h.lab.Sim.Tracef("%s: resets controller %d", h.name, a.cntlid)
	a.ready = false
	early := h.rng.IntN(2) == 0
	if early {
		a.closeIO("controller reset")
	}
	healthy := h.lab.healthy()
	ok := a.property(p, nvme.FabricsPropertySet, nvme.PropCC, 0).ok() &&
		a.csts(p, func(c nvme.CSTS) bool { return !c.RDY() && !c.CFS() })
	a.closeIO("controller reset")
	if !ok {
		if healthy && h.lab.healthy() && !a.admin.over && !a.admin.end.Lossy() {
			h.lab.Violation("%s: controller %d cannot be reset although the drives are healthy", h.name, a.cntlid)
		}
		return false
	}
	h.lab.Sim.Tracef("%s: controller %d is not ready", h.name, a.cntlid)
	h.fence(func(l *lostWrite) bool { return l.a == a })
	if h.rng.IntN(3) == 0 {
		p.Sleep(h.rng.Int64N(50e6))
	}
	return a.enable(p)
}

func (a *association) closeIO(reason string) {
	for _, q := range a.io {
		q.close(reason)
	}
}

// shutdown shuts the controller down and ends the association. When the target reports that it is done, everything
// that was acknowledged is durable.
func (h *Host) shutdown(p *lab.Proc, a *association) bool {
	h.shutdowns++
	a.ready = false
	began := h.lab.Sim.Now()
	cc := nvme.CC(0).WithEN(true).WithCSS(nvme.CCCSSIOCS).WithIOSQES(nvme.CCIOSQES64).WithIOCQES(
		nvme.CCIOCQES16).WithSHN(nvme.SHNNormal)
	if a.property(p, nvme.FabricsPropertySet, nvme.PropCC, uint64(cc)).ok() &&
		a.csts(p, func(c nvme.CSTS) bool { return c.SHST() == 2 }) {
		h.lab.shutdownComplete(began)
	}
	return false
}
