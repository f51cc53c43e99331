package partition

import (
	"errors"
	"math/rand/v2"
	"testing"

	"jbofd/internal/kvstore"
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
