package format

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
)

// Every structure that is found by its offset begins with a prelude, in all versions of the format:
//
//	0  8 B  magic
//	8  u32  version
//	12 u32  CRC32C of the whole structure without this field
//	16 u32  length of the whole structure in bytes
const (
	preludeVersion = 8
	preludeCRC     = 12
	preludeLength  = 16
)

// Errors that every Check wraps. The wrapping error names the structure and the field.
var (
	// ErrBlank: the bytes are all zero, so that nothing was ever written there.
	ErrBlank = errors.New("blank")
	// ErrVersion: the checksum is right, but this program does not know the version.
	ErrVersion = errors.New("unknown format version")
	// ErrCorrupt: the bytes are not what was written.
	ErrCorrupt = errors.New("damaged")
)

var (
	castagnoli = crc32.MakeTable(crc32.Castagnoli)
	le         = binary.LittleEndian
)

// fieldError is an ErrCorrupt. Its text is made only if somebody reads it, because recovery looks for records where
// there may be none, and then most checks fail.
type fieldError struct {
	what, field string
	got, want   any
}

func (e *fieldError) Error() string {
	return fmt.Sprintf("%s: %v: %s is %v, want %v", e.what, ErrCorrupt, e.field, e.got, e.want)
}

func (e *fieldError) Unwrap() error { return ErrCorrupt }

// bad returns ErrCorrupt for a field that does not have the value it must have. got and want must not change later.
func bad(what, field string, got, want any) error {
	return &fieldError{what: what, field: field, got: got, want: want}
}

// checksum is printed in hexadecimal.
type checksum uint32

func (c checksum) String() string { return fmt.Sprintf("%#08x", uint32(c)) }

// zero reports whether b contains only zeroes.
func zero(b []byte) bool {
	for _, v := range b {
		if v != 0 {
			return false
		}
	}
	return true
}

func preludeCRCOf(b []byte) uint32 {
	return crc32.Update(crc32.Update(0, castagnoli, b[:preludeCRC]), castagnoli, b[preludeCRC+4:])
}

// seal writes the prelude of b, which has exactly the length of the structure and is complete otherwise. The magic has
// 8 bytes.
func seal(b []byte, magic string, version uint32) {
	copy(b, magic)
	le.PutUint32(b[preludeVersion:], version)
	le.PutUint32(b[preludeLength:], uint32(len(b)))
	le.PutUint32(b[preludeCRC:], preludeCRCOf(b))
}

// check verifies the prelude of b, which has exactly the length of the structure, and whose version must be one from
// oldest to newest. The name what is used in errors.
//
// Errors: ErrBlank, ErrVersion naming the versions, ErrCorrupt naming the field.
func check(b []byte, what, magic string, oldest, newest uint32) error {
	if got := string(b[:8]); got != magic {
		if zero(b) {
			return fmt.Errorf("%s: %w", what, ErrBlank)
		}
		return bad(what, "magic", fmt.Sprintf("%q", got), fmt.Sprintf("%q", magic))
	}
	if got := int64(le.Uint32(b[preludeLength:])); got != int64(len(b)) {
		return bad(what, "length", got, len(b))
	}
	if got, want := le.Uint32(b[preludeCRC:]), preludeCRCOf(b); got != want {
		return bad(what, "CRC32C", checksum(got), checksum(want))
	}
	if v := le.Uint32(b[preludeVersion:]); v < oldest || v > newest {
		known := fmt.Sprint(newest)
		if oldest < newest {
			known = fmt.Sprintf("%d to %d", oldest, newest)
		}
		return fmt.Errorf("%s: %w: it has %d, this program knows %s", what, ErrVersion, v, known)
	}
	return nil
}
