package bufpool

// heap is a binary heap that tells its elements where they are. The zero heap is empty.
type heap[T any] []T

// rules are how a heap orders its elements, and how it tells them their places; -1: out of the heap.
type rules[T any] struct {
	before func(x, y T) bool
	put    func(x T, at int)
}

// add adds an element.
func (h *heap[T]) add(r *rules[T], x T) {
	*h = append(*h, x)
	h.up(r, len(*h)-1)
}

// remove takes the element at i out.
func (h *heap[T]) remove(r *rules[T], i int) {
	s := *h
	x, last := s[i], len(s)-1
	s[i] = s[last]
	var zero T
	s[last] = zero
	*h = s[:last]
	if i < last {
		h.fix(r, i)
	}
	r.put(x, -1)
}

// fix finds the place of the element at i, which has changed.
func (h *heap[T]) fix(r *rules[T], i int) {
	if !h.down(r, i) {
		h.up(r, i)
	}
}

func (h *heap[T]) up(r *rules[T], i int) {
	s := *h
	for i > 0 {
		parent := (i - 1) / 2
		if !r.before(s[i], s[parent]) {
			break
		}
		s[i], s[parent] = s[parent], s[i]
		r.put(s[i], i)
		i = parent
	}
	r.put(s[i], i)
}

// down reports whether the element has moved.
func (h *heap[T]) down(r *rules[T], i int) bool {
	s, from := *h, i
	for {
		child := 2*i + 1
		if child >= len(s) {
			break
		}
		if child+1 < len(s) && r.before(s[child+1], s[child]) {
			child++
		}
		if !r.before(s[child], s[i]) {
			break
		}
		s[i], s[child] = s[child], s[i]
		r.put(s[i], i)
		i = child
	}
	r.put(s[i], i)
	return i > from
}
