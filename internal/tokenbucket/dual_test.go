package tokenbucket

import (
	"math/rand/v2"
	"testing"
)

const dualCapacity = 262144

func dual(rate, cost, read, write int64) Dual {
	d := NewDual(0, dualCapacity)
	d.SetRate(rate)
	d.SetWriteCost(cost)
	d.tokens = [2]int64{read, write}
	return d
}

func TestDualRefillVectors(t *testing.T) {
	for _, c := range []struct{ rate, dt, cost, read, write, wantRead, wantWrite int64 }{
		{1048576000, 100_000, 9 * CostOne, 0, 0, 94371, 10485},
		{1048576000, 1_000_000, 9 * CostOne, 0, 0, 262144, 262144}, // overflow moved
		{1048576000, 1_000_000, CostOne, 200000, 200000, 262144, 262144},
		{52428800, 1_000, 9 * CostOne, 0, 0, 46, 5},
		{52428800, 1_000_000, 9 * CostOne, 262144, 0, 262144, 52427},
		{1048576000, 200_000, 5 * CostOne, 0, 262144, 209714, 262144},
	} {
		d := dual(c.rate, c.cost, c.read, c.write)
		d.Refill(c.dt)
		if d.Tokens(ReadSide) != c.wantRead || d.Tokens(WriteSide) != c.wantWrite {
			t.Errorf("%+v: %d/%d", c, d.Tokens(ReadSide), d.Tokens(WriteSide))
		}
	}
}

// TestDualNextTokenIsExact: a nanosecond earlier, the I/O is not ready; at that time it is.
func TestDualNextTokenIsExact(t *testing.T) {
	t.Logf("-seed %d", *seed)
	rng := rand.New(rand.NewPCG(*seed, 1))
	for i := range 200_000 {
		d := dual(logInt(rng, 1_000_000_000_000), CostOne+rng.Int64N(9*CostOne),
			rng.Int64N(2*dualCapacity)-dualCapacity, rng.Int64N(dualCapacity+1))
		d.at = rng.Int64N(1 << 50)
		if rng.IntN(2) == 0 {
			d.tokens[0], d.tokens[1] = d.tokens[1], d.tokens[0]
		}
		side, n := Side(rng.IntN(2)), logInt(rng, 4*dualCapacity)
		at := d.NextToken(side, n)
		if d.Ready(side, n) {
			if at != d.at {
				t.Fatalf("%d: %+v is ready for %d on side %d, but waits until %d", i, d, n, side, at)
			}
			continue
		}
		before, after := d, d
		before.Refill(at - 1)
		after.Refill(at)
		if before.Ready(side, n) || !after.Ready(side, n) {
			t.Fatalf("%d: %+v, %d on side %d: at %d-1 it has %d, at %d it has %d", i, d, n, side, at,
				before.tokens[side], at, after.tokens[side])
		}
	}
}

// TestDualNeverGivesMoreThanItsRate, however often it is asked; it loses less than one byte per
// side and refill.
func TestDualNeverGivesMoreThanItsRate(t *testing.T) {
	t.Logf("-seed %d", *seed)
	rng := rand.New(rand.NewPCG(*seed, 2))
	for range 200 {
		rate := 50_000_000 + logInt(rng, 4_000_000_000)
		d := dual(rate, CostOne+rng.Int64N(8*CostOne), 0, 0)
		step := logInt(rng, 2000)
		var now, taken, refills int64
		for range 20_000 {
			now += 1 + rng.Int64N(step)
			at := d.at
			d.Refill(now)
			if d.at != at {
				refills++
			}
			for side := range Side(2) {
				if n := d.Tokens(side); n > 0 {
					d.Take(side, n)
					taken += n
				}
			}
		}
		came := float64(now) * float64(rate) / second
		if lost := came - float64(taken); lost < 0 || lost > 3*float64(refills)+20 {
			t.Fatalf("rate %d, cost %d: %d of %.0f bytes given with %d refills", rate, d.cost, taken, came, refills)
		}
	}
}

func TestDualDoesNotStarveWhenAskedAllTheTime(t *testing.T) {
	d := dual(52428800, 9*CostOne, 0, 0) // 5 bytes per 95 ns, a half of one to the writes
	for now := range int64(1_000_000) {
		d.Refill(now)
	}
	if r, w := d.Tokens(ReadSide), d.Tokens(WriteSide); r < 45000 || w < 4700 {
		t.Errorf("after 1 ms %d/%d tokens, want 47185/5242 or a little less", r, w)
	}
}

func TestDualLongIOPassesWhenItsBucketIsFullAndIsPaidAfterwards(t *testing.T) {
	d := dual(1_000_000_000, CostOne, dualCapacity, 0)
	const n = 4 * dualCapacity
	if !d.Ready(ReadSide, n) {
		t.Fatal("a full bucket does not let it pass")
	}
	d.Take(ReadSide, n)
	if d.Ready(ReadSide, 1) || d.Ready(ReadSide, 0) {
		t.Error("a side that owes lets more pass")
	}
	// Half of a byte a nanosecond, all of it once the other side is full.
	want := int64(dualCapacity/0.5 + (3*dualCapacity + 4096 - dualCapacity))
	if at := d.NextToken(ReadSide, 4096); at < want-2 || at > want+2 {
		t.Errorf("4096 more after %d ns, want %d", at, want)
	}
	d.Discard()
	if d.Tokens(ReadSide) != -3*dualCapacity {
		t.Errorf("discarding leaves %d, want the debt of %d", d.Tokens(ReadSide), -3*dualCapacity)
	}
}

func TestDualDiscard(t *testing.T) {
	d := dual(1, CostOne, 5, 7)
	d.Discard()
	if d.tokens != [2]int64{} {
		t.Errorf("%v left", d.tokens)
	}
	d.Take(ReadSide, 3)
	d.Take(WriteSide, 4)
	d.Discard()
	if d.tokens != [2]int64{-3, -4} {
		t.Errorf("%v left of what is owed", d.tokens)
	}
}

func TestDualAllocatesNothing(t *testing.T) {
	d := dual(1_000_000_000, 9*CostOne, 0, 0)
	var now int64
	if n := testing.AllocsPerRun(100, func() {
		now = d.NextToken(WriteSide, 4096)
		d.Refill(now)
		if d.Ready(WriteSide, 4096) {
			d.Take(WriteSide, 4096)
		}
	}); n != 0 {
		t.Errorf("%v allocations, want 0", n)
	}
}

// logInt returns a number from 1 to most, with all orders of magnitude equally likely.
func logInt(rng *rand.Rand, most int64) int64 {
	n := int64(1)
	for n < most && rng.IntN(12) > 0 {
		n *= 10
	}
	return min(1+rng.Int64N(n), most)
}
