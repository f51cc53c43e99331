// Package pdu holds the wire formats of NVMe/TCP (NVMe/TCP Transport 1.0,
// section 3.6) as views over bytes. It does no I/O and keeps no state; the
// target's and the host's machines share it.
//
// Every PDU starts with the common header:
//
//	 0      1       2      3      4 .. 7
//	+------+-------+------+------+--------------+
//	| type | flags | HLEN | PDO  | PLEN (LE)    |
//	+------+-------+------+------+--------------+
//	| PDU-specific header, up to HLEN           |
//	+-------------------------------------------+
//	| HDGST, 4 bytes, if agreed and the type has one
//	| PAD up to PDO
//	| DATA, from PDO on
//	| DDGST, 4 bytes, if agreed and there is data
//	+-------------------------------------------+
package pdu

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"

	"jbofd/internal/nvme"
)

// Type is the PDU type in byte 0.
type Type uint8

// PDU types.
const (
	TypeICReq       Type = 0x00
	TypeICResp      Type = 0x01
	TypeH2CTermReq  Type = 0x02
	TypeC2HTermReq  Type = 0x03
	TypeCapsuleCmd  Type = 0x04
	TypeCapsuleResp Type = 0x05
	TypeH2CData     Type = 0x06
	TypeC2HData     Type = 0x07
	TypeR2T         Type = 0x09
)

// String names the type as the specification does.
func (t Type) String() string {
	switch t {
	case TypeICReq:
		return "ICReq"
	case TypeICResp:
		return "ICResp"
	case TypeH2CTermReq:
		return "H2CTermReq"
	case TypeC2HTermReq:
		return "C2HTermReq"
	case TypeCapsuleCmd:
		return "CapsuleCmd"
	case TypeCapsuleResp:
		return "CapsuleResp"
	case TypeH2CData:
		return "H2CData"
	case TypeC2HData:
		return "C2HData"
	case TypeR2T:
		return "R2T"
	}
	return fmt.Sprintf("Type(%#02x)", uint8(t))
}

// Flags of the common header.
const (
	FlagHDGST   = 1 << 0 // a header digest follows the header
	FlagDDGST   = 1 << 1 // a data digest follows the data
	FlagLast    = 1 << 2 // last H2CData of its R2T, last C2HData of its command
	FlagSuccess = 1 << 3 // C2HData: the command succeeded, no CapsuleResp follows
)

// Header lengths (HLEN) and bounds, in bytes.
const (
	CommonLen      = 8
	ICLen          = 128
	CapsuleCmdLen  = CommonLen + nvme.SQESize
	CapsuleRespLen = CommonLen + nvme.CQESize
	DataLen        = 24
	R2TLen         = 24
	TermLen        = 24
	DigestLen      = 4
	MaxHeaderLen   = ICLen
	// MaxTermLen bounds a TermReq: its header and up to 128 bytes of the PDU at fault.
	MaxTermLen = TermLen + 128
	// MinMaxH2CData is the least MAXH2CDATA a controller may name.
	MinMaxH2CData = 4096
	// MaxAlignUnits is the largest HPDA or CPDA (0-based dwords): 128 bytes.
	MaxAlignUnits = 31
)

// FES is a fatal error status: why a TermReq ends the connection.
type FES uint16

// Fatal error statuses.
const (
	InvalidHeaderField     FES = 1 // FEI: offset of the field
	SequenceError          FES = 2
	HeaderDigestError      FES = 3 // FEI: the digest received
	DataTransferOutOfRange FES = 4
	R2TLimitExceeded       FES = 5 // C2HTermReq: data transfer limit exceeded
	UnsupportedParameter   FES = 6 // FEI: offset of the parameter
)

// String names the status.
func (f FES) String() string {
	switch f {
	case InvalidHeaderField:
		return "invalid PDU header field"
	case SequenceError:
		return "PDU sequence error"
	case HeaderDigestError:
		return "header digest error"
	case DataTransferOutOfRange:
		return "data transfer out of range"
	case R2TLimitExceeded:
		return "R2T or data transfer limit exceeded"
	case UnsupportedParameter:
		return "unsupported parameter"
	}
	return fmt.Sprintf("FES(%d)", uint16(f))
}

// FatalError is a protocol violation that ends the connection with a TermReq.
type FatalError struct {
	FES FES
	// FEI is the fatal error information: a byte offset into the header, or the
	// digest received.
	FEI uint32
	// What says it for the log.
	What string
}

func (e *FatalError) Error() string {
	return fmt.Sprintf("%s: %s (fes %d, fei %#x)", e.FES, e.What, uint16(e.FES), e.FEI)
}

// Common is the common header.
type Common [CommonLen]byte

func (h *Common) Type() Type   { return Type(h[0]) }
func (h *Common) Flags() uint8 { return h[1] }
func (h *Common) HLEN() uint8  { return h[2] }
func (h *Common) PDO() uint8   { return h[3] }
func (h *Common) PLEN() uint32 { return binary.LittleEndian.Uint32(h[4:]) }

// Set fills the common header.
func (h *Common) Set(t Type, flags, hlen, pdo uint8, plen uint32) {
	h[0], h[1], h[2], h[3] = byte(t), flags, hlen, pdo
	binary.LittleEndian.PutUint32(h[4:], plen)
}

// IC is an ICReq or ICResp: 128 bytes, the same places, two meanings.
//
//	8..9 PFV | 10 HPDA/CPDA | 11 DGST | 12..15 MAXR2T (0-based) / MAXH2CDATA
type IC [ICLen]byte

func (p *IC) Common() *Common    { return (*Common)(p[:CommonLen]) }
func (p *IC) PFV() uint16        { return binary.LittleEndian.Uint16(p[8:]) }
func (p *IC) SetPFV(v uint16)    { binary.LittleEndian.PutUint16(p[8:], v) }
func (p *IC) PDA() uint8         { return p[10] }
func (p *IC) SetPDA(v uint8)     { p[10] = v }
func (p *IC) DGST() uint8        { return p[11] }
func (p *IC) SetDGST(v uint8)    { p[11] = v }
func (p *IC) HeaderDigest() bool { return p[11]&1 != 0 }
func (p *IC) DataDigest() bool   { return p[11]&2 != 0 }

// MAXR2T is an ICReq's largest number of outstanding R2Ts per command, 0-based.
func (p *IC) MAXR2T() uint32     { return binary.LittleEndian.Uint32(p[12:]) }
func (p *IC) SetMAXR2T(v uint32) { binary.LittleEndian.PutUint32(p[12:], v) }

// MAXH2CDATA is an ICResp's largest data per H2CData PDU in bytes.
func (p *IC) MAXH2CDATA() uint32     { return binary.LittleEndian.Uint32(p[12:]) }
func (p *IC) SetMAXH2CDATA(v uint32) { binary.LittleEndian.PutUint32(p[12:], v) }

// CapsuleCmd is a command capsule's header: common header and SQE.
type CapsuleCmd [CapsuleCmdLen]byte

func (p *CapsuleCmd) Common() *Common { return (*Common)(p[:CommonLen]) }
func (p *CapsuleCmd) SQE() *nvme.SQE  { return (*nvme.SQE)(p[CommonLen:]) }

// CapsuleResp is a response capsule: common header and CQE.
type CapsuleResp [CapsuleRespLen]byte

func (p *CapsuleResp) Common() *Common { return (*Common)(p[:CommonLen]) }
func (p *CapsuleResp) CQE() *nvme.CQE  { return (*nvme.CQE)(p[CommonLen:]) }

// Data is the header of H2CData, C2HData and R2T alike.
//
//	8..9 CCCID | 10..11 TTAG (reserved in C2HData) | 12..15 DATAO/R2TO | 16..19 DATAL/R2TL | 20..23 reserved
type Data [DataLen]byte

func (p *Data) Common() *Common    { return (*Common)(p[:CommonLen]) }
func (p *Data) CCCID() uint16      { return binary.LittleEndian.Uint16(p[8:]) }
func (p *Data) SetCCCID(v uint16)  { binary.LittleEndian.PutUint16(p[8:], v) }
func (p *Data) TTAG() uint16       { return binary.LittleEndian.Uint16(p[10:]) }
func (p *Data) SetTTAG(v uint16)   { binary.LittleEndian.PutUint16(p[10:], v) }
func (p *Data) Offset() uint32     { return binary.LittleEndian.Uint32(p[12:]) }
func (p *Data) SetOffset(v uint32) { binary.LittleEndian.PutUint32(p[12:], v) }
func (p *Data) Length() uint32     { return binary.LittleEndian.Uint32(p[16:]) }
func (p *Data) SetLength(v uint32) { binary.LittleEndian.PutUint32(p[16:], v) }

// Term is the header of a TermReq; the start of the offending PDU follows it.
//
//	8..9 FES | 10..13 FEI | 14..23 reserved
type Term [TermLen]byte

func (p *Term) Common() *Common { return (*Common)(p[:CommonLen]) }
func (p *Term) FES() FES        { return FES(binary.LittleEndian.Uint16(p[8:])) }
func (p *Term) SetFES(v FES)    { binary.LittleEndian.PutUint16(p[8:], uint16(v)) }
func (p *Term) FEI() uint32     { return binary.LittleEndian.Uint32(p[10:]) }
func (p *Term) SetFEI(v uint32) { binary.LittleEndian.PutUint32(p[10:], v) }

// AppendTerm appends a whole TermReq of type t for err, quoting the header of
// the PDU at fault as far as it fits.
func AppendTerm(dst []byte, t Type, err *FatalError, offending []byte) []byte {
	if len(offending) > MaxTermLen-TermLen {
		offending = offending[:MaxTermLen-TermLen]
	}
	var h Term
	h.Common().Set(t, 0, TermLen, 0, uint32(TermLen+len(offending)))
	h.SetFES(err.FES)
	h.SetFEI(err.FEI)
	return append(append(dst, h[:]...), offending...)
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Digest returns the CRC32C of b as digests carry it (little endian on the wire).
func Digest(b []byte) uint32 { return crc32.Checksum(b, castagnoli) }

// UpdateDigest continues a digest over more bytes; 0 starts one.
func UpdateDigest(d uint32, b []byte) uint32 { return crc32.Update(d, castagnoli, b) }

// Format is what both ends agreed on in the ICReq/ICResp exchange, as it bears
// on the layout of PDUs in one direction.
type Format struct {
	HeaderDigest, DataDigest bool
	// AlignBytes is the alignment of DATA within PDUs sent in this direction
	// ((HPDA or CPDA + 1) * 4); 0 or 4 means none beyond dwords.
	AlignBytes int
}

// DataOffset returns PDO for a PDU of header length hlen that carries data.
func (f Format) DataOffset(hlen int) int {
	if f.HeaderDigest {
		hlen += DigestLen
	}
	if a := f.AlignBytes; a > 1 {
		hlen = (hlen + a - 1) / a * a
	}
	return hlen
}
