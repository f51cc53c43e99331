package kvstore

import (
	"testing"

	"jbofd/internal/kvstore/format"
)

// beginShrink begins to halve a partition that has little in it, and returns how many chunks it had.
func beginShrink(r *ranged, bytes, was int64) (chunks int) {
	for range 100 {
		r.change(100, 100)
	}
	chunks = len(r.s.pool.Chunks)
	if err := r.s.Resize(ResizeOptions{PartitionBytes: bytes, ExtentBytes: was, SegTbl: r.s.cfg.SegTbl}); err != nil {
		r.tb.Fatal(err)
	}
	return chunks
}

// TestAShrinkAwaitsTheTryOfABadChunk: an I/O of the try of a bad chunk is in flight when a shrink has emptied all
// chunks that it takes away. They stay until the I/O has ended if it is in one of them, and no longer than that.
func TestAShrinkAwaitsTheTryOfABadChunk(t *testing.T) {
	cfg := rangedConfigs[0]
	cfg.SegTbl = make([]byte, 5<<14)
	for _, last := range []bool{false, true} {
		r := newRanged(t, FixedSeed(t), cfg)
		r.s.bad.stage, r.s.bad.busy = badRead, true
		if last {
			r.s.bad.chunk = format.ChunkNumber(len(r.s.pool.Chunks) - 1)
		}
		chunks := beginShrink(r, cfg.PartitionBytes/2, cfg.PartitionBytes)
		for range 1000 {
			r.now += 100e6
			r.run()
		}
		if st := r.s.ResizeState(); st.Running != last || st.Err != nil || len(r.s.pool.Chunks) < chunks == last {
			t.Fatalf("a try of a chunk that is taken away: %v; %d of %d chunks are left before it has ended: %+v", last,
				len(r.s.pool.Chunks), chunks, st)
		}
		r.s.badEnded(false)
		for range 10 {
			r.now += 1e9
			r.run()
		}
		if st := r.s.ResizeState(); st.Running || st.Err != nil || len(r.s.pool.Chunks) >= chunks {
			t.Errorf("%d of %d chunks are left: %+v", len(r.s.pool.Chunks), chunks, st)
		}
	}
}

// TestAShrinkAwaitsACheckpoint that takes minutes, when all chunks that it takes away are empty.
func TestAShrinkAwaitsACheckpoint(t *testing.T) {
	cfg := rangedConfigs[0]
	cfg.SegTbl = make([]byte, 5<<14)
	r := newRanged(t, FixedSeed(t), cfg)
	r.s.Checkpoint()
	var held []IO
	chunks := beginShrink(r, cfg.PartitionBytes/2, cfg.PartitionBytes)
	turn := func(hold bool) {
		r.s.Turn(r.now, &r.act)
		r.now += 1e8
		others := r.act.IOs[:0]
		for _, q := range r.act.IOs {
			if hold && q.Background && r.s.ckpt.stage != ckptIdle {
				held = append(held, q)
			} else {
				others = append(others, q)
			}
		}
		r.act.IOs, r.act.Replies = others, r.act.Replies[:0]
		r.transfer()
	}
	r.s.Checkpoint()
	for range 3000 {
		turn(true)
	}
	if st := r.s.ResizeState(); len(held) == 0 || !st.Running || st.DoneBytes != st.TotalBytes {
		t.Fatalf("%d I/Os are held: %+v", len(held), st)
	}
	r.act.IOs = append(r.act.IOs, held...)
	r.transfer()
	for range 3000 {
		turn(false)
	}
	if st := r.s.ResizeState(); st.Running || st.Err != nil || len(r.s.pool.Chunks) >= chunks {
		t.Errorf("%d of %d chunks are left: %+v", len(r.s.pool.Chunks), chunks, st)
	}
}
