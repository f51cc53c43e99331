package kvstore_test

import (
	"math"
	"testing"

	"jbofd/internal/kvstore"
	"jbofd/internal/kvstore/format"
	"jbofd/internal/ssd"
)

// dropped is a store in which a range is dropped, and some of what it has is put again.
type dropped struct {
	*model
	first, last uint64
	// sent: the Drop was submitted. done: it was answered. again are the keys that were put again, and answered.
	sent, done bool
	again      map[int]bool
}

const dropTag = 1 << 62

// run submits the Drop and Puts, and steps until the store is idle or the process dies.
func (d *dropped) run() {
	d.t.Helper()
	d.rig.reply = func(p kvstore.Reply) {
		switch {
		case p.Status != kvstore.OK:
			d.t.Fatalf("%+v", p)
		case p.Tag == dropTag:
			d.done = true
		case p.Tag > dropTag:
			d.again[int(p.Tag-dropTag-1)] = true
		}
	}
	d.sent = true
	d.s.Submit(&kvstore.Request{Op: kvstore.Drop, Tag: dropTag, Range: kvstore.Range{First: d.first, Last: d.last}})
	next := 0
	for n := 0; !d.crashed && (n == 0 || !d.s.Idle() || next < len(d.keys)); n++ {
		if d.done && next < len(d.keys) && d.s.Submit(&kvstore.Request{Op: kvstore.Put, Tag: dropTag + 1 + uint64(next),
			Key: d.keys[next].name, Value: []byte("again")}) {
			next += 7
		}
		d.step()
		if n == 3000 {
			d.s.Checkpoint()
		}
	}
}

// verify compares what there is with what there may be.
func (d *dropped) verify() {
	d.t.Helper()
	gone, there := 0, 0
	for i := range d.keys {
		p := d.do(kvstore.Request{Op: kvstore.Exist, Key: d.keys[i].name})
		exists := p.Status == kvstore.OK
		if !exists && p.Status != kvstore.NotFound {
			d.t.Fatalf("key %d: %+v", i, p)
		}
		at := d.s.Position(d.keys[i].name)
		switch covered := at >= d.first && at <= d.last; {
		case d.again[i] && (!exists || p.ValueLen != 5):
			d.t.Fatalf("key %d was put behind the Drop: %+v", i, p)
		case d.again[i] || exists && p.ValueLen == 5:
		case !covered && !exists:
			d.t.Fatalf("key %d is not in the range, and was dropped", i)
		case covered && exists:
			there++
		case covered:
			gone++
		}
	}
	if gone > 0 && there > 0 || d.done && there > 0 || !d.sent && gone > 0 {
		d.t.Fatalf("of the range there are %d keys, and %d were dropped; answered: %v", there, gone, d.done)
	}
}

// TestACrashAtEveryWriteOfADrop: a restart finds all of the range or nothing, and nothing if the Drop was answered.
// What was put behind it is there.
func TestACrashAtEveryWriteOfADrop(t *testing.T) {
	kvstore.PlainOnly(t)
	t.Parallel()
	for seed := range kvstore.Seeds(t, 3) {
		cfg := variant(seed, 40)
		cfg.Requests = 16
		if seed%2 == 1 {
			cfg.FUA, cfg.Volatile = false, seed%3 == 0
		}
		base := newModel(newRig(t, seed, cfg), 400, nil)
		base.size = func() int { return 20 + base.rng.IntN(300) }
		for i := range base.keys {
			base.push(kvstore.Put, i, base.size())
		}
		base.finish()
		base.settle()
		base.stop()
		n := 0
		for at := 1; ; at += every(1 + at/12) {
			d := &dropped{model: base.again(seed + uint64(at)), first: 1 << 61, last: math.MaxUint64 - 1<<62,
				again: map[int]bool{}}
			d.reopen0()
			d.crashIn, d.power = at, at%2 == 0 && !cfg.Volatile
			d.run()
			ended := !d.crashed
			for k := range 2 {
				if !d.crashed {
					d.crash()
				}
				d.crashIn = 0
				d.reopen0()
				d.verify()
				if k == 0 { // and once more while it is swept again
					d.crashIn = 1 + d.rng.IntN(30)
					d.settle()
				}
			}
			d.settle()
			d.s.Checkpoint()
			d.settle()
			d.verify()
			d.recount()
			if left := d.s.DropsLeft(); left > 0 {
				t.Fatalf("%d Drops are left", left)
			}
			n++
			if ended {
				t.Logf("%d crashes, the last would be at write %d", n, at)
				break
			}
		}
	}
}

// TestADropThatIsAnsweredIsInBothSuperblocks: a crash right after the answer, and then either of them is lost.
func TestADropThatIsAnsweredIsInBothSuperblocks(t *testing.T) {
	cfg := small(32)
	base := newModel(newRig(t, seeds(t), cfg), 60, func() int { return 100 })
	for i := range base.keys {
		base.push(kvstore.Put, i, 100)
	}
	base.finish()
	base.settle()
	for i, lost := range []int64{-1, 0, cfg.PartitionBytes - format.SuperblockBytes} {
		for parity := range 2 { // of the generation, so that either copy is written first
			d := &dropped{model: base.again(uint64(i)), first: 1 << 62, last: math.MaxUint64 - 1<<62,
				again: map[int]bool{}}
			for range 1 + parity {
				d.crash()
				d.reopen0()
				d.rig.reply = func(p kvstore.Reply) { d.done = d.done || p.Tag == dropTag && p.Status == kvstore.OK }
				d.done = false
				d.s.Submit(&kvstore.Request{Op: kvstore.Drop, Tag: dropTag,
					Range: kvstore.Range{First: d.first, Last: d.last}})
				for d.sent = true; !d.done; {
					d.step()
				}
				d.last++ // the next Drop covers more
			}
			d.last--
			if d.crash(); lost >= 0 {
				d.dev.Unreadable(lost, format.SuperblockBytes)
			}
			d.reopen0()
			d.verify()
		}
	}
}

// TestADropCoversWritesThatAreUnderWay: the segment of such a write was empty, so that the sweep must not have passed
// it when the write ends, and the Drop must not have gone from the list.
func TestADropCoversWritesThatAreUnderWay(t *testing.T) {
	r := newRig(t, seeds(t), small(32))
	m := newModel(r, 1, nil)
	m.do(kvstore.Request{Op: kvstore.Put, Key: []byte("first")})
	m.settle()
	const late = 1e15
	key, ended, swept := []byte("under way"), false, false
	r.reply = func(p kvstore.Reply) {
		ended, swept = ended || p.Tag == 1, swept || p.Tag == dropTag
	}
	r.dev.Hold = func(q *ssd.Request) int64 {
		if q.Op == ssd.Write {
			return late
		}
		return 0
	}
	if !m.s.Submit(&kvstore.Request{Op: kvstore.Put, Tag: 1, Key: key}) {
		t.Fatal("a Put is not taken")
	}
	r.turn()
	r.dev.Hold = nil
	if !m.s.Submit(&kvstore.Request{Op: kvstore.Drop, Tag: dropTag, Range: kvstore.Range{Last: math.MaxUint64}}) {
		t.Fatal("a Drop is not taken")
	}
	for n := 0; r.dev.Next() < 0 || r.dev.Flights[r.dev.Next()].DueNS < late || !swept; n++ {
		if r.step(); n == 1000 {
			t.Fatal("the Drop does not end")
		}
	}
	if ended {
		t.Fatal("the Put has ended, although its write was held")
	}
	for i := range r.dev.Flights {
		r.dev.Flights[i].DueNS = r.now
	}
	for n := 0; n < 3 && m.s.DropsLeft() > 0 || n == 0; n++ {
		m.settle()
		m.s.Checkpoint()
		m.settle()
	}
	if left := m.s.DropsLeft(); left > 0 || !ended {
		t.Fatalf("%d Drops are left, the Put has ended: %v", left, ended)
	}
	if p := m.do(kvstore.Request{Op: kvstore.Get, Key: key, Value: make([]byte, 10)}); p.Status != kvstore.NotFound {
		t.Errorf("a Get of what was dropped: %+v", p)
	}
	if n := m.s.Stats().Objects; n != 0 {
		t.Errorf("there are %d objects", n)
	}
	m.recount()
}
