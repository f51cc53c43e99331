package lab

import (
	"bytes"
	"errors"
	"fmt"
	"testing"
	"time"

	"jbofd/internal/turn"
)

func TestTimersRunAtTheirTimeAndReadyTasksInAnyOrder(t *testing.T) {
	orders := map[string]bool{}
	for seed := range uint64(50) {
		s := NewSim(seed)
		begin := s.Now()
		order := ""
		s.After(100, func() { order += "c" })
		s.After(50, func() {
			if s.Now() != begin+50 {
				t.Errorf("a timer of 50 ns runs after %d", s.Now()-begin)
			}
			s.Go(func() { order += "a" })
			s.Go(func() { order += "b" })
		})
		gone := s.After(70, func() { t.Error("a stopped timer runs") })
		gone.Stop()
		for s.Step() {
		}
		orders[order] = true
		if s.Now() != begin+100 {
			t.Errorf("%d ns have passed, want 100", s.Now()-begin)
		}
	}
	if len(orders) != 2 || !orders["abc"] || !orders["bac"] {
		t.Errorf("orders %v, want both of a and b, and c last", orders)
	}
}

func TestWaitRunsTasksAndKeepsItsTimeout(t *testing.T) {
	s := NewSim(1)
	done := make(chan struct{})
	s.After(1000, func() { close(done) })
	if s.Wait(done, 500) || !s.Wait(done, -1) {
		t.Error("Wait does not end when it should")
	}
}

func TestProcessesWaitAndAreWokenOnce(t *testing.T) {
	s := NewSim(2)
	var log []string
	p := s.Spawn(func(p *Proc) {
		p.Sleep(10)
		log = append(log, "slept")
		p.Wait(func(wake func()) {
			s.After(5, wake)
			s.After(6, wake) // too many
		})
		log = append(log, "woken")
		p.Sleep(100)
		log = append(log, "slept again")
		p.Wait(func(func()) {})
		t.Error("woken by nobody")
	})
	for s.Step() {
	}
	p.Stop()
	if got := fmt.Sprint(log); got != "[slept woken slept again]" {
		t.Error(got)
	}
}

func TestNothingOfADeadProcessRuns(t *testing.T) {
	s := NewSim(3)
	p := s.NewProcess(s.NewClock("n", ClockConfig{Skew: 0.1, JumpNS: 1000}))
	var env turn.Env = p
	timer, err := env.NewTimer(turn.Fine, func() { t.Error("a timer runs") })
	if err != nil {
		t.Fatal(err)
	}
	timer.Reset(10)
	env.Go(func() { t.Error("a task runs") })
	p.Kill()
	for s.Step() {
	}
}

func TestClocksKeepTheirBounds(t *testing.T) {
	for seed := range uint64(50) {
		s := NewSim(seed)
		c := s.NewClock("n", ClockConfig{Skew: 0.1, JumpNS: 1000})
		begin, last := s.Now(), c.Now()
		for range 50 {
			s.After(s.rng.Int64N(10000), func() {})
			s.Step()
			if s.rng.IntN(3) == 0 {
				c.Jump()
			}
			if now := c.Now(); now < last {
				t.Fatalf("seed %d: the clock runs backwards", seed)
			} else {
				last = now
			}
			passed := s.Now() - begin
			if off := last - begin - passed; off > passed/10+1001 || off < -passed/10-1 {
				t.Fatalf("seed %d: %d ns off after %d", seed, off, passed)
			}
		}
	}
}

// dial connects two ends and returns both, and what each has received.
func dial(t *testing.T, s *Sim, n *Network) (a, b *End, atA, atB *bytes.Buffer) {
	t.Helper()
	atA, atB = &bytes.Buffer{}, &bytes.Buffer{}
	n.Listen("b", func(e *End) {
		b = e
		e.Received = func(p []byte) { atB.Write(p) }
	})
	a = n.Dial("a", "b")
	a.Received = func(p []byte) { atA.Write(p) }
	s.Run(int64(time.Second), func() bool { return b != nil })
	return a, b, atA, atB
}

func TestAConnectionKeepsTheOrderOfItsBytes(t *testing.T) {
	for seed := range uint64(50) {
		s := NewSim(seed)
		n := NewNetwork(s)
		n.MaxPiece = 1 + int(seed)
		a, b, atA, atB := dial(t, s, n)
		var sent bytes.Buffer
		for i := range 100 {
			p := fmt.Appendf(nil, "%d ", i)
			sent.Write(p)
			a.Send(p)
			b.Send(p)
			if i%7 == 0 {
				s.After(10000, func() {})
				s.Step()
			}
			if i == 50 {
				a.HoldUp(1e6)
			}
		}
		a.Close()
		var why error
		b.Closed = func(err error) { why = err }
		for s.Step() {
		}
		if !bytes.Equal(atB.Bytes(), sent.Bytes()) {
			t.Fatalf("seed %d: %q arrives", seed, atB.Bytes())
		}
		if !errors.Is(why, ErrClosed) || atA.Len() > sent.Len() {
			t.Fatalf("seed %d: closed with %v", seed, why)
		}
	}
}

func TestCuts(t *testing.T) {
	s := NewSim(5)
	n := NewNetwork(s)
	a, b, atA, atB := dial(t, s, n)
	a.CutOneWay()
	a.Send([]byte("lost"))
	b.Send([]byte("heard"))
	for s.Step() {
	}
	if atB.Len() != 0 || atA.String() != "heard" || a.Over() || b.Over() {
		t.Errorf("cut one way: %q and %q arrive", atA, atB)
	}
	var whys []error
	a.Closed, b.Closed = func(err error) { whys = append(whys, err) }, func(err error) { whys = append(whys, err) }
	b.Send([]byte("not heard"))
	b.Cut(1000)
	for s.Step() {
	}
	if atA.String() != "heard" || len(whys) != 2 || !errors.Is(whys[0], ErrCut) || !errors.Is(whys[1], ErrCut) {
		t.Errorf("cut: %q arrives, the ends learn %v", atA, whys)
	}
	c := n.Dial("a", "nobody")
	var why error
	c.Closed = func(err error) { why = err }
	for s.Step() {
	}
	if why == nil {
		t.Error("a connection to nobody lives")
	}
}
