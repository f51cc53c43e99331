package kvstore

import (
	"bytes"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/nvme"
)

// identified is a ranged store whose model has the identities of each key, too.
type identified struct {
	*ranged
	kept map[string]*keptIdentities
	seq  uint64
	// answers: writes say which earlier ones have been answered.
	answers bool
	// writes are some that were made at some time.
	writes []Request
}

// keptIdentities are those of a key, and the version of its last change.
type keptIdentities struct {
	ids     []nvme.KVIdentity
	evicted bool
	version uint64
}

func identifiedTwins(t *testing.T, seed uint64) (a, b *identified) {
	x, y := twins(t, seed)
	return &identified{ranged: x, kept: map[string]*keptIdentities{}},
		&identified{ranged: y, kept: map[string]*keptIdentities{}, seq: 1 << 32}
}

// anyWrite returns a random write of a random key of n, mostly with an identity.
func (r *identified) anyWrite(n, size int) Request {
	q := Request{Op: Put, Key: fmt.Appendf(nil, "%x", r.rng.IntN(n)*7919)}
	if r.rng.IntN(4) == 0 {
		q.Expires = r.wall + 1 + r.rng.Uint32N(50)
	}
	switch r.rng.IntN(6) {
	case 0:
		q.Op, q.Tombstone = Delete, true
	case 1:
		q = Request{Op: Delete, Key: q.Key}
	default:
		q.Value = make([]byte, r.rng.IntN(size))
		for i := range q.Value {
			q.Value[i] = byte(r.rng.Uint32())
		}
	}
	if r.rng.IntN(5) > 0 {
		r.seq++
		q.ID = Identity{Client: 1 + r.rng.Uint64N(3), Seq: r.seq}
		if r.rng.IntN(5) > 0 {
			q.ID.KeepUntil = r.wall + 1 + r.rng.Uint32N(60)
		}
		if r.answers && r.rng.IntN(4) == 0 {
			q.ID.Answered = q.ID.Seq - r.rng.Uint64N(min(q.ID.Seq, 100))
		}
	}
	return q
}

// write makes a write, and notes what that does.
func (r *identified) write(q Request) {
	r.tb.Helper()
	p := r.do(q)
	switch {
	case p.Status == NotFound && q.Op == Delete:
		return
	case p.Status != OK:
		r.tb.Fatalf("%+v: %+v", q, p)
	}
	r.note(q, p.Version)
}

// note notes what a write does that has been given a version.
func (r *identified) note(q Request, version uint64) {
	k := r.kept[string(q.Key)]
	if k == nil {
		k = &keptIdentities{}
		r.kept[string(q.Key)] = k
	}
	k.evicted = k.evicted && !r.isOver(k.ids[0])
	k.ids, k.version = slices.DeleteFunc(k.ids, r.isOver), version
	if q.ID.Client != 0 {
		id := nvme.KVIdentity{Client: q.ID.Client, Seq: q.ID.Seq, Version: version, KeepUntil: q.ID.KeepUntil}
		first := 0
		if k.evicted {
			first = 1 // the oldest one says until when others were to be kept
		}
		left := slices.DeleteFunc(k.ids[first:], func(o nvme.KVIdentity) bool {
			return o.Client == id.Client && o.Seq < q.ID.Answered
		})
		if k.ids = append(k.ids[:first+len(left)], id); len(k.ids) > format.MaxIdentities {
			if first, next := k.ids[0].KeepUntil, &k.ids[1].KeepUntil; first == 0 || *next != 0 && first > *next {
				*next = first
			}
			k.ids, k.evicted = k.ids[1:], true
		}
		if q.ID.Retry = true; r.rng.IntN(3) == 0 {
			r.writes = append(r.writes, q)
		}
	}
	if q.Op == Delete && !q.Tombstone {
		delete(r.has, string(q.Key))
		return
	}
	r.has[string(q.Key)] = object{key: q.Key, version: version, value: q.Value, expires: q.Expires,
		tombstone: q.Tombstone}
}

// isOver reports whether an identity need not be kept any longer.
func (r *identified) isOver(id nvme.KVIdentity) bool {
	return id.KeepUntil != 0 && id.KeepUntil <= r.wall
}

// expectedEntries is what a CopyOut of a range should return, by key.
func (r *identified) expectedEntries(first, last uint64) map[string]string {
	all := map[string]string{}
	for key, k := range r.kept {
		o, exists := r.has[key]
		exists = exists && (o.expires == 0 || o.expires > r.wall)
		ids := slices.DeleteFunc(slices.Clone(k.ids), r.isOver)
		if p := r.position([]byte(key)); !exists && len(ids) == 0 || p < first || p > last {
			continue
		}
		if !exists {
			o = object{}
		}
		all[key] = sayEntry(k.version, o.expires, exists && !o.tombstone, o.tombstone, o.value, ids,
			k.evicted && !r.isOver(k.ids[0]))
	}
	return all
}

func sayEntry(version uint64, expires uint32, exists, tombstone bool, value []byte, ids []nvme.KVIdentity,
	evicted bool) string {
	return fmt.Sprintf("version %d expires %d exists %v tombstone %v value %d %x identities %v evicted %v", version,
		expires, exists, tombstone, len(value), value[:min(8, len(value))], ids, evicted)
}

// entries is what CopyOuts of a range return, by key.
func (r *identified) entries(first, last uint64) map[string]string {
	all := map[string]string{}
	r.walk(CopyOut, first, last, nvme.KVEntryOverhead+1500+r.rng.IntN(9000), func(b nvme.KVRange, st Status) {
		if st != OK {
			r.tb.Fatalf("CopyOut: status %d", st)
		}
		for e := range b.Entries() {
			var ids []nvme.KVIdentity
			for i := range e.Identities() {
				ids = append(ids, e.Identity(i))
			}
			all[string(e.Key())] = sayEntry(e.Version(), e.Expires(), e.Exists(), e.Tombstone(), e.Value(), ids,
				e.Evicted())
		}
	})
	return all
}

// sameEntries fails if two maps of entries differ.
func sameEntries(t *testing.T, what string, got, want map[string]string) {
	t.Helper()
	for k := range want {
		if got[k] != want[k] {
			t.Fatalf("%s: %q is\n%s, want\n%s", what, k, got[k], want[k])
		}
	}
	if len(got) != len(want) {
		t.Fatalf("%s: %d entries, want %d", what, len(got), len(want))
	}
}

// sums returns the Digests of a range in up to n sub-ranges.
func (r *identified) sums(first, last uint64, n int) []byte {
	sums := make([]byte, n*nvme.KVSumBytes)
	r.walk(Digest, first, last, nvme.KVRangeHeaderBytes+len(sums), func(p nvme.KVRange, st Status) {
		if st != OK {
			r.tb.Fatalf("Digest: status %d", st)
		}
		for i := range p.Items() {
			nvme.KVSum(sums[i*nvme.KVSumBytes:]).Add(p.Sum(i).Count(), p.Sum(i).Sum())
		}
	})
	return sums
}

// retry asks what a retry of a write is answered, without carrying it out if it is not known.
func (r *identified) retry(q Request) Reply {
	return r.do(Request{Op: Put, Key: q.Key, ID: q.ID, Condition: IfVersion, Version: MaxVersion})
}

// sameAnswers fails if retries of writes are not answered alike, but for those that come too late. With cautious, the
// copy may say that it is not known whether a write that the source does not know was carried out.
func sameAnswers(t *testing.T, a, b *identified, cautious bool) (repeated int) {
	t.Helper()
	for _, q := range slices.Concat(a.writes, b.writes) {
		if q.ID.KeepUntil != 0 && q.ID.KeepUntil <= a.wall {
			continue
		}
		x, y := a.retry(q), b.retry(q)
		if cautious && x.Status == VersionMismatch && y.Status == Indeterminate {
			continue
		}
		if x.Status != y.Status || x.Version != y.Version {
			t.Fatalf("a retry of %+v of %q is answered %+v at the source, %+v at the copy", q.ID, q.Key, x, y)
		}
		if x.Status == OK {
			repeated++
		}
	}
	return repeated
}

// advance lets time pass in both stores.
func advance(a, b *identified, seconds uint32) {
	a.wall += seconds
	b.wall = a.wall
	a.s.SetWall(a.wall)
	b.s.SetWall(a.wall)
}

// batches are the results of CopyOuts of a range.
func (r *identified) batches(first, last uint64) (all [][]byte) {
	r.walk(CopyOut, first, last, nvme.KVEntryOverhead+1500+r.rng.IntN(30000), func(b nvme.KVRange, st Status) {
		if st != OK {
			r.tb.Fatalf("CopyOut: status %d", st)
		}
		all = append(all, slices.Clone(b))
	})
	return all
}

// TestAnsweredIdentitiesAreNotCopied: what the source has dropped because it was answered is not in its copies.
func TestAnsweredIdentitiesAreNotCopied(t *testing.T) {
	for seed := range Seeds(t, 3) {
		a, b := identifiedTwins(t, seed)
		a.answers = true
		for range 3 {
			for range 600 {
				a.write(a.anyWrite(20, 600))
			}
			first, last := a.anyRange()
			sameEntries(t, "CopyOut", a.entries(first, last), a.expectedEntries(first, last))
		}
		copyAll(t, a, b)
	}
}

// TestCopiesCarryIdentities: a retry of a write is answered by a copy as by the source, after overwrites, deletes with
// and without tombstones, and the end of identities, whether the source has more than the copy or both have changed.
func TestCopiesCarryIdentities(t *testing.T) {
	for seed := range Seeds(t, 3) {
		a, b := identifiedTwins(t, seed)
		repeated, gone, cautious := 0, 0, false
		for round := range 6 {
			for range 300 {
				a.write(a.anyWrite(40, 1200))
			}
			first, last := a.anyRange()
			sameEntries(t, "CopyOut", a.entries(first, last), a.expectedEntries(first, last))
			if round%2 > 0 {
				cautious = round == 5
				copyExactly(t, a, b, cautious)
			} else {
				copyAll(t, a, b)
			}
			for _, e := range a.expectedEntries(0, math.MaxUint64) {
				if bytes.Contains([]byte(e), []byte("exists false tombstone false")) {
					gone++
				}
			}
			repeated += sameAnswers(t, a, b, cautious)
			if p := b.do(Request{Op: CopyIn, Value: a.batches(0, math.MaxUint64)[0]}); p.ValueLen != 0 {
				t.Fatalf("seed %d: the first batch again: %+v", seed, p)
			}
			advance(a, b, a.rng.Uint32N(40))
			repeated += sameAnswers(t, a, b, cautious)
		}
		if repeated < 100 || gone < 3 {
			t.Errorf("seed %d: %d retries of known writes, %d keys that are gone", seed, repeated, gone)
		}
	}
}

// copyAll copies everything, in any order, some of it twice. Keys that were deleted without a trace are deleted in the
// copy, too.
func copyAll(t *testing.T, a, b *identified) {
	t.Helper()
	all := a.batches(0, math.MaxUint64)
	a.rng.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	for i, c := range append(all, all[0]) {
		if p := b.do(Request{Op: CopyIn, Value: c}); p.Status != OK {
			t.Fatalf("CopyIn %d: %+v", i, p)
		}
	}
	there := b.entries(0, math.MaxUint64)
	for k, want := range a.entries(0, math.MaxUint64) {
		if there[k] != want {
			t.Fatalf("the copy of %q is\n%s, want\n%s", k, there[k], want)
		}
	}
	for k := range there {
		if _, known := a.expectedEntries(0, math.MaxUint64)[k]; !known {
			b.do(Request{Op: Delete, Key: []byte(k)})
		}
	}
}

// copyExactly gives the copy a history of its own and live writes, and makes it what the source is. With many, a key
// may have so many live writes that the copy cannot tell which identities were dropped for them.
func copyExactly(t *testing.T, a, b *identified, many bool) {
	t.Helper()
	b.s.NoteVersion(a.s.clock)
	for range 200 { // this did not become the history of the source
		b.write(b.anyWrite(50, 1200))
	}
	a.s.NoteVersion(b.s.clock)
	for range 50 {
		a.write(a.anyWrite(50, 1200))
	}
	clock := max(a.s.clock, b.s.clock)
	version := clock
	var later []Request
	writes := map[string]int{}
	live := func() {
		q := a.anyWrite(50, 1200)
		if writes[string(q.Key)]++; writes[string(q.Key)] >= format.MaxIdentities && !many {
			return
		}
		version++
		q.Condition, q.Version, q.Tombstone = IfNewer, version, q.Op == Delete
		a.write(q)
		later = append(later, q)
	}
	catchUp := func(n int) {
		for range min(n, len(later)) {
			if p := b.do(later[0]); p.Status != OK && p.Status != Superseded {
				t.Fatalf("a live write: %+v", p)
			}
			later = later[1:]
		}
	}
	all := a.batches(0, math.MaxUint64)
	for range 100 {
		live()
	}
	catchUp(50)
	all = append(all, a.batches(0, math.MaxUint64)...)
	for range 50 {
		live()
	}
	a.rng.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	for _, c := range all {
		catchUp(a.rng.IntN(20))
		for range 1 + a.rng.IntN(2) {
			if p := b.do(Request{Op: CopyIn, Value: c, Version: clock}); p.Status != OK {
				t.Fatalf("an exact CopyIn: %+v", p)
			}
		}
	}
	catchUp(len(later))
	if b.writes = nil; many { // the copy does not know the writes of its own history any more
		return
	}
	sameEntries(t, "an exact copy", b.entries(0, math.MaxUint64), a.expectedEntries(0, math.MaxUint64))
	first, last := a.anyRange()
	if n := 1 + a.rng.IntN(64); !bytes.Equal(a.sums(first, last, n), b.sums(first, last, n)) {
		t.Fatal("digests of an exact copy differ")
	}
}

// TestDigestsTellIdentitiesApart: two stores with the same objects have the same digest if and only if they have the
// same identities at that time.
func TestDigestsTellIdentitiesApart(t *testing.T) {
	for seed := range Seeds(t, 2) {
		a, b := identifiedTwins(t, seed)
		for range 200 {
			a.write(a.anyWrite(30, 100))
		}
		a.write(Request{Op: Put, Key: []byte("key"), ID: Identity{Client: 9, Seq: 1, KeepUntil: a.wall + 1000}})
		copyAll(t, a, b)
		pass := func() {
			for _, c := range a.batches(0, math.MaxUint64) {
				b.do(Request{Op: CopyIn, Value: c, Version: max(a.s.clock, b.s.clock)})
			}
		}
		same := func(what string, want bool) {
			t.Helper()
			if got := bytes.Equal(a.sums(0, math.MaxUint64, 1), b.sums(0, math.MaxUint64, 1)); got != want {
				t.Errorf("seed %d: %s: the same digest: %v", seed, what, got)
			}
			if got := maps.Equal(a.entries(0, math.MaxUint64), b.entries(0, math.MaxUint64)); got != want {
				t.Errorf("seed %d: %s: the same entries: %v", seed, what, got)
			}
		}
		same("a copy", true)
		version := a.kept["key"].version
		edit := func(what string, fill func(e nvme.KVEntry), n int) {
			t.Helper()
			c := nvme.NewKVRange(make([]byte, 1000), nvme.KVCopy, 0, math.MaxUint64, nvme.KVCursor{})
			e, c, _ := c.Append([]byte("key"), 0, n)
			e.SetPosition(a.position([]byte("key")))
			e.SetVersion(version)
			fill(e)
			c.SetTo(nvme.KVLastOf(math.MaxUint64))
			c.Seal()
			if p := b.do(Request{Op: CopyIn, Value: c}); p.Status != OK || p.ValueLen != 1 {
				t.Fatalf("%s: %+v", what, p)
			}
			same(what, false)
		}
		own := nvme.KVIdentity{Client: 9, Seq: 1, Version: version, KeepUntil: a.wall + 1000}
		other := nvme.KVIdentity{Client: 9, Seq: 2, Version: version - 1, KeepUntil: a.wall + 5}
		edit("another identity", func(e nvme.KVEntry) { e.SetIdentity(0, other) }, 1)
		advance(a, b, 4)
		same("before its end", false)
		advance(a, b, 1)
		same("behind its end", true)
		b.write(Request{Op: Put, Key: []byte("key")}) // drops it
		a.write(Request{Op: Put, Key: []byte("key"), Condition: IfNewer, Version: b.s.clock})
		version = b.s.clock
		same("without it", true)
		edit("others were evicted", func(e nvme.KVEntry) { e.SetIdentity(0, own); e.SetEvicted(true) }, 1)
		pass()
		same("an exact copy", true)
		own.KeepUntil++
		edit("it is kept longer", func(e nvme.KVEntry) { e.SetIdentity(0, own) }, 1)
		pass()
		same("an exact copy", true)
	}
}

// TestMergedIdentitiesAreTheNewest, whatever the order in which they come.
func TestMergedIdentitiesAreTheNewest(t *testing.T) {
	for seed := range Seeds(t, 20) {
		rng := rand.New(rand.NewPCG(seed, 13))
		var all []format.Identity
		for i := range 1 + rng.IntN(3*format.MaxIdentities) {
			all = append(all, format.Identity{Client: 1 + uint64(i%3), Seq: uint64(i), Version: 5 + uint64(i)/2,
				KeepUntil: rng.Uint32N(4)})
		}
		var got []format.Identity
		evicted := false
		for range 3 {
			for _, i := range rng.Perm(len(all)) {
				got, evicted = format.MergeIdentities(got, all[i], evicted)
			}
		}
		want, until := slices.Clone(all), uint32(1)
		for i := range want {
			want[i].Outcome = 0
		}
		slices.SortFunc(want, func(a, b format.Identity) int { return a.ByVersion(&b) })
		for ; len(want) > format.MaxIdentities; want = want[1:] {
			if until = max(until, want[0].KeepUntil); want[0].KeepUntil == 0 {
				until = math.MaxUint32
			}
		}
		if len(all) > format.MaxIdentities && want[0].KeepUntil != 0 {
			if want[0].KeepUntil = max(want[0].KeepUntil, until); until == math.MaxUint32 {
				want[0].KeepUntil = 0
			}
		}
		if !slices.Equal(got, want) || evicted != (len(all) > format.MaxIdentities) {
			t.Fatalf("seed %d: %d are merged to\n%v, want\n%v", seed, len(all), got, want)
		}
	}
}

// TestTheOldestOfMergedIdentitiesStandsForEvictedOnes: it is kept as long as the oldest one before, whatever takes its
// place.
func TestTheOldestOfMergedIdentitiesStandsForEvictedOnes(t *testing.T) {
	oldest := format.Identity{Client: 1, Seq: 1, Version: 10, KeepUntil: 100}
	next := format.Identity{Client: 1, Seq: 2, Version: 20, KeepUntil: 60}
	again := oldest
	again.Version = 30
	for what, id := range map[string]format.Identity{
		"an older one":      {Client: 2, Seq: 1, Version: 5, KeepUntil: 50},
		"the oldest, again": again,
		"a younger one":     {Client: 2, Seq: 1, Version: 40, KeepUntil: 50},
	} {
		for _, evicted := range []bool{false, true} {
			ids := append(make([]format.Identity, 0, format.MaxIdentities+1), oldest, next)
			ids, still := format.MergeIdentities(ids, id, evicted)
			if still != evicted || evicted && ids[0].KeepUntil != 100 {
				t.Errorf("%s: evicted %v, was %v; %v", what, still, evicted, ids)
			}
		}
	}
}

// TestIdentitiesOutliveADrop of their objects, in the store and in its copies, also in one that is being copied in when
// the Drop comes into effect.
func TestIdentitiesOutliveADrop(t *testing.T) {
	for _, exact := range []uint64{0, 500} {
		a, b := identifiedTwins(t, FixedSeed(t))
		q := Request{Op: Put, Key: []byte("key"), Value: []byte("value"), ID: Identity{Client: 7, Seq: 1}}
		version := a.do(q).Version
		before := a.batches(0, math.MaxUint64)[0]
		drop := Request{Op: Drop, Range: Range{Last: math.MaxUint64}, Version: 100}
		a.do(drop)
		q.ID.Retry = true
		for n, c := range [][]byte{before, a.batches(0, math.MaxUint64)[0]} {
			if n == 0 {
				if exact > 0 {
					continue
				}
				if b.s.Submit(&drop); b.turns(1) != 1 || len(b.s.drops.list) > 0 {
					t.Fatal("the Drop is in effect already")
				}
			}
			if p := b.do(Request{Op: CopyIn, Value: c, Version: exact}); p.Status != OK {
				t.Fatalf("%+v", p)
			}
			for _, r := range []*identified{a, b} {
				if p := r.do(Request{Op: Exist, Key: q.Key}); p.Status != NotFound {
					t.Errorf("the object exists: %+v", p)
				}
				if p := r.retry(q); p.Status != OK || p.Version != version {
					t.Errorf("a retry: %+v", p)
				}
			}
		}
		sameEntries(t, "the copy", b.entries(0, math.MaxUint64), a.entries(0, math.MaxUint64))
	}
}

// TestACopyOfAnEvictedKeyStaysSo until the end of what was evicted, also if the store has an older identity of the key,
// which ends before that.
func TestACopyOfAnEvictedKeyStaysSo(t *testing.T) {
	a, b := identifiedTwins(t, FixedSeed(t))
	write := func(s *identified, client, seq, given uint64, keep uint32) {
		t.Helper()
		q := Request{Op: Put, Key: []byte("key"), Given: given,
			ID: Identity{Client: client, Seq: seq, KeepUntil: s.wall + keep}}
		if p := s.do(q); p.Status != OK {
			t.Fatalf("%+v: %+v", q, p)
		}
	}
	write(a, 2, 0, 90, 1000)
	for i := range uint64(format.MaxIdentities) {
		write(a, 1, i, 100+i, 10)
	}
	advance(a, b, 11) // what is left takes no room from the identity of b
	write(b, 3, 0, 50, 5)
	for _, c := range a.batches(0, math.MaxUint64) {
		if p := b.do(Request{Op: CopyIn, Value: c}); p.Status != OK {
			t.Fatalf("%+v", p)
		}
	}
	advance(a, b, 6)
	for name, s := range map[string]*identified{"original": a, "copy": b} {
		q := Request{Op: Put, Key: []byte("key"), ID: Identity{Client: 2, KeepUntil: s.wall + 10, Retry: true}}
		if p := s.do(q); p.Status != Indeterminate {
			t.Errorf("%s: a retry of an evicted one: %+v", name, p)
		}
	}
}
