package publish

import (
	"bytes"
	"errors"
	"testing"
	"time"

	"jbofd/internal/drive"
	"jbofd/internal/nvmeof/target"
	"jbofd/internal/pipeline"
	"jbofd/internal/ssd"
)

// TestZeroesThatWereGivenUpKeepAUserAway: an erasure was given up, and the drive still has its zeroes. The range gets
// no user before they have ended: Vacate says so. Otherwise they overwrite what a host has written and was told is
// done.
func TestZeroesThatWereGivenUpKeepAUserAway(t *testing.T) {
	r := newRig(t)
	r.disk.Hold = func(q *ssd.Request) int64 {
		if q.Op == ssd.WriteZeroes {
			return int64(90 * time.Second)
		}
		return 0
	}
	if err := r.publisher.Erase(r.drive, 0, storeBytes, nil, nil); !errors.Is(err, ErrUnanswered) {
		t.Fatal(err)
	}
	r.disk.Hold = nil
	if err := r.publisher.Vacate(r.drive, nil); errors.Is(err, target.ErrInFlight) {
		return // right
	}
	// This is what a reload does before it publishes a namespace in the range again.
	t.Errorf("the range is given to a user, with %d requests at the drive", len(r.disk.Flights))
	data := bytes.Repeat([]byte("acknowl."), 512/8)
	write := &drive.IO{Op: pipeline.Write, Offset: 4096, Len: 512, Flags: ssd.FUA}
	write.Buf.B = data
	if err := do(r.drive, write, -1, nil); err != nil {
		t.Fatal(err)
	}
	r.sim.Run(r.sim.Now()+int64(5*time.Minute), func() bool { return len(r.disk.Flights) == 0 })
	if got := r.disk.Visible[4096:][:512]; !bytes.Equal(got, data) {
		t.Errorf("an acknowledged write is lost: % x...", got[:8])
	}
}

// TestADrainThatBeganBeforeCountsForNothing: an erasure fails while a drain is under way, which does not know what the
// drive has of that.
func TestADrainThatBeganBeforeCountsForNothing(t *testing.T) {
	r := newRig(t)
	r.disk.Hold = func(*ssd.Request) int64 { return int64(time.Second) }
	if err := do(r.drive, &drive.IO{Op: pipeline.Flush}, 0, nil); !errors.Is(err, ErrUnanswered) {
		t.Fatal(err)
	}
	drained := make(chan struct{}, 1)
	r.sim.Go(func() {
		if err := r.publisher.Drain(r.drive, nil); err != nil {
			t.Error(err)
		}
		drained <- struct{}{}
	})
	r.sim.Run(r.sim.Now()+int64(100*time.Millisecond), func() bool { return false })
	r.publisher.leftover(r.drive)
	r.sim.Wait(drained, -1)
	if n := r.publisher.Undrained(); n != 1 {
		t.Errorf("%d drives may have requests", n)
	}
	if err := r.publisher.Vacate(r.drive, nil); err != nil {
		t.Error(err)
	}
	if n := r.publisher.Undrained(); n != 0 {
		t.Errorf("%d drives may have requests after Vacate", n)
	}
}
