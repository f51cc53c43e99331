package nvme

import "jbofd/internal/uuid"

// IdentifySize is the size of every Identify data structure.
const IdentifySize = 4096

// CNS values of the Identify command (NVMe Base 2.0, section 5.17.1).
const (
	CNSNamespace            = 0x00
	CNSController           = 0x01
	CNSActiveNSList         = 0x02
	CNSNSDescriptors        = 0x03
	CNSNVMSetList           = 0x04
	CNSNamespaceCSI         = 0x05 // I/O command set specific namespace
	CNSControllerCSI        = 0x06 // I/O command set specific controller
	CNSActiveNSListCSI      = 0x07
	CNSNamespaceIndependent = 0x08 // I/O command set independent namespace
	CNSAllocatedNSList      = 0x10
	CNSAllocatedNamespace   = 0x11
	CNSNSControllerList     = 0x12 // controllers a namespace is attached to
	CNSControllerList       = 0x13
	CNSPrimaryController    = 0x14
	CNSSecondaryControllers = 0x15
	CNSUUIDList             = 0x17
	CNSDomainList           = 0x18
	CNSAllocatedNSListCSI   = 0x1A
	CNSAllocatedNSCSI       = 0x1B
	CNSIOCommandSets        = 0x1C
)

// CSI is a command set identifier.
type CSI uint8

// Command set identifiers.
const (
	CSINVM CSI = 0
	CSIKV  CSI = 1
	CSIZNS CSI = 2
)

// IdentifyController is the Identify Controller data structure (CNS 01h; NVMe Base
// 2.0, figure 275, section 5.17.2.1; the NVM command set's part, 512 to 535, in NVM Command Set 1.0,
// section 4.1.5.2).
//
//	   0 ..  255  capabilities and identity: VID, SN, MN, FR, CMIC, MDTS, CNTLID, VER, ...
//	 256 ..  511  admin commands and optional subsystem features: OACS, AERL, KAS, ANA, ...
//	 512 ..  703  NVM command set: SQES, CQES, MAXCMD, NN, ONCS, VWC, SGLS, ...
//	 768 .. 1023  SUBNQN
//	1792 .. 2047  fabrics: IOCCSZ, IORCSZ, ICDOFF, FCATT, MSDBD, OFCS
//	2048 .. 3071  power state descriptors
//	3072 .. 4095  vendor specific: Extension
type IdentifyController [IdentifySize]byte

// Offsets of the fields.
const (
	icVID       = 0
	icSSVID     = 2
	icSN        = 4
	icMN        = 24
	icFR        = 64
	icRAB       = 72
	icIEEE      = 73
	icCMIC      = 76
	icMDTS      = 77
	icCNTLID    = 78
	icVER       = 80
	icRTD3R     = 84
	icRTD3E     = 88
	icOAES      = 92
	icCTRATT    = 96
	icCNTRLTYPE = 111
	icFGUID     = 112
	icCRDT1     = 128
	icCRDT2     = 130
	icCRDT3     = 132
	icOACS      = 256
	icACL       = 258
	icAERL      = 259
	icFRMW      = 260
	icLPA       = 261
	icELPE      = 262
	icNPSS      = 263
	icAVSCC     = 264
	icAPSTA     = 265
	icWCTEMP    = 266
	icCCTEMP    = 268
	icMTFA      = 270
	icTNVMCAP   = 280
	icUNVMCAP   = 296
	icRPMBS     = 312
	icEDSTT     = 316
	icKAS       = 320
	icHCTMA     = 322
	icMNTMT     = 324
	icMXTMT     = 326
	icSANICAP   = 328
	icHMMINDS   = 332
	icNSETIDMAX = 338
	icENDGIDMAX = 340
	icANATT     = 342
	icANACAP    = 343
	icANAGRPMAX = 344
	icNANAGRPID = 348
	icCQT       = 386
	icSQES      = 512
	icCQES      = 513
	icMAXCMD    = 514
	icNN        = 516
	icONCS      = 520
	icFUSES     = 522
	icFNA       = 524
	icVWC       = 525
	icAWUN      = 526
	icAWUPF     = 528
	icICSVSCC   = 530
	icNWPC      = 531
	icACWU      = 532
	icCDFS      = 534
	icSGLS      = 536
	icMNAN      = 540
	icSubNQN    = 768
	icIOCCSZ    = 1792
	icIORCSZ    = 1796
	icICDOFF    = 1800
	icFCATT     = 1802
	icMSDBD     = 1803
	icOFCS      = 1804
	icDCTYPE    = 1806
)

const (
	icPSD    = 2048
	icVendor = 3072
)

// Values and bits of Identify Controller fields.
const (
	CMICMultiPort       = 1 << 0
	CMICMultiController = 1 << 1
	CMICANA             = 1 << 3 // ANA reporting

	CTRATTHostID128 = 1 << 0 // 128-bit host identifiers
	CTRATTTBKAS     = 1 << 6 // traffic based keep alive
	CTRATTELBAS     = 1 << 15

	CNTRLTYPEIO        = 1
	CNTRLTYPEDiscovery = 2
	CNTRLTYPEAdmin     = 3

	OACSNSManagement = 1 << 3

	LPASMARTPerNS = 1 << 0
	LPAEffects    = 1 << 1
	LPAExtended   = 1 << 2 // Get Log Page with offsets and 32-bit lengths
	LPASupported  = 1 << 5 // log pages 00h, 05h, 12h and 13h

	ONCSCompare      = 1 << 0
	ONCSWriteUncorr  = 1 << 1
	ONCSDSM          = 1 << 2
	ONCSWriteZeroes  = 1 << 3
	ONCSSave         = 1 << 4 // features can be saved and selected
	ONCSReservations = 1 << 5
	ONCSTimestamp    = 1 << 6
	ONCSVerify       = 1 << 7
	ONCSCopy         = 1 << 8

	FUSESCompareAndWrite = 1 << 0

	VWCPresent      = 1 << 0
	VWCFlushNSIDNo  = 2 << 1 // Flush does not accept NSID FFFFFFFFh
	VWCFlushNSIDAll = 3 << 1 // Flush with NSID FFFFFFFFh flushes every namespace

	SGLSSupported     = 1 << 0 // without alignment requirements
	SGLSKeyed         = 1 << 2
	SGLSOffset        = 1 << 20 // address may be an offset: in-capsule data
	SGLSTransportData = 1 << 21 // transport SGL data block: TCP

	ANACAPOptimized      = 1 << 0
	ANACAPNonOptimized   = 1 << 1
	ANACAPInaccessible   = 1 << 2
	ANACAPPersistentLoss = 1 << 3
	ANACAPChange         = 1 << 4
	ANACAPGroupStable    = 1 << 6 // a namespace's ANAGRPID does not change while it is attached

	FCATTStatic    = 1 << 0 // static controller model
	OFCSDisconnect = 1 << 0

	DCTYPEDirect  = 1
	DCTYPECentral = 2
)

// VID is the PCI vendor ID; 0 for a controller without PCI.
func (c *IdentifyController) VID() uint16       { return le.Uint16(c[icVID:]) }
func (c *IdentifyController) SetVID(v uint16)   { le.PutUint16(c[icVID:], v) }
func (c *IdentifyController) SSVID() uint16     { return le.Uint16(c[icSSVID:]) }
func (c *IdentifyController) SetSSVID(v uint16) { le.PutUint16(c[icSSVID:], v) }

// SN is the serial number, MN the model number, FR the firmware revision: ASCII,
// padded with spaces, at most 20, 40 and 8 bytes.
func (c *IdentifyController) SN() string     { return asciiField(c[icSN : icSN+20]) }
func (c *IdentifyController) SetSN(s string) { setASCII(c[icSN:icSN+20], s) }
func (c *IdentifyController) MN() string     { return asciiField(c[icMN : icMN+40]) }
func (c *IdentifyController) SetMN(s string) { setASCII(c[icMN:icMN+40], s) }
func (c *IdentifyController) FR() string     { return asciiField(c[icFR : icFR+8]) }
func (c *IdentifyController) SetFR(s string) { setASCII(c[icFR:icFR+8], s) }

// RAB is the recommended arbitration burst, a power of two.
func (c *IdentifyController) RAB() uint8     { return c[icRAB] }
func (c *IdentifyController) SetRAB(v uint8) { c[icRAB] = v }

// IEEE is the OUI, least significant byte first.
func (c *IdentifyController) IEEE() [3]byte     { return [3]byte(c[icIEEE:]) }
func (c *IdentifyController) SetIEEE(v [3]byte) { copy(c[icIEEE:], v[:]) }

// CMIC states what the controllers of the subsystem share: CMIC constants.
func (c *IdentifyController) CMIC() uint8     { return c[icCMIC] }
func (c *IdentifyController) SetCMIC(v uint8) { c[icCMIC] = v }

// MDTS is the maximum data transfer size as a power of two in units of CAP.MPSMIN; 0 stands for no limit.
func (c *IdentifyController) MDTS() uint8        { return c[icMDTS] }
func (c *IdentifyController) SetMDTS(v uint8)    { c[icMDTS] = v }
func (c *IdentifyController) CNTLID() uint16     { return le.Uint16(c[icCNTLID:]) }
func (c *IdentifyController) SetCNTLID(v uint16) { le.PutUint16(c[icCNTLID:], v) }

// VER is the version, as in the VS property.
func (c *IdentifyController) VER() VS     { return VS(le.Uint32(c[icVER:])) }
func (c *IdentifyController) SetVER(v VS) { le.PutUint32(c[icVER:], uint32(v)) }

// RTD3R is the RTD3 resume latency in microseconds.
func (c *IdentifyController) RTD3R() uint32     { return le.Uint32(c[icRTD3R:]) }
func (c *IdentifyController) SetRTD3R(v uint32) { le.PutUint32(c[icRTD3R:], v) }

// RTD3E is the RTD3 entry latency in microseconds. A host waits that long for a shutdown.
func (c *IdentifyController) RTD3E() uint32     { return le.Uint32(c[icRTD3E:]) }
func (c *IdentifyController) SetRTD3E(v uint32) { le.PutUint32(c[icRTD3E:], v) }

// OAES holds the optional asynchronous events: AEC constants, the same bits.
func (c *IdentifyController) OAES() uint32     { return le.Uint32(c[icOAES:]) }
func (c *IdentifyController) SetOAES(v uint32) { le.PutUint32(c[icOAES:], v) }

// CTRATT holds controller attributes: CTRATT constants.
func (c *IdentifyController) CTRATT() uint32     { return le.Uint32(c[icCTRATT:]) }
func (c *IdentifyController) SetCTRATT(v uint32) { le.PutUint32(c[icCTRATT:], v) }

// CNTRLTYPE distinguishes I/O, discovery and administrative controllers.
func (c *IdentifyController) CNTRLTYPE() uint8     { return c[icCNTRLTYPE] }
func (c *IdentifyController) SetCNTRLTYPE(v uint8) { c[icCNTRLTYPE] = v }
func (c *IdentifyController) FGUID() uuid.UUID     { return uuid.UUID(c[icFGUID : icFGUID+16]) }
func (c *IdentifyController) SetFGUID(v uuid.UUID) { copy(c[icFGUID:], v[:]) }

// CRDT1 to CRDT3 are the retry delays, in 100 ms, that CRD values 1 to 3 of a status select.
func (c *IdentifyController) CRDT1() uint16     { return le.Uint16(c[icCRDT1:]) }
func (c *IdentifyController) SetCRDT1(v uint16) { le.PutUint16(c[icCRDT1:], v) }
func (c *IdentifyController) CRDT2() uint16     { return le.Uint16(c[icCRDT2:]) }
func (c *IdentifyController) SetCRDT2(v uint16) { le.PutUint16(c[icCRDT2:], v) }
func (c *IdentifyController) CRDT3() uint16     { return le.Uint16(c[icCRDT3:]) }
func (c *IdentifyController) SetCRDT3(v uint16) { le.PutUint16(c[icCRDT3:], v) }

// OACS holds the optional admin commands: OACS constants.
func (c *IdentifyController) OACS() uint16     { return le.Uint16(c[icOACS:]) }
func (c *IdentifyController) SetOACS(v uint16) { le.PutUint16(c[icOACS:], v) }

// ACL is the number of concurrent Aborts, 0-based.
func (c *IdentifyController) ACL() uint8     { return c[icACL] }
func (c *IdentifyController) SetACL(v uint8) { c[icACL] = v }

// AERL is the number of outstanding Asynchronous Event Requests, 0-based.
func (c *IdentifyController) AERL() uint8     { return c[icAERL] }
func (c *IdentifyController) SetAERL(v uint8) { c[icAERL] = v }

// FRMW: bit 0 slot 1 read only, bits 3:1 number of slots, bit 4 activation without
// reset.
func (c *IdentifyController) FRMW() uint8     { return c[icFRMW] }
func (c *IdentifyController) SetFRMW(v uint8) { c[icFRMW] = v }

// LPA holds log page attributes: LPA constants.
func (c *IdentifyController) LPA() uint8     { return c[icLPA] }
func (c *IdentifyController) SetLPA(v uint8) { c[icLPA] = v }

// ELPE is the number of error log entries, 0-based.
func (c *IdentifyController) ELPE() uint8     { return c[icELPE] }
func (c *IdentifyController) SetELPE(v uint8) { c[icELPE] = v }

// NPSS is the number of power states, 0-based.
func (c *IdentifyController) NPSS() uint8      { return c[icNPSS] }
func (c *IdentifyController) SetNPSS(v uint8)  { c[icNPSS] = v }
func (c *IdentifyController) AVSCC() uint8     { return c[icAVSCC] }
func (c *IdentifyController) SetAVSCC(v uint8) { c[icAVSCC] = v }
func (c *IdentifyController) APSTA() uint8     { return c[icAPSTA] }
func (c *IdentifyController) SetAPSTA(v uint8) { c[icAPSTA] = v }

// WCTEMP and CCTEMP are the warning and critical temperature thresholds in kelvin.
func (c *IdentifyController) WCTEMP() uint16     { return le.Uint16(c[icWCTEMP:]) }
func (c *IdentifyController) SetWCTEMP(v uint16) { le.PutUint16(c[icWCTEMP:], v) }
func (c *IdentifyController) CCTEMP() uint16     { return le.Uint16(c[icCCTEMP:]) }
func (c *IdentifyController) SetCCTEMP(v uint16) { le.PutUint16(c[icCCTEMP:], v) }

// MTFA is the maximum time of firmware activation in 100 ms.
func (c *IdentifyController) MTFA() uint16     { return le.Uint16(c[icMTFA:]) }
func (c *IdentifyController) SetMTFA(v uint16) { le.PutUint16(c[icMTFA:], v) }

// TNVMCAP is the total and UNVMCAP the unallocated capacity in bytes.
func (c *IdentifyController) TNVMCAP() Uint128     { return getUint128(c[icTNVMCAP:]) }
func (c *IdentifyController) SetTNVMCAP(v Uint128) { putUint128(c[icTNVMCAP:], v) }
func (c *IdentifyController) UNVMCAP() Uint128     { return getUint128(c[icUNVMCAP:]) }
func (c *IdentifyController) SetUNVMCAP(v Uint128) { putUint128(c[icUNVMCAP:], v) }
func (c *IdentifyController) RPMBS() uint32        { return le.Uint32(c[icRPMBS:]) }
func (c *IdentifyController) SetRPMBS(v uint32)    { le.PutUint32(c[icRPMBS:], v) }

// EDSTT is the extended device self-test time in minutes.
func (c *IdentifyController) EDSTT() uint16     { return le.Uint16(c[icEDSTT:]) }
func (c *IdentifyController) SetEDSTT(v uint16) { le.PutUint16(c[icEDSTT:], v) }

// KAS is the keep-alive granularity in 100 ms; 0 means that keep alive is not supported.
func (c *IdentifyController) KAS() uint16           { return le.Uint16(c[icKAS:]) }
func (c *IdentifyController) SetKAS(v uint16)       { le.PutUint16(c[icKAS:], v) }
func (c *IdentifyController) HCTMA() uint16         { return le.Uint16(c[icHCTMA:]) }
func (c *IdentifyController) SetHCTMA(v uint16)     { le.PutUint16(c[icHCTMA:], v) }
func (c *IdentifyController) MNTMT() uint16         { return le.Uint16(c[icMNTMT:]) }
func (c *IdentifyController) SetMNTMT(v uint16)     { le.PutUint16(c[icMNTMT:], v) }
func (c *IdentifyController) MXTMT() uint16         { return le.Uint16(c[icMXTMT:]) }
func (c *IdentifyController) SetMXTMT(v uint16)     { le.PutUint16(c[icMXTMT:], v) }
func (c *IdentifyController) SANICAP() uint32       { return le.Uint32(c[icSANICAP:]) }
func (c *IdentifyController) SetSANICAP(v uint32)   { le.PutUint32(c[icSANICAP:], v) }
func (c *IdentifyController) HMMINDS() uint32       { return le.Uint32(c[icHMMINDS:]) }
func (c *IdentifyController) SetHMMINDS(v uint32)   { le.PutUint32(c[icHMMINDS:], v) }
func (c *IdentifyController) NSETIDMAX() uint16     { return le.Uint16(c[icNSETIDMAX:]) }
func (c *IdentifyController) SetNSETIDMAX(v uint16) { le.PutUint16(c[icNSETIDMAX:], v) }
func (c *IdentifyController) ENDGIDMAX() uint16     { return le.Uint16(c[icENDGIDMAX:]) }
func (c *IdentifyController) SetENDGIDMAX(v uint16) { le.PutUint16(c[icENDGIDMAX:], v) }

// CQT is the Command Quiesce Time in milliseconds: how long commands may be in flight after their association has
// ended; 0: not reported.
//
// Source: NVMe Base 2.1, section 9.6 and Identify Controller, bytes 387:386.
func (c *IdentifyController) CQT() uint16     { return le.Uint16(c[icCQT:]) }
func (c *IdentifyController) SetCQT(v uint16) { le.PutUint16(c[icCQT:], v) }

// ANATT is the longest ANA transition in seconds.
func (c *IdentifyController) ANATT() uint8     { return c[icANATT] }
func (c *IdentifyController) SetANATT(v uint8) { c[icANATT] = v }

// ANACAP holds the ANA states the controller reports: ANACAP constants.
func (c *IdentifyController) ANACAP() uint8     { return c[icANACAP] }
func (c *IdentifyController) SetANACAP(v uint8) { c[icANACAP] = v }

// ANAGRPMAX is the largest ANA group identifier, NANAGRPID the number of groups.
func (c *IdentifyController) ANAGRPMAX() uint32     { return le.Uint32(c[icANAGRPMAX:]) }
func (c *IdentifyController) SetANAGRPMAX(v uint32) { le.PutUint32(c[icANAGRPMAX:], v) }
func (c *IdentifyController) NANAGRPID() uint32     { return le.Uint32(c[icNANAGRPID:]) }
func (c *IdentifyController) SetNANAGRPID(v uint32) { le.PutUint32(c[icNANAGRPID:], v) }

// SQES and CQES: required (bits 3:0) and maximum (bits 7:4) entry sizes as powers of
// two; over fabrics 66h and 44h.
func (c *IdentifyController) SQES() uint8     { return c[icSQES] }
func (c *IdentifyController) SetSQES(v uint8) { c[icSQES] = v }
func (c *IdentifyController) CQES() uint8     { return c[icCQES] }
func (c *IdentifyController) SetCQES(v uint8) { c[icCQES] = v }

// MAXCMD is the maximum number of commands that a host should have outstanding on an I/O queue. It must not be 0 over
// fabrics.
func (c *IdentifyController) MAXCMD() uint16     { return le.Uint16(c[icMAXCMD:]) }
func (c *IdentifyController) SetMAXCMD(v uint16) { le.PutUint16(c[icMAXCMD:], v) }

// NN is the largest valid NSID. MNAN is the maximum number of namespaces; 0 stands for NN.
func (c *IdentifyController) NN() uint32     { return le.Uint32(c[icNN:]) }
func (c *IdentifyController) SetNN(v uint32) { le.PutUint32(c[icNN:], v) }

// ONCS holds the optional NVM commands: ONCS constants.
func (c *IdentifyController) ONCS() uint16     { return le.Uint16(c[icONCS:]) }
func (c *IdentifyController) SetONCS(v uint16) { le.PutUint16(c[icONCS:], v) }

// FUSES: bit 0, fused Compare and Write.
func (c *IdentifyController) FUSES() uint16     { return le.Uint16(c[icFUSES:]) }
func (c *IdentifyController) SetFUSES(v uint16) { le.PutUint16(c[icFUSES:], v) }
func (c *IdentifyController) FNA() uint8        { return c[icFNA] }
func (c *IdentifyController) SetFNA(v uint8)    { c[icFNA] = v }

// VWC: bit 0, a volatile write cache is present; bits 2:1, what Flush does with NSID
// FFFFFFFFh: VWC constants.
func (c *IdentifyController) VWC() uint8     { return c[icVWC] }
func (c *IdentifyController) SetVWC(v uint8) { c[icVWC] = v }

// AWUN, AWUPF and ACWU are the atomic write units (normal, over power failure, of
// compare and write) in logical blocks, 0-based.
func (c *IdentifyController) AWUN() uint16       { return le.Uint16(c[icAWUN:]) }
func (c *IdentifyController) SetAWUN(v uint16)   { le.PutUint16(c[icAWUN:], v) }
func (c *IdentifyController) AWUPF() uint16      { return le.Uint16(c[icAWUPF:]) }
func (c *IdentifyController) SetAWUPF(v uint16)  { le.PutUint16(c[icAWUPF:], v) }
func (c *IdentifyController) ICSVSCC() uint8     { return c[icICSVSCC] }
func (c *IdentifyController) SetICSVSCC(v uint8) { c[icICSVSCC] = v }
func (c *IdentifyController) NWPC() uint8        { return c[icNWPC] }
func (c *IdentifyController) SetNWPC(v uint8)    { c[icNWPC] = v }
func (c *IdentifyController) ACWU() uint16       { return le.Uint16(c[icACWU:]) }
func (c *IdentifyController) SetACWU(v uint16)   { le.PutUint16(c[icACWU:], v) }

// CDFS holds the copy descriptor formats supported.
func (c *IdentifyController) CDFS() uint16     { return le.Uint16(c[icCDFS:]) }
func (c *IdentifyController) SetCDFS(v uint16) { le.PutUint16(c[icCDFS:], v) }

// SGLS states which kinds of SGLs are supported: SGLS constants.
func (c *IdentifyController) SGLS() uint32     { return le.Uint32(c[icSGLS:]) }
func (c *IdentifyController) SetSGLS(v uint32) { le.PutUint32(c[icSGLS:], v) }
func (c *IdentifyController) MNAN() uint32     { return le.Uint32(c[icMNAN:]) }
func (c *IdentifyController) SetMNAN(v uint32) { le.PutUint32(c[icMNAN:], v) }

// SubNQN is the NQN of the subsystem, terminated by a NUL.
func (c *IdentifyController) SubNQN() string     { return textField(c[icSubNQN : icSubNQN+256]) }
func (c *IdentifyController) SetSubNQN(s string) { setText(c[icSubNQN:icSubNQN+256], s) }

// IOCCSZ is the size of an I/O command capsule in 16 byte units: the SQE (4) and the
// in-capsule data.
func (c *IdentifyController) IOCCSZ() uint32     { return le.Uint32(c[icIOCCSZ:]) }
func (c *IdentifyController) SetIOCCSZ(v uint32) { le.PutUint32(c[icIOCCSZ:], v) }

// IORCSZ is the size of an I/O response capsule in 16 byte units: 1.
func (c *IdentifyController) IORCSZ() uint32     { return le.Uint32(c[icIORCSZ:]) }
func (c *IdentifyController) SetIORCSZ(v uint32) { le.PutUint32(c[icIORCSZ:], v) }

// ICDOFF is the offset of in-capsule data in 16 byte units. It must be 0 over TCP.
func (c *IdentifyController) ICDOFF() uint16     { return le.Uint16(c[icICDOFF:]) }
func (c *IdentifyController) SetICDOFF(v uint16) { le.PutUint16(c[icICDOFF:], v) }

// FCATT: bit 0 is 0 for the dynamic controller model.
func (c *IdentifyController) FCATT() uint8     { return c[icFCATT] }
func (c *IdentifyController) SetFCATT(v uint8) { c[icFCATT] = v }

// MSDBD is the maximum number of SGL data block descriptors of a command; 0 stands for no limit.
func (c *IdentifyController) MSDBD() uint8     { return c[icMSDBD] }
func (c *IdentifyController) SetMSDBD(v uint8) { c[icMSDBD] = v }

// OFCS: bit 0, Disconnect is supported.
func (c *IdentifyController) OFCS() uint16     { return le.Uint16(c[icOFCS:]) }
func (c *IdentifyController) SetOFCS(v uint16) { le.PutUint16(c[icOFCS:], v) }

// DCTYPE distinguishes direct (1) and central (2) discovery controllers.
func (c *IdentifyController) DCTYPE() uint8     { return c[icDCTYPE] }
func (c *IdentifyController) SetDCTYPE(v uint8) { c[icDCTYPE] = v }

// SetPowerState0 sets the maximum power of power state 0 in centiwatts.
func (c *IdentifyController) SetPowerState0(centiwatts uint16) {
	le.PutUint16(c[icPSD:], centiwatts)
}

// PowerState0 is the maximum power of power state 0 in centiwatts.
func (c *IdentifyController) PowerState0() uint16 { return le.Uint16(c[icPSD:]) }

// Bits of the extension that jbofd announces: docs/wire-extensions.md.
const (
	ExtCredits       = 1 << 0
	ExtOrderedWrites = 1 << 1
	ExtPushdown      = 1 << 2
	ExtKV            = 1 << 3
	ExtOffload       = 1 << 4
	ExtReplication   = 1 << 5
	ExtClusterMap    = 1 << 6
)

// ExtVersion is the version of the extensions that this package implements.
const ExtVersion = 1

const extMagic = "JBOF"

// Extension returns the version and bits of jbofd's extensions from the vendor specific area. It returns false if a
// controller of another vendor, or an older jbofd, has none.
//
//	3072 "JBOF" | 3076 u16 version | 3078 u16 reserved | 3080 u32 bits
func (c *IdentifyController) Extension() (version uint16, bits uint32, ok bool) {
	v := c[icVendor:]
	if string(v[:4]) != extMagic {
		return 0, 0, false
	}
	return le.Uint16(v[4:]), le.Uint32(v[8:]), true
}

// SetExtension announces extensions.
func (c *IdentifyController) SetExtension(version uint16, bits uint32) {
	v := c[icVendor:]
	copy(v, extMagic)
	le.PutUint16(v[4:], version)
	le.PutUint16(v[6:], 0)
	le.PutUint32(v[8:], bits)
}

// Check validates the fields that a host relies on; the error names the invalid field.
func (c *IdentifyController) Check() error {
	switch {
	case c.SQES()&0xf > 6 || c.SQES()>>4 < 6:
		return fieldError("Identify Controller", "SQES", c.SQES(), "a range holding 6 (64 bytes)")
	case c.CQES()&0xf > 4 || c.CQES()>>4 < 4:
		return fieldError("Identify Controller", "CQES", c.CQES(), "a range holding 4 (16 bytes)")
	case c.CNTRLTYPE() == CNTRLTYPEDiscovery:
		return nil // the following fields concern I/O queues
	case c.IOCCSZ() < SQESize/16:
		return fieldError("Identify Controller", "IOCCSZ", c.IOCCSZ(), "at least 4")
	case c.IORCSZ() < CQESize/16:
		return fieldError("Identify Controller", "IORCSZ", c.IORCSZ(), "at least 1")
	case !terminated(c[icSubNQN : icSubNQN+256]):
		return fieldError("Identify Controller", "SUBNQN", "unterminated", "at most 223 bytes and a NUL")
	}
	return nil
}
