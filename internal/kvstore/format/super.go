package format

import (
	"jbofd/internal/units"
	"jbofd/internal/uuid"
)

// Superblock is a view of a superblock, which describes the partition and names its last checkpoint. There are two
// copies. The valid one with the higher generation counts.
//
//	0  20 B prelude, magic "JBOFDKVS"       48  u64  partition length in bytes
//	20 u32  block size                      56  u64  hash seed
//	24 u64  generation, 1 and up            64  u64  checkpoint's id, 0: there is none
//	32 16B  partition UUID                  72  u32  chunk length in bytes
//	                                        76  u32  number of checkpoint pages
//	80 u64  volatile from: a loss of power may have lost writes of this version and later ones; 0: of none
//	88 u32  salt, 0: of the hash seed only, as in partitions made with version 2 or 3 of the format
//	92 u32  pages of the full checkpoint    96  u64  id of the last stream of pages
//	112 u64  sequence number of the first     104 u32  pages of the last stream
//	         Openings that count, 0: none     108 u32  time of day in unix seconds, 0: unknown
//	120 … 255 reserved
//	256 u24 each: the chunks of the checkpoint, in order, at most MaxCheckpointChunks
//	2560 24 B each: the Drops, at most MaxDrops
//
// A checkpoint is a full one, and increments of it, which say what has changed since the stream before. Each is a
// stream of bytes that begins with a page of its own. Until version 3 there were only full checkpoints, and the fields
// from 92 on were zero; their chunks are found by their headers.
type Superblock []byte

const (
	superMagic      = "JBOFDKVS"
	superBlockSize  = 20
	superGeneration = 24
	superUUID       = 32
	superLength     = 48
	superHashSeed   = 56
	superCheckpoint = 64
	superChunk      = 72
	superPages      = 76
	superVolatile   = 80
	superSalt       = 88
	superFullPages  = 92
	superLastStream = 96
	superLastPages  = 104
	superWall       = 108
	superOpenings   = 112
	superReserved   = 120
	superChunks     = 256
	superDrops      = 2560
)

// MaxCheckpointChunks is how many chunks of a checkpoint a superblock can name. A checkpoint that takes more has no
// increments, and its chunks are found by their headers.
const MaxCheckpointChunks = (superDrops - superChunks) / 3

// Version is the version of the format that the superblock was sealed with; 0: it was not sealed.
func (b Superblock) Version() uint32 { return le.Uint32(b[preludeVersion:]) }

func (b Superblock) BlockSize() int            { return int(le.Uint32(b[superBlockSize:])) }
func (b Superblock) SetBlockSize(v int)        { le.PutUint32(b[superBlockSize:], uint32(v)) }
func (b Superblock) Generation() uint64        { return le.Uint64(b[superGeneration:]) }
func (b Superblock) SetGeneration(v uint64)    { le.PutUint64(b[superGeneration:], v) }
func (b Superblock) UUID() uuid.UUID           { return uuid.UUID(b[superUUID:]) }
func (b Superblock) SetUUID(v uuid.UUID)       { copy(b[superUUID:], v[:]) }
func (b Superblock) PartitionBytes() int64     { return int64(le.Uint64(b[superLength:])) }
func (b Superblock) SetPartitionBytes(v int64) { le.PutUint64(b[superLength:], uint64(v)) }
func (b Superblock) HashSeed() uint64          { return le.Uint64(b[superHashSeed:]) }
func (b Superblock) SetHashSeed(v uint64)      { le.PutUint64(b[superHashSeed:], v) }
func (b Superblock) Checkpoint() uint64        { return le.Uint64(b[superCheckpoint:]) }
func (b Superblock) SetCheckpoint(v uint64)    { le.PutUint64(b[superCheckpoint:], v) }
func (b Superblock) ChunkBytes() int64         { return int64(le.Uint32(b[superChunk:])) }
func (b Superblock) SetChunkBytes(v int64)     { le.PutUint32(b[superChunk:], uint32(v)) }
func (b Superblock) Pages() uint32             { return le.Uint32(b[superPages:]) }
func (b Superblock) SetPages(v uint32)         { le.PutUint32(b[superPages:], v) }

// VolatileFrom is the first version of the key log whose write a loss of power may have lost; 0: none.
func (b Superblock) VolatileFrom() uint64     { return le.Uint64(b[superVolatile:]) }
func (b Superblock) SetVolatileFrom(v uint64) { le.PutUint64(b[superVolatile:], v) }

// FullPages is how many of the Pages belong to the full checkpoint, or 0 if the version has no increments. LastPages is
// how many belong to the last stream.
func (b Superblock) FullPages() uint32     { return le.Uint32(b[superFullPages:]) }
func (b Superblock) SetFullPages(v uint32) { le.PutUint32(b[superFullPages:], v) }
func (b Superblock) LastPages() uint32     { return le.Uint32(b[superLastPages:]) }
func (b Superblock) SetLastPages(v uint32) { le.PutUint32(b[superLastPages:], v) }

// LastStream is the id of the last stream. That of a full checkpoint is the checkpoint's id.
func (b Superblock) LastStream() uint64     { return le.Uint64(b[superLastStream:]) }
func (b Superblock) SetLastStream(v uint64) { le.PutUint64(b[superLastStream:], v) }

// Openings is the sequence number of the first block of Openings that may list chunks which were opened since the
// checkpoint; 0: any chunk may have been.
func (b Superblock) Openings() uint64     { return le.Uint64(b[superOpenings:]) }
func (b Superblock) SetOpenings(v uint64) { le.PutUint64(b[superOpenings:], v) }

// Wall is the time of day, in unix seconds, when the superblock was written: what was to expire until then has expired.
// It is 0 if the superblock was written by a version without that field.
func (b Superblock) Wall() uint32     { return le.Uint32(b[superWall:]) }
func (b Superblock) SetWall(v uint32) { le.PutUint32(b[superWall:], v) }

// NextStream is the id of an increment that is written when the next record has that version and the superblock that
// generation. It is also made of the id of the stream before, so that it is known if that one is missing.
func NextStream(before, version, generation uint64) uint64 {
	return mix(before)&^(1<<32-1) | mix(generation<<48^version)>>32
}

// IsNextStream reports whether the stream with an id is an increment of the one before.
func IsNextStream(id, before uint64) bool { return id>>32 == mix(before)>>32 }

// Chunks appends the chunks of the checkpoint to dst. There are none if the superblock does not name them.
func (b Superblock) Chunks(dst []ChunkNumber) []ChunkNumber {
	if b.FullPages() == 0 || b.CheckpointChunks() > MaxCheckpointChunks {
		return dst
	}
	for i := range b.CheckpointChunks() {
		dst = append(dst, ChunkNumber(uint24(b[superChunks+3*i:])))
	}
	return dst
}

// SetChunks names the chunks of the checkpoint, and reports whether they can be named.
func (b Superblock) SetChunks(chunks ...[]ChunkNumber) bool {
	list := b[superChunks:superDrops]
	clear(list)
	i := 0
	for _, some := range chunks {
		for _, c := range some {
			if i == MaxCheckpointChunks || c >= 1<<24 {
				clear(list)
				return false
			}
			putUint24(list[3*i:], uint32(c))
			i++
		}
	}
	return true
}

// SuperblockOffset returns the offset in the partition of the superblock of a generation.
func SuperblockOffset(generation uint64, partitionBytes int64) units.ExtentOffset {
	if generation&1 == 1 {
		return 0
	}
	return units.ExtentOffset(partitionBytes - SuperblockBytes)
}

// PagesPerChunk is how many pages of a checkpoint fit into a chunk.
func (b Superblock) PagesPerChunk() uint32 {
	return uint32((b.ChunkBytes() - int64(b.BlockSize())) / PageBytes)
}

// CheckpointChunks is the number of chunks that a checkpoint of Pages pages takes.
func (b Superblock) CheckpointChunks() int {
	return int((b.Pages() + b.PagesPerChunk() - 1) / b.PagesPerChunk())
}

// PagePlace returns which chunk of the checkpoint contains a page, and its offset in that chunk.
func (b Superblock) PagePlace(page uint32) (chunk int, offset ChunkOffset) {
	return int(page / b.PagesPerChunk()), ChunkOffset(b.BlockSize()) + ChunkOffset(page%b.PagesPerChunk())*PageBytes
}

// Salt is the part of the seeds of checksums that is the same in the whole partition.
func (b Superblock) Salt() uint32 {
	if v := le.Uint32(b[superSalt:]); v != 0 {
		return v
	}
	return uint32(mix(b.HashSeed() ^ 0x6A626F66))
}

// SetSalt derives the salt of a new partition from its UUID and hash seed, which must be set before. Partitions that
// are replicas of each other have the same hash seed. Without the UUID, records that another partition has left on the
// drive would count as this one's.
func (b Superblock) SetSalt() {
	id := b.UUID()
	v := uint32(mix(b.HashSeed() ^ 0x6A626F66 ^ mix(le.Uint64(id[:])^mix(le.Uint64(id[8:])))))
	le.PutUint32(b[superSalt:], max(1, v))
}

// Seal completes the superblock by writing its prelude. It must be called last.
// Begins reports whether b has the magic of a superblock, valid or not.
func (b Superblock) Begins() bool { return string(b[:len(superMagic)]) == superMagic }

func (b Superblock) Seal() { seal(b[:SuperblockBytes], superMagic, Version) }

// Check verifies the superblock of a partition of that length.
//
// Errors: ErrBlank, ErrVersion, ErrCorrupt naming the field.
func (b Superblock) Check(partitionBytes int64) error {
	const what = "superblock"
	if len(b) != SuperblockBytes {
		return bad(what, "length", len(b), SuperblockBytes)
	}
	if err := check(b, what, superMagic, OldestVersion, Version); err != nil {
		return err
	}
	pow2 := func(v, low, high int64) bool { return v >= low && v <= high && v&(v-1) == 0 }
	switch {
	case !pow2(int64(b.BlockSize()), 512, SuperblockBytes):
		return bad(what, "block size", b.BlockSize(), "a power of two from 512 to 4096")
	case b.Generation() == 0:
		return bad(what, "generation", 0, "at least 1")
	case b.PartitionBytes() != partitionBytes:
		return bad(what, "partition length", b.PartitionBytes(), partitionBytes)
	case !pow2(b.ChunkBytes(), MinChunkBytes, MaxChunkBytes):
		return bad(what, "chunk length", b.ChunkBytes(), "a power of two from 128 KiB to 64 MiB")
	case (b.Checkpoint() == 0) != (b.Pages() == 0):
		return bad(what, "number of checkpoint pages", b.Pages(), "0 if and only if there is no checkpoint")
	case b.FullPages() > b.Pages() || b.LastPages() > b.Pages():
		return bad(what, "number of pages of a stream", max(b.FullPages(), b.LastPages()), "no more than all")
	case !zero(b[superReserved:superChunks]):
		return bad(what, "a reserved byte", "set", "zero")
	}
	return b.checkDrops()
}

// Kind says what a chunk is used for.
type Kind uint8

// Kinds of chunks.
const (
	KeyLog Kind = 1 + iota
	ValueLog
	Checkpoint
	// Bad is the kind of no header, but of the ChunkEntry of a chunk that is not used because it cannot be read.
	Bad
)

// ChunkHeader is a view of the header of a chunk, its first ChunkHeaderBytes. The rest of the block is zero. The header
// is durable before anything is written behind it.
//
//	0  20 B prelude, magic "JBOFDKVC"
//	20 u8   kind: 1 key log, 2 value log, 3 checkpoint
//	21 u8   bits 32 to 39 of the epoch
//	22 2 B  reserved
//	24 u32  epoch: chunks are numbered in the order in which they were opened
//	28 u32  index of the chunk in its checkpoint, else 0
//	32 16B  partition UUID
//	48 u64  checkpoint's id, else 0
//	56 8 B  reserved
type ChunkHeader []byte

// ChunkHeaderBytes is the length of a ChunkHeader.
const ChunkHeaderBytes = 64

const (
	chunkMagic      = "JBOFDKVC"
	chunkKind       = 20
	chunkEpochHigh  = 21
	chunkReserved0  = 22
	chunkEpoch      = 24
	chunkIndex      = 28
	chunkUUID       = 32
	chunkCheckpoint = 48
	chunkReserved1  = 56
)

func (b ChunkHeader) Kind() Kind             { return Kind(b[chunkKind]) }
func (b ChunkHeader) SetKind(v Kind)         { b[chunkKind] = byte(v) }
func (b ChunkHeader) Epoch() uint64          { return epoch40(b[chunkEpoch:], b[chunkEpochHigh]) }
func (b ChunkHeader) SetEpoch(v uint64)      { b[chunkEpochHigh] = putEpoch(b[chunkEpoch:], v) }
func (b ChunkHeader) Index() uint32          { return le.Uint32(b[chunkIndex:]) }
func (b ChunkHeader) SetIndex(v uint32)      { le.PutUint32(b[chunkIndex:], v) }
func (b ChunkHeader) UUID() uuid.UUID        { return uuid.UUID(b[chunkUUID:]) }
func (b ChunkHeader) SetUUID(v uuid.UUID)    { copy(b[chunkUUID:], v[:]) }
func (b ChunkHeader) Checkpoint() uint64     { return le.Uint64(b[chunkCheckpoint:]) }
func (b ChunkHeader) SetCheckpoint(v uint64) { le.PutUint64(b[chunkCheckpoint:], v) }

// Begins reports whether b has the magic of a header, valid or not.
func (b ChunkHeader) Begins() bool { return string(b[:len(chunkMagic)]) == chunkMagic }

// Seal completes the header.
func (b ChunkHeader) Seal() { seal(b[:ChunkHeaderBytes], chunkMagic, Version) }

// Check verifies the header.
//
// Errors: ErrBlank, ErrVersion, ErrCorrupt naming the field.
func (b ChunkHeader) Check() error {
	const what = "chunk header"
	if len(b) != ChunkHeaderBytes {
		return bad(what, "length", len(b), ChunkHeaderBytes)
	}
	if err := check(b, what, chunkMagic, OldestVersion, Version); err != nil {
		return err
	}
	switch {
	case b.Kind() < KeyLog || b.Kind() > Checkpoint:
		return bad(what, "kind", b.Kind(), "1 to 3")
	case b.Epoch() == 0:
		return bad(what, "epoch", 0, "at least 1")
	case (b.Kind() == Checkpoint) != (b.Checkpoint() != 0):
		return bad(what, "checkpoint's id", b.Checkpoint(), "set if and only if the kind is 3")
	case !zero(b[chunkReserved0:chunkEpoch]) || !zero(b[chunkReserved1:]):
		return bad(what, "a reserved byte", "set", "zero")
	}
	return nil
}

// Page is a view of a page of a checkpoint. A checkpoint is one or more streams of bytes that are cut into pages of
// PageBytes.
//
//	0  20 B prelude, magic "JBOFDKVP"
//	20 u32  index of the page in the checkpoint
//	24 u64  stream's id
//	32 …    payload
type Page []byte

const (
	pageMagic   = "JBOFDKVP"
	pageIndex   = 20
	pageStream  = 24
	pagePayload = 32
	// PagePayloadBytes is how much of the stream a page holds.
	PagePayloadBytes = PageBytes - pagePayload
)

func (b Page) Index() uint32      { return le.Uint32(b[pageIndex:]) }
func (b Page) SetIndex(v uint32)  { le.PutUint32(b[pageIndex:], v) }
func (b Page) Stream() uint64     { return le.Uint64(b[pageStream:]) }
func (b Page) SetStream(v uint64) { le.PutUint64(b[pageStream:], v) }
func (b Page) Payload() []byte    { return b[pagePayload:PageBytes] }

// Begins reports whether b has the magic of a page, valid or not.
func (b Page) Begins() bool { return string(b[:len(pageMagic)]) == pageMagic }

// Seal completes the page.
func (b Page) Seal() { seal(b[:PageBytes], pageMagic, Version) }

// Check verifies a page that should have that index, and belong to that stream.
//
// Errors: ErrBlank, ErrVersion, ErrCorrupt naming the field.
func (b Page) Check(stream uint64, index uint32) error {
	const what = "checkpoint page"
	if len(b) != PageBytes {
		return bad(what, "length", len(b), PageBytes)
	}
	if err := check(b, what, pageMagic, OldestVersion, Version); err != nil {
		return err
	}
	switch {
	case b.Stream() != stream:
		return bad(what, "stream's id", b.Stream(), stream)
	case b.Index() != index:
		return bad(what, "index", b.Index(), index)
	}
	return nil
}

// Summary is a view of the first SummaryBytes of a stream, which describe the store at the time when it began. Behind
// it are a ChunkEntry for each chunk, and the SegTbl. Summary and entries are the manifest of the store: they say which
// chunk belongs to which log and where each log ended. Later writes are found behind those ends. An increment has, in
// place of the SegTbl, only those units of its entries that have changed: each is u32 number and the entries. A number
// of EndOfUnits ends it.
//
//	0  u64 next version          32 3 times {u32 epoch, u8 its bits 32 to 39, u24 end in the chunk / 256} of
//	8  u56 objects                  the open chunks: key log, value log, moved values;
//	   u8  bits 32 to 39 of 24      epoch 0: none
//	16 u32 number of segments    56 u64 object versions: the greatest that was given
//	20 u30 number of chunks
//	   u1  wide: set from half of the epochs on that have 32 bits
//	   u1  merges: see Merges
//	24 u32 last epoch
//	28 u32 first expiry: nothing in the store expires before it, in unix seconds; 0: nothing expires
//
// The last two are 0 in checkpoints of old versions. Old programs, whose epochs had 32 bits, take the mark of wide ones
// for chunks that there cannot be, and refuse the partition.
type Summary []byte

// EndOfUnits is behind the last unit of an increment.
const EndOfUnits = 1<<32 - 1

// SummaryBytes and ChunkEntryBytes are the lengths of a Summary and a ChunkEntry.
const SummaryBytes, ChunkEntryBytes = 64, 12

const summaryMerges, summaryWide = 1 << 31, 1 << 30

func (b Summary) NextVersion() uint64     { return le.Uint64(b) }
func (b Summary) SetNextVersion(v uint64) { le.PutUint64(b, v) }
func (b Summary) Objects() int64          { return int64(le.Uint64(b[8:])<<8) >> 8 }
func (b Summary) Segments() uint32        { return le.Uint32(b[16:]) }
func (b Summary) SetSegments(v uint32)    { le.PutUint32(b[16:], v) }
func (b Summary) Chunks() int             { return int(le.Uint32(b[20:]) &^ (summaryMerges | summaryWide)) }

// SetObjects sets the number of objects.
func (b Summary) SetObjects(v int64) { le.PutUint64(b[8:], uint64(v)&^(0xFF<<56)|uint64(b[15])<<56) }

// SetChunks sets the number of chunks, and takes away the marks of SetMerges and SetLastEpoch.
func (b Summary) SetChunks(v int)   { le.PutUint32(b[20:], uint32(v)) }
func (b Summary) LastEpoch() uint64 { return epoch40(b[24:], b[15]) }

// SetLastEpoch sets the last epoch, and marks wide ones. It is called after SetChunks.
func (b Summary) SetLastEpoch(v uint64) {
	if b[15] = putEpoch(b[24:], v); v >= 1<<31 {
		b[23] |= summaryWide >> 24
	}
}

// Merges reports whether the SegTbl may have become shorter since the stream began. What is behind it in the key log
// then says so (Segment.Limit). Without it, it was written by a program whose tables only grow, and whose segments may
// have hash bits that are too few.
func (b Summary) Merges() bool { return le.Uint32(b[20:])&summaryMerges != 0 }

// SetMerges sets what Merges reports.
func (b Summary) SetMerges() { b[23] |= summaryMerges >> 24 }

func (b Summary) Clock() uint64           { return le.Uint64(b[56:]) }
func (b Summary) SetClock(v uint64)       { le.PutUint64(b[56:], v) }
func (b Summary) FirstExpiry() uint32     { return le.Uint32(b[28:]) }
func (b Summary) SetFirstExpiry(v uint32) { le.PutUint32(b[28:], v) }

// Open returns epoch and end of the open chunk of log i, 0 to 2; epoch 0: the log had none.
func (b Summary) Open(i int) (epoch uint64, end ChunkOffset) {
	b = b[32+8*i:]
	return epoch40(b, b[4]), ChunkOffset(le.Uint32(b[4:]) &^ 0xFF)
}

// SetOpen sets the epoch and the end of the open chunk of log i. The end is that of a block.
func (b Summary) SetOpen(i int, epoch uint64, end ChunkOffset) {
	b = b[32+8*i:]
	le.PutUint32(b[4:], uint32(end))
	b[4] = putEpoch(b, epoch)
}

// KeyEpoch is the epoch of the first chunk of the key log that recovery reads besides the checkpoint.
func (b Summary) KeyEpoch() uint64 {
	if epoch, _ := b.Open(0); epoch != 0 {
		return epoch
	}
	return b.LastEpoch() + 1
}

// ChunkEntry is a view of the state of a chunk in a checkpoint: u32 epoch, u32 live bytes, u8 kind (0: free, 4:
// not used because it cannot be read), u8 bits 32 to 39 of the epoch, 2 B reserved.
type ChunkEntry []byte

func (b ChunkEntry) Epoch() uint64     { return epoch40(b, b[9]) }
func (b ChunkEntry) SetEpoch(v uint64) { b[9] = putEpoch(b, v) }
func (b ChunkEntry) Live() uint32      { return le.Uint32(b[4:]) }
func (b ChunkEntry) SetLive(v uint32)  { le.PutUint32(b[4:], v) }
func (b ChunkEntry) Kind() Kind        { return Kind(b[8]) }
func (b ChunkEntry) SetKind(v Kind)    { b[8] = byte(v) }

// epoch40 is an epoch of 40 bits, of which low has the lower 32.
func epoch40(low []byte, high byte) uint64 { return uint64(le.Uint32(low)) | uint64(high)<<32 }

// putEpoch writes the lower 32 bits of an epoch to low and returns the others.
func putEpoch(low []byte, v uint64) (high byte) {
	le.PutUint32(low, uint32(v))
	return byte(v >> 32)
}
