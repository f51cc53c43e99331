package kvstore_test

import (
	"testing"

	"jbofd/internal/kvstore"
	"jbofd/internal/kvstore/format"
	"jbofd/internal/lab"
	"jbofd/internal/ssd"
)

// badChunk is a store that has opened with a bad chunk, whose header cannot be read.
type badChunk struct {
	*model
	chunk    format.ChunkNumber
	from, to int64 // where it is
	// reads and writes of it are counted.
	reads, writes int
}

// newBadChunk returns a partition with a chunk that will be bad. Its process has died.
func newBadChunk(t *testing.T, seed uint64, scrubRate int64) *badChunk {
	cfg := small(0)
	cfg.ChunkBytes, cfg.PartitionBytes, cfg.CheckpointBytes = 2<<20, 25*2<<20+128<<10, 1<<30
	cfg.ScrubBytesPerSec = scrubRate
	b := &badChunk{model: newModel(newRig(t, seed, cfg), 100, func() int { return 500 })}
	b.random(300, 8)
	b.s.Checkpoint()
	b.settle()
	b.random(50, 8)
	n := b.s.Stats().Chunks - 1
	b.chunk, b.from, b.to = format.ChunkNumber(n), b.headerAt(int(n)), b.headerAt(int(n)+1)
	if use := b.s.UseOf(b.chunk); use != "never used" {
		t.Fatalf("the last chunk is %s", use)
	}
	junk := make([]byte, b.to-b.from)
	for i := range junk {
		junk[i] = byte(b.rng.Uint32() | 1)
	}
	b.dev.Store(b.from, junk)
	b.dev.Unreadable(b.from, 4096)
	b.crash()
	return b
}

// again returns a copy.
func (b *badChunk) again(seed uint64) *badChunk {
	c := *b
	c.model = b.model.again(seed)
	return &c
}

// faults lets I/Os of the chunk end as outcome says, and counts them.
func (b *badChunk) faults(outcome func(q *ssd.Request) lab.Outcome) {
	b.reads, b.writes = 0, 0
	b.dev.Fault = func(q *ssd.Request) lab.Outcome {
		if q.Op == ssd.Flush || q.Offset < b.from || q.Offset >= b.to {
			return lab.Good
		}
		if q.Op == ssd.Write {
			b.writes++
		} else {
			b.reads++
		}
		return outcome(q)
	}
}

// bad is the number of bad chunks after a time.
func (b *badChunk) bad(seconds int64) int64 {
	b.t.Helper()
	for end := b.now + seconds*1e9; b.now < end && !b.crashed; {
		if b.turn(); b.dev.Next() < 0 && (b.act.WakeNS == 0 || b.act.WakeNS > end) {
			b.now = end
			break
		}
		b.step()
	}
	return b.s.Stats().BadChunks
}

// anything lets all I/Os succeed that can.
func anything(*ssd.Request) lab.Outcome { return lab.Good }

// TestABadChunkComesBackWhenAllOfItCanBeRead: not before, however much of it can be written. One that stays bad costs a
// few I/Os a day. What fails once is tried again.
func TestABadChunkComesBackWhenAllOfItCanBeRead(t *testing.T) {
	t.Parallel()
	const minute, day = 60, 86400
	base := newBadChunk(t, 3*seeds(t)+1, 0)
	within := func(q *ssd.Request, at int64) bool { return q.Offset <= at && at < q.Offset+q.Len }
	last := base.to - 1
	for _, c := range []struct {
		name    string
		outcome func(b *badChunk) func(q *ssd.Request) lab.Outcome
		// comes: the chunk comes back, after tries. mostWrites bounds the writes of a week if it does not.
		comes      bool
		after      int64
		mostWrites int
	}{
		{"it is healed by a write", func(*badChunk) func(*ssd.Request) lab.Outcome {
			return anything
		}, true, 2 * minute, 0},
		{"its last block cannot be read", func(*badChunk) func(*ssd.Request) lab.Outcome {
			return func(q *ssd.Request) lab.Outcome {
				if q.Op == ssd.Read && within(q, last) {
					return lab.FailUndone
				}
				return lab.Good
			}
		}, false, 0, 20 * 32},
		{"its first block cannot be written", func(b *badChunk) func(*ssd.Request) lab.Outcome {
			return func(q *ssd.Request) lab.Outcome {
				if q.Op == ssd.Write && within(q, b.from) {
					return lab.FailUndone
				}
				return lab.Good
			}
		}, false, 0, 20},
		{"a write has failed once", func(b *badChunk) func(*ssd.Request) lab.Outcome {
			return func(q *ssd.Request) lab.Outcome {
				if q.Op == ssd.Write && b.writes == 7 {
					return lab.FailDone
				}
				return lab.Good
			}
		}, true, 4 * minute, 0},
		{"a write was lost once", func(b *badChunk) func(*ssd.Request) lab.Outcome {
			return func(q *ssd.Request) lab.Outcome {
				if q.Op == ssd.Write && b.writes == 7 {
					return lab.Lost
				}
				return lab.Good
			}
		}, true, 4 * minute, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := base.again(1)
			b.t = t
			b.reopen0()
			if got := b.s.Stats(); got.BadChunks != 1 {
				t.Fatalf("%d bad chunks, want one", got.BadChunks)
			}
			free := b.s.Stats().FreeChunks
			b.faults(c.outcome(b))
			if n := b.bad(minute - 1); n != 1 || b.reads+b.writes > 0 {
				t.Errorf("after less than a minute: %d bad chunks, %d reads, %d writes", n, b.reads, b.writes)
			}
			if !c.comes {
				if n := b.bad(7 * day); n != 1 || b.writes == 0 || b.writes > c.mostWrites || b.reads > b.writes {
					t.Errorf("after a week: %d bad chunks, %d reads, %d writes, want one, and at most %d", n, b.reads,
						b.writes, c.mostWrites)
				}
				b.faults(anything)
				c.after = 2 * day
			} else if n := b.bad(c.after / 2); n != 1 && c.after > 2*minute {
				t.Errorf("after %d s there are %d bad chunks, want one", c.after/2, n)
			}
			if n := b.bad(c.after); n != 0 {
				t.Fatalf("after %d s more: %d bad chunks, want none", c.after, n)
			}
			b.bad(minute)
			use := b.s.UseOf(b.chunk)
			if got := b.s.Stats().FreeChunks; got <= free || use != "free" && use != "never used" {
				t.Errorf("%d chunks are free, %d were; the chunk is %s", got, free, use)
			}
			b.dev.Fault = nil
			b.crash()
			b.reopen()
			if st := b.s.Stats(); st.BadChunks != 0 || st.LostHeaders != 0 {
				t.Errorf("after a restart: %d bad chunks and %d lost headers", st.BadChunks, st.LostHeaders)
			}
			b.random(300, 8)
			b.settle()
			b.compare(false)
		})
	}
}

// TestACrashAtEveryWriteOfATry: the chunk is bad at the next start, or free if a checkpoint says so; nothing is lost;
// and it comes back.
func TestACrashAtEveryWriteOfATry(t *testing.T) {
	kvstore.PlainOnly(t)
	t.Parallel()
	const try = 90
	for seed := range kvstore.Seeds(t, 2) {
		base := newBadChunk(t, seed, int64(seed%2)<<20)
		bad, free := 0, 0
		for at := 1; ; at += every(1 + b2i(at < 30)*6) {
			b := base.again(seed + uint64(at))
			b.reopen()
			b.crashIn, b.power = at, at%2 == 0
			b.bad(try)
			ended := !b.crashed
			if ended {
				b.crash()
			}
			b.reopen()
			if b.s.Stats().BadChunks == 1 {
				bad++
			} else {
				free++
			}
			b.random(100, 8)
			if n := b.bad(try); n != 0 {
				t.Fatalf("a crash at write %d: %d bad chunks after another try", at, n)
			}
			b.compare(false)
			if ended {
				break
			}
		}
		if t.Logf("the chunk is bad after %d crashes and free after %d", bad, free); bad == 0 || free == 0 {
			t.Error("too little has happened")
		}
	}
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

// TestATryKeepsNothingWaiting: a stop ends after an I/O of the try, and a shrink takes the chunk away.
func TestATryKeepsNothingWaiting(t *testing.T) {
	base := newBadChunk(t, 3*seeds(t)+1, 0)
	for n := 1; n < 60; n += 7 {
		b := base.again(uint64(n))
		b.reopen()
		b.faults(anything)
		for b.reads+b.writes < n {
			b.step()
		}
		begin, more := b.now, b.reads+b.writes+1
		if n%2 == 0 {
			b.stop()
			if took := b.now - begin; took > 1e9 || b.reads+b.writes > more {
				t.Errorf("a stop takes %d ns, and %d I/Os of the try", took, b.reads+b.writes-more+1)
			}
		} else {
			to := b.cfg.PartitionBytes - b.cfg.ChunkBytes
			if err := b.s.Resize(kvstore.ResizeOptions{PartitionBytes: to, ExtentBytes: b.cfg.PartitionBytes,
				SegTbl: b.cfg.SegTbl}); err != nil {
				t.Fatal(err)
			}
			for b.s.ResizeState().Running {
				b.step()
			}
			if err := b.s.ResizeState().Err; err != nil {
				t.Fatal(err)
			}
			if st := b.s.Stats(); st.BadChunks != 0 || b.reads+b.writes > more {
				t.Errorf("a shrink leaves %d bad chunks, and takes %d I/Os of the try", st.BadChunks,
					b.reads+b.writes-more+1)
			}
			b.cfg.PartitionBytes = to
			b.settle()
			b.compare(false)
		}
	}
}

// TestAShrinkAwaitsATryThatHangs: an I/O of the try of a chunk that is to be taken away hangs for minutes. The shrink
// goes on when it has ended, however it ends.
func TestAShrinkAwaitsATryThatHangs(t *testing.T) {
	const hangs = 200e9
	base := newBadChunk(t, 3*seeds(t)+1, 0)
	for i, n := range []int{20, 64} { // a write that fails in the end, and the last read
		b := base.again(uint64(n))
		b.reopen()
		b.faults(func(*ssd.Request) lab.Outcome {
			if i%2 == 0 && b.reads+b.writes == n {
				return lab.FailUndone
			}
			return lab.Good
		})
		begun := 0
		b.dev.Hold = func(q *ssd.Request) int64 {
			if q.Op == ssd.Flush || q.Offset < b.from || q.Offset >= b.to {
				return 0
			}
			if begun++; begun == n {
				return hangs
			}
			return 0
		}
		for b.turn(); begun < n; b.turn() {
			b.step()
		}
		begin, to := b.now, b.cfg.PartitionBytes-b.cfg.ChunkBytes
		if err := b.s.Resize(kvstore.ResizeOptions{PartitionBytes: to, ExtentBytes: b.cfg.PartitionBytes,
			SegTbl: b.cfg.SegTbl}); err != nil {
			t.Fatal(err)
		}
		for b.s.ResizeState().Running {
			b.step()
		}
		if err, took := b.s.ResizeState().Err, b.now-begin; err != nil || took < hangs-1e9 || took > hangs+10e9 {
			t.Fatalf("I/O %d of the try hangs for %d s: the shrink ends after %d s: %v", n, int64(hangs/1e9), took/1e9,
				err)
		}
		b.cfg.PartitionBytes = to
		b.settle()
		b.compare(false)
	}
}
