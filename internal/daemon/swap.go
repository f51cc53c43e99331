package daemon

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"
	"sync"
	"time"

	"jbofd/internal/admin"
	"jbofd/internal/config"
	"jbofd/internal/kvstore"
	"jbofd/internal/kvstore/swap"
	"jbofd/internal/nvmeof/target"
	"jbofd/internal/partition"
	"jbofd/internal/pipeline"
	"jbofd/internal/ssd/label"
	"jbofd/internal/telemetry"
	"jbofd/internal/uuid"
)

// closeAreaTimeout is how long a swap area may take for its last write.
const closeAreaTimeout = 200 * time.Millisecond

// swapArea is a swap area of a drive that is served.
type swapArea struct {
	// Area is nil if it could not be opened; err says why.
	*partition.Area
	err    error
	ssd    *openSSD
	extent label.Extent
	// retiring: the configuration does not have the area any more. It serves the keys in it until they have been
	// returned.
	retiring bool
	fresh    bool
}

// swapAreas are those of all drives. They are opened before the stores and closed after them, and change under
// Node.reload only.
type swapAreas struct {
	mu  sync.Mutex
	all []*swapArea
}

// component is what the area is called where the daemon says what is not ready.
func (a *swapArea) component() string { return "kv_swap of ssd " + a.ssd.name }

// openAreas opens the swap areas in the drives' labels, and creates those that the configuration has and no label does.
// An area that the configuration does not have, or has with another size, stays in service until it is empty. An area
// that cannot be opened is left out, with an error in the log. Namespaces that may have keys in it do not open then;
// the others do.
//
// Errors: a drive has no room for a new area.
func (n *Node) openAreas() error {
	plan := labelPlan{}
	var found []*swapArea
	for i, d := range n.drives() {
		if !d.serves() {
			continue
		}
		want := int64(n.cfg.SSDs[i].KVSwap)
		for _, e := range d.label.Label().Extents {
			if e.Use == label.Swap {
				a := &swapArea{ssd: d, extent: e, retiring: e.LengthBytes != want}
				if !a.retiring {
					want = 0
				}
				found = append(found, a)
			}
		}
		if want == 0 {
			continue
		}
		p := plan.of(d)
		e, err := p.label.Allocate(label.Extent{UUID: label.NewUUID(), LengthBytes: want, Use: label.Swap})
		if err != nil {
			return fmt.Errorf("ssd %s: kv_swap %s: %w", d.name, n.cfg.SSDs[i].KVSwap, err)
		}
		p.changed = true
		found = append(found, &swapArea{ssd: d, extent: e, fresh: true})
	}
	var all sync.WaitGroup
	for _, a := range found {
		all.Go(func() { a.err = a.open() })
	}
	all.Wait()
	for _, a := range found {
		if a.fresh && a.err == nil { // only now: a crash before this leaves free space, not an unformatted area
			a.err = labelPlan{a.ssd: plan[a.ssd]}.commit()
		}
		log := n.log.With("ssd", a.ssd.name, "area", a.extent.UUID.String(), "size",
			config.Bytes(a.extent.LengthBytes).String())
		if a.err != nil {
			n.tel.Health().Block(a.component(), a.err.Error())
			log.Error("swap area left out", "error", a.err)
			if a.fresh {
				a.close(n)
				continue
			}
		} else {
			log.Info("swap area opened", "new", a.fresh, "retiring", a.retiring, "used",
				config.Bytes(a.Stats().LiveBytes).String())
		}
		n.areas.all = append(n.areas.all, a)
	}
	return nil
}

// open opens the area, or formats it if it is new.
func (a *swapArea) open() error {
	var salt [8]byte
	if _, err := rand.Read(salt[:]); err != nil {
		return err
	}
	a.ssd.drive.SetTenant(target.Background, pipeline.Settings{Weight: a.ssd.backgroundWeight})
	opened, err := partition.OpenArea(partition.AreaConfig{
		Drive: a.ssd.drive, OffsetBytes: a.extent.StartBytes, LenBytes: a.extent.LengthBytes,
		Background: target.Background,
		Retiring:   a.retiring, Format: a.fresh, UUID: a.extent.UUID, Salt: binary.LittleEndian.Uint64(salt[:]),
	})
	if err != nil {
		return err
	}
	a.Area = opened
	return nil
}

// close closes the area. No store uses it any more.
func (a *swapArea) close(n *Node) {
	if a.Area == nil {
		return
	}
	if err := a.Close(closeAreaTimeout); err != nil {
		n.log.Error("swap area not closed cleanly: it recovers at the next start, no acknowledged write is lost", "ssd",
			a.ssd.name, "error", err)
	}
}

// closeAreas closes all swap areas.
func (n *Node) closeAreas() {
	var all sync.WaitGroup
	for _, a := range n.swapAreas() {
		all.Go(func() { a.close(n) })
	}
	all.Wait()
	n.areas.mu.Lock()
	n.areas.all = nil
	n.areas.mu.Unlock()
}

// swapAreas returns a copy of the list of swap areas.
func (n *Node) swapAreas() []*swapArea {
	n.areas.mu.Lock()
	defer n.areas.mu.Unlock()
	return slices.Clone(n.areas.all)
}

// lenders returns the open areas that a namespace on d may use: those of other drives.
func (n *Node) lenders(d *openSSD) (all []*partition.Area) {
	for _, a := range n.swapAreas() {
		if a.Area != nil && a.ssd != d {
			all = append(all, a.Area)
		}
	}
	return all
}

// addHint adds to the error of a store that was not opened what an operator can do, if a swap area or a loss is the
// cause. A partition of the cluster is not opened without what it has lost: what it told the cluster of its ranges
// would not be true, and other nodes may have everything.
func (n *Node) addHint(err error, u uuid.UUID, replicated bool) error {
	if loss := (*kvstore.LossError)(nil); errors.As(err, &loss) {
		if replicated {
			return fmt.Errorf("%w; look whether the drive does better at another start; if not, %w", err, errReplicated)
		}
		return fmt.Errorf("%w; jbofctl kv open %v opens it without them", err, u)
	}
	if errors.Is(err, swap.ErrAttached) { // what it has sent to an area before has not ended
		return fmt.Errorf("%w: try again by a reload", err)
	}
	if !errors.Is(err, swap.ErrManifest) {
		return err
	}
	var away []string
	for _, d := range n.drives() {
		if !d.serves() {
			away = append(away, "ssd "+d.name)
		}
	}
	for _, a := range n.swapAreas() {
		if a.err != nil {
			away = append(away, a.component())
		}
	}
	if len(away) == 0 {
		away = []string{"none of the configuration"}
	}
	return fmt.Errorf("%w (not served: %s); restart with the drive that has it, or see jbofctl swap", err,
		strings.Join(away, ", "))
}

// sourcesOf returns the namespaces that have or may have keys in an area, the area's sources. It also reports whether
// the list is complete: it is not if a drive is not served or a namespace is damaged, since their manifests are
// unknown.
func (n *Node) sourcesOf(u uuid.UUID, a *swapArea) (sources []admin.SwapSource, sure bool) {
	sources, sure = []admin.SwapSource{}, true
	found := map[[16]byte]int{} // number of keys by UUID of sources that are not open
	if a != nil && a.Area != nil {
		for _, h := range a.Sources() {
			if !h.Attached {
				found[h.UUID] = h.Keys
			}
		}
	}
	for _, d := range n.drives() {
		if !d.serves() {
			sure = false
		}
		if d.label == nil {
			continue
		}
		for _, e := range d.label.Label().Extents {
			if _, has := found[e.UUID]; e.Use != label.KV || !d.serves() && !has {
				continue
			}
			h := admin.SwapSource{UUID: e.UUID.String(), SubNQN: e.NQN, NSID: e.NSID, Keys: found[e.UUID]}
			delete(found, e.UUID)
			if s := n.publisher.Store(e.UUID); s != nil {
				h.Open = true
				for _, use := range s.Uses() {
					if use.Area == u && use.Listed {
						h.Keys = use.Keys
						sources = append(sources, h)
					}
				}
				continue
			}
			if !d.serves() {
				sources = append(sources, h)
				continue
			}
			book, err := partition.ReadManifest(d.drive, target.Background, e.StartBytes)
			switch {
			case err != nil:
				sure = false
			case book.Names(u):
				sources = append(sources, h)
			}
		}
	}
	for source, keys := range found {
		sources = append(sources, admin.SwapSource{UUID: uuid.UUID(source).String(), Keys: keys})
	}
	return sources, sure
}

// freeAreas frees the areas that are not configured any more and are empty.
func (n *Node) freeAreas() {
	for _, a := range n.swapAreas() {
		if !a.retiring || a.Area == nil {
			continue
		}
		if sources, sure := n.sourcesOf(a.extent.UUID, a); len(sources) > 0 || !sure {
			continue
		}
		if err := n.freeArea(a); err != nil {
			n.log.Error("swap area not freed", "ssd", a.ssd.name, "area", a.extent.UUID.String(), "error", err)
		}
	}
}

// freeArea erases an area that no namespace needs and frees its extent.
func (n *Node) freeArea(a *swapArea) error {
	n.areas.mu.Lock()
	n.areas.all = slices.DeleteFunc(n.areas.all, func(o *swapArea) bool { return o == a })
	n.areas.mu.Unlock()
	a.close(n)
	if err := n.erase(a.ssd, a.extent); err != nil {
		return fmt.Errorf("ssd %s: erase swap area: %w", a.ssd.name, err)
	}
	if err := a.ssd.label.Update(func(l *label.Label) error { return l.Free(a.extent.UUID) }); err != nil {
		return fmt.Errorf("ssd %s: %w", a.ssd.name, err)
	}
	if a.err != nil {
		n.tel.Health().Clear(a.component())
	}
	n.log.Info("swap area freed", "ssd", a.ssd.name, "area", a.extent.UUID.String(), "size",
		config.Bytes(a.extent.LengthBytes).String())
	return nil
}

// DiscardSwap discards a swap area that is damaged, missing or not configured any more, with all keys in it. Namespaces
// that did not open for want of the area lose the keys that they had there, and are opened.
//
// Errors: the area is in use, or no drive and no manifest has it; errors of the drives.
func (n *Node) DiscardSwap(name string) error {
	u, err := uuid.Parse(name)
	if err != nil {
		return fmt.Errorf("uuid %q: %w", name, err)
	}
	if err := n.beginChange("the discarding of swap area " + name); err != nil {
		return err
	}
	defer n.endChange()
	var a *swapArea
	for _, o := range n.swapAreas() {
		if o.extent.UUID == u {
			a = o
		}
	}
	if a != nil && a.Area != nil && !a.retiring {
		return fmt.Errorf("swap area %s of ssd %s is in use: take kv_swap of that ssd out of the configuration and "+
			"restart first", name, a.ssd.name)
	}
	sources, _ := n.sourcesOf(u, a)
	for _, h := range sources {
		if h.Open {
			return fmt.Errorf("swap area %s: %d keys of namespace %s %d are there and will be returned to the "+
				"namespace's own drive; try again when that is done", name, h.Keys, h.SubNQN, h.NSID)
		}
	}
	dropped, err := n.dropFromManifests(u)
	if err != nil {
		return err
	}
	if a == nil && dropped == 0 {
		return fmt.Errorf("no drive that is served has a swap area %s, and no namespace needs it", name)
	}
	if a != nil {
		if err := n.freeArea(a); err != nil {
			return err
		}
	}
	n.log.Warn("swap area discarded with the keys in it", "area", name, "namespaces", dropped)
	return n.apply(n.cfg, lenient)
}

// closedStores returns the key-value namespaces that are not open although their drives are served.
func (n *Node) closedStores() iter.Seq2[*openSSD, label.Extent] {
	return func(yield func(*openSSD, label.Extent) bool) {
		for _, d := range n.drives() {
			if !d.serves() {
				continue
			}
			for _, e := range d.label.Label().Extents {
				if e.Use == label.KV && n.publisher.Store(e.UUID) == nil && !yield(d, e) {
					return
				}
			}
		}
	}
}

// dropFromManifests removes an area from the manifests of the namespaces that are not open.
func (n *Node) dropFromManifests(u uuid.UUID) (dropped int, err error) {
	for d, e := range n.closedStores() {
		did, err := partition.DropArea(d.drive, target.Background, e.StartBytes, u)
		switch {
		case errors.Is(err, swap.ErrManifest): // such a namespace does not open anyway
			n.log.Warn("the manifest of a namespace's swap areas cannot be read", "ssd", d.name, "subsystem", e.NQN,
				"nsid", e.NSID, "error", err)
		case err != nil:
			return dropped, fmt.Errorf("ssd %s: namespace %s %d: %w", d.name, e.NQN, e.NSID, err)
		case did:
			dropped++
			n.log.Warn("namespace loses its keys in a swap area", "ssd", d.name, "subsystem", e.NQN, "nsid", e.NSID,
				"area", u.String())
		}
	}
	return dropped, nil
}

// listSwap answers the admin API: the areas of the drives, and those that namespaces lack.
func (n *Node) listSwap() any {
	l := admin.List[admin.SwapArea]{APIVersion: admin.Version, Items: []admin.SwapArea{}}
	known := map[uuid.UUID]bool{}
	for _, a := range n.swapAreas() {
		known[a.extent.UUID] = true
		i := admin.SwapArea{UUID: a.extent.UUID.String(), SSD: a.ssd.name, SizeBytes: a.extent.LengthBytes,
			State: "open"}
		switch {
		case a.err != nil:
			i.State, i.Error = "failed", a.err.Error()
		case a.retiring:
			i.State = "retiring"
		}
		if a.Area != nil {
			i.UsedBytes = a.Stats().LiveBytes
		}
		i.Sources, _ = n.sourcesOf(a.extent.UUID, a)
		l.Items = append(l.Items, i)
	}
	for d, e := range n.closedStores() {
		book, err := partition.ReadManifest(d.drive, target.Background, e.StartBytes)
		if err != nil {
			continue // the status of its namespace says what is wrong
		}
		for _, line := range book.Areas {
			if u := uuid.UUID(line.Area); !known[u] {
				known[u] = true
				sources, _ := n.sourcesOf(u, nil)
				l.Items = append(l.Items, admin.SwapArea{UUID: u.String(), State: "missing", Sources: sources})
			}
		}
	}
	return l
}

// swapStats returns the metrics of the swap areas.
func (n *Node) swapStats() (all []telemetry.SwapStats) {
	for _, a := range n.swapAreas() {
		s := telemetry.SwapStats{SSD: a.ssd.name, Area: a.extent.UUID.String(), SizeBytes: a.extent.LengthBytes}
		if a.Area != nil {
			st := a.Stats()
			s.Up, s.UsedBytes, s.WrittenBytes, s.Records, s.Refusals, s.Failures = true, st.LiveBytes, st.WrittenBytes,
				st.Records, st.Refusals, st.Failures
		}
		all = append(all, s)
	}
	return all
}
