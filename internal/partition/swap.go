package partition

import (
	"errors"
	"fmt"
	"slices"

	"jbofd/internal/drive"
	"jbofd/internal/kvstore"
	"jbofd/internal/kvstore/swap"
	"jbofd/internal/ssd"
	"jbofd/internal/tenant"
	"jbofd/internal/turn"
	"jbofd/internal/units"
	"jbofd/internal/uuid"
)

// SwapConfig says where a partition may write values when its own drive has too much to do.
type SwapConfig struct {
	// Areas are the swap areas of the node's other drives. A partition does not open without an area that may hold some
	// of its newest values.
	Areas []*Area
	// Keys is how many keys may be in swap areas at once; 0: 16384, which take 1.4 MiB of memory.
	Keys int
	// Policy says when to swap; zero fields have their defaults.
	Policy swap.Policy
}

// swapper runs a partition's swap.Source, in the turns of the partition. The Source decides which Puts go to the areas
// of other drives and moves their values back later.
type swapper struct {
	p        *Partition
	source   *swap.Source
	areas    []*Area
	memory   *memory // its own: the store's is in use by another goroutine while the Source is opened
	outcomes turn.Messages[outcome]
	done     turn.Mailbox[swapIO]

	// What follows belongs to the partition's owner.
	taken   []outcome
	ios     []*swapIO // by tag
	atDrive int       // how many of them drives have
	acts    swap.Actions
	loads   []swap.Load
	batches []drive.Batch // of the areas' SSDs
	wakeNS  int64
	// stopping: no key is in an area any more, or none of those that are can be moved back, and the store was told to
	// stop.
	stopping bool
}

// outcome is how an area has ended a partition's Append.
type outcome struct {
	area *Area
	swap.Outcome
}

// swapIO is a device I/O of a Source.
type swapIO struct {
	drive.IO
	tag  uint32
	l    *swapper
	node turn.Node[swapIO]
}

// Done implements drive.Sink.
func (s *swapIO) Done(*drive.IO) (kick bool) { return s.l.done.Push(&s.node) }

// Admitted implements drive.Sink; nothing is fetched.
func (s *swapIO) Admitted(*drive.IO) (kick bool) { panic("partition: nothing to fetch") }

// Kick implements drive.Sink.
func (s *swapIO) Kick() { s.l.p.driver.Run() }

// Kick implements turn.Kicker: an area has put something into outcomes.
func (s *swapper) Kick() { s.p.driver.Run() }

// ReadManifest reads the manifest of a partition that is not open, at an offset of a device.
//
// Errors: those of swap.LoadManifest.
func ReadManifest(o *drive.Drive, t tenant.ID, offsetBytes units.DriveOffset) (*swap.Manifest, error) {
	m := newMemory(o.Pool(), "swap manifest")
	defer m.free()
	read, _ := accessTo(o, t, offsetBytes)
	return swap.LoadManifest(read, m.Alloc)
}

// DropArea makes a partition that is not open forget what it has in a swap area, if there may be something; see
// swap.Manifest.Drop.
//
// Errors: those of swap.LoadManifest, and the device's.
func DropArea(o *drive.Drive, t tenant.ID, offsetBytes units.DriveOffset, area uuid.UUID) (dropped bool, err error) {
	m := newMemory(o.Pool(), "swap manifest")
	defer m.free()
	read, write := accessTo(o, t, offsetBytes)
	manifest, err := swap.LoadManifest(read, m.Alloc)
	if err != nil || !manifest.Names(area) {
		return false, err
	}
	return true, manifest.Drop(area, write, m.Alloc)
}

// openManifest writes the swap manifest of a new partition. An existing partition that lacks an area is refused before
// anything is written to it.
func openManifest(cfg *Config, m *memory) error {
	read, write := accessTo(cfg.Drive, cfg.Background, cfg.OffsetBytes)
	if cfg.Store.Format {
		return swap.FormatManifest(cfg.Store.UUID, write, m.Alloc)
	}
	manifest, err := swap.LoadManifest(read, m.Alloc)
	if err != nil || manifest.Source != cfg.Store.UUID {
		return nil // opening the store says better what is wrong; openSwapper says whose manifest it is
	}
	for _, line := range manifest.Areas {
		if !slices.ContainsFunc(cfg.Swap.Areas, func(a *Area) bool { return a.UUID() == line.Area }) {
			return swap.Missing(line.Area)
		}
	}
	return nil
}

// openSwapper finds the partition's values in swap areas. The store is open, and no Request comes yet.
func (p *Partition) openSwapper() error {
	manifest, err := ReadManifest(p.drive, p.cfg.Background, p.cfg.OffsetBytes)
	if err != nil {
		return err
	}
	l := p.swapper
	if l == nil {
		switch {
		case manifest.Source != p.store.UUID():
			return nil
		case len(manifest.Areas) > 0:
			return swap.Missing(manifest.Areas[0].Area)
		}
		_, write := accessTo(p.drive, p.cfg.Background, p.cfg.OffsetBytes)
		return manifest.Repair(write, p.memory.Alloc)
	}
	info := p.drive.Device().Info()
	hc := swap.SourceConfig{
		Manifest: manifest, UUID: p.store.UUID(), BlockSize: info.BlockSize, FUA: info.VolatileCache && !p.cfg.Volatile,
		Keys: p.cfg.Swap.Keys, Policy: p.cfg.Swap.Policy,
		MaxValueBytes: min(swap.MaxValueBytes, p.store.MaxValueBytes()), Background: p.cfg.Background,
		Versions: p.store, Alloc: l.memory.Alloc,
	}
	for _, a := range p.cfg.Swap.Areas {
		if a.cfg.Drive == p.drive {
			return fmt.Errorf("%w: %s is on the partition's own SSD", swap.ErrConfig, swap.Name(a.UUID()))
		}
		at, err := a.attach(l, hc.UUID)
		if err != nil {
			return err
		}
		hc.Areas = append(hc.Areas, at)
	}
	if l.source, err = swap.NewSource(hc); err != nil {
		return err
	}
	l.ios = make([]*swapIO, l.source.Tags())
	for i := range l.ios {
		d := &swapIO{l: l, tag: uint32(i)}
		d.node.Item = d
		d.Init(d, d.tag)
		l.ios[i] = d
	}
	l.loads, l.batches = make([]swap.Load, len(l.areas)), make([]drive.Batch, len(l.areas))
	p.driver.Lock()
	p.swapping = l
	p.turn() // values may be moved back at once
	p.driver.Unlock()
	return nil
}

// stopDraining ends the moving of values back to the store, because the time for closing is over.
func (s *swapper) stopDraining() {
	s.p.driver.Lock()
	s.source.AbandonDrain()
	s.p.turn()
	s.p.driver.Unlock()
}

// ErrKeysSwapped: Close had no time to move all values back from swap areas, or could not. Nothing is lost.
var ErrKeysSwapped = errors.New("keys are still in swap areas; the next start finds them there")

// keysLeft returns ErrKeysSwapped if keys are in swap areas. The partition is closed.
func (s *swapper) keysLeft() error {
	s.p.driver.Lock()
	defer s.p.driver.Unlock()
	if n := s.source.Stats().Keys; n > 0 {
		return fmt.Errorf("%d %w", n, ErrKeysSwapped)
	}
	return nil
}

// pending reports whether a turn has something to do.
func (s *swapper) pending() bool { return s.outcomes.Pending() || s.done.Pending() }

// discard discards what comes after the end of the partition.
func (s *swapper) discard() {
	for n := s.done.Take(); n != nil; n = n.Detach() {
		s.atDrive--
	}
	s.taken = s.outcomes.Take(s.taken)[:0]
}

// begin tells the Source what has ended, and how loaded the drives are.
func (s *swapper) begin(now int64) {
	for n := s.done.Take(); n != nil; {
		d := n.Item
		n = n.Detach()
		s.atDrive--
		d.Buf.B = nil
		s.source.Complete(d.tag, d.Err)
	}
	s.taken = s.outcomes.Take(s.taken)
	for i := range s.taken {
		s.source.Outcome(&s.taken[i].Outcome)
	}
	clear(s.taken)
	s.taken = s.taken[:0]
	waiting, held := driveLoad(s.p.drive)
	if held == 0 { // otherwise the Requests may wait for nothing but a cap
		waiting += s.p.queues[getQueue].n + s.p.queues[putQueue].n + s.p.queues[deleteQueue].n
	}
	if s.source.Empty() && waiting < lowLoad {
		return
	}
	for i, a := range s.areas {
		s.loads[i] = a.load()
	}
	st := s.p.store.Stats()
	// Swapped values need room in the store when they are moved back. A tenth is left to its reserve.
	s.source.Observe(now, waiting, st.Chunks*st.ChunkBytes/10*9-st.LiveBytes, s.loads)
}

// driveLoad returns how many IOs a drive has, and how many others are held by caps, which says nothing of the drive's
// load.
func driveLoad(o *drive.Drive) (waiting, held int) {
	s := o.Stats()
	held = int(s.Held.Load())
	return max(int(s.Queued.Load()+s.Inflight.Load())-held, 0), held
}

// lowLoad is a number of waiting IOs below which no policy swaps, so that the other drives' load need not be read.
const lowLoad = 8

// feed gives the Source's requests to the store, and reports whether the store has taken one.
func (s *swapper) feed() (any bool) {
	var r kvstore.Request
	for !s.stopping && s.source.NextForStore(&r) {
		r.Tag |= sourceTag
		if !s.p.store.Submit(&r) {
			break
		}
		s.source.TakenByStore()
		any = true
	}
	return any
}

// sourceTag marks the tags of requests that the Source has made itself or has delayed.
const sourceTag = 1 << 32

// turn runs the Source.
func (s *swapper) turn(now int64) {
	s.source.Turn(now, &s.acts)
	s.wakeNS = s.acts.WakeNS
	for i := range s.acts.Replies {
		s.p.reply(&s.acts.Replies[i])
	}
	for i := range s.acts.Releases {
		q := &s.acts.Releases[i]
		s.send(q.Area, areaMessage{release: true, place: q.Place, append: swap.Append{Source: q.Source}})
	}
	for i := range s.acts.Appends {
		q := &s.acts.Appends[i]
		s.send(q.Area, areaMessage{append: q.Append})
	}
	for i := range s.acts.IOs {
		q := &s.acts.IOs[i]
		d := s.ios[q.Tag]
		base, batch := s.p.cfg.OffsetBytes, &s.p.batch
		if q.Area >= 0 {
			base, batch = s.areas[q.Area].cfg.OffsetBytes, &s.batches[q.Area]
		}
		d.Op, d.Offset, d.Len, d.Buf.B, d.Flags = q.Op, q.Offset.On(base), units.Bytes(len(q.Buf)), q.Buf, 0
		if q.FUA {
			d.Flags = ssd.FUA
		}
		d.Tenant, d.Credited, d.Extent = q.Tenant, false, s.p.pass
		batch.Add(&d.IO)
	}
	s.atDrive += len(s.acts.IOs)
	s.acts.Replies, s.acts.Releases, s.acts.IOs = s.acts.Replies[:0], s.acts.Releases[:0], s.acts.IOs[:0]
	clear(s.acts.Appends)
	s.acts.Appends = s.acts.Appends[:0]
}

// submit hands the Source's I/Os in swap areas to their drives.
func (s *swapper) submit() {
	for i, a := range s.areas {
		a.cfg.Drive.Submit(&s.batches[i])
	}
}

// send puts a message into an area's inbox. The area runs after this turn.
func (s *swapper) send(area int, m areaMessage) {
	if a := s.areas[area]; a.inbox.Put(m) {
		s.p.driver.Kick(a)
	}
}

// stop tells the store to stop once every key has been moved back, or none can be, and reads from areas are answered.
func (s *swapper) stop() {
	if !s.stopping && s.source.NoRequests() && (s.source.Drained() || s.source.ReturnBlocked()) {
		s.stopping = true
		s.p.store.Stop()
	}
}
