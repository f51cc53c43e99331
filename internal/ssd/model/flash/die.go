package flash

// The states of a die.
const (
	dieIdle = iota
	dieReading
	dieProgramming // runs its job, of any kind
	dieTurning     // between two states, within an event
)

// The kinds of a die's job.
const (
	jobNone = iota
	jobProgram
	jobCollect
	jobErase
)

// job is a die's background operation.
type job struct {
	kind uint8
	n    uint8
	// units are the host's; from are slots of the buffer (jobProgram) or physical units (jobCollect).
	units, from [maxProgramUnits]uint32
	to          uint32
	leftNS      int64
}

// hostQueue is how many programs of buffered data wait at each die.
const hostQueue = 2

// die is a flash die.
type die struct {
	state     uint8
	suspended bool
	nHost     uint8
	channel   uint8
	reads     list
	reading   int32
	page      uint32 // in the register
	startNS   int64  // start of the job's current run
	sliceNS   int64  // how long the job runs before reads may suspend it
	burstNS   int64  // how long reads may run before the job resumes
	job       job
	host      [hostQueue][maxProgramUnits]uint32 // slots of programs that wait
}

// dieEvent ends the die's current read or run of its job at time t.
func (d *Drive) dieEvent(t int64, i int) {
	x := &d.dies[i]
	if x.state == dieReading {
		d.readDone(t, x)
	} else {
		d.jobRan(t, i, x)
	}
	d.turn(t, i)
}

// readDone transfers a page that was read into the register over the channel.
func (d *Drive) readDone(t int64, x *die) {
	p := &d.parts[x.reading]
	x.page = p.page
	busy := &d.chanNS[x.channel]
	*busy = max(*busy, t) + int64(p.bytes)*d.chanPSPerByte/1000
	d.partDone(*busy, p.req)
	d.release(x.reading)
	x.state = dieTurning
}

// jobRan accounts for the job's run until t and ends the job if it is complete.
func (d *Drive) jobRan(t int64, i int, x *die) {
	ran := t - x.startNS
	x.state = dieTurning
	x.page = none
	x.job.leftNS -= ran
	x.sliceNS -= ran
	d.stats.DieProgramNS += ran
	if x.sliceNS <= 0 {
		x.burstNS = min(x.burstNS, 0) + d.bounds(x).ReadBurstNS
	}
	if x.job.leftNS <= 0 {
		d.jobDone(t, i, x)
	}
}

// turn decides what a die does next.
func (d *Drive) turn(t int64, i int) {
	x := &d.dies[i]
	if x.job.kind == jobNone && d.ftl != nil {
		d.pick(t, i, x)
	}
	reads := x.reads.head >= 0
	switch {
	case reads && (x.job.kind == jobNone || x.burstNS > 0):
		d.read(t, i, x)
	case x.job.kind != jobNone:
		if x.suspended || reads && x.sliceNS <= 0 {
			x.sliceNS = d.bounds(x).SliceNS
			x.suspended = false
		}
		x.burstNS = min(x.burstNS, 0) // time that reads overran counts against their next burst
		x.state, x.startNS = dieProgramming, t
		end := t + x.job.leftNS
		if reads {
			end = min(end, t+x.sliceNS)
		}
		d.next.set(i, end)
	default:
		x.state, x.sliceNS, x.burstNS = dieIdle, 0, 0
		d.next.set(i, never)
	}
}

// bounds returns how a die's job currently shares the die with reads.
func (d *Drive) bounds(x *die) Share {
	switch {
	case d.nFree >= d.pressedBelow:
		return d.cfg.Calm
	case x.job.kind == jobProgram:
		return d.cfg.PressedProgram
	}
	return d.cfg.PressedCollect
}

// read starts the read at the head of the die's queue.
func (d *Drive) read(t int64, i int, x *die) {
	x.reading = d.pop(&x.reads)
	p := &d.parts[x.reading]
	var ns int64
	switch {
	case p.write:
		ns = d.jitter(d.cfg.ProgramNS)
	case p.page == x.page:
		ns = d.cfg.RegisterNS
	default:
		ns = d.jitter(d.cfg.ReadNS)
	}
	if x.job.kind != jobNone {
		if !x.suspended {
			x.suspended = true
			d.stats.Suspends++
			ns += d.cfg.SuspendNS
		}
		x.burstNS -= ns
		x.sliceNS = 0
	}
	d.stats.DieReadNS += ns
	x.state = dieReading
	d.next.set(i, t+ns)
}

// jitter returns ns, varied at random by up to JitterPercent.
func (d *Drive) jitter(ns int64) int64 {
	if d.cfg.JitterPercent == 0 {
		return ns
	}
	span := ns * d.cfg.JitterPercent / 100
	return ns - span + int64(d.rnd.below(uint32(2*span+1)))
}

// pick chooses the die's next job: erases first, then the collection that is owed, then programs of host data.
func (d *Drive) pick(t int64, i int, x *die) {
	f := d.ftl
	j := &x.job
	if f.mustCollect(i) && f.dies[i].erase == none {
		n, pages := f.gather(i, &j.from)
		if n > 0 {
			for k := range n {
				j.units[k] = f.p2l[j.from[k]]
			}
			j.kind, j.n, j.to = jobCollect, uint8(n), f.allocate(i, gcFrontier)
			// Planes are read together; the data go to the controller and back over the channel.
			reads := int64(pages+d.cfg.Planes-1) / int64(d.cfg.Planes)
			j.leftNS = reads*d.cfg.ReadNS + d.jitter(d.cfg.ProgramNS) + d.transfer(t, x, 2*int64(n)*unitBytes)
			return
		}
	}
	if f.dies[i].erase != none {
		j.kind, j.leftNS = jobErase, d.cfg.EraseNS
		return
	}
	if x.nHost > 0 && f.canProgram(i, hostFrontier) {
		f.charge(i)
		j.kind, j.n, j.to = jobProgram, uint8(d.programUnits), f.allocate(i, hostFrontier)
		j.from = x.host[0]
		x.host[0] = x.host[1]
		x.nHost--
		d.room |= 1 << i
		for k := range d.programUnits {
			j.units[k] = d.slots[j.from[k]].unit
		}
		j.leftNS = d.jitter(d.cfg.ProgramNS) + d.transfer(t, x, int64(d.programUnits)*unitBytes)
	}
}

// transfer occupies the die's channel with bytes and returns how long that takes.
func (d *Drive) transfer(t int64, x *die, bytes int64) int64 {
	ns := bytes * d.chanPSPerByte / 1000
	busy := &d.chanNS[x.channel]
	*busy = max(*busy, t) + ns
	return ns
}

// jobDone applies the result of a completed job.
func (d *Drive) jobDone(t int64, i int, x *die) {
	f := d.ftl
	j := &x.job
	kind := j.kind
	j.kind = jobNone
	switch kind {
	case jobErase:
		f.erased(i)
	case jobCollect:
		f.moved(j.from[:j.n], j.units[:j.n], j.to)
	case jobProgram:
		for k, s := range j.from[:j.n] {
			if u := j.units[k]; f.l2p[u] == inBuffer|s {
				f.place(u, j.to+uint32(k))
			}
			d.releaseSlot(s)
		}
		d.durable.programming -= int(j.n)
		f.hostUnits += uint64(j.n)
		d.admit(t)
		d.dispatch(t)
		d.durableUpTo(t)
	}
}
