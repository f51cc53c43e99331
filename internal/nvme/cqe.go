package nvme

import "encoding/binary"

// CQESize is the size of a completion queue entry in bytes.
const CQESize = 16

// CQE is a completion queue entry (NVMe Base 2.0, figure 89). Over fabrics the
// phase bit is reserved.
//
//	 0 .. 3   4 .. 7   8 .. 9   10 .. 11  12 .. 13  14 .. 15
//	+--------+--------+--------+---------+---------+----------------+
//	| DW0    | DW1    | SQHD   | SQID    | CID     | P, status      |
//	+--------+--------+--------+---------+---------+----------------+
type CQE [CQESize]byte

func (c *CQE) DW0() uint32          { return binary.LittleEndian.Uint32(c[0:]) }
func (c *CQE) SetDW0(v uint32)      { binary.LittleEndian.PutUint32(c[0:], v) }
func (c *CQE) DW1() uint32          { return binary.LittleEndian.Uint32(c[4:]) }
func (c *CQE) SetDW1(v uint32)      { binary.LittleEndian.PutUint32(c[4:], v) }
func (c *CQE) Result64() uint64     { return binary.LittleEndian.Uint64(c[0:]) }
func (c *CQE) SetResult64(v uint64) { binary.LittleEndian.PutUint64(c[0:], v) }

// SQHD is the submission queue head pointer.
func (c *CQE) SQHD() uint16     { return binary.LittleEndian.Uint16(c[8:]) }
func (c *CQE) SetSQHD(v uint16) { binary.LittleEndian.PutUint16(c[8:], v) }

// SQID is the submission queue identifier. Over fabrics it is reserved; completions for which KVVersioned holds have
// the units of a Credit here.
func (c *CQE) SQID() uint16     { return binary.LittleEndian.Uint16(c[10:]) }
func (c *CQE) SetSQID(v uint16) { binary.LittleEndian.PutUint16(c[10:], v) }

func (c *CQE) CID() uint16     { return binary.LittleEndian.Uint16(c[12:]) }
func (c *CQE) SetCID(v uint16) { binary.LittleEndian.PutUint16(c[12:], v) }

// Status is the status field without the phase bit.
func (c *CQE) Status() Status     { return Status(binary.LittleEndian.Uint16(c[14:]) >> 1) }
func (c *CQE) SetStatus(s Status) { binary.LittleEndian.PutUint16(c[14:], uint16(s)<<1) }

// Credit is the amount that a host may have outstanding at an SSD. It is in DW1 of I/O completions after the host has
// enabled ExtCredits; see docs/wire-extensions.md.
//
//	31 .. 16               15 .. 0
//	+---------------------+----------------------------+
//	| number of the SSD   | units of 4 KiB; 0 says     |
//	|                     | nothing                    |
//	+---------------------+----------------------------+
type Credit uint32

// MaxCreditUnits is the maximum number of units in a Credit.
const MaxCreditUnits = 1<<16 - 1

// MakeCredit returns a Credit. It limits units to MaxCreditUnits.
func MakeCredit(ssd uint16, units int) Credit {
	return Credit(ssd)<<16 | Credit(min(max(units, 0), MaxCreditUnits))
}

// Units returns how many units of 4 KiB may be outstanding; 0 stands for no information.
func (c Credit) Units() int { return int(c & MaxCreditUnits) }

// SSD is the drive's number in the node.
func (c Credit) SSD() uint16 { return uint16(c >> 16) }
