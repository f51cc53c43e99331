package nvmeof

import (
	"slices"

	"jbofd/internal/fence"
	"jbofd/internal/nvme"
	"jbofd/internal/pipeline"
	"jbofd/internal/units"
	"jbofd/internal/uuid"
)

// MaxNSID is the highest namespace identifier a subsystem may use (NN and MNAN
// in Identify Controller).
const MaxNSID = 1024

// Namespace is one namespace as hosts see it and where it lies. It is immutable
// once published in a table; a change publishes another one.
type Namespace struct {
	NSID uint32
	// CSI is its command set: blocks (nvme.CSINVM) or keys and values (nvme.CSIKV).
	CSI nvme.CSI
	// Executor, if not KindBlock, is the kind of executor of all commands for the namespace. Otherwise the command set
	// says: KindBlock for blocks and for Flush, KindKV for keys and values.
	Executor Kind
	// SSD is the daemon's number of the drive it lies on.
	SSD int
	// OffsetBytes and SizeBytes are its extent on that drive.
	OffsetBytes units.DriveOffset
	SizeBytes   units.Bytes
	// Extent is the right to use that extent. The driver sets it when it publishes the namespace, and ends it when the
	// namespace is not published any more.
	Extent fence.Pass
	// BlockShift is log2 of the logical block size: 9 or 12. Of blocks only.
	BlockShift uint8
	// Partition is the target service's number of the store that serves keys and values, MaxValueBytes
	// the longest value that it takes.
	Partition     int
	MaxValueBytes int
	// UsedBytes tells how much of SizeBytes keys and values take; nil: not known. The driver calls it without
	// locks.
	UsedBytes func() int64
	UUID      uuid.UUID
	NGUID     [16]byte
	EUI64     [8]byte
	// Hosts are the NQNs that may see it; nil: every host of the subsystem.
	Hosts []string
	// VolatileCache: writes need a flush to be durable.
	VolatileCache bool
	// DeallocatedReadsZero is what the drive says of deallocated blocks.
	DeallocatedReadsZero bool
	// OptimalIOBytes is the drive's preferred granularity.
	OptimalIOBytes int
	// ANAGroup and ANAState report asymmetric access.
	ANAGroup uint32
	ANAState nvme.ANAState
}

// Blocks is the size in logical blocks.
func (n *Namespace) Blocks() units.Blocks { return n.SizeBytes.Blocks(n.BlockShift) }

// place returns where blocks of the namespace are on its drive. If it does not have all of them, ok is false.
//
// hot: 0 allocs
func (n *Namespace) place(start units.LBA, count units.Blocks) (r pipeline.Range, ok bool) {
	if !n.Blocks().Contains(start, count) {
		return r, false
	}
	offset, ok1 := start.Offset(n.BlockShift)
	length, ok2 := count.Bytes(n.BlockShift)
	return pipeline.Range{Offset: offset.On(n.OffsetBytes), Len: length}, ok1 && ok2
}

// VisibleTo reports whether the host may see the namespace.
func (n *Namespace) VisibleTo(hostNQN string) bool {
	return n.Hosts == nil || slices.Contains(n.Hosts, hostNQN)
}

// sameToHosts reports whether Identify answers the same for both.
func (n *Namespace) sameToHosts(o *Namespace) bool {
	return n.CSI == o.CSI && n.SizeBytes == o.SizeBytes && n.BlockShift == o.BlockShift &&
		n.MaxValueBytes == o.MaxValueBytes &&
		n.UUID == o.UUID && n.NGUID == o.NGUID && n.EUI64 == o.EUI64 && n.ANAGroup == o.ANAGroup
}

// NamespaceTable holds the namespaces that one host sees in one subsystem. It
// is immutable; queue pairs are given another one when something changes.
type NamespaceTable struct {
	byNSID []*Namespace // index NSID-1, nil where there is none
	count  int
	// errorOnDelete says for which a Delete of a key that does not exist fails.
	errorOnDelete perNamespace
	// extendedKV, replication: the host was granted extended key-value, and replication.
	extendedKV, replication bool
	ended                   bool // see EndedTable
}

// EndedTable is the table of a queue whose connection is being closed. It has no namespaces, and commands that have
// been received already end without DNR: the host may repeat them over another connection, if it still has access.
var EndedTable = &NamespaceTable{ended: true}

// missing is the status of a command to a namespace that the table does not have.
func (t *NamespaceTable) missing() nvme.Status {
	if t.ended {
		return nvme.AbortedSQDeletion
	}
	// also for one within NN that is not active, as Linux and SPDK answer
	return nvme.InvalidNamespaceOrFormat | nvme.DNR
}

// NewNamespaceTable makes the table of those of all that host may see.
func NewNamespaceTable(all []*Namespace, hostNQN string) *NamespaceTable {
	return newNamespaceTable(all, func(n *Namespace) bool { return n.VisibleTo(hostNQN) })
}

// newNamespaceTable makes the table of those of all that are visible.
func newNamespaceTable(all []*Namespace, visible func(*Namespace) bool) *NamespaceTable {
	t := &NamespaceTable{}
	for _, n := range all {
		if !visible(n) {
			continue
		}
		for len(t.byNSID) < int(n.NSID) {
			t.byNSID = append(t.byNSID, nil)
		}
		t.byNSID[n.NSID-1] = n
		t.count++
	}
	return t
}

// Get returns the namespace, or nil if the host has none of that number.
//
// hot: 0 allocs
func (t *NamespaceTable) Get(nsid uint32) *Namespace {
	if i := nsid - 1; i < uint32(len(t.byNSID)) { // nsid 0 wraps around
		return t.byNSID[i]
	}
	return nil
}

// lowestSSD returns the lowest number among the drives that the namespaces lie on; ok
// is false if there are none.
func (t *NamespaceTable) lowestSSD() (ssd int, ok bool) {
	for _, n := range t.byNSID {
		if n != nil && (!ok || n.SSD < ssd) {
			ssd, ok = n.SSD, true
		}
	}
	return ssd, ok
}

// ssds returns the numbers of the drives that the namespaces lie on, in order.
func (t *NamespaceTable) ssds() (ssds []int) {
	for _, n := range t.byNSID {
		if n != nil && !slices.Contains(ssds, n.SSD) {
			ssds = append(ssds, n.SSD)
		}
	}
	slices.Sort(ssds)
	return ssds
}

// uses reports whether one of the namespaces lies on the drive.
func (t *NamespaceTable) uses(ssd int) bool {
	return slices.ContainsFunc(t.byNSID, func(n *Namespace) bool { return n != nil && n.SSD == ssd })
}

// Count is how many namespaces there are.
func (t *NamespaceTable) Count() int { return t.count }

// AppendIDs appends the NSIDs above after in ascending order, at most limit.
func (t *NamespaceTable) AppendIDs(dst []uint32, after uint32, limit int) []uint32 {
	return t.appendIDs(dst, after, limit, func(*Namespace) bool { return true })
}

// appendIDs is AppendIDs of those that are wanted.
func (t *NamespaceTable) appendIDs(dst []uint32, after uint32, limit int, wanted func(*Namespace) bool) []uint32 {
	for i := int(after); i < len(t.byNSID) && limit > 0; i++ {
		if n := t.byNSID[i]; n != nil && wanted(n) {
			dst = append(dst, uint32(i+1))
			limit--
		}
	}
	return dst
}
