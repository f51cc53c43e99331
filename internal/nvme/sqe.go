package nvme

import (
	"encoding/binary"

	"jbofd/internal/units"
)

// SQESize is the size of a submission queue entry in bytes.
const SQESize = 64

// SQE is a submission queue entry (NVMe Base 2.0, figure 87). The conversion (*SQE)(b) gives a view of received bytes
// without copying them.
//
//	 0        1        2        3        4 .. 7    8 .. 15
//	+--------+--------+-----------------+---------+----------------+
//	| opcode | flags  | CID             | NSID    | CDW2, CDW3     |
//	+--------+--------+-----------------+---------+----------------+
//	| MPTR (16 .. 23)                   | DPTR: SGL1 (24 .. 39)    |
//	+-----------------------------------+--------------------------+
//	| CDW10 .. CDW15 (40 .. 63)                                    |
//	+--------------------------------------------------------------+
type SQE [SQESize]byte

// Fuse is the fused-operation field of an SQE.
type Fuse uint8

// Fused operation values.
const (
	FuseNone   Fuse = 0
	FuseFirst  Fuse = 1
	FuseSecond Fuse = 2
)

// PSDT values: the interpretation of the data pointer of an SQE. Fabrics commands always use SGLs.
const (
	PSDTPRP        = 0
	PSDTSGL        = 1 // metadata pointer is a contiguous buffer
	PSDTSGLMetaSGL = 2 // metadata pointer is an SGL
)

func (s *SQE) Opcode() uint8     { return s[0] }
func (s *SQE) SetOpcode(v uint8) { s[0] = v }

// Fuse returns bits 1:0 of the flags byte.
func (s *SQE) Fuse() Fuse     { return Fuse(s[1] & 3) }
func (s *SQE) SetFuse(f Fuse) { s[1] = s[1]&^3 | uint8(f)&3 }

// PSDT returns bits 7:6 of the flags byte.
func (s *SQE) PSDT() uint8     { return s[1] >> 6 }
func (s *SQE) SetPSDT(v uint8) { s[1] = s[1]&0x3f | v<<6 }

// CID is the command identifier, unique among a queue's outstanding commands.
func (s *SQE) CID() uint16     { return binary.LittleEndian.Uint16(s[2:]) }
func (s *SQE) SetCID(v uint16) { binary.LittleEndian.PutUint16(s[2:], v) }

// NSID is the namespace identifier.
func (s *SQE) NSID() uint32     { return binary.LittleEndian.Uint32(s[4:]) }
func (s *SQE) SetNSID(v uint32) { binary.LittleEndian.PutUint32(s[4:], v) }

// CDW returns command dword n, 2 to 15.
func (s *SQE) CDW(n int) uint32       { return binary.LittleEndian.Uint32(s[4*n:]) }
func (s *SQE) SetCDW(n int, v uint32) { binary.LittleEndian.PutUint32(s[4*n:], v) }

// SGL returns the SGL descriptor in the data pointer.
func (s *SQE) SGL() *SGL { return (*SGL)(s[24:40]) }

// SLBA is the starting logical block of an I/O command (CDW10 and CDW11).
func (s *SQE) SLBA() units.LBA     { return units.LBA(binary.LittleEndian.Uint64(s[40:])) }
func (s *SQE) SetSLBA(v units.LBA) { binary.LittleEndian.PutUint64(s[40:], uint64(v)) }

// NLB is the number of logical blocks of an I/O command, 1-based (CDW12 15:0
// holds it 0-based).
func (s *SQE) NLB() units.Blocks     { return units.Blocks(binary.LittleEndian.Uint16(s[48:])) + 1 }
func (s *SQE) SetNLB(v units.Blocks) { binary.LittleEndian.PutUint16(s[48:], uint16(v-1)) }

// FCTYPE is the type of a fabrics command (byte 4).
func (s *SQE) FCTYPE() uint8     { return s[4] }
func (s *SQE) SetFCTYPE(v uint8) { s[4] = v }

// SGL is one SGL descriptor (NVMe Base 2.0, section 4.1.2).
type SGL [16]byte

// SGL descriptor types and subtypes as they stand in the last byte.
const (
	SGLTypeDataBlock       = 0x0
	SGLTypeKeyedDataBlock  = 0x4
	SGLTypeTransportData   = 0x5
	SGLSubtypeAddress      = 0x0
	SGLSubtypeOffset       = 0x1 // in-capsule, address is an offset into the capsule's data
	SGLSubtypeTransport    = 0xA // transport-specific
	SGLSubtypeInvalidateRK = 0xF // keyed: request remote invalidation
)

// MaxKeyedLength is the maximum length that a keyed descriptor can state.
const MaxKeyedLength = 1<<24 - 1

func (g *SGL) Type() uint8        { return g[15] >> 4 }
func (g *SGL) Subtype() uint8     { return g[15] & 0xf }
func (g *SGL) SetType(t, s uint8) { g[15] = t<<4 | s&0xf }

// Address is the address, or the offset for in-capsule data.
func (g *SGL) Address() uint64     { return binary.LittleEndian.Uint64(g[0:]) }
func (g *SGL) SetAddress(v uint64) { binary.LittleEndian.PutUint64(g[0:], v) }

// Length is the number of bytes described (not for keyed descriptors).
func (g *SGL) Length() uint32     { return binary.LittleEndian.Uint32(g[8:]) }
func (g *SGL) SetLength(v uint32) { binary.LittleEndian.PutUint32(g[8:], v) }

// KeyedLength is the number of bytes that a keyed descriptor describes, at most MaxKeyedLength.
func (g *SGL) KeyedLength() uint32 { return uint32(g[8]) | uint32(g[9])<<8 | uint32(g[10])<<16 }

// Key is the remote key of a keyed descriptor.
func (g *SGL) Key() uint32 { return binary.LittleEndian.Uint32(g[11:]) }

// SetKeyed makes g a keyed data block descriptor; subtype is SGLSubtypeAddress or
// SGLSubtypeInvalidateRK.
func (g *SGL) SetKeyed(subtype uint8, addr uint64, length, key uint32) {
	g.SetAddress(addr)
	g[8], g[9], g[10] = byte(length), byte(length>>8), byte(length>>16)
	binary.LittleEndian.PutUint32(g[11:], key)
	g.SetType(SGLTypeKeyedDataBlock, subtype)
}
