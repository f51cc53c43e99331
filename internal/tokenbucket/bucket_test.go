package tokenbucket

import (
	"flag"
	"math/big"
	"math/rand/v2"
	"testing"
	"time"
)

var seed = flag.Uint64("seed", uint64(time.Now().UnixNano()), "seed of the random tests")

func TestZeroBucketIsUnlimited(t *testing.T) {
	var b Bucket
	for now := range int64(100) {
		if !b.Ready(now) || b.NextToken(now) != now || b.Limited() || b.Rate() != 0 {
			t.Fatalf("at %d it limits: %+v", now, b)
		}
		b.Take(1 << 40)
	}
}

func TestTokensComeAtExactTimes(t *testing.T) {
	for _, c := range []struct{ rate, first, third int64 }{
		{1, 1_000_000_000, 3_000_000_000},
		{3, 333_333_334, 1_000_000_000},
		{7, 142_857_143, 428_571_429},
		{10, 100_000_000, 300_000_000},
		{1_000_000_000, 1, 3},
		{1_000_000_000_000, 1, 1},
	} {
		b := NewBucket(0, c.rate, 1)
		b.Take(1) // empty
		if got := b.NextToken(0); got != c.first {
			t.Errorf("%d a second: the first token at %d, want %d", c.rate, got, c.first)
		}
		b.Take(2)
		if got := b.NextToken(0); got != c.third {
			t.Errorf("%d a second: the third token at %d, want %d", c.rate, got, c.third)
		}
	}
}

func TestDebtIsPaidBeforeAnythingPasses(t *testing.T) {
	b := NewBucket(0, 1000, 5)
	b.Take(105)
	const paid = 101_000_000 // 100 owed and one to pass
	if got := b.NextToken(0); got != paid {
		t.Errorf("next token at %d, want %d", got, paid)
	}
	if b.Ready(paid-1) || !b.Ready(paid) {
		t.Error("ready at the wrong time")
	}
}

// TestPacedTakerGetsTheRateWithoutDrift: an hour in which each token is taken as soon as it exists.
func TestPacedTakerGetsTheRateWithoutDrift(t *testing.T) {
	for _, rate := range []int64{1, 3, 7, 10, 97, 333} {
		b := NewBucket(0, rate, 2)
		b.Take(2)
		var now, taken int64
		for taken < 3600*rate {
			now = b.NextToken(now)
			if !b.Ready(now) {
				t.Fatalf("rate %d: not ready at %d, as it said", rate, now)
			}
			b.Take(1)
			taken++
		}
		// The fraction of a token that the clock cannot hit is kept for the next one.
		if now != 3600*second {
			t.Errorf("rate %d: %d tokens by %d ns, want %d", rate, taken, now, int64(3600*second))
		}
	}
}

func TestSetRateKeepsWhatIsOwed(t *testing.T) {
	b := NewBucket(0, 10, 10)
	b.Take(20)
	b.SetRate(0, 1000, 100)
	if got := b.NextToken(0); got != 11_000_000 {
		t.Errorf("next token at %d, want 11000000", got)
	}
	b.SetRate(0, 10, 3)
	if !b.Ready(10*second) || b.tokens != 3 {
		t.Errorf("%d tokens after a long time, want the new capacity", b.tokens)
	}
	b.SetRate(10*second, 10, 2)
	if b.tokens != 2 {
		t.Errorf("%d tokens in a bucket for 2", b.tokens)
	}
}

// TestAgainstRationalNumbers compares with a model that never rounds.
func TestAgainstRationalNumbers(t *testing.T) {
	t.Logf("-seed %d", *seed)
	rng := rand.New(rand.NewPCG(*seed, 0))
	one := big.NewRat(1, 1)
	for run := range 300 {
		rate := logInt(rng, 1_000_000_000_000)
		capacity := logInt(rng, 1_000_000_000_000)
		now := rng.Int64N(1 << 60)
		b := NewBucket(now, rate, capacity)
		perNS := big.NewRat(rate, second)
		tokens := new(big.Rat).SetInt64(capacity)
		for step := range 200 {
			dt := int64(0)
			switch rng.IntN(3) {
			case 0:
				dt = rng.Int64N(100)
			case 1:
				dt = logInt(rng, 1_000_000_000_000)
			case 2: // to where it says
				at := b.NextToken(now)
				if at-now > 1<<55 {
					continue
				}
				// One nanosecond earlier there is less than one token.
				if at > now {
					early := new(big.Rat).Mul(perNS, new(big.Rat).SetInt64(at-1-now))
					if early.Add(early, tokens).Cmp(one) >= 0 {
						t.Fatalf("run %d, step %d: says %d, one earlier is enough", run, step, at)
					}
				}
				dt = at - now
			}
			now += dt
			tokens.Add(tokens, new(big.Rat).Mul(perNS, new(big.Rat).SetInt64(dt)))
			if full := new(big.Rat).SetInt64(capacity); tokens.Cmp(full) > 0 {
				tokens = full
			}
			ready := tokens.Cmp(one) >= 0
			if b.Ready(now) != ready {
				t.Fatalf("run %d, step %d: rate %d, ready %v with %s tokens", run, step, rate, !ready,
					tokens.FloatString(12))
			}
			if ready && rng.IntN(3) > 0 {
				n := logInt(rng, 10*capacity)
				b.Take(n)
				tokens.Sub(tokens, new(big.Rat).SetInt64(n))
			}
		}
	}
}

func TestBucketAllocatesNothing(t *testing.T) {
	b := NewBucket(0, 1000, 10)
	var now int64
	if n := testing.AllocsPerRun(100, func() {
		now = b.NextToken(now)
		if b.Ready(now) {
			b.Take(3)
		}
	}); n != 0 {
		t.Errorf("%v allocations, want 0", n)
	}
}
