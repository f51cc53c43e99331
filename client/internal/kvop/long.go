package kvop

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"

	"jbofd/internal/nvme"
)

// MaxLongKey is the longest key in bytes where keys are hashed.
const MaxLongKey = 64 << 10

// Hash is the device's key of a key: the first 128 bits of its SHA-256. Nobody finds two keys of
// one hash, not even on purpose, which a faster hash does not promise; and it is in hardware
// where it matters.
func Hash(key []byte) (h [nvme.MaxKVKey]byte) { // hot: 0 allocs
	sum := sha256.Sum256(key)
	copy(h[:], sum[:])
	return h
}

// What stands in front of a long key: see appendLong.
const (
	longHeader  = 12
	longMagic   = "JKVL"
	longVersion = 1
)

// LongBytes is what a key of n bytes takes of a value.
func LongBytes(n int) int { return longHeader + n }

// appendLong appends header and key:
//
//	0 magic "JKVL" | 4 version u16 | 6 zero u16 | 8 key length u32 | 12 key | value
//
// There is no checksum: the store has one over all of it, and the key is compared byte for
// byte before the value is believed.
func appendLong(dst, key []byte) []byte { // hot: 0 allocs
	dst = append(dst, longMagic...)
	dst = binary.LittleEndian.AppendUint16(dst, longVersion)
	dst = append(dst, 0, 0)
	dst = binary.LittleEndian.AppendUint32(dst, uint32(len(key)))
	return append(dst, key...)
}

// belongs says whose a value is that begins with b: of the key that own, header and key, is of;
// of another key; or not one with a long key at all.
func belongs(b, own []byte) (mine, foreign bool) { // hot: 0 allocs
	if bytes.HasPrefix(b, own) {
		return true, false
	}
	_, ok := KeyLen(b)
	return false, !ok
}

// KeyLen is the length of the key in front of a value with a long key, of which b is the
// beginning; false if the value is not such a one, or of another version.
func KeyLen(b []byte) (int, bool) {
	if len(b) < longHeader || string(b[:4]) != longMagic || binary.LittleEndian.Uint32(b[4:]) != longVersion {
		return 0, false
	}
	n := binary.LittleEndian.Uint32(b[8:])
	return int(n), n >= 1 && n <= MaxLongKey
}

// LongKey is the key in front of a value, if b holds all of it.
func LongKey(b []byte) ([]byte, bool) {
	n, ok := KeyLen(b)
	if !ok || LongBytes(n) > len(b) {
		return nil, false
	}
	return b[longHeader:LongBytes(n):LongBytes(n)], true
}
