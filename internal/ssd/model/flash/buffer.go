package flash

// admit moves waiting writes into the buffer in order, while the buffer has room.
func (d *Drive) admit(t int64) {
	f := d.ftl
	for d.waiting.head >= 0 {
		q := &d.reqs[d.parts[d.waiting.head].req]
		for q.units > 0 {
			p := f.l2p[q.unit]
			if p < inBuffer || p == none || d.slots[p&^inBuffer].inFlight {
				if d.nFree == 0 {
					return
				}
				if p < inBuffer {
					f.invalidate(p)
				}
				d.buffer(q.unit)
			} // else the unit is in the buffer and is overwritten there
			q.unit++
			q.units--
			q.left--
		}
		i := d.pop(&d.waiting)
		d.nWaiting--
		q.left = 1
		if q.fua {
			d.makeDurable(t, d.parts[i].req)
		} else {
			d.partDone(t, d.parts[i].req)
		}
		d.release(i)
	}
}

// buffer puts a unit into a free slot.
func (d *Drive) buffer(u uint32) {
	s := d.freeSlot
	d.freeSlot = d.slots[s].next
	d.nFree--
	d.slots[s] = slot{unit: u, next: none}
	if d.dirty == none {
		d.dirty = s
	} else {
		d.slots[d.dirtyTail].next = s
	}
	d.dirtyTail = s
	d.nDirty++
	d.ftl.l2p[u] = inBuffer | s
}

func (d *Drive) releaseSlot(s uint32) {
	d.slots[s].next = d.freeSlot
	d.freeSlot = s
	d.nFree++
	d.durable.released++
}

// dispatch gives whole programs of buffered units to the dies that have room, in turn.
func (d *Drive) dispatch(t int64) {
	for room := d.room; d.nDirty >= int(d.programUnits) && room != 0; {
		i := nextBit(room, d.nextDie)
		x := &d.dies[i]
		if d.ftl.dies[i].valid+int64(x.nHost+1)*int64(d.programUnits) > d.ftl.maxValid {
			room &^= 1 << i // full of valid data: another die's turn
			continue
		}
		d.nextDie = i + 1
		d.take(&x.host[x.nHost])
		if x.nHost++; x.nHost == hostQueue {
			room &^= 1 << i
			d.room &^= 1 << i
		}
		if x.state == dieIdle {
			d.turn(t, i)
			room |= d.room & (1 << i)
		}
	}
}

// take moves a program's worth of slots from the dirty ones. There are enough.
func (d *Drive) take(to *[maxProgramUnits]uint32) {
	for n := uint32(0); n < d.programUnits; {
		s := d.dirty
		d.dirty = d.slots[s].next
		if d.ftl.l2p[d.slots[s].unit] != inBuffer|s { // unmapped in the meantime
			d.releaseSlot(s)
			continue
		}
		d.slots[s].inFlight = true
		to[n] = s
		n++
		d.nDirty--
		d.durable.programming++
	}
}
