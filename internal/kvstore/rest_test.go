package kvstore

import (
	"encoding/binary"
	"testing"
)

// TestAFullPartitionComesToRest: values of one length fill the partition until a Put is refused. After each Put
// compaction ends, whatever it can win. Keys without values, each written once, are there before, or not.
func TestAFullPartitionComesToRest(t *testing.T) {
	PlainOnly(t)
	const most = 20_000 // turns
	for _, size := range []int{1000, 20_000, 40_000} {
		for _, block := range []int{512, 4096} {
			for _, keys := range []int{0, 250} {
				d := newInstant(t, Config{PartitionBytes: 4 << 20, BlockSize: block, ChunkBytes: 128 << 10,
					KeysPerSegment: 256})
				d.put(0, keys, func(i int) uint64 { return uint64(i) }, nil, 1)
				d.last.Status = OK
				for n := keys; d.last.Status == OK; n++ {
					binary.LittleEndian.PutUint64(d.k[:], uint64(n))
					d.replies = 0
					d.s.Submit(&Request{Op: Put, Key: d.k[:], Value: make([]byte, size)})
					if turns := d.turns(most); turns == most || d.replies == 0 {
						t.Fatalf("values of %d bytes, blocks of %d, %d keys before: Put %d is not at rest after %d "+
							"turns, %d replies: %+v", size, block, keys, n, turns, d.replies, d.s.Stats())
					}
				}
			}
		}
	}
}
