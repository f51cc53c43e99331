package node

import (
	"fmt"
	"time"

	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/target"
	"jbofd/internal/partition"
	"jbofd/internal/units"
)

// maxValueBytes is the longest value that hosts store.
const maxValueBytes = 8 << 10

// Sizes of a simulated store: small, so that its log wraps, segments split and chunks are emptied within a run.
const (
	storeOffset  = 1 << 20
	storeChunks  = 24
	storeChunk   = 128 << 10
	storeBytes   = storeChunks*storeChunk + storeChunk
	storeKeys    = 24
	storePeriod  = 120 * time.Second // how long it may take to close
	storeSegment = 6
)

// store is the partition of a namespace of keys and values.
type store struct {
	partition *partition.Partition
	number    int
	formatted bool
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

// openStore opens the store of a namespace, or formats it at the first time.
func (n *Node) openStore(ns *namespace) error {
	p, err := partition.Open(partition.Config{
		Drive: n.drives[ns.disk], OffsetBytes: units.DriveOffset(ns.offset), Background: target.Background,
		Store: kvstore.Config{
			PartitionBytes: ns.bytes, ChunkBytes: storeChunk, GroupBytes: 8 << 10, KeysPerSegment: storeSegment,
			Requests: 32,
			Format:   !ns.store.formatted, UUID: [16]byte{byte(ns.nsid), 7}, HashSeed: 99,
		},
		Damaged: func(d kvstore.Damage) { n.lab.Violation("%s: damaged: %+v", ns.name, d) },
	})
	if err != nil {
		return err
	}
	ns.store.partition, ns.store.formatted = p, true
	ns.store.number = n.service.AddPartition(p)
	return nil
}

// closeStore closes the store of a namespace that nobody uses any more.
func (n *Node) closeStore(ns *namespace) {
	n.service.RemovePartition(ns.store.number)
	if err := ns.store.partition.Close(storePeriod); err != nil && !n.lab.broken() {
		n.lab.Violation("%s does not close: %v", ns.name, err)
	}
	ns.store.partition = nil
}

// publish fills in what hosts see of a namespace of keys and values.
func (ns *namespace) publish(pub *nvmeof.Namespace) {
	p := ns.store.partition
	pub.CSI, pub.BlockShift = nvme.CSIKV, 0
	pub.Partition, pub.MaxValueBytes, pub.UsedBytes = ns.store.number, p.MaxValueBytes(), p.UsedBytes
}
