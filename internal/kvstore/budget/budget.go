// Package budget shares out the chunks of a partition, so that none of those who write waits for another in a circle.
//
//	│<──────────────────────────── chunks ────────────────────────────>│
//	│ values │ key log: what lives in it and 2/5 more │ 2 │ checkpoint │
//	                                                    └ to empty the key log
//
// A checkpoint needs nothing but free chunks. Emptying a chunk of the key log needs less than a chunk of it, and a checkpoint
// to get that back. Every change writes all keys of a segment again, so Deletes and moved values need the key log to be emptied;
// they leave it a chunk and a half. And there is something to be won in the key log, for the values leave it its share. Emptying
// a chunk of values needs less than one for values, which Puts leave it.
package budget

import (
	"jbofd/internal/kvstore/chunks"
	"jbofd/internal/kvstore/format"
)

// Budget says who may take a chunk.
type Budget struct {
	// Fill is how many bytes of records make a chunk full: less than its size, because groups end with padding.
	Fill int64
	// Need are the free chunks that a checkpoint takes, and one more, for the table may grow before the next.
	Need int
	// Limit is how many bytes may live.
	Limit int64

	pool *chunks.Pool
	// pages are those of a checkpoint in a chunk.
	pages int64
}

// kept are the chunks beside Need that Puts cannot have: two for emptying the key log, one for emptying values, and the ends
// of the logs.
const kept = 7

// Of is the budget of a pool that is written in groups of so many bytes. Each ends with padding: half a block or, if it is long enough to
// choose where to end, less.
func Of(pool *chunks.Pool, groupBytes, blockSize int) Budget {
	group, block := int64(groupBytes), int64(blockSize)
	padding := block / 2
	if group >= 16*block {
		padding = block / 4
	}
	room := pool.Bytes() - block
	return Budget{pool: pool, pages: room / format.PageBytes, Fill: room * group / (group + padding)}
}

// SetNeed sets Need and Limit, for checkpoints of a table of so many bytes.
func (b *Budget) SetNeed(tableBytes int) {
	stream := int64(format.SummaryBytes + len(b.pool.Chunks)*format.ChunkEntryBytes + tableBytes)
	pages := (stream + format.PagePayloadBytes - 1) / format.PagePayloadBytes
	b.Need = int((pages+b.pages-1)/b.pages) + 1
	b.Limit = int64(len(b.pool.Chunks)-b.Reserve()) * b.Fill / 1000 * 965
}

// Reserve is how many chunks are not for what Puts bring.
func (b *Budget) Reserve() int { return b.Need + kept }

// Spare is what lives in the key log if objects and segments are as many, times 2/5: so much stays free for it, and for the others to be emptied.
func Spare(objects, segments int64) int64 {
	return (objects*(format.ItemHeaderBytes+format.MaxKey) + segments*format.SegmentHeaderBytes) * 2 / 5
}

// Scarce reports that there is not much more than emptying the key log needs.
func (b *Budget) Scarce() bool { return b.pool.Free <= b.Need+2 }

// Crowded reports that the values have taken what the key log should have, which is emptied well if a quarter of it or more is not live: of
// the values something has to be won.
func (b *Budget) Crowded() bool {
	share := (b.pool.KeyLive*7/5+b.Fill-1)/b.Fill + 4
	return int64(b.pool.KeyChunks+b.pool.Free-b.Need) <= share
}

// Keys is how many chunks the key log may take.
func (b *Budget) Keys() int { return max(0, b.pool.Free-b.Need) }

// Moved is how many chunks may be taken for moved values, which give back more.
func (b *Budget) Moved() int { return max(0, b.pool.Free-b.Need-2) }

// Marks says between which amounts of bytes that can be written the store lives: below high there is compaction, the more the less there
// is; at low, Puts wait for it. Both lie above the reserve, by a few chunks, but by not
// more than a part of what could be won at all.
func (b *Budget) Marks() (low, high int64) {
	chunk, n := b.pool.Bytes(), int64(len(b.pool.Chunks))
	reserve := int64(b.Need+5) * chunk
	band := max(0, min(max(3, n/200)*chunk, (n*chunk-reserve-b.pool.Live)/4))
	return reserve + band/3, reserve + band
}

// Weights are what it costs to move a live byte. That of a value costs a part of a segment besides. That of a
// segment need not be moved at all if it is left alone: with each of its keys that changes it dies, so it lives shorter by the number
// of its keys. Three quarters of that number gave the least writes; from half to all of it makes little difference.
func (b *Budget) Weights(keysPerSegment int) chunks.Weights {
	w := chunks.Weights{Key: int64(keysPerSegment) * 192, Value: 256, Fill: b.Fill}
	if values := b.pool.Live - b.pool.KeyLive; values > 0 {
		// A segment's bytes for each value's.
		w.Value += min(256*16, int64(keysPerSegment)*256*b.pool.KeyLive/values)
	}
	return w
}
