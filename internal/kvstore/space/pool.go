// Package space manages the space of a partition: the state of each chunk and the bytes that are live in it, the choice
// of the chunk that compaction empties next, and the budget that says which log may take a free chunk. A chunk takes 16
// bytes of DRAM.
//
//	Free ──Take──> Open ──Seal──> Sealed ──Choose──> Victim ──Release──┐
//	 ^                              │ nothing in it is live            │
//	 │                              └──────────────────────────────────┤
//	 ├──────────────────────────────── if recovery does not read it ───┤
//	 └── PendingFree <──a checkpoint begins── Obsolete <── if it may ──┘
//	     until that checkpoint is durable        ^
//	                                 Bad ──Heal──┘
package space

import (
	"slices"

	"jbofd/internal/invariants"
	"jbofd/internal/kvstore/format"
	"jbofd/internal/units"
)

// State is the state of a chunk.
type State uint8

// States.
const (
	// Free: the chunk may be taken.
	Free State = iota
	// Open: a log appends to the chunk.
	Open
	// Sealed: nothing is appended to the chunk any more.
	Sealed
	// Victim: compaction is emptying the chunk.
	Victim
	// Obsolete: nothing in the chunk is live, but recovery may read it until the next checkpoint is durable.
	Obsolete
	// PendingFree: the chunk was Obsolete when the checkpoint began that is being written. It becomes Free with it.
	PendingFree
	// Damaged: the chunk was walked through, and not all that is live in it was found. Nothing is written to the chunk
	// until all of it has died.
	Damaged
	// Bad: the chunk could not be read when the partition was opened, and was not in use. It is not used before all of
	// it was written and read back.
	Bad
	// Withdrawn: the chunk is free, and lies from the limit of the pool on, so that it is not used.
	Withdrawn
)

// Chunk is the state of a chunk. There is one for every chunk of the partition, so that its size counts: 16 bytes.
type Chunk struct {
	// Live is the number of bytes of records in the chunk that are live or being written. In a free chunk it is the
	// index of the next free one.
	//
	// Invariant: exact, except in chunks with damaged records.
	Live uint32
	// Pins counts what keeps the chunk from being released: values whose requests have not ended, and groups being
	// written.
	Pins  uint16
	State State
	Kind  format.Kind
	Epoch Epoch
	// AtCheckpoint is the committed part of Live when the last checkpoint began, or NotCounted if the chunk held no log
	// then.
	AtCheckpoint Noted
}

// chunkBytes is the length of a Chunk.
const chunkBytes = 16

// Pool has the state of all chunks of a partition, the list of those that are free, and the sums over them.
type Pool struct {
	// Chunks are indexed by chunk number.
	Chunks []Chunk
	// Free, Obsolete, Bad and Damaged count the chunks in these states.
	Free, Obsolete, Bad, Damaged int
	// Live is the sum of Live of all chunks, KeyLive of those of the key log. KeyChunks is the number of those.
	Live, KeyLive int64
	KeyChunks     int
	// LastEpoch is the epoch of the chunk that was taken last.
	LastEpoch uint64
	// KeyEpoch is the epoch from which on recovery reads chunks of the key log.
	KeyEpoch uint64
	// Hold: recovery might need any chunk, so that none is used again before the next checkpoint.
	Hold bool
	// Changes increases whenever there may be more space for those who wait for it.
	Changes uint64
	// Doubtful are chunks whose headers could not be read, in order, for Recovered: those that are free are taken last.
	Doubtful []format.ChunkNumber
	// Sweep is how many chunks one call of NoteLive or EndCheckpoint goes through, which takes 10 to 50 µs.
	Sweep int
	// Wrong counts what was to be subtracted from a chunk that had less: it takes damage that no checksum has found.
	Wrong int64

	salt     uint32
	shift    uint               // log2 of the size of chunks
	freeList format.ChunkNumber // a list of the free chunks; the one that was freed last is taken first
	freeEnd  format.ChunkNumber // its last one, if there is one
	look     int                // the chunk at which the last Choose stopped
	// limit is the number of the first chunk that is not used, because a resize takes it away or has not added it yet.
	// beyond counts what there is from there on. unsorted are the free chunks at the front of the list among which some
	// may be that are not to be taken.
	limit    format.ChunkNumber
	beyond   beyond
	unsorted int
	// below is how many free chunks lie below the limit. Up to keep, chunks from the limit on count as Free, too; those
	// are on the list withdrawn.
	below, keep int
	withdrawn   format.ChunkNumber
	// soon is the rank up to which chunks of values are emptied soon.
	soon float64
	// gains increases with everything that makes more of a chunk worth emptying. fruitless are the searches since, for
	// each Kinds: a partition that is full must not be searched in each turn.
	gains     uint64
	fruitless [4]search
	// sweep is how far BeginCheckpoint or EndCheckpoint has come.
	sweep format.ChunkNumber
	// noting: a checkpoint begins, and what is live at this time is still to be noted in the chunks from sweep on. Of
	// these noted has a bit for each one in which something was changed since, so that it was noted before.
	noting bool
	noted  []uint64
	// unread has a bit for each chunk in which something could not be read since the partition was opened.
	unread []uint64
}

const none = -1

// noNext is Chunk.Live of the last free chunk: none as a ChunkNumber.
const noNext = 1<<32 - 1

// search is a search of Choose that has found nothing: how many chunks, up to that at look, were compared, when gains
// and Kinds.MostLive had these values.
type search struct {
	gains    uint64
	most     int64
	compared int
	look     int
}

// New returns a pool in which all chunks of the partition with that superblock are free.
func New(sb format.Superblock) *Pool {
	p := &Pool{salt: sb.Salt(), Sweep: 8192, freeList: none, withdrawn: none}
	for int64(1)<<p.shift < sb.ChunkBytes() {
		p.shift++
	}
	n := (sb.PartitionBytes() - format.AreaStart - format.SuperblockBytes) >> p.shift
	words := (max(n, 0) + 63) / 64
	p.Chunks, p.noted, p.unread = make([]Chunk, max(n, 0)), make([]uint64, words), make([]uint64, words)
	p.limit = format.ChunkNumber(len(p.Chunks))
	for i := len(p.Chunks) - 1; i >= 0; i-- {
		p.free(format.ChunkNumber(i))
	}
	return p
}

// MemoryBytes is the memory of the states of so many chunks.
func MemoryBytes(chunks int) int64 {
	return int64(chunks)*chunkBytes + 2*8*int64((chunks+63)/64)
}

// Bytes is the size of a chunk.
func (p *Pool) Bytes() int64 { return 1 << p.shift }

// End is the offset of the end of a chunk.
func (p *Pool) End() format.ChunkOffset { return 1 << p.shift }

// Of returns the number of the chunk that contains an offset in the partition.
func (p *Pool) Of(offset units.ExtentOffset) format.ChunkNumber {
	return format.ChunkNumber((offset - format.AreaStart) >> p.shift)
}

// Within returns the offset in its chunk of an offset in the partition.
func (p *Pool) Within(offset units.ExtentOffset) format.ChunkOffset {
	return format.ChunkOffset(offset - p.At(p.Of(offset), 0))
}

// At returns the offset in the partition of an offset in chunk i.
func (p *Pool) At(i format.ChunkNumber, o format.ChunkOffset) units.ExtentOffset {
	return format.AreaStart + units.ExtentOffset(i)<<p.shift + units.ExtentOffset(o)
}

// Contains reports whether an offset in the partition lies in a chunk.
func (p *Pool) Contains(offset units.ExtentOffset) bool {
	return offset >= format.AreaStart && int(p.Of(offset)) < len(p.Chunks)
}

// Around returns the whole blocks that contain n bytes at an offset, cut off at the end of the chunk.
func (p *Pool) Around(offset units.ExtentOffset, n, blockSize int) (start units.ExtentOffset, length int) {
	block := units.ExtentOffset(blockSize)
	start = offset &^ (block - 1)
	end := min((offset+units.ExtentOffset(n)+block-1)&^(block-1), p.At(p.Of(offset), p.End()))
	return start, int(end - start)
}

// Seed returns the initial value of the checksum of a record at an offset.
func (p *Pool) Seed(offset units.ExtentOffset) uint32 {
	return p.SeedOf(p.Chunks[p.Of(offset)].Epoch, offset)
}

// SeedOf is Seed for the time when the chunk had the given epoch.
func (p *Pool) SeedOf(epoch Epoch, offset units.ExtentOffset) uint32 {
	return format.Seed(p.salt, epoch.N(), offset)
}

// NoteUnreadable notes that something in chunk i could not be read.
func (p *Pool) NoteUnreadable(i format.ChunkNumber) {
	if int(i) < len(p.Chunks) { // a resize may have taken it away since
		p.unread[i>>6] |= 1 << (i & 63)
	}
}

// Unreadable reports whether something in chunk i could not be read since the partition was opened.
func (p *Pool) Unreadable(i format.ChunkNumber) bool { return p.unread[i>>6]>>(i&63)&1 != 0 }

// maxPassed bounds how many free chunks Take passes over.
const maxPassed = 64

// Take opens a free chunk, which must exist, for a log or a checkpoint. The key log gets a chunk in which nothing was
// unreadable, if there is one nearby: if its end lay before a block that cannot be read, the next opening would have to
// take that block for the newest segments. The other logs write over such blocks, which often heals them.
func (p *Pool) Take(kind format.Kind) format.ChunkNumber {
	invariants.Check(p.Free > 0, "chunks: none is free")
	i := p.takeFree(kind)
	p.noteFirst(i)
	p.countFree()
	p.LastEpoch++
	invariants.Check(p.LastEpoch <= MaxEpoch, "chunks: there are no more epochs")
	p.Chunks[i] = Chunk{Epoch: NewEpoch(p.LastEpoch), State: Open, Kind: kind, AtCheckpoint: p.Chunks[i].AtCheckpoint}
	if kind == format.KeyLog {
		p.KeyChunks++
	}
	return i
}

// takeFree takes a chunk off the list of free chunks, or one from the limit on.
func (p *Pool) takeFree(kind format.Kind) format.ChunkNumber {
	if p.below == 0 {
		return p.takeKept()
	}
	for p.freeList >= p.limit {
		p.beyond.listed--
		p.withdraw(p.pop())
	}
	p.below--
	before, i := format.ChunkNumber(none), p.freeList
	if kind == format.KeyLog {
		for n := 0; p.Unreadable(i) || i >= p.limit; n++ {
			next := p.nextFree(i)
			if next == none || n == maxPassed {
				return p.pop()
			}
			before, i = i, next
		}
	}
	if before == none {
		return p.pop()
	}
	p.Chunks[before].Live = p.Chunks[i].Live
	if i == p.freeEnd {
		p.freeEnd = before
	}
	return i
}

// nextFree is the free chunk behind one on the list, or none.
func (p *Pool) nextFree(i format.ChunkNumber) format.ChunkNumber {
	return format.ChunkNumber(p.Chunks[i].Live)
}

// Seal closes an open chunk, and releases it if nothing in it is live.
func (p *Pool) Seal(i format.ChunkNumber) {
	p.Reseal(i)
	p.releaseIfEmpty(i)
}

// Reseal makes a chunk that was a victim, or damaged, one that may be chosen again.
func (p *Pool) Reseal(i format.ChunkNumber) {
	if p.Chunks[i].State == Damaged {
		p.Damaged--
	}
	p.Chunks[i].State = Sealed
	p.gains++
}

// AddLive adds n bytes to those that are live in chunk i.
func (p *Pool) AddLive(i format.ChunkNumber, n int) {
	p.noteFirst(i)
	p.Chunks[i].Live += uint32(n)
	p.count(i, int64(n))
}

// SubLive subtracts n bytes from those that are live in the chunk at an offset, and releases the chunk if nothing is
// left and nothing is being written to it. The offset and n may come from the drive, so that they are not relied on.
func (p *Pool) SubLive(offset units.ExtentOffset, n int) {
	i := p.Of(offset)
	c := &p.Chunks[i]
	if c.State == Free || c.State == Withdrawn {
		p.Wrong++
		return
	}
	p.noteFirst(i)
	if c.Live < uint32(n) {
		p.Wrong++
		n = int(c.Live)
	}
	c.Live -= uint32(n)
	p.gains++
	p.count(i, -int64(n))
	p.releaseIfEmpty(i)
}

// SetLive corrects the number of bytes that are live in a sealed or damaged chunk, and releases it if nothing is.
func (p *Pool) SetLive(i format.ChunkNumber, n int64) {
	p.noteFirst(i)
	c := &p.Chunks[i]
	n = max(0, min(n, p.Bytes()))
	p.count(i, n-int64(c.Live))
	c.Live = uint32(n)
	p.gains++
	p.releaseIfEmpty(i)
}

// Pin keeps chunk i from being released. Unpin undoes it.
func (p *Pool) Pin(i format.ChunkNumber) { p.Chunks[i].Pins++ }

// Unpin undoes one Pin.
func (p *Pool) Unpin(i format.ChunkNumber) {
	c := &p.Chunks[i]
	invariants.Check(c.Pins > 0, "chunks: one is not pinned")
	if c.Pins--; c.Pins == 0 {
		p.gains++
	}
	p.releaseIfEmpty(i)
}

// releaseIfEmpty releases a chunk that is sealed or damaged, not pinned, and has nothing live.
func (p *Pool) releaseIfEmpty(i format.ChunkNumber) {
	c := &p.Chunks[i]
	if c.State != Sealed && c.State != Damaged || c.Live != 0 || c.Pins != 0 {
		return
	}
	if c.State == Damaged {
		p.Damaged--
	}
	p.Release(i)
}

// Release frees a chunk in which nothing is live, or makes it obsolete if recovery might still read it.
func (p *Pool) Release(i format.ChunkNumber) {
	p.noteFirst(i)
	c := &p.Chunks[i]
	// After a crash or a failed write the count may include bytes of values that no segment refers to. The chunk was
	// walked through and nothing in it is live, so that the rest of the count is theirs.
	p.count(i, -int64(c.Live))
	c.Live = 0
	if c.Kind == format.KeyLog && c.Epoch.N() >= p.KeyEpoch || p.Hold {
		c.State = Obsolete
		p.countObsolete(i)
		p.Changes++
		return
	}
	p.free(i)
}

// countObsolete counts a chunk that has become obsolete.
func (p *Pool) countObsolete(i format.ChunkNumber) {
	if i < p.limit {
		p.Obsolete++
	} else {
		p.beyond.obsolete++
	}
}

// Return frees a chunk of a checkpoint that is not the last, at once.
func (p *Pool) Return(i format.ChunkNumber) {
	p.noteFirst(i)
	p.count(i, -int64(p.Chunks[i].Live))
	p.free(i)
}

// ReturnBad frees a chunk that could not be written, at once. Recovery must not need it. It is taken again only when
// there is no other: a write often heals a block, but if it does not, the chunk must not be in the way of all writes.
func (p *Pool) ReturnBad(i format.ChunkNumber) {
	p.Return(i)
	if p.freeList == i && p.freeEnd != i {
		p.freeList = p.nextFree(i)
		p.pushBack(i)
	}
}

// Heal makes a bad chunk obsolete, all of which can be read again: it is free with the next checkpoint.
func (p *Pool) Heal(i format.ChunkNumber) {
	p.noteFirst(i)
	c := &p.Chunks[i]
	invariants.Check(c.State == Bad && i < p.limit, "chunks: one is healed that is not bad")
	*c = Chunk{Epoch: c.Epoch, State: Obsolete, AtCheckpoint: c.AtCheckpoint}
	p.Bad--
	p.unread[i>>6] &^= 1 << (i & 63)
	p.countObsolete(i)
	p.Changes++
}

// SetDamaged makes a victim damaged: not all that is live in it was found.
func (p *Pool) SetDamaged(i format.ChunkNumber) {
	p.Chunks[i].State = Damaged
	p.Damaged++
}

// count adds n to the sums of live bytes, to which chunk i contributes.
func (p *Pool) count(i format.ChunkNumber, n int64) {
	p.Live += n
	if p.Chunks[i].Kind == format.KeyLog {
		p.KeyLive += n
	}
}

// free puts chunk i on the list of free chunks.
func (p *Pool) free(i format.ChunkNumber) {
	c := &p.Chunks[i]
	if c.Kind == format.KeyLog {
		p.KeyChunks--
	}
	// AtCheckpoint stays: a checkpoint that is being written describes the chunk as it was when the checkpoint began.
	*c = Chunk{Epoch: c.Epoch, State: Free, Kind: c.Kind, Live: uint32(p.freeList), AtCheckpoint: c.AtCheckpoint}
	p.Changes++
	switch {
	case i >= p.limit:
		p.withdraw(i)
		p.beyond.free++
	case p.unsorted > 0:
		p.pushBack(i)
		p.below++
	default:
		if p.freeList == none {
			p.freeEnd = i
		}
		p.freeList = i
		p.below++
	}
	p.countFree()
}

// BeginCheckpoint fixes what a checkpoint says of the chunks: what is live in each now, and that Obsolete chunks are
// pending free. That is noted by calls of NoteLive, or before something is changed in a chunk.
func (p *Pool) BeginCheckpoint() {
	p.sweep, p.noting = 0, true
	clear(p.noted)
	p.Obsolete, p.beyond.obsolete = 0, 0
}

// NoteLive notes what is live in some more chunks, and reports whether all are done. AtCheckpoint is valid then.
func (p *Pool) NoteLive() (done bool) {
	end := min(p.sweep+format.ChunkNumber(p.Sweep), format.ChunkNumber(len(p.Chunks)))
	for i := p.sweep; i < end; i++ {
		p.noteFirst(i)
	}
	p.sweep = end
	p.noting = int(end) < len(p.Chunks)
	return !p.noting
}

// noteFirst notes what is live in a chunk, before something is changed in it, if a checkpoint begins that has not come
// to the chunk yet.
func (p *Pool) noteFirst(i format.ChunkNumber) {
	if p.noting && i >= p.sweep {
		p.note(i)
	}
}

func (p *Pool) note(i format.ChunkNumber) {
	w, bit := &p.noted[i>>6], uint64(1)<<(i&63)
	if *w&bit != 0 {
		return
	}
	*w |= bit
	c := &p.Chunks[i]
	if c.State == Obsolete {
		c.State = PendingFree
	}
	if c.AtCheckpoint = noted(c.Live); c.State == Free || c.State == Withdrawn || c.State == PendingFree ||
		c.Kind == format.Checkpoint {
		c.AtCheckpoint = NotCounted
	}
}

// Exclude subtracts n bytes, which are live but not committed, from the AtCheckpoint of the chunk at an offset. It is
// called when a checkpoint has just begun.
func (p *Pool) Exclude(offset units.ExtentOffset, n int) {
	p.noteFirst(p.Of(offset))
	c := &p.Chunks[p.Of(offset)]
	c.AtCheckpoint = noted(c.AtCheckpoint.Bytes() - uint32(n))
}

// EndCheckpoint ends what BeginCheckpoint began, in several calls, the last of which returns true. If the checkpoint is
// durable, as done says, the chunks that are pending free are freed; otherwise they are obsolete again. No other
// checkpoint may begin meanwhile.
func (p *Pool) EndCheckpoint(done bool) (ended bool) {
	if int(p.sweep) == len(p.Chunks) {
		p.sweep = 0
	}
	end := min(p.sweep+format.ChunkNumber(p.Sweep), format.ChunkNumber(len(p.Chunks)))
	for i := p.sweep; i < end; i++ {
		switch {
		case p.Chunks[i].State != PendingFree:
		case done:
			p.free(i)
		default:
			p.Chunks[i].State = Obsolete
			p.countObsolete(i)
		}
	}
	p.sweep = end
	p.Changes++
	return int(end) == len(p.Chunks)
}

// Recovered completes a pool in which recovery has set Epoch, Live, Kind and State (Free, Open or Sealed) of every
// chunk, and KeyEpoch and Hold: it computes the sums and the list of free chunks, and releases the sealed chunks in
// which nothing is live.
func (p *Pool) Recovered() {
	p.Free, p.below, p.Live, p.KeyLive, p.KeyChunks, p.freeList = 0, 0, 0, 0, 0, none
	for _, i := range p.Doubtful {
		if p.Chunks[i].State == Free {
			p.free(i)
		}
	}
	for i := len(p.Chunks) - 1; i >= 0; i-- {
		if p.Chunks[i].Kind == format.KeyLog {
			p.KeyChunks++
		}
		switch p.Chunks[i].State {
		case Obsolete:
			p.Obsolete++
		case Bad:
			p.Bad++
		case Damaged:
			p.Damaged++
		}
		if p.Chunks[i].State != Free {
			p.count(format.ChunkNumber(i), int64(p.Chunks[i].Live))
		} else if _, doubtful := slices.BinarySearch(p.Doubtful, format.ChunkNumber(i)); !doubtful {
			p.free(format.ChunkNumber(i))
		}
	}
	for i := range p.Chunks {
		p.releaseIfEmpty(format.ChunkNumber(i))
	}
	p.Doubtful = nil
}
