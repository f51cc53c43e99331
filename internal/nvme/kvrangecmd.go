package nvme

// Opcodes of extended key-value for ranges of positions (docs/wire-extensions.md, docs/ranges.md). Their low two bits
// are the data's direction, as DataDirection reads them.
const (
	CmdKVScan    = 0x86 // data: KVRange of kind KVScan
	CmdKVCopyIn  = 0x89 // data: KVRange of kind KVCopy
	CmdKVCopyOut = 0x8A // data: KVRange of kind KVCopy
	CmdKVCount   = 0x8E // data: KVRange of kind KVCount
	CmdKVDigest  = 0x92 // data: KVRange of kind KVDigest
	CmdKVDrop    = 0x94 // no data
)

// KVRangeCommand reports whether an opcode of the Key Value command set is one for a range.
func KVRangeCommand(opcode uint8) bool {
	switch opcode {
	case CmdKVScan, CmdKVCopyIn, CmdKVCopyOut, CmdKVCount, CmdKVDigest, CmdKVDrop:
		return true
	}
	return false
}

// KVRangeSQE reads an SQE as a command for a range of positions. What is not named is reserved.
//
//	Scan, CopyOut, Count, Digest:
//	CDW2, CDW3    with a key: its bytes 0 to 7; without one: the position at which to begin
//	CDW10         size of the host's buffer in bytes
//	CDW11         15:8 shift (Digest) | 7:0 length of the key behind which to begin, or 0
//	CDW12, CDW13  last position
//	CDW14, CDW15  with a key: its bytes 8 to 15; without one: CDW14 is the time, CDW15 reserved
//
//	CopyIn:
//	CDW10         size of the KVRange in bytes
//	CDW12, CDW13  clock, or 0
//
//	Drop:
//	CDW2, CDW3    first position
//	CDW12, CDW13  last position
//	CDW14, CDW15  clock, or 0
//
// An example: a Scan into 64 KiB of what comes behind the key "ab", up to the last position of all.
//
//	CDW2     CDW3     … CDW10    CDW11    CDW12    CDW13    CDW14    CDW15
//	61620000 00000000   00000100 02000000 ffffffff ffffffff 00000000 00000000
type KVRangeSQE SQE

// KVRange reads the command as one for a range.
func (s *SQE) KVRange() *KVRangeSQE { return (*KVRangeSQE)(s) }

// First is the position at which to begin; there is none if KeyLen is not 0.
func (k *KVRangeSQE) First() uint64     { return le.Uint64(k[8:]) }
func (k *KVRangeSQE) SetFirst(v uint64) { le.PutUint64(k[8:], v) }

// Last is the last position of the range.
func (k *KVRangeSQE) Last() uint64     { return le.Uint64(k[48:]) }
func (k *KVRangeSQE) SetLast(v uint64) { le.PutUint64(k[48:], v) }

// LenBytes is the size of the data.
func (k *KVRangeSQE) LenBytes() uint32     { return le.Uint32(k[40:]) }
func (k *KVRangeSQE) SetLenBytes(v uint32) { le.PutUint32(k[40:], v) }

// KeyLen is the length of the key behind which to begin, or 0.
func (k *KVRangeSQE) KeyLen() uint8 { return k[44] }

// Shift is the binary logarithm of the length of the sub-ranges of a Digest, which begin at multiples of their length.
func (k *KVRangeSQE) Shift() uint8     { return k[45] }
func (k *KVRangeSQE) SetShift(v uint8) { k[45] = v }

// Time is a time in unix seconds: what expires until then is left out.
func (k *KVRangeSQE) Time() uint32     { return le.Uint32(k[56:]) }
func (k *KVRangeSQE) SetTime(v uint32) { le.PutUint32(k[56:], v) }

// Clock is that of a Drop or CopyIn.
func (k *KVRangeSQE) Clock() uint64 {
	if k[0] == CmdKVCopyIn {
		return le.Uint64(k[48:])
	}
	return le.Uint64(k[56:])
}

// SetClock sets the clock of a command that has its opcode already.
func (k *KVRangeSQE) SetClock(v uint64) {
	if k[0] == CmdKVCopyIn {
		le.PutUint64(k[48:], v)
		return
	}
	le.PutUint64(k[56:], v)
}

// SetFrom sets where a command begins: behind the key of a cursor, or with no key at its position.
func (k *KVRangeSQE) SetFrom(c KVCursor) {
	if c.KeyLen > 0 {
		(*SQE)(k).KV().SetKey(c.Key[:c.KeyLen])
		return
	}
	k.SetFirst(c.Position)
}

// SubRanges is the number of sub-ranges of a Digest without a key, less 1, of which the first one has the position
// First.
func (k *KVRangeSQE) SubRanges() (less1 uint64) { return k.Last()>>k.Shift() - k.First()>>k.Shift() }

// Valid reports whether the fields are valid and those that are reserved are 0.
//
// Cost: 0 allocs.
func (k *KVRangeSQE) Valid() bool { // hot: 0 allocs
	var b [16]byte
	copy(b[:8], k[8:16])
	copy(b[8:], k[56:64])
	n := int(k.KeyLen())
	switch reading := k[46]|k[47] == 0; k[0] {
	case CmdKVCopyIn:
		return reading && k[44]|k[45] == 0 && zeroes(b[:]) && k.Clock() <= MaxKVClock
	case CmdKVDrop:
		return reading && k[44]|k[45] == 0 && k.LenBytes() == 0 && k.First() <= k.Last() && k.Clock() <= MaxKVClock
	case CmdKVScan, CmdKVCopyOut:
		if !reading || k[45] != 0 {
			return false
		}
		if n > 0 {
			return n <= MaxKVKey && zeroes(b[n:])
		}
		return k.First() <= k.Last() && zeroes(b[12:])
	case CmdKVCount:
		return reading && k[44]|k[45] == 0 && k.First() <= k.Last() && zeroes(b[12:])
	case CmdKVDigest:
		return reading && n == 0 && k.Shift() <= 64 && k.First() <= k.Last() && zeroes(b[12:]) &&
			k.SubRanges() < KVMaxSums
	}
	return false
}
