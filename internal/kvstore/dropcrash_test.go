package kvstore_test

import (
	"math"
	"testing"

	"jbofd/internal/kvstore"
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
