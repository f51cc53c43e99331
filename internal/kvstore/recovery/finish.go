package recovery

import (
	"jbofd/internal/kvstore/chunks"
	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/segtbl"
	"jbofd/internal/kvstore/setup"
)

// Fresh is the Image of a new store. super is where its superblock will be.
func Fresh(super format.Superblock, cfg *setup.Config) *Image {
	super.SetBlockSize(cfg.BlockSize)
	super.SetUUID(cfg.UUID)
	super.SetPartitionBytes(cfg.PartitionBytes)
	super.SetHashSeed(cfg.HashSeed)
	super.SetChunkBytes(cfg.ChunkBytes)
	image := &Image{Super: super, Pool: chunks.New(super), Table: segtbl.New(cfg.SegTbl), Version: 1}
	image.Table.Grow(segtbl.First)
	for l := range image.Tails {
		image.Tails[l].Chunk = none
	}
	return image
}

// Write is what a Finish asks for: a write, or a flush if Buf is nil.
type Write struct {
	Offset int64
	Buf    []byte
}

// Finish is what is written before a partition is open, one I/O after the other. A flush ends it: what was found must not be lost any more,
// even if it was only in the device's cache.
type Finish struct {
	super          format.Superblock
	partitionBytes int64
	writes         []func() Write
	// mending: the second superblock is being written.
	mending bool
}

// NewFinish is for a partition that was read. If only one superblock is sound and says what counts, the other one
// is written again, for nothing may be given up of what it says.
func NewFinish(super format.Superblock, partitionBytes int64, oneCopy bool) *Finish {
	f := &Finish{super: super, partitionBytes: partitionBytes, mending: oneCopy}
	if oneCopy {
		f.writes = append(f.writes, func() Write { return f.write(super.Generation() + 1) })
	}
	return f.thenFlush()
}

// NewFormat is for a new store. The superblock that is read last is erased first, with blank, so that no older store is
// found in place of this one.
func NewFormat(super format.Superblock, partitionBytes int64, blank []byte) *Finish {
	f := &Finish{super: super, partitionBytes: partitionBytes}
	f.writes = append(f.writes, func() Write { return Write{Offset: format.SuperblockOffset(2, partitionBytes), Buf: blank} })
	for generation := range uint64(2) {
		f.writes = append(f.writes, func() Write { return f.write(generation + 1) })
	}
	return f.thenFlush()
}

func (f *Finish) thenFlush() *Finish {
	f.writes = append(f.writes, func() Write { return Write{} })
	return f
}

func (f *Finish) write(generation uint64) Write {
	f.super.SetGeneration(generation)
	f.super.Seal()
	return Write{Offset: format.SuperblockOffset(generation, f.partitionBytes), Buf: f.super}
}

// Next returns the next I/O; ok: there is one.
func (f *Finish) Next() (w Write, ok bool) {
	if len(f.writes) == 0 {
		return Write{}, false
	}
	next := f.writes[0]
	f.writes = f.writes[1:]
	return next(), true
}

// Done takes the end of the I/O and returns why the partition cannot be opened, if it cannot. A superblock that could not be mended
// is written by the next checkpoint, in the same place.
func (f *Finish) Done(err error) error {
	if f.mending {
		if f.mending = false; err != nil {
			f.super.SetGeneration(f.super.Generation() - 1)
		}
		return nil
	}
	return err
}
