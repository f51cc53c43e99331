package partition

import (
	"errors"
	"fmt"

	"jbofd/internal/kvstore/check"
	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/space"
	"jbofd/internal/kvstore/swap"
	"jbofd/internal/ssd"
	"jbofd/internal/units"
)

// CheckOptions describe a Check.
type CheckOptions struct {
	// OffsetBytes and LengthBytes are the extent on the device.
	OffsetBytes units.DriveOffset
	LengthBytes int64
	// MaxKeys is how many damaged keys are named at most.
	MaxKeys int
	// Progress, if set, is told how many of how many chunks were read. Stop, once it is closed, ends the check.
	Progress func(read, of int)
	Stop     <-chan struct{}
}

// CheckReport is what a Check has found.
type CheckReport struct {
	check.Report
	// SwapAreas are those that may have newer values of some keys. They are not looked at.
	SwapAreas []string `json:"swapAreas,omitempty"`
}

// ErrCheckStopped is the error of a Check that has been told to stop.
var ErrCheckStopped = errors.New("the check was stopped")

// Check reads a partition on a device that nobody else has open, and says what in it is sound, damaged and lost. It
// writes nothing.
//
// Errors: those of check.Run; ErrCheckStopped; the device's.
func Check(dev ssd.Device, o CheckOptions) (CheckReport, error) {
	q, err := dev.OpenQueue(1)
	if err != nil {
		return CheckReport{}, err
	}
	defer q.Close() // nothing is outstanding
	readAt := readerOf(dev, q, o.OffsetBytes)
	m := &memory{}
	table, err := m.reserveSegTbl(segTblBytes(o.LengthBytes, 1))
	if err != nil {
		return CheckReport{}, err
	}
	defer m.unmap()
	stopped := false
	read := func(offset units.ExtentOffset, buf []byte) error {
		select {
		case <-o.Stop:
			stopped = true
			return fmt.Errorf("check: %w", ssd.ErrGone)
		default:
		}
		return readAt(offset, buf)
	}
	var report CheckReport
	if manifest, err := swap.LoadManifest(read, space.HeapAlloc); err == nil {
		for _, a := range manifest.Areas {
			report.SwapAreas = append(report.SwapAreas, a.Area.String())
		}
	}
	report.Report, err = check.Run(check.Config{PartitionBytes: o.LengthBytes, BlockSize: dev.Info().BlockSize,
		SegTbl: table, Alloc: space.HeapAlloc, Read: read, MaxKeys: o.MaxKeys, Progress: o.Progress})
	if stopped {
		return report, ErrCheckStopped
	}
	return report, err
}

// readerOf returns what reads from an extent of a device.
func readerOf(dev ssd.Device, q ssd.Queue, start units.DriveOffset) func(units.ExtentOffset, []byte) error {
	return func(offset units.ExtentOffset, buf []byte) error {
		q.Submit([]ssd.Request{{Op: ssd.Read, Offset: int64(offset.On(start)), Len: int64(len(buf)), Buf: buf}})
		var done [1]ssd.Completion
		for ssd.Await(q, done[:], -1) == 0 {
			if err := dev.Healthy(); err != nil {
				return err
			}
		}
		return done[0].Err
	}
}

// HasStore reports whether a device without a label looks like a partition: a superblock begins where one of the two
// has its place.
//
// Errors: the device's.
func HasStore(dev ssd.Device) (bool, error) {
	size := dev.Info().SizeBytes &^ (format.SuperblockBytes - 1)
	if size < 2*format.SuperblockBytes {
		return false, nil
	}
	q, err := dev.OpenQueue(1)
	if err != nil {
		return false, err
	}
	defer q.Close() // nothing is outstanding
	read := readerOf(dev, q, 0)
	buf := make(format.Superblock, format.SuperblockBytes)
	for generation := range uint64(2) {
		if readErr := read(format.SuperblockOffset(generation, size), buf); readErr != nil {
			err = readErr // the other one may be readable
		} else if buf.Begins() {
			return true, nil
		}
	}
	return false, err
}
