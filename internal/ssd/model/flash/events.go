package flash

// never is a time after every event.
const never = int64(1) << 62

// winner is a tournament tree of the dies' next events. It finds the earliest event at once, and changing an event
// costs log2(dies) comparisons. If times are equal, the die with the lower index wins.
type winner struct {
	at   [maxDies]int64
	tree [2 * maxDies]uint8 // tree[1] is the winner, leaves from maxDies on
}

func (w *winner) reset() {
	for i := range w.at {
		w.at[i] = never
		w.tree[maxDies+i] = uint8(i)
	}
	for n := maxDies - 1; n > 0; n-- {
		w.tree[n] = w.tree[2*n]
	}
}

func (w *winner) set(i int, at int64) {
	w.at[i] = at
	for n := (maxDies + i) / 2; n > 0; n /= 2 {
		a, b := w.tree[2*n], w.tree[2*n+1]
		if w.at[b%maxDies] < w.at[a%maxDies] {
			a = b
		}
		w.tree[n] = a
	}
}

func (w *winner) first() (i int, at int64) {
	i = int(w.tree[1] % maxDies)
	return i, w.at[i]
}

// due is the time at which a request completes. seq orders requests with equal times.
type due struct {
	at  int64
	seq uint32
	req int32
}

func (d due) before(b due) bool {
	return d.at < b.at || d.at == b.at && int32(d.seq-b.seq) < 0
}

// dueHeap is a binary heap of completions, ordered by time.
type dueHeap struct {
	s []due
}

func (h *dueHeap) push(x due) {
	h.s = append(h.s, x)
	i := len(h.s) - 1
	for i > 0 {
		up := (i - 1) / 2
		if !x.before(h.s[up]) {
			break
		}
		h.s[i] = h.s[up]
		i = up
	}
	h.s[i] = x
}

func (h *dueHeap) pop() due {
	top := h.s[0]
	n := len(h.s) - 1
	x := h.s[n]
	h.s = h.s[:n]
	i := 0
	for {
		c := 2*i + 1
		if c >= n {
			break
		}
		if c+1 < n && h.s[c+1].before(h.s[c]) {
			c++
		}
		if !h.s[c].before(x) {
			break
		}
		h.s[i] = h.s[c]
		i = c
	}
	if n > 0 {
		h.s[i] = x
	}
	return top
}

// random is xorshift64*. It is small and fast, and gives the same sequence on every machine.
type random uint64

func newRandom(seed uint64) random {
	// One step of splitmix64 makes small seeds differ in all bits. The state is never 0.
	seed += 0x9E3779B97F4A7C15
	seed = (seed ^ seed>>30) * 0xBF58476D1CE4E5B9
	seed = (seed ^ seed>>27) * 0x94D049BB133111EB
	return random(seed ^ seed>>31 | 1)
}

func (r *random) next() uint64 {
	x := uint64(*r)
	x ^= x >> 12
	x ^= x << 25
	x ^= x >> 27
	*r = random(x)
	return x * 0x2545F4914F6CDD1D
}

// below returns a number in [0, n), n < 1<<32.
func (r *random) below(n uint32) uint32 {
	return uint32(r.next() >> 32 * uint64(n) >> 32)
}
