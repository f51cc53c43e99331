// Package check reads a key-value partition that nobody has open, and says what in it is sound, damaged and lost. It
// writes nothing.
//
//	recovery ──> chunks of value logs: where sound records begin ──> chunks of the key log: what refers to them
//
// What the partition contains is found out by the recovery that a store opens it with, and records by the walk with
// which compaction reads them.
package check

import (
	"errors"
	"fmt"
	"math/bits"
	"slices"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/lookup"
	"jbofd/internal/kvstore/recovery"
	"jbofd/internal/kvstore/space"
	"jbofd/internal/units"
)

// Config describes a check.
type Config struct {
	// PartitionBytes is the length of the partition, or of its extent. BlockSize is the device's.
	PartitionBytes int64
	BlockSize      int
	// SegTbl is memory for the table: lookup.TableBytes of as many segments as there may be.
	SegTbl []byte
	// Alloc returns memory for Read.
	Alloc space.Alloc
	// Read reads whole blocks of the partition.
	Read func(offset units.ExtentOffset, buf []byte) error
	// MaxKeys is how many keys of damaged values and of lost segments are named at most.
	MaxKeys int
	// Progress, if set, is called after each chunk: how many of how many were read.
	Progress func(read, of int)
}

// Report is what a check has found.
type Report struct {
	UUID string `json:"uuid"`
	// FormatVersion is that of the superblock. SizeBytes is the length of the partition.
	FormatVersion uint32 `json:"formatVersion"`
	SizeBytes     int64  `json:"sizeBytes"`
	// Objects are the keys that exist, Tombstones those that were deleted and are remembered, Segments the segments
	// that have keys.
	Objects    int64 `json:"objects"`
	Tombstones int64 `json:"tombstones"`
	Segments   int64 `json:"segments"`
	// SoundValueBytes is the length of the values that can be read.
	SoundValueBytes int64 `json:"soundValueBytes"`
	// Chunks are all, UsedChunks those of logs, FreeChunks those that can be written. BadChunks are not used, because
	// they could not be read.
	Chunks     int `json:"chunks"`
	UsedChunks int `json:"usedChunks"`
	FreeChunks int `json:"freeChunks"`
	BadChunks  int `json:"badChunks"`

	// OneSuperblock: the other copy is damaged, or older than this one. LostHeaders are chunk headers that cannot be
	// read or are damaged. Nothing is lost with either. UnreadableBlocks is how many blocks of logs the drive does not
	// read; what was lost with them is counted below.
	OneSuperblock    bool `json:"oneSuperblock"`
	LostHeaders      int  `json:"lostHeaders"`
	UnreadableBlocks int  `json:"unreadableBlocks"`

	// Loss states what is missing of what was written since the last checkpoint, with which the namespace is not
	// served before an operator accepts it; empty: nothing. The rest of the report is then about what is left.
	Loss string `json:"loss,omitempty"`
	// DamagedValues is how many keys have values that are damaged or unreadable, DamagedBytes their length.
	DamagedValues int64 `json:"damagedValues"`
	DamagedBytes  int64 `json:"damagedBytes"`
	// LostSegments is how many segments are damaged or unreadable, with all keys that they had. LossySegments have lost
	// keys before, and have only what was written since.
	LostSegments  int64 `json:"lostSegments"`
	LossySegments int64 `json:"lossySegments"`
	// DamagedKeys are keys of damaged values, LostKeys keys that older records of lost segments have; these may have
	// been deleted since. Both as text, escaped where it is none, and no more than Config.MaxKeys.
	DamagedKeys []string `json:"damagedKeys,omitempty"`
	LostKeys    []string `json:"lostKeys,omitempty"`
}

// Sound reports that nothing is damaged or lost.
func (r *Report) Sound() bool {
	return r.Loss == "" && r.DamagedValues == 0 && r.LostSegments == 0 && r.LossySegments == 0
}

// ErrNotOpened is wrapped by the errors that say why a partition could not be opened at all.
var ErrNotOpened = errors.New("the partition cannot be opened")

// checker is a check under way.
type checker struct {
	Config
	Report
	image *recovery.Image
	buf   []byte
	read  int // chunks
	// starts has for each chunk of a value log where its sound records begin, in order: 4 bytes a value.
	starts map[format.ChunkNumber][]uint32
	// drops are the ranges that were dropped and may not be swept yet.
	drops lookup.Drops
	// seen has a bit for each segment whose newest record was found.
	seen []byte
}

// Run checks a partition.
//
// Errors: ErrNotOpened with the error of the recovery; space.ErrNoMemory.
func Run(cfg Config) (Report, error) {
	c := &checker{Config: cfg, starts: map[format.ChunkNumber][]uint32{}}
	if err := c.recover(); err != nil {
		return c.Report, fmt.Errorf("%w: %w", ErrNotOpened, err)
	}
	sb := c.image.Super
	c.UUID, c.FormatVersion, c.SizeBytes = sb.UUID().String(), sb.Version(), sb.PartitionBytes()
	c.OneSuperblock, c.LostHeaders = c.image.OneCopy, c.image.LostHeaders
	c.drops = sb.Drops(nil)
	c.countChunks()
	mem := space.Buffers{Alloc: cfg.Alloc}
	longest := int(min(format.MaxValueBytes(format.MaxValue), int(sb.ChunkBytes())))
	c.buf = mem.Take("a chunk that is checked", recovery.WalkBytes(int(sb.ChunkBytes()), longest))
	if mem.Err != nil {
		return c.Report, mem.Err
	}
	for i := range c.image.Pool.Chunks {
		c.walk(format.ChunkNumber(i), format.ValueLog, c.value)
	}
	c.seen = make([]byte, c.image.Table.Len()/8+1)
	for i := range c.image.Pool.Chunks {
		c.walk(format.ChunkNumber(i), format.KeyLog, c.segment)
	}
	c.findLost()
	slices.Sort(c.DamagedKeys)
	slices.Sort(c.LostKeys)
	return c.Report, nil
}

// recover finds out what the partition contains. If something is lost it is stated, and what is left is looked at.
func (c *checker) recover() error {
	for token := ""; ; {
		m := recovery.New(recovery.Config{PartitionBytes: c.PartitionBytes, BlockSize: c.BlockSize, SegTbl: c.SegTbl,
			Alloc: c.Alloc, AcceptLoss: token})
		for m.Image() == nil && m.Err() == nil {
			for _, r := range m.Next(nil) {
				m.Done(r.Slot, c.Read(r.Offset, r.Buf))
			}
		}
		var loss *recovery.LossError
		switch err := m.Err(); {
		case err == nil:
			c.image = m.Image()
			return nil
		case !errors.As(err, &loss) || token != "":
			return err
		default:
			token, c.Loss = loss.Token(), loss.Loss.String()
		}
	}
}

// countChunks counts the chunks by their states.
func (c *checker) countChunks() {
	c.Chunks = len(c.image.Pool.Chunks)
	for i := range c.image.Pool.Chunks {
		switch ch := &c.image.Pool.Chunks[i]; {
		case ch.State == space.Bad:
			c.BadChunks++
		case c.isUsed(ch):
			c.UsedChunks++
		case ch.State == space.Free:
			c.FreeChunks++
		}
	}
}

// isUsed reports whether a chunk holds records.
func (c *checker) isUsed(ch *space.Chunk) bool {
	return (ch.Kind == format.KeyLog || ch.Kind == format.ValueLog) && ch.State != space.Free && ch.State != space.Bad
}

// walk goes through the sound records of a chunk, if it is of that kind.
func (c *checker) walk(i format.ChunkNumber, kind format.Kind, record func(rec []byte, at units.ExtentOffset)) {
	if ch := &c.image.Pool.Chunks[i]; ch.Kind != kind || !c.isUsed(ch) {
		return
	}
	w := recovery.NewWalk(c.image.Pool, c.image.Super.BlockSize(), c.buf)
	w.Begin(i)
	for !w.Ended() && !w.Failed {
		if at, buf := w.Piece(true); buf != nil {
			w.Read(c.Read(at, buf) == nil)
		}
		for {
			rec, at, sound := w.Next()
			if rec == nil && !w.Searching {
				break
			}
			if sound {
				record(rec, at)
			}
		}
	}
	c.UnreadableBlocks += w.Unreadable
	if c.read++; c.Progress != nil {
		c.Progress(min(c.read, c.UsedChunks), c.UsedChunks)
	}
}

// value notes where a sound value begins.
func (c *checker) value(_ []byte, at units.ExtentOffset) {
	i := c.image.Pool.Of(at)
	c.starts[i] = append(c.starts[i], uint32(c.image.Pool.Within(at)))
}

// isSound reports whether a sound value begins at a place.
func (c *checker) isSound(place units.ExtentOffset) bool {
	_, found := slices.BinarySearch(c.starts[c.image.Pool.Of(place)], uint32(c.image.Pool.Within(place)))
	return found
}

// segment looks at what a segment refers to, if it is the newest of its number.
func (c *checker) segment(rec []byte, at units.ExtentOffset) {
	seg, table := format.Segment(rec), &c.image.Table
	n := seg.Number()
	if n >= table.Len() || table.Get(n) != lookup.NewEntry(at, seg.ExtentBytes()) {
		return
	}
	c.seen[n/8] |= 1 << (n % 8)
	c.Segments++
	if seg.Lossy() {
		c.LossySegments++
	}
	var key []byte // the last one that belongs to the segment and exists
	length, sound := int64(0), true
	end := func() {
		switch {
		case key == nil:
		case sound:
			c.SoundValueBytes += length
		default:
			c.DamagedValues++
			c.DamagedBytes += length
			c.name(&c.DamagedKeys, key)
		}
	}
	for off := seg.First(); off < seg.LengthBytes(); {
		it := seg.Item(off)
		off += it.LengthBytes()
		if it.HasKey() {
			end()
			key, length, sound = nil, 0, true
			hash := format.HashKey(c.image.Super.HashSeed(), it.Key())
			switch {
			case table.Segment(hash) != n, c.drops.Covers(bits.Reverse64(hash), it.Version()):
			case it.Gone():
				c.Tombstones++
			default:
				c.Objects++
				key = it.Key()
			}
		}
		if key != nil && it.ValueLen() > 0 {
			length += int64(it.ValueLen())
			sound = sound && c.image.Pool.Contains(it.ValueOffset()) && c.isSound(it.ValueOffset())
		}
	}
	end()
}

// findLost counts the segments whose newest records were not found, and looks for their keys in older ones.
func (c *checker) findLost() {
	table := &c.image.Table
	lost := map[uint32]bool{}
	for n := range table.Len() {
		if table.Get(n) != 0 && c.seen[n/8]>>(n%8)&1 == 0 {
			lost[n] = true
		}
	}
	if c.LostSegments = int64(len(lost)); len(lost) == 0 || c.MaxKeys == 0 {
		return
	}
	named := map[string]bool{}
	for i := range c.image.Pool.Chunks {
		c.walk(format.ChunkNumber(i), format.KeyLog, func(rec []byte, _ units.ExtentOffset) {
			seg := format.Segment(rec)
			if !lost[seg.Number()] {
				return
			}
			for off := seg.First(); off < seg.LengthBytes(); {
				it := seg.Item(off)
				off += it.LengthBytes()
				if it.HasKey() && !it.Gone() && !named[string(it.Key())] &&
					table.Segment(format.HashKey(c.image.Super.HashSeed(), it.Key())) == seg.Number() {
					named[string(it.Key())] = true
					c.name(&c.LostKeys, it.Key())
				}
			}
		})
	}
}

// name adds a key to a list, if there is room.
func (c *checker) name(list *[]string, key []byte) {
	if len(*list) < c.MaxKeys {
		text := fmt.Sprintf("%q", key)
		*list = append(*list, text[1:len(text)-1])
	}
}
