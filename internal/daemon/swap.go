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
	"jbofd/internal/kvstore/swap"
	"jbofd/internal/nvmeof/fabric"
	"jbofd/internal/partition"
	"jbofd/internal/pipeline"
	"jbofd/internal/ssd/label"
	"jbofd/internal/telemetry"
)

// closeAreaTimeout is how long a swap area may take for its last write.
const closeAreaTimeout = 200 * time.Millisecond

// swapArea is a swap area of a drive that is served.
type swapArea struct {
	// Area is nil if it could not be opened; err says why.
	*partition.Area
	err    error
	drive  *drive
	extent label.Extent
	// retiring: the configuration does not have it any more. It serves what is in it until that has come home.
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
func (a *swapArea) component() string { return "kv_swap of ssd " + a.drive.name }

// openAreas opens the swap areas that the drives' labels have, and makes those that the configuration wants besides. One
// that the configuration does not have, or has with another size, goes on as long as there is something in it. One that
// cannot be opened is left out, loudly: then the namespaces that may have keys in it do not open, the others do.
//
// Errors: there is no room for a new one.
func (n *Node) openAreas() error {
	plan := labelPlan{}
	var found []*swapArea
	for i, d := range n.ssds {
		if d.owner == nil {
			continue
		}
		want := int64(n.cfg.SSDs[i].KVSwap)
		for _, e := range d.label.Label().Extents {
			if e.Use == label.Swap {
				a := &swapArea{drive: d, extent: e, retiring: e.LengthBytes != want}
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
		found = append(found, &swapArea{drive: d, extent: e, fresh: true})
	}
	var all sync.WaitGroup
	for _, a := range found {
		all.Go(func() { a.err = a.open() })
	}
	all.Wait()
	for _, a := range found {
		if a.fresh && a.err == nil { // a crash before leaves free space and nothing else
			a.err = labelPlan{a.drive: plan[a.drive]}.commit()
		}
		log := n.log.With("ssd", a.drive.name, "area", a.extent.UUID.String(), "size", config.Bytes(a.extent.LengthBytes).String())
		if a.err != nil {
			n.tel.Health().Block(a.component(), a.err.Error())
			log.Error("swap area left out", "error", a.err)
			if a.fresh {
				a.close(n)
				continue
			}
		} else {
			log.Info("swap area opened", "new", a.fresh, "retiring", a.retiring, "used", config.Bytes(a.Stats().LiveBytes).String())
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
	a.drive.owner.SetTenant(fabric.Background, pipeline.Settings{Weight: a.drive.backgroundWeight})
	opened, err := partition.OpenArea(partition.AreaConfig{
		Owner: a.drive.owner, OffsetBytes: a.extent.StartBytes, LenBytes: a.extent.LengthBytes, Background: fabric.Background,
		Retiring: a.retiring, Format: a.fresh, UUID: a.extent.UUID, Salt: binary.LittleEndian.Uint64(salt[:]),
	})
	if err != nil {
		return err
	}
	a.Area = opened
	return nil
}

// close ends the area. Nobody uses it any more.
func (a *swapArea) close(n *Node) {
	if a.Area == nil {
		return
	}
	if err := a.Close(closeAreaTimeout); err != nil {
		n.log.Error("swap area not stopped in order; nothing is lost", "ssd", a.drive.name, "error", err)
	}
}

// closeAreas ends all of them.
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

// swapAreas returns a list of them.
func (n *Node) swapAreas() []*swapArea {
	n.areas.mu.Lock()
	defer n.areas.mu.Unlock()
	return slices.Clone(n.areas.all)
}

// lenders are the areas that a namespace on that drive may use: those of the others.
func (n *Node) lenders(d *drive) (all []*partition.Area) {
	for _, a := range n.swapAreas() {
		if a.Area != nil && a.drive != d {
			all = append(all, a.Area)
		}
	}
	return all
}

// explain adds to why a store was not opened what an operator can do, if it is for a swap area.
func (n *Node) explain(err error) error {
	if errors.Is(err, swap.ErrAttached) { // it was closed before its keys were at home
		return fmt.Errorf("%w: restart the daemon", err)
	}
	if !errors.Is(err, swap.ErrBook) {
		return err
	}
	var away []string
	for _, d := range n.ssds {
		if d.owner == nil {
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
	return fmt.Errorf("%w (not served: %s); restart with the drive that has it, or see jbofctl swap", err, strings.Join(away, ", "))
}

// homesOf returns the namespaces that have keys in an area or may have some, and whether that are all: of a drive that is
// not served, or a namespace that is damaged, nobody knows.
func (n *Node) homesOf(u label.UUID, a *swapArea) (homes []admin.SwapHome, sure bool) {
	homes, sure = []admin.SwapHome{}, true
	found := map[[16]byte]int{} // keys of those that have not come
	if a != nil && a.Area != nil {
		for _, h := range a.Homes() {
			if !h.Attached {
				found[h.UUID] = h.Keys
			}
		}
	}
	for _, d := range n.ssds {
		if d.owner == nil {
			sure = false
			continue
		}
		for _, e := range d.label.Label().Extents {
			if e.Use != label.KV {
				continue
			}
			h := admin.SwapHome{UUID: e.UUID.String(), SubNQN: e.NQN, NSID: e.NSID, Keys: found[e.UUID]}
			delete(found, e.UUID)
			if s := n.store(e.UUID); s != nil {
				h.Open = true
				for _, use := range s.Uses() {
					if use.Area == u && use.Listed {
						h.Keys = use.Keys
						homes = append(homes, h)
					}
				}
				continue
			}
			book, err := partition.ReadBook(d.owner, fabric.Background, e.StartBytes)
			switch {
			case err != nil:
				sure = false
			case book.Names(u):
				homes = append(homes, h)
			}
		}
	}
	for uuid, keys := range found {
		homes = append(homes, admin.SwapHome{UUID: label.UUID(uuid).String(), Keys: keys})
	}
	return homes, sure
}

// freeAreas gives the room of areas back that are configured no more and in which there is nothing.
func (n *Node) freeAreas() {
	for _, a := range n.swapAreas() {
		if !a.retiring || a.Area == nil {
			continue
		}
		if homes, sure := n.homesOf(a.extent.UUID, a); len(homes) > 0 || !sure {
			continue
		}
		if err := n.freeArea(a); err != nil {
			n.log.Error("swap area not freed", "ssd", a.drive.name, "area", a.extent.UUID.String(), "error", err)
		}
	}
}

// freeArea erases an area, which nobody needs, and frees its extent.
func (n *Node) freeArea(a *swapArea) error {
	n.areas.mu.Lock()
	n.areas.all = slices.DeleteFunc(n.areas.all, func(o *swapArea) bool { return o == a })
	n.areas.mu.Unlock()
	a.close(n)
	if err := erase(n.stopping, a.drive.owner, a.extent.StartBytes, a.extent.LengthBytes); err != nil {
		return fmt.Errorf("ssd %s: erase swap area: %w", a.drive.name, err)
	}
	if err := a.drive.label.Update(func(l *label.Label) error { return l.Free(a.extent.UUID) }); err != nil {
		return fmt.Errorf("ssd %s: %w", a.drive.name, err)
	}
	if a.err != nil {
		n.tel.Health().Clear(a.component())
	}
	n.log.Info("swap area freed", "ssd", a.drive.name, "area", a.extent.UUID.String(), "size", config.Bytes(a.extent.LengthBytes).String())
	return nil
}

// DiscardSwap gives up a swap area that is damaged, or not there, or configured no more, with all that is in it: the namespaces
// that could not be opened without it forget what they had there, and are opened.
//
// Errors: it is in use, or nobody knows it; the drives'.
func (n *Node) DiscardSwap(uuid string) error {
	parsed, err := admin.ParseUUID(uuid)
	if err != nil {
		return fmt.Errorf("uuid %q: %w", uuid, err)
	}
	u := label.UUID(parsed)
	n.reload.Lock()
	defer n.reload.Unlock()
	var a *swapArea
	for _, o := range n.swapAreas() {
		if o.extent.UUID == u {
			a = o
		}
	}
	if a != nil && a.Area != nil && !a.retiring {
		return fmt.Errorf("swap area %s of ssd %s is in use: take kv_swap of that ssd out of the configuration and restart first", uuid, a.drive.name)
	}
	homes, _ := n.homesOf(u, a)
	for _, h := range homes {
		if h.Open {
			return fmt.Errorf("swap area %s: %d keys of namespace %s %d are there and come home by themselves; try again", uuid, h.Keys, h.SubNQN, h.NSID)
		}
	}
	dropped, err := n.dropBookLines(u)
	if err != nil {
		return err
	}
	if a == nil && dropped == 0 {
		return fmt.Errorf("no drive that is served has a swap area %s, and no namespace needs it", uuid)
	}
	if a != nil {
		if err := n.freeArea(a); err != nil {
			return err
		}
	}
	n.log.Warn("swap area given up with what was in it", "area", uuid, "namespaces", dropped)
	return n.apply(n.cfg, true)
}

// closedStores are the key-value namespaces on drives that answer which are not open.
func (n *Node) closedStores() iter.Seq2[*drive, label.Extent] {
	return func(yield func(*drive, label.Extent) bool) {
		for _, d := range n.ssds {
			if d.owner == nil {
				continue
			}
			for _, e := range d.label.Label().Extents {
				if e.Use == label.KV && n.store(e.UUID) == nil && !yield(d, e) {
					return
				}
			}
		}
	}
}

// dropBookLines makes the namespaces that are not open forget an area.
func (n *Node) dropBookLines(u label.UUID) (dropped int, err error) {
	for d, e := range n.closedStores() {
		did, err := partition.DropArea(d.owner, fabric.Background, e.StartBytes, u)
		switch {
		case errors.Is(err, swap.ErrBook): // such a namespace does not open anyway
			n.log.Warn("namespace has no book of its swap areas that can be read", "ssd", d.name, "subsystem", e.NQN, "nsid", e.NSID, "error", err)
		case err != nil:
			return dropped, fmt.Errorf("ssd %s: namespace %s %d: %w", d.name, e.NQN, e.NSID, err)
		case did:
			dropped++
			n.log.Warn("namespace forgets what it had in a swap area", "ssd", d.name, "subsystem", e.NQN, "nsid", e.NSID, "area", u.String())
		}
	}
	return dropped, nil
}

// listSwap answers the admin API: the areas of the drives, and those that namespaces lack.
func (n *Node) listSwap() any {
	l := admin.List[admin.SwapArea]{APIVersion: admin.Version, Items: []admin.SwapArea{}}
	known := map[label.UUID]bool{}
	for _, a := range n.swapAreas() {
		known[a.extent.UUID] = true
		i := admin.SwapArea{UUID: a.extent.UUID.String(), SSD: a.drive.name, SizeBytes: a.extent.LengthBytes, State: "open"}
		switch {
		case a.err != nil:
			i.State, i.Error = "failed", a.err.Error()
		case a.retiring:
			i.State = "retiring"
		}
		if a.Area != nil {
			i.UsedBytes = a.Stats().LiveBytes
		}
		i.Homes, _ = n.homesOf(a.extent.UUID, a)
		l.Items = append(l.Items, i)
	}
	for d, e := range n.closedStores() {
		book, err := partition.ReadBook(d.owner, fabric.Background, e.StartBytes)
		if err != nil {
			continue // its namespace says what is wrong
		}
		for _, line := range book.Lines {
			if u := label.UUID(line.Area); !known[u] {
				known[u] = true
				homes, _ := n.homesOf(u, nil)
				l.Items = append(l.Items, admin.SwapArea{UUID: u.String(), State: "missing", Homes: homes})
			}
		}
	}
	return l
}

// swapStats are what Prometheus is told of the areas.
func (n *Node) swapStats() (all []telemetry.SwapStats) {
	for _, a := range n.swapAreas() {
		s := telemetry.SwapStats{SSD: a.drive.name, Area: a.extent.UUID.String(), SizeBytes: a.extent.LengthBytes}
		if a.Area != nil {
			st := a.Stats()
			s.Up, s.UsedBytes, s.WrittenBytes, s.Records, s.Refusals, s.Failures = true, st.LiveBytes, st.WrittenBytes, st.Records, st.Refusals, st.Failures
		}
		all = append(all, s)
	}
	return all
}
