package crrs

// Open parts: what the copier of a pass has lost.
//
// A copier that cannot read some data repairs itself first, from another member that serves. If there is none, the data
// stays lost until a member that has it is back. The copier may be the only one that has the rest. So the rest is
// copied at once, around the loss: the range is compared in parts, those that have a loss are copied, and the lost part
// of them stays open (unresolved). It is asked for again and again, less often each time. The filling member is
// complete when nothing is open any more.

const (
	// openAgainNS is the delay before an open part is asked for again the first time. It doubles openDoublings times.
	openAgainNS   = 1e9
	openDoublings = 6
	// maxOpen is how many open parts there are at most, besides those that reach to the end of the part of their task.
	maxOpen = 64
)

// openPart is a part that the copier cannot read: the objects after From, through the position end.
type openPart struct {
	Part
	end   uint64
	tries uint8
	dueNS int64
}

// copierLost notes that the copier cannot read data that was asked for with tag, and continues around it. end is the
// last position of the loss, 0 if it is not known.
func (r *Replica) copierLost(tag, end uint64) {
	p := &r.pass
	t := p.taskOf(tag, taskAsked)
	if t == nil {
		return
	}
	last := t.First + 1<<t.Bits - 1
	switch {
	case !t.copied && t.Bits == r.bits && t.Bits > fanBits:
		p.differing = append(p.differing, differing{first: t.First, bits: t.Bits - fanBits,
			differ: 1<<(1<<fanBits) - 1})
		t.state = taskIdle
		return
	case !t.copied:
		t.state, t.copied = taskWanted, true
		return
	}
	o := openPart{Part: Part{First: t.First, Bits: t.Bits, From: t.From}, end: last, tries: t.tries}
	switch {
	case t.again:
		o.end, t.state = t.end, taskIdle
	case end < max(t.First, t.From.Position) || end >= last || len(p.open) >= maxOpen:
		t.state = taskIdle
	default:
		o.end = end
		t.state, t.From = taskWanted, Cursor{Position: end + 1}
	}
	o.dueNS = r.nowNS + openAgainNS<<o.tries
	o.tries = min(o.tries+1, openDoublings)
	p.open = append(p.open, o)
}

// takeOpen gives a task an open part that is due, and reports whether there is one.
func (p *pass) takeOpen(t *task, now int64) bool {
	for i := range p.open {
		if o := &p.open[i]; now >= o.dueNS {
			*t = task{state: taskWanted, copied: true, Part: o.Part, again: true, end: o.end, tries: o.tries,
				attempt: t.attempt}
			p.open[i] = p.open[len(p.open)-1]
			p.open = p.open[:len(p.open)-1]
			return true
		}
	}
	return false
}

// askOpen makes all open parts due: there may be another copier, or another member from which it can repair itself.
func (p *pass) askOpen() {
	for i := range p.open {
		p.open[i].tries, p.open[i].dueNS = 0, 0
	}
}

// openDueNS is when the first open part is due; 0: nothing is open.
func (p *pass) openDueNS() (at int64) {
	for i := range p.open {
		if due := max(p.open[i].dueNS, 1); at == 0 || due < at {
			at = due
		}
	}
	return at
}

// lossResult is DW0 of the completion that tells where a loss ends: the higher half of its last position, because there
// is no room for more. lossEnd is the end of the loss for the asker: the last position with that higher half, or 0 if
// the end is not known.
func lossResult(last uint64) uint64 { return last >> 32 }

func lossEnd(result uint64) uint64 {
	if result &= 1<<32 - 1; result == 0 {
		return 0
	}
	return result<<32 | (1<<32 - 1)
}
