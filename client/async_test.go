package client

import (
	"bytes"
	"errors"
	"sync"
	"testing"

	"jbofd/internal/nvme"
)

// gatherer is a Sink.
type gatherer struct {
	mu    sync.Mutex
	ended []*Async
}

func (g *gatherer) Ended(list *Async) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for a := list; a != nil; {
		next := a.Next
		a.Next = nil
		g.ended = append(g.ended, a)
		a = next
	}
}

func (g *gatherer) count() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.ended)
}

// asyncReads makes reads of block i each, as a list.
func asyncReads(g *gatherer, n int) (all []*Async) {
	for i := range n {
		a := &Async{Sink: g, Item: i}
		SetRW(&a.Cmd, OpRead, 1, uint64(i), 1)
		a.Cmd.Data = make([]byte, 512)
		a.Prepare()
		all = append(all, a)
		if i > 0 {
			all[i-1].Next = a
		}
	}
	return all
}

// openAsync connects with one I/O queue of a depth.
func openAsync(t *testing.T, s *script, depth int) (*Controller, *IOQueue) {
	o := quick(s)
	o.Queues, o.QueueDepth, o.ReportCredits = 1, depth, true
	c, _ := connect(t, o)
	qs, err := c.IOQueues(testContext(t))
	if err != nil || len(qs) != 1 || qs[0].Depth() != depth || qs[0].Err() != nil {
		t.Fatalf("%d queues, %v", len(qs), err)
	}
	return c, qs[0]
}

// TestAsyncsEndOnceEach, many more than the queue is deep, also those that Send itself returns.
func TestAsyncsEndOnceEach(t *testing.T) {
	overEach(t, 1<<20, func(t *testing.T, s *script) {
		for i := range s.disk {
			s.disk[i] = byte(i / 512)
		}
		// Over RDMA the script has room for 8 work requests for each place of the queue, and takes two for a read.
		_, q := openAsync(t, s, 32)
		g := &gatherer{}
		all := asyncReads(g, 100)
		for i := 0; i < len(all); i += 50 {
			all[i+49].Next = nil
			g.Ended(q.Send(all[i]))
		}
		eventually(t, "all reads have ended", func() bool { return g.count() == len(all) })
		seen := map[*Async]bool{}
		for _, a := range g.ended {
			if a.Err != nil || !a.Sent || !a.Comp.Status.OK() || seen[a] ||
				!bytes.Equal(a.Cmd.Data, bytes.Repeat([]byte{byte(a.Item.(int))}, 512)) {
				t.Fatalf("read %d: %v, %v, data %x", a.Item, a.Err, a.Comp.Status, a.Cmd.Data[:4])
			}
			seen[a] = true
		}
		// One that cannot be sent holds up no other.
		g.ended = nil
		bad, good := asyncReads(g, 1)[0], asyncReads(g, 1)[0]
		bad.Cmd.SQE.SetOpcode(OpFlush)
		bad.Next = good
		g.Ended(q.Send(bad))
		eventually(t, "both have ended", func() bool { return g.count() == 2 })
		if !errors.Is(bad.Err, ErrInvalid) || bad.Sent || good.Err != nil {
			t.Errorf("%v, sent %t; %v", bad.Err, bad.Sent, good.Err)
		}
	})
}

// TestACancelledAsyncGivesItsBufferBack: before it was sent, while it waits for a slot, and when it is at the target.
// One that has ended is not ended again, and used again it is as new.
func TestACancelledAsyncGivesItsBufferBack(t *testing.T) {
	overEach(t, 1<<20, func(t *testing.T, s *script) {
		_, q := openAsync(t, s, 2)
		g := &gatherer{}
		end := s.stall("read")
		all := asyncReads(g, 4)
		if q.Cancel(all[3]) { // its Send is still to come
			t.Error("a command has ended before Send")
		}
		g.Ended(q.Send(all[0]))
		if g.count() != 1 || g.ended[0] != all[3] || !errors.Is(all[3].Err, ErrCancelled) || all[3].Sent {
			t.Fatalf("%d have ended; %v, sent %t", g.count(), all[3].Err, all[3].Sent)
		}
		for i, sent := range []bool{true, true, false} {
			if !q.Cancel(all[i]) || !errors.Is(all[i].Err, ErrCancelled) || all[i].Sent != sent {
				t.Errorf("command %d: %v, sent %t", i, all[i].Err, all[i].Sent)
			}
		}
		eventually(t, "the target is asked to abort both", func() bool { return s.count("abort") == 2 })
		end()
		for _, a := range all[:2] { // a target that drops a command keeps its slot: the queue is full for ever
			if q.Cancel(a) {
				t.Error("a command has ended twice")
			}
		}
		if n := g.count(); n != 1 {
			t.Errorf("%d commands were told", n)
		}
	})
}

// TestAnAsyncIsAsNewAfterPrepare: a Cancel that came after its end counts for nothing.
func TestAnAsyncIsAsNewAfterPrepare(t *testing.T) {
	overEach(t, 1<<20, func(t *testing.T, s *script) {
		_, q := openAsync(t, s, 2)
		g := &gatherer{}
		a := asyncReads(g, 1)[0]
		for i := range 20 {
			a.Prepare()
			g.Ended(q.Send(a))
			eventually(t, "it has ended", func() bool { return g.count() == i+1 })
			if a.Err != nil {
				t.Fatalf("use %d: %v", i, a.Err)
			}
			q.Cancel(a)
		}
	})
}

// TestALossEndsAsyncs: those at the target are marked as sent. The queue takes nothing any more, and another one does.
func TestALossEndsAsyncs(t *testing.T) {
	overEach(t, 1<<20, func(t *testing.T, s *script) {
		c, q := openAsync(t, s, 4)
		g := &gatherer{}
		end := s.stall("read")
		before := s.count("read")
		g.Ended(q.Send(asyncReads(g, 6)[0]))
		eventually(t, "reads are at the target", func() bool { return s.count("read") >= before+4 })
		end()
		s.cut()
		eventually(t, "all have ended", func() bool { return g.count() == 6 })
		sent := 0
		for _, a := range g.ended {
			if !errors.Is(a.Err, ErrConnectionLost) {
				t.Errorf("%v", a.Err)
			}
			if a.Sent {
				sent++
			}
		}
		if sent != 4 || q.Err() == nil {
			t.Errorf("%d are marked as sent, want 4; the queue says %v", sent, q.Err())
		}
		late := asyncReads(g, 1)[0]
		if got := q.Send(late); got != late || late.Err == nil || late.Sent {
			t.Errorf("a command for the old queue: %v, sent %t", late.Err, late.Sent)
		}
		eventually(t, "another queue takes commands", func() bool {
			qs, err := c.IOQueues(testContext(t))
			if err != nil {
				t.Fatal(err)
			}
			a := asyncReads(g, 1)[0]
			n := g.count()
			g.Ended(qs[0].Send(a))
			eventually(t, "it has ended", func() bool { return g.count() == n+1 })
			return a.Err == nil
		})
	})
}

// TestReportedCreditsHoldNothingBack.
func TestReportedCreditsHoldNothingBack(t *testing.T) {
	overEach(t, 1<<20, func(t *testing.T, s *script) {
		s.mu.Lock()
		s.credit = nvme.MakeCredit(3, 4)
		s.mu.Unlock()
		c, q := openAsync(t, s, 32)
		g := &gatherer{}
		end := s.stall("read")
		before := s.count("read")
		g.Ended(q.Send(asyncReads(g, 12)[0]))
		eventually(t, "all reads are at the target", func() bool { return s.count("read") == before+12 })
		end()
		a := &Async{Sink: g}
		SetRW(&a.Cmd, OpWrite, 1, 0, 1)
		a.Cmd.Data = make([]byte, 512)
		a.Prepare()
		g.Ended(q.Send(a))
		eventually(t, "a write has ended", func() bool { return g.count() == 1 })
		if n := ReportedCredit(OpWrite, 3, &a.Comp); n != 4 {
			t.Errorf("the completion reports a credit of %d, want 4", n)
		}
		if n := ReportedCredit(OpWrite, 2, &a.Comp); n != 0 {
			t.Errorf("the completion reports a credit of %d for another drive", n)
		}
		if n := ReportedCredit(nvme.CmdKVXStore, 3, &Completion{SQID: 7, Result: 1 << 40}); n != 7 {
			t.Errorf("the completion of an extended Store reports a credit of %d, want 7", n)
		}
		o := quick(s)
		c2, _ := connect(t, o) // keeps within credits itself
		if _, err := c2.IOQueues(testContext(t)); !errors.Is(err, ErrUnsupported) {
			t.Errorf("IOQueues: %v", err)
		}
		if _, err := c.QueryCredit(testContext(t), 3); err != nil {
			t.Error(err)
		}
	})
}
