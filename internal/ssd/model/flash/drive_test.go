package flash

import (
	"slices"
	"testing"
)

// mix is a load of all operations; what completes is recorded.
func mix(t *testing.T, name string, seed uint64) []Completion {
	cfg, err := Preset(name, 64<<20)
	if err != nil {
		t.Fatal(err)
	}
	cfg.Seed = seed
	d, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	d.Precondition(Fragmented)
	r := newRandom(7)
	var all []Completion
	now := int64(0)
	for i := range uint64(20_000) {
		n := int64(r.below(64)+1) * 512
		d.Submit(now, Request{Op: Op(r.below(5)), OffsetBytes: int64(r.below(uint32(cfg.SizeBytes/512-64))) * 512, LenBytes: n, Tag: i})
		now += int64(r.below(20_000))
		all = d.Advance(now, all)
	}
	for at, ok := d.NextEvent(); ok; at, ok = d.NextEvent() {
		all = d.Advance(at, all)
	}
	return all
}

func TestSameSeedSameCompletions(t *testing.T) {
	for _, name := range Presets() {
		a, b := mix(t, name, 3), mix(t, name, 3)
		if len(a) != 20_000 || !slices.Equal(a, b) {
			t.Errorf("%s: two runs of one seed gave %d and %d completions that differ", name, len(a), len(b))
		}
		if slices.Equal(a, mix(t, name, 4)) {
			t.Errorf("%s: another seed gave the same completions", name)
		}
		if !slices.IsSortedFunc(a, func(x, y Completion) int { return int(x.AtNS - y.AtNS) }) {
			t.Errorf("%s: completions are not in order of time", name)
		}
	}
}
