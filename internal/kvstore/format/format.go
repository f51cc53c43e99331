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
	"errors"
	"fmt"
	"hash/crc32"
)

// Version is the format that this package writes and the only one it reads.
const Version = 1

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

// What a check may say; it names the field.
var (
	// ErrBlank: there is nothing of ours, only zeroes.
	ErrBlank = errors.New("blank")
	// ErrVersion: sound, but of a version that this program does not know.
	ErrVersion = errors.New("unknown format version")
	// ErrCorrupt: not what was written.
	ErrCorrupt = errors.New("damaged")
)

var (
	castagnoli = crc32.MakeTable(crc32.Castagnoli)
	le         = binary.LittleEndian
)

func bad(what, field string, got, want any) error {
	return fmt.Errorf("%s: %w: %s is %v, want %v", what, ErrCorrupt, field, got, want)
}

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

// prelude is what superblock, chunk header and page have in common, in all versions:
//
//	0  8 B  magic
//	8  u32  version
//	12 u32  CRC32C of the whole, this field left out
//	16 u32  length
const (
	offVersion = 8
	offCRC     = 12
	offLength  = 16
)

func crcOf(b []byte) uint32 {
	return crc32.Update(crc32.Update(0, castagnoli, b[:offCRC]), castagnoli, b[offCRC+4:])
}

func seal(b []byte, magic string) {
	copy(b, magic)
	le.PutUint32(b[offVersion:], Version)
	le.PutUint32(b[offLength:], uint32(len(b)))
	le.PutUint32(b[offCRC:], crcOf(b))
}

// check tests what all preludes have. b is exactly as long as the structure.
func check(b []byte, what, magic string) error {
	if got := string(b[:8]); got != magic {
		if zero(b) {
			return fmt.Errorf("%s: %w", what, ErrBlank)
		}
		return bad(what, "magic", fmt.Sprintf("%q", got), fmt.Sprintf("%q", magic))
	}
	if got := int64(le.Uint32(b[offLength:])); got != int64(len(b)) {
		return bad(what, "length", got, len(b))
	}
	if got, want := le.Uint32(b[offCRC:]), crcOf(b); got != want {
		return bad(what, "CRC32C", fmt.Sprintf("%#08x", got), fmt.Sprintf("%#08x", want))
	}
	if v := le.Uint32(b[offVersion:]); v != Version {
		return fmt.Errorf("%s: %w: the partition has %d, this program knows %d", what, ErrVersion, v, Version)
	}
	return nil
}

func zero(b []byte) bool {
	for _, v := range b {
		if v != 0 {
			return false
		}
	}
	return true
}
