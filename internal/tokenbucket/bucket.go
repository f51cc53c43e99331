// Package tokenbucket paces I/O: a single bucket for a tenant's cap, and Gimbal's dual bucket for the reads and writes
// of an SSD. The caller passes the time in nanoseconds. Rounding loses nothing except where Dual says so.
package tokenbucket

import (
	"math"
	"math/bits"
)

const second = 1_000_000_000

// Bucket is a single token bucket that may go into debt: Take is allowed while there is at least one token and charges
// the whole amount. So an amount larger than the bucket passes, and later ones wait until it is paid.
//
// The zero Bucket is unlimited.
type Bucket struct {
	rate     int64 // tokens a second; 0: unlimited
	capacity int64
	tokens   int64 // Invariant: tokens <= capacity
	rest     int64 // fraction of a token that refill has not handed out yet, in 1/second of a token
	at       int64 // tokens are as of this time
}

// NewBucket returns a full bucket of rate tokens a second. capacity is how many tokens it can hold, at least 1.
func NewBucket(now, rate, capacity int64) Bucket {
	capacity = max(capacity, 1)
	return Bucket{rate: rate, capacity: capacity, tokens: capacity, at: now}
}

// Limited reports whether the bucket limits anything.
func (b *Bucket) Limited() bool { return b.rate > 0 }

// Rate is the tokens a second, 0 if unlimited.
func (b *Bucket) Rate() int64 { return b.rate }

// SetRate changes rate and capacity from now on. Saved tokens and debt stay.
func (b *Bucket) SetRate(now, rate, capacity int64) {
	if b.rate == 0 {
		*b = NewBucket(now, rate, capacity)
		return
	}
	b.refill(now)
	b.rate, b.capacity, b.rest = rate, max(capacity, 1), 0
	b.tokens = min(b.tokens, b.capacity)
}

// refill adds the tokens for the time since the last refill.
func (b *Bucket) refill(now int64) {
	dt := now - b.at
	if dt <= 0 {
		return
	}
	b.at = now
	hi, lo := bits.Mul64(uint64(dt), uint64(b.rate))
	lo, carry := bits.Add64(lo, uint64(b.rest), 0)
	hi += carry
	if hi >= second { // more than any bucket can hold
		b.tokens, b.rest = b.capacity, 0
		return
	}
	q, r := bits.Div64(hi, lo, second)
	if q > math.MaxInt64 || b.tokens+int64(min(q, math.MaxInt64/2)) >= b.capacity {
		b.tokens, b.rest = b.capacity, 0
		return
	}
	b.tokens += int64(q)
	b.rest = int64(r)
}

// Ready reports whether Take would be allowed.
//
// hot: 0 allocs
func (b *Bucket) Ready(now int64) bool {
	if b.rate == 0 {
		return true
	}
	b.refill(now)
	return b.tokens > 0
}

// Take charges n tokens. The caller must have called Ready.
//
// hot: 0 allocs
func (b *Bucket) Take(n int64) {
	if b.rate != 0 {
		b.tokens -= n
	}
}

// NextToken is the first time at which Ready is true, now or later.
func (b *Bucket) NextToken(now int64) int64 {
	if b.Ready(now) {
		return now
	}
	need := uint64(1 - b.tokens)
	hi, lo := bits.Mul64(need, second)
	lo, borrow := bits.Sub64(lo, uint64(b.rest), 0)
	hi -= borrow
	if hi >= uint64(b.rate) {
		return math.MaxInt64
	}
	q, r := bits.Div64(hi, lo, uint64(b.rate))
	if r > 0 {
		q++
	}
	if q > math.MaxInt64-uint64(b.at) {
		return math.MaxInt64
	}
	return b.at + int64(q)
}
