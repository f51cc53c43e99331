// Package memverbs is a model of RDMA in memory that implements the interfaces of package verbs. It lets tests run code
// that uses RDMA in one process, without hardware and without cgo.
//
//	Network ── NewProvider ──> Provider (a host) ── AddDevice ──> Device
//	   │                           └ Listen, Resolve ──> Endpoint, with its queue pair
//	   └ step: one move of one endpoint, chosen by the seed
//
// A Network advances in steps. Each step picks one endpoint that has something to do and performs one of its possible
// moves: deliver the connection manager's next message, report an event to the user, execute the next work request,
// acknowledge the oldest one, or flush the oldest one. Requests of one queue pair therefore arrive in order and exactly
// once, while requests of different queue pairs interleave freely. The seed also decides what the specification leaves
// open: whether completions of a closed queue pair are lost or still arrive, whether a failed queue pair is reported by
// Fatal, and whether a removed device still flushes requests. Code that relies on one of these outcomes fails for some
// seeds.
//
// # Two ways to drive it
//
// With Config.Live, a goroutine of the network makes the steps and sleeps while there are none; blocking calls block.
// Otherwise steps happen only in Step, in Run, and in calls that would block (Accept, Connect, Wait). These calls make
// steps until their condition holds, and return ErrQuiet if no step is left. The same calls with the same seed then
// produce the same run. Endpoint.Begin lets one goroutine drive both ends of a connection.
//
// # What it is strict about
//
// Memory is read and written when a request is executed, not when it is posted, and as late as possible for READs. Code
// that reuses a buffer too early therefore sends wrong data or is caught by the race detector. Addresses are synthetic
// and never reused, keys are not reused, and the two keys of an MR differ. A place in a queue becomes free only when
// its completion, or a later one, has been polled. Private data is padded with zeroes to the maximum length, as on
// InfiniBand and RoCE. Faults returns the user's mistakes that hardware does not report.
//
// Deviations: OpSendInvalidate invalidates any region, whereas devices invalidate only regions of kernels and memory
// windows. A message moves as a whole, never in parts.
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

// ErrQuiet is returned by a call that would block for ever: the network is not live, and no step is left.
var ErrQuiet = errors.New("memverbs: nothing is left to happen")

// Config configures a Network. The zero value is a network that is driven by Step and Run.
type Config struct {
	// Seed decides everything that the specification leaves open.
	Seed uint64
	// Live starts a goroutine that makes the steps.
	Live bool
	// MaxDelay is the maximum number of turns that an endpoint skips. 0 stands for 8, a negative value for none.
	MaxDelay int
	// RNRDelay is the time between the attempts to send a message for which there was no receive. It applies to live
	// networks only; 0 stands for a millisecond.
	RNRDelay time.Duration
	// ExactPrivateData keeps private data at its own length, as iWARP does.
	ExactPrivateData bool
}

// Network connects providers. Its methods may be called from any goroutine, Step and Run from one at a time.
type Network struct {
	cfg Config

	mu  sync.Mutex
	rng *rand.Rand
	// active holds the endpoints that may have something to do. Invariant: active[i].place is i.
	active []*Endpoint
	// endpoints holds the open endpoints, oldest first.
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
	// rnr holds the endpoints whose next attempt waits for the timer.
	rnr      []*Endpoint
	rnrTimer *time.Timer
	// work wakes the network's goroutine. changed wakes goroutines that wait for a connection or for the end of a call
	// of OnEvent's function.
	work    sync.Cond
	changed sync.Cond
	closed  bool
	stopped chan struct{}
}

// New returns a network without providers.
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

// Close stops the network's goroutine; no step happens any more. Idempotent.
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

// Faults returns the mistakes that users have made so far, or nil: overflows of completion queues, and RDMA READs on a
// connection that permits none.
func (n *Network) Faults() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	return errors.Join(n.faults...)
}

func (n *Network) fault(err error) { n.faults = append(n.faults, err) }

// Step makes one step and reports whether there was one to make. It must not be called on a live network.
func (n *Network) Step() bool {
	if n.cfg.Live {
		panic("memverbs: Step of a live network")
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.step()
}

// Run makes steps until none is left and returns their number. It must not be called on a live network.
func (n *Network) Run() (steps int) {
	for n.Step() {
		steps++
	}
	return steps
}

// burst is the number of steps that deliver makes before it releases the lock for others.
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
		// Without a pause, the goroutine would take the mutex again at once and starve the others.
		n.mu.Unlock()
		runtime.Gosched()
		n.mu.Lock()
	}
}

// step makes one move of one endpoint. The caller holds mu; step releases it while a function set by OnEvent runs.
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

// activate makes endpoints eligible for turns after their state has changed.
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

// coin decides a question that the specification leaves open.
func (n *Network) coin() bool { return n.rng.Uint32()&1 == 0 }

// await blocks until done returns true. On a network that is not live it makes steps instead. It returns false if it
// would block for ever. The caller holds mu.
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

// Pause stops all steps until Resume. Calls still work: connections do not progress, and posted requests stay
// outstanding.
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

// Endpoints returns the open endpoints, oldest first. It includes requests that nobody has accepted yet.
func (n *Network) Endpoints() []*Endpoint {
	n.mu.Lock()
	defer n.mu.Unlock()
	return append([]*Endpoint(nil), n.endpoints...)
}
