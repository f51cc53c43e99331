package kvstore

import (
	"errors"
	"fmt"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/recovery"
	"jbofd/internal/pipeline"
)

// openState is how far a partition is open.
type openState struct {
	// machine reads the partition, if it is not formatted; reads are those it asks for.
	machine *recovery.Machine
	reads   []recovery.Read
	// finish is what is written when all is read, or formatted; nil before that.
	finish *recovery.Finish
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
	case o.finish != nil:
		return
	case s.cfg.Format:
		s.finishOpening(recovery.NewFormat(s.super, s.cfg.PartitionBytes, s.cfg.Alloc(format.SuperblockBytes)))
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
		s.finishOpening(recovery.NewFinish(s.super, s.cfg.PartitionBytes, image.OneCopy))
	}
}

// finishOpening goes on with what is written before the store is open for business.
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

// recovered takes a completion.
func (s *Store) recovered(slot int32, err error) {
	switch o := s.opening; {
	case s.phase == failed:
	case o.finish == nil:
		o.machine.Done(slot, err)
	default:
		if err := o.finish.Done(err); err != nil {
			s.refuse(err)
			return
		}
		s.finishOpening(o.finish)
	}
}

// Opening says what is being read while the partition is opened, and how far that is: so many of so many.
func (s *Store) Opening() (what string, read, of int) {
	if s.phase != unopened || s.opening.machine == nil {
		return "", 0, 0
	}
	return s.opening.machine.Progress()
}
