package partition

import (
	"errors"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"

	"jbofd/internal/bufpool"
	"jbofd/internal/buildtags"
	"jbofd/internal/kvstore"
	"jbofd/internal/pipeline/policies"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/fault"
	"jbofd/internal/tenant"
)

const partitionBytes = 48 << 20

// TestHistoriesOfManyHosts: several hosts at once, on a synchronous and on an asynchronous device, under a policy that
// paces. What they have written is there after a clean stop.
func TestHistoriesOfManyHosts(t *testing.T) {
	for name, device := range map[string]func(*bufpool.Pool) (ssd.Device, error){"mem": inMemory(partitionBytes),
		"file": inFile(t, partitionBytes)} {
		t.Run(name, func(t *testing.T) {
			t.Logf("-seed %d", *seed)
			policy, err := policies.New("jbof", policies.Config{Depth: 64})
			if err != nil {
				t.Fatal(err)
			}
			r := newRig(t, partitionBytes, policy, device)
			p := r.mustOpen(true)
			const hosts, keys = 4, 3000
			var models [hosts]map[uint64][2]uint64
			for round := range 3 {
				var wg sync.WaitGroup
				for i := range hosts {
					if models[i] == nil {
						models[i] = map[uint64][2]uint64{}
					}
					wg.Go(func() {
						h := newHost(p, tenant.ID(1+i), 32, 2000)
						rnd := rand.New(rand.NewPCG(*seed, uint64(round*hosts+i)))
						if err := h.history(rnd, models[i], uint64(i)*keys, keys, 6000, 2000); err != nil {
							t.Errorf("host %d, round %d: %v", i, round, err)
						}
					})
				}
				wg.Wait()
				objects := 0
				for _, m := range models {
					objects += len(m)
				}
				if st := p.Stats(); st.Objects != int64(objects) || st.MemoryBytes == 0 {
					t.Errorf("%d objects in %d bytes of memory, want %d", st.Objects, st.MemoryBytes, objects)
				}
				r.close(p)
				p = r.mustOpen(false)
			}
			r.close(p)
		})
	}
}

// TestAPartitionThatWasNotClosedLosesNothing: acknowledged writes are there after the partition was dropped in the
// middle of its work.
func TestAPartitionThatWasNotClosedLosesNothing(t *testing.T) {
	r := newRig(t, partitionBytes, nil, inMemory(partitionBytes))
	p := r.mustOpen(true)
	model := map[uint64][2]uint64{}
	rnd := rand.New(rand.NewPCG(*seed, 0))
	for range 3 {
		if err := newHost(p, 1, 32, 500).history(rnd, model, 0, 5000, 8000, 500); err != nil {
			t.Fatal(err)
		}
		r.drop(p)
		p = r.mustOpen(false)
	}
	r.close(p)
}

// TestFaultsFailRequestsOnly: whatever the device does, requests end, with or without an error, and the store
// continues.
func TestFaultsFailRequestsOnly(t *testing.T) {
	r := newRig(t, partitionBytes, nil, failing(partitionBytes, fault.Config{Seed: *seed}))
	p := r.mustOpen(true)
	h := newHost(p, 1, 16, 300)
	dev := r.dev.(*fault.Device)
	for _, ops := range [][]ssd.Op{{ssd.Read}, {ssd.Write}, {ssd.Read, ssd.Write}} {
		dev.SetRules(fault.Rule{Ops: ops, Probability: 0.2, Err: ssd.ErrMedia})
		failed := 0
		for i := range uint64(400) {
			h.add(kvstore.Put, i%50, 300)
			h.add(kvstore.Get, i%60, 300)
			p.Submit(&h.batch)
			for len(h.free) < 16 {
				for _, r := range h.wait() {
					switch r.Status {
					case kvstore.OK, kvstore.NotFound:
					case kvstore.DeviceError:
						failed++
					default:
						t.Fatalf("op %d: status %d", r.Op, r.Status)
					}
				}
			}
		}
		if failed == 0 {
			t.Error("nothing has failed")
		}
		dev.SetRules()
	}
	if q := h.do(kvstore.Put, 1, 300); q.Status != kvstore.OK {
		t.Errorf("when all is well again: status %d", q.Status)
	}
	r.close(p)
}

func TestAForeignDeviceIsRefusedAndNotChanged(t *testing.T) {
	r := newRig(t, partitionBytes, nil, inMemory(partitionBytes))
	if _, err := r.open(false); !errors.Is(err, kvstore.ErrPartition) {
		t.Errorf("a blank partition: %v", err)
	}
	p := r.mustOpen(true)
	r.close(p)
	if q := newHost(p, 1, 1, 1).do(kvstore.Get, 1, 1); q.Status != kvstore.Aborted {
		t.Errorf("a request to a closed partition: status %d, want Aborted: its drive has not failed", q.Status)
	}
}

// TestCloseIsBounded: with a device that does not answer, Close says that it took too long.
func TestCloseIsBounded(t *testing.T) {
	r := newRig(t, partitionBytes, nil, failing(partitionBytes, fault.Config{Seed: 1}))
	p := r.mustOpen(true)
	newHost(p, 1, 1, 100).do(kvstore.Put, 1, 100)
	dev := r.dev.(*fault.Device)
	dev.SetRules(fault.Rule{Ops: []ssd.Op{ssd.Write}, Err: ssd.ErrMedia})
	if err := p.Close(1); err == nil {
		t.Error("Close of a store that cannot write its checkpoint says nothing")
	}
	dev.SetRules()
	p = r.mustOpen(false)
	if q := newHost(p, 1, 1, 100).do(kvstore.Get, 1, 100); q.Status != kvstore.OK || q.ValueLen != 100 {
		t.Errorf("status %d, %d bytes", q.Status, q.ValueLen)
	}
	r.close(p)
}

// TestAStopWhileTheScrubReadsEndsInOrder: the scrub is always reading, and the drive takes its time.
func TestAStopWhileTheScrubReadsEndsInOrder(t *testing.T) {
	r := newRig(t, partitionBytes, nil, failing(partitionBytes, fault.Config{Seed: 1}))
	p := r.mustOpen(true)
	h := newHost(p, 1, 1, 4000)
	for key := range uint64(300) {
		h.do(kvstore.Put, key, 4000)
	}
	r.close(p)
	// Now nothing is written, so that no timer is set that might help the stop along.
	p, err := Open(Config{Drive: r.o, OffsetBytes: offset, Background: 9, Store: kvstore.Config{PartitionBytes: r.size,
		ScrubBytesPerSec: 1 << 40}})
	if err != nil {
		t.Fatal(err)
	}
	dev := r.dev.(*fault.Device)
	dev.SetRules(fault.Rule{Ops: []ssd.Op{ssd.Read}, Hold: true})
	if err := dev.AwaitHeld(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	closed := make(chan error)
	go func() { closed <- p.Close(testTimeout) }()
	for p.serving() {
		runtime.Gosched()
	}
	dev.SetRules()
	dev.Release()
	if err := <-closed; err != nil {
		t.Error(err)
	}
}

// serving reports that the partition is open and Close was not called.
func (p *Partition) serving() bool {
	p.driver.Lock()
	defer p.driver.Unlock()
	return p.phase == serving
}

// TestTenantsHaveEqualNumbersOfRequestsInTheStore: a tenant with many requests does not keep another one out.
func TestTenantsHaveEqualNumbersOfRequestsInTheStore(t *testing.T) {
	var w waiting
	for i := range 100 {
		w.push(&Request{Tenant: 1, Slot: uint32(i)})
	}
	take := func() *Request {
		r := w.peek()
		w.pop()
		return r
	}
	for range 8 {
		if r := take(); r.Tenant != 1 {
			t.Fatal("nobody else is there")
		}
	}
	for i := range 10 {
		w.push(&Request{Tenant: 2, Slot: uint32(i)})
	}
	for i := range 8 {
		if r := take(); r.Tenant != 2 || r.Slot != uint32(i) {
			t.Errorf("tenant %d, slot %d; want tenant 2 until it has as many, in order", r.Tenant, r.Slot)
		}
	}
	counts := [3]int{}
	for range 4 {
		counts[take().Tenant]++
	}
	if counts[1] != 2 || counts[2] != 2 {
		t.Errorf("%v, want them in turn", counts)
	}
}

func TestServingAllocatesNothing(t *testing.T) {
	if buildtags.Race {
		t.Skip("the race detector lets pools forget at random; the plain build counts")
	}
	r := newRig(t, partitionBytes, nil, inMemory(partitionBytes))
	p := r.mustOpen(true)
	defer r.close(p)
	h := newHost(p, 1, 32, 256)
	n := uint64(0)
	round := func() {
		for range 16 {
			h.add(kvstore.Put, n%5000, 256)
			h.add(kvstore.Get, n*7%5000, 256)
			n++
		}
		p.Submit(&h.batch)
		for len(h.free) < 32 {
			h.wait()
		}
	}
	for range 1000 {
		round()
	}
	if allocs := testing.AllocsPerRun(500, round); allocs > 1 {
		t.Errorf("%v allocations for 32 requests, want 0", allocs)
	}
}

// benchmark keeps 128 requests outstanding at a device in memory.
func benchmark(b *testing.B, op kvstore.Op) {
	const size, objects = 256 << 20, 300_000
	r := newRig(b, size, nil, inMemory(size))
	p := r.mustOpen(true)
	h := newHost(p, 1, 128, 256)
	run := func(op kvstore.Op, n int, key func(i int) uint64) {
		for i := 0; i < n; {
			for i < n && len(h.free) > 0 {
				h.add(op, key(i), 256)
				i++
			}
			p.Submit(&h.batch)
			for _, r := range h.wait() {
				if r.Status != kvstore.OK {
					b.Fatalf("status %d", r.Status)
				}
			}
		}
		for len(h.free) < 128 {
			h.wait()
		}
	}
	run(kvstore.Put, objects, func(i int) uint64 { return uint64(i) })
	rnd := rand.New(rand.NewPCG(1, 1))
	b.ReportAllocs()
	b.ResetTimer()
	run(op, b.N, func(int) uint64 { return rnd.Uint64N(objects) })
	b.StopTimer()
	r.close(p)
}

func BenchmarkGet256(b *testing.B) { benchmark(b, kvstore.Get) }
func BenchmarkPut256(b *testing.B) { benchmark(b, kvstore.Put) }
