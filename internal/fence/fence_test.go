package fence

import (
	"math"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

func TestNothingOlderBeginsAfterRaise(t *testing.T) {
	h := NewHolder(func() {})
	var old, young Share
	h.Join(&old)
	if !old.Begin() {
		t.Fatal("a share of the current epoch must not begin")
	}
	before := old.Pass()
	epoch := h.Raise()
	h.Join(&young)
	if old.Begin() || !before.Stale() {
		t.Error("a request of an older epoch begins")
	}
	if !young.Begin() || young.Pass().Stale() {
		t.Error("a share that joined after Raise must not begin")
	}
	if got := old.InFlight(); got != 1 {
		t.Errorf("%d requests in flight, 1 has begun", got)
	}
	if h.Epoch() != epoch || h.InFlight(epoch) != 1 {
		t.Errorf("epoch %d with %d in flight, want %d with 1", h.Epoch(), h.InFlight(epoch), epoch)
	}
}

func TestDrainedIsCalledWhenTheLastOlderRequestEnds(t *testing.T) {
	told := 0
	h := NewHolder(func() { told++ })
	var a, b Share
	h.Join(&a)
	h.Join(&b)
	a.Begin()
	a.Begin()
	b.Begin()
	b.End()
	if told != 0 {
		t.Error("told of a share that is not stale")
	}
	epoch := h.Raise()
	if h.Drained(epoch) {
		t.Error("drained with two requests in flight")
	}
	a.End()
	if told != 0 || h.Drained(epoch) {
		t.Error("drained with a request in flight")
	}
	a.End()
	if told != 1 || !h.Drained(epoch) {
		t.Errorf("told %d times, drained %v; want once and true", told, h.Drained(epoch))
	}
}

func TestYoungerRequestsDoNotHoldUpADrain(t *testing.T) {
	h := NewHolder(func() {})
	var young Share
	epoch := h.Raise()
	h.Join(&young)
	young.Begin()
	if !h.Drained(epoch) {
		t.Error("a request of the current epoch holds up the drain of those before")
	}
	if h.Drained(h.Raise()) {
		t.Error("the next epoch does not wait for it")
	}
}

func TestLeaveMayCompleteADrain(t *testing.T) {
	told := 0
	h := NewHolder(func() { told++ })
	var s Share
	h.Join(&s)
	epoch := h.Raise()
	s.Leave()
	if told == 0 || !h.Drained(epoch) {
		t.Error("nobody is told when a stale share leaves")
	}
	var nobody Share
	nobody.Leave() // belongs to no holder
	if !nobody.Begin() || nobody.Pass().Stale() {
		t.Error("the zero share is stale")
	}
	nobody.End()
}

// TestPastTheLeaseTheOwnerDecides: a pass is not good past the lease before the owner has renewed the right, and stale
// if the owner has ended it.
func TestPastTheLeaseTheOwnerDecides(t *testing.T) {
	h, asked, alive := NewHolder(func() {}), 0, true
	h.Lease(func() {
		if asked++; alive {
			h.SetLease(200)
		} else {
			h.Raise()
			h.SetLease(math.MaxInt64)
		}
	})
	p := h.Pass()
	if p.StaleAt(math.MaxInt64) || asked != 0 {
		t.Error("a lease without end ends")
	}
	h.SetLease(100)
	if p.StaleAt(100) || asked != 0 {
		t.Error("the owner is asked within the lease")
	}
	if p.StaleAt(101) || asked != 1 || p.StaleAt(200) || asked != 1 {
		t.Errorf("asked %d times, and the lease was renewed once", asked)
	}
	alive = false
	if !p.StaleAt(201) || asked != 2 || !p.Stale() {
		t.Error("the right has not ended with its lease")
	}
	if p.StaleAt(math.MaxInt64); asked != 2 {
		t.Error("the owner is asked again")
	}
	if (Pass{}).StaleAt(math.MaxInt64) {
		t.Error("the zero pass is stale")
	}
}

func TestBeginAndEndAllocateNothing(t *testing.T) {
	h := NewHolder(func() {})
	var s Share
	h.Join(&s)
	if n := testing.AllocsPerRun(100, func() {
		h.Renew(1)
		if s.Begin() && !s.Pass().StaleAt(1) {
			s.End()
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// TestNoRequestPassesTheCheckAfterTheDrain lets users begin requests and check their passes as a drive does, while the
// holder's epoch is raised repeatedly. After a drain no earlier request may be between its check and its end.
func TestNoRequestPassesTheCheckAfterTheDrain(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	told := make(chan struct{}, 1)
	h := NewHolder(func() {
		select {
		case told <- struct{}{}:
		default:
		}
	})
	var stop atomic.Bool
	var users sync.WaitGroup
	// atDevice counts, by parity of the epoch, requests that passed the check and have not ended.
	var atDevice [2]atomic.Int64
	for u := range 4 {
		users.Go(func() {
			rng := rand.New(rand.NewPCG(seed, uint64(u)))
			for !stop.Load() {
				var s Share
				h.Join(&s)
				for !stop.Load() && s.Begin() { // a share of the last epoch never becomes stale
					if p := s.Pass(); !p.Stale() {
						atDevice[p.epoch%2].Add(1)
						if p.Stale() && rng.IntN(2) == 0 { // the epoch was raised while it was at the device
							time.Sleep(time.Microsecond)
						}
						atDevice[p.epoch%2].Add(-1)
					}
					s.End()
				}
				s.Leave()
				runtime.Gosched() // let the holder, which waits for this, go on
			}
		})
	}
	for range 2000 {
		epoch := h.Raise()
		for !h.Drained(epoch) {
			<-told
		}
		if n := atDevice[(epoch-1)%2].Load(); n != 0 {
			t.Errorf("epoch %d drained with %d requests of the one before at the device", epoch, n)
		}
	}
	stop.Store(true)
	users.Wait()
}
