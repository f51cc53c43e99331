package nvme

import (
	"fmt"
	"hash/crc32"
	"iter"
	"math/bits"

	"jbofd/internal/uuid"
)

// ClusterMap is the content of log page LIDClusterMap (docs/wire-extensions.md): which partition of which node holds
// which range of the keys of a cluster, at one epoch. It is complete in itself.
//
//	 0 4 B  magic "JBCM"                          32 u64  epoch of the view
//	 4 u16  version of this layout, 1             40 u64  hash seed, of KVPosition
//	 6 u16  reserved                              48 u32  number of ranges, a power of two, 16 to 65536
//	 8 u32  length of the whole in bytes          52 u32  number of partitions, at most 65536
//	12 u32  generation                            56 u16  number of nodes, at most 4096
//	16 16B  UUID of the cluster                   58 u8   width: the most members that a range may have
//	                                              59 5 B  reserved
//	64      ranges, each of 8 bytes and 2 for each member, up to a multiple of 4:
//	          0 u32 epoch of the chain | 4 u8 number of members | 5 3 B reserved |
//	          8 u16 members: partitions that serve, from ChainHead to ChainTail; then zeroes
//	        partitions, each of 20 bytes:
//	          0 16B UUID | 16 u16 its node | 18 u16 reserved
//	        nodes, each with zeroes up to a multiple of 4:
//	          0 u8 length of the name | 1 u8 of the address | 2 u8 of the SubNQN | 3 u8 reserved | 4 the three
//	last 4  u32 CRC32C of all bytes before it
//
// All numbers are little endian. The address is a URL, such as tcp://192.0.2.1:4420. An example of a range: at epoch 7
// of its chain the partitions 2 and 258 serve, and the width is 3.
//
//	07000000 02       000000   0200 0201 0000 0000
//	epoch    members  reserved members        zeroes to a multiple of 4
type ClusterMap []byte

// Lengths in bytes and limits.
const (
	ClusterMapHeaderBytes = 64
	// ClusterMapMaxBytes is more than the longest map has.
	ClusterMapMaxBytes    = 8 << 20
	ClusterMapMinRanges   = 16
	ClusterMapMaxRanges   = 1 << 16
	ClusterMapMaxNodes    = 4096
	ClusterMapMaxMembers  = 16
	clusterMapPartition   = 20
	clusterMapRangeHeader = 8
	clusterMapCRC         = 4
	// clusterMapMaxText is the length of the longest name, address or SubNQN.
	clusterMapMaxText = 255
)

const (
	clusterMapMagic   = "JBCM"
	clusterMapVersion = 1

	cmVersion    = 4
	cmLength     = 8
	cmGeneration = 12
	cmCluster    = 16
	cmEpoch      = 32
	cmSeed       = 40
	cmRanges     = 48
	cmPartitions = 52
	cmNodes      = 56
	cmWidth      = 58
	cmReserved   = 59
)

// ClusterMapHeader is what a map says before its ranges.
type ClusterMapHeader struct {
	Cluster  uuid.UUID
	Epoch    uint64
	HashSeed uint64
	// Ranges and Partitions are their numbers, Members is the most members that a range has.
	Ranges, Partitions, Members int
}

// NewClusterMap begins a map. Its ranges and partitions are to be set, its nodes appended in the order in which the
// partitions count them, and then it is to be sealed.
func NewClusterMap(h ClusterMapHeader) ClusterMap {
	b := ClusterMap(make([]byte, ClusterMapHeaderBytes, ClusterMapHeaderBytes+h.Ranges*clusterMapStride(h.Members)+
		h.Partitions*clusterMapPartition+clusterMapCRC))
	copy(b, clusterMapMagic)
	le.PutUint16(b[cmVersion:], clusterMapVersion)
	copy(b[cmCluster:], h.Cluster[:])
	le.PutUint64(b[cmEpoch:], h.Epoch)
	le.PutUint64(b[cmSeed:], h.HashSeed)
	le.PutUint32(b[cmRanges:], uint32(h.Ranges))
	le.PutUint32(b[cmPartitions:], uint32(h.Partitions))
	b[cmWidth] = uint8(h.Members)
	return append(b, make([]byte, b.nodesAt()-len(b))...)
}

// clusterMapStride is the length of a range with room for so many members.
func clusterMapStride(members int) int { return (clusterMapRangeHeader + 2*members + 3) &^ 3 }

func (b ClusterMap) LenBytes() int      { return int(le.Uint32(b[cmLength:])) }
func (b ClusterMap) Cluster() uuid.UUID { return uuid.UUID(b[cmCluster:][:16]) }
func (b ClusterMap) Epoch() uint64      { return le.Uint64(b[cmEpoch:]) }
func (b ClusterMap) HashSeed() uint64   { return le.Uint64(b[cmSeed:]) }
func (b ClusterMap) Ranges() int        { return int(le.Uint32(b[cmRanges:])) }
func (b ClusterMap) Partitions() int    { return int(le.Uint32(b[cmPartitions:])) }
func (b ClusterMap) Nodes() int         { return int(le.Uint16(b[cmNodes:])) }

// Members is the most members that a range may have.
func (b ClusterMap) Members() int { return int(b[cmWidth]) }

// Generation tells the maps of one controller apart: it is another one when the map is.
func (b ClusterMap) Generation() uint32 { return le.Uint32(b[cmGeneration:]) }

func (b ClusterMap) rangeAt(r int) []byte {
	stride := clusterMapStride(b.Members())
	return b[ClusterMapHeaderBytes+r*stride:][:stride]
}

func (b ClusterMap) partitionsAt() int {
	return ClusterMapHeaderBytes + b.Ranges()*clusterMapStride(b.Members())
}

func (b ClusterMap) nodesAt() int { return b.partitionsAt() + b.Partitions()*clusterMapPartition }

func (b ClusterMap) partitionAt(i int) []byte {
	return b[b.partitionsAt()+i*clusterMapPartition:][:clusterMapPartition]
}

// ChainEpoch is the epoch of the chain of range r.
func (b ClusterMap) ChainEpoch(r int) uint32 { return le.Uint32(b.rangeAt(r)) }

// Member returns the partition that is member i of range r.
func (b ClusterMap) Member(r, i int) uint16 {
	return le.Uint16(b.rangeAt(r)[clusterMapRangeHeader+2*i:])
}

// MembersOf is how many members of range r serve.
func (b ClusterMap) MembersOf(r int) int { return int(b.rangeAt(r)[4]) }

// SetRange sets the epoch of a chain and its members, from ChainHead to ChainTail.
func (b ClusterMap) SetRange(r int, epoch uint32, members []uint16) {
	e := b.rangeAt(r)
	le.PutUint32(e, epoch)
	e[4] = uint8(len(members))
	clear(e[clusterMapRangeHeader:])
	for i, m := range members {
		le.PutUint16(e[clusterMapRangeHeader+2*i:], m)
	}
}

// Partition returns the UUID of a partition, which its namespace has too, and the index of its node.
func (b ClusterMap) Partition(i int) (id uuid.UUID, node uint16) {
	e := b.partitionAt(i)
	return uuid.UUID(e[:16]), le.Uint16(e[16:])
}

// SetPartition sets UUID and node of a partition.
func (b ClusterMap) SetPartition(i int, id uuid.UUID, node uint16) {
	e := b.partitionAt(i)
	copy(e, id[:])
	le.PutUint16(e[16:], node)
}

// ClusterMapNode is a node in a map. Address is empty if it is not known.
type ClusterMapNode struct{ Name, Address, SubNQN string }

// AppendNode appends a node. Texts longer than 255 bytes are truncated.
func (b ClusterMap) AppendNode(n ClusterMapNode) ClusterMap {
	cut := func(s string) string { return s[:min(len(s), clusterMapMaxText)] }
	name, address, nqn := cut(n.Name), cut(n.Address), cut(n.SubNQN)
	le.PutUint16(b[cmNodes:], uint16(b.Nodes()+1))
	b = append(b, uint8(len(name)), uint8(len(address)), uint8(len(nqn)), 0)
	b = append(append(append(b, name...), address...), nqn...)
	return append(b, make([]byte, -len(b)&3)...)
}

// Seal ends a map: it appends the checksum. Nothing else may be called afterwards but SetGeneration and getters.
func (b ClusterMap) Seal() ClusterMap {
	b = append(b, make([]byte, clusterMapCRC)...)
	le.PutUint32(b[cmLength:], uint32(len(b)))
	b.setCRC()
	return b
}

// SetGeneration changes the generation of a map that was sealed.
func (b ClusterMap) SetGeneration(v uint32) {
	le.PutUint32(b[cmGeneration:], v)
	b.setCRC()
}

func (b ClusterMap) crc() uint32 { return crc32.Checksum(b[:len(b)-clusterMapCRC], castagnoli) }
func (b ClusterMap) setCRC()     { le.PutUint32(b[len(b)-clusterMapCRC:], b.crc()) }

// AllNodes yields the nodes of a map that passes Check, in the order in which partitions count them.
func (b ClusterMap) AllNodes() iter.Seq[ClusterMapNode] {
	return func(yield func(ClusterMapNode) bool) {
		rest := b[b.nodesAt():]
		for range b.Nodes() {
			n, length, _ := clusterMapNode(rest)
			if !yield(n) {
				return
			}
			rest = rest[length:]
		}
	}
}

// clusterMapNode reads the node that b begins with, and returns its length; ok is false if it is longer than b.
func clusterMapNode(b []byte) (n ClusterMapNode, length int, ok bool) {
	if len(b) < 4 {
		return n, 0, false
	}
	name, address, nqn := int(b[0]), int(b[1]), int(b[2])
	if length = (4 + name + address + nqn + 3) &^ 3; length > len(b) {
		return n, 0, false
	}
	text := b[4:length]
	n = ClusterMapNode{string(text[:name]), string(text[name:][:address]), string(text[name+address:][:nqn])}
	return n, length, b[3] == 0 && zeroes(text[name+address+nqn:])
}

// CheckHeader validates the first ClusterMapHeaderBytes of a map, of which b need have no more: then LenBytes,
// Generation and Epoch may be used.
func (b ClusterMap) CheckHeader() error {
	const what = "cluster map"
	switch {
	case len(b) < ClusterMapHeaderBytes:
		return fieldError(what, "length", len(b), fmt.Sprintf("at least %d", ClusterMapHeaderBytes))
	case string(b[:4]) != clusterMapMagic:
		return fieldError(what, "magic", b[:4], fmt.Sprintf("%q", clusterMapMagic))
	case le.Uint16(b[cmVersion:]) != clusterMapVersion:
		return fieldError(what, "version", le.Uint16(b[cmVersion:]), "1")
	case b.LenBytes() > ClusterMapMaxBytes || b.LenBytes()%4 != 0:
		return fieldError(what, "length in bytes", b.LenBytes(), fmt.Sprintf("a multiple of 4 up to %d",
			ClusterMapMaxBytes))
	case b.Epoch() == 0:
		return fieldError(what, "epoch", 0, "at least 1")
	case b.Ranges() < ClusterMapMinRanges || b.Ranges() > ClusterMapMaxRanges || bits.OnesCount(uint(b.Ranges())) != 1:
		return fieldError(what, "number of ranges", b.Ranges(), "a power of two from 16 to 65536")
	case b.Partitions() > 1<<16:
		return fieldError(what, "number of partitions", b.Partitions(), "at most 65536")
	case b.Nodes() > ClusterMapMaxNodes:
		return fieldError(what, "number of nodes", b.Nodes(), "at most 4096")
	case b.Members() > ClusterMapMaxMembers:
		return fieldError(what, "width", b.Members(), fmt.Sprintf("at most %d", ClusterMapMaxMembers))
	case b[6]|b[7] != 0 || !zeroes(b[cmReserved:ClusterMapHeaderBytes]):
		return fieldError(what, "a reserved field", b[:ClusterMapHeaderBytes], "0")
	case b.LenBytes() < b.nodesAt()+4*b.Nodes()+clusterMapCRC:
		return fieldError(what, "length in bytes", b.LenBytes(), "that of its ranges, partitions and nodes")
	}
	return nil
}

// Check validates a whole map, so that no getter panics and all indexes are valid.
func (b ClusterMap) Check() error {
	const what = "cluster map"
	if err := b.CheckHeader(); err != nil {
		return err
	}
	switch {
	case len(b) != b.LenBytes():
		return fieldError(what, "length in bytes", b.LenBytes(), fmt.Sprint(len(b)))
	case le.Uint32(b[len(b)-clusterMapCRC:]) != b.crc():
		return fieldError(what, "CRC32C", fmt.Sprintf("%08x", le.Uint32(b[len(b)-clusterMapCRC:])),
			fmt.Sprintf("%08x", b.crc()))
	}
	for r := range b.Ranges() {
		e := b.rangeAt(r)
		n := int(e[4])
		if n > b.Members() || e[5]|e[6]|e[7] != 0 || !zeroes(e[clusterMapRangeHeader+2*n:]) {
			return fieldError(what, fmt.Sprintf("range %d", r), fmt.Sprintf("% x", e), "members, then zeroes")
		}
		for i := range n {
			if m := b.Member(r, i); int(m) >= b.Partitions() {
				return fieldError(what, fmt.Sprintf("member %d of range %d", i, r), m,
					fmt.Sprintf("less than %d", b.Partitions()))
			}
		}
	}
	for i := range b.Partitions() {
		if e := b.partitionAt(i); int(le.Uint16(e[16:])) >= b.Nodes() || e[18]|e[19] != 0 {
			return fieldError(what, fmt.Sprintf("node of partition %d", i), le.Uint16(e[16:]),
				fmt.Sprintf("less than %d", b.Nodes()))
		}
	}
	rest := b[b.nodesAt() : len(b)-clusterMapCRC]
	for i := range b.Nodes() {
		_, length, ok := clusterMapNode(rest)
		if !ok {
			return fieldError(what, fmt.Sprintf("node %d", i), fmt.Sprintf("%d bytes", len(rest)),
				"as long as it says, and zeroes behind its texts")
		}
		rest = rest[length:]
	}
	if len(rest) > 0 {
		return fieldError(what, "length in bytes", b.LenBytes(), fmt.Sprintf("%d bytes less", len(rest)))
	}
	return nil
}

// KVPosition is the position of a key of 1 to 16 bytes among the keys of a cluster with this hash seed: the first bits
// of it are the number of the range.
//
// Cost: 0 allocs.
func KVPosition(seed uint64, key []byte) uint64 { // hot: 0 allocs
	var k [MaxKVKey]byte
	copy(k[:], key)
	h := kvMix(seed ^ le.Uint64(k[:]) ^ uint64(len(key))*0x9E3779B97F4A7C15)
	return bits.Reverse64(kvMix(h + le.Uint64(k[8:]) ^ seed*0xA0761D6478BD642F))
}

func kvMix(x uint64) uint64 {
	x = (x ^ x>>32) * 0xD6E8FEB86659FD93
	x = (x ^ x>>32) * 0xD6E8FEB86659FD93
	return x ^ x>>32
}
