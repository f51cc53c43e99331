package kvop

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"

	"jbofd/internal/nvme"
)

// MaxLongKey is the longest key in bytes where keys are hashed.
const MaxLongKey = 64 << 10

// Hash returns the target's key for a long key: the first 128 bits of its SHA-256. SHA-256 makes it infeasible to
// construct two keys with the same hash, which faster hashes do not, and modern processors have instructions for it.
func Hash(key []byte) (h [nvme.MaxKVKey]byte) { // hot: 0 allocs
	sum := sha256.Sum256(key)
	copy(h[:], sum[:])
	return h
}

// Header of a long key: see appendLong.
const (
	longHeader  = 12
	longMagic   = "JKVL"
	longVersion = 1
)

// LongBytes returns the size of header and key for a key of n bytes.
func LongBytes(n int) int { return longHeader + n }

// appendLong appends header and key:
//
//	0 magic "JKVL" | 4 version u16 | 6 zero u16 | 8 key length u32 | 12 key | value
//
// It has no checksum: the store has one over the whole value, and the key is compared byte for byte before the value is
// used.
func appendLong(dst, key []byte) []byte { // hot: 0 allocs
	dst = append(dst, longMagic...)
	dst = binary.LittleEndian.AppendUint16(dst, longVersion)
	dst = append(dst, 0, 0)
	dst = binary.LittleEndian.AppendUint32(dst, uint32(len(key)))
	return append(dst, key...)
}

// valueOwner tells whose value begins with b. mine: that of the key of own, which is header and key. foreign: it was
// not stored with a long key. Neither: that of another key.
func valueOwner(b, own []byte) (mine, foreign bool) { // hot: 0 allocs
	if bytes.HasPrefix(b, own) {
		return true, false
	}
	_, ok := KeyLen(b)
	return false, !ok
}

// KeyLen returns the length of the long key of a value that begins with b; false if the value has no long key, or one
// of another version.
func KeyLen(b []byte) (int, bool) {
	if len(b) < longHeader || string(b[:4]) != longMagic || binary.LittleEndian.Uint32(b[4:]) != longVersion {
		return 0, false
	}
	n := binary.LittleEndian.Uint32(b[8:])
	return int(n), n >= 1 && n <= MaxLongKey
}

// LongKey returns the long key of a value that begins with b, if b contains all of the key.
func LongKey(b []byte) ([]byte, bool) {
	n, ok := KeyLen(b)
	if !ok || LongBytes(n) > len(b) {
		return nil, false
	}
	return b[longHeader:LongBytes(n):LongBytes(n)], true
}
