package kvstore

import (
	"errors"
	"testing"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/pipeline"
)

// TestAChunkIsUsedOnlyWhenABlockListsIt: although several chunks are opened at once where a block ends, and although
// blocks cannot be written.
func TestAChunkIsUsedOnlyWhenABlockListsIt(t *testing.T) {
	for seed := range Seeds(t, 4) {
		cfg := rangedConfigs[0]
		cfg.ListChunks()
		r := newRanged(t, seed, cfg)
		r.checkpoint()
		fails := 0
		r.fail = func(q *IO) error {
			if isList := q.Offset >= format.SuperblockBytes && q.Offset < format.AreaStart; isList &&
				q.Op == pipeline.Write && fails > 0 {
				fails--
				return errors.New("injected")
			}
			return nil
		}
		for round := range 300 {
			r.s.ListFew(1 + r.rng.IntN(4))
			if r.rng.IntN(4) == 0 {
				fails = int(seed%2) * r.rng.IntN(4)
			}
			for l := range r.s.logs {
				if r.rng.IntN(3) > 0 {
					r.s.openChunk(l)
				}
			}
			r.run()
			if list := r.s.Unlisted(r.disk); len(list) > 0 {
				t.Fatalf("round %d: chunks %v are used, and no block lists them", round, list)
			}
			if r.rng.IntN(20) == 0 {
				r.checkpoint()
			}
		}
	}
}
