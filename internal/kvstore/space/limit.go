package space

import (
	"slices"

	"jbofd/internal/invariants"
	"jbofd/internal/kvstore/format"
)

// The limit of a pool. A resize of the partition moves it:
//
//	shrink   Narrow ──> the chunks from the limit on are emptied ──> Truncate
//	grow     Extend ──> a checkpoint and superblocks for the new size are durable ──> Widen
//
// What is free from the limit on is withdrawn, and on a list of its own. As long as too few chunks below the limit are
// free for the logs and compaction to work, some of these may be taken nevertheless (Keep).
//
// Narrow and Widen go through Sweep chunks in a call. A free chunk from the limit on may still be on the list of free
// chunks; Narrow goes through the list as well. It takes each chunk off the front and puts it back at the end unless it
// lies from the limit on. unsorted chunks at the front have not been looked at yet.

// Limit is the number of chunks that may be used: all but those that a resize takes away, or has not added yet.
func (p *Pool) Limit() int { return int(p.limit) }

// Usable is the number of chunks below the limit that are not bad, without those that Widen has not freed yet.
func (p *Pool) Usable() int {
	n := int(p.limit) - p.Bad + p.beyond.bad
	if int(p.limit) == len(p.Chunks) {
		n -= p.beyond.free
	}
	return n
}

// Beyond is the number of chunks from the limit on that hold nothing.
func (p *Pool) Beyond() int { return p.beyond.free + p.beyond.bad }

// Below is how many of the Free chunks lie below the limit.
func (p *Pool) Below() int { return p.below }

// Keep lets chunks from the limit on be taken, as long as there are any, if fewer than n are free below it.
func (p *Pool) Keep(n int) {
	p.keep = n
	p.countFree()
}

// countFree sets Free.
func (p *Pool) countFree() { p.Free = p.below + min(p.beyond.free, max(0, p.keep-p.below)) }

// beyond counts chunks from the limit on.
type beyond struct {
	// free are withdrawn, or free and still on the list of free chunks, which listed counts. obsolete are obsolete, bad
	// are bad.
	free, listed, obsolete, bad int
}

// Narrow moves the limit down towards n, and reports whether it is there and no chunk from there on is on the list of
// free chunks.
func (p *Pool) Narrow(n int) (done bool) {
	if to := max(p.limit-format.ChunkNumber(p.Sweep), format.ChunkNumber(n)); to < p.limit {
		for i := to; i < p.limit; i++ {
			switch p.Chunks[i].State {
			case Free:
				p.below--
				p.beyond.free++
				p.beyond.listed++
			case Obsolete:
				p.Obsolete--
				p.beyond.obsolete++
			case Bad:
				p.beyond.bad++
			}
		}
		if p.limit = to; int(to) == n {
			p.unsorted = p.below + p.beyond.listed
		}
		p.countFree()
		p.gains++
		return false
	}
	for range p.Sweep {
		switch {
		case p.beyond.listed == 0:
			p.unsorted = 0
			return true
		case p.unsorted == 0: // Take has taken some from behind the front
			p.unsorted = p.below + p.beyond.listed
		}
		if i := p.pop(); i >= p.limit {
			p.beyond.listed--
			p.withdraw(i)
		} else {
			p.pushBack(i)
		}
	}
	return false
}

// Widen lets all chunks be used. It reports whether that is done.
func (p *Pool) Widen() (done bool) {
	p.below += p.beyond.listed
	p.beyond.free -= p.beyond.listed
	p.Obsolete += p.beyond.obsolete
	p.beyond.listed, p.beyond.obsolete, p.beyond.bad = 0, 0, 0
	p.limit, p.unsorted, p.keep = format.ChunkNumber(len(p.Chunks)), 0, 0
	for n := 0; n < p.Sweep && p.withdrawn != none; n++ {
		i := p.popWithdrawn()
		p.noteFirst(i)
		p.Chunks[i].State = Free
		p.pushBack(i)
		p.below++
	}
	p.countFree()
	p.gains++
	p.Changes++
	return p.withdrawn == none
}

// Extend adds chunks, so that there are n. They are withdrawn. No checkpoint may be under way.
func (p *Pool) Extend(n int) {
	chunks := make([]Chunk, n)
	first := copy(chunks, p.Chunks)
	p.Chunks = chunks
	for i := n - 1; i >= first; i-- {
		p.withdraw(format.ChunkNumber(i))
	}
	p.beyond.free += n - first
	words := (n + 63) / 64
	p.noted = append(p.noted, make([]uint64, max(0, words-len(p.noted)))...)
	p.unread = append(p.unread, make([]uint64, max(0, words-len(p.unread)))...)
}

// Truncate removes the chunks from the limit on, which hold nothing. Narrow has ended, and no checkpoint is under way.
func (p *Pool) Truncate() {
	invariants.Check(p.Beyond() == len(p.Chunks)-int(p.limit) && p.beyond.listed == 0,
		"chunks: one that is taken away is in use")
	for i := p.limit; int(i) < len(p.Chunks); i++ {
		p.unread[i>>6] &^= 1 << (i & 63)
	}
	p.Chunks = slices.Clone(p.Chunks[:p.limit]) // the memory of the others is given back
	words := (len(p.Chunks) + 63) / 64
	p.noted, p.unread = slices.Clone(p.noted[:words]), slices.Clone(p.unread[:words])
	p.Bad -= p.beyond.bad
	p.beyond, p.withdrawn, p.keep = beyond{}, none, 0
	p.countFree()
	p.gains++
}

// EmptyNext makes the first chunk of those from number from on that can be emptied a victim, and returns it with the
// number of the one behind it. It goes through Sweep chunks at most; if it finds none, v is -1. mostKeys and mostValues
// bound what may be live in it. left has what the chunks that were passed still hold.
func (p *Pool) EmptyNext(from format.ChunkNumber, mostKeys, mostValues int64, left *Left) (v, next format.ChunkNumber) {
	end := min(from+format.ChunkNumber(p.Sweep), format.ChunkNumber(len(p.Chunks)))
	for i := from; i < end; i++ {
		c := &p.Chunks[i]
		most := mostValues
		if c.Kind == format.KeyLog {
			most = mostKeys
		}
		switch {
		case c.State == Sealed && c.Pins == 0 && int64(c.Live) <= most:
			c.State = Victim
			left.Used++
			return i, i + 1
		case c.State == Damaged && c.Pins == 0:
			left.Damaged++
		case c.State == Sealed || c.State == Victim || c.State == Damaged ||
			c.State == Open && c.Kind != format.Checkpoint:
			left.Used++
		case c.State == Obsolete || c.State == PendingFree || c.State == Open:
			left.Held++
		}
	}
	return none, end
}

// Left says what chunks hold that are to be emptied: Used ones have live records, Damaged ones some that are lost, and
// Held ones are free after the next checkpoint.
type Left struct{ Used, Damaged, Held int }

// pop takes the first chunk off the list of free chunks.
func (p *Pool) pop() format.ChunkNumber {
	i := p.freeList
	p.freeList = p.nextFree(i)
	p.unsorted = max(0, p.unsorted-1)
	return i
}

// pushBack puts a chunk at the end of the list of free chunks.
func (p *Pool) pushBack(i format.ChunkNumber) {
	p.Chunks[i].Live = noNext
	if p.freeList == none {
		p.freeList = i
	} else {
		p.Chunks[p.freeEnd].Live = uint32(i)
	}
	p.freeEnd = i
}

// withdraw makes a chunk from the limit on, which is free and on no list, one that is withdrawn.
func (p *Pool) withdraw(i format.ChunkNumber) {
	p.noteFirst(i)
	c := &p.Chunks[i]
	c.State, c.Live = Withdrawn, uint32(p.withdrawn)
	p.withdrawn = i
}

// popWithdrawn takes the first chunk off the list of those that are withdrawn.
func (p *Pool) popWithdrawn() format.ChunkNumber {
	i := p.withdrawn
	p.withdrawn = p.nextFree(i)
	p.beyond.free--
	return i
}

// takeKept takes a chunk from the limit on, because there is none below it.
func (p *Pool) takeKept() format.ChunkNumber {
	if p.withdrawn != none {
		return p.popWithdrawn()
	}
	p.beyond.free--
	p.beyond.listed--
	return p.pop() // there are none below the limit on the list
}

// For returns the budget that the partition would have with n chunks and a SegTbl of tableBytes.
func (b *Budget) For(n, tableBytes int) Budget {
	c := *b
	c.setTable(n, n-b.pool.Bad, tableBytes)
	return c
}

// ChunksFor is how many chunks there may be for a checkpoint to take no more than so many chunks, by the measure of
// CheckpointChunks.
func (b *Budget) ChunksFor(checkpointChunks, tableBytes int) int64 {
	pages := int64(checkpointChunks-1) * b.pages
	return max(0, pages*format.PagePayloadBytes-format.SummaryBytes-int64(tableBytes)) / format.ChunkEntryBytes
}
