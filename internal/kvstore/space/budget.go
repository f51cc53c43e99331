package space

import (
	"jbofd/internal/kvstore/format"
)

// Budget shares out the free chunks of a partition, so that the logs, compaction and checkpoints never wait for each
// other in a circle.
//
//	│<──────────────────────────── chunks ────────────────────────────>│
//	│ values │ key log: what is live in it and 2/5 more │ 2 │ checkpoint │
//	                                                       └ to empty the key log
//
// A checkpoint needs free chunks and nothing else. Emptying a chunk of the key log takes less than one chunk of it, and
// a checkpoint before the emptied chunk is free. Every change writes all keys of a segment again, so that Deletes and
// moved values depend on the key log being emptied: they leave it a chunk and a half. Because values leave the key log
// its share, there is always something to win in it. Emptying a chunk of values takes less than one chunk of values,
// which Puts leave.
type Budget struct {
	// Fill is how many bytes of records fill a chunk. It is less than the chunk's size, because groups end with
	// padding.
	Fill int64
	// CheckpointChunks is how many free chunks a checkpoint takes, and one more because the SegTbl may grow before the
	// next checkpoint.
	CheckpointChunks int
	// CheckpointBytes is the length of the pages of a checkpoint.
	CheckpointBytes int64
	// MaxLive bounds the live bytes. Puts beyond it are refused.
	MaxLive int64

	pool *Pool
	// pages is how many checkpoint pages fit into a chunk.
	pages int64
}

// reservedChunks is the number of chunks, besides CheckpointChunks, that Puts cannot take: two to empty the key log,
// one to empty values, and the open ends of the logs.
const reservedChunks = 7

// NewBudget returns the budget of a pool whose logs are written in groups of about groupBytes. A group ends with half a
// block of padding on average, or a quarter if it is long enough to be ended where little is needed.
func NewBudget(pool *Pool, groupBytes, blockSize int) Budget {
	group, block := int64(groupBytes), int64(blockSize)
	padding := block / 2
	if group >= 16*block {
		padding = block / 4
	}
	room := pool.Bytes() - block
	return Budget{pool: pool, pages: room / format.PageBytes, Fill: room * group / (group + padding)}
}

// SetTable computes CheckpointChunks, CheckpointBytes and MaxLive for a SegTbl of tableBytes.
func (b *Budget) SetTable(tableBytes int) {
	b.setTable(len(b.pool.Chunks), b.pool.Usable(), tableBytes)
}

// setTable is SetTable for so many chunks, of which usable are used.
func (b *Budget) setTable(chunks, usable, tableBytes int) {
	stream := int64(format.SummaryBytes + chunks*format.ChunkEntryBytes + tableBytes)
	pages := (stream + format.PagePayloadBytes - 1) / format.PagePayloadBytes
	b.CheckpointBytes = pages * format.PageBytes
	b.CheckpointChunks = int((pages+b.pages-1)/b.pages) + 1
	b.MaxLive = int64(usable-b.Reserve()) * b.Fill / 1000 * 965
}

// Reserve is the number of chunks that Puts cannot take.
func (b *Budget) Reserve() int { return b.CheckpointChunks + reservedChunks }

// versionBytes is how many bytes of its version an object has, as a rule.
const versionBytes = 3

// Spare is the free space that the key log needs to be emptied well: 2/5 of what is live in it, with that many objects
// and segments.
func Spare(objects, segments int64) int64 {
	return (objects*(format.ItemHeaderBytes+format.MaxKey+versionBytes) + segments*format.SegmentHeaderBytes) * 2 / 5
}

// Scarce reports that hardly more chunks are free than emptying the key log takes.
func (b *Budget) Scarce() bool { return b.pool.Free <= b.CheckpointChunks+2 }

// Crowded reports that values occupy chunks of the key log's share. The key log is emptied well if at least a quarter
// of it is dead, so that compaction then has to win space from values.
func (b *Budget) Crowded() bool {
	share := (b.pool.KeyLive*7/5+b.Fill-1)/b.Fill + 4
	return int64(b.pool.KeyChunks+b.pool.Free-b.CheckpointChunks) <= share
}

// KeyChunks is how many chunks the key log may take.
func (b *Budget) KeyChunks() int { return max(0, b.pool.Free-b.CheckpointChunks) }

// MovedChunks is how many chunks may be taken for values that compaction moves. Their victims give back more. As a last
// resort it is one more, of the two that the key log needs to be emptied.
func (b *Budget) MovedChunks(lastResort bool) int {
	keys := 2
	if lastResort {
		keys = 1
	}
	return max(0, b.pool.Free-b.CheckpointChunks-keys)
}

// Watermarks returns two amounts of headroom, in bytes. Below high there is compaction, with the more victims the less
// headroom there is. At low, Puts are stalled. Both lie above the reserve by a few chunks, but by no more than a part
// of the space that could be won.
func (b *Budget) Watermarks() (low, high int64) {
	chunk, n := b.pool.Bytes(), int64(b.pool.Limit())
	reserve := int64(b.CheckpointChunks+4) * chunk
	band := max(0, min(max(3, n/200)*chunk, (n*chunk-reserve-b.pool.Live)/4))
	return reserve + band/3, reserve + band
}

// Weights is the cost of moving a live byte, for Pool.Choose. Moving a value also writes a part of its segment. A
// segment that is left alone dies when the first of its keys changes, so that moving it early is wasteful in proportion
// to the number of its keys. Three quarters of that number gave the fewest writes; anything from half to all of it
// makes little difference.
func (b *Budget) Weights(keysPerSegment int) Weights {
	w := Weights{Key: int64(keysPerSegment) * 192, Value: 256, Fill: b.Fill}
	if values := b.pool.Live - b.pool.KeyLive; values > 0 {
		// A segment's bytes for each value's.
		w.Value += min(256*16, int64(keysPerSegment)*256*b.pool.KeyLive/values)
	}
	return w
}
