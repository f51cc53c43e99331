package kvstore

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/space"
	"jbofd/internal/pipeline"
	"jbofd/internal/units"
)

// lossyRig is a store in which the record of one segment is damaged. With 1,000 objects segment+64 is still to be split
// from it.
type lossyRig struct {
	*instant
	cfg     Config
	segment uint32
	// keys are those of the segment, absent some that belong to it and do not exist.
	keys, absent [][]byte
}

func numberedKey(i int) []byte {
	return binary.LittleEndian.AppendUint64(make([]byte, 0, 16), uint64(i))[:8]
}

func newLossyRig(t *testing.T, objects int) *lossyRig {
	cfg := Config{PartitionBytes: 16 << 20, BlockSize: 512, ChunkBytes: 256 << 10}
	d := &lossyRig{instant: newInstant(t, cfg), cfg: cfg}
	for i := range objects {
		d.one(t, Request{Op: Put, Key: numberedKey(i), Value: make([]byte, 100)}, OK)
	}
	inSegment := map[uint32]int{}
	for i := range objects {
		n := d.s.tbl.Segment(format.HashKey(d.s.hashSeed, numberedKey(i)))
		if inSegment[n]++; inSegment[n] > inSegment[d.segment] && n < 64 && (objects > 1000 || n+64 >= d.s.tbl.Len()) {
			d.segment = n
		}
	}
	for i := 0; len(d.absent) < 8; i++ {
		key := numberedKey(i)
		switch {
		case d.s.tbl.Segment(format.HashKey(d.s.hashSeed, key)) != d.segment:
		case i < objects:
			d.keys = append(d.keys, key)
		default:
			d.absent = append(d.absent, key)
		}
	}
	if len(d.keys) < 8 {
		t.Fatalf("the segment has %d keys", len(d.keys))
	}
	d.flip()
	return d
}

// flip damages the record of the segment, or undoes it.
func (d *lossyRig) flip() { d.disk[d.s.tbl.Get(d.segment).Offset()+format.SegmentHeaderBytes] ^= 1 }

// reopen opens the store again, after a clean stop or as after a crash.
func (d *lossyRig) reopen(t *testing.T, clean bool) {
	t.Helper()
	if clean {
		d.s.Stop()
		d.run()
		if !d.s.Stopped() {
			t.Fatal("the store does not stop")
		}
	}
	cfg := d.cfg
	cfg.SegTbl = make([]byte, 5<<18)
	s, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	d.s = s
	d.run()
	if !s.Ready() {
		t.Fatal(s.Err())
	}
}

func (d *lossyRig) get(t *testing.T, key []byte, want Status) {
	t.Helper()
	d.one(t, Request{Op: Get, Key: key, Value: make([]byte, 100)}, want)
	d.one(t, Request{Op: Exist, Key: key}, want)
}

// TestADamagedSegmentTakesWrites: what is written to it is there, what was not written since is reported as lost, not
// as missing, and so it is after a restart.
func TestADamagedSegmentTakesWrites(t *testing.T) {
	d := newLossyRig(t, 1000)
	k, absent := d.keys, d.absent
	d.get(t, k[0], Corrupt)
	d.one(t, Request{Op: Put, Key: k[1], Value: []byte("new"), Condition: IfAbsent}, Corrupt)
	d.one(t, Request{Op: Put, Key: k[1], Value: []byte("new"), Condition: IfPresent}, Corrupt)
	d.one(t, Request{Op: Put, Key: k[1], Value: []byte("new")}, OK)
	d.one(t, Request{Op: Put, Key: k[2]}, OK)
	d.one(t, Request{Op: Put, Key: k[3], Value: []byte("new")}, OK)
	d.one(t, Request{Op: Delete, Key: k[3]}, OK)
	d.one(t, Request{Op: Delete, Key: k[4]}, OK)
	d.one(t, Request{Op: Delete, Key: k[5]}, OK)
	d.one(t, Request{Op: Put, Key: k[5], Value: []byte("new"), Condition: IfAbsent}, OK)
	d.one(t, Request{Op: Delete, Key: absent[0]}, OK)
	for _, restart := range []string{"", "clean", "crash"} {
		if restart != "" {
			d.reopen(t, restart == "clean")
		}
		for _, i := range []int{0, 6, 7} {
			d.get(t, k[i], Corrupt)
		}
		d.get(t, absent[1], Corrupt)
		for _, i := range []int{1, 2, 5} {
			d.get(t, k[i], OK)
		}
		d.get(t, k[3], NotFound)
		d.get(t, k[4], NotFound)
		d.get(t, absent[0], NotFound)
		d.one(t, Request{Op: Delete, Key: k[4]}, NotFound)
		d.one(t, Request{Op: Put, Key: k[4], Condition: IfPresent}, NotFound)
		d.one(t, Request{Op: Put, Key: k[1], Condition: IfAbsent}, Exists)
		d.one(t, Request{Op: List, Value: make([]byte, 1<<20)}, Corrupt)
		if d.s.pool.Wrong != 0 {
			t.Errorf("live bytes were counted wrong, %d times", d.s.pool.Wrong)
		}
	}
}

// TestATableGrowsPastADamagedSegment: the keys that were lost are lost in both of its halves.
func TestATableGrowsPastADamagedSegment(t *testing.T) {
	for name, written := range map[string]bool{"written before": true, "empty": false} {
		t.Run(name, func(t *testing.T) {
			d := newLossyRig(t, 1000)
			if written {
				d.one(t, Request{Op: Put, Key: d.keys[1], Value: []byte("new")}, OK)
			}
			d.s.Checkpoint()
			d.run()
			var put [][]byte
			first, n, other := 1_000_000, 0, d.segment+64 // the new segment that takes keys from the damaged one
			for ; written && n < 1200 || d.s.tbl.Len() <= other; n++ {
				for !written && d.s.tbl.Segment(format.HashKey(d.s.hashSeed, numberedKey(first+n)))&63 == d.segment {
					n++ // nothing is put to it
				}
				put = append(put, numberedKey(first+n))
				d.one(t, Request{Op: Put, Key: put[len(put)-1], Value: make([]byte, 100)}, OK)
			}
			if got, want := int64(d.s.tbl.Len()), d.s.objects/int64(d.s.cfg.KeysPerSegment); got < want {
				t.Errorf("%d segments, want %d", got, want)
			}
			for _, clean := range []bool{false, true} {
				d.reopen(t, clean)
				for i, key := range d.keys {
					d.get(t, key, map[bool]Status{true: OK, false: Corrupt}[i == 1 && written])
				}
				for _, key := range put {
					d.get(t, key, OK)
				}
			}
		})
	}
}

// TestASegmentIsReadAgainBeforeItCountsAsLost, because a read may go wrong on its way.
func TestASegmentIsReadAgainBeforeItCountsAsLost(t *testing.T) {
	d := newLossyRig(t, 1000)
	at := d.s.tbl.Get(d.segment).Offset() + format.SegmentHeaderBytes
	d.s.Submit(&Request{Op: Put, Key: d.keys[0], Value: []byte("new")})
	for reads := 0; ; {
		d.s.Turn(d.now, &d.act)
		if len(d.act.IOs) == 0 {
			break
		}
		for _, q := range d.act.IOs {
			if q.Op == pipeline.Read && q.Offset <= at && at < q.Offset+512 {
				if reads++; reads == maxTries {
					d.disk[at] ^= 1
				}
			}
		}
		d.transfer()
	}
	d.run()
	for _, key := range d.keys {
		d.get(t, key, OK)
	}
}

// audit returns what an audit says.
func (d *lossyRig) audit(t *testing.T, repair bool) AuditState {
	t.Helper()
	if !d.s.Audit(repair) {
		t.Fatal("no audit begins")
	}
	d.run()
	d.wait(t, "the end of the audit", func() bool { return !d.s.AuditState().Running })
	return d.s.AuditState()
}

// TestAnAuditGivesBackWhatDamageHolds: it says what is lost; with repair what is lost is given up, and afterwards every
// count is exact and no chunk is kept for nothing.
func TestAnAuditGivesBackWhatDamageHolds(t *testing.T) {
	d := newLossyRig(t, 4000)
	keys := int64(len(d.keys))
	d.one(t, Request{Op: Put, Key: d.keys[1], Value: make([]byte, 100)}, OK)
	d.one(t, Request{Op: Delete, Key: d.keys[2]}, OK)
	if got := d.audit(t, false); got.Lossy != 1 || got.Known != 1 || got.Lost != 0 || got.Looked != d.s.tbl.Len() {
		t.Errorf("an audit says %+v", got)
	}
	d.get(t, d.keys[3], Corrupt)
	if got := d.audit(t, true); got.Lossy != 0 || got.Repaired != 1 || got.Known != 1 || got.Lost != keys {
		t.Errorf("a repair of a segment that had %d keys says %+v", keys, got) // one was put again, and counted twice
	}
	for restart := range 2 {
		d.get(t, d.keys[1], OK)
		d.get(t, d.keys[2], NotFound)
		d.get(t, d.keys[3], NotFound)
		d.one(t, Request{Op: List, Value: make([]byte, 1<<20)}, OK)
		if err := d.s.Recount(d.disk, true); err != nil {
			t.Error(err)
		}
		if restart == 0 {
			d.reopen(t, true)
		}
	}
}

// TestARepairKeepsWhatCannotBeReadForAMoment: an operator may repair a namespace while its drive is away.
func TestARepairKeepsWhatCannotBeReadForAMoment(t *testing.T) {
	d := newLossyRig(t, 1000)
	d.flip()
	d.fail = failReads
	for range 2 * maxTries {
		if got := d.audit(t, true); got.Repaired != 0 || got.Lossy != 0 || got.Unreadable == 0 {
			t.Fatalf("a repair without the drive says %+v", got)
		}
		d.now += unreadableNS
	}
	d.fail = nil
	for i := range 1000 {
		d.get(t, numberedKey(i), OK)
	}
	if err := d.s.Recount(d.disk, true); err != nil {
		t.Error(err)
	}
}

// TestARepairThatIsRepeatedGivesUpWhatStaysUnreadable, and nothing else.
func TestARepairThatIsRepeatedGivesUpWhatStaysUnreadable(t *testing.T) {
	d := newLossyRig(t, 4000)
	d.flip()
	at := d.s.tbl.Get(d.segment).Offset()
	block := at &^ 511
	d.unreadable(at, block+512)
	lost := 0
	for i := range 4000 {
		e := d.s.tbl.Get(d.s.tbl.Segment(format.HashKey(d.s.hashSeed, numberedKey(i))))
		if o := e.Offset(); o < block+512 && o+units.ExtentOffset(e.MaxBytes()) > block {
			lost++
		}
	}
	for try := 1; ; try++ {
		got := d.audit(t, true)
		if got.Unreadable == 0 {
			break
		}
		if got.Repaired > 0 || try > maxTries {
			t.Fatalf("repair %d says %+v", try, got)
		}
		d.now += unreadableNS
	}
	missing := 0
	for i := range 4000 {
		d.s.Submit(&Request{Op: Get, Key: numberedKey(i), Value: make([]byte, 100)})
		d.run()
		if d.last.Status == NotFound {
			missing++
		}
	}
	if missing < len(d.keys) || missing > lost {
		t.Errorf("%d keys are given up, of %d in the segment and %d in its block", missing, len(d.keys), lost)
	}
}

// TestTheChunkOfALostSegmentIsFreedByItself: the record is damaged, so that it is not known how much of its chunk dies
// with it. Compaction leaves the chunk alone; an audit finds that nothing refers to it.
func TestTheChunkOfALostSegmentIsFreedByItself(t *testing.T) {
	d := newLossyRig(t, 4000)
	chunk := d.s.pool.Of(d.s.tbl.Get(d.segment).Offset())
	for l := range d.s.logs {
		d.s.closeChunk(l)
	}
	d.one(t, Request{Op: Put, Key: d.keys[1], Value: []byte("new")}, OK)
	d.s.compact.suspect = chunk
	d.run()
	d.wait(t, "compaction", func() bool { return d.s.pool.Chunks[chunk].State == space.Damaged })
	if got := d.s.AuditState(); got.DamagedChunks != 1 {
		t.Errorf("%+v", got)
	}
	d.wait(t, "the end of the chunk", func() bool { return d.s.pool.Chunks[chunk].State != space.Damaged })
	if got := d.s.AuditState(); got.FreedChunks != 1 || got.DamagedChunks != 0 || got.Lossy != 1 {
		t.Errorf("%+v", got)
	}
	d.get(t, d.keys[1], OK)
	d.get(t, d.keys[2], Corrupt)
}

func failReads(q *IO) error {
	if q.Op == pipeline.Read {
		return errors.New("unreadable")
	}
	return nil
}

// readOthers has other segments read.
func (d *lossyRig) readOthers(n int) {
	for i := 1_000_000; n > 0; i++ {
		if key := numberedKey(i); d.s.tbl.Segment(format.HashKey(d.s.hashSeed, key)) != d.segment {
			n--
			d.s.Submit(&Request{Op: Delete, Key: key})
			d.run()
		}
	}
}

// TestAnUnreadableSegmentIsLostOnlyIfTheDriveReadsOthers, and only if that lasts: then it takes writes and is split.
func TestAnUnreadableSegmentIsLostOnlyIfTheDriveReadsOthers(t *testing.T) {
	d := newLossyRig(t, 1000)
	put := func(want Status) {
		t.Helper()
		d.one(t, Request{Op: Put, Key: d.keys[1], Value: []byte("new")}, want)
	}
	d.fail = failReads
	for range 2 * maxTries { // the drive reads nothing, for long
		put(DeviceError)
		d.now += unreadableNS
	}
	d.s.unreadable = unreadables{}
	at := d.s.tbl.Get(d.segment).Offset()
	d.fail = func(q *IO) error {
		if q.Op == pipeline.Read && q.Offset <= at && at < q.Offset+units.ExtentOffset(len(q.Buf)) {
			return errors.New("unreadable")
		}
		return nil
	}
	for range 2 * maxTries { // it reads others, but it may recover soon
		put(DeviceError)
		d.readOthers(2 * unreadableReads)
	}
	d.now += unreadableNS
	for i := range 2000 {
		d.s.Submit(&Request{Op: Put, Key: numberedKey(1_000_000 + i), Value: make([]byte, 100)})
		d.run()
	}
	put(OK)
	d.get(t, d.keys[1], OK)
	d.get(t, d.keys[2], Corrupt)
	d.now += 1e9
	d.run()
	if got, want := int64(d.s.tbl.Len()), d.s.objects/int64(d.s.cfg.KeysPerSegment); got < want {
		t.Errorf("%d segments, want %d", got, want)
	}
}

// TestASegmentThatIsReadNowAndThenIsNotLost.
func TestASegmentThatIsReadNowAndThenIsNotLost(t *testing.T) {
	d := newLossyRig(t, 1000)
	d.disk[d.s.tbl.Get(d.segment).Offset()+format.SegmentHeaderBytes] ^= 1 // as it was
	for round := range 4 * maxTries {
		want := NotFound // the key is not in the segment, so that nothing is written
		if round%maxTries != maxTries-1 {
			want = DeviceError
			d.fail = failReads
		}
		d.one(t, Request{Op: Delete, Key: d.absent[0]}, want)
		d.fail = nil
		d.readOthers(2 * unreadableReads)
		d.now += unreadableNS
	}
	for _, key := range d.keys {
		d.get(t, key, OK)
	}
}

// TestDamagedChunksGiveWayToWrites loses a segment of a partition that is nearly full. The values of its keys lie in a
// fifth of the chunks. If those were kept for them, there would soon be no room for Deletes.
func TestDamagedChunksGiveWayToWrites(t *testing.T) {
	PlainOnly(t)
	t.Parallel()
	const objects = 1200
	d := newLossyRig(t, objects)
	d.flip()
	value, rng := make([]byte, 9000), rand.New(rand.NewPCG(FixedSeed(t), 0))
	for _, i := range rng.Perm(objects) {
		d.one(t, Request{Op: Put, Key: numberedKey(i), Value: value}, OK)
	}
	d.flip()
	for n := range 20000 {
		key := numberedKey(rng.IntN(objects))
		if slices.ContainsFunc(d.keys, func(k []byte) bool { return bytes.Equal(k, key) }) {
			continue
		}
		if n%8 == 0 {
			d.one(t, Request{Op: Delete, Key: key}, OK)
		}
		d.one(t, Request{Op: Put, Key: key, Value: value}, OK)
	}
	if got := d.s.AuditState(); got.DamagedChunks > len(d.keys)/2 {
		t.Errorf("%d chunks are kept for %d keys that are lost", got.DamagedChunks, len(d.keys))
	}
	for _, key := range d.keys {
		d.one(t, Request{Op: Get, Key: key, Value: value}, Corrupt)
	}
}
