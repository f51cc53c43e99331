package policies

import (
	"testing"

	"jbofd/internal/pipeline"
	"jbofd/internal/tenant"
)

// rounds returns one step of a pipeline with 64 tenants: an I/O is dispatched, the oldest completes, and its tenant
// enqueues another.
func rounds(t testing.TB, policy string) func() {
	const tenants, each = 64, 8
	made, err := New(policy, Config{Depth: 256})
	if err != nil {
		t.Fatal(err)
	}
	p := pipeline.New(made)
	var ios []pipeline.IO
	for i := range tenants {
		p.SetTenant(0, tenant.ID(i), pipeline.Settings{Weight: 1 + i%4})
		for range each {
			op := pipeline.Read
			if i%4 == 3 {
				op = pipeline.Write
			}
			io := pipeline.IO{Tag: pipeline.Tag(len(ios)), Tenant: tenant.ID(i), Op: op, LenBytes: 4096 << (i % 3)}
			ios = append(ios, io)
			p.Enqueue(0, io)
		}
	}
	var now int64
	dst := make([]pipeline.Tag, 0, len(ios))
	ring := make([]pipeline.Tag, 0, len(ios))
	first := 0
	return func() {
		now += 1000
		dst = p.Dispatch(now, dst[:0])
		if len(ring)+len(dst) > cap(ring) {
			ring, first = ring[:copy(ring, ring[first:])], 0
		}
		ring = append(ring, dst...)
		if first == len(ring) {
			if at, ok := p.NextWake(now); ok {
				now = max(now, at)
			}
			return
		}
		tag := ring[first]
		first++
		p.Complete(now, tag, pipeline.Result{LatencyNS: 100_000})
		p.Enqueue(now, ios[tag])
	}
}

func TestNoPolicyAllocates(t *testing.T) {
	for _, name := range Names() {
		step := rounds(t, name)
		for range 10_000 {
			step()
		}
		if n := testing.AllocsPerRun(10_000, step); n != 0 {
			t.Errorf("%s: %v allocations an I/O, want 0", name, n)
		}
	}
}

// BenchmarkRound measures enqueue, dispatch and complete of an I/O with 64 tenants.
func BenchmarkRound(b *testing.B) {
	for _, name := range Names() {
		b.Run(name, func(b *testing.B) {
			step := rounds(b, name)
			b.ReportAllocs()
			for b.Loop() {
				step()
			}
		})
	}
}
