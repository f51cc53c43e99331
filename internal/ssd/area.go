package ssd

import (
	"errors"
	"fmt"
)

// Area is memory of a drive that is read and written by words, without a request: of NVMe drives, the Persistent
// Memory Region (PMR) and the Controller Memory Buffer (CMB). It is small, and takes about a microsecond for what a
// request takes tens for. So it is where records go that have to be durable before a write is submitted.
//
// Offsets and lengths are multiples of AreaWord. What was written is read back at once, but it is durable only after a
// Flush. If the power is lost, or the process ends, before that, each word is the old or the new one, whatever has
// become of those before and after it: records need a checksum. A volatile Area loses everything with the power and
// with each reset of its drive.
//
// Read, Write and Flush are for one goroutine at a time, and block while the drive is reset. Any goroutine may call
// Info and Healthy.
//
// Cost: 0 allocs, unless there is an error. Read costs a round trip to the device for each word, Flush one or two.
//
// Source: NVMe 2.0, Persistent Memory Region and Controller Memory Buffer.
type Area interface {
	// Info describes the area.
	Info() AreaInfo
	// Healthy returns nil, or why the area cannot be written; it does no I/O. Read works if that wraps ErrReadOnly.
	Healthy() error
	// Read fills p with what is at offset.
	//
	// Errors: ErrRange, ErrGone, ErrMedia.
	Read(p []byte, offset int64) error
	// Write stores p at offset. p may be used again at once.
	//
	// Errors: ErrRange, ErrGone, ErrMedia, ErrReadOnly. Some of these are reported by the next Flush only.
	Write(p []byte, offset int64) error
	// Flush makes durable what was written before. After an error, each write since the last Flush that succeeded may
	// be durable or not. The error is reported once, so write these records again before the next Flush.
	//
	// Errors: ErrGone, ErrMedia, ErrReadOnly.
	Flush() error
}

// AreaWord is the unit of an Area in bytes.
const AreaWord = 8

// ErrReadOnly: the device, or its Area, can be read, but does not take writes any more.
var ErrReadOnly = errors.New("read only")

// AreaInfo describes an Area.
type AreaInfo struct {
	// Kind is the NVMe name in lower case: "pmr" or "cmb".
	Kind string
	// SizeBytes is a multiple of AreaWord; 0 if the drive reports an impossible size.
	SizeBytes int64
	// Persistent: it keeps what was flushed without power.
	Persistent bool
	// NotRestored: what the area had before the drive lost its power may be lost, or wrong. The drive says so once it
	// is ready, so this is only valid if Healthy has not returned an error.
	NotRestored bool
	// BufferBytes is how much it takes at full speed; more at a time may be slower. 0: the drive does not say.
	BufferBytes int64
}

// CheckArea returns an error if a read or write of n bytes at offset is outside of an area of so many bytes, or not in
// whole words. It is for implementations.
//
// Errors: ErrRange.
func CheckArea(sizeBytes int64, n int, offset int64) error {
	if offset < 0 || offset%AreaWord != 0 || n%AreaWord != 0 || offset > sizeBytes || int64(n) > sizeBytes-offset {
		return fmt.Errorf("%w: %d bytes at %d of an area of %d", ErrRange, n, offset, sizeBytes)
	}
	return nil
}

// AreaOwner is a Device that may have memory of its own.
type AreaOwner interface {
	Device
	// Areas returns its memory, persistent memory first, also what cannot be used: see Area.Healthy. It is the same as
	// long as the device is open.
	Areas() []Area
}

// Areas returns the memory of a device; nil: it has none.
func Areas(d Device) []Area {
	if o, ok := d.(AreaOwner); ok {
		return o.Areas()
	}
	return nil
}
