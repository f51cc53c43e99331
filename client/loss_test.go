package client

import (
	"bytes"
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"jbofd/internal/credit"
	"jbofd/internal/nvme"
)

func TestReadsAndWritesSurviveALoss(t *testing.T) {
	overEach(t, 1<<20, func(t *testing.T, s *script) {
		copy(s.disk[4096:], "what the disk holds")
		c, n := connect(t, quick(s))
		ctx := testContext(t)
		for _, op := range []string{"read", "write"} {
			end := s.stall(op)
			before := s.count(op)
			got := make(chan error, 1)
			b := make([]byte, 4096)
			go func() {
				var err error
				if op == "read" {
					_, err = n.ReadAt(ctx, b, 4096)
				} else {
					_, err = n.WriteAt(ctx, bytes.Repeat([]byte{9}, 4096), 8192, FUA)
				}
				got <- err
			}()
			eventually(t, "the command reaches the target", func() bool { return s.count(op) > before })
			end()
			s.cut()
			if err := <-got; err != nil {
				t.Fatalf("%s: %v", op, err)
			}
			if op == "read" && !bytes.HasPrefix(b, []byte("what the disk holds")) {
				t.Error("the repeated read brought other data")
			}
			if s.count(op) != before+2 {
				t.Errorf("%s was sent %d times, want 2", op, s.count(op)-before)
			}
		}
		if s.disk[8192] != 9 || c.Losses() != 2 {
			t.Errorf("byte %d, %d losses", s.disk[8192], c.Losses())
		}
	})
}

func TestCompareAndWriteIsNotRepeated(t *testing.T) {
	overEach(t, 1<<20, func(t *testing.T, s *script) {
		_, n := connect(t, quick(s))
		end := s.stall("compare")
		got := make(chan error, 1)
		go func() { got <- n.CompareAndWrite(testContext(t), make([]byte, 512), make([]byte, 512), 0) }()
		eventually(t, "the command reaches the target", func() bool { return s.count("compare") > 0 })
		end()
		s.cut()
		if err := <-got; !errors.Is(err, ErrConnectionLost) {
			t.Errorf("%v, want ErrConnectionLost", err)
		}
		if k := s.count("compare"); k != 1 {
			t.Errorf("sent %d times", k)
		}
		// And it succeeds without faults.
		w := bytes.Repeat([]byte{3}, 512)
		if err := n.CompareAndWrite(testContext(t), make([]byte, 512), w, 0); err != nil {
			t.Fatal(err)
		}
		if err := n.CompareAndWrite(testContext(t), make([]byte, 512), w, 0); !errors.Is(err, ErrCompareFailed) {
			t.Errorf("%v, want ErrCompareFailed", err)
		}
	})
}

func TestCtrlLossTimeoutEndsTheWait(t *testing.T) {
	overEach(t, 1<<20, func(t *testing.T, s *script) {
		o := quick(s)
		o.CtrlLossTimeout = 50 * time.Millisecond
		_, n := connect(t, o)
		s.stop()
		s.cut()
		_, err := n.ReadAt(testContext(t), make([]byte, 512), 0)
		if !errors.Is(err, ErrConnectionLost) {
			t.Errorf("%v, want ErrConnectionLost", err)
		}
		_, err = n.ReadAt(testContext(t), make([]byte, 512), 0)
		if !errors.Is(err, ErrConnectionLost) {
			t.Errorf("later: %v, want ErrConnectionLost", err)
		}
	})
}

func TestKeepAliveIsSentWhileDataStalls(t *testing.T) {
	overEach(t, 1<<20, func(t *testing.T, s *script) {
		o := quick(s)
		o.KATO = 100 * time.Millisecond
		_, n := connect(t, o)
		defer s.stall("read")()
		ctx, cancel := context.WithCancel(context.Background())
		var wg sync.WaitGroup
		for range 100 { // more than the queues hold
			wg.Add(1)
			go func() {
				defer wg.Done()
				if _, err := n.ReadAt(ctx, make([]byte, 512), 0); !errors.Is(err, context.Canceled) {
					t.Error(err)
				}
			}()
		}
		before := s.count("keepalive")
		eventually(t, "three more Keep Alives", func() bool { return s.count("keepalive") >= before+3 })
		cancel()
		wg.Wait()
	})
}

func TestUnansweredKeepAliveIsALoss(t *testing.T) {
	overEach(t, 1<<20, func(t *testing.T, s *script) {
		o := quick(s)
		o.KATO = 100 * time.Millisecond
		c, n := connect(t, o)
		end := s.stall("keepalive")
		eventually(t, "the loss", func() bool { return c.Losses() > 0 })
		end()
		if _, err := n.ReadAt(testContext(t), make([]byte, 512), 0); err != nil {
			t.Fatal(err)
		}
	})
}

func TestUnansweredCommandIsALoss(t *testing.T) {
	overEach(t, 1<<20, func(t *testing.T, s *script) {
		o := quick(s)
		o.CommandTimeout = time.Second
		c, n := connect(t, o)
		end := s.stall("read")
		got := make(chan error, 1)
		go func() {
			_, err := n.ReadAt(testContext(t), make([]byte, 512), 0)
			got <- err
		}()
		eventually(t, "the loss", func() bool { return c.Losses() > 0 })
		end()
		if err := <-got; err != nil {
			t.Fatal(err)
		}
	})
}

// TestALossWhileTheCreditIsAskedForIsWaitedOut: opening a namespace, and Locate, ask for the credit of a drive that the
// host has not used. The loss of the connection while they do is no error of theirs.
func TestALossWhileTheCreditIsAskedForIsWaitedOut(t *testing.T) {
	overEach(t, 1<<20, func(t *testing.T, s *script) {
		s.credit = nvme.MakeCredit(3, 4)
		cuts := 1
		s.answer = func(c *scriptConn, e *nvme.SQE) bool {
			if c.qid != 0 || e.Features().FID() != nvme.FIDExtensions {
				return false
			}
			switch {
			case e.Opcode() == nvme.AdminSetFeatures: // the first credit is that of another drive
				c.reply(e.CID(), 0, nvme.ExtCredits|uint64(nvme.MakeCredit(7, 4))<<32)
			case e.Opcode() != nvme.AdminGetFeatures:
				return false
			case cuts > 0:
				cuts--
				c.cut()
			default:
				c.reply(e.CID(), 0, uint64(nvme.MakeCredit(uint16(e.Features().Value()), 4))<<32)
			}
			return true
		}
		began := time.Now()
		c, n := connect(t, quick(s)) // opens the namespace
		got := n.Credit()
		// On a busy machine some of the credit has been given back before anybody looks.
		least := max(4>>min(time.Since(began)/credit.HalfLifeNS, 2), 1)
		if got.SSD != 3 || got.Units < least || got.Units > 4 || c.Losses() != 1 {
			t.Errorf("after the loss: %+v, %d losses", got, c.Losses())
		}
		s.mu.Lock()
		cuts = 1
		s.mu.Unlock()
		if err := c.Locate(testContext(t), 2, 5); err != nil || c.Losses() != 2 {
			t.Errorf("Locate: %v, %d losses", err, c.Losses())
		}
	})
}

// TestHowLongAKeepAliveIsUnanswered: it is known also after the loss, when there is no other association.
func TestHowLongAKeepAliveIsUnanswered(t *testing.T) {
	overEach(t, 1<<20, func(t *testing.T, s *script) {
		o := quick(s)
		o.KATO, o.CtrlLossTimeout = 200*time.Millisecond, -1
		c, _ := connect(t, o)
		before := s.count("keepalive")
		eventually(t, "a Keep Alive is answered", func() bool {
			return s.count("keepalive") > before && c.KeepAliveUnanswered() == 0
		})
		end := s.stall("keepalive")
		defer end()
		eventually(t, "the controller gives up", func() bool { return c.Err() != nil })
		if d := c.KeepAliveUnanswered(); d < o.KATO {
			t.Errorf("the Keep Alive is unanswered for %v, want at least %v", d, o.KATO)
		}
	})
}
