package sim

// ring is a FIFO that grows on demand.
type ring[T any] struct {
	items []T
	first int
	n     int
}

func (r *ring[T]) push(v T) {
	if r.n == len(r.items) {
		grown := make([]T, max(16, 2*r.n))
		for i := range r.n {
			grown[i] = r.items[(r.first+i)&(len(r.items)-1)]
		}
		r.items, r.first = grown, 0
	}
	r.items[(r.first+r.n)&(len(r.items)-1)] = v
	r.n++
}

func (r *ring[T]) peek() *T { return &r.items[r.first] }

func (r *ring[T]) pop() T {
	v := r.items[r.first]
	r.first = (r.first + 1) & (len(r.items) - 1)
	r.n--
	return v
}

// timer is an action of a client at a given time.
type timer struct {
	atNS int64
	// order breaks ties between equal times, so that runs are reproducible.
	order  uint64
	what   event
	tenant int
	load   int
}

type event uint8

const (
	connect event = iota
	disconnect
	loadOn
	loadOff
	ask // a paced load's next I/O is due
	control
	coreTurn // the next client polls
)

// timers is a binary heap.
type timers struct {
	heap  []timer
	order uint64
}

func (h *timers) less(i, j int) bool {
	a, b := &h.heap[i], &h.heap[j]
	return a.atNS < b.atNS || a.atNS == b.atNS && a.order < b.order
}

func (h *timers) push(t timer) {
	h.order++
	t.order = h.order
	h.heap = append(h.heap, t)
	for i := len(h.heap) - 1; i > 0; {
		up := (i - 1) / 2
		if !h.less(i, up) {
			break
		}
		h.heap[i], h.heap[up] = h.heap[up], h.heap[i]
		i = up
	}
}

func (h *timers) pop() timer {
	top := h.heap[0]
	last := len(h.heap) - 1
	h.heap[0] = h.heap[last]
	h.heap = h.heap[:last]
	for i := 0; ; {
		least := i
		for _, c := range [2]int{2*i + 1, 2*i + 2} {
			if c < last && h.less(c, least) {
				least = c
			}
		}
		if least == i {
			return top
		}
		h.heap[i], h.heap[least] = h.heap[least], h.heap[i]
		i = least
	}
}
