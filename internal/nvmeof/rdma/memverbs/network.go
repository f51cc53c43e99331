// Package memverbs is a model of RDMA in memory, behind the interfaces of package verbs: what
// uses RDMA is tested on it in one process, without hardware and without cgo.
//
//	Network ── NewProvider ──> Provider (a host) ── AddDevice ──> Device
//	   │                           └ Listen, Resolve ──> Endpoint, with its queue pair
//	   └ step: one move of one endpoint, chosen by the seed
//
// A Network moves in steps. Each step takes one endpoint of those that have something to do and
// one of the things it has to do: the connection manager's next message, an event for its
// user, its next work request, the acknowledgement of its oldest one, the flush of its oldest
// one. So requests of one queue pair arrive in order and once, and anything may happen
// between those of two; what the specification leaves open is decided by the seed as well: whether
// completions of a closed queue pair are lost or still come, whether a failed queue pair
// is announced by Fatal, whether a device that is removed still flushes. Users that rely on
// one of them fail for some seeds.
//
// # Two ways to drive it
//
// With Config.Live a goroutine of the network makes the steps, and sleeps when there are none;
// blocking calls block. Without, nothing happens but in Step, Run and in calls that would block
// (Accept, Connect, Wait): they make steps until they have what they wait for, and return ErrQuiet
// when nothing is left to do. The same calls with the same seed then give the same run.
// Endpoint.Begin lets one goroutine be both ends of a connection.
//
// # What it is strict about
//
// Memory is read and written when a request is carried out, not when it is posted, and READs as late as
// possible: whoever reuses a buffer early sends wrong data, or is caught by the race detector.
// Addresses are made up and never repeat, keys do not come back, and an MR's two keys differ. A queue's
// place is free again when a completion of it, or of a later one, has been polled. Private data
// is padded with zeroes to its longest, as on InfiniBand and RoCE. Mistakes of the user that hardware
// answers with silence are kept in Faults.
//
// Where it differs: OpSendInvalidate invalidates any region, devices only those of kernels and
// memory windows. A message moves at once, never in part.
//
// Source: InfiniBand Architecture 1.3, volume 1, chapters 9 to 12.
package memverbs

import (
	"errors"
	"math/rand/v2"
	"runtime"
	"sync"
	"time"
)

// ErrQuiet is returned by a call that would block for ever: the network is not live, and
// nothing is left that could happen.
var ErrQuiet = errors.New("memverbs: nothing is left to happen")

// Config of a Network. The zero value is one that is driven by steps.
type Config struct {
	// Seed decides all that is open.
	Seed uint64
	// Live lets a goroutine make the steps.
	Live bool
	// MaxDelay is for how many of its turns an endpoint may stand still; 0: 8, below: none.
	MaxDelay int
	// RNRDelay is the time between the attempts of a message that met no receive, if Live; 0:
	// a millisecond.
	RNRDelay time.Duration
	// ExactPrivateData leaves private data at its length, as iWARP does.
	ExactPrivateData bool
}

// Network joins providers. Its methods may be called from any goroutine, Step and Run by one.
type Network struct {
	cfg Config

	mu  sync.Mutex
	rng *rand.Rand
	// active are the endpoints that may have something to do. Invariant: active[i].place is i.
	active []*Endpoint
	// endpoints are those that are not closed, oldest first.
	endpoints []*Endpoint
	providers []*Provider
	qps       map[uint64]*Endpoint
	lkeys     map[uint32]*region
	rkeys     map[uint32]*region
	lastKey   uint32
	lastAddr  uint64
	lastQP    uint32
	lastPort  uint16
	paused    bool
	faults    []error
	// rnr are the endpoints whose next attempt waits for the timer.
	rnr      []*Endpoint
	rnrTimer *time.Timer
	// work wakes the network's goroutine; changed those who wait for a connection or for a call
	// of OnEvent's function to end.
	work    sync.Cond
	changed sync.Cond
	closed  bool
	stopped chan struct{}
}

// New makes a network without hosts.
func New(cfg Config) *Network {
	if cfg.MaxDelay == 0 {
		cfg.MaxDelay = 8
	}
	if cfg.RNRDelay <= 0 {
		cfg.RNRDelay = time.Millisecond
	}
	n := &Network{
		cfg: cfg, rng: rand.New(rand.NewPCG(cfg.Seed, 0x6d656d7665726273)),
		qps: map[uint64]*Endpoint{}, lkeys: map[uint32]*region{}, rkeys: map[uint32]*region{},
		stopped: make(chan struct{}),
	}
	n.work.L, n.changed.L = &n.mu, &n.mu
	n.lastKey, n.lastQP = n.rng.Uint32(), n.rng.Uint32N(1<<20)
	n.lastAddr = 0x7e00_0000_0000 + n.rng.Uint64N(1<<28)<<12
	n.lastPort = 40000
	if cfg.Live {
		go n.deliver()
	} else {
		close(n.stopped)
	}
	return n
}

// Close ends the network's goroutine: nothing moves any more. Idempotent.
func (n *Network) Close() error {
	n.mu.Lock()
	n.closed = true
	if n.rnrTimer != nil {
		n.rnrTimer.Stop()
	}
	n.work.Broadcast()
	n.changed.Broadcast()
	n.mu.Unlock()
	<-n.stopped
	return nil
}

// Faults are the mistakes that users have made so far, nil if none: completion queues that
// overflowed, RDMA READs on a connection that allows none.
func (n *Network) Faults() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	return errors.Join(n.faults...)
}

func (n *Network) fault(err error) { n.faults = append(n.faults, err) }

// Step makes one step and reports whether there was one to make. Not of a live network.
func (n *Network) Step() bool {
	if n.cfg.Live {
		panic("memverbs: Step of a live network")
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.step()
}

// Run makes steps until none is left and returns how many there were. Not of a live network.
func (n *Network) Run() (steps int) {
	for n.Step() {
		steps++
	}
	return steps
}

// burst is how many steps are made before others get the lock.
const burst = 16

// deliver is the goroutine of a live network.
func (n *Network) deliver() {
	defer close(n.stopped)
	n.mu.Lock()
	defer n.mu.Unlock()
	for !n.closed {
		for range burst {
			if !n.step() {
				n.work.Wait()
				break
			}
		}
		// A mutex that is taken again at once keeps the others out until they starve.
		n.mu.Unlock()
		runtime.Gosched()
		n.mu.Lock()
	}
}

// step makes one move of one endpoint. The caller holds mu, which is free while a function of OnEvent's runs.
func (n *Network) step() bool { // hot: 0 allocs
	for len(n.active) > 0 && !n.paused && !n.closed {
		e := n.active[n.rng.IntN(len(n.active))]
		if e.delay > 0 {
			e.delay--
			return true
		}
		if n.move(e) {
			if n.cfg.MaxDelay > 0 && n.rng.IntN(8) == 0 {
				e.delay = n.rng.IntN(n.cfg.MaxDelay + 1)
			}
			return true
		}
		n.deactivate(e)
	}
	return false
}

// activate lets endpoints have turns again after something of theirs has changed.
func (n *Network) activate(list ...*Endpoint) {
	for _, e := range list {
		if e != nil && e.place < 0 {
			e.place = len(n.active)
			n.active = append(n.active, e)
		}
	}
	n.work.Signal()
}

func (n *Network) deactivate(e *Endpoint) {
	last := n.active[len(n.active)-1]
	n.active[e.place] = last
	last.place = e.place
	n.active = n.active[:len(n.active)-1]
	e.place = -1
}

// coin decides what the specification leaves open.
func (n *Network) coin() bool { return n.rng.Uint32()&1 == 0 }

// await blocks until done, or if the network is not live makes steps. It returns false when that
// would be for ever. The caller holds mu.
func (n *Network) await(c *sync.Cond, done func() bool) bool {
	for !done() {
		switch {
		case n.cfg.Live && n.closed:
			return false
		case n.cfg.Live:
			c.Wait()
		case !n.step():
			return false
		}
	}
	return true
}

// Pause stops everything that moves; Resume lets it go on. Calls still work: connections hang, posted requests
// stay outstanding.
func (n *Network) Pause() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.paused = true
}

// Resume ends a Pause.
func (n *Network) Resume() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.paused = false
	n.work.Signal()
}

// Endpoints are those that exist, oldest first, also of requests that nobody has accepted yet.
func (n *Network) Endpoints() []*Endpoint {
	n.mu.Lock()
	defer n.mu.Unlock()
	return append([]*Endpoint(nil), n.endpoints...)
}
