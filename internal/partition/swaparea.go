package partition

import (
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"jbofd/internal/drive"
	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/swap"
	"jbofd/internal/pipeline"
	"jbofd/internal/ssd"
	"jbofd/internal/tenant"
	"jbofd/internal/turn"
	"jbofd/internal/units"
	"jbofd/internal/uuid"
)

// AreaConfig describes an Area.
type AreaConfig struct {
	// Drive holds the area, at OffsetBytes, LenBytes long, in whole blocks.
	Drive       *drive.Drive
	OffsetBytes units.DriveOffset
	LenBytes    int64
	// Background is the tenant charged for superblocks. Records are charged to the tenants whose values they hold.
	Background tenant.ID
	// Volatile is as in Config: swapped values are lost with the power, too.
	Volatile bool
	// Retiring: the area takes no new keys. Those in it are served until their partitions have moved them back.
	Retiring bool
	// Format makes a new, empty area with UUID and Salt, and discards what is there. The salt should be random and
	// secret, so that nobody can choose a value that looks like a record. Without Format both are ignored.
	Format bool
	UUID   uuid.UUID
	Salt   uint64
}

// Area is an open swap area: a part of a drive that takes Puts of partitions on other drives when those have too much
// to do. It is opened before the partitions that use it and closed after them. Its methods may be called from any
// goroutine.
type Area struct {
	cfg    AreaConfig
	memory *memory
	driver turn.Driver
	inbox  turn.Messages[areaMessage]
	done   turn.Mailbox[areaIO]
	// used is the part of the log in use, in thousandths. waiting is how many messages the machine has not taken yet,
	// because it has no space for them in a group. failing: the area cannot be written at the moment. The turn sets
	// them for load.
	used, waiting atomic.Int64
	failing       atomic.Bool

	// Everything below belongs to the driver's owner.
	machine *swap.Area
	backlog []areaMessage // taken from inbox, but not by the machine; in order
	sources []*swapper    // by the machine's number of the Source
	ios     [swap.AreaTags]areaIO
	acts    swap.AreaActions
	batch   drive.Batch
	closing bool
	stopped chan struct{}
	gone    bool // closed: completions and messages are discarded
}

// areaMessage is an Append or, if release is set, a Release.
type areaMessage struct {
	append  swap.Append
	release bool
	place   format.LogOffset
}

// areaIO is a device I/O of an Area.
type areaIO struct {
	drive.IO
	tag  uint32
	a    *Area
	node turn.Node[areaIO]
}

// Done implements drive.Sink.
func (a *areaIO) Done(*drive.IO) (kick bool) { return a.a.done.Push(&a.node) }

// Admitted implements drive.Sink; nothing is fetched.
func (a *areaIO) Admitted(*drive.IO) (kick bool) { panic("partition: nothing to fetch") }

// Kick implements drive.Sink.
func (a *areaIO) Kick() { a.a.driver.Run() }

// Kick implements turn.Kicker: a partition has put something into the inbox.
func (a *Area) Kick() { a.driver.Run() }

// waitIO is a device I/O whose submitter waits for it: done is closed when the I/O is done.
type waitIO struct {
	drive.IO
	done chan struct{}
}

// Done implements drive.Sink.
func (w *waitIO) Done(*drive.IO) (kick bool) {
	close(w.done)
	return false
}

// Admitted implements drive.Sink; nothing is fetched.
func (w *waitIO) Admitted(*drive.IO) (kick bool) { panic("partition: nothing to fetch") }

// Kick implements drive.Sink.
func (w *waitIO) Kick() {}

// doAndWait submits one device I/O and waits until it is done. It must not be called during a turn.
func doAndWait(o *drive.Drive, t tenant.ID, op pipeline.Op, flags ssd.Flags, offset units.DriveOffset,
	buf []byte) error {
	w := &waitIO{done: make(chan struct{})}
	w.Init(w, 0)
	w.Op, w.Flags, w.Offset, w.Len, w.Buf.B, w.Tenant = op, flags, offset, units.Bytes(len(buf)), buf, t
	var b drive.Batch
	b.Add(&w.IO)
	o.Submit(&b)
	o.Env().Wait(w.done, -1)
	return w.Err
}

// accessTo returns functions that read, and that write durably, at an offset of the range that begins at base. They
// return when the I/O is done, so they are for opening a partition or area only.
func accessTo(o *drive.Drive, t tenant.ID, base units.DriveOffset) (swap.Read, swap.Write) {
	read := func(offset units.ExtentOffset, buf []byte) error {
		return doAndWait(o, t, pipeline.Read, 0, offset.On(base), buf)
	}
	write := func(offset units.ExtentOffset, buf []byte) error {
		flags := ssd.Flags(0)
		if o.Device().Info().VolatileCache {
			flags = ssd.FUA
		}
		return doAndWait(o, t, pipeline.Write, flags, offset.On(base), buf)
	}
	return read, write
}

// OpenArea formats a swap area if cfg.Format is set, and opens it: it reads the area's log to find the records that
// partitions have there. It returns when that is done, and must not be called during a turn.
//
// Errors: those of swap.OpenArea, swap.FormatArea and turn.Driver.Init.
func OpenArea(cfg AreaConfig) (*Area, error) {
	info := cfg.Drive.Device().Info()
	m := newMemory(cfg.Drive.Pool(), fmt.Sprintf("swap area at %d of %s", cfg.OffsetBytes, info.Name))
	mc := swap.AreaConfig{AreaBytes: cfg.LenBytes, BlockSize: info.BlockSize, FUA: info.VolatileCache && !cfg.Volatile,
		Alloc: m.Alloc}
	read, write := accessTo(cfg.Drive, cfg.Background, cfg.OffsetBytes)
	if cfg.Format {
		if err := swap.FormatArea(mc, cfg.UUID, cfg.Salt, write); err != nil {
			m.free()
			return nil, err
		}
	}
	swapArea, err := swap.OpenArea(mc, read)
	if err != nil {
		m.free()
		return nil, err
	}
	a := &Area{cfg: cfg, memory: m, machine: swapArea, stopped: make(chan struct{})}
	for i := range a.ios {
		d := &a.ios[i]
		d.a, d.tag, d.node.Item = a, uint32(i), d
		d.Init(d, d.tag)
	}
	if err := a.driver.Init(turn.Config{Env: cfg.Drive.Env(), Machine: (*areaMachine)(a),
		MaxTurns: maxTurns}); err != nil {
		m.free()
		return nil, err
	}
	a.used.Store(int64(swapArea.Used()))
	return a, nil
}

// errAreaStuck: see Close.
var errAreaStuck = errors.New("the last write of the swap area is not done")

// Close waits for the writes under way, for at most patience, and closes the area. Its partitions must be closed.
// Idempotent.
//
// Errors: the writes were not done in time. Nothing is lost, but the area's memory is given up, because the device may
// still read it.
func (a *Area) Close(patience time.Duration) error {
	a.driver.Lock()
	if a.closing {
		a.driver.Unlock()
		return nil
	}
	a.closing = true
	a.machine.Stop()
	a.turn()
	a.driver.Unlock()
	if a.driver.Env().Wait(a.stopped, patience) {
		a.driver.Close()
		a.memory.free()
		return nil
	}
	a.driver.Close()
	a.driver.Lock()
	defer a.driver.Unlock()
	if !a.gone { // the device may still read from the memory
		a.gone = true
		a.memory.abandon()
		return fmt.Errorf("%w after %v", errAreaStuck, patience)
	}
	return nil
}

// UUID is the area's.
func (a *Area) UUID() uuid.UUID { return a.machine.UUID() }

// Stats returns the area's counters.
func (a *Area) Stats() swap.AreaStats {
	a.driver.Lock()
	defer a.driver.Unlock()
	return a.machine.Stats()
}

// Sources returns the partitions with records here that may count, or that are attached. One that was closed with keys
// here, because its drive has vanished or there was no time to return them, is not attached any more.
func (a *Area) Sources() []swap.SourceInfo {
	a.driver.Lock()
	all := a.machine.Sources()
	by := slices.Clone(a.sources)
	a.driver.Unlock()
	for i := range all {
		for _, l := range by {
			if s := &all[i]; s.Attached && l != nil && l.p.ended(s.UUID) {
				s.Attached, s.Keys = false, l.keysIn(a)
			}
		}
	}
	return slices.DeleteFunc(all, func(s swap.SourceInfo) bool { return !s.Attached && s.Keys == 0 })
}

// ended reports whether it is the partition with that UUID, and was closed.
func (p *Partition) ended(id uuid.UUID) bool {
	p.driver.Lock()
	defer p.driver.Unlock()
	return p.phase == gone && p.store.UUID() == id
}

// keysIn is how many keys a partition that was closed has in an area.
func (s *swapper) keysIn(a *Area) (keys int) {
	s.p.driver.Lock()
	defer s.p.driver.Unlock()
	if s.source != nil {
		for _, use := range s.source.Uses() {
			if use.Area == a.UUID() {
				keys += use.Keys
			}
		}
	}
	return keys
}

// Forget discards the records of a partition that was deleted.
func (a *Area) Forget(source uuid.UUID) {
	a.driver.Lock()
	defer a.driver.Unlock()
	a.machine.Forget(source)
	a.turn()
}

// attach connects a partition to the area. If the partition was open before and was closed with keys here, its records
// are looked for in the log. It must not be called during a turn.
//
// Errors: swap.ErrAttached, it is open, or some of its writes have not ended; those of swap.Search.Read.
func (a *Area) attach(l *swapper, source uuid.UUID) (swap.AreaRef, error) {
	if err := a.again(source); err != nil {
		return swap.AreaRef{}, fmt.Errorf("%s: %w", swap.Name(a.machine.UUID()), err)
	}
	a.driver.Lock()
	defer a.driver.Unlock()
	at, err := a.machine.Attach(source)
	if err != nil {
		return swap.AreaRef{}, fmt.Errorf("%s: %w", swap.Name(a.machine.UUID()), err)
	}
	for at.Source >= len(a.sources) {
		a.sources = append(a.sources, nil)
	}
	a.sources[at.Source] = l
	return swap.AreaRef{UUID: a.machine.UUID(), Log: a.machine.Log(), BlockSize: a.cfg.Drive.Device().Info().BlockSize,
		Attachment: at}, nil
}

// againPatience is how long attach waits for what a partition has sent that was closed.
const againPatience = 10 * time.Second

// again finds the records of a partition that was closed with keys in the area.
func (a *Area) again(source uuid.UUID) error {
	a.driver.Lock()
	at := slices.IndexFunc(a.machine.Sources(), func(s swap.SourceInfo) bool { return s.Attached && s.UUID == source })
	by := slices.Clone(a.sources)
	a.driver.Unlock()
	if at < 0 || !slices.ContainsFunc(by, func(l *swapper) bool { return l != nil && l.p.ended(source) }) {
		return nil // Attach says if that is wrong
	}
	env := a.driver.Env()
	var r *swap.Search
	for late := env.Now() + int64(againPatience); r == nil; {
		a.driver.Lock()
		r = a.machine.Search(source)
		a.driver.Unlock()
		if r == nil && (env.Now() > late || env.Wait(a.stopped, lookEvery)) {
			return fmt.Errorf("%w, and the area has not written all that it had from it", swap.ErrAttached)
		}
	}
	m := newMemory(a.cfg.Drive.Pool(), "swap log")
	defer m.free()
	read, _ := accessTo(a.cfg.Drive, a.cfg.Background, a.cfg.OffsetBytes)
	if err := r.Read(read, m.Alloc); err != nil {
		return err
	}
	a.driver.Lock()
	defer a.driver.Unlock()
	a.machine.Adopt(r)
	return nil
}

// load is how loaded the area and its drive are. It takes no lock: the turns of partitions call it.
func (a *Area) load() swap.Load {
	waiting, _ := driveLoad(a.cfg.Drive)
	return swap.Load{Waiting: waiting + int(a.waiting.Load()), Used: int(a.used.Load()), Failing: a.cfg.Retiring ||
		a.failing.Load()}
}

// areaMachine is the Area as its driver sees it.
type areaMachine Area

// Pending implements turn.Machine.
func (m *areaMachine) Pending() bool { return m.inbox.Pending() || m.done.Pending() }

// Turn implements turn.Machine.
func (m *areaMachine) Turn() { (*Area)(m).turn() }

// turn does all the work that can be done. Needs ownership.
func (a *Area) turn() {
	if a.gone {
		a.done.Take()
		a.backlog = a.inbox.Take(a.backlog)[:0]
		return
	}
	for n := a.done.Take(); n != nil; {
		d := n.Item
		n = n.Detach()
		d.Buf.B = nil
		a.machine.Complete(d.tag, d.Err)
	}
	a.backlog = a.inbox.Take(a.backlog)
	now := a.driver.Now()
	for again := true; again; {
		again = a.feed()
		a.machine.Turn(now, &a.acts)
		a.deliver()
	}
	a.used.Store(int64(a.machine.Used()))
	a.failing.Store(a.machine.Failing())
	a.waiting.Store(int64(len(a.backlog)))
	a.submit()
	if at := a.acts.WakeNS; at != 0 {
		a.driver.WakeAt(at)
	}
	if a.closing && a.machine.Idle() && len(a.backlog) == 0 {
		a.gone = true
		close(a.stopped)
	}
}

// forgetAppends drops the Appends of a partition that was given up and that the machine has not taken.
func (a *Area) forgetAppends(l *swapper) {
	a.driver.Lock()
	defer a.driver.Unlock()
	a.backlog = slices.DeleteFunc(a.inbox.Take(a.backlog),
		func(m areaMessage) bool { return !m.release && a.sources[m.append.Source] == l })
}

// feed gives the machine messages of the backlog, in order, as many as it takes, and reports whether it took any.
func (a *Area) feed() bool {
	n := 0
	for n < len(a.backlog) {
		m := &a.backlog[n]
		if m.release {
			a.machine.Release(m.append.Source, m.place)
		} else if !a.machine.Submit(&m.append) {
			break
		}
		n++
	}
	if n == 0 {
		return false
	}
	rest := copy(a.backlog, a.backlog[n:])
	clear(a.backlog[rest:])
	a.backlog = a.backlog[:rest]
	return true
}

// deliver hands the outcomes to their partitions.
func (a *Area) deliver() {
	for i := range a.acts.Outcomes {
		o := &a.acts.Outcomes[i]
		l := a.sources[o.Source]
		if l.outcomes.Put(outcome{area: a, Outcome: *o}) {
			a.driver.Kick(l)
		}
	}
	a.acts.Outcomes = a.acts.Outcomes[:0]
}

// submit hands the machine's I/Os to the drive.
func (a *Area) submit() {
	for i := range a.acts.IOs {
		q := &a.acts.IOs[i]
		d := &a.ios[q.Tag]
		d.Op, d.Offset, d.Len = q.Op, q.Offset.On(a.cfg.OffsetBytes), units.Bytes(len(q.Buf))
		d.Buf.B, d.Flags = q.Buf, 0
		if q.FUA {
			d.Flags = ssd.FUA
		}
		d.Tenant, d.Credited = q.Tenant, false
		if q.Background {
			d.Tenant = a.cfg.Background
		}
		a.batch.Add(&d.IO)
	}
	a.acts.IOs = a.acts.IOs[:0]
	a.cfg.Drive.Submit(&a.batch)
}
