package policies

import (
	"slices"
	"strings"
	"testing"

	"jbofd/internal/pipeline"
	"jbofd/internal/tenant"
)

func TestEveryPolicyIsMadeByItsName(t *testing.T) {
	for _, name := range Names() {
		p, err := New(name, Config{Depth: 32})
		if err != nil || p.Name() != name {
			t.Errorf("%s: %v, %v", name, p, err)
		}
	}
}

func TestUnknownNamesAndDepthsAreRefused(t *testing.T) {
	_, err := New("gimball", Config{Depth: 1})
	if err == nil {
		t.Fatal("no error")
	}
	for _, name := range append(Names(), "gimball") {
		if !strings.Contains(err.Error(), name) {
			t.Errorf("%q does not say %s", err, name)
		}
	}
	if _, err := New("fifo", Config{}); err == nil {
		t.Error("a depth of 0 passes")
	}
}

// TestEveryPolicyKeepsTheDepthAndFinishesAll in a Pipeline, as in the daemon.
func TestEveryPolicyKeepsTheDepthAndFinishesAll(t *testing.T) {
	const depth, ios, tenants = 8, 400, 5
	for _, name := range Names() {
		p, err := New(name, Config{Depth: depth})
		if err != nil {
			t.Fatal(err)
		}
		pipe := pipeline.New(p)
		for tag := range pipeline.Tag(ios) {
			pipe.Enqueue(0, pipeline.IO{Tag: tag, Tenant: tenant.ID(tag % tenants), Op: pipeline.Op(tag) % pipeline.Ops,
				LenBytes: 4096 << (tag % 6)})
		}
		var now int64
		var flight, dst, done []pipeline.Tag
		for len(done) < ios {
			dst = pipe.Dispatch(now, dst[:0])
			flight = append(flight, dst...)
			if len(flight) > depth {
				t.Fatalf("%s: %d at the device, at most %d", name, len(flight), depth)
			}
			if len(flight) == 0 {
				at, ok := pipe.NextWake(now)
				if !ok {
					t.Fatalf("%s: %d I/Os are stranded", name, pipe.Queued())
				}
				now = max(now, at)
				continue
			}
			now += 50_000
			pipe.Complete(now, flight[0], pipeline.Result{LatencyNS: 50_000})
			done = append(done, flight[0])
			flight = flight[1:]
		}
		slices.Sort(done)
		if len(slices.Compact(done)) != ios || pipe.Queued() != 0 || pipe.Inflight() != 0 {
			t.Errorf("%s: %d queued, %d in flight", name, pipe.Queued(), pipe.Inflight())
		}
		for i := range tenant.ID(tenants) {
			pipe.RemoveTenant(now, i)
		}
		if left := pipe.Tenants(nil); len(left) != 0 {
			t.Errorf("%s: tenants %v are left", name, left)
		}
	}
}
