package kvstore

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/pipeline"
	"jbofd/internal/units"
)

// TestReadsThatFailByChanceLoseNothing: a drive fails reads now and then, or most of them, for long. What is read in
// vain again and again meanwhile is not lost.
func TestReadsThatFailByChanceLoseNothing(t *testing.T) {
	PlainOnly(t)
	t.Parallel()
	for _, objects := range []int{10, 60, 1000} {
		for _, fails := range []float64{0.02, 0.3, 0.5, 0.9} {
			t.Run(fmt.Sprintf("%d objects, %g of the reads", objects, fails), func(t *testing.T) {
				rng := rand.New(rand.NewPCG(FixedSeed(t), 0))
				d := newInstant(t, Config{PartitionBytes: 16 << 20, BlockSize: 512, ChunkBytes: 256 << 10})
				for i := range objects {
					d.one(t, Request{Op: Put, Key: numberedKey(i), Value: make([]byte, 100)}, OK)
				}
				d.fail = func(q *IO) error {
					if q.Op == pipeline.Read && rng.Float64() < fails {
						return errors.New("unreadable")
					}
					return nil
				}
				for range 30_000 {
					// Most of the reads are of a few segments.
					key := objects + int(float64(8*objects)*math.Pow(rng.Float64(), 8))
					d.s.Submit(&Request{Op: Delete, Key: numberedKey(key)})
					d.run()
					d.now += 1e6
				}
				if n := d.s.unreadable.losses; n != 0 {
					t.Errorf("%d segments were given up", n)
				}
			})
		}
	}
}

// TestAnOutageIsNoReasonToGiveUpASegment that was read in vain before it.
func TestAnOutageIsNoReasonToGiveUpASegment(t *testing.T) {
	d := newLossyRig(t, 1000)
	d.flip() // undone
	at := d.s.tbl.Get(d.segment).Offset()
	d.unreadable(at, at+1)
	d.one(t, Request{Op: Delete, Key: d.absent[0]}, DeviceError)
	d.readOthers(4 * unreadableReads)
	d.fail = failReads
	for range 10 * maxTries {
		d.one(t, Request{Op: Delete, Key: d.absent[0]}, DeviceError)
		d.now += unreadableNS
	}
	d.fail = nil
	for _, key := range d.keys {
		d.get(t, key, OK)
	}
}

// TestManyUnreadableSegmentsAreFoundLost, though they are read in turn, and while the drive reads others.
func TestManyUnreadableSegmentsAreFoundLost(t *testing.T) {
	d := newLossyRig(t, 4000)
	d.flip() // undone
	const bad = 20
	var keys [bad][]byte
	lost := map[units.ExtentOffset]bool{}
	for i := 0; len(lost) < bad; i++ {
		n := d.s.tbl.Segment(format.HashKey(d.s.hashSeed, numberedKey(1_000_000+i)))
		if at := d.s.tbl.Get(n).Offset(); n != d.segment && !lost[at] {
			keys[len(lost)], lost[at] = numberedKey(1_000_000+i), true
		}
	}
	d.fail = func(q *IO) error {
		for at := range lost {
			if q.Op == pipeline.Read && q.Offset <= at && at < q.Offset+units.ExtentOffset(len(q.Buf)) {
				return errors.New("unreadable")
			}
		}
		return nil
	}
	taken := map[int]bool{}
	for round := 0; len(taken) < bad; round++ {
		if round > 60 {
			t.Fatalf("%d of %d segments take writes", len(taken), bad)
		}
		for i, key := range keys {
			d.s.Submit(&Request{Op: Put, Key: key})
			if d.run(); d.last.Status == OK {
				taken[i] = true
			}
		}
		d.readOthers(unreadableReads)
		d.now += unreadableNS
	}
}

// TestUnreadableSegmentsThatNobodyReadsAreNotInTheWay of others that are unreadable.
func TestUnreadableSegmentsThatNobodyReadsAreNotInTheWay(t *testing.T) {
	d := newLossyRig(t, 1000)
	d.flip() // undone
	d.fail = failReads
	other := map[uint32]bool{d.segment: true}
	for i := 1_000_000; len(other) < 2*len(d.s.unreadable.last); i++ {
		n := d.s.tbl.Segment(format.HashKey(d.s.hashSeed, numberedKey(i)))
		if n == d.segment {
			continue
		}
		other[n] = true
		d.one(t, Request{Op: Put, Key: numberedKey(i)}, DeviceError)
	}
	var read []byte // a key of a segment that is always read
	for i := 2_000_000; read == nil || other[d.s.tbl.Segment(format.HashKey(d.s.hashSeed, read))]; i++ {
		read = numberedKey(i)
	}
	d.now += staleNS
	at := d.s.tbl.Get(d.segment).Offset()
	d.unreadable(at, at+1)
	for range maxTries - 1 {
		d.one(t, Request{Op: Put, Key: d.keys[1]}, DeviceError)
		for range 2 * unreadableReads {
			d.s.Submit(&Request{Op: Delete, Key: read})
			d.run()
		}
		d.now += unreadableNS
	}
	d.one(t, Request{Op: Put, Key: d.keys[1]}, OK)
}
