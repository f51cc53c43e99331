package partition

import (
	"errors"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"jbofd/internal/bufpool"
	"jbofd/internal/buildtags"
	"jbofd/internal/drive"
	"jbofd/internal/kvstore"
	"jbofd/internal/kvstore/swap"
	"jbofd/internal/pipeline"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/fault"
	"jbofd/internal/ssd/model"
	"jbofd/internal/units"
)

const areaBytes = 8 << 20

// eager is a policy that swaps after the first few queued requests.
var eager = swap.Policy{BeginGap: 8, EndGap: 4, CalmNS: 1e6, UnlistNS: 1e9}

// box is two SSDs: a partition on the first, a swap area on the second.
type box struct {
	t            testing.TB
	source, away *rig
	area         *Area
	p            *Partition
	policy       swap.Policy
}

func newBox(t testing.TB, policy swap.Policy, source, away func(*bufpool.Pool) (ssd.Device, error)) *box {
	b := &box{t: t, policy: policy, source: newRig(t, partitionBytes, nil, source),
		away: newRig(t, areaBytes, nil, away)}
	b.open(true)
	return b
}

func (b *box) openArea(format bool) {
	b.t.Helper()
	var err error
	if b.area, err = OpenArea(AreaConfig{Drive: b.away.o, OffsetBytes: offset, LenBytes: areaBytes, Background: 9,
		Format: format, UUID: [16]byte{5}, Salt: 77}); err != nil {
		b.t.Fatal(err)
	}
}

func (b *box) config(format bool) Config {
	return Config{Drive: b.source.o, OffsetBytes: offset, Background: 9,
		Swap: SwapConfig{Areas: []*Area{b.area}, Policy: b.policy}, Store: kvstore.Config{
			PartitionBytes: b.source.size, Format: format, UUID: [16]byte{7}, HashSeed: 99, ChunkBytes: 256 << 10,
		}}
}

func (b *box) open(format bool) {
	b.t.Helper()
	b.openArea(format)
	var err error
	if b.p, err = Open(b.config(format)); err != nil {
		b.t.Fatal(err)
	}
}

func (b *box) close() {
	b.t.Helper()
	b.source.close(b.p)
	for range 2 {
		if err := b.area.Close(testTimeout); err != nil {
			b.t.Fatal(err)
		}
	}
}

// all gets every key of a model.
func (b *box) all(model map[uint64][2]uint64, keys uint64) {
	b.t.Helper()
	h := newHost(b.p, 1, 1, 4000)
	want := make([]byte, 4000)
	for key := range keys {
		v, exists := model[key]
		r := h.do(kvstore.Get, key, 4000)
		switch {
		case !exists && r.Status == kvstore.NotFound:
		case !exists || r.Status != kvstore.OK || r.ValueLen != int(v[1]):
			b.t.Fatalf("key %d: status %d, %d bytes, want %v %v", key, r.Status, r.ValueLen, exists, v)
		default:
			fill(want[:v[1]], key, v[0])
			if !slices.Equal(want[:v[1]], r.Value[:v[1]]) {
				b.t.Fatalf("key %d: another value than was put", key)
			}
		}
	}
}

// TestSwappedKeysAreReadAndReturned: with devices of all kinds, over restarts.
func TestSwappedKeysAreReadAndReturned(t *testing.T) {
	t.Logf("-seed=%d", *seed)
	for name, device := range map[string]func(*bufpool.Pool) (ssd.Device, error){
		"memory": inMemory(partitionBytes), "file": inFile(t, partitionBytes),
	} {
		t.Run(name, func(t *testing.T) {
			b := newBox(t, eager, device, inMemory(areaBytes))
			m := map[uint64][2]uint64{}
			rnd := rand.New(rand.NewPCG(*seed, 3))
			swapped := int64(0)
			for round := range 3 {
				h := newHost(b.p, 1, 24, 4000)
				for range 30 {
					if err := h.history(rnd, m, 0, 300, 200, 2000); err != nil {
						t.Fatalf("round %d: %v", round, err)
					}
				}
				b.all(m, 300)
				st := b.p.Stats().Swap
				t.Logf("round %d: %+v, area %+v", round, st, b.area.Stats())
				swapped += st.Swapped
				b.close()
				b.open(false)
				if n := b.p.Stats().Swap.Keys; n != 0 {
					t.Errorf("%d keys are out after a stop in order", n)
				}
				b.all(m, 300)
			}
			if swapped == 0 {
				t.Error("nothing was swapped")
			}
			b.close()
		})
	}
}

// copyOf makes a copy of a device in memory.
func copyOf(t testing.TB, r *rig) func(*bufpool.Pool) (ssd.Device, error) {
	return func(p *bufpool.Pool) (ssd.Device, error) {
		dev, err := inMemory(r.size)(p)
		if err != nil {
			return nil, err
		}
		o, err := drive.New(drive.Config{Device: dev, Pool: r.pool})
		if err != nil {
			return nil, err
		}
		defer func() {
			if err := o.Close(); err != nil {
				t.Error(err)
			}
		}()
		buf := make([]byte, 1<<20)
		for at := int64(0); at < dev.Info().SizeBytes; at += int64(len(buf)) {
			if err := doAndWait(r.o, 1, pipeline.Read, 0, units.DriveOffset(at), buf); err != nil {
				return nil, err
			}
			if err := doAndWait(o, 1, pipeline.Write, 0, units.DriveOffset(at), buf); err != nil {
				return nil, err
			}
		}
		return dev, nil
	}
}

// TestSwappedKeysSurviveALossOfPower, and the source does not open without the area that has them.
func TestSwappedKeysSurviveALossOfPower(t *testing.T) {
	t.Logf("-seed=%d", *seed)
	stay := eager
	stay.CalmNS = int64(time.Hour)
	b := newBox(t, stay, inMemory(partitionBytes), inMemory(areaBytes))
	m := map[uint64][2]uint64{}
	rnd := rand.New(rand.NewPCG(*seed, 3))
	h := newHost(b.p, 1, 24, 4000)
	for range 30 {
		if err := h.history(rnd, m, 0, 300, 200, 2000); err != nil {
			t.Fatal(err)
		}
	}
	out := b.p.Stats().Swap.Keys
	if out == 0 {
		t.Fatal("no key is out")
	}
	// Both are copied at one moment: neither the partition nor the area begins a write meanwhile.
	b.p.driver.Lock()
	b.area.driver.Lock()
	c := &box{t: t, policy: stay, source: newRig(t, partitionBytes, nil, copyOf(t, b.source)),
		away: newRig(t, areaBytes, nil, copyOf(t, b.away))}
	b.area.driver.Unlock()
	b.p.driver.Unlock()
	c.openArea(false)
	cfg := c.config(false)
	cfg.Swap.Areas = nil
	if _, err := Open(cfg); !errors.Is(err, swap.ErrManifest) {
		t.Errorf("without the area: %v", err)
	}
	var err error
	if c.p, err = Open(c.config(false)); err != nil {
		t.Fatal(err)
	}
	if n := c.p.Stats().Swap.Keys; n != out {
		t.Errorf("%d keys are out, want %d", n, out)
	}
	c.all(m, 300)
	c.close() // they are returned
	if c.p, err = Open(cfg); err != nil {
		t.Fatalf("without the area, when no keys are swapped: %v", err)
	}
	c.all(m, 300)
	c.source.close(c.p)
	b.close()
}

// TestAFailedAreaIsNotAnsweredForFromTheSource: Gets of its keys fail until it works again; other keys are served.
func TestAFailedAreaIsNotAnsweredForFromTheSource(t *testing.T) {
	stay := eager
	stay.CalmNS = int64(time.Hour)
	b := newBox(t, stay, inMemory(partitionBytes), failing(areaBytes, fault.Config{Seed: 1}))
	h := newHost(b.p, 1, 64, 100)
	put := func(version uint64) (ok, failed int) {
		for key := range uint64(32) {
			r := h.add(kvstore.Put, key, 100)
			fill(r.Value, key, version)
		}
		b.p.Submit(&h.batch)
		for len(h.free) < 64 {
			for _, r := range h.wait() {
				switch r.Status {
				case kvstore.OK:
					ok++
				case kvstore.DeviceError:
					failed++
				default:
					t.Fatalf("status %d", r.Status)
				}
			}
		}
		return ok, failed
	}
	for range 20 {
		if ok, _ := put(1); ok != 32 {
			t.Fatal("a PUT fails without a reason")
		}
	}
	if n := b.p.Stats().Swap.Keys; n != 32 {
		t.Fatalf("%d keys are out, want 32", n)
	}
	dev := b.away.dev.(*fault.Device)
	dev.SetRules(fault.Rule{Err: ssd.ErrMedia})
	for key := range uint64(32) {
		if r := h.do(kvstore.Get, key, 100); r.Status != kvstore.DeviceError {
			t.Fatalf("a Get from an area that fails: status %d", r.Status)
		}
	}
	if _, failed := put(2); failed != 32 {
		t.Fatalf("%d of 32 Puts have failed", failed)
	}
	if r := h.do(kvstore.Put, 99, 100); r.Status != kvstore.OK {
		t.Errorf("another key: status %d", r.Status)
	}
	dev.SetRules()
	deadline := time.Now().Add(testTimeout)
	for b.area.failing.Load() {
		if time.Now().After(deadline) {
			t.Fatal("the area does not recover")
		}
		h.do(kvstore.Put, 99, 100)
	}
	if ok, _ := put(3); ok != 32 {
		t.Errorf("%d of 32 Puts succeed when all is well again", ok)
	}
	want := make([]byte, 100)
	for key := range uint64(32) {
		r := h.do(kvstore.Get, key, 100)
		fill(want, key, 3)
		if r.Status != kvstore.OK || !slices.Equal(want, r.Value[:100]) {
			t.Fatalf("key %d: status %d, not the last value", key, r.Status)
		}
	}
	b.close()
}

// TestSwappingAllocatesNothing, neither while keys are swapped nor while they are not.
func TestSwappingAllocatesNothing(t *testing.T) {
	if buildtags.Race {
		t.Skip("the race detector lets pools forget at random; the plain build counts")
	}
	for _, p := range []swap.Policy{{}, eager} {
		b := newBox(t, p, inMemory(partitionBytes), inMemory(areaBytes))
		h := newHost(b.p, 1, 32, 256)
		n := uint64(0)
		round := func() {
			for range 16 {
				h.add(kvstore.Put, n%2000, 256)
				h.add(kvstore.Get, n*7%2000, 256)
				n++
			}
			b.p.Submit(&h.batch)
			for len(h.free) < 32 {
				h.wait()
			}
		}
		for range 2000 {
			round()
		}
		if allocs := testing.AllocsPerRun(300, round); allocs > 1 {
			t.Errorf("%v allocations for 32 requests, want 0", allocs)
		}
		t.Logf("%+v", b.p.Stats().Swap)
		b.close()
	}
}

var figures = flag.Bool("figures", false, "measure what swapping gives")

// TestSwappingFigures: Puts of zipfian keys to one of two emulated drives, with and without swapping. Paper: 15.4 %
// more at 256 B, 17.2 % at 1 KB.
func TestSwappingFigures(t *testing.T) {
	if !*figures {
		t.Skip("-figures is not set")
	}
	for _, size := range []int{256, 1024} {
		for _, with := range []bool{false, true} {
			t.Run(fmt.Sprintf("%d/%v", size, with), func(t *testing.T) {
				measure(t, size, with)
			})
		}
	}
}

func emulated(size int64) func(*bufpool.Pool) (ssd.Device, error) {
	return func(*bufpool.Pool) (ssd.Device, error) {
		return model.Open(model.Config{Name: "ssd0", SizeBytes: size + 2*offset, Slowdown: 20, Seed: 1})
	}
}

func measure(t *testing.T, size int, with bool) {
	const keys, depth, bytes, swapBytes = 100_000, 256, 512 << 20, 256 << 20
	b := &box{t: t, source: newRig(t, bytes, nil, emulated(bytes)),
		away: newRig(t, swapBytes, nil, emulated(swapBytes))}
	var err error
	if b.area, err = OpenArea(AreaConfig{Drive: b.away.o, OffsetBytes: offset, LenBytes: swapBytes, Background: 9,
		Format: true, UUID: [16]byte{5}, Salt: 77}); err != nil {
		t.Fatal(err)
	}
	cfg := b.config(true)
	cfg.Store.ChunkBytes = 0
	if !with {
		cfg.Swap.Areas = nil
	}
	if b.p, err = Open(cfg); err != nil {
		t.Fatal(err)
	}
	h := newHost(b.p, 1, depth, size)
	began := map[*Request]time.Time{}
	var lat []time.Duration
	run := func(until func() bool, key func() uint64) (n int) {
		for !until() || len(h.free) < depth {
			for !until() && len(h.free) > 0 {
				r := h.add(kvstore.Put, key(), size)
				began[r] = time.Now()
			}
			b.p.Submit(&h.batch)
			for _, r := range h.wait() {
				if r.Status != kvstore.OK {
					t.Fatalf("status %d", r.Status)
				}
				lat = append(lat, time.Since(began[r]))
				n++
			}
		}
		return n
	}
	next := uint64(0)
	run(func() bool { return next >= keys }, func() uint64 { next++; return next - 1 })
	for deadline := time.Now().Add(testTimeout); !b.p.Idle() && time.Now().Before(deadline); {
		b.p.Stats()
	}
	zipf := newZipf(keys, 0.99)
	lat = lat[:0]
	const lasts = 5 * time.Second
	start := time.Now()
	n := run(func() bool { return time.Since(start) > lasts }, zipf)
	took := time.Since(start)
	slices.Sort(lat)
	sum := time.Duration(0)
	for _, l := range lat {
		sum += l
	}
	t.Logf("%d B, swapping %v: %.0f PUT/s, average %v, p99.9 %v; %+v", size, with, float64(n)/took.Seconds(),
		(sum / time.Duration(len(lat))).Round(time.Microsecond), lat[len(lat)*999/1000].Round(time.Microsecond),
		b.p.Stats().Swap)
	out := b.p.Stats().Swap.Keys
	start = time.Now()
	b.source.close(b.p)
	t.Logf("stopped after %v with %d keys to be moved back", time.Since(start).Round(time.Millisecond), out)
	if err := b.area.Close(testTimeout); err != nil {
		t.Error(err)
	}
}

// newZipf returns scrambled Zipfian keys, as in YCSB.
func newZipf(n uint64, theta float64) func() uint64 {
	weights := make([]float64, n)
	total := 0.0
	for i := range weights {
		total += 1 / math.Pow(float64(i+1), theta)
		weights[i] = total
	}
	rnd := rand.New(rand.NewPCG(1, 2))
	return func() uint64 {
		i, _ := slices.BinarySearch(weights, rnd.Float64()*total)
		return uint64(i) * 0x9E3779B97F4A7C15 % n
	}
}

// TestKeysThatCannotReturnBeforeTheTimeoutStay: closing ends after its timeout, and the next opening finds the rest.
// The area may be retiring by then: it returns its keys and takes no new ones.
func TestKeysThatCannotReturnBeforeTheTimeoutStay(t *testing.T) {
	slow := fault.Config{Seed: 1, Delay: 30 * time.Millisecond, DelayProbability: 1}
	stay := eager
	stay.CalmNS = int64(time.Hour)
	b := newBox(t, stay, failing(partitionBytes, fault.Config{Seed: 1}), inMemory(areaBytes))
	h := newHost(b.p, 1, 128, 100)
	model := map[uint64][2]uint64{}
	put := func(version uint64) {
		for key := range uint64(2000) {
			r := h.add(kvstore.Put, key, 100)
			fill(r.Value, key, version)
			model[key] = [2]uint64{version, 100}
			if len(h.free) == 0 || key == 1999 {
				b.p.Submit(&h.batch)
				for len(h.free) < 128 {
					for _, r := range h.wait() {
						if r.Status != kvstore.OK {
							t.Fatalf("status %d", r.Status)
						}
					}
				}
			}
		}
	}
	for version := uint64(1); b.p.Stats().Swap.Keys < 1500; version++ {
		put(version)
	}
	out := b.p.Stats().Swap.Keys
	b.source.dev.(*fault.Device).SetRules(fault.Rule{Delay: slow.Delay})
	h.add(kvstore.List, 0, 100) // which waits until all keys have been returned
	// which waits for its own key, the last one to return
	h.add(kvstore.Put, 1999, 100).Value = make([]byte, swap.MaxValueBytes+1)
	b.p.Submit(&h.batch)
	const limit = 700 * time.Millisecond
	began := time.Now()
	err := b.p.Close(limit)
	for len(h.free) < 128 {
		for _, r := range h.wait() {
			if r.Status != kvstore.DeviceError {
				t.Errorf("op %d, which waited for keys to be moved back, says %d", r.Op, r.Status)
			}
		}
	}
	if !errors.Is(err, ErrKeysSwapped) {
		t.Fatalf("closed with %v; %d keys were out", err, out)
	}
	if took := time.Since(began); took > testTimeout/2 {
		t.Errorf("closing with a patience of %v took %v", limit, took)
	}
	if err := b.area.Close(testTimeout); err != nil {
		t.Fatal(err)
	}
	// Keys that return while these lines look at them do so slowly, also if the machine is busy with something else.
	b.source.dev.(*fault.Device).SetRules(fault.Rule{Ops: []ssd.Op{ssd.Write}, Delay: 200 * time.Millisecond})
	if b.area, err = OpenArea(AreaConfig{Drive: b.away.o, OffsetBytes: offset, LenBytes: areaBytes, Background: 9,
		Retiring: true}); err != nil {
		t.Fatal(err)
	}
	b.policy = eager
	if b.p, err = Open(b.config(false)); err != nil {
		t.Fatal(err)
	}
	st := b.p.Stats().Swap
	uses := b.p.Uses()
	left := b.p.Stats().Swap.Keys
	if left == 0 || st.Keys > out || len(uses) != 1 || int64(uses[0].Keys) > st.Keys || int64(uses[0].Keys) < left ||
		!uses[0].Listed || uses[0].Area != b.area.UUID() {
		t.Errorf("%d keys were out, then %d, %+v, %d", out, st.Keys, uses, left)
	}
	b.source.dev.(*fault.Device).SetRules()
	b.all(model, 2000)
	h = newHost(b.p, 1, 128, 100)
	for deadline := time.Now().Add(testTimeout); b.p.Stats().Swap.Keys > 0 && time.Now().Before(deadline); {
		h.do(kvstore.Get, 5000, 100)
	}
	put(99) // new keys do not go there
	if st := b.p.Stats().Swap; st.Keys != 0 || st.Swapped != 0 {
		t.Errorf("a retiring area took keys: %+v", st)
	}
	b.all(model, 2000)
	b.close()
}

// TestACapIsNoReasonToSwap: requests that wait for their tenant's cap are no sign of load. They neither cause swapping
// nor prevent the return of keys.
func TestACapIsNoReasonToSwap(t *testing.T) {
	b := newBox(t, swap.Policy{CalmNS: 50e6}, inMemory(partitionBytes), inMemory(areaBytes))
	const capped, hosts, depth = 3, 10, 12
	b.source.o.SetTenant(capped, pipeline.Settings{Weight: 1, Caps: pipeline.Caps{RWIOsPerSec: 1000}})
	other := newHost(b.p, 1, 32, 100)
	for key := range uint64(3000) {
		if r := other.do(kvstore.Put, key, 100); r.Status != kvstore.OK {
			t.Fatalf("status %d", r.Status)
		}
	}
	var all []*host
	for range hosts {
		all = append(all, newHost(b.p, capped, depth, 100))
	}
	key := uint64(0)
	round := func() { // all hosts have as much outstanding as allowed
		for _, h := range all {
			for len(h.free) > 0 {
				op := kvstore.Get // most, as each costs two reads
				if key++; key%4 == 0 {
					op = kvstore.Put
				}
				h.add(op, key*7%3000, 100)
			}
			b.p.Submit(&h.batch)
		}
		for _, h := range all {
			h.wait()
		}
	}
	for key < 400 {
		round()
	}
	if st := b.p.Stats().Swap; st.Swapped != 0 {
		t.Errorf("with a capped tenant only: %+v", st)
	}
	rest := func() {
		for _, h := range all {
			for len(h.free) < depth {
				h.wait()
			}
		}
	}
	rest()
	// Another tenant has caused swapping. Then only the capped tenant is active, and always has requests waiting.
	other = newHost(b.p, 1, 128, 100)
	deadline := time.Now().Add(testTimeout)
	for b.p.Stats().Swap.Keys == 0 {
		if time.Now().After(deadline) {
			t.Fatal("no key is sent away")
		}
		for len(other.free) > 0 {
			other.add(kvstore.Put, 5000+uint64(len(other.free)), 100)
		}
		b.p.Submit(&other.batch)
		for len(other.free) < 128 {
			other.wait()
		}
	}
	for ; b.p.Stats().Swap.Keys > 0; round() {
		if time.Now().After(deadline) {
			t.Fatalf("keys are not moved back beside a capped tenant: %+v", b.p.Stats().Swap)
		}
	}
	rest()
	b.close()
}
