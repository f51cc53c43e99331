package nvme

import (
	"testing"
	"time"
)

// Values of the properties of a controller's memory, by the figures of NVMe Base 2.0.
func TestMemoryPropertiesLayout(t *testing.T) {
	if c := CAP(1<<57 | 1<<56); !c.CMBS() || !c.PMRS() || CAP(1<<58-1<<57).PMRS() || CAP(1<<57-1).CMBS() ||
		CAP(0).WithCMBS(true) != 1<<57 || CAP(0).WithPMRS(true) != 1<<56 {
		t.Error("CAP.CMBS is not bit 57, or CAP.PMRS not bit 56")
	}
	if l := CMBLOC(0x000121FA); l.BIR() != 2 || l.OFST() != 0x12 || MakeCMBLOC(2, 0x12) != 0x12002 {
		t.Errorf("CMBLOC: BAR %d, offset %#x", l.BIR(), l.OFST())
	}
	// QEMU's cmb_size_mb=64: 64 units of 1 MiB, with SQS, LISTS, RDS and WDS.
	if s := CMBSZ(0x0004021D); s.UnitBytes() != 1<<20 || s.Bytes() != 64<<20 || MakeCMBSZ(64, 2) != 0x00040200 {
		t.Errorf("CMBSZ: %d bytes in units of %d", s.Bytes(), s.UnitBytes())
	}
	if s := CMBSZ(0xFFFFF600); s.Bytes() != 0xFFFFF<<36 || CMBSZ(0xFFFFF700).Bytes() != 0 {
		t.Errorf("the largest CMBSZ has %d bytes, and one of a reserved unit %d", s.Bytes(), CMBSZ(0xFFFFF700).Bytes())
	}
	// QEMU's pmrdev: CMSS, PMRWBM bit 1, BAR 4, WDS and RDS.
	if c := PMRCAP(0x01000898); c.BIR() != 4 || c.PMRWBM() != PMRWBMStatus || c.Timeout() != 0 ||
		PMRCAP(0).WithBIR(4).WithPMRWBM(2) != 0x880 {
		t.Errorf("PMRCAP: BAR %d, PMRWBM %#x, %v", c.BIR(), c.PMRWBM(), c.Timeout())
	}
	if a, b := PMRCAP(0x00FF0000).Timeout(), PMRCAP(0x00020100).Timeout(); a != 127500*time.Millisecond ||
		b != 2*time.Minute || PMRCAP(0x100).WithTimeout(3) != 0x30000 {
		t.Errorf("PMRCAP.PMRTO: %v and %v", a, b)
	}
	if s := PMRSTS(0x1507); !s.NRDY() || s.HSTS() != PMRReadOnly || s.ERR() != 7 ||
		MakePMRSTS(true, PMRReadOnly, 7) != 0x507 {
		t.Errorf("PMRSTS: %v, health %d, error %d", s.NRDY(), s.HSTS(), s.ERR())
	}
	for e, want := range map[EBS]int64{0x400: 4, 0x411: 4096, 0x402: 4 << 20, 0x403: 4 << 30, 0x404: 0} {
		if e.Bytes() != want {
			t.Errorf("an elasticity buffer of %#x has %d bytes, want %d", uint32(e), e.Bytes(), want)
		}
	}
	if MakeEBS(4096).Bytes() != 4096 {
		t.Error("MakeEBS")
	}
}
