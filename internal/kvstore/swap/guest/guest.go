// Package guest is what swapping leaves on SSDs: views over bytes, little endian, with nothing but
// layout and checks.
//
// A swap area is an extent of its own. After two superblocks, of which the valid one with the higher
// generation counts, there is the guest log, circular:
//
//	 0              4 KiB          8 KiB                                                     end
//	┌──────────────┬──────────────┬─ ─ ─ ─ ─┬───────────────┬───────────────┬─ ─ ─ ─ ─ ─ ─ ─┐
//	│ superblock A │ superblock B │ rest of │ group         │ group         │ former lap    │
//	└──────────────┴──────────────┴─ ─ ─ ─ ─┴───────────────┴───────────────┴─ ─ ─ ─ ─ ─ ─ ─┘
//	                              LogTail >  LogHead                          > LogTail
//
//	group   ┌────────┬────────┬────────┬────────┬──────┐
//	        │ header │ record │ record │ record │ zero │   whole blocks; records at multiples of 8
//	        └────────┴────────┴────────┴────────┴──────┘
//
// A place in the log counts bytes since the area was made and only grows; its offset is the rest of the division by
// the log's length. A group does not go over the end: if it does not fit before, it is placed at the beginning of
// the next lap. Checksums start from the area's salt and the place: what a former lap left, or a host put into a
// value, is never a group or a record.
//
// Groups are written one at a time, the next one when the one before is durable: so the first that is not valid is the
// end of the log, and a valid one behind it says that the area is damaged.
//
// The Book is two blocks in the home's partition, between its first superblock and its first chunk. It says in which
// areas there may be records of this home, and from which place on they count.
//
// Why it is so: docs/decisions/0008-swapping.md.
package guest

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/prelude"
)

// Version is the format that this package writes and the only one it reads.
const Version = 1

// Sizes in bytes.
const (
	// SuperblockBytes is the length of each superblock, LogStart where in an area the log begins.
	SuperblockBytes = 4096
	LogStart        = 2 * SuperblockBytes
	// GroupHeaderBytes is the length of a group's header, RecordHeaderBytes that of a record before its value.
	GroupHeaderBytes, RecordHeaderBytes = 32, 56
	// RecordUnit is what records are aligned to.
	RecordUnit = 8
	// MaxGroupBytes is the length of the longest group.
	MaxGroupBytes = 256 << 10
	// BookBytes is the length of each copy of the book.
	BookBytes = 4096
	// MaxAreas is how many areas a book has lines for.
	MaxAreas = 64
)

// BookOffsets are where in a partition the copies of its book are.
var BookOffsets = [2]int64{16 << 10, 32 << 10}

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

// Superblock and book begin with a prelude.
func seal(b []byte, magic string) { prelude.Seal(b, magic, Version) }

func check(b []byte, what, magic string) error { return prelude.Check(b, what, magic, Version) }

func bad(what, field string, got, want any) error { return prelude.Bad(what, field, got, want) }

func zero(b []byte) bool { return prelude.Zero(b) }

// Superblock is a view of SuperblockBytes that say what the area is and where its log begins.
//
//	0  20 B prelude, magic "JBOFDKVG"       48  u64  length of the area in bytes
//	20 u32  block size                      56  u64  salt
//	24 u64  generation, 1 and up            64  u64  place of LogHead
//	32 16B  area's UUID                     72 … 4095 reserved
type Superblock []byte

const (
	superMagic      = "JBOFDKVG"
	superBlockSize  = 20
	superGeneration = 24
	superUUID       = 32
	superLength     = 48
	superSalt       = 56
	superLogHead    = 64
	superReserved   = 72
)

func (b Superblock) BlockSize() int         { return int(le.Uint32(b[superBlockSize:])) }
func (b Superblock) SetBlockSize(v int)     { le.PutUint32(b[superBlockSize:], uint32(v)) }
func (b Superblock) Generation() uint64     { return le.Uint64(b[superGeneration:]) }
func (b Superblock) SetGeneration(v uint64) { le.PutUint64(b[superGeneration:], v) }
func (b Superblock) UUID() [16]byte         { return [16]byte(b[superUUID:]) }
func (b Superblock) SetUUID(v [16]byte)     { copy(b[superUUID:], v[:]) }
func (b Superblock) AreaBytes() int64       { return int64(le.Uint64(b[superLength:])) }
func (b Superblock) SetAreaBytes(v int64)   { le.PutUint64(b[superLength:], uint64(v)) }
func (b Superblock) Salt() uint64           { return le.Uint64(b[superSalt:]) }
func (b Superblock) SetSalt(v uint64)       { le.PutUint64(b[superSalt:], v) }
func (b Superblock) LogHead() uint64        { return le.Uint64(b[superLogHead:]) }
func (b Superblock) SetLogHead(v uint64)    { le.PutUint64(b[superLogHead:], v) }

// Seal completes the superblock: the prelude, last of all.
func (b Superblock) Seal() { seal(b[:SuperblockBytes], superMagic) }

// Check says what is wrong with the superblock of an area of that length.
//
// Errors: ErrBlank, ErrVersion, ErrCorrupt naming the field.
func (b Superblock) Check(areaBytes int64) error {
	const what = "superblock of the swap area"
	if len(b) != SuperblockBytes {
		return bad(what, "length", len(b), SuperblockBytes)
	}
	if err := check(b, what, superMagic); err != nil {
		return err
	}
	switch n := b.BlockSize(); {
	case n < 512 || n > SuperblockBytes || n&(n-1) != 0:
		return bad(what, "block size", n, "a power of two from 512 to 4096")
	case b.Generation() == 0:
		return bad(what, "generation", 0, "at least 1")
	case b.AreaBytes() != areaBytes:
		return bad(what, "length of the area", b.AreaBytes(), areaBytes)
	case b.LogHead()%uint64(n) != 0:
		return bad(what, "LogHead", b.LogHead(), "whole blocks")
	case !zero(b[superReserved:]):
		return bad(what, "a reserved byte", "set", "zero")
	}
	return nil
}

// Log is how places of an area's log become offsets and seeds.
type Log struct {
	// LenBytes is the log's length, whole blocks.
	LenBytes uint64
	// Salt is the area's.
	Salt uint32
}

// NewLog returns the log of the area with that superblock.
func NewLog(b Superblock) Log {
	n := uint64(b.AreaBytes()-LogStart) &^ uint64(b.BlockSize()-1)
	return Log{LenBytes: n, Salt: uint32(b.Salt()) ^ uint32(b.Salt()>>32)}
}

// Offset is where in the area a place is.
func (l Log) Offset(place uint64) int64 { return LogStart + int64(place%l.LenBytes) }

// NextLap is the first place of the lap after that of place, or place itself if it begins one.
func (l Log) NextLap(place uint64) uint64 { return (place + l.LenBytes - 1) / l.LenBytes * l.LenBytes }

// Rest is how many bytes of its lap begin at place.
func (l Log) Rest(place uint64) uint64 { return l.LenBytes - place%l.LenBytes }

// Seed is where the checksum of what is at place starts.
func (l Log) Seed(place uint64) uint32 {
	return format.Seed(l.Salt, uint32(place>>40), int64(place))
}

// Group is a view of a group.
//
//	0  u32  CRC32C of the header's rest, from Seed   20 u32  number of records, at least 1
//	4  u8   magic 'G'                                24 u32  CRC32C of what follows the header
//	5  3 B  reserved                                 28 4 B  reserved
//	8  u64  place                                    32 …    records
//	16 u32  length in bytes, whole blocks
//
// A record's own checksum does not say which group it is of: what a group left that was torn by a crash stands at the
// same places as the records of the one that is written there next.
type Group []byte

const (
	groupMagic     = 'G'
	grpMagic       = 4
	grpReserved0   = 5
	grpPlace       = 8
	grpLength      = 16
	grpRecords     = 20
	grpContent     = 24
	grpReserved1   = 28
	groupHeaderEnd = GroupHeaderBytes
)

func (b Group) Place() uint64        { return le.Uint64(b[grpPlace:]) }
func (b Group) SetPlace(v uint64)    { le.PutUint64(b[grpPlace:], v) }
func (b Group) LengthBytes() int     { return int(le.Uint32(b[grpLength:])) }
func (b Group) SetLengthBytes(v int) { le.PutUint32(b[grpLength:], uint32(v)) }
func (b Group) Records() int         { return int(le.Uint32(b[grpRecords:])) }
func (b Group) SetRecords(v int)     { le.PutUint32(b[grpRecords:], uint32(v)) }

// Seal completes the header of a group, when its records are.
func (b Group) Seal(seed uint32) {
	b[grpMagic] = groupMagic
	le.PutUint32(b[grpContent:], crc32.Checksum(b[GroupHeaderBytes:b.LengthBytes()], castagnoli))
	le.PutUint32(b, crc32.Update(seed, castagnoli, b[4:groupHeaderEnd]))
}

// CheckHeader says what is wrong with the header of a group; its records may be anything.
//
// Errors: ErrCorrupt naming the field.
func (b Group) CheckHeader(seed uint32, blockSize int) error {
	const what = "group"
	switch {
	case len(b) < GroupHeaderBytes:
		return bad(what, "length", len(b), "at least 32")
	case b[grpMagic] != groupMagic:
		return bad(what, "magic", b[grpMagic], groupMagic)
	}
	if got, want := le.Uint32(b), crc32.Update(seed, castagnoli, b[4:groupHeaderEnd]); got != want {
		return bad(what, "CRC32C", fmt.Sprintf("%#08x", got), fmt.Sprintf("%#08x", want))
	}
	switch n := b.LengthBytes(); {
	case n < blockSize || n > MaxGroupBytes || n%blockSize != 0:
		return bad(what, "length", n, "whole blocks, at most 256 KiB")
	case b.Records() < 1 || b.Records() > n/RecordHeaderBytes:
		return bad(what, "number of records", b.Records(), "at least 1, as many as fit")
	case !zero(b[grpReserved0:grpPlace]) || !zero(b[grpReserved1:groupHeaderEnd]):
		return bad(what, "a reserved byte", "set", "zero")
	}
	return nil
}

// CheckContent says what is wrong with what follows the header, which has been checked; the group is there in
// full length.
//
// Errors: ErrCorrupt naming the field.
func (b Group) CheckContent() error {
	if got, want := le.Uint32(b[grpContent:]), crc32.Checksum(b[GroupHeaderBytes:b.LengthBytes()], castagnoli); got != want {
		return bad("group", "CRC32C of the records", fmt.Sprintf("%#08x", got), fmt.Sprintf("%#08x", want))
	}
	return nil
}

// Kind is what a record says of its key.
type Kind uint8

// Kinds of records.
const (
	// Put: the key has this value.
	Put Kind = 1 + iota
	// Delete: the key does not exist.
	Delete
)

// Record is a view of a record. It may be longer than the record.
//
//	0  u32  CRC32C of the rest, from Seed    16 16B  UUID of the home's partition
//	4  u8   magic 'R'                        32 16B  key, filled up with zeroes
//	5  u8   kind: 1 Put, 2 Delete            48 u32  length of the value
//	6  u8   length of the key, 1 to 16       52 u32  where in its group it is
//	7  u8   reserved                         56 …    value
//	8  u64  place
type Record []byte

const (
	recordMagic = 'R'
	recMagic    = 4
	recKind     = 5
	recKeyLen   = 6
	recReserved = 7
	recPlace    = 8
	recHome     = 16
	recKey      = 32
	recValueLen = 48
	recAt       = 52
)

// RecordBytes is what a record with a value of that length takes.
func RecordBytes(valueLen int) int {
	return format.RoundUp(RecordHeaderBytes+valueLen, RecordUnit)
}

func (b Record) Kind() Kind         { return Kind(b[recKind]) }
func (b Record) SetKind(v Kind)     { b[recKind] = byte(v) }
func (b Record) Place() uint64      { return le.Uint64(b[recPlace:]) }
func (b Record) SetPlace(v uint64)  { le.PutUint64(b[recPlace:], v) }
func (b Record) Home() [16]byte     { return [16]byte(b[recHome:]) }
func (b Record) SetHome(v [16]byte) { copy(b[recHome:], v[:]) }
func (b Record) KeyLen() int        { return int(b[recKeyLen]) }
func (b Record) Key() []byte        { return b[recKey : recKey+b.KeyLen()] }
func (b Record) ValueLen() int      { return int(le.Uint32(b[recValueLen:])) }
func (b Record) SetValueLen(v int)  { le.PutUint32(b[recValueLen:], uint32(v)) }
func (b Record) At() uint32         { return le.Uint32(b[recAt:]) }
func (b Record) SetAt(v uint32)     { le.PutUint32(b[recAt:], v) }
func (b Record) Value() []byte      { return b[RecordHeaderBytes : RecordHeaderBytes+b.ValueLen()] }

// SetKey sets the key, of at most 16 bytes, and its length.
func (b Record) SetKey(key []byte) {
	b[recKeyLen] = byte(len(key))
	clear(b[recKey:recValueLen])
	copy(b[recKey:recValueLen], key)
}

// Seal completes a record.
//
// hot: 0 allocs
func (b Record) Seal(seed uint32) {
	b[recMagic] = recordMagic
	le.PutUint32(b, crc32.Update(seed, castagnoli, b[4:RecordHeaderBytes+b.ValueLen()]))
}

// Check says what is wrong with a record.
//
// Errors: ErrCorrupt naming the field.
//
// hot: 0 allocs (if nothing is wrong)
func (b Record) Check(seed uint32) error {
	const what = "record"
	switch {
	case len(b) < RecordHeaderBytes:
		return bad(what, "length", len(b), "at least 56")
	case b[recMagic] != recordMagic:
		return bad(what, "magic", b[recMagic], recordMagic)
	case b.ValueLen() < 0 || b.ValueLen() > len(b)-RecordHeaderBytes:
		return bad(what, "length of the value", b.ValueLen(), len(b)-RecordHeaderBytes)
	}
	if got, want := le.Uint32(b), crc32.Update(seed, castagnoli, b[4:RecordHeaderBytes+b.ValueLen()]); got != want {
		return bad(what, "CRC32C", fmt.Sprintf("%#08x", got), fmt.Sprintf("%#08x", want))
	}
	switch {
	case b.KeyLen() < 1 || b.KeyLen() > format.MaxKey:
		return bad(what, "length of the key", b.KeyLen(), "1 to 16")
	case b.Kind() != Put && b.Kind() != Delete:
		return bad(what, "kind", b.Kind(), "1 or 2")
	case b[recReserved] != 0:
		return bad(what, "a reserved byte", "set", "zero")
	}
	return nil
}

// Book is a view of BookBytes that say where a home may have guests.
//
//	0  20 B prelude, magic "JBOFDKVB"       32 16B  UUID of the home's partition
//	20 u32  number of lines, at most 64     48 16B  reserved
//	24 u64  generation, 1 and up            64 …    lines, then zeroes
//
// A line is 24 bytes: the area's UUID, and the place before which nothing counts: those records are at home.
type Book []byte

const (
	bookMagic      = "JBOFDKVB"
	bookCount      = 20
	bookGeneration = 24
	bookHome       = 32
	bookReserved   = 48
	bookLines      = 64
	bookLineBytes  = 24
)

func (b Book) Lines() int             { return int(le.Uint32(b[bookCount:])) }
func (b Book) Generation() uint64     { return le.Uint64(b[bookGeneration:]) }
func (b Book) SetGeneration(v uint64) { le.PutUint64(b[bookGeneration:], v) }
func (b Book) Home() [16]byte         { return [16]byte(b[bookHome:]) }
func (b Book) SetHome(v [16]byte)     { copy(b[bookHome:], v[:]) }

// Line returns a line: the area and the place from which on its records count.
func (b Book) Line(i int) (area [16]byte, floor uint64) {
	at := bookLines + i*bookLineBytes
	return [16]byte(b[at:]), le.Uint64(b[at+16:])
}

// AddLine appends a line; there are at most MaxAreas.
func (b Book) AddLine(area [16]byte, floor uint64) {
	n := b.Lines()
	at := bookLines + n*bookLineBytes
	copy(b[at:], area[:])
	le.PutUint64(b[at+16:], floor)
	le.PutUint32(b[bookCount:], uint32(n+1))
}

// Seal completes the book: the prelude, last of all.
func (b Book) Seal() { seal(b[:BookBytes], bookMagic) }

// Check says what is wrong with a copy of the book.
//
// Errors: ErrBlank, ErrVersion, ErrCorrupt naming the field.
func (b Book) Check() error {
	const what = "book of guests"
	if len(b) != BookBytes {
		return bad(what, "length", len(b), BookBytes)
	}
	if err := check(b, what, bookMagic); err != nil {
		return err
	}
	switch {
	case b.Generation() == 0:
		return bad(what, "generation", 0, "at least 1")
	case b.Lines() < 0 || b.Lines() > MaxAreas:
		return bad(what, "number of lines", b.Lines(), "at most 64")
	case !zero(b[bookReserved:bookLines]) || !zero(b[bookLines+b.Lines()*bookLineBytes:]):
		return bad(what, "a reserved byte", "set", "zero")
	}
	return nil
}
