package kvstore_test

import (
	"errors"
	"slices"
	"testing"

	"jbofd/internal/kvstore"
	"jbofd/internal/kvstore/format"
	"jbofd/internal/lab"
	"jbofd/internal/ssd"
)

// listing returns a partition that lists the chunks that it opens, few in a block.
func listing(t *testing.T, seed uint64) *model {
	cfg := variant(seed, 60)
	cfg.CheckpointBytes = 1 << 30
	cfg.ListChunks()
	m := newModel(newRig(t, seed, cfg), 500, nil)
	m.size = sizes(m.rng, 8000)
	m.s.ListFew(3)
	return m
}

// reopenCounting crashes and opens the partition again. It returns how many chunk headers were read.
func (m *model) reopenCounting() (headers int) {
	m.t.Helper()
	m.dev.Observe = func(q *ssd.Request) {
		if q.Op == ssd.Read && q.Len == 2*int64(m.cfg.BlockSize) && (q.Offset-format.AreaStart)%m.cfg.ChunkBytes == 0 &&
			!m.s.Ready() {
			headers++
		}
	}
	m.power = m.rng.IntN(2) == 0
	m.crash()
	m.reopen()
	m.dev.Observe = nil
	m.s.ListFew(3)
	return headers
}

// isDoubtful reports whether one of these blocks of the ring, or the one behind them, is damaged. If that was done in
// an earlier turn of the ring, and the block was not written since, it might be a part of the list for all that is
// known.
func (m *model) isDoubtful(list []int64) bool {
	size := int64(m.cfg.BlockSize)
	_, blocks := format.OpeningsOffset(0, int(size))
	last := list[len(list)-1]
	behind := format.SuperblockBytes + (last-format.SuperblockBytes+size)%(int64(blocks)*size)
	return slices.ContainsFunc(append(list, behind), func(at int64) bool {
		err := format.Openings(m.dev.Visible[at:][:size]).Check()
		return slices.Contains(m.dev.UnreadableBlocks(), at) || err != nil && !errors.Is(err, format.ErrBlank)
	})
}

// TestAnOpeningReadsTheHeadersOfListedChunks: only chunks that were opened since the last checkpoint, or soon before,
// have their headers read. Crashes at any time lose nothing. If a list is lost all headers are read.
func TestAnOpeningReadsTheHeadersOfListedChunks(t *testing.T) {
	kvstore.PlainOnly(t)
	t.Parallel()
	for seed := range kvstore.Seeds(t, times(3)) {
		m := listing(t, seed)
		all := int(m.s.Stats().Chunks)
		opened := func() int { // since now
			before := 0
			m.dev.Observe = func(q *ssd.Request) {
				if h := format.ChunkHeader(q.Buf); q.Op == ssd.Write && h.Begins() {
					before++
				}
			}
			m.random(1+m.rng.IntN(600), 24)
			m.dev.Observe = nil
			return before
		}
		for round := range 12 {
			opened()
			m.s.Checkpoint()
			m.settle()
			n := opened()
			m.settle()
			offsets, _ := m.s.Openings()
			damage := round % 4
			switch at := offsets[m.rng.IntN(len(offsets))]; damage {
			case 1:
				m.dev.Unreadable(at, 1)
			case 2:
				m.dev.Flip(at+m.rng.Int64N(50), 1)
			}
			doubtful := m.isDoubtful(offsets)
			got := m.reopenCounting()
			if damage%3 == 0 && got > n+8 && !doubtful {
				t.Errorf("round %d: %d of %d headers were read, and %d chunks were opened since the checkpoint", round,
					got, all, n)
			}
			if damage%3 != 0 && got != all && n > 0 {
				// The list may not have been written at all.
				t.Logf("round %d: %d of %d headers were read, with a lost list", round, got, all)
			}
		}
		for range 20 {
			m.crashIn, m.power = 1+m.rng.IntN(200), m.rng.IntN(2) == 0
			m.random(1e6, 1+m.rng.IntN(40))
			m.reopen()
			m.s.ListFew(3)
		}
	}
}

// TestMoreChunksAreOpenedThanCanBeListed: no checkpoint can be written while the logs open one chunk after the other.
func TestMoreChunksAreOpenedThanCanBeListed(t *testing.T) {
	kvstore.PlainOnly(t)
	for seed := range kvstore.Seeds(t, times(2)) {
		m := listing(t, seed)
		m.random(500, 24)
		m.s.Checkpoint()
		m.settle()
		m.s.ListFew(1)
		m.ops = updates
		m.dev.Fault = func(q *ssd.Request) lab.Outcome {
			if h := format.ChunkHeader(q.Buf); q.Op == ssd.Write && h.Begins() && h.Kind() == format.Checkpoint {
				return lab.FailUndone
			}
			return lab.Good
		}
		any := false
		for n := 0; !any; n++ {
			m.random(200, 24)
			if _, any = m.s.Openings(); n > 2000 {
				t.Fatal("there is always room for more")
			}
		}
		m.random(1000, 24)
		if headers := m.reopenCounting(); headers != int(m.s.Stats().Chunks) {
			t.Errorf("%d headers were read, want all", headers)
		}
		m.dev.Fault = nil
		for range 3 { // the lists begin anew
			m.random(300, 24)
			m.s.Checkpoint()
			m.settle()
		}
		if headers := m.reopenCounting(); headers > int(m.s.Stats().Chunks)/2 {
			t.Errorf("%d headers were read, and few chunks were opened", headers)
		}
	}
}
