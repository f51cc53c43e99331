package kvstore

import (
	"jbofd/internal/kvstore/format"
	"jbofd/internal/pipeline"
	"jbofd/internal/uuid"
)

// manyChunks is from how many chunks on the chunks that are opened are listed. With fewer an opening of the partition
// reads the headers of all: 4096 take some 4 ms.
const manyChunks = 4096

// openings lists the chunks that are opened, in blocks of a ring (format.Openings). What is written to a chunk must be
// found again, so that a chunk is used only when both its header and the block that lists it are durable. These two are
// written at the same time.
type openings struct {
	// on: chunks are listed. Without it the headers of all chunks are read when the partition is opened. A device with
	// a volatile cache might lose the list.
	on bool
	// room is how many chunks a block lists.
	room int
	buf  format.Openings
	// first is the first block that the last checkpoint needs, next that which the checkpoint under way will need.
	first, next uint64
	// any: the ring is full, so that the last block says that any chunk may have been opened. While it does, no numbers
	// are added: the block covers all chunks. A checkpoint makes room.
	any bool
	// writing: the block is being written. durable: it was written, though perhaps not with all that it lists now.
	writing, durable bool
	// pending are the chunks that are being opened, in the order in which the ring lists them.
	pending []opening
}

// opening is a chunk that is being opened. header: its header was written, or has failed; listed: so has the block.
type opening struct {
	kind           ioKind
	who            int32
	chunk          format.ChunkNumber
	header, listed bool
	// writing: the block that is being written lists it.
	writing, failed bool
}

// writeHeader writes the header of a chunk. The I/O that ends is one of that kind.
func (s *Store) writeHeader(kind ioKind, who int32, chunk format.ChunkNumber, header []byte) {
	s.io(kind, who, pipeline.Write, s.pool.At(chunk, 0), header)
	o := &s.openings
	o.pending = append(o.pending, opening{kind: kind, who: who, chunk: chunk, listed: !o.on})
	s.writeOpenings()
}

// writeOpenings writes the block that lists the chunks which are being opened, if it is not being written.
func (s *Store) writeOpenings() {
	o := &s.openings
	if !o.on || o.writing {
		return
	}
	some := false
	for i := range o.pending {
		p := &o.pending[i]
		if p.listed {
			continue
		}
		if o.buf.Len() >= o.room && !o.any {
			if some {
				break // the chunks that this block lists now must be durable before the next one begins
			}
			s.nextBlock()
		}
		p.writing, some = true, true
		if !o.any {
			o.buf.Append(p.chunk)
		}
	}
	if !some {
		return
	}
	o.writing = true
	o.buf.Seal()
	s.stats.CheckpointBytes += int64(len(o.buf))
	at, _ := format.OpeningsOffset(o.buf.Sequence(), s.cfg.BlockSize)
	s.io(ioOpenings, 0, pipeline.Write, at, o.buf)
}

// nextBlock begins another block, because the last one is full. If that is not durable, none of the chunks that it
// lists is used, because all of its writes have failed. It begins again: an opening would not look behind it.
func (s *Store) nextBlock() {
	o := &s.openings
	switch _, blocks := format.OpeningsOffset(0, s.cfg.BlockSize); {
	case !o.durable:
		o.begin(o.buf.Sequence(), s.cfg.UUID)
	case o.buf.Sequence()-o.first+2 > uint64(blocks):
		o.any = true
		o.buf.SetAny()
	default:
		o.begin(o.buf.Sequence()+1, s.cfg.UUID)
	}
}

// begin begins a block.
func (o *openings) begin(sequence uint64, id uuid.UUID) {
	o.buf.Begin(sequence, id)
	o.durable = false
}

// listed ends the write of the block.
func (s *Store) listed(ok bool) {
	o := &s.openings
	o.writing, o.durable = false, o.durable || ok
	for i := range o.pending {
		if p := &o.pending[i]; p.writing {
			p.writing, p.listed, p.failed = false, true, p.failed || !ok
		}
	}
	s.chunksOpened()
	s.writeOpenings()
}

// headerEnded ends the write of a header.
func (s *Store) headerEnded(kind ioKind, who int32, ok bool) {
	for i := range s.openings.pending {
		if p := &s.openings.pending[i]; p.kind == kind && p.who == who && !p.header {
			p.header, p.failed = true, p.failed || !ok
			break
		}
	}
	s.chunksOpened()
}

// chunksOpened ends the openings of which both writes have ended.
func (s *Store) chunksOpened() {
	o := &s.openings
	for i := 0; i < len(o.pending); {
		p := o.pending[i]
		if !p.header || !p.listed {
			i++
			continue
		}
		o.pending = append(o.pending[:i], o.pending[i+1:]...)
		if p.kind == ioHeader {
			s.headerWritten(int(p.who), !p.failed)
		} else {
			s.checkpointWritten(!p.failed)
		}
	}
}

// openingsCrowded reports that half of the ring is in use, so that a checkpoint is due.
func (s *Store) openingsCrowded() bool {
	_, blocks := format.OpeningsOffset(0, s.cfg.BlockSize)
	return s.openings.on && s.openings.buf.Sequence()-s.openings.first >= uint64(blocks/2)
}

// beginOpenings notes which blocks the checkpoint that begins will need.
func (s *Store) beginOpenings() { s.openings.next = s.openings.buf.Sequence() }

// endOpenings gives up the blocks that only the checkpoint before needed.
func (s *Store) endOpenings() {
	o := &s.openings
	o.first = o.next
	if o.any && o.on && !o.writing {
		o.any = false
		o.begin(o.buf.Sequence()+1, s.cfg.UUID)
	}
}
