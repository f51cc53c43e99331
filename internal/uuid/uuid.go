// Package uuid holds the 128-bit identifiers of drives, extents, namespaces, partitions and hosts. The bytes are in the
// order in which the UUID is printed (RFC 9562), which is also their order on the wire and on the drive.
package uuid

import (
	"encoding/hex"
	"fmt"
)

// UUID is a 128-bit identifier. The zero UUID stands for none.
type UUID [16]byte

// IsZero reports whether u is the nil UUID.
func (u UUID) IsZero() bool { return u == UUID{} }

// String returns the UUID in lower case, 8-4-4-4-12.
func (u UUID) String() string {
	h := hex.EncodeToString(u[:])
	return h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:]
}

// Parse reads 32 hexadecimal digits, either with the four hyphens of String or without any.
func Parse(s string) (u UUID, err error) {
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
