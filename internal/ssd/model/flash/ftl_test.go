package flash

import (
	"math"
	"testing"
)

// checkMap checks the invariants of the translation layer.
func checkMap(t *testing.T, d *Drive) {
	t.Helper()
	f := d.ftl
	valid := make([]uint32, len(f.valid))
	mapped := 0
	for p, u := range f.p2l {
		if u == none {
			continue
		}
		if f.l2p[u] != uint32(p) {
			t.Fatalf("physical unit %d says it holds unit %d, which the map has at %d", p, u, f.l2p[u])
		}
		b := uint32(p) >> f.blockShift
		if s := f.state[b]; s == blockFree || s == blockErase {
			t.Fatalf("physical unit %d holds unit %d in block %d of state %d", p, u, b, s)
		}
		valid[b]++
		mapped++
	}
	buffered := 0
	for u, p := range f.l2p {
		switch {
		case p == none:
		case p&inBuffer != 0:
			buffered++
			if d.slots[p&^inBuffer].unit != uint32(u) {
				t.Fatalf("unit %d is mapped to slot %d, which holds unit %d", u, p&^inBuffer, d.slots[p&^inBuffer].unit)
			}
		case f.p2l[p] != uint32(u):
			t.Fatalf("unit %d is mapped to %d, which holds unit %d", u, p, f.p2l[p])
		default:
			mapped--
		}
	}
	if mapped != 0 {
		t.Fatalf("%d more physical units hold something than are mapped", mapped)
	}
	if used := len(d.slots) - d.nFree; buffered > used {
		t.Fatalf("%d units are in the buffer, of which %d slots are taken", buffered, used)
	}
	for i := range f.dies {
		sum, free := int64(0), 0
		for b := uint32(i) * f.blocksPerDie; b < uint32(i+1)*f.blocksPerDie; b++ {
			if valid[b] != f.valid[b] {
				t.Fatalf("block %d has %d valid units, counted as %d", b, valid[b], f.valid[b])
			}
			sum += int64(valid[b])
			if f.state[b] == blockFree {
				free++
			}
		}
		if sum != f.dies[i].valid || free != f.dies[i].nFree || free < 1 {
			t.Fatalf("die %d has %d valid units and %d erased blocks, counted as %d and %d; at least one must "+
				"be erased", i, sum, free, f.dies[i].valid, f.dies[i].nFree)
		}
	}
}

// Random operations against a plain model: which units are mapped, and every few of them all the invariants.
func TestTheMapHoldsUnderRandomOperations(t *testing.T) {
	cfg, err := Preset("dct983", 64<<20)
	if err != nil {
		t.Fatal(err)
	}
	for seed := uint64(1); seed <= 3; seed++ {
		cfg.Seed = seed
		cfg.OverProvisionPermille = []int64{20, 90, 400}[seed-1]
		d, err := New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		d.Precondition(Condition(seed - 1))
		units := uint32(len(d.ftl.l2p))
		model := make([]bool, units)
		for u := range model {
			model[u] = seed > 1
		}
		r := newRandom(seed)
		var done []Completion
		for i := range 60_000 {
			// One after the other, so that the model knows the order.
			first, n := r.below(units), r.below(16)+1
			n = min(n, units-first)
			op, value := Write, true
			switch x := r.below(100); {
			case x < 10:
				op = Read
			case x < 14:
				op, value = Deallocate, false
			case x < 16:
				op, value = WriteZeroes, false
			}
			at := d.nowNS
			d.Submit(at, Request{Op: op, OffsetBytes: int64(first) * unitBytes, LenBytes: int64(n) * unitBytes})
			for done = done[:0]; len(done) == 0; {
				at, _ = d.NextEvent()
				done = d.Advance(at, done)
			}
			if op != Read {
				for u := first; u < first+n; u++ {
					model[u] = value
				}
			}
			if i%3000 == 0 {
				checkMap(t, d)
				for u := range model {
					if model[u] != (d.ftl.l2p[u] != none) {
						t.Fatalf("after %d operations unit %d is at %#x, want mapped: %v", i, u, d.ftl.l2p[u], model[u])
					}
				}
			}
		}
		if d.ftl.erases == 0 {
			t.Error("nothing was erased: the test does not reach collection")
		}
	}
}

// Uniform random writes: with alpha = physical / logical units that take part, the amplification of
// greedy collection is A = alpha / (alpha + W(-alpha e^-alpha)) with Lambert's W for large blocks
// (Desnoyers, "Analytic Modeling of SSD Write Performance").
func TestWriteAmplificationIsThatOfGreedyCollection(t *testing.T) {
	for _, permille := range []int64{70, 90, 150, 300} {
		cfg, err := Preset("dct983", 1<<30)
		if err != nil {
			t.Fatal(err)
		}
		cfg.OverProvisionPermille = permille
		d, err := New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		d.Precondition(Fragmented)
		run(t, d, 0, 2000*ms, &stream{op: Write, bytes: 4 << 10, depth: 32})
		f := d.ftl
		valid := int64(0)
		for i := range f.dies {
			valid += f.dies[i].valid
		}
		// The erased blocks that a die keeps and one block's worth of its two frontiers take no part.
		physical := int64(len(f.p2l)) - int64(len(f.dies)*(cfg.GCStartBlocks+1))<<f.blockShift
		alpha := float64(physical) / float64(valid)
		w := -0.5 // Lambert's W by Newton's method: w e^w = x
		x := -alpha * math.Exp(-alpha)
		for range 60 {
			w -= (w*math.Exp(w) - x) / (math.Exp(w) * (w + 1))
		}
		want := alpha / (alpha + w)
		got := d.Stats().WriteAmplification
		t.Logf("over-provisioning %d permille (alpha %.4f): amplification %.2f, formula %.2f", permille, alpha, got,
			want)
		if math.Abs(got/want-1) > 0.10 {
			t.Errorf("over-provisioning %d permille: amplification %.2f is not within 10 %% of %.2f", permille, got,
				want)
		}
	}
}

func TestPreconditionedStateIsSteady(t *testing.T) {
	fragmented := preset(t, "dct983", 1<<30, Fragmented)
	checkMap(t, fragmented)
	w := &stream{op: Write, bytes: 4 << 10, depth: 64}
	d := fragmented.Clone()
	run(t, d, 300*ms, 500*ms, w)
	first := w.mbps(500 * ms)
	run(t, d, 2000*ms, 500*ms, w)
	later := w.mbps(500 * ms)
	if math.Abs(later/first-1) > 0.05 {
		t.Errorf("random writes ran at %.1f MB/s and two seconds later at %.1f MB/s", first, later)
	}
	// Then write three times the capacity, in no virtual time.
	units := uint32(len(d.ftl.l2p))
	d = fragmented.Clone()
	for n := uint32(0); n < 3*units; n += d.programUnits {
		d.programNow(func(uint32) uint32 { return d.rnd.below(units) }, d.programUnits)
	}
	checkMap(t, d)
	run(t, d, 300*ms, 500*ms, w)
	if end := w.mbps(500 * ms); math.Abs(end/first-1) > 0.05 {
		t.Errorf("random writes ran at %.1f MB/s and three times the capacity later at %.1f MB/s", first, end)
	}
	t.Logf("%.1f MB/s, later %.1f MB/s, in the end %.1f MB/s", first, later, w.mbps(500*ms))
}

func TestEverySizeCanBePreconditioned(t *testing.T) {
	for _, permille := range []int64{20, 90, 10_000} {
		for _, size := range []int64{16 << 20, 16<<20 + 4096, 50_003 * 4096, 300 << 20} {
			cfg, err := Preset("dct983", size)
			if err != nil {
				t.Fatal(err)
			}
			cfg.OverProvisionPermille = permille
			d, err := New(cfg)
			if err != nil {
				t.Fatal(err)
			}
			for _, c := range []Condition{Fragmented, Empty, Clean} {
				d.Precondition(c)
				checkMap(t, d)
				for u, p := range d.ftl.l2p {
					if (p == none) != (c == Empty) {
						t.Fatalf("%d bytes, %d permille, condition %d: unit %d is at %#x", size, permille, c, u, p)
					}
				}
			}
		}
	}
}
