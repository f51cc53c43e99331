package kvstore_test

import (
	"bytes"
	"fmt"
	"math"
	"testing"

	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
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
		p := m.do(kvstore.Request{Op: kvstore.Put, Key: []byte(name), Value: valueOf(name)})
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
						op == kvstore.CopyOut && !bytes.Equal(e.Value(), valueOf(name))) {
						t.Fatalf("%q has version %d, %d bytes", name, e.Version(), e.ValueLen())
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
