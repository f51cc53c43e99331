package kvstore

import (
	"encoding/binary"
	"testing"

	"jbofd/internal/pipeline"
)

// readBytes makes what the store reads from now on count.
func (d *instant) readBytes() *int64 {
	n := new(int64)
	d.fail = func(q *IO) error {
		if q.Op == pipeline.Read {
			*n += int64(len(q.Buf))
		}
		return nil
	}
	return n
}

// TestEveryRoundOfExpiryIsSlow: a round reads about 4 MiB/s as long as there is room, also the first one after a start.
func TestEveryRoundOfExpiryIsSlow(t *testing.T) {
	r := newRanged(t, 1, Config{BlockSize: 512, PartitionBytes: 128 << 20})
	r.put(0, 50_000, func(i int) uint64 { return uint64(i) }, nil, 32)
	for round := range 3 {
		r.do(Request{Op: Put, Key: binary.LittleEndian.AppendUint64(nil, uint64(round)), Expires: r.wall + 100})
		r.now += 60e9
		r.run()
		r.wall += 200
		r.s.SetWall(r.wall)
		began, read := r.now, r.readBytes()
		for r.run(); r.s.expiry.running; r.run() {
			if most := 256<<10 + 2*(r.now-began)*expiryBytesPerSec/1e9; *read > most {
				t.Fatalf("round %d has read %d bytes in %d ms, want at most %d", round, *read, (r.now-began)/1e6, most)
			}
			r.now += 10e6
		}
		if *read < 1<<20 || r.s.Stats().Expired != int64(round+1) {
			t.Errorf("round %d has read %d bytes, %d objects have expired", round, *read, r.s.Stats().Expired)
		}
	}
}

// TestIdentitiesAreReclaimedSlowly: in a nearly full partition a few writes with identities begin no round of expiry.
// When all keys have been deleted with identities, a round reclaims what these have kept, as slowly as every other.
func TestIdentitiesAreReclaimedSlowly(t *testing.T) {
	r := newRanged(t, 1, Config{BlockSize: 512, PartitionBytes: 32 << 20, ChunkBytes: 512 << 10})
	key := func(i int) uint64 { return uint64(i) }
	n := 0
	for val := make([]byte, 1000); r.s.pool.Live+r.s.spare() < r.s.budget.MaxLive/100*92; n += 500 {
		r.put(n, 500, key, val, 32)
	}
	id, read := Identity{Client: 5}, r.readBytes()
	write := func(op Op, i int) {
		id.Seq, id.KeepUntil = id.Seq+1, r.wall+20
		q := Request{Op: op, Key: make([]byte, len(r.k)), ID: id}
		binary.LittleEndian.PutUint64(q.Key, key(i))
		if p := r.do(q); p.Status != OK {
			t.Fatalf("op %d of key %d: status %d", op, i, p.Status)
		}
	}
	segments := int64(r.s.tbl.Len())
	for range 120 {
		write(Put, r.rng.IntN(n))
		for range 2 {
			r.now += 500e6
			r.run()
		}
		r.wall++
		r.s.SetWall(r.wall)
	}
	if !r.s.isShort() {
		t.Fatal("the partition is not nearly full any more")
	}
	if most := 2048 * int64(120); *read > most {
		t.Errorf("%d bytes were read for 120 Puts in a table of %d segments, want at most %d", *read, segments, most)
	}
	for i := range n {
		write(Delete, i)
	}
	live := r.s.Stats().LiveBytes
	r.wall += 25
	r.s.SetWall(r.wall)
	began, rounds := r.now, 0
	for *read = 0; r.now-began < 60e9; r.now += 50e6 {
		if r.run(); r.s.expiry.running {
			rounds++
		}
	}
	if now := r.s.Stats().LiveBytes; rounds == 0 || now > live/4 || *read > 60*expiryBytesPerSec {
		t.Errorf("%d of %d bytes are live, the round was seen %d times, %d bytes were read", now, live, rounds, *read)
	}
}

// TestWhatHasExpiredDoesNotExistAgain, after a restart with a clock that is behind, but one that was days ahead counts
// for nothing once it is right again.
func TestWhatHasExpiredDoesNotExistAgain(t *testing.T) {
	r := newRanged(t, 1, rangedConfigs[0])
	restart := func(wall uint32) {
		t.Helper()
		r.checkpoint()
		cfg := rangedConfigs[0]
		cfg.SegTbl = make([]byte, 5<<18)
		s, err := New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		r.s, r.act = s, Actions{}
		s.SetWall(wall)
		if r.run(); !s.Ready() {
			t.Fatal(s.Err())
		}
	}
	exists := func(key string, want Status) {
		t.Helper()
		if p := r.do(Request{Op: Exist, Key: []byte(key)}); p.Status != want {
			t.Errorf("%s: status %d, want %d", key, p.Status, want)
		}
	}
	put := func(key string, expires uint32) {
		t.Helper()
		if p := r.do(Request{Op: Put, Key: []byte(key), Value: []byte("v"), Expires: expires}); p.Status != OK {
			t.Fatalf("%s: status %d", key, p.Status)
		}
	}
	wall := uint32(1e9)
	r.s.SetWall(wall)
	put("first", wall+10)
	r.s.SetWall(wall + 20)
	r.run() // a round; the next one begins 10 s later
	put("k", wall+100)
	r.checkpoint()
	r.s.SetWall(wall + 200)
	exists("k", NotFound)
	for _, behind := range []uint32{150, 80_000} {
		restart(wall + 200 - behind)
		exists("k", NotFound)
	}
	r.s.SetWall(wall + 20*86400)
	put("early", wall+1000)
	exists("early", NotFound)
	r.s.SetWall(wall + 300)
	put("late", wall+1000)
	exists("late", OK)
	r.s.SetWall(wall + 20*86400)
	restart(wall + 300)
	put("later", wall+1000)
	exists("later", OK)
	r.s.SetWall(wall + 1001)
	exists("later", NotFound)
	r.s.SetWall(wall + 300)
	exists("later", NotFound)
}

// nearlyFull stores values until room is short, and with every fourth a short one with that expiry, if it is not 0. It
// returns how many bytes a round reads.
func (r *ranged) nearlyFull(expires uint32) (bytes int64) {
	val := make([]byte, 1000)
	put := func(key string, n, size int, expires uint32) {
		q := Request{Op: Put, Key: binary.LittleEndian.AppendUint64([]byte(key), uint64(n)), Value: val[:size],
			Expires: expires}
		if p := r.do(q); p.Status != OK {
			r.tb.Fatalf("Put %d: status %d", n, p.Status)
		}
	}
	for n := 0; r.s.pool.Live+r.s.spare() < r.s.budget.MaxLive/100*92; n++ {
		if put("long", n, len(val), 0); expires > 0 && n%4 == 0 {
			put("short", n, 20, expires)
		}
	}
	if !r.s.isShort() {
		r.tb.Fatal("the partition is not nearly full")
	}
	for i := range r.s.tbl.Len() {
		bytes += int64(r.s.tbl.Get(i).MaxBytes() + r.s.cfg.BlockSize)
	}
	return bytes
}

// TestRoundsThatWinNothingAreNotUrgent: in a nearly full partition a few objects are stored again each second, before
// they expire. There is something due all the time, and rounds find nothing. They are as slow and as rare as if there
// were room.
func TestRoundsThatWinNothingAreNotUrgent(t *testing.T) {
	r := newRanged(t, FixedSeed(t), Config{BlockSize: 512, PartitionBytes: 32 << 20, ChunkBytes: 512 << 10})
	bytes := r.nearlyFull(0)
	read := r.readBytes()
	const seconds = 60
	for range seconds {
		for i := range 3 {
			q := Request{Op: Put, Key: []byte{byte(i)}, Value: make([]byte, 1000), Expires: r.wall + 2}
			if p := r.do(q); p.Status != OK {
				t.Fatalf("status %d", p.Status)
			}
		}
		for range 20 {
			before := *read
			r.now += 50e6
			if r.run(); *read-before > 1<<20 {
				t.Fatalf("%d bytes were read in 50 ms", *read-before)
			}
		}
		r.wall++
		r.s.SetWall(r.wall)
	}
	if !r.s.isShort() {
		t.Fatal("the partition is not nearly full any more")
	}
	if rounds := int64(seconds*1e9/expiryPauseNS) + 2; *read > rounds*bytes || *read < 2*bytes {
		t.Errorf("%d bytes were read in %d s, the segments have %d, want 2 to %d rounds", *read, seconds, bytes, rounds)
	}
}

// TestARoundThatWinsRoomIsFastButBounded: a fifth of the objects in a nearly full partition have expired at once, and
// have so short values that room is short until the round has ended.
func TestARoundThatWinsRoomIsFastButBounded(t *testing.T) {
	r := newRanged(t, FixedSeed(t), Config{BlockSize: 512, PartitionBytes: 32 << 20, ChunkBytes: 512 << 10})
	bytes := r.nearlyFull(r.wall + 100)
	r.now += 60e9
	r.run()
	read, began, objects := r.readBytes(), r.now, r.s.Stats().Objects
	r.wall += 200
	r.s.SetWall(r.wall)
	slowNS := bytes * 1e9 / expiryBytesPerSec
	for going := true; going && r.now < began+slowNS; going = r.s.expiry.running {
		r.run()
		if most := 512<<10 + 3*(r.now-began)*urgentBytesPerSec/1e9; *read > most {
			t.Fatalf("%d bytes are read in %d ms, want at most %d", *read, (r.now-began)/1e6, most)
		}
		r.now += 1e6
	}
	if took := r.now - began; !r.s.isShort() || took > slowNS/4 {
		t.Errorf("the round takes %d ms, a slow one %d; room is short: %v", took/1e6, slowNS/1e6, r.s.isShort())
	}
	if o := r.s.Stats().Objects; *read < bytes/2 || o > objects*85/100 {
		t.Errorf("%d of %d objects are left after a round that has read %d bytes of %d", o, objects, *read, bytes)
	}
}
