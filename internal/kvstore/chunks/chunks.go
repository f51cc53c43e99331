// Package chunks is the space of a key-value partition: which chunk holds what, how much of it is
// live, which are free, and which is the best to empty. 16 bytes of DRAM a chunk.
//
//	Free ──Take──> Open ──Seal──> Sealed ──Choose──> Victim ──Release──┐
//	 ^                              │ nothing live                     │
//	 │                              └──────────────────────────────────┤
//	 └─────────────── Leaving <──checkpoint begins── Spent <───────────┘ or free at once
package chunks

import (
	"jbofd/internal/invariants"
	"jbofd/internal/kvstore/format"
)

// State is what may be done with a chunk.
type State uint8

// States.
const (
	// Free chunks may be taken.
	Free State = iota
	// Open ones are written to.
	Open
	// Sealed ones are not, any more.
	Sealed
	// Victim: it is being emptied.
	Victim
	// Spent: nothing in it is live, but recovery may need it until there is a checkpoint.
	Spent
	// Leaving: as Spent, until the checkpoint that is being written is done.
	Leaving
	// Bad: a live record in it is damaged. It is left alone.
	Bad
)

// Chunk is the state of a chunk. Its memory counts: it is 16 bytes.
type Chunk struct {
	Epoch uint32
	// Live is how many bytes of records in it are live or on their way; of a free one it is the next free one.
	// Invariant: exact, but for what is damaged.
	Live uint32
	// Then is what was committed of Live when the last checkpoint began, NotThen if the chunk held nothing that counts.
	Then uint32
	// Pins are values in it whose writers have not ended, and groups being written.
	Pins  uint16
	State State
	Kind  format.Kind
}

// NotThen is the Then of a chunk that was free or the checkpoint's.
const NotThen = 1<<32 - 1

// Pool is the chunks of a partition.
type Pool struct {
	// Chunks by number.
	Chunks []Chunk
	// Free and Spent count the chunks of these states.
	Free, Spent int
	// Live is the sum of all chunks' live bytes, KeyLive of those of the key log, which are KeyChunks.
	Live, KeyLive int64
	KeyChunks     int
	// LastEpoch is that of the chunk taken last.
	LastEpoch uint32
	// KeyEpoch: the chunks of the key log from this epoch on are what recovery reads.
	KeyEpoch uint32
	// Hold: recovery might read any chunk, so none may be used again before the next checkpoint.
	Hold bool
	// Changes counts what may let somebody go on who waits for space.
	Changes uint64

	salt     uint32
	shift    uint  // log2 of the size of chunks
	freeList int32 // a stack
	look     int   // where to go on choosing
}

const none = -1

// New is a pool of free chunks as a superblock describes it.
func New(sb format.Superblock) *Pool {
	p := &Pool{salt: sb.Salt(), freeList: none}
	for int64(1)<<p.shift < sb.ChunkBytes() {
		p.shift++
	}
	n := (sb.PartitionBytes() - format.AreaStart - format.SuperblockBytes) >> p.shift
	p.Chunks = make([]Chunk, max(n, 0))
	for i := len(p.Chunks) - 1; i >= 0; i-- {
		p.free(int32(i))
	}
	return p
}

// Bytes is the size of a chunk.
func (p *Pool) Bytes() int64 { return 1 << p.shift }

// Of returns the chunk that holds that place of the partition.
func (p *Pool) Of(offset int64) int32 { return int32((offset - format.AreaStart) >> p.shift) }

// Start is where a chunk begins in the partition.
func (p *Pool) Start(i int32) int64 { return format.AreaStart + int64(i)<<p.shift }

// Contains reports whether a record can be at that place.
func (p *Pool) Contains(offset int64) bool {
	return offset >= format.AreaStart && p.Of(offset) < int32(len(p.Chunks))
}

// Around returns the whole blocks around n bytes, not beyond the chunk.
func (p *Pool) Around(offset int64, n, blockSize int) (start int64, length int) {
	block := int64(blockSize)
	start = offset &^ (block - 1)
	end := min((offset+int64(n)+block-1)&^(block-1), p.Start(p.Of(offset))+p.Bytes())
	return start, int(end - start)
}

// Seed is where the checksum of a record at that place starts.
func (p *Pool) Seed(offset int64) uint32 { return p.SeedOf(p.Chunks[p.Of(offset)].Epoch, offset) }

// SeedOf is Seed for the life of the chunk that had that epoch.
func (p *Pool) SeedOf(epoch uint32, offset int64) uint32 { return format.Seed(p.salt, epoch, offset) }

// Take opens a free chunk; there is one.
func (p *Pool) Take(kind format.Kind) int32 {
	i := p.freeList
	invariants.Check(i != none, "chunks: none is free")
	p.freeList = int32(p.Chunks[i].Live)
	p.Free--
	p.LastEpoch++
	p.Chunks[i] = Chunk{Epoch: p.LastEpoch, State: Open, Kind: kind, Then: p.Chunks[i].Then}
	if kind == format.KeyLog {
		p.KeyChunks++
	}
	return i
}

// Seal closes an open chunk.
func (p *Pool) Seal(i int32) {
	p.Chunks[i].State = Sealed
	p.consider(i)
}

// Born counts n bytes in a chunk as live.
func (p *Pool) Born(i int32, n int) {
	p.Chunks[i].Live += uint32(n)
	p.count(i, int64(n))
}

// Died takes n bytes at that place off the live ones.
func (p *Pool) Died(offset int64, n int) {
	i := p.Of(offset)
	c := &p.Chunks[i]
	invariants.Check(c.State != Free && c.Live >= uint32(n), "chunks: more bytes die in a chunk than live in it")
	c.Live -= uint32(n)
	p.count(i, -int64(n))
	p.consider(i)
}

// Pin keeps a chunk from being used again.
func (p *Pool) Pin(i int32) { p.Chunks[i].Pins++ }

// Unpin undoes one Pin.
func (p *Pool) Unpin(i int32) {
	c := &p.Chunks[i]
	invariants.Check(c.Pins > 0, "chunks: one is not pinned")
	c.Pins--
	p.consider(i)
}

// consider releases a sealed chunk if nothing in it is live.
func (p *Pool) consider(i int32) {
	if c := &p.Chunks[i]; c.State == Sealed && c.Live == 0 && c.Pins == 0 {
		p.Release(i)
	}
}

// Release frees a chunk in which nothing is live, as soon as recovery does not need it.
func (p *Pool) Release(i int32) {
	c := &p.Chunks[i]
	// What is still counted had died without a witness.
	p.count(i, -int64(c.Live))
	c.Live = 0
	if c.Kind == format.KeyLog && c.Epoch >= p.KeyEpoch || p.Hold {
		c.State = Spent
		p.Spent++
		p.Changes++
		return
	}
	p.free(i)
}

// GiveBack frees a chunk at once: one that does not count on the SSD.
func (p *Pool) GiveBack(i int32) {
	p.count(i, -int64(p.Chunks[i].Live))
	p.free(i)
}

func (p *Pool) count(i int32, n int64) {
	p.Live += n
	if p.Chunks[i].Kind == format.KeyLog {
		p.KeyLive += n
	}
}

func (p *Pool) free(i int32) {
	c := &p.Chunks[i]
	if c.Kind == format.KeyLog {
		p.KeyChunks--
	}
	// A checkpoint that is being written goes on to tell what it was when that began.
	*c = Chunk{Epoch: c.Epoch, State: Free, Kind: c.Kind, Live: uint32(p.freeList), Then: c.Then}
	p.freeList = i
	p.Free++
	p.Changes++
}

// BeginCheckpoint: what is spent by now will be free when the checkpoint is done.
func (p *Pool) BeginCheckpoint() {
	for i := range p.Chunks {
		c := &p.Chunks[i]
		if c.State == Spent {
			c.State = Leaving
		}
		if c.Then = c.Live; c.State == Free || c.State == Leaving || c.Kind == format.Checkpoint {
			c.Then = NotThen
		}
	}
	p.Spent = 0
}

// Uncommitted leaves n bytes at that place, which are live but not committed, out of what the checkpoint that has just begun
// counts.
func (p *Pool) Uncommitted(offset int64, n int) { p.Chunks[p.Of(offset)].Then -= uint32(n) }

// EndCheckpoint ends what BeginCheckpoint began; done says whether there is a new checkpoint.
func (p *Pool) EndCheckpoint(done bool) {
	for i := range p.Chunks {
		switch {
		case p.Chunks[i].State != Leaving:
		case done:
			p.free(int32(i))
		default:
			p.Chunks[i].State = Spent
			p.Spent++
		}
	}
	p.Changes++
}

// Settle ends the reading of a pool from an SSD, which has set Epoch, Live, Kind and State (Free, Open or Sealed) of the
// chunks and nothing else.
func (p *Pool) Settle() {
	p.Free, p.Live, p.KeyLive, p.KeyChunks, p.freeList = 0, 0, 0, 0, none
	for i := len(p.Chunks) - 1; i >= 0; i-- {
		if p.Chunks[i].Kind == format.KeyLog {
			p.KeyChunks++
		}
		if p.Chunks[i].State == Free {
			p.free(int32(i))
		} else {
			p.count(int32(i), int64(p.Chunks[i].Live))
		}
	}
	for i := range p.Chunks {
		p.consider(int32(i))
	}
}

// leastWon is which part of a chunk must be won. Less is lost in moving.
const leastWon = 40

// lookAt is how many chunks Choose compares, so that its time is bounded. Among so many there is always one that is
// about as good as the best.
const lookAt = 8192

// Weights are what it costs to move a live byte of a log, in any unit, and how many bytes of records fill a chunk: less than
// its size, because groups end with padding.
type Weights struct{ Key, Value, Fill int64 }

// Kinds says which chunks may be chosen.
type Kinds struct{ Keys, Values bool }

// Choose takes the sealed chunk that costs least for each byte won as a victim, or none (-1) if there is nothing to
// win.
func (p *Pool) Choose(w Weights, of Kinds) int32 {
	best, least := int32(none), 0.0
	i := p.look
	for range min(lookAt, len(p.Chunks)) {
		if i++; i >= len(p.Chunks) {
			i = 0
		}
		c := &p.Chunks[i]
		cost, may := w.Value*int64(c.Live), of.Values
		if c.Kind == format.KeyLog {
			cost, may = w.Key*int64(c.Live), of.Keys
		}
		won := w.Fill - int64(c.Live)
		if c.State != Sealed || c.Pins > 0 || won < p.Bytes()/leastWon || !may {
			continue
		}
		if each := float64(cost) / float64(won); best == none || each < least {
			best, least = int32(i), each
		}
	}
	p.look = i
	if best != none {
		p.Chunks[best].State = Victim
	}
	return best
}
