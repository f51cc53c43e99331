// Package turn drives state machines. A machine is state without a lock or a goroutine of its own; a Driver decides
// which goroutine runs it, and when.
//
// A Driver runs its machine in turns. During a turn the machine takes its input from mailboxes, which any goroutine may
// fill without a lock, and does all the work that it can. One goroutine at a time owns the machine:
//
//	Push ──> Mailbox ──┐
//	timer ─────────────┼──> Run: own, Machine.Turn, end ownership ──> Kick of other machines
//	device ────────────┘        └───── again while Pending ─────┘
//
// The goroutine that has pushed work calls Run. If the machine is free, that goroutine becomes its owner and does the
// work at once, without a context switch. If the machine is owned, Run returns: the owner looks into the mailboxes
// again after it has ended its ownership, so no work is left behind. A goroutine takes a bounded number of turns in a
// row; the rest is handed over to a goroutine of its own, so that a submitter gets on with its own work.
//
// A machine must not call into another machine's sinks while it is owned: two machines that do so to each other can
// deadlock on the locks that sinks take. So wake-ups of others are deferred with Kick until ownership has ended.
//
// A Driver uses time, goroutines and timers only through its Env. A simulation supplies an Env of its own and runs the
// same code on one goroutine in virtual time.
package turn

import (
	"sync"
	"sync/atomic"

	"jbofd/internal/invariants"
)

// Machine is what a Driver drives.
type Machine interface {
	// Pending reports whether a turn has something to do: typically, whether a mailbox has mail. Called from any
	// goroutine, without ownership.
	Pending() bool
	// Turn takes all mail and does the work that can be done. Called with ownership.
	Turn()
}

// Kicker is woken up after a turn.
type Kicker interface {
	// Kick is called without ownership. It may take locks and run other machines.
	Kick()
}

// Config describes a Driver.
type Config struct {
	// Env is where the machine runs; nil: Real.
	Env     Env
	Machine Machine
	// MaxTurns is how many turns Run takes in a row before it hands the rest over; 0: 4.
	MaxTurns int
	// HandOver lets some other goroutine call Run soon; nil: a goroutine of the Env. Machines that have a goroutine
	// anyway, which polls a completion queue for instance, wake that one. HandOver may be called often.
	HandOver func()
	// Precision is that of the timer.
	Precision Precision
	// MinWaitNS is the shortest time to which the timer is set. Work that becomes due sooner is done together.
	MinWaitNS int64
}

// Driver runs one Machine. Init must be called first. Its methods may be called from any goroutine, except where they
// say that they need ownership.
type Driver struct {
	machine  Machine
	env      Env
	maxTurns int
	minWait  int64
	timer    Timer
	// handOver is Config's; continuation is continueRun.
	handOver, continuation func()

	// handedOver: a hand-over was asked for and its Run has not begun. running counts hand-overs that were asked for
	// and have not ended. idle gets a value whenever running becomes 0 after Close has begun.
	handedOver atomic.Bool
	running    atomic.Int32
	closing    atomic.Bool
	idle       chan struct{}

	// mu is ownership of the machine and of everything below.
	mu sync.Mutex
	// kicks are those to wake up when ownership ends.
	kicks *[]Kicker
	// timerNS is when the timer fires; 0: it is not set.
	timerNS  int64
	timerOff bool
}

// defaultMaxTurns suits machines whose turn costs a few microseconds.
const defaultMaxTurns = 4

// Init prepares the Driver. No turn is taken before the first Run.
//
// Errors: those of Env.NewTimer. The Driver must then not be used, and not be closed.
func (d *Driver) Init(cfg Config) (err error) {
	if cfg.Env == nil {
		cfg.Env = Real
	}
	if cfg.MaxTurns == 0 {
		cfg.MaxTurns = defaultMaxTurns
	}
	d.machine, d.env, d.maxTurns, d.minWait = cfg.Machine, cfg.Env, cfg.MaxTurns, cfg.MinWaitNS
	d.idle = make(chan struct{}, 1)
	d.kicks = kickLists.Get().(*[]Kicker)
	d.handOver = cfg.HandOver
	d.continuation = d.continueRun // once: a method value allocates
	d.timer, err = d.env.NewTimer(cfg.Precision, d.timerFired)
	return err
}

// continueRun is the hand-over's goroutine.
func (d *Driver) continueRun() {
	d.handedOver.Store(false) // before Run: what is pushed from here on may need another hand-over
	d.Run()
	if d.running.Add(-1) == 0 && d.closing.Load() {
		select {
		case d.idle <- struct{}{}:
		default:
		}
	}
}

// Env returns the Driver's environment.
func (d *Driver) Env() Env { return d.env }

// Now is the Env's time in nanoseconds.
func (d *Driver) Now() int64 { return d.env.Now() }

// Run takes turns until the machine has nothing pending or another goroutine owns it. Whoever has pushed mail calls it,
// but not during a turn of the same machine, and not with a lock held that a Kick takes.
//
// hot: 0 allocs
func (d *Driver) Run() {
	for turns := 0; d.machine.Pending(); turns++ {
		if turns == d.maxTurns {
			d.RunLater()
			return
		}
		if !d.mu.TryLock() {
			return
		}
		d.machine.Turn()
		d.end()
	}
}

// RunLater makes another goroutine call Run soon. It is for callers that hold a lock that a Kick takes, or that have
// spent enough time on the machine. Further calls before that Run have no effect.
func (d *Driver) RunLater() {
	if d.handOver != nil {
		d.handOver()
		return
	}
	if !d.handedOver.Load() && !d.handedOver.Swap(true) {
		d.running.Add(1)
		d.env.Go(d.continuation)
	}
}

// Lock waits for ownership and takes it, for calls that inspect or change the machine outside of a turn. It must not be
// called during a turn of the same machine, where it would deadlock. Driver implements sync.Locker.
func (d *Driver) Lock() { d.mu.Lock() }

// Unlock ends the ownership that Lock has taken, makes the calls that Kick has deferred, and runs the machine if work
// has been pushed into its mailboxes meanwhile.
func (d *Driver) Unlock() {
	d.end()
	d.Run()
}

// Release ends the ownership that Lock has taken and makes the calls that Kick has deferred, as Unlock does, but does
// not run the machine. It is for a goroutine that takes turns in a loop of its own. That goroutine must check for
// pending work, or call Run, before it sleeps.
func (d *Driver) Release() { d.end() }

// end ends ownership and then calls the Kickers that were kicked during it.
func (d *Driver) end() {
	// Kickers take locks and write to sockets, so they are called without ownership. The list is exchanged for an empty
	// one because the next owner may kick meanwhile.
	kicks := d.kicks
	if len(*kicks) == 0 {
		d.mu.Unlock()
		return
	}
	d.kicks = kickLists.Get().(*[]Kicker)
	d.mu.Unlock()
	for _, k := range *kicks {
		k.Kick()
	}
	clear(*kicks)
	*kicks = (*kicks)[:0]
	kickLists.Put(kicks)
}

// kickLists are empty lists of Kickers.
var kickLists = sync.Pool{New: func() any {
	list := make([]Kicker, 0, 64)
	return &list
}}

// Kick calls k.Kick once ownership has ended. A Kicker that is kicked twice in a turn is called twice. Needs ownership.
//
// hot: 0 allocs
func (d *Driver) Kick(k Kicker) { *d.kicks = append(*d.kicks, k) }

// WakeAt asks for a turn at a time of the Env, or soon after. Only the earliest request counts: a machine that wants
// several asks for the next one in each turn. The turn may come early, because a timer is not set to a later time when
// the machine no longer needs the earlier one: setting it costs more than a turn that finds nothing to do. Needs
// ownership.
//
// hot: 0 allocs
func (d *Driver) WakeAt(atNS int64) {
	if d.timerNS != 0 && d.timerNS <= atNS || d.timerOff {
		return
	}
	now := d.env.Now() // not the time at which the turn began: it may have taken long
	atNS = max(atNS, now+d.minWait)
	if d.timerNS != 0 && d.timerNS <= atNS {
		return
	}
	d.timerNS = max(atNS, 1)
	d.timer.Reset(max(atNS-now, 1))
}

// timerFired is the timer's function. A turn follows even if nothing is pending.
func (d *Driver) timerFired() {
	d.mu.Lock()
	d.timerNS = 0
	if !d.timerOff {
		d.machine.Turn()
	}
	d.Unlock()
}

// Close ends the timer and waits for the goroutines that the Driver has started. The submitters must have stopped, and
// the machine must have nothing pending. Turns are possible afterwards, but nothing is handed over or timed any more by
// the Driver. Not with ownership. Idempotent.
func (d *Driver) Close() {
	d.mu.Lock()
	d.timerOff = true
	d.mu.Unlock()
	d.timer.Close()
	d.closing.Store(true)
	for d.running.Load() > 0 {
		done := d.env.Wait(d.idle, -1)
		invariants.Check(done, "turn: the environment has lost a goroutine")
	}
	d.Run()
}
