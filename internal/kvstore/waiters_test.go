package kvstore

import (
	"testing"

	"jbofd/internal/kvstore/format"
)

// TestABufferThatAWaiterNoLongerNeedsGoesToTheNext: many Gets wait for long segments; the keys of the first one's
// segment are deleted meanwhile.
func TestABufferThatAWaiterNoLongerNeedsGoesToTheNext(t *testing.T) {
	d := newInstant(t, Config{PartitionBytes: 16 << 20, BlockSize: 512, ChunkBytes: 256 << 10, KeysPerSegment: 256})
	s := d.s
	in := map[uint32][][]byte{}
	const keys = 4000
	for i := range keys {
		key := append(numberedKey(i), "12345678"...)
		d.one(t, Request{Op: Put, Key: key}, OK)
		n := s.tbl.Segment(format.HashKey(s.hashSeed, key))
		in[n] = append(in[n], key)
	}
	if s.tbl.Get(0).MaxBytes() <= 4096 || s.tbl.Len() != 16 {
		t.Fatalf("%d segments, the first takes %d bytes at most", s.tbl.Len(), s.tbl.Get(0).MaxBytes())
	}
	var held []IO
	run := func() {
		for {
			s.Turn(d.now, &d.act)
			d.now += 1000
			d.replies += len(d.act.Replies)
			d.act.Replies = d.act.Replies[:0]
			some := d.act.IOs[:0]
			for _, q := range d.act.IOs {
				if s.ios[q.Tag].kind == ioLookup {
					held = append(held, q)
				} else {
					some = append(some, q)
				}
			}
			if d.act.IOs = some; len(some) == 0 {
				return
			}
			d.transfer()
		}
	}
	d.replies = 0
	gets := 0
	get := func(segment uint32) {
		s.Submit(&Request{Op: Exist, Key: in[segment][0]})
		gets++
		run()
	}
	for len(held) == gets {
		get(3) // until one of them waits
	}
	buffers := len(held)
	for range 2 * buffers { // more than there will be buffers returned
		get(3)
	}
	get(1)
	get(2)
	if len(held) != buffers {
		t.Fatal("there is a buffer for each")
	}
	for _, key := range in[3] {
		s.Submit(&Request{Op: Delete, Key: key})
		run()
	}
	d.replies = 0
	d.act.IOs, held = held[:1:1], held[1:]
	d.transfer()
	run()
	for len(held) > 0 {
		d.act.IOs, held = held, nil
		d.transfer()
		run()
	}
	if d.replies != gets {
		t.Errorf("%d of %d are answered", d.replies, gets)
	}
}
