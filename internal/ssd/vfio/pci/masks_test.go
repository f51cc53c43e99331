package pci

import (
	"encoding/binary"
	"testing"

	"jbofd/internal/ssd/vfio/pcie"
)

// config is a configuration space with a list of capabilities: {offset, ID, next} each.
func config(first byte, caps ...[3]byte) []byte {
	c := make([]byte, 256)
	binary.LittleEndian.PutUint16(c[configStatus:], statusCapabilities)
	c[configCapabilities] = first
	for _, x := range caps {
		c[x[0]], c[x[0]+1] = x[1], x[2]
	}
	return c
}

func TestTheTableOfMSIXIsFound(t *testing.T) {
	good := config(0x40, [3]byte{0x40, 0x01, 0x50}, [3]byte{0x50, capabilityMSIX, 0})
	binary.LittleEndian.PutUint32(good[0x50+msixTable:], 0x3000|4)
	noBAR := config(0x40, [3]byte{0x40, capabilityMSIX, 0})
	binary.LittleEndian.PutUint32(noBAR[0x40+msixTable:], 0x3000|6)
	noList := config(0x40, [3]byte{0x40, capabilityMSIX, 0})
	noList[configStatus] = 0
	for name, tc := range map[string]struct {
		config []byte
		ok     bool
	}{
		"second":      {good, true},
		"BAR 6":       {noBAR, false},
		"no list":     {noList, false},
		"no MSI-X":    {config(0x40, [3]byte{0x40, 0x01, 0}), false},
		"a circle":    {config(0x40, [3]byte{0x40, 0x01, 0x50}, [3]byte{0x50, 0x05, 0x40}), false},
		"at the end":  {config(0xfc, [3]byte{0xfc, capabilityMSIX, 0}), false},
		"the header":  {config(0x10, [3]byte{0x10, capabilityMSIX, 0}), false},
		"all ones":    {config(0xff, [3]byte{0xfc, 0xff, 0xff}), false},
		"nothing yet": {config(0), false},
	} {
		bar, offset, err := parseMSIX(tc.config)
		if (err == nil) != tc.ok || tc.ok && (bar != 4 || offset != 0x3000) {
			t.Errorf("%s: BAR %d, offset %#x, %v", name, bar, offset, err)
		}
	}
}

// A mask is bit 0 of the last word of its entry, and no other word is changed.
func TestAMaskIsOneBit(t *testing.T) {
	memory := make([]byte, 4096)
	for i := range memory {
		memory[i] = 0x5A
	}
	m := maskTable{mapping: pcie.MMIO(memory), first: 0x100}
	for _, on := range []bool{true, false} {
		m.mask(3, on)
		want := uint32(0)
		if on {
			want = 1
		}
		at := 0x100 + 3*16 + 12
		if got := binary.LittleEndian.Uint32(memory[at:]); got != want {
			t.Errorf("vector control is %#x, want %#x", got, want)
		}
		for i, b := range memory {
			if (i < at || i >= at+4) && b != 0x5A {
				t.Fatalf("byte %d is changed", i)
			}
		}
	}
	(&maskTable{}).mask(3, true) // does nothing
}
