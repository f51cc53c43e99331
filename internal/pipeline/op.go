package pipeline

import (
	"fmt"

	"jbofd/internal/units"
)

// Op is an operation that an I/O asks of an SSD: the operations of a device, in the order of ssd.Op, and the composed
// operations, which the drive carries out with several device requests.
type Op uint8

// Operations.
const (
	Read Op = iota
	Write
	Flush
	Deallocate
	WriteZeroes
	// DeallocateRanges deallocates several ranges.
	DeallocateRanges
	// Compare reads the range and compares it with the host's data.
	Compare
	// CompareWrite compares the range with the first half of the data and, if they are equal, writes the second half.
	// No other change of the range happens in between.
	CompareWrite
	// Verify reads the range and discards the data.
	Verify
	// Ops is the number of operations.
	Ops
)

var opNames = [Ops]string{"read", "write", "flush", "deallocate", "write_zeroes", "deallocate", "compare",
	"compare_and_write", "verify"}

// String returns the operation's name as metrics write it.
func (o Op) String() string {
	if o < Ops {
		return opNames[o]
	}
	return fmt.Sprintf("Op(%d)", uint8(o))
}

// Mutates reports whether the operation changes what is stored.
func (o Op) Mutates() bool {
	switch o {
	case Write, Deallocate, WriteZeroes, DeallocateRanges, CompareWrite:
		return true
	}
	return false
}

// NamesRange reports whether the operation names a range of which the device transfers nothing.
func (o Op) NamesRange() bool { return o == WriteZeroes || o == Deallocate || o == DeallocateRanges }

// Range is a range of an SSD.
type Range struct {
	Offset units.DriveOffset
	Len    units.Bytes
}
