package client

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"jbofd/internal/nvme"
)

// traceOf returns a copy of the commands that the script has seen, without those of no interest here.
func traceOf(s *script) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []string
	for _, e := range s.trace {
		switch _, name, _ := strings.Cut(e, " "); name {
		case "connect", "reset", "enable", "shutdown", "read", "write", "disconnect":
			out = append(out, e)
		}
	}
	return out
}

// breakOnce makes the script trace commands, and cut the connection of the first I/O command of an opcode, and no other
// connection.
func (s *script) breakOnce(opcode uint8) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.tracing = true
	done := false
	s.answer = func(c *scriptConn, e *nvme.SQE) bool {
		if done || c.qid == 0 || e.Opcode() != opcode {
			return false
		}
		done = true
		c.cut()
		return true
	}
}

// cut ends the connection of one queue.
func (c *scriptConn) cut() {
	switch w := c.wire.(type) {
	case *scriptTCP:
		w.c.Close()
	case *scriptRDMA:
		_ = w.ep.Disconnect()
	}
}

// wantBetween checks that after the n-th entry first and before the next entry last all of want come, in order.
func wantBetween(t *testing.T, trace []string, first, last string, want ...string) {
	t.Helper()
	i := slices.Index(trace, first)
	if i < 0 {
		t.Fatalf("no %q in %q", first, trace)
	}
	k := slices.Index(trace[i+1:], last)
	if k < 0 {
		t.Fatalf("no %q after %q in %q", last, first, trace)
	}
	rest := trace[i+1 : i+1+k]
	for _, w := range want {
		j := slices.Index(rest, w)
		if j < 0 {
			t.Fatalf("between %q and %q there is no %q in its place: %q", first, last, w, trace)
		}
		rest = rest[j+1:]
	}
}

// TestAWriteIsRepeatedBehindAResetAndANewAdminConnect, although only the connection of one I/O queue was lost: a queue
// is never reconnected alone.
func TestAWriteIsRepeatedBehindAResetAndANewAdminConnect(t *testing.T) {
	overEach(t, 1<<20, func(t *testing.T, s *script) {
		o := quick(s)
		o.Queues = 1
		c, n := connect(t, o)
		s.breakOnce(nvme.CmdWrite)
		if _, err := n.WriteAt(testContext(t), bytes.Repeat([]byte{7}, 512), 0, 0); err != nil {
			t.Fatal(err)
		}
		wantBetween(t, traceOf(s), "1 write", "1 write", "0 reset", "0 connect", "0 enable", "1 connect")
		if c.Losses() != 1 || s.disk[0] != 7 {
			t.Errorf("%d losses, byte %d", c.Losses(), s.disk[0])
		}
	})
}

// TestAQPairOpenedAfterALossBelongsToANewAssociation, so that its user may repeat writes there.
func TestAQPairOpenedAfterALossBelongsToANewAssociation(t *testing.T) {
	overEach(t, 1<<20, func(t *testing.T, s *script) {
		o := quick(s)
		o.QPairs = 1
		c, _ := connect(t, o)
		q, err := c.OpenQPair(testContext(t))
		if err != nil {
			t.Fatal(err)
		}
		s.breakOnce(nvme.CmdWrite)
		w := Command{Data: make([]byte, 512)}
		SetRW(&w, OpWrite, 1, 0, 1)
		if _, err := q.Submit([]Command{w}); err != nil {
			t.Fatal(err)
		}
		if _, err := q.Poll(make([]Completion, 1), -1); !errors.Is(err, ErrConnectionLost) {
			t.Fatalf("%v, want ErrConnectionLost", err)
		}
		if err := q.Close(); err != nil {
			t.Error(err)
		}
		if q, err = c.OpenQPair(testContext(t)); err != nil {
			t.Fatal(err)
		}
		defer q.Close()
		run(t, q, []Command{w})
		write := fmt.Sprint(q.ID(), " write")
		wantBetween(t, traceOf(s), write, write, "0 reset", "0 connect", "0 enable", fmt.Sprint(q.ID(), " connect"))
	})
}

// TestReconnectAwaitsTheEndOfAReset: as long as CSTS.RDY is 1, commands of the old association may be in flight.
func TestReconnectAwaitsTheEndOfAReset(t *testing.T) {
	overEach(t, 1<<20, func(t *testing.T, s *script) {
		s.capTO.Store(20) // a busy machine needs longer than 500 ms for five answers
		_, n := connect(t, quick(s))
		s.breakOnce(nvme.CmdWrite)
		s.mu.Lock()
		breaks := s.answer
		polls := 0
		s.answer = func(c *scriptConn, e *nvme.SQE) bool {
			switch {
			case e.Opcode() != nvme.OpFabrics:
				return breaks(c, e)
			case e.FCTYPE() == nvme.FabricsConnect && e.Connect().QID() == 0 && polls < 5:
				t.Errorf("admin Connect after %d of 5 answers that the controller is still ready", polls)
			case e.FCTYPE() == nvme.FabricsPropertyGet && e.Property().OFST() == nvme.PropCSTS && !c.s.cc.EN() &&
				polls < 5:
				polls++
				c.reply(e.CID(), 0, uint64(nvme.CSTSRDY))
				return true
			}
			return false
		}
		s.mu.Unlock()
		if _, err := n.WriteAt(testContext(t), make([]byte, 512), 0, 0); err != nil {
			t.Fatal(err)
		}
	})
}

// TestReconnectAwaitsTheKeepAliveTimeoutOfASilentTarget: the end of an association that the target has not confirmed is
// certain only when its keep-alive timeout has passed.
func TestReconnectAwaitsTheKeepAliveTimeoutOfASilentTarget(t *testing.T) {
	overEach(t, 1<<20, func(t *testing.T, s *script) {
		o := quick(s)
		o.KATO = 800 * time.Millisecond // longer than CAP.TO, for which a reset is awaited
		_, n := connect(t, o)
		var lastSeen, connected time.Time // of the old association, and of the new one
		s.mu.Lock()
		s.answer = func(c *scriptConn, e *nvme.SQE) bool {
			connect := e.Opcode() == nvme.OpFabrics && e.FCTYPE() == nvme.FabricsConnect
			if connect && connected.IsZero() {
				connected = time.Now()
			}
			if connected.IsZero() {
				lastSeen = time.Now()
			}
			return connected.IsZero() // no answer on the old association
		}
		s.mu.Unlock()
		if _, err := n.WriteAt(testContext(t), make([]byte, 512), 0, 0); err != nil {
			t.Fatal(err)
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		if d := connected.Sub(lastSeen); d < o.KATO {
			t.Errorf("connected %s after the last command of the old association, before the keep-alive timeout of %s",
				d,
				o.KATO)
		}
	})
}

// TestReconnectAwaitsTheCommandQuiesceTime of a target that has ended the association, but has not been reset.
func TestReconnectAwaitsTheCommandQuiesceTime(t *testing.T) {
	overEach(t, 1<<20, func(t *testing.T, s *script) {
		s.cqtMS.Store(300)
		_, n := connect(t, quick(s))
		lost := time.Now()
		s.cut()
		if _, err := n.WriteAt(testContext(t), make([]byte, 512), 0, 0); err != nil {
			t.Fatal(err)
		}
		if d := time.Since(lost); d < 300*time.Millisecond {
			t.Errorf("the write was repeated %s after the loss, before the command quiesce time of 300ms", d)
		}
	})
}

// TestControllerBusyIsRepeated, by the first Connect and after a loss.
func TestControllerBusyIsRepeated(t *testing.T) {
	overEach(t, 1<<20, func(t *testing.T, s *script) {
		busy := 3
		s.mu.Lock()
		s.answer = func(c *scriptConn, e *nvme.SQE) bool {
			if e.Opcode() != nvme.OpFabrics || e.FCTYPE() != nvme.FabricsConnect || e.Connect().QID() != 0 ||
				busy == 0 {
				return false
			}
			busy--
			c.reply(e.CID(), nvme.ConnectControllerBusy, 0)
			return true
		}
		s.mu.Unlock()
		c, n := connect(t, quick(s))
		s.mu.Lock()
		busy = 5
		s.mu.Unlock()
		s.cut()
		if _, err := n.WriteAt(testContext(t), make([]byte, 512), 0, 0); err != nil {
			t.Fatal(err)
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		if busy != 0 || c.Losses() != 1 {
			t.Errorf("%d more answers Controller Busy to give, %d losses", busy, c.Losses())
		}
	})
}

// TestPermanentControllerBusyIsAnError: with DNR at once, without it when ConnectTimeout has passed.
func TestPermanentControllerBusyIsAnError(t *testing.T) {
	s := newScript(t, 512)
	for _, st := range []nvme.Status{nvme.ConnectControllerBusy, nvme.ConnectControllerBusy | nvme.DNR} {
		s.mu.Lock()
		s.answer = func(c *scriptConn, e *nvme.SQE) bool {
			c.reply(e.CID(), st, 0)
			return true
		}
		s.mu.Unlock()
		o := quick(s)
		o.ConnectTimeout = 300 * time.Millisecond
		before := s.count("connect")
		_, err := Connect(testContext(t), o)
		var se *StatusError
		if !errors.As(err, &se) || se.Status != st {
			t.Errorf("%s: %v", st, err)
		}
		if n := s.count("connect") - before; st.DNR() != (n == 1) {
			t.Errorf("%s: %d Connects", st, n)
		}
	}
}

// reasons is a slog.Handler that passes on the reasons of the records with one message.
type reasons struct {
	slog.Handler
	message string
	seen    chan string
}

func (n reasons) Enabled(context.Context, slog.Level) bool { return true }

func (n reasons) Handle(_ context.Context, r slog.Record) error {
	if r.Message == n.message {
		r.Attrs(func(a slog.Attr) bool {
			if a.Key == "reason" {
				n.seen <- a.Value.String()
			}
			return true
		})
	}
	return nil
}

// TestConnectThatTakesLongIsLogged while it waits, with the reason: a host that is answered Controller Busy looks like
// one that hangs.
func TestConnectThatTakesLongIsLogged(t *testing.T) {
	for _, c := range []struct {
		name  string
		reply bool // Connect is answered Controller Busy; otherwise held
		want  string
	}{{"busy", true, "Controller Busy"}, {"held", false, "no answer yet"}} {
		t.Run(c.name, func(t *testing.T) {
			s := newScript(t, 512)
			logged := make(chan struct{})
			ctx, cancel := context.WithCancel(testContext(t))
			defer cancel()
			s.mu.Lock()
			s.answer = func(conn *scriptConn, e *nvme.SQE) bool {
				if e.Opcode() != nvme.OpFabrics || e.FCTYPE() != nvme.FabricsConnect || e.Connect().QID() != 0 {
					return false
				}
				select {
				case <-logged:
					return false
				default:
				}
				if c.reply {
					conn.reply(e.CID(), nvme.ConnectControllerBusy, 0)
				}
				return true
			}
			s.mu.Unlock()
			o := quick(s)
			n := reasons{Handler: slog.DiscardHandler, message: "still connecting", seen: make(chan string, 16)}
			o.Logger, o.slowConnect = slog.New(n), time.Millisecond
			connected := make(chan error, 1)
			go func() {
				c, err := Connect(ctx, o)
				if err == nil {
					err = c.Close()
				}
				connected <- err
			}()
			for why := ""; !strings.Contains(why, c.want); {
				select {
				case why = <-n.seen:
				case err := <-connected:
					t.Fatalf("Connect ended with %v; logged was only %q", err, why)
				}
			}
			close(logged)
			if !c.reply {
				cancel()
			}
			if err := <-connected; err != nil && !errors.Is(err, context.Canceled) || c.reply && err != nil {
				t.Error(err)
			}
		})
	}
}

// TestWhatWasSentAndNotAnsweredIsIndeterminate, and nothing else is.
func TestWhatWasSentAndNotAnsweredIsIndeterminate(t *testing.T) {
	s := newScript(t, 1<<20)
	o := quick(s)
	o.CtrlLossTimeout = -1
	b := make([]byte, 512)
	for _, op := range []struct {
		name, command string
		changes       bool
		do            func(context.Context, *Namespace) error
	}{
		{"Write", "write", true, func(ctx context.Context, n *Namespace) error {
			_, err := n.WriteAt(ctx, b, 0,
				0)
			return err
		}},
		{"Read", "read", false, func(ctx context.Context, n *Namespace) error {
			_,
				err := n.ReadAt(ctx, b, 0)
			return err
		}},
		{"Compare", "compare", false, func(ctx context.Context, n *Namespace) error { return n.Compare(ctx, b, 0) }},
		{"CompareAndWrite", "compare", true, func(ctx context.Context, n *Namespace) error {
			return n.CompareAndWrite(ctx, b,
				b, 0)
		}},
	} {
		for end, want := range map[string]error{"loss": ErrConnectionLost, "close": ErrClosed,
			"context": context.Canceled} {
			c, n := connect(t, o)
			answers := s.stall(op.command)
			before := s.count(op.command)
			ctx, cancel := context.WithCancel(testContext(t))
			got := make(chan error, 1)
			go func() { got <- op.do(ctx, n) }()
			eventually(t, "the command reaches the target", func() bool { return s.count(op.command) > before })
			switch end {
			case "loss":
				s.cut()
			case "close":
				if err := c.Close(); err != nil {
					t.Error(err)
				}
			case "context":
				cancel()
			}
			if err := <-got; !errors.Is(err, want) || errors.Is(err, ErrIndeterminate) != op.changes {
				t.Errorf("%s ended by %s: %v", op.name, end, err)
			}
			answers()
			cancel()
			if err := c.Close(); err != nil {
				t.Error(err)
			}
			// Nothing was sent.
			if err := op.do(testContext(t), n); err == nil || errors.Is(err, ErrIndeterminate) {
				t.Errorf("%s after Close: %v", op.name, err)
			}
		}
	}
}

// TestCloseOfAQPairAwaitsItsCommands and that the queue is deleted.
func TestCloseOfAQPairAwaitsItsCommands(t *testing.T) {
	overEach(t, 1<<20, func(t *testing.T, s *script) {
		s.disconnects.Store(true)
		o := quick(s)
		o.QPairs = 1
		c, _ := connect(t, o)
		for _, interrupt := range []bool{false, true} {
			q, err := c.OpenQPair(testContext(t))
			if err != nil {
				t.Fatal(err)
			}
			var cmds []Command
			for i := range 8 {
				w := Command{Data: bytes.Repeat([]byte{byte(i + 1)}, 65536)}
				SetRW(&w, OpWrite, 1, uint64(i)*128, 128)
				cmds = append(cmds, w)
			}
			if n, err := q.Submit(cmds); n != len(cmds) || err != nil {
				t.Fatal(n, err)
			}
			if interrupt {
				q.Interrupt()
				if _, err := q.Poll(make([]Completion, 1), -1); !errors.Is(err, ErrClosed) {
					t.Errorf("%v, want ErrClosed", err)
				}
			}
			if err := q.Close(); err != nil {
				t.Fatal(err)
			}
			s.mu.Lock()
			for i := range cmds {
				if s.disk[i*65536] != byte(i+1) {
					t.Errorf("interrupted %t: write %d was under way when Close returned", interrupt, i)
				}
			}
			clear(s.disk)
			s.mu.Unlock()
		}
		if s.count("disconnect") != 2 || c.Losses() != 0 {
			t.Errorf("%d Disconnects, %d losses, want 2 and none", s.count("disconnect"), c.Losses())
		}
	})
}

// TestCloseOfAQPairWithStuckCommandsEndsTheAssociation: their late writes must not overwrite what is written next.
func TestCloseOfAQPairWithStuckCommandsEndsTheAssociation(t *testing.T) {
	overEach(t, 1<<20, func(t *testing.T, s *script) {
		o := quick(s)
		o.QPairs = 1
		c, _ := connect(t, o)
		q, err := c.OpenQPair(testContext(t))
		if err != nil {
			t.Fatal(err)
		}
		s.mu.Lock()
		s.tracing = true
		s.mu.Unlock()
		end := s.stall("write")
		w := Command{Data: make([]byte, 512)}
		SetRW(&w, OpWrite, 1, 0, 1)
		if _, err := q.Submit([]Command{w}); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the write reaches the target", func() bool { return s.count("write") == 1 })
		end()
		q.closeTimeout = time.Millisecond
		if err := q.Close(); err != nil {
			t.Fatal(err)
		}
		if q, err = c.OpenQPair(testContext(t)); err != nil {
			t.Fatal(err)
		}
		defer q.Close()
		run(t, q, []Command{w})
		write := fmt.Sprint(q.ID(), " write")
		wantBetween(t, traceOf(s), write, write, "0 reset", "0 connect")
	})
}

// TestOpenQPairCancelledAtItsEndFails: either OpenQPair returns the context's error, or the queue pair lives on.
func TestOpenQPairCancelledAtItsEndFails(t *testing.T) {
	overEach(t, 1<<20, func(t *testing.T, s *script) {
		o := quick(s)
		o.QPairs = 1
		c, _ := connect(t, o)
		for range 100 {
			ctx, cancel := context.WithCancel(testContext(t))
			s.mu.Lock()
			s.answer = func(conn *scriptConn, e *nvme.SQE) bool {
				if e.Opcode() == nvme.OpFabrics && e.FCTYPE() == nvme.FabricsConnect {
					cancel()
				}
				return false
			}
			s.mu.Unlock()
			q, err := c.OpenQPair(ctx)
			if err != nil {
				if !errors.Is(err, context.Canceled) {
					t.Fatal(err)
				}
				continue
			}
			w := Command{Data: make([]byte, 512)}
			SetRW(&w, OpRead, 1, 0, 1)
			if _, err := q.Submit([]Command{w}); err != nil {
				t.Fatalf("the queue pair is unusable: %v", err)
			}
			if _, err := q.Poll(make([]Completion, 1), -1); err != nil {
				t.Fatalf("the queue pair is unusable: %v", err)
			}
			q.Close()
		}
	})
}
