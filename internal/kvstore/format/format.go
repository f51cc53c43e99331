// Package format is what a key-value partition looks like on its SSD: views over
// bytes, little endian, with nothing but layout and checks.
//
//	 0            64 KiB                                                        end - 4 KiB
//	┌────────────┬───────────┬───────────┬───────────┬─ ─ ─ ─ ─┬───────────┬─────────────┐
//	│ superblock │ chunk 0   │ chunk 1   │ chunk 2   │         │ chunk n-1 │ superblock  │
//	│ A          │ key log   │ value log │ free      │         │ checkpoint│ B           │
//	└────────────┴───────────┴───────────┴───────────┴─ ─ ─ ─ ─┴───────────┴─────────────┘
//
// The logs are made of chunks of one power-of-two size. A chunk begins with a block of
// its own, the ChunkHeader; groups of records follow, each group begins at a block, and the
// records in it are packed: segments at multiples of KeyUnit, values of ValueUnit.
//
//	chunk   ┌────────┬─────────────────┬──────┬──────────┬─────────
//	        │ header │ rec rec rec rec │ zero │ rec rec  │ ...
//	        └────────┴─────────────────┴──────┴──────────┴─────────
//	         block    group, whole blocks       group
//
// A record's checksum starts from a seed made of the partition, the chunk's epoch and the
// record's place (Seed): what was written elsewhere, in a former life of the chunk or by a
// host that wrote a record's bytes as its value, is not taken for a record.
//
// Why it is so: docs/decisions/0007-kvstore-layout.md.
package format

import (
	"encoding/binary"

	"jbofd/internal/kvstore/prelude"
)

// Version is the format that this package writes and the only one it reads.
const Version = 2

// Sizes in bytes.
const (
	// SuperblockBytes is the length of each superblock.
	SuperblockBytes = 4096
	// AreaStart is where chunk 0 begins.
	AreaStart = 64 << 10
	// KeyUnit and ValueUnit are what segments and values are aligned to.
	KeyUnit, ValueUnit = 32, 8
	// PageBytes is the length of a checkpoint page.
	PageBytes = 32 << 10
	// MinChunkBytes and MaxChunkBytes bound the size of chunks.
	MinChunkBytes, MaxChunkBytes = 128 << 10, 64 << 20
	// MaxKey and MaxValue are the longest key and value.
	MaxKey, MaxValue = 16, 1 << 20
	// MaxPartitionBytes is what a SegTbl entry can address.
	MaxPartitionBytes = 1 << 42
)

// What a check may say: see package prelude.
var (
	ErrBlank   = prelude.ErrBlank
	ErrVersion = prelude.ErrVersion
	ErrCorrupt = prelude.ErrCorrupt
)

var (
	castagnoli = prelude.Castagnoli
	le         = binary.LittleEndian
)

// Seed is where the checksum of a record starts: the partition's salt, the epoch of the
// chunk, and the record's offset in the partition.
func Seed(salt, epoch uint32, offset int64) uint32 {
	return uint32(mix(uint64(salt)<<32 | uint64(epoch) ^ uint64(offset)*0x9E3779B97F4A7C15))
}

func mix(x uint64) uint64 {
	x = (x ^ x>>32) * 0xD6E8FEB86659FD93
	x = (x ^ x>>32) * 0xD6E8FEB86659FD93
	return x ^ x>>32
}

// HashKey hashes a key of 1 to 16 bytes; the length counts. The seed is the superblock's.
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

// Superblock, chunk header and page begin with a prelude.
func seal(b []byte, magic string) { prelude.Seal(b, magic, Version) }

func check(b []byte, what, magic string) error { return prelude.Check(b, what, magic, Version) }

func bad(what, field string, got, want any) error { return prelude.Bad(what, field, got, want) }

func zero(b []byte) bool { return prelude.Zero(b) }
