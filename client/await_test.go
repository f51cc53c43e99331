package client

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"

	"jbofd/internal/nvme"
)

// lockedQPair is a QPair that goroutines share by a lock.
type lockedQPair struct {
	mu    sync.Mutex
	q     *QPair
	comps [8]Completion
	done  func(Completion)
	// blocked has a value when the connection is full.
	blocked chan struct{}
	err     error
	wg      sync.WaitGroup
}

// shareQPair starts the goroutines that wait for q. They end when it has failed.
func shareQPair(t testing.TB, q *QPair, done func(Completion)) *lockedQPair {
	l := &lockedQPair{q: q, done: done, blocked: make(chan struct{}, 1)}
	l.wg.Add(2)
	go func() {
		defer l.wg.Done()
		defer close(l.blocked)
		for !l.ended() {
			if err := q.AwaitRecv(l.receive); err != nil {
				t.Errorf("AwaitRecv: %v", err)
				return
			}
		}
	}()
	go func() {
		defer l.wg.Done()
		for range l.blocked {
			if err := q.AwaitSend(l.send); err != nil && !l.ended() {
				t.Errorf("AwaitSend: %v", err)
			}
		}
	}()
	return l
}

func (l *lockedQPair) ended() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.err != nil
}

func (l *lockedQPair) receive() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for l.err == nil {
		n, more, err := l.q.Receive(l.comps[:])
		for _, c := range l.comps[:n] {
			l.done(c)
		}
		l.err = err
		l.kick()
		if !more {
			return err != nil
		}
	}
	return true
}

// kick starts AwaitSend if the connection is full.
func (l *lockedQPair) kick() {
	if l.q.Blocked() {
		select {
		case l.blocked <- struct{}{}:
		default:
		}
	}
}

func (l *lockedQPair) send() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err == nil {
		_, l.err = l.q.Submit(nil)
		l.collect()
	}
	return l.err != nil || !l.q.Blocked()
}

func (l *lockedQPair) collect() {
	for n := l.q.Completed(l.comps[:]); n > 0; n = l.q.Completed(l.comps[:]) {
		for _, c := range l.comps[:n] {
			l.done(c)
		}
	}
}

// submit submits one command.
func (l *lockedQPair) submit(t testing.TB, c Command) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if n, err := l.q.Submit([]Command{c}); n != 1 || err != nil {
		t.Errorf("Submit: %d, %v", n, err)
	}
	l.collect()
	l.kick()
}

// TestAQPairIsSharedByALock: several goroutines write and read back more than a socket holds, and no goroutine has the
// QPair while it waits.
func TestAQPairIsSharedByALock(t *testing.T) {
	overEach(t, 16<<20, func(t *testing.T, s *script) {
		const senders, rounds, size = 8, 8, 1 << 20
		o := quick(s)
		o.QPairs = 1
		c, _ := connect(t, o)
		q, err := c.OpenQPair(testContext(t))
		if err != nil {
			t.Fatal(err)
		}
		var answers [senders]chan Completion
		for i := range answers {
			answers[i] = make(chan Completion, 1)
		}
		l := shareQPair(t, q, func(c Completion) { answers[c.Tag] <- c })
		var wg sync.WaitGroup
		for i := range senders {
			wg.Add(1)
			go func() {
				defer wg.Done()
				data := make([]byte, size)
				for round := range rounds {
					want := bytes.Repeat([]byte{byte(i), byte(round)}, size/2)
					copy(data, want)
					for _, op := range []uint8{OpWrite, OpRead} {
						x := Command{Data: data, Tag: uint64(i)}
						SetRW(&x, op, 1, uint64(i)*size/512, size/512)
						l.submit(t, x)
						if c := <-answers[i]; !c.Status.OK() {
							t.Errorf("sender %d, opcode %d: %v", i, op, c.Status)
							return
						}
						if op == OpWrite {
							clear(data)
						}
					}
					if !bytes.Equal(data, want) {
						t.Errorf("sender %d, round %d: other data was read than written", i, round)
						return
					}
				}
			}()
		}
		wg.Wait()
		q.Shutdown()
		l.wg.Wait()
		if !errors.Is(l.err, ErrClosed) {
			t.Errorf("after Shutdown: %v, want ErrClosed", l.err)
		}
		if err := q.Close(); err != nil {
			t.Error(err)
		}
	})
}

// TestShutdownEndsTheAssociationAtOnce, also if the target does not answer: whoever waits is woken, and Close does not
// wait for a shutdown of the controller.
func TestShutdownEndsTheAssociationAtOnce(t *testing.T) {
	overEach(t, 1<<20, func(t *testing.T, s *script) {
		for range 4 {
			o := quick(s)
			o.QPairs, o.CtrlLossTimeout = 1, -1
			c, err := Connect(testContext(t), o)
			if err != nil {
				t.Fatal(err)
			}
			q, err := c.OpenQPair(testContext(t))
			if err != nil {
				t.Fatal(err)
			}
			s.mu.Lock()
			s.tracing, s.trace = true, nil
			s.stalled = func(*nvme.SQE) bool { return true }
			s.mu.Unlock()
			l := shareQPair(t, q, func(c Completion) { t.Errorf("command %d has ended", c.Tag) })
			x := Command{Data: make([]byte, 512)}
			SetRW(&x, OpRead, 1, 0, 1)
			l.submit(t, x)
			q.Shutdown()
			l.wg.Wait()
			if !errors.Is(l.err, ErrClosed) {
				t.Errorf("%v, want ErrClosed", l.err)
			}
			if err := errors.Join(q.Close(), c.Close()); err != nil {
				t.Error(err)
			}
			s.mu.Lock()
			if slices.Contains(s.trace, "0 shutdown") {
				t.Error("Close has asked for a shutdown of the controller")
			}
			s.stalled = nil
			s.mu.Unlock()
		}
	})
}

// TestALossWakesWhoAwaitsCompletions.
func TestALossWakesWhoAwaitsCompletions(t *testing.T) {
	overEach(t, 1<<20, func(t *testing.T, s *script) {
		defer s.stall("read")()
		o := quick(s)
		o.QPairs, o.CtrlLossTimeout = 1, -1
		c, _ := connect(t, o)
		q, err := c.OpenQPair(testContext(t))
		if err != nil {
			t.Fatal(err)
		}
		l := shareQPair(t, q, func(c Completion) { t.Errorf("command %d has ended", c.Tag) })
		x := Command{Data: make([]byte, 512)}
		SetRW(&x, OpRead, 1, 0, 1)
		l.submit(t, x)
		s.cut()
		l.wg.Wait()
		if !errors.Is(l.err, ErrConnectionLost) {
			t.Errorf("%v, want ErrConnectionLost", l.err)
		}
		if err := q.Close(); err != nil {
			t.Error(err)
		}
	})
}

func TestAwaitRecvIsNotForCredits(t *testing.T) {
	s := newScript(t, 1<<20)
	s.credit = nvme.MakeCredit(1, 8)
	o := quick(s)
	o.QPairs = 1
	c, _ := connect(t, o)
	q, err := c.OpenQPair(testContext(t))
	if err != nil {
		t.Fatal(err)
	}
	defer q.Close()
	if err := q.AwaitRecv(func() bool { return true }); !errors.Is(err, ErrUnsupported) {
		t.Errorf("%v, want ErrUnsupported", err)
	}
}

// TestReplicationIsForNodes: a target that does not offer it is refused.
func TestReplicationIsForNodes(t *testing.T) {
	s := newScript(t, 1<<20)
	o := quick(s)
	o.Replication, o.HostNQN = true, "nqn.2026-11.example.jbofd:node-a"
	c, err := Connect(testContext(t), o)
	if err == nil {
		c.Close()
	}
	if want := "replication to " + o.HostNQN; !errors.Is(err, ErrUnsupported) ||
		!bytes.Contains(fmt.Append(nil, err), []byte(want)) {
		t.Errorf("%v, want ErrUnsupported that says %q", err, want)
	}
}
