package pipeline

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"jbofd/internal/tenant"
)

// modelBucket is a token bucket in billionths of a token.
type modelBucket struct{ rate, capacity, nano, at int64 }

func (b *modelBucket) set(now, rate int64) {
	b.refill(now)
	if b.rate == 0 {
		b.nano, b.at = math.MaxInt64, now
	} else {
		b.nano -= (b.nano%sec + sec) % sec // whole tokens
	}
	b.rate, b.capacity = rate, max(rate/burstsPerSec, 1)*sec
	b.nano = min(b.nano, b.capacity)
}

func (b *modelBucket) refill(now int64) {
	if b.rate > 0 {
		b.nano = min(b.nano+(now-b.at)*b.rate, b.capacity)
	}
	b.at = now
}

func (b *modelBucket) readyAt(now int64) int64 {
	b.refill(now)
	if b.rate == 0 || b.nano >= sec {
		return now
	}
	return now + (sec-b.nano+b.rate-1)/b.rate
}

// TestPipelineAgainstASlowModel compares what is dispatched, counted and asked for
// with a model that has lists and recomputes all of it every time.
func TestPipelineAgainstASlowModel(t *testing.T) {
	t.Logf("-seed %d", *seed)
	rng := rand.New(rand.NewPCG(*seed, 2))
	type modelTenant struct {
		caps     [buckets]modelBucket
		held     []IO
		released []Tag
	}
	for range 60 {
		p := New(NewFIFO(1 << 20))
		p.releaseNS = 1 // the model has no grid of release times
		const tenants = 5
		model := make([]modelTenant, tenants)
		now := int64(0)
		var device, freed []Tag
		next := Tag(0)
		set := func(i int) {
			var c Caps
			for _, f := range []*int64{&c.RWIOsPerSec, &c.RWBytesPerSec, &c.ReadBytesPerSec, &c.WriteBytesPerSec} {
				if rng.IntN(2) == 0 {
					*f = 1 + rng.Int64N(1000)
				}
			}
			for k, rate := range []int64{c.RWIOsPerSec * 1000, c.RWBytesPerSec, c.ReadBytesPerSec, c.WriteBytesPerSec} {
				model[i].caps[k].set(now, rate)
			}
			p.SetTenant(now, tenant.ID(i), Settings{Weight: 1, Caps: c})
		}
		for i := range model {
			set(i)
		}
		readyAt := func(m *modelTenant, op Op) int64 {
			at := m.caps[iosBucket].readyAt(now)
			switch op {
			case Read:
				at = max(at, m.caps[bytesBucket].readyAt(now), m.caps[readBucket].readyAt(now))
			case Write:
				at = max(at, m.caps[bytesBucket].readyAt(now), m.caps[writeBucket].readyAt(now))
			}
			return at
		}
		// release admits the I/Os that the caps allow now, oldest first.
		release := func(m *modelTenant) {
		again:
			for i, io := range m.held {
				if readyAt(m, io.Op) > now {
					continue
				}
				m.caps[iosBucket].nano -= 1000 * sec
				if io.Op != Flush {
					m.caps[bytesBucket].nano -= io.LenBytes * sec
					if io.Op == Read {
						m.caps[readBucket].nano -= io.LenBytes * sec
					} else {
						m.caps[writeBucket].nano -= io.LenBytes * sec
					}
				}
				m.held = slices.Delete(m.held, i, i+1)
				m.released = append(m.released, io.Tag)
				goto again
			}
		}
		for range 400 {
			switch k := rng.IntN(10); {
			case k < 4:
				tag := next
				if n := len(freed); n > 0 {
					tag, freed = freed[n-1], freed[:n-1]
				} else {
					next++
				}
				io := IO{Tag: tag, Tenant: tenant.ID(rng.IntN(tenants)), Op: []Op{Read, Write, Flush}[rng.IntN(3)],
					LenBytes: rng.Int64N(300)}
				m := &model[io.Tenant]
				m.held = append(m.held, io)
				p.Enqueue(now, io)
				if len(m.held) == 1 { // an I/O that arrives when none is held need not wait for Dispatch
					release(m)
				}
			case k < 5 && len(device) > 0:
				i := rng.IntN(len(device))
				p.Complete(now, device[i], Result{})
				freed = append(freed, device[i])
				device = slices.Delete(device, i, i+1)
			case k < 6:
				i := rng.IntN(tenants)
				set(i)
				if len(model[i].held) > 0 {
					for j := range model { // Pipeline looks at all who are due by then
						release(&model[j])
					}
				}
			case k < 7:
				m := &model[rng.IntN(tenants)]
				if len(m.held) > 0 {
					i := rng.IntN(len(m.held))
					if !p.Cancel(now, m.held[i].Tag) {
						t.Fatal("a held I/O cannot be cancelled")
					}
					freed = append(freed, m.held[i].Tag)
					m.held = slices.Delete(m.held, i, i+1)
				}
			default:
				got := p.Dispatch(now, nil)
				var want []Tag
				for i := range model {
					release(&model[i])
					want = append(want, model[i].released...)
					model[i].released = model[i].released[:0]
				}
				slices.SortStableFunc(got,
					func(a, b Tag) int { return int(p.ios[a].io.Tenant) - int(p.ios[b].io.Tenant) })
				if !slices.Equal(got, want) {
					t.Fatalf("at %d: dispatched %v, want %v", now, got, want)
				}
				device = append(device, got...)
				at, ok := p.NextWake(now)
				wantAt := int64(math.MaxInt64)
				for i := range model {
					for _, io := range model[i].held {
						wantAt = min(wantAt, readyAt(&model[i], io.Op))
					}
				}
				if ok != (wantAt < math.MaxInt64) || ok && at != wantAt {
					t.Fatalf("at %d: next wake-up at %d (%v), want %d", now, at, ok, wantAt)
				}
				now += rng.Int64N(20 * msec)
				if ok && rng.IntN(2) == 0 {
					now = max(now, at)
				}
			}
			queued := 0
			for i := range model {
				queued += len(model[i].held) + len(model[i].released)
			}
			if p.Queued() != queued || p.Inflight() != len(device) {
				t.Fatalf("%d queued and %d in flight, want %d and %d", p.Queued(), p.Inflight(), queued, len(device))
			}
		}
	}
}
