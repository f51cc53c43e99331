package nvme

// Offsets of controller properties (NVMe Base 2.0, section 3.1.3). Over fabrics they are read
// and written with Property Get and Property Set.
const (
	PropCAP  = 0x00 // 8 bytes
	PropVS   = 0x08
	PropCC   = 0x14
	PropCSTS = 0x1C
	PropNSSR = 0x20
	PropNSSD = 0x64
	PropCRTO = 0x68
)

// PropertySize returns the size in bytes of the property at an offset, or 0 if fabrics define no property there.
func PropertySize(off uint32) int {
	switch off {
	case PropCAP:
		return 8
	case PropVS, PropCC, PropCSTS, PropNSSR, PropNSSD, PropCRTO:
		return 4
	}
	return 0
}

// NSSRReset is the value ("NVMe") that resets the subsystem when written to NSSR.
const NSSRReset = 0x4E564D65

// CAP is the Controller Capabilities property:
//
//	60 CRIMS | 59 CRWMS | 55:52 MPSMAX | 51:48 MPSMIN | 44:37 CSS | 36 NSSRS |
//	35:32 DSTRD | 31:24 TO | 18:17 AMS | 16 CQR | 15:0 MQES
type CAP uint64

// Bits of CAP.CSS.
const (
	CAPCSSNVM   = 1 << 0
	CAPCSSIOCS  = 1 << 6 // one or more I/O command sets
	CAPCSSAdmin = 1 << 7 // no I/O command set
)

func (c CAP) bits(shift, width uint) uint64 { return uint64(c) >> shift & (1<<width - 1) }
func (c CAP) with(shift, width uint, v uint64) CAP {
	mask := uint64(1<<width-1) << shift
	return CAP(uint64(c)&^mask | v<<shift&mask)
}

// MQES is the largest number of entries in a queue, 0-based.
func (c CAP) MQES() uint16          { return uint16(c.bits(0, 16)) }
func (c CAP) WithMQES(v uint16) CAP { return c.with(0, 16, uint64(v)) }

// CQR: queues must be physically contiguous. It is always set over fabrics.
func (c CAP) CQR() bool          { return c.bits(16, 1) != 0 }
func (c CAP) WithCQR(v bool) CAP { return c.with(16, 1, b2u(v)) }
func (c CAP) AMS() uint8         { return uint8(c.bits(17, 2)) }

// TO is the maximum time from a change of CC.EN to that of CSTS.RDY, in 500 ms.
func (c CAP) TO() uint8          { return uint8(c.bits(24, 8)) }
func (c CAP) WithTO(v uint8) CAP { return c.with(24, 8, uint64(v)) }
func (c CAP) DSTRD() uint8       { return uint8(c.bits(32, 4)) }

// NSSRS: subsystem reset is supported.
func (c CAP) NSSRS() bool          { return c.bits(36, 1) != 0 }
func (c CAP) WithNSSRS(v bool) CAP { return c.with(36, 1, b2u(v)) }

// CSS holds the command sets: CAPCSS constants.
func (c CAP) CSS() uint8          { return uint8(c.bits(37, 8)) }
func (c CAP) WithCSS(v uint8) CAP { return c.with(37, 8, uint64(v)) }

// MPSMIN and MPSMAX are the memory page sizes, 2^(12+n) bytes.
func (c CAP) MPSMIN() uint8          { return uint8(c.bits(48, 4)) }
func (c CAP) WithMPSMIN(v uint8) CAP { return c.with(48, 4, uint64(v)) }
func (c CAP) MPSMAX() uint8          { return uint8(c.bits(52, 4)) }
func (c CAP) WithMPSMAX(v uint8) CAP { return c.with(52, 4, uint64(v)) }

// CRWMS and CRIMS: the controller ready modes, with media and independent of it.
func (c CAP) CRWMS() bool          { return c.bits(59, 1) != 0 }
func (c CAP) WithCRWMS(v bool) CAP { return c.with(59, 1, b2u(v)) }
func (c CAP) CRIMS() bool          { return c.bits(60, 1) != 0 }

// VS is the Version property: major (31:16), minor (15:8), tertiary (7:0).
type VS uint32

// Versions.
const (
	Version1_3 VS = 0x00010300
	Version1_4 VS = 0x00010400
	Version2_0 VS = 0x00020000
)

// CC is the Controller Configuration property:
//
//	24 CRIME | 23:20 IOCQES | 19:16 IOSQES | 15:14 SHN | 13:11 AMS | 10:7 MPS | 6:4 CSS | 0 EN
type CC uint32

// Values of CC.CSS and CC.SHN.
const (
	CCCSSNVM    = 0
	CCCSSIOCS   = 6
	CCCSSAdmin  = 7
	SHNNone     = 0
	SHNNormal   = 1
	SHNAbrupt   = 2
	CCIOSQES64  = 6 // 64 byte SQEs
	CCIOCQES16  = 4 // 16 byte CQEs
	CCMPS4KiB   = 0
	CCAMSRobin  = 0
	CCAMSWeight = 1
)

func (c CC) bits(shift, width uint) uint8 { return uint8(uint32(c) >> shift & (1<<width - 1)) }
func (c CC) with(shift, width uint, v uint8) CC {
	mask := uint32(1<<width-1) << shift
	return CC(uint32(c)&^mask | uint32(v)<<shift&mask)
}

// EN enables the controller. Clearing it resets the controller.
func (c CC) EN() bool         { return c&1 != 0 }
func (c CC) WithEN(v bool) CC { return c.with(0, 1, uint8(b2u(v))) }

// CSS is the command set selected.
func (c CC) CSS() uint8          { return c.bits(4, 3) }
func (c CC) WithCSS(v uint8) CC  { return c.with(4, 3, v) }
func (c CC) MPS() uint8          { return c.bits(7, 4) }
func (c CC) WithMPS(v uint8) CC  { return c.with(7, 4, v) }
func (c CC) AMS() uint8          { return c.bits(11, 3) }
func (c CC) WithAMS(v uint8) CC  { return c.with(11, 3, v) }
func (c CC) SHN() uint8          { return c.bits(14, 2) }
func (c CC) WithSHN(v uint8) CC  { return c.with(14, 2, v) }
func (c CC) IOSQES() uint8       { return c.bits(16, 4) }
func (c CC) IOCQES() uint8       { return c.bits(20, 4) }
func (c CC) CRIME() bool         { return c.bits(24, 1) != 0 }
func (c CC) WithCRIME(v bool) CC { return c.with(24, 1, uint8(b2u(v))) }

// WithIOSQES and WithIOCQES set the entry sizes, as powers of two.
func (c CC) WithIOSQES(v uint8) CC { return c.with(16, 4, v) }
func (c CC) WithIOCQES(v uint8) CC { return c.with(20, 4, v) }

// CSTS is the Controller Status property:
//
//	6 ST | 5 PP | 4 NSSRO | 3:2 SHST | 1 CFS | 0 RDY
type CSTS uint32

// Bits of CSTS and values of SHST, in place.
const (
	CSTSRDY           CSTS = 1 << 0
	CSTSCFS           CSTS = 1 << 1
	CSTSSHSTMask      CSTS = 3 << 2
	CSTSSHSTOccurring CSTS = 1 << 2
	CSTSSHSTComplete  CSTS = 2 << 2
	CSTSNSSRO         CSTS = 1 << 4
	CSTSPP            CSTS = 1 << 5
)

// RDY: the controller processes commands. CFS: fatal status; the controller must be reset.
func (c CSTS) RDY() bool { return c&CSTSRDY != 0 }
func (c CSTS) CFS() bool { return c&CSTSCFS != 0 }

// SHST is the shutdown status: 0 none, 1 occurring, 2 complete.
func (c CSTS) SHST() uint8 { return uint8(c >> 2 & 3) }

// WithSHST sets the shutdown status.
func (c CSTS) WithSHST(v uint8) CSTS { return c&^CSTSSHSTMask | CSTS(v)<<2&CSTSSHSTMask }

func b2u(b bool) uint64 {
	if b {
		return 1
	}
	return 0
}
