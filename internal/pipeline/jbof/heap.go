package jbof

import "jbofd/internal/pipeline"

// heap holds the tenants with I/Os in a lane, the one furthest behind first.
type heap []pipeline.Tenant

// before is the order of a heap: by virtual time, then by arrival.
func (p *Policy) before(lane int, a, b pipeline.Tenant) bool {
	x, y := &p.tenants[a], &p.tenants[b]
	if x.virtual != y.virtual {
		return x.virtual < y.virtual
	}
	return p.ios[x.queues[lane].first].seq < p.ios[y.queues[lane].first].seq
}

func (p *Policy) place(lane, i int, t pipeline.Tenant) {
	p.heaps[lane][i] = t
	p.tenants[t].queues[lane].pos = int32(i)
}

func (p *Policy) push(lane int, t pipeline.Tenant) {
	p.heaps[lane] = append(p.heaps[lane], t)
	p.up(lane, len(p.heaps[lane])-1)
}

// remove takes the i-th out.
func (p *Policy) remove(lane, i int) {
	h := p.heaps[lane]
	p.tenants[h[i]].queues[lane].pos = -1
	n := len(h) - 1
	last := h[n]
	p.heaps[lane] = h[:n]
	if i == n {
		return
	}
	p.place(lane, i, last)
	p.up(lane, i)
	p.down(lane, int(p.tenants[last].queues[lane].pos))
}

// up moves the i-th to its place towards the top.
func (p *Policy) up(lane, i int) {
	h := p.heaps[lane]
	t := h[i]
	for i > 0 {
		parent := (i - 1) / 2
		if !p.before(lane, t, h[parent]) {
			break
		}
		p.place(lane, i, h[parent])
		i = parent
	}
	p.place(lane, i, t)
}

// down moves the i-th to its place away from the top.
func (p *Policy) down(lane, i int) {
	h := p.heaps[lane]
	t := h[i]
	for {
		child := 2*i + 1
		if child >= len(h) {
			break
		}
		if child+1 < len(h) && p.before(lane, h[child+1], h[child]) {
			child++
		}
		if !p.before(lane, h[child], t) {
			break
		}
		p.place(lane, i, h[child])
		i = child
	}
	p.place(lane, i, t)
}
