package lab

import (
	"errors"
	"math/rand/v2"
)

// Fault model of Network:
//
//   - Bytes arrive after a delay, in pieces of any size: a PDU may be split anywhere, and several may arrive at once.
//     Within one direction of a connection bytes keep their order and none is lost, doubled or changed; between
//     connections there is no order.
//   - A connection is cut: each end learns of it at a time of its own, and what was on its way is lost.
//   - One direction is cut: its bytes are lost without an error while the other direction works, until somebody
//     closes the connection. A host then may connect again while the target still serves the old connection.
//   - A direction is held up: nothing arrives for a time, then everything does.
//   - A close by one end reaches the other end behind the bytes sent before, or is lost with them.
//
// Dial succeeds when somebody listens; a connection that cannot be made looks like one that is cut at once.

// Errors that an End is closed with.
var (
	// ErrCut: the connection was lost.
	ErrCut = errors.New("connection reset")
	// ErrClosed: the other end has closed the connection.
	ErrClosed = errors.New("closed by the peer")
)

// Network connects endpoints by name.
type Network struct {
	sim       *Sim
	rng       *rand.Rand
	listeners map[string]func(*End)
	// MinDelayNS and MaxDelayNS bound how long a piece takes.
	MinDelayNS, MaxDelayNS int64
	// MaxPiece bounds the pieces in which bytes arrive, if not 0.
	MaxPiece int
	conns    int
}

// NewNetwork returns a network without listeners.
func NewNetwork(sim *Sim) *Network {
	return &Network{sim: sim, rng: sim.Rand("network"), listeners: map[string]func(*End){}, MinDelayNS: 5000,
		MaxDelayNS: 60000}
}

// Listen calls accept with the target's end of every connection to address. nil: nobody listens any more.
func (n *Network) Listen(address string, accept func(*End)) {
	if accept == nil {
		delete(n.listeners, address)
		return
	}
	n.listeners[address] = accept
}

// Dial connects to address and returns the caller's end. The other end is accepted later.
func (n *Network) Dial(from, to string) *End {
	n.conns++
	a, b := &End{net: n, ID: n.conns, Local: from, Remote: to}, &End{net: n, ID: n.conns, Local: to, Remote: from}
	a.peer, b.peer = b, a
	after := n.delay()
	a.arrivesNS = n.sim.Now() + after // what a sends now arrives behind that
	n.sim.After(after, func() {
		accept := n.listeners[to]
		if accept == nil {
			b.over = true
			a.lost(ErrCut)
			return
		}
		accept(b)
	})
	return a
}

func (n *Network) delay() int64 {
	return n.MinDelayNS + n.rng.Int64N(max(n.MaxDelayNS-n.MinDelayNS, 1))
}

// End is one end of a connection. Received and Closed are to be set by its user before it returns to the Sim.
type End struct {
	net  *Network
	peer *End
	// ID numbers the connection, for traces. Local and Remote are the names of its ends.
	ID            int
	Local, Remote string
	// Received is called with bytes in their order; they belong to the callee.
	Received func(b []byte)
	// Closed is called once, when this end learns that the connection is over. It is not called after Close.
	Closed func(err error)
	// Drained is called when Unsent has become 0; it may be nil.
	Drained func()

	out       []byte // not on its way yet
	flushing  bool
	heldUntil int64 // no piece from this end arrives earlier
	arrivesNS int64 // when the last piece from this end arrives
	blackhole bool  // what this end sends is lost
	over      bool  // this end knows that the connection is over, since overNS
	overNS    int64
}

// Send queues bytes for the other end; they are copied. After the end of the connection they are dropped.
func (e *End) Send(b []byte) {
	if e.over || len(b) == 0 {
		return
	}
	e.out = append(e.out, b...)
	if !e.flushing {
		e.flushing = true
		e.net.sim.Go(e.flush)
	}
}

// Unsent is how many bytes wait to be put on their way.
func (e *End) Unsent() int { return len(e.out) }

// flush puts a piece on its way.
func (e *End) flush() {
	e.flushing = false
	if e.over || len(e.out) == 0 {
		return
	}
	n := len(e.out)
	if most := e.net.MaxPiece; most > 0 && n > 1 {
		n = 1 + e.net.rng.IntN(min(n, most))
	}
	piece := e.out[:n:n]
	e.out = e.out[n:] // Send appends behind the piece, or in other memory
	if !e.blackhole {
		e.arrive(func() {
			if p := e.peer; !p.over && !e.blackhole {
				p.Received(piece)
			}
		})
	}
	if len(e.out) > 0 {
		e.flushing = true
		e.net.sim.After(e.net.MinDelayNS/8, e.flush)
	} else if e.Drained != nil {
		e.Drained()
	}
}

// arrive runs f when what this end sends now arrives, which is after all that it has sent before.
func (e *End) arrive(f func()) {
	now := e.net.sim.Now()
	at := max(now+e.net.delay(), e.arrivesNS+1, e.heldUntil)
	e.arrivesNS = at
	e.net.sim.After(at-now, f)
}

// Close closes this end; the other one learns of it behind the bytes sent before.
func (e *End) Close() {
	if e.over {
		return
	}
	for len(e.out) > 0 {
		e.flush()
	}
	e.over, e.overNS = true, e.net.sim.Now()
	if !e.blackhole {
		e.arrive(func() { e.peer.lost(ErrClosed) })
	}
}

// lost tells this end that the connection is over.
func (e *End) lost(err error) {
	if e.over {
		return
	}
	e.over, e.overNS, e.out = true, e.net.sim.Now(), nil
	if e.Closed != nil {
		e.Closed(err)
	}
}

// Peer is the other end, for those who may know what no host can.
func (e *End) Peer() *End { return e.peer }

// Lossy reports that bytes of this end, or of the other one, are being lost without an error.
func (e *End) Lossy() bool { return e.blackhole || e.peer.blackhole }

// Over reports that this end is closed or knows that the connection is lost.
func (e *End) Over() bool { return e.over }

// Cut ends the connection for both ends, for each after a delay of up to so many nanoseconds.
func (e *End) Cut(withinNS int64) {
	e.blackhole, e.peer.blackhole = true, true
	for _, end := range []*End{e, e.peer} {
		e.net.sim.After(e.net.rng.Int64N(withinNS+1), func() { end.lost(ErrCut) })
	}
}

// CutOneWay loses what this end sends from now on, without an error.
func (e *End) CutOneWay() { e.blackhole = true }

// OverFor is for how long this end has known that the connection is over; 0 if it does not.
func (e *End) OverFor() int64 {
	if !e.over {
		return 0
	}
	return e.net.sim.Now() - e.overNS
}

// HoldUp lets nothing that this end sends arrive for so long.
func (e *End) HoldUp(ns int64) { e.heldUntil = e.net.sim.Now() + ns }
