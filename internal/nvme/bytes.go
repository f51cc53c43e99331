package nvme

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/bits"
	"strings"
	"unicode/utf8"
)

var le = binary.LittleEndian

// fieldError returns an error that names the invalid field of a structure, its value and the allowed values.
func fieldError(what, field string, value any, allowed string) error {
	return fmt.Errorf("%s: %s is %v, must be %s", what, field, value, allowed)
}

// Uint128 is a 128-bit counter.
type Uint128 struct{ Lo, Hi uint64 }

// U128 converts v to a Uint128.
func U128(v uint64) Uint128 { return Uint128{Lo: v} }

// Uint64 returns the value, or the maximum uint64 if the value is larger.
func (u Uint128) Uint64() uint64 {
	if u.Hi != 0 {
		return ^uint64(0)
	}
	return u.Lo
}

// Float64 returns the value, as near as a float64 comes to it.
func (u Uint128) Float64() float64 { return float64(u.Hi)*(1<<64) + float64(u.Lo) }

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

// setASCII writes s to dst, left justified and padded with spaces. Bytes that are not printable ASCII become '?', and a
// string that is too long is truncated.
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

// asciiField returns a padded field without trailing spaces and without everything from a NUL on.
func asciiField(b []byte) string { return strings.TrimRight(textField(b), " ") }

func isASCII(s string) bool {
	for i := range len(s) {
		if s[i] < ' ' || s[i] > '~' {
			return false
		}
	}
	return true
}

// setText writes s to dst and fills the rest with zeroes. At least one byte is zero.
func setText(dst []byte, s string) {
	clear(dst)
	copy(dst[:len(dst)-1], s)
}

// textField returns a field up to its first NUL or to its end.
func textField(b []byte) string {
	if i := bytes.IndexByte(b, 0); i >= 0 {
		b = b[:i]
	}
	return string(b)
}

// terminated reports whether an NQN field contains a NUL within its maximum length.
func terminated(b []byte) bool { return bytes.IndexByte(b[:MaxNQNLen+1], 0) >= 0 }

// CheckNQN validates an NVMe qualified name as the Linux host does: 1 to 223 bytes of UTF-8 without NUL, compared byte
// for byte. It does not require the form nqn.yyyy-mm.domain:name.
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
