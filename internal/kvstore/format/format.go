// Package format is the on-disk format of key-value partitions and swap areas: views over bytes, little endian, with
// getters, setters and checks.
//
// A partition:
//
//	 0            64 KiB                                                        end - 4 KiB
//	┌────────────┬───────────┬───────────┬───────────┬─ ─ ─ ─ ─┬───────────┬─────────────┐
//	│ superblock │ chunk 0   │ chunk 1   │ chunk 2   │         │ chunk n-1 │ superblock  │
//	│ A          │ key log   │ value log │ free      │         │ checkpoint│ B           │
//	└────────────┴───────────┴───────────┴───────────┴─ ─ ─ ─ ─┴───────────┴─────────────┘
//
// Between superblock A and chunk 0 is the ring of Openings.
//
// The logs consist of chunks, all of the same power-of-two size. The first block of a chunk is its ChunkHeader. Groups
// of records follow. Within a group the records are packed: segments at multiples of KeyUnit, values at multiples of
// ValueUnit.
//
//	chunk   ┌────────┬─────────────────┬──────┬──────────┬─────────
//	        │ header │ rec rec rec rec │ zero │ rec rec  │ ...
//	        └────────┴─────────────────┴──────┴──────────┴─────────
//	         block    group, whole blocks       group
//
// The checksum of a record starts from a seed made of the partition, the chunk's epoch and the record's offset (Seed).
// Therefore bytes are not taken for a record if they were written at another place, if they remain from an earlier use
// of the chunk, or if a host stores the bytes of a record as a value.
//
// A swap area is described at AreaSuperblock. The reasons for the formats are in docs/decisions/0007-kvstore-layout.md
// and 0008-swapping.md.
package format

import "jbofd/internal/units"

// Version is the version of the partition format that this package writes. It also reads those since OldestVersion: 2
// has no values in pieces, 2 and 3 have no versions of objects, expiry or identities, longer records of values, and no
// increments of checkpoints.
const OldestVersion, Version = 2, 4

// Sizes in bytes.
const (
	// SuperblockBytes is the length of each superblock.
	SuperblockBytes = 4096
	// AreaStart is the offset of chunk 0.
	AreaStart = 64 << 10
	// KeyUnit and ValueUnit are the alignments of segments and values.
	KeyUnit, ValueUnit = 32, 8
	// PageBytes is the length of a checkpoint page.
	PageBytes = 32 << 10
	// MinChunkBytes and MaxChunkBytes bound the size of chunks.
	MinChunkBytes, MaxChunkBytes = 128 << 10, 64 << 20
	// MaxKey and MaxValue are the longest key and value.
	MaxKey, MaxValue = 16, 1 << 20
	// MaxPartitionBytes is the length that an entry of the SegTbl can address.
	MaxPartitionBytes = 1 << 42
)

// ChunkNumber is the number of a chunk of a partition; a negative one is no chunk.
type ChunkNumber int32

// ChunkOffset is an offset in bytes from the start of a chunk.
type ChunkOffset int64

// Add returns the offset n bytes behind o.
func (o ChunkOffset) Add(n int) ChunkOffset { return o + ChunkOffset(n) }

// RoundUp returns the first offset from o on at which a block begins.
func (o ChunkOffset) RoundUp(blockSize int) ChunkOffset {
	block := ChunkOffset(blockSize)
	return (o + block - 1) &^ (block - 1)
}

// Seed returns the initial value of the checksum of a record: a hash of the partition's salt, the epoch of the chunk,
// and the record's offset in the partition.
func Seed(salt uint32, epoch uint64, offset units.ExtentOffset) uint32 {
	return seed(salt, epoch, uint64(offset))
}

func seed(salt uint32, epoch, place uint64) uint32 {
	return uint32(mix(uint64(salt)<<32 ^ epoch ^ place*0x9E3779B97F4A7C15))
}

func mix(x uint64) uint64 {
	x = (x ^ x>>32) * 0xD6E8FEB86659FD93
	x = (x ^ x>>32) * 0xD6E8FEB86659FD93
	return x ^ x>>32
}

// HashKey hashes a key of 1 to 16 bytes, with its length. The seed is that of the superblock. Up to nine keys, whose
// lengths are 8 to 16 bytes and which end in zeroes, may share a hash whatever the seed is.
//
// hot: 0 allocs
func HashKey(seed uint64, key []byte) uint64 {
	var k [MaxKey]byte
	copy(k[:], key)
	a, b := le.Uint64(k[:]), le.Uint64(k[8:])
	h := mix(seed ^ a ^ uint64(len(key))*0x9E3779B97F4A7C15)
	return mix(h + b ^ seed*0xA0761D6478BD642F)
}

// RoundUp rounds n up to a multiple of the power of two unit.
func RoundUp(n, unit int) int { return (n + unit - 1) &^ (unit - 1) }

func uint24(b []byte) uint32 { return uint32(le.Uint16(b)) | uint32(b[2])<<16 }
func putUint24(b []byte, v uint32) {
	le.PutUint16(b, uint16(v))
	b[2] = byte(v >> 16)
}
func uint40(b []byte) uint64 { return uint64(le.Uint32(b)) | uint64(b[4])<<32 }
func putUint40(b []byte, v uint64) {
	le.PutUint32(b, uint32(v))
	b[4] = byte(v >> 32)
}
func uint48(b []byte) uint64 { return uint64(le.Uint32(b)) | uint64(le.Uint16(b[4:]))<<32 }
func putUint48(b []byte, v uint64) {
	le.PutUint32(b, uint32(v))
	le.PutUint16(b[4:], uint16(v>>32))
}

// KeyState is what HashVersion tells apart besides the version of a key.
type KeyState uint8

const (
	// KeyAbsent: the key does not exist, but has a tombstone.
	KeyAbsent KeyState = 1 << iota
	// KeyGone, with KeyAbsent: it has no tombstone, but identities.
	KeyGone
	// KeyEvicted: identities of the key were dropped before their time.
	KeyEvicted
)

// HashVersion hashes a key with its version and state, for sums that tell whether two stores have the same. No two keys
// have the same hash for all seeds, as they may with HashKey.
//
// hot: 0 allocs
func HashVersion(seed uint64, key []byte, version uint64, state KeyState) uint64 {
	return mix(hashLong(seed^0x9E3779B97F4A7C15, key, uint64(state)) ^ version)
}

// HashIdentity hashes a key with an identity of it, for the same sums.
//
// hot: 0 allocs
func HashIdentity(seed uint64, key []byte, id *Identity) uint64 {
	h := hashLong(seed^0xC2B2AE3D27D4EB4F, key, uint64(id.KeepUntil))
	h = mix(h ^ id.Client)
	h = mix(h ^ id.Seq)
	return mix(h ^ id.Version)
}

// hashLong hashes a key, so that no two keys have the same hash for all seeds, and 32 bits.
func hashLong(seed uint64, key []byte, with uint64) uint64 {
	var k [MaxKey]byte
	copy(k[:], key)
	h := mix(seed ^ le.Uint64(k[:]))
	h = mix(h ^ le.Uint64(k[8:]))
	return mix(h ^ with<<8 ^ uint64(len(key)))
}
