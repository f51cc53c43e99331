package ycsb

import (
	"math"
	"math/rand/v2"
)

// chooser chooses records. Each thread has its own.
type chooser interface {
	// next returns a record in [start, limit). start is below limit and the same in every call. limit never decreases.
	next(limit uint64) uint64 // hot: 0 allocs
}

// newChooser returns the chooser that w asks for. inserts is how many records the run will add, as far as that is
// known.
func newChooser(w *Workload, inserts uint64, rng *rand.Rand) chooser {
	switch w.Distribution {
	case "zipfian":
		// If the number of records were taken anew for each draw, each insert would make other records popular.
		// Therefore the range includes the records to be inserted from the beginning, and a record that does not exist
		// yet is drawn again.
		return &scrambled{z: newZipf(zipfItems, w.Theta), rng: rng, start: w.InsertStart,
			items: w.InsertCount + 2*inserts}
	case "latest":
		return &latest{z: newZipf(1, w.Theta), rng: rng, start: w.InsertStart}
	case "hotspot":
		return &hotspot{rng: rng, start: w.InsertStart, data: w.HotData, operations: w.HotOperations}
	}
	return &uniform{rng: rng, start: w.InsertStart}
}

// uniform chooses all records with the same probability.
type uniform struct {
	rng   *rand.Rand
	start uint64
}

func (c *uniform) next(limit uint64) uint64 { // hot: 0 allocs
	return c.start + c.rng.Uint64N(limit-c.start)
}

// hotspot chooses the first records, a share data of all, in a share operations of the draws.
type hotspot struct {
	rng              *rand.Rand
	start            uint64
	data, operations float64
}

func (c *hotspot) next(limit uint64) uint64 { // hot: 0 allocs
	n := limit - c.start
	hot := min(uint64(float64(n)*c.data), n)
	if c.rng.Float64() < c.operations && hot > 0 || hot == n {
		return c.start + c.rng.Uint64N(hot)
	}
	return c.start + hot + c.rng.Uint64N(n-hot)
}

// zipfItems is the number of ranks from which YCSB draws, whatever the number of records. At theta 0.99 the most
// popular record gets 3.8 % of the operations, and not more in a smaller set.
const zipfItems = 10_000_000_000

// scrambled is YCSB's zipfian: the ranks are scattered over the records by a hash.
type scrambled struct {
	z            zipf
	rng          *rand.Rand
	start, items uint64
}

func (c *scrambled) next(limit uint64) uint64 { // hot: 0 allocs
	for {
		if r := c.start + fnv64(c.z.draw(c.rng)-1)%c.items; r < limit {
			return r
		}
	}
}

// latest prefers the records that were inserted last.
type latest struct {
	z     zipf
	rng   *rand.Rand
	start uint64
}

func (c *latest) next(limit uint64) uint64 { // hot: 0 allocs
	c.z.resize(limit - c.start)
	return limit - c.z.draw(c.rng)
}

// Zipfian returns what draws from so many records as YCSB's zipfian distribution does.
func Zipfian(records uint64, theta float64, rng *rand.Rand) func() uint64 {
	c := &scrambled{z: newZipf(zipfItems, theta), rng: rng, items: records}
	return func() uint64 { return c.next(records) }
}

// fnv64 is FNV-1a over the eight bytes of n, little endian, and then without its sign, as in YCSB.
func fnv64(n uint64) uint64 { // hot: 0 allocs
	h := uint64(0xCBF29CE484222325)
	for range 8 {
		h = (h ^ n&0xff) * 1099511628211
		n >>= 8
	}
	if int64(h) < 0 {
		h = -h
	}
	return h
}

// zipf draws ranks 1 to n, rank k with a weight of k to the power of -theta, by rejection-inversion:
// exact for any theta, and n can be changed at the price of one power. The method of Gray et al.
// that YCSB has is an approximation from rank 3 on, has no theta of 1, and must sum up all
// n weights.
//
// Source: W. Hörmann, G. Derflinger, Rejection-inversion to generate variates from monotone discrete
// distributions, ACM TOMACS 6 (1996).
type zipf struct {
	n           uint64
	theta       float64
	first, last float64 // the area under the weights, from below rank 1 to above rank n
	squeeze     float64 // a draw this close below its rank is always accepted
}

func newZipf(n uint64, theta float64) zipf {
	z := zipf{theta: theta}
	z.first = z.area(1.5) - 1
	z.squeeze = 2 - z.at(z.area(2.5)-z.weight(2))
	z.resize(n)
	return z
}

// resize makes ranks 1 to n.
func (z *zipf) resize(n uint64) { // hot: 0 allocs
	if n != z.n {
		z.n, z.last = n, z.area(float64(n)+0.5)
	}
}

func (z *zipf) draw(rng *rand.Rand) uint64 { // hot: 0 allocs
	for {
		u := z.last + rng.Float64()*(z.first-z.last)
		x := z.at(u)
		k := min(max(uint64(x+0.5), 1), z.n)
		if f := float64(k); f-x <= z.squeeze || u >= z.area(f+0.5)-z.weight(f) {
			return k
		}
	}
}

func (z *zipf) weight(x float64) float64 { return math.Exp(-z.theta * math.Log(x)) }

// area is the integral of the weight up to x, but for a constant: (x^(1-theta) - 1) / (1-theta), and the
// logarithm of x where theta is 1.
func (z *zipf) area(x float64) float64 {
	l := math.Log(x)
	t := (1 - z.theta) * l
	if math.Abs(t) < 1e-8 {
		return l * (1 + t/2)
	}
	return math.Expm1(t) / (1 - z.theta)
}

// at is the inverse of area.
func (z *zipf) at(u float64) float64 {
	t := max(u*(1-z.theta), -1)
	if math.Abs(t) < 1e-8 {
		return math.Exp(u * (1 - t/2))
	}
	return math.Exp(math.Log1p(t) / (1 - z.theta))
}
