package replicas

import (
	"encoding/binary"

	"jbofd/internal/bufpool"
	"jbofd/internal/crrs"
	"jbofd/internal/nvme"
)

// Commands of other nodes that wait for the drive: Ship, Compare and Fetch. All partitions of a node share the queues
// for them, so that a partition whose drive is slow, or silent, must not hold up commands for the others. Each command
// is answered within Config.AnswerWithin, with Namespace Not Ready if the drive has not read its data by then. The
// request to the store runs to completion nevertheless:
//
// Ship the value is read into memory of the Replicas, because the command may end before. The host of the read asks
//	         another member.
//	Compare  may be more work than the drive does in that time. The node asks again, and gets the result of the
//	Fetch    request that was begun: so a slow drive makes the copy slow, but does not make it begin anew each time.
//
// Such a result is used only if it was begun less than crrs.JoinNS ago: see there for how old a batch may be. And it
// must have been begun for the same round: writes that the node has found lost since may have been stored after it was
// read.

// ask is a command that waits for the drive, or a request to the store whose command was answered already (late).
type ask struct {
	what question
	// beganNS is when its replica got it, sinceNS when the last command for it came, in nanoseconds of Config.Clock.
	beganNS, sinceNS int64
	// buf is memory for the value of a Ship.
	buf bufpool.Buf
	// late: the command was answered before the store was done.
	late bool
	next *ask
}

// question identifies the request of a Compare or Fetch: all fields that are equal in two commands for the same data.
// For a Ship it has the opcode alone.
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

// questionOf returns the question of a command.
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

// beginAsk passes a command that waits for the drive to its replica, unless it joins an earlier one. It allocates when
// there are more such commands than ever before.
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
	*a = ask{what: w, beganNS: g.clockNS, sinceNS: g.clockNS, buf: buf}
	g.asks[h] = a
	g.asked++
	g.touch(m).Receive(from, uint64(h), q.SQE, value, q.Tenant)
}

// join lets a command wait for the request of an earlier one with the same question that was answered before the store
// was done. It reports whether there is one.
func (g *Replicas) join(q *Request, m *member, w *question) bool {
	for h, a := range g.asks {
		if a != nil && a.late && a.what == *w && g.clockNS-a.beganNS < crrs.JoinNS {
			a.late, a.sinceNS = false, g.clockNS
			g.late--
			g.asked++
			g.requests[h], q.m, q.handle = q, m, uint32(h)
			return true
		}
	}
	return false
}

// takeAsk notes that the replica answers a command that waits for the drive. value is the memory of a Ship's value,
// which does not change before askEnded.
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

// askEnded frees the ask of a handle.
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

// giveUpAsk answers a command before the store is done.
func (g *Replicas) giveUpAsk(handle uint32, st nvme.Status) {
	g.asks[handle].late = true
	g.asked--
	g.late++
	g.abandon(handle, st)
}

// looksPerAnswer is how often commands are checked within Config.AnswerWithin.
const looksPerAnswer = 5

// lookForOverdue answers the commands whose data the drive has not read in time.
func (g *Replicas) lookForOverdue() {
	if g.overdueNS == 0 || g.clockNS < g.overdueNS {
		return
	}
	g.overdueNS = 0
	for h, a := range g.asks {
		if a != nil && !a.late && g.clockNS-a.sinceNS >= int64(g.cfg.AnswerWithin) {
			g.giveUpAsk(uint32(h), nvme.NamespaceNotReady)
		}
	}
}

// nextOverdueNS is when lookForOverdue is due next; 0: it is not.
func (g *Replicas) nextOverdueNS() int64 {
	if g.overdueNS == 0 && g.asked > 0 && g.cfg.AnswerWithin > 0 {
		g.overdueNS = g.clockNS + int64(g.cfg.AnswerWithin)/looksPerAnswer
	}
	return g.overdueNS
}
