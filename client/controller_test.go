package client

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"jbofd/internal/nvme"
	"jbofd/internal/testutil/loopback"
)

func TestManyGoroutinesShareTheQueues(t *testing.T) {
	for _, mode := range []string{"plain", "digests", "rdma"} {
		t.Run(mode, func(t *testing.T) {
			digests := mode == "digests"
			s := newScriptOver(t, mode == "rdma", 16<<20)
			o := quick(s)
			o.HeaderDigest, o.DataDigest = digests, digests
			o.QueueDepth = 4 // fewer than goroutines: some wait for a place
			_, n := connect(t, o)
			ctx := testContext(t)
			var wg sync.WaitGroup
			for g := range 16 {
				wg.Add(1)
				go func() {
					defer wg.Done()
					rng := rand.New(rand.NewPCG(uint64(g), 1))
					base := int64(g) << 20
					for range 20 {
						size := []int{512, 4096, 8192, 65536, 1 << 20}[rng.IntN(5)]
						off := base + int64(rng.IntN((1<<20-size)/512+1))*512
						w := bytes.Repeat([]byte{byte(rng.Uint32())}, size)
						if k, err := n.WriteAt(ctx, w, off, 0); err != nil || k != size {
							t.Errorf("write: %d, %v", k, err)
							return
						}
						r := make([]byte, size)
						if k, err := n.ReadAt(ctx, r, off); err != nil || k != size {
							t.Errorf("read: %d, %v", k, err)
							return
						}
						if !bytes.Equal(r, w) {
							t.Errorf("goroutine %d reads other data than it wrote", g)
							return
						}
					}
				}()
			}
			wg.Wait()
		})
	}
}

// TestBothDirectionsFull: a target that does not read while it writes does not stall the host, although the socket
// buffers are full in both directions.
func TestBothDirectionsFull(t *testing.T) {
	overEach(t, 64<<20, func(t *testing.T, s *script) {
		o := quick(s)
		o.QPairs = 1
		c, n := connect(t, o)
		ctx := testContext(t)
		var wg sync.WaitGroup
		for g := range 24 {
			wg.Add(1)
			go func() {
				defer wg.Done()
				b := make([]byte, 1<<20)
				for range 4 {
					var err error
					if g%2 == 0 {
						_, err = n.ReadAt(ctx, b, int64(g)<<20)
					} else {
						_, err = n.WriteAt(ctx, b, int64(g)<<20, 0)
					}
					if err != nil {
						t.Error(err)
					}
				}
			}()
		}
		wg.Wait()
		p, err := c.OpenQPair(ctx)
		if err != nil {
			t.Fatal(err)
		}
		defer p.Close()
		for range 3 {
			var cmds []Command
			for i := range 32 {
				c := Command{Data: make([]byte, 1<<20), Tag: uint64(i)}
				SetRW(&c, []uint8{OpRead, OpWrite}[i%2], 1, uint64(i)*2048, 2048)
				cmds = append(cmds, c)
			}
			run(t, p, cmds)
		}
	})
}

func TestCancelledReadGivesItsBufferBack(t *testing.T) {
	overEach(t, 4<<20, func(t *testing.T, s *script) {
		for i := range s.disk {
			s.disk[i] = 1
		}
		_, n := connect(t, quick(s))
		end := s.stall("read")
		ctx, cancel := context.WithCancel(context.Background())
		b := make([]byte, 1<<20)
		got := make(chan error, 1)
		go func() {
			_, err := n.ReadAt(ctx, b, 0)
			got <- err
		}()
		eventually(t, "the read reaches the target", func() bool { return s.count("read") > 0 })
		cancel()
		if err := <-got; !errors.Is(err, context.Canceled) {
			t.Fatalf("%v, want context.Canceled", err)
		}
		clear(b)
		eventually(t, "an Abort", func() bool { return s.count("abort") == 1 })
		end()
		// The queue continues, and other reads do not write to the old buffer.
		for range 4 {
			r := make([]byte, 1<<20)
			if _, err := n.ReadAt(testContext(t), r, 0); err != nil || r[len(r)-1] != 1 {
				t.Fatalf("later read: %v", err)
			}
		}
		if !bytes.Equal(b, make([]byte, len(b))) {
			t.Error("the buffer changed after the call had returned")
		}
	})
}

func TestEventsReachTheUser(t *testing.T) {
	overEach(t, 1<<20, func(t *testing.T, s *script) {
		events := make(chan Event, 4)
		o := quick(s)
		o.OnEvent = func(e Event) { events <- e }
		connect(t, o)
		for range 2 {
			eventually(t, "an event request", func() bool { return s.notify(uint32(nvme.AERNamespaceChanged)) })
			e := <-events
			if e.Kind != EventNamespaces || fmt.Sprint(e.NSIDs) != "[1 5]" {
				t.Errorf("%+v", e)
			}
		}
	})
}

func TestTransientStatusIsRetriedUnlessDNR(t *testing.T) {
	overEach(t, 1<<20, func(t *testing.T, s *script) {
		_, n := connect(t, quick(s))
		for _, st := range []nvme.Status{nvme.CommandInterrupted, nvme.LBAOutOfRange | nvme.DNR} {
			before := s.count("flush")
			var once atomic.Bool
			s.mu.Lock()
			s.answer = func(c *scriptConn, e *nvme.SQE) bool {
				if c.qid == 0 || e.Opcode() != nvme.CmdFlush || once.Swap(true) {
					return false
				}
				c.reply(e.CID(), st, 0)
				return true
			}
			s.mu.Unlock()
			err := n.Flush(testContext(t))
			tries := s.count("flush") - before
			var se *StatusError
			switch {
			case st.DNR() && (tries != 1 || !errors.As(err, &se) || se.Status != st):
				t.Errorf("%s: %d tries, %v", st, tries, err)
			case !st.DNR() && (tries != 2 || err != nil):
				t.Errorf("%s: %d tries, %v", st, tries, err)
			}
		}
	})
}

func TestCloseFailsWhatIsOutstanding(t *testing.T) {
	for _, rdma := range []bool{false, true} {
		t.Run(fmt.Sprintf("rdma=%t", rdma), func(t *testing.T) { testCloseFailsWhatIsOutstanding(t, rdma) })
	}
}

func testCloseFailsWhatIsOutstanding(t *testing.T, rdma bool) {
	before := runtime.NumGoroutine()
	s := newScriptOver(t, rdma, 1<<20)
	c, n := connect(t, quick(s))
	s.stall("read")
	got := make(chan error, 1)
	go func() {
		_, err := n.ReadAt(context.Background(), make([]byte, 512), 0)
		got <- err
	}()
	eventually(t, "the read reaches the target", func() bool { return s.count("read") > 0 })
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-got; !errors.Is(err, ErrClosed) {
		t.Errorf("%v, want ErrClosed", err)
	}
	if err := n.Flush(context.Background()); !errors.Is(err, ErrClosed) {
		t.Errorf("after Close: %v, want ErrClosed", err)
	}
	s.stop()
	s.cut()
	s.wg.Wait()
	if s.rdma != nil {
		s.rdma.net.Close()
	}
	eventually(t, "all goroutines end", func() bool { return runtime.NumGoroutine() <= before })
}

// TestBrokenTargetsAreErrors: whatever answers on the port, Connect ends with an error that names the fault.
func TestBrokenTargetsAreErrors(t *testing.T) {
	for name, c := range map[string]struct {
		answer string
		want   error
	}{
		"http":    {"HTTP/1.1 400 Bad Request\r\n\r\n", ErrProtocol},
		"silence": {"", ErrConnectionLost},
		"term": {"\x03\x00\x18\x00\x18\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00",
			ErrProtocol},
	} {
		t.Run(name, func(t *testing.T) {
			ln := loopback.Listen(t)
			defer ln.Close()
			done := make(chan struct{})
			go func() {
				defer close(done)
				conn, err := ln.Accept()
				if err != nil {
					return
				}
				defer conn.Close()
				b := make([]byte, 128)
				if _, err := conn.Read(b); err != nil {
					t.Error(err)
				}
				if _, err := conn.Write([]byte(c.answer)); err != nil {
					t.Error(err)
				}
			}()
			_, err := Connect(testContext(t), Options{Address: ln.Addr().String(), SubNQN: "nqn.x"})
			if !errors.Is(err, c.want) {
				t.Errorf("%v, want %v", err, c.want)
			}
			<-done
		})
	}
}

// TestDiscoveryLogHasOneGeneration: a log that changes while it is read is read again.
func TestDiscoveryLogHasOneGeneration(t *testing.T) {
	overEach(t, 512, func(t *testing.T, s *script) {
		build := func(gen uint64, nqns ...string) []byte {
			b := make([]byte, nvme.DiscoveryHeaderSize+len(nqns)*nvme.DiscoveryEntrySize)
			l := nvme.DiscoveryLog(b)
			l.Header().SetGENCTR(gen)
			l.Header().SetNUMREC(uint64(len(nqns)))
			for i, n := range nqns {
				e := l.Entry(i)
				e.SetTRTYPE(nvme.TRTYPETCP)
				e.SetADRFAM(nvme.ADRFAMIPv4)
				e.SetSUBTYPE(nvme.SUBTYPENVM)
				e.SetTRADDR("192.0.2.1")
				e.SetTRSVCID("4420")
				e.SetSubNQN(n)
			}
			return b
		}
		many := make([]string, 40) // more than one Get Log Page
		for i := range many {
			many[i] = fmt.Sprintf("nqn.new:%d", i)
		}
		s.mu.Lock()
		s.log = build(1, "nqn.old")
		s.answer = func(c *scriptConn, e *nvme.SQE) bool {
			if c.qid == 0 && e.Opcode() == nvme.AdminGetLogPage && e.GetLog().LPO() == nvme.DiscoveryHeaderSize &&
				s.log[0] == 1 {
				s.log = build(2, many...)
			}
			return false
		}
		s.mu.Unlock()
		o := quick(s)
		o.SubNQN = ""
		d, err := ConnectDiscovery(testContext(t), o)
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		log, err := d.Log(testContext(t))
		if err != nil {
			t.Fatal(err)
		}
		if log.Generation != 2 || len(log.Entries) != 40 || log.Entries[39].SubNQN != "nqn.new:39" ||
			log.Entries[0].Address() != "192.0.2.1:4420" {
			t.Errorf("generation %d, %d entries, first %+v", log.Generation, len(log.Entries), log.Entries[0])
		}
		eventually(t, "an event request", func() bool { return s.notify(uint32(nvme.AERDiscoveryChanged)) })
		<-d.Changed()
		s.cut() // a reconnection may hide changes, so it is reported as a change
		<-d.Changed()
	})
}

// TestCancellationStorm: calls that are cancelled at any moment free their slots in the queues, do not see their
// buffers change later, and do not affect other calls.
func TestCancellationStorm(t *testing.T) {
	overEach(t, 8<<20, func(t *testing.T, s *script) {
		o := quick(s)
		o.Queues, o.QueueDepth = 1, 4
		_, n := connect(t, o)
		// A busy machine takes half a minute for it, with the race detector.
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		defer cancel()
		var wg sync.WaitGroup
		for g := range 8 {
			wg.Add(1)
			go func() {
				defer wg.Done()
				rng := rand.New(rand.NewPCG(uint64(g), 2))
				base := int64(g) << 20
				size := []int{4096, 256 << 10}[g%2]
				ours := bytes.Repeat([]byte{0x5A}, size)
				want := byte(0) // of the whole area, unless a cancelled write has left it undefined
				known := true
				for i := range 60 {
					cctx, cancel := context.WithCancel(ctx)
					stop := time.AfterFunc(time.Duration(rng.IntN(300))*time.Microsecond, cancel)
					if i%3 != 0 {
						stop.Stop()
					}
					b := bytes.Repeat([]byte{byte(i + 1)}, size)
					var err error
					write := rng.IntN(2) == 0
					if write {
						_, err = n.WriteAt(cctx, b, base, 0)
					} else {
						_, err = n.ReadAt(cctx, b, base)
					}
					switch {
					case err == nil && write:
						want, known = byte(i+1), true
					case err == nil:
						if known && (b[0] != want || b[size-1] != want) {
							t.Errorf("goroutine %d: read %d, want %d", g, b[0], want)
						}
					case errors.Is(err, context.Canceled):
						known = known && !write
						copy(b, ours) // the buffer is ours again: the race detector would report an access
					default:
						t.Error(err)
					}
					cancel()
					if !known {
						// The cancelled write may still be in flight. Write the area once more on the same queue, which
						// this target serves in order.
						if _, err := n.WriteAt(ctx, bytes.Repeat([]byte{77}, size), base, 0); err != nil {
							t.Error(err)
						}
						want, known = 77, size <= 8192
					}
				}
			}()
		}
		wg.Wait()
		// No slot was lost: the queue takes as many reads at once as it is deep.
		end := s.stall("read")
		before := s.count("read")
		cctx, cancel := context.WithCancel(ctx)
		for range 4 {
			wg.Add(1)
			go func() {
				defer wg.Done()
				if _, err := n.ReadAt(cctx, make([]byte, 512), 0); !errors.Is(err, context.Canceled) {
					t.Error(err)
				}
			}()
		}
		eventually(t, "four reads outstanding", func() bool { return s.count("read") == before+4 })
		cancel()
		wg.Wait()
		end()
	})
}

// TestCreditBoundsWhatIsOutstanding at the target, for a queue pair and the namespace together. Further commands wait
// at the host until there is room.
func TestCreditBoundsWhatIsOutstanding(t *testing.T) {
	overEach(t, 1<<20, func(t *testing.T, s *script) {
		s.mu.Lock()
		s.credit = nvme.MakeCredit(3, 4)
		s.mu.Unlock()
		o := quick(s)
		o.QPairs, o.Credits = 1, CreditsOn
		c, n := connect(t, o)
		q, err := c.OpenQPair(testContext(t))
		if err != nil {
			t.Fatal(err)
		}
		defer q.Close()
		var held []func()
		s.mu.Lock()
		s.answer = func(c *scriptConn, e *nvme.SQE) bool {
			if c.qid == 0 || e.Opcode() != nvme.CmdFlush {
				return false
			}
			cid := e.CID()
			held = append(held, func() { c.wire.event(cid, 0) })
			return true
		}
		s.mu.Unlock()
		cmds := make([]Command, 12)
		for i := range cmds {
			cmds[i].Tag = uint64(i)
			cmds[i].SQE.SetOpcode(OpFlush)
			cmds[i].SQE.SetNSID(1)
		}
		if k, err := q.Submit(cmds); k != 12 || err != nil {
			t.Fatal(k, err)
		}
		// The credit is 4, or less if the host was slow to use it.
		credit := n.Credit()
		if credit.Units < 1 || credit.Units > 4 || q.Held() != 12-credit.Units || credit.Outstanding != credit.Units ||
			credit.SSD != 3 {
			t.Errorf("%d held, %+v", q.Held(), credit)
		}
		comps := make([]Completion, 12)
		for done := 0; done < 12; {
			eventually(t, "a command at the target", func() bool {
				s.mu.Lock()
				defer s.mu.Unlock()
				if len(held) > 4 {
					t.Errorf("%d outstanding at the target, the credit is 4", len(held))
				}
				if len(held) == 0 {
					return false
				}
				held[0]()
				held = held[1:]
				return true
			})
			k, err := q.Poll(comps, 5*time.Second)
			if err != nil || k == 0 {
				t.Fatal(k, err)
			}
			done += k
		}
		if q.Held() != 0 || n.Credit().Outstanding != 0 {
			t.Errorf("%d held, %+v", q.Held(), n.Credit())
		}
	})
}

// The script's blocks are of 512 bytes, and it clears what is deallocated.
func TestDeallocateNamesTheBlocksOfItsRanges(t *testing.T) {
	s := newScript(t, 1<<20)
	_, n := connect(t, quick(s))
	ctx := testContext(t)
	want := bytes.Repeat([]byte{0xFF}, 1<<20)
	if _, err := n.WriteAt(ctx, want, 0, 0); err != nil {
		t.Fatal(err)
	}
	var ranges []Range
	for i := range int64(300) { // more than one command can name
		ranges = append(ranges, Range{Offset: 2048 + i*3*512, Length: 1024})
		clear(want[2048+i*3*512:][:1024])
	}
	ranges = append(ranges, Range{Offset: 1<<20 - 4096, Length: 4096}, Range{Offset: 512})
	clear(want[1<<20-4096:])
	if err := n.Deallocate(ctx, ranges...); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 1<<20)
	if _, err := n.ReadAt(ctx, got, 0); err != nil || !bytes.Equal(got, want) {
		t.Errorf("other blocks than those of the ranges were deallocated (%v)", err)
	}
}
