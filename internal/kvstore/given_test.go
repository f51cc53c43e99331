package kvstore

import (
	"bytes"
	"math"
	"slices"
	"testing"

	"jbofd/internal/kvstore/format"
)

// TestStoresWithGivenVersionsAgree: two stores take the same writes with the same versions, each in an order of its
// own and some of them twice. They end with the same objects and identities, which are those of the order of the
// versions, and answer retries alike.
func TestStoresWithGivenVersionsAgree(t *testing.T) {
	for seed := range Seeds(t, 3) {
		a, b := identifiedTwins(t, seed)
		version, repeated, superseded, evicted := uint64(1), 0, 0, 0
		for round := range 6 {
			var all []Request
			for range 400 {
				q := a.anyWrite(40, 1200)
				if a.rng.IntN(2) == 0 { // so many writes of two keys that identities are evicted
					q.Key = []byte([...]string{"often", "always"}[a.rng.IntN(2)])
				}
				version += 1 + a.rng.Uint64N(3)
				q.Given, q.Tombstone = version, q.Op == Delete
				all = append(all, q)
				a.note(q, version)
			}
			for _, r := range []*identified{a, b} {
				superseded += r.take(all)
			}
			want := a.expectedEntries(0, math.MaxUint64)
			for _, e := range want {
				if bytes.Contains([]byte(e), []byte("evicted true")) {
					evicted++
				}
			}
			sameEntries(t, "the first store", a.entries(0, math.MaxUint64), want)
			sameEntries(t, "the second store", b.entries(0, math.MaxUint64), want)
			first, last := a.anyRange()
			if n := 1 + a.rng.IntN(64); !bytes.Equal(a.sums(first, last, n), b.sums(first, last, n)) {
				t.Fatalf("seed %d, round %d: digests differ", seed, round)
			}
			repeated += sameAnswers(t, a, b, false)
			advance(a, b, a.rng.Uint32N(40))
		}
		if repeated < 100 || superseded < 1000 || evicted < 10 {
			t.Errorf("seed %d: %d retries of known writes, %d superseded writes, %d keys with evicted identities", seed,
				repeated, superseded, evicted)
		}
	}
}

// take gives writes to the store in any order, some twice, and returns how many of them were superseded.
func (r *identified) take(all []Request) (superseded int) {
	r.tb.Helper()
	all = slices.Clone(all)
	for _, q := range all[:len(all)/8] {
		all = append(all, q)
	}
	r.rng.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	known := map[string]uint64{} // what the store has of earlier calls is older
	for _, q := range all {
		was, key := known[string(q.Key)], string(q.Key)
		p, want := r.do(q), Reply{Version: q.Given}
		if was >= q.Given {
			want = Reply{Status: Superseded, Version: was}
			superseded++
		}
		if p.Status != want.Status || p.Version != want.Version {
			r.tb.Fatalf("version %d of %q, which has %d: %+v, want %+v", q.Given, key, was, p, want)
		}
		known[key] = max(was, q.Given)
	}
	return superseded
}

// TestTheStoreDecidesOnAGivenVersion: a condition is judged as ever, and what is done gets the version that is given.
func TestTheStoreDecidesOnAGivenVersion(t *testing.T) {
	r := newRanged(t, 1, rangedConfigs[0])
	key, other := []byte("key"), []byte("other")
	id := func(seq uint64) Identity { return Identity{Client: 7, Seq: seq} }
	retry := func(seq uint64) Identity { return Identity{Client: 7, Seq: seq, Retry: true} }
	for i, c := range []struct {
		q       Request
		status  Status
		version uint64
	}{
		{Request{Op: Put, Key: key, Condition: IfPresent, Given: 10, ID: id(1)}, NotFound, 0},
		{Request{Op: Put, Key: key, Condition: IfVersion, Version: 3, Given: 10}, VersionMismatch, 0},
		{Request{Op: Put, Key: key, Condition: IfAbsent, Given: 10, ID: id(2)}, OK, 10},
		{Request{Op: Put, Key: key, Condition: IfAbsent, Given: 11}, Exists, 10},
		{Request{Op: Put, Key: key, Condition: IfVersion, Version: 9, Given: 11}, VersionMismatch, 10},
		{Request{Op: Put, Key: key, Condition: IfVersion, Version: 10, Given: 10}, Superseded, 10},
		{Request{Op: Put, Key: key, Condition: IfVersion, Version: 10, Given: 11, ID: id(3)}, OK, 11},
		// Only a Retry looks for what was done before, and one that was not done leaves no identity.
		{Request{Op: Put, Key: key, Condition: IfVersion, Version: 10, Given: 12, ID: id(3)}, VersionMismatch, 11},
		{Request{Op: Put, Key: key, Condition: IfVersion, Version: 10, Given: 12, ID: retry(3)}, OK, 11},
		{Request{Op: Put, Key: key, Condition: IfVersion, Version: 10, Given: 12, ID: retry(4)}, VersionMismatch, 11},
		{Request{Op: Put, Key: key, Given: 13, ID: retry(2)}, OK, 10},
		{Request{Op: Put, Key: key, Given: 13, ID: id(2)}, OK, 13},
		{Request{Op: Put, Key: key, Given: 14, ID: retry(2)}, OK, 13},
		{Request{Op: Put, Key: key, Given: 14, ID: retry(5)}, OK, 14},
		{Request{Op: Put, Key: key, Given: 12, ID: id(6)}, Superseded, 14},
		{Request{Op: Put, Key: key, Given: 15, ID: retry(6)}, OK, 12},
		{Request{Op: Delete, Key: key, Condition: IfVersion, Version: 14, Given: 20, ID: id(7), Tombstone: true}, OK,
			20},
		{Request{Op: Delete, Key: key, Condition: IfPresent, Given: 21}, NotFound, 0},
		{Request{Op: Put, Key: key, Given: 19}, Superseded, 20},
		{Request{Op: Put, Key: key, Condition: IfAbsent, Given: 20}, Superseded, 20},
		{Request{Op: Put, Key: key, Condition: IfAbsent, Given: 21}, OK, 21},
		{Request{Op: Delete, Key: other, Given: 22, Tombstone: true, ID: id(8)}, OK, 22},
		{Request{Op: Put, Key: other, Given: 21, ID: id(9)}, Superseded, 22},
		{Request{Op: Delete, Key: other, Given: 23, Tombstone: true, ID: retry(9)}, OK, 21},
		{Request{Op: Put, Key: other, Given: MaxVersion + 1}, InvalidValue, 0},
		{Request{Op: Put, Key: other, Given: 30, Version: 30, Condition: IfNewer}, InvalidValue, 0},
		{Request{Op: Put, Key: other}, OK, 23},
		{Request{Op: Put, Key: other, Given: MaxVersion}, OK, MaxVersion},
	} {
		if p := r.do(c.q); p.Status != c.status || p.Version != c.version {
			t.Fatalf("request %d: %+v: status %d, version %d, want %d, %d", i, c.q, p.Status, p.Version, c.status,
				c.version)
		}
	}
	if v := r.s.GreatestVersion(); v != MaxVersion {
		t.Errorf("the greatest version is %d", v)
	}
}

// TestADropLeavesTheIdentityOfAGivenVersion: what a Drop covers does not exist, but it was done, and a retry is told
// so.
func TestADropLeavesTheIdentityOfAGivenVersion(t *testing.T) {
	r := newRanged(t, 2, rangedConfigs[0])
	all := Range{Last: math.MaxUint64}
	if p := r.do(Request{Op: Drop, Range: all, Version: 100}); p.Status != OK {
		t.Fatal(p)
	}
	q := Request{Op: Put, Key: []byte("key"), Value: []byte("value"), Given: 50, ID: Identity{Client: 1, Seq: 1}}
	if p := r.do(q); p.Status != Superseded {
		t.Fatalf("%+v, want Superseded", p)
	}
	if p := r.do(Request{Op: Exist, Key: q.Key}); p.Status != NotFound {
		t.Errorf("%+v of what was dropped", p)
	}
	q.ID.Retry, q.Given = true, 101
	if p := r.do(q); p.Status != OK || p.Version != 50 {
		t.Errorf("a retry: %+v, want version 50", p)
	}
	q = Request{Op: Put, Key: []byte("another"), Condition: IfAbsent, Given: 60}
	if p := r.do(q); p.Status != Superseded {
		t.Errorf("%+v, want Superseded", p)
	}
}

// TestASupersededIdentityFindsRoom in a segment whose keys have as many identities as they may have: the oldest one
// makes room, or it is itself the oldest.
func TestASupersededIdentityFindsRoom(t *testing.T) {
	r := newRanged(t, 3, rangedConfigs[0])
	put := func(version uint64, retry bool) Reply {
		q := Request{Op: Put, Key: []byte("key"), Given: version, ID: Identity{Client: 1, Seq: version}}
		if retry {
			q.ID.Retry, q.Given = true, 10_000
		}
		return r.do(q)
	}
	newest := 100 + 10*uint64(format.MaxIdentities-1)
	for i := range uint64(format.MaxIdentities) {
		if p := put(100+10*i, false); p.Status != OK {
			t.Fatal(p)
		}
	}
	for _, late := range []uint64{105, 95, 99} {
		if p := put(late, false); p.Status != Superseded || p.Version != newest {
			t.Fatalf("%+v, want Superseded by %d", p, newest)
		}
	}
	for version, want := range map[uint64]Status{95: Indeterminate, 99: Indeterminate, 100: Indeterminate, 105: OK,
		110: OK, newest: OK} {
		if p := put(version, true); p.Status != want || want == OK && p.Version != version {
			t.Errorf("a retry of version %d: %+v, want %d", version, p, want)
		}
	}
}
