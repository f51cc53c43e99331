package turn

import (
	"flag"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

var seed = flag.Uint64("seed", uint64(time.Now().UnixNano()), "seed of the random tests")

// message is an item in a machine's mailbox.
type message struct {
	node Node[message]
	from int
	n    int
}

func newMessage(from, n int) *message {
	l := &message{from: from, n: n}
	l.node.Item = l
	return l
}

// reader is a machine that reads its messages. It checks that its Driver runs one turn at a time.
type reader struct {
	t      *testing.T
	driver Driver
	mail   Mailbox[message]
	// busy: a turn is in progress.
	busy atomic.Bool
	// during, if set, runs within each turn.
	during func(turn int)

	turns int
	got   []*message
}

func newReader(t *testing.T, cfg Config) *reader {
	t.Helper()
	r := &reader{t: t}
	cfg.Machine = r
	if err := r.driver.Init(cfg); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.driver.Close)
	return r
}

func (r *reader) Pending() bool { return r.mail.Pending() }

func (r *reader) Turn() {
	if r.busy.Swap(true) {
		r.t.Error("two turns at once")
	}
	r.turns++
	for n := r.mail.Take(); n != nil; {
		l := n.Item
		n = n.Detach()
		r.got = append(r.got, l)
	}
	if r.during != nil {
		r.during(r.turns)
	}
	r.busy.Store(false)
}

func (r *reader) post(l *message) {
	r.mail.Push(&l.node)
	r.driver.Run()
}

// kicker counts its kicks.
type kicker struct{ f func() }

func (k kicker) Kick() { k.f() }

func TestMessagesAreReadOnceAndInOrderByOneTurnAtATime(t *testing.T) {
	r := newReader(t, Config{})
	const senders, letters = 8, 20_000
	var all sync.WaitGroup
	for from := range senders {
		all.Go(func() {
			var c Chain[message]
			for n := range letters {
				switch l := newMessage(from, n); {
				case n%3 == 0:
					r.post(l)
				case n%3 == 1:
					c.Add(&l.node)
				default:
					c.Add(&l.node)
					r.mail.PushChain(&c)
					if !c.Empty() {
						t.Error("PushChain leaves the chain as it was")
					}
					r.driver.Run()
				}
			}
			r.mail.PushChain(&c)
			r.driver.Run()
		})
	}
	all.Wait()
	r.driver.Close() // after the run that was handed over
	r.driver.Lock()
	defer r.driver.Unlock()
	if len(r.got) != senders*letters {
		t.Fatalf("%d letters were read, %d were sent", len(r.got), senders*letters)
	}
	var next [senders]int
	for _, l := range r.got {
		if l.n != next[l.from] {
			t.Fatalf("letter %d of sender %d was read when %d was due", l.n, l.from, next[l.from])
		}
		next[l.from]++
	}
}

func TestASubmitterTakesABoundedNumberOfTurns(t *testing.T) {
	e := newEvents(1)
	r := newReader(t, Config{Env: e, MaxTurns: 3})
	const busyTurns = 10
	r.during = func(turn int) {
		if turn < busyTurns {
			r.mail.Push(&newMessage(0, turn).node) // as others do
		}
	}
	r.post(newMessage(0, 0))
	if r.turns != 3 {
		t.Fatalf("the submitter has taken %d turns, want 3", r.turns)
	}
	for e.step() {
	}
	if r.turns != busyTurns || r.mail.Pending() {
		t.Errorf("%d turns were taken in all, want %d, and pending is %t", r.turns, busyTurns, r.mail.Pending())
	}
}

func TestRunsThatAreHandedOverTogetherAreOneRun(t *testing.T) {
	e := newEvents(1)
	r := newReader(t, Config{Env: e})
	r.mail.Push(&newMessage(0, 0).node)
	r.driver.RunLater()
	r.driver.RunLater()
	if len(e.ready) != 1 || r.turns != 0 {
		t.Errorf("%d goroutines were started and %d turns taken, want 1 and 0", len(e.ready), r.turns)
	}
	e.step()
	r.driver.RunLater() // the one before has begun
	if len(e.ready) != 1 || r.turns != 1 {
		t.Errorf("%d goroutines were started and %d turns taken, want 1 and 1", len(e.ready), r.turns)
	}
}

func TestHandOverRunsTheMachineOnItsOwnGoroutine(t *testing.T) {
	e := newEvents(1)
	handed := 0
	r := newReader(t, Config{Env: e, MaxTurns: 1, HandOver: func() { handed++ }})
	r.during = func(turn int) {
		if turn == 1 {
			r.mail.Push(&newMessage(0, 1).node)
		}
	}
	r.post(newMessage(0, 0))
	r.driver.RunLater()
	if handed != 2 || len(e.ready) > 0 {
		t.Errorf("handed over %d times, and %d goroutines started; want 2 and 0", handed, len(e.ready))
	}
	r.driver.Run()
}

func TestMessagesDuringALockAreReadAfterwards(t *testing.T) {
	r := newReader(t, Config{})
	r.driver.Lock()
	r.post(newMessage(0, 0))
	if len(r.got) > 0 {
		t.Error("mail was read while somebody else owned the machine")
	}
	r.driver.Unlock()
	r.driver.Lock()
	defer r.driver.Unlock()
	if len(r.got) != 1 {
		t.Errorf("%d letters were read, want 1", len(r.got))
	}
}

func TestKicksAreMadeAfterOwnershipEnds(t *testing.T) {
	a, b := newReader(t, Config{}), newReader(t, Config{})
	kicks := 0
	a.during = func(turn int) {
		a.driver.Kick(kicker{func() {
			kicks++
			a.driver.Lock() // would never end if the machine were still owned
			defer a.driver.Unlock()
			b.post(newMessage(0, turn))
		}})
	}
	b.during = func(int) { // b wakes a, which runs its turn to its end
		if b.turns < 5 {
			b.driver.Kick(kicker{func() { a.post(newMessage(1, 0)) }})
		}
	}
	a.post(newMessage(0, 0))
	if a.turns != 5 || b.turns != 5 || kicks != 5 {
		t.Errorf("%d and %d turns and %d kicks, want 5 of each", a.turns, b.turns, kicks)
	}
}

func TestTheTimerBringsATurnAtTheEarliestTimeAskedFor(t *testing.T) {
	e := newEvents(1)
	r := newReader(t, Config{Env: e, MinWaitNS: 50})
	var at []int64
	ask := []int64{1000, 400, 700} // in one turn
	r.during = func(turn int) {
		if turn == 1 {
			for _, ns := range ask {
				r.driver.WakeAt(ns)
			}
			return
		}
		at = append(at, e.now)
		if turn == 2 {
			r.driver.WakeAt(e.now + 1) // sooner than MinWaitNS
		}
	}
	r.post(newMessage(0, 0))
	for e.step() {
	}
	if !slices.Equal(at, []int64{400, 450}) {
		t.Errorf("turns at %v, want 400 and 450", at)
	}
	if n := e.timers[0].resets; n != 3 {
		t.Errorf("the timer was set %d times, want 3: not for a time later than the one it is set to", n)
	}
}

func TestCloseStopsTheTimer(t *testing.T) {
	e := newEvents(1)
	r := newReader(t, Config{Env: e})
	r.driver.Lock()
	r.driver.WakeAt(100)
	r.driver.Unlock()
	r.driver.Close()
	r.driver.Lock()
	r.driver.WakeAt(200)
	r.driver.Unlock()
	if e.step() || r.turns > 0 {
		t.Errorf("%d turns were taken after Close", r.turns)
	}
}

func TestCloseWaitsForRunsThatWereHandedOver(t *testing.T) {
	e := newEvents(1)
	r := newReader(t, Config{Env: e})
	r.during = func(turn int) {
		if turn < 10 {
			r.mail.Push(&newMessage(0, turn).node)
		}
	}
	r.mail.Push(&newMessage(0, 0).node)
	r.driver.RunLater()
	r.driver.Close()
	if r.turns != 10 || e.step() {
		t.Errorf("Close has returned after %d turns of 10, or before the last goroutine has ended", r.turns)
	}
}

// TestQuiesceWaitsForEarlierRequests: and for no others. The model is a list of the operations in flight.
func TestQuiesceWaitsForEarlierRequests(t *testing.T) {
	t.Logf("-seed %d", *seed)
	rng := rand.New(rand.NewPCG(*seed, 0))
	type operation struct {
		epoch uint32
		began int
	}
	type waiter struct {
		quiet <-chan struct{}
		at    int
	}
	var q Quiescer
	var inFlight []operation
	var waiters []waiter
	for now := range 200_000 {
		switch r := rng.IntN(20); {
		case r < 9 && len(inFlight) < 30:
			inFlight = append(inFlight, operation{q.Begin(), now})
		case r < 19 && len(inFlight) > 0:
			i := rng.IntN(len(inFlight))
			q.End(inFlight[i].epoch)
			inFlight = slices.Delete(inFlight, i, i+1)
		case len(waiters) < 20:
			waiters = append(waiters, waiter{q.Quiesce(), now})
		}
		if q.InFlight() != len(inFlight) {
			t.Fatalf("%d operations are in flight, want %d", q.InFlight(), len(inFlight))
		}
		waiters = slices.DeleteFunc(waiters, func(w waiter) bool {
			older := slices.ContainsFunc(inFlight, func(o operation) bool { return o.began < w.at })
			select {
			case <-w.quiet:
				if older {
					t.Fatalf("quiet since %d is reported while an older operation is in flight", w.at)
				}
				return true
			default:
				if !older {
					t.Fatalf("quiet since %d is not reported with nothing older in flight", w.at)
				}
				return false
			}
		})
	}
}

func TestATurnAllocatesNothing(t *testing.T) {
	r := newReader(t, Config{Env: newEvents(1)})
	r.got = make([]*message, 0, 1)
	var kick Kicker = kicker{func() {}}
	r.during = func(int) {
		r.got = r.got[:0]
		r.driver.Kick(kick)
		r.driver.WakeAt(r.driver.Now() + 1000)
	}
	l := newMessage(0, 0)
	if n := testing.AllocsPerRun(1000, func() { r.post(l) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func TestMessagesKeepTheirOrderAndSayWhetherTheyAreTheFirst(t *testing.T) {
	var m Messages[int]
	if first := m.Put(1); !first {
		t.Error("the first message is not reported as such")
	}
	if first := m.Put(2); first {
		t.Error("the second message is reported as the first")
	}
	if got := m.Take([]int{0}); !slices.Equal(got, []int{0, 1, 2}) || m.Pending() {
		t.Errorf("took %v", got)
	}
	if got := m.Take(nil); got != nil {
		t.Errorf("took %v from an empty mailbox", got)
	}
	if first := m.Put(3); !first {
		t.Error("the first message after Take is not reported as such")
	}
}

// count is a machine that counts its messages.
type count struct {
	mail   Mailbox[message]
	driver Driver
	n      int
}

func (c *count) Pending() bool { return c.mail.Pending() }

func (c *count) Turn() {
	for n := c.mail.Take(); n != nil; n = n.Detach() {
		c.n++
	}
}

func BenchmarkTurn(b *testing.B) {
	c := &count{}
	if err := c.driver.Init(Config{Machine: c}); err != nil {
		b.Fatal(err)
	}
	defer c.driver.Close()
	l := newMessage(0, 0)
	for b.Loop() {
		c.mail.Push(&l.node)
		c.driver.Run()
	}
}
