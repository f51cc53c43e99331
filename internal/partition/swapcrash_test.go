package partition

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"jbofd/internal/bufpool"
	"jbofd/internal/kvstore"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/fault"
	"jbofd/internal/ssd/mem"
)

// version is a possible content of a key: the value of that version, or nothing.
type version struct {
	number uint64 // 0: the key does not exist
	size   int
}

// fate is what is known of a key: the last acknowledged version, and those requested since and not refused.
type fate struct {
	sure  version
	maybe []version
	busy  bool
}

// TestAPowerLossWhileKeysAreSwapped: a store and a swap area on two drives with volatile caches, both of which lose the
// power during their work, one a little earlier than the other. Sometimes their writes have failed before, too.
// Acknowledged writes are there afterwards, and nothing else.
func TestAPowerLossWhileKeysAreSwapped(t *testing.T) {
	t.Logf("-seed=%d", *seed)
	const keys, lives = 150, 15
	var disks [2]ssd.Device
	for i, size := range []int64{partitionBytes, areaBytes} {
		dev, err := mem.Open(mem.Config{Name: fmt.Sprintf("ssd%d", i), SizeBytes: size + 2*offset})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := dev.Close(); err != nil {
				t.Error(err)
			}
		})
		disks[i] = dev
	}
	rnd := rand.New(rand.NewPCG(*seed, 5))
	fates := make([]fate, keys)
	number, swapped, found, lost := uint64(0), int64(0), int64(0), 0
	for life := range lives {
		wrap := func(i int) func(*bufpool.Pool) (ssd.Device, error) {
			return func(*bufpool.Pool) (ssd.Device, error) {
				return fault.New(disks[i], fault.Config{Seed: rnd.Uint64(), LoseUnflushed: true,
					Delay: 300 * time.Microsecond, DelayProbability: 0.3})
			}
		}
		policy := eager
		if life%2 == 0 {
			policy.CalmNS = int64(time.Hour) // swapped keys stay swapped
		}
		b := &box{t: t, policy: policy, source: newRig(t, partitionBytes, nil, wrap(0)),
			away: newRig(t, areaBytes, nil, wrap(1))}
		b.open(life == 0)
		found += b.p.Stats().Swap.Keys
		h := newHost(b.p, 1, 32, 3000)
		for key := range fates { // the content found is the content from now on
			f := &fates[key]
			r := h.do(kvstore.Get, uint64(key), 3000)
			k := slices.IndexFunc(append([]version{f.sure}, f.maybe...),
				func(v version) bool { return is(r, uint64(key), v) })
			if k < 0 {
				t.Fatalf("life %d, key %d: status %d, %d bytes; want %+v or one of %+v", life, key, r.Status,
					r.ValueLen, f.sure, f.maybe)
			}
			if k > 0 {
				*f = fate{sure: f.maybe[k-1]}
			}
			lost += len(f.maybe)
			*f = fate{sure: f.sure}
		}
		failing := life%3 == 2
		for _, r := range []*rig{b.source, b.away} {
			if failing {
				r.dev.(*fault.Device).SetRules(fault.Rule{Ops: []ssd.Op{ssd.Write}, Probability: 0.01,
					Err: ssd.ErrMedia})
			}
		}
		out := map[*Request]version{}
		crashAt := 200 + rnd.IntN(1500)
		for done, crashed := 0, false; !crashed || len(out) > 0; {
			for !crashed && len(h.free) > 0 {
				key := rnd.Uint64N(keys)
				f := &fates[key]
				if f.busy {
					break
				}
				f.busy = true
				v := version{}
				var r *Request
				if rnd.IntN(6) == 0 {
					r = h.add(kvstore.Delete, key, 0)
				} else {
					number++
					v = version{number, rnd.IntN(3000)}
					r = h.add(kvstore.Put, key, v.size)
					fill(r.Value, key, v.number)
				}
				out[r] = v
			}
			b.p.Submit(&h.batch)
			for _, r := range h.wait() {
				f := &fates[keyOf(r)]
				f.busy = false
				switch {
				case r.Status == kvstore.OK || r.Op == kvstore.Delete && r.Status == kvstore.NotFound:
					*f = fate{sure: out[r]}
				case !crashed && !failing:
					t.Fatalf("life %d: op %d says %d", life, r.Op, r.Status)
				default:
					f.maybe = append(f.maybe, out[r])
				}
				delete(out, r)
				done++
			}
			if !crashed && done > crashAt {
				crashed = true
				swapped += b.p.Stats().Swap.Swapped
				first, second := b.source, b.away
				if rnd.IntN(2) == 0 {
					first, second = second, first
				}
				for _, r := range []*rig{first, second} {
					if err := r.dev.(*fault.Device).Crash(); err != nil {
						t.Fatal(err)
					}
				}
			}
		}
		_ = b.p.Close(20 * time.Millisecond) // the device is gone
		_ = b.area.Close(20 * time.Millisecond)
	}
	t.Logf("%d writes swapped, %d keys found in the area, %d writes without an answer did not happen", swapped, found,
		lost)
	if swapped < 100 || found < 100 || lost == 0 {
		t.Error("not much has happened")
	}
}

func keyOf(r *Request) (key uint64) {
	for i := range 8 {
		key |= uint64(r.Key[i]) << (8 * i)
	}
	return key
}

// is reports whether a Get has found that version of a key.
func is(r *Request, key uint64, v version) bool {
	if v.number == 0 {
		return r.Status == kvstore.NotFound
	}
	want := make([]byte, v.size)
	fill(want, key, v.number)
	return r.Status == kvstore.OK && r.ValueLen == v.size && slices.Equal(want, r.Value[:v.size])
}
