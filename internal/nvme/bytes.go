package nvme

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math/bits"
	"strings"
	"unicode/utf8"
)

var le = binary.LittleEndian

// fieldError says which field of a structure is wrong, its value and what is allowed.
func fieldError(what, field string, value any, allowed string) error {
	return fmt.Errorf("%s: %s is %v, must be %s", what, field, value, allowed)
}

// Uint128 is a 128-bit counter.
type Uint128 struct{ Lo, Hi uint64 }

// U128 widens v.
func U128(v uint64) Uint128 { return Uint128{Lo: v} }

// Uint64 is the value, or all ones when it does not fit.
func (u Uint128) Uint64() uint64 {
	if u.Hi != 0 {
		return ^uint64(0)
	}
	return u.Lo
}

// Add returns u+v, wrapping at 2^128.
func (u Uint128) Add(v uint64) Uint128 {
	lo, carry := bits.Add64(u.Lo, v, 0)
	return Uint128{Lo: lo, Hi: u.Hi + carry}
}

func getUint128(b []byte) Uint128 { return Uint128{Lo: le.Uint64(b), Hi: le.Uint64(b[8:])} }

func putUint128(b []byte, v Uint128) {
	le.PutUint64(b, v.Lo)
	le.PutUint64(b[8:], v.Hi)
}

// setASCII fills dst with s, left justified and padded with spaces; bytes that are not
// printable ASCII become '?', what does not fit is cut.
func setASCII(dst []byte, s string) {
	for i := range dst {
		switch {
		case i >= len(s):
			dst[i] = ' '
		case s[i] < ' ' || s[i] > '~':
			dst[i] = '?'
		default:
			dst[i] = s[i]
		}
	}
}

// asciiField reads a padded field: spaces at the end go, as does all from a NUL on.
func asciiField(b []byte) string { return strings.TrimRight(textField(b), " ") }

func isASCII(s string) bool {
	for i := range len(s) {
		if s[i] < ' ' || s[i] > '~' {
			return false
		}
	}
	return true
}

// setText fills dst with s and zeroes; one byte at least stays zero.
func setText(dst []byte, s string) {
	clear(dst)
	copy(dst[:len(dst)-1], s)
}

// textField reads a field up to its NUL, or to its end.
func textField(b []byte) string {
	if i := bytes.IndexByte(b, 0); i >= 0 {
		b = b[:i]
	}
	return string(b)
}

// terminated reports whether an NQN field ends with a NUL in time.
func terminated(b []byte) bool { return bytes.IndexByte(b[:MaxNQNLen+1], 0) >= 0 }

// CheckNQN judges an NVMe qualified name as the Linux host does: 1 to 223 bytes of
// UTF-8 without NUL, compared byte for byte. The form nqn.yyyy-mm.domain:name is not demanded.
func CheckNQN(s string) error {
	switch {
	case s == "":
		return fmt.Errorf("NQN is empty, must be 1 to %d bytes of UTF-8", MaxNQNLen)
	case len(s) > MaxNQNLen:
		return fmt.Errorf("NQN %q... has %d bytes, must be 1 to %d", s[:16], len(s), MaxNQNLen)
	case !utf8.ValidString(s):
		return fmt.Errorf("NQN %q is not valid UTF-8", s)
	case strings.IndexByte(s, 0) >= 0:
		return fmt.Errorf("NQN %q holds a NUL", s)
	}
	return nil
}

// UUID is a 128-bit identifier in the order it is printed in (RFC 9562): that of host
// identifiers, NGUIDs and namespace UUIDs on the wire.
type UUID [16]byte

// IsZero reports the nil UUID, which stands for none.
func (u UUID) IsZero() bool { return u == UUID{} }

// String is the UUID in lower case, 8-4-4-4-12.
func (u UUID) String() string {
	h := hex.EncodeToString(u[:])
	return h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:]
}

// ParseUUID reads 32 hexadecimal digits, with the four hyphens of String or with none.
func ParseUUID(s string) (u UUID, err error) {
	h := s
	if len(s) == 36 && s[8] == '-' && s[13] == '-' && s[18] == '-' && s[23] == '-' {
		h = s[:8] + s[9:13] + s[14:18] + s[19:23] + s[24:]
	}
	if len(h) != 32 {
		return UUID{}, fmt.Errorf("UUID %q: must be 32 hexadecimal digits as xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx", s)
	}
	if _, err := hex.Decode(u[:], []byte(h)); err != nil {
		return UUID{}, fmt.Errorf("UUID %q: %w", s, err)
	}
	return u, nil
}
