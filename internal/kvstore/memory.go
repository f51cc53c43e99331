package kvstore

import (
	"jbofd/internal/kvstore/lookup"
	"jbofd/internal/kvstore/space"
)

// SegTblBytes is how much of the SegTbl's memory its entries take, from its beginning on. What is behind may be zeroed,
// but for the bits of changed units at the end.
func (s *Store) SegTblBytes() int64 { return int64(len(s.tbl.Bytes())) }

// TableBytes is the memory of the tables of segments and chunks.
func (s *Store) TableBytes() int64 {
	if s.pool == nil {
		return 0
	}
	return lookup.MemoryBytes(s.tbl.Len(), s.tbl.Max()) + space.MemoryBytes(len(s.pool.Chunks))
}
