package kvstore_test

import (
	"fmt"
	"slices"
	"testing"

	"jbofd/internal/kvstore"
	"jbofd/internal/kvstore/format"
	"jbofd/internal/lab"
	"jbofd/internal/ssd"
)

// headerDamage is what happens to the header of a chunk.
var headerDamage = []struct {
	name string
	do   func(m *model, at int64)
}{
	{"unreadable", func(m *model, at int64) { m.dev.Unreadable(at, int64(m.dev.BlockSize())) }},
	{"a flipped bit", func(m *model, at int64) {
		m.dev.Flip(at+m.rng.Int64N(format.ChunkHeaderBytes), uint(m.rng.IntN(8)))
	}},
	{"zeroes", func(m *model, at int64) { m.dev.Store(at, make([]byte, m.dev.BlockSize())) }},
}

// stopped returns a partition whose chunks have all uses, and their uses. It was stopped cleanly, or its process has
// died after more writes than its last checkpoint has.
func stopped(t *testing.T, seed uint64, clean bool) (m *model, uses []string) {
	cfg := variant(seed, 34)
	cfg.CheckpointBytes = 1 << 30 // no checkpoints but those asked for, and those that space needs
	r := newRig(t, seed, cfg)
	m = newModel(r, 450, sizes(r.rng, 4000))
	has := func(use string) bool { return slices.Contains(uses, use) }
	for m.random(2500, 24); ; {
		m.random(200, 16)
		if clean {
			m.stop()
		} else {
			m.finish()
		}
		uses = uses[:0]
		for i := range m.s.Stats().Chunks {
			uses = append(uses, m.s.UseOf(format.ChunkNumber(i)))
		}
		if has("free") && has("keys, sealed") && (clean || has("values, opened since") && has("keys, opened since") &&
			has("values, open then")) {
			break
		}
		if clean {
			m.reopen()
		}
	}
	m.crash()
	return m, uses
}

// TestNoChunkHeaderIsNeeded: whichever header is lost, and however, the partition opens with all keys and goes on
// working, also after another crash.
func TestNoChunkHeaderIsNeeded(t *testing.T) {
	kvstore.PlainOnly(t)
	t.Parallel()
	for seed := range kvstore.Seeds(t, times(2)) {
		for _, clean := range []bool{true, false} {
			base, uses := stopped(t, seed, clean)
			tested := map[string]int{}
			for i, use := range uses {
				if tested[use]++; tested[use] > kvstore.Sized(3, 2) && !*longFlag {
					continue
				}
				for _, damage := range headerDamage {
					name := fmt.Sprintf("clean stop %v, chunk %d (%s), %s", clean, i, use, damage.name)
					m := base.again(seed)
					damage.do(m, m.headerAt(i))
					if err := m.open(); err != nil {
						t.Errorf("%s: %v", name, err)
						continue
					}
					m.recount()
					m.compare(true)
					m.random(200, 16)
					m.settle()
					m.crash()
					m.reopen()
				}
			}
			t.Logf("clean stop %v: %v", clean, tested)
		}
	}
}

func (m *model) headerAt(chunk int) int64 { return format.AreaStart + int64(chunk)*m.cfg.ChunkBytes }

// TestAnyHeadersMayBeLostTogether: several headers are lost at once, of any use and in any way.
func TestAnyHeadersMayBeLostTogether(t *testing.T) {
	kvstore.PlainOnly(t)
	t.Parallel()
	for seed := range kvstore.Seeds(t, times(4)) {
		base, uses := stopped(t, seed, seed%3 == 0)
		for n := range kvstore.Sized(10, 6) {
			m := base.again(seed + uint64(n))
			lost := m.rng.Perm(len(uses))[:1+m.rng.IntN(len(uses))]
			slices.Sort(lost)
			for _, i := range lost {
				headerDamage[m.rng.IntN(len(headerDamage))].do(m, m.headerAt(i))
			}
			if err := m.open(); err != nil {
				t.Fatalf("chunks %v: %v", lost, err)
			}
			m.recount()
			m.compare(true)
			m.random(300, 16)
			m.settle()
			m.crash()
			m.reopen()
		}
	}
}

// TestAChunkThatCannotBeWrittenIsNotInTheWay: the headers of a few chunks, and the pages of one, can never be written
// from some time on when the store uses them. No request fails, and checkpoints are written.
func TestAChunkThatCannotBeWrittenIsNotInTheWay(t *testing.T) {
	kvstore.PlainOnly(t)
	t.Parallel()
	for seed := range kvstore.Seeds(t, times(4)) {
		r := newRig(t, seed, variant(seed, 34))
		m := newModel(r, 450, sizes(r.rng, 4000))
		// The chunks that are used last may not be used at all.
		headers, pages := map[int64]int{}, map[int64]int{}
		r.dev.Fault = func(q *ssd.Request) lab.Outcome {
			if q.Op != ssd.Write || q.Offset < format.AreaStart {
				return lab.Good
			}
			chunk := (q.Offset - format.AreaStart) / m.cfg.ChunkBytes
			bad, most := headers, 2
			if q.Offset > m.headerAt(int(chunk)) {
				if bad, most = pages, 1; q.Len != format.PageBytes {
					return lab.Good
				}
			}
			if bad[chunk] > 0 || len(bad) < most && r.rng.IntN(3) == 0 {
				bad[chunk]++
				return lab.FailUndone
			}
			return lab.Good
		}
		for range 10 {
			m.random(1000, 24)
			m.settle()
			before := m.s.Stats().Checkpoints
			m.s.Checkpoint()
			for n := 0; m.s.Stats().Checkpoints == before; n++ {
				if m.step(); n > 1e5 {
					t.Fatalf("no checkpoint is written: %s", m.s.State())
				}
			}
		}
		m.compare(false)
		if m.failed > 0 || len(headers) < 2 || len(pages) < 1 {
			t.Errorf("%d requests have failed, with failed writes of the headers %v and the pages of %v", m.failed,
				headers, pages)
		}
	}
}

// TestChunksOpenedInVainAreFreeAfterARestart: writes fail that have been done, so that every free chunk gets the header
// of an open chunk of the key log. After a crash they are free again: without free chunks there is no checkpoint, and
// the partition would take no write for ever.
func TestChunksOpenedInVainAreFreeAfterARestart(t *testing.T) {
	kvstore.PlainOnly(t)
	t.Parallel()
	for seed := range kvstore.Seeds(t, times(2)) {
		r := newRig(t, seed, variant(seed, 34))
		m := newModel(r, 60, sizes(r.rng, 4000))
		m.random(300, 24)
		m.settle()
		opened := map[int64]bool{}
		r.dev.Fault = func(q *ssd.Request) lab.Outcome {
			switch h := format.ChunkHeader(q.Buf); {
			case q.Op != ssd.Write || !h.Begins() || h.Kind() == format.ValueLog:
				return lab.Good
			case h.Kind() == format.Checkpoint:
				return lab.FailUndone
			}
			opened[q.Offset] = true
			return lab.FailDone
		}
		free := func() int { return int(m.s.Stats().FreeChunks) }
		for n := 0; len(opened) < free(); n++ {
			if m.random(100, 24); n > 1000 {
				t.Fatalf("only %d of %d free chunks were opened", len(opened), free())
			}
		}
		m.crash()
		r.dev.Fault = nil
		m.reopen()
		m.finish()
		if n := free(); n < len(opened)/2 {
			t.Errorf("%d chunks are free, %d were: %s", n, len(opened), m.s.State())
		}
		m.random(2000, 24)
		m.settle()
		m.compare(false)
	}
}
