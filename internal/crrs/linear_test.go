package crrs

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"testing"
)

// operation is a read or write of one key, as its client saw it. Every write writes another value, so that it is known
// which write a read has seen; value 0 is the state before the first write.
type operation struct {
	write      bool
	value      uint64
	begin, end int64 // end: math.MaxInt64 for a write whose outcome the client does not know
	// swap: the write was done because the value was replaced.
	swap     bool
	replaced uint64
}

func (o operation) String() string {
	kind := "read"
	if o.write {
		kind = "write"
	}
	return fmt.Sprintf("%s %d [%d, %d]", kind, o.value, o.begin, o.end)
}

// span is what the operations of one value, or of values that follow each other, say of the time at which they were
// there: the first end of an operation and the last begin of one.
type span struct {
	firstEnd, lastBegin int64
	values              []uint64
}

// zone is a span in the order of time. A forward one was there from its begin to its end, any other at some instant
// between.
func (s *span) zone() (from, to int64, forward bool) {
	return min(s.firstEnd, s.lastBegin), max(s.firstEnd, s.lastBegin), s.firstEnd < s.lastBegin
}

// linearizable reports, as an error, why the operations of one key are not linearizable. It takes the time of a sort.
//
// All operations of one value must be next to each other in the order that is looked for, the write first. A value that
// was swapped for another one is next to it. The operations are linearizable if and only if no two forward zones
// overlap and no other zone lies within a forward one.
//
// Source: Gibbons and Korach, Testing shared memories (SIAM J. Comput. 26, 1997), for writes of different values.
func linearizable(ops []operation) error {
	byValue := map[uint64][]operation{}
	for _, o := range ops {
		byValue[o.value] = append(byValue[o.value], o)
	}
	spans := map[uint64]*span{}
	successor, replaced := map[uint64]uint64{}, map[uint64]bool{}
	for value, group := range byValue {
		s, swap, err := spanOf(value, group)
		if err != nil {
			return err
		}
		if s == nil {
			continue // it may never have happened
		}
		spans[value] = s
		if swap != nil {
			if other, twice := successor[swap.replaced]; twice {
				return fmt.Errorf("value %d was swapped for %d and for %d", swap.replaced, other, value)
			}
			successor[swap.replaced], replaced[value] = value, true
		}
	}
	var zones []*span
	for value, s := range spans {
		if replaced[value] {
			continue
		}
		for next, ok := successor[value]; ok; next, ok = successor[next] {
			n := spans[next]
			if s.lastBegin > n.firstEnd {
				return fmt.Errorf("value %d was swapped for %d: %v; %v", value, next, byValue[value], byValue[next])
			}
			s.firstEnd, s.lastBegin = min(s.firstEnd, n.firstEnd), max(s.lastBegin, n.lastBegin)
			s.values = append(s.values, next)
		}
		zones = append(zones, s)
	}
	if err := disjoint(zones); err != nil {
		return fmt.Errorf("%w: %v", err, byValue)
	}
	return nil
}

// spanOf returns the span of a value, or nil if it is not known that it was ever there, and the write if it was a swap.
func spanOf(value uint64, group []operation) (s *span, swap *operation, err error) {
	var w *operation
	s = &span{firstEnd: math.MaxInt64, lastBegin: math.MinInt64, values: []uint64{value}}
	for i, o := range group {
		if o.write && w != nil {
			return nil, nil, fmt.Errorf("value %d was written twice", value)
		}
		if o.write {
			w = &group[i]
		}
		s.firstEnd, s.lastBegin = min(s.firstEnd, o.end), max(s.lastBegin, o.begin)
	}
	switch {
	case value == 0:
		s.firstEnd = math.MinInt64
		return s, nil, nil
	case w == nil:
		return nil, nil, fmt.Errorf("%v: nobody has written that", group[0])
	case w.end == math.MaxInt64 && len(group) == 1:
		return nil, nil, nil
	}
	for _, o := range group {
		if o.end < w.begin {
			return nil, nil, fmt.Errorf("%v before %v", o, *w)
		}
	}
	if w.swap && w.end != math.MaxInt64 {
		swap = w
	}
	return s, swap, nil
}

// disjoint reports zones that exclude each other.
func disjoint(zones []*span) error {
	slices.SortFunc(zones, func(a, b *span) int {
		af, at, _ := a.zone()
		bf, bt, _ := b.zone()
		return cmp.Or(cmp.Compare(af, bf), cmp.Compare(at, bt))
	})
	var last *span // the forward zone that ends last
	for _, z := range zones {
		from, to, forward := z.zone()
		if last != nil {
			lastFrom, lastTo, _ := last.zone()
			if forward && from < lastTo || !forward && from > lastFrom && to < lastTo {
				return fmt.Errorf("values %v and %v", last.values, z.values)
			}
		}
		if forward {
			last = z
		}
	}
	return nil
}

func TestTheCheckerKnowsWhatIsLinearizable(t *testing.T) {
	w := func(v uint64, begin, end int64) operation {
		return operation{write: true, value: v, begin: begin, end: end}
	}
	r := func(v uint64, begin, end int64) operation { return operation{value: v, begin: begin, end: end} }
	swap := func(old, v uint64, begin, end int64) operation {
		return operation{write: true, value: v, begin: begin, end: end, swap: true, replaced: old}
	}
	const never = math.MaxInt64
	for _, c := range []struct {
		name string
		ok   bool
		ops  []operation
	}{
		{"nothing", true, nil},
		{"a read of what is there", true, []operation{w(1, 1, 2), r(1, 3, 4)}},
		{"a read of what was there", false, []operation{w(1, 1, 2), w(2, 3, 4), r(1, 5, 6)}},
		{"a read during a write, either", true, []operation{w(1, 1, 2), w(2, 3, 9), r(1, 4, 5), r(2, 6, 7)}},
		{"a reader goes back in time", false, []operation{w(1, 1, 2), w(2, 3, 9), r(2, 4, 5), r(1, 6, 7)}},
		{"nothing after something", false, []operation{w(1, 1, 2), r(0, 3, 4)}},
		{"nothing before something", true, []operation{r(0, 1, 4), w(1, 2, 3), r(1, 3, 5)}},
		{"from nowhere", false, []operation{r(7, 1, 2)}},
		{"from the future", false, []operation{r(1, 1, 2), w(1, 3, 4)}},
		{"unknown and seen late", true, []operation{w(1, 1, never), w(2, 2, 3), r(2, 4, 5), r(1, 6, 7)}},
		{"unknown, seen, replaced, seen again", false,
			[]operation{w(1, 1, never), r(1, 2, 3), w(2, 4, 5), r(2, 6, 7), r(1, 8, 9)}},
		{"concurrent writes", true, []operation{w(1, 1, 9), w(2, 1, 9), r(1, 10, 11)}},
		{"concurrent writes, both last", false, []operation{w(1, 1, 9), w(2, 1, 9), r(1, 10, 11), r(2, 12, 13)}},
		{"a swap", true, []operation{w(1, 1, 2), swap(1, 2, 3, 4), r(2, 5, 6)}},
		{"two swaps of one value", false, []operation{w(1, 1, 2), swap(1, 2, 3, 9), swap(1, 3, 3, 9)}},
		{"a swap of what was replaced", false, []operation{w(1, 1, 2), w(2, 3, 4), swap(1, 3, 5, 6)}},
		{"a write that a swap has lost", false,
			[]operation{w(1, 1, 2), r(1, 3, 4), w(2, 5, 8), swap(1, 3, 6, 7), r(3, 9, 10)}},
		{"a write beside a swap", true, []operation{w(1, 1, 2), w(2, 5, 8), swap(1, 3, 6, 7), r(2, 9, 10)}},
		{"a chain of swaps", true, []operation{swap(0, 1, 1, 2), swap(1, 2, 3, 4), swap(2, 3, 5, 6), r(3, 7, 8)}},
		{"a write within the life of another value", false, []operation{w(1, 1, 2), w(2, 4, 5), r(1, 7, 8)}},
	} {
		if err := linearizable(c.ops); (err == nil) != c.ok {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}
