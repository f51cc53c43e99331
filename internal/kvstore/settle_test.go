package kvstore

import (
	"errors"
	"math"
	"math/bits"
	"slices"
	"testing"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/nvme"
	"jbofd/internal/pipeline"
)

// settle makes a Settle of the segment of a key, and returns its Reply.
func (d *lossyRig) settle(t *testing.T, key []byte, version uint64, width uint8) Reply {
	t.Helper()
	var got *Reply
	d.s.Submit(&Request{Op: Settle, Tag: 99, Version: version,
		Range: Range{First: bits.Reverse64(format.HashKey(d.s.hashSeed, key)), Width: width}})
	for range 1000 {
		d.s.Turn(d.now, &d.act)
		for _, p := range d.act.Replies {
			if p.Tag == 99 {
				got = &p
			}
		}
		d.act.Replies = d.act.Replies[:0]
		if got != nil {
			return *got
		}
		d.transfer()
	}
	t.Fatal("a Settle has no Reply")
	return Reply{}
}

// TestALossIsSettledByACopy: what a segment has lost is copied in, and then nothing of it is unknown any more, also
// after a restart. What was written and deleted meanwhile is newer than the copy.
func TestALossIsSettledByACopy(t *testing.T) {
	d := newLossyRig(t, 1000)
	d.flip() // undone
	value := make([]byte, 1<<20)
	d.one(t, Request{Op: CopyOut, Range: Range{Last: math.MaxUint64}, Value: value}, OK)
	b := nvme.KVRange(value)
	b = b[:b.LenBytes()]
	if !b.Complete() {
		t.Fatal("the copy has not everything")
	}
	if p := d.settle(t, d.keys[0], 0, 0); p.Status != OK || p.Version != 0 {
		t.Fatalf("of a sound segment: %+v", p)
	}
	d.flip()
	k, absent := d.keys, d.absent
	first := d.settle(t, k[0], 0, 0)
	if first.Status != OK || first.Version == 0 || first.ValueLen != 6 && first.ValueLen != 7 {
		t.Fatalf("of a damaged segment: %+v", first)
	}
	newest := d.s.clock + 1
	d.one(t, Request{Op: Put, Key: k[1], Value: []byte("new"), Given: newest}, OK)
	d.one(t, Request{Op: Delete, Key: k[2], Tombstone: true, Given: newest + 1}, OK)
	d.one(t, Request{Op: CopyIn, Value: b}, OK)
	d.get(t, absent[0], Corrupt)

	// Another loss may be one of what was copied.
	at, _ := d.s.Place(k[0])
	d.disk[at+format.SegmentHeaderBytes] ^= 1
	d.get(t, k[0], Corrupt)
	if p := d.settle(t, k[0], first.Version, 0); p.Status != Superseded {
		t.Fatalf("after another loss: %+v", p)
	}
	d.one(t, Request{Op: Delete, Key: k[0], Given: newest + 2, Tombstone: true}, OK)
	if p := d.settle(t, k[0], first.Version, 0); p.Status != Superseded {
		t.Fatalf("after another loss, and a write: %+v", p)
	}
	// What is known may be older than what was lost.
	d.get(t, k[0], NotFound)
	d.one(t, Request{Op: Get, Key: k[0], Sound: math.MaxUint64}, Corrupt)
	d.one(t, Request{Op: Put, Key: k[0], Given: newest + 5, Condition: IfAbsent, Sound: math.MaxUint64}, Corrupt)
	d.one(t, Request{Op: Get, Key: k[0], Sound: newest + 2}, Corrupt)
	d.one(t, Request{Op: Get, Key: k[0], Sound: newest + 1}, NotFound)
	d.one(t, Request{Op: Put, Key: k[0], Given: newest + 2, Condition: IfAbsent, Sound: newest + 1}, Superseded)
	d.one(t, Request{Op: Put, Key: k[0], Given: newest + 2, Condition: IfAbsent, Sound: newest + 2}, Corrupt)
	again := d.settle(t, k[0], 0, 0)
	d.one(t, Request{Op: Put, Key: k[1], Value: []byte("new"), Given: newest + 3}, OK)
	d.one(t, Request{Op: Delete, Key: k[2], Tombstone: true, Given: newest + 4}, OK)
	d.one(t, Request{Op: CopyIn, Value: slices.Clone(b)}, OK)
	if p := d.settle(t, k[0], again.Version, uint8(again.ValueLen+1)); p.Status != Superseded {
		t.Fatalf("of a longer segment: %+v", p)
	}
	// The table has grown, so that there may be two segments.
	for _, key := range append(slices.Clone(k), absent...) {
		if p := d.settle(t, key, again.Version, uint8(again.ValueLen)); p.Status != OK {
			t.Fatalf("a Settle: %+v", p)
		}
	}
	for _, restart := range []string{"", "clean", "crash"} {
		if restart != "" {
			d.reopen(t, restart == "clean")
		}
		for i, key := range k {
			d.get(t, key, map[bool]Status{true: NotFound, false: OK}[i == 0 || i == 2])
		}
		for _, key := range absent {
			d.get(t, key, NotFound)
		}
		if p := d.settle(t, k[0], 0, 0); p.Status != OK || p.Version != 0 {
			t.Fatalf("of a settled segment: %+v", p)
		}
	}
}

// TestALossySegmentIsSplitForWhoeverSettlesAPart: the parts are lossy, each until it is settled. Without a loss the
// table keeps its length.
func TestALossySegmentIsSplitForWhoeverSettlesAPart(t *testing.T) {
	d := newLossyRig(t, 1000)
	d.flip() // undone
	before := d.s.tbl.Len()
	d.settle(t, d.keys[0], 0, 12)
	if d.run(); d.s.tbl.Len() != before {
		t.Fatalf("the table has %d segments in place of %d, and nothing is lost", d.s.tbl.Len(), before)
	}
	d.flip()
	const width = 9
	if p := d.settle(t, d.keys[0], 0, width); p.Version == 0 || p.ValueLen >= width {
		t.Fatalf("%+v", p)
	}
	d.run()
	part := func(key []byte) uint64 { return bits.Reverse64(format.HashKey(d.s.hashSeed, key)) >> (64 - width) }
	p := d.settle(t, d.keys[0], 0, width)
	if p.Version == 0 || p.ValueLen < width {
		t.Fatalf("%+v: it is not split; the table has %d segments", p, d.s.tbl.Len())
	}
	if p = d.settle(t, d.keys[0], p.Version, width); p.Status != OK {
		t.Fatalf("%+v", p)
	}
	for _, restart := range []string{"", "clean", "crash"} {
		if restart != "" {
			d.reopen(t, restart == "clean")
		}
		settled, lost := 0, 0
		for _, key := range append(slices.Clone(d.keys), d.absent...) {
			want := Corrupt
			if part(key) == part(d.keys[0]) {
				want = NotFound
				settled++
			} else {
				lost++
			}
			d.get(t, key, want)
		}
		if settled == 0 || lost == 0 {
			t.Fatalf("%d keys are in the part that is settled, %d in others", settled, lost)
		}
	}
	if d.s.pool.Wrong != 0 {
		t.Errorf("live bytes were counted wrong, %d times", d.s.pool.Wrong)
	}
}

// TestASettleFindsOutWhetherASegmentCanBeRead: an idle store does not learn otherwise that the drive reads all but one.
// If it reads nothing, nothing counts as lost, and what can be read again is there.
func TestASettleFindsOutWhetherASegmentCanBeRead(t *testing.T) {
	for _, what := range []string{"one segment", "one segment for a while", "everything"} {
		d := newLossyRig(t, 1000)
		d.flip() // undone
		at := d.s.tbl.Get(d.segment).Offset()
		d.unreadable(at, at+1)
		if what == "everything" {
			d.unreadable(0, 1<<40)
		}
		tries, p := 0, Reply{Status: DeviceError}
		for ; tries < 100 && p.Status == DeviceError; tries++ {
			if what == "one segment for a while" && tries == 5 {
				d.fail = nil
			}
			p = d.settle(t, d.keys[0], 0, 0)
			d.now += 50e6
		}
		switch {
		case what == "everything":
			if p.Status != DeviceError {
				t.Errorf("%s: %+v", what, p)
			}
		case what == "one segment" && (p.Status != OK || p.Version == 0 || tries > 30 || tries < 10):
			t.Errorf("%s: %+v after %d tries", what, p, tries)
		case what == "one segment for a while" && (p.Status != OK || p.Version != 0):
			t.Errorf("%s: %+v after %d tries", what, p, tries)
		}
		if d.fail = nil; what == "one segment" {
			d.one(t, Request{Op: Get, Key: d.keys[0], Value: make([]byte, 100)}, Corrupt)
			continue
		}
		d.one(t, Request{Op: Get, Key: d.keys[0], Value: make([]byte, 100)}, OK)
	}
}

// TestATableThatASettleWantsToGrowTriesAgain: a round of splits that has failed is repeated otherwise only when one of
// its segments is written.
func TestATableThatASettleWantsToGrowTriesAgain(t *testing.T) {
	d := newLossyRig(t, 1000)
	d.flip() // undone
	const width = 9
	d.segment = d.s.tbl.Len() - 64 - 1 // not one of those that are split first
	var key []byte
	for i := 0; key == nil; i++ {
		if d.s.tbl.Segment(format.HashKey(d.s.hashSeed, numberedKey(i))) == d.segment {
			key = numberedKey(i)
		}
	}
	d.flip()
	if p := d.settle(t, key, 0, 0); p.Version == 0 {
		t.Fatalf("%+v", p)
	}
	failed := 0
	d.fail = func(q *IO) error {
		if q.Op != pipeline.Write || failed > 0 {
			return nil
		}
		failed++
		return errors.New("write error")
	}
	for range 10 {
		d.settle(t, key, 0, width)
		d.run()
		d.now += 50e6
	}
	if p := d.settle(t, key, 0, width); p.ValueLen < width || failed == 0 {
		t.Errorf("%+v: the table has %d segments", p, d.s.tbl.Len())
	}
}

// TestARetryOfADoneWriteIsRecognizedInALossySegment: that the key has its identity says enough. What a Retry of
// another key has done is not known.
func TestARetryOfADoneWriteIsRecognizedInALossySegment(t *testing.T) {
	d := newLossyRig(t, 1000)
	if p := d.settle(t, d.keys[0], 0, 0); p.Version == 0 {
		t.Fatalf("%+v", p)
	}
	id, given := Identity{Client: 1, Seq: 7}, d.s.clock+10
	d.one(t, Request{Op: Put, Key: d.keys[0], Value: []byte("x"), Given: given, ID: id}, OK)
	id.Retry = true
	for _, sound := range []uint64{0, given, math.MaxUint64} {
		d.one(t, Request{Op: Put, Key: d.keys[0], Value: []byte("x"), Given: given + 5, ID: id, Sound: sound}, OK)
		if d.last.Version != given {
			t.Errorf("with what is sound above %d, a retry has version %d, want %d", sound, d.last.Version, given)
		}
	}
	d.one(t, Request{Op: Put, Key: d.keys[1], Value: []byte("x"), Given: given + 6, ID: id, Sound: given}, Corrupt)
}
