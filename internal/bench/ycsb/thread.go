package ycsb

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"jbofd/internal/bench"
)

// thread is one of YCSB's threads: a goroutine with a queue of its own.
type thread struct {
	id     int
	b      *Bench
	q      Queue
	rng    *rand.Rand
	choose chooser
	left   uint64 // operations still to begin in a run

	frees []func() error // give the slots' buffers back
	slots []slot
	free  []uint32
	again []uint32 // slots that have read and have to write
	ops   []Op
	dones []Done

	pacer  bench.Pacer
	worker *bench.Worker

	mu  sync.Mutex
	cur *stats
	old *stats // the other one, for take
	// stretches are those of the phase, for the timeline.
	stretches []stretch
}

// slot is one outstanding operation.
type slot struct {
	buf    []byte
	key    [KeyBytes]byte
	kind   kind
	put    bool // what is outstanding is a write
	record uint64
	floor  uint32 // of a read
	write  write  // of a write
	// due is when the operation should have begun, began when it did, and at when the part of it did that is
	// outstanding now.
	due, began, at int64
}

func newThread(ctx context.Context, b *Bench, i int) (*thread, error) {
	t := &thread{
		id: i, b: b, rng: rand.New(rand.NewPCG(b.cfg.Seed, uint64(i))), slots: make([]slot, b.cfg.Depth),
		free:  make([]uint32, 0, b.cfg.Depth),
		again: make([]uint32, 0, b.cfg.Depth), ops: make([]Op, 0, b.cfg.Depth), dones: make([]Done, b.cfg.Depth),
		cur: &stats{}, old: &stats{},
	}
	for k := range t.slots {
		buf, free, err := b.db.Buffer(b.w.ValueBytes())
		if err != nil {
			return nil, errors.Join(err, t.release())
		}
		t.frees = append(t.frees, free)
		t.slots[k].buf = buf
		t.free = append(t.free, uint32(b.cfg.Depth-1-k))
	}
	var err error
	if t.q, err = b.db.OpenQueue(ctx, b.cfg.Depth); err != nil {
		return nil, errors.Join(err, t.release())
	}
	t.worker = b.workers.Add(t.q)
	return t, nil
}

// close ends the queue, then gives its buffers back.
func (t *thread) close() error { return errors.Join(t.q.Close(), t.release()) }

func (t *thread) release() error {
	var errs []error
	for _, free := range t.frees {
		errs = append(errs, free())
	}
	return errors.Join(errs...)
}

// take returns what was counted since the last take; valid until the next.
func (t *thread) take() *stats {
	t.old.reset()
	t.mu.Lock()
	defer t.mu.Unlock()
	t.cur, t.old = t.old, t.cur
	return t.old
}

// loop keeps the queue busy with the operations that next makes, until there are no more or the thread is stopped.
func (t *thread) loop(next func(*slot) bool) error { // hot: 0 allocs per operation
	more := true
	for {
		now := t.b.workers.Now()
		if at, stopped := t.worker.Stopped(); stopped && more {
			more = false
			t.giveUp(at)
		}
		for _, i := range t.again {
			t.slots[i].at = now
			t.begin(i, true)
		}
		t.again = t.again[:0]
		wait := time.Duration(-1)
		for more && len(t.free) > 0 {
			due, early := t.pacer.Due(now)
			if early > 0 {
				wait = early
				break
			}
			i := t.free[len(t.free)-1]
			s := &t.slots[i]
			if !next(s) {
				more = false
				break
			}
			if t.pacer.On() {
				t.pacer.Advance(1 - t.rng.Float64())
			}
			s.due, s.began, s.at = due, now, now
			t.free = t.free[:len(t.free)-1]
			t.begin(i, s.kind == update || s.kind == insert)
		}
		if len(t.ops) > 0 {
			n, err := t.q.Submit(t.ops)
			if err != nil {
				return err
			}
			t.ops = t.ops[:copy(t.ops, t.ops[n:])]
		}
		out := len(t.slots) - len(t.free)
		if !more && out == 0 {
			return nil
		}
		wait, ok := bench.PollWait(wait, out)
		if !ok {
			continue
		}
		n, err := t.q.Poll(t.dones, wait)
		if n > 0 && !t.finish(t.dones[:n]) && !t.b.cfg.ContinueOnError {
			t.b.workers.Stop()
		}
		if err := t.worker.Interrupted(out-n, len(t.slots)); err != nil {
			return err
		}
		if err != nil {
			return err
		}
	}
}

// giveUp counts the operations that were due when the thread was stopped and will not begin.
func (t *thread) giveUp(atNS int64) {
	n := min(t.pacer.Overdue(atNS), t.left)
	t.mu.Lock()
	t.cur.overdue += n
	t.mu.Unlock()
}

// begin makes the Op of slot i: a write of the next version, or a read.
func (t *thread) begin(i uint32, put bool) { // hot: 0 allocs
	s := &t.slots[i]
	o := Op{Put: put, Key: &s.key, Value: s.buf, Tag: i}
	if s.put = put; put {
		s.write = t.b.versions.issue(s.record)
		o.Value = s.buf[:t.b.w.valueLen(s.write.stamp)]
		fillValue(o.Value, s.write.stamp)
	} else {
		s.floor = t.b.versions.floor(s.record)
	}
	t.ops = append(t.ops, o)
}

// finish handles the operations that have ended and reports whether none has failed.
func (t *thread) finish(dones []Done) (ok bool) { // hot: 0 allocs
	now := t.b.workers.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	ok = true
	for i := range dones {
		d := &dones[i]
		s := &t.slots[d.Tag]
		part := s.kind
		if part == readModifyWrite {
			if part = read; s.put {
				part = update
			}
		}
		st := t.cur
		st.results[part][d.Result]++
		if d.Result == OK {
			record(&st.raw[part], now-s.at)
			if t.pacer.On() {
				from := s.at
				if s.at == s.began {
					from = s.due
				}
				record(&st.corrected[part], now-from)
			}
		}
		if s.put {
			t.settle(s, d)
		} else {
			t.check(st, s, d)
		}
		if d.Result >= Refused {
			ok = false
			st.note(fmt.Sprintf("%s of key %s (record %d): %v", part, s.key[:], s.record, d.Err))
		}
		if s.kind == readModifyWrite {
			if !s.put && d.Result == OK {
				t.again = append(t.again, d.Tag)
				continue
			}
			st.results[s.kind][d.Result]++
			if d.Result == OK {
				record(&st.raw[s.kind], now-s.began)
				if t.pacer.On() {
					record(&st.corrected[s.kind], now-s.due)
				}
			}
		}
		st.ops++
		t.countAt(now, now-s.began, d.Result == OK)
		t.free = append(t.free, d.Tag)
	}
	return ok
}

// settle tells the versions the outcome of a write.
func (t *thread) settle(s *slot, d *Done) { // hot: 0 allocs
	switch d.Result {
	case OK:
		t.b.versions.settle(s.write, done)
	case Refused:
		t.b.versions.settle(s.write, refused)
	default:
		t.b.versions.settle(s.write, unknown)
	}
}

// check verifies what a read has returned.
func (t *thread) check(st *stats, s *slot, d *Done) { // hot: 0 allocs while it holds
	v := t.b.versions
	var err error
	switch {
	case d.Result == NotFound:
		err = v.missing(s.record, s.floor)
	case d.Result != OK:
		return
	case d.ValueLen > len(s.buf):
		err = fmt.Errorf("%d bytes, but the values of this workload have at most %d", d.ValueLen, len(s.buf))
	default:
		var found stamp
		if found, err = checkValue(s.buf[:d.ValueLen], s.record); err == nil {
			if err = v.check(found, s.floor); err == nil && t.b.quiet {
				v.found(found)
			}
		}
	}
	st.checked++
	if err != nil {
		st.wrong++
		st.note(fmt.Sprintf("verify: key %s (record %d): %v", s.key[:], s.record, err))
	}
}

// nextLoad makes the next insert of the load.
func (t *thread) nextLoad(s *slot) bool { // hot: 0 allocs
	n := t.b.sequence.Add(1) - 1
	if n >= t.b.end {
		return false
	}
	t.prepare(s, insert, n)
	return true
}

// nextRun makes the next operation of a run.
func (t *thread) nextRun(s *slot) bool { // hot: 0 allocs
	if t.left == 0 {
		return false
	}
	t.left--
	w := &t.b.w
	u := t.rng.Float64()
	k := readModifyWrite
	switch {
	case u < w.Read:
		k = read
	case u < w.Read+w.Update:
		k = update
	case u < w.Read+w.Update+w.Insert:
		n := t.b.sequence.Add(1) - 1
		if n >= t.b.end {
			t.b.full.Store(true)
			return false
		}
		t.prepare(s, insert, n)
		return true
	case w.ReadModifyWrite == 0:
		// u is above a sum of 1 that was rounded down.
		k = read
		if w.Read == 0 {
			k = update
		}
	}
	t.prepare(s, k, t.choose.next(t.b.versions.limit.Load()))
	return true
}

// nextVerify makes the next read of everything that was ever written.
func (t *thread) nextVerify(s *slot) bool { // hot: 0 allocs
	for {
		n := t.b.sequence.Add(1) - 1
		if n >= t.b.end {
			return false
		}
		if v := t.b.versions; n < v.assumed || v.entries[n].issued.Load() > 0 {
			t.prepare(s, read, n)
			return true
		}
	}
}

// prepare prepares an operation on a record.
func (t *thread) prepare(s *slot, k kind, n uint64) { // hot: 0 allocs
	s.kind, s.record = k, n
	putKey(&s.key, n, t.b.w.Ordered)
}
