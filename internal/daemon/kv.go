package daemon

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"time"

	"jbofd/internal/config"
	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/fabric"
	"jbofd/internal/partition"
	"jbofd/internal/pipeline"
	"jbofd/internal/ssd/label"
	"jbofd/internal/telemetry"
)

// closeStoresTimeout is how long the stores may take for their last checkpoints.
const closeStoresTimeout = 700 * time.Millisecond

// removeStoreTimeout is how long a store may take to stop whose namespace was removed.
const removeStoreTimeout = 10 * time.Second

// store is the partition of a key-value namespace.
type store struct {
	*partition.Partition
	// number is the fabric's; -1 before it has one.
	number int
	nqn    string
	nsid   uint32
}

// stores are the partitions that are open.
type stores struct {
	mu   sync.Mutex
	open map[label.UUID]*store
	// left are those that could not be opened and are left out.
	left map[label.UUID]leftOut
}

// leftOut is a store that could not be opened.
type leftOut struct {
	// component is what it is called where the daemon says what is not ready.
	component string
	err       error
}

// kvPlan is a key-value namespace that a configuration asks for.
type kvPlan struct {
	ns     *nvmeof.Namespace
	drive  *drive
	extent label.Extent
	cfg    config.Namespace
	// fresh: the extent is new, and there is no store on it.
	fresh bool
	store *store
	err   error
}

// openStores opens the partitions that plan needs and that are not open, all at once. A fresh one is
// formatted before the label says that it is there: a crash in between leaves free space and nothing else.
// If one fails, those opened here are closed again; if lenient only a fresh one is a failure, and others go
// into the namespaces that are left out. One that is left out already stays so.
func (n *Node) openStores(plan []*kvPlan, lenient bool) (opened []*kvPlan, err error) {
	var all sync.WaitGroup
	for _, p := range plan {
		if p.store = n.store(p.extent.UUID); p.store != nil {
			continue
		}
		opened = append(opened, p)
		all.Go(func() { p.store, p.err = n.openStore(p) })
	}
	all.Wait()
	var errs []error
	for _, p := range opened {
		if p.err == nil {
			continue
		}
		p.err = fmt.Errorf("subsystem %s, namespace %d: ssd %s: %w", p.extent.NQN, p.cfg.NSID, p.cfg.SSD, p.err)
		if p.fresh || !lenient && n.whyLeftOut(p.extent.UUID) == "" {
			errs = append(errs, p.err)
			continue
		}
		n.leaveOut(p)
		n.log.Error("namespace left out", "subsystem", p.extent.NQN, "nsid", p.cfg.NSID, "ssd", p.cfg.SSD, "error", p.err)
	}
	if len(errs) > 0 {
		n.dropStores(opened)
		return nil, errors.Join(errs...)
	}
	return opened, nil
}

// leaveOut remembers that a store could not be opened.
func (n *Node) leaveOut(p *kvPlan) {
	l := leftOut{component: fmt.Sprintf("namespace %s %d", p.extent.NQN, p.cfg.NSID), err: p.err}
	n.stores.mu.Lock()
	n.stores.left[p.extent.UUID] = l
	n.stores.mu.Unlock()
	n.tel.Health().Block(l.component, l.err.Error())
}

// forgive forgets that a store could not be opened: it is, or nobody wants it any more.
func (n *Node) forgive(u label.UUID) {
	n.stores.mu.Lock()
	l, was := n.stores.left[u]
	delete(n.stores.left, u)
	n.stores.mu.Unlock()
	if was {
		n.tel.Health().Clear(l.component)
	}
}

// whyLeftOut is why a store could not be opened, or "".
func (n *Node) whyLeftOut(u label.UUID) string {
	n.stores.mu.Lock()
	defer n.stores.mu.Unlock()
	if l, was := n.stores.left[u]; was {
		return l.err.Error()
	}
	return ""
}

// openStore opens or formats one.
func (n *Node) openStore(p *kvPlan) (*store, error) {
	began := time.Now()
	p.drive.owner.SetTenant(fabric.Background, pipeline.Settings{Weight: p.drive.backgroundWeight})
	var seed [8]byte
	if _, err := rand.Read(seed[:]); err != nil {
		return nil, err
	}
	log := n.log.With("subsystem", p.extent.NQN, "nsid", p.cfg.NSID, "ssd", p.cfg.SSD)
	kv := p.cfg.KV
	opened, err := partition.Open(partition.Config{
		Owner: p.drive.owner, OffsetBytes: p.extent.StartBytes, Background: fabric.Background, Volatile: kv.Durability == "none",
		Store: kvstore.Config{
			PartitionBytes: p.extent.LengthBytes, KeysPerSegment: kv.KeysPerSegment, Requests: kv.Requests,
			GroupBytes: int(kv.GroupBytes), GroupDelayNS: int64(max(kv.GroupDelay, 1)), ScrubBytesPerSec: int64(kv.ScrubRate),
			Format: p.fresh, UUID: p.extent.UUID, HashSeed: binary.LittleEndian.Uint64(seed[:]),
		},
		Swap:    partition.SwapConfig{Areas: n.lenders(p.drive)},
		Damaged: func(d kvstore.Damage) { log.Error("a record is not what was written", "damage", fmt.Sprintf("%+v", d)) },
		Opening: func(what string, read, of int) {
			log.Info("key-value store is being opened", "reading", what, "read", read, "of", of, "for", time.Since(began).Round(time.Second).String())
		},
	})
	if err != nil {
		return nil, n.explain(err)
	}
	st := opened.Stats()
	log.Info("key-value store opened", "objects", st.Objects, "swapped", st.Swap.Keys, "took", time.Since(began).Round(time.Millisecond).String())
	return &store{Partition: opened, number: -1, nqn: p.extent.NQN, nsid: p.cfg.NSID}, nil
}

// dropStores closes stores of which nobody has heard.
func (n *Node) dropStores(plan []*kvPlan) {
	for _, p := range plan {
		if p.store != nil {
			n.closeStore(p.store, removeStoreTimeout)
		}
	}
}

func (n *Node) closeStore(s *store, patience time.Duration) {
	err := s.Close(patience)
	switch {
	case errors.Is(err, partition.ErrKeysOut):
		n.log.Warn("key-value store stopped before its keys were at home; nothing is lost", "subsystem", s.nqn, "nsid", s.nsid, "error", err)
	case err != nil:
		n.log.Error("key-value store not stopped in order; nothing is lost", "subsystem", s.nqn, "nsid", s.nsid, "error", err)
	}
}

// adoptStores lets the fabric know the stores and fills in the namespaces; those whose store could not be
// opened are not in the result.
func (n *Node) adoptStores(plan []*kvPlan) (there map[*nvmeof.Namespace]bool) {
	there = map[*nvmeof.Namespace]bool{}
	for _, p := range plan {
		if p.store != nil {
			n.forgive(p.extent.UUID)
		}
	}
	n.stores.mu.Lock()
	defer n.stores.mu.Unlock()
	for _, p := range plan {
		s := p.store
		if s == nil {
			continue
		}
		if s.number < 0 {
			s.number = n.fab.AddPartition(s)
			n.stores.open[p.extent.UUID] = s
		}
		p.ns.Partition, p.ns.MaxValueBytes, p.ns.UsedBytes = s.number, s.MaxValueBytes(), s.UsedBytes
		there[p.ns] = true
	}
	return there
}

// retireStores closes the stores that no namespace of the plan stands on.
func (n *Node) retireStores(plan []*kvPlan) {
	keep := map[label.UUID]bool{}
	for _, p := range plan {
		keep[p.extent.UUID] = true
	}
	n.stores.mu.Lock()
	var gone []*store
	for u, s := range n.stores.open {
		if !keep[u] {
			gone = append(gone, s)
			delete(n.stores.open, u)
		}
	}
	var forgotten []label.UUID
	for u := range n.stores.left {
		if !keep[u] {
			forgotten = append(forgotten, u)
		}
	}
	n.stores.mu.Unlock()
	for _, u := range forgotten {
		n.forgive(u)
	}
	for _, s := range gone {
		n.fab.RemovePartition(s.number)
		n.closeStore(s, removeStoreTimeout)
	}
}

// swappedKeys is how many keys are in swap areas.
func (n *Node) swappedKeys() (keys int64) {
	n.stores.mu.Lock()
	defer n.stores.mu.Unlock()
	for _, s := range n.stores.open {
		keys += s.Stats().Swap.Keys
	}
	return keys
}

// closeStores ends all of them; nobody asks them for anything any more.
func (n *Node) closeStores(patience time.Duration) {
	n.stores.mu.Lock()
	open := n.stores.open
	n.stores.open = map[label.UUID]*store{}
	n.stores.mu.Unlock()
	var all sync.WaitGroup
	for _, s := range open {
		all.Go(func() { n.closeStore(s, patience) })
	}
	all.Wait()
}

// store returns the one on that extent, if it is open.
func (n *Node) store(u label.UUID) *store {
	n.stores.mu.Lock()
	defer n.stores.mu.Unlock()
	return n.stores.open[u]
}

// kvStats are what Prometheus is told of the stores.
func (n *Node) kvStats() (all []telemetry.KVStats) {
	n.stores.mu.Lock()
	open := make([]*store, 0, len(n.stores.open))
	for _, s := range n.stores.open {
		open = append(open, s)
	}
	n.stores.mu.Unlock()
	for _, s := range open {
		st := s.Stats()
		all = append(all, telemetry.KVStats{
			Subsystem: s.nqn, NSID: s.nsid, Objects: st.Objects, Segments: st.Segments, MemoryBytes: st.MemoryBytes,
			LiveBytes: st.LiveBytes, FreeBytes: st.FreeChunks * st.ChunkBytes, UserBytes: st.UserBytes, KeyLogBytes: st.KeyLogBytes,
			ValueLogBytes: st.ValueLogBytes, MovedBytes: st.MovedBytes, CheckpointBytes: st.CheckpointBytes,
			Compactions: st.Compactions, Checkpoints: st.Checkpoints, ScrubbedBytes: st.Scrubbed, DamagedRecords: st.Damaged, Waiting: st.Waiting,
			SwapKeys: st.Swap.Keys, SwapPuts: st.Swap.Swapped, SwapReads: st.Swap.Reads, SwapReturned: st.Swap.Returned,
			SwapMoved: st.Swap.Moved, SwapRefused: st.Swap.Refused, SwapFailures: st.Swap.Failures,
		})
	}
	return all
}

// asKV makes a namespace one of keys and values.
func asKV(ns *nvmeof.Namespace) {
	ns.CSI, ns.BlockShift = nvme.CSIKV, 0
}
