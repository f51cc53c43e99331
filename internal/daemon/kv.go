package daemon

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"jbofd/internal/config"
	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/target"
	"jbofd/internal/partition"
	"jbofd/internal/pipeline"
	"jbofd/internal/publish"
	"jbofd/internal/ssd/label"
	"jbofd/internal/telemetry"
	"jbofd/internal/units"
	"jbofd/internal/uuid"
)

// closeStoresTimeout is how long the stores may take for their last checkpoints, besides the time for their bytes; see
// partition.CloseWith.
const closeStoresTimeout = 700 * time.Millisecond

// dropStoreTimeout is how long a store may take to stop that was opened for a reload that is refused.
const dropStoreTimeout = 10 * time.Second

// leftOuts are the stores that could not be opened and are left out.
type leftOuts struct {
	mu     sync.Mutex
	stores map[uuid.UUID]leftOut
	// accepted is the loss that the operator accepts of a store that is being opened. It changes under Node.reload.
	accepted map[uuid.UUID]string
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
	store *publish.Store
	err   error
}

// openStores opens the partitions that the plan needs and that are not open, in parallel. A fresh store is formatted
// before its extent is in the label, so that a crash in between leaves free space and not an unformatted store. If one
// fails, those opened here are closed again. With lenient, only the failure of a fresh store counts; any other store
// that fails is left out. A store that was left out before stays left out.
func (n *Node) openStores(plan []*kvPlan, lenient bool) (opened []*kvPlan, err error) {
	var all sync.WaitGroup
	for _, p := range plan {
		if p.store = n.publisher.Store(p.extent.UUID); p.store != nil {
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
		if p.fresh || !lenient && n.leftOutReason(p.extent.UUID) == "" {
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
	n.left.mu.Lock()
	n.left.stores[p.extent.UUID] = l
	n.left.mu.Unlock()
	n.tel.Health().Block(l.component, l.err.Error())
}

// clearLeftOut removes the record of leaveOut: the store has been opened, or is not configured any more.
func (n *Node) clearLeftOut(u uuid.UUID) {
	n.left.mu.Lock()
	l, was := n.left.stores[u]
	delete(n.left.stores, u)
	n.left.mu.Unlock()
	if was {
		n.tel.Health().Clear(l.component)
	}
}

// lossOf returns what a store has lost that is therefore left out, or nil.
func (n *Node) lossOf(u uuid.UUID) *kvstore.LossError {
	n.left.mu.Lock()
	defer n.left.mu.Unlock()
	var loss *kvstore.LossError
	errors.As(n.left.stores[u].err, &loss)
	return loss
}

// OpenKV opens a key-value namespace that has lost writes since its last checkpoint, and is left out therefore. The
// loss that the operator accepts is the Token of the one that was stated.
//
// Errors: the namespace is not left out because of a loss, or of another one by now; those of opening it.
func (n *Node) OpenKV(name, accept string) error {
	u, err := uuid.Parse(name)
	if err != nil {
		return fmt.Errorf("uuid %q: %w", name, err)
	}
	if err := n.beginChange("the opening of namespace " + name); err != nil {
		return err
	}
	defer n.endChange()
	loss, reason := n.lossOf(u), n.leftOutReason(u)
	switch {
	case n.isReplicated(u):
		return fmt.Errorf("namespace %s is a partition of the cluster: %w", name, errReplicated)
	case reason == "":
		return fmt.Errorf("no key-value namespace %s is left out", name)
	case loss == nil:
		return fmt.Errorf("namespace %s is left out for another reason than a loss: %s", name, reason)
	case loss.Token() != accept:
		return fmt.Errorf("namespace %s has lost something else than what is accepted: %s", name, loss.Loss.String())
	}
	n.left.accepted = map[uuid.UUID]string{u: accept}
	err = n.apply(n.cfg, lenient)
	n.left.accepted = nil
	if reason := n.leftOutReason(u); err == nil && reason != "" {
		err = errors.New(reason)
	}
	return err
}

// leftOutReason returns why a store could not be opened, or "".
func (n *Node) leftOutReason(u uuid.UUID) string {
	n.left.mu.Lock()
	defer n.left.mu.Unlock()
	if l, was := n.left.stores[u]; was {
		return l.err.Error()
	}
	return ""
}

// opening returns what is told how far the opening of a store is: the log, and systemd as long as it gets on.
func opening(log *slog.Logger, began time.Time) func(what string, read, of int) {
	var last struct {
		what string
		read int
	}
	return func(what string, read, of int) {
		log.Info("key-value store is being opened", "reading", what, "read", read, "of", of, "for",
			time.Since(began).Round(time.Second).String())
		if what != last.what || read != last.read {
			extendTimeout(openingExtension)
			last.what, last.read = what, read
		}
	}
}

// openStore opens a store, or formats a fresh one.
func (n *Node) openStore(p *kvPlan) (*publish.Store, error) {
	began := time.Now()
	if err := n.publisher.Vacate(p.ssd.drive, n.stopping); err != nil {
		return nil, err
	}
	p.ssd.drive.SetTenant(target.Background, pipeline.Settings{Weight: p.ssd.backgroundWeight})
	var random [8]byte
	if _, err := rand.Read(random[:]); err != nil {
		return nil, err
	}
	seed := binary.LittleEndian.Uint64(random[:])
	if p.cfg.Replicated {
		seed, _ = n.cluster.hashSeed()
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
			AcceptLoss:       n.left.accepted[p.extent.UUID],
			Format:           p.fresh, UUID: p.extent.UUID, HashSeed: seed,
		},
		Swap: partition.SwapConfig{Areas: n.lenders(p.ssd)},
		Damaged: func(d kvstore.Damage) {
			n.damage.damaged(p.extent.NQN, p.cfg.NSID, p.cfg.SSD, d)
			if p.cfg.Replicated {
				n.cluster.host.damaged(p.extent.UUID, d)
			}
		},
		Opening: opening(log, began),
		Closing: func(written, of int64) {
			log.Info("key-value store is being closed", "writing", "last checkpoint", "written_bytes", written,
				"of_bytes", of)
		},
	})
	if err != nil {
		return nil, n.addHint(err, p.extent.UUID, p.cfg.Replicated)
	}
	st := opened.Stats()
	if st.LostHeaders > 0 {
		log.Warn("chunk headers could not be read or were damaged; nothing is lost with them", "headers",
			st.LostHeaders, "bad_chunks", st.BadChunks)
	}
	if lost := opened.Lost(); lost != nil {
		log.Warn("key-value store opened without writes that it had acknowledged, as the operator wants", "lost",
			lost.String())
	}
	log.Info("key-value store opened", "objects", st.Objects, "swapped", st.Swap.Keys, "took",
		time.Since(began).Round(time.Millisecond).String())
	return publish.NewStore(opened, p.extent.UUID, p.extent.NQN, p.cfg.NSID), nil
}

// dropStores closes stores that the target service does not know yet.
func (n *Node) dropStores(plan []*kvPlan) {
	for _, p := range plan {
		if p.store != nil {
			n.publisher.Close(p.store, dropStoreTimeout)
		}
	}
}

// storeClosed logs that a store was not closed as it should be.
func (n *Node) storeClosed(s *publish.Store, err error) {
	switch {
	case errors.Is(err, partition.ErrKeysSwapped):
		n.log.Warn("key-value store closed with keys in swap areas: it needs those areas at the next start",
			"subsystem", s.NQN, "nsid", s.NSID, "error", err)
	case err != nil:
		n.log.Error("key-value store not closed cleanly: it recovers at the next start, no acknowledged write is lost",
			"subsystem", s.NQN, "nsid", s.NSID, "error", err)
	}
}

// clearRemovedLeftOut removes the records of stores that could not be opened and are no longer configured.
func (n *Node) clearRemovedLeftOut(plan []*kvPlan) {
	keep := map[uuid.UUID]bool{}
	for _, p := range plan {
		keep[p.extent.UUID] = true
	}
	n.left.mu.Lock()
	var removed []uuid.UUID
	for u := range n.left.stores {
		if !keep[u] {
			removed = append(removed, u)
		}
	}
	n.left.mu.Unlock()
	for _, u := range removed {
		n.clearLeftOut(u)
	}
}

// swappedKeys returns how many keys of all stores are in swap areas.
func (n *Node) swappedKeys() (keys int64) {
	for _, s := range n.publisher.Stores() {
		keys += s.Stats().Swap.Keys
	}
	return keys
}

// erase zeroes an extent that nothing uses any more; see publish.Publisher.Erase. It releases n.reload for that time:
// see withoutReload.
func (n *Node) erase(d *openSSD, e label.Extent) error {
	length := units.Bytes(e.LengthBytes)
	n.erasing(0, length)
	err := n.withoutReload(d, func() error {
		return n.publisher.Erase(d.drive, e.StartBytes, length, func(done units.Bytes) { n.erasing(done, length) },
			n.stopping)
	})
	if errors.Is(err, target.ErrStopped) {
		return errStopping
	}
	return err
}

// kvStats returns the metrics of the stores.
func (n *Node) kvStats() (all []telemetry.KVStats) {
	for _, s := range n.publisher.Stores() {
		st := s.Stats()
		all = append(all, telemetry.KVStats{
			Subsystem: s.NQN, NSID: s.NSID, Objects: st.Objects, Segments: st.Segments,
			MemoryBytes: st.MemoryBytes + st.TableBytes,
			LiveBytes:   st.LiveBytes, KeyBytes: st.KeyBytes, FreeBytes: st.FreeChunks * st.ChunkBytes,
			UserBytes:     st.UserBytes,
			KeyLogBytes:   st.KeyLogBytes,
			ValueLogBytes: st.ValueLogBytes, MovedBytes: st.MovedBytes, CheckpointBytes: st.CheckpointBytes,
			Compactions: st.Compactions, Checkpoints: st.Checkpoints, ScrubbedBytes: st.Scrubbed,
			DamagedRecords: st.Damaged, Waiting: st.Waiting,
			LostHeaders: st.LostHeaders, BadChunks: st.BadChunks,
			SwapKeys: st.Swap.Keys, SwapPuts: st.Swap.Swapped, SwapReads: st.Swap.Reads, SwapReturned: st.Swap.Returned,
			SwapMoved: st.Swap.Moved, SwapRefused: st.Swap.Refused, SwapFailures: st.Swap.Failures,
		})
	}
	return all
}

// describeKV makes ns a key-value namespace.
func describeKV(ns *nvmeof.Namespace) {
	ns.CSI, ns.BlockShift = nvme.CSIKV, 0
}
