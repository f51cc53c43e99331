package kvstore_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"jbofd/internal/kvstore"
	"jbofd/internal/ssd"
	"jbofd/internal/tenant"
)

// groupRig is a rig whose I/Os are completed by hand.
type groupRig struct {
	*rig
	// done has the tags of the replies received.
	done []uint64
	// charged has the bytes written for requests, by the tenant that was charged.
	charged [8]float64
}

func newGroupRig(t *testing.T, cfg kvstore.Config) *groupRig {
	t.Helper()
	cfg.PartitionBytes, cfg.BlockSize, cfg.FUA, cfg.ChunkBytes = 32<<20, 512, true, 256<<10
	r := &groupRig{rig: newRig(t, kvstore.FixedSeed(t), cfg)}
	r.reply = func(p kvstore.Reply) {
		if p.Status != kvstore.OK {
			t.Errorf("request %d: status %d", p.Tag, p.Status)
		}
		r.done = append(r.done, p.Tag)
	}
	return r
}

func (r *groupRig) submit(q kvstore.Request) {
	r.t.Helper()
	if !r.s.Submit(&q) {
		r.t.Fatal("no room for a request")
	}
	r.turn()
}

// complete ends the outstanding I/Os of one kind.
func (r *groupRig) complete(op ssd.Op) {
	for i := 0; i < len(r.dev.Flights); {
		f := &r.dev.Flights[i]
		if f.Op != op {
			i++
			continue
		}
		if io := r.ios[f.Tag]; op == ssd.Write && !io.Background {
			r.charged[io.Tenant] += float64(len(io.Buf))
		}
		q, err := r.dev.End(i)
		r.s.Complete(uint32(q.Tag), err)
	}
	r.turn()
}

// outstanding are the I/Os of one kind.
func (r *groupRig) outstanding(op ssd.Op) (all []kvstore.IO) {
	for i := range r.dev.Flights {
		if f := &r.dev.Flights[i]; f.Op == op {
			all = append(all, r.ios[f.Tag])
		}
	}
	return all
}

func groupKey(i int) []byte { return fmt.Appendf(nil, "%04x", i) }

// TestAPutIsOneReadAndTwoWritesOverlapped: the value is written while the segment is read, and the segment after both.
func TestAPutIsOneReadAndTwoWritesOverlapped(t *testing.T) {
	for name, order := range map[string][2]ssd.Op{"value first": {ssd.Write, ssd.Read},
		"segment first": {ssd.Read, ssd.Write}} {
		t.Run(name, func(t *testing.T) {
			r := newGroupRig(t, kvstore.Config{})
			r.submit(kvstore.Request{Op: kvstore.Put, Key: []byte("key"), Value: make([]byte, 1000)})
			r.settle()
			r.turn()
			r.done = nil
			r.submit(kvstore.Request{Op: kvstore.Put, Key: []byte("key"), Value: make([]byte, 1000), Tag: 7})
			if reads, writes := len(r.outstanding(ssd.Read)), len(r.outstanding(ssd.Write)); reads != 1 || writes != 1 {
				t.Fatalf("%d reads and %d writes at once, want the segment's and the value's", reads, writes)
			}
			r.complete(order[0])
			if left := r.outstanding(order[1]); len(left) != 1 || len(r.dev.Flights) != 1 || len(r.done) != 0 {
				t.Fatalf("%d I/Os outstanding and %d replies when one is done", len(r.dev.Flights), len(r.done))
			}
			r.complete(order[1])
			if len(r.dev.Flights) != 1 || len(r.outstanding(ssd.Write)) != 1 || len(r.done) != 0 {
				t.Fatalf("%d I/Os outstanding and %d replies, want the segment's write", len(r.dev.Flights),
					len(r.done))
			}
			r.complete(ssd.Write)
			if len(r.dev.Flights) != 0 || len(r.done) != 1 || r.done[0] != 7 {
				t.Errorf("%d I/Os outstanding, replies %v", len(r.dev.Flights), r.done)
			}
		})
	}
}

// TestAGroupWaitsAsLongAsConfigured for more records while another one is being written, but no longer than until it is
// full.
func TestAGroupWaitsAsLongAsConfigured(t *testing.T) {
	const delay, full = 300_000, 8 << 10
	r := newGroupRig(t, kvstore.Config{GroupDelayNS: delay, GroupBytes: full})
	keys := 0
	put := func() {
		keys++
		r.submit(kvstore.Request{Op: kvstore.Put, Key: groupKey(keys), Value: make([]byte, 500), Tag: uint64(keys)})
	}
	put() // opens a chunk
	r.settle()
	put()
	if n := len(r.outstanding(ssd.Write)); n != 1 {
		t.Fatalf("%d writes outstanding: a lone value does not wait", n)
	}
	opened := r.now
	put()
	put()
	r.now = opened + delay - 1
	r.turn()
	if n := len(r.outstanding(ssd.Write)); n != 1 || r.act.WakeNS != opened+delay {
		t.Fatalf("%d writes outstanding before the delay is over; the next turn is at %d, want %d", n, r.act.WakeNS,
			opened+delay)
	}
	r.now = opened + delay
	r.turn()
	writes := r.outstanding(ssd.Write)
	if len(writes) != 2 || len(writes[1].Buf) < 2*500 || len(writes[1].Buf) > 3*512 {
		t.Fatalf("%d writes outstanding when the delay is over, want one more with two values", len(writes))
	}
	records := 0
	for ; len(r.outstanding(ssd.Write)) == 2 && records < 100; records++ {
		put()
	}
	writes = r.outstanding(ssd.Write)
	if n := len(writes[2].Buf); n < full*5/8 || n > full+1024 {
		t.Errorf("a full group of %d records has %d bytes, want about %d", records, n, full)
	}
	if r.now != opened+delay {
		t.Error("a full group has waited")
	}
	// If the group before completes first, the records at hand are written at once.
	put()
	before := len(r.outstanding(ssd.Write))
	r.complete(ssd.Write)
	if n := len(r.outstanding(ssd.Write)); before != 3 || n == 0 {
		t.Errorf("%d writes outstanding, then %d when those have ended", before, n)
	}
	r.settle()
}

// TestAGroupIsChargedToItsFirstWriter: a group is charged to the tenant of its first record, so that on average each
// tenant pays for its own records.
func TestAGroupIsChargedToItsFirstWriter(t *testing.T) {
	r := newGroupRig(t, kvstore.Config{})
	put := func(key int, payer tenant.ID) {
		r.submit(kvstore.Request{Op: kvstore.Put, Key: groupKey(key), Value: make([]byte, 400), Tenant: payer,
			Tag: uint64(key)})
	}
	put(0, 1)
	r.settle()
	put(1, 5) // is written alone
	for i, payer := range []tenant.ID{6, 5, 5, 5} {
		put(2+i, payer)
	}
	r.complete(ssd.Write)
	var group kvstore.IO // meanwhile the segment of the previous Put is written
	for _, q := range r.outstanding(ssd.Write) {
		if len(q.Buf) > len(group.Buf) {
			group = q
		}
	}
	if len(group.Buf) < 4*400 || group.Tenant != 6 || group.Background {
		t.Fatalf("the group of tenants 6, 5, 5, 5: %d bytes in the name of %d", len(group.Buf), group.Tenant)
	}
	r.settle()

	rng := rand.New(rand.NewPCG(kvstore.FixedSeed(t), 3))
	records := [3]float64{}
	clear(r.charged[:])
	for i := range 20_000 {
		payer := tenant.ID(1 + min(rng.IntN(4), 1)) // a quarter is tenant 1's
		records[payer]++
		q := kvstore.Request{Op: kvstore.Put, Key: groupKey(i % 3000), Value: make([]byte, 400), Tenant: payer}
		for !r.s.Submit(&q) {
			r.complete(ssd.Read)
			r.complete(ssd.Write)
		}
		if i%16 == 15 {
			r.turn()
			r.complete(ssd.Read)
			r.complete(ssd.Write)
		}
	}
	got, want := r.charged[1]/(r.charged[1]+r.charged[2]), records[1]/(records[1]+records[2])
	if r.charged[0] != 0 || math.Abs(got-want) > 0.15*want {
		t.Errorf("tenant 1 put %.3f of the records and paid for %.3f of what was written for requests, tenant 0 for "+
			"%.0f bytes", want, got, r.charged[0])
	}
}
