package replicas

import (
	"encoding/binary"

	"jbofd/internal/bufpool"
	"jbofd/internal/crrs"
	"jbofd/internal/nvme"
)

// Commands of other nodes that wait for the drive: Ship, Compare and Fetch. All partitions of a node have their queues
// in common, so that one whose drive is slow, or silent, must not hold up commands for the others. Each is answered
// within Config.AnswerWithin, with Namespace Not Ready if the drive has not brought what it asks for by then. What the
// store was asked for takes its course:
//
//	Ship     the value is read into memory of the Replicas, as the command may end before. The host of the read asks
//	         another member.
//	Compare  may be more work than the drive does in that time. The node asks again, and is given what was begun, so
//	Fetch    that a slow drive makes the copy slow, and does not make it begin anew each time.
//
// What is given is not older than crrs.JoinNS: see there for how old a batch may be. And it was begun for the same
// round: what the node has found lost since may have been stored after it was read.

// ask is such a command, or what there is left of one.
type ask struct {
	what question
	// beganNS is when its replica was given it, sinceNS when the node has asked last, by Config.Clock.
	beganNS, sinceNS int64
	// buf is memory for the value of a Ship.
	buf bufpool.Buf
	// late: it was answered before its replica had done with it.
	late bool
	next *ask
}

// question is what a Compare or a Fetch asks for, without what another command with the same aim has otherwise. Of a
// Ship it has the opcode.
type question struct {
	opcode, bits, keyLen uint8
	number, round        uint16
	epoch, lenBytes      uint32
	from                 crrs.Peer
	key                  [nvme.MaxKVKey]byte
}

// asks reports whether a command of another node waits for the drive.
func asks(opcode uint8) bool {
	return opcode == nvme.CmdKVShip || opcode == nvme.CmdKVCompare || opcode == nvme.CmdKVFetch
}

// questionOf returns what a command asks for.
func questionOf(e *nvme.SQE, from crrs.Peer) (w question) {
	w.opcode = e.Opcode()
	if w.opcode == nvme.CmdKVShip {
		return w
	}
	k := e.KVReplica()
	w.number, w.epoch, w.bits, w.lenBytes, w.from = k.Range(), k.Epoch(), k.Bits(), k.LenBytes(), from
	w.round = k.Round()
	if w.keyLen = k.KeyLen(); w.keyLen > 0 {
		k.Key(&w.key)
	} else {
		binary.LittleEndian.PutUint64(w.key[:], k.First())
	}
	return w
}

// beginAsk takes a command that waits for the drive to its replica. It allocates when there are more than before.
//
// hot: 0 allocs
func (g *Replicas) beginAsk(q *Request, m *member, from crrs.Peer) {
	w := questionOf(q.SQE, from)
	if g.late > 0 && w.opcode != nvme.CmdKVShip && g.join(q, m, &w) {
		return
	}
	var buf bufpool.Buf
	value := q.Value
	if w.opcode == nvme.CmdKVShip {
		var ok bool
		if buf, ok = g.cfg.Pool.Get(g.account, len(q.Value)); !ok {
			q.Status = nvme.NamespaceNotReady
			g.done(q)
			return
		}
		value = buf.B[:len(q.Value)]
	}
	h := g.hold(q, m)
	a := g.freeAsk
	if g.askSpares.take(); a == nil {
		a = &ask{}
	} else {
		g.freeAsk = a.next
	}
	*a = ask{what: w, beganNS: g.clock, sinceNS: g.clock, buf: buf}
	g.asks[h] = a
	g.asked++
	g.touch(m).Receive(from, uint64(h), q.SQE, value, q.Tenant)
}

// join gives a command what an earlier one with the same aim has begun, which was answered late.
func (g *Replicas) join(q *Request, m *member, w *question) bool {
	for h, a := range g.asks {
		if a != nil && a.late && a.what == *w && g.clock-a.beganNS < crrs.JoinNS {
			a.late, a.sinceNS = false, g.clock
			g.late--
			g.asked++
			g.requests[h], q.m, q.handle = q, m, uint32(h)
			return true
		}
	}
	return false
}

// takeAsk takes a command from what waits, when its replica answers it. value is what was read for a Ship, which does
// not change before askEnded.
func (g *Replicas) takeAsk(handle uint32) (value []byte) {
	a := g.asks[handle]
	switch {
	case a == nil:
		return nil
	case a.late:
		g.late--
	default:
		g.asked--
	}
	return a.buf.B
}

// askEnded frees what is left of a command.
func (g *Replicas) askEnded(handle uint32) {
	a := g.asks[handle]
	if a == nil {
		return
	}
	if !a.buf.IsZero() {
		g.cfg.Pool.Put(a.buf)
	}
	*a = ask{next: g.freeAsk}
	g.freeAsk, g.asks[handle] = a, nil
	g.askSpares.n++
}

// giveUpAsk answers a command before its replica has done with it.
func (g *Replicas) giveUpAsk(handle uint32, st nvme.Status) {
	g.asks[handle].late = true
	g.asked--
	g.late++
	g.abandon(handle, st)
}

// looksPerAnswer is how often commands are looked at in Config.AnswerWithin.
const looksPerAnswer = 5

// lookForOverdue answers what the drive has not brought in time.
func (g *Replicas) lookForOverdue() {
	if g.overdueNS == 0 || g.clock < g.overdueNS {
		return
	}
	g.overdueNS = 0
	for h, a := range g.asks {
		if a != nil && !a.late && g.clock-a.sinceNS >= int64(g.cfg.AnswerWithin) {
			g.giveUpAsk(uint32(h), nvme.NamespaceNotReady)
		}
	}
}

// nextOverdueNS is when to look next; 0: never.
func (g *Replicas) nextOverdueNS() int64 {
	if g.overdueNS == 0 && g.asked > 0 && g.cfg.AnswerWithin > 0 {
		g.overdueNS = g.clock + int64(g.cfg.AnswerWithin)/looksPerAnswer
	}
	return g.overdueNS
}
