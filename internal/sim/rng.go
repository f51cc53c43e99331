package sim

import "math/bits"

// rng is splitmix64 (Steele, Lea, Flood, OOPSLA 2014). It is small and fast, and random enough to choose offsets.
type rng struct{ state uint64 }

func newRNG(seed uint64, stream int) rng {
	r := rng{seed ^ uint64(stream+1)*0xd1342543de82ef95}
	r.next()
	return r
}

func (r *rng) next() uint64 {
	r.state += 0x9e3779b97f4a7c15
	z := r.state
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// below returns a number in [0, n); n > 0.
func (r *rng) below(n int64) int64 {
	hi, _ := bits.Mul64(r.next(), uint64(n))
	return int64(hi)
}
