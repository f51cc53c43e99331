package bufpool

import (
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
)

// A device is told of a region once, when its memory is first used, by many goroutines at the same time; what it
// refuses stays refused, and other regions do not suffer.
func TestADeviceIsToldOfARegionOnce(t *testing.T) {
	p, err := New(Config{TotalBytes: 16 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	}()
	a := p.Account("test")
	defer a.Close()
	get := func(n int) []byte {
		b, ok := p.Get(a, n)
		if !ok {
			t.Fatal("no buffer")
		}
		defer p.Put(b)
		return b.B[:n]
	}
	low, high := get(4096), get(1<<20)
	lowIndex, lowBase, _ := p.RegionOf(low)
	highIndex, highBase, _ := p.RegionOf(high)
	if lowIndex == highIndex {
		t.Fatal("both buffers are in one region")
	}
	cause := errors.New("no more")
	var r *Regions
	for range 50 {
		var told [2]atomic.Int32
		r = &Regions{}
		r.Init(p, func(base []byte) (uint64, error) {
			for range 20 {
				runtime.Gosched() // the others come meanwhile
			}
			if &base[0] == &highBase[0] {
				told[1].Add(1)
				return 0, cause
			}
			told[0].Add(1)
			return 0, nil // 0 is an address, too
		})
		if err := r.Refused(); err != nil {
			t.Error(err)
		}
		begin := make(chan struct{})
		var all sync.WaitGroup
		for range 8 {
			all.Go(func() {
				<-begin
				at := uint64(OffsetIn(lowBase, low))
				for i := range 10 {
					if got, ok := r.Address(low[i:]); !ok || got != at+uint64(i) {
						t.Errorf("%#x, %v; want %#x", got, ok, at+uint64(i))
					}
					if _, ok := r.Address(high); ok {
						t.Error("a region that was refused has an address")
					}
				}
			})
		}
		close(begin)
		all.Wait()
		if told[0].Load() != 1 || told[1].Load() != 1 {
			t.Fatalf("the device was told %d and %d times", told[0].Load(), told[1].Load())
		}
	}
	if err := r.Refused(); !errors.Is(err, cause) {
		t.Errorf("%v, want %v", err, cause)
	}
	if _, ok := r.Address(make([]byte, 4096)); ok {
		t.Error("memory that is not in the pool has an address")
	}
	if n := testing.AllocsPerRun(100, func() { r.Address(low) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
	var none Regions
	none.Init(nil, nil)
	if _, ok := none.Address(low); ok {
		t.Error("there is an address without a pool")
	}
}
