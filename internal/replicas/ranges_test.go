package replicas_test

import (
	"fmt"
	"runtime"
	"slices"
	"testing"
	"time"

	"jbofd/internal/cluster"
	"jbofd/internal/cluster/view"
	"jbofd/internal/crrs"
	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
	"jbofd/internal/replicas"
)

// oneNode returns a rig whose node has not been told of a view, and a view that gives it all ranges.
func oneNode(t testing.TB, ranges int) (*rig, *cluster.Map) {
	return setup{ranges: ranges}.oneNode(t)
}

func (s setup) oneNode(t testing.TB) (*rig, *cluster.Map) {
	s.nodes, s.copies, s.frozen = 1, 1, true
	ranges := s.ranges
	g := s.rig(t)
	v := *g.view
	v.Chains = make([]view.Chain, ranges)
	for i := range v.Chains {
		v.Chains[i], v.ChainEpochs[i] = view.Chain{{Since: v.Epoch}}, 1
	}
	g.nodes[0].until.Store(clock() + int64(time.Hour))
	return g, &cluster.Map{View: &v}
}

// TestVersionsOfARangeAreThoseOfItsEpoch: also if the store has greater ones of other ranges. The next ChainHead may
// not know those, and would give lower ones than a write that only the store of this one has.
func TestVersionsOfARangeAreThoseOfItsEpoch(t *testing.T) {
	g, m := oneNode(t, testRanges)
	n, h := g.nodes[0], newHost()
	busy := g.view.RangeOf(position([]byte("busy")))
	other := "other"
	for i := 0; g.view.RangeOf(position([]byte(other))) == busy; i++ {
		other = fmt.Sprint("other", i)
	}
	number := g.view.RangeOf(position([]byte(other)))
	first := *m.View
	first.Chains, first.ChainEpochs = slices.Clone(m.Chains), slices.Clone(m.ChainEpochs)
	first.ChainEpochs[busy], first.Chains[number] = 1000, nil
	second := first
	second.Chains = m.Chains
	for _, v := range []*cluster.Map{{View: &first}, {View: &second}} {
		n.r.SetState(v, v)
		h.put("busy", "value")
		h.want(n, nvme.Success, "")
	}
	great := h.Result
	h.put(other, "value")
	h.want(n, nvme.Success, "")
	if h.Result == 0 || h.Result>>40 > 1 || great>>40 < 1000 {
		t.Errorf("in epoch 1 of a range the version is %d, in epoch 1000 of another one %d", h.Result, great)
	}
}

// inUse is how much memory is in use that the garbage collector looks after.
func inUse() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC() // what finalizers and pools have held
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// TestARangeCostsLittleWhileItIsIdle: before anything is asked of it, and some time after very much was.
func TestARangeCostsLittleWhileItIsIdle(t *testing.T) {
	const (
		ranges = 512
		most   = 16 << 10 // bytes of each
	)
	g, m := oneNode(t, ranges)
	n := g.nodes[0]
	before := inUse()
	n.r.SetState(m, m)
	each := (inUse() - before) / ranges
	t.Logf("%d bytes a range", each)
	if each > most/2 {
		t.Errorf("a range that was never asked for anything costs %d bytes", each)
	}
	// A burst of writes and reads of all ranges; those that find no place are refused.
	counted := make(chan nvme.Status, 1<<20)
	const burst = 64 * ranges
	requests := make([]burstRequest, burst)
	for round := range 2 {
		var b replicas.Batch
		for i := range requests {
			q := &requests[i]
			q.Request = replicas.Request{Kind: replicas.Kind(i / 2 % 2), Op: kvstore.Put, Key: crrsKey(fmt.Sprint(i)),
				Value: make([]byte, 16), Sink: q, Tenant: 3}
			q.ended = counted
			b.Add(&q.Request)
		}
		n.r.Submit(&b)
		done := 0
		for range requests {
			switch st := <-counted; st.Code() {
			case nvme.Success, nvme.KeyDoesNotExist:
				done++
			case nvme.NamespaceNotReady:
			default:
				t.Fatalf("round %d: %v", round, st)
			}
		}
		if done < 4096 {
			t.Errorf("only %d of %d requests found a place", done, burst)
		}
	}
	clear(requests)
	after := int64(0)
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(100 * time.Millisecond) {
		if after = (inUse() - before) / ranges; after <= most || time.Now().After(end) {
			break
		}
	}
	t.Logf("%d bytes a range after a burst", after)
	if after > most {
		t.Errorf("a range that is idle again costs %d bytes", after)
	}
}

// burstRequest tells how it has ended.
type burstRequest struct {
	replicas.Request
	ended chan<- nvme.Status
}

// ReplicaDone implements replicas.Sink.
func (q *burstRequest) ReplicaDone(*replicas.Request) bool {
	q.ended <- q.Status
	return false
}

func (q *burstRequest) Kick() {}

// BenchmarkRanges: a Put and a Get of one of many ranges, which are not to cost more than those of the only one.
func BenchmarkRanges(b *testing.B) {
	for _, ranges := range []int{1, 128, 1024} {
		b.Run(fmt.Sprint(ranges), func(b *testing.B) {
			g, m := setup{ranges: ranges, atOnce: true}.oneNode(b)
			g.nodes[0].r.SetState(m, m)
			h := newHost()
			keys := make([]crrs.Key, 4096)
			for i := range keys {
				keys[i] = crrsKey(fmt.Sprint(i))
			}
			value := make([]byte, 64)
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				h.Request = replicas.Request{Key: keys[i%len(keys)], Op: kvstore.Put, Value: value}
				h.ask(g.nodes[0])
				h.Kind = replicas.Read
				h.ask(g.nodes[0])
				if !h.Status.OK() {
					b.Fatal(h.Status)
				}
			}
		})
	}
}
