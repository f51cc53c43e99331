package kvstore

import (
	"encoding/binary"
	"math"
	"slices"
	"testing"

	"jbofd/internal/nvme"
)

// tinyBatch is the longest batch of a store that has n keys of 4 bytes at most, without values: 32,000 entries if there
// are as many. Gone says that it has only an identity of each key, which has expired.
func tinyBatch(r *ranged, n int, version uint64, gone bool) nvme.KVRange {
	type at struct {
		position uint64
		key      uint32
	}
	var all []at
	key := make([]byte, 4)
	for i := range uint32(n) {
		binary.LittleEndian.PutUint32(key, i)
		all = append(all, at{r.position(key), i})
	}
	slices.SortFunc(all, func(a, b at) int {
		if a.position < b.position {
			return -1
		}
		return 1
	})
	b := nvme.NewKVRange(make([]byte, MaxRangeBytes), nvme.KVCopy, 0, math.MaxUint64, nvme.KVCursor{})
	identities := 0
	if gone {
		identities = 1
	}
	for _, a := range all {
		binary.LittleEndian.PutUint32(key, a.key)
		e, next, ok := b.Append(key, 0, identities)
		if !ok {
			break
		}
		b = next
		e.SetPosition(a.position)
		if e.SetVersion(version); gone {
			e.SetGone()
			e.SetIdentity(0, nvme.KVIdentity{Client: 1, Seq: 1, Version: 1, KeepUntil: 1})
		}
	}
	b.SetTo(nvme.KVLastOf(math.MaxUint64))
	b.SetFlags(nvme.KVComplete)
	b.Seal()
	return b
}

// copyWork is what one turn has done for CopyIns, at most: entries that it has looked at, and begun, bytes that it has
// summed up, and the work that it has counted.
type copyWork struct{ looked, begun, summed, counted int }

// copyInByTurns runs CopyIns and returns how many turns that takes, and the most that one of them has done.
func copyInByTurns(r *ranged, q ...Request) (turns int, most copyWork, replies []Reply) {
	r.tb.Helper()
	for i := range q {
		q[i].Tag = uint64(i)
		if !r.s.Submit(&q[i]) {
			r.tb.Fatal("a CopyIn is not taken")
		}
	}
	type state struct {
		valid       bool
		at, looked  int
		begun, done int
	}
	states := func() (all [MaxCopyIns]state) {
		for i := range r.s.copyIns {
			switch c := &r.s.copyIns[i]; {
			case c.b == nil:
			case c.valid:
				all[i] = state{valid: true, begun: nvme.KVRange(c.b).Items() - c.left}
			default:
				all[i] = state{looked: c.left, at: c.checker.At()}
			}
		}
		return all
	}
	before := states()
	for ; len(replies) < len(q); turns++ {
		if turns > 1e5 {
			r.tb.Fatal("the CopyIns do not end")
		}
		r.s.Turn(r.now, &r.act)
		r.now += 1000
		replies = append(replies, r.act.Replies...)
		r.act.Replies = r.act.Replies[:0]
		w, after := copyWork{counted: copyWorkMost - r.s.copyWork}, states()
		for i, a := range after {
			b := before[i]
			switch {
			case a == state{}: // it has ended
			case a.valid == b.valid:
				w.looked += a.looked - b.looked
				w.begun += a.begun - b.begun
				if a.looked == 0 {
					w.summed += a.at - b.at
				}
			default:
				w.begun += a.begun
			}
		}
		if before = after; len(r.act.IOs) == 0 && r.act.WakeNS == 0 && len(replies) < len(q) {
			r.tb.Fatalf("after turn %d the store waits for nothing", turns)
		}
		most = copyWork{max(most.looked, w.looked), max(most.begun, w.begun), max(most.summed, w.summed),
			max(most.counted, w.counted)}
		r.transfer()
	}
	slices.SortFunc(replies, func(a, b Reply) int { return int(a.Tag) - int(b.Tag) })
	return turns, most, replies
}

// within checks that no turn has done more than a bounded amount of work.
func (w copyWork) within(t *testing.T, what string, turns, least int) {
	t.Helper()
	// Each of these is 30 to 50 µs.
	if w.looked > copyWorkMost+copyLooks || w.begun > copyWrites+copyLooks ||
		w.summed > copyWorkMost<<10+copySumBytes || w.counted > 2*copyWorkMost {
		t.Errorf("%s: a turn does %+v", what, w)
	}
	if turns < least {
		t.Errorf("%s: it has ended after %d turns, want at least %d", what, turns, least)
	}
}

// TestACopyInOfManyEntriesTakesShortTurns: 1 MiB has 32,000 entries, which take milliseconds to look at. Each turn
// looks at some, and others have theirs meanwhile.
func TestACopyInOfManyEntriesTakesShortTurns(t *testing.T) {
	r := newRanged(t, FixedSeed(t), Config{PartitionBytes: 64 << 20, BlockSize: 512, ChunkBytes: 512 << 10})
	b := tinyBatch(r, 40000, 7, false)
	if b.Items() < 32000 {
		t.Fatalf("the batch has %d entries", b.Items())
	}
	for _, c := range []struct {
		what    string
		q       Request
		changed int
		least   int // turns
	}{
		{"nothing is there", Request{Op: CopyIn, Value: b}, b.Items(), b.Items()/copyWorkMost + 500},
		{"everything is there", Request{Op: CopyIn, Value: b}, 0, b.Items()/copyWorkMost + 500},
		{"exactly", Request{Op: CopyIn, Value: b, Version: 9}, 0, b.Items()/copyWorkMost + 500},
		{"newer ones exactly", Request{Op: CopyIn, Value: tinyBatch(r, 40000, 8, false), Version: 9}, 2 * b.Items(),
			b.Items()/copyWorkMost + 500},
		{"nothing exactly", Request{Op: CopyIn, Value: tinyBatch(r, 0, 0, false), Version: 9}, b.Items(), 20},
		{"identities that have expired", Request{Op: CopyIn, Value: tinyBatch(r, 40000, 7, true)}, 0, 200},
	} {
		turns, most, replies := copyInByTurns(r, c.q)
		if p := replies[0]; p.Status != OK || p.ValueLen != c.changed {
			t.Errorf("%s: %+v, want %d changes", c.what, p, c.changed)
		}
		most.within(t, c.what, turns, c.least)
		t.Logf("%s: %d turns, at most %+v", c.what, turns, most)
	}
}

// TestAnExactCopyInFindsEntriesWithoutALookAtAll: also where one segment has them all, and all keys are to be found.
func TestAnExactCopyInFindsEntriesWithoutALookAtAll(t *testing.T) {
	r := newRanged(t, FixedSeed(t), Config{PartitionBytes: 64 << 20, BlockSize: 512, ChunkBytes: 512 << 10})
	key := make([]byte, 4)
	for i := range uint32(10) {
		binary.LittleEndian.PutUint32(key, i*4000)
		if p := r.do(Request{Op: Put, Key: key}); p.Status != OK {
			t.Fatalf("%+v", p)
		}
	}
	b := tinyBatch(r, 40000, 99, false)
	turns, most, replies := copyInByTurns(r, Request{Op: CopyIn, Value: b, Version: 90})
	if p := replies[0]; p.Status != OK || p.ValueLen < b.Items() {
		t.Errorf("%+v", p)
	}
	most.within(t, "few segments", turns, 500)
}

// TestCopyInsTakeTurnsWhileTheyAreValidated: several have the work of a turn together.
func TestCopyInsTakeTurnsWhileTheyAreValidated(t *testing.T) {
	r := newRanged(t, FixedSeed(t), Config{PartitionBytes: 64 << 20, BlockSize: 512, ChunkBytes: 512 << 10})
	b := tinyBatch(r, 40000, 7, false)
	short := tinyBatch(r, 10, 8, false)
	_, most, replies := copyInByTurns(r, Request{Op: CopyIn, Value: b}, Request{Op: CopyIn, Value: slices.Clone(b)},
		Request{Op: CopyIn, Value: slices.Clone(b)}, Request{Op: CopyIn, Value: short})
	most.within(t, "four", 0, 0)
	for _, p := range replies {
		if p.Status != OK {
			t.Errorf("%+v", p)
		}
	}
	n := 0
	for q := (Request{Op: CopyIn, Value: slices.Clone(b)}); r.s.Submit(&q); n++ {
	}
	if n != MaxCopyIns {
		t.Fatalf("%d CopyIns are taken", n)
	}
	for turn := range 3 {
		r.turns(1)
		at := 0
		for i := range r.s.copyIns {
			at += min(1, max(0, r.s.copyIns[i].checker.At()-4))
		}
		if turn == 2 && at != MaxCopyIns {
			t.Errorf("after %d turns %d CopyIns have begun", turn+1, at)
		}
	}
	r.run()
}

// TestABatchThatIsInvalidAtItsEndChangesNothing, however long it takes to find out.
func TestABatchThatIsInvalidAtItsEndChangesNothing(t *testing.T) {
	r := newRanged(t, FixedSeed(t), Config{PartitionBytes: 64 << 20, BlockSize: 512, ChunkBytes: 512 << 10})
	good := tinyBatch(r, 40000, 7, false)
	last := nvme.KVEntry(good[len(good)-32:])
	for _, c := range []struct {
		what  string
		clock uint64
		bad   func(b nvme.KVRange, last nvme.KVEntry)
	}{
		{"a high version", 0, func(b nvme.KVRange, e nvme.KVEntry) { e.SetVersion(MaxCopied + 1); b.Seal() }},
		{"no version", 0, func(b nvme.KVRange, e nvme.KVEntry) { e.SetVersion(0); b.Seal() }},
		{"too few entries", 0, func(b nvme.KVRange, _ nvme.KVEntry) { b.SetItems(b.Items() - 1); b.Seal() }},
		{"another position", 9, func(b nvme.KVRange, e nvme.KVEntry) { e.SetPosition(e.Position() + 1); b.Seal() }},
		{"its checksum", 0, func(_ nvme.KVRange, e nvme.KVEntry) { e[len(e)-1]++ }},
	} {
		b := slices.Clone(good)
		c.bad(b, nvme.KVEntry(b[len(b)-len(last):]))
		_, _, replies := copyInByTurns(r, Request{Op: CopyIn, Value: b, Version: c.clock})
		if p := replies[0]; p.Status != InvalidValue || p.ValueLen != 0 {
			t.Errorf("%s: %+v", c.what, p)
		}
		if r.s.objects != 0 || r.writes != 0 && r.s.stats.KeyLogBytes != 0 {
			t.Errorf("%s: %d objects, %d bytes of key log", c.what, r.s.objects, r.s.stats.KeyLogBytes)
		}
	}
	// It is the same when it ends early, or a Drop comes, while it is not known to be valid.
	begin := func(turns int, summed bool) {
		r.s.Submit(&Request{Op: CopyIn, Tag: 5, Value: slices.Clone(good)})
		for range turns {
			r.turns(1)
		}
		if c := &r.s.copyIns[0]; c.b == nil || c.valid || c.summed != summed {
			t.Fatalf("it has looked at %d entries, valid: %v", c.left, c.valid)
		}
	}
	for _, turns := range []int{1, 40} {
		begin(turns, turns > 1)
		r.s.EndEarly(5)
		if r.turns(2); r.last.Status != Aborted || r.s.objects != 0 || r.s.copying != 0 {
			t.Errorf("ended early: %+v, %d objects", r.last, r.s.objects)
		}
	}
	begin(40, true)
	r.s.Submit(&Request{Op: Drop, Tag: 6, Version: 7,
		Range: Range{First: last.Position(), Last: math.MaxUint64}})
	for r.s.copying > 0 {
		r.turns(1)
	}
	if r.run(); r.s.objects != 0 {
		t.Errorf("a Drop came: %d objects", r.s.objects)
	}
}

// TestACopyInOfAValueThatIsTooLongIsRefused: that of a partition with longer chunks.
func TestACopyInOfAValueThatIsTooLongIsRefused(t *testing.T) {
	r := newRanged(t, FixedSeed(t), Config{PartitionBytes: 64 << 20, BlockSize: 512, ChunkBytes: 512 << 10})
	for more, want := range []Status{OK, InvalidValue} {
		b := nvme.NewKVRange(make([]byte, MaxRangeBytes), nvme.KVCopy, 0, math.MaxUint64, nvme.KVCursor{})
		e, b, _ := b.Append([]byte("key"), r.s.MaxValueBytes()+more, 0)
		clear(e.Value())
		e.SetVersion(7)
		b.SetTo(nvme.KVLastOf(math.MaxUint64))
		b.Seal()
		if p := r.do(Request{Op: CopyIn, Value: b}); p.Status != want {
			t.Errorf("a value of %d bytes: status %d, want %d", e.ValueLen(), p.Status, want)
		}
	}
}
