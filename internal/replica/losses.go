package replica

import (
	"jbofd/internal/crrs"
	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
)

// Losses are what the store of a partition has reported as lost or damaged, and what is to be repaired of that: by a
// scrub, an audit, or whoever has come across it. A repair of a range does one thing at a time, and may have no source
// for as long as another member is away. So they are remembered until they have been repaired, and tried again, less
// often each time. What is not remembered is reported again by the next pass of the scrub, or after a restart.
//
//	store ── Found ──> Losses ── Next ──> Replica of the range ── Ended ──> Losses
//
// A loss that was repaired meanwhile, or whose key was replaced, costs one more repair that changes nothing. A member
// that is alone cannot repair, and looks in the store whether there is a loss still: see Ask.
type Losses struct {
	all []loss
	// nextNS is when Next has something to look at; 0: never.
	nextNS int64
	// reported counts all that were noted.
	reported uint64
	look     lossLook
}

type loss struct {
	number int
	// It is of what there is from position to last: of a value if they are the same, or of the rest of a segment.
	position, last uint64
	dueNS          int64
	tries          uint8
}

const (
	// MaxLosses is how many losses are remembered.
	MaxLosses = 4096
	// lossBusyNS is when a loss is looked at again whose replica has another repair. lossAgainNS is when it is tried
	// again for the first time. It doubles lossDoublings times.
	lossBusyNS    = 100e6
	lossAgainNS   = 2e9
	lossDoublings = 8
	// lossesInTurn is how many losses a turn looks at.
	lossesInTurn = 64
)

// Found notes that data are lost at positions position through last of range number: a value, or the keys of a segment.
func (l *Losses) Found(number int, position, last uint64, now int64) {
	for i := range l.all {
		if e := &l.all[i]; e.position == position && e.number == number {
			e.last = max(e.last, last)
			return
		}
	}
	if len(l.all) == MaxLosses {
		return
	}
	l.reported++
	l.all = append(l.all, loss{number: number, position: position, last: last, dueNS: now})
	l.wake(now)
}

// LossStep is what becomes of a loss that is due.
type LossStep uint8

// Steps of losses.
const (
	// LossBegun: the repair has begun, or cannot in this view.
	LossBegun LossStep = iota
	// LossBusy: the replica has another repair under way.
	LossBusy
	// LossAlone: no other member serves, so that nobody can repair it.
	LossAlone
	// LossGone: the partition is no member of the range any more.
	LossGone
)

// Next has those repaired that are due: begin has the replica of a range repair a position.
func (l *Losses) Next(now int64, begin func(number int, position uint64) LossStep) {
	if l.nextNS == 0 || now < l.nextNS {
		return
	}
	l.nextNS = 0
	looked := 0
	for i := 0; i < len(l.all); i++ {
		e := &l.all[i]
		if now < e.dueNS || looked == lossesInTurn {
			l.wake(e.dueNS)
			continue
		}
		looked++
		step := begin(e.number, e.position)
		if step == LossAlone {
			step = l.beginLook(e)
		}
		switch step {
		case LossGone:
			l.remove(i)
			i--
			continue
		case LossBegun:
			e.dueNS = now + lossAgainNS<<e.tries
			e.tries = min(e.tries+1, lossDoublings)
		default:
			e.dueNS = now + lossBusyNS
		}
		l.wake(e.dueNS)
	}
}

// Ended notes how a repair has ended.
func (l *Losses) Ended(number int, e *crrs.RepairEvent, now int64) {
	if e.Outcome == crrs.RepairBegun || len(l.all) == 0 {
		return
	}
	for i := 0; i < len(l.all); i++ {
		x := &l.all[i]
		switch {
		case x.number != number:
		case e.Outcome == crrs.RepairDone && x.position >= e.Position && x.position <= e.Last:
			if x.position == x.last || x.last <= e.SegmentLast {
				l.remove(i)
				i--
				continue
			}
			x.position, x.dueNS, x.tries = e.SegmentLast+1, now, 0 // the rest of what was split meanwhile
			l.wake(now)
		case x.dueNS <= now+lossBusyNS && e.Outcome == crrs.RepairDone:
			x.dueNS = now // it has waited for this one
			l.wake(now)
		}
	}
}

// Retry lets all be tried again soon, because there is another view.
func (l *Losses) Retry(now int64) {
	for i := range l.all {
		l.all[i].tries, l.all[i].dueNS = 0, now
		l.wake(now)
	}
}

// Known returns how many there are.
func (l *Losses) Known() int { return len(l.all) }

// Reported counts those that were noted.
func (l *Losses) Reported() uint64 { return l.reported }

// NextNS is when Next is to be called; 0: never.
func (l *Losses) NextNS() int64 { return l.nextNS }

func (l *Losses) wake(at int64) {
	if at = max(at, 1); l.nextNS == 0 || at < l.nextNS {
		l.nextNS = at
	}
}

func (l *Losses) remove(i int) {
	l.all[i] = l.all[len(l.all)-1]
	l.all = l.all[:len(l.all)-1]
}

// lossLook is a look whether something is lost still.
type lossLook struct {
	loss
	// running: there is one. asked: the store has a request of it.
	running, asked bool
	// from is where the next request begins.
	from  nvme.KVCursor
	value []byte
}

// lossLookBytes is for what the store returns of a segment. Of a value it may be as long as the longest one.
const lossLookBytes = 64 << 10

// beginLook asks the store whether the data of a loss are still unreadable.
func (l *Losses) beginLook(e *loss) LossStep {
	if l.look.running {
		return LossBusy
	}
	l.look = lossLook{loss: *e, running: true, from: nvme.KVCursor{Position: e.position},
		value: make([]byte, lossLookBytes)}
	return LossBegun
}

// Ask returns a request for the store, if there is one to be made: whether what there is from one position to another
// one can be read. Looked takes the Reply.
func (l *Losses) Ask(q *kvstore.Request) bool {
	k := &l.look
	if !k.running || k.asked {
		return false
	}
	k.asked = true
	*q = kvstore.Request{Op: kvstore.Scan, Background: true, Value: k.value, Key: k.from.Key[:k.from.KeyLen],
		Range: kvstore.Range{First: k.position, Last: k.last, From: k.from.Position}}
	if k.position == k.last {
		q.Op = kvstore.CopyOut // which reads values
	}
	return true
}

// Looked handles the store's Reply. A loss whose data can be read again is removed. Others are checked again when they
// are due.
func (l *Losses) Looked(p *kvstore.Reply) {
	k := &l.look
	k.asked = false
	switch b := nvme.KVRange(k.value); {
	case p.Status == kvstore.InvalidValue && p.ValueLen > len(k.value):
		k.value = make([]byte, p.ValueLen)
		return
	case p.Status == kvstore.OK && !b.Complete():
		k.from = b.To()
		return
	}
	for i := range l.all {
		if e := l.all[i]; e.number == k.number && e.position == k.position {
			if l.remove(i); p.Status != kvstore.OK || e.last != k.last {
				l.all = append(l.all, e) // behind the others, so that it is their turn
			}
			break
		}
	}
	k.running, k.value = false, nil
}
