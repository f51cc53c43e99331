package kvstore

import (
	"jbofd/internal/kvstore/format"
	"jbofd/internal/uuid"
)

// UUID identifies the partition, once it is open.
func (s *Store) UUID() uuid.UUID { return s.cfg.UUID }

// HashSeed is the seed of the store, with which it was formatted: see Config.HashSeed.
func (s *Store) HashSeed() uint64 { return s.hashSeed }

// Origin tells the store from others, also from one with the same UUID that was made anew: its keys are at other
// positions. It is not 0. See nvme.KVRange.Origin.
func (s *Store) Origin() uint32 { return max(1, uint32(format.HashKey(s.hashSeed, s.cfg.UUID[:]))) }
