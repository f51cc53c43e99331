package format

import (
	"fmt"
	"hash/crc32"
)

// Value is a view of a value in the value log. It may be longer than the record.
//
//	0  u32  CRC32C of the rest, from Seed       8  u32  low bits of the hash of the key
//	4  u8   magic 'v'                           12 u32  low bits of the version of the record
//	5  u24  length of the value, at least 1     16 …    value
//
// The version is that which the next segment had when the value was written. Records of versions 2 and 3 of the format
// have all of the hash and more of the version:
//
//	4  u8   magic 'V'                           16 u48  version
//	8  u64  hash of the key                     22 2 B  reserved
//	                                            24 …    value
type Value []byte

const (
	// ValueHeaderBytes is the length of a record before its value. Those of old versions have more.
	ValueHeaderBytes = 16
	oldValueBytes    = 24

	valueMagic, oldValueMagic = 'v', 'V'
	valMagic                  = 4
	valLength                 = 5
	valHash                   = 8
	valVersion                = 12
	oldValVersion             = 16
	oldValReserved            = 22
)

// ValueBytes is the length of the record of a value of that length.
func ValueBytes(valueLen int) int { return RoundUp(ValueHeaderBytes+valueLen, ValueUnit) }

// MaxValueBytes is the length of the record of a value of that length, of whichever version.
func MaxValueBytes(valueLen int) int { return RoundUp(oldValueBytes+valueLen, ValueUnit) }

func (b Value) old() bool { return b[valMagic] == oldValueMagic }

func (b Value) header() int {
	if b.old() {
		return oldValueBytes
	}
	return ValueHeaderBytes
}

// RecordBytes is the length of the record.
func (b Value) RecordBytes() int  { return RoundUp(b.header()+b.ValueLen(), ValueUnit) }
func (b Value) ValueLen() int     { return int(uint24(b[valLength:])) }
func (b Value) SetValueLen(v int) { putUint24(b[valLength:], uint32(v)) }

// Hash is the low 32 bits of the hash of the key. They are enough for the number of its segment.
func (b Value) Hash() uint32 { return le.Uint32(b[valHash:]) }

// SetHash sets the low bits of the hash.
func (b Value) SetHash(v uint64) { le.PutUint32(b[valHash:], uint32(v)) }

// HasHash reports whether a hash may be that of the key.
func (b Value) HasHash(hash uint64) bool {
	if b.old() {
		return le.Uint64(b[valHash:]) == hash
	}
	return b.Hash() == uint32(hash)
}

// Version returns the low bits of the version, and how many.
func (b Value) Version() (version uint64, bits int) {
	if b.old() {
		return uint48(b[oldValVersion:]), 48
	}
	return uint64(le.Uint32(b[valVersion:])), 32
}

// SetVersion sets the low bits of the version.
func (b Value) SetVersion(v uint64) { le.PutUint32(b[valVersion:], uint32(v)) }

// Data is the value.
func (b Value) Data() []byte { return b[b.header() : b.header()+b.ValueLen()] }

// Begins reports whether b has the magic of a value, valid or not.
func (b Value) Begins() bool {
	return len(b) >= ValueHeaderBytes && (b[valMagic] == valueMagic || b.old() && len(b) >= oldValueBytes)
}

// Seal computes the checksum of a value whose seed is given.
func (b Value) Seal(seed uint32) {
	b[valMagic] = valueMagic
	le.PutUint32(b, crc32.Update(seed, castagnoli, b[4:ValueHeaderBytes+b.ValueLen()]))
}

// Check verifies the record.
//
// Errors: ErrCorrupt naming the field.
//
// hot: 0 allocs (if nothing is wrong)
func (b Value) Check(seed uint32) error {
	const what = "value"
	switch {
	case len(b) < ValueHeaderBytes:
		return bad(what, "length", len(b), "at least 16")
	case !b.Begins():
		return bad(what, "magic", b[valMagic], valueMagic)
	}
	most := min(len(b)-b.header(), MaxValue)
	if b.ValueLen() < 1 || b.ValueLen() > most {
		return bad(what, "length", b.ValueLen(), fmt.Sprintf("1 to %d", most))
	}
	if got, want := le.Uint32(b), crc32.Update(seed, castagnoli, b[4:b.header()+b.ValueLen()]); got != want {
		return bad(what, "CRC32C", checksum(got), checksum(want))
	}
	if b.old() && !zero(b[oldValReserved:oldValueBytes]) {
		return bad(what, "a reserved byte", "set", "zero")
	}
	return nil
}
