// Package node is a whole node in the simulated environment: the target machine, the target service, connections with
// real PDUs over a simulated network, drives with their pipelines, and key-value stores, in virtual time and on one
// goroutine. Simulated hosts load it with blocks and keys and hold every answer to a model.
//
// It belongs to tests only. Its files begin with their fault models; docs/lab.md tells how to replay a seed.
package node

import (
	"fmt"
	"log/slog"
	"math/rand/v2"

	"jbofd/internal/lab"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/target"
	"jbofd/internal/ssd"
	"jbofd/internal/telemetry"
)

// Lab is one run: a seed, a node, hosts, and the model.
type Lab struct {
	Sim   *lab.Sim
	Net   *lab.Network
	Disks []*lab.Drive
	Node  *Node
	Hosts []*Host

	namespaces []*namespace
	clock      *lab.Clock
	rng        *rand.Rand
	tel        *telemetry.Telemetry
	log        *slog.Logger
	memory     *rand.Rand // of other users of memory
	lastStamp  uint64
	writers    map[uint64]*association // of blocks, by stamp
	choices    uint64
	// disturb: hosts reset, cut and shut down. faulty: drives fail requests; faultyNS is when they last did.
	disturb, faulty bool
	faultyNS        int64
	// returnedNS is when a drive that had vanished came back last.
	returnedNS int64
	// sickNS is when a drive was last not healthy, 0: never.
	sickNS int64
	traits traits
	// lost are the drives that do not come back when they vanish, recent the places of their latest writes.
	lost   [drives]bool
	recent [drives][]extent
	// tenants are those of the configuration.
	tenants []target.TenantConfig
	// areaLives counts the swap areas that were formatted. areaDamaged: parts of them were damaged.
	areaLives   int
	areaDamaged bool
	violation   string
	// calibrating is the number of the drive that is being calibrated, from 1.
	calibrating int
	// contended: hosts do nothing but write the same few blocks, so that writes wait for each other.
	contended bool
	// crashes and stops count lives of the node that have ended so, cut those stops that did not wait for a drive.
	// stopNS is when the last stop began, 0: none has.
	crashes, stops, cut int
	stopNS              int64
	swapped             int64 // values that stores that are closed have swapped
	// freezes counts how often the node's process was stopped, strays the associations that were cut off meanwhile.
	// frozenNS is when the process last continued, 0: it was never stopped.
	freezes, strays int
	frozenNS        int64
}

// drives is how many drives a node has.
const drives = 2

// Options say what a run includes.
type Options struct {
	Seed uint64
	// Log receives the node's log, and Trace what happens; nil: nothing does.
	Log   *slog.Logger
	Trace func(line string)
	// Telemetry may be shared by many runs: making one is expensive.
	Telemetry *telemetry.Telemetry
}

// New prepares a run.
func New(o Options) *Lab {
	s := lab.NewSim(o.Seed)
	s.Trace(o.Trace)
	l := &Lab{Sim: s, Net: lab.NewNetwork(s), rng: s.Rand("lab"), tel: o.Telemetry, log: o.Log, disturb: true,
		writers: map[uint64]*association{}}
	if l.log == nil {
		l.log = slog.New(slog.DiscardHandler)
	}
	if l.rng.IntN(2) == 0 {
		l.Net.MaxPiece = 1 + l.rng.IntN(1+l.rng.IntN(3000))
	}
	l.clock = s.NewClock("node", lab.ClockConfig{Skew: 0.02, JumpNS: 500e6})
	l.traits = l.drawTraits()
	volatile := l.rng.IntN(2) == 0
	for i := range drives {
		d := lab.NewDrive(lab.DriveConfig{SizeBytes: diskBytes, BlockSize: blockBytes, Volatile: volatile,
			Rand:   s.Rand(fmt.Sprintf("drive %d", i)),
			Misuse: func(what string) { l.Violation("drive %d: %s", i, what) }})
		d.SlowOneIn = 40
		d.Observe = func(r *ssd.Request) {
			if l.calibrating == i+1 && r.Op != ssd.Read {
				l.Violation("drive %d: %v by a calibration", i, r.Op)
			}
			l.notRemoved(i, r)
			l.notEnded(r)
			l.remember(i, r)
		}
		d.Harmed = func(offset, length int64) { l.harmed(i, offset, length) }
		l.Disks = append(l.Disks, d)
	}
	l.addBlocks(1, 0, 0, 16, volatile)
	l.addBlocks(2, 1, 64<<10, 24, volatile)
	l.addKeys(3, storeDisk)
	for i := range 2 {
		l.Hosts = append(l.Hosts, newHost(l, fmt.Sprintf("host%d", i)))
	}
	l.drawTenants()
	return l
}

const diskBytes = 6 << 20

func (l *Lab) addBlocks(nsid uint32, disk int, offset int64, blocks int, volatile bool) {
	ns := &namespace{name: fmt.Sprintf("namespace %d", nsid), nsid: nsid, disk: disk, offset: offset,
		bytes: int64(blocks) * blockBytes, volatile: volatile, there: true}
	for i := range blocks {
		ns.registers = append(ns.registers, newRegister(fmt.Sprintf("block %d of %s", i, ns.name)))
	}
	l.namespaces = append(l.namespaces, ns)
}

// stamp returns a stamp that was never used.
func (l *Lab) stamp() uint64 {
	l.lastStamp++
	return l.lastStamp<<8 | 0xA5
}

// Violation says that something is wrong. The first one counts, and ends the run.
func (l *Lab) Violation(format string, args ...any) {
	if l.violation == "" {
		l.violation = fmt.Sprintf("at %.3f µs: ", float64(l.Sim.Now())/1e3) + fmt.Sprintf(format, args...)
		l.Sim.Tracef("VIOLATION %s", l.violation)
	}
}

// mayFail reports whether there is a reason for the status of a command for a namespace that was sent at a time. Its
// answer may have been on its way for long.
func (l *Lab) mayFail(ns *namespace, s nvme.Status, sentNS int64) bool {
	now := l.Sim.Now()
	switch s.Code() {
	case nvme.AbortRequested, nvme.AbortedSQDeletion, nvme.TransientTransportError:
		return true
	case nvme.WriteFault, nvme.UnrecoveredReadError, nvme.InternalError:
		return l.broken() || ns.damaged || l.anyGone() || l.returnedNS > sentNS ||
			// Its store was given up. Where drives are healthy, that is a violation itself: see storeClosed.
			ns.kv && (!ns.there || now-ns.goneNS < answerNS)
	case nvme.CommandInterrupted: // half of a fused pair, which must not keep the buffer beyond the pool's bound
		return l.traits.scarce
	case nvme.CapacityExceeded: // a chunk with a damaged record is not used again
		return ns.damaged
	case nvme.InvalidNamespaceOrFormat, nvme.NamespaceNotReady:
		for _, ns := range l.namespaces {
			if !ns.there || now-ns.goneNS < answerNS {
				return true
			}
		}
	}
	return false
}

// mayRefuse reports whether there is a reason for a failed Connect.
func (l *Lab) mayRefuse(s nvme.Status) bool {
	// The association of an I/O queue may have ended because the node was stopped for too long.
	return s.Code() == nvme.ConnectInvalidParameters && l.frozenNS != 0 && l.Sim.Now()-l.frozenNS < answerNS
}

// shutdownComplete says that the target has reported a shutdown as complete that began at that time: it has flushed the
// drives of the namespaces that the host saw.
func (l *Lab) shutdownComplete(beganNS int64) {
	for _, ns := range l.namespaces {
		if ns.there && ns.goneNS < beganNS {
			for _, r := range ns.registers {
				r.flushed(beganNS, l.Sim.Now())
			}
		}
	}
}

// Run runs the whole of it and returns the first violation, or "".
func (l *Lab) Run() string {
	var err error
	if l.Node, err = l.startNode(); err != nil {
		return err.Error()
	}
	defer l.end()
	for _, h := range l.Hosts {
		workers := 1 + l.rng.IntN(8)
		if l.traits.swaps {
			workers += 4
		}
		h.start(workers)
	}
	l.watch()
	if l.traits.scarce {
		l.squeeze()
	}
	for range 6 + l.rng.IntN(5) {
		if !l.advance(int64(50e6) + l.rng.Int64N(2e9)) {
			return l.violation
		}
		l.act()
	}
	l.heal()
	l.disturb = false
	l.advance(1e9)
	for _, h := range l.Hosts {
		h.stop = true
		h.wakeAll()
	}
	if !l.Sim.Run(2*answerNS, func() bool { return l.violation != "" || l.idle() }) && l.violation == "" {
		l.Violation("the hosts do not come to rest: %s", l.state())
	}
	if l.violation == "" {
		l.Node.stop()
	}
	if l.violation == "" {
		l.verify()
	}
	return l.violation
}

// watch looks now and then for commands without an answer.
func (l *Lab) watch() {
	for _, h := range l.Hosts {
		h.watch()
	}
	l.Node.nobodyWaits()
	l.Node.nobodyLingers()
	l.Sim.After(1e9, l.watch)
}

// advance lets time pass; false: there is a violation.
func (l *Lab) advance(ns int64) bool {
	l.Sim.Run(ns, func() bool { return l.violation != "" })
	return l.violation == ""
}

// idle reports that no host has anything under way.
func (l *Lab) idle() bool {
	for _, h := range l.Hosts {
		if h.busy > 0 || !h.a.over {
			return false
		}
	}
	return true
}

func (l *Lab) state() (s string) {
	for _, h := range l.Hosts {
		s += fmt.Sprintf("%s: %d processes at a command, association ready %v over %v; ", h.name, h.busy, h.a.ready,
			h.a.over)
	}
	return s
}

// end stops the hosts' processes.
func (l *Lab) end() {
	for _, h := range l.Hosts {
		h.stop = true
		for _, p := range h.procs {
			p.Stop()
		}
	}
}

// act does something to the node.
func (l *Lab) act() {
	if l.anyGone() && l.rng.IntN(3) == 0 {
		l.crash(l.rng.IntN(2) == 0)
		return
	}
	switch l.rng.IntN(9) {
	case 0, 1:
		l.breakDrive()
	case 2:
		l.heal()
	case 3:
		l.removeNamespace()
	case 4: // a reload that changes the tenants, or nothing
		l.drawTenants()
		l.Node.publish()
	case 5:
		l.clock.Jump()
		l.restartCapWindows()
	case 6:
		if l.rng.IntN(3) == 0 {
			l.crash(l.rng.IntN(2) == 0)
		}
	case 7:
		if l.rng.IntN(2) == 0 {
			l.restart(l.rng.IntN(2) == 0)
		}
	case 8:
		l.freeze()
	}
}

// notRemoved demands that a request changes nothing in the extent of a namespace that was erased: it may be another's.
func (l *Lab) notRemoved(disk int, r *ssd.Request) {
	for _, ns := range l.namespaces {
		if ns.erased && ns.disk == disk && r.Op != ssd.Read && r.Op != ssd.Flush && r.Offset < ns.offset+ns.bytes &&
			ns.offset < r.Offset+r.Len {
			l.Violation("%v of %d bytes at %d: %s was erased", r.Op, r.Len, r.Offset, ns.name)
		}
	}
}

// fencePromptNS is how long the target may take to fence what belonged to an association whose end it has seen.
const fencePromptNS = 1e6

// notEnded demands that a write of blocks does not begin at a drive when its association is over at the target: its
// host may be told any moment that nothing of the kind is under way. The stamp tells whose write it is.
func (l *Lab) notEnded(r *ssd.Request) {
	if r.Op != ssd.Write {
		return
	}
	stamp, _ := stampOf(r.Buf[:blockBytes])
	a := l.writers[stamp]
	if a == nil {
		return
	}
	if l.Node.stoppedNS != 0 {
		l.Violation("%#x of %s begins at a drive %d µs after a stop of the node has ended all associations", stamp,
			a.h.name, (l.Sim.Now()-l.Node.stoppedNS)/1000)
	}
	// A node that was frozen sees the end only afterwards, and in any case before it answers the host's next Connect.
	if over := min(a.admin.end.Peer().OverFor(), l.Sim.Now()-l.frozenNS); over > fencePromptNS {
		l.Violation("%#x of %s begins at a drive %d µs after its association has ended", stamp, a.h.name, over/1000)
	}
	if a.cutNS != 0 && l.Sim.Now()-a.cutNS > strayNS {
		l.Violation("%#x of %s begins at a drive %d s after the network has lost its association", stamp, a.h.name,
			(l.Sim.Now()-a.cutNS)/1e9)
	}
}

// verify reads every block from the drives, when nothing is under way any more.
func (l *Lab) verify() {
	for _, ns := range l.namespaces {
		if ns.kv || l.Disks[ns.disk].Gone() {
			continue
		}
		for i, r := range ns.registers {
			at := ns.offset + int64(i)*blockBytes
			stamp, whole := stampOf(l.Disks[ns.disk].Visible[at : at+blockBytes])
			now := l.Sim.Now()
			if err := r.read(now, now, func(w *write) bool { return whole && w.stamp == stamp }); err != nil {
				l.Violation("at the end %s holds %#x: %v", r.name, stamp, err)
			}
		}
	}
}
