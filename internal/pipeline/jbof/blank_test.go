package jbof

import (
	"math"
	"math/rand/v2"
	"testing"

	"jbofd/internal/pipeline"
	"jbofd/internal/tenant"
)

// TestADriveThatWasNotCalibratedIsLearned while reads of two sizes and writes compete, whatever each of them costs. The
// sizes of reads are compared before reads and writes are, so that they are known less exactly.
func TestADriveThatWasNotCalibratedIsLearned(t *testing.T) {
	t.Logf("-seed %d", *seed)
	rng := rand.New(rand.NewPCG(*seed, 0))
	factor := func() float64 { return math.Exp2(2*rng.Float64() - 1) }
	for i := range 6 {
		d := defaultProfile
		readNS, byteNS := d.ReadNS*factor(), d.ReadByteNS*factor()
		if i == 0 { // a large read costs 31 small ones, not 17
			readNS, byteNS = 20, 0.16
		}
		writeNS := (readNS + byteNS*unit) / unit * (1 + 9*rng.Float64())
		p := New(Config{})
		var ios []pipeline.IO
		for j, io := range []pipeline.IO{{Op: pipeline.Read, LenBytes: 4 << 10},
			{Op: pipeline.Read, LenBytes: 128 << 10}, {Op: pipeline.Write, LenBytes: 16 << 10}} {
			io.Tenant = tenant.ID(j)
			p.SetTenant(0, io.Tenant, 1)
			ios = append(ios, repeat(64, io)...)
		}
		s := newServer(p, func(io pipeline.IO) float64 {
			if io.Op == pipeline.Write {
				return writeNS * float64(io.LenBytes)
			}
			return readNS + byteNS*float64(io.LenBytes)
		})
		s.run(4e9, ios...)
		got, want := p.costs.read(128<<10)/p.costs.UnitNS(), (readNS+byteNS*(128<<10))/(readNS+byteNS*unit)
		if r := got / want; i == 0 && (r < 0.75 || r > 1.33) {
			t.Errorf("a large read costs %.1f small ones, want %.1f", got, want)
		}
		for _, c := range []struct {
			name      string
			got, want float64
		}{
			{"4 KiB read", p.costs.read(4 << 10), readNS + byteNS*(4<<10)},
			{"128 KiB read", p.costs.read(128 << 10), readNS + byteNS*(128<<10)},
			{"written byte", p.costs.writeByteNS, writeNS},
		} {
			if r := c.got / c.want; r < 0.6 || r > 1.6 {
				t.Errorf("%s: %.2f ns, want %.2f (%.0f + %.2f a byte, written %.2f)", c.name, c.got, c.want, readNS,
					byteNS, writeNS)
			}
		}
	}
}

// TestTheWindowOfADriveIsFound: a drive that was not calibrated serves so many reads at once.
func TestTheWindowOfADriveIsFound(t *testing.T) {
	const serviceNS = 100_000
	for _, servers := range []int{12, 48, 96, 200} {
		p := New(Config{})
		p.SetTenant(0, 0, 1)
		p.SetTenant(0, 1, 1)
		var due []int64 // ordered
		var tags []pipeline.Tag
		now, dst := int64(0), []pipeline.Tag(nil)
		free := make([]int64, servers)
		for i := range pipeline.Tag(600) {
			p.Enqueue(0, pipeline.IO{Tag: i, Tenant: tenant.ID(i % 2), Op: pipeline.Read, LenBytes: unit})
		}
		for i := 0; now < 1e9; i++ {
			dst = p.Dispatch(now, dst[:0])
			for j, tag := range dst {
				s := (i + j) % servers
				for k := range free { // the server that is free first
					if free[k] < free[s] {
						s = k
					}
				}
				free[s] = max(free[s], now) + serviceNS
				due, tags = append(due, free[s]), append(tags, tag)
			}
			now = max(now, due[0])
			tag := tags[0]
			p.Complete(now, tag, pipeline.Result{LatencyNS: serviceNS})
			due, tags = due[1:], tags[1:]
			p.Enqueue(now, pipeline.IO{Tag: tag, Tenant: tenant.ID(tag % 2), Op: pipeline.Read, LenBytes: unit})
		}
		if got := int(p.costs.depth); got < servers || got > 2*servers {
			t.Errorf("a drive that serves %d reads at once has a window of %d", servers, got)
		}
	}
}
