package kvstore

import (
	"fmt"
	"testing"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/units"
)

// TestAValueOutsideOfAllChunksCanBeReplaced: an item of a valid segment names a place where no value can be. A Get
// reports it, and Puts and Deletes of the key work.
func TestAValueOutsideOfAllChunksCanBeReplaced(t *testing.T) {
	const size = 32 << 20
	for _, at := range []units.ExtentOffset{0, format.AreaStart - format.ValueUnit, size, format.MaxPartitionBytes} {
		for _, op := range []Op{Put, Delete} {
			t.Run(fmt.Sprintf("%d/%d", at, op), func(t *testing.T) {
				d := newInstant(t, Config{PartitionBytes: size, BlockSize: 512, ChunkBytes: 256 << 10})
				key := []byte("key")
				d.one(t, Request{Op: Put, Key: key, Value: make([]byte, 100)}, OK)
				e := d.s.tbl.Get(d.s.tbl.Segment(format.HashKey(d.s.hashSeed, key)))
				seg := format.Segment(d.disk[e.Offset():])
				seg.Item(seg.Find(key)).SetValueOffset(at)
				seg.Seal(d.s.pool.Seed(e.Offset()))

				d.one(t, Request{Op: Get, Key: key, Value: make([]byte, 100)}, Corrupt)
				if len(d.act.Damage) != 1 {
					t.Errorf("%d reports of damage, want 1", len(d.act.Damage))
				}
				d.one(t, Request{Op: op, Key: key, Value: make([]byte, 200)}, OK)
				want := OK
				if op == Delete {
					want = NotFound
				}
				d.one(t, Request{Op: Get, Key: key, Value: make([]byte, 200)}, want)
			})
		}
	}
}
