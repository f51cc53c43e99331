package kvstore_test

import (
	"bytes"
	"fmt"
	"math"
	"slices"
	"testing"

	"jbofd/internal/kvstore"
	"jbofd/internal/kvstore/format"
)

// write is a request with an identity, and what is known about it.
type write struct {
	q        kvstore.Request
	answered bool
	reply    kvstore.Reply
}

// TestARepeatedWriteIsDoneOnce: a history of identified writes is cut off by a crash at every write to the drive. All
// of its requests are repeated, those without an answer first, and then again and again, with splits, compaction and
// restarts between: each has changed its key once.
func TestARepeatedWriteIsDoneOnce(t *testing.T) {
	t.Parallel()
	for seed := range kvstore.Seeds(t, 2) {
		for at, ends := 1, false; !ends; at += every(3) {
			r := newRig(t, seed, small(28))
			m := newModel(r, 1, func() int { return 0 })
			var all []*write
			r.reply = func(p kvstore.Reply) {
				w := all[p.Tag]
				if w.answered && (p.Status != w.reply.Status || p.Version != w.reply.Version) {
					t.Fatalf("at write %d: request %d is answered with %+v, it was %+v", at, p.Tag, p, w.reply)
				}
				w.reply, w.answered = p, true
			}
			key := func(i int) []byte { return fmt.Appendf(nil, "key%d", i%6) }
			for i := range 40 {
				w := &write{q: kvstore.Request{Op: kvstore.Put, Tag: uint64(i), Key: key(i),
					Value: value(i, 1, 700*(i%5)),
					ID:    kvstore.Identity{Client: uint64(1 + i%3), Seq: uint64(i), KeepUntil: r.wall() + 100_000}}}
				if i%7 == 6 {
					w.q.Op, w.q.Value = kvstore.Delete, nil
				}
				all = append(all, w)
			}
			r.crashIn, r.power = at, at%2 == 0
			for i := 0; i < len(all) && !r.crashed; {
				if m.s.Submit(&all[i].q) {
					i++
				}
				for n := r.rng.IntN(4); n > 0 && !r.crashed; n-- {
					r.step()
				}
			}
			for !r.crashed && !m.s.Idle() {
				r.step()
			}
			if ends = !r.crashed; ends {
				r.crashIn, r.crashed = 0, false
				r.crash()
			}
			for round := range 4 {
				if err := m.open(); err != nil {
					t.Fatal(err)
				}
				order := r.rng.Perm(len(all))
				slices.SortStableFunc(order, func(a, b int) int {
					if all[a].answered == all[b].answered {
						return 0
					} else if all[b].answered {
						return -1
					}
					return 1
				})
				for _, i := range order {
					if all[i].answered && all[i].reply.Status == kvstore.NotFound {
						continue // it has changed nothing, which need not be remembered
					}
					all[i].q.ID.Retry = true
					for !m.s.Submit(&all[i].q) {
						r.step()
					}
				}
				r.settle()
				r.turn()   // brings the last replies, and may begin a split
				r.settle() // which a recount must not find under way
				m.recount()
				checkDoneOnce(t, m, all, fmt.Sprintf("at write %d, round %d", at, round))
				for i := range 40 { // the table grows
					m.do(kvstore.Request{Op: kvstore.Put, Key: fmt.Appendf(nil, "more%d", 40*round+i),
						Value: make([]byte, 2000)})
				}
				r.settle()
				r.crash()
			}
		}
	}
}

// checkDoneOnce checks that each key has the content of that request of its own that was given the greatest version.
func checkDoneOnce(t *testing.T, m *model, all []*write, when string) {
	t.Helper()
	before := m.reply
	defer func() { m.reply = before }()
	for k := range 6 {
		var last *write
		for i, w := range all {
			if !w.answered {
				t.Fatalf("%s: request %d has no answer", when, i)
			}
			if i%6 == k && w.reply.Status == kvstore.OK && (last == nil || w.reply.Version > last.reply.Version) {
				last = w
			}
		}
		buf := make([]byte, 4000)
		p := m.do(kvstore.Request{Op: kvstore.Get, Key: fmt.Appendf(nil, "key%d", k), Value: buf})
		if last.q.Op == kvstore.Delete && p.Status == kvstore.NotFound {
			continue
		}
		if last.q.Op == kvstore.Delete || p.Status != kvstore.OK || p.Version != last.reply.Version ||
			!bytes.Equal(buf[:p.ValueLen], last.q.Value) {
			t.Fatalf("%s: key %d: %+v, want version %d of request %d", when, k, p, last.reply.Version, last.q.Tag)
		}
	}
}

// TestARetryWhoseIdentityMayBeGoneIsNotDone: of the requests that have changed a key the last MaxIdentities are
// remembered, for as long as they have asked for.
func TestARetryWhoseIdentityMayBeGoneIsNotDone(t *testing.T) {
	r := newRig(t, seeds(t), small(28))
	m := newModel(r, 1, func() int { return 0 })
	put := func(seq uint64, retry bool) kvstore.Reply {
		return m.do(kvstore.Request{Op: kvstore.Put, Key: []byte("key"), Value: []byte{byte(seq)},
			ID: kvstore.Identity{Client: 1, Seq: seq, KeepUntil: 1e9 + 1e6 + uint32(seq),
				Retry: retry}})
	}
	want := func(p kvstore.Reply, st kvstore.Status, version uint64) {
		t.Helper()
		if p.Status != st || p.Version != version {
			t.Fatalf("status %d, version %d, want %d, %d", p.Status, p.Version, st, version)
		}
	}
	const most = format.MaxIdentities
	want(put(1, true), kvstore.OK, 2) // nothing can have been dropped
	for seq := uint64(2); seq <= most; seq++ {
		want(put(seq, false), kvstore.OK, seq+1)
	}
	for seq := uint64(1); seq <= most; seq++ {
		want(put(seq, true), kvstore.OK, seq+1)
		want(put(seq, false), kvstore.OK, seq+1) // a first try that a retry has overtaken
	}
	want(put(most+1, false), kvstore.OK, most+2)
	want(put(1, true), kvstore.Indeterminate, 0)
	want(put(199, true), kvstore.Indeterminate, 0)
	want(put(2, true), kvstore.OK, 3)
	want(m.do(kvstore.Request{Op: kvstore.Delete, Key: []byte("key")}), kvstore.OK, most+3)
	want(put(most+1, true), kvstore.OK, most+2)
	want(put(1, true), kvstore.Indeterminate, 0)
	want(m.do(kvstore.Request{Op: kvstore.Exist, Key: []byte("key")}), kvstore.NotFound, 0)
	// When all of them may be dropped, a retry that asks for more time is a request like any other.
	r.now = (1e6 + most + 1) * 1e9
	want(put(most+1, true), kvstore.Indeterminate, 0)
	want(put(200, true), kvstore.OK, most+4)
}

// TestADamagedSegmentMakesRetriesIndeterminate: their identities may have been in it.
func TestADamagedSegmentMakesRetriesIndeterminate(t *testing.T) {
	r := newRig(t, seeds(t), small(28))
	m := newModel(r, 1, func() int { return 0 })
	q := kvstore.Request{Op: kvstore.Put, Key: []byte("key"), Value: []byte("a"),
		ID: kvstore.Identity{Client: 1, Seq: 1}}
	if p := m.do(q); p.Status != kvstore.OK {
		t.Fatal(p)
	}
	m.settle()
	at, _ := m.s.Place([]byte("key"))
	copied := make([]byte, 1000)
	copied = copied[:m.do(kvstore.Request{Op: kvstore.CopyOut, Range: kvstore.Range{Last: math.MaxUint64},
		Value: copied}).ValueLen]
	r.dev.Visible[at+format.SegmentHeaderBytes] ^= 1
	r.dev.Durable[at+format.SegmentHeaderBytes] ^= 1
	q.ID.Retry = true
	if p := m.do(q); p.Status != kvstore.Indeterminate {
		t.Errorf("%+v, want Indeterminate", p)
	}
	if p := m.do(kvstore.Request{Op: kvstore.CopyIn, Value: copied}); p.Status != kvstore.OK || p.ValueLen != 1 {
		t.Errorf("%+v, want 1 entry", p)
	}
	if p := m.do(q); p.Status != kvstore.OK {
		t.Errorf("%+v when a copy has brought it back", p)
	}
	q.ID.Seq = 3
	if p := m.do(q); p.Status != kvstore.Indeterminate {
		t.Errorf("%+v, want Indeterminate", p)
	}
	q.ID.Retry, q.ID.Seq = false, 2
	first := m.do(q)
	if first.Status != kvstore.OK {
		t.Fatalf("%+v", first)
	}
	q.ID.Retry = true
	if p := m.do(q); p.Status != kvstore.OK || p.Version != first.Version {
		t.Errorf("%+v, want %+v", p, first)
	}
}

// TestAFullPartitionOfIdentitiesStillServes: every key has as many identities as it may have, and none may go. Retries
// are answered as before, overwrites and Deletes find room, and the Deletes give it back.
func TestAFullPartitionOfIdentitiesStillServes(t *testing.T) {
	kvstore.PlainOnly(t)
	t.Parallel()
	r := newRig(t, seeds(t), small(28))
	replies := map[uint64]kvstore.Reply{}
	r.reply = func(p kvstore.Reply) { replies[p.Tag] = p }
	tag := uint64(0)
	submit := func(q kvstore.Request) uint64 {
		tag++
		q.Tag = tag
		for n := 0; !r.s.Submit(&q); n++ {
			if r.step(); n > 1e5 {
				t.Fatalf("request %d is not taken: %+v\n%s", tag, r.s.Stats(), r.s.State())
			}
		}
		return tag
	}
	settle := func() {
		t.Helper()
		r.settle()
		if r.turn(); len(replies) != int(tag) {
			t.Fatalf("%d replies to %d requests", len(replies), tag)
		}
	}
	key := func(i int) []byte { return fmt.Appendf(nil, "k%d", i) }
	put := func(i, seq int, retry bool) kvstore.Request {
		return kvstore.Request{Op: kvstore.Put, Key: key(i), Value: make([]byte, 20),
			ID: kvstore.Identity{Client: 1, Seq: uint64(i*100 + seq), Retry: retry}}
	}
	first := map[int]kvstore.Reply{}
	keys := 0
	for full := false; !full; keys++ {
		tags := [format.MaxIdentities]uint64{}
		for seq := range tags {
			tags[seq] = submit(put(keys, seq, false))
		}
		settle()
		for _, at := range tags {
			full = full || replies[at].Status == kvstore.CapacityExceeded
			if st := replies[at].Status; st != kvstore.OK && st != kvstore.CapacityExceeded {
				t.Fatalf("status %d", st)
			}
		}
		if first[keys] = replies[tags[0]]; keys > 20_000 {
			t.Fatal("it does not become full")
		}
	}
	r.recountRig()
	for i := range keys - 1 {
		at := submit(put(i, 0, true))
		again := submit(put(i, 99, true)) // it was never made, and there is no room for it
		settle()
		if p := replies[at]; p.Status != kvstore.OK || p.Version != first[i].Version {
			t.Fatalf("a retry of %+v: %+v", first[i], p)
		}
		if st := replies[again].Status; st != kvstore.CapacityExceeded && st != kvstore.OK {
			t.Fatalf("a new request: status %d", st)
		}
	}
	for round := range 3 {
		for i := range keys {
			submit(kvstore.Request{Op: kvstore.Put, Key: key(i), Value: make([]byte, 1+7*round)})
			if i%20 == 0 {
				settle()
			}
		}
	}
	settle()
	for i := range keys {
		at := submit(kvstore.Request{Op: kvstore.Delete, Key: key(i), ID: kvstore.Identity{Client: 2, Seq: uint64(i)}})
		if settle(); replies[at].Status != kvstore.OK && i < keys-1 {
			t.Fatalf("Delete of key %d: status %d: %+v", i, replies[at].Status, r.s.Stats())
		}
	}
	r.recountRig()
	if st := r.s.Stats(); st.Objects != 0 {
		t.Errorf("%d objects are left", st.Objects)
	}
	t.Logf("%d keys, %+v", keys, r.s.Stats())
}

// recountRig compares the counters with the content of the SSD, when nothing is under way: the turn that has returned
// the last reply may have begun a split.
func (r *rig) recountRig() {
	r.t.Helper()
	r.settle()
	if err := r.s.Recount(r.dev.Visible, true); err != nil {
		r.t.Fatal(err)
	}
}

// TestAnsweredWritesAreForgotten: a key that one client writes again and again, of which a few writes have no answer
// yet. Their retries get their results, one that was never made is made, and those of other clients are remembered.
func TestAnsweredWritesAreForgotten(t *testing.T) {
	for _, given := range []bool{false, true} {
		r := newRig(t, seeds(t), small(28))
		m := newModel(r, 1, func() int { return 0 })
		version := uint64(1000)
		put := func(client, seq, answered uint64, retry bool) kvstore.Reply {
			q := kvstore.Request{Op: kvstore.Put, Key: []byte("key"), Value: []byte{byte(seq)},
				ID: kvstore.Identity{Client: client, Seq: seq, Answered: answered, Retry: retry}}
			if given {
				version++
				q.Given = version
			}
			return m.do(q)
		}
		type answer struct{ client, seq, version uint64 }
		var open []answer
		ok := func(p kvstore.Reply) uint64 {
			t.Helper()
			if p.Status != kvstore.OK {
				t.Fatalf("given %v: %+v", given, p)
			}
			return p.Version
		}
		open = append(open, answer{2, 5, ok(put(2, 5, 0, false))}) // another client, with a lower number
		for seq := uint64(10); seq < 20*format.MaxIdentities; seq++ {
			answered := uint64(0)
			if seq > 20 {
				answered = seq - 10
			}
			v := ok(put(1, seq, answered, false))
			if open = append(open, answer{1, seq, v}); len(open) > 12 {
				open = append(open[:1], open[2:]...)
			}
			if seq%7 == 0 {
				r.settle()
				r.crash()
				if err := m.open(); err != nil {
					t.Fatal(err)
				}
			}
			for _, a := range open {
				if p := put(a.client, a.seq, 0, true); p.Status != kvstore.OK || p.Version != a.version {
					t.Fatalf("given %v: a retry of %+v after %d: %+v", given, a, seq, p)
				}
			}
		}
		never := put(1, 5000, 0, true)
		if ok(never); never.Version <= open[len(open)-1].version {
			t.Errorf("given %v: a retry of what was never made: %+v", given, never)
		}
		// Some are evicted: that is known also when all that are left have been answered.
		for seq := uint64(6000); seq < 6000+format.MaxIdentities; seq++ {
			ok(put(1, seq, 0, false))
		}
		ok(put(1, 7000, 7000, false))
		if p := put(2, 5, 0, true); p.Status != kvstore.Indeterminate {
			t.Errorf("given %v: a retry of an evicted one: %+v", given, p)
		}
		if p := put(1, 7000, 0, true); p.Status != kvstore.OK {
			t.Errorf("given %v: a retry of the last one: %+v", given, p)
		}
	}
}

// TestEvictionsAreForgottenInTime: a key that is written all the time had more writes in flight at once than it has
// identities, for a while. Retries that are not found are Indeterminate for as long as those were to be kept that were
// evicted, and then are requests like any others, although the key has always had identities since.
func TestEvictionsAreForgottenInTime(t *testing.T) {
	const keep, evicted = 20_000, 10
	for _, given := range []bool{false, true} {
		r := newRig(t, seeds(t), small(28))
		m := newModel(r, 1, func() int { return 0 })
		seq, version, end := uint64(0), uint64(1000), uint32(0)
		put := func(answered uint64, retry bool) kvstore.Status {
			seq++
			q := kvstore.Request{Op: kvstore.Put, Key: []byte("key"), Value: []byte{byte(seq)},
				ID: kvstore.Identity{Client: 1, Seq: seq, Answered: answered, Retry: retry, KeepUntil: r.wall() + keep}}
			if seq == evicted+1 {
				end = q.ID.KeepUntil // the oldest one that is left
			}
			if given {
				version++
				q.Given = version
			}
			return m.do(q).Status
		}
		for range format.MaxIdentities + evicted {
			if st := put(0, false); st != kvstore.OK {
				t.Fatal(st)
			}
		}
		unsure, sure := 0, 0
		for range 60 {
			r.now += 1000 * 1e9
			for range 5 {
				if st := put(seq-3, false); st != kvstore.OK {
					t.Fatal(st)
				}
			}
			before := r.wall()
			st := put(seq-3, true)
			switch {
			case before >= end && st == kvstore.OK:
				sure++
			case r.wall() < end && st == kvstore.Indeterminate:
				unsure++
			case before >= end || r.wall() < end:
				t.Fatalf("given %v: a retry of what was never made: %d at %d; evicted ones were to be kept until %d",
					given, st, before, end)
			}
		}
		if sure < 5 || unsure < 5 {
			t.Errorf("given %v: %d retries were made, %d were Indeterminate", given, sure, unsure)
		}
	}
}
