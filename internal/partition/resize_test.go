package partition

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"jbofd/internal/bufpool"
	"jbofd/internal/drive"
	"jbofd/internal/kvstore"
	"jbofd/internal/lab"
	"jbofd/internal/ssd"
)

// TestAPartitionIsResizedWhileItServes, and again after it was opened in an extent that is longer than it is. Its table
// moves when it grows.
func TestAPartitionIsResizedWhileItServes(t *testing.T) {
	const small, large = 16 << 20, 64 << 20
	r := newRig(t, small, nil, inMemory(large))
	p := r.mustOpen(true)
	rnd, content := rand.New(rand.NewPCG(*seed, 3)), map[uint64][2]uint64{}
	t.Logf("-seed %d", *seed)
	work := func(n int) {
		if err := newHost(p, 1, 20, 20000).history(rnd, content, 0, 500, n, 20000); err != nil {
			t.Fatal(err)
		}
	}
	work(2000)
	for _, to := range []int64{large, small, 40 << 20} {
		done := make(chan error, 1)
		go func() { done <- p.Resize(ResizeOptions{PartitionBytes: to, ExtentBytes: large}) }()
		for err, ended := error(nil), false; !ended; {
			select {
			case err = <-done:
				if ended = true; err != nil {
					t.Fatal(err)
				}
			default:
				work(100)
			}
		}
		if got := p.SizeBytes(); got != to {
			t.Fatalf("%d bytes, want %d", got, to)
		}
		work(500)
	}
	r.close(p)
	r.size = large
	p = r.mustOpen(false)
	if got := p.SizeBytes(); got != 40<<20 {
		t.Errorf("opened again: %d bytes", got)
	}
	work(2000)
	if err := p.CheckResize(1 << 20); !errors.Is(err, kvstore.ErrResize) {
		t.Errorf("a size of 1 MiB: %v", err)
	}
	r.close(p)
}

// TestAResizeOfADriveThatDoesNotAnswerEnds: at once if the drive has vanished or the daemon stops, and after a minute
// if it says nothing. A drive that answers, however slowly, is waited for.
func TestAResizeOfADriveThatDoesNotAnswerEnds(t *testing.T) {
	const small, large, second = 16 << 20, 32 << 20, int64(time.Second)
	const silent = "has answered nothing for 1m0s"
	for _, to := range []int64{small, large} {
		for _, c := range []struct {
			name         string
			vanish, stop bool
			// held is how long each write takes, after as many.
			held   int64
			after  int
			wants  error
			says   string
			within time.Duration
		}{
			{name: "vanishes", vanish: true, wants: ssd.ErrGone, within: time.Second / 10},
			{name: "vanishes later", vanish: true, after: 1, wants: ssd.ErrGone, within: time.Second / 10},
			{name: "hangs, a stop", held: 1e6 * second, stop: true, wants: ErrStopped, within: time.Second / 5},
			{name: "hangs", held: 1e6 * second, says: silent, within: time.Minute + time.Second},
			{name: "hangs later", held: 1e6 * second, after: 1, says: silent, within: time.Minute + time.Second},
			{name: "is slow", held: 50 * second, within: time.Hour},
		} {
			t.Run(fmt.Sprintf("%s, to %d MiB", c.name, to>>20), func(t *testing.T) {
				from := small + large - to
				sim, disk, p := onDisk(t, large, from)
				stop, writes := make(chan struct{}), 0
				disk.Hold = func(r *ssd.Request) int64 {
					if r.Op != ssd.Write {
						return 0
					}
					switch writes++; {
					case writes <= c.after:
						return 0
					case writes == c.after+1 && c.vanish:
						sim.After(1e6, disk.Vanish)
						return 2e6
					case writes == c.after+1 && c.stop:
						sim.After(1e6, func() { close(stop) })
					}
					return c.held
				}
				began, busy := sim.Now(), &simHost{}
				for i := 1; i < 10; i++ { // what the drive gets meanwhile is no answer
					sim.After(int64(i)*8*second, func() {
						var b Batch
						b.Add(&Request{Op: kvstore.Put, KeyLen: 16, Key: [16]byte{byte(i)}, Value: make([]byte, 100),
							Sink: busy, Tenant: 1})
						p.Submit(&b)
					})
				}
				err := p.Resize(ResizeOptions{PartitionBytes: to, ExtentBytes: large, Stop: stop})
				took := time.Duration(sim.Now() - began)
				t.Logf("%d writes in %v: %v", writes, took, err)
				switch {
				case took > c.within || writes <= c.after:
					t.Errorf("%d writes in %v, want %v at most", writes, took, c.within)
				case c.wants != nil && !errors.Is(err, c.wants), c.says != "" && (err == nil ||
					!strings.Contains(err.Error(), c.says)):
					t.Errorf("%v, want %v %s", err, c.wants, c.says)
				case c.wants == nil && c.says == "" && (err != nil || p.SizeBytes() != to || took < 2*time.Minute):
					t.Errorf("%v after %v, and %d bytes", err, took, p.SizeBytes())
				}
				if err == nil != p.HasSize(to) || err != nil && p.HasSize(from) && !c.stop {
					t.Errorf("after %v it has %d bytes for good: %v, and %d: %v", err, to, p.HasSize(to), from,
						p.HasSize(from))
				}
				if disk.Hold = nil; !c.vanish {
					sim.Run(sim.Now()+1e9*second, func() bool { return len(disk.Flights) == 0 })
				}
				if !c.vanish && !p.HasSize(p.SizeBytes()) {
					t.Errorf("the drive has answered: %+v, and %d bytes", p.ResizeState(), p.SizeBytes())
				}
				if err := p.Close(testTimeout); (err == nil) == c.vanish {
					t.Errorf("it is closed: %v", err)
				}
			})
		}
	}
}

// onDisk opens a new store on a simulated drive with room for so many bytes. more changes its configuration.
func onDisk(t *testing.T, room, size int64, more ...func(*Config)) (*lab.Sim, *lab.Drive, *Partition) {
	t.Helper()
	sim := lab.NewSim(*seed)
	t.Logf("-seed %d", *seed)
	pool, err := bufpool.New(bufpool.Config{TotalBytes: 4 << 20})
	if err != nil {
		t.Fatal(err)
	}
	disk := lab.NewDrive(lab.DriveConfig{SizeBytes: room + offset, BlockSize: 512, Rand: sim.Rand("drive"),
		Misuse: func(what string) { t.Error(what) }})
	o, err := drive.New(drive.Config{Device: lab.NewDevice(sim, "ssd0", disk), Pool: pool, Env: sim})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := o.Close(); err != nil {
			t.Error(err)
		}
		pool.CloseTest(t)
	})
	cfg := Config{Drive: o, OffsetBytes: offset, Background: 9, Store: kvstore.Config{
		PartitionBytes: size, Format: true, UUID: [16]byte{7}, HashSeed: 99, ChunkBytes: 256 << 10}}
	for _, set := range more {
		set(&cfg)
	}
	p, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return sim, disk, p
}
