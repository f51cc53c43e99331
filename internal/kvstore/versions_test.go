package kvstore_test

import (
	"bytes"
	"fmt"
	"slices"
	"testing"

	"jbofd/internal/kvstore"
)

// extended is what a store must say about a key, if requests come one after the other.
type extended struct {
	value   []byte
	version uint64
	expires uint32
	// exists: there is an object, which may have expired. tombstone: there is one, which may be dropped at expires.
	exists, tombstone bool
}

func (x *extended) at(wall uint32) extended {
	if x.expires != 0 && x.expires <= wall {
		return extended{}
	}
	return *x
}

// TestExtendedRequestsAgainstAMap: conditions on versions, given versions, tombstones and expiry, one request after the
// other, with crashes, splits and compaction between them.
func TestExtendedRequestsAgainstAMap(t *testing.T) {
	t.Parallel()
	for seed := range kvstore.Seeds(t, times(4)) {
		r := newRig(t, seed, variant(seed, 40))
		m := newModel(r, 1, func() int { return 0 })
		keys := make([]extended, 300)
		buf := make([]byte, 64<<10)
		clock, expired := uint64(1), int64(0)
		counts := map[string]int{}
		for n := range 4000 {
			i := m.rng.IntN(len(keys))
			q := kvstore.Request{Op: []kvstore.Op{kvstore.Put, kvstore.Put, kvstore.Delete, kvstore.Get}[m.rng.IntN(4)],
				Key:       fmt.Appendf(nil, "key%d", i),
				Condition: kvstore.Condition(m.rng.IntN(int(kvstore.IfNewer) + 1))}
			if m.rng.IntN(3) == 0 {
				q.Expires = r.wall() + uint32(1+m.rng.IntN(600))
			}
			q.Tombstone = q.Op == kvstore.Delete && m.rng.IntN(2) == 0
			k := keys[i].at(r.wall())
			switch {
			case q.Condition == kvstore.IfVersion && m.rng.IntN(4) > 0 && k.exists:
				q.Version = k.version
			case q.Condition == kvstore.IfVersion && m.rng.IntN(2) == 0:
				q.Version = clock - uint64(m.rng.IntN(3))
			case q.Condition == kvstore.IfNewer && m.rng.IntN(2) == 0 && (k.exists || k.tombstone):
				q.Version = max(1, k.version+uint64(m.rng.IntN(5))-2)
			case q.Condition == kvstore.IfNewer:
				q.Version = clock + 1 + m.rng.Uint64()>>(20+m.rng.IntN(44))
			}
			switch q.Op {
			case kvstore.Put:
				q.Value = value(i, uint32(n), sizes(m.rng, 8000)())
			case kvstore.Get:
				q.Value = buf
			}
			p := m.do(q)
			want := kvstore.Reply{Tag: p.Tag, ValueLen: p.ValueLen}
			if k.exists {
				want.Version = k.version
			}
			switch {
			case q.Op == kvstore.Get && !k.exists:
				want.Status = kvstore.NotFound
			case q.Op == kvstore.Get:
				want.Expires, want.ValueLen = k.expires, len(k.value)
				if !bytes.Equal(buf[:min(p.ValueLen, len(buf))], k.value) {
					t.Fatalf("request %d: %d bytes of another value", n, p.ValueLen)
				}
			case q.Condition == kvstore.IfVersion && q.Version != want.Version:
				want.Status = kvstore.VersionMismatch
			case q.Condition == kvstore.IfNewer && q.Version <= k.version:
				want.Status, want.Version = kvstore.Superseded, k.version
			case q.Condition == kvstore.IfAbsent && k.exists && q.Op == kvstore.Put:
				want.Status = kvstore.Exists
			case q.Condition == kvstore.IfPresent && !k.exists, q.Op == kvstore.Delete && !k.exists &&
				q.Condition != kvstore.IfNewer && q.Condition != kvstore.IfAbsent:
				want.Status = kvstore.NotFound
			case q.Op == kvstore.Delete && q.Condition == kvstore.IfAbsent:
				if want.Status = kvstore.Exists; !k.exists {
					want.Status = kvstore.NotFound
				}
			default:
				if clock++; q.Condition == kvstore.IfNewer {
					clock = max(clock-1, q.Version)
				}
				if want.Version = clock; q.Condition == kvstore.IfNewer {
					want.Version = q.Version
				}
				if q.Op == kvstore.Delete && !k.exists && !q.Tombstone {
					want.Status = kvstore.NotFound
				}
				x := extended{version: want.Version, expires: q.Expires, exists: q.Op == kvstore.Put,
					tombstone: q.Tombstone, value: q.Value}
				if q.Op == kvstore.Delete && !q.Tombstone {
					x = extended{}
				}
				keys[i] = x
			}
			if counts[fmt.Sprint(q.Op, q.Condition, p.Status)]++; p != want {
				t.Fatalf("request %d at %d: op %d of %s condition %d version %d: %+v, want %+v, it was %+v", n,
					r.wall(), q.Op, q.Key, q.Condition, q.Version, p, want, k)
			}
			switch {
			case m.rng.IntN(40) == 0:
				r.now += int64(m.rng.IntN(60)) * 1e9
			case m.rng.IntN(400) == 0:
				if m.power = m.rng.IntN(2) == 0; m.rng.IntN(2) == 0 {
					m.settle()
					m.recount()
				}
				expired += m.s.Stats().Expired
				m.crash()
				if err := m.open(); err != nil {
					t.Fatal(err)
				}
				m.recount()
			}
		}
		objects := int64(0)
		for i := range keys {
			if keys[i].at(r.wall()).exists {
				objects++
			}
		}
		m.settle()
		if st := m.s.Stats(); st.Objects < objects || expired+st.Expired == 0 {
			t.Errorf("%d objects, want at least %d: %+v", st.Objects, objects, st)
		}
		for _, c := range []string{
			fmt.Sprint(kvstore.Put, kvstore.IfVersion, kvstore.OK),
			fmt.Sprint(kvstore.Put, kvstore.IfVersion, kvstore.VersionMismatch),
			fmt.Sprint(kvstore.Delete, kvstore.IfVersion, kvstore.OK),
			fmt.Sprint(kvstore.Put, kvstore.IfNewer, kvstore.OK),
			fmt.Sprint(kvstore.Put, kvstore.IfNewer, kvstore.Superseded),
			fmt.Sprint(kvstore.Delete, kvstore.IfNewer, kvstore.Superseded),
			fmt.Sprint(kvstore.Delete, kvstore.IfNewer, kvstore.OK),
		} {
			if counts[c] < 5 {
				t.Errorf("%s happened %d times: %v", c, counts[c], counts)
			}
		}
	}
}

// TestWhatHasExpiredIsReclaimed though nobody touches the keys: objects, tombstones, and what is only kept for
// identities. Then the store rests.
func TestWhatHasExpiredIsReclaimed(t *testing.T) {
	t.Parallel()
	for seed := range kvstore.Seeds(t, 2) {
		r := newRig(t, seed, small(60))
		m := newModel(r, 1, func() int { return 0 })
		const keys = 1500
		key := func(i int) []byte { return fmt.Appendf(nil, "key%d", i) }
		do := func(q kvstore.Request) {
			t.Helper()
			if p := m.do(q); p.Status != kvstore.OK {
				t.Fatalf("op %d of %s: status %d", q.Op, q.Key, p.Status)
			}
		}
		last := uint32(0) // when the last tombstone expires
		for i := range keys {
			q := kvstore.Request{Op: kvstore.Put, Key: key(i), Value: make([]byte, []int{0, 300, 2500, 9000}[i%4])}
			if i%3 > 0 {
				q.Expires = r.wall() + 1000 + uint32(i)
			}
			do(q)
			switch {
			case i%30 == 3:
				last = r.wall() + 5000
				do(kvstore.Request{Op: kvstore.Delete, Key: key(i), Tombstone: true, Expires: last})
			case i%30 == 6:
				do(kvstore.Request{Op: kvstore.Delete, Key: key(i), ID: kvstore.Identity{Client: 7, Seq: uint64(i),
					KeepUntil: r.wall() + 2000}})
			}
		}
		before := r.now
		if seed%2 == 0 {
			m.power = true
			m.crash()
			if err := m.open(); err != nil {
				t.Fatal(err)
			}
		}
		for n := 0; r.step(); n++ {
			if n == 1e6 {
				t.Fatalf("the store does not come to rest: wake at %d, it is %d: %+v", r.act.WakeNS, r.now, m.s.Stats())
			}
		}
		m.recount()
		want := int64(keys/3 - 2*keys/30)
		if st := m.s.Stats(); st.Objects != want || seed%2 > 0 && st.Expired != keys-keys/3 {
			t.Errorf("%d objects, %d have expired, want %d and %d", st.Objects, st.Expired, want, keys-keys/3)
		}
		if took := r.now - before; r.wall() < last || took > 20_000e9 {
			t.Errorf("the store rests after %d s", took/1e9)
		}
		bytes := int64(0)
		for i := 0; i < keys; i += 3 {
			if i%30 != 3 && i%30 != 6 {
				_, n := m.s.Extent([]int{0, 300, 2500, 9000}[i%4])
				if bytes += int64(n); i%4 == 0 {
					bytes -= int64(n)
				}
			}
		}
		if st := m.s.Stats(); st.LiveBytes > bytes+st.Segments*600 {
			t.Errorf("%d bytes live, %d of them values", st.LiveBytes, bytes)
		}
		for i := range keys {
			do := kvstore.OK
			if i%3 > 0 || i%30 == 3 || i%30 == 6 {
				do = kvstore.NotFound
			}
			if p := m.do(kvstore.Request{Op: kvstore.Exist, Key: key(i)}); p.Status != do {
				t.Fatalf("key %d: status %d, want %d", i, p.Status, do)
			}
		}
	}
}

// TestAFullPartitionOfExpiredObjectsTakesPuts as soon as the objects have expired.
func TestAFullPartitionOfExpiredObjectsTakesPuts(t *testing.T) {
	r := newRig(t, seeds(t), small(28))
	var got *kvstore.Reply
	r.reply = func(p kvstore.Reply) { got = &p }
	put := func(key string, expires uint32) kvstore.Status {
		got = nil
		q := kvstore.Request{Op: kvstore.Put, Key: []byte(key), Value: make([]byte, 1000), Expires: expires}
		for !r.s.Submit(&q) {
			r.step()
		}
		for r.turn(); got == nil; r.turn() { // time does not go on when the reply is there
			r.step()
		}
		return got.Status
	}
	expires := r.wall() + 3000
	n := 0
	for st := put("key", expires); st != kvstore.CapacityExceeded; n++ {
		if st = put(fmt.Sprint(n), expires); st != kvstore.OK && st != kvstore.CapacityExceeded || n > 10_000 {
			t.Fatalf("Put %d: status %d", n, st)
		}
	}
	if r.wall() >= expires-1000 {
		t.Fatal("it took too long")
	}
	for r.wall() <= expires {
		if !r.step() {
			t.Fatal("the store waits for nothing")
		}
	}
	from, refused := r.now, 0
	for i := range n - 1 {
		st := put(fmt.Sprint("new", i), 0)
		for ; st == kvstore.CapacityExceeded && r.now-from < 1e9; refused++ {
			r.step()
			st = put(fmt.Sprint("new", i), 0)
		}
		if st != kvstore.OK {
			t.Fatalf("Put %d of %d: status %d, %d ms after all has expired: %+v", i, n, st, (r.now-from)/1e6,
				r.s.Stats())
		}
	}
	t.Logf("%d refused Puts, %d ms for %d", refused, (r.now-from)/1e6, n)
}

// TestVersionsAscendOverCrashes at every write, also those of Deletes whose keys have left nothing behind.
func TestVersionsAscendOverCrashes(t *testing.T) {
	t.Parallel()
	for seed := range kvstore.Seeds(t, 2) {
		r := newRig(t, seed, small(28))
		m := newModel(r, 1, func() int { return 0 })
		last := uint64(1)
		r.reply = func(p kvstore.Reply) {
			if p.Status == kvstore.OK {
				if p.Version <= last {
					t.Fatalf("version %d was given after %d", p.Version, last)
				}
				last = p.Version
			}
		}
		for round := range 150 {
			r.crashIn, r.power = 1+r.rng.IntN(6), r.rng.IntN(2) == 0
			for i := 0; !r.crashed && i < 20; i++ {
				q := kvstore.Request{Op: kvstore.Put, Key: fmt.Appendf(nil, "key%d", r.rng.IntN(4))}
				if r.rng.IntN(2) == 0 {
					q.Op = kvstore.Delete
				}
				for !m.s.Submit(&q) {
					r.step()
				}
				for !r.crashed && !m.s.Idle() {
					r.step()
				}
				if r.rng.IntN(8) == 0 {
					m.s.Checkpoint()
				}
			}
			if !r.crashed {
				r.crash()
			}
			if err := m.open(); err != nil {
				t.Fatalf("round %d: %v", round, err)
			}
		}
	}
}

// checkVersion checks the version in a reply. The versions of a key ascend, no version is given twice, and that of an
// object is the one with which its Put was answered. may is what the key may have held meanwhile.
func (m *model) checkVersion(q *request, p kvstore.Reply, may []event, fail func(string, ...any)) {
	m.t.Helper()
	holds := func(version uint64) bool {
		return slices.ContainsFunc(may, func(e event) bool {
			return e.start != q.start && e.size != absent && (e.given == 0 || e.given == version)
		})
	}
	missing := slices.ContainsFunc(may, func(e event) bool { return e.start != q.start && e.size == absent })
	write := q.op == kvstore.Put || q.op == kvstore.Delete
	switch {
	case p.Status == kvstore.OK && write:
		for _, e := range m.keys[q.key].events {
			if e.state == done && e.end < q.start && e.given >= p.Version {
				fail("version %d is not above %d", p.Version, e.given)
			}
		}
		if m.given[p.Version] {
			fail("version %d was given before", p.Version)
		}
		m.given[p.Version] = true
		if q.cond == kvstore.IfVersion && (q.expected == 0 && !missing || q.expected != 0 && !holds(q.expected)) {
			fail("it did not have version %d", q.expected)
		}
	case p.Status == kvstore.OK, p.Status == kvstore.Exists:
		if p.Version == 0 || !holds(p.Version) {
			fail("version %d", p.Version)
		}
	case p.Status == kvstore.VersionMismatch:
		if p.Version == q.expected || p.Version == 0 && !missing || p.Version != 0 && !holds(p.Version) {
			fail("version %d instead of %d", p.Version, q.expected)
		}
	case p.Version != 0:
		fail("version %d", p.Version)
	}
}
