package partition

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"jbofd/internal/kvstore/swap"
	"jbofd/internal/owner"
	"jbofd/internal/pipeline"
	"jbofd/internal/ssd"
)

// AreaConfig describes an Area.
type AreaConfig struct {
	// Owner is the SSD's, OffsetBytes and LenBytes are where on it the area is, in whole blocks.
	Owner                 *owner.Owner
	OffsetBytes, LenBytes int64
	// Background is the tenant that pays for superblocks; records are paid for by those whose they are.
	Background pipeline.Tenant
	// Volatile is as in Config: then what is swapped is lost with the power, too.
	Volatile bool
	// Retiring: the area takes no new keys. Those in it are served until they have come home.
	Retiring bool
	// Format makes a new area, whatever is there. UUID and Salt are for it; the salt should be random and secret.
	Format bool
	UUID   [16]byte
	Salt   uint64
}

// Area is a swap area at work: a part of an SSD that takes PUTs of partitions on other SSDs when those have too much to
// do. It is opened before the partitions that use it and closed after them. Its methods may be called from any
// goroutine.
type Area struct {
	cfg    AreaConfig
	memory *memory
	inbox  mailbox[areaMessage]
	done   atomic.Pointer[areaIO]
	due    atomic.Bool
	// used is the part of the log in use, in thousandths, waiting what has no place in a group yet.
	used, waiting atomic.Int64
	failing       atomic.Bool

	// mu is ownership: everything below belongs to who holds it.
	mu      sync.Mutex
	machine *swap.Area
	backlog []areaMessage // in order
	homes   []*lending    // by the machine's number
	ios     [swap.AreaTags]areaIO
	acts    swap.AreaActions
	batch   owner.Batch
	kicks   []*lending
	timer   *time.Timer
	timerNS int64
	start   time.Time
	closing bool
	stopped chan struct{}
	gone    bool
}

// areaMessage is an Append or, if release is set, a Release.
type areaMessage struct {
	append  swap.Append
	release bool
	place   uint64
}

// mailbox brings messages from one machine's goroutine to another's.
type mailbox[T any] struct {
	any atomic.Bool
	// mu guards items.
	mu    sync.Mutex
	items []T
}

func (m *mailbox[T]) put(items ...T) {
	m.mu.Lock()
	m.items = append(m.items, items...)
	m.mu.Unlock()
	m.any.Store(true)
}

// take appends all there is to dst.
func (m *mailbox[T]) take(dst []T) []T {
	if !m.any.Swap(false) {
		return dst
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	dst = append(dst, m.items...)
	clear(m.items)
	m.items = m.items[:0]
	return dst
}

// areaIO is a device I/O of an Area.
type areaIO struct {
	owner.IO
	tag  uint32
	a    *Area
	next *areaIO
}

// Done implements owner.Sink.
func (d *areaIO) Done(*owner.IO) (kick bool) {
	for {
		old := d.a.done.Load()
		d.next = old
		if d.a.done.CompareAndSwap(old, d) {
			return old == nil
		}
	}
}

// Admitted implements owner.Sink; nothing is fetched.
func (d *areaIO) Admitted(*owner.IO) (kick bool) { panic("partition: nothing to fetch") }

// Kick implements owner.Sink.
func (d *areaIO) Kick() { d.a.run() }

// waitIO is a device I/O that somebody waits for.
type waitIO struct {
	owner.IO
	done chan struct{}
}

// Done implements owner.Sink.
func (w *waitIO) Done(*owner.IO) (kick bool) {
	close(w.done)
	return false
}

// Admitted implements owner.Sink; nothing is fetched.
func (w *waitIO) Admitted(*owner.IO) (kick bool) { panic("partition: nothing to fetch") }

// Kick implements owner.Sink.
func (w *waitIO) Kick() {}

// doAndWait does one device I/O.
func doAndWait(o *owner.Owner, t pipeline.Tenant, op pipeline.Op, flags ssd.Flags, offset int64, buf []byte) error {
	w := &waitIO{done: make(chan struct{})}
	w.Init(w, 0)
	w.Op, w.Flags, w.Offset, w.Len, w.Buf.B, w.Tenant = op, flags, offset, int64(len(buf)), buf, t
	var b owner.Batch
	b.Add(&w.IO)
	o.Submit(&b)
	<-w.done
	return w.Err
}

// accessTo returns how to read and to write durably at an offset of a device, for openings.
func accessTo(o *owner.Owner, t pipeline.Tenant, base int64) (swap.Read, swap.Write) {
	read := func(offset int64, buf []byte) error {
		return doAndWait(o, t, pipeline.Read, 0, base+offset, buf)
	}
	write := func(offset int64, buf []byte) error {
		flags := ssd.Flags(0)
		if o.Device().Info().VolatileCache {
			flags = ssd.FUA
		}
		return doAndWait(o, t, pipeline.Write, flags, base+offset, buf)
	}
	return read, write
}

// OpenArea opens a swap area, or formats it, and finds what partitions have there.
//
// Errors: those of swap.OpenArea and swap.FormatArea.
func OpenArea(cfg AreaConfig) (*Area, error) {
	info := cfg.Owner.Device().Info()
	m := &memory{}
	mc := swap.AreaConfig{AreaBytes: cfg.LenBytes, BlockSize: info.BlockSize, FUA: info.VolatileCache && !cfg.Volatile, Alloc: m.alloc}
	read, write := accessTo(cfg.Owner, cfg.Background, cfg.OffsetBytes)
	if cfg.Format {
		if err := swap.FormatArea(mc, cfg.UUID, cfg.Salt, write); err != nil {
			m.free()
			return nil, err
		}
	}
	machine, err := swap.OpenArea(mc, read)
	if err != nil {
		m.free()
		return nil, err
	}
	a := &Area{cfg: cfg, memory: m, machine: machine, start: time.Now(), stopped: make(chan struct{})}
	for i := range a.ios {
		d := &a.ios[i]
		d.a, d.tag = a, uint32(i)
		d.Init(d, d.tag)
	}
	a.timer = time.AfterFunc(time.Hour, a.ring)
	a.timer.Stop()
	a.used.Store(int64(machine.Used()))
	return a, nil
}

// errAreaBusy: see Close.
var errAreaBusy = errors.New("the last write of the swap area is not done")

// Close ends the area after what is under way, waiting for that at most as long as patience. Its partitions must be
// closed. Idempotent.
//
// Errors: it has taken too long; nothing is lost.
func (a *Area) Close(patience time.Duration) error {
	a.mu.Lock()
	if a.closing {
		a.leave()
		return nil
	}
	a.closing = true
	a.machine.Stop()
	a.turn()
	a.leave()
	t := time.NewTimer(patience)
	defer t.Stop()
	select {
	case <-a.stopped:
		a.timer.Stop()
		a.memory.free()
		return nil
	case <-t.C:
	}
	a.mu.Lock()
	defer a.leave()
	a.timer.Stop()
	if !a.gone { // the device may still write from our memory: it is left to the end of the process
		a.gone = true
		return fmt.Errorf("%w after %v", errAreaBusy, patience)
	}
	return nil
}

// UUID is the area's.
func (a *Area) UUID() [16]byte { return a.machine.UUID() }

// Stats returns the area's counters.
func (a *Area) Stats() swap.AreaStats {
	a.mu.Lock()
	defer a.leave()
	return a.machine.Stats()
}

// Homes returns the partitions with records here that may count, or that are attached.
func (a *Area) Homes() []swap.AreaHome {
	a.mu.Lock()
	defer a.leave()
	return a.machine.Homes()
}

// Forget says that a partition is gone for good, with what it has here. It is not open.
func (a *Area) Forget(home [16]byte) {
	a.mu.Lock()
	defer a.leave()
	a.machine.Forget(home)
	a.turn()
}

// attach brings a partition to the area.
func (a *Area) attach(l *lending, home [16]byte) (swap.HomeArea, error) {
	a.mu.Lock()
	defer a.leave()
	at, err := a.machine.Attach(home)
	if err != nil {
		return swap.HomeArea{}, fmt.Errorf("%s: %w", swap.Name(a.machine.UUID()), err)
	}
	for at.Home >= len(a.homes) {
		a.homes = append(a.homes, nil)
	}
	a.homes[at.Home] = l
	return swap.HomeArea{UUID: a.machine.UUID(), Log: a.machine.Log(), BlockSize: a.cfg.Owner.Device().Info().BlockSize, Attachment: at}, nil
}

// load is what the area's SSD has to do.
func (a *Area) load() swap.Load {
	waiting, _ := busy(a.cfg.Owner)
	return swap.Load{Waiting: waiting + int(a.waiting.Load()), Used: int(a.used.Load()), Failing: a.cfg.Retiring || a.failing.Load()}
}

func (a *Area) ring() {
	a.due.Store(true)
	a.run()
}

func (a *Area) pending() bool { return a.inbox.any.Load() || a.done.Load() != nil || a.due.Load() }

// run takes turns until there is nothing to do or somebody else has the area.
func (a *Area) run() {
	for turns := 0; a.pending(); turns++ {
		if turns == maxTurns {
			go a.run()
			return
		}
		if !a.mu.TryLock() {
			return
		}
		a.turn()
		a.unlock()
	}
}

// leave ends ownership and sees to what was brought meanwhile.
func (a *Area) leave() {
	a.unlock()
	a.run()
}

// unlock ends ownership and lets the partitions look at their outcomes.
func (a *Area) unlock() {
	var few [16]*lending
	kicks := append(few[:0], a.kicks...)
	clear(a.kicks)
	a.kicks = a.kicks[:0]
	a.mu.Unlock()
	for _, l := range kicks {
		l.p.run()
	}
}

// turn brings everything forward that can go. Called with ownership.
func (a *Area) turn() {
	if a.due.Swap(false) {
		a.timerNS = 0
	}
	if a.gone {
		a.done.Store(nil)
		a.backlog = a.inbox.take(a.backlog)[:0]
		return
	}
	for d := a.done.Swap(nil); d != nil; {
		next := d.next
		d.next, d.Buf.B = nil, nil
		a.machine.Complete(d.tag, d.Err)
		d = next
	}
	a.backlog = a.inbox.take(a.backlog)
	now := int64(time.Since(a.start))
	for again := true; again; {
		again = a.feed()
		a.machine.Turn(now, &a.acts)
		a.deliver()
	}
	a.used.Store(int64(a.machine.Used()))
	a.failing.Store(a.machine.Failing())
	a.waiting.Store(int64(len(a.backlog)))
	a.submit()
	if at := a.acts.WakeNS; at != 0 && (a.timerNS == 0 || at < a.timerNS) {
		a.timerNS = at
		a.timer.Reset(time.Duration(max(at-now, 0)))
	}
	if a.closing && a.machine.Idle() && len(a.backlog) == 0 {
		a.gone = true
		close(a.stopped)
	}
}

// feed gives the machine what it takes, in order, and reports whether it has taken something.
func (a *Area) feed() bool {
	n := 0
	for n < len(a.backlog) {
		m := &a.backlog[n]
		if m.release {
			a.machine.Release(m.append.Home, m.place)
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
		l := a.homes[o.Home]
		l.outcomes.put(outcome{area: a, Outcome: *o})
		known := false
		for _, k := range a.kicks {
			known = known || k == l
		}
		if !known {
			a.kicks = append(a.kicks, l)
		}
	}
	a.acts.Outcomes = a.acts.Outcomes[:0]
}

// submit gives the machine's I/Os to the SSD.
func (a *Area) submit() {
	for i := range a.acts.IOs {
		q := &a.acts.IOs[i]
		d := &a.ios[q.Tag]
		d.Op, d.Offset, d.Len, d.Buf.B, d.Flags = q.Op, a.cfg.OffsetBytes+q.Offset, int64(len(q.Buf)), q.Buf, 0
		if q.FUA {
			d.Flags = ssd.FUA
		}
		d.Tenant, d.Credited = pipeline.Tenant(q.Tenant), false
		if q.Background {
			d.Tenant = a.cfg.Background
		}
		a.batch.Add(&d.IO)
	}
	a.acts.IOs = a.acts.IOs[:0]
	a.cfg.Owner.Submit(&a.batch)
}
