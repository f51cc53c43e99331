package bench

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
)

// Every block of a verified write contains the data to verify it:
//
//	 0 ..  3  magic "JBV1"
//	 4 ..  7  CRC32C of the rest of the block, bytes 8 on
//	 8 .. 15  seed of the run
//	16 .. 23  offset of the block in the namespace, bytes
//	24 .. 31  generation: how often this place was written, from 1
//	32 ..     noise drawn from the three
//
// A verification can therefore distinguish stale data (an older generation), misplaced data (another offset), foreign
// data (another seed or no magic), and torn or corrupt data (CRC).
const (
	verifyMagic  = "JBV1"
	verifyHeader = 32
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// anyGeneration, as expected generation, matches every generation.
const anyGeneration = ^uint64(0)

// fillVerify fills buf, which will be written at offset, with the pattern in blocks of bs bytes.
func fillVerify(buf []byte, bs int, seed uint64, offset int64, generation uint64) { // hot: 0 allocs
	le := binary.LittleEndian
	for ; len(buf) >= bs; buf, offset = buf[bs:], offset+int64(bs) {
		b := buf[:bs]
		copy(b, verifyMagic)
		le.PutUint64(b[8:], seed)
		le.PutUint64(b[16:], uint64(offset))
		le.PutUint64(b[24:], generation)
		x := mix(seed ^ mix(uint64(offset)^mix(generation)))
		for i := verifyHeader; i+8 <= bs; i += 8 {
			x ^= x << 13
			x ^= x >> 7
			x ^= x << 17
			le.PutUint64(b[i:], x)
		}
		le.PutUint32(b[4:], crc32.Checksum(b[8:], castagnoli))
	}
}

// checkVerify returns nil if buf, which was read at offset, contains what fillVerify wrote.
// hot: 0 allocs while it holds
func checkVerify(buf []byte, bs int, seed uint64, offset int64, generation uint64) error {
	le := binary.LittleEndian
	for at := 0; at+bs <= len(buf); at += bs {
		b := buf[at : at+bs]
		where := offset + int64(at)
		got := le.Uint64(b[24:])
		switch {
		case string(b[:4]) != verifyMagic:
			if allZero(b) {
				return fmt.Errorf("offset %d: zeroes, want generation %s: the write is lost", where,
					generationName(generation))
			}
			return fmt.Errorf("offset %d: foreign data, begins with % x", where, b[:16])
		case crc32.Checksum(b[8:], castagnoli) != le.Uint32(b[4:]):
			return fmt.Errorf("offset %d: torn or corrupt: crc32c is %08x, want %08x (header says offset %d, "+
				"generation %d)",
				where, crc32.Checksum(b[8:], castagnoli), le.Uint32(b[4:]), le.Uint64(b[16:]), got)
		case le.Uint64(b[16:]) != uint64(where):
			return fmt.Errorf("offset %d: misplaced: these data belong at offset %d (generation %d)", where,
				le.Uint64(b[16:]), got)
		case le.Uint64(b[8:]) != seed:
			return fmt.Errorf("offset %d: data of another run: seed %d, want %d", where, le.Uint64(b[8:]), seed)
		case generation != anyGeneration && got != generation:
			return fmt.Errorf("offset %d: stale: generation %d, want %d", where, got, generation)
		}
	}
	return nil
}

func generationName(g uint64) string {
	if g == anyGeneration {
		return "any"
	}
	return fmt.Sprint(g)
}

func allZero(b []byte) bool {
	for _, x := range b {
		if x != 0 {
			return false
		}
	}
	return true
}

// mix is SplitMix64's finaliser: a bijection that spreads every bit.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
