package pdu

import (
	"strings"
	"testing"
)

func header(t Type, flags, hlen, pdo uint8, plen uint32) []byte {
	var c Common
	c.Set(t, flags, hlen, pdo, plen)
	return c[:]
}

func TestCheckHeaderAcceptsWhatHostsAndTargetsSend(t *testing.T) {
	hd := Format{HeaderDigest: true}
	dd := Format{DataDigest: true}
	both := Format{HeaderDigest: true, DataDigest: true}
	for _, c := range []struct {
		name     string
		h        []byte
		fromHost bool
		f        Format
		data     int
	}{
		{"ICReq", header(TypeICReq, 0, 128, 0, 128), true, Format{}, 0},
		{"ICResp", header(TypeICResp, 0, 128, 0, 128), false, Format{}, 0},
		{"CapsuleCmd without data", header(TypeCapsuleCmd, 0, 72, 0, 72), true, Format{}, 0},
		{"CapsuleCmd without data, reserved PDO", header(TypeCapsuleCmd, 0, 72, 72, 72), true, Format{}, 0},
		{"CapsuleCmd without data, digests", header(TypeCapsuleCmd, FlagHDGST, 72, 0, 76), true, both, 0},
		{"CapsuleCmd Connect", header(TypeCapsuleCmd, 0, 72, 72, 72+1024), true, Format{}, 1024},
		{"CapsuleCmd 4 KiB, digests", header(TypeCapsuleCmd, FlagHDGST|FlagDDGST, 72, 76, 76+4096+4), true, both, 4096},
		{"CapsuleCmd aligned to 128", header(TypeCapsuleCmd, 0, 72, 128, 128+512), true, Format{AlignBytes: 128}, 512},
		{"CapsuleCmd data digest only", header(TypeCapsuleCmd, FlagDDGST, 72, 72, 72+512+4), true, dd, 512},
		{"CapsuleResp", header(TypeCapsuleResp, 0, 24, 0, 24), false, Format{}, 0},
		{"CapsuleResp digest", header(TypeCapsuleResp, FlagHDGST, 24, 0, 28), false, hd, 0},
		{"H2CData", header(TypeH2CData, FlagLast, 24, 24, 24+8192), true, Format{}, 8192},
		{"H2CData digests", header(TypeH2CData, FlagHDGST|FlagDDGST, 24, 28, 28+8192+4), true, both, 8192},
		{"C2HData success", header(TypeC2HData, FlagLast|FlagSuccess, 24, 24, 24+4096), false, Format{}, 4096},
		{"R2T", header(TypeR2T, 0, 24, 0, 24), false, Format{}, 0},
		{"R2T digest", header(TypeR2T, FlagHDGST, 24, 0, 28), false, both, 0},
		{"H2CTermReq", header(TypeH2CTermReq, 0, 24, 0, 96), true, both, 0},
		{"C2HTermReq bare", header(TypeC2HTermReq, 0, 24, 0, 24), false, both, 0},
		{"C2HTermReq longest", header(TypeC2HTermReq, 0, 24, 0, 152), false, both, 0},
	} {
		if err := CheckHeader(c.h, c.fromHost, c.f); err != nil {
			t.Errorf("%s: refused: %v", c.name, err)
		} else if n := DataLength(c.h, c.f); n != c.data {
			t.Errorf("%s: DataLength = %d, want %d", c.name, n, c.data)
		}
	}
}

func TestCheckHeaderNamesTheWrongField(t *testing.T) {
	both := Format{HeaderDigest: true, DataDigest: true}
	for _, c := range []struct {
		name     string
		h        []byte
		fromHost bool
		f        Format
		fei      uint32
		say      string
	}{
		{"unknown type", header(0x0b, 0, 24, 0, 24), true, Format{}, offType, "type"},
		{"type 08h", header(0x08, 0, 24, 0, 24), true, Format{}, offType, "type"},
		{"type FFh", header(0xff, 0, 24, 0, 24), true, Format{}, offType, "type"},
		{"wrong way to target", header(TypeCapsuleResp, 0, 24, 0, 24), true, Format{}, offType, "host"},
		{"wrong way to host", header(TypeCapsuleCmd, 0, 72, 0, 72), false, Format{}, offType, "controller"},
		{"HLEN short", header(TypeCapsuleCmd, 0, 71, 0, 72), true, Format{}, offHLEN, "HLEN 71"},
		{"HLEN zero", header(TypeICReq, 0, 0, 0, 128), true, Format{}, offHLEN, "HLEN 0"},
		{"HLEN before PLEN", header(TypeICReq, 0, 127, 0, 9), true, Format{}, offHLEN, "HLEN"},
		{"ICReq PLEN", header(TypeICReq, 0, 128, 0, 129), true, Format{}, offPLEN, "PLEN 129"},
		{"digest flag missing", header(TypeCapsuleCmd, 0, 72, 0, 76), true, both, offFlags, "HDGSTF"},
		{"digest flag not agreed", header(TypeCapsuleCmd, FlagHDGST, 72, 0, 76), true, Format{}, offFlags, "HDGSTF"},
		{"data digest flag missing", header(TypeH2CData, FlagHDGST, 24, 28, 28+512+4), true, both, offFlags, "DDGSTF"},
		{"PLEN short", header(TypeCapsuleCmd, 0, 72, 0, 71), true, Format{}, offPLEN, "PLEN 71"},
		{"PLEN zero", header(TypeCapsuleCmd, 0, 72, 0, 0), true, Format{}, offPLEN, "PLEN 0"},
		{"H2CData without data", header(TypeH2CData, FlagLast, 24, 24, 24), true, Format{}, offPLEN, "PLEN 24"},
		{"R2T with data", header(TypeR2T, 0, 24, 24, 28), false, Format{}, offPLEN, "PLEN 28"},
		{"PDO within header", header(TypeCapsuleCmd, 0, 72, 68, 72+512), true, Format{}, offPDO, "PDO 68"},
		{"PDO zero with data", header(TypeCapsuleCmd, 0, 72, 0, 72+512), true, Format{}, offPDO, "PDO 0"},
		{"PDO within digest", header(TypeH2CData, FlagHDGST|FlagDDGST, 24, 24, 24+512+8), true, both, offPDO, "PDO 24"},
		{"PDO not a dword", header(TypeH2CData, 0, 24, 26, 26+512), true, Format{}, offPDO, "multiple of 4"},
		{"PDO not aligned", header(TypeCapsuleCmd, 0, 72, 72, 72+512), true, Format{AlignBytes: 64}, offPDO,
			"multiple of 64"},
		{"PDO at PLEN", header(TypeCapsuleCmd, 0, 72, 128, 128), true, Format{}, offPLEN, "PLEN 128"},
		{"only a digest for data", header(TypeH2CData, FlagHDGST|FlagDDGST, 24, 28, 32), true, both, offPLEN,
			"PLEN 32"},
		{"TermReq short", header(TypeH2CTermReq, 0, 24, 0, 23), true, Format{}, offPLEN, "PLEN 23"},
		{"TermReq long", header(TypeH2CTermReq, 0, 24, 0, 153), true, Format{}, offPLEN, "PLEN 153"},
	} {
		err := CheckHeader(c.h, c.fromHost, c.f)
		switch {
		case err == nil:
			t.Errorf("%s: accepted", c.name)
		case err.FES != InvalidHeaderField || err.FEI != c.fei || !strings.Contains(err.Error(), c.say):
			t.Errorf("%s: got %v, want FEI %d and %q", c.name, err, c.fei, c.say)
		}
	}
}

func TestCheckHeaderDoesNotAllocate(t *testing.T) {
	h := header(TypeCapsuleCmd, FlagHDGST|FlagDDGST, 72, 76, 76+4096+4)
	f := Format{HeaderDigest: true, DataDigest: true}
	if n := testing.AllocsPerRun(100, func() {
		if CheckHeader(h, true, f) != nil {
			t.Fatal("refused")
		}
	}); n != 0 {
		t.Errorf("%v allocs", n)
	}
}
