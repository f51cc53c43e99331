package daemon

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"jbofd/internal/config"
	"jbofd/internal/partition"
	"jbofd/internal/publish"
	"jbofd/internal/ssd/label"
	"jbofd/internal/units"
	"jbofd/internal/uuid"
)

// A key-value namespace that has another size in the configuration than on the drive is resized while it serves.
//
//	grow     the extent in the label ──> the store
//	shrink   the store ──> the freed end is erased ──> the extent in the label
//
// So the extent is never shorter than the partition, which says itself where it ends. A namespace whose sizes differ,
// because the daemon died in between, is served with the size of its store, and the next reload or start goes on.

// kvResize is a namespace that is to be resized.
type kvResize struct {
	// sub and ns are its places in the configuration.
	sub, ns int
	nqn     string
	cfg     config.Namespace
	ssd     *openSSD
	extent  label.Extent
	store   *publish.Store
}

func (r *kvResize) bytes() int64 { return int64(r.cfg.Size) }

func (r *kvResize) shrinks() bool { return r.bytes() < r.extent.LengthBytes }

// what names the change.
func (r *kvResize) what() string {
	return fmt.Sprintf("the resize of namespace %d of %s to %s", r.cfg.NSID, r.nqn, r.cfg.Size)
}

// resizes returns the namespaces that are to be resized: those whose extents have other sizes, or whose stores have,
// or are still being resized.
func (n *Node) resizes(cfg *config.Config) (all []*kvResize) {
	for i, sc := range cfg.Subsystems {
		for j, nc := range sc.Namespaces {
			if nc.Type != "kv" {
				continue
			}
			for _, d := range n.drives() {
				if d.name != nc.SSD || !d.serves() {
					continue
				}
				l := d.label.Label()
				k := l.FindNamespace(sc.NQN, nc.NSID)
				if k < 0 || l.Extents[k].Use != label.KV {
					continue
				}
				r := &kvResize{sub: i, ns: j, nqn: sc.NQN, cfg: nc, ssd: d, extent: l.Extents[k],
					store: n.publisher.Store(l.Extents[k].UUID)}
				if r.bytes() != r.extent.LengthBytes || r.store != nil && !r.store.HasSize(r.bytes()) {
					all = append(all, r)
				}
			}
		}
	}
	return all
}

// resize gives key-value namespaces the sizes that cfg says, one after the other, those that shrink first. It finds out
// before whether all of them can have it, and whether everything else that cfg says about extents is possible then.
// With mode trying that is all. pending says whether there was anything to resize.
//
// It releases n.reload while it resizes: see withoutReload. A namespace whose drive is withdrawn before its turn comes
// is left out, like one whose drive was not there at the beginning.
//
// Errors: what is in the way; errStopping. If something fails after that, the namespaces before keep their new sizes.
func (n *Node) resize(cfg *config.Config, mode applyMode) (pending bool, err error) {
	return n.resizeThose(cfg, mode, func() []*kvResize { return n.resizes(cfg) })
}

// resizeThose is resize of the namespaces that find returns.
func (n *Node) resizeThose(cfg *config.Config, mode applyMode, find func() []*kvResize) (pending bool, err error) {
	all := find()
	if len(all) == 0 {
		return false, nil
	}
	if err := n.checkResizes(cfg, all, mode); err != nil || mode == trying {
		return true, err
	}
	done := map[uuid.UUID]bool{}
	for r := nextResize(all, done); r != nil; r = nextResize(find(), done) {
		done[r.extent.UUID] = true
		n.resizedFor(cfg, r.extent.UUID)
		if err := n.resizeOne(r); err != nil {
			return true, cfg.NamespaceProblem(r.sub, r.ns, "size", fmt.Errorf("subsystem %s, namespace %d: "+
				"size %s: %w", r.nqn, r.cfg.NSID, r.cfg.Size, err))
		}
	}
	return true, nil
}

// nextResize returns one that is not done, those that shrink first, or nil.
func nextResize(all []*kvResize, done map[uuid.UUID]bool) (next *kvResize) {
	for _, r := range all {
		if !done[r.extent.UUID] && (next == nil || r.shrinks() && !next.shrinks()) {
			next = r
		}
	}
	return next
}

// checkResizes reports whether all resizes are possible.
func (n *Node) checkResizes(cfg *config.Config, all []*kvResize, mode applyMode) error {
	plan := labelPlan{}
	problem := func(i, j int, field string, err error) error {
		sc := cfg.Subsystems[i]
		return cfg.NamespaceProblem(i, j, field, fmt.Errorf("subsystem %s, namespace %d: %w", sc.NQN,
			sc.Namespaces[j].NSID, err))
	}
	for _, r := range all {
		err := r.check()
		if err == nil && r.shrinks() {
			err = plan.of(r.ssd).label.Shrink(r.extent.UUID, r.bytes())
		}
		if err != nil {
			return problem(r.sub, r.ns, "size", fmt.Errorf("size %s: %w", r.cfg.Size, err))
		}
	}
	for i, sc := range cfg.Subsystems {
		for j, nc := range sc.Namespaces {
			if _, _, err := n.namespace(plan, sc.NQN, nc, mode); err != nil {
				return problem(i, j, "", err)
			}
		}
	}
	return nil
}

// check reports whether the store has the new size for good, or can have it. A resize that was given up goes on when
// the drive answers: until it has ended the store can have no size, also not the one that SizeBytes says.
func (r *kvResize) check() error {
	if r.store == nil {
		return fmt.Errorf("the namespace has %s, and it is not open: its size can change only while it is served; "+
			"allowed: %s", config.Bytes(r.extent.LengthBytes), config.Bytes(r.extent.LengthBytes))
	}
	if r.store.HasSize(r.bytes()) {
		return nil
	}
	return r.store.CheckResize(r.bytes())
}

// resizeOne resizes a namespace.
func (n *Node) resizeOne(r *kvResize) error {
	if err := r.check(); err != nil { // again: its drive may have come back since
		return err
	}
	if err := n.publisher.Vacate(r.ssd.drive, n.stopping); err != nil { // the end may have been erased
		return fmt.Errorf("ssd %s: %w", r.ssd.name, err)
	}
	log := n.log.With("subsystem", r.nqn, "nsid", r.cfg.NSID, "ssd", r.cfg.SSD, "size", r.cfg.Size.String())
	log.Info("key-value namespace is being resized", "from", config.Bytes(r.store.SizeBytes()).String())
	within := r.extent.LengthBytes
	if r.bytes() > within {
		within = r.bytes()
		if err := r.ssd.label.Update(func(l *label.Label) error { return l.Grow(r.extent.UUID, within) }); err != nil {
			return fmt.Errorf("ssd %s: %w", r.ssd.name, err)
		}
	}
	if !r.store.HasSize(r.bytes()) {
		err := n.withoutReload(r.ssd, func() error {
			return r.store.Resize(partition.ResizeOptions{PartitionBytes: r.bytes(), ExtentBytes: within,
				Progress: n.resizing(log), Stop: n.stopping, Patience: n.resizePatience})
		})
		switch {
		case errors.Is(err, partition.ErrStopped):
			return errStopping
		case err != nil:
			return fmt.Errorf("ssd %s: %w", r.ssd.name, err)
		}
	}
	if r.shrinks() {
		if err := n.cutOff(r); err != nil {
			return fmt.Errorf("ssd %s: %w", r.ssd.name, err)
		}
	}
	log.Info("key-value namespace resized")
	return nil
}

// resizing returns what is told how far the shrinking of a namespace is.
func (n *Node) resizing(log *slog.Logger) func(done, of int64) {
	return func(done, of int64) {
		n.changing("emptied", units.Bytes(done), units.Bytes(of))
		extendTimeout(openingExtension)
		log.Info("key-value namespace is being resized", "emptied_bytes", done, "of_bytes", of)
	}
}

// cutOff erases the end of an extent that the store does not use any more, and frees it. The last block, which says
// where the partition ends, is erased when the label says so.
func (n *Node) cutOff(r *kvResize) error {
	const note = 4096
	if !r.store.HasSize(r.bytes()) { // it may still need what is to be erased, or grow into it
		return fmt.Errorf("%s has not ended; reload again when it has", r.what())
	}
	e, d := r.extent, r.ssd
	e.StartBytes, e.LengthBytes = e.StartBytes.Add(units.Bytes(r.bytes())), e.LengthBytes-r.bytes()-note
	if err := n.erase(d, e); err != nil {
		return fmt.Errorf("erase the end of namespace %d: %w", r.cfg.NSID, err)
	}
	if err := d.label.Update(func(l *label.Label) error { return l.Shrink(r.extent.UUID, r.bytes()) }); err != nil {
		return err
	}
	e.StartBytes, e.LengthBytes = e.EndBytes(), note
	return n.erase(d, e)
}

// sizesComponent is not ready if namespaces do not have the sizes that the configuration says.
const sizesComponent = "sizes of namespaces"

// resizedFor notes that a namespace is being resized for a configuration that is not in force. If its reload is refused
// the namespace may keep that size: reloadLocked forgets it when a configuration is accepted.
func (n *Node) resizedFor(cfg *config.Config, id uuid.UUID) {
	n.cfgMu.Lock()
	defer n.cfgMu.Unlock()
	if cfg != n.cfg {
		n.resizedAhead = append(n.resizedAhead, id)
	}
}

// owed returns the namespaces on a drive, or on all with "", whose sizes the configuration that is in force has changed
// while their drive was away, or no daemon ran. What a refused reload has resized is not owed its old size: only the
// next reload says what it is to have. n.cfg must not change.
func (n *Node) owed(ssd string) (all []*kvResize) {
	n.cfgMu.Lock()
	cfg, ahead := n.cfg, n.resizedAhead
	n.cfgMu.Unlock()
	for _, r := range n.resizes(cfg) {
		if (ssd == "" || r.cfg.SSD == ssd) && !slices.Contains(ahead, r.extent.UUID) {
			all = append(all, r)
		}
	}
	return all
}

// resizeReturned begins to resize the namespaces on a drive that is back, as far as they are owed it. Those on other
// drives stay as they are.
func (n *Node) resizeReturned(sc config.SSD) {
	if len(n.owed(sc.Name)) == 0 {
		n.clearSizes()
		return
	}
	n.hot.attending.Go(func() {
		if n.beginChange("the resize of namespaces of ssd "+sc.Name+", which is back") != nil {
			return
		}
		defer n.endChange()
		_, err := n.resizeThose(n.cfg, strict, func() []*kvResize { return n.owed(sc.Name) })
		if err == nil {
			err = n.apply(n.cfg, lenient)
		}
		if !n.resizeFailed(err) {
			n.clearSizes()
		}
	})
}

// clearSizes makes the component ready if no namespace is owed a size.
func (n *Node) clearSizes() {
	if len(n.owed("")) == 0 {
		n.tel.Health().Clear(sizesComponent)
	}
}

// resizeLate resizes the namespaces that the configuration has with another size than the drives, while hosts are
// served. The caller holds n.changes and n.reload, which are released at the end; a stop waits for that.
func (n *Node) resizeLate(cfg *config.Config) {
	defer n.endChange()
	n.resizeFailed(n.apply(cfg, strict))
}

// resizeFailed says so if a resize that no request waits for has failed.
func (n *Node) resizeFailed(err error) bool {
	if err != nil && !errors.Is(err, errStopping) {
		n.log.Error("a namespace does not have the size that is configured", "error", err)
		n.tel.Health().Block(sizesComponent, err.Error())
	}
	return err != nil
}
