package kvstore

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"testing"

	"jbofd/internal/nvme"
)

// twins returns two stores with the same hash seed and different chunks, groups, tables and histories.
func twins(t *testing.T, seed uint64) (a, b *ranged) {
	return newRanged(t, seed, rangedConfigs[0]), newRanged(t, seed+1, rangedConfigs[1])
}

// copyRange copies a range from one store to another, and returns how many entries have changed something. A batch is
// sometimes repeated, and the order is sometimes not that of the positions.
func copyRange(from, to *ranged, first, last uint64, size int) (applied int) {
	var batches [][]byte
	from.walk(CopyOut, first, last, size, func(b nvme.KVRange, st Status) {
		if st != OK {
			from.tb.Fatalf("CopyOut: status %d", st)
		}
		batches = append(batches, slices.Clone(b))
		if from.rng.IntN(5) == 0 {
			batches = append(batches, slices.Clone(b))
		}
	})
	if from.rng.IntN(2) == 0 {
		from.rng.Shuffle(len(batches), func(i, j int) { batches[i], batches[j] = batches[j], batches[i] })
	}
	for _, b := range batches {
		p := to.do(Request{Op: CopyIn, Value: b, Background: from.rng.IntN(2) == 0})
		if p.Status != OK {
			to.tb.Fatalf("CopyIn: status %d", p.Status)
		}
		applied += p.ValueLen
	}
	return applied
}

// differences finds the positions at which two stores differ, by Digests of sub-ranges, down to those that have at most
// 16 objects. It returns the ranges and the number of Digests.
func differences(a, b *ranged, fan int) (ranges [][2]uint64, requests int) {
	a.requests, b.requests = 0, 0
	sums := func(r *ranged, first, last uint64) (all []byte, sub nvme.KVRange) {
		r.walk(Digest, first, last, nvme.KVRangeHeaderBytes+fan*nvme.KVSumBytes, func(p nvme.KVRange, st Status) {
			if sub = slices.Clone(p); all == nil {
				all = make([]byte, p.Items()*nvme.KVSumBytes)
			}
			for i := range p.Items() {
				nvme.KVSum(all[i*nvme.KVSumBytes:]).Add(p.Sum(i).Count(), p.Sum(i).Sum())
			}
		})
		return all, sub
	}
	todo := [][2]uint64{{0, math.MaxUint64}}
	for len(todo) > 0 {
		r := todo[0]
		todo = todo[1:]
		sa, sub := sums(a, r[0], r[1])
		sb, _ := sums(b, r[0], r[1])
		for i := range sub.Items() {
			x, y := nvme.KVSum(sa[i*nvme.KVSumBytes:]), nvme.KVSum(sb[i*nvme.KVSumBytes:])
			if x.Sum() == y.Sum() && x.Count() == y.Count() {
				continue
			}
			first, last := sub.SubRange(i)
			if max(x.Count(), y.Count()) <= 16 {
				ranges = append(ranges, [2]uint64{first, last})
			} else {
				todo = append(todo, [2]uint64{first, last})
			}
		}
	}
	return ranges, a.requests + b.requests
}

// TestCopiesHaveTheSameDigests: what is copied out of a store and into another one, which has some of it, older and
// newer, makes both the same; and a second time nothing changes.
func TestCopiesHaveTheSameDigests(t *testing.T) {
	for seed := range Seeds(t, 2) {
		a, b := twins(t, seed)
		for range 1500 {
			a.change(900, 3000)
		}
		// The other store has an older state of a part of it.
		copyRange(a, b, 0, 1<<63, 20000)
		for range 500 {
			a.change(900, 3000)
		}
		if n := copyRange(a, b, 0, math.MaxUint64, 5000+int(seed%100000)); n == 0 {
			t.Error("nothing was copied")
		}
		// Deletes without tombstones are not copied. Their keys are found by digests, and dropped by hand.
		ranges, _ := differences(a, b, 64)
		for _, r := range ranges {
			b.walk(Scan, r[0], r[1], 1<<16, func(batch nvme.KVRange, _ Status) {
				for e := range batch.Entries() {
					if _, there := a.has[string(e.Key())]; !there {
						b.do(Request{Op: Put, Key: e.Key()}) // in place of a tombstone
						b.do(Request{Op: Delete, Key: e.Key()})
					}
				}
			})
		}
		if ranges, _ = differences(a, b, 64); len(ranges) > 0 {
			t.Fatalf("seed %d: %d ranges differ after the copy: %x", seed, len(ranges), ranges[0])
		}
		if n := copyRange(a, b, 0, math.MaxUint64, 50000); n != 0 {
			t.Errorf("a second copy changes %d objects", n)
		}
		b.has = a.has
		b.check(0, math.MaxUint64)
	}
}

// TestDigestsFindFewDifferencesWithFewRequests: with n objects of which d differ, they are found with at most
// 2 (1 + d log n / log fan) requests.
func TestDigestsFindFewDifferencesWithFewRequests(t *testing.T) {
	t.Parallel()
	a, b := twins(t, FixedSeed(t))
	const n, fan = 20000, 16
	for i := range n {
		key := binary.LittleEndian.AppendUint64(nil, uint64(i))
		q := Request{Op: Put, Condition: IfNewer, Version: uint64(i + 1), Key: key}
		a.do(q)
		if i%9 > 0 {
			q.Key = key
			b.do(q)
		}
	}
	copyRange(a, b, 0, math.MaxUint64, 1<<20)
	if ranges, requests := differences(a, b, fan); len(ranges) > 0 || requests != 2 {
		t.Fatalf("%d ranges differ, after %d requests", len(ranges), requests)
	}
	for _, d := range []int{1, 5, 20} {
		var want []uint64
		for range d {
			key := binary.LittleEndian.AppendUint64(nil, a.rng.Uint64N(n))
			a.do(Request{Op: Put, Key: key, Value: []byte("other")})
			want = append(want, a.position(key))
		}
		ranges, requests := differences(a, b, fan)
		if most := 2 * (1 + d*(bits.Len(n)/4+1)); requests > most {
			t.Errorf("%d differences of %d are found with %d requests, want at most %d", d, n, requests, most)
		}
		for _, p := range want {
			if !slices.ContainsFunc(ranges, func(r [2]uint64) bool { return p >= r[0] && p <= r[1] }) {
				t.Errorf("the difference at %#x is not found", p)
			}
		}
		copied := 0
		for _, r := range ranges {
			copied += copyRange(a, b, r[0], r[1], 1<<16)
		}
		if ranges, _ = differences(a, b, fan); len(ranges) > 0 {
			t.Errorf("%d ranges differ although %d objects were copied", len(ranges), copied)
		}
	}
}

func TestCopyInRefusesWhatIsNotABatch(t *testing.T) {
	r := newRanged(t, FixedSeed(t), rangedConfigs[0])
	b := nvme.NewKVRange(make([]byte, 1000), nvme.KVCopy, 0, math.MaxUint64, nvme.KVCursor{})
	e, b, _ := b.Append([]byte("key"), 5, 0)
	e.SetVersion(7)
	e.SetPosition(3) // of a store with another hash seed
	copy(e.Value(), "value")
	b.SetTo(nvme.KVLastOf(math.MaxUint64))
	b.SetFlags(nvme.KVComplete)
	b.Seal()
	for n := range b {
		c := slices.Clone(b)
		c[n] ^= 16
		if p := r.do(Request{Op: CopyIn, Value: c}); p.Status != InvalidValue {
			t.Fatalf("with another byte %d: status %d", n, p.Status)
		}
	}
	for _, n := range []int{0, 10, len(b) - 1} {
		if p := r.do(Request{Op: CopyIn, Value: b[:n]}); p.Status != InvalidValue {
			t.Errorf("%d bytes: status %d", n, p.Status)
		}
	}
	if p := r.do(Request{Op: CopyIn, Value: b}); p.Status != OK || p.ValueLen != 1 {
		t.Errorf("%+v", p)
	}
	buf := make([]byte, 10)
	if p := r.do(Request{Op: Get, Key: []byte("key"), Value: buf}); p.Version != 7 || string(buf[:5]) != "value" {
		t.Errorf("%+v %q", p, buf)
	}
	// Values longer than the partition takes, and versions that are too high.
	for _, bad := range []func(nvme.KVEntry){func(e nvme.KVEntry) { e.SetVersion(MaxCopied + 1) }} {
		c := slices.Clone(b)
		e, _ := nvme.KVRange(c).EntryAt(nvme.KVRangeHeaderBytes)
		bad(e)
		nvme.KVRange(c).Seal()
		if p := r.do(Request{Op: CopyIn, Value: c}); p.Status != InvalidValue {
			t.Errorf("status %d", p.Status)
		}
	}
	for _, q := range []Request{{Op: Scan, Value: make([]byte, 50)}, {Op: Digest, Value: make([]byte, 100)},
		{Op: Count, Range: Range{First: 2, Last: 1}, Value: make([]byte, 1000)},
		{Op: Scan, Range: Range{Last: 1, From: 2}, Value: make([]byte, 1000)},
		{Op: Drop, Range: Range{First: 2, Last: 1}}} {
		if p := r.do(q); p.Status != InvalidValue {
			t.Errorf("op %d: status %d, want InvalidValue", q.Op, p.Status)
		}
	}
}

// TestACopyOutThatIsTooShortSaysHowMuchItNeeds.
func TestACopyOutThatIsTooShortSaysHowMuchItNeeds(t *testing.T) {
	r := newRanged(t, FixedSeed(t), rangedConfigs[1])
	r.do(Request{Op: Put, Key: []byte("k"), Value: bytes.Repeat([]byte("v"), 3000)})
	q := Request{Op: CopyOut, Range: Range{Last: math.MaxUint64}, Value: make([]byte, 200)}
	p := r.do(q)
	if p.Status != InvalidValue {
		t.Fatalf("%+v", p)
	}
	q.Value = make([]byte, p.ValueLen)
	if p = r.do(q); p.Status != OK || nvme.KVRange(q.Value).Check() != nil || nvme.KVRange(q.Value).Items() != 1 {
		t.Errorf("%+v", p)
	}
}

// TestAFullPartitionStopsACopyIn: with CapacityExceeded.
func TestAFullPartitionStopsACopyIn(t *testing.T) {
	a, b := twins(t, FixedSeed(t))
	val := make([]byte, 30000)
	n := 0
	for ; n < 800; n++ {
		key := fmt.Appendf(nil, "%d", n)
		if b.do(Request{Op: Put, Key: key, Value: val}).Status != OK {
			break
		}
	}
	last := OK
	b.walk(CopyOut, 0, math.MaxUint64, 400000, func(batch nvme.KVRange, _ Status) {
		if last == OK {
			last = a.do(Request{Op: CopyIn, Value: slices.Clone(batch)}).Status
		}
	})
	if last != CapacityExceeded {
		t.Errorf("%d values are copied into a smaller partition: status %d", n, last)
	}
	if a.s.copying != 0 || a.s.freeCopy.N != copyWrites {
		t.Errorf("%d CopyIns and %d of %d ops are left", a.s.copying, a.s.freeCopy.N, copyWrites)
	}
}

// TestRequestsForRangesAreTakenBesideAnyNumberOfOthers: who has too much for the store leaves no room, but ranges have
// some of their own.
func TestRequestsForRangesAreTakenBesideAnyNumberOfOthers(t *testing.T) {
	r := newRanged(t, FixedSeed(t), rangedConfigs[0])
	for range 200 {
		r.change(100, 100)
	}
	var out []byte
	r.walk(CopyOut, 0, math.MaxUint64, 50000, func(b nvme.KVRange, _ Status) { out = slices.Clone(b) })
	buf := make([]byte, 100)
	for _, q := range []Request{{Op: Get, Value: buf}, {Op: Put, Value: buf[:20]}} {
		for i := 0; ; i++ {
			q.Key = fmt.Appendf(nil, "%d", i)
			if !r.s.Submit(&q) {
				break
			}
		}
	}
	for i := range MaxRanges {
		q := Request{Op: Scan, Range: Range{Last: math.MaxUint64}, Value: make([]byte, 1000)}
		if !r.s.Submit(&q) {
			t.Errorf("Scan %d is not taken", i)
		}
	}
	if !r.s.Submit(&Request{Op: CopyIn, Value: out}) ||
		!r.s.Submit(&Request{Op: Drop, Range: Range{Last: math.MaxUint64}}) {
		t.Error("a CopyIn or a Drop is not taken")
	}
	if r.s.Submit(&Request{Op: Scan, Range: Range{Last: math.MaxUint64}, Value: make([]byte, 1000)}) {
		t.Error("more Scans are taken than may be in progress")
	}
	r.run()
	r.run()
	if !r.s.Idle() {
		t.Error(r.s.State())
	}
}

// TestRangesAllocateNothing once their tables have grown.
func TestRangesAllocateNothing(t *testing.T) {
	r := newRanged(t, FixedSeed(t), rangedConfigs[0])
	for i := range 1000 {
		r.change(500, 500)
		r.do(Request{Op: Put, Key: fmt.Append(nil, "id", i%50), ID: Identity{Client: 1, Seq: uint64(i)}})
	}
	buf, batch := make([]byte, 100000), make([]byte, 100000)
	for _, op := range []Op{CopyOut, Scan, Count, Digest} {
		if n := testing.AllocsPerRun(20, func() {
			r.s.Submit(&Request{Op: op, Range: Range{Last: math.MaxUint64}, Value: buf})
			r.run()
		}); n != 0 {
			t.Errorf("op %d allocates %v times", op, n)
		}
		if op == CopyOut {
			batch = batch[:copy(batch, buf[:r.last.ValueLen])]
		}
	}
	if n := testing.AllocsPerRun(20, func() {
		r.s.Submit(&Request{Op: CopyIn, Value: batch})
		r.run()
	}); n != 0 || r.last.Status != OK {
		t.Errorf("a CopyIn allocates %v times, status %d", n, r.last.Status)
	}
}

// TestAStoreThatIsMadeAnewHasAnotherOrigin: its keys are at other positions, although it has the same UUID.
func TestAStoreThatIsMadeAnewHasAnotherOrigin(t *testing.T) {
	seen := make(map[uint32]bool)
	for seed := range uint64(100) {
		for id := range byte(10) {
			s := &Store{hashSeed: seed, cfg: Config{UUID: [16]byte{id}}}
			if o := s.Origin(); o == 0 || seen[o] || o != s.Origin() {
				t.Fatalf("UUID %v, seed %d: %d", s.UUID(), seed, o)
			}
			seen[s.Origin()] = true
		}
	}
}
