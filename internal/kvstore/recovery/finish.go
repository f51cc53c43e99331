package recovery

import (
	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/lookup"
	"jbofd/internal/kvstore/space"
	"jbofd/internal/units"
	"jbofd/internal/uuid"
)

// FormatConfig describes a store that is made new. The fields are those of the superblock.
type FormatConfig struct {
	BlockSize      int
	PartitionBytes int64
	ChunkBytes     int64
	HashSeed       uint64
	UUID           uuid.UUID
	// SegTbl is the memory of the table.
	SegTbl []byte
}

// Fresh returns the Image of a new store and fills in its superblock, super.
func Fresh(super format.Superblock, cfg *FormatConfig) *Image {
	super.SetBlockSize(cfg.BlockSize)
	super.SetUUID(cfg.UUID)
	super.SetPartitionBytes(cfg.PartitionBytes)
	super.SetHashSeed(cfg.HashSeed)
	super.SetChunkBytes(cfg.ChunkBytes)
	super.SetSalt()
	image := &Image{Super: super, Pool: space.New(super), Table: lookup.NewSegTbl(cfg.SegTbl), Version: 1, Clock: 1}
	image.NextOpenings = 1
	image.Table.Grow(lookup.FirstSegments)
	for l := range image.Tails {
		image.Tails[l].Chunk = none
	}
	return image
}

// Write is a write that a Finish asks for, or a flush if Buf is nil.
type Write struct {
	Offset units.ExtentOffset
	Buf    []byte
}

// Finish is what has to be written before a partition is open, one I/O after the other. The last one is a flush: what
// was found must not be lost any more, even if it was only in the device's cache.
type Finish struct {
	super          format.Superblock
	partitionBytes int64
	writes         []func() Write
	// repairing: the second superblock is being written.
	repairing bool
}

// NewFinish returns the Finish of a partition that was read, whose superblock is in super. If only one superblock is
// valid and names the checkpoint, the other one is written first, because nothing of an older checkpoint may be given
// up as long as its superblock might count. For the same reason a note is written if the partition does not end where
// its extent does.
func NewFinish(image *Image, super format.Superblock) *Finish {
	f := &Finish{super: super, partitionBytes: super.PartitionBytes(), repairing: image.OneCopy}
	if image.OneCopy {
		f.writes = append(f.writes, func() Write { return f.write(super.Generation() + 1) })
	}
	if image.NoteAt != 0 {
		f.writes = append(f.writes, func() Write { return Write{Offset: image.NoteAt, Buf: super} })
	}
	return f.thenFlush()
}

// NewFormat returns the Finish of a new store. First the superblock that is written last is erased with blank, so that
// no older store is found in place of this one. lists: the blocks that list chunks are erased, too.
func NewFormat(super format.Superblock, partitionBytes int64, blank []byte, lists bool) *Finish {
	f := &Finish{super: super, partitionBytes: partitionBytes}
	f.writes = append(f.writes, func() Write {
		return Write{Offset: format.SuperblockOffset(2, partitionBytes),
			Buf: blank}
	})
	for at := format.SuperblockBytes; lists && at < format.AreaStart; at += format.SuperblockBytes {
		f.writes = append(f.writes, func() Write { return Write{Offset: units.ExtentOffset(at), Buf: blank} })
	}
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

// Next returns the next I/O. Without one, ok is false.
func (f *Finish) Next() (w Write, ok bool) {
	if len(f.writes) == 0 {
		return Write{}, false
	}
	next := f.writes[0]
	f.writes = f.writes[1:]
	return next(), true
}

// Done ends the I/O and returns why the partition cannot be opened, if so. If the second superblock could not be
// written, the next checkpoint writes it, in the same place.
func (f *Finish) Done(err error) error {
	if f.repairing {
		if f.repairing = false; err != nil {
			f.super.SetGeneration(f.super.Generation() - 1)
		}
		return nil
	}
	return err
}
