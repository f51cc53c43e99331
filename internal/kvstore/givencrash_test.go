package kvstore_test

import (
	"bytes"
	"fmt"
	"testing"

	"jbofd/internal/kvstore"
)

// TestAWriteWithAGivenVersionSurvivesACrashWithItsIdentity: a store takes writes whose versions are given in any order,
// several at once, and the process dies at every write to the drive. What was answered is there, an identity also if
// its write was superseded. When all writes were made again, in another order, the store has what it would have without
// the crash.
func TestAWriteWithAGivenVersionSurvivesACrashWithItsIdentity(t *testing.T) {
	t.Parallel()
	for seed := range kvstore.Seeds(t, 2) {
		for at, ends := 1, false; !ends; at += every(4) {
			ends = givenCrash(t, seed, at)
		}
	}
}

// givenCrash does that with a crash at one write, and reports whether there were fewer.
func givenCrash(t *testing.T, seed uint64, at int) (ended bool) {
	const keys, of = 6, 7 // as many writes of each key as identities that it keeps, less one
	r := newRig(t, seed, small(28))
	m := newModel(r, 1, func() int { return 0 })
	all := make([]*write, keys*of)
	for i := range all {
		q := kvstore.Request{Op: kvstore.Put, Tag: uint64(i), Key: fmt.Appendf(nil, "key%d", i%keys),
			Value: value(i, 1, 700*(i%5)), Given: uint64(10 + 3*i),
			ID: kvstore.Identity{Client: 3, Seq: uint64(i), KeepUntil: 4e9}}
		if i%5 == 4 {
			q.Op, q.Value, q.Tombstone = kvstore.Delete, nil, true
		}
		all[i] = &write{q: q}
	}
	superseded := 0
	r.reply = func(p kvstore.Reply) {
		w := all[p.Tag]
		if p.Status != kvstore.OK && p.Status != kvstore.Superseded {
			t.Fatalf("at write %d: request %d: %+v", at, p.Tag, p)
		}
		if p.Status == kvstore.Superseded {
			superseded++
		}
		w.answered, w.reply = true, p
	}
	do := func(order []int) {
		for n := 0; n < len(order) && !r.crashed; {
			if m.s.Submit(&all[order[n]].q) {
				n++
			}
			for k := r.rng.IntN(4); k > 0 && !r.crashed; k-- {
				r.step()
			}
		}
		for !r.crashed && !m.s.Idle() {
			r.step()
		}
	}
	r.crashIn, r.power = at, at%2 == 0
	do(r.rng.Perm(len(all)))
	if ended = !r.crashed; ended {
		r.crashIn = 0
		r.crash()
	}
	if err := m.open(); err != nil {
		t.Fatal(err)
	}
	for k := range keys {
		checkGiven(t, m, all, k, keys, fmt.Sprintf("at write %d, after it", at))
	}
	do(r.rng.Perm(len(all)))
	r.settle()
	r.turn()   // brings the last replies, and may begin a split
	r.settle() // which a recount must not find under way
	m.recount()
	for i, w := range all {
		if !w.answered {
			t.Fatalf("at write %d: request %d has no answer", at, i)
		}
	}
	for k := range keys {
		if last := checkGiven(t, m, all, k, keys, fmt.Sprintf("at write %d, in the end", at)); last != len(all)-keys+k {
			t.Fatalf("at write %d: key %d has the content of request %d", at, k, last)
		}
	}
	if superseded == 0 {
		t.Errorf("at write %d: nothing was superseded", at)
	}
	return ended
}

// checkGiven checks that a key has the content of one of its requests, which it returns, or -1, that none that was
// answered is newer, and that the identities of those that were answered are there.
func checkGiven(t *testing.T, m *model, all []*write, k, keys int, when string) (content int) {
	t.Helper()
	key := fmt.Appendf(nil, "key%d", k)
	content = -1
	newest := -1 // that the store knows
	for i := k; i < len(all); i += keys {
		w := all[i]
		// The conditions say that the store decides; neither holds, so that nothing changes.
		q := kvstore.Request{Op: kvstore.Put, Key: key, ID: w.q.ID, Given: 10_000, Condition: kvstore.IfVersion,
			Version: 9999}
		q.ID.Retry = true
		p := m.do(q)
		if w.answered && (p.Status != kvstore.OK || p.Version != w.q.Given) {
			t.Fatalf("%s: a retry of request %d, which was answered: %+v", when, i, p)
		}
		if p.Status == kvstore.OK {
			newest = i
		} else if p.Status != kvstore.VersionMismatch {
			t.Fatalf("%s: a retry of request %d: %+v", when, i, p)
		}
	}
	buf := make([]byte, 4000)
	p := m.do(kvstore.Request{Op: kvstore.Get, Key: key, Value: buf})
	for i := k; i < len(all); i += keys {
		q := &all[i].q
		if p.Status == kvstore.OK && p.Version == q.Given && bytes.Equal(buf[:p.ValueLen], q.Value) ||
			p.Status == kvstore.NotFound && q.Op == kvstore.Delete && i == newest {
			content = i
		}
	}
	if p.Status == kvstore.OK && content < 0 || p.Status != kvstore.OK && p.Status != kvstore.NotFound {
		t.Fatalf("%s: key %d: %+v", when, k, p)
	}
	if content >= 0 && content < newest || content < 0 && newest >= 0 && all[newest].answered {
		t.Fatalf("%s: key %d has the content of request %d, and the store knows request %d", when, k, content, newest)
	}
	return content
}
