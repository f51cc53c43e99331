// Package prelude is what all structures of the key-value store on an SSD begin with that are found by their
// offset, in all versions, little endian:
//
//	0  8 B  magic
//	8  u32  version
//	12 u32  CRC32C of the whole, this field left out
//	16 u32  length
package prelude

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
)

// Bytes is the length of a prelude.
const Bytes = 20

const (
	offVersion = 8
	offCRC     = 12
	offLength  = 16
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

// Castagnoli is the table of CRC32C.
var Castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Bad is ErrCorrupt for a field that is not as it must be.
func Bad(what, field string, got, want any) error {
	return fmt.Errorf("%s: %w: %s is %v, want %v", what, ErrCorrupt, field, got, want)
}

// Zero reports whether there is nothing but zeroes in b.
func Zero(b []byte) bool {
	for _, v := range b {
		if v != 0 {
			return false
		}
	}
	return true
}

func crcOf(b []byte) uint32 {
	return crc32.Update(crc32.Update(0, Castagnoli, b[:offCRC]), Castagnoli, b[offCRC+4:])
}

// Seal writes the prelude of b, which is exactly as long as the structure, and complete but for that. magic has 8 bytes.
func Seal(b []byte, magic string, version uint32) {
	le := binary.LittleEndian
	copy(b, magic)
	le.PutUint32(b[offVersion:], version)
	le.PutUint32(b[offLength:], uint32(len(b)))
	le.PutUint32(b[offCRC:], crcOf(b))
}

// Check tests the prelude of b, which is exactly as long as the structure; version is the one that this program knows. what is for
// errors.
//
// Errors: ErrBlank, ErrVersion with both versions, ErrCorrupt naming the field.
func Check(b []byte, what, magic string, version uint32) error {
	le := binary.LittleEndian
	if got := string(b[:8]); got != magic {
		if Zero(b) {
			return fmt.Errorf("%s: %w", what, ErrBlank)
		}
		return Bad(what, "magic", fmt.Sprintf("%q", got), fmt.Sprintf("%q", magic))
	}
	if got := int64(le.Uint32(b[offLength:])); got != int64(len(b)) {
		return Bad(what, "length", got, len(b))
	}
	if got, want := le.Uint32(b[offCRC:]), crcOf(b); got != want {
		return Bad(what, "CRC32C", fmt.Sprintf("%#08x", got), fmt.Sprintf("%#08x", want))
	}
	if v := le.Uint32(b[offVersion:]); v != version {
		return fmt.Errorf("%s: %w: it has %d, this program knows %d", what, ErrVersion, v, version)
	}
	return nil
}
