package kvstore

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"testing"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/nvme"
	"jbofd/internal/pipeline"
)

// drop drops a range in a store and in its model. The clock is 0 or one that the Drop names.
func (r *ranged) drop(first, last, clock uint64) {
	r.tb.Helper()
	p := r.do(Request{Op: Drop, Range: Range{First: first, Last: last}, Version: clock})
	if p.Status != OK || clock != 0 && p.Version != clock {
		r.tb.Fatalf("a Drop: %+v", p)
	}
	for key, o := range r.has {
		if at := r.position(o.key); at >= first && at <= last && o.version <= p.Version {
			delete(r.has, key)
		}
	}
}

// checkpoint writes one.
func (r *ranged) checkpoint() {
	r.s.Checkpoint()
	r.run()
}

// TestDropsAgainstAModel: overlapping Drops, some with older clocks, with writes before and after them.
func TestDropsAgainstAModel(t *testing.T) {
	for seed := range Seeds(t, 3) {
		r := newRanged(t, seed, rangedConfigs[seed%2])
		for round := range 8 {
			for range 300 {
				r.change(600, 1000)
			}
			for range 1 + r.rng.IntN(4) {
				first, last := r.anyRange()
				clock := uint64(0)
				if r.rng.IntN(3) == 0 {
					clock = 1 + r.rng.Uint64N(r.s.clock)
				}
				r.drop(first, last, clock)
				r.check(r.anyRange())
			}
			if round%3 == 2 {
				r.checkpoint()
				r.run()
			}
		}
		r.check(0, math.MaxUint64)
		r.checkpoint()
		if len(r.s.drops.list) > 0 {
			t.Errorf("%d Drops are left after a checkpoint, %d of them swept", len(r.s.drops.list),
				len(r.s.drops.swept))
		}
		r.check(0, math.MaxUint64)
		if err := r.s.Recount(r.disk, true); err != nil {
			t.Error(err)
		}
		r.drop(0, math.MaxUint64, 0)
		if st := r.s.Stats(); st.Objects != 0 || st.LiveBytes != 0 {
			t.Errorf("everything was dropped, and there are %d objects and %d bytes", st.Objects, st.LiveBytes)
		}
		r.change(1, 100)
		r.check(0, math.MaxUint64)
	}
}

// TestADropLeavesNoRecordThatASplitHasEmptied: the record of a segment whose keys have all gone to new segments has
// nothing to leave out, and goes nevertheless.
func TestADropLeavesNoRecordThatASplitHasEmptied(t *testing.T) {
	r := newRanged(t, FixedSeed(t), rangedConfigs[0])
	emptied := func() bool {
		for n := range r.s.tbl.Len() {
			if e := r.s.tbl.Get(n); e != 0 {
				seg := format.Segment(r.disk[e.Offset():])
				seg = slices.Clone(seg[:seg.LengthBytes()])
				seg.Filter(func(key []byte) bool { return r.s.SegmentOf(key) == n })
				if seg.Vacant() {
					return true
				}
			}
		}
		return false
	}
	for n := 0; !emptied(); n++ {
		if n == 100_000 {
			t.Fatal("no split takes all keys of a segment")
		}
		r.do(Request{Op: Put, Key: fmt.Appendf(nil, "%d", n)})
	}
	r.drop(0, math.MaxUint64, 0)
	if st := r.s.Stats(); st.Objects != 0 || st.LiveBytes != 0 {
		t.Errorf("everything was dropped, and there are %d objects and %d bytes", st.Objects, st.LiveBytes)
	}
	if err := r.s.Recount(r.disk, true); err != nil {
		t.Error(err)
	}
}

// TestADropMakesRoomInAFullPartition: more than once.
func TestADropMakesRoomInAFullPartition(t *testing.T) {
	r := newRanged(t, FixedSeed(t), rangedConfigs[0])
	val := make([]byte, 5000)
	var most int
	for round := range 3 {
		n := 0
		for ; n < 5000; n++ {
			if p := r.do(Request{Op: Put, Key: fmt.Appendf(nil, "%d.%d", round, n), Value: val}); p.Status != OK {
				break
			}
		}
		if most = max(most, n); n < most*9/10 || n == 5000 {
			t.Errorf("round %d: %d values fit, %d before", round, n, most)
		}
		r.do(Request{Op: Drop, Range: Range{Last: math.MaxUint64}})
		r.run()
	}
}

// TestAListOfDropsHasAnEnd: while nothing can be swept 64 fit, and the others are refused, and do nothing. Drops that
// have the range of others replace them.
func TestAListOfDropsHasAnEnd(t *testing.T) {
	r := newRanged(t, FixedSeed(t), rangedConfigs[0])
	for range 300 {
		r.change(600, 100)
	}
	unreadable := func(q *IO) error {
		if q.Op == pipeline.Read {
			return errors.New("unreadable")
		}
		return nil
	}
	r.fail = unreadable
	for i := range uint64(format.MaxDrops) {
		r.drop(2*i<<50, 2*i<<50+1<<50, 0)
	}
	r.fail = nil
	if n := len(r.s.drops.list); n != format.MaxDrops {
		t.Fatalf("%d Drops are on the list", n)
	}
	if p := r.do(Request{Op: Drop, Range: Range{First: 1 << 63, Last: 1<<63 + 1}}); p.Status != NoMemory {
		t.Errorf("status %d, want NoMemory", p.Status)
	}
	r.check(0, math.MaxUint64)
	r.fail = unreadable
	r.drop(0, 1<<60, 0)
	r.fail = nil
	if n := len(r.s.drops.list); n != 1 {
		t.Errorf("%d Drops are on the list, want the one that has the others' ranges", n)
	}
	r.check(0, math.MaxUint64)
	p := r.do(Request{Op: Put, Condition: IfNewer, Version: 1, Key: r.keyIn(0, 1<<60)})
	if p.Status != Superseded {
		t.Errorf("a Put IfNewer with a version that was dropped: status %d", p.Status)
	}
	r.now += sweepAgainNS
	r.run()
	r.checkpoint()
	if n := len(r.s.drops.list); n != 0 {
		t.Errorf("%d Drops are left", n)
	}
}

// TestADamagedSegmentKeepsItsDropOnly: Drops elsewhere are swept and leave the list, and of the one that covers the
// damage what is sound is swept once. What is left of it is swept when the segment was repaired, and the list is empty
// when the store has rested for a while.
func TestADamagedSegmentKeepsItsDropOnly(t *testing.T) {
	r := newRanged(t, FixedSeed(t), rangedConfigs[0])
	val := make([]byte, 500)
	const n, end = 2000, 1<<61 - 1
	hurt := []byte(nil)
	for i := range n {
		key := fmt.Appendf(nil, "%d", i)
		if r.do(Request{Op: Put, Key: key, Value: val}); r.position(key) <= end {
			hurt = key
		}
	}
	r.checkpoint()
	r.disk[int64(r.s.tbl.Get(r.s.SegmentOf(hurt)).Offset())+40] ^= 0xff
	r.drop(0, end, 0)
	r.drop(end+1, math.MaxUint64, 0)
	r.run()
	if st := r.s.Stats(); st.Objects > 4*13 {
		t.Errorf("%d of %d objects are left, want those of the damaged segment", st.Objects, n)
	}
	reads := r.reads
	r.now += sweepAgainNS
	if r.run(); r.reads == reads || r.reads > reads+8 {
		t.Errorf("the next sweep takes %d reads", r.reads-reads)
	}
	for i := range uint64(format.MaxDrops + 10) {
		first := uint64(1)<<62 + i<<40
		r.drop(first, first+1<<39, 0)
	}
	r.checkpoint()
	if n := len(r.s.drops.list); n != 1 {
		t.Errorf("%d Drops are on the list, want one", n)
	}
	r.s.Audit(true)
	r.run() // the sweep does not wait for its time
	r.checkpoint()
	if n := len(r.s.drops.list); n != 0 {
		t.Errorf("%d Drops are left when the segment was repaired", n)
	}
	if err := r.s.Recount(r.disk, true); err != nil {
		t.Error(err)
	}
}

// TestADropOfNothingLeavesTheList: of a store that nobody writes to as well.
func TestADropOfNothingLeavesTheList(t *testing.T) {
	r := newRanged(t, FixedSeed(t), rangedConfigs[0])
	r.do(Request{Op: Put, Key: []byte("key")})
	r.checkpoint()
	at := r.position([]byte("key"))
	r.drop(at+1, at+1, 0)
	if n := len(r.s.drops.list); n != 1 {
		t.Fatalf("%d Drops are on the list", n)
	}
	if !r.s.Dropping(at-1, at+2, false) || !r.s.Dropping(at+1, at+1, false) || r.s.Dropping(at+2, at+9, false) ||
		r.s.Dropping(0, at, false) {
		t.Error("the store does not tell where it is dropping")
	}
	checkpoints := r.s.Stats().Checkpoints
	for range 10 {
		r.now += 60e9
		r.run()
	}
	if n, more := len(r.s.drops.list), r.s.Stats().Checkpoints-checkpoints; n != 0 || more != 1 {
		t.Errorf("%d Drops are left after %d checkpoints", n, more)
	}
	if r.s.Dropping(0, math.MaxUint64, false) {
		t.Error("a Drop that is over counts")
	}
	// One that is waited for leaves the list at once.
	r.drop(at+1, at+1, 0)
	if !r.s.Dropping(at, at+1, true) {
		t.Error("a Drop on the list does not count")
	}
	r.run()
	if r.s.Dropping(at, at+1, false) {
		t.Error("a Drop that was swept stays on the list though somebody waits for its end")
	}
}

// TestADropCountsFromWhenItIsSubmitted: also while its superblocks are being written, and when that has failed, because
// it may take effect later.
func TestADropCountsFromWhenItIsSubmitted(t *testing.T) {
	r := newRanged(t, FixedSeed(t), rangedConfigs[0])
	r.do(Request{Op: Put, Key: []byte("key")})
	if !r.s.Submit(&Request{Op: Drop, Range: Range{First: 5, Last: 7}, Tag: 1}) || !r.s.Dropping(7, 9, false) {
		t.Fatal("a Drop that was submitted does not count")
	}
	var acts Actions
	r.s.Turn(r.now, &acts)
	failed := 0
	for i := range acts.IOs {
		if q := &acts.IOs[i]; q.Op == pipeline.Write {
			failed++
			r.s.Complete(q.Tag, errors.New("failed"))
		}
	}
	if failed != 1 {
		t.Fatalf("%d writes of a superblock", failed)
	}
	acts = Actions{}
	r.s.Turn(r.now, &acts)
	if len(acts.Replies) != 1 || acts.Replies[0].Status != DeviceError || !r.s.Dropping(7, 9, false) {
		t.Errorf("a Drop whose outcome is not known does not count: %+v", acts.Replies)
	}
}

// keyIn returns a key in a range of positions that the store does not have.
func (r *ranged) keyIn(first, last uint64) []byte {
	for i := 0; ; i++ {
		key := fmt.Appendf(nil, "new %d", i)
		if p := r.position(key); p >= first && p <= last {
			return key
		}
	}
}

// TestWhatWasDroppedIsCopiedInAgain: as long as a Drop covers an entry a CopyIn is refused as a whole, and lets the
// Drop leave the list. Then it restores what was dropped, also of keys of which identities are left. It never ends with
// OK and without what it was to store.
func TestWhatWasDroppedIsCopiedInAgain(t *testing.T) {
	for _, clock := range []uint64{0, MaxCopied} {
		a, b := twins(t, FixedSeed(t))
		for range 300 {
			a.change(600, 100)
		}
		for i := range uint64(50) {
			key, id := fmt.Appendf(nil, "identified %d", i), Identity{Client: 7, Seq: i + 1}
			if i%2 == 0 {
				id.KeepUntil = a.wall + 1000
			}
			p := a.do(Request{Op: Put, Key: key, Value: key, ID: id})
			a.has[string(key)] = object{key: key, value: key, version: p.Version}
		}
		batch := make([]byte, 1<<20)
		p := a.do(Request{Op: CopyOut, Range: Range{Last: math.MaxUint64}, Value: batch})
		batch = batch[:p.ValueLen]
		if !nvme.KVRange(batch).Complete() || p.Status != OK {
			t.Fatalf("a CopyOut: %+v", p)
		}
		in := Request{Op: CopyIn, Value: batch, Version: clock, Restore: clock == 0}
		if p := b.do(in); p.Status != OK {
			t.Fatalf("a CopyIn: %+v", p)
		}
		b.has = maps.Clone(a.has)
		for round := range 2 {
			b.drop(1<<62, 1<<63, 0)
			dropped := len(a.has) - len(b.has)
			if dropped < 20 {
				t.Fatalf("%d objects are dropped", dropped)
			}
			if p := b.do(in); p.Status != Superseded || p.ValueLen != 0 {
				t.Errorf("round %d: a CopyIn of what a Drop covers: %+v", round, p)
			}
			for key, o := range a.has {
				_, kept := b.has[key]
				if p := b.do(Request{Op: Exist, Key: o.key}); kept != (p.Status == OK) && !o.tombstone {
					t.Fatalf("round %d: key %q: status %d, kept %v", round, key, p.Status, kept)
				}
			}
			if p := b.do(in); p.Status != OK || p.ValueLen < dropped {
				t.Errorf("round %d: a CopyIn after the Drop: %+v, %d Drops on the list, %d objects dropped", round, p,
					len(b.s.drops.list), dropped)
			}
			out := make([]byte, 1<<20)
			p := b.do(Request{Op: CopyOut, Range: Range{Last: math.MaxUint64}, Value: out})
			if h := nvme.KVRangeHeaderBytes; !bytes.Equal(batch[h:], out[h:p.ValueLen]) {
				t.Errorf("round %d: what was copied in is not what was copied out", round)
			}
			b.has = maps.Clone(a.has)
		}
	}
}

// TestAnImportRestoresOlderObjectsOfKeysThatAreGone: of a key that was overwritten and then deleted or dropped
// identities are left, with a newer version. A CopyIn that restores stores the object of the export, with a new
// version, and only once. Any other one leaves the key as it is, as all do that has a tombstone.
func TestAnImportRestoresOlderObjectsOfKeysThatAreGone(t *testing.T) {
	r := newRanged(t, FixedSeed(t), rangedConfigs[0])
	write := func(q Request) {
		t.Helper()
		if p := r.do(q); p.Status != OK {
			t.Fatalf("op %d of %q: status %d", q.Op, q.Key, p.Status)
		}
	}
	id := Identity{Client: 9}
	next := func() Identity { id.Seq++; return id }
	keys := []string{"dropped", "deleted", "with a tombstone", "there", "never again"}
	for _, key := range keys {
		write(Request{Op: Put, Key: []byte(key), Value: []byte("old"), ID: next()})
	}
	batch := make([]byte, 1<<20)
	p := r.do(Request{Op: CopyOut, Range: Range{Last: math.MaxUint64}, Value: batch})
	batch = batch[:p.ValueLen]
	for _, key := range keys[:4] {
		write(Request{Op: Put, Key: []byte(key), Value: []byte("new"), ID: next()})
	}
	write(Request{Op: Delete, Key: []byte("deleted"), ID: next()})
	write(Request{Op: Delete, Key: []byte("with a tombstone"), Tombstone: true, ID: next()})
	at := r.position([]byte("dropped"))
	write(Request{Op: Drop, Range: Range{First: at, Last: at}})
	r.checkpoint()
	want := map[string]string{"there": "new", "never again": "old"}
	check := func(when string) (versions []uint64) {
		t.Helper()
		for _, key := range keys {
			value := make([]byte, 10)
			p := r.do(Request{Op: Get, Key: []byte(key), Value: value})
			if got := string(value[:p.ValueLen]); p.Status == OK && got != want[key] ||
				p.Status != OK && (p.Status != NotFound || want[key] != "") {
				t.Errorf("%s: %q is %q with status %d, want %q", when, key, got, p.Status, want[key])
			}
			versions = append(versions, p.Version)
		}
		return versions
	}
	before := check("before an import")
	newest := r.s.clock
	if p := r.do(Request{Op: CopyIn, Value: batch}); p.Status != OK || p.ValueLen != 0 {
		t.Errorf("a copy: %+v", p)
	}
	check("after a copy")
	want["dropped"], want["deleted"] = "old", "old"
	for round, stored := range []int{2, 0} {
		if p := r.do(Request{Op: CopyIn, Value: batch, Restore: true}); p.Status != OK || p.ValueLen != stored {
			t.Errorf("import %d: %+v, want %d stored", round, p, stored)
		}
		got := check(fmt.Sprintf("after import %d", round))
		for i, key := range keys {
			if new := i < 2; new != (got[i] > newest) || !new && got[i] != before[i] {
				t.Errorf("import %d: %q has version %d, before %d; the newest was %d", round, key, got[i], before[i],
					newest)
			}
		}
	}
	out := make([]byte, 1<<20)
	p = r.do(Request{Op: CopyOut, Range: Range{Last: math.MaxUint64}, Value: out})
	if err := nvme.KVRange(out[:p.ValueLen]).Check(); err != nil {
		t.Error(err)
	}
	if err := r.s.Recount(r.disk, true); err != nil {
		t.Error(err)
	}
}
