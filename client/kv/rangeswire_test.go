package kv

import (
	"bytes"
	"errors"
	"fmt"
	"iter"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/internal/nvme"
)

// openRanges opens a target that has extended key-value and answers commands for ranges as f says. The second value of
// f is the result of the command. f runs with the target's lock.
func openRanges(t *testing.T, f func(q *nvme.KVRangeSQE, data []byte) ([]byte, uint64, nvme.Status)) (*target,
	*Namespace) {
	t.Helper()
	s := newTarget(t)
	s.with(func() { s.extended, s.ranges = true, f })
	return s, open(t, s, Options{})
}

// answerTo begins the answer to a command that reads a range, which has n bytes at most.
func answerTo(q *nvme.KVRangeSQE, kind nvme.KVRangeKind, n int) nvme.KVRange {
	from := nvme.KVCursorAt(q.First(), nil)
	if q.KeyLen() > 0 {
		var buf [nvme.MaxKVKey]byte
		from = nvme.KVCursorAt(rangeKeyAt, (*nvme.SQE)(q).KV().Key(&buf))
	}
	return nvme.NewKVRange(make([]byte, n), kind, from.Position, q.Last(), from)
}

// rangeKeyAt is the position of the keys behind which commands begin.
const rangeKeyAt = 50

// complete completes an answer that ends the range.
func complete(b nvme.KVRange) nvme.KVRange {
	b.SetTo(nvme.KVLastOf(b.Last()))
	b.SetFlags(b.Flags() | nvme.KVComplete)
	b.Seal()
	return b
}

// firstError returns the error that ends a sequence.
func firstError[T any](seq iter.Seq2[T, error]) error {
	for _, err := range seq {
		if err != nil {
			return err
		}
	}
	return nil
}

// TestADropWithoutAClockIsNotRepeated: its clock is that of the target when it comes. When the connection is lost with
// the answer, a repetition would drop what was stored since. One with a clock is repeated, with the same.
func TestADropWithoutAClockIsNotRepeated(t *testing.T) {
	const clock = 1<<40 + 5
	var s *target
	var asked []nvme.KVRangeSQE
	drop := func(q *nvme.KVRangeSQE, _ []byte) ([]byte, uint64, nvme.Status) {
		asked = append(asked, *q)
		at := q.Clock()
		if at == 0 {
			at = s.version
		}
		for _, key := range slices.Clone(s.keys) {
			if s.about[key].version <= at {
				s.remove(key)
			}
		}
		s.store(fmt.Sprintf("after drop %d", len(asked)), nil)
		return nil, at, nvme.Success
	}
	s, n := openRanges(t, drop)
	ctx := testContext(t)
	for _, c := range []struct {
		clock uint64
		how   verdict
		sent  int // how often
	}{{0, breakOff, 1}, {0, breakBefore, 1}, {clock, breakOff, 2}, {clock, breakBefore, 2}} {
		what := fmt.Sprintf("clock %d, verdict %d", c.clock, c.how)
		s.with(func() {
			for _, key := range slices.Clone(s.keys) {
				s.remove(key)
			}
		})
		s.set("old", nil)
		broken := false
		s.onIO(func(e *nvme.SQE) (nvme.Status, verdict) {
			if e.Opcode() != nvme.CmdKVDrop || broken {
				return nvme.Success, carryOut
			}
			broken = true
			return nvme.Success, c.how
		})
		s.with(func() { asked = nil })
		before := s.count(nvme.CmdKVDrop)
		got, err := n.DropRange(ctx, Range{First: 3, Last: 1<<63 + 4}, c.clock)
		// The connection is there again when another command has been answered.
		exists, _ := n.Exists(ctx, []byte("after drop 1"))
		if sent := s.count(nvme.CmdKVDrop) - before; sent != c.sent {
			t.Errorf("%s: it is sent %d times, want %d", what, sent, c.sent)
		}
		if c.clock == 0 {
			if !errors.Is(err, client.ErrIndeterminate) || got != 0 || exists != (c.how == breakOff) {
				t.Errorf("%s: clock %d, %v; what was stored since is there: %v", what, got, err, exists)
			}
			continue
		}
		if err != nil || got != c.clock {
			t.Errorf("%s: clock %d, %v", what, got, err)
		}
		s.with(func() {
			for _, q := range asked {
				if q.Clock() != c.clock || q.First() != 3 || q.Last() != 1<<63+4 || !q.Valid() {
					t.Errorf("%s: a Drop of %#x to %#x with clock %d is sent", what, q.First(), q.Last(), q.Clock())
				}
			}
		})
	}
	s.onIO(nil)
	if got, err := n.DropRange(ctx, All(), 0); err != nil || got == 0 {
		t.Errorf("a Drop without a clock has clock %d, %v", got, err)
	}
	s.with(func() {
		if q := asked[len(asked)-1]; q.Clock() != 0 || q.First() != 0 || q.Last() != math.MaxUint64 {
			t.Errorf("a Drop of %#x to %#x with clock %d is sent", q.First(), q.Last(), q.Clock())
		}
	})
}

// TestBoundsOfRangeCommands: the greatest clock and the longest batch are sent, and what is more is not.
func TestBoundsOfRangeCommands(t *testing.T) {
	const changed = 70_000 // more than 16 bits
	var last nvme.KVRangeSQE
	var data []byte
	s, n := openRanges(t, func(q *nvme.KVRangeSQE, b []byte) ([]byte, uint64, nvme.Status) {
		last, data = *q, bytes.Clone(b)
		if (*nvme.SQE)(q).Opcode() == nvme.CmdKVDrop {
			return nil, q.Clock(), nvme.Success
		}
		return nil, changed, nvme.Success
	})
	ctx := testContext(t)
	batch := func(size int) Batch {
		b := nvme.NewKVRange(make([]byte, size), nvme.KVCopy, 0, math.MaxUint64, nvme.KVCursor{})
		e, b, _ := b.Append([]byte("key"), size-nvme.KVRangeHeaderBytes-nvme.KVEntryHeaderBytes-3, 0)
		e.SetVersion(1)
		return Batch(complete(b))
	}
	for _, clock := range []uint64{0, 1, nvme.MaxKVClock} {
		if got, err := n.DropRange(ctx, Range{First: 7, Last: 7}, clock); err != nil || got != clock {
			t.Errorf("a Drop with clock %d: %d, %v", clock, got, err)
		}
		s.with(func() {
			if last.Clock() != clock || last.First() != 7 || last.Last() != 7 || !last.Valid() {
				t.Errorf("a Drop of %d to %d with clock %d is sent", last.First(), last.Last(), last.Clock())
			}
		})
		b := batch(n.geo.Load().space.MaxTransfer)
		if got, err := n.CopyIn(ctx, b, clock); err != nil || got != changed {
			t.Errorf("a CopyIn with clock %d: %d changed, %v", clock, got, err)
		}
		s.with(func() {
			if last.Clock() != clock || int(last.LenBytes()) != len(b) || !bytes.Equal(data, b) || !last.Valid() {
				t.Errorf("a CopyIn of %d bytes with clock %d is sent", len(data), last.Clock())
			}
		})
	}
	before := s.count(nvme.CmdKVDrop) + s.count(nvme.CmdKVCopyIn)
	_, drop := n.DropRange(ctx, All(), nvme.MaxKVClock+1)
	_, copyIn := n.CopyIn(ctx, batch(200), nvme.MaxKVClock+1)
	_, long := n.CopyIn(ctx, batch(n.geo.Load().space.MaxTransfer+8), 0)
	if !errors.Is(drop, client.ErrInvalid) || !errors.Is(copyIn, client.ErrInvalid) ||
		!errors.Is(long, ErrValueTooLarge) {
		t.Errorf("%v, %v, %v", drop, copyIn, long)
	}
	if sent := s.count(nvme.CmdKVDrop) + s.count(nvme.CmdKVCopyIn) - before; sent != 0 {
		t.Errorf("%d of them are sent", sent)
	}
}

// TestAnswersAboutAnotherRangeAreRefused, however valid they are.
func TestAnswersAboutAnotherRangeAreRefused(t *testing.T) {
	// An answer has what edit makes of it, the result is longer by more, and so many bytes of it are not sent.
	type answer struct {
		name        string
		edit        func(b nvme.KVRange) nvme.KVRange
		more, lacks int
		ok          bool
	}
	same := func(b nvme.KVRange) nvme.KVRange { return b }
	from := func(c nvme.KVCursor) func(nvme.KVRange) nvme.KVRange {
		return func(b nvme.KVRange) nvme.KVRange {
			b.SetFrom(c)
			return b
		}
	}
	another := func(kind nvme.KVRangeKind, last uint64) func(nvme.KVRange) nvme.KVRange {
		return func(b nvme.KVRange) nvme.KVRange {
			return nvme.NewKVRange(make([]byte, 4096), kind, b.First(), last, b.From())
		}
	}
	stands := func(b nvme.KVRange) nvme.KVRange {
		b.SetTo(b.From())
		return b
	}
	const last = 1000
	for _, c := range []struct {
		r       Range
		answers []answer
	}{
		{Range{First: 20, Last: last}, []answer{
			{"right", same, 0, 0, true},
			{"of another kind", another(nvme.KVCopy, last), 0, 0, false},
			{"of a shorter range", another(nvme.KVScan, last-1), 0, 0, false},
			{"of a longer range", another(nvme.KVScan, last+1), 0, 0, false},
			{"behind another position", from(nvme.KVCursorAt(21, nil)), 0, 0, false},
			{"behind a key", from(nvme.KVCursorAt(20, []byte("key"))), 0, 0, false},
			{"that does not advance", stands, 0, 0, false},
			{"that is longer than the buffer", same, rangeBytes, 0, false},
			{"of which not all was received", same, 0, 8, false},
		}},
		{Range{Last: last, After: []byte("key")}, []answer{
			{"right", same, 0, 0, true},
			{"behind another key", from(nvme.KVCursorAt(rangeKeyAt, []byte("kex"))), 0, 0, false},
			{"behind a longer key", from(nvme.KVCursorAt(rangeKeyAt, []byte("key\x00"))), 0, 0, false},
			{"behind no key", from(nvme.KVCursorAt(rangeKeyAt, nil)), 0, 0, false},
		}},
	} {
		for _, a := range c.answers {
			_, n := openRanges(t, func(q *nvme.KVRangeSQE, _ []byte) ([]byte, uint64, nvme.Status) {
				b := answerTo(q, nvme.KVScan, 4096)
				b.SetTo(nvme.KVLastOf(last))
				if b = a.edit(b); b.Last() != last {
					b.SetTo(nvme.KVCursorAt(60, nil))
				}
				to, at := b.To(), b.From()
				if to.Position == 0 {
					to = nvme.KVLastOf(last)
				}
				b.SetTo(to)
				if to.Compare(&at) > 0 {
					b.SetFlags(nvme.KVComplete)
				}
				b.Seal()
				return b[:len(b)-a.lacks], uint64(len(b) + a.more), nvme.Success
			})
			err := firstError(n.Scan(testContext(t), c.r))
			if a.ok && err != nil || !a.ok && !errors.Is(err, client.ErrProtocol) {
				t.Errorf("%+v, an answer %s: %v", c.r, a.name, err)
			}
		}
	}
}

// TestARestOfAnOlderAnswerDoesNotCount: what was not received is not taken from the answer before, though it would fit.
func TestARestOfAnOlderAnswerDoesNotCount(t *testing.T) {
	calls := 0
	s, n := openRanges(t, func(q *nvme.KVRangeSQE, _ []byte) ([]byte, uint64, nvme.Status) {
		b := answerTo(q, nvme.KVCopy, 4096)
		calls++
		e, b, _ := b.Append([]byte{byte(calls)}, 1000, 0)
		clear(e.Value())
		e.SetPosition(uint64(100 * calls))
		e.SetVersion(7)
		if b.SetTo(nvme.KVCursorAt(uint64(100*calls+1), nil)); calls == 1 {
			b.Seal()
			return b, uint64(len(b)), nvme.Success
		}
		complete(b)
		return b[:200], uint64(len(b)), nvme.Success
	})
	err := firstError(n.CopyOut(testContext(t), All()))
	if sent := s.count(nvme.CmdKVCopyOut); !errors.Is(err, client.ErrProtocol) || sent != 2 {
		t.Errorf("after %d commands: %v", sent, err)
	}
}

// TestALossNamesItsPartAndIsPassed by all commands.
func TestALossNamesItsPartAndIsPassed(t *testing.T) {
	_, n := openRanges(t, func(q *nvme.KVRangeSQE, _ []byte) ([]byte, uint64, nvme.Status) {
		kind := map[uint8]nvme.KVRangeKind{nvme.CmdKVScan: nvme.KVScan, nvme.CmdKVCopyOut: nvme.KVCopy,
			nvme.CmdKVCount: nvme.KVCount, nvme.CmdKVDigest: nvme.KVDigest}[(*nvme.SQE)(q).Opcode()]
		b := answerTo(q, kind, 4096)
		switch kind {
		case nvme.KVCount:
			b = b[:nvme.KVRangeHeaderBytes+nvme.KVTotalsBytes]
			b.SetItems(1)
			b.Totals().Add(1, 2, 3)
		case nvme.KVDigest:
			k := int(q.SubRanges()) + 1
			b = b[:nvme.KVRangeHeaderBytes+k*nvme.KVSumBytes]
			clear(b[nvme.KVRangeHeaderBytes:])
			b.SetItems(k)
			b.SetShift(q.Shift())
			b.Sum(0).Add(1, 2)
		default:
			e, c, _ := b.Append([]byte("k"), 0, 0)
			b = c
			e.SetPosition(q.First() + 1)
			e.SetVersion(1)
		}
		// The parts end at 100, 200, and so on. The second and the fourth are lost.
		if to := q.First()/100*100 + 100; to < 500 {
			if b.SetTo(nvme.KVCursorAt(to, nil)); to%200 == 0 {
				b.SetFlags(nvme.KVLost)
			}
			b.Seal()
			return b, uint64(len(b)), nvme.Success
		}
		return complete(b), uint64(len(b)), nvme.Success
	})
	ctx, r := testContext(t), Range{First: 10, Last: 1000}
	var parts []LostError
	note := func(err error) {
		t.Helper()
		var lost *LostError
		switch {
		case errors.As(err, &lost):
			parts = append(parts, *lost)
		case err != nil:
			t.Fatal(err)
		}
	}
	both := []LostError{{100, 200}, {300, 400}}
	check := func(what string, want []LostError) {
		t.Helper()
		if !slices.Equal(parts, want) {
			t.Errorf("%s: %v are lost, want %v", what, parts, want)
		}
		parts = nil
	}
	entries := 0
	for e, err := range n.Scan(ctx, r) {
		if note(err); err == nil {
			entries++
			if e.Version != 1 {
				t.Errorf("%+v", e)
			}
		}
	}
	check("Scan", both)
	batches := 0
	for b, err := range n.CopyOut(ctx, r) {
		note(err)
		for range b.Entries() {
			batches++
		}
	}
	check("CopyOut", both)
	totals, err := n.Count(ctx, r)
	note(err)
	check("Count", both[:1])
	sums, err := n.Digest(ctx, r, 1, time.Time{})
	note(err)
	check("Digest", both[:1])
	if entries != 5 || batches != 5 || totals != (Totals{5, 10, 15}) || len(sums) != 1 || sums[0].Count != 5 ||
		sums[0].Sum != 10 {
		t.Errorf("%d entries, %d in batches, %+v, %+v", entries, batches, totals, sums)
	}
}

// TestAValueThatFitsNoCommandIsTold, with its size, from other errors with the same status.
func TestAValueThatFitsNoCommandIsTold(t *testing.T) {
	for _, c := range []struct {
		result uint64
		large  bool
	}{{0, false}, {1 << 10, false}, {1 << 30, true}} {
		_, n := openRanges(t, func(*nvme.KVRangeSQE, []byte) ([]byte, uint64, nvme.Status) {
			return nil, c.result, nvme.InvalidValueSize | nvme.DNR
		})
		err := firstError(n.CopyOut(testContext(t), All()))
		var st *client.StatusError
		if !errors.Is(err, ErrValueTooLarge) || errors.As(err, &st) == c.large ||
			strings.Contains(err.Error(), "takes 1073741824 bytes") != c.large {
			t.Errorf("a result of %d: %v", c.result, err)
		}
	}
}

// TestADigestOfOtherSubRangesIsRefused: of another shift, though there is room for them.
func TestADigestOfOtherSubRangesIsRefused(t *testing.T) {
	for _, right := range []bool{true, false} {
		_, n := openRanges(t, func(q *nvme.KVRangeSQE, _ []byte) ([]byte, uint64, nvme.Status) {
			b := answerTo(q, nvme.KVDigest, 4096)
			k, shift := int(q.SubRanges())+1, q.Shift()
			if !right {
				k, shift = k/2, shift+1
			}
			b = b[:nvme.KVRangeHeaderBytes+k*nvme.KVSumBytes]
			clear(b[nvme.KVRangeHeaderBytes:])
			b.SetItems(k)
			b.SetShift(shift)
			return complete(b), uint64(len(b)), nvme.Success
		})
		_, err := n.Digest(testContext(t), All(), 4, time.Time{})
		if right && err != nil || !right && !errors.Is(err, client.ErrProtocol) {
			t.Errorf("right: %v, %v", right, err)
		}
	}
}
