package linear

import (
	"math"
	"testing"
)

func TestTheCheckerKnowsWhatIsLinearizable(t *testing.T) {
	w := func(v uint64, begin, end int64) Operation {
		return Operation{Write: true, Value: v, Begin: begin, End: end}
	}
	r := func(v uint64, begin, end int64) Operation { return Operation{Value: v, Begin: begin, End: end} }
	swap := func(old, v uint64, begin, end int64) Operation {
		return Operation{Write: true, Value: v, Begin: begin, End: end, Swap: true, Replaced: old}
	}
	const never = math.MaxInt64
	for _, c := range []struct {
		name string
		ok   bool
		ops  []Operation
	}{
		{"nothing", true, nil},
		{"a read of what is there", true, []Operation{w(1, 1, 2), r(1, 3, 4)}},
		{"a read of what was there", false, []Operation{w(1, 1, 2), w(2, 3, 4), r(1, 5, 6)}},
		{"a read during a write, either", true, []Operation{w(1, 1, 2), w(2, 3, 9), r(1, 4, 5), r(2, 6, 7)}},
		{"a reader goes back in time", false, []Operation{w(1, 1, 2), w(2, 3, 9), r(2, 4, 5), r(1, 6, 7)}},
		{"nothing after something", false, []Operation{w(1, 1, 2), r(0, 3, 4)}},
		{"nothing before something", true, []Operation{r(0, 1, 4), w(1, 2, 3), r(1, 3, 5)}},
		{"from nowhere", false, []Operation{r(7, 1, 2)}},
		{"from the future", false, []Operation{r(1, 1, 2), w(1, 3, 4)}},
		{"unknown and seen late", true, []Operation{w(1, 1, never), w(2, 2, 3), r(2, 4, 5), r(1, 6, 7)}},
		{"unknown, seen, replaced, seen again", false,
			[]Operation{w(1, 1, never), r(1, 2, 3), w(2, 4, 5), r(2, 6, 7), r(1, 8, 9)}},
		{"concurrent writes", true, []Operation{w(1, 1, 9), w(2, 1, 9), r(1, 10, 11)}},
		{"concurrent writes, both last", false, []Operation{w(1, 1, 9), w(2, 1, 9), r(1, 10, 11), r(2, 12, 13)}},
		{"a swap", true, []Operation{w(1, 1, 2), swap(1, 2, 3, 4), r(2, 5, 6)}},
		{"two swaps of one value", false, []Operation{w(1, 1, 2), swap(1, 2, 3, 9), swap(1, 3, 3, 9)}},
		{"a swap of what was replaced", false, []Operation{w(1, 1, 2), w(2, 3, 4), swap(1, 3, 5, 6)}},
		{"a write that a swap has lost", false,
			[]Operation{w(1, 1, 2), r(1, 3, 4), w(2, 5, 8), swap(1, 3, 6, 7), r(3, 9, 10)}},
		{"a write beside a swap", true, []Operation{w(1, 1, 2), w(2, 5, 8), swap(1, 3, 6, 7), r(2, 9, 10)}},
		{"a chain of swaps", true, []Operation{swap(0, 1, 1, 2), swap(1, 2, 3, 4), swap(2, 3, 5, 6), r(3, 7, 8)}},
		{"a write within the life of another value", false, []Operation{w(1, 1, 2), w(2, 4, 5), r(1, 7, 8)}},
	} {
		if err := Check(c.ops); (err == nil) != c.ok {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}
