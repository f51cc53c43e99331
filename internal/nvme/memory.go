package nvme

import "time"

// Properties of the memory that a controller may have: the Controller Memory Buffer (CMB), which is volatile, and the
// Persistent Memory Region (PMR). Each is in a BAR (NVMe Base 2.0, sections 3.1.3.10 to 3.1.3.26, 8.5 and 8.14).
const (
	PropCMBMSC = 0x50 // 8 bytes: 63:12 CBA | 1 CMSE | 0 CRE
	PropCMBEBS = 0x5C
	PropPMRCTL = 0xE04 // bit 0 EN
	PropPMRSTS = 0xE08
	PropPMREBS = 0xE0C
)

// CMBMSCCRE enables CMBLOC and CMBSZ, PMRCTLEN the PMR.
const (
	CMBMSCCRE = 1 << 0
	PMRCTLEN  = 1 << 0
)

// PMRS and CMBS: the controller has a PMR, and a CMB with CMBMSC. A CMB of before NVMe 1.4 has neither CMBS nor CMBMSC.
func (c CAP) PMRS() bool          { return c.bits(56, 1) != 0 }
func (c CAP) WithPMRS(v bool) CAP { return c.with(56, 1, b2u(v)) }
func (c CAP) CMBS() bool          { return c.bits(57, 1) != 0 }
func (c CAP) WithCMBS(v bool) CAP { return c.with(57, 1, b2u(v)) }

// CMBLOC is where the CMB is:
//
//	31:12 OFST, in units of CMBSZ.SZU | 8:3 what may be in it | 2:0 BIR
type CMBLOC uint32

// MakeCMBLOC returns the location of a CMB in a BAR, at an offset in units of CMBSZ.SZU.
func MakeCMBLOC(bar uint8, offset uint32) CMBLOC { return CMBLOC(offset<<12 | uint32(bar&7)) }

// BIR is the BAR, OFST the offset in it in units of CMBSZ.SZU.
func (l CMBLOC) BIR() uint8   { return uint8(l & 7) }
func (l CMBLOC) OFST() uint32 { return uint32(l) >> 12 }

// CMBSZ is how large the CMB is. It is 0 if there is none, or if CMBMSC.CRE is 0.
//
//	31:12 SZ, in units of SZU | 11:8 SZU, 4 KiB << 4 SZU | 4 WDS | 3 RDS | 2 LISTS | 1 CQS | 0 SQS
type CMBSZ uint32

// MakeCMBSZ returns the size of a CMB of n units of 4 KiB << 4 szu.
func MakeCMBSZ(n uint32, szu uint8) CMBSZ { return CMBSZ(n<<12 | uint32(szu&15)<<8) }

// UnitBytes is the unit of SZ and of CMBLOC.OFST; 0: SZU is reserved. Bytes is the size of the CMB.
func (s CMBSZ) UnitBytes() int64 {
	if u := s >> 8 & 15; u <= 6 {
		return 4096 << (4 * u)
	}
	return 0
}
func (s CMBSZ) Bytes() int64 { return int64(s>>12) * s.UnitBytes() }

// PMRCAP are the capabilities of the PMR:
//
//	24 CMSS | 23:16 PMRTO | 13:10 PMRWBM | 9:8 PMRTU | 7:5 BIR | 4 WDS | 3 RDS
type PMRCAP uint32

// Bits of PMRCAP.PMRWBM: what ensures that earlier writes to the PMR are persistent.
const (
	PMRWBMRead   = 1 << 0 // a read of any address of the PMR
	PMRWBMStatus = 1 << 1 // a read of PMRSTS
)

// BIR is the BAR that is the PMR, all of it; PMRWBM has PMRWBM bits.
func (c PMRCAP) BIR() uint8                 { return uint8(c >> 5 & 7) }
func (c PMRCAP) WithBIR(v uint8) PMRCAP     { return c&^(7<<5) | PMRCAP(v&7)<<5 }
func (c PMRCAP) PMRWBM() uint8              { return uint8(c >> 10 & 15) }
func (c PMRCAP) WithPMRWBM(v uint8) PMRCAP  { return c&^(15<<10) | PMRCAP(v&15)<<10 }
func (c PMRCAP) WithTimeout(n uint8) PMRCAP { return c&^(255<<16|3<<8) | PMRCAP(n)<<16 }

// Timeout is the least time to wait for PMRSTS.NRDY after a change of PMRCTL.EN: PMRTO in units of PMRTU.
// WithTimeout sets it in 500 ms.
func (c PMRCAP) Timeout() time.Duration {
	unit := 500 * time.Millisecond
	if c>>8&3 == 1 {
		unit = time.Minute
	}
	return time.Duration(c>>16&255) * unit
}

// PMRSTS is the status of the PMR:
//
//	12 CBAI | 11:9 HSTS | 8 NRDY | 7:0 ERR
type PMRSTS uint32

// Values of PMRSTS.HSTS.
const (
	PMRNormal       = 0
	PMRRestoreError = 1 // it works, but what was in it may not be as it was
	PMRReadOnly     = 2
	PMRUnreliable   = 3
)

// MakePMRSTS returns a status.
func MakePMRSTS(notReady bool, hsts, err uint8) PMRSTS {
	return PMRSTS(hsts&7)<<9 | PMRSTS(b2u(notReady))<<8 | PMRSTS(err)
}

// ERR is not 0 if an earlier write was not completed. NRDY: the PMR is not enabled, or not ready yet.
func (s PMRSTS) ERR() uint8  { return uint8(s) }
func (s PMRSTS) NRDY() bool  { return s>>8&1 != 0 }
func (s PMRSTS) HSTS() uint8 { return uint8(s >> 9 & 7) }

// EBS is the elasticity buffer of a CMB or PMR (CMBEBS, PMREBS): what takes writes at full speed.
//
//	31:8 WBZ, in units of SZU | 4 RBB | 3:0 SZU: 0 bytes, 1 KiB, 2 MiB, 3 GiB
type EBS uint32

// MakeEBS returns the value for a buffer of so many bytes, below 16 MiB.
func MakeEBS(bytes uint32) EBS { return EBS(bytes << 8) }

// Bytes is the size of the buffer; 0 also if SZU is reserved.
func (e EBS) Bytes() int64 {
	if u := e & 15; u <= 3 {
		return int64(e>>8) << (10 * u)
	}
	return 0
}
