// Package partition runs key-value stores on drives. A Partition takes Requests from the transports to the store's
// machine and the machine's I/Os to the drive, where they pass the same pipeline as block I/Os, under the tenant that
// has asked.
//
//	Submit ──> inbox ──> queues by tenant ──> kvstore.Store ──> I/Os ──> drive.Drive ──> device
//	KVDone <── replies <────────────────────────┘   ^                      │
//	                                                └── done <── Done ─────┘
//
// A turn.Driver drives a partition and a swap area, as it does a drive: the goroutine that brings Requests or
// completions runs the store if nobody else does. A timer brings the turns that the store asks for when nothing else
// happens.
package partition

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"jbofd/internal/drive"
	"jbofd/internal/fence"
	"jbofd/internal/kvstore"
	"jbofd/internal/kvstore/swap"
	"jbofd/internal/tenant"
	"jbofd/internal/turn"
	"jbofd/internal/units"
)

// Config describes a Partition.
type Config struct {
	// Drive holds the partition, from OffsetBytes on. Its Env is also the partition's.
	Drive       *drive.Drive
	OffsetBytes units.DriveOffset
	// Background is the tenant under which compaction, checkpoints and recovery are done.
	Background tenant.ID
	// Volatile: the operator accepts that acknowledged writes are lost with the power. Otherwise they are durable.
	Volatile bool
	// Store is the store's own configuration. BlockSize, SegTbl, FUA and Alloc are filled in.
	Store kvstore.Config
	// Swap lets Puts go to other drives when this one has too much to do. Without Areas nothing is swapped.
	Swap SwapConfig
	// Damaged, if set, is told of each record that the store has found damaged. It must not block.
	Damaged func(kvstore.Damage)
	// Wall returns the time of day, by which objects expire; nil: time.Now.
	Wall func() time.Time
	// Opening, if set, is called every few seconds during Open: what is being read, how much of it was, and how much
	// there is.
	Opening func(what string, read, of int)
	// Closing, if set, is called every few seconds while the store writes its last checkpoint: how many bytes of it are
	// written, and how many there are.
	Closing func(written, of int64)
}

// Partition is an open store. Its methods may be called from any goroutine.
type Partition struct {
	cfg    Config
	drive  *drive.Drive
	memory *memory
	driver turn.Driver
	// inbox brings submitted Requests, done the store's I/Os that have ended.
	inbox turn.Mailbox[Request]
	done  turn.Mailbox[deviceIO]
	// aborting: there are Requests that Request.Abort has taken out and that the next turn ends.
	aborting atomic.Bool
	// swapper exists from before the first turn, because its mailboxes may be used from then on. Nil without swapping.
	swapper *swapper
	// used is Stats.LiveBytes after the last turn.
	used atomic.Int64
	// full: what is used is more than four fifths of what may be; tooFull: more than nine tenths.
	full, tooFull atomic.Bool
	// right is the right to use the partition's extent, which pass carries with each I/O. It ends if Close gives the
	// store up.
	right *fence.Holder
	pass  fence.Pass

	// Everything below belongs to the driver's owner.
	store *kvstore.Store
	// opened is closed when the store has opened or failed, stopped when its last checkpoint is done.
	opened, stopped chan struct{}
	phase           phase
	// atDrive counts the store's I/Os that the drive has. lost: one has found the drive vanished while the store was
	// closing, so that there can be no last checkpoint.
	atDrive int
	lost    bool
	// quiet is set when the store was given up, and closed when no drive has an I/O of the partition any more.
	quiet chan struct{}
	// resized is closed when the resize that is under way has ended, or, with resizeLost, when one of the store's I/Os
	// has found the drive vanished.
	resized    chan struct{}
	resizeLost bool
	// heardNS is when the drive has ended one of the store's I/Os last, or when it got the first one that it has.
	heardNS int64
	// swapping is nil until the store is open, and without swapping.
	swapping *swapper
	queues   [numQueues]waiting
	// copying is the number of CopyIns that the store has, or the Source for it.
	copying int
	reqs    []*Request // in the store, by tag
	freeReq []uint32
	ios     []*deviceIO // by the store's tag
	acts    kvstore.Actions
	batch   drive.Batch
	tenants []tenantState
	// wall is the time of day in seconds since 1970 that the store was told, wallDueNS is when it is told again.
	wall      uint32
	wallDueNS int64
}

type phase uint8

const (
	opening phase = iota
	serving
	closing
	gone // the store has stopped or was given up
)

// deviceIO is a device I/O of the store.
type deviceIO struct {
	drive.IO
	tag  uint32
	p    *Partition
	node turn.Node[deviceIO]
}

// Done implements drive.Sink. Only the first one after a turn asks for a kick: it stands for all.
func (d *deviceIO) Done(*drive.IO) (kick bool) { return d.p.done.Push(&d.node) }

// Admitted implements drive.Sink; nothing is fetched.
func (d *deviceIO) Admitted(*drive.IO) (kick bool) { panic("partition: nothing to fetch") }

// Kick implements drive.Sink.
func (d *deviceIO) Kick() { d.p.driver.Run() }

// Open opens the partition, or formats it if Config.Store says so, and returns when requests are
// welcome.
//
// Errors: those of kvstore.New and kvstore.Store.Err, kvstore.ErrNoMemory among them; the partition has not been
// written to then. Those of swap.LoadManifest and swap.NewSource, if an area is missing that has some of its newest
// values.
func Open(cfg Config) (*Partition, error) {
	info := cfg.Drive.Device().Info()
	m := newMemory(cfg.Drive.Pool(), fmt.Sprintf("kv store at %d of %s", cfg.OffsetBytes, info.Name))
	sc := cfg.Store
	sc.BlockSize = info.BlockSize
	sc.FUA, sc.Volatile = info.VolatileCache && !cfg.Volatile, info.VolatileCache && cfg.Volatile
	sc.Alloc = m.Alloc
	var err error
	if sc.SegTbl, err = m.reserveSegTbl(segTblBytes(sc.PartitionBytes, sc.KeysPerSegment)); err != nil {
		m.free()
		return nil, err
	}
	store, err := kvstore.New(sc)
	if err != nil {
		m.free()
		return nil, err
	}
	if err := openManifest(&cfg, m); err != nil {
		m.free()
		return nil, err
	}
	p := &Partition{
		cfg: cfg, drive: cfg.Drive, memory: m, store: store,
		opened: make(chan struct{}), stopped: make(chan struct{}), right: fence.NewHolder(func() {}),
	}
	p.pass = p.right.Pass()
	if p.cfg.Wall == nil {
		p.cfg.Wall = time.Now
	}
	if err := p.driver.Init(turn.Config{Env: cfg.Drive.Env(), Machine: (*machine)(p), MaxTurns: maxTurns}); err != nil {
		m.free()
		return nil, err
	}
	if len(cfg.Swap.Areas) > 0 {
		p.swapper = &swapper{p: p, areas: cfg.Swap.Areas, memory: newMemory(cfg.Drive.Pool(),
			fmt.Sprintf("swapping of the kv store at %d of %s", cfg.OffsetBytes, info.Name))}
	}
	p.driver.Lock()
	p.turn()
	p.driver.Unlock()
	p.awaitOpened()
	err = store.Err()
	if err == nil {
		err = p.openSwapper()
	}
	if err != nil {
		return nil, errors.Join(err, p.abandon())
	}
	return p, nil
}

// openingEvery is how often Config.Opening is told.
var openingEvery = 3 * time.Second

// awaitOpened waits for the store to have opened or failed.
func (p *Partition) awaitOpened() {
	for !p.driver.Env().Wait(p.opened, openingEvery) {
		p.driver.Lock()
		what, read, of := p.store.Opening()
		p.driver.Unlock()
		if what != "" && p.cfg.Opening != nil {
			p.cfg.Opening(what, read, of)
		}
	}
}

// giveUp ends a store that cannot have its last checkpoint. Its memory is given back if the drives end its I/Os within
// patience. Otherwise a device may still be reading and writing it.
func (p *Partition) giveUp(patience time.Duration) {
	quiet := make(chan struct{})
	p.driver.Lock()
	p.phase, p.quiet = gone, quiet
	p.right.Raise()
	p.driver.Unlock()
	p.drive.AbortStale()
	p.endBegun()
	p.driver.Run()
	if p.driver.Env().Wait(quiet, patience) {
		p.release()
		return
	}
	p.abandonMemory()
	p.driver.Close()
}

// abandon ends a partition that could not be opened. A store that has opened is stopped.
func (p *Partition) abandon() error {
	if p.store.Err() == nil {
		return p.Close(openTimeout)
	}
	p.release()
	return nil
}

// openTimeout is how long a store that has served nothing may take to stop.
const openTimeout = 10 * time.Second

// release closes the driver and gives the memory back. The store has stopped, so that no I/O uses the memory.
func (p *Partition) release() {
	p.driver.Lock()
	p.phase = gone
	p.driver.Unlock()
	p.driver.Close()
	p.memory.free()
	if p.swapper != nil {
		p.swapper.memory.free()
	}
}

// abandonMemory gives up the memory without returning it to the system, because the device may still use it.
func (p *Partition) abandonMemory() {
	p.memory.abandon()
	if p.swapper != nil {
		p.swapper.memory.abandon()
	}
}

// Submit hands the batch over and empties it; on return the Requests may be done already. From any goroutine, but
// not from within a Sink's methods.
//
// hot: 0 allocs
func (p *Partition) Submit(b *Batch) {
	if b.Empty() {
		return
	}
	for n := b.chain.Newest(); n != nil; n = n.Older() {
		n.Item.Aborted = false
		n.Item.partition = p
		n.Item.state.Store(requestQueued)
	}
	p.inbox.PushChain(&b.chain)
	p.driver.Run()
}

// Drive is the drive that the partition lies on.
func (p *Partition) Drive() *drive.Drive { return p.drive }

// MaxValueBytes is the longest value that the partition takes.
func (p *Partition) MaxValueBytes() int { return p.store.MaxValueBytes() }

// Origin tells the partition from others: see kvstore.Store.Origin.
func (p *Partition) Origin() uint32 { return p.store.Origin() }

// HashSeed is the seed with which the store was formatted: see kvstore.Config.
func (p *Partition) HashSeed() uint64 { return p.store.HashSeed() }

// Lost returns what was lost when the partition was opened with kvstore.Config.AcceptLoss, or nil.
func (p *Partition) Lost() *kvstore.Loss { return p.store.Lost() }

// UsedBytes is how much of the partition keys and values take, after the last turn. It takes no lock.
func (p *Partition) UsedBytes() int64 { return p.used.Load() }

// NearlyFull reports whether the partition should take no more Puts of clients, while it has room for those that other
// replicas have taken.
func (p *Partition) NearlyFull() bool { return p.full.Load() }

// TooFullToFill reports whether what room there is, beyond nine tenths, is for writes that have begun, and not for
// copies of what other replicas have.
func (p *Partition) TooFullToFill() bool { return p.tooFull.Load() }

// Uses returns what the partition has in swap areas.
func (p *Partition) Uses() []swap.Use {
	p.driver.Lock()
	defer p.driver.Unlock()
	if p.swapping == nil || p.phase == gone {
		return nil
	}
	return p.swapping.source.Uses()
}

// Stats returns the store's counters, and how much memory it has.
func (p *Partition) Stats() Stats {
	p.driver.Lock()
	defer p.driver.Unlock()
	if p.phase == gone {
		return Stats{}
	}
	st := Stats{Stats: p.store.Stats(), MemoryBytes: p.memory.Bytes(), Waiting: p.waiting()}
	st.TableBytes = p.store.TableBytes()
	if p.swapping != nil {
		st.Swap = p.swapping.source.Stats()
		st.MemoryBytes += p.swapping.memory.Bytes()
	}
	return st
}

// Stats are the counters of a partition.
type Stats struct {
	kvstore.Stats
	// MemoryBytes is the memory taken for buffers, TableBytes that of the tables of segments and chunks.
	MemoryBytes, TableBytes int64
	// Waiting is how many Requests the store has not taken yet.
	Waiting int
	// Swap counts values written to swap areas and moved back.
	Swap swap.Stats
}

// Idle reports that there is nothing under way, not even in the background.
func (p *Partition) Idle() bool {
	p.driver.Lock()
	defer p.driver.Unlock()
	return p.phase == serving && !(*machine)(p).Pending() && p.waiting() == 0 && p.store.Idle()
}

// Audit asks the store for an audit; see kvstore.Store.Audit.
func (p *Partition) Audit(repair bool) bool {
	p.driver.Lock()
	defer p.driver.Unlock()
	if p.phase != serving || !p.store.Audit(repair) {
		return false
	}
	p.turn()
	return true
}

// LookForLosses has the store report again what it has lost; see kvstore.Store.LookForLosses.
func (p *Partition) LookForLosses() {
	p.driver.Lock()
	defer p.driver.Unlock()
	if p.phase == serving {
		p.store.LookForLosses()
		p.turn()
	}
}

// ScrubState returns how far the store's scrub is.
func (p *Partition) ScrubState() kvstore.ScrubState {
	p.driver.Lock()
	defer p.driver.Unlock()
	if p.phase != serving {
		return kvstore.ScrubState{}
	}
	return p.store.ScrubState()
}

// SetScrubRate changes the rate of the store's scrub, in bytes per second; 0: it pauses.
func (p *Partition) SetScrubRate(bytesPerSec int64) {
	p.driver.Lock()
	defer p.driver.Unlock()
	if p.phase == serving {
		p.store.SetScrubRate(bytesPerSec)
		p.turn()
	}
}

// AuditState returns how far the store's audit is, or what the last one has found.
func (p *Partition) AuditState() kvstore.AuditState {
	p.driver.Lock()
	defer p.driver.Unlock()
	if p.phase == gone {
		return kvstore.AuditState{}
	}
	return p.store.AuditState()
}

// Dropping reports whether a Drop of something in a range of positions is not over: see kvstore.Store.Dropping. One
// that waits for the store is not among them.
func (p *Partition) Dropping(first, last uint64, hurry bool) bool {
	p.driver.Lock()
	defer p.driver.Unlock()
	if p.phase != serving {
		return true // nobody knows any more
	}
	dropping := p.store.Dropping(first, last, hurry)
	if dropping && hurry {
		p.turn()
	}
	return dropping
}

// Checkpoint asks the store for a checkpoint now.
func (p *Partition) Checkpoint() {
	p.driver.Lock()
	defer p.driver.Unlock()
	if p.phase == serving {
		p.store.Checkpoint()
		p.turn()
	}
}
