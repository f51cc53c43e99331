package kvstore

import (
	"encoding/binary"
	"flag"
	"math/rand/v2"
	"testing"
	"time"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/lookup"
)

var terabytes = flag.Bool("4tib", false, "measure checkpoints and openings of a partition of 4 TiB with a table of "+
	"400 chunks, which takes 4 GB of memory")

// resting returns a store with a table of that many segments, nearly all of which are empty and do not change. It has a
// checkpoint.
func resting(tb testing.TB, partitionBytes, chunkBytes int64, segments uint32) *instant {
	d := &instant{sparse: sparse{}}
	cfg := Config{PartitionBytes: partitionBytes, ChunkBytes: chunkBytes, BlockSize: 4096, Format: true,
		UUID: [16]byte{1}, HashSeed: 42, SegTbl: make([]byte, 2*lookup.EntryBytes*int(segments))}
	var err error
	if d.s, err = New(cfg); err != nil {
		tb.Fatal(err)
	}
	d.run()
	d.s.tbl.Extend(segments)
	d.s.Checkpoint()
	d.run()
	if st := d.s.Stats(); st.Checkpoints != 1 {
		tb.Fatalf("%+v", st)
	}
	return d
}

// putAt puts a value of n bytes, of zeroes, and lets so much time pass.
func (d *instant) putAt(tb testing.TB, key uint64, n int, gapNS int64) {
	binary.LittleEndian.PutUint64(d.k[:], key)
	d.one(tb, Request{Op: Put, Key: d.k[:], Value: make([]byte, n)}, OK)
	for end := d.now + gapNS; d.now < end; {
		if d.now = end; d.act.WakeNS > 0 && d.act.WakeNS < end {
			d.now = d.act.WakeNS
		}
		d.run()
	}
}

// open opens the partition again, after a kill -9, and returns how long the drive takes for it: 90 µs for the reads
// that are asked for together, a microsecond for each of them, and the time of their bytes at 3 GB/s.
func (d *instant) open(tb testing.TB) (ns, reads, bytes int64) {
	cfg := d.s.cfg
	cfg.Format, cfg.SegTbl = false, make([]byte, len(cfg.SegTbl))
	s, err := New(cfg)
	if err != nil {
		tb.Fatal(err)
	}
	d.s, d.act = s, Actions{}
	for !s.Ready() && s.Err() == nil {
		s.Turn(d.now, &d.act)
		took := int64(90e3)
		for _, q := range d.act.IOs {
			reads, bytes, took = reads+1, bytes+int64(len(q.Buf)), took+1000+int64(len(q.Buf))/3
		}
		d.transfer()
		d.now, ns = d.now+took, ns+took
	}
	if !s.Ready() {
		tb.Fatal(s.Err())
	}
	return ns, reads, bytes
}

// reopenings measures openings after a kill -9 in the middle of work and after a clean stop.
func reopenings(t *testing.T, d *instant) {
	segments := d.s.tbl.Len()
	for _, what := range []string{"kill -9", "a clean stop"} {
		if what != "kill -9" {
			d.s.Stop()
			d.run()
			if !d.s.Stopped() {
				t.Fatal("the store does not stop")
			}
		}
		began := time.Now()
		ns, reads, bytes := d.open(t)
		t.Logf("opening after %s: %.2f s, %d reads of %.0f MB; %.2f s of this computer", what, float64(ns)/1e9, reads,
			float64(bytes)/1e6, time.Since(began).Seconds())
		if ns > 5e9 || d.s.tbl.Len() < segments {
			t.Errorf("opening took %.2f s, want 5, and there are %d segments, want %d", float64(ns)/1e9, d.s.tbl.Len(),
				segments)
		}
	}
}

// TestCheckpointsWriteWhatHasChanged: beside a large table that rests, a trickle of Puts, hot keys and uniform Puts
// write few bytes of checkpoints.
func TestCheckpointsWriteWhatHasChanged(t *testing.T) {
	PlainOnly(t)
	t.Parallel()
	size, chunk, segments, puts := int64(8<<30), int64(1<<20), uint32(5<<20), 150_000 // 26 chunks of table
	if *terabytes {
		size, chunk, segments, puts = format.MaxPartitionBytes, 4<<20, 335<<20, 8_000_000 // 400 chunks
	}
	d := resting(t, size, chunk, segments)
	table := d.s.Stats().CheckpointBytes
	measure := func(what string, f func()) (bytes, user int64, ns int64) {
		before, at := d.s.Stats(), d.now
		f()
		st := d.s.Stats()
		bytes, user, ns = st.CheckpointBytes-before.CheckpointBytes, st.UserBytes-before.UserBytes, d.now-at
		t.Logf("%s: %.2f MB of %d checkpoints, beside %.0f MB of table, for %.2f MB of values in %.0f s: %.4f bytes a "+
			"user byte, %.0f KB/s", what, float64(bytes)/1e6, st.Checkpoints-before.Checkpoints, float64(table)/1e6,
			float64(user)/1e6, float64(ns)/1e9, float64(bytes)/float64(user), float64(bytes)*1e6/float64(ns))
		return bytes, user, ns
	}
	rng := rand.New(rand.NewPCG(FixedSeed(t), 5))
	bytes, _, ns := measure("100 Puts in 200 s, and 10 minutes without one", func() {
		for range 100 {
			d.putAt(t, rng.Uint64(), 1000, 2e9)
		}
		d.putAt(t, rng.Uint64(), 1000, 600e9)
	})
	if most := ns / 1e9 << 20; bytes > most || bytes > table/2 {
		t.Errorf("%d bytes of checkpoints, want at most %d and less than half of the table", bytes, most)
	}
	val := make([]byte, 1000)
	bytes, user, _ := measure("300 hot keys", func() {
		d.put(0, puts, func(int) uint64 { return rng.Uint64N(300) }, val, 32)
	})
	if bytes*10 > user {
		t.Errorf("hot keys: %d bytes of checkpoints for %d of values, want 0.1 at most", bytes, user)
	}
	bytes, user, _ = measure("uniform Puts", func() {
		d.put(0, puts, func(int) uint64 { return rng.Uint64() }, val, 32)
	})
	if bytes*10 > user {
		t.Errorf("uniform Puts: %d bytes of checkpoints for %d of values, want 0.1 at most", bytes, user)
	}
	if st := d.s.Stats(); st.Checkpoints < 4 {
		t.Errorf("%d checkpoints tell little", st.Checkpoints)
	}
	reopenings(t, d)
}
