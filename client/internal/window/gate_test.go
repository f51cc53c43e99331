package window

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"jbofd/client/internal/host"
	"jbofd/internal/nvme"
)

func read(nsid uint32, n int) host.Command {
	var c host.Command
	c.SQE.SetOpcode(nvme.CmdRead)
	c.SQE.SetNSID(nsid)
	c.Data = make([]byte, n)
	return c
}

// newGate has namespace 1 on SSD 4 and 2 and 3 on SSD 0.
func newGate(units int) *Gate {
	g := New()
	for nsid, ssd := range map[uint32]uint16{1: 4, 2: 0, 3: 0} {
		g.Map(nsid, ssd)
	}
	g.Grant(nvme.MakeCredit(4, units))
	return g
}

// acquire waits for one command in the background. The channel returns the outcome.
func acquire(ctx context.Context, g *Gate, c host.Command) (t *Ticket, result chan error) {
	t, result = new(Ticket), make(chan error, 1)
	go func() {
		var tickets [1]Ticket
		err := g.Acquire(ctx, nil, []host.Command{c}, tickets[:])
		*t = tickets[0]
		result <- err
	}()
	return t, result
}

func TestWaitersGoInOrderAndHoldUpNoOtherSSD(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, ctx := newGate(8), context.Background()
		first, done := acquire(ctx, g, read(1, 32<<10))
		<-done
		var order []string
		wait := func(name string, n int) (*Ticket, func()) {
			ticket, result := acquire(ctx, g, read(1, n))
			synctest.Wait()
			return ticket, func() {
				if err := <-result; err != nil {
					t.Errorf("%s: %v", name, err)
				}
				order = append(order, name)
			}
		}
		large, largeGoes := wait("large", 24<<10)
		small, smallGoes := wait("small", 4<<10) // would fit into the rest of the credit, but is behind
		if s := g.State(1); s.Waiting != 2 || s.Outstanding != 8 || s.Units != 8 || s.SSD != 4 {
			t.Fatalf("%+v", s)
		}
		for _, nsid := range []uint32{2, 3, 99} { // no credit yet; unknown
			if _, result := acquire(ctx, g, read(nsid, 1<<20)); true {
				synctest.Wait()
				select {
				case err := <-result:
					if err != nil {
						t.Error(err)
					}
				default:
					t.Errorf("namespace %d waits for another's drive", nsid)
				}
			}
		}
		time.Sleep(time.Millisecond)
		g.Release(*first, nvme.MakeCredit(4, 6))
		largeGoes()
		synctest.Wait()
		if s := g.State(1); s.Waiting != 1 || s.Outstanding != 6 {
			t.Errorf("after a decrease to 6: %+v", s)
		}
		g.Release(*large, 0)
		smallGoes()
		g.Release(*small, nvme.MakeCredit(4, 20))
		if s := g.State(1); s.Outstanding != 0 || s.Waiting != 0 || s.Units != 20 || s.Waits != 2 ||
			s.Waited != 2*time.Millisecond {
			t.Errorf("at the end: %+v", s)
		}
		if fmt.Sprint(order) != "[large small]" {
			t.Errorf("order %v", order)
		}
	})
}

func TestACancelledWaiterLetsTheNextProceed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate(2)
		first, done := acquire(context.Background(), g, read(1, 4<<10))
		<-done
		ctx, cancel := context.WithCancel(context.Background())
		_, large := acquire(ctx, g, read(1, 8<<10))
		synctest.Wait()
		small, result := acquire(context.Background(), g, read(1, 4<<10))
		synctest.Wait()
		cancel()
		if err := <-large; !errors.Is(err, context.Canceled) {
			t.Errorf("cancelled: %v", err)
		}
		if err := <-result; err != nil {
			t.Error(err)
		}
		dead := make(chan struct{})
		lost := make(chan error)
		go func() {
			var tickets [1]Ticket
			lost <- g.Acquire(context.Background(), dead, []host.Command{read(1, 4<<10)}, tickets[:])
		}()
		synctest.Wait()
		close(dead)
		if err := <-lost; err != ErrDead {
			t.Errorf("a queue that failed: %v", err)
		}
		g.Release(*first, 0)
		g.Release(*small, 0)
		if s := g.State(1); s.Outstanding != 0 || s.Waiting != 0 {
			t.Errorf("left over: %+v", s)
		}
	})
}

func TestWaitConsumesNoCredit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate(2)
		if err := g.Wait(context.Background(), nil, 1, 1<<20); err != nil {
			t.Fatal(err) // nothing is outstanding
		}
		first, done := acquire(context.Background(), g, read(1, 8<<10))
		<-done
		result := make(chan error, 1)
		go func() { result <- g.Wait(context.Background(), nil, 1, 4<<10) }()
		synctest.Wait()
		select {
		case <-result:
			t.Fatal("there is no room")
		default:
		}
		g.Release(*first, 0)
		if err := <-result; err != nil {
			t.Error(err)
		}
		if s := g.State(1); s.Outstanding != 0 || s.Waits != 0 {
			t.Errorf("%+v", s)
		}
	})
}

// TestManyGoroutinesNeverExceedTheCredit has goroutines that acquire, release and give up under a constant credit: the
// units outstanding stay within the credit, except for a single command that is larger.
func TestManyGoroutinesNeverExceedTheCredit(t *testing.T) {
	const units = 20
	g := newGate(units)
	var out, commands, over atomic.Int64
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(1, uint64(i)))
			for range 400 {
				ctx, cancel := context.WithCancel(context.Background())
				if rng.IntN(4) == 0 {
					time.AfterFunc(time.Duration(rng.IntN(50))*time.Microsecond, cancel)
				}
				cmds := []host.Command{read(1, 1+rng.IntN(100<<10))}
				if rng.IntN(4) == 0 {
					cmds = append(cmds, read(1, 1+rng.IntN(8<<10)))
				}
				var tickets [2]Ticket
				if g.Acquire(ctx, nil, cmds, tickets[:]) == nil {
					u := int64(tickets[0].units + tickets[1].units)
					n := commands.Add(1)
					if sum := out.Add(u); sum > units && n > 1 {
						over.Add(1)
					}
					out.Add(-u)
					commands.Add(-1)
					for k := range cmds {
						g.Release(tickets[k], nvme.MakeCredit(4, units))
					}
				}
				cancel()
			}
		})
	}
	wg.Wait()
	if n := over.Load(); n > 0 {
		t.Errorf("over the credit %d times", n)
	}
	if s := g.State(1); s.Outstanding != 0 || s.Waiting != 0 || g.windows[g.windowOf(1)].first != nil {
		t.Errorf("left over: %+v", s)
	}
}
