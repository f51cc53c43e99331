package kvstore

import (
	"encoding/binary"
	"fmt"
	"testing"
)

// filled is a store of 256 B values with 128 requests in flight, on an instant device.
func filled(b *testing.B, n int) *instant {
	d := newInstant(b, Config{PartitionBytes: 256 << 20, BlockSize: 512, ChunkBytes: 512 << 10})
	d.put(0, n, func(i int) uint64 { return uint64(i) }, make([]byte, 256), 128)
	return d
}

const benchObjects = 400_000 // half of what fits

// next visits all keys in a pseudo-random order.
func next(x uint64) uint64 { return (x*6364136223846793005 + 1442695040888963407) % (1 << 40) }

func BenchmarkGet256(b *testing.B) {
	d := filled(b, benchObjects)
	var k [16]byte
	bufs := make([][256]byte, 128)
	x := uint64(1)
	b.ResetTimer()
	for i := 0; i < b.N; {
		for j := 0; j < 128 && i < b.N; j++ {
			x = next(x)
			binary.LittleEndian.PutUint64(k[:], x%benchObjects)
			d.s.Submit(&Request{Op: Get, Key: k[:], Value: bufs[j][:]})
			i++
		}
		d.run()
		if d.last.Status != OK {
			b.Fatal(d.last)
		}
	}
}

func BenchmarkPut256(b *testing.B) {
	d := filled(b, benchObjects)
	val := make([]byte, 256)
	x := uint64(1)
	any := func(int) uint64 { x = next(x); return x % benchObjects }
	d.put(0, 3*benchObjects, any, val, 128)
	b.ResetTimer()
	d.put(0, b.N, any, val, 128)
	b.StopTimer()
	if d.last.Status != OK {
		b.Fatal(d.last)
	}
}

// BenchmarkWritten measures what is written for each user byte on a partition of 1 GiB, which takes a minute and 1.2
// GiB of memory. Run it with -benchtime 1x.
func BenchmarkWritten(b *testing.B) {
	for _, fill := range []float64{0.45, 0.65, 0.75, 0.85} {
		for _, block := range []int{512, 4096} {
			b.Run(fmt.Sprintf("%.0f/%d", 100*fill, block), func(b *testing.B) {
				for range b.N {
					wa, _, _ := written(b, Config{PartitionBytes: 1 << 30, BlockSize: block}, fill, 1024, 2, 0.3)
					b.ReportMetric(wa, "B/userB")
				}
			})
		}
	}
}
