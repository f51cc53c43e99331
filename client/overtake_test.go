package client_test

import (
	"bytes"
	"errors"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/fault"
	"jbofd/internal/testutil/loopback"
)

// relay forwards connections to a target and cuts them on demand.
type relay struct {
	address string
	mu      sync.Mutex
	pairs   [][2]net.Conn // in the order in which the host has connected: admin queue, I/O queues
}

func newRelay(t testing.TB, to string) *relay {
	l := loopback.Listen(t)
	r := &relay{address: l.Addr().String()}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			host, err := l.Accept()
			if err != nil {
				return
			}
			target, err := net.Dial("tcp", to)
			if err != nil {
				t.Error(err)
				host.Close()
				continue
			}
			r.mu.Lock()
			r.pairs = append(r.pairs, [2]net.Conn{host, target})
			r.mu.Unlock()
			for _, c := range [][2]net.Conn{{host, target}, {target, host}} {
				wg.Go(func() {
					// The end of one direction, for any reason, ends both.
					_, _ = io.Copy(c[0], c[1])
					host.Close()
					target.Close()
				})
			}
		}
	})
	t.Cleanup(func() {
		l.Close()
		r.cut(0, len(r.all()))
		wg.Wait()
	})
	return r
}

func (r *relay) all() [][2]net.Conn {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.pairs
}

// cut ends connections from to to-1 of those that were made so far.
func (r *relay) cut(from, to int) {
	for _, p := range r.all()[from:to] {
		p[0].Close()
		p[1].Close()
	}
}

// waitFor polls for an event that cannot be waited for otherwise.
func waitFor(t testing.TB, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	late := time.After(15 * time.Second)
	for !ok() {
		select {
		case <-tick.C:
		case <-late:
			t.Fatalf("not within 15 s: %s", what)
		}
	}
}

// writeDelay is how long the drive delays every second write.
const writeDelay = time.Second

const overtakeBlocks = 32

// wantNew reads all blocks when the writes that were submitted before lost cannot be at the drive any more.
func wantNew(t *testing.T, j *jbofd, lost time.Time) {
	t.Helper()
	<-time.After(time.Until(lost.Add(2 * writeDelay))) // the property is that something has not happened by then
	n, err := j.connect(t, client.Options{}).Namespace(t.Context(), 1)
	if err != nil {
		t.Fatal(err)
	}
	b := make([]byte, jbofdBlock)
	for i := range overtakeBlocks {
		if _, err := n.ReadAt(t.Context(), b, int64(i)*jbofdBlock); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(b, block("new")) {
			t.Errorf("block %d: %q, which was overwritten by %q", i, b[:3], "new")
		}
	}
}

func block(what string) []byte {
	b := make([]byte, jbofdBlock)
	copy(b, what)
	return b
}

// TestANewWriteIsNotOvertakenByOneOfALostAssociation: the drive delays half of its writes; connections are lost while
// writes are at the drive; the host repeats these, and then writes new data.
func TestANewWriteIsNotOvertakenByOneOfALostAssociation(t *testing.T) {
	t.Parallel()
	for name, cut := range map[string][2]int{"all connections": {0, 3}, "admin queue": {0, 1}, "an I/O queue": {1, 2}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			j := newJBOFD(t)
			r := newRelay(t, j.address)
			c := j.connect(t, client.Options{Address: r.address, Queues: 2, ReconnectDelay: time.Millisecond})
			n, err := c.Namespace(t.Context(), 1)
			if err != nil {
				t.Fatal(err)
			}
			write := func(what string) (wait func()) {
				var wg sync.WaitGroup
				for i := range overtakeBlocks {
					wg.Go(func() {
						if _, err := n.WriteAt(t.Context(), block(what), int64(i)*jbofdBlock, 0); err != nil {
							t.Error(err)
						}
					})
				}
				return wg.Wait
			}
			j.drive.SetRules(fault.Rule{Ops: []ssd.Op{ssd.Write}, Probability: 0.5, Delay: writeDelay})
			wait := write("old")
			waitFor(t, "8 writes are delayed", func() bool { return j.drive.Injected() >= 8 })
			r.cut(cut[0], cut[1])
			lost := time.Now()
			j.drive.SetRules() // those at the drive are still delayed
			wait()
			if c.Losses() != 1 {
				t.Errorf("%d losses, want 1", c.Losses())
			}
			write("new")()
			wantNew(t, j, lost)
		})
	}
}

// TestANewWriteIsNotOvertakenByOneOfALostQPair: the user of a QPair reopens it and writes new data.
func TestANewWriteIsNotOvertakenByOneOfALostQPair(t *testing.T) {
	t.Parallel()
	for name, lose := range map[string]func(*testing.T, *relay, *client.QPair){
		"cut": func(t *testing.T, r *relay, q *client.QPair) {
			r.cut(1, 2)
			for {
				if _, err := q.Poll(make([]client.Completion, 64), -1); err != nil {
					if !errors.Is(err, client.ErrConnectionLost) {
						t.Errorf("%v, want ErrConnectionLost", err)
					}
					return
				}
			}
		},
		"closed": func(*testing.T, *relay, *client.QPair) {},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			j := newJBOFD(t)
			r := newRelay(t, j.address)
			c := j.connect(t, client.Options{Address: r.address, QPairs: 1, ReconnectDelay: time.Millisecond})
			open := func() *client.QPair {
				q, err := c.OpenQPair(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				return q
			}
			submit := func(q *client.QPair, what string) {
				cmds := make([]client.Command, overtakeBlocks)
				for i := range cmds {
					cmds[i].Data = block(what)
					client.SetRW(&cmds[i], client.OpWrite, 1, uint64(i), 1)
				}
				if n, err := q.Submit(cmds); n != len(cmds) || err != nil {
					t.Fatal(n, err)
				}
			}
			q := open()
			j.drive.SetRules(fault.Rule{Ops: []ssd.Op{ssd.Write}, Probability: 0.5, Delay: writeDelay})
			submit(q, "old")
			waitFor(t, "8 writes are delayed", func() bool { return j.drive.Injected() >= 8 })
			lost := time.Now()
			lose(t, r, q)
			j.drive.SetRules() // those at the drive are still delayed
			if err := q.Close(); err != nil {
				t.Error(err)
			}
			q = open()
			submit(q, "new")
			comps := make([]client.Completion, overtakeBlocks)
			for done := 0; done < overtakeBlocks; {
				n, err := q.Poll(comps, -1)
				if err != nil {
					t.Fatal(err)
				}
				for _, comp := range comps[:n] {
					if !comp.Status.OK() {
						t.Errorf("write: %s", comp.Status)
					}
				}
				done += n
			}
			if err := q.Close(); err != nil {
				t.Error(err)
			}
			wantNew(t, j, lost)
		})
	}
}
