package baseline

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"jbofd/internal/pipeline"
	"jbofd/internal/tenant"
)

func TestFlashFQCostIsLinear(t *testing.T) {
	f := NewFlashFQ(FlashFQConfig{Depth: 1, Read: LinearCost{FixedNS: 1000, PerMiBNS: 1 << 20},
		Write: LinearCost{FixedNS: 3000, PerMiBNS: 4 << 20}})
	for _, c := range []struct {
		class    pipeline.Class
		lenBytes int64
		want     int64
	}{
		{pipeline.ReadClass, 4096, 5096}, {pipeline.ReadClass, 131072, 132072}, {pipeline.WriteClass, 4096, 19384},
		{pipeline.WriteClass, 0, 3000}, {pipeline.OtherClass, 1 << 30, 1000},
	} {
		if got := f.cost(&request{class: c.class, lenBytes: c.lenBytes}); got != c.want {
			t.Errorf("%v of %d: %d ns, want %d", c.class, c.lenBytes, got, c.want)
		}
	}
}

// TestFlashFQFairnessBound: between any two moments while two tenants are backlogged, their dispatched cost divided by
// weight differs by no more than their largest I/Os divided by weight. Their completed cost differs by D more of these.
func TestFlashFQFairnessBound(t *testing.T) {
	t.Logf("-seed %d", *seed)
	rng := rand.New(rand.NewPCG(*seed, 3))
	for range 40 {
		depth, n := 1+rng.IntN(16), 2+rng.IntN(6)
		f := NewFlashFQ(FlashFQConfig{Depth: depth})
		weights := make([]float64, n)
		largest := make([]float64, n)
		dispatched := make([]float64, n)
		completed := make([]float64, n)
		ios := map[pipeline.Tag]pipeline.IO{}
		next := pipeline.Tag(0)
		enqueue := func(i int) {
			io := pipeline.IO{Tag: next, Tenant: tenant.ID(i), Op: pipeline.Op(rng.IntN(3)),
				LenBytes: 512 << rng.IntN(9)}
			next++
			ios[io.Tag] = io
			f.Enqueue(1, io)
			largest[i] = max(largest[i], float64(f.cost(&f.ios[io.Tag])))
		}
		for i := range n {
			w := 1 + rng.IntN(5)
			weights[i] = float64(w)
			f.SetTenant(0, tenant.ID(i), w)
			for range 20 {
				enqueue(i)
			}
		}
		var flight, dst []pipeline.Tag
		for range 3000 {
			dst = f.Dispatch(1, dst[:0])
			for _, tag := range dst {
				i := int(ios[tag].Tenant)
				dispatched[i] += float64(f.cost(&f.ios[tag]))
				enqueue(i) // stays backlogged
			}
			flight = append(flight, dst...)
			if len(flight) > depth {
				t.Fatalf("%d in flight, at most %d", len(flight), depth)
			}
			k := rng.IntN(len(flight))
			tag := flight[k]
			flight = slices.Delete(flight, k, k+1)
			completed[ios[tag].Tenant] += float64(f.cost(&f.ios[tag]))
			f.Complete(1, tag, pipeline.Result{})
			for i := range n {
				for j := range i {
					unit := largest[i]/weights[i] + largest[j]/weights[j]
					if d := math.Abs(dispatched[i]/weights[i] - dispatched[j]/weights[j]); d > unit+1 {
						t.Fatalf("dispatched differs by %.0f, at most %.0f", d, unit)
					}
					if d := math.Abs(completed[i]/weights[i] - completed[j]/weights[j]); d > float64(depth+1)*unit+1 {
						t.Fatalf("completed differs by %.0f, at most %.0f", d, float64(depth+1)*unit)
					}
				}
			}
		}
	}
}

// serial returns the service time of FlashFQ's default model.
func serial(op pipeline.Op, lenBytes int64) int64 {
	f := NewFlashFQ(FlashFQConfig{Depth: 1})
	return f.cost(&request{class: op.Class(), lenBytes: lenBytes})
}

func TestFlashFQSharesByWeight(t *testing.T) {
	r := rig{p: NewFlashFQ(FlashFQConfig{Depth: 8}), service: serial}
	for i := range 3 {
		r.streams = append(r.streams, stream{op: pipeline.Read, lenBytes: 4096, depth: 32, weight: 1 << i})
	}
	got := r.run(1e9)
	for i := range 3 {
		within(t, "share", float64(got[i])/float64(got[0]), float64(int(1)<<i), 1)
	}
}

func TestFlashFQSharesByCost(t *testing.T) {
	r := rig{p: NewFlashFQ(FlashFQConfig{Depth: 8}), service: serial, streams: []stream{
		{op: pipeline.Read, lenBytes: 4096, depth: 32}, {op: pipeline.Read, lenBytes: 131072, depth: 32},
		{op: pipeline.Write, lenBytes: 4096, depth: 32},
	}}
	got := r.run(1e9)
	for i, s := range r.streams {
		within(t, "device time", float64(got[i]*serial(s.op, s.lenBytes)), 1e9/3, 2)
	}
}

// TestFlashFQAnticipation: a tenant with a think time of 20 µs after each I/O gets its half beside one that is always
// backlogged. Without anticipation it gets one I/O for each of the other's.
func TestFlashFQAnticipation(t *testing.T) {
	run := func(anticipateNS int64) (share float64) {
		r := rig{p: NewFlashFQ(FlashFQConfig{Depth: 1, AnticipateNS: anticipateNS}), service: serial, streams: []stream{
			{op: pipeline.Read, lenBytes: 16384, depth: 1, thinkNS: 5_000},
			{op: pipeline.Read, lenBytes: 1 << 20, depth: 8},
		}}
		got := r.run(1e9)
		mine, others := got[0]*serial(pipeline.Read, 16384), got[1]*serial(pipeline.Read, 1<<20)
		return float64(mine) / float64(mine+others)
	}
	within(t, "with anticipation", run(0), 0.5, 3)
	if got := run(-1); got > 0.1 {
		t.Errorf("without anticipation it has %.2f; the test shows nothing", got)
	}
}

func TestFlashFQAnticipationIsBounded(t *testing.T) {
	f := NewFlashFQ(FlashFQConfig{Depth: 1, AnticipateNS: 1000})
	for i := range tenant.ID(2) {
		f.SetTenant(0, i, 1)
	}
	// once lets tenant 0 complete a small I/O beside tenant 1, which is ahead of it, and returns for how long
	// that has to wait.
	once := func(now int64, tag pipeline.Tag) int64 {
		first, second := pipeline.IO{Tag: 100 + tag, Tenant: 1, LenBytes: 1 << 20},
			pipeline.IO{Tag: 200 + tag, Tenant: 1, LenBytes: 1 << 20}
		small := pipeline.IO{Tag: tag, Tenant: 0, LenBytes: 512}
		for _, io := range []pipeline.IO{first, small} {
			f.Enqueue(now, io)
			if io == small {
				f.Enqueue(now, second)
			}
			if dst := f.Dispatch(now, nil); len(dst) != 1 || dst[0] != io.Tag {
				t.Fatalf("dispatched %v, want %d", dst, io.Tag)
			}
			f.Complete(now, io.Tag, pipeline.Result{})
		}
		for waited := now; ; {
			if dst := f.Dispatch(waited, nil); len(dst) > 0 {
				f.Complete(waited, dst[0], pipeline.Result{})
				return waited - now
			}
			at, ok := f.NextWake()
			if !ok || at <= waited {
				t.Fatalf("at %d it wakes at %d, %v", waited, at, ok)
			}
			waited = at
		}
	}
	if got := once(1000, 0); got != 1000 {
		t.Errorf("the others wait for %d ns, want 1000", got)
	}
	if got := once(50_000, 1); got != 0 {
		t.Errorf("the others wait for %d ns for one who did not come, want 0", got)
	}
	// It comes back soon, so the others wait again.
	f.Enqueue(50_500, pipeline.IO{Tag: 2, Tenant: 0, LenBytes: 512})
	f.Complete(50_600, f.Dispatch(50_600, nil)[0], pipeline.Result{})
	if !f.flows[0].hopeful {
		t.Error("one who came in time is not expected again")
	}
}

func TestFlashFQIdlenessEarnsNothing(t *testing.T) {
	f := NewFlashFQ(FlashFQConfig{Depth: 1})
	f.SetTenant(0, 0, 1)
	f.SetTenant(0, 1, 1)
	turn := func(tenants ...tenant.ID) tenant.ID {
		for _, t := range tenants {
			if f.flows[t].queue.n == 0 {
				f.Enqueue(1, pipeline.IO{Tag: pipeline.Tag(t), Tenant: t, LenBytes: 4096})
			}
		}
		tag := f.Dispatch(1, nil)[0]
		f.Complete(1, tag, pipeline.Result{})
		f.endAnticipation(f.ios[tag].tenant)
		return f.ios[tag].tenant
	}
	for range 1000 {
		turn(0)
	}
	var had [2]int
	for range 100 {
		had[turn(0, 1)]++
	}
	if had[0] < 49 || had[0] > 51 {
		t.Errorf("after a long time without the second, they get %v of 100", had)
	}
}

func TestFlashFQDoesNotAnticipateRemovedTenants(t *testing.T) {
	for name, leave := range map[string]bool{"left": true, "lost its claim": false} {
		f := NewFlashFQ(FlashFQConfig{Depth: 2})
		f.SetTenant(0, 0, 1)
		f.SetTenant(0, 1, 1)
		f.Enqueue(0, pipeline.IO{Tag: 0, Tenant: 0, LenBytes: 512})
		for i := range pipeline.Tag(4) {
			f.Enqueue(0, pipeline.IO{Tag: 1 + i, Tenant: 1, LenBytes: 1 << 20})
		}
		f.Dispatch(0, nil) // 0 and 1
		if !leave {
			f.Complete(0, 1, pipeline.Result{})
			f.Dispatch(0, nil) // 2, whose start tag is beyond what 0 would have had
		}
		f.Complete(0, 0, pipeline.Result{})
		if leave {
			if dst := f.Dispatch(0, nil); len(dst) != 0 {
				t.Fatalf("%v goes before the one who is expected; the test shows nothing", dst)
			}
			f.RemoveTenant(0, 0)
		}
		if dst := f.Dispatch(0, nil); len(dst) != 1 {
			t.Errorf("%s: dispatched %v, want one", name, dst)
		}
	}
}
