package kvstore

import (
	"errors"
	"fmt"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/recovery"
	"jbofd/internal/kvstore/space"
	"jbofd/internal/pipeline"
)

// openState is the state of a partition that is being opened.
type openState struct {
	// machine reads a partition that is not formatted. reads are the reads that it asks for.
	machine *recovery.Machine
	reads   []recovery.Read
	// finish is what has to be written once everything is read; nil before that.
	finish *recovery.Finish
}

// failOpening ends the opening with an error.
func (s *Store) failOpening(err error) {
	if !errors.Is(err, ErrPartition) {
		err = fmt.Errorf("%w: %w", ErrPartition, err)
	}
	s.phase, s.err = failed, err
}

// open continues to open the partition.
func (s *Store) open() {
	o := s.opening
	switch {
	case o.finish != nil:
		return
	case s.cfg.Format:
		mem := space.Buffers{Alloc: s.cfg.Alloc}
		blank := mem.Take("a blank superblock", format.SuperblockBytes)
		if mem.Err != nil {
			s.failOpening(mem.Err)
			return
		}
		s.finishOpening(recovery.NewFormat(s.super, s.cfg.PartitionBytes, blank, s.openings.on))
		return
	case o.machine == nil:
		o.machine = recovery.New(recovery.Config{PartitionBytes: s.cfg.PartitionBytes, BlockSize: s.cfg.BlockSize,
			SegTbl: s.cfg.SegTbl, Alloc: s.cfg.Alloc, AcceptLoss: s.cfg.AcceptLoss})
	}
	o.reads = o.machine.Next(o.reads[:0])
	for _, r := range o.reads {
		s.io(ioRecover, r.Slot, pipeline.Read, r.Offset, r.Buf)
	}
	if err := o.machine.Err(); err != nil {
		s.failOpening(err)
	}
	if image := o.machine.Image(); image != nil {
		if err := s.adopt(image); err != nil {
			s.failOpening(err)
			return
		}
		s.finishOpening(recovery.NewFinish(image, s.super))
	}
}

// finishOpening asks for the next I/O that has to be done before the store is open, or opens it.
func (s *Store) finishOpening(f *recovery.Finish) {
	s.opening.finish = f
	w, ok := f.Next()
	switch {
	case !ok:
		s.phase, s.opening = ready, nil
	case w.Buf == nil:
		s.io(ioRecover, 0, pipeline.Flush, 0, nil)
	default:
		s.io(ioRecover, 0, pipeline.Write, w.Offset, w.Buf)
	}
}

// recovered ends an I/O of the opening.
func (s *Store) recovered(slot int32, err error) {
	switch o := s.opening; {
	case s.phase == failed:
	case o.finish == nil:
		o.machine.Done(slot, err)
	default:
		if err := o.finish.Done(err); err != nil {
			s.failOpening(err)
			return
		}
		s.finishOpening(o.finish)
	}
}

// Opening says what is being read while the partition is opened, and how many of how many have been.
func (s *Store) Opening() (what string, read, of int) {
	if s.phase != unopened || s.opening.machine == nil {
		return "", 0, 0
	}
	return s.opening.machine.Progress()
}
