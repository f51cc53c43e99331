package wiredump

import (
	"encoding/binary"
	"testing"
)

type view [24]byte

func (v *view) A() uint16     { return binary.LittleEndian.Uint16(v[2:]) }
func (v *view) SetA(x uint16) { binary.LittleEndian.PutUint16(v[2:], x) }
func (v *view) B() bool       { return v[4]&0x80 != 0 }
func (v *view) SetB(x bool) {
	v[4] &= 0x7f
	if x {
		v[4] |= 0x80
	}
}
func (v *view) C() uint8     { return v[4] & 0x7f }
func (v *view) SetC(x uint8) { v[4] = v[4]&0x80 | x&0x7f }

func TestLayoutFindsFieldsBySetters(t *testing.T) {
	const want = "24 bytes\n   2   2  A\n   4   1  B  bits 80\n   4   1  C  bits 7f\n"
	if got := Layout(new(view)); got != want {
		t.Errorf("got:\n%swant:\n%s", got, want)
	}
}

func TestDumpNamesFieldsAndCountsZeroes(t *testing.T) {
	v := new(view)
	v.SetA(0x1234)
	v.SetB(true)
	v[23] = 9
	const want = "" +
		"0000  00                                               2 zeroes\n" +
		"0002  34 12                                            A = 4660 (0x1234)\n" +
		"0004  80                                               B = true, C = 0\n" +
		"0005  00                                               18 zeroes\n" +
		"0017  09\n"
	if got := Dump(v); got != want {
		t.Errorf("got:\n%swant:\n%s", got, want)
	}
}
