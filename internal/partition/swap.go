package partition

import (
	"errors"
	"fmt"
	"slices"
	"sync/atomic"

	"jbofd/internal/kvstore"
	"jbofd/internal/kvstore/swap"
	"jbofd/internal/owner"
	"jbofd/internal/pipeline"
	"jbofd/internal/ssd"
)

// SwapConfig is a partition's part in swapping.
type SwapConfig struct {
	// Areas are those of the other SSDs of the box. A partition in whose areas there may be some of its newest values does
	// not open without them.
	Areas []*Area
	// Keys is how many keys may be out at once; 0: 16384, 1.3 MiB.
	Keys int
	// Policy says when; zero fields have their defaults.
	Policy swap.Policy
}

// lending is the driver of a partition's swap.Home.
type lending struct {
	p        *Partition
	home     *swap.Home
	areas    []*Area
	memory   memory // its own: the store takes from the other one while the Home is opened
	outcomes mailbox[outcome]
	done     atomic.Pointer[guestIO]

	// What follows belongs to the partition's owner.
	taken   []outcome
	ios     []*guestIO // by tag
	acts    swap.Actions
	loads   []swap.Load
	batches []owner.Batch // of the areas' SSDs
	touched []bool        // areas that have got messages
	wakeNS  int64
	// stopping: the keys are at home, or cannot come, and the store was told to stop.
	stopping bool
}

// outcome is an area's word for a partition.
type outcome struct {
	area *Area
	swap.Outcome
}

// guestIO is a device I/O of a Home.
type guestIO struct {
	owner.IO
	tag  uint32
	l    *lending
	next *guestIO
}

// Done implements owner.Sink.
func (d *guestIO) Done(*owner.IO) (kick bool) {
	for {
		old := d.l.done.Load()
		d.next = old
		if d.l.done.CompareAndSwap(old, d) {
			return old == nil
		}
	}
}

// Admitted implements owner.Sink; nothing is fetched.
func (d *guestIO) Admitted(*owner.IO) (kick bool) { panic("partition: nothing to fetch") }

// Kick implements owner.Sink.
func (d *guestIO) Kick() { d.l.p.run() }

// ReadBook reads the book of a partition that is not open, at an offset of a device.
//
// Errors: those of swap.LoadBook.
func ReadBook(o *owner.Owner, t pipeline.Tenant, offsetBytes int64) (*swap.Book, error) {
	m := &memory{}
	defer m.free()
	read, _ := accessTo(o, t, offsetBytes)
	return swap.LoadBook(read, m.alloc)
}

// DropArea makes a partition that is not open forget what it has in a swap area, if there may be something; see
// swap.Book.Drop.
//
// Errors: those of swap.LoadBook, and the device's.
func DropArea(o *owner.Owner, t pipeline.Tenant, offsetBytes int64, area [16]byte) (dropped bool, err error) {
	m := &memory{}
	defer m.free()
	read, write := accessTo(o, t, offsetBytes)
	book, err := swap.LoadBook(read, m.alloc)
	if err != nil || !book.Names(area) {
		return false, err
	}
	return true, book.Drop(area, write, m.alloc)
}

// openBook makes the book of a new partition, or refuses one that lacks an area before anything is written to it.
func openBook(cfg *Config, m *memory) error {
	read, write := accessTo(cfg.Owner, cfg.Background, cfg.OffsetBytes)
	if cfg.Store.Format {
		return swap.FormatBook(cfg.Store.UUID, write, m.alloc)
	}
	book, err := swap.LoadBook(read, m.alloc)
	if err != nil || book.Home != cfg.Store.UUID {
		return nil // the store says better what is wrong, and openLending whose book it is
	}
	for _, line := range book.Lines {
		if !slices.ContainsFunc(cfg.Swap.Areas, func(a *Area) bool { return a.UUID() == line.Area }) {
			return swap.Missing(line.Area)
		}
	}
	return nil
}

// openLending finds what the partition has elsewhere. The store is open, and nobody knows the partition yet.
func (p *Partition) openLending() error {
	book, err := ReadBook(p.owner, p.cfg.Background, p.cfg.OffsetBytes)
	if err != nil {
		return err
	}
	l := p.outside
	if l == nil {
		switch {
		case book.Home != p.store.UUID():
			return nil
		case len(book.Lines) > 0:
			return swap.Missing(book.Lines[0].Area)
		}
		_, write := accessTo(p.owner, p.cfg.Background, p.cfg.OffsetBytes)
		return book.Mend(write, p.memory.alloc)
	}
	info := p.owner.Device().Info()
	hc := swap.HomeConfig{
		Book: book, UUID: p.store.UUID(), BlockSize: info.BlockSize, FUA: info.VolatileCache && !p.cfg.Volatile, Keys: p.cfg.Swap.Keys, Policy: p.cfg.Swap.Policy,
		MaxValueBytes: min(swap.MaxValueBytes, p.store.MaxValueBytes()), Background: uint32(p.cfg.Background), Alloc: l.memory.alloc,
	}
	for _, a := range p.cfg.Swap.Areas {
		if a.cfg.Owner == p.owner {
			return fmt.Errorf("%w: %s is on the partition's own SSD", swap.ErrConfig, swap.Name(a.UUID()))
		}
		at, err := a.attach(l, hc.UUID)
		if err != nil {
			return err
		}
		hc.Areas = append(hc.Areas, at)
	}
	if l.home, err = swap.NewHome(hc); err != nil {
		return err
	}
	l.ios = make([]*guestIO, l.home.Tags())
	for i := range l.ios {
		d := &guestIO{l: l, tag: uint32(i)}
		d.Init(d, d.tag)
		l.ios[i] = d
	}
	l.loads, l.batches, l.touched = make([]swap.Load, len(l.areas)), make([]owner.Batch, len(l.areas)), make([]bool, len(l.areas))
	p.mu.Lock()
	p.lending = l
	p.turn() // what is out may have time to come home
	p.leave()
	return nil
}

// leaveOut keeps the keys that are not at home yet from coming, because time is up.
func (l *lending) leaveOut() {
	l.p.mu.Lock()
	l.home.Leave()
	l.p.turn()
	l.p.leave()
}

// ErrKeysOut: Close had no time for all keys to come home, or they could not. Nothing is lost.
var ErrKeysOut = errors.New("keys are in swap areas still; the next start finds them there")

// out is an error if keys are not at home. The partition is closed.
func (l *lending) out() error {
	l.p.mu.Lock()
	defer l.p.leave()
	if n := l.home.Stats().Keys; n > 0 {
		return fmt.Errorf("%d %w", n, ErrKeysOut)
	}
	return nil
}

// pending reports whether a turn has something to do.
func (l *lending) pending() bool { return l.outcomes.any.Load() || l.done.Load() != nil }

// drop forgets what comes too late.
func (l *lending) drop() {
	l.done.Store(nil)
	l.taken = l.outcomes.take(l.taken)[:0]
}

// begin hands what has happened to the Home, and how things are.
func (l *lending) begin(now int64) {
	for d := l.done.Swap(nil); d != nil; {
		next := d.next
		d.next, d.Buf.B = nil, nil
		l.home.Complete(d.tag, d.Err)
		d = next
	}
	l.taken = l.outcomes.take(l.taken)
	for i := range l.taken {
		l.home.Outcome(&l.taken[i].Outcome)
	}
	clear(l.taken)
	l.taken = l.taken[:0]
	waiting, held := busy(l.p.owner)
	if held == 0 { // else Requests may wait behind others that only wait for caps
		waiting += l.p.waiting.n
	}
	if l.home.Empty() && waiting < quietLoad {
		return
	}
	for i, a := range l.areas {
		l.loads[i] = a.load()
	}
	st := l.p.store.Stats()
	// What is out must find room at home: a tenth is kept for what the store keeps back.
	l.home.Observe(now, waiting, st.Chunks*st.ChunkBytes/10*9-st.LiveBytes, l.loads)
}

// busy is what an SSD has to do, and what is held back by caps besides, which says nothing of the SSD.
func busy(o *owner.Owner) (waiting, held int) {
	s := o.Stats()
	held = int(s.Held.Load())
	return max(int(s.Queued.Load()+s.Inflight.Load())-held, 0), held
}

// quietLoad is what an SSD can have before it without anybody's asking the others: less than any gap.
const quietLoad = 8

// feed gives the Home's requests to the store, and reports whether it has taken one.
func (l *lending) feed() (any bool) {
	var r kvstore.Request
	for !l.stopping && l.home.NextForStore(&r) {
		r.Tag |= ofHome
		if !l.p.store.Submit(&r) {
			break
		}
		l.home.TakenByStore()
		any = true
	}
	return any
}

// ofHome marks the tags of requests that the Home has made of its own or kept for a while.
const ofHome = 1 << 32

// turn lets the Home act.
func (l *lending) turn(now int64) {
	l.home.Turn(now, &l.acts)
	l.wakeNS = l.acts.WakeNS
	for i := range l.acts.Replies {
		l.p.reply(&l.acts.Replies[i])
	}
	for i := range l.acts.Releases {
		q := &l.acts.Releases[i]
		l.areas[q.Area].inbox.put(areaMessage{release: true, place: q.Place, append: swap.Append{Home: q.Home}})
		l.touched[q.Area] = true
	}
	for i := range l.acts.Appends {
		q := &l.acts.Appends[i]
		l.areas[q.Area].inbox.put(areaMessage{append: q.Append})
		l.touched[q.Area] = true
	}
	for i := range l.acts.IOs {
		q := &l.acts.IOs[i]
		d := l.ios[q.Tag]
		base, batch := l.p.cfg.OffsetBytes, &l.p.batch
		if q.Area >= 0 {
			base, batch = l.areas[q.Area].cfg.OffsetBytes, &l.batches[q.Area]
		}
		d.Op, d.Offset, d.Len, d.Buf.B, d.Flags = q.Op, base+q.Offset, int64(len(q.Buf)), q.Buf, 0
		if q.FUA {
			d.Flags = ssd.FUA
		}
		d.Tenant, d.Credited = pipeline.Tenant(q.Tenant), false
		batch.Add(&d.IO)
	}
	l.acts.Replies, l.acts.Releases, l.acts.IOs = l.acts.Replies[:0], l.acts.Releases[:0], l.acts.IOs[:0]
	clear(l.acts.Appends)
	l.acts.Appends = l.acts.Appends[:0]
}

// submit gives what the Home has asked for to the other SSDs.
func (l *lending) submit() {
	for i, a := range l.areas {
		a.cfg.Owner.Submit(&l.batches[i])
		if l.touched[i] {
			l.touched[i] = false
			a.run()
		}
	}
}

// stop tells the store to stop as soon as all keys are at home, or cannot come, and what is read in areas is answered.
func (l *lending) stop() {
	if !l.stopping && l.home.Answered() && (l.home.Drained() || l.home.Stuck()) {
		l.stopping = true
		l.p.store.Stop()
	}
}
