package nvme

import (
	"iter"
	"math/bits"

	"jbofd/internal/units"
	"jbofd/internal/uuid"
)

// IdentifyNamespace is the Identify Namespace data structure of the NVM command set
// (CNS 00h and 11h; NVM Command Set 1.0, section 4.1.5.1).
//
//	  0 .. 103  sizes, features, atomicity, granularity, ANAGRPID
//	104 .. 127  NGUID, EUI64
//	128 .. 383  64 LBA formats of 4 bytes
//	384 .. 4095 vendor specific: u16 number of the ssd in the node
type IdentifyNamespace [IdentifySize]byte

// Offsets of the fields.
const (
	nsNSZE     = 0
	nsNCAP     = 8
	nsNUSE     = 16
	nsNSFEAT   = 24
	nsNLBAF    = 25
	nsFLBAS    = 26
	nsMC       = 27
	nsDPC      = 28
	nsDPS      = 29
	nsNMIC     = 30
	nsRESCAP   = 31
	nsFPI      = 32
	nsDLFEAT   = 33
	nsNAWUN    = 34
	nsNAWUPF   = 36
	nsNACWU    = 38
	nsNABSN    = 40
	nsNABO     = 42
	nsNABSPF   = 44
	nsNOIOB    = 46
	nsNVMCAP   = 48
	nsNPWG     = 64
	nsNPWA     = 66
	nsNPDG     = 68
	nsNPDA     = 70
	nsNOWS     = 72
	nsMSSRL    = 74
	nsMCL      = 76
	nsMSRC     = 80
	nsANAGRPID = 92
	nsNSATTR   = 99
	nsNVMSETID = 100
	nsENDGID   = 102
	nsNGUID    = 104
	nsEUI64    = 120
)

const (
	nsLBAF   = 128
	nsVendor = 384
	// MaxLBAFormats is the number of places for LBA formats.
	MaxLBAFormats = 64
)

// Values and bits of Identify Namespace fields.
const (
	NSFEATThin    = 1 << 0
	NSFEATAtomics = 1 << 1 // NAWUN to NABSPF are valid
	NSFEATDULBE   = 1 << 2 // deallocated or unwritten block errors
	NSFEATNoReuse = 1 << 3 // NGUID and EUI64 are never used again
	NSFEATOptPerf = 1 << 4 // NPWG to NOWS are valid

	NMICShared = 1 << 0

	DLFEATReadZeroes  = 1 << 0 // deallocated blocks read as zeroes
	DLFEATWriteZeroes = 1 << 3 // Write Zeroes may deallocate

	NSATTRWriteProtected = 1 << 0
	NSTATReady           = 1 << 0
)

// NSZE is the size, NCAP the capacity and NUSE what is allocated, in logical blocks.
func (n *IdentifyNamespace) NSZE() units.Blocks     { return units.Blocks(le.Uint64(n[nsNSZE:])) }
func (n *IdentifyNamespace) SetNSZE(v units.Blocks) { le.PutUint64(n[nsNSZE:], uint64(v)) }
func (n *IdentifyNamespace) NCAP() units.Blocks     { return units.Blocks(le.Uint64(n[nsNCAP:])) }
func (n *IdentifyNamespace) SetNCAP(v units.Blocks) { le.PutUint64(n[nsNCAP:], uint64(v)) }
func (n *IdentifyNamespace) NUSE() units.Blocks     { return units.Blocks(le.Uint64(n[nsNUSE:])) }
func (n *IdentifyNamespace) SetNUSE(v units.Blocks) { le.PutUint64(n[nsNUSE:], uint64(v)) }

// NSFEAT holds namespace features: NSFEAT constants.
func (n *IdentifyNamespace) NSFEAT() uint8     { return n[nsNSFEAT] }
func (n *IdentifyNamespace) SetNSFEAT(v uint8) { n[nsNSFEAT] = v }

// NLBAF is the number of LBA formats, 0-based.
func (n *IdentifyNamespace) NLBAF() uint8     { return n[nsNLBAF] }
func (n *IdentifyNamespace) SetNLBAF(v uint8) { n[nsNLBAF] = v }

// FLBAS: bits 3:0 the index of the format in use, 6:5 its upper bits, bit 4 metadata at the end of data.
func (n *IdentifyNamespace) FLBAS() uint8     { return n[nsFLBAS] }
func (n *IdentifyNamespace) SetFLBAS(v uint8) { n[nsFLBAS] = v }
func (n *IdentifyNamespace) MC() uint8        { return n[nsMC] }
func (n *IdentifyNamespace) SetMC(v uint8)    { n[nsMC] = v }
func (n *IdentifyNamespace) DPC() uint8       { return n[nsDPC] }
func (n *IdentifyNamespace) SetDPC(v uint8)   { n[nsDPC] = v }
func (n *IdentifyNamespace) DPS() uint8       { return n[nsDPS] }
func (n *IdentifyNamespace) SetDPS(v uint8)   { n[nsDPS] = v }

// NMIC: bit 0, the namespace may be attached to several controllers.
func (n *IdentifyNamespace) NMIC() uint8       { return n[nsNMIC] }
func (n *IdentifyNamespace) SetNMIC(v uint8)   { n[nsNMIC] = v }
func (n *IdentifyNamespace) RESCAP() uint8     { return n[nsRESCAP] }
func (n *IdentifyNamespace) SetRESCAP(v uint8) { n[nsRESCAP] = v }
func (n *IdentifyNamespace) FPI() uint8        { return n[nsFPI] }
func (n *IdentifyNamespace) SetFPI(v uint8)    { n[nsFPI] = v }

// DLFEAT says what deallocated blocks read as: DLFEAT constants.
func (n *IdentifyNamespace) DLFEAT() uint8     { return n[nsDLFEAT] }
func (n *IdentifyNamespace) SetDLFEAT(v uint8) { n[nsDLFEAT] = v }

// AtomicWrites is what a controller and a namespace say of writes that a power loss does not tear.
type AtomicWrites struct {
	// Controller is the controller's AWUPF, plus 1: blocks.
	Controller int
	// Own: the namespace has values of its own (NSFEATAtomics), as follows.
	Own                  bool
	NAWUPF, NABSPF, NABO uint16
}

// AtomicWrites returns what the namespace says, with the controller's AWUPF, plus 1.
func (n *IdentifyNamespace) AtomicWrites(controller int) AtomicWrites {
	return AtomicWrites{Controller: controller, Own: n.NSFEAT()&NSFEATAtomics != 0, NAWUPF: n.NAWUPF(),
		NABSPF: n.NABSPF(), NABO: n.NABO()}
}

// Blocks is the length in blocks, a power of two, of the aligned writes that a power loss does not tear. A namespace
// may have boundaries that such writes must not cross; the result divides their distance.
func (a AtomicWrites) Blocks() int {
	n := a.Controller
	if a.Own {
		if a.NAWUPF > 0 {
			n = int(a.NAWUPF) + 1
		}
		if b := int(a.NABSPF); b > 0 {
			n = min(n, (b+1)&-(b+1))
		}
		if a.NABO != 0 {
			n = 1
		}
	}
	return 1 << (bits.Len(uint(n)) - 1)
}

// NAWUN to NABSPF are the atomic units and boundaries of this namespace in logical
// blocks, 0-based, valid with NSFEATAtomics.
func (n *IdentifyNamespace) NAWUN() uint16      { return le.Uint16(n[nsNAWUN:]) }
func (n *IdentifyNamespace) SetNAWUN(v uint16)  { le.PutUint16(n[nsNAWUN:], v) }
func (n *IdentifyNamespace) NAWUPF() uint16     { return le.Uint16(n[nsNAWUPF:]) }
func (n *IdentifyNamespace) SetNAWUPF(v uint16) { le.PutUint16(n[nsNAWUPF:], v) }
func (n *IdentifyNamespace) NACWU() uint16      { return le.Uint16(n[nsNACWU:]) }
func (n *IdentifyNamespace) SetNACWU(v uint16)  { le.PutUint16(n[nsNACWU:], v) }
func (n *IdentifyNamespace) NABSN() uint16      { return le.Uint16(n[nsNABSN:]) }
func (n *IdentifyNamespace) SetNABSN(v uint16)  { le.PutUint16(n[nsNABSN:], v) }
func (n *IdentifyNamespace) NABO() uint16       { return le.Uint16(n[nsNABO:]) }
func (n *IdentifyNamespace) SetNABO(v uint16)   { le.PutUint16(n[nsNABO:], v) }
func (n *IdentifyNamespace) NABSPF() uint16     { return le.Uint16(n[nsNABSPF:]) }
func (n *IdentifyNamespace) SetNABSPF(v uint16) { le.PutUint16(n[nsNABSPF:], v) }

// NOIOB is the optimal I/O boundary in logical blocks.
func (n *IdentifyNamespace) NOIOB() uint16     { return le.Uint16(n[nsNOIOB:]) }
func (n *IdentifyNamespace) SetNOIOB(v uint16) { le.PutUint16(n[nsNOIOB:], v) }

// NVMCAP is the capacity in bytes.
func (n *IdentifyNamespace) NVMCAP() Uint128     { return getUint128(n[nsNVMCAP:]) }
func (n *IdentifyNamespace) SetNVMCAP(v Uint128) { putUint128(n[nsNVMCAP:], v) }

// NPWG to NOWS are the preferred granularity and alignment of writes and deallocations
// and the optimal write size in logical blocks, 0-based, valid with NSFEATOptPerf.
func (n *IdentifyNamespace) NPWG() uint16     { return le.Uint16(n[nsNPWG:]) }
func (n *IdentifyNamespace) SetNPWG(v uint16) { le.PutUint16(n[nsNPWG:], v) }
func (n *IdentifyNamespace) NPWA() uint16     { return le.Uint16(n[nsNPWA:]) }
func (n *IdentifyNamespace) SetNPWA(v uint16) { le.PutUint16(n[nsNPWA:], v) }
func (n *IdentifyNamespace) NPDG() uint16     { return le.Uint16(n[nsNPDG:]) }
func (n *IdentifyNamespace) SetNPDG(v uint16) { le.PutUint16(n[nsNPDG:], v) }
func (n *IdentifyNamespace) NPDA() uint16     { return le.Uint16(n[nsNPDA:]) }
func (n *IdentifyNamespace) SetNPDA(v uint16) { le.PutUint16(n[nsNPDA:], v) }
func (n *IdentifyNamespace) NOWS() uint16     { return le.Uint16(n[nsNOWS:]) }
func (n *IdentifyNamespace) SetNOWS(v uint16) { le.PutUint16(n[nsNOWS:], v) }

// MSSRL, MCL and MSRC bound the Copy command: blocks a range, blocks in all, ranges
// (0-based).
func (n *IdentifyNamespace) MSSRL() uint16     { return le.Uint16(n[nsMSSRL:]) }
func (n *IdentifyNamespace) SetMSSRL(v uint16) { le.PutUint16(n[nsMSSRL:], v) }
func (n *IdentifyNamespace) MCL() uint32       { return le.Uint32(n[nsMCL:]) }
func (n *IdentifyNamespace) SetMCL(v uint32)   { le.PutUint32(n[nsMCL:], v) }
func (n *IdentifyNamespace) MSRC() uint8       { return n[nsMSRC] }
func (n *IdentifyNamespace) SetMSRC(v uint8)   { n[nsMSRC] = v }

// ANAGRPID is the ANA group; 0 when there is no ANA.
func (n *IdentifyNamespace) ANAGRPID() uint32     { return le.Uint32(n[nsANAGRPID:]) }
func (n *IdentifyNamespace) SetANAGRPID(v uint32) { le.PutUint32(n[nsANAGRPID:], v) }

// NSATTR: bit 0, write protected.
func (n *IdentifyNamespace) NSATTR() uint8        { return n[nsNSATTR] }
func (n *IdentifyNamespace) SetNSATTR(v uint8)    { n[nsNSATTR] = v }
func (n *IdentifyNamespace) NVMSETID() uint16     { return le.Uint16(n[nsNVMSETID:]) }
func (n *IdentifyNamespace) SetNVMSETID(v uint16) { le.PutUint16(n[nsNVMSETID:], v) }
func (n *IdentifyNamespace) ENDGID() uint16       { return le.Uint16(n[nsENDGID:]) }
func (n *IdentifyNamespace) SetENDGID(v uint16)   { le.PutUint16(n[nsENDGID:], v) }

// NGUID and EUI64 are big endian identifiers; all zeroes: none.
func (n *IdentifyNamespace) NGUID() uuid.UUID     { return uuid.UUID(n[nsNGUID : nsNGUID+16]) }
func (n *IdentifyNamespace) SetNGUID(v uuid.UUID) { copy(n[nsNGUID:], v[:]) }
func (n *IdentifyNamespace) EUI64() [8]byte       { return [8]byte(n[nsEUI64:]) }
func (n *IdentifyNamespace) SetEUI64(v [8]byte)   { copy(n[nsEUI64:], v[:]) }

// LBAFormat is one LBA format: metadata bytes (15:0), block size as a power of two
// (23:16), relative performance (25:24, 0 best).
type LBAFormat uint32

// MakeLBAFormat is a format without metadata; shift is 9 for 512 and 12 for 4096 bytes.
func MakeLBAFormat(shift uint8) LBAFormat { return LBAFormat(shift) << 16 }

// MetadataBytes is the metadata per block.
func (f LBAFormat) MetadataBytes() int { return int(f & 0xffff) }

// Shift is the power of two of the block size.
func (f LBAFormat) Shift() uint8 { return uint8(f >> 16) }

// RelativePerformance is 0 (best) to 3.
func (f LBAFormat) RelativePerformance() uint8 { return uint8(f>>24) & 3 }

// LBAF returns LBA format i, 0 to 63; the zero format when there is no such place.
func (n *IdentifyNamespace) LBAF(i int) LBAFormat {
	if i < 0 || i >= MaxLBAFormats {
		return 0
	}
	return LBAFormat(le.Uint32(n[nsLBAF+4*i:]))
}

// SetLBAF sets LBA format i, 0 to 63.
func (n *IdentifyNamespace) SetLBAF(i int, f LBAFormat) { le.PutUint32(n[nsLBAF+4*i:], uint32(f)) }

// FormatIndex is the index of the LBA format in use.
func (n *IdentifyNamespace) FormatIndex() int {
	i := int(n.FLBAS() & 0xf)
	if n.NLBAF() > 15 {
		i |= int(n.FLBAS()>>5&3) << 4
	}
	return i
}

// Format is the LBA format in use.
func (n *IdentifyNamespace) Format() LBAFormat { return n.LBAF(n.FormatIndex()) }

// SSD is the number of the ssd in the node, from jbofd's vendor area: valid only when
// the controller has an Extension.
func (n *IdentifyNamespace) SSD() uint16     { return le.Uint16(n[nsVendor:]) }
func (n *IdentifyNamespace) SetSSD(v uint16) { le.PutUint16(n[nsVendor:], v) }

// Check judges what a host must rely on; the error names the field. The zeroes of
// an inactive NSID fail: ask Inactive first.
func (n *IdentifyNamespace) Check() error {
	const what = "Identify Namespace"
	f := n.Format()
	switch {
	case n.NLBAF() >= MaxLBAFormats:
		return fieldError(what, "NLBAF", n.NLBAF(), "at most 63")
	case n.FormatIndex() > int(n.NLBAF()):
		return fieldError(what, "FLBAS", n.FLBAS(), "the index of one of the NLBAF formats")
	case f.Shift() < 9 || f.Shift() > 31:
		return fieldError(what, "LBADS", f.Shift(), "9 to 31")
	case n.NCAP() > n.NSZE():
		return fieldError(what, "NCAP", n.NCAP(), "at most NSZE")
	case n.NUSE() > n.NCAP():
		return fieldError(what, "NUSE", n.NUSE(), "at most NCAP")
	}
	if _, ok := n.NSZE().Bytes(f.Shift()); !ok {
		return fieldError(what, "NSZE", n.NSZE(), "less than 2^63 bytes")
	}
	return nil
}

// Inactive reports whether the structure is the all-zero one of an inactive NSID.
func (n *IdentifyNamespace) Inactive() bool { return n.NSZE() == 0 && *n == IdentifyNamespace{} }

// IdentifyNamespaceIndependent is the I/O command set independent Identify Namespace
// data structure (CNS 08h; NVMe Base 2.0, section 5.17.2.8).
type IdentifyNamespaceIndependent [IdentifySize]byte

// Offsets of the fields.
const (
	insNSFEAT   = 0
	insNMIC     = 1
	insRESCAP   = 2
	insFPI      = 3
	insANAGRPID = 4
	insNSATTR   = 8
	insNVMSETID = 10
	insENDGID   = 12
	insNSTAT    = 14
)

func (n *IdentifyNamespaceIndependent) NSFEAT() uint8        { return n[insNSFEAT] }
func (n *IdentifyNamespaceIndependent) SetNSFEAT(v uint8)    { n[insNSFEAT] = v }
func (n *IdentifyNamespaceIndependent) NMIC() uint8          { return n[insNMIC] }
func (n *IdentifyNamespaceIndependent) SetNMIC(v uint8)      { n[insNMIC] = v }
func (n *IdentifyNamespaceIndependent) RESCAP() uint8        { return n[insRESCAP] }
func (n *IdentifyNamespaceIndependent) SetRESCAP(v uint8)    { n[insRESCAP] = v }
func (n *IdentifyNamespaceIndependent) FPI() uint8           { return n[insFPI] }
func (n *IdentifyNamespaceIndependent) SetFPI(v uint8)       { n[insFPI] = v }
func (n *IdentifyNamespaceIndependent) ANAGRPID() uint32     { return le.Uint32(n[insANAGRPID:]) }
func (n *IdentifyNamespaceIndependent) SetANAGRPID(v uint32) { le.PutUint32(n[insANAGRPID:], v) }
func (n *IdentifyNamespaceIndependent) NSATTR() uint8        { return n[insNSATTR] }
func (n *IdentifyNamespaceIndependent) SetNSATTR(v uint8)    { n[insNSATTR] = v }
func (n *IdentifyNamespaceIndependent) NVMSETID() uint16     { return le.Uint16(n[insNVMSETID:]) }
func (n *IdentifyNamespaceIndependent) SetNVMSETID(v uint16) { le.PutUint16(n[insNVMSETID:], v) }
func (n *IdentifyNamespaceIndependent) ENDGID() uint16       { return le.Uint16(n[insENDGID:]) }
func (n *IdentifyNamespaceIndependent) SetENDGID(v uint16)   { le.PutUint16(n[insENDGID:], v) }

// NSTAT: bit 0, ready.
func (n *IdentifyNamespaceIndependent) NSTAT() uint8     { return n[insNSTAT] }
func (n *IdentifyNamespaceIndependent) SetNSTAT(v uint8) { n[insNSTAT] = v }

// IdentifyControllerNVM is the Identify Controller data structure of the NVM command set
// (CNS 06h, CSI 00h; NVM Command Set 1.0, section 4.1.5.4).
type IdentifyControllerNVM [IdentifySize]byte

// Offsets of the fields.
const (
	icnVSL   = 0
	icnWZSL  = 1
	icnWUSL  = 2
	icnDMRL  = 3
	icnDMRSL = 4
	icnDMSL  = 8
)

// VSL, WZSL and WUSL bound Verify, Write Zeroes and Write Uncorrectable: powers of two
// in units of CAP.MPSMIN; 0 is no limit.
func (c *IdentifyControllerNVM) VSL() uint8      { return c[icnVSL] }
func (c *IdentifyControllerNVM) SetVSL(v uint8)  { c[icnVSL] = v }
func (c *IdentifyControllerNVM) WZSL() uint8     { return c[icnWZSL] }
func (c *IdentifyControllerNVM) SetWZSL(v uint8) { c[icnWZSL] = v }
func (c *IdentifyControllerNVM) WUSL() uint8     { return c[icnWUSL] }
func (c *IdentifyControllerNVM) SetWUSL(v uint8) { c[icnWUSL] = v }

// DMRL, DMRSL and DMSL bound Dataset Management: ranges, blocks a range, blocks in all.
func (c *IdentifyControllerNVM) DMRL() uint8       { return c[icnDMRL] }
func (c *IdentifyControllerNVM) SetDMRL(v uint8)   { c[icnDMRL] = v }
func (c *IdentifyControllerNVM) DMRSL() uint32     { return le.Uint32(c[icnDMRSL:]) }
func (c *IdentifyControllerNVM) SetDMRSL(v uint32) { le.PutUint32(c[icnDMRSL:], v) }
func (c *IdentifyControllerNVM) DMSL() uint64      { return le.Uint64(c[icnDMSL:]) }
func (c *IdentifyControllerNVM) SetDMSL(v uint64)  { le.PutUint64(c[icnDMSL:], v) }

// IdentifyNamespaceNVM is the Identify Namespace data structure of the NVM command
// set (CNS 05h, CSI 00h; NVM Command Set 1.0, section 4.1.5.3).
type IdentifyNamespaceNVM [IdentifySize]byte

// LBSTM is the logical block storage tag mask.
func (n *IdentifyNamespaceNVM) LBSTM() uint64     { return le.Uint64(n[0:]) }
func (n *IdentifyNamespaceNVM) SetLBSTM(v uint64) { le.PutUint64(n[0:], v) }

// PIC holds the protection information capabilities.
func (n *IdentifyNamespaceNVM) PIC() uint8     { return n[8] }
func (n *IdentifyNamespaceNVM) SetPIC(v uint8) { n[8] = v }

// ELBAF returns extended LBA format i, 0 to 63; 0 when there is no such place.
func (n *IdentifyNamespaceNVM) ELBAF(i int) uint32 {
	if i < 0 || i >= MaxLBAFormats {
		return 0
	}
	return le.Uint32(n[12+4*i:])
}

// SetELBAF sets extended LBA format i, 0 to 63.
func (n *IdentifyNamespaceNVM) SetELBAF(i int, v uint32) { le.PutUint32(n[12+4*i:], v) }

// NIDT is the type of a namespace identification descriptor.
type NIDT uint8

// Namespace identifier types (NVMe Base 2.0, section 5.17.2.3).
const (
	NIDTEUI64 NIDT = 1
	NIDTNGUID NIDT = 2
	NIDTUUID  NIDT = 3
	NIDTCSI   NIDT = 4
)

// nidLen is NIDL as the type fixes it; 0 for a type unknown here.
func (t NIDT) nidLen() int {
	switch t {
	case NIDTEUI64:
		return 8
	case NIDTNGUID, NIDTUUID:
		return 16
	case NIDTCSI:
		return 1
	}
	return 0
}

const nsDescHeader = 4

// AppendNSDescriptor appends one namespace identification descriptor:
//
//	0 NIDT | 1 NIDL | 2..3 reserved | NID, NIDL bytes
func AppendNSDescriptor(dst []byte, t NIDT, nid []byte) []byte {
	return append(append(dst, byte(t), byte(len(nid)), 0, 0), nid...)
}

// NSDescriptors is a namespace identification descriptor list (CNS 03h) as received.
// It ends at a descriptor of length 0 or at the end of the bytes.
type NSDescriptors []byte

// All yields the descriptors up to the first that is cut short. The slices are views of d.
func (d NSDescriptors) All() iter.Seq2[NIDT, []byte] {
	return func(yield func(NIDT, []byte) bool) {
		for b := []byte(d); len(b) >= nsDescHeader && b[1] != 0; {
			end := nsDescHeader + int(b[1])
			if end > len(b) || !yield(NIDT(b[0]), b[nsDescHeader:end]) {
				return
			}
			b = b[end:]
		}
	}
}

// Check judges the list: no descriptor reaches past the end, those of known types
// have their length and come once.
func (d NSDescriptors) Check() error {
	const what = "Namespace Identification Descriptor"
	var seen [256]bool
	for b := []byte(d); len(b) >= nsDescHeader && b[1] != 0; {
		t, end := NIDT(b[0]), nsDescHeader+int(b[1])
		switch want := t.nidLen(); {
		case end > len(b):
			return fieldError(what, "NIDL", b[1], "within the list")
		case want != 0 && int(b[1]) != want:
			return fieldError(what, "NIDL", b[1], "the length of its type")
		case want != 0 && seen[t]:
			return fieldError(what, "NIDT", uint8(t), "once in the list")
		}
		seen[t] = true
		b = b[end:]
	}
	return nil
}
