package partition

import (
	"bytes"
	"encoding/binary"
	"flag"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"jbofd/internal/bufpool"
	"jbofd/internal/drive"
	"jbofd/internal/kvstore"
	"jbofd/internal/pipeline"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/fault"
	"jbofd/internal/ssd/file"
	"jbofd/internal/ssd/mem"
	"jbofd/internal/tenant"
)

var seed = flag.Uint64("seed", uint64(time.Now().UnixNano()), "seed of the random tests")

// testTimeout is how long a test waits for what must happen.
const testTimeout = 20 * time.Second

// offset is where the partition begins on the device.
const offset = 1 << 20

// rig is a drive on which partitions can be opened.
type rig struct {
	t    testing.TB
	pool *bufpool.Pool
	dev  ssd.Device
	o    *drive.Drive
	size int64
}

func newRig(t testing.TB, size int64, policy pipeline.Policy, device func(*bufpool.Pool) (ssd.Device, error)) *rig {
	t.Helper()
	pool, err := bufpool.New(bufpool.Config{TotalBytes: 16 << 20})
	if err != nil {
		t.Fatal(err)
	}
	dev, err := device(pool)
	if err != nil {
		t.Fatal(err)
	}
	o, err := drive.New(drive.Config{Device: dev, Pool: pool, Policy: policy})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := o.Close(); err != nil {
			t.Error(err)
		}
		if err := dev.Close(); err != nil {
			t.Error(err)
		}
		pool.CloseTest(t)
	})
	return &rig{t: t, pool: pool, dev: dev, o: o, size: size}
}

func inMemory(size int64) func(*bufpool.Pool) (ssd.Device, error) {
	return func(*bufpool.Pool) (ssd.Device, error) {
		return mem.Open(mem.Config{Name: "ssd0", SizeBytes: size + 2*offset})
	}
}

func inFile(t testing.TB, size int64) func(*bufpool.Pool) (ssd.Device, error) {
	return func(p *bufpool.Pool) (ssd.Device, error) {
		return file.Open(file.Config{Name: "ssd0", Path: filepath.Join(t.TempDir(), "ssd"), Create: true,
			SizeBytes: size + 2*offset, Pool: p})
	}
}

func failing(size int64, c fault.Config) func(*bufpool.Pool) (ssd.Device, error) {
	return func(p *bufpool.Pool) (ssd.Device, error) {
		dev, err := inMemory(size)(p)
		if err != nil {
			return nil, err
		}
		return fault.New(dev, c)
	}
}

// open opens the partition; with format it makes a new one.
func (r *rig) open(format bool) (*Partition, error) {
	return Open(Config{Drive: r.o, OffsetBytes: offset, Background: 9, Store: kvstore.Config{
		PartitionBytes: r.size, Format: format, UUID: [16]byte{7}, HashSeed: 99, ChunkBytes: 256 << 10,
	}})
}

func (r *rig) mustOpen(format bool) *Partition {
	r.t.Helper()
	p, err := r.open(format)
	if err != nil {
		r.t.Fatal(err)
	}
	return p
}

// drop ends a partition as a crash does. Nothing is in progress, and it must not begin anything by itself either: its
// next checkpoint would interfere with those of the next Partition on that extent.
func (r *rig) drop(p *Partition) {
	p.driver.Lock()
	p.phase = gone
	p.abandonMemory()
	p.driver.Unlock()
	p.driver.Close()
}

func (r *rig) close(p *Partition) {
	r.t.Helper()
	for range 2 {
		if err := p.Close(testTimeout); err != nil {
			r.t.Fatal(err)
		}
	}
}

// host keeps Requests outstanding, like a connection of one tenant.
type host struct {
	p      *Partition
	tenant tenant.ID
	kicked chan struct{}
	mu     sync.Mutex
	done   []*Request
	taken  []*Request
	free   []*Request
	batch  Batch
}

func newHost(p *Partition, tenant tenant.ID, depth, valueBytes int) *host {
	h := &host{p: p, tenant: tenant, kicked: make(chan struct{}, 1), done: make([]*Request, 0, depth),
		taken: make([]*Request, 0, depth)}
	for i := range depth {
		h.free = append(h.free, &Request{Sink: h, Tenant: tenant, Slot: uint32(i), Value: make([]byte, valueBytes)})
	}
	return h
}

func (h *host) KVDone(r *Request) bool {
	h.mu.Lock()
	h.done = append(h.done, r)
	h.mu.Unlock()
	return true
}

func (h *host) Kick() {
	select {
	case h.kicked <- struct{}{}:
	default:
	}
}

// add fills in a Request for the next batch; Value is n bytes.
func (h *host) add(op kvstore.Op, key uint64, n int) *Request {
	r := h.free[len(h.free)-1]
	h.free = h.free[:len(h.free)-1]
	r.Op, r.Condition, r.KeyLen, r.Value = op, kvstore.Always, 16, r.Value[:n]
	binary.LittleEndian.PutUint64(r.Key[:], key)
	h.batch.Add(r)
	return r
}

// wait returns some Requests that are done, and frees them.
func (h *host) wait() []*Request {
	for {
		h.mu.Lock()
		h.taken, h.done = h.done, h.taken[:0]
		h.mu.Unlock()
		if len(h.taken) > 0 {
			h.free = append(h.free, h.taken...)
			return h.taken
		}
		<-h.kicked
	}
}

// do runs one request alone.
func (h *host) do(op kvstore.Op, key uint64, n int) *Request {
	h.add(op, key, n)
	h.p.Submit(&h.batch)
	return h.wait()[0]
}

// fill fills b with what tells its key and version: SplitMix64 in a register, because the race detector records each
// access to the state of a generator, and each byte.
func fill(b []byte, key, version uint64) {
	x := (key*0xBF58476D1CE4E5B9 ^ version) * 0x94D049BB133111EB
	var w [8]byte
	for ; len(b) > 0; b = b[min(8, len(b)):] {
		x += 0x9E3779B97F4A7C15
		z := (x ^ x>>30) * 0xBF58476D1CE4E5B9
		z = (z ^ z>>27) * 0x94D049BB133111EB
		if z ^= z >> 31; len(b) >= 8 {
			binary.LittleEndian.PutUint64(b, z)
			continue
		}
		binary.LittleEndian.PutUint64(w[:], z)
		copy(b, w[:])
	}
}

// history does n random operations on the keys first to first+keys-1, and compares every reply with a map.
func (h *host) history(rnd *rand.Rand, model map[uint64][2]uint64, first, keys uint64, n, maxValue int) error {
	type pending struct {
		key, version uint64
		n            int
	}
	busy := map[uint64]bool{}
	out := map[*Request]pending{}
	check := func(r *Request) error {
		w := out[r]
		delete(out, r)
		delete(busy, w.key)
		was, exists := model[w.key]
		switch {
		case r.Op == kvstore.Get && !exists || r.Op == kvstore.Delete && !exists || r.Op == kvstore.Exist && !exists:
			if r.Status != kvstore.NotFound {
				return fmt.Errorf("key %d: op %d says %d of a key that is not there", w.key, r.Op, r.Status)
			}
			return nil
		case r.Status != kvstore.OK:
			return fmt.Errorf("key %d: op %d says %d", w.key, r.Op, r.Status)
		}
		switch r.Op {
		case kvstore.Put:
			model[w.key] = [2]uint64{w.version, uint64(w.n)}
		case kvstore.Delete:
			delete(model, w.key)
		case kvstore.Get:
			want := make([]byte, was[1])
			fill(want, w.key, was[0])
			if r.ValueLen != len(want) ||
				!bytes.Equal(r.Value[:min(len(r.Value), len(want))], want[:min(len(r.Value), len(want))]) {
				return fmt.Errorf("key %d: another value than was put, %d bytes, want %d", w.key, r.ValueLen, len(want))
			}
		}
		return nil
	}
	for i := 0; i < n || len(out) > 0; {
		for i < n && len(h.free) > 0 {
			key := first + rnd.Uint64N(keys)
			if busy[key] {
				break
			}
			busy[key] = true
			i++
			var r *Request
			size := rnd.IntN(maxValue + 1)
			switch rnd.IntN(10) {
			case 0, 1, 2, 3:
				r = h.add(kvstore.Get, key, maxValue)
			case 4:
				r = h.add(kvstore.Delete, key, 0)
			case 5:
				r = h.add(kvstore.Exist, key, 0)
			default:
				r = h.add(kvstore.Put, key, size)
				fill(r.Value, key, uint64(i))
			}
			out[r] = pending{key, uint64(i), size}
		}
		h.p.Submit(&h.batch)
		for _, r := range h.wait() {
			if err := check(r); err != nil {
				return err
			}
		}
	}
	return nil
}
