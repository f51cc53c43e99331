// Package partition drives key-value stores on their SSDs: it brings requests from the transports to
// the store's machine, and the machine's device I/Os to the SSD's owner, where they pass the
// same pipeline as block I/Os, under the tenant that asked.
//
//	Submit ──> inbox ──> tenants' turns ──> kvstore.Store ──> IOs ──> owner.Owner ──> device
//	KVDone <── replies <──────────────────────┘   ^                      │
//	                                              └── done <── Done ─────┘
//
// As with an owner, no goroutine is bound to a partition: whoever brings requests or completions
// and finds it free drives it, and whoever finds it taken leaves them to the present driver. A timer
// brings the turn that a store asks for when nothing else happens.
package partition

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"jbofd/internal/kvstore"
	"jbofd/internal/kvstore/swap"
	"jbofd/internal/owner"
	"jbofd/internal/pipeline"
	"jbofd/internal/ssd"
)

// Config describes a Partition.
type Config struct {
	// Owner is the SSD's, OffsetBytes where on it the partition begins.
	Owner       *owner.Owner
	OffsetBytes int64
	// Background is the tenant under which compaction, checkpoints and recovery are done.
	Background pipeline.Tenant
	// Volatile: the operator takes it that writes that were acknowledged are lost with the power. Otherwise they are
	// durable, by the nature of the device.
	Volatile bool
	// Store is the store's own configuration. BlockSize, SegTbl, FUA and Alloc are filled in.
	Store kvstore.Config
	// Swap lets PUTs go to other SSDs when this one has too much to do. Without Areas it does not happen.
	Swap SwapConfig
	// Damaged, if set, is told of each record that the store has found damaged. It must not block.
	Damaged func(kvstore.Damage)
	// Opening, if set, is told every few seconds what Open is reading, and that so many of so many are read.
	Opening func(what string, read, of int)
}

// Partition is one store at work. Its methods may be called from any goroutine.
type Partition struct {
	cfg    Config
	owner  *owner.Owner
	memory *memory
	// inbox is a stack of submitted Requests, newest first, done one of device I/Os that are over, and due
	// says that the timer has rung.
	inbox atomic.Pointer[Request]
	done  atomic.Pointer[deviceIO]
	due   atomic.Bool
	// outside is the part of lending that others write to, from before the first turn on; nil without swapping.
	outside *lending
	// used is Stats.LiveBytes after the last turn.
	used atomic.Int64

	// mu is ownership: everything below belongs to who holds it.
	mu    sync.Mutex
	store *kvstore.Store
	// opened is closed when the store has opened or failed, stopped when its last checkpoint is done.
	opened, stopped chan struct{}
	phase           phase
	// lending is nil until the store is open, and without swapping.
	lending *lending
	waiting waiting
	reqs    []*Request // in the store, by tag
	freeReq []uint32
	ios     []*deviceIO // by the store's tag
	acts    kvstore.Actions
	batch   owner.Batch
	tenants []tenant
	kicks   *[]Sink
	timer   *time.Timer
	timerNS int64 // when it rings; 0: it is not set
	start   time.Time
}

type phase uint8

const (
	opening phase = iota
	serving
	closing
	gone // there is no store any more
)

// deviceIO is a device I/O of the store.
type deviceIO struct {
	owner.IO
	tag  uint32
	p    *Partition
	next *deviceIO
}

// Done implements owner.Sink.
func (d *deviceIO) Done(*owner.IO) (kick bool) {
	for {
		old := d.p.done.Load()
		d.next = old
		if d.p.done.CompareAndSwap(old, d) {
			return old == nil // the one before has asked for the kick
		}
	}
}

// Admitted implements owner.Sink; nothing is fetched.
func (d *deviceIO) Admitted(*owner.IO) (kick bool) { panic("partition: nothing to fetch") }

// Kick implements owner.Sink.
func (d *deviceIO) Kick() { d.p.run() }

// Open opens the partition, or formats it if Config.Store says so, and returns when requests are
// welcome.
//
// Errors: those of kvstore.New and kvstore.Store.Err; the partition has not been written to then. Those of
// swap.LoadBook and swap.NewHome, if an area is missing that has some of its newest values.
func Open(cfg Config) (*Partition, error) {
	info := cfg.Owner.Device().Info()
	m := &memory{}
	sc := cfg.Store
	sc.BlockSize = info.BlockSize
	sc.FUA, sc.Volatile = info.VolatileCache && !cfg.Volatile, info.VolatileCache && cfg.Volatile
	sc.Alloc = m.alloc
	var err error
	if sc.SegTbl, err = m.reserve(segTblBytes(sc.PartitionBytes, sc.KeysPerSegment)); err != nil {
		return nil, fmt.Errorf("address space for the segment table: %w", err)
	}
	store, err := kvstore.New(sc)
	if err != nil {
		m.free()
		return nil, err
	}
	if err := openBook(&cfg, m); err != nil {
		m.free()
		return nil, err
	}
	p := &Partition{
		cfg: cfg, owner: cfg.Owner, memory: m, store: store, start: time.Now(),
		opened: make(chan struct{}), stopped: make(chan struct{}), kicks: kickLists.Get().(*[]Sink),
	}
	p.timer = time.AfterFunc(time.Hour, p.ring)
	p.timer.Stop()
	if len(cfg.Swap.Areas) > 0 {
		p.outside = &lending{p: p, areas: cfg.Swap.Areas}
	}
	p.mu.Lock()
	p.turn()
	p.leave()
	p.awaitOpened()
	err = store.Err()
	if err == nil {
		err = p.openLending()
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
	t := time.NewTicker(openingEvery)
	defer t.Stop()
	for {
		select {
		case <-p.opened:
			return
		case <-t.C:
			p.mu.Lock()
			what, read, of := p.store.Opening()
			p.leave()
			if what != "" && p.cfg.Opening != nil {
				p.cfg.Opening(what, read, of)
			}
		}
	}
}

// Close brings home what is in swap areas and stops the store with a last checkpoint, after which it opens at once. It
// waits for that at most as long as patience; nothing is lost if it takes longer. The submitters must have stopped. Idempotent.
//
// Errors: the last checkpoint was not done in time; ErrKeysOut.
func (p *Partition) Close(patience time.Duration) error {
	p.mu.Lock()
	if p.phase != serving {
		p.leave()
		return nil
	}
	p.phase = closing
	if p.lending != nil {
		p.lending.home.Drain()
	} else {
		p.store.Stop()
	}
	p.turn()
	p.leave()
	if p.lending != nil && !p.stops(max(patience-checkpointPatience, patience/2)) {
		p.lending.leaveOut()
		patience = min(checkpointPatience, patience/2)
	}
	if p.stops(patience) {
		p.release()
		if p.lending != nil {
			return p.lending.out()
		}
		return nil
	}
	p.mu.Lock()
	p.phase = gone
	p.leave()
	// The device may still write to and from our memory: it is left to the end of the process.
	p.timer.Stop()
	return fmt.Errorf("the last checkpoint took longer than %v; the next start replays the log", patience)
}

// checkpointPatience is what Close keeps of its patience for the last checkpoint when keys are to come home before.
const checkpointPatience = 500 * time.Millisecond

// stops waits for the store to have stopped, and reports that it has.
func (p *Partition) stops(patience time.Duration) bool {
	t := time.NewTimer(patience)
	defer t.Stop()
	select {
	case <-p.stopped:
		return true
	case <-t.C:
		return false
	}
}

// abandon ends a partition that could not be opened; the store, if it has, stops as it is.
func (p *Partition) abandon() error {
	if p.store.Err() == nil {
		return p.Close(openPatience)
	}
	p.release()
	return nil
}

// openPatience is how long a store may take to stop that has done nothing yet.
const openPatience = 10 * time.Second

// release gives the memory back. Nothing is under way.
func (p *Partition) release() {
	p.mu.Lock()
	p.phase = gone
	p.leave()
	p.timer.Stop()
	p.memory.free()
	if p.outside != nil {
		p.outside.memory.free()
	}
}

// Submit hands the batch over and empties it; on return the Requests may be done already. From any goroutine, but
// not from within a Sink's methods.
//
// hot: 0 allocs
func (p *Partition) Submit(b *Batch) {
	if b.newest == nil {
		return
	}
	newest, oldest := b.newest, b.oldest
	*b = Batch{}
	for {
		old := p.inbox.Load()
		oldest.next = old
		if p.inbox.CompareAndSwap(old, newest) {
			break
		}
	}
	p.run()
}

// MaxValueBytes is the longest value that the partition takes.
func (p *Partition) MaxValueBytes() int { return p.store.MaxValueBytes() }

// UsedBytes is how much of the partition keys and values take. It waits for nothing.
func (p *Partition) UsedBytes() int64 { return p.used.Load() }

// Uses returns what is in swap areas.
func (p *Partition) Uses() []swap.Use {
	p.mu.Lock()
	defer p.leave()
	if p.lending == nil || p.phase == gone {
		return nil
	}
	return p.lending.home.Uses()
}

// Stats returns the store's counters, and how much memory it has.
func (p *Partition) Stats() Stats {
	p.mu.Lock()
	defer p.leave()
	if p.phase == gone {
		return Stats{}
	}
	st := Stats{Stats: p.store.Stats(), MemoryBytes: p.memory.bytes, Waiting: p.waiting.n}
	if p.lending != nil {
		st.Swap = p.lending.home.Stats()
		st.MemoryBytes += p.lending.memory.bytes
	}
	return st
}

// Stats are a store's, and of what drives it.
type Stats struct {
	kvstore.Stats
	// MemoryBytes is the memory taken for buffers.
	MemoryBytes int64
	// Waiting Requests have not begun.
	Waiting int
	// Swap counts what went elsewhere and came home.
	Swap swap.Stats
}

// Idle reports that there is nothing under way, not even in the background.
func (p *Partition) Idle() bool {
	p.mu.Lock()
	defer p.leave()
	return p.phase == serving && !p.pending() && p.waiting.n == 0 && p.store.Idle()
}

// Checkpoint asks the store for a checkpoint now.
func (p *Partition) Checkpoint() {
	p.mu.Lock()
	defer p.leave()
	if p.phase == serving {
		p.store.Checkpoint()
		p.turn()
	}
}

// now is the store's clock.
func (p *Partition) now() int64 { return int64(time.Since(p.start)) }

// ring is the timer's.
func (p *Partition) ring() {
	p.due.Store(true)
	p.run()
}

// pending reports whether a turn has something to do.
func (p *Partition) pending() bool {
	return p.inbox.Load() != nil || p.done.Load() != nil || p.due.Load() || p.outside != nil && p.outside.pending()
}

// maxTurns is how many turns a submitter takes in a row before it may see to what it has to do
// itself.
const maxTurns = 16

// run takes turns until there is nothing to do or somebody else has the partition: that one looks
// again after letting go, so nothing is left behind.
func (p *Partition) run() {
	for turns := 0; p.pending(); turns++ {
		if turns == maxTurns {
			go p.run()
			return
		}
		if !p.mu.TryLock() {
			return
		}
		p.turn()
		p.unlock()
	}
}

// leave ends ownership and sees to what was brought meanwhile.
func (p *Partition) leave() {
	p.unlock()
	p.run()
}

// unlock ends ownership and kicks the sinks that asked for it.
func (p *Partition) unlock() {
	kicks := p.kicks
	if len(*kicks) == 0 {
		p.mu.Unlock()
		return
	}
	p.kicks = kickLists.Get().(*[]Sink)
	p.mu.Unlock()
	for _, s := range *kicks {
		s.Kick()
	}
	clear(*kicks)
	*kicks = (*kicks)[:0]
	kickLists.Put(kicks)
}

// kickLists are lists that no partition fills at the moment.
var kickLists = sync.Pool{New: func() any {
	list := make([]Sink, 0, 64)
	return &list
}}

// turn brings everything forward that can go. What others have handed over comes first, then Requests begin as far as that has made
// room, and what the store and the lending ask for goes to the drives in one batch at the end. Called with ownership.
func (p *Partition) turn() {
	if p.phase == gone {
		p.due.Store(false)
		p.done.Store(nil)
		if p.outside != nil {
			p.outside.drop()
		}
		p.takeInbox()
		p.refuse()
		return
	}
	if p.due.Swap(false) {
		p.timerNS = 0
	}
	now := p.now()
	l := p.lending
	p.takeDone()
	p.takeInbox()
	if l != nil {
		l.begin(now)
		if p.phase == closing {
			l.stop()
		}
	}
	p.begin()
	for again := true; again; again = p.begin() { // replies make room
		p.store.Turn(now, &p.acts)
		p.answer()
		if l != nil {
			l.turn(now)
		}
	}
	p.setTimer(now)
	if p.store.Ready() {
		p.used.Store(p.store.LiveBytes())
	}
	p.submit()
	if l != nil {
		l.submit()
	}
	switch {
	case p.phase == opening && (p.store.Ready() || p.store.Err() != nil):
		p.phase = serving
		close(p.opened)
	case p.phase == closing && p.store.Stopped():
		p.phase = gone
		close(p.stopped)
	}
}

// refuse ends the Requests that come too late.
func (p *Partition) refuse() {
	for r := p.waiting.any(); r != nil; r = p.waiting.any() {
		r.Status, r.ValueLen = kvstore.DeviceError, 0
		p.tell(r)
	}
}

// takeDone hands the device's completions to the store.
func (p *Partition) takeDone() {
	for d := p.done.Swap(nil); d != nil; {
		next := d.next
		d.next = nil
		if d.CreditUnits > 0 {
			p.tenant(d.Tenant).creditUnits = d.CreditUnits
		}
		d.Buf.B = nil
		p.store.Complete(d.tag, d.Err)
		d = next
	}
}

// takeInbox puts what was submitted in the queues of its tenants.
func (p *Partition) takeInbox() {
	var first *Request
	for r := p.inbox.Swap(nil); r != nil; { // newest first: turn around
		next := r.next
		r.next = first
		first = r
		r = next
	}
	for r := first; r != nil; {
		next := r.next
		r.next = nil
		p.tenant(r.Tenant).asks(r)
		p.waiting.push(r)
		r = next
	}
}

// tenant returns what is remembered of one.
func (p *Partition) tenant(t pipeline.Tenant) *tenant {
	for int(t) >= len(p.tenants) {
		p.tenants = append(p.tenants, tenant{})
	}
	return &p.tenants[t]
}

// begin gives waiting Requests to the store as long as it takes them, and reports whether it took one.
func (p *Partition) begin() (any bool) {
	if p.phase == closing {
		p.refuse()
	}
	l := p.lending
	if l != nil {
		any = l.feed()
	}
	for p.phase == serving {
		r := p.waiting.peek()
		if r == nil {
			break
		}
		if len(p.freeReq) == 0 {
			p.freeReq = append(p.freeReq, uint32(len(p.reqs)))
			p.reqs = append(p.reqs, nil)
		}
		tag := p.freeReq[len(p.freeReq)-1]
		q := kvstore.Request{
			Op: r.Op, Condition: r.Condition, Tag: uint64(tag), Tenant: uint32(r.Tenant), Key: r.Key[:min(int(r.KeyLen), len(r.Key))], Value: r.Value, Room: r.Room,
		}
		verdict := swap.ToStore
		if l != nil {
			verdict = l.home.Submit(&q)
		}
		if verdict == swap.Full || verdict == swap.ToStore && !p.store.Submit(&q) {
			break
		}
		if l != nil && verdict == swap.ToStore && (r.Op == kvstore.Put || r.Op == kvstore.Delete) {
			l.home.Began(tag, q.Key)
		}
		p.freeReq = p.freeReq[:len(p.freeReq)-1]
		p.reqs[tag] = r
		p.waiting.pop()
		any = true
	}
	return any
}

// answer passes the store's replies on.
func (p *Partition) answer() {
	for i := range p.acts.Replies {
		a := &p.acts.Replies[i]
		switch l := p.lending; {
		case a.Tag >= ofHome:
			l.home.Stored(a.Tag&^ofHome, a.Status, a.ValueLen)
			continue
		case l != nil:
			l.home.Ended(uint32(a.Tag))
		}
		p.reply(a)
	}
	p.acts.Replies = p.acts.Replies[:0]
	if p.cfg.Damaged != nil {
		for _, d := range p.acts.Damage {
			p.cfg.Damaged(d)
		}
	}
	p.acts.Damage = p.acts.Damage[:0]
}

// reply ends the Request with the reply's tag.
func (p *Partition) reply(a *kvstore.Reply) {
	r := p.reqs[a.Tag]
	p.reqs[a.Tag] = nil
	p.freeReq = append(p.freeReq, uint32(a.Tag))
	r.Status, r.ValueLen = a.Status, a.ValueLen
	p.waiting.ended(r)
	p.tell(r)
}

// tell ends a Request.
func (p *Partition) tell(r *Request) {
	r.CreditUnits = 0
	if r.Credited {
		r.CreditUnits = p.tenant(r.Tenant).credit()
	}
	if s := r.Sink; s.KVDone(r) {
		*p.kicks = append(*p.kicks, s)
	}
}

// submit gives the store's I/Os to the SSD.
func (p *Partition) submit() {
	for i := range p.acts.IOs {
		q := &p.acts.IOs[i]
		for int(q.Tag) >= len(p.ios) {
			d := &deviceIO{p: p, tag: uint32(len(p.ios))}
			d.Init(d, d.tag)
			p.ios = append(p.ios, d)
		}
		d := p.ios[q.Tag]
		d.Op, d.Offset, d.Len, d.Buf.B = q.Op, p.cfg.OffsetBytes+q.Offset, int64(len(q.Buf)), q.Buf
		d.Flags = 0
		if q.FUA {
			d.Flags = ssd.FUA
		}
		d.Tenant, d.Credited = pipeline.Tenant(q.Tenant), false
		if q.Background {
			d.Tenant = p.cfg.Background
		} else {
			t := p.tenant(d.Tenant)
			t.moves(d.Op, d.Len)
			d.Credited = t.credited
		}
		p.batch.Add(&d.IO)
	}
	p.acts.IOs = p.acts.IOs[:0]
	p.owner.Submit(&p.batch)
}

// setTimer sees to it that there is a turn when the store wants one. A timer that rings too early is
// let ring: setting it costs more.
func (p *Partition) setTimer(now int64) {
	at := p.acts.WakeNS
	if p.lending != nil && p.lending.wakeNS != 0 && (at == 0 || p.lending.wakeNS < at) {
		at = p.lending.wakeNS
	}
	if at == 0 || p.timerNS != 0 && p.timerNS <= at {
		return
	}
	p.timerNS = at
	p.timer.Reset(time.Duration(max(at-now, 0)))
}
