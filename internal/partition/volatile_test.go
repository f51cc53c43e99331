package partition

import (
	"bytes"
	"math/rand/v2"
	"testing"
	"time"

	"jbofd/internal/bufpool"
	"jbofd/internal/kvstore"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/fault"
	"jbofd/internal/ssd/mem"
)

// TestALossOfPowerWithoutDurability: a store with durability none on a drive with a volatile cache. After a stop
// everything is there. After a loss of power each key has the value that it had at the stop, or a newer one.
func TestALossOfPowerWithoutDurability(t *testing.T) {
	t.Logf("-seed=%d", *seed)
	const keys, size = 200, 300
	disk, err := mem.Open(mem.Config{Name: "ssd0", SizeBytes: partitionBytes + 2*offset})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := disk.Close(); err != nil {
			t.Error(err)
		}
	})
	rnd := rand.New(rand.NewPCG(*seed, 3))
	var r *rig
	open := func(format bool) *Partition {
		p, err := Open(Config{Drive: r.o, OffsetBytes: offset, Background: 9, Volatile: true, Store: kvstore.Config{
			PartitionBytes: r.size, Format: format, UUID: [16]byte{7}, HashSeed: 99, ChunkBytes: 256 << 10,
		}})
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	var now, stopped [keys]uint64
	want := make([]byte, size)
	check := func(h *host) (behind int) {
		for k := range uint64(keys) {
			q := h.do(kvstore.Get, k, size)
			v := now[k]
			for ; v > stopped[k]; v-- {
				if fill(want, k, v); bytes.Equal(q.Value, want) {
					break
				}
			}
			if fill(want, k, v); q.Status != kvstore.OK || !bytes.Equal(q.Value, want) {
				t.Fatalf("key %d: status %d, want a version from %d to %d", k, q.Status, stopped[k], now[k])
			}
			if v < now[k] {
				behind++
			}
			now[k] = v
		}
		return behind
	}
	put := func(h *host, k uint64) {
		now[k]++
		q := h.add(kvstore.Put, k, size)
		fill(q.Value, k, now[k])
		h.p.Submit(&h.batch)
		if got := h.wait()[0].Status; got != kvstore.OK {
			t.Fatalf("Put of key %d: status %d", k, got)
		}
	}
	behind := 0
	for life := range 6 {
		r = newRig(t, partitionBytes, nil, func(*bufpool.Pool) (ssd.Device, error) {
			return fault.New(disk, fault.Config{Seed: rnd.Uint64(), LoseUnflushed: true})
		})
		p := open(life == 0)
		h := newHost(p, 1, 1, size)
		if life > 0 {
			behind += check(h)
		}
		for k := range uint64(keys) {
			put(h, k)
		}
		r.close(p)
		stopped = now
		p = open(false)
		h = newHost(p, 1, 1, size)
		if n := check(h); n > 0 {
			t.Fatalf("%d keys lost something in a stop", n)
		}
		for range 1000 {
			put(h, rnd.Uint64N(keys))
		}
		if err := r.dev.(*fault.Device).Crash(); err != nil {
			t.Fatal(err)
		}
		_ = p.Close(20 * time.Millisecond) // the device is gone
	}
	if t.Logf("%d keys lost something in losses of power", behind); behind == 0 {
		t.Error("nothing was lost: the device kept all")
	}
}
