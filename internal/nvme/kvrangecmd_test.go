package nvme

import (
	"encoding/hex"
	"math"
	"slices"
	"testing"
)

// rangeSQE is a command for a range.
func rangeSQE(opcode uint8, fill func(*KVRangeSQE)) SQE {
	var e SQE
	e.SetOpcode(opcode)
	fill(e.KVRange())
	return e
}

func TestKVRangeSQEGolden(t *testing.T) {
	for _, c := range []struct {
		name string
		e    SQE
		want string // CDW2, CDW3, CDW10 to CDW15
	}{
		{"scan behind a key", rangeSQE(CmdKVScan, func(k *KVRangeSQE) {
			k.SetFrom(KVCursorAt(77, []byte("ab")))
			k.SetLast(math.MaxUint64)
			k.SetLenBytes(64 << 10)
		}), "6162000000000000" + "00000100" + "02000000" + "ffffffffffffffff" + "0000000000000000"},
		{"copy out from a position", rangeSQE(CmdKVCopyOut, func(k *KVRangeSQE) {
			k.SetFrom(KVCursorAt(0x0807060504030201, nil))
			k.SetLast(0x1807060504030201)
			k.SetTime(0x65000000)
			k.SetLenBytes(1 << 20)
		}), "0102030405060708" + "00001000" + "00000000" + "0102030405060718" + "0000006500000000"},
		{"scan behind a key of 16 bytes", rangeSQE(CmdKVScan, func(k *KVRangeSQE) {
			k.SetFrom(KVCursorAt(77, []byte("0123456789abcdef")))
			k.SetLast(3)
			k.SetLenBytes(136)
		}), "3031323334353637" + "88000000" + "10000000" + "0300000000000000" + "3839616263646566"},
		{"count", rangeSQE(CmdKVCount, func(k *KVRangeSQE) {
			k.SetFirst(1)
			k.SetLast(2)
			k.SetLenBytes(128)
		}), "0100000000000000" + "80000000" + "00000000" + "0200000000000000" + "0000000000000000"},
		{"digest", rangeSQE(CmdKVDigest, func(k *KVRangeSQE) {
			k.SetLast(math.MaxUint64)
			k.SetShift(56)
			k.SetLenBytes(4192)
		}), "0000000000000000" + "60100000" + "00380000" + "ffffffffffffffff" + "0000000000000000"},
		{"copy in with a clock", rangeSQE(CmdKVCopyIn, func(k *KVRangeSQE) {
			k.SetClock(0x4711)
			k.SetLenBytes(500)
		}), "0000000000000000" + "f4010000" + "00000000" + "1147000000000000" + "0000000000000000"},
		{"drop", rangeSQE(CmdKVDrop, func(k *KVRangeSQE) {
			k.SetFirst(1)
			k.SetLast(2)
			k.SetClock(0x4711)
		}), "0100000000000000" + "00000000" + "00000000" + "0200000000000000" + "1147000000000000"},
	} {
		if got := hex.EncodeToString(append(append([]byte{}, c.e[8:16]...), c.e[40:]...)); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
		if !c.e.KVRange().Valid() {
			t.Errorf("%s: not valid", c.name)
		}
		if !KVExtended(c.e.Opcode()) || KVVersioned(c.e.Opcode()) != (c.e.Opcode() == CmdKVDrop) {
			t.Errorf("%s: extended, versioned", c.name)
		}
		checkRangeSQE(t, c.e)
	}
}

// TestKVRangeSQEReservedBitsAreRefused: whichever bit of a command is changed, it is refused if nothing reads the bit.
func TestKVRangeSQEReservedBitsAreRefused(t *testing.T) {
	// What is used without a key, from a byte to another one, exclusive.
	used := map[uint8][][2]int{
		CmdKVScan:    {{8, 16}, {40, 45}, {48, 60}},
		CmdKVCopyOut: {{8, 16}, {40, 45}, {48, 60}},
		CmdKVCount:   {{8, 16}, {40, 44}, {48, 60}},
		CmdKVDigest:  {{8, 16}, {40, 44}, {45, 46}, {48, 60}},
		CmdKVCopyIn:  {{40, 44}, {48, 56}},
		CmdKVDrop:    {{8, 16}, {48, 64}},
	}
	for opcode, fields := range used {
		for at := 8; at < 64; at++ {
			is := func(f [2]int) bool { return at >= f[0] && at < f[1] }
			if at >= 16 && at < 40 || slices.ContainsFunc(fields, is) {
				continue
			}
			for bit := range 8 {
				e := rangeSQE(opcode, func(k *KVRangeSQE) { k.SetLast(100) })
				if opcode == CmdKVCopyIn {
					e.KVRange().SetClock(100)
				}
				if !e.KVRange().Valid() {
					t.Fatalf("opcode %#x: not valid", opcode)
				}
				if e[at] |= 1 << bit; e.KVRange().Valid() {
					t.Errorf("opcode %#x: bit %d of byte %d is valid", opcode, bit, at)
				}
			}
		}
	}
	for what, e := range map[string]SQE{
		"it ends before it begins": rangeSQE(CmdKVScan, func(k *KVRangeSQE) { k.SetFirst(1) }),
		"a key of 17":              rangeSQE(CmdKVScan, func(k *KVRangeSQE) { k[44] = 17 }),
		"a key, and more": rangeSQE(CmdKVScan, func(k *KVRangeSQE) {
			k[44], k[8], k[9] = 1, 'a', 'b'
		}),
		"a shift of 65": rangeSQE(CmdKVDigest, func(k *KVRangeSQE) { k.SetShift(65) }),
		"too many sub-ranges": rangeSQE(CmdKVDigest, func(k *KVRangeSQE) {
			k.SetLast(1 << 16)
		}),
		"a clock of 2^63":          rangeSQE(CmdKVDrop, func(k *KVRangeSQE) { k.SetClock(1 << 63) }),
		"a copy with such a clock": rangeSQE(CmdKVCopyIn, func(k *KVRangeSQE) { k.SetClock(1 << 63) }),
		"a drop that ends before it begins": rangeSQE(CmdKVDrop, func(k *KVRangeSQE) {
			k.SetFirst(2)
			k.SetLast(1)
		}),
		"another command": rangeSQE(CmdKVXStore, func(*KVRangeSQE) {}),
	} {
		if e.KVRange().Valid() {
			t.Errorf("%s is valid", what)
		}
	}
}

// TestBoundsOfRangeSQEsAreValid: a range of one position, the greatest clock, the longest key and the greatest shift.
func TestBoundsOfRangeSQEsAreValid(t *testing.T) {
	for what, e := range map[string]SQE{
		"a scan of one position": rangeSQE(CmdKVScan, func(k *KVRangeSQE) {
			k.SetFirst(7)
			k.SetLast(7)
		}),
		"a count of one position": rangeSQE(CmdKVCount, func(k *KVRangeSQE) {
			k.SetFirst(7)
			k.SetLast(7)
		}),
		"a digest of one position": rangeSQE(CmdKVDigest, func(k *KVRangeSQE) {
			k.SetFirst(7)
			k.SetLast(7)
			k.SetShift(64)
		}),
		"a digest of as many sub-ranges as there may be": rangeSQE(CmdKVDigest, func(k *KVRangeSQE) {
			k.SetLast(KVMaxSums - 1)
		}),
		"a drop of one position with the greatest clock": rangeSQE(CmdKVDrop, func(k *KVRangeSQE) {
			k.SetFirst(7)
			k.SetLast(7)
			k.SetClock(MaxKVClock)
		}),
		"a copy in with the greatest clock": rangeSQE(CmdKVCopyIn, func(k *KVRangeSQE) { k.SetClock(MaxKVClock) }),
		"a key of 16": rangeSQE(CmdKVScan, func(k *KVRangeSQE) {
			k.SetFrom(KVCursorAt(1, []byte("0123456789abcdef")))
		}),
	} {
		if !e.KVRange().Valid() {
			t.Errorf("%s is not valid", what)
		}
	}
}

// checkRangeSQE: a valid command survives being rewritten, and its numbers are within bounds.
func checkRangeSQE(t *testing.T, e SQE) {
	t.Helper()
	for _, opcode := range []uint8{CmdKVScan, CmdKVCopyIn, CmdKVCopyOut, CmdKVCount, CmdKVDigest, CmdKVDrop} {
		e.SetOpcode(opcode)
		k := e.KVRange()
		if !k.Valid() {
			continue
		}
		again := rangeSQE(opcode, func(o *KVRangeSQE) {
			o.SetLenBytes(k.LenBytes())
			switch opcode {
			case CmdKVCopyIn:
				o.SetClock(k.Clock())
				return
			case CmdKVDrop:
				o.SetFirst(k.First())
				o.SetClock(k.Clock())
			default:
				var buf [MaxKVKey]byte
				c := KVCursorAt(k.First(), e.KV().Key(&buf))
				if o.SetFrom(c); c.KeyLen == 0 {
					o.SetTime(k.Time())
				}
				o.SetShift(k.Shift())
			}
			o.SetLast(k.Last())
		})
		if [8]byte(again[8:]) != [8]byte(e[8:]) || [24]byte(again[40:]) != [24]byte(e[40:]) {
			t.Fatalf("opcode %#x: % x reads back as % x", opcode, e[:], again[:])
		}
		if opcode == CmdKVDigest && k.SubRanges() >= KVMaxSums {
			t.Fatalf("%d sub-ranges", k.SubRanges())
		}
	}
}
