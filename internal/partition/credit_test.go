package partition

import (
	"math"
	"testing"

	"jbofd/internal/kvstore"
	"jbofd/internal/pipeline"
	"jbofd/internal/tenant"
)

// generous is a policy that gives everybody the same credit.
type generous struct {
	pipeline.Policy
	units int
}

func (g generous) Credit(tenant.ID) int { return g.units }

// TestCreditsCountWhatHostsCount: the credit that a policy gives in I/Os is converted to the commands that hosts count,
// although buffers may be longer than the values that come, and values longer than segments.
func TestCreditsCountWhatHostsCount(t *testing.T) {
	const units, keys = 100, 200
	for _, c := range []struct {
		name          string
		value, buffer int
		want          float64 // commands, by the units that each counts for
	}{
		// Segments and values are a unit each.
		{"as long as their values", 3000, 4096, units},
		{"longer than their values", 3000, 64 << 10, units * 16},
		// Retrieves that count for 15 take a read of one unit and one of 16.
		{"of long values", 15 * 4096, 15 * 4096, units / ((1 + 16) / 2.0) * 15},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t, partitionBytes, generous{pipeline.NewFIFO(64), units}, inMemory(partitionBytes))
			p := r.mustOpen(true)
			defer r.close(p)
			fill := newHost(p, 2, 1, c.value)
			for k := range uint64(keys) {
				if q := fill.do(kvstore.Put, k, c.value); q.Status != kvstore.OK || q.CreditUnits != 0 {
					t.Fatalf("status %d, credit %d for a host that keeps to none", q.Status, q.CreditUnits)
				}
			}
			h := newHost(p, 1, 1, c.buffer)
			h.free[0].Credited, h.free[0].Units = true, (c.buffer+4095)/4096
			got := 0
			for k := range uint64(keys) {
				got = h.do(kvstore.Get, k, c.buffer).CreditUnits
			}
			if math.Abs(float64(got)-c.want) > 0.1*c.want {
				t.Errorf("the credit is %d units, want %.0f", got, c.want)
			}
		})
	}
}
