package serve

import (
	"log/slog"
	"runtime"
	"sync"
	"testing"
	"time"

	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/rdma/verbs"
	"jbofd/internal/nvmeof/target"
	"jbofd/internal/nvmeof/target/connection"
)

// fullQueue is a completion queue with completions of unknown queue pairs. The group's lock guards it.
type fullQueue struct {
	verbs.CQ
	left int
}

func (q *fullQueue) Poll(dst []verbs.WC) (int, error) {
	n := min(len(dst), q.left)
	clear(dst[:n])
	q.left -= n
	runtime.Gosched() // in the middle of a turn
	return n, nil
}

func (q *fullQueue) SetDeadline(time.Time) error { return nil }

// A completion that clear leaves behind would reach the next queue pair of the same number, or be a lost receive.
func TestClearTakesEverythingAlthoughOthersTakeTurns(t *testing.T) {
	service := target.New(
		target.Config{Target: nvmeof.New(nvmeof.Config{Limits: nvmeof.Limits{MDTSBytes: nvmeof.MinMDTSBytes}}),
			Log: slog.New(slog.DiscardHandler), Clock: func() int64 { return 0 }})
	defer service.Close()
	const entries = 4 * maxRounds * pollBatch
	q := &fullQueue{}
	g := &group{dev: &device{receives: &receives{bound: entries / 2}}, srv: &Server{service: service}, cq: q,
		room: entries / 2, batches: connection.NewBatches(service)}
	if err := g.init(); err != nil {
		t.Fatal(err)
	}
	defer g.driver.Close()
	stop := make(chan struct{})
	var others sync.WaitGroup
	for range 2 {
		others.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					g.step()
				}
			}
		})
	}
	defer others.Wait()
	defer close(stop)
	for range 200 {
		g.driver.Lock()
		q.left = entries
		g.driver.Release()
		g.clear()
		g.driver.Lock()
		left := q.left
		g.driver.Release()
		if left > 0 {
			t.Fatalf("%d completions of %d are left", left, entries)
		}
	}
}

type numberedQP struct {
	verbs.QP
	num uint32
}

func (q numberedQP) Num() uint32    { return q.num }
func (q numberedQP) Handle() uint64 { return uint64(q.num) << 32 }

// Connections that end while their commands wait for memory must not accumulate: it may take long until memory is free.
func TestGroupKeepsNothingOfConnectionsThatAreGone(t *testing.T) {
	g := &group{}
	g.conns.init()
	var all []*conn
	for i := range uint32(20) {
		c := &conn{g: g, qp: numberedQP{num: i + 1}}
		g.conns.put(i+1, c)
		g.out.Sends = append(g.out.Sends, verbs.SendWR{QP: c.qp.Handle()})
		if i%2 == 0 {
			c.stall()
			c.stall()
		}
		all = append(all, c)
	}
	for i, c := range all {
		g.forget(c)
		if left := len(all) - i - 1; len(g.out.Sends) != left || g.conns.n != left || len(g.stalled) != left/2 {
			t.Fatalf("with %d connections there are %d work requests, %d connections in the table, %d that wait", left,
				len(g.out.Sends), g.conns.n, len(g.stalled))
		}
	}
}
