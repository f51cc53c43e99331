package kvstore_test

import (
	"bytes"
	"fmt"
	"math"
	"slices"
	"testing"

	"jbofd/internal/kvstore"
	"jbofd/internal/lab"
	"jbofd/internal/nvme"
	"jbofd/internal/ssd"
)

// TestRangesWhileEverythingMoves: objects that nobody changes are returned exactly once, with their values, while
// others are written, segments are split, chunks are compacted and reused, and reads overtake each other.
func TestRangesWhileEverythingMoves(t *testing.T) {
	// A split moved the keys behind the cursor of a CopyOut that waited to read values.
	rangesWhileEverythingMoves(t, 593574968096882)
	for seed := range kvstore.Seeds(t, times(3)) {
		rangesWhileEverythingMoves(t, seed)
	}
}

func rangesWhileEverythingMoves(t *testing.T, seed uint64) {
	const rangeTag, stable = 1 << 61, 150
	r := newRig(t, seed, variant(seed, 32))
	m := newModel(r, 300+int(seed%2)*300, sizes(r.rng, 8000))
	versions := map[string]uint64{}
	valueOf := func(name string) []byte { return bytes.Repeat([]byte(name), 1+len(name)*int(name[1])%900) }
	for i := range stable {
		name := fmt.Sprintf("s%d", i)
		p := m.do(kvstore.Request{Op: kvstore.Put, Key: []byte(name), Value: valueOf(name),
			ID: kvstore.Identity{Client: 5, Seq: uint64(i)}})
		if p.Status != kvstore.OK {
			t.Fatalf("%+v", p)
		}
		versions[name] = p.Version
	}
	var got *kvstore.Reply
	r.reply = func(p kvstore.Reply) {
		if p.Tag == rangeTag {
			got = &p
		} else {
			m.check(p)
		}
	}
	walks := 0
	for before := m.s.Stats(); m.s.Stats().Compactions < before.Compactions+20 && walks < 40 || walks < 6; walks++ {
		op := []kvstore.Op{kvstore.CopyOut, kvstore.Scan, kvstore.Count}[walks%3]
		seen := map[string]bool{}
		buf := make([]byte, 150000)
		q := kvstore.Request{Op: op, Tag: rangeTag, Range: kvstore.Range{Last: math.MaxUint64}, Value: buf,
			Background: walks%2 == 0}
		for complete := false; !complete; {
			q.Value = buf[:9000+r.rng.IntN(len(buf)-9000)]
			for got = nil; !m.s.Submit(&q); {
				m.step()
			}
			for got == nil {
				if len(m.reqs) < 20 && r.rng.IntN(3) == 0 {
					m.submit(kvstore.Put, kvstore.Always, r.rng.IntN(len(m.keys)), m.size())
				}
				m.step()
			}
			b := nvme.KVRange(q.Value[:got.ValueLen])
			if got.Status != kvstore.OK || b.Check() != nil || b.Lost() {
				t.Fatalf("%+v, %v", got, b.Check())
			}
			if op != kvstore.Count {
				for e := range b.Entries() {
					name := string(e.Key())
					if seen[name] {
						t.Fatalf("%q is returned twice", name)
					}
					seen[name] = true
					if v, ok := versions[name]; ok && (v != e.Version() ||
						op == kvstore.CopyOut && (!bytes.Equal(e.Value(), valueOf(name)) || e.Identities() != 1 ||
							e.Identity(0).Version != v)) {
						t.Fatalf("%q has version %d, %d bytes, %d identities", name, e.Version(), e.ValueLen(),
							e.Identities())
					}
				}
			}
			to := b.To()
			complete, q.Range.From, q.Key = b.Complete(), to.Position, bytes.Clone(to.Key[:to.KeyLen])
		}
		for name := range versions {
			if op != kvstore.Count && !seen[name] {
				t.Fatalf("op %d does not return %q", op, name)
			}
		}
	}
	m.finish()
	m.settle()
	t.Logf("%d walks, %+v", walks, m.s.Stats())
}

// TestACopyOutReturnsOneChangeOfAnObject: its version, expiry and value belong together, also if the object is put
// again while the value is read, and the read then fails. If the length has changed, the object comes with the next
// CopyOut.
func TestACopyOutReturnsOneChangeOfAnObject(t *testing.T) {
	for _, n := range []int{1000, 999, 1001, 0} {
		r := newRig(t, seeds(t), small(32))
		m := newModel(r, 1, nil)
		key, old, next := []byte("key"), bytes.Repeat([]byte{1}, 1000), bytes.Repeat([]byte{2}, n)
		type change struct {
			version uint64
			expires uint32
			value   []byte
		}
		expires := r.wall() + 1000
		changes := []change{{m.do(kvstore.Request{Op: kvstore.Put, Key: key, Value: old}).Version, 0, old}}
		m.settle()
		const rangeTag = 1 << 61
		var got *kvstore.Reply
		r.reply = func(p kvstore.Reply) {
			switch p.Tag {
			case rangeTag:
				got = &p
			case 1:
				changes = append(changes, change{p.Version, expires, next})
			}
		}
		reads, held := 0, uint64(0)
		r.dev.Hold = func(q *ssd.Request) int64 {
			if reads++; reads != 2 {
				return 0 // that of the segment comes first
			}
			held = q.Tag
			return 1e15
		}
		q := kvstore.Request{Op: kvstore.CopyOut, Tag: rangeTag, Range: kvstore.Range{Last: math.MaxUint64},
			Value: make([]byte, 9000)}
		for !m.s.Submit(&q) {
			m.step()
		}
		for r.turn(); reads < 2; r.turn() {
			m.step()
		}
		r.dev.Hold = nil
		m.s.Submit(&kvstore.Request{Op: kvstore.Put, Tag: 1, Key: key, Value: next, Expires: expires})
		for len(changes) < 2 {
			m.step()
		}
		r.dev.Fault = func(f *ssd.Request) lab.Outcome {
			if f.Op == ssd.Read && f.Tag == held {
				held = math.MaxUint64
				return lab.FailUndone
			}
			return lab.Good
		}
		for i := range r.dev.Flights {
			r.dev.Flights[i].DueNS = r.now
		}
		if got != nil {
			t.Fatal("the CopyOut has ended, although its read was held")
		}
		found := 0
		for complete := false; !complete; {
			for got == nil {
				m.step()
			}
			b := nvme.KVRange(q.Value[:got.ValueLen])
			if got.Status != kvstore.OK || b.Check() != nil || b.Lost() {
				t.Fatalf("%d bytes: %+v, %v", n, got, b.Check())
			}
			for e := range b.Entries() {
				found++
				if !slices.ContainsFunc(changes, func(c change) bool {
					return c.version == e.Version() && c.expires == e.Expires() && bytes.Equal(c.value, e.Value())
				}) {
					t.Errorf("%d bytes: version %d, expiry %d, a value of %d bytes that begins with %d", n, e.Version(),
						e.Expires(), e.ValueLen(), append(e.Value(), 0)[0])
				}
			}
			to := b.To()
			if complete = b.Complete(); !complete {
				q.Range.From, q.Key = to.Position, bytes.Clone(to.Key[:to.KeyLen])
				for got = nil; !m.s.Submit(&q); {
					m.step()
				}
			}
		}
		if found != 1 {
			t.Errorf("%d bytes: the object is returned %d times", n, found)
		}
	}
}
