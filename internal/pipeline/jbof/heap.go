package jbof

import "jbofd/internal/tenant"

// heap holds the tenants with I/Os queued in a lane; the one with the least virtual time is first.
type heap []tenant.ID

// before orders a heap: by virtual time, then by arrival.
func (p *Policy) before(lane int, a, b tenant.ID) bool {
	x, y := &p.tenants[a], &p.tenants[b]
	if x.virtual != y.virtual {
		return x.virtual < y.virtual
	}
	return p.ios[x.queues[lane].first].seq < p.ios[y.queues[lane].first].seq
}

func (p *Policy) place(lane, i int, t tenant.ID) {
	p.heaps[lane][i] = t
	p.tenants[t].queues[lane].pos = int32(i)
}

func (p *Policy) push(lane int, t tenant.ID) {
	p.heaps[lane] = append(p.heaps[lane], t)
	p.up(lane, len(p.heaps[lane])-1)
}

// remove removes the i-th element.
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

// up moves the i-th element towards the top until the order holds.
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

// down moves the i-th element away from the top until the order holds.
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
