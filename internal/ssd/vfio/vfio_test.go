package vfio_test

import (
	"bytes"
	"errors"
	"flag"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"jbofd/internal/bufpool"
	"jbofd/internal/nvme"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/ssdtest"
	"jbofd/internal/ssd/vfio"
	"jbofd/internal/ssd/vfio/pcietest"
	"jbofd/internal/units"
)

var seedFlag = flag.Uint64("seed", 0, "the random tests' seed; 0: a new one")

// random returns a source for a test, which says its seed.
func random(t *testing.T) *rand.Rand {
	seed := *seedFlag
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	t.Logf("-seed=%d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

// rig is a drive on a controller in memory.
type rig struct {
	*testing.T
	ctrl *pcietest.Controller
	dev  *vfio.Device
	pool *bufpool.Pool
	acct *bufpool.Account
}

// quick are limits of time for drives that do not answer.
var quick = vfio.Config{Name: "test", Address: "0000:00:00.0", Timeout: 60 * time.Millisecond,
	AbortTimeout: 30 * time.Millisecond, AdminTimeout: 300 * time.Millisecond}

func newRig(t *testing.T, c pcietest.Config, v vfio.Config) *rig {
	t.Helper()
	if c.SizeBytes == 0 {
		c.SizeBytes = 8 << 20
	}
	r := &rig{T: t}
	var err error
	if r.pool, err = bufpool.New(bufpool.Config{TotalBytes: 16 << 20}); err != nil {
		t.Fatal(err)
	}
	r.acct = r.pool.Account("test")
	if r.ctrl, err = pcietest.New(c); err != nil {
		t.Fatal(err)
	}
	v.Pool = r.pool
	if v.Name == "" {
		v.Name = "test"
	}
	if r.dev, err = vfio.Open(v, r.ctrl); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.dev.Close(); err != nil {
			t.Error(err)
		}
		for _, s := range r.ctrl.Counts().Strays {
			t.Errorf("the controller saw %s", s)
		}
	})
	return r
}

func (r *rig) queue(depth int) ssd.Queue {
	r.Helper()
	return ssdtest.OpenQueue(r, r.dev, depth)
}

// buffer returns memory that the device sees.
func (r *rig) buffer(n int) []byte {
	r.Helper()
	return ssdtest.Buffer(r, r.pool, r.acct, n)
}

// The drive keeps the promises of package ssd, whatever its controller can do.
func TestConformance(t *testing.T) {
	for name, cfg := range map[string]pcietest.Config{
		"all":      {SGL: true, WriteZeroes: true, DSM: true, Shadows: true},
		"least":    {MDTS: 1, Entries: 8},
		"zeroes":   {MDTS: 4, WriteZeroes: true, WZSL: 2},
		"older":    {MDTS: 3, WriteZeroes: true, DSM: true, WZSL: -1},
		"4096":     {BlockShift: 12, MDTS: 5, DSM: true},
		"a queue":  {Vectors: 2, WriteZeroes: true},
		"no lists": {SGL: true, MDTS: 7},
		"no masks": {NoMasks: true, MDTS: 3},
		"forgets":  {Forgets: true, Shadows: true},
	} {
		t.Run(name, func(t *testing.T) {
			ssdtest.Conformance(t, func(t *testing.T) ssd.Device { return newRig(t, cfg, vfio.Config{}).dev })
		})
	}
}

// Data of any length arrives at any address that the device sees, described by PRPs or an SGL, in as many commands as
// MDTS asks for.
func TestDataOfAnyLengthAndPlace(t *testing.T) {
	for name, cfg := range map[string]pcietest.Config{
		"PRP": {MDTS: 2}, "PRP, long": {}, "SGL": {SGL: true, MDTS: 6},
	} {
		t.Run(name, func(t *testing.T) {
			rng := random(t)
			r := newRig(t, cfg, vfio.Config{})
			q := r.queue(2)
			// What is before and behind the data in its buffer stays as it is.
			b := r.buffer(1 << 20)
			model := make([]byte, 4<<20)
			for range 300 {
				n := 512 * (1 + rng.IntN(64))
				if rng.IntN(8) == 0 {
					n = 512 * (1 + rng.IntN(2000))
				}
				place := 4 * rng.IntN((len(b)-n)/4+1)
				off := 512 * rng.IntN((len(model)-n)/512+1)
				for i := range b {
					b[i] = byte(i * 7)
				}
				data := b[place : place+n]
				if rng.IntN(2) == 0 {
					for i := range data {
						data[i] = byte(rng.Uint32())
					}
					copy(model[off:], data)
					ssdtest.Write(t, q, int64(off), data, 0)
				} else if err := ssdtest.Do(t, q, ssd.Request{Op: ssd.Read, Offset: int64(off), Len: int64(n),
					Buf: data}); err != nil || !bytes.Equal(data, model[off:off+n]) {
					t.Fatalf("a read of %d bytes at %d to place %d: %v", n, off, place, err)
				}
				for i := range b {
					if (i < place || i >= place+n) && b[i] != byte(i*7) {
						t.Fatalf("byte %d is changed by %d bytes at place %d", i, n, place)
					}
				}
			}
		})
	}
}

// A batch costs one write to a doorbell, and its completions another one; a controller with shadow doorbells is told
// less often.
func TestDoorbellsOfABatch(t *testing.T) {
	for name, shadows := range map[string]bool{"registers": false, "shadow doorbells": true} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, pcietest.Config{Shadows: shadows}, vfio.Config{})
			const depth, rounds = 32, 50
			q := r.queue(depth)
			reqs, comps := make([]ssd.Request, depth), make([]ssd.Completion, depth)
			for i := range reqs {
				reqs[i] = ssd.Request{Op: ssd.Read, Offset: int64(i) * 4096, Len: 4096, Buf: r.buffer(4096),
					Tag: uint64(i)}
			}
			before := r.ctrl.Counts().Doorbells
			polls := 0
			for range rounds {
				if n := q.Submit(reqs); n != depth {
					t.Fatalf("Submit took %d", n)
				}
				for left := depth; left > 0; polls++ {
					left -= ssd.Await(q, comps, -1)
				}
			}
			if n := r.ctrl.Counts().Doorbells - before; n > rounds+polls {
				t.Errorf("%d writes to doorbells for %d batches and %d polls", n, rounds, polls)
			}
			// Whatever the last queue has left, another one of its number is served.
			for range 5 {
				ssdtest.Read(t, q, 0, 512)
			}
			if err := q.Close(); err != nil {
				t.Fatal(err)
			}
			q = r.queue(depth)
			for range 3 {
				ssdtest.Read(t, q, 0, 512)
			}
		})
	}
}

// Nothing is allocated for a request.
func TestARequestAllocatesNothing(t *testing.T) {
	r := newRig(t, pcietest.Config{MDTS: 2}, vfio.Config{})
	const depth = 16
	q := r.queue(depth)
	reqs, comps := make([]ssd.Request, depth), make([]ssd.Completion, depth)
	for i := range reqs {
		reqs[i] = ssd.Request{Op: ssd.Op(i % 2), Offset: int64(i) << 16, Len: 48 << 10, Buf: r.buffer(48 << 10),
			Tag: uint64(i)}
	}
	round := func() {
		q.Submit(reqs)
		for left := depth; left > 0; {
			left -= ssd.Await(q, comps, -1)
		}
	}
	round()
	if n := testing.AllocsPerRun(100, round); n > 0.5 { // the controller's goroutine allocates, too
		t.Errorf("%v allocations a batch", n)
	}
}

// A command that is not answered is aborted, and sent again after a reset of the controller.
func TestACommandThatIsLostIsSentAgain(t *testing.T) {
	for name, stick := range map[string]bool{"the controller is reset": false, "the function is reset": true} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, pcietest.Config{}, quick)
			q := r.queue(8)
			want := bytes.Repeat([]byte{7}, 4096)
			ssdtest.Write(t, q, 4096, want, 0)
			lost, aborted := false, false
			r.ctrl.Intercept(func(id uint16, e *nvme.SQE) pcietest.Answer {
				aborted = aborted || id == 0 && e.Opcode() == nvme.AdminAbort
				drop := id != 0 && !lost
				lost = lost || drop
				return pcietest.Answer{Drop: drop}
			})
			if stick {
				r.ctrl.Stick()
			}
			resets := r.ctrl.Counts().Resets
			if got := ssdtest.Read(t, q, 4096, 4096); !bytes.Equal(got, want) {
				t.Error("the read returns something else")
			}
			r.ctrl.Intercept(nil)
			if n := r.ctrl.Counts().Resets - resets; !aborted || n == 0 {
				t.Errorf("aborted: %v; %d resets", aborted, n)
			}
		})
	}
}

// A command that is never answered ends, and so does everything else, within the limits of time.
func TestACommandThatIsNeverAnsweredEnds(t *testing.T) {
	r := newRig(t, pcietest.Config{}, quick)
	q := r.queue(8)
	r.ctrl.Intercept(func(id uint16, e *nvme.SQE) pcietest.Answer {
		return pcietest.Answer{Drop: id != 0 && e.Opcode() == nvme.CmdRead && e.SLBA() == 8}
	})
	b := r.buffer(8192)
	q.Submit([]ssd.Request{{Op: ssd.Read, Offset: 4096, Len: 512, Buf: b, Tag: 1},
		{Op: ssd.Read, Offset: 0, Len: 512, Buf: b[4096:], Tag: 2}})
	outcomes := map[uint64]error{}
	var c [2]ssd.Completion
	for end := time.Now().Add(10 * time.Second); len(outcomes) < 2 && time.Now().Before(end); {
		for _, c := range c[:ssd.Await(q, c[:], time.Second)] {
			outcomes[c.Tag] = c.Err
		}
	}
	if err := outcomes[1]; !errors.Is(err, ssd.ErrMedia) {
		t.Errorf("the read that is never answered: %v", err)
	}
	if err, ok := outcomes[2]; !ok || err != nil {
		t.Errorf("the other one: %v", err)
	}
	r.ctrl.Intercept(nil)
	ssdtest.Read(t, q, 4096, 512)
}

// A controller that is not there any more, or is being removed, has no access to memory when its requests end.
func TestADriveThatIsGone(t *testing.T) {
	for name, lose := range map[string]func(c *pcietest.Controller){
		"pulled":        (*pcietest.Controller).Vanish,
		"being removed": func(c *pcietest.Controller) { c.Removed().Signal() },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, pcietest.Config{}, quick)
			q := r.queue(8)
			r.ctrl.Intercept(func(id uint16, e *nvme.SQE) pcietest.Answer { return pcietest.Answer{Drop: id != 0} })
			b := r.buffer(512)
			reqs := make([]ssd.Request, 8)
			for i := range reqs {
				reqs[i] = ssd.Request{Op: ssd.Write, Offset: int64(i) * 512, Len: 512, Buf: b, Tag: uint64(i)}
			}
			q.Submit(reqs)
			lose(r.ctrl)
			var c [8]ssd.Completion
			begin := time.Now()
			for left := len(reqs); left > 0; {
				n := ssd.Await(q, c[:], 5*time.Second)
				if n == 0 {
					t.Fatalf("%d requests are not answered", left)
				}
				for _, c := range c[:n] {
					if !errors.Is(c.Err, ssd.ErrGone) {
						t.Errorf("%v", c.Err)
					}
				}
				left -= n
			}
			if !r.ctrl.Revoked() {
				t.Error("the controller still has access to memory")
			}
			if d := time.Since(begin); d > time.Second {
				t.Errorf("answered after %v", d)
			}
			if err := r.dev.Healthy(); !errors.Is(err, ssd.ErrGone) {
				t.Errorf("Healthy: %v", err)
			}
			if err := ssdtest.Do(t, q, ssd.Request{Op: ssd.Flush}); !errors.Is(err, ssd.ErrGone) {
				t.Errorf("a flush afterwards: %v", err)
			}
		})
	}
}

// What a status means for the request, and whether the command is sent again.
func TestStatuses(t *testing.T) {
	for _, tc := range []struct {
		st    nvme.Status
		times int // how often it comes
		want  error
		sent  int
	}{
		{nvme.UnrecoveredReadError | nvme.DNR, 9, ssd.ErrMedia, 1},
		{nvme.LBAOutOfRange | nvme.DNR, 9, ssd.ErrRange, 1},
		{nvme.CapacityExceeded, 9, ssd.ErrNoSpace, 1},
		{nvme.InvalidOpcode | nvme.DNR, 9, ssd.ErrUnsupported, 1},
		{nvme.NamespaceNotReady, 2, nil, 3},
		{nvme.NamespaceNotReady | nvme.DNR, 1, ssd.ErrMedia, 1},
		{nvme.CommandInterrupted, 9, ssd.ErrMedia, 4},
	} {
		t.Run(tc.st.String(), func(t *testing.T) {
			r := newRig(t, pcietest.Config{}, vfio.Config{})
			q := r.queue(2)
			left, sent := tc.times, 0
			r.ctrl.Intercept(func(id uint16, e *nvme.SQE) (a pcietest.Answer) {
				if id != 0 {
					if sent++; left > 0 {
						left--
						a.Status = tc.st
					}
				}
				return a
			})
			err := ssdtest.Do(t, q, ssd.Request{Op: ssd.Read, Len: 512, Buf: r.buffer(512)})
			r.ctrl.Intercept(nil)
			if !errors.Is(err, tc.want) || tc.want == nil && err != nil {
				t.Errorf("%v, want %v", err, tc.want)
			}
			if sent != tc.sent {
				t.Errorf("sent %d times, want %d", sent, tc.sent)
			}
		})
	}
}

// A controller that lies is reset; every request is answered once, nothing beyond its buffer is touched, and nothing
// panics.
func TestAControllerThatLies(t *testing.T) {
	rng := random(t)
	for round := range 20 {
		r := newRig(t, pcietest.Config{MDTS: 3, Shadows: round%2 == 0, SGL: round%3 == 0}, quick)
		q := r.queue(16)
		lies, liar := 1+rng.IntN(4), rand.New(rand.NewPCG(rng.Uint64(), 0))
		r.ctrl.Intercept(func(id uint16, e *nvme.SQE) (a pcietest.Answer) {
			if id == 0 || lies == 0 || liar.IntN(20) != 0 {
				return a
			}
			lies--
			switch liar.IntN(5) {
			case 0:
				a.Corrupt = func(c *nvme.CQE) { c.SetCID(uint16(liar.Uint32())) }
			case 1:
				a.Corrupt = func(c *nvme.CQE) { c.SetCID(c.CID() + 64) }
			case 2:
				a.Corrupt = func(c *nvme.CQE) { c.SetSQHD(uint16(liar.Uint32())) }
			case 3:
				a.Held = true
			case 4:
				a.Status = nvme.Status(liar.Uint32()) & 0x7fff
			}
			return a
		})
		left, sent := 0, 0
		answered := map[uint64]bool{}
		b := r.buffer(256 << 10)
		for sent < 200 || left > 0 {
			var reqs []ssd.Request
			for left+len(reqs) < 16 && sent < 200 {
				n := int64(512 * (1 + rng.IntN(100)))
				reqs = append(reqs, ssd.Request{Op: ssd.Op(rng.IntN(3)), Offset: 512 * rng.Int64N(8000), Len: n,
					Buf: b[:n], Tag: uint64(sent)})
				sent++
			}
			if n := q.Submit(reqs); n != len(reqs) {
				t.Fatalf("Submit took %d of %d", n, len(reqs))
			}
			left += len(reqs)
			var c [16]ssd.Completion
			n := ssd.Await(q, c[:], 20*time.Second)
			if n == 0 {
				t.Fatalf("%d requests are not answered", left)
			}
			for _, c := range c[:n] {
				if answered[c.Tag] {
					t.Fatalf("request %d is answered twice", c.Tag)
				}
				answered[c.Tag] = true
			}
			left -= n
		}
		r.ctrl.Intercept(nil)
		if slices.Contains(r.ctrl.Counts().Strays, "") {
			t.Error("a stray access")
		}
	}
}

// A request fails if one of its parts does, whatever becomes of the others.
func TestAPartThatFails(t *testing.T) {
	for _, bad := range []units.LBA{0, 16, 32} {
		r := newRig(t, pcietest.Config{MDTS: 1}, vfio.Config{})
		q := r.queue(2)
		r.ctrl.Intercept(func(id uint16, e *nvme.SQE) (a pcietest.Answer) {
			if id != 0 && e.SLBA() == bad {
				a.Status = nvme.UnrecoveredReadError | nvme.DNR
			}
			return a
		})
		err := ssdtest.Do(t, q, ssd.Request{Op: ssd.Read, Len: 24 << 10, Buf: r.buffer(24 << 10)})
		r.ctrl.Intercept(nil)
		if !errors.Is(err, ssd.ErrMedia) {
			t.Errorf("the part at block %d fails, and the request ends with %v", bad, err)
		}
		ssdtest.Read(t, q, 0, 24<<10)
	}
}

// Each flag of a request is one of its commands, and none is added.
func TestFlagsOfCommands(t *testing.T) {
	r := newRig(t, pcietest.Config{MDTS: 1, WriteZeroes: true}, vfio.Config{})
	q := r.queue(2)
	b := r.buffer(32 << 10)
	for op, unmap := range map[ssd.Op]ssd.Flags{ssd.Read: 0, ssd.Write: 0, ssd.WriteZeroes: ssd.Unmap} {
		for _, flags := range []ssd.Flags{0, ssd.FUA, unmap, ssd.FUA | unmap} {
			var want, wrong uint32
			if flags&ssd.FUA != 0 {
				want |= nvme.CDW12FUA
			}
			if flags&ssd.Unmap != 0 {
				want |= nvme.CDW12Deallocate
			}
			commands := 0
			r.ctrl.Intercept(func(id uint16, e *nvme.SQE) pcietest.Answer {
				if id != 0 {
					commands++
					wrong |= e.CDW(12)&^0xffff ^ want
				}
				return pcietest.Answer{}
			})
			if err := ssdtest.Do(t, q, ssd.Request{Op: op, Flags: flags, Len: 32 << 10, Buf: b}); err != nil {
				t.Error(err)
			}
			r.ctrl.Intercept(nil)
			if wrong != 0 || commands == 0 {
				t.Errorf("%v with flags %b: bits %#x of CDW12 are wrong in %d commands", op, flags, wrong, commands)
			}
		}
	}
}
