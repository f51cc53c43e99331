package flash

import "testing"

// TestAClonedDriveBehavesLikeTheOriginal runs a drive and its clone, made under load, one after the other: they answer
// the same.
func TestAClonedDriveBehavesLikeTheOriginal(t *testing.T) {
	cfg, err := Preset("dct983", 1<<30)
	if err != nil {
		t.Fatal(err)
	}
	d, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	d.Precondition(Fragmented)
	load := func(d *Drive, from, ios int) (out []Completion) {
		r := newRandom(uint64(from) + 1)
		now := int64(from) * 1000
		for i := range ios {
			op := Read
			if i%3 == 0 {
				op = Write
			}
			d.Submit(now, Request{Op: op, OffsetBytes: int64(r.next()%(1<<18)) * 4096, LenBytes: 4096, Tag: uint64(i)})
			now += 5000
			out = d.Advance(now, out)
		}
		return out
	}
	load(d, 0, 5000)
	c := d.Clone()
	a, b := load(d, 30000, 20000), load(c, 30000, 20000)
	if len(a) != len(b) || len(a) == 0 {
		t.Fatalf("%d completions of the drive, %d of its clone", len(a), len(b))
	}
	for i := range a {
		if a[i] != b[i] {
			t.Fatalf("completion %d: %+v of the drive, %+v of its clone", i, a[i], b[i])
		}
	}
}
