package ycsb

import (
	"encoding/binary"
	"fmt"
	"math/bits"
)

// KeyBytes is the length of every key: the longest that the store takes.
const KeyBytes = 16

const keyDigits = "0123456789abcdefghijklmnopqrstuv"

// putKey writes the key of a record: "user" and 60 bits in 12 digits of base 32. They are the record's number,
// so that keys sort as records do, or that number sent through a bijection, so that keys are
// scattered and no two records share one.
func putKey(key *[KeyBytes]byte, record uint64, ordered bool) { // hot: 0 allocs
	const mask = 1<<60 - 1
	x := record & mask
	if !ordered {
		// A multiplication by an odd number and a shift to the right are each reversible.
		x = x * 0x9e3779b97f4a7c15 & mask
		x ^= x >> 31
		x = x * 0xbf58476d1ce4e5b9 & mask
		x ^= x >> 29
	}
	copy(key[:], "user")
	for i := KeyBytes - 1; i >= 4; i-- {
		key[i] = keyDigits[x&31]
		x >>= 5
	}
}

// Every value says what it is, and all of it follows from that:
//
//	 0 ..  7  record
//	 8 .. 11  life: drawn when the versions of the records began to be counted
//	12 .. 15  version: how often the record was written since, from 1
//	16 ..     noise drawn from the three and the length
//
// Therefore every byte is verified, and a stale value (an older version) is distinguished from a value of another
// record, a value of an earlier life, and a torn value.
const headerBytes = 16

// minValueBytes is the shortest value: eight bytes of noise prove the header.
const minValueBytes = headerBytes + 8

// mix is SplitMix64's finaliser: a bijection that spreads every bit.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// stamp names one version of a record.
type stamp struct {
	record        uint64
	life, version uint32
}

func (s stamp) seed() uint64 {
	return mix(s.record ^ mix(uint64(s.life)<<32|uint64(s.version)))
}

// valueLen returns the length of the value.
func (w *Workload) valueLen(s stamp) int { // hot: 0 allocs
	n := w.Fields * w.MinField
	if w.MinField == w.MaxField {
		return n
	}
	more := uint64(w.MaxField - w.MinField + 1)
	x := s.seed()
	for range w.Fields {
		x = mix(x)
		hi, _ := bits.Mul64(x, more)
		n += int(hi)
	}
	return n
}

// fillValue writes the value to v, which is as long as the value.
//
// Cost: more than 5 GB/s.
func fillValue(v []byte, s stamp) { // hot: 0 allocs
	le := binary.LittleEndian
	n := newNoise(s, len(v))
	le.PutUint64(v, s.record)
	le.PutUint32(v[8:], s.life)
	le.PutUint32(v[12:], s.version)
	b := v[headerBytes:]
	for ; len(b) >= 32; b = b[32:] {
		le.PutUint64(b, n.word(0))
		le.PutUint64(b[8:], n.word(1))
		le.PutUint64(b[16:], n.word(2))
		le.PutUint64(b[24:], n.word(3))
		n.x += fourSteps
	}
	for ; len(b) > 0; b = b[min(8, len(b)):] {
		var w [8]byte
		le.PutUint64(w[:], n.word(0))
		copy(b, w[:])
		n.x += noiseStep
	}
}

// checkValue returns the stamp of v, if v is what fillValue wrote for some version of record.
func checkValue(v []byte, record uint64) (s stamp, err error) { // hot: 0 allocs while it holds
	le := binary.LittleEndian
	if len(v) < minValueBytes {
		return s, fmt.Errorf("%d bytes, less than any value has: % x", len(v), v)
	}
	s = stamp{record: le.Uint64(v), life: le.Uint32(v[8:]), version: le.Uint32(v[12:])}
	n := newNoise(s, len(v))
	var wrong uint64
	b := v[headerBytes:]
	for ; len(b) >= 32; b = b[32:] {
		wrong |= (le.Uint64(b) ^ n.word(0)) | (le.Uint64(b[8:]) ^ n.word(1)) | (le.Uint64(b[16:]) ^ n.word(2)) |
			(le.Uint64(b[24:]) ^ n.word(3))
		n.x += fourSteps
	}
	for ; len(b) > 0; b = b[min(8, len(b)):] {
		var w [8]byte
		k := copy(w[:], b)
		wrong |= (le.Uint64(w[:]) ^ n.word(0)) << (64 - 8*k)
		n.x += noiseStep
	}
	switch {
	case wrong != 0:
		want := make([]byte, len(v))
		fillValue(want, s)
		at := 0
		for v[at] == want[at] {
			at++
		}
		end := min(at+8, len(v))
		return s, fmt.Errorf("torn, corrupt or cut: %d bytes that say record %d, version %d; from byte %d on % x, "+
			"must be % x", len(v), s.record, s.version, at, v[at:end], want[at:end])
	case s.record != record:
		return s, fmt.Errorf("the value of another record: %d, version %d", s.record, s.version)
	}
	return s, nil
}

// noise is a stream of words that do not depend on each other, so that they are made and
// compared as fast as memory goes.
type noise struct{ x uint64 }

const (
	noiseStep = 0x9e3779b97f4a7c15
	fourSteps = 4 * noiseStep & (1<<64 - 1)
)

func newNoise(s stamp, length int) noise { return noise{mix(s.seed() ^ uint64(length))} }

// word returns the i-th word from here.
func (n noise) word(i uint64) uint64 {
	w := n.x + i*noiseStep
	return (w ^ w>>32) * 0xbf58476d1ce4e5b9
}
