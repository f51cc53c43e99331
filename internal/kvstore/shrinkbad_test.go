package kvstore

import "testing"

// TestAShrinkAwaitsTheTryOfABadChunk: an I/O of the try of a bad chunk is in flight when a shrink has emptied all
// chunks that it takes away. They stay until the I/O has ended, as it may be in one of them.
func TestAShrinkAwaitsTheTryOfABadChunk(t *testing.T) {
	cfg := rangedConfigs[0]
	cfg.SegTbl = make([]byte, 5<<14)
	r := newRanged(t, FixedSeed(t), cfg)
	for range 100 {
		r.change(100, 100)
	}
	chunks := len(r.s.pool.Chunks)
	r.s.bad.stage, r.s.bad.busy = badRead, true
	if err := r.s.Resize(ResizeOptions{PartitionBytes: cfg.PartitionBytes / 2, ExtentBytes: cfg.PartitionBytes,
		SegTbl: cfg.SegTbl}); err != nil {
		t.Fatal(err)
	}
	for range 100 {
		r.now += 100e6
		r.run()
	}
	if n := len(r.s.pool.Chunks); n != chunks || !r.s.ResizeState().Running {
		t.Fatalf("%d of %d chunks are left before the I/O has ended: %+v", n, chunks, r.s.ResizeState())
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
