package kvstore

import (
	"math"
	"slices"
	"testing"

	"jbofd/internal/nvme"
)

// BenchmarkRanges measures the CPU time of requests for ranges for each object of 256 B, without identities.
func BenchmarkRanges(b *testing.B) {
	const n = 50_000
	d := newInstant(b, Config{PartitionBytes: 64 << 20, BlockSize: 512, ChunkBytes: 512 << 10})
	d.put(0, n, func(i int) uint64 { return uint64(i) }, make([]byte, 256), 128)
	to := newInstant(b, Config{PartitionBytes: 64 << 20, BlockSize: 512, ChunkBytes: 512 << 10})
	for name, op := range map[string]Op{"CopyOut": CopyOut, "Digest": Digest, "Count": Count, "CopyIn": CopyIn} {
		b.Run(name, func(b *testing.B) {
			q := Request{Op: op, Value: make([]byte, 1<<20), Range: Range{Last: math.MaxUint64}}
			if op == CopyIn {
				q.Op = CopyOut
				d.s.Submit(&q)
				d.run()
				q = Request{Op: op, Value: slices.Clone(q.Value[:d.last.ValueLen])}
			}
			at, objects := d, 0
			if op == CopyIn {
				at = to
			}
			for b.Loop() {
				at.s.Submit(&q)
				at.run()
				if at.last.Status != OK {
					b.Fatal(at.last)
				}
				if objects = n; op == CopyOut || op == CopyIn {
					objects = nvme.KVRange(q.Value).Items()
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(objects), "ns/object")
		})
	}
}
