package kvstore

import (
	"bytes"
	"fmt"
	"math"
	"math/bits"
	"math/rand/v2"
	"slices"
	"testing"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/nvme"
)

// object is what a ranged store should have of a key.
type object struct {
	key       []byte
	version   uint64
	value     []byte
	expires   uint32
	tombstone bool
}

func (o *object) String() string {
	return fmt.Sprintf("%q, version %d, %d bytes, expires %d, tombstone %v", o.key, o.version, len(o.value), o.expires,
		o.tombstone)
}

// state is what its digest says besides its version.
func (o *object) state() format.KeyState {
	if o.tombstone {
		return format.KeyAbsent
	}
	return 0
}

// ranged is a store on an instant device, and a simple model of what it has.
type ranged struct {
	*instant
	tb   testing.TB
	rng  *rand.Rand
	wall uint32
	has  map[string]object
	// perRequest counts the requests for ranges.
	requests int
}

func newRanged(tb testing.TB, seed uint64, cfg Config) *ranged {
	r := &ranged{instant: newInstant(tb, cfg), tb: tb, rng: rand.New(rand.NewPCG(seed, 11)), has: map[string]object{},
		wall: 1000}
	r.s.SetWall(r.wall)
	return r
}

// do runs a request to its end.
func (r *ranged) do(q Request) Reply {
	r.tb.Helper()
	for n := 0; !r.s.Submit(&q); n++ {
		if r.run(); n > 100 {
			r.tb.Fatalf("op %d is not taken: %s", q.Op, r.s.State())
		}
	}
	r.run()
	return r.last
}

// change makes a random change of a random key of n.
func (r *ranged) change(n, size int) {
	r.tb.Helper()
	key := fmt.Appendf(nil, "%x", r.rng.IntN(n)*7919)
	o := object{key: key}
	if r.rng.IntN(4) == 0 {
		o.expires = r.wall + 1 + r.rng.Uint32N(50)
	}
	old, there := r.has[string(key)]
	exists := there && !old.tombstone && (old.expires == 0 || old.expires > r.wall)
	q := Request{Op: Put, Key: key, Expires: o.expires}
	switch r.rng.IntN(6) {
	case 0:
		q.Op, q.Tombstone, o.tombstone = Delete, true, true
	case 1:
		q = Request{Op: Delete, Key: key}
	default:
		o.value = make([]byte, r.rng.IntN(size))
		for i := range o.value {
			o.value[i] = byte(r.rng.Uint32())
		}
		q.Value = o.value
	}
	p := r.do(q)
	switch {
	case p.Status == NotFound && q.Op == Delete && !exists:
		return
	case p.Status != OK:
		r.tb.Fatalf("op %d of %q: status %d", q.Op, key, p.Status)
	}
	if o.version = p.Version; q.Op == Delete && !q.Tombstone {
		delete(r.has, string(key))
		return
	}
	r.has[string(key)] = o
}

func (r *ranged) position(key []byte) uint64 {
	return bits.Reverse64(format.HashKey(r.s.hashSeed, key))
}

// expected is what a range should have, in order.
func (r *ranged) expected(first, last uint64) (all []object) {
	for _, o := range r.has {
		if p := r.position(o.key); p >= first && p <= last && (o.expires == 0 || o.expires > r.wall) {
			all = append(all, o)
		}
	}
	slices.SortFunc(all, func(a, b object) int {
		ca, cb := nvme.KVCursorAt(r.position(a.key), a.key), nvme.KVCursorAt(r.position(b.key), b.key)
		return ca.Compare(&cb)
	})
	return all
}

// walk goes through a range with requests whose memory has n bytes, and yields the results.
func (r *ranged) walk(op Op, first, last uint64, n int, yield func(nvme.KVRange, Status)) {
	r.tb.Helper()
	buf := make([]byte, n)
	q := Request{Op: op, Range: Range{First: first, Last: last, From: first}, Value: buf}
	for {
		r.requests++
		asked := q
		if asked.Range.FromKey = len(q.Key) > 0 && op != Digest && r.rng.IntN(2) == 0; asked.Range.FromKey {
			asked.Range.First, asked.Range.From = math.MaxUint64, math.MaxUint64 // the key says it
		}
		p := r.do(asked)
		b := nvme.KVRange(buf[:p.ValueLen])
		if err := b.Check(); err != nil {
			r.tb.Fatalf("op %d: status %d: %v", op, p.Status, err)
		}
		from, to := b.From(), b.To()
		if want := nvme.KVCursorAt(q.Range.From, q.Key); from.Compare(&want) != 0 {
			r.tb.Fatalf("op %d begins at %v, want %v", op, from, want)
		}
		if from.Compare(&to) == 0 && !b.Complete() {
			r.tb.Fatalf("op %d does not advance: status %d", op, p.Status)
		}
		yield(b, p.Status)
		if b.Complete() {
			return
		}
		q.Range.From, q.Key = to.Position, slices.Clone(to.Key[:to.KeyLen])
	}
}

// anyRange returns a random range, often one that begins and ends at keys.
func (r *ranged) anyRange() (first, last uint64) {
	switch r.rng.IntN(4) {
	case 0:
		return 0, math.MaxUint64
	case 1:
		if all := r.expected(0, math.MaxUint64); len(all) > 0 {
			i := r.rng.IntN(len(all))
			k := i + r.rng.IntN(len(all)-i)
			return r.position(all[i].key), r.position(all[k].key)
		}
	}
	first = r.rng.Uint64() >> r.rng.IntN(10)
	return first, first + min(math.MaxUint64-first, r.rng.Uint64()>>r.rng.IntN(10))
}

// check compares all range requests with the model.
func (r *ranged) check(first, last uint64) {
	r.tb.Helper()
	want := r.expected(first, last)
	longest := 0
	for _, o := range want {
		longest = max(longest, len(o.value))
	}
	for _, op := range []Op{Scan, CopyOut} {
		least := nvme.KVRangeHeaderBytes + nvme.KVEntryBytes(nvme.KVCopy, format.MaxKey, longest, 0)
		var got []object
		r.walk(op, first, last, least+r.rng.IntN(5000), func(b nvme.KVRange, st Status) {
			if st != OK || b.Lost() {
				r.tb.Fatalf("op %d: status %d, flags %d", op, st, b.Flags())
			}
			for e := range b.Entries() {
				o := object{key: slices.Clone(e.Key()), version: e.Version(), expires: e.Expires(),
					tombstone: e.Tombstone(), value: make([]byte, e.ValueLen())}
				if op == CopyOut {
					copy(o.value, e.Value())
				}
				if e.Position() != r.position(o.key) {
					r.tb.Fatalf("%q is at %#x, want %#x", o.key, e.Position(), r.position(o.key))
				}
				got = append(got, o)
			}
		})
		if len(got) != len(want) {
			r.tb.Fatalf("op %d of %#x to %#x: %d objects, want %d", op, first, last, len(got), len(want))
		}
		for i, w := range want {
			if g := got[i]; !bytes.Equal(g.key, w.key) || g.version != w.version || g.expires != w.expires ||
				g.tombstone != w.tombstone || len(g.value) != len(w.value) ||
				op == CopyOut && !bytes.Equal(g.value, w.value) {
				p := r.do(Request{Op: Exist, Key: w.key})
				r.tb.Fatalf("op %d: object %d is %v, want %v, exists %+v", op, i, &g, &w, p)
			}
		}
	}
	r.checkSums(first, last, want)
}

// checkSums compares Count and Digest with what is expected.
func (r *ranged) checkSums(first, last uint64, want []object) {
	r.tb.Helper()
	var objects, tombstones, size uint64
	sums := make([]byte, (1+r.rng.IntN(64))*nvme.KVSumBytes)
	n, shift := nvme.KVSubRanges(first, last, len(sums)/nvme.KVSumBytes)
	for _, o := range want {
		at := (r.position(o.key) - first) >> shift * nvme.KVSumBytes
		nvme.KVSum(sums[at:]).Add(1, format.HashVersion(r.s.hashSeed, o.key, o.version, o.state()))
		if o.tombstone {
			tombstones++
			continue
		}
		objects++
		size += uint64(len(o.key) + len(o.value))
	}
	r.walk(Count, first, last, 4096, func(b nvme.KVRange, st Status) {
		t := b.Totals()
		objects -= t.Objects()
		tombstones -= t.Tombstones()
		size -= t.Bytes()
	})
	if objects != 0 || tombstones != 0 || size != 0 {
		r.tb.Fatalf("Count lacks %d objects, %d tombstones, %d bytes", objects, tombstones, size)
	}
	r.walk(Digest, first, last, nvme.KVRangeHeaderBytes+len(sums), func(b nvme.KVRange, st Status) {
		if b.Items() != n {
			r.tb.Fatalf("%d sub-ranges, want %d", b.Items(), n)
		}
		for i := range n {
			nvme.KVSum(sums[i*nvme.KVSumBytes:]).Add(-b.Sum(i).Count(), -b.Sum(i).Sum())
		}
	})
	r.checkAligned(first, last, want)
	if i := slices.IndexFunc(sums, func(v byte) bool { return v != 0 }); i >= 0 {
		r.tb.Fatalf("Digest of %#x to %#x: sub-range %d of %d is wrong", first, last, i/nvme.KVSumBytes, n)
	}
}

// checkAligned compares a Digest whose sub-ranges begin at multiples of their length with what is expected. It reads
// few segments a request.
func (r *ranged) checkAligned(first, last uint64, want []object) {
	r.tb.Helper()
	shift := uint8(0)
	for last>>shift-first>>shift >= 40 {
		shift++
	}
	shift += uint8(r.rng.IntN(int(65 - shift)))
	sums := map[uint64][2]uint64{} // by sub-range
	for _, o := range want {
		sum := sums[r.position(o.key)>>shift]
		sum[0]++
		sum[1] += format.HashVersion(r.s.hashSeed, o.key, o.version, o.state())
		sums[r.position(o.key)>>shift] = sum
	}
	buf := make([]byte, nvme.KVRangeHeaderBytes+40*nvme.KVSumBytes)
	q := Request{Op: Digest, Value: buf, Range: Range{From: first, Last: last, Width: shift + 1, Looks: 3}}
	for complete := false; !complete; {
		q.Range.First = q.Range.From &^ (1<<shift - 1)
		p := r.do(q)
		b := nvme.KVRange(buf[:p.ValueLen])
		if p.Status != OK || b.Check() != nil || b.Shift() != shift {
			r.tb.Fatalf("Digest with shift %d: status %d, %v", shift, p.Status, b.Check())
		}
		for i := range b.Items() {
			at, _ := b.SubRange(i)
			sum := sums[at>>shift]
			sums[at>>shift] = [2]uint64{sum[0] - b.Sum(i).Count(), sum[1] - b.Sum(i).Sum()}
		}
		complete, q.Range.From = b.Complete(), b.To().Position
	}
	for at, sum := range sums {
		if sum != [2]uint64{} {
			r.tb.Fatalf("Digest of %#x to %#x with shift %d: sub-range %d lacks %d", first, last, shift, at, sum)
		}
	}
}

// TestBadRangesAreRefused: with Width, the sub-ranges must begin at a multiple of their length, and fit.
func TestBadRangesAreRefused(t *testing.T) {
	r := newRanged(t, FixedSeed(t), rangedConfigs[0])
	buf := make([]byte, nvme.KVRangeHeaderBytes+4*nvme.KVSumBytes)
	for _, c := range []struct {
		in Range
		st Status
	}{
		{Range{Last: 63, Width: 5}, OK},
		{Range{Last: 64, Width: 5}, InvalidValue},
		{Range{First: 16, From: 20, Last: 79, Width: 5}, OK},
		{Range{First: 8, From: 20, Last: 60, Width: 5}, InvalidValue},
		{Range{Last: math.MaxUint64, Width: 65}, OK},
		{Range{Last: math.MaxUint64, Width: 66}, InvalidValue},
		{Range{Last: math.MaxUint64, Width: 62}, InvalidValue},
	} {
		if p := r.do(Request{Op: Digest, Value: buf, Range: c.in}); p.Status != c.st {
			t.Errorf("%+v: status %d, want %d", c.in, p.Status, c.st)
		}
	}
}

// TestARangeRequestReadsFewSegmentsIfAsked, and ends early if asked, with what it has until then.
func TestARangeRequestReadsFewSegmentsIfAsked(t *testing.T) {
	r := newRanged(t, FixedSeed(t), rangedConfigs[0])
	for range 3000 {
		r.change(2000, 100)
	}
	q := Request{Op: Scan, Range: Range{Last: math.MaxUint64, Looks: 5}, Value: make([]byte, 1<<20)}
	few := nvme.KVRange(q.Value[:r.do(q).ValueLen]).Items()
	if few < 5 || few > 5*50 {
		t.Errorf("a Scan of 5 segments has %d objects", few)
	}
	q.Range.Looks, q.Tag = 0, 77
	r.s.Submit(&q)
	r.s.EndEarly(78)
	r.s.EndEarly(77)
	r.run()
	b := nvme.KVRange(q.Value[:r.last.ValueLen])
	if r.last.Tag != 77 || r.last.Status != OK || b.Check() != nil || b.Complete() || b.Items() < 1 ||
		b.Items() > few {
		t.Errorf("a Scan that was ended early: %+v, %d objects, %v", r.last, b.Items(), b.Check())
	}
	q.Value, q.Range.Looks = make([]byte, 1<<20), 0
	q.Op = CopyOut
	in := q.Value[:r.do(q).ValueLen]
	to := newRanged(t, FixedSeed(t), rangedConfigs[1])
	to.s.Submit(&Request{Op: CopyIn, Value: in, Tag: 79})
	to.s.EndEarly(79)
	if to.run(); to.last.Status != Aborted {
		t.Errorf("a CopyIn that was ended early: %+v", to.last)
	}
}

// rangedConfigs are those of stores that have the same hash seed, and everything else different.
var rangedConfigs = []Config{
	{PartitionBytes: 12 << 20, BlockSize: 512, ChunkBytes: 128 << 10, KeysPerSegment: 6, GroupBytes: 4 << 10},
	{PartitionBytes: 32 << 20, BlockSize: 4096, ChunkBytes: 512 << 10, KeysPerSegment: 20},
}

func TestRangesHaveWhatWasStored(t *testing.T) {
	t.Parallel()
	for seed := range Seeds(t, 4) {
		r := newRanged(t, seed, rangedConfigs[seed%2])
		r.check(0, math.MaxUint64)
		keys := []int{30, 1200, 4000}[seed%3]
		size := min([]int{300, 2000, 40000}[seed/3%3], 8<<20/keys)
		for round := range 6 {
			for range 500 {
				r.change(keys, 1+r.rng.IntN(size))
			}
			for range 4 {
				r.check(r.anyRange())
			}
			r.wall += r.rng.Uint32N(20)
			r.s.SetWall(r.wall)
			if round == 3 {
				r.wall += 60 // everything that expires has expired
				r.s.SetWall(r.wall)
			}
		}
	}
}

// TestKeysThatShareAHash: up to nine keys do, and results end between them.
func TestKeysThatShareAHash(t *testing.T) {
	r := newRanged(t, FixedSeed(t), rangedConfigs[0])
	base := []byte("8 bytes.")
	found := [][]byte{}
	for n := 8; n <= 16; n++ {
		found = append(found, append(slices.Clone(base), make([]byte, n-8)...))
	}
	for _, key := range found {
		p := r.do(Request{Op: Put, Key: key, Value: bytes.Repeat(key, 10)})
		r.has[string(key)] = object{key: key, version: p.Version, value: bytes.Repeat(key, 10)}
	}
	for range 50 {
		r.check(0, math.MaxUint64)
		p := r.position(base)
		r.check(p, p)
	}
}
