package swap

import (
	"flag"
	"iter"
	"math/rand/v2"
	"testing"
)

// seeds yields the n seeds of a random test: fixed ones and fresh ones in turn, or with -seed that one and those after
// it. Each is logged before it is used, so that the last one in the log of a failed test repeats the failure as -seed.
func seeds(t testing.TB, n int) iter.Seq[uint64] {
	// Tests choose by remainders of the seed, which the fresh ones share with the fixed ones.
	fixed, fresh := *seed, 1+rand.Uint64N(1<<40)*840
	flag.Visit(func(f *flag.Flag) {
		if f.Name == "seed" {
			fresh = fixed
		}
	})
	return func(yield func(uint64) bool) {
		for i := range uint64(n) {
			s := fixed + i
			if i%2 == 1 {
				s = fresh + i
			}
			t.Logf("-seed=%d", s)
			if !yield(s) {
				return
			}
		}
	}
}
