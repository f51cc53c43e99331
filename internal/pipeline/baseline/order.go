package baseline

import (
	"slices"

	"jbofd/internal/tenant"
)

// order is a heap of tenants by a key each, the least first; of equal keys that of the tenant with the least ID, so
// that runs are reproducible.
type order struct {
	heap []tenant.ID
	// places is indexed by tenant.
	places []place
}

// place of a tenant; at is an index in the heap, valid if the tenant is there.
type place struct {
	key float64
	at  int
}

// grow makes room for n tenants, so that nothing is allocated later.
func (o *order) grow(n int) {
	for n > len(o.places) {
		o.places = append(o.places, place{})
	}
	o.heap = slices.Grow(o.heap, n-len(o.heap))
}

// len is the number of tenants in the heap.
func (o *order) len() int { return len(o.heap) }

// first returns the tenant with the least key. There must be one.
func (o *order) first() tenant.ID { return o.heap[0] }

// key returns the key that a tenant had last.
func (o *order) key(t tenant.ID) float64 { return o.places[t].key }

// add adds a tenant.
func (o *order) add(t tenant.ID, key float64) {
	o.places[t] = place{key, len(o.heap)}
	o.heap = append(o.heap, t)
	o.up(len(o.heap) - 1)
}

// set changes the key of a tenant in the heap.
func (o *order) set(t tenant.ID, key float64) {
	p := &o.places[t]
	p.key = key
	o.up(p.at)
	o.down(p.at)
}

// remove removes a tenant.
func (o *order) remove(t tenant.ID) {
	i, last := o.places[t].at, len(o.heap)-1
	o.swap(i, last)
	o.heap = o.heap[:last]
	if i < last {
		o.up(i)
		o.down(i)
	}
}

// all changes the keys of all tenants in the heap.
func (o *order) all(key func(tenant.ID) float64) {
	for _, t := range o.heap {
		o.places[t].key = key(t)
	}
	for i := len(o.heap)/2 - 1; i >= 0; i-- {
		o.down(i)
	}
}

func (o *order) less(i, j int) bool {
	a, b := o.heap[i], o.heap[j]
	if o.places[a].key != o.places[b].key {
		return o.places[a].key < o.places[b].key
	}
	return a < b
}

func (o *order) swap(i, j int) {
	o.heap[i], o.heap[j] = o.heap[j], o.heap[i]
	o.places[o.heap[i]].at, o.places[o.heap[j]].at = i, j
}

func (o *order) up(i int) {
	for i > 0 && o.less(i, (i-1)/2) {
		o.swap(i, (i-1)/2)
		i = (i - 1) / 2
	}
}

func (o *order) down(i int) {
	for {
		least := i
		for c := 2*i + 1; c <= 2*i+2 && c < len(o.heap); c++ {
			if o.less(c, least) {
				least = c
			}
		}
		if least == i {
			return
		}
		o.swap(i, least)
		i = least
	}
}
