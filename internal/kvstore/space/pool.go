// Package space manages the space of a partition: the state of each chunk and the bytes that are live in it, the choice
// of the chunk that compaction empties next, and the budget that says which log may take a free chunk. A chunk takes 16
// bytes of DRAM.
//
//	Free ──Take──> Open ──Seal──> Sealed ──Choose──> Victim ──Release──┐
//	 ^                              │ nothing in it is live            │
//	 │                              └──────────────────────────────────┤
//	 ├──────────────────────────────── if recovery does not read it ───┤
//	 └── PendingFree <──a checkpoint begins── Obsolete <── if it may ──┘
//	     until that checkpoint is durable
package space

import (
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
	// Damaged: a live record in the chunk is damaged. The chunk is never used again.
	Damaged
)

// Chunk is the state of a chunk. There is one for every chunk of the partition, so that its size counts: 16 bytes.
type Chunk struct {
	Epoch uint32
	// Live is the number of bytes of records in the chunk that are live or being written. In a free chunk it is the
	// index of the next free one.
	//
	// Invariant: exact, except in chunks with damaged records.
	Live uint32
	// AtCheckpoint is the committed part of Live when the last checkpoint began, or NotCounted if the chunk held no log
	// then.
	AtCheckpoint uint32
	// Pins counts what keeps the chunk from being released: values whose requests have not ended, and groups being
	// written.
	Pins  uint16
	State State
	Kind  format.Kind
}

// NotCounted is the AtCheckpoint of a chunk that was free, obsolete or part of a checkpoint.
const NotCounted = 1<<32 - 1

// Pool has the state of all chunks of a partition, the list of those that are free, and the sums over them.
type Pool struct {
	// Chunks are indexed by chunk number.
	Chunks []Chunk
	// Free and Obsolete count the chunks in these states.
	Free, Obsolete int
	// Live is the sum of Live of all chunks, KeyLive of those of the key log. KeyChunks is the number of those.
	Live, KeyLive int64
	KeyChunks     int
	// LastEpoch is the epoch of the chunk that was taken last.
	LastEpoch uint32
	// KeyEpoch is the epoch from which on recovery reads chunks of the key log.
	KeyEpoch uint32
	// Hold: recovery might need any chunk, so that none is used again before the next checkpoint.
	Hold bool
	// Changes increases whenever there may be more space for those who wait for it.
	Changes uint64

	salt     uint32
	shift    uint               // log2 of the size of chunks
	freeList format.ChunkNumber // a stack
	look     int                // the chunk at which the last Choose stopped
}

const none = -1

// New returns a pool in which all chunks of the partition with that superblock are free.
func New(sb format.Superblock) *Pool {
	p := &Pool{salt: sb.Salt(), freeList: none}
	for int64(1)<<p.shift < sb.ChunkBytes() {
		p.shift++
	}
	n := (sb.PartitionBytes() - format.AreaStart - format.SuperblockBytes) >> p.shift
	p.Chunks = make([]Chunk, max(n, 0))
	for i := len(p.Chunks) - 1; i >= 0; i-- {
		p.free(format.ChunkNumber(i))
	}
	return p
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
func (p *Pool) SeedOf(epoch uint32, offset units.ExtentOffset) uint32 {
	return format.Seed(p.salt, epoch, offset)
}

// Take opens a free chunk, which must exist, for a log or a checkpoint.
func (p *Pool) Take(kind format.Kind) format.ChunkNumber {
	i := p.freeList
	invariants.Check(i != none, "chunks: none is free")
	p.freeList = format.ChunkNumber(p.Chunks[i].Live)
	p.Free--
	p.LastEpoch++
	p.Chunks[i] = Chunk{Epoch: p.LastEpoch, State: Open, Kind: kind, AtCheckpoint: p.Chunks[i].AtCheckpoint}
	if kind == format.KeyLog {
		p.KeyChunks++
	}
	return i
}

// Seal closes an open chunk, and releases it if nothing in it is live.
func (p *Pool) Seal(i format.ChunkNumber) {
	p.Chunks[i].State = Sealed
	p.releaseIfEmpty(i)
}

// AddLive adds n bytes to those that are live in chunk i.
func (p *Pool) AddLive(i format.ChunkNumber, n int) {
	p.Chunks[i].Live += uint32(n)
	p.count(i, int64(n))
}

// SubLive subtracts n bytes from those that are live in the chunk at an offset, and releases the chunk if it is sealed
// and nothing is left.
func (p *Pool) SubLive(offset units.ExtentOffset, n int) {
	i := p.Of(offset)
	c := &p.Chunks[i]
	invariants.Check(c.State != Free && c.Live >= uint32(n), "chunks: more bytes die in a chunk than live in it")
	c.Live -= uint32(n)
	p.count(i, -int64(n))
	p.releaseIfEmpty(i)
}

// Pin keeps chunk i from being released. Unpin undoes it.
func (p *Pool) Pin(i format.ChunkNumber) { p.Chunks[i].Pins++ }

// Unpin undoes one Pin.
func (p *Pool) Unpin(i format.ChunkNumber) {
	c := &p.Chunks[i]
	invariants.Check(c.Pins > 0, "chunks: one is not pinned")
	c.Pins--
	p.releaseIfEmpty(i)
}

// releaseIfEmpty releases a chunk that is sealed, not pinned, and has nothing live.
func (p *Pool) releaseIfEmpty(i format.ChunkNumber) {
	if c := &p.Chunks[i]; c.State == Sealed && c.Live == 0 && c.Pins == 0 {
		p.Release(i)
	}
}

// Release frees a chunk in which nothing is live, or makes it obsolete if recovery might still read it.
func (p *Pool) Release(i format.ChunkNumber) {
	c := &p.Chunks[i]
	// After a crash or a failed write the count may include bytes of values that no segment refers to. The chunk was
	// walked through and nothing in it is live, so that the rest of the count is theirs.
	p.count(i, -int64(c.Live))
	c.Live = 0
	if c.Kind == format.KeyLog && c.Epoch >= p.KeyEpoch || p.Hold {
		c.State = Obsolete
		p.Obsolete++
		p.Changes++
		return
	}
	p.free(i)
}

// Return frees a chunk at once. It must hold nothing that recovery reads: a checkpoint that is not the last, or a chunk
// whose header could not be written.
func (p *Pool) Return(i format.ChunkNumber) {
	p.count(i, -int64(p.Chunks[i].Live))
	p.free(i)
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
	p.freeList = i
	p.Free++
	p.Changes++
}

// BeginCheckpoint notes in each chunk what is live. Obsolete chunks become pending free.
func (p *Pool) BeginCheckpoint() {
	for i := range p.Chunks {
		c := &p.Chunks[i]
		if c.State == Obsolete {
			c.State = PendingFree
		}
		if c.AtCheckpoint = c.Live; c.State == Free || c.State == PendingFree || c.Kind == format.Checkpoint {
			c.AtCheckpoint = NotCounted
		}
	}
	p.Obsolete = 0
}

// Exclude subtracts n bytes, which are live but not committed, from the AtCheckpoint of the chunk at an offset. It is
// called when a checkpoint has just begun.
func (p *Pool) Exclude(offset units.ExtentOffset, n int) {
	p.Chunks[p.Of(offset)].AtCheckpoint -= uint32(n)
}

// EndCheckpoint ends what BeginCheckpoint began. If the checkpoint is durable, as done says, the chunks that are
// pending free are freed; otherwise they are obsolete again.
func (p *Pool) EndCheckpoint(done bool) {
	for i := range p.Chunks {
		switch {
		case p.Chunks[i].State != PendingFree:
		case done:
			p.free(format.ChunkNumber(i))
		default:
			p.Chunks[i].State = Obsolete
			p.Obsolete++
		}
	}
	p.Changes++
}

// Recovered completes a pool in which recovery has set Epoch, Live, Kind and State (Free, Open or Sealed) of every
// chunk, and KeyEpoch and Hold: it computes the sums and the list of free chunks, and releases the sealed chunks in
// which nothing is live.
func (p *Pool) Recovered() {
	p.Free, p.Live, p.KeyLive, p.KeyChunks, p.freeList = 0, 0, 0, 0, none
	for i := len(p.Chunks) - 1; i >= 0; i-- {
		if p.Chunks[i].Kind == format.KeyLog {
			p.KeyChunks++
		}
		if p.Chunks[i].State == Free {
			p.free(format.ChunkNumber(i))
		} else {
			p.count(format.ChunkNumber(i), int64(p.Chunks[i].Live))
		}
	}
	for i := range p.Chunks {
		p.releaseIfEmpty(format.ChunkNumber(i))
	}
}

// minGainPart: emptying a chunk must win at least this part of it. Less is lost again to padding when its records are
// moved.
const minGainPart = 40

// maxCompared bounds how many chunks Choose compares. Among so many there is always one that is nearly as good as the
// best.
const maxCompared = 8192

// Weights are what it costs to move a live byte of a log, in any unit, and the number of bytes of records that fill a
// chunk. That is less than the chunk's size, because groups end with padding.
type Weights struct{ Key, Value, Fill int64 }

// Kinds are the logs whose chunks may be chosen.
type Kinds struct{ Keys, Values bool }

// Choose makes the sealed chunk that costs least for each byte won a victim and returns it, or -1 if there is nothing
// to win. It goes on where the last call stopped.
func (p *Pool) Choose(w Weights, of Kinds) format.ChunkNumber {
	best, least := format.ChunkNumber(none), 0.0
	i := p.look
	for range min(maxCompared, len(p.Chunks)) {
		if i++; i >= len(p.Chunks) {
			i = 0
		}
		c := &p.Chunks[i]
		cost, may := w.Value*int64(c.Live), of.Values
		if c.Kind == format.KeyLog {
			cost, may = w.Key*int64(c.Live), of.Keys
		}
		won := w.Fill - int64(c.Live)
		if c.State != Sealed || c.Pins > 0 || won < p.Bytes()/minGainPart || !may {
			continue
		}
		if each := float64(cost) / float64(won); best == none || each < least {
			best, least = format.ChunkNumber(i), each
		}
	}
	p.look = i
	if best != none {
		p.Chunks[best].State = Victim
	}
	return best
}
