package flash

// durable is what commands that make data durable wait for, on a drive with a volatile buffer.
type durable struct {
	// released counts the slots of the buffer that were set free since the drive was reset; programming is how many
	// are being programmed or queued at a die.
	released    uint64
	programming int
	// waits are the commands that wait, in order.
	waits []durableWait
}

// durableWait is a command that is done when so many slots were set free.
type durableWait struct {
	released uint64
	req      int32
}

// makeDurable ends the last part of a command when all that is in the buffer at time t has been programmed. Less than a
// program's worth of units, which fills no page, takes a program's time and occupies no die. Slots are counted and not
// followed, so units that come later and are programmed earlier can end the wait a little early.
func (d *Drive) makeDurable(t int64, req int32) {
	if !d.cfg.VolatileBuffer {
		d.partDone(t, req)
		return
	}
	rest := d.nDirty % int(d.programUnits)
	if rest > 0 {
		d.reqs[req].latencyNS += d.cfg.ProgramNS
	}
	if n := d.durable.programming + d.nDirty - rest; n > 0 {
		d.durable.waits = append(d.durable.waits, durableWait{d.durable.released + uint64(n), req})
		return
	}
	d.partDone(t, req)
}

// durableUpTo ends the commands whose data has been programmed by time t, or was unmapped.
func (d *Drive) durableUpTo(t int64) {
	w := &d.durable
	nothing := w.programming == 0 && d.nDirty < int(d.programUnits)
	n := 0
	for n < len(w.waits) && (nothing || w.waits[n].released <= w.released) {
		d.partDone(t, w.waits[n].req)
		n++
	}
	w.waits = w.waits[:copy(w.waits, w.waits[n:])]
}
