package format

import (
	"jbofd/internal/units"
	"jbofd/internal/uuid"
)

// Openings is a view of a block that lists chunks which have been opened since a checkpoint, or before. The blocks are
// a ring between the first superblock and the first chunk, and have the length of a block of the partition. So an
// opening of a large partition reads the headers of these chunks only. A block is written again when chunks are added
// to it.
//
//	0  20 B prelude, magic "JBOFDKVO"       48  u32  flags: 1: any chunk may have been opened
//	20 u32  number of chunks                52  u32  each: a chunk
//	24 u64  sequence number, 1 and up
//	32 16B  partition UUID
type Openings []byte

const (
	openingsMagic    = "JBOFDKVO"
	openingsCount    = 20
	openingsSequence = 24
	openingsUUID     = 32
	openingsFlags    = 48
	openingsChunks   = 52
)

// Room is how many chunks the block can list.
func (b Openings) Room() int { return (len(b) - openingsChunks) / 4 }

// Len is how many it lists.
func (b Openings) Len() int { return int(le.Uint32(b[openingsCount:])) }

// Chunk is number i of the chunks.
func (b Openings) Chunk(i int) ChunkNumber { return ChunkNumber(le.Uint32(b[openingsChunks+4*i:])) }

// Append adds a chunk. There must be room for it.
func (b Openings) Append(c ChunkNumber) {
	n := b.Len()
	le.PutUint32(b[openingsChunks+4*n:], uint32(c))
	le.PutUint32(b[openingsCount:], uint32(n+1))
}

func (b Openings) Sequence() uint64 { return le.Uint64(b[openingsSequence:]) }
func (b Openings) UUID() uuid.UUID  { return uuid.UUID(b[openingsUUID:]) }

// Any reports that any chunk may have been opened, because there was no room for more.
func (b Openings) Any() bool { return le.Uint32(b[openingsFlags:]) != 0 }
func (b Openings) SetAny()   { le.PutUint32(b[openingsFlags:], 1) }

// Begin makes it a block without chunks.
func (b Openings) Begin(sequence uint64, id uuid.UUID) {
	clear(b)
	le.PutUint64(b[openingsSequence:], sequence)
	copy(b[openingsUUID:], id[:])
}

// Seal completes the block.
func (b Openings) Seal() { seal(b, openingsMagic, Version) }

// Check verifies the block.
//
// Errors: ErrBlank, ErrVersion, ErrCorrupt naming the field.
func (b Openings) Check() error {
	const what = "block of opened chunks"
	if err := check(b, what, openingsMagic, Version, Version); err != nil {
		return err
	}
	if b.Len() > b.Room() {
		return bad(what, "number of chunks", b.Len(), "no more than there is room for")
	}
	return nil
}

// OpeningsBytes is the length of the ring.
const OpeningsBytes = AreaStart - SuperblockBytes

// OpeningsOffset is where the block with a sequence number is in the partition, and how many the ring has.
func OpeningsOffset(sequence uint64, blockSize int) (at units.ExtentOffset, blocks int) {
	blocks = OpeningsBytes / blockSize
	return SuperblockBytes + units.ExtentOffset(sequence%uint64(blocks))*units.ExtentOffset(blockSize), blocks
}
