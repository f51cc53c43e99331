// Package label keeps the on-drive table of extents: what part of an SSD belongs
// to which namespace, so that a restarted node finds everything again.
//
//	 0           128 KiB   1 MiB                                              device end (4 KiB aligned)
//	┌───────────┬─────────┬───────────────┬───────────────┬─ ─ ─ ─ ─┬─────────┬───────────┐
//	│ label A   │ unused  │ extent        │ extent        │  free   │ unused  │ label B   │
//	└───────────┴─────────┴───────────────┴───────────────┴─ ─ ─ ─ ─┴─────────┴───────────┘
//	 128 KiB               start and length are whole MiB              < 1 MiB    128 KiB
//
// Both labels are the same 128 KiB; all integers are little endian:
//
//	byte 0    ┌──────────────────────────────────────────────────────────────┐
//	  header  │   0  8 B  magic "JBOFDSSD"                                   │
//	          │   8  u32  version (1)                                        │
//	          │  12  u32  CRC32C of all 128 KiB, this field as zero          │
//	          │  16  u32  label length (131072)                              │
//	          │  20  u32  entry length (512)                                 │
//	          │  24  u32  number of entries (0 to 255)                       │
//	          │  28  u32  reserved                                           │
//	          │  32  u64  generation, 1 and up                               │
//	          │  40  16B  drive UUID                                         │
//	          │  56  u64  device length in bytes when written                │
//	          │  64 … 511 reserved                                           │
//	byte 512  ├──────────────────────────────────────────────────────────────┤
//	  entry   │   0  16B  extent UUID (the namespace's)                      │
//	   0      │  16  u64  start in bytes, whole MiB                          │
//	          │  24  u64  length in bytes, whole MiB, > 0                    │
//	          │  32  u32  NSID, 0 for none                                   │
//	          │  36  u8   use: 1 spare, 2 block, 3 kv, 4 ordering, 5 swap    │
//	          │  37  u8   log2 of the namespace's block size, 0 or 9 … 16    │
//	          │  38  u16  flags (none defined)                               │
//	          │  40  u8   length of the owner's NQN, 0 … 223                 │
//	          │  41 … 255 reserved                                           │
//	          │ 256  224B owner's NQN, zero-padded                           │
//	          │ 480 … 511 reserved                                           │
//	byte 1024 ├──────────────────────────────────────────────────────────────┤
//	          │ entry 1, … in order of start; the unused rest is zero        │
//	          └──────────────────────────────────────────────────────────────┘
//
// Reserved bytes are zero, checked. Magic, version, CRC and label length keep
// their places in all versions, so that an unknown version is told from damage.
//
// The valid label with the higher generation counts. An update never writes over
// the only valid copy, so a crash at any write leaves a readable label; see
// Store. No atomicity of the device beyond its block is assumed. Why the sizes:
// docs/decisions/0001-label-area.md.
package label

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"slices"
	"strings"

	"jbofd/internal/units"
	"jbofd/internal/uuid"
)

// Version is the format this package writes and the only one it reads.
const Version = 1

// Sizes in bytes.
const (
	// AreaBytes is the length of each of the two labels.
	AreaBytes = 128 << 10
	// AlignBytes is what starts and lengths of extents are multiples of.
	AlignBytes = 1 << 20
	// MinDeviceBytes is the smallest device that has room for an extent.
	MinDeviceBytes = 2*AlignBytes + AreaBytes
	// MaxNQN is the longest owner NQN.
	MaxNQN = 223
	// MaxExtents is how many extents a label holds.
	MaxExtents = (AreaBytes - headerBytes) / entryBytes
)

const (
	magic       = "JBOFDSSD"
	headerBytes = 512
	entryBytes  = 512
	tailAlign   = 4096 // alignment of label B

	offVersion     = 8
	offCRC         = 12
	offAreaBytes   = 16
	offEntryBytes  = 20
	offEntries     = 24
	offReserved0   = 28
	offGeneration  = 32
	offDriveUUID   = 40
	offDeviceBytes = 56
	offReserved1   = 64

	entStart     = 16
	entLength    = 24
	entNSID      = 32
	entUse       = 36
	entShift     = 37
	entFlags     = 38
	entNQNLen    = 40
	entReserved0 = 41
	entNQN       = 256
	entReserved1 = 480
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// The errors of reading a drive's label.
var (
	// ErrBlank: the drive has no label and no other data where such data is looked for, so it may be formatted.
	ErrBlank = errors.New("the drive is blank")
	// ErrForeign: the drive has no label but is not empty. It is overwritten only with force.
	ErrForeign = errors.New("the drive holds foreign data")
	// ErrVersion: the label is intact but of a version that this program does not know.
	ErrVersion = errors.New("unknown label version")
	// ErrCorrupt: there is a label, but no intact copy of it.
	ErrCorrupt = errors.New("the label is damaged")
	// ErrShrunk: the device is smaller than its label says.
	ErrShrunk = errors.New("the drive is smaller than its label says")
)

// The errors of changing the table.
var (
	// ErrNoRoom: there is no free range that is long enough, or no free entry.
	ErrNoRoom = errors.New("no room on the drive")
	// ErrExists: the UUID, or the pair of NQN and NSID, is in the table already.
	ErrExists = errors.New("extent exists already")
	// ErrNotFound: no extent has that UUID.
	ErrNotFound = errors.New("no such extent")
	// ErrInvalid: an argument out of its range.
	ErrInvalid = errors.New("invalid extent")
)

// Use is the purpose of an extent.
type Use uint8

// The uses of an extent.
const (
	// Spare: the extent is reserved and not yet used.
	Spare Use = 1 + iota
	// Block is a block namespace.
	Block
	// KV is a partition of the key-value store.
	KV
	// Ordering is the log of ordered writes.
	Ordering
	// Swap is a swap area, where key-value partitions of other drives store data for a while.
	Swap
)

// String returns the use as it is shown to operators.
func (u Use) String() string {
	switch u {
	case Spare:
		return "spare"
	case Block:
		return "block"
	case KV:
		return "kv"
	case Ordering:
		return "ordering"
	case Swap:
		return "swap"
	}
	return fmt.Sprintf("Use(%d)", uint8(u))
}

// Extent is a contiguous range of a drive.
type Extent struct {
	// UUID names the extent and the namespace on it; not zero, unique on the drive.
	UUID uuid.UUID
	// StartBytes and LengthBytes are multiples of AlignBytes.
	StartBytes  units.DriveOffset
	LengthBytes int64
	// NSID is the namespace's number in its subsystem, 0 if it has none. With
	// NQN it is unique on the drive.
	NSID uint32
	Use  Use
	// BlockShift is log2 of the namespace's block size, 9 to 16, or 0.
	BlockShift uint8
	// Flags has no bits defined in version 1.
	Flags uint16
	// NQN is the subsystem that owns the extent, up to MaxNQN bytes of printable
	// text without NUL, or "".
	NQN string
}

// EndBytes is the first byte behind the extent.
func (e *Extent) EndBytes() units.DriveOffset { return e.StartBytes.Add(units.Bytes(e.LengthBytes)) }

// Label is the content of a drive's label: pure data and arithmetic.
type Label struct {
	DriveUUID uuid.UUID
	// Generation counts updates, from 1.
	Generation uint64
	// DeviceBytes is the device's length; it places label B and bounds the extents.
	DeviceBytes int64
	// Extents are sorted by start. Invariant: they are disjoint and lie within
	// [AlignBytes, DataEnd(DeviceBytes)).
	Extents []Extent
}

// TailOffset is where label B begins on a device of that length.
func TailOffset(deviceBytes int64) int64 {
	return deviceBytes&^(tailAlign-1) - AreaBytes
}

// DataEnd is the end of the last possible extent on a device of that length.
func DataEnd(deviceBytes int64) int64 { return TailOffset(deviceBytes) &^ (AlignBytes - 1) }

// Clone returns a deep copy.
func (l *Label) Clone() *Label {
	c := *l
	c.Extents = slices.Clone(l.Extents)
	return &c
}

// Validate names the first field that breaks the format's rules.
//
// Errors: ErrInvalid.
func (l *Label) Validate() error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: %s", ErrInvalid, fmt.Sprintf(format, args...))
	}
	switch {
	case l.DriveUUID == uuid.UUID{}:
		return bad("drive UUID is zero")
	case l.Generation == 0:
		return bad("generation is 0")
	case l.DeviceBytes < MinDeviceBytes:
		return bad("device length is %d bytes, want at least %d", l.DeviceBytes, MinDeviceBytes)
	case len(l.Extents) > MaxExtents:
		return bad("%d extents, want at most %d", len(l.Extents), MaxExtents)
	}
	end, limit := units.DriveOffset(AlignBytes), units.DriveOffset(DataEnd(l.DeviceBytes))
	for i := range l.Extents {
		e := &l.Extents[i]
		if err := e.validate(); err != nil {
			return fmt.Errorf("extent %d: %w", i, err)
		}
		switch {
		case e.StartBytes < end && i > 0:
			return bad("extent %d at %d overlaps or precedes extent %d, which ends at %d", i, e.StartBytes, i-1, end)
		case e.StartBytes < end:
			return bad("extent 0 starts at %d, want at least %d", e.StartBytes, end)
		case e.EndBytes() > limit:
			return bad("extent %d ends at %d, want at most %d", i, e.EndBytes(), limit)
		}
		end = e.EndBytes()
		for j := range i {
			if err := e.distinct(&l.Extents[j]); err != nil {
				return bad("extents %d and %d: %v", j, i, err)
			}
		}
	}
	return nil
}

// validate checks what can be wrong with an extent alone.
func (e *Extent) validate() error {
	bad := func(field string, got any, want string) error {
		return fmt.Errorf("%w: %s is %v, want %s", ErrInvalid, field, got, want)
	}
	switch {
	case e.UUID == uuid.UUID{}:
		return bad("UUID", "zero", "any other")
	case e.StartBytes < 0 || e.StartBytes%AlignBytes != 0:
		return bad("start", e.StartBytes, "a multiple of 1 MiB")
	case e.LengthBytes <= 0 || e.LengthBytes%AlignBytes != 0:
		return bad("length", e.LengthBytes, "a positive multiple of 1 MiB")
	case e.EndBytes() < 0:
		return bad("length", e.LengthBytes, "an end below 2^63")
	case e.Use < Spare || e.Use > Swap:
		return bad("use", uint8(e.Use), "1 to 5")
	case e.BlockShift != 0 && (e.BlockShift < 9 || e.BlockShift > 16):
		return bad("block size shift", e.BlockShift, "0 or 9 to 16")
	case e.Flags != 0:
		return bad("flags", e.Flags, "0")
	case len(e.NQN) > MaxNQN:
		return bad("NQN length", len(e.NQN), "at most 223")
	case strings.IndexFunc(e.NQN, func(r rune) bool { return r < ' ' || r == 0x7f || r == 0xFFFD }) >= 0:
		return bad("NQN", fmt.Sprintf("%q", e.NQN), "printable UTF-8")
	}
	return nil
}

// distinct returns an error if both extents have the same identity.
func (e *Extent) distinct(o *Extent) error {
	switch {
	case e.UUID == o.UUID:
		return fmt.Errorf("%w: UUID %v", ErrExists, e.UUID)
	case e.NSID != 0 && e.NSID == o.NSID && e.NQN == o.NQN:
		return fmt.Errorf("%w: NSID %d of %q", ErrExists, e.NSID, e.NQN)
	}
	return nil
}

// Encode writes the label to dst, AreaBytes long, every byte of it.
//
// Errors: ErrInvalid, as Validate.
func (l *Label) Encode(dst []byte) error {
	if err := l.Validate(); err != nil {
		return err
	}
	dst = dst[:AreaBytes]
	clear(dst)
	le := binary.LittleEndian
	copy(dst, magic)
	le.PutUint32(dst[offVersion:], Version)
	le.PutUint32(dst[offAreaBytes:], AreaBytes)
	le.PutUint32(dst[offEntryBytes:], entryBytes)
	le.PutUint32(dst[offEntries:], uint32(len(l.Extents)))
	le.PutUint64(dst[offGeneration:], l.Generation)
	copy(dst[offDriveUUID:], l.DriveUUID[:])
	le.PutUint64(dst[offDeviceBytes:], uint64(l.DeviceBytes))
	for i := range l.Extents {
		e, d := &l.Extents[i], dst[headerBytes+i*entryBytes:][:entryBytes]
		copy(d, e.UUID[:])
		le.PutUint64(d[entStart:], uint64(e.StartBytes))
		le.PutUint64(d[entLength:], uint64(e.LengthBytes))
		le.PutUint32(d[entNSID:], e.NSID)
		d[entUse] = byte(e.Use)
		d[entShift] = e.BlockShift
		le.PutUint16(d[entFlags:], e.Flags)
		d[entNQNLen] = byte(len(e.NQN))
		copy(d[entNQN:], e.NQN)
	}
	le.PutUint32(dst[offCRC:], checksum(dst))
	return nil
}

// checksum is the CRC32C of an area with the CRC field as zero.
func checksum(area []byte) uint32 {
	crc := crc32.Update(0, castagnoli, area[:offCRC])
	crc = crc32.Update(crc, castagnoli, make([]byte, 4))
	return crc32.Update(crc, castagnoli, area[offCRC+4:])
}

// HasMagic reports whether b begins like a label, sound or not.
func HasMagic(b []byte) bool { return bytes.HasPrefix(b, []byte(magic)) }

// Decode reads a label from b, AreaBytes long, and checks all of it.
//
// Errors: ErrCorrupt naming the field (also when there is no label at all:
// HasMagic tells), ErrVersion.
func Decode(b []byte) (*Label, error) {
	bad := func(field string, got, want any) (*Label, error) {
		return nil, fmt.Errorf("%w: %s is %v, want %v", ErrCorrupt, field, got, want)
	}
	if len(b) != AreaBytes {
		return bad("label length", len(b), AreaBytes)
	}
	if !HasMagic(b) {
		return bad("magic", fmt.Sprintf("%q", b[:len(magic)]), fmt.Sprintf("%q", magic))
	}
	le := binary.LittleEndian
	if got := le.Uint32(b[offAreaBytes:]); got != AreaBytes {
		return bad("label length", got, AreaBytes)
	}
	if got, want := le.Uint32(b[offCRC:]), checksum(b); got != want {
		return bad("CRC32C", fmt.Sprintf("%#08x", got), fmt.Sprintf("%#08x", want))
	}
	if v := le.Uint32(b[offVersion:]); v != Version {
		return nil, fmt.Errorf("%w: the drive has %d, this program knows %d", ErrVersion, v, Version)
	}
	if got := le.Uint32(b[offEntryBytes:]); got != entryBytes {
		return bad("entry length", got, entryBytes)
	}
	n := le.Uint32(b[offEntries:])
	if n > MaxExtents {
		return bad("number of entries", n, fmt.Sprintf("at most %d", MaxExtents))
	}
	if !zero(b[offReserved0:offGeneration]) || !zero(b[offReserved1:headerBytes]) {
		return bad("a reserved byte of the header", "set", "zero")
	}
	if !zero(b[headerBytes+int(n)*entryBytes:]) {
		return bad("a byte behind the last entry", "set", "zero")
	}
	l := &Label{Generation: le.Uint64(b[offGeneration:]), DeviceBytes: int64(le.Uint64(b[offDeviceBytes:]))}
	copy(l.DriveUUID[:], b[offDriveUUID:])
	for i := range int(n) {
		d := b[headerBytes+i*entryBytes:][:entryBytes]
		nqn := int(d[entNQNLen])
		if nqn > MaxNQN {
			return bad(fmt.Sprintf("NQN length of entry %d", i), nqn, "at most 223")
		}
		if !zero(d[entReserved0:entNQN]) || !zero(d[entNQN+nqn:]) {
			return bad(fmt.Sprintf("a reserved byte of entry %d", i), "set", "zero")
		}
		e := Extent{
			StartBytes:  units.DriveOffset(le.Uint64(d[entStart:])),
			LengthBytes: int64(le.Uint64(d[entLength:])),
			NSID:        le.Uint32(d[entNSID:]),
			Use:         Use(d[entUse]),
			BlockShift:  d[entShift],
			Flags:       le.Uint16(d[entFlags:]),
			NQN:         string(d[entNQN : entNQN+nqn]),
		}
		copy(e.UUID[:], d)
		l.Extents = append(l.Extents, e)
	}
	if err := l.Validate(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	return l, nil
}

// zeroes is what zero compares with.
var zeroes [4096]byte

// zero reports whether b is all zeroes.
func zero(b []byte) bool {
	for len(b) > len(zeroes) {
		if !bytes.Equal(b[:len(zeroes)], zeroes[:]) {
			return false
		}
		b = b[len(zeroes):]
	}
	return bytes.Equal(b, zeroes[:len(b)])
}

// Allocate places e, whose StartBytes is ignored, in the first free range that is
// long enough and returns it with its start.
//
// Errors: ErrInvalid, ErrExists, ErrNoRoom (says the largest that would fit).
func (l *Label) Allocate(e Extent) (Extent, error) {
	e.StartBytes = 0
	if err := e.validate(); err != nil {
		return Extent{}, err
	}
	for i := range l.Extents {
		if err := e.distinct(&l.Extents[i]); err != nil {
			return Extent{}, err
		}
	}
	if len(l.Extents) >= MaxExtents {
		return Extent{}, fmt.Errorf("%w: all %d entries of the label are in use", ErrNoRoom, MaxExtents)
	}
	start := units.DriveOffset(AlignBytes)
	for i := 0; i <= len(l.Extents); i++ {
		end := l.endOfGap(i)
		if int64(end.Sub(start)) >= e.LengthBytes {
			e.StartBytes = start
			l.Extents = slices.Insert(l.Extents, i, e)
			return e, nil
		}
		if i < len(l.Extents) {
			start = l.Extents[i].EndBytes()
		}
	}
	return Extent{}, fmt.Errorf("%w: %dMiB wanted, the largest free range has %dMiB (of %dMiB free)", ErrNoRoom,
		e.LengthBytes/AlignBytes, l.LargestFreeBytes()/AlignBytes, l.FreeBytes()/AlignBytes)
}

// endOfGap is where the free range before extent i ends.
func (l *Label) endOfGap(i int) units.DriveOffset {
	if i < len(l.Extents) {
		return l.Extents[i].StartBytes
	}
	return units.DriveOffset(DataEnd(l.DeviceBytes))
}

// FreeBytes is the sum of all free ranges.
func (l *Label) FreeBytes() int64 {
	n := DataEnd(l.DeviceBytes) - AlignBytes
	for i := range l.Extents {
		n -= l.Extents[i].LengthBytes
	}
	return n
}

// LargestFreeBytes is the longest extent that Allocate can place.
func (l *Label) LargestFreeBytes() (n int64) {
	start := units.DriveOffset(AlignBytes)
	for i := 0; i <= len(l.Extents); i++ {
		n = max(n, int64(l.endOfGap(i).Sub(start)))
		if i < len(l.Extents) {
			start = l.Extents[i].EndBytes()
		}
	}
	return n
}

// Find returns the index of the extent of that UUID, or -1.
func (l *Label) Find(u uuid.UUID) int {
	return slices.IndexFunc(l.Extents, func(e Extent) bool { return e.UUID == u })
}

// FindNamespace returns the index of the extent of that subsystem and NSID, or -1.
func (l *Label) FindNamespace(nqn string, nsid uint32) int {
	return slices.IndexFunc(l.Extents, func(e Extent) bool { return e.NSID == nsid && e.NQN == nqn })
}

// Grow lengthens an extent in place. A length it has already changes nothing.
//
// Errors: ErrNotFound; ErrInvalid (not in MiB, or shorter than now); ErrNoRoom
// (what follows is in use: says how long it can become).
func (l *Label) Grow(u uuid.UUID, lengthBytes int64) error {
	i := l.Find(u)
	if i < 0 {
		return fmt.Errorf("%w: %v", ErrNotFound, u)
	}
	e := &l.Extents[i]
	if lengthBytes%AlignBytes != 0 || lengthBytes < e.LengthBytes {
		return fmt.Errorf("%w: length is %d, want a multiple of 1 MiB, at least the present %d", ErrInvalid,
			lengthBytes, e.LengthBytes)
	}
	if most := int64(l.endOfGap(i + 1).Sub(e.StartBytes)); lengthBytes > most {
		return fmt.Errorf("%w: extent %v can grow in place from %dMiB to at most %dMiB, %dMiB wanted", ErrNoRoom, u,
			e.LengthBytes/AlignBytes, most/AlignBytes, lengthBytes/AlignBytes)
	}
	e.LengthBytes = lengthBytes
	return nil
}

// Shrink shortens an extent in place. A length it has already changes nothing. What is behind its new end is free, and
// not touched.
//
// Errors: ErrNotFound; ErrInvalid (not in MiB, or longer than now).
func (l *Label) Shrink(u uuid.UUID, lengthBytes int64) error {
	i := l.Find(u)
	if i < 0 {
		return fmt.Errorf("%w: %v", ErrNotFound, u)
	}
	e := &l.Extents[i]
	if lengthBytes%AlignBytes != 0 || lengthBytes <= 0 || lengthBytes > e.LengthBytes {
		return fmt.Errorf("%w: length is %d, want a multiple of 1 MiB, at most the present %d", ErrInvalid, lengthBytes,
			e.LengthBytes)
	}
	e.LengthBytes = lengthBytes
	return nil
}

// Free removes an extent from the table. Its content is not touched.
//
// Errors: ErrNotFound.
func (l *Label) Free(u uuid.UUID) error {
	i := l.Find(u)
	if i < 0 {
		return fmt.Errorf("%w: %v", ErrNotFound, u)
	}
	l.Extents = slices.Delete(l.Extents, i, i+1)
	return nil
}
