package replica

import (
	"bytes"
	"slices"
	"testing"
)

// TestSpareMemoryIsNotLongerThanItsValues: while the partition has no memory left for values, one that is needed gets
// some of its own, which is used again, and never given up. A write of a few bytes takes no MiB.
func TestSpareMemoryIsNotLongerThanItsValues(t *testing.T) {
	r := alone(t, headRole)
	longest := r.cfg.Batches.bytes
	var made []int
	r.cfg.Alloc = func(n int) ([]byte, error) {
		made = append(made, n)
		return make([]byte, n), nil
	}
	r.begin()
	var own []uint32
	for n := 1 << 16; n > 0; n /= 2 {
		for _, mem, ok := r.hold(make([]byte, n), false); ok; _, mem, ok = r.hold(make([]byte, n), false) {
			own = append(own, mem)
		}
	}
	for round, step := range []struct{ values, made []int }{
		{[]int{1, 4096 - frame}, []int{4096, 4096}},
		{[]int{100, 4097 - frame}, []int{8192}},
		{[]int{20_000}, []int{32 << 10}},
		{[]int{longest - frame, 30, 40}, []int{longest}},
		{[]int{longest - frame, 20_000, 5000, 1, 2}, nil},
		{[]int{1, 2, 3, 4, 5, 6}, []int{4096}}, // all else is in use
	} {
		made = nil
		var mems []uint32
		var all [][]byte
		for i, n := range step.values {
			want := bytes.Repeat([]byte{byte(i + 1)}, n)
			held, mem, ok := r.hold(want, true)
			if !ok || !bytes.Equal(held, want) {
				t.Fatalf("round %d: a value of %d bytes is not held", round, n)
			}
			mems, all = append(mems, mem), append(all, held)
		}
		for i := range all {
			if bytes.Count(all[i], []byte{byte(i + 1)}) != len(all[i]) {
				t.Errorf("round %d: value %d was overwritten", round, i)
			}
		}
		if !slices.Equal(made, step.made) {
			t.Errorf("round %d: memory of %d bytes was made, want %d", round, made, step.made)
		}
		r.release(mems)
	}
	r.release(own)
}
