package ycsb

import (
	"math"
	"math/rand/v2"
	"testing"
)

func testRNG() *rand.Rand { return rand.New(rand.NewPCG(*seed, 1)) }

// chiSquare fails the test if the counts do not match the expected shares. The bound is crossed once in a million
// seeds.
func chiSquare(t *testing.T, name string, counts []int, share func(i int) float64) {
	t.Helper()
	total := 0
	for _, c := range counts {
		total += c
	}
	x, groups := 0.0, 0
	restWant, restGot := 0.0, 0.0
	for i, c := range counts {
		want := share(i) * float64(total)
		if want < 8 { // too few for the test: combined
			restWant, restGot = restWant+want, restGot+float64(c)
			continue
		}
		x += (float64(c) - want) * (float64(c) - want) / want
		groups++
	}
	if restWant >= 8 {
		x += (restGot - restWant) * (restGot - restWant) / restWant
		groups++
	}
	// Wilson and Hilferty's approximation of the distribution's quantile at 4.75 sigma.
	k := float64(groups - 1)
	a := 2 / (9 * k)
	if bound := k * math.Pow(1-a+4.75*math.Sqrt(a), 3); x > bound {
		t.Errorf("%s: chi square of %d groups is %.1f, must be below %.1f", name, groups, x, bound)
	}
}

func TestZipfDrawsEachRankByItsWeight(t *testing.T) {
	for _, theta := range []float64{0, 0.1, 0.5, 0.99, 1, 1.2, 2.5} {
		for _, n := range []int{1, 2, 3, 1000} {
			z := newZipf(uint64(n), theta)
			rng := testRNG()
			counts := make([]int, n)
			for range 200_000 {
				counts[z.draw(rng)-1]++
			}
			if n == 1 {
				continue
			}
			zeta := 0.0
			for k := 1; k <= n; k++ {
				zeta += math.Pow(float64(k), -theta)
			}
			chiSquare(t, "zipf", counts, func(i int) float64 { return math.Pow(float64(i+1), -theta) / zeta })
		}
	}
}

// TestZipfFollowsItsGrowth: after any number of resizes it draws like a new one of that size.
func TestZipfFollowsItsGrowth(t *testing.T) {
	z := newZipf(1, 0.99)
	for n := uint64(1); n <= 500; n += 7 {
		z.resize(n)
	}
	z.resize(500)
	if want := newZipf(500, 0.99); z != want {
		t.Errorf("grown to 500: %+v, made with 500: %+v", z, want)
	}
}

// TestZipfianMatchesYCSB: the most popular record has 1/26.47 of the operations, whatever the number of records, and is
// the one given by YCSB's hash.
func TestZipfianMatchesYCSB(t *testing.T) {
	const zetan = 26.46902820178302 // YCSB's constant for 10^10 items and 0.99
	w := Workload{Distribution: "zipfian", Theta: 0.99, RecordCount: 100_000, InsertCount: 100_000}
	c := newChooser(&w, 0, testRNG())
	counts := map[uint64]int{}
	const draws = 400_000
	for range draws {
		counts[c.next(w.RecordCount)]++
	}
	for rank := uint64(0); rank < 8; rank++ {
		r := fnv64(rank) % w.RecordCount
		// Other ranks map to the same record by chance: about 1/100000 of the rest.
		want := math.Pow(float64(rank+1), -0.99)/zetan + 1e-5
		sigma := math.Sqrt(want / draws)
		if got := float64(counts[r]) / draws; math.Abs(got-want) > 5*sigma+1e-5 {
			t.Errorf("rank %d, record %d: a share of %.5f, want %.5f ± %.5f", rank, r, got, want, sigma)
		}
	}
	// Values of YCSB's Utils.fnvhash64.
	for n, want := range map[uint64]uint64{0: 6284781860667377211, 1: 8517097267634966620} {
		if got := fnv64(n); got != want {
			t.Errorf("fnv64(%d) = %d, want %d", n, got, want)
		}
	}
}

// TestZipfianKeepsPopularKeysWhileRecordsAreAdded and never chooses a record that does not exist.
func TestZipfianKeepsPopularKeysWhileRecordsAreAdded(t *testing.T) {
	w := Workload{Distribution: "zipfian", Theta: 0.99, RecordCount: 1000, InsertStart: 100, InsertCount: 900}
	favourite := func(limit uint64) uint64 {
		c := newChooser(&w, 500, testRNG())
		counts := make([]int, 3000)
		best := uint64(0)
		for range 50_000 {
			r := c.next(limit)
			if r < 100 || r >= limit {
				t.Fatalf("record %d of [100, %d)", r, limit)
			}
			if counts[r]++; counts[r] > counts[best] {
				best = r
			}
		}
		return best
	}
	a, b := favourite(1000), favourite(1500)
	if a != b && b < 1000 {
		t.Errorf("the favourite of 900 records is %d, of 1400 it is %d", a, b)
	}
}

func TestLatestPrefersTheNewest(t *testing.T) {
	w := Workload{Distribution: "latest", Theta: 0.99, RecordCount: 1000, InsertStart: 500, InsertCount: 500}
	c := newChooser(&w, 0, testRNG())
	zeta := 0.0
	for k := 1; k <= 800; k++ {
		zeta += math.Pow(float64(k), -0.99)
	}
	counts := make([]int, 800)
	c.next(600)
	for range 200_000 {
		counts[1299-c.next(1300)]++
	}
	chiSquare(t, "latest", counts, func(i int) float64 { return math.Pow(float64(i+1), -0.99) / zeta })
}

func TestUniformAndHotspotDrawTheirShares(t *testing.T) {
	w := Workload{Distribution: "uniform", InsertStart: 10}
	c := newChooser(&w, 0, testRNG())
	counts := make([]int, 400)
	for range 200_000 {
		counts[c.next(410)-10]++
	}
	chiSquare(t, "uniform", counts, func(int) float64 { return 1.0 / 400 })

	w = Workload{Distribution: "hotspot", InsertStart: 10, HotData: 0.25, HotOperations: 0.9}
	c = newChooser(&w, 0, testRNG())
	clear(counts)
	for range 200_000 {
		counts[c.next(410)-10]++
	}
	chiSquare(t, "hotspot", counts, func(i int) float64 {
		if i < 100 {
			return 0.9 / 100
		}
		return 0.1 / 300
	})
	for _, edge := range []Workload{{Distribution: "hotspot", HotData: 0, HotOperations: 1},
		{Distribution: "hotspot", HotData: 1, HotOperations: 0}} {
		c = newChooser(&edge, 0, testRNG())
		for range 100 {
			if r := c.next(3); r > 2 {
				t.Errorf("%+v: record %d of 3", edge, r)
			}
		}
	}
}

func TestChoosersAreDeterministic(t *testing.T) {
	for _, d := range Distributions {
		w := Workload{Distribution: d, Theta: 0.99, RecordCount: 1000, InsertCount: 1000, HotData: 0.2,
			HotOperations: 0.8}
		a, b := newChooser(&w, 10, testRNG()), newChooser(&w, 10, testRNG())
		for range 1000 {
			if x, y := a.next(1000), b.next(1000); x != y {
				t.Fatalf("%s: %d and %d", d, x, y)
			}
		}
	}
}

func BenchmarkChoose(b *testing.B) {
	for _, d := range Distributions {
		b.Run(d, func(b *testing.B) {
			w := Workload{Distribution: d, Theta: 0.99, RecordCount: 1 << 20, InsertCount: 1 << 20, HotData: 0.2,
				HotOperations: 0.8}
			c := newChooser(&w, 0, testRNG())
			for b.Loop() {
				c.next(1 << 20)
			}
		})
	}
}
