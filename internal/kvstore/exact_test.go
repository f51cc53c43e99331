package kvstore

import (
	"fmt"
	"maps"
	"math"
	"math/bits"
	"slices"
	"testing"

	"jbofd/internal/nvme"
)

// live makes a random change of a random key of n in both stores, as a chain does: with a version that is the same in
// both, and with tombstones. later collects what the second store is to do, which may come before or behind copies.
func live(a *ranged, n, size int, version uint64, later *[]Request) {
	a.tb.Helper()
	key := fmt.Appendf(nil, "%x", a.rng.IntN(n)*7919)
	q := Request{Op: Put, Condition: IfNewer, Version: version, Key: key}
	o := object{key: key, version: version}
	if a.rng.IntN(4) == 0 {
		q.Op, q.Tombstone, o.tombstone = Delete, true, true
	} else {
		o.value = make([]byte, a.rng.IntN(size))
		for i := range o.value {
			o.value[i] = byte(a.rng.Uint32())
		}
		q.Value = o.value
	}
	if p := a.do(q); p.Status != OK {
		a.tb.Fatalf("a live write with version %d: %+v", version, p)
	}
	a.has[string(key)] = o
	*later = append(*later, q)
}

// TestAnExactCopyMakesARangeWhatTheSourceSays: whatever a store has, of a history of its own, it has what the source
// has after the exact copies of one pass, in any order and any number of times, among live writes that reach both, and
// that it got before or gets after the copies. What is outside of the range stays as it is.
func TestAnExactCopyMakesARangeWhatTheSourceSays(t *testing.T) {
	for seed := range Seeds(t, 4) {
		a, b := twins(t, seed)
		for range 900 {
			a.change(700, 1500)
		}
		copyRange(a, b, 0, 1<<63, 50000)
		b.s.NoteVersion(a.s.clock)
		for range 900 { // of another history: some has gone, and some is newer than what the source has
			b.change(900, 1500)
		}
		a.s.NoteVersion(b.s.clock)
		for range 300 {
			a.change(900, 1500)
		}
		a.wall, b.wall = 2000, 2000 // all that expires has
		a.s.SetWall(a.wall)
		b.s.SetWall(b.wall)
		first, last := a.anyRange()
		if seed%3 == 0 {
			first, last = 0, math.MaxUint64
		}
		clock := max(a.s.clock, b.s.clock)
		version := clock
		var later []Request
		var batches [][]byte
		catchUp := func(n int) {
			for range min(n, len(later)) {
				if p := b.do(later[0]); p.Status != OK && p.Status != Superseded {
					t.Fatalf("a live write: %+v", p)
				}
				later = later[1:]
			}
		}
		a.walk(CopyOut, first, last, 4000+a.rng.IntN(60000), func(r nvme.KVRange, st Status) {
			batches = append(batches, slices.Clone(r))
		})
		// The same again after live writes, so that a key is in copies of several versions.
		for range 100 {
			version++
			live(a, 900, 1500, version, &later)
		}
		catchUp(50)
		a.walk(CopyOut, first, last, 4000+a.rng.IntN(60000), func(r nvme.KVRange, st Status) {
			batches = append(batches, slices.Clone(r))
		})
		outside := map[string]uint64{} // of keys that b has changed
		for k, o := range b.has {
			if p := b.position(o.key); (p < first || p > last) && !o.tombstone &&
				(o.expires == 0 || o.expires > b.wall) {
				outside[k] = o.version
			}
		}
		a.rng.Shuffle(len(batches), func(i, j int) { batches[i], batches[j] = batches[j], batches[i] })
		for _, c := range batches {
			catchUp(a.rng.IntN(10))
			for range 1 + a.rng.IntN(2) {
				if p := b.do(Request{Op: CopyIn, Value: c, Version: clock}); p.Status != OK {
					t.Fatalf("seed %d: an exact CopyIn: %+v", seed, p)
				}
			}
		}
		catchUp(len(later))
		b.has = map[string]object{}
		for k, o := range a.has {
			b.has[k] = o
		}
		b.check(first, last)
		for k, v := range outside {
			if p := b.do(Request{Op: Exist, Key: []byte(k)}); p.Version < v && a.has[k].version <= clock {
				t.Fatalf("seed %d: %q is outside of the range and has version %d, want %d", seed, k, p.Version, v)
			}
		}
		if p := b.do(Request{Op: CopyIn, Value: batches[0], Version: clock}); p.Status != OK || p.ValueLen != 0 {
			t.Errorf("an exact CopyIn again: %+v", p)
		}
		if b.s.copying != 0 || b.s.freeCopy.N != copyWrites {
			t.Errorf("%d CopyIns and %d of %d ops are left", b.s.copying, b.s.freeCopy.N, copyWrites)
		}
	}
}

// TestAnExactCopyOfNothingRemovesWhatIsOld and no more, in ranges of few positions, too.
func TestAnExactCopyOfNothingRemovesWhatIsOld(t *testing.T) {
	r := newRanged(t, FixedSeed(t), rangedConfigs[0])
	for i := range 300 {
		key := fmt.Append(nil, "key", i)
		p := r.do(Request{Op: Put, Key: key, Value: make([]byte, i)})
		r.has[string(key)] = object{key: key, version: p.Version, value: make([]byte, i)}
	}
	all := r.expected(0, math.MaxUint64)
	at := func(i int) nvme.KVCursor { return nvme.KVCursorAt(r.position(all[i].key), all[i].key) }
	for _, c := range []struct {
		from, to nvme.KVCursor
		clock    uint64
		want     func(i int, o object) bool // it goes
	}{
		{at(3), at(3), 1000, func(int, object) bool { return false }},
		{at(3), at(4), 1000, func(i int, _ object) bool { return i == 4 }},
		{at(4), at(9), 100, func(i int, o object) bool { return i > 4 && i <= 9 && o.version <= 100 }},
		{nvme.KVCursorAt(0, nil), at(0), 300, func(i int, _ object) bool { return i == 0 }},
		{at(298), nvme.KVLastOf(math.MaxUint64), 300, func(i int, _ object) bool { return i == 299 }},
		{nvme.KVCursorAt(math.MaxUint64-2, nil), nvme.KVLastOf(math.MaxUint64), 300, func(int, object) bool {
			return false
		}},
		{nvme.KVCursor{}, nvme.KVLastOf(math.MaxUint64), 200, func(_ int, o object) bool { return o.version <= 200 }},
	} {
		b := nvme.NewKVRange(make([]byte, 100), nvme.KVCopy, 0, math.MaxUint64, c.from)
		b.SetTo(c.to)
		b.Seal()
		gone := 0
		for i, o := range all {
			if _, there := r.has[string(o.key)]; there && c.want(i, o) {
				delete(r.has, string(o.key))
				gone++
			}
		}
		if p := r.do(Request{Op: CopyIn, Value: b, Version: c.clock}); p.Status != OK || p.ValueLen != gone {
			t.Errorf("%+v, %d should go", p, gone)
		}
		r.check(0, math.MaxUint64)
	}
}

// TestAnExactCopyReadsTheSegmentsOfItsPart and no others, each once, also if its part is so short, or so near to the
// last position, that it is not enough for all lanes.
func TestAnExactCopyReadsTheSegmentsOfItsPart(t *testing.T) {
	r := newRanged(t, FixedSeed(t), rangedConfigs[0])
	for i := range 3000 {
		if p := r.do(Request{Op: Put, Key: fmt.Append(nil, "key", i), Value: []byte("value")}); p.Status != OK {
			t.Fatalf("%+v", p)
		}
	}
	const end = math.MaxUint64
	for _, c := range []struct{ first, last uint64 }{
		{end, end}, {end - 2, end}, {end - 7, end}, {end - 8, end}, {end - 1000, end}, {0, 0}, {0, 6}, {0, 7},
		{1 << 63, 1 << 63}, {1<<63 - 1, 1 << 63}, {1 << 60, 1<<61 - 1}, {end - 1<<60, end}, {0, end},
	} {
		segments := int64(1)
		for p := c.first; ; segments++ {
			n := r.s.tbl.Bits(r.s.tbl.Segment(bits.Reverse64(p)))
			if p |= 1<<(64-n) - 1; p >= c.last {
				break
			}
			p++
		}
		b := nvme.NewKVRange(make([]byte, 100), nvme.KVCopy, 0, end, nvme.KVCursorAt(c.first, nil))
		b.SetTo(nvme.KVLastOf(c.last))
		b.Seal()
		before := r.reads
		if p := r.do(Request{Op: CopyIn, Value: b, Version: 1}); p.Status != OK || p.ValueLen != 0 {
			t.Fatalf("%+v", p)
		}
		// A segment that several lanes share is read by each, but by those that wait for each other only once.
		if reads := r.reads - before; reads > segments+clearLanes-1 || reads < segments/2 {
			t.Errorf("%#x to %#x has %d segments, %d are read", c.first, c.last, segments, reads)
		}
	}
}

// TestAnExactCopyRefusesWhatItCannotMakeTrue: a batch of another hash seed, or that lacks what is lost, or whose
// entries a Drop covers.
func TestAnExactCopyRefusesWhatItCannotMakeTrue(t *testing.T) {
	r := newRanged(t, FixedSeed(t), rangedConfigs[0])
	r.change(1, 10)
	before := maps.Clone(r.has)
	batch := func(version uint64, edit func(nvme.KVRange, nvme.KVEntry)) []byte {
		b := nvme.NewKVRange(make([]byte, 1000), nvme.KVCopy, 0, math.MaxUint64, nvme.KVCursor{})
		e, b, _ := b.Append([]byte("key"), 0, 0)
		e.SetVersion(version)
		e.SetPosition(r.position([]byte("key")))
		b.SetTo(nvme.KVLastOf(math.MaxUint64))
		b.SetFlags(nvme.KVComplete)
		edit(b, e)
		b.Seal()
		return b
	}
	try := func(what string, b []byte, clock uint64, want Status) {
		t.Helper()
		if p := r.do(Request{Op: CopyIn, Value: b, Version: clock}); p.Status != want {
			t.Errorf("%s: status %d, want %d", what, p.Status, want)
		}
	}
	try("another seed", batch(5, func(_ nvme.KVRange, e nvme.KVEntry) { e.SetPosition(e.Position() + 1) }), 9,
		InvalidValue)
	try("a loss", batch(5, func(b nvme.KVRange, _ nvme.KVEntry) { b.SetFlags(nvme.KVLost) }), 9, InvalidValue)
	nothing := func(nvme.KVRange, nvme.KVEntry) {}
	try("a high clock", batch(5, nothing), MaxCopied+1, InvalidValue)
	r.has = before
	r.check(0, math.MaxUint64)
	p := r.position([]byte("key"))
	r.s.Submit(&Request{Op: Drop, Range: Range{First: p, Last: p}, Version: 7})
	for n := 0; len(r.s.drops.list) == 0 && n < 100; n++ {
		r.turns(1)
	}
	r.s.Submit(&Request{Op: CopyIn, Value: batch(5, nothing), Version: 9})
	if r.turns(1); r.last.Status != Superseded {
		t.Errorf("dropped: %+v", r.last)
	}
	try("not dropped", batch(8, nothing), 9, OK)
	r.run()
	r.s.Checkpoint()
	r.run()
	try("not dropped any more", batch(5, nothing), 9, OK)
	if p := r.do(Request{Op: Exist, Key: []byte("key")}); p.Version != 5 {
		t.Errorf("%+v", p)
	}
}
