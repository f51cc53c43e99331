package baseline

import (
	"errors"
	"testing"

	"jbofd/internal/pipeline"
	"jbofd/internal/tenant"
)

// fast is a device that takes no time.
func fast(pipeline.Op, int64) int64 { return 100 }

func TestReFlexCosts(t *testing.T) {
	f := NewReFlex(ReFlexConfig{Depth: 1})
	for _, c := range []struct {
		class    pipeline.Class
		lenBytes int64
		tokens   float64 // while there are writes
		readOnly float64
	}{
		{pipeline.ReadClass, 4096, 1, 0.5}, {pipeline.ReadClass, 512, 1, 0.5}, {pipeline.ReadClass, 6000, 2, 1},
		{pipeline.ReadClass, 131072, 32, 16},
		{pipeline.WriteClass, 4096, 10, 10}, {pipeline.WriteClass, 131072, 320, 320},
		{pipeline.OtherClass, 1 << 40, 1, 0.5},
	} {
		r := &request{class: c.class, lenBytes: c.lenBytes}
		f.writes = 1
		if got := float64(f.cost(0, r)) / tokenUnits; got != c.tokens {
			t.Errorf("%v of %d: %v tokens, want %v", c.class, c.lenBytes, got, c.tokens)
		}
		f.writes = 0
		if got := float64(f.cost(0, r)) / tokenUnits; got != c.readOnly {
			t.Errorf("%v of %d: %v tokens with only reads, want %v", c.class, c.lenBytes, got, c.readOnly)
		}
	}
}

// TestReFlexRateIsTheConfiguredOne, whatever the drive could do.
func TestReFlexRateIsTheConfiguredOne(t *testing.T) {
	for _, c := range []struct {
		name    string
		streams []stream
		tokens  float64 // per I/O of the first stream
	}{
		{"reads alone", []stream{{op: pipeline.Read, lenBytes: 4096, depth: 64}}, 0.5},
		{"writes alone", []stream{{op: pipeline.Write, lenBytes: 4096, depth: 64}}, 10},
		{"huge writes", []stream{{op: pipeline.Write, lenBytes: 1 << 20, depth: 4}, {}, {}}, 2560},
		{"large reads", []stream{{op: pipeline.Read, lenBytes: 131072, depth: 64}}, 16},
	} {
		r := rig{p: NewReFlex(ReFlexConfig{Depth: 256, TokensPerSec: 100_000}), service: fast, ns: 50_000,
			streams: c.streams}
		got := r.run(2e9)
		within(t, c.name, float64(got[0])*c.tokens, 200_000, 1)
	}
}

func TestReFlexBestEffortSharesByWeightAndCost(t *testing.T) {
	r := rig{p: NewReFlex(ReFlexConfig{Depth: 256, TokensPerSec: 210_000}), service: fast, ns: 50_000,
		streams: []stream{
			{op: pipeline.Read, lenBytes: 4096, depth: 64, weight: 1}, {op: pipeline.Write, lenBytes: 4096, depth: 64,
				weight: 2}, {op: pipeline.Read, lenBytes: 131072, depth: 64, weight: 4},
		}}
	got := r.run(2e9)
	for i, tokens := range []float64{1, 10, 32} {
		within(t, "tokens a second", float64(got[i])*tokens/2, 30_000*float64(r.streams[i].weight), 2)
	}
}

func TestReFlexIdleTokensAreRedistributed(t *testing.T) {
	r := rig{p: NewReFlex(ReFlexConfig{Depth: 256, TokensPerSec: 100_000}), service: fast, ns: 50_000,
		streams: []stream{
			// 1000 a second
			{op: pipeline.Write, lenBytes: 4096, depth: 64}, {}, {},
			{op: pipeline.Read, lenBytes: 4096, depth: 1, thinkNS: 950_000},
		}}
	got := r.run(2e9)
	within(t, "the light one's I/Os", float64(got[3]), 2000, 3)
	within(t, "tokens of the one who needs them", float64(got[0])*10, 198_000, 3)
}

func TestReFlexLatencyCriticalTenantHasItsReservation(t *testing.T) {
	f := NewReFlex(ReFlexConfig{Depth: 256, TokensPerSec: 100_000})
	f.SetTenant(0, 0, 1)
	if err := f.Reserve(0, 100_001); !errors.Is(err, ErrOverbooked) {
		t.Fatalf("more than there is: %v", err)
	}
	if err := f.Reserve(0, 60_000); err != nil {
		t.Fatal(err)
	}
	r := rig{p: f, service: fast, ns: 50_000, streams: []stream{
		{op: pipeline.Read, lenBytes: 4096, depth: 64}, {op: pipeline.Write, lenBytes: 4096, depth: 64},
		{op: pipeline.Write, lenBytes: 4096, depth: 64},
	}}
	got := r.run(2e9)
	within(t, "reserved", float64(got[0]), 120_000, 1)
	within(t, "best effort", float64(got[1])*10, 40_000, 2)
	within(t, "best effort", float64(got[2])*10, 40_000, 2)
	if err := f.Reserve(1, 50_000); !errors.Is(err, ErrOverbooked) {
		t.Errorf("more than is left: %v", err)
	}
}

func TestReFlexLatencyCriticalTenantMayOverdraw(t *testing.T) {
	f := NewReFlex(ReFlexConfig{Depth: 256, TokensPerSec: 1000})
	f.SetTenant(0, 0, 1)
	f.SetTenant(0, 1, 1)
	if err := f.Reserve(0, 500); err != nil {
		t.Fatal(err)
	}
	for i := range pipeline.Tag(200) {
		f.Enqueue(0, pipeline.IO{Tag: i, Tenant: tenant.ID(i % 2), Op: pipeline.Read, LenBytes: 4096})
	}
	f.Enqueue(0, pipeline.IO{Tag: 200, Tenant: 1, Op: pipeline.Write, LenBytes: 4096}) // reads cost 1
	n := 0
	for _, tag := range f.Dispatch(0, nil) {
		if tag%2 == 0 {
			n++
		}
	}
	if n != overdraft {
		t.Errorf("%d go at once, want %d", n, overdraft)
	}
	at, ok := f.NextWake()
	if !ok {
		t.Fatal("no wake-up")
	}
	if got := f.Dispatch(at-1, nil); len(got) != 0 {
		t.Errorf("%v goes before %d", got, at)
	}
}

func TestReFlexIdlenessSavesUpOneBurst(t *testing.T) {
	f := NewReFlex(ReFlexConfig{Depth: 1 << 20, TokensPerSec: 1_000_000})
	f.SetTenant(0, 0, 1)
	f.Dispatch(0, nil)
	for i := range pipeline.Tag(100_000) {
		f.Enqueue(60e9, pipeline.IO{Tag: i, Op: pipeline.Read, LenBytes: 4096})
	}
	if n := len(f.Dispatch(60e9, nil)); n != 2000 { // for half of a token each
		t.Errorf("%d I/Os go at once, want those that 1 ms pays for", n)
	}
}

func TestReFlexWakesWhenReadsBecomeCheaper(t *testing.T) {
	f := NewReFlex(ReFlexConfig{Depth: 8, TokensPerSec: 50})
	f.SetTenant(0, 0, 1)
	f.SetTenant(0, 1, 1)
	f.Enqueue(0, pipeline.IO{Tag: 0, Op: pipeline.Write, LenBytes: 4096})
	f.Cancel(0, 0)
	f.Enqueue(0, pipeline.IO{Tag: 1, Op: pipeline.Read, LenBytes: 4096})
	f.Dispatch(0, nil)
	// A token takes 20 ms, half a token 10 ms. By then a read costs no more than that.
	if at, ok := f.NextWake(); !ok || at != readOnlyAfterNS {
		t.Fatalf("wakes at %d, %v, want %d", at, ok, int64(readOnlyAfterNS))
	}
	if got := f.Dispatch(readOnlyAfterNS, nil); len(got) != 1 {
		t.Errorf("dispatched %v, want one", got)
	}
}

func TestReFlexUnusedReservationsAreShared(t *testing.T) {
	f := NewReFlex(ReFlexConfig{Depth: 256, TokensPerSec: 100_000})
	f.SetTenant(0, 0, 1)
	if err := f.Reserve(0, 80_000); err != nil {
		t.Fatal(err)
	}
	w := stream{op: pipeline.Write, lenBytes: 4096, depth: 64}
	r := rig{p: f, service: fast, ns: 50_000, streams: []stream{{}, w, w}}
	got := r.run(2e9)
	for _, n := range got[1:] {
		within(t, "tokens", float64(n)*10, 100_000, 5)
	}
}
