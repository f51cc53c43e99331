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
