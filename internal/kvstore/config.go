package kvstore

import (
	"errors"
	"fmt"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/lookup"
	"jbofd/internal/kvstore/space"
	"jbofd/internal/uuid"
)

// Config describes a Store.
type Config struct {
	// PartitionBytes is the length of the partition, a multiple of BlockSize.
	PartitionBytes int64
	// BlockSize is the block size of the device, 512 to 4096.
	BlockSize int
	// SegTbl is the memory of the table, 5 bytes for each segment that there may be. It is touched only as far as the
	// data has grown, so that it can be a large mapping outside of the Go heap. The store clears what it uses.
	SegTbl []byte
	// KeysPerSegment is the average number of objects at which the table grows; 0: 13. With many tombstones or
	// identities it grows earlier.
	KeysPerSegment int
	// Requests is how many reading requests, and how many writing ones, may be in progress; 0: 256. Of these an eighth,
	// 8 at most, is kept for Deletes.
	Requests int
	// GroupBytes is the length at which a group of records is written; 0: 64 KiB.
	GroupBytes int
	// GroupDelayNS is how long a group may wait for more records while another group of its log is being written; 0: 50
	// µs. Otherwise a group does not wait.
	GroupDelayNS int64
	// FUA asks for writes that survive a loss of power. It is for devices with a volatile cache.
	FUA bool
	// Volatile: the device has a volatile cache and FUA is not set, so that a loss of power takes what was written
	// since the last checkpoint. Checkpoints are flushed.
	Volatile bool
	// CheckpointBytes is how much key log is written between checkpoints; 0: 768 bytes for each chunk, at least 8
	// chunks.
	CheckpointBytes int64
	// Compactions is how many chunks may be emptied at once, 2 to 16; 0: 3. Each takes a buffer of 1.25 MiB. LEED calls
	// it the number S of parallel sub-compactions.
	Compactions int
	// ScrubBytesPerSec is the rate at which the background scrub reads; 0: there is no scrub.
	ScrubBytesPerSec int64
	// Alloc returns memory for I/O; nil: the heap's. It is called while the partition is opened, and while the store
	// serves only for segments that become longer than 4 KiB.
	Alloc space.Alloc
	// AcceptLoss opens the partition although writes since the last checkpoint are lost. It is the Token of the Loss
	// that the LossError of the last attempt states; a partition that has lost something else does not open.
	AcceptLoss string

	// Format makes a new store on the partition, whatever it contains. The fields below are for that.
	Format bool
	UUID   uuid.UUID
	// HashSeed should be random and secret, so that nobody can choose keys that belong to one segment. Checksums start
	// from it, too: with the seed of a store that was on the partition before, that store's records would count as this
	// one's.
	HashSeed uint64
	// ChunkBytes is the size of a chunk; 0: 2 MiB, or 4 MiB for partitions of more than 4 GiB.
	ChunkBytes int64

	// many: from this number of chunks on, the opened ones are listed in the Openings; 0: manyChunks.
	many int
	// longBytes is the average length of the records of segments at which the table grows although it has enough for
	// its objects: twice that of KeysPerSegment of the longest objects.
	longBytes int
	// growMost is how many chunks a partition that grows gets at once; 0: as many as a checkpoint has room for.
	growMost int64
	// eager: the table becomes shorter as soon as it has two segments more than it needs.
	eager bool
}

// ErrConfig is wrapped by New for a Config that is out of bounds.
var ErrConfig = errors.New("kvstore: invalid configuration")

// complete fills in the defaults and checks the rest.
//
// Errors: ErrConfig naming the field.
func (c *Config) complete() error {
	setDefault(&c.KeysPerSegment, 13)
	setDefault(&c.Requests, 256)
	setDefault(&c.Compactions, 3)
	setDefault(&c.GroupBytes, 64<<10)
	setDefault(&c.GroupDelayNS, 50e3)
	setDefault(&c.many, manyChunks)
	if c.Alloc == nil {
		c.Alloc = space.HeapAlloc
	}
	if c.ChunkBytes == 0 {
		c.ChunkBytes = 2 << 20
		if c.PartitionBytes > 4<<30 {
			c.ChunkBytes = 4 << 20
		}
	}
	powerOfTwo := func(n int64) bool { return n > 0 && n&(n-1) == 0 }
	for _, f := range []struct {
		ok    bool
		field string
		got   any
		want  string
	}{
		{c.BlockSize >= 512 && c.BlockSize <= 4096 && powerOfTwo(int64(c.BlockSize)), "BlockSize", c.BlockSize,
			"a power of two from 512 to 4096"},
		{c.BlockSize > 0 && c.PartitionBytes%int64(c.BlockSize) == 0 && c.PartitionBytes <= format.MaxPartitionBytes,
			"PartitionBytes", c.PartitionBytes, "whole blocks, at most 4 TiB"},
		{c.ChunkBytes >= format.MinChunkBytes && c.ChunkBytes <= format.MaxChunkBytes && powerOfTwo(c.ChunkBytes),
			"ChunkBytes", c.ChunkBytes, "a power of two from 128 KiB to 64 MiB"},
		{c.KeysPerSegment >= 1 && c.KeysPerSegment <= 256, "KeysPerSegment", c.KeysPerSegment, "1 to 256"},
		{c.Requests >= 1 && c.Requests <= 1<<15, "Requests", c.Requests, "1 to 32768"},
		{c.Compactions >= 2 && c.Compactions <= 16, "Compactions", c.Compactions, "2 to 16"},
		{c.GroupBytes >= 512 && c.GroupBytes <= format.MinChunkBytes/2, "GroupBytes", c.GroupBytes, "512 to 65536"},
		{len(c.SegTbl) >= lookup.EntryBytes*lookup.FirstSegments, "length of SegTbl", len(c.SegTbl),
			"room for 16 segments"},
	} {
		if !f.ok {
			return fmt.Errorf("%w: %s is %v, want %s", ErrConfig, f.field, f.got, f.want)
		}
	}
	c.GroupBytes = max(c.GroupBytes, c.BlockSize)
	c.longBytes = 2 * (format.SegmentHeaderBytes + 2*format.KeyUnit + c.KeysPerSegment*maxItemBytes)
	return nil
}

func setDefault[T int | int64](v *T, d T) {
	if *v == 0 {
		*v = d
	}
}
