package tokenbucket

import "math/bits"

// Side is which of a Dual's buckets an I/O takes from.
type Side uint8

// Sides.
const (
	ReadSide Side = iota
	WriteSide
)

// CostOne is a write cost of 1.0: write costs are fixed-point numbers in units of
// 1/CostOne.
const CostOne = 1024

// gainMax bounds what one refill is reckoned with, so that its product with a write cost
// fits. It fills any bucket.
const gainMax = 1 << 44

// Dual is Gimbal's pair of buckets for the reads and the writes of one SSD. They share
// one rate R: of each byte that comes, WC/(WC+1) goes to the reads and 1/(WC+1) to the
// writes, where WC is the write cost; what a full bucket cannot take goes to the other. Tokens are
// raw bytes: the cost shows in the split only.
//
// The arithmetic is that of the released code, to the bit: fractions of a byte are
// discarded at each refill. But a refill that would give one side nothing does not count as one,
// else buckets that are asked often enough would never fill.
//
// An amount larger than a bucket passes when its bucket is full, and what is missing is
// owed. The released code would wait for ever.
//
// Source: Gimbal (SIGCOMM'21), appendix C.1, Algorithm 4.
type Dual struct {
	rate     int64 // bytes a second, at least 1
	cost     int64 // write cost, at least CostOne, at most 1<<16
	capacity int64 // of each bucket, at most 1<<40
	// tokens by side; negative: owed. Invariant: tokens <= capacity.
	tokens [2]int64
	at     int64 // tokens are as of this time
}

// NewDual makes two full buckets of capacity bytes. SetRate and SetWriteCost must
// follow.
func NewDual(now, capacity int64) Dual {
	return Dual{rate: 1, cost: CostOne, capacity: capacity, tokens: [2]int64{capacity, capacity}, at: now}
}

// SetRate sets the bytes a second, at least 1, that the next refill gives for all the time since
// the last one.
func (d *Dual) SetRate(bytesPerSec int64) { d.rate = max(bytesPerSec, 1) }

// SetWriteCost sets the split that the next refill uses; at least CostOne.
func (d *Dual) SetWriteCost(cost int64) { d.cost = max(cost, CostOne) }

// Refill adds what came since the last time.
//
// hot: 0 allocs
func (d *Dual) Refill(now int64) {
	if now <= d.at {
		return
	}
	hi, lo := bits.Mul64(uint64(now-d.at), uint64(d.rate))
	gain := int64(gainMax)
	if hi < second {
		if g, _ := bits.Div64(hi, lo, second); g < gainMax {
			gain = int64(g)
		}
	}
	read, write := d.split(gain)
	if write == 0 {
		return // the smaller side's: later
	}
	d.at = now
	r, w := d.tokens[ReadSide]+read, d.tokens[WriteSide]+write
	if r > d.capacity {
		w, r = min(w+r-d.capacity, d.capacity), d.capacity
	}
	if w > d.capacity {
		r, w = min(r+w-d.capacity, d.capacity), d.capacity
	}
	d.tokens = [2]int64{r, w}
}

// split divides what came.
func (d *Dual) split(gain int64) (read, write int64) {
	return gain * d.cost / (d.cost + CostOne), gain * CostOne / (d.cost + CostOne)
}

// Ready reports whether Take would be allowed, as of the last refill.
//
// hot: 0 allocs
func (d *Dual) Ready(s Side, n int64) bool { return d.tokens[s] >= min(n, d.capacity) }

// Take charges n bytes. The caller has asked Ready.
//
// hot: 0 allocs
func (d *Dual) Take(s Side, n int64) { d.tokens[s] -= n }

// Discard throws the tokens of both sides away. What is owed stays.
//
// hot: 0 allocs
func (d *Dual) Discard() {
	d.tokens[ReadSide] = min(d.tokens[ReadSide], 0)
	d.tokens[WriteSide] = min(d.tokens[WriteSide], 0)
}

// Tokens is what a side has, as of the last refill; negative if it owes.
func (d *Dual) Tokens(s Side) int64 { return d.tokens[s] }

// NextToken is the first time at which Refill makes Take(s, n) allowed, if rate and cost stay as they
// are and nobody takes or refills before.
//
// hot: 0 allocs
func (d *Dual) NextToken(s Side, n int64) int64 {
	n = min(n, d.capacity)
	missing := n - d.tokens[s]
	if missing <= 0 {
		return d.at
	}
	whole := d.cost + CostOne
	own := d.cost
	if s == WriteSide {
		own = CostOne
	}
	// Either its own part suffices, or with what the other side cannot take; the two parts of
	// a gain make one byte less than it if they do not come out even.
	gain := ceilDiv(missing, whole, own)
	spill := missing + d.capacity - d.tokens[1-s]
	if r, w := d.split(min(spill, gainMax)); r+w < spill {
		spill++
	}
	gain = max(min(gain, spill), ceilDiv(1, whole, CostOne))
	return d.at + ceilDiv(gain, second, d.rate)
}

// ceilDiv is a*b/c, rounded up.
func ceilDiv(a, b, c int64) int64 {
	hi, lo := bits.Mul64(uint64(a), uint64(b))
	if hi >= uint64(c) {
		return 1 << 62
	}
	q, r := bits.Div64(hi, lo, uint64(c))
	if r > 0 {
		q++
	}
	return int64(min(q, 1<<62))
}
