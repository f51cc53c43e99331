package kvstore

import (
	"errors"
	"fmt"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/recovery"
	"jbofd/internal/pipeline"
)

// openState is how far a partition is open. If only one superblock is sound and says what counts, the other one is
// written again, for nothing may be given up of what it says. A flush ends it: what was found must not be lost
// any more, even if it was only in the device's cache.
type openState struct {
	// step of formatting; 0: not begun.
	step int
	// machine reads the partition, if it is not formatted; reads are those it asks for.
	machine *recovery.Machine
	reads   []recovery.Read
	// mending: all is read, the second superblock is being written. flushing: that is done.
	mending, flushing bool
}

// refuse ends the opening: nothing on the partition is touched.
func (s *Store) refuse(err error) {
	if !errors.Is(err, ErrPartition) {
		err = fmt.Errorf("%w: %w", ErrPartition, err)
	}
	s.phase, s.err = failed, err
}

// open continues to open the partition.
func (s *Store) open() {
	o := s.opening
	switch {
	case o.mending || o.flushing || s.cfg.Format && o.step > 0:
		return
	case s.cfg.Format:
		s.formatStep()
		return
	case o.machine == nil:
		o.machine = recovery.New(recovery.Config{PartitionBytes: s.cfg.PartitionBytes, BlockSize: s.cfg.BlockSize, SegTbl: s.cfg.SegTbl, Alloc: s.cfg.Alloc})
	}
	o.reads = o.machine.Next(o.reads[:0])
	for _, r := range o.reads {
		s.io(ioRecover, r.Slot, pipeline.Read, r.Offset, r.Buf)
	}
	if err := o.machine.Err(); err != nil {
		s.refuse(err)
	}
	if image := o.machine.Image(); image != nil {
		if err := s.adopt(image); err != nil {
			s.refuse(err)
			return
		}
		sb := format.Superblock(s.super)
		if o.mending = image.OneCopy; o.mending {
			sb.SetGeneration(sb.Generation() + 1)
			sb.Seal()
			s.io(ioRecover, 0, pipeline.Write, format.SuperblockOffset(sb.Generation(), s.cfg.PartitionBytes), sb)
			return
		}
		s.flush()
	}
}

// flush makes durable what was found.
func (s *Store) flush() {
	s.opening.flushing = true
	s.io(ioRecover, 0, pipeline.Flush, 0, nil)
}

// formatStep writes the superblocks. The one that is read last is erased first, so that no older store is
// found in place of this one.
func (s *Store) formatStep() {
	o := s.opening
	sb := format.Superblock(s.super)
	switch o.step {
	case 0:
		s.io(ioRecover, 0, pipeline.Write, format.SuperblockOffset(2, s.cfg.PartitionBytes), s.cfg.Alloc(format.SuperblockBytes))
	case 1, 2:
		sb.SetGeneration(uint64(o.step))
		sb.Seal()
		s.io(ioRecover, 0, pipeline.Write, format.SuperblockOffset(sb.Generation(), s.cfg.PartitionBytes), sb)
	case 3:
		s.io(ioRecover, 0, pipeline.Flush, 0, nil)
	default:
		s.serve()
	}
	o.step++
}

// serve opens for business.
func (s *Store) serve() {
	s.phase = ready
	s.opening = nil
}

// recovered takes a completion.
func (s *Store) recovered(slot int32, err error) {
	o := s.opening
	switch {
	case s.phase == failed:
	case s.cfg.Format || o.mending || o.flushing:
		switch {
		case o.mending && !o.flushing:
			if err != nil {
				// The next checkpoint tries again, in the same place.
				sb := format.Superblock(s.super)
				sb.SetGeneration(sb.Generation() - 1)
			}
			s.flush()
		case err != nil:
			s.refuse(err)
		case o.flushing:
			s.serve()
		default:
			s.formatStep()
		}
	default:
		o.machine.Done(slot, err)
	}
}
