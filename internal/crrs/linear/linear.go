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
	if o.Swap {
		kind = fmt.Sprintf("swap of %d for", o.Replaced)
	} else if o.Write {
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

// groups are operations in the order of their values.
type groups []Operation

// of returns the operations of a value.
func (g groups) of(value uint64) []Operation {
	from, _ := slices.BinarySearchFunc(g, value, func(o Operation, v uint64) int { return cmp.Compare(o.Value, v) })
	to := from
	for to < len(g) && g[to].Value == value {
		to++
	}
	return g[from:to]
}

// Check reports, as an error, why the operations of one key are not linearizable.
//
// All operations of one value must be next to each other in the order that is looked for, the write first. A value that
// was swapped for another one is next to it. The operations are linearizable if and only if no two forward zones
// overlap and no other zone lies within a forward one.
//
// Source: Gibbons and Korach, Testing shared memories (SIAM J. Comput. 26, 1997), for writes of different values.
func Check(ops []Operation) error {
	all := groups(slices.Clone(ops))
	slices.SortFunc(all, func(a, b Operation) int { return cmp.Compare(a.Value, b.Value) })
	happened, err := swapped(all)
	if err != nil {
		return err
	}
	spans := make([]*span, 0, len(all)) // in the order of values
	successor, replaced := map[uint64]uint64{}, map[uint64]bool{}
	if happened[0] && all[0].Value != 0 {
		spans = append(spans, &span{firstEnd: math.MinInt64, lastBegin: math.MinInt64, values: []uint64{0}})
	}
	for rest := all; len(rest) > 0; {
		value, n := rest[0].Value, 1
		for n < len(rest) && rest[n].Value == value {
			n++
		}
		s, swap, err := spanOf(value, rest[:n], happened[value])
		rest = rest[n:]
		if err != nil {
			return err
		}
		if s == nil {
			continue // it may never have happened
		}
		spans = append(spans, s)
		if swap != nil {
			if other, twice := successor[swap.Replaced]; twice {
				return fmt.Errorf("value %d was swapped for %d and for %d", swap.Replaced, other, value)
			}
			successor[swap.Replaced], replaced[value] = value, true
		}
	}
	zones, err := all.zones(spans, successor, replaced)
	if err != nil {
		return err
	}
	if a, b := overlap(zones); a != nil {
		err := fmt.Errorf("values %v and %v", a.values, b.values)
		for _, value := range slices.Concat(a.values, b.values) {
			err = fmt.Errorf("%w; %v", err, all.of(value))
		}
		return err
	}
	return nil
}

// swapped returns the values of which a swap shows that they were there. Others may have been there, too.
func swapped(all groups) (map[uint64]bool, error) {
	happened := map[uint64]bool{}
	for i, o := range all {
		near := func(k int) bool { return k >= 0 && k < len(all) && all[k].Value == o.Value }
		if !o.Write || !o.Swap || o.End == math.MaxInt64 && !near(i-1) && !near(i+1) {
			continue // no swap, or one that may never have happened
		}
		for swap := &o; swap != nil && !happened[swap.Replaced]; {
			value, group := swap.Replaced, all.of(swap.Replaced)
			happened[value] = true
			i := slices.IndexFunc(group, func(o Operation) bool { return o.Write })
			if value != 0 && i < 0 {
				return nil, fmt.Errorf("%v has replaced %d, which nobody has written", *swap, value)
			}
			if swap = nil; i >= 0 && group[i].Swap {
				swap = &group[i]
			}
		}
	}
	return happened, nil
}

// zones returns the spans of values, one for those that were swapped for each other. The spans are in the order of
// their values.
func (g groups) zones(spans []*span, successor map[uint64]uint64, replaced map[uint64]bool) ([]*span, error) {
	find := func(value uint64) *span {
		i, _ := slices.BinarySearchFunc(spans, value,
			func(s *span, v uint64) int { return cmp.Compare(s.values[0], v) })
		return spans[i]
	}
	zones, left := make([]*span, 0, len(spans)), len(spans)
	for _, s := range spans {
		value := s.values[0]
		if replaced[value] {
			continue
		}
		merged := *s
		for next, ok := successor[value]; ok; next, ok = successor[next] {
			n := find(next)
			if merged.lastBegin > n.firstEnd {
				return nil, fmt.Errorf("value %d was swapped for %d: %v; %v", value, next, g.of(value), g.of(next))
			}
			merged.firstEnd, merged.lastBegin = min(merged.firstEnd, n.firstEnd), max(merged.lastBegin, n.lastBegin)
			merged.values = append(merged.values, next)
		}
		zones = append(zones, &merged)
		left -= len(merged.values)
	}
	if left > 0 {
		return nil, fmt.Errorf("%d values were swapped for each other in a circle", left)
	}
	return zones, nil
}

// spanOf returns the span of a value, or nil if it is not known that it was ever there, and the write if it was a swap.
// happened: it was there, as another one has replaced it.
func spanOf(value uint64, group []Operation, happened bool) (s *span, swap *Operation, err error) {
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
	case w.End == math.MaxInt64 && len(group) == 1 && !happened:
		return nil, nil, nil
	}
	for _, o := range group {
		if o.End < w.Begin {
			return nil, nil, fmt.Errorf("%v before %v", o, *w)
		}
	}
	if w.Swap {
		swap = w
	}
	return s, swap, nil
}

// overlap returns two zones that exclude each other, or nil.
func overlap(zones []*span) (*span, *span) {
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
				return last, z
			}
		}
		if forward {
			last = z
		}
	}
	return nil, nil
}
