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

// gainMax bounds the gain of one refill, so that its product with a write cost does not overflow. It fills any bucket.
const gainMax = 1 << 44

// Dual is Gimbal's pair of buckets for the reads and the writes of an SSD. They share a rate R: of each byte gained,
// WC/(WC+1) goes to reads and 1/(WC+1) to writes, where WC is the write cost. What a full bucket cannot hold goes to
// the other one. Tokens are raw bytes: the cost affects only the split.
//
// The arithmetic is exactly that of the released code: each refill discards fractions of a byte. But a refill that
// would give nothing to one side is skipped; otherwise buckets that are refilled often enough would never fill.
//
// An amount larger than a bucket passes when its bucket is full, and the difference becomes debt. In the released code
// it would wait for ever.
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

// Refill adds the tokens for the time since the last refill, split by the write cost. What one bucket cannot hold goes
// to the other. If the time is too short for a byte of writes, it adds nothing and leaves the time to the next refill.
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

// split divides a gain between the sides.
func (d *Dual) split(gain int64) (read, write int64) {
	return gain * d.cost / (d.cost + CostOne), gain * CostOne / (d.cost + CostOne)
}

// Ready reports whether Take would be allowed, as of the last refill.
//
// hot: 0 allocs
func (d *Dual) Ready(s Side, n int64) bool { return d.tokens[s] >= min(n, d.capacity) }

// Take charges n bytes. The caller must have called Ready.
//
// hot: 0 allocs
func (d *Dual) Take(s Side, n int64) { d.tokens[s] -= n }

// Discard removes the tokens of both sides. Debt stays.
//
// hot: 0 allocs
func (d *Dual) Discard() {
	d.tokens[ReadSide] = min(d.tokens[ReadSide], 0)
	d.tokens[WriteSide] = min(d.tokens[WriteSide], 0)
}

// Tokens is what a side has, as of the last refill; negative if it owes.
func (d *Dual) Tokens(s Side) int64 { return d.tokens[s] }

// NextToken returns the first time at which a Refill would make Take(s, n) allowed, if rate and cost do not change and
// no other call of Take or Refill comes before.
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
