// Package units has the types of addresses and counts of blocks and bytes. They are different types so that the
// compiler finds where one is taken for another; docs/decisions/0009-units.md says where they are used and where not.
//
//	host       LBA  Blocks
//	            │      │         Offset, Bytes: by the size of a block, checked for overflow
//	            v      v
//	extent  ExtentOffset  Bytes
//	            │                On: by the extent's place on its drive
//	            v
//	drive   DriveOffset   Bytes
package units

import "math"

// LBA is the address of a logical block of a namespace.
type LBA uint64

// Blocks is a number of logical blocks.
type Blocks uint64

// Bytes is a number of bytes: the length of an I/O, or of what offsets address.
type Bytes int64

// ExtentOffset is an offset in bytes from the start of an extent of a drive: of a namespace, a partition or a swap
// area.
type ExtentOffset int64

// DriveOffset is an offset in bytes from the start of a drive.
type DriveOffset int64

// Offset returns where the block begins in its namespace. A block has 1<<shift bytes. Without an offset below 2^63, ok
// is false.
//
// hot: 0 allocs
func (a LBA) Offset(shift uint8) (o ExtentOffset, ok bool) {
	if uint64(a) > math.MaxInt64>>shift {
		return 0, false
	}
	return ExtentOffset(a << shift), true
}

// Bytes returns the length of n blocks of 1<<shift bytes. If it is 2^63 or more, ok is false.
//
// hot: 0 allocs
func (n Blocks) Bytes(shift uint8) (b Bytes, ok bool) {
	if uint64(n) > math.MaxInt64>>shift {
		return 0, false
	}
	return Bytes(n << shift), true
}

// Contains reports whether count blocks from an address on lie within the first n blocks. No sum can overflow.
//
// hot: 0 allocs
func (n Blocks) Contains(start LBA, count Blocks) bool {
	return uint64(start) < uint64(n) && count <= n-Blocks(start)
}

// Blocks returns how many whole blocks of 1<<shift bytes there are in b, which is not negative.
func (b Bytes) Blocks(shift uint8) Blocks { return Blocks(b) >> shift }

// On returns the place on the drive of an offset in an extent that begins at start. The extent ends below 2^63.
func (o ExtentOffset) On(start DriveOffset) DriveOffset { return start + DriveOffset(o) }

// LBA returns the address of the block of 1<<shift bytes that contains the byte at an offset, which is not negative.
func (o ExtentOffset) LBA(shift uint8) LBA { return LBA(o) >> shift }

// Add returns the offset n bytes behind o.
func (o ExtentOffset) Add(n Bytes) ExtentOffset { return o + ExtentOffset(n) }

// Sub returns the number of bytes from p to o.
func (o ExtentOffset) Sub(p ExtentOffset) Bytes { return Bytes(o - p) }

// Add returns the offset n bytes behind o.
func (o DriveOffset) Add(n Bytes) DriveOffset { return o + DriveOffset(n) }

// Sub returns the number of bytes from p to o.
func (o DriveOffset) Sub(p DriveOffset) Bytes { return Bytes(o - p) }
