// Package drive drives one SSD: its pipeline, its device queue, and the commands that take more than one device
// request.
//
// A turn.Driver runs a Drive: the goroutine that submits an IO does the work of the drive if no other goroutine does. A
// device that completes asynchronously has one goroutine more, which sleeps in Queue.Wait, unless it is an
// ssd.Notifier. The owner of the drive is that of the device queue, too.
//
//	Submit ──> inbox ──> pipeline ──> admitted ──> [host's data] ──> [scratch, claim] ──> staged ──> device queue
//	                     │  │             │ buffer from the pool                                          │
//	                timer┘ Abort       waits in the pool's queue           pipeline <── next request <── Done
//
// The timer brings the turn in which the pipeline has more to dispatch without any event before, because a tenant's cap
// has tokens again.
package drive

import (
	"errors"
	"fmt"
	"sync/atomic"

	"jbofd/internal/bufpool"
	"jbofd/internal/pipeline"
	"jbofd/internal/ssd"
	"jbofd/internal/turn"
)

// Config describes a Drive.
type Config struct {
	Device ssd.Device
	Pool   *bufpool.Pool
	// Depth is how many requests may be outstanding at the device; 0: 256.
	Depth int
	// Policy is how the pipeline decides; nil: a FIFO of Depth.
	Policy pipeline.Policy
	// Env is where the drive runs; nil: turn.Real.
	Env turn.Env
	// Failed is told of each request that the device failed; nil: nobody. It is called during a turn, so it must not
	// wait.
	Failed func(op pipeline.Op, err error)
}

// Drive is one SSD with its pipeline: it lets IOs pass the pipeline, submits their requests to the device, and ends
// them. Its exported methods may be called from any goroutine, but most of them not from within a Sink's methods.
type Drive struct {
	device  ssd.Device
	queue   ssd.Queue
	sync    bool
	polled  bool // ssd.Info.Polled
	pool    *bufpool.Pool
	driver  turn.Driver
	failed  func(op pipeline.Op, err error)
	stats   Stats
	account *bufpool.Account
	poller  chan struct{} // closed when the poll goroutine has ended
	spin    ssd.Spin      // of the poll goroutine

	// inbox brings IOs that were submitted, fetched or given a buffer.
	inbox turn.Mailbox[IO]
	// wants holds what else the next turn must do: wantAborted and so on.
	wants  atomic.Uint32
	closed atomic.Bool

	// Everything below belongs to the driver's owner.
	pipe     *pipeline.Pipeline
	slab     []*IO    // by tag; grows with what is outstanding, which the transports bound
	freeTags []uint32 // Invariant: cap(freeTags) >= len(slab)
	staged   list     // ready for the device queue
	claims   claims
	scratch  scratchBuffers
	// waiting counts IOs that wait for a claim or a scratch buffer.
	waiting  int
	quiescer turn.Quiescer
	atDevice int
	tags     []pipeline.Tag
	reqs     []ssd.Request
	comps    []ssd.Completion
}

// firstTags is how many IOs a drive has room for at first.
const firstTags = 1024

// minWaitNS is the shortest time that a turn is put off: what caps let in sooner is let in together, and the tokens
// saved up meanwhile are not lost.
const minWaitNS = 50_000

// New opens a queue on the device and makes its Drive.
//
// Errors: the device's; the pool has no memory for a scratch buffer; those of turn.Env.NewTimer.
func New(cfg Config) (*Drive, error) {
	if cfg.Depth == 0 {
		cfg.Depth = 256
	}
	if cfg.Policy == nil {
		cfg.Policy = pipeline.NewFIFO(cfg.Depth)
	}
	if cfg.Env == nil {
		cfg.Env = turn.Real
	}
	info := cfg.Device.Info()
	name := info.Name
	q, err := cfg.Device.OpenQueue(cfg.Depth)
	if err != nil {
		return nil, fmt.Errorf("ssd %s: open queue: %w", name, err)
	}
	d := &Drive{
		device: cfg.Device, queue: q, sync: q.Synchronous(), polled: info.Polled, pool: cfg.Pool, failed: cfg.Failed,
		account:  cfg.Pool.Account("ssd:" + name),
		pipe:     pipeline.New(cfg.Policy),
		slab:     make([]*IO, firstTags),
		freeTags: make([]uint32, firstTags),
		tags:     make([]pipeline.Tag, 0, cfg.Depth),
		reqs:     make([]ssd.Request, 0, cfg.Depth),
		comps:    make([]ssd.Completion, cfg.Depth),
		poller:   make(chan struct{}),
	}
	for i := range d.freeTags {
		d.freeTags[i] = uint32(firstTags - 1 - i)
	}
	// The first scratch buffer is never given back, so that a Compare does not wait for memory that no completion
	// frees.
	if !d.scratch.grow(d.pool, d.account) {
		d.account.Close()
		return nil, errors.Join(fmt.Errorf("ssd %s: no buffer of %d bytes left for compare operations", name,
			scratchBytes), q.Close())
	}
	err = d.driver.Init(turn.Config{Env: cfg.Env, Machine: (*machine)(d), Precision: turn.Fine, MinWaitNS: minWaitNS})
	if err != nil {
		d.scratch.free(d.pool)
		d.account.Close()
		return nil, errors.Join(fmt.Errorf("ssd %s: %w", name, err), q.Close())
	}
	switch n, ok := q.(ssd.Notifier); {
	case d.sync:
		close(d.poller)
	case ok:
		close(d.poller)
		n.Notify(d.notify)
	default:
		cfg.Env.Go(d.poll)
	}
	return d, nil
}

// Close ends the Drive after its outstanding IOs; the submitters must have stopped. The device stays open. Idempotent.
func (d *Drive) Close() error {
	if d.closed.Swap(true) {
		return nil
	}
	d.queue.Wake()
	err := d.queue.Close()
	<-d.poller
	d.driver.Close() // turns are possible still: Snapshot takes one
	d.driver.Lock()
	defer d.driver.Unlock()
	d.scratch.free(d.pool)
	d.account.Close()
	return err
}

// Device returns the device under the Drive.
func (d *Drive) Device() ssd.Device { return d.device }

// Env returns the environment in which the Drive runs.
func (d *Drive) Env() turn.Env { return d.driver.Env() }

// Stats returns the live counters.
func (d *Drive) Stats() *Stats { return &d.stats }

// Quiesce returns a channel that is closed when every IO that was submitted before is done. IOs submitted since are not
// waited for.
func (d *Drive) Quiesce() <-chan struct{} {
	d.driver.Lock()
	defer d.driver.Unlock()
	d.drainInbox(d.driver.Now())
	quiet := d.quiescer.Quiesce()
	d.turn()
	return quiet
}
