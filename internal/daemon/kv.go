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
	"jbofd/internal/nvmeof/target"
	"jbofd/internal/partition"
	"jbofd/internal/pipeline"
	"jbofd/internal/ssd/label"
	"jbofd/internal/telemetry"
	"jbofd/internal/uuid"
)

// closeStoresTimeout is how long the stores may take for their last checkpoints.
const closeStoresTimeout = 700 * time.Millisecond

// removeStoreTimeout is how long a store may take to stop whose namespace was removed.
const removeStoreTimeout = 10 * time.Second

// store is the open partition of a key-value namespace.
type store struct {
	*partition.Partition
	// number is the partition's number in the target service; -1 before the service has it.
	number int
	nqn    string
	nsid   uint32
}

// stores are the partitions that are open.
type stores struct {
	mu   sync.Mutex
	open map[uuid.UUID]*store
	// left are those that could not be opened and are left out.
	left map[uuid.UUID]leftOut
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
	ssd    *openSSD
	extent label.Extent
	cfg    config.Namespace
	// fresh: the extent is new, and there is no store on it.
	fresh bool
	store *store
	err   error
}

// openStores opens the partitions that the plan needs and that are not open, in parallel. A fresh store is formatted
// before its extent is in the label, so that a crash in between leaves free space and not an unformatted store. If one
// fails, those opened here are closed again. With lenient, only the failure of a fresh store counts; any other store
// that fails is left out. A store that was left out before stays left out.
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
		n.log.Error("namespace left out", "subsystem", p.extent.NQN, "nsid", p.cfg.NSID, "ssd", p.cfg.SSD, "error",
			p.err)
	}
	if len(errs) > 0 {
		n.dropStores(opened)
		return nil, errors.Join(errs...)
	}
	return opened, nil
}

// leaveOut records that a store could not be opened, which makes the node not ready.
func (n *Node) leaveOut(p *kvPlan) {
	l := leftOut{component: fmt.Sprintf("namespace %s %d", p.extent.NQN, p.cfg.NSID), err: p.err}
	n.stores.mu.Lock()
	n.stores.left[p.extent.UUID] = l
	n.stores.mu.Unlock()
	n.tel.Health().Block(l.component, l.err.Error())
}

// forgive removes the record of leaveOut: the store has been opened, or is not configured any more.
func (n *Node) forgive(u uuid.UUID) {
	n.stores.mu.Lock()
	l, was := n.stores.left[u]
	delete(n.stores.left, u)
	n.stores.mu.Unlock()
	if was {
		n.tel.Health().Clear(l.component)
	}
}

// whyLeftOut returns why a store could not be opened, or "".
func (n *Node) whyLeftOut(u uuid.UUID) string {
	n.stores.mu.Lock()
	defer n.stores.mu.Unlock()
	if l, was := n.stores.left[u]; was {
		return l.err.Error()
	}
	return ""
}

// openStore opens a store, or formats a fresh one.
func (n *Node) openStore(p *kvPlan) (*store, error) {
	began := time.Now()
	p.ssd.drive.SetTenant(target.Background, pipeline.Settings{Weight: p.ssd.backgroundWeight})
	var seed [8]byte
	if _, err := rand.Read(seed[:]); err != nil {
		return nil, err
	}
	log := n.log.With("subsystem", p.extent.NQN, "nsid", p.cfg.NSID, "ssd", p.cfg.SSD)
	kv := p.cfg.KV
	opened, err := partition.Open(partition.Config{
		Drive: p.ssd.drive, OffsetBytes: p.extent.StartBytes, Background: target.Background,
		Volatile: kv.Durability == "none",
		Store: kvstore.Config{
			PartitionBytes: p.extent.LengthBytes, KeysPerSegment: kv.KeysPerSegment, Requests: kv.Requests,
			GroupBytes: int(kv.GroupBytes), GroupDelayNS: int64(max(kv.GroupDelay, 1)),
			ScrubBytesPerSec: int64(kv.ScrubRate),
			Format:           p.fresh, UUID: p.extent.UUID, HashSeed: binary.LittleEndian.Uint64(seed[:]),
		},
		Swap: partition.SwapConfig{Areas: n.lenders(p.ssd)},
		Damaged: func(d kvstore.Damage) {
			log.Error("damaged record: it is not what was written", "damage", fmt.Sprintf("%+v", d))
		},
		Opening: func(what string, read, of int) {
			log.Info("key-value store is being opened", "reading", what, "read", read, "of", of, "for",
				time.Since(began).Round(time.Second).String())
		},
	})
	if err != nil {
		return nil, n.explain(err)
	}
	st := opened.Stats()
	log.Info("key-value store opened", "objects", st.Objects, "swapped", st.Swap.Keys, "took",
		time.Since(began).Round(time.Millisecond).String())
	return &store{Partition: opened, number: -1, nqn: p.extent.NQN, nsid: p.cfg.NSID}, nil
}

// dropStores closes stores that the target service does not know yet.
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
		n.log.Warn("key-value store closed with keys in swap areas: it needs those areas at the next start",
			"subsystem", s.nqn, "nsid", s.nsid, "error", err)
	case err != nil:
		n.log.Error("key-value store not closed cleanly: it recovers at the next start, no acknowledged write is lost",
			"subsystem", s.nqn, "nsid", s.nsid, "error", err)
	}
}

// adoptStores registers the stores with the target service and returns the namespaces with their stores' numbers. A
// namespace whose store could not be opened is not in the result.
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
			s.number = n.service.AddPartition(s)
			n.stores.open[p.extent.UUID] = s
		}
		p.ns.Partition, p.ns.MaxValueBytes, p.ns.UsedBytes = s.number, s.MaxValueBytes(), s.UsedBytes
		there[p.ns] = true
	}
	return there
}

// retireStores closes the stores of namespaces that the plan does not have.
func (n *Node) retireStores(plan []*kvPlan) {
	keep := map[uuid.UUID]bool{}
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
	var forgotten []uuid.UUID
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
		n.service.RemovePartition(s.number)
		n.closeStore(s, removeStoreTimeout)
	}
}

// swappedKeys returns how many keys of all stores are in swap areas.
func (n *Node) swappedKeys() (keys int64) {
	n.stores.mu.Lock()
	defer n.stores.mu.Unlock()
	for _, s := range n.stores.open {
		keys += s.Stats().Swap.Keys
	}
	return keys
}

// closeStores closes all stores. There are no requests to them any more.
func (n *Node) closeStores(patience time.Duration) {
	n.stores.mu.Lock()
	open := n.stores.open
	n.stores.open = map[uuid.UUID]*store{}
	n.stores.mu.Unlock()
	var all sync.WaitGroup
	for _, s := range open {
		all.Go(func() { n.closeStore(s, patience) })
	}
	all.Wait()
}

// store returns the store on the extent with that UUID; nil if it is not open.
func (n *Node) store(u uuid.UUID) *store {
	n.stores.mu.Lock()
	defer n.stores.mu.Unlock()
	return n.stores.open[u]
}

// kvStats returns the metrics of the stores.
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
			LiveBytes: st.LiveBytes, FreeBytes: st.FreeChunks * st.ChunkBytes, UserBytes: st.UserBytes,
			KeyLogBytes:   st.KeyLogBytes,
			ValueLogBytes: st.ValueLogBytes, MovedBytes: st.MovedBytes, CheckpointBytes: st.CheckpointBytes,
			Compactions: st.Compactions, Checkpoints: st.Checkpoints, ScrubbedBytes: st.Scrubbed,
			DamagedRecords: st.Damaged, Waiting: st.Waiting,
			SwapKeys: st.Swap.Keys, SwapPuts: st.Swap.Swapped, SwapReads: st.Swap.Reads, SwapReturned: st.Swap.Returned,
			SwapMoved: st.Swap.Moved, SwapRefused: st.Swap.Refused, SwapFailures: st.Swap.Failures,
		})
	}
	return all
}

// asKV makes ns a key-value namespace.
func asKV(ns *nvmeof.Namespace) {
	ns.CSI, ns.BlockShift = nvme.CSIKV, 0
}
