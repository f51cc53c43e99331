package sim

// ring is a FIFO that grows on demand.
type ring[T any] struct {
	items []T
	first int
	n     int
}

func (q *ring[T]) push(v T) {
	if q.n == len(q.items) {
		grown := make([]T, max(16, 2*q.n))
		for i := range q.n {
			grown[i] = q.items[(q.first+i)&(len(q.items)-1)]
		}
		q.items, q.first = grown, 0
	}
	q.items[(q.first+q.n)&(len(q.items)-1)] = v
	q.n++
}

func (q *ring[T]) peek() *T { return &q.items[q.first] }

func (q *ring[T]) pop() T {
	v := q.items[q.first]
	q.first = (q.first + 1) & (len(q.items) - 1)
	q.n--
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
