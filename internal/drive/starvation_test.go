package drive

import (
	"testing"
	"time"

	"jbofd/internal/bufpool"
	"jbofd/internal/lab"
	"jbofd/internal/pipeline"
	"jbofd/internal/pipeline/jbof"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/model/flash"
	"jbofd/internal/tenant"
	"jbofd/internal/units"
)

// flashDevice is an emulated drive in virtual time, which holds only zeroes.
type flashDevice struct {
	sim    *lab.Sim
	flash  *flash.Drive
	wake   *lab.Timer
	notify func()
	reqs   map[uint64]ssd.Request
	done   []flash.Completion
	most   int
}

func newFlashDevice(t *testing.T, sim *lab.Sim) *flashDevice {
	t.Helper()
	cfg, err := flash.Preset("dct983", flashBytes)
	if err != nil {
		t.Fatal(err)
	}
	d := &flashDevice{sim: sim, reqs: map[uint64]ssd.Request{}}
	if d.flash, err = flash.New(cfg); err != nil {
		t.Fatal(err)
	}
	d.flash.Precondition(flash.Clean)
	d.wake = sim.After(1<<50, d.advance)
	d.wake.Stop()
	return d
}

const flashBytes = 1 << 30

func (d *flashDevice) Info() ssd.Info {
	return ssd.Info{Name: "flash", Backend: "model", SizeBytes: flashBytes, BlockSize: 512, OptimalIOBytes: 4096,
		AtomicWriteBytes: 4096}
}
func (d *flashDevice) OpenQueue(int) (ssd.Queue, error) { return d, nil }
func (d *flashDevice) Healthy() error                   { return nil }
func (d *flashDevice) Close() error                     { return nil }
func (d *flashDevice) Wake()                            {}
func (d *flashDevice) Synchronous() bool                { return false }
func (d *flashDevice) Notify(f func())                  { d.notify = f }

func (d *flashDevice) Submit(reqs []ssd.Request) int {
	for _, r := range reqs {
		d.reqs[r.Tag] = r
		d.flash.Submit(d.sim.Now(), flash.Request{Op: flash.Op(r.Op), OffsetBytes: r.Offset, LenBytes: r.Len,
			Tag: r.Tag})
	}
	d.most = max(d.most, len(d.reqs))
	d.advance()
	return len(reqs)
}

// advance hands out what the emulated drive has completed by now.
func (d *flashDevice) advance() {
	before := len(d.done)
	d.done = d.flash.Advance(d.sim.Now(), d.done)
	if at, ok := d.flash.NextCompletion(); ok {
		d.wake.Reset(max(at-d.sim.Now(), 1))
	}
	if len(d.done) > before {
		d.sim.Go(d.notify)
	}
}

func (d *flashDevice) Wait(time.Duration) bool { return len(d.done) > 0 }

func (d *flashDevice) Poll(dst []ssd.Completion) int {
	n := min(len(dst), len(d.done))
	for i, c := range d.done[:n] {
		if r := d.reqs[c.Tag]; r.Op == ssd.Read {
			clear(r.Buf[:r.Len])
		}
		delete(d.reqs, c.Tag)
		dst[i] = ssd.Completion{Tag: c.Tag, LatencyNS: c.LatencyNS}
	}
	d.done = append(d.done[:0], d.done[n:]...)
	return n
}

// simHost is a tenant's host in a simulation.
type simHost struct {
	d       *Drive
	account *bufpool.Account
	tenant  tenant.ID
	out     int
	done    []*IO
}

func (h *simHost) Admitted(*IO) bool { panic("nothing to fetch") }
func (h *simHost) Kick()             {}
func (h *simHost) Done(io *IO) bool {
	h.out--
	h.done = append(h.done, io)
	return false
}

func (h *simHost) submit(op pipeline.Op, offset units.DriveOffset, length units.Bytes, data []byte) *IO {
	io := &IO{Op: op, Offset: offset, Len: length, Account: h.account, Tenant: h.tenant}
	io.Buf.B = data
	io.Init(h, 0)
	h.out++
	var b Batch
	b.Add(io)
	h.d.Submit(&b)
	return io
}

// TestVerifyDoesNotStarveCompareAndWrite: while a tenant has the drive verify 6 GiB, another tenant's compare-and-write
// of a block takes at most ten times as long as on an idle drive. A cluster file system locks its metadata that way,
// and VMware waits 8 seconds for it. The drive is idle soon after the first tenant is gone.
func TestVerifyDoesNotStarveCompareAndWrite(t *testing.T) {
	policies := map[string]func() pipeline.Policy{
		"fifo": func() pipeline.Policy { return pipeline.NewFIFO(256) },
		"jbof": func() pipeline.Policy { return jbof.New(jbof.Config{}) },
	}
	for name, policy := range policies {
		t.Run(name, func(t *testing.T) {
			pool, err := bufpool.New(bufpool.Config{TotalBytes: 64 << 20})
			if err != nil {
				t.Fatal(err)
			}
			defer pool.CloseTest(t)
			sim := lab.NewSim(1)
			dev := newFlashDevice(t, sim)
			d, err := New(Config{Device: dev, Pool: pool, Policy: policy(), Env: sim})
			if err != nil {
				t.Fatal(err)
			}
			defer d.Close()
			a := &simHost{d: d, tenant: 1, account: pool.Account("a")}
			b := &simHost{d: d, tenant: 2, account: pool.Account("b")}
			defer a.account.Close()
			defer b.account.Close()
			image := make([]byte, 2*4096)
			// lock does compare-and-writes of a block one after the other and returns how long the slowest took.
			lock := func() (worstNS int64) {
				for i := range units.DriveOffset(50) {
					began := sim.Now()
					io := b.submit(pipeline.CompareWrite, i<<20, 4096, image)
					if !sim.Run(int64(30*time.Second), func() bool { return b.out == 0 }) || io.Err != nil {
						t.Fatalf("compare-and-write %d has not succeeded within 30 s: %v", i, io.Err)
					}
					worstNS = max(worstNS, sim.Now()-began)
				}
				return worstNS
			}
			idle := lock()
			var verifies []*IO
			for range 24 {
				verifies = append(verifies, a.submit(pipeline.Verify, 0, 256<<20, nil))
			}
			sim.Run(int64(5*time.Millisecond), func() bool { return false })
			began, before := sim.Now(), d.Stats().Bytes[ssd.Read].Load()
			busy := lock()
			rate := float64(d.Stats().Bytes[ssd.Read].Load()-before) / float64(sim.Now()-began)
			t.Logf("compare-and-write: %.3f ms on the idle drive, %.3f ms beside Verifys that read %.1f GB/s",
				float64(idle)/1e6, float64(busy)/1e6, rate)
			if rate < 1 {
				t.Errorf("the Verifys read %.2f GB/s, want at least 1: they give way to nobody", rate)
			}
			if busy > 10*idle {
				t.Errorf("a compare-and-write takes %.1f ms beside another tenant's Verifys, %.3f ms on an idle drive",
					float64(busy)/1e6, float64(idle)/1e6)
			}

			if a.out != len(verifies) {
				t.Fatalf("%d of %d Verifys are under way: the test tests nothing", a.out, len(verifies))
			}
			gone := sim.Now()
			for _, io := range verifies {
				if !d.Abort(io) {
					t.Error("a Verify that has 256 MiB to read cannot be aborted")
				}
			}
			if !sim.Run(int64(60*time.Second), func() bool { return a.out == 0 }) {
				t.Fatalf("%d Verifys are not over a minute after they were aborted", a.out)
			}
			if took := sim.Now() - gone; took > int64(20*time.Millisecond) {
				t.Errorf("aborted Verifys have kept the drive busy for %.1f ms", float64(took)/1e6)
			}
			for _, io := range verifies {
				if io.Err != ErrAborted {
					t.Errorf("an aborted Verify ended with %v", io.Err)
				}
			}
		})
	}
}
