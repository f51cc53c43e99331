package kvstore

import (
	"encoding/binary"
	"testing"
)

// TestLongBuffersAreShared: one long segment takes one longer buffer, and one of each length that it has had, however
// many activeSegs have had it.
func TestLongBuffersAreShared(t *testing.T) {
	served, taken := false, 0
	d := newInstant(t, Config{PartitionBytes: 64 << 20, BlockSize: 512, KeysPerSegment: 256,
		Alloc: func(n int) ([]byte, error) {
			if served {
				taken += n
			}
			return make([]byte, n), nil
		}})
	s := d.s
	served = true
	var long, others []uint64
	var k [16]byte
	for key := uint64(0); len(long) < 1500 || len(others) < 300; key++ {
		binary.LittleEndian.PutUint64(k[:], key)
		if s.SegmentOf(k[:]) == 0 {
			long = append(long, key)
		} else {
			others = append(others, key)
		}
	}
	slots := map[int32]bool{}
	for n := range long {
		for i := range 20 {
			all := others[:300]
			key := all[(n*7+i)%len(all)]
			if i == n%20 {
				key = long[n]
			}
			binary.LittleEndian.PutUint64(k[:], key)
			if !s.Submit(&Request{Op: Put, Key: k[:]}) {
				t.Fatal("a Put is not taken")
			}
		}
		for i := range s.segs {
			if a := &s.segs[i]; a.number == 0 && len(a.buf) > len(a.small) {
				slots[int32(i)] = true
			}
		}
		d.run()
	}
	n := s.tbl.Get(0).MaxBytes()
	most := 0
	for class := 0; class == 0 || s.longBytes(class-1) < n+2*s.cfg.BlockSize; class++ {
		most += s.longBytes(class)
	}
	t.Logf("a segment of %d bytes, which %d activeSegs have had, takes %d bytes", n, len(slots), taken)
	if taken > most {
		t.Errorf("%d bytes are allocated for one segment of %d, want at most %d", taken, n, most)
	}
	if len(slots) < 5 || n < 30_000 {
		t.Error("too little has happened")
	}
	for i := range s.segs {
		if a := &s.segs[i]; len(a.buf) != len(a.small) {
			t.Errorf("activeSeg %d has kept a longer buffer", i)
		}
	}
}
