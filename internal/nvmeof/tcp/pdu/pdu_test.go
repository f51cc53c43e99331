package pdu

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"pgregory.net/rapid"

	"jbofd/internal/nvme"
	"jbofd/internal/testutil/wiredump"
)

// frames are whole PDUs as hosts and jbofd send them, golden and seeds for the fuzzers.
var frames = map[string]frame{
	"icreq": {true, Format{}, func() []byte {
		var p IC
		p.Common().Set(TypeICReq, 0, ICLen, 0, ICLen)
		p.SetDGST(3)
		p.SetMAXR2T(0)
		return p[:]
	}},
	"icresp": {false, Format{}, func() []byte {
		var p IC
		p.Common().Set(TypeICResp, 0, ICLen, 0, ICLen)
		p.SetDGST(3)
		p.SetMAXH2CDATA(131072)
		return p[:]
	}},
	"capsule-cmd": {true, Format{}, func() []byte {
		var p CapsuleCmd
		p.Common().Set(TypeCapsuleCmd, 0, CapsuleCmdLen, 0, CapsuleCmdLen)
		s := p.SQE()
		s.SetOpcode(nvme.CmdRead)
		s.SetPSDT(nvme.PSDTSGL)
		s.SetCID(0x17)
		s.SetNSID(1)
		s.SGL().SetType(nvme.SGLTypeTransportData, nvme.SGLSubtypeTransport)
		s.SGL().SetLength(4096)
		s.SetSLBA(0x1122334455)
		s.SetNLB(8)
		return p[:]
	}},
	"capsule-cmd-data-digests": {true, Format{HeaderDigest: true, DataDigest: true, AlignBytes: 16}, func() []byte {
		f := Format{HeaderDigest: true, DataDigest: true, AlignBytes: 16}
		var p CapsuleCmd
		pdo := f.DataOffset(CapsuleCmdLen)
		p.Common().Set(TypeCapsuleCmd, FlagHDGST|FlagDDGST, CapsuleCmdLen, uint8(pdo), uint32(pdo+32+DigestLen))
		s := p.SQE()
		s.SetOpcode(nvme.CmdWrite)
		s.SetPSDT(nvme.PSDTSGL)
		s.SetCID(0x18)
		s.SetNSID(1)
		s.SGL().SetType(nvme.SGLTypeDataBlock, nvme.SGLSubtypeOffset)
		s.SGL().SetLength(32)
		return seal(f, p[:], pdo, bytes.Repeat([]byte{0xff}, 32))
	}},
	"capsule-resp": {false, Format{HeaderDigest: true}, func() []byte {
		f := Format{HeaderDigest: true}
		var p CapsuleResp
		p.Common().Set(TypeCapsuleResp, FlagHDGST, CapsuleRespLen, 0, CapsuleRespLen+DigestLen)
		p.CQE().SetSQHD(5)
		p.CQE().SetCID(0x17)
		p.CQE().SetStatus(nvme.LBAOutOfRange | nvme.DNR)
		return seal(f, p[:], 0, nil)
	}},
	"h2cdata": {true, Format{DataDigest: true}, func() []byte {
		f := Format{DataDigest: true}
		var p Data
		p.Common().Set(TypeH2CData, FlagLast|FlagDDGST, DataLen, DataLen, DataLen+32+DigestLen)
		p.SetCCCID(0x18)
		p.SetTTAG(0x0102)
		p.SetOffset(8192)
		p.SetLength(32)
		return seal(f, p[:], DataLen, make([]byte, 32))
	}},
	"c2hdata": {false, Format{}, func() []byte {
		var p Data
		p.Common().Set(TypeC2HData, FlagLast|FlagSuccess, DataLen, DataLen, DataLen+8)
		p.SetCCCID(0x17)
		p.SetLength(8)
		return seal(Format{}, p[:], DataLen, []byte("jbofdata"))
	}},
	"r2t": {false, Format{HeaderDigest: true}, func() []byte {
		f := Format{HeaderDigest: true}
		var p Data
		p.Common().Set(TypeR2T, FlagHDGST, R2TLen, 0, R2TLen+DigestLen)
		p.SetCCCID(0x18)
		p.SetTTAG(0x0102)
		p.SetOffset(8192)
		p.SetLength(131072)
		return seal(f, p[:], 0, nil)
	}},
	"h2ctermreq": {true, Format{}, func() []byte {
		return AppendTerm(nil, TypeH2CTermReq, &FatalError{FES: HeaderDigestError, FEI: 0x12345678},
			header(TypeC2HData, 0, 24, 24, 32))
	}},
	"c2htermreq": {false, Format{}, func() []byte {
		return AppendTerm(nil, TypeC2HTermReq, &FatalError{FES: InvalidHeaderField, FEI: offHLEN},
			header(TypeCapsuleCmd, 0, 71, 0, 72))
	}},
}

type frame struct {
	fromHost bool
	f        Format
	make     func() []byte
}

// seal appends to a header its digest, padding, data and data digest under f.
func seal(f Format, h []byte, pdo int, data []byte) []byte {
	b := append([]byte(nil), h...)
	var d [DigestLen]byte
	if f.HeaderDigest {
		PutDigest(d[:], Digest(h))
		b = append(b, d[:]...)
	}
	if len(data) == 0 {
		return b
	}
	b = append(b, make([]byte, pdo-len(b))...)
	b = append(b, data...)
	if f.DataDigest {
		PutDigest(d[:], Digest(data))
		b = append(b, d[:]...)
	}
	return b
}

// annotate prints a PDU with the names of its parts.
func annotate(b []byte, f Format) string {
	var out strings.Builder
	c := (*Common)(b)
	fmt.Fprintf(&out, "%d bytes, %+v\n", len(b), f)
	at := 0
	part := func(n int, format string, args ...any) {
		wiredump.Lines(&out, b, at, at+n, fmt.Sprintf(format, args...))
		at += n
	}
	rest := func(to int) {
		wiredump.Raw(&out, b, at, to)
		at = to
	}
	part(1, "%s", c.Type())
	part(1, "flags %s", flags(c.Flags()))
	part(1, "HLEN = %d", c.HLEN())
	part(1, "PDO = %d", c.PDO())
	part(4, "PLEN = %d", c.PLEN())
	switch c.Type() {
	case TypeICReq, TypeICResp:
		p := (*IC)(b)
		part(2, "PFV = %d", p.PFV())
		part(1, "PDA = %d", p.PDA())
		part(1, "DGST = %d: header %t, data %t", p.DGST(), p.HeaderDigest(), p.DataDigest())
		if c.Type() == TypeICReq {
			part(4, "MAXR2T = %d (0-based)", p.MAXR2T())
		} else {
			part(4, "MAXH2CDATA = %d", p.MAXH2CDATA())
		}
	case TypeH2CData, TypeC2HData, TypeR2T:
		p := (*Data)(b)
		part(2, "CCCID = %#x", p.CCCID())
		part(2, "TTAG = %#x", p.TTAG())
		part(4, "offset = %d", p.Offset())
		part(4, "length = %d", p.Length())
	case TypeCapsuleCmd:
		s := (*CapsuleCmd)(b).SQE()
		part(1, "SQE: opcode %#02x", s.Opcode())
		part(1, "PSDT = %d, fuse = %d", s.PSDT(), s.Fuse())
		part(2, "CID = %#x", s.CID())
		part(4, "NSID = %d", s.NSID())
		rest(CommonLen + 24)
		part(8, "SGL address = %d", s.SGL().Address())
		part(4, "SGL length = %d", s.SGL().Length())
		part(4, "SGL type %#x, subtype %#x", s.SGL().Type(), s.SGL().Subtype())
		part(8, "SLBA = %#x", s.SLBA())
		part(4, "NLB = %d", s.NLB())
	case TypeCapsuleResp:
		q := (*CapsuleResp)(b).CQE()
		part(8, "CQE: result %d", q.Result64())
		part(2, "SQHD = %d", q.SQHD())
		part(2, "SQID = %d", q.SQID())
		part(2, "CID = %#x", q.CID())
		part(2, "%s", q.Status())
	case TypeH2CTermReq, TypeC2HTermReq:
		p := (*Term)(b)
		part(2, "FES = %d: %s", p.FES(), p.FES())
		part(4, "FEI = %#x", p.FEI())
		rest(TermLen)
		part(len(b)-TermLen, "the PDU at fault")
		return out.String()
	}
	rest(int(c.HLEN()))
	if f.HeaderDigest {
		part(DigestLen, "HDGST = %#08x", GetDigest(b[at:]))
	}
	if n := DataLength(b, f); n > 0 {
		if pad := int(c.PDO()) - at; pad > 0 {
			part(pad, "PAD")
		}
		part(n, "DATA")
		if f.DataDigest {
			part(DigestLen, "DDGST = %#08x", GetDigest(b[at:]))
		}
	}
	if at != len(b) {
		fmt.Fprintf(&out, "%d bytes not accounted for\n", len(b)-at)
	}
	return out.String()
}

func flags(f uint8) string {
	var s []string
	for i, n := range []string{"HDGSTF", "DDGSTF", "LAST", "SUCCESS"} {
		if f>>i&1 != 0 {
			s = append(s, n)
		}
	}
	if f>>4 != 0 {
		s = append(s, fmt.Sprintf("%#x", f&0xf0))
	}
	if s == nil {
		return "none"
	}
	return strings.Join(s, " ")
}

// TestGolden compares every PDU type with its annotated dump. Regenerate with -rewrite, and
// understand the diff: a place never changes.
func TestGolden(t *testing.T) {
	seen := map[string]bool{}
	datadriven.RunTest(t, "testdata/golden", func(t *testing.T, d *datadriven.TestData) string {
		f, ok := frames[d.Cmd]
		if !ok {
			d.Fatalf(t, "no frame %q", d.Cmd)
		}
		seen[d.Cmd] = true
		return annotate(f.make(), f.f)
	})
	for n := range frames {
		if !seen[n] {
			t.Errorf("testdata/golden has no %q", n)
		}
	}
}

func TestGoldenFramesPassTheHeaderCheck(t *testing.T) {
	for name, f := range frames {
		b := f.make()
		if err := CheckHeader(b, f.fromHost, f.f); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if n := int((*Common)(b).PLEN()); n != len(b) {
			t.Errorf("%s: PLEN %d, %d bytes", name, n, len(b))
		}
		if err := CheckHeader(b, !f.fromHost, f.f); err == nil || err.FEI != offType {
			t.Errorf("%s: the wrong way: %v", name, err)
		}
	}
}

// TestDigestIsCRC32C uses the vectors of RFC 3720, appendix B.4, and the check value of
// the CRC catalogues.
func TestDigestIsCRC32C(t *testing.T) {
	up, down := make([]byte, 32), make([]byte, 32)
	for i := range up {
		up[i], down[i] = byte(i), byte(31-i)
	}
	for _, c := range []struct {
		name string
		b    []byte
		wire string
	}{
		{"32 zeroes", make([]byte, 32), "aa36918a"},
		{"32 ones", bytes.Repeat([]byte{0xff}, 32), "43aba862"},
		{"ascending", up, "4e79dd46"},
		{"descending", down, "5cdb3f11"},
		{"check value", []byte("123456789"), "839206e3"},
		{"nothing", nil, "00000000"},
	} {
		var w [DigestLen]byte
		PutDigest(w[:], Digest(c.b))
		if got := hex.EncodeToString(w[:]); got != c.wire {
			t.Errorf("%s: %s on the wire, want %s", c.name, got, c.wire)
		}
		if GetDigest(w[:]) != Digest(c.b) {
			t.Errorf("%s: does not read back", c.name)
		}
	}
}

func TestDigestInPiecesIsDigestOfTheWhole(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := rapid.SliceOf(rapid.Byte()).Draw(t, "bytes")
		cut := rapid.IntRange(0, len(b)).Draw(t, "cut")
		if got := UpdateDigest(UpdateDigest(0, b[:cut]), b[cut:]); got != Digest(b) {
			t.Fatalf("%#x, want %#x", got, Digest(b))
		}
	})
}

func TestTermReqQuotesNoMoreThan128Bytes(t *testing.T) {
	for _, n := range []int{0, 8, 127, 128, 129, 4096} {
		bad := bytes.Repeat([]byte{0xab}, n)
		b := AppendTerm([]byte("before"), TypeC2HTermReq, &FatalError{FES: SequenceError, FEI: 7}, bad)
		if string(b[:6]) != "before" {
			t.Fatalf("%d: what was there is gone", n)
		}
		b = b[6:]
		p := (*Term)(b)
		if want := TermLen + min(n, 128); len(b) != want || int(p.Common().PLEN()) != want || len(b) > MaxTermLen {
			t.Errorf("%d: %d bytes, PLEN %d, want %d", n, len(b), p.Common().PLEN(), want)
		}
		if p.FES() != SequenceError || p.FEI() != 7 || !bytes.Equal(b[TermLen:], bad[:min(n, 128)]) {
			t.Errorf("%d: % x", n, b)
		}
		if err := CheckHeader(b, false, Format{HeaderDigest: true}); err != nil {
			t.Errorf("%d: %v", n, err)
		}
	}
}

func TestDataOffsetIsAlignedAndBehindTheHeader(t *testing.T) {
	for pda := 0; pda <= MaxAlignUnits; pda++ {
		for _, hlen := range []int{CapsuleCmdLen, DataLen} {
			for _, hd := range []bool{false, true} {
				f := Format{HeaderDigest: hd, AlignBytes: (pda + 1) * 4}
				least := hlen
				if hd {
					least += DigestLen
				}
				off := f.DataOffset(hlen)
				if off < least || off-least >= f.AlignBytes || off%f.AlignBytes != 0 || off > 255 {
					t.Errorf("HLEN %d, %+v: PDO %d", hlen, f, off)
				}
			}
		}
	}
	if off := (Format{}).DataOffset(DataLen); off != DataLen {
		t.Errorf("no alignment: PDO %d", off)
	}
}

func TestNamesOfTypesAndStatuses(t *testing.T) {
	for typ, name := range map[Type]string{TypeICReq: "ICReq", TypeR2T: "R2T", 8: "Type(0x08)"} {
		if typ.String() != name {
			t.Errorf("%d is %q, want %q", typ, typ, name)
		}
	}
	err := &FatalError{FES: InvalidHeaderField, FEI: 2, What: "HLEN 3"}
	if got, want := err.Error(), "invalid PDU header field: HLEN 3 (fes 1, fei 0x2)"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	if FES(99).String() != "FES(99)" {
		t.Error(FES(99))
	}
}

// FuzzCheckHeader compares CheckHeader with the rules written out one by one, and checks that DataLength and the layout
// agree for every header that passes.
func FuzzCheckHeader(f *testing.F) {
	for _, fr := range frames {
		f.Add(fr.make(), fr.fromHost, fr.f.HeaderDigest, fr.f.DataDigest, uint8(fr.f.AlignBytes/4))
	}
	f.Fuzz(func(t *testing.T, b []byte, fromHost, hd, dd bool, units uint8) {
		if len(b) < CommonLen {
			return
		}
		fm := Format{HeaderDigest: hd, DataDigest: dd, AlignBytes: 4 * int(units%33)}
		err := CheckHeader(b, fromHost, fm)
		if want := headerHolds(b, fromHost, fm); (err == nil) != want {
			t.Fatalf("% x: CheckHeader %v, by the rules %t", b[:CommonLen], err, want)
		}
		if err != nil {
			if err.FES != InvalidHeaderField || err.FEI > offPLEN || err.What == "" {
				t.Fatalf("%+v", err)
			}
			return
		}
		c := (*Common)(b)
		n := DataLength(b, fm)
		if n < 0 || n > 0 && int(c.PDO())+n > int(c.PLEN()) {
			t.Fatalf("% x: data length %d", b[:CommonLen], n)
		}
	})
}

func headerHolds(b []byte, fromHost bool, f Format) bool {
	hlens := map[Type]int{TypeICResp: 128, TypeC2HTermReq: 24, TypeCapsuleResp: 24, TypeC2HData: 24, TypeR2T: 24}
	if fromHost {
		hlens = map[Type]int{TypeICReq: 128, TypeH2CTermReq: 24, TypeCapsuleCmd: 72, TypeH2CData: 24}
	}
	hlen, ok := hlens[Type(b[0])]
	if !ok || int(b[2]) != hlen {
		return false
	}
	plen, pdo := int64(GetDigest(b[4:])), int64(b[3])
	switch Type(b[0]) {
	case TypeICReq, TypeICResp:
		return plen == 128
	case TypeH2CTermReq, TypeC2HTermReq:
		return plen >= 24 && plen <= 152
	}
	if b[1]&1 == 1 != f.HeaderDigest {
		return false
	}
	end := int64(hlen)
	if f.HeaderDigest {
		end += 4
	}
	switch Type(b[0]) {
	case TypeCapsuleResp, TypeR2T:
		return plen == end
	case TypeCapsuleCmd:
		if plen == end {
			return true
		}
	}
	tail := int64(0)
	if f.DataDigest {
		tail = 4
	}
	align := max(int64(f.AlignBytes), 4)
	return b[1]&2 != 0 == f.DataDigest && pdo >= end && pdo%align == 0 && plen > pdo+tail
}

// FuzzViews reads all fields of every view over arbitrary bytes.
func FuzzViews(f *testing.F) {
	for _, fr := range frames {
		f.Add(fr.make())
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var whole [MaxHeaderLen]byte
		copy(whole[:], b)
		before := whole
		for _, v := range []any{(*IC)(whole[:]), (*Data)(whole[:]), (*Term)(whole[:])} {
			for _, fl := range wiredump.Fields(v) {
				fl.Get(v)
			}
		}
		_ = (*CapsuleCmd)(whole[:]).SQE().SGL().Type()
		_ = (*CapsuleResp)(whole[:]).CQE().Status().String()
		_ = (*Common)(whole[:]).Type().String()
		_ = (*Term)(whole[:]).FES().String()
		if whole != before {
			t.Fatal("reading changed the bytes")
		}
		dst := AppendTerm(nil, TypeH2CTermReq, &FatalError{}, b)
		if err := CheckHeader(dst, true, Format{}); err != nil || len(dst) > MaxTermLen {
			t.Fatalf("%d bytes: %v", len(dst), err)
		}
	})
}
