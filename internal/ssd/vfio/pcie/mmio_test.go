package pcie

import (
	"bytes"
	"encoding/binary"
	"testing"
)

// An access is that of one word at its offset, and of no byte beside it.
func TestAccessesAreThoseOfAWord(t *testing.T) {
	m := MMIO(make([]byte, 64)) // allocated at a multiple of 8
	const v = 0x8877665544332211
	for i := range m {
		m[i] = 0xEE
	}
	want := bytes.Clone(m)
	m.Store64(24, v)
	binary.LittleEndian.PutUint64(want[24:], v)
	m.Store32(40, v>>32&0xFFFFFFFF)
	binary.LittleEndian.PutUint32(want[40:], v>>32)
	fullBarrier()
	if !bytes.Equal(m, want) {
		t.Errorf("it is\n% x, want\n% x", []byte(m), want)
	}
	if m.Load64(24) != v || m.Load32(40) != v>>32 || m.Load32(28) != v>>32 {
		t.Errorf("%#x and %#x are read", m.Load64(24), m.Load32(40))
	}
}
