package node

import (
	"errors"
	"fmt"
	"time"

	"jbofd/internal/kvstore"
	"jbofd/internal/kvstore/swap"
	"jbofd/internal/nvmeof/target"
	"jbofd/internal/partition"
	"jbofd/internal/publish"
	"jbofd/internal/ssd"
	"jbofd/internal/units"
	"jbofd/internal/uuid"
)

// Fault model of stores and swap areas: none of their own. They are opened and closed as the daemon does it.

// maxValueBytes is the longest value that hosts store.
const maxValueBytes = 8 << 10

// Sizes of a simulated store: small, so that its log wraps, segments split and chunks are emptied within a run.
const (
	storeOffset  = 1 << 20
	storeChunks  = 24
	storeChunk   = 128 << 10
	storeBytes   = storeChunks*storeChunk + storeChunk
	storeKeys    = 24
	storeSegment = 6
	storeDisk    = 1

	// The swap area is on the other drive.
	areaDisk     = 0
	areaOffset   = 1 << 20
	areaBytes    = 2 << 20
	areaPatience = 10 * time.Second
)

// store is the partition of a namespace of keys and values.
type store struct {
	// open is nil if the store is not open.
	open *publish.Store
	// lives counts the stores that were formatted on the extent before.
	lives     int
	formatted bool
	// stuck: it was not closed as it should be, so that it may not open again before a restart.
	stuck bool
}

// addKeys adds a namespace of keys and values.
func (l *Lab) addKeys(nsid uint32, disk int) {
	ns := &namespace{name: fmt.Sprintf("namespace %d", nsid), nsid: nsid, disk: disk, offset: storeOffset,
		bytes: storeBytes, kv: true, there: true}
	for i := range storeKeys {
		ns.registers = append(ns.registers, newRegister(fmt.Sprintf("key %d", i)))
	}
	l.namespaces = append(l.namespaces, ns)
}

// eager is a policy that swaps as soon as a few requests wait.
var eager = swap.Policy{BeginGap: 4, EndGap: 2, CalmNS: 5e6, UnlistNS: 1e9}

// openArea opens the swap area, or formats it at the first time.
func (n *Node) openArea() error {
	l := n.lab
	if !l.traits.swaps || l.Disks[areaDisk].Gone() {
		return nil
	}
	cfg := partition.AreaConfig{Drive: n.drives[areaDisk], OffsetBytes: areaOffset, LenBytes: areaBytes,
		Background: target.Background, Format: l.areaLives == 0, UUID: uuid.UUID{5, byte(l.areaLives)},
		Salt: 77 + uint64(l.areaLives)}
	area, err := partition.OpenArea(cfg)
	if err != nil && l.areaDamaged {
		l.areaLives++ // the operator gives the area up
		cfg.Format, cfg.UUID, cfg.Salt = true, uuid.UUID{5, byte(l.areaLives)}, 77+uint64(l.areaLives)
		area, err = partition.OpenArea(cfg)
	}
	if err != nil && l.areaDamaged {
		return nil // it is left out, as the daemon does it
	}
	if err != nil {
		return fmt.Errorf("the swap area does not open: %w", err)
	}
	l.areaLives = max(l.areaLives, 1)
	n.area = area
	return nil
}

// openStores opens the stores at the start of the node. One that does not open for a reason is left out, or formatted
// if it was damaged.
func (n *Node) openStores() error {
	if err := n.openArea(); err != nil {
		return err
	}
	for _, ns := range n.lab.namespaces {
		ns.there = !n.lab.Disks[ns.disk].Gone()
		if !ns.kv || !ns.there {
			continue
		}
		ns.store.stuck = false
		err := n.openStore(ns)
		if err != nil && ns.damaged {
			n.lab.Sim.Tracef("%s does not open and is formatted: %v", ns.name, err)
			if n.area != nil {
				n.area.Forget(ns.id())
			}
			ns.renew()
			err = n.openStore(ns)
			ns.damaged = true // parts of the extent cannot be read before they are written
		}
		switch {
		case err == nil:
		case n.lab.mayStayClosed(ns, err):
			ns.there = false
		default:
			return fmt.Errorf("%s does not open: %w", ns.name, err)
		}
	}
	return nil
}

// mayStayClosed reports whether there is a reason for a store not to open.
func (l *Lab) mayStayClosed(ns *namespace, err error) bool {
	return ns.damaged || ns.store.stuck || l.broken() || l.Disks[ns.disk].Gone() ||
		l.anyGone() && errors.Is(err, swap.ErrManifest)
}

// openStore opens the store of a namespace, or formats it at the first time.
func (n *Node) openStore(ns *namespace) error {
	cfg := partition.Config{
		Drive: n.drives[ns.disk], OffsetBytes: units.DriveOffset(ns.offset), Background: target.Background,
		Store: kvstore.Config{
			PartitionBytes: ns.bytes, ChunkBytes: storeChunk, GroupBytes: 8 << 10, KeysPerSegment: storeSegment,
			Requests: 32,
			Format:   !ns.store.formatted, UUID: ns.id(), HashSeed: 99 + uint64(ns.store.lives),
		},
		Damaged: func(d kvstore.Damage) {
			if !ns.damaged {
				n.lab.Violation("%s: damaged: %+v", ns.name, d)
			}
		},
	}
	if n.area != nil {
		cfg.Swap = partition.SwapConfig{Areas: []*partition.Area{n.area}, Policy: eager}
	}
	if err := n.publisher.Vacate(cfg.Drive, nil); err != nil {
		return err
	}
	for _, f := range n.lab.Disks[ns.disk].Flights {
		if f.Op == ssd.Write && f.Offset < ns.offset+ns.bytes && ns.offset < f.Offset+f.Len {
			n.lab.Violation("%s is opened while a write at %d of its last life is under way", ns.name, f.Offset)
		}
	}
	opened, err := partition.Open(cfg)
	if err != nil {
		return err
	}
	if ns.damaged { // what was damaged may be forgotten now, and what was there before it may be back
		for _, r := range ns.registers {
			r.loose = true
		}
	}
	ns.store.open, ns.store.formatted = publish.NewStore(opened, ns.id(), SubNQN, ns.nsid), true
	return nil
}

// storeClosed is told how a store was closed.
func (n *Node) storeClosed(s *publish.Store, err error) {
	for _, ns := range n.lab.namespaces {
		if ns.store.open != s {
			continue
		}
		if err == nil {
			return
		}
		n.lab.Sim.Tracef("%s: %v", ns.name, err)
		ns.store.stuck = true
		if !n.lab.broken() && !ns.damaged && n.lab.healthy() {
			n.lab.Violation("%s does not close: %v", ns.name, err)
		}
	}
}
