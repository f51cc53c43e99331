package view

import (
	"cmp"
	"container/heap"
	"slices"
)

// placement is how the ranges are given to partitions: to Replicas different nodes each, and to different failure
// domains as far as there are as many, in proportion to the partitions' weights.
//
// What is placed stays. So a change of the members moves no more than it must: what a lost node had, or what a new node
// is to have. A lost node's ranges go to whoever has least for its weight, which spreads them over all others.
//
// Deviation from LEED 3.1.2 and consistent hashing with virtual nodes at random points: ranges of equal length are
// assigned, and the assignment is part of the view. Random points give some nodes twice the load of others; here loads
// differ by one range (TestPlacementIsEven), and as little moves (TestALostNodeMovesOnlyItsShare).
type placement struct {
	nodes    []Node
	parts    []Partition
	replicas int
	// usable says which partitions may be given ranges.
	usable []bool
	// domains are the numbers of the nodes' failure domains; spread: no two replicas of a range may share one.
	domains []int
	spread  bool
	load    []int
	target  []float64
	want    [][]PartitionID
}

// place returns the wanted partitions of each range. current are those that have been wanted so far, of which the first
// serving ones of a range serve; one that is not usable loses its ranges. With fewer usable nodes than replicas a range
// has fewer.
func place(nodes []Node, parts []Partition, usable []bool, replicas int, current [][]PartitionID, serving []int) (
	wanted [][]PartitionID) {
	p := &placement{nodes: nodes, parts: parts, replicas: replicas, usable: usable, load: make([]int, len(parts)),
		want: make([][]PartitionID, len(current))}
	p.numberDomains()
	p.setTargets()
	kept := make([]int, len(current)) // of those that serve
	for r, was := range current {
		now := make([]PartitionID, 0, max(replicas, len(was)))
		for i, id := range was {
			if usable[id] && p.fits(now, id) {
				now = append(now, id)
				p.load[id]++
				if i < serving[r] {
					kept[r]++
				}
			}
		}
		p.want[r] = now
	}
	p.shed(kept)
	p.fill()
	p.rebalance()
	return p.want
}

// numberDomains numbers the failure domains of the nodes that have usable partitions. A node without a name of a domain
// is a domain of its own.
func (p *placement) numberDomains() {
	used := make([]bool, len(p.nodes))
	for id := range p.parts {
		if p.usable[id] {
			used[p.parts[id].Node] = true
		}
	}
	names, count := map[string]int{}, 0
	p.domains = make([]int, len(p.nodes))
	for n := range p.nodes {
		name := p.nodes[n].Domain
		d, known := names[name]
		if name == "" || !known {
			d = len(p.nodes) + n // a number that no other domain has
			if name != "" {
				names[name] = d
			}
			if used[n] {
				count++
			}
		}
		p.domains[n] = d
	}
	p.spread = count >= p.replicas
}

// fits reports whether a partition may be added to the replicas of a range.
func (p *placement) fits(now []PartitionID, id PartitionID) bool {
	node := p.parts[id].Node
	for _, q := range now {
		other := p.parts[q].Node
		if other == node || p.spread && p.domains[other] == p.domains[node] {
			return false
		}
	}
	return true
}

// setTargets computes how many ranges each partition is to have. A node has a range at most once, so that what exceeds
// this goes to the others.
func (p *placement) setTargets() {
	ranges := float64(len(p.want))
	weight := make([]float64, len(p.nodes))
	for id := range p.parts {
		if p.usable[id] {
			weight[p.parts[id].Node] += float64(p.parts[id].Weight)
		}
	}
	share := make([]float64, len(p.nodes))
	left := ranges * float64(p.replicas)
	for full := true; full; {
		full = false
		total := 0.0
		for n, w := range weight {
			if share[n] < ranges {
				total += w
			}
		}
		for n, w := range weight {
			if share[n] < ranges && w > 0 && left*w/total > ranges {
				share[n], full = ranges, true
				left -= ranges
				break // so that the others' shares are computed anew
			}
		}
		if !full {
			for n, w := range weight {
				if share[n] < ranges && total > 0 {
					share[n] = left * w / total
				}
			}
		}
	}
	p.target = make([]float64, len(p.parts))
	for id := range p.parts {
		if n := p.parts[id].Node; p.usable[id] && weight[n] > 0 {
			p.target[id] = share[n] * float64(p.parts[id].Weight) / weight[n]
		}
	}
}

// shed takes from ranges with too many replicas those that do not serve, and then those of the partitions that have
// most for their target: so the others need not move. serving is how many of a range's first ones serve.
func (p *placement) shed(serving []int) {
	for r := range p.want {
		for len(p.want[r]) > p.replicas {
			at := len(p.want[r]) - 1
			if at < serving[r] {
				serving[r]--
				for i, id := range p.want[r] {
					if p.relative(id, 0) > p.relative(p.want[r][at], 0) {
						at = i
					}
				}
			}
			p.load[p.want[r][at]]--
			p.want[r] = slices.Delete(p.want[r], at, at+1)
		}
	}
}

// fill gives each range that has too few replicas those partitions that have least for their target.
func (p *placement) fill() {
	h := &leastLoaded{p: p}
	for id := range p.parts {
		if p.usable[id] && p.target[id] > 0 {
			h.ids = append(h.ids, PartitionID(id))
		}
	}
	heap.Init(h)
	var skipped []PartitionID
	for r := range p.want {
		for len(p.want[r]) < p.replicas && h.Len() > 0 {
			id := heap.Pop(h).(PartitionID)
			if !p.fits(p.want[r], id) {
				skipped = append(skipped, id)
				continue
			}
			p.want[r] = append(p.want[r], id)
			p.load[id]++
			for _, q := range append(skipped, id) {
				heap.Push(h, q)
			}
			skipped = skipped[:0]
		}
		for _, q := range skipped {
			heap.Push(h, q)
		}
		skipped = skipped[:0]
	}
}

// rebalance moves ranges from partitions that have more than their target to those that lack a range or more.
func (p *placement) rebalance() {
	var lacking []PartitionID
	for id := range p.parts {
		if p.usable[id] && p.lacks(PartitionID(id)) {
			lacking = append(lacking, PartitionID(id))
		}
	}
	if len(lacking) == 0 {
		return
	}
	held := make([][]int32, len(p.parts))
	for r, now := range p.want {
		for _, id := range now {
			held[id] = append(held[id], int32(r))
		}
	}
	givers := &mostLoaded{leastLoaded{p: p}}
	for id := range p.parts {
		if p.usable[id] && float64(p.load[id]) > p.target[id] {
			givers.ids = append(givers.ids, PartitionID(id))
		}
	}
	heap.Init(givers)
	for givers.Len() > 0 && len(lacking) > 0 {
		from := heap.Pop(givers).(PartitionID)
		slices.SortFunc(lacking, func(a, b PartitionID) int {
			return cmp.Compare(p.relative(a, 0), p.relative(b, 0))
		})
		for i, to := range lacking {
			if !p.move(held, from, to) {
				continue
			}
			if !p.lacks(to) {
				lacking = slices.Delete(lacking, i, i+1)
			}
			if float64(p.load[from]) > p.target[from] {
				heap.Push(givers, from)
			}
			break
		}
	}
}

func (p *placement) lacks(id PartitionID) bool { return float64(p.load[id]) <= p.target[id]-1 }

// move gives one of the ranges of a partition to another one, if there is one that it may have.
func (p *placement) move(held [][]int32, from, to PartitionID) bool {
	for i, r := range held[from] {
		now := p.want[r]
		at := slices.Index(now, from)
		rest := slices.Delete(slices.Clone(now), at, at+1)
		if !p.fits(rest, to) {
			continue
		}
		now[at] = to
		held[from] = slices.Delete(held[from], i, i+1)
		held[to] = append(held[to], r)
		p.load[from]--
		p.load[to]++
		return true
	}
	return false
}

// relative is what a partition would have for its target with that many ranges more.
func (p *placement) relative(id PartitionID, more int) float64 {
	return float64(p.load[id]+more) / p.target[id]
}

// leastLoaded is a heap of partitions. Among those with the same load the order is random and another one with each
// range that they get, so that all pairs of nodes meet in some chains.
type leastLoaded struct {
	p   *placement
	ids []PartitionID
}

func (h *leastLoaded) Len() int      { return len(h.ids) }
func (h *leastLoaded) Swap(i, j int) { h.ids[i], h.ids[j] = h.ids[j], h.ids[i] }
func (h *leastLoaded) Push(x any)    { h.ids = append(h.ids, x.(PartitionID)) }
func (h *leastLoaded) Pop() any {
	last := h.ids[len(h.ids)-1]
	h.ids = h.ids[:len(h.ids)-1]
	return last
}

func (h *leastLoaded) Less(i, j int) bool {
	a, b := h.ids[i], h.ids[j]
	return cmp.Or(cmp.Compare(h.p.relative(a, 1), h.p.relative(b, 1)), cmp.Compare(h.order(a), h.order(b))) < 0
}

// mostLoaded is a heap of partitions, those first that have most for their target.
type mostLoaded struct{ leastLoaded }

func (h *mostLoaded) Less(i, j int) bool {
	a, b := h.ids[i], h.ids[j]
	return cmp.Or(cmp.Compare(h.p.relative(b, 0), h.p.relative(a, 0)), cmp.Compare(h.order(a), h.order(b))) < 0
}

func (h *leastLoaded) order(id PartitionID) uint64 { return mix(uint64(h.p.load[id])<<32 | uint64(id)) }

// mix is a bijection that scatters its argument.
func mix(x uint64) uint64 {
	x = (x ^ x>>32) * 0xD6E8FEB86659FD93
	x = (x ^ x>>32) * 0xD6E8FEB86659FD93
	return x ^ x>>32
}
