package vfio

import (
	"fmt"
	"runtime"
	"slices"
	"testing"
	"time"

	"jbofd/internal/bufpool"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/vfio/pcietest"
)

// slow is a queue on a controller that carries out commands when the test says so.
type slow struct {
	testing.TB
	ctrl  *pcietest.Controller
	q     *queue
	reqs  []ssd.Request
	comps []ssd.Completion
}

func newSlow(t testing.TB, depth int, cfg pcietest.Config) *slow {
	t.Helper()
	cfg.SizeBytes, cfg.Manual = 4<<20, true
	pool, err := bufpool.New(bufpool.Config{TotalBytes: 16 << 20})
	if err != nil {
		t.Fatal(err)
	}
	account := pool.Account("test")
	s := &slow{TB: t, comps: make([]ssd.Completion, depth)}
	if s.ctrl, err = pcietest.New(cfg); err != nil {
		t.Fatal(err)
	}
	d, err := Open(Config{Name: "test", Pool: pool}, s.ctrl)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
		for _, s := range s.ctrl.Counts().Strays {
			t.Errorf("the controller saw %s", s)
		}
	})
	q, err := d.OpenQueue(depth)
	if err != nil {
		t.Fatal(err)
	}
	s.q = q.(*queue)
	for i := range depth {
		b, ok := pool.Get(account, 4096)
		if !ok {
			t.Fatal("no buffer")
		}
		s.reqs = append(s.reqs, ssd.Request{Op: ssd.Read, Offset: int64(i) * 4096, Len: 4096, Buf: b.B, Tag: uint64(i)})
	}
	return s
}

func (s *slow) submit() {
	if n := s.q.Submit(s.reqs); n != len(s.reqs) {
		s.Fatalf("Submit took %d", n)
	}
}

func (s *slow) serve() {
	if n := s.ctrl.Serve(len(s.reqs)); n != len(s.reqs) {
		s.Fatalf("the controller has carried out %d commands", n)
	}
}

func (s *slow) poll() {
	if n := s.q.Poll(s.comps); n != len(s.reqs) {
		s.Fatalf("Poll returned %d", n)
	}
}

// busy carries out batches that are found without a wait.
func (s *slow) busy(batches int) {
	for range batches {
		s.submit()
		s.serve()
		s.poll()
	}
}

// sleep carries out a batch for which a Wait blocks.
func (s *slow) sleep() {
	s.Helper()
	s.submit()
	calls := s.q.event.Calls()
	ended := make(chan bool)
	go func() { ended <- s.q.Wait(-1) }()
	for end := time.Now().Add(10 * time.Second); s.q.event.Calls() == calls; runtime.Gosched() {
		if time.Now().After(end) {
			s.Fatal("Wait does not block")
		}
	}
	s.serve()
	select {
	case <-ended:
	case <-time.After(10 * time.Second):
		s.Fatal("Wait has missed the interrupt")
	}
	s.poll()
}

// cost is what the driver has done.
type cost struct{ doorbells, interrupts, masks, calls int }

func (s *slow) cost() cost {
	c := s.ctrl.Counts()
	// The controller's signals, which stand for those of the kernel, are not the driver's.
	return cost{c.Doorbells, c.Interrupts, c.Masks, int(s.q.event.Calls()) - c.Interrupts}
}

func (c cost) since(b cost) cost {
	return cost{c.doorbells - b.doorbells, c.interrupts - b.interrupts, c.masks - b.masks, c.calls - b.calls}
}

// more reports whether there were up to n more calls.
func (c cost) more(calls, n int) bool { return c.calls >= calls && c.calls <= calls+n }

// What a batch costs, exactly: one write to a doorbell for its submissions and one for its completions; if it is found
// by looking, nothing else; if a Wait blocks for it, one interrupt, and a read of the event before and after that.
func TestCostsOfABatch(t *testing.T) {
	for _, depth := range []int{1, 32, 128} {
		t.Run(fmt.Sprintf("QD %d", depth), func(t *testing.T) {
			const batches = 20
			s := newSlow(t, depth, pcietest.Config{})
			s.busy(busyBatches) // it is busy from here on
			before := s.cost()
			s.busy(batches)
			if got, want := s.cost().since(before), (cost{doorbells: 2 * batches}); got != want {
				t.Errorf("busy: %+v for %d batches, want %+v", got, batches, want)
			}
			s.sleep()
			before = s.cost()
			for range batches {
				s.sleep()
			}
			want := cost{doorbells: 2 * batches, interrupts: batches, calls: 2 * batches}
			got := s.cost().since(before)
			if got.more(want.calls, batches/5) { // epoll may tell of an event twice
				want.calls = got.calls
			}
			if got != want {
				t.Errorf("waiting: %+v for %d batches, want %+v", got, batches, want)
			}
		})
	}
}

// A queue that becomes busy and idle in turn masks its interrupt once each time.
func TestCostsOfBecomingIdle(t *testing.T) {
	s := newSlow(t, 4, pcietest.Config{Forgets: true})
	s.sleep()
	const times = 10
	before := s.cost()
	for range times {
		s.busy(7)
		s.sleep()
	}
	// The batch after a wait sends one more interrupt, which the next wait finds: one read more or less, as it happens
	// to be told of it.
	want := cost{doorbells: 2 * 8 * times, interrupts: 2 * times, masks: 2 * times, calls: 3 * times}
	got := s.cost().since(before)
	if got.more(2*times, 2*times) {
		want.calls = got.calls
	}
	if got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
}

// An owner that polls while another goroutine waits does not take the interrupt from it.
func TestAnOwnerDoesNotDisarmAWaiter(t *testing.T) {
	s := newSlow(t, 2, pcietest.Config{})
	s.busy(10)
	over := false
	ended := make(chan bool)
	go func() {
		for {
			s.q.Wait(-1)
			s.q.mu.Lock()
			found := s.q.requests.Done() && over
			s.q.mu.Unlock()
			if found {
				close(ended)
				return
			}
		}
	}()
	for range 50 {
		s.busy(1)
		runtime.Gosched()
	}
	s.submit()
	s.q.mu.Lock()
	over = true
	s.q.mu.Unlock()
	s.serve()
	select {
	case <-ended:
	case <-time.After(10 * time.Second):
		t.Error("the waiter has missed the last completions")
	}
	s.poll()
}

// A controller that is too fast, or too slow, for a look between arming and waiting: whenever a completion comes, Wait
// ends, also if the device forgets interrupts that became due under a mask.
func TestACompletionAtAnyTimeEndsAWait(t *testing.T) {
	for name, cfg := range map[string]pcietest.Config{
		"masks": {}, "forgets": {Forgets: true}, "no masks": {NoMasks: true},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSlow(t, 1, cfg)
			ended := make(chan bool)
			for i := range 2000 {
				if i%3 == 0 {
					s.busy(busyBatches)
				}
				s.submit()
				go func() { ended <- s.q.Wait(-1) }()
				for range i % 7 {
					runtime.Gosched()
				}
				s.serve()
				select {
				case <-ended:
				case <-time.After(10 * time.Second):
					t.Fatalf("round %d: the completion was missed", i)
				}
				s.poll()
			}
		})
	}
}

// A completion that comes just before the end of a mask, and whose interrupt the device forgets, ends a Wait: the queue
// looks once more after it has armed itself.
func TestWaitLooksAfterItHasArmed(t *testing.T) {
	s := newSlow(t, 4, pcietest.Config{Forgets: true, AtUnmask: true})
	ended := make(chan bool)
	for range 20 {
		s.busy(busyBatches) // it is masked now
		s.submit()
		go func() { ended <- s.q.Wait(-1) }()
		select {
		case <-ended:
		case <-time.After(10 * time.Second):
			t.Fatal("the completion was missed")
		}
		s.poll()
	}
	// The keeper finds a completion that was missed, too, but later, and signals the event.
	if n := s.cost().calls; n != 0 {
		t.Errorf("%d reads and writes of the event by the driver, want 0: Wait has blocked", n)
	}
}

// The driver's share of an I/O of 4 KiB that is found by looking, without the controller's, which is code of this test:
// the median of batches, less what the clock costs that separates the two.
func BenchmarkDriver(b *testing.B) {
	for _, depth := range []int{1, 32, 128} {
		b.Run(fmt.Sprintf("QD=%d", depth), func(b *testing.B) {
			s := newSlow(b, depth, pcietest.Config{})
			s.busy(busyBatches)
			var samples, clock [4096]int64
			for i := range clock {
				clock[i] = -time.Until(time.Now()).Nanoseconds()
			}
			batches := 0
			before := s.cost()
			b.ReportAllocs()
			for b.Loop() {
				begin := time.Now()
				s.q.Submit(s.reqs)
				took := time.Since(begin)
				s.serve()
				begin = time.Now()
				s.q.Poll(s.comps)
				samples[batches%len(samples)] = int64(took + time.Since(begin))
				batches++
			}
			median := func(of []int64) float64 {
				slices.Sort(of)
				return float64(of[len(of)/2])
			}
			ios := float64(batches * depth)
			c := s.cost().since(before)
			took := median(samples[:min(batches, len(samples))]) - 2*median(clock[:])
			b.ReportMetric(took/float64(depth), "driver-ns/IO")
			b.ReportMetric(float64(c.doorbells)/ios, "doorbells/IO")
			b.ReportMetric(float64(c.interrupts)/ios, "interrupts/IO")
			b.ReportMetric(float64(c.calls)/ios, "syscalls/IO")
		})
	}
}
