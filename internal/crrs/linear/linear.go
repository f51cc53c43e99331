// Package linear checks whether what clients have seen of one key is linearizable, in the time of a sort.
package linear

import (
	"cmp"
	"fmt"
	"math"
	"slices"
)

// Operation is a read or write of one key, as its client saw it. Every write writes another value, so that it is known
// which write a read has seen; value 0 is the state before the first write.
type Operation struct {
	Write bool
	Value uint64
	// Begin and End are when it was sent and answered. End is math.MaxInt64 for a write whose outcome the client does
	// not know.
	Begin, End int64
	// Swap: the write was done because the value was Replaced.
	Swap     bool
	Replaced uint64
}

func (o Operation) String() string {
	kind := "read"
	if o.Write {
		kind = "write"
	}
	return fmt.Sprintf("%s %d [%d, %d]", kind, o.Value, o.Begin, o.End)
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

// Check reports, as an error, why the operations of one key are not linearizable.
//
// All operations of one value must be next to each other in the order that is looked for, the write first. A value that
// was swapped for another one is next to it. The operations are linearizable if and only if no two forward zones
// overlap and no other zone lies within a forward one.
//
// Source: Gibbons and Korach, Testing shared memories (SIAM J. Comput. 26, 1997), for writes of different values.
func Check(ops []Operation) error {
	byValue := map[uint64][]Operation{}
	for _, o := range ops {
		byValue[o.Value] = append(byValue[o.Value], o)
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
			if other, twice := successor[swap.Replaced]; twice {
				return fmt.Errorf("value %d was swapped for %d and for %d", swap.Replaced, other, value)
			}
			successor[swap.Replaced], replaced[value] = value, true
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
func spanOf(value uint64, group []Operation) (s *span, swap *Operation, err error) {
	var w *Operation
	s = &span{firstEnd: math.MaxInt64, lastBegin: math.MinInt64, values: []uint64{value}}
	for i, o := range group {
		if o.Write && w != nil {
			return nil, nil, fmt.Errorf("value %d was written twice", value)
		}
		if o.Write {
			w = &group[i]
		}
		s.firstEnd, s.lastBegin = min(s.firstEnd, o.End), max(s.lastBegin, o.Begin)
	}
	switch {
	case value == 0:
		s.firstEnd = math.MinInt64
		return s, nil, nil
	case w == nil:
		return nil, nil, fmt.Errorf("%v: nobody has written that", group[0])
	case w.End == math.MaxInt64 && len(group) == 1:
		return nil, nil, nil
	}
	for _, o := range group {
		if o.End < w.Begin {
			return nil, nil, fmt.Errorf("%v before %v", o, *w)
		}
	}
	if w.Swap && w.End != math.MaxInt64 {
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
