// Package fence keeps requests from reaching a device after the right to make them has ended, for instance the requests
// of an association that the target has terminated.
//
// A Holder stands for something that has the right to make requests and may lose and regain it: the association of a
// host with a subsystem, or a namespace's use of its extent. Its epoch numbers the periods in which it has the right.
// Each user of that right, such as a connection, has a Share of the holder and belongs to the epoch in which the share
// joined. A Pass names a holder and an epoch. Each request carries a pass, and the drive checks it at the only place
// where requests are handed to the device: it refuses a stale pass.
//
//	Join ──> Share ── Begin ──> request with Pass ──> [Pass.Stale?] ──> device ──> End
//	Raise ──> no older request starts (at once) ──> no older request is in flight (drained) ──> Drained
//
// Raising the epoch has two phases. When Raise returns, no request of an older epoch starts any more: Begin refuses it,
// and if it has begun but has not been handed to the device, the drive refuses it. Requests that the device already has
// cannot be stopped; they have to drain. Each share counts its requests in flight, and when the count of an older share
// reaches zero, the holder calls the drained function of its owner. The owner sets a deadline for the second phase and
// decides what happens when it passes. The fence stays raised either way.
//
// A right may also have to be renewed, as an association is by signs of life from its host. Then the holder has a
// lease, a time up to which the right is known to exist. A timer that ends the right is not enough: after the process
// was stopped for longer than the lease, requests may start before the timer runs. So the places that check a pass
// compare the lease with the present time (StaleAt), and past it they first let the owner of the holder end or renew
// the right.
//
// Each share has a counter of its own, in a cache line that only the share's user writes to. On the hot path the shares
// of a holder have only the epoch in common, which is rarely written. So the cost of fencing a request does not grow
// with the number of connections.
package fence

import (
	"errors"
	"math"
	"sync"
	"sync/atomic"
)

// ErrStale is the outcome of a request whose pass was stale when it was about to be handed to the device. The device
// has not seen the request, or has done only a part of it that does no harm (see drive.IO.Pass).
var ErrStale = errors.New("stale: the association or namespace of this request has ended")

// cacheLine is an upper bound of the unit of cache coherence: 64 bytes, or 128 with adjacent-line prefetch.
const cacheLine = 128

// Holder stands for something whose right to make requests can end. Its methods may be called from any goroutine.
type Holder struct {
	epoch atomic.Uint64
	// leaseNS is the time up to which the right is known to exist.
	leaseNS atomic.Int64
	_       [cacheLine - 16]byte // epoch and lease are read for each request, the rest seldom

	// drained is called when a share of an older epoch has reached zero; see NewHolder.
	drained func()
	// renew is called past the lease; see Lease.
	renew func()

	mu     sync.Mutex
	shares map[*Share]struct{}
}

// NewHolder returns a holder in epoch 1. The holder calls drained each time a share of an older epoch has no more
// requests in flight. Other shares may still have some, so the owner of the holder must then ask Drained. drained must
// not block, nor take a lock of the user of the share, who may hold it during the call.
func NewHolder(drained func()) *Holder {
	h := &Holder{drained: drained, shares: map[*Share]struct{}{}}
	h.epoch.Store(1)
	h.leaseNS.Store(math.MaxInt64)
	return h
}

// Lease gives the holder a lease, which begins without end. Once a user finds it over, renew must set another one with
// SetLease, and call Raise before that if the right has ended. Users call renew with their locks held. Before the first
// Join, and before any Renew.
func (h *Holder) Lease(renew func()) { h.renew = renew }

// SetLease sets the time up to which the right is known to exist, in nanoseconds on the clock of those that call Renew
// and Pass.StaleAt. math.MaxInt64: for ever.
func (h *Holder) SetLease(untilNS int64) { h.leaseNS.Store(untilNS) }

// Renew lets the owner renew or end the right if the lease is over.
//
// hot: 0 allocs, one load
func (h *Holder) Renew(nowNS int64) {
	if nowNS > h.leaseNS.Load() {
		h.renew()
	}
}

// Epoch returns the current epoch.
func (h *Holder) Epoch() uint64 { return h.epoch.Load() }

// Pass returns a pass of the current epoch, for users that count their requests in flight without a Share.
func (h *Holder) Pass() Pass { return Pass{h, h.epoch.Load()} }

// Join makes s a share of the current epoch. s must not be a share of any holder and must have no requests in flight.
// The caller must call Leave when it has finished.
func (h *Holder) Join(s *Share) {
	h.mu.Lock()
	defer h.mu.Unlock()
	s.pass = Pass{h, h.epoch.Load()}
	h.shares[s] = struct{}{}
}

// Raise ends the current epoch and returns the next one. After Raise no request of an older epoch starts.
func (h *Holder) Raise() (epoch uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.epoch.Add(1)
}

// Drained reports whether no request of an epoch below before is in flight. Once Raise has returned that epoch, a true
// result is final.
func (h *Holder) Drained(before uint64) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	for s := range h.shares {
		if s.pass.epoch < before && s.n.Load() > 0 {
			return false
		}
	}
	return true
}

// InFlight returns the number of requests in flight of epochs below before.
func (h *Holder) InFlight(before uint64) (n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for s := range h.shares {
		if s.pass.epoch < before {
			n += int(s.n.Load())
		}
	}
	return n
}

// Share counts the requests in flight of one user of a holder's right. The zero Share belongs to no holder and is never
// stale. One goroutine at a time may call Begin and End; the other methods may be called from any goroutine.
type Share struct {
	n    atomic.Int64
	_    [cacheLine - 8]byte // the drive reads passes while the connection counts
	pass Pass
}

// Pass returns the pass that the share's requests carry. It does not change after Join.
func (s *Share) Pass() Pass { return s.pass }

// InFlight returns the number of requests that have begun and not ended.
func (s *Share) InFlight() int { return int(s.n.Load()) }

// Begin counts a request and returns true. If the share is of an older epoch, the request must not begin, and Begin
// returns false.
//
// hot: 0 allocs
func (s *Share) Begin() bool {
	// The order matters. The request is counted before the epoch is read, and Raise changes the epoch before Drained
	// reads the count. So either Begin sees the new epoch, or Drained sees the request.
	s.n.Add(1)
	if s.pass.Stale() {
		s.End()
		return false
	}
	return true
}

// End counts a request that has ended, or that can never reach the device any more.
//
// hot: 0 allocs
func (s *Share) End() {
	if s.n.Add(-1) == 0 && s.pass.Stale() {
		s.pass.holder.drained()
	}
}

// Leave removes the share from its holder. It must have no requests in flight. Idempotent.
func (s *Share) Leave() {
	h := s.pass.holder
	if h == nil {
		return
	}
	h.mu.Lock()
	delete(h.shares, s)
	h.mu.Unlock()
	if s.pass.Stale() {
		h.drained()
	}
}

// Pass names the holder for which a request is made, and the epoch. The zero Pass is for the node's own requests and is
// never stale.
type Pass struct {
	holder *Holder
	epoch  uint64
}

// Stale reports whether the right to make the request has ended.
//
// hot: 0 allocs, one load
func (p Pass) Stale() bool { return p.holder != nil && p.holder.epoch.Load() != p.epoch }

// StaleAt is Stale for those that let a request start: if the holder's lease is over, its owner first renews or ends
// the right.
//
// hot: 0 allocs, two loads
func (p Pass) StaleAt(nowNS int64) bool {
	if p.holder == nil {
		return false
	}
	p.holder.Renew(nowNS)
	return p.holder.epoch.Load() != p.epoch
}
