package serve_test

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/internal/credit"
	"jbofd/internal/nvme"
	"jbofd/internal/pipeline"
	"jbofd/internal/ssd/mem"
	"jbofd/internal/tenant"
)

// giving is a FIFO that gives every tenant the same credit and counts the units outstanding of all tenants together.
type giving struct {
	*pipeline.FIFO
	credit             atomic.Int64
	units, most, lone  int64 // lone counts the I/Os outstanding
	exceeded, enqueued int64
	of                 map[pipeline.Tag]int64
}

func newGiving(credit int64) *giving {
	g := &giving{FIFO: pipeline.NewFIFO(256), of: map[pipeline.Tag]int64{}}
	g.credit.Store(credit)
	return g
}

func (g *giving) Credit(tenant.ID) int { return int(g.credit.Load()) }

func (g *giving) Enqueue(now int64, io pipeline.IO) {
	u := max((io.LenBytes+4095)/4096, 1)
	g.of[io.Tag] = u
	g.units += u
	g.lone++
	g.enqueued++
	g.most = max(g.most, g.units)
	if g.units > g.credit.Load() && g.lone > 1 {
		g.exceeded++
	}
	g.FIFO.Enqueue(now, io)
}

func (g *giving) Complete(now int64, tag pipeline.Tag, r pipeline.Result) {
	g.units -= g.of[tag]
	g.lone--
	g.FIFO.Complete(now, tag, r)
}

// creditRig has namespace 1 on a drive that gives credit and namespace 2 on one that gives none.
func creditRig(t testing.TB, credit int64) (*rig, *giving) {
	t.Helper()
	g := newGiving(credit)
	var devices []*mem.Device
	for _, name := range []string{"m0", "m1"} {
		d, err := mem.Open(mem.Config{Name: name, SizeBytes: testBytes})
		if err != nil {
			t.Fatal(err)
		}
		devices = append(devices, d)
	}
	return newRigWith(t, nil, []pipeline.Policy{g}, devices[0], devices[1]), g
}

func connect(t testing.TB, o client.Options) *client.Controller {
	t.Helper()
	o.SubNQN, o.CtrlLossTimeout = testNQN, -1
	c, err := client.Connect(context.Background(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

func namespace(t testing.TB, c *client.Controller, nsid uint32) *client.Namespace {
	t.Helper()
	n, err := c.Namespace(context.Background(), nsid)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// TestAHostNeverExceedsItsCredit has queue pairs at depth 32 and a crowd of goroutines on one
// controller, with all sizes: the drive never sees more of them than it gave credit for,
// and the other drive, which gives none, is not limited.
func TestAHostNeverExceedsItsCredit(t *testing.T) {
	const units = 40
	r, g := creditRig(t, units)
	began := time.Now()
	c := connect(t, client.Options{Address: r.address, Queues: 2, QPairs: 2, QueueDepth: 32})
	n := namespace(t, c, 1)
	// On a busy machine some of it may have aged.
	got := n.Credit()
	least := units >> min(time.Since(began)/credit.HalfLifeNS, 5)
	if !got.On || got.Units > units || got.Units < least || got.SSD != 0 {
		t.Fatalf("with the grant: %+v", got)
	}
	other := namespace(t, c, 2)
	if got := other.Credit(); !got.On || got.Units != 0 || got.SSD != 1 {
		t.Fatalf("of the other drive: %+v", got)
	}
	var wg sync.WaitGroup
	for i := range 2 {
		q, err := c.OpenQPair(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		wg.Go(func() {
			l := newLoad(q, []uint8{client.OpRead, client.OpWrite}[i], []int{8192, 64 << 10}[i], 32)
			if err := errors.Join(l.Run(1000), q.Close()); err != nil {
				t.Error(err)
			}
		})
	}
	for i := range 32 {
		wg.Go(func() {
			buf := make([]byte, (1+i%4)*12<<10)
			for range 50 {
				_, err := n.ReadAt(context.Background(), buf, 0)
				err = errors.Join(err, n.Flush(context.Background()),
					second(other.ReadAt(context.Background(), buf, 0)))
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	began = time.Now() // a completion brings the credit anew
	if _, err := n.ReadAt(context.Background(), make([]byte, 4096), 0); err != nil {
		t.Error(err)
	}
	got = n.Credit()
	least = units >> min(time.Since(began)/credit.HalfLifeNS, 5)
	if got.Outstanding != 0 || got.Waiting != 0 || got.Waits == 0 || got.WaitTime == 0 ||
		got.Units > units || got.Units < least {
		t.Errorf("at the end: %+v", got)
	}
	if w := other.Credit(); w.Waits != 0 || w.Units != 0 {
		t.Errorf("commands waited for a drive without credit: %+v", w)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	r.Service.SSD(0).Credit(0) // orders the drive's writes before this
	// A host overdraws its credit on purpose when nothing has completed for 100 ms, as on a machine that is very busy.
	overdrawn := int64(got.Overdrawn)
	if g.exceeded > 0 && overdrawn == 0 || g.most < units/2 || g.most > 48+overdrawn {
		t.Errorf("%d of %d I/Os came when more than %d units were outstanding; the most was %d", g.exceeded, g.enqueued,
			units, g.most)
	}
}

func second[A, B any](_ A, b B) B { return b }

// TestCreditsOfATenantAreDivided connects the same host several times.
func TestCreditsOfATenantAreDivided(t *testing.T) {
	r, _ := creditRig(t, 100)
	o := client.Options{Address: r.address, HostNQN: client.HostNQNFor([16]byte{7}), HostID: [16]byte{7}}
	a := connect(t, o)
	n := namespace(t, a, 1)
	buf := make([]byte, 4096)
	read := func(want int) {
		t.Helper()
		if _, err := n.ReadAt(context.Background(), buf, 0); err != nil {
			t.Fatal(err)
		}
		if got := n.Credit().Units; got != want {
			t.Errorf("credit %d, want %d", got, want)
		}
	}
	read(100)
	b, c := connect(t, o), connect(t, o)
	if got := namespace(t, c, 1).Credit().Units; got != 33 {
		t.Errorf("the third is granted %d", got)
	}
	read(33)
	other := o
	other.HostNQN, other.HostID = client.HostNQNFor([16]byte{8}), [16]byte{8}
	connect(t, other)
	without := o
	without.Credits = client.CreditsOff
	connect(t, without)
	read(33) // connections of another tenant and those without credits do not count
	if err := errors.Join(b.Close(), c.Close()); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(5 * time.Second); ; { // their connections end gradually
		if _, err := n.ReadAt(context.Background(), buf, 0); err != nil {
			t.Fatal(err)
		}
		if n.Credit().Units == 100 || time.Now().After(deadline) {
			break
		}
	}
	read(100)
	if _, err := b.IOPassthru(context.Background(), client.SQE{}, nil); !errors.Is(err, client.ErrClosed) {
		t.Error(err)
	}
}

// TestStandardHostsSeeNoCredits checks the completions: without the feature DW1 is 0. With it every completion carries
// the credit, also with an error.
func TestStandardHostsSeeNoCredits(t *testing.T) {
	r, _ := creditRig(t, 70000)
	for _, mode := range []client.CreditMode{client.CreditsOff, client.CreditsOn} {
		c := connect(t, client.Options{Address: r.address, Credits: mode})
		n := namespace(t, c, 1)
		want := uint64(0)
		if mode == client.CreditsOn {
			want = uint64(nvme.MakeCredit(0, 70000)) << 32
		}
		if n.Credit().On != (mode == client.CreditsOn) {
			t.Errorf("mode %d: %+v", mode, n.Credit())
		}
		io := func(op uint8, lba uint64, nlb uint32, fails bool) client.Completion {
			t.Helper()
			var cmd client.Command
			client.SetRW(&cmd, op, 1, lba, nlb)
			var data []byte
			if op != client.OpFlush && op != client.OpWriteZeroes {
				data = make([]byte, nlb*blockBytes)
			}
			got, err := c.IOPassthru(context.Background(), cmd.SQE, data)
			if (err != nil) != fails {
				t.Fatalf("opcode %#x: %v", op, err)
			}
			return got
		}
		for _, op := range []uint8{client.OpWrite, client.OpRead, client.OpFlush, client.OpWriteZeroes} {
			if got := io(op, 3, 2, false).Result; got != want {
				t.Errorf("mode %d, opcode %#x: result %#x, want %#x", mode, op, got, want)
			}
		}
		zeroed := io(client.OpRead, 3, 1, false)
		if zeroed.Received != blockBytes {
			t.Errorf("%d bytes", zeroed.Received)
		}
		var cmp client.Command // of a block of zeroes with a block of ones
		client.SetRW(&cmp, client.OpCompare, 1, 3, 1)
		ones := make([]byte, blockBytes)
		ones[0] = 1
		got, err := c.IOPassthru(context.Background(), cmp.SQE, ones)
		if !errors.Is(err, client.ErrCompareFailed) || got.Result != want {
			t.Errorf("mode %d, compare: result %#x, want %#x; %v", mode, got.Result, want, err)
		}
		if got := io(client.OpRead, 1<<40, 1, true).Result; got != 0 {
			t.Errorf("mode %d, an LBA that is not there: result %#x", mode, got)
		}
	}
}
