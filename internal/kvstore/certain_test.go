package kvstore_test

import (
	"testing"

	"jbofd/internal/kvstore"
	"jbofd/internal/lab"
	"jbofd/internal/ssd"
)

// TestWhatHasFailedIsNotCertainBeforeACheckpoint: a restart may find a write done that has failed, until a checkpoint
// is durable. Certain says so.
func TestWhatHasFailedIsNotCertainBeforeACheckpoint(t *testing.T) {
	r := newRig(t, seeds(t), small(32))
	m := newModel(r, 100, func() int { return 100 })
	m.random(200, 16)
	m.settle()
	certain := func() kvstore.Status {
		t.Helper()
		st, answered := kvstore.OK, false
		reply := r.reply
		r.reply = func(p kvstore.Reply) {
			if p.Tag != 1<<40 {
				reply(p)
				return
			}
			st, answered = p.Status, true
		}
		defer func() { r.reply = reply }()
		r.s.Submit(&kvstore.Request{Op: kvstore.Certain, Tag: 1 << 40})
		if r.turn(); !answered {
			t.Fatal("no answer")
		}
		return st
	}
	if st := certain(); st != kvstore.OK {
		t.Errorf("of a store in which nothing has failed: %v", st)
	}
	r.dev.Fault = func(q *ssd.Request) lab.Outcome {
		if q.Op == ssd.Write && !isValues(q) {
			return lab.FailUndone + lab.Outcome(r.rng.IntN(3))
		}
		return lab.Good
	}
	m.ops = []kvstore.Op{kvstore.Put}
	m.random(20, 4)
	if st := certain(); st != kvstore.DeviceError {
		t.Errorf("while no segment is written: %v", st)
	}
	r.dev.Fault = nil
	m.settle()
	for until := r.now + 5e9; r.now < until && certain() != kvstore.OK; {
		if !r.step() {
			break
		}
	}
	if st := certain(); st != kvstore.OK {
		t.Errorf("when the drive works again: %v", st)
	}
}
