package format

import (
	"hash/crc32"

	"jbofd/internal/units"
	"jbofd/internal/uuid"
)

// AreaVersion is the version of the format of swap areas that this package writes. It also reads version 1, whose
// records have no version of the object. ManifestVersion is that of swap manifests.
const OldestAreaVersion, AreaVersion, ManifestVersion = 1, 2, 1

// Sizes in bytes.
const (
	// SwapLogStart is the offset of the swap log in a swap area, behind the two superblocks.
	SwapLogStart = 2 * SuperblockBytes
	// SwapGroupHeaderBytes is the length of a group's header, SwapRecordHeaderBytes the length of a record without its
	// value.
	SwapGroupHeaderBytes, SwapRecordHeaderBytes = 32, 64
	oldSwapRecordBytes                          = 56
	// SwapRecordUnit is the alignment of records.
	SwapRecordUnit = 8
	// MaxSwapGroupBytes is the length of the longest group.
	MaxSwapGroupBytes = 256 << 10
	// SwapManifestBytes is the length of each copy of the swap manifest.
	SwapManifestBytes = 4096
	// MaxSwapAreas is the number of areas that a swap manifest can name.
	MaxSwapAreas = 64
)

// SwapManifestOffsets are the offsets in a partition of the two copies of its swap manifest.
var SwapManifestOffsets = [2]units.ExtentOffset{16 << 10, 32 << 10}

// A swap area takes values of partitions on other drives for a while. It is an extent of its own. Behind two
// superblocks, of which the valid one with the higher generation counts, is the swap log, which is circular:
//
//	 0              4 KiB          8 KiB                                                     end
//	┌──────────────┬──────────────┬─ ─ ─ ─ ─┬───────────────┬───────────────┬─ ─ ─ ─ ─ ─ ─ ─┐
//	│ superblock A │ superblock B │ rest of │ group         │ group         │ previous lap  │
//	└──────────────┴──────────────┴─ ─ ─ ─ ─┴───────────────┴───────────────┴─ ─ ─ ─ ─ ─ ─ ─┘
//	                              LogTail >  LogHead                          > LogTail
//
//	group   ┌────────┬────────┬────────┬────────┬──────┐
//	        │ header │ record │ record │ record │ zero │   whole blocks; records at multiples of 8
//	        └────────┴────────┴────────┴────────┴──────┘
//
// A place in the log is the number of bytes that were written before it since the area was made, so that places only
// grow. The offset of a place is the remainder of its division by the log's length. A group does not cross the end of
// the log: if it does not fit it goes to the beginning of the next lap. Checksums start from the area's salt and the
// place, so that neither bytes of an earlier lap nor a value that a host has chosen are taken for a group or a record.
//
// Groups are written one at a time, each when the one before is durable. Therefore the first invalid group is the end
// of the log, and a valid group behind it means that the area is damaged.

// AreaSuperblock is a view of a superblock of a swap area, which describes the area and says where its log begins.
//
//	0  20 B prelude, magic "JBOFDKVG"       48  u64  length of the area in bytes
//	20 u32  block size                      56  u64  salt
//	24 u64  generation, 1 and up            64  u64  place of LogHead
//	32 16B  area's UUID                     72 … 4095 reserved
type AreaSuperblock []byte

const (
	areaMagic      = "JBOFDKVG"
	areaBlockSize  = 20
	areaGeneration = 24
	areaUUID       = 32
	areaLength     = 48
	areaSalt       = 56
	areaLogHead    = 64
	areaReserved   = 72
)

// Version is the version of the format that the superblock was sealed with.
func (b AreaSuperblock) Version() uint32 { return le.Uint32(b[preludeVersion:]) }

func (b AreaSuperblock) BlockSize() int         { return int(le.Uint32(b[areaBlockSize:])) }
func (b AreaSuperblock) SetBlockSize(v int)     { le.PutUint32(b[areaBlockSize:], uint32(v)) }
func (b AreaSuperblock) Generation() uint64     { return le.Uint64(b[areaGeneration:]) }
func (b AreaSuperblock) SetGeneration(v uint64) { le.PutUint64(b[areaGeneration:], v) }
func (b AreaSuperblock) UUID() uuid.UUID        { return uuid.UUID(b[areaUUID:]) }
func (b AreaSuperblock) SetUUID(v uuid.UUID)    { copy(b[areaUUID:], v[:]) }
func (b AreaSuperblock) AreaBytes() int64       { return int64(le.Uint64(b[areaLength:])) }
func (b AreaSuperblock) SetAreaBytes(v int64)   { le.PutUint64(b[areaLength:], uint64(v)) }
func (b AreaSuperblock) Salt() uint64           { return le.Uint64(b[areaSalt:]) }
func (b AreaSuperblock) SetSalt(v uint64)       { le.PutUint64(b[areaSalt:], v) }
func (b AreaSuperblock) LogHead() LogOffset     { return LogOffset(le.Uint64(b[areaLogHead:])) }
func (b AreaSuperblock) SetLogHead(v LogOffset) { le.PutUint64(b[areaLogHead:], uint64(v)) }

// Seal completes the superblock by writing its prelude. It must be called last.
func (b AreaSuperblock) Seal() { seal(b[:SuperblockBytes], areaMagic, AreaVersion) }

// Check verifies the superblock of an area of that length.
//
// Errors: ErrBlank, ErrVersion, ErrCorrupt naming the field.
func (b AreaSuperblock) Check(areaBytes int64) error {
	const what = "superblock of the swap area"
	if len(b) != SuperblockBytes {
		return bad(what, "length", len(b), SuperblockBytes)
	}
	if err := check(b, what, areaMagic, OldestAreaVersion, AreaVersion); err != nil {
		return err
	}
	switch n := b.BlockSize(); {
	case n < 512 || n > SuperblockBytes || n&(n-1) != 0:
		return bad(what, "block size", n, "a power of two from 512 to 4096")
	case b.Generation() == 0:
		return bad(what, "generation", 0, "at least 1")
	case b.AreaBytes() != areaBytes:
		return bad(what, "length of the area", b.AreaBytes(), areaBytes)
	case b.LogHead()%LogOffset(n) != 0:
		return bad(what, "LogHead", b.LogHead(), "whole blocks")
	case !zero(b[areaReserved:]):
		return bad(what, "a reserved byte", "set", "zero")
	}
	return nil
}

// LogOffset is a place in a swap log. It is not an offset in the area: SwapLog.Offset returns that.
type LogOffset uint64

// Add returns the place n bytes behind o.
func (o LogOffset) Add(n int) LogOffset { return o + LogOffset(n) }

// Sub returns the number of bytes from p to o, which is not before p.
func (o LogOffset) Sub(p LogOffset) uint64 { return uint64(o - p) }

// SwapLog translates places of a swap log to offsets and seeds.
type SwapLog struct {
	// LenBytes is the length of the log, in whole blocks.
	LenBytes uint64
	// Salt is the area's salt.
	Salt uint32
}

// NewSwapLog returns the log of the area with that superblock.
func NewSwapLog(b AreaSuperblock) SwapLog {
	n := uint64(b.AreaBytes()-SwapLogStart) &^ uint64(b.BlockSize()-1)
	return SwapLog{LenBytes: n, Salt: uint32(b.Salt()) ^ uint32(b.Salt()>>32)}
}

// Offset returns the offset of a place in the area.
func (l SwapLog) Offset(place LogOffset) units.ExtentOffset {
	return SwapLogStart + units.ExtentOffset(uint64(place)%l.LenBytes)
}

// NextLap returns the first place of the next lap, or place itself if it is the first of a lap.
func (l SwapLog) NextLap(place LogOffset) LogOffset {
	n := LogOffset(l.LenBytes)
	return (place + n - 1) / n * n
}

// LapEnd returns the place up to which a log may reach whose head is at a place: one lap further.
func (l SwapLog) LapEnd(head LogOffset) LogOffset { return head + LogOffset(l.LenBytes) }

// Rest returns how many bytes of its lap begin at place.
func (l SwapLog) Rest(place LogOffset) uint64 { return l.LenBytes - uint64(place)%l.LenBytes }

// Seed returns the initial value of the checksum of a group or record at place.
func (l SwapLog) Seed(place LogOffset) uint32 { return seed(l.Salt, uint64(place>>40), uint64(place)) }

// SwapGroup is a view of a group.
//
//	0  u32  CRC32C of the header's rest, from Seed   20 u32  number of records, at least 1
//	4  u8   magic 'G'                                24 u32  CRC32C of what follows the header
//	5  3 B  reserved                                 28 4 B  reserved
//	8  u64  place                                    32 …    records
//	16 u32  length in bytes, whole blocks
//
// The header has a checksum of the records because their own checksums do not say which group they belong to: the
// remains of a group that a crash has torn are at the same places as the records of the group that is written there
// next.
type SwapGroup []byte

const (
	groupMagic     = 'G'
	grpMagic       = 4
	grpReserved0   = 5
	grpPlace       = 8
	grpLength      = 16
	grpRecords     = 20
	grpContent     = 24
	grpReserved1   = 28
	groupHeaderEnd = SwapGroupHeaderBytes
)

func (b SwapGroup) Place() LogOffset     { return LogOffset(le.Uint64(b[grpPlace:])) }
func (b SwapGroup) SetPlace(v LogOffset) { le.PutUint64(b[grpPlace:], uint64(v)) }
func (b SwapGroup) LengthBytes() int     { return int(le.Uint32(b[grpLength:])) }
func (b SwapGroup) SetLengthBytes(v int) { le.PutUint32(b[grpLength:], uint32(v)) }
func (b SwapGroup) Records() int         { return int(le.Uint32(b[grpRecords:])) }
func (b SwapGroup) SetRecords(v int)     { le.PutUint32(b[grpRecords:], uint32(v)) }

// Seal completes the header of a group whose records are complete.
func (b SwapGroup) Seal(seed uint32) {
	b[grpMagic] = groupMagic
	le.PutUint32(b[grpContent:], crc32.Checksum(b[SwapGroupHeaderBytes:b.LengthBytes()], castagnoli))
	le.PutUint32(b, crc32.Update(seed, castagnoli, b[4:groupHeaderEnd]))
}

// CheckHeader verifies the header of a group. The records are not checked.
//
// Errors: ErrCorrupt naming the field.
func (b SwapGroup) CheckHeader(seed uint32, blockSize int) error {
	const what = "group"
	switch {
	case len(b) < SwapGroupHeaderBytes:
		return bad(what, "length", len(b), "at least 32")
	case b[grpMagic] != groupMagic:
		return bad(what, "magic", b[grpMagic], groupMagic)
	}
	if got, want := le.Uint32(b), crc32.Update(seed, castagnoli, b[4:groupHeaderEnd]); got != want {
		return bad(what, "CRC32C", checksum(got), checksum(want))
	}
	switch n := b.LengthBytes(); {
	case n < blockSize || n > MaxSwapGroupBytes || n%blockSize != 0:
		return bad(what, "length", n, "whole blocks, at most 256 KiB")
	case b.Records() < 1 || b.Records() > n/oldSwapRecordBytes:
		return bad(what, "number of records", b.Records(), "at least 1, as many as fit")
	case !zero(b[grpReserved0:grpPlace]) || !zero(b[grpReserved1:groupHeaderEnd]):
		return bad(what, "a reserved byte", "set", "zero")
	}
	return nil
}

// CheckContent verifies the records of a group whose header has been checked. The view must contain the whole group.
//
// Errors: ErrCorrupt naming the field.
func (b SwapGroup) CheckContent() error {
	if got, want := le.Uint32(b[grpContent:]), crc32.Checksum(b[SwapGroupHeaderBytes:b.LengthBytes()],
		castagnoli); got != want {
		return bad("group", "CRC32C of the records", checksum(got), checksum(want))
	}
	return nil
}

// SwapKind is what a record says about its key.
type SwapKind uint8

// Kinds of records.
const (
	// SwapPut: the key has this value.
	SwapPut SwapKind = 1 + iota
	// SwapDelete: the key does not exist.
	SwapDelete
)

// SwapRecord is a view of a record. It may be longer than the record.
//
//	0  u32  CRC32C of the rest, from Seed    16 16B  UUID of the source partition
//	4  u8   magic 'r'                        32 16B  key, filled up with zeroes
//	5  u8   kind: 1 SwapPut, 2 SwapDelete            48 u32  length of the value
//	6  u8   length of the key, 1 to 16       52 u32  offset in its group
//	7  u8   reserved                         56 u64  version of the object, or of the Delete
//	8  u64  place                            64 …    value
//
// Records of version 1 of the format have the magic 'R' and the value at byte 56.
type SwapRecord []byte

const (
	recordMagic, oldRecordMagic = 'r', 'R'
	recMagic                    = 4
	recKind                     = 5
	recKeyLen                   = 6
	recReserved                 = 7
	recPlace                    = 8
	recSource                   = 16
	recKey                      = 32
	recValueLen                 = 48
	recAt                       = 52
	recVersion                  = 56
)

// SwapRecordBytes is the length of a record with a value of that length.
func SwapRecordBytes(valueLen int) int {
	return RoundUp(SwapRecordHeaderBytes+valueLen, SwapRecordUnit)
}

func (b SwapRecord) Kind() SwapKind        { return SwapKind(b[recKind]) }
func (b SwapRecord) SetKind(v SwapKind)    { b[recKind] = byte(v) }
func (b SwapRecord) Place() LogOffset      { return LogOffset(le.Uint64(b[recPlace:])) }
func (b SwapRecord) SetPlace(v LogOffset)  { le.PutUint64(b[recPlace:], uint64(v)) }
func (b SwapRecord) Source() uuid.UUID     { return uuid.UUID(b[recSource:]) }
func (b SwapRecord) SetSource(v uuid.UUID) { copy(b[recSource:], v[:]) }
func (b SwapRecord) KeyLen() int           { return int(b[recKeyLen]) }
func (b SwapRecord) Key() []byte           { return b[recKey : recKey+b.KeyLen()] }
func (b SwapRecord) ValueLen() int         { return int(le.Uint32(b[recValueLen:])) }
func (b SwapRecord) SetValueLen(v int)     { le.PutUint32(b[recValueLen:], uint32(v)) }
func (b SwapRecord) At() uint32            { return le.Uint32(b[recAt:]) }
func (b SwapRecord) SetAt(v uint32)        { le.PutUint32(b[recAt:], v) }
func (b SwapRecord) Value() []byte         { return b[b.header() : b.header()+b.ValueLen()] }

// LengthBytes is the length of the record.
func (b SwapRecord) LengthBytes() int { return RoundUp(b.header()+b.ValueLen(), SwapRecordUnit) }

func (b SwapRecord) header() int {
	if b[recMagic] == oldRecordMagic {
		return oldSwapRecordBytes
	}
	return SwapRecordHeaderBytes
}

// Version is the version of the object, or of the Delete; 0 in a record of version 1 of the format.
func (b SwapRecord) Version() uint64 {
	if b[recMagic] == oldRecordMagic {
		return 0
	}
	return le.Uint64(b[recVersion:])
}
func (b SwapRecord) SetVersion(v uint64) { le.PutUint64(b[recVersion:], v) }

// SetKey sets the key, which has at most 16 bytes, and its length.
func (b SwapRecord) SetKey(key []byte) {
	b[recKeyLen] = byte(len(key))
	clear(b[recKey:recValueLen])
	copy(b[recKey:recValueLen], key)
}

// Seal computes the checksum of a record.
//
// hot: 0 allocs
func (b SwapRecord) Seal(seed uint32) {
	b[recMagic] = recordMagic
	le.PutUint32(b, crc32.Update(seed, castagnoli, b[4:SwapRecordHeaderBytes+b.ValueLen()]))
}

// Check verifies a record.
//
// Errors: ErrCorrupt naming the field.
//
// hot: 0 allocs (if nothing is wrong)
func (b SwapRecord) Check(seed uint32) error {
	const what = "record"
	switch {
	case len(b) < oldSwapRecordBytes:
		return bad(what, "length", len(b), "at least 56")
	case b[recMagic] != recordMagic && b[recMagic] != oldRecordMagic:
		return bad(what, "magic", b[recMagic], recordMagic)
	case b.ValueLen() < 0 || b.ValueLen() > len(b)-b.header():
		return bad(what, "length of the value", b.ValueLen(), len(b)-b.header())
	}
	if got, want := le.Uint32(b), crc32.Update(seed, castagnoli, b[4:b.header()+b.ValueLen()]); got != want {
		return bad(what, "CRC32C", checksum(got), checksum(want))
	}
	switch {
	case b.KeyLen() < 1 || b.KeyLen() > MaxKey:
		return bad(what, "length of the key", b.KeyLen(), "1 to 16")
	case b.Kind() != SwapPut && b.Kind() != SwapDelete:
		return bad(what, "kind", b.Kind(), "1 or 2")
	case b[recReserved] != 0:
		return bad(what, "a reserved byte", "set", "zero")
	}
	return nil
}

// SwapManifest is a view of the swap manifest of a source partition: the areas that may hold records of the source, and
// the place in each from which on they count. There are two copies in the partition, between its first superblock and
// its first chunk.
//
//	0  20 B prelude, magic "JBOFDKVB"       32 16B  UUID of the source partition
//	20 u32  number of areas, at most 64     48 16B  reserved
//	24 u64  generation, 1 and up            64 …    areas, then zeroes
//
// An area is 24 bytes: its UUID, and the place before which no record counts, because those keys have returned.
type SwapManifest []byte

const (
	manifestMagic      = "JBOFDKVB"
	manifestCount      = 20
	manifestGeneration = 24
	manifestSource     = 32
	manifestReserved   = 48
	manifestAreas      = 64
	manifestAreaBytes  = 24
)

func (b SwapManifest) Areas() int             { return int(le.Uint32(b[manifestCount:])) }
func (b SwapManifest) Generation() uint64     { return le.Uint64(b[manifestGeneration:]) }
func (b SwapManifest) SetGeneration(v uint64) { le.PutUint64(b[manifestGeneration:], v) }
func (b SwapManifest) Source() uuid.UUID      { return uuid.UUID(b[manifestSource:]) }
func (b SwapManifest) SetSource(v uuid.UUID)  { copy(b[manifestSource:], v[:]) }

// Area returns the UUID of area i and the place from which on its records count.
func (b SwapManifest) Area(i int) (area uuid.UUID, floor LogOffset) {
	at := manifestAreas + i*manifestAreaBytes
	return uuid.UUID(b[at:]), LogOffset(le.Uint64(b[at+16:]))
}

// AddArea adds an area. There are at most MaxSwapAreas.
func (b SwapManifest) AddArea(area uuid.UUID, floor LogOffset) {
	n := b.Areas()
	at := manifestAreas + n*manifestAreaBytes
	copy(b[at:], area[:])
	le.PutUint64(b[at+16:], uint64(floor))
	le.PutUint32(b[manifestCount:], uint32(n+1))
}

// Seal completes the manifest by writing its prelude. It must be called last.
func (b SwapManifest) Seal() { seal(b[:SwapManifestBytes], manifestMagic, ManifestVersion) }

// Check verifies a copy of the manifest.
//
// Errors: ErrBlank, ErrVersion, ErrCorrupt naming the field.
func (b SwapManifest) Check() error {
	const what = "swap manifest"
	if len(b) != SwapManifestBytes {
		return bad(what, "length", len(b), SwapManifestBytes)
	}
	if err := check(b, what, manifestMagic, ManifestVersion, ManifestVersion); err != nil {
		return err
	}
	switch {
	case b.Generation() == 0:
		return bad(what, "generation", 0, "at least 1")
	case b.Areas() < 0 || b.Areas() > MaxSwapAreas:
		return bad(what, "number of areas", b.Areas(), "at most 64")
	case !zero(b[manifestReserved:manifestAreas]) || !zero(b[manifestAreas+b.Areas()*manifestAreaBytes:]):
		return bad(what, "a reserved byte", "set", "zero")
	}
	return nil
}
