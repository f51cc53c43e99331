package node

// Fault model of a freeze: the node's process is stopped at any instant between two tasks, for less or much more than
// the keep alive timeout of its hosts, and continues. Meanwhile the network delivers bytes to its sockets, and may then
// lose some associations silently. Their hosts give them up and connect again over new connections.

// strayNS is how long a write may begin after the network has lost its association silently: the keep alive timeout,
// twice if a stop that was shorter than it has delayed the last sign of life, by a clock that is too slow.
const strayNS = 2*katoMS*1e6 + 1e9

// freeze stops the node's process for a while.
func (l *Lab) freeze() {
	l.freezes++
	forNS := 1e6 + l.rng.Int64N(2*katoMS*1e6)
	switch l.rng.IntN(4) {
	case 0:
		forNS = strayNS + l.rng.Int64N(2*katoMS*1e6)
	case 1: // as long as hosts wait before they repeat writes over another path
		forNS = deadNS + l.rng.Int64N(katoMS*1e6)
	}
	l.Sim.Tracef("the node's process is stopped for %d ms", forNS/1e6)
	n := l.Node
	n.process.Stop()
	l.frozenNS = 1 << 62 // nothing is late meanwhile
	end := l.Sim.Now() + forNS
	if l.advance(l.rng.Int64N(5e6)) {
		for _, h := range l.Hosts {
			if h.a != nil && h.a.ready && l.rng.IntN(2) == 0 {
				l.strays++
				h.a.stray()
			}
		}
		l.advance(end - l.Sim.Now())
	}
	l.Sim.Tracef("the node's process continues")
	l.frozenNS = l.Sim.Now()
	l.sick(l.Sim.Now()) // what was due meanwhile is late
	l.restartCapWindows()
	n.process.Continue()
}

// stray is what happens to an association when the network loses all its connections silently.
func (a *association) stray() {
	a.cutNS = a.h.lab.Sim.Now()
	a.h.lab.Sim.Tracef("%s: controller %d is cut off", a.h.name, a.cntlid)
	for _, q := range append([]*hostQueue{a.admin}, a.io...) {
		q.end.CutOneWay()
		q.end.Peer().CutOneWay()
	}
	a.end("the path is lost")
}
