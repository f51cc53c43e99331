package kvstore_test

import (
	"bytes"
	"fmt"
	"math"
	"slices"
	"testing"

	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
)

// restoredKey is a key of TestACrashAtEveryWriteOfACopyThatRestores: it has version had, whose value may be damaged. A
// live write gives it version had+1, if new is set, and was answered if acked is.
type restoredKey struct {
	name       []byte
	value      []byte
	had        uint64
	damaged    bool
	new, acked bool
}

// restoring is a store with such keys, and a batch with all of them.
type restoring struct {
	*model
	all    []restoredKey
	batch  nvme.KVRange
	copied bool // the CopyIn was answered
}

// fill stores the keys, copies them out, and damages some of their values.
func (d *restoring) fill() {
	for i := range 250 {
		k := restoredKey{name: fmt.Append(nil, "restored", i), value: make([]byte, 1+d.rng.IntN(900)),
			had: 1 + d.rng.Uint64N(1000), new: d.rng.IntN(4) == 0}
		if d.rng.IntN(40) == 0 {
			k.value = make([]byte, 900+d.rng.IntN(50_000))
		}
		for n := range k.value {
			k.value[n] = byte(d.rng.Uint32())
		}
		if p := d.do(kvstore.Request{Op: kvstore.Put, Condition: kvstore.IfNewer, Version: k.had, Key: k.name,
			Value: k.value}); p.Status != kvstore.OK {
			d.t.Fatalf("%+v", p)
		}
		d.all = append(d.all, k)
	}
	d.settle()
	b := nvme.KVRange(make([]byte, kvstore.MaxRangeBytes))
	p := d.do(kvstore.Request{Op: kvstore.CopyOut, Range: kvstore.Range{Last: math.MaxUint64}, Value: b})
	if d.batch = slices.Clone(b[:p.ValueLen]); p.Status != kvstore.OK || !d.batch.Complete() {
		d.t.Fatalf("%+v", p)
	}
	d.stop()
	for i := range d.all {
		k := &d.all[i]
		if k.damaged = len(k.value) > 0 && d.rng.IntN(3) == 0; k.damaged {
			d.dev.Flip(d.s.ValueAt(d.dev.Visible, k.name)+int64(d.rng.IntN(min(900, len(k.value)))), 3)
		}
	}
}

// run submits the CopyIn and live writes, and steps until all is done or the process dies.
func (d *restoring) run() {
	d.t.Helper()
	d.copied = false
	const copyTag = 1 << 62
	d.rig.reply = func(p kvstore.Reply) {
		switch {
		case p.Tag == copyTag && p.Status == kvstore.OK:
			d.copied = true
		case p.Tag < copyTag && (p.Status == kvstore.OK || p.Status == kvstore.Superseded):
			d.all[p.Tag].acked = true
		default:
			d.t.Fatalf("%+v", p)
		}
	}
	sent := false
	for i := 0; !d.crashed && (i < len(d.all) || !sent || !d.s.Idle()); {
		if !sent && d.rng.IntN(20) == 0 {
			sent = d.s.Submit(&kvstore.Request{Op: kvstore.CopyIn, Tag: copyTag, Value: d.batch,
				Background: d.rng.IntN(2) == 0})
		}
		for i < len(d.all) && !d.all[i].new {
			i++
		}
		if i < len(d.all) && d.s.Submit(&kvstore.Request{Op: kvstore.Put, Condition: kvstore.IfNewer,
			Version: d.all[i].had + 1, Key: d.all[i].name, Value: d.all[i].name, Tag: uint64(i)}) {
			i++
		}
		d.step()
	}
}

// verify compares what there is with what there may be.
func (d *restoring) verify() {
	d.t.Helper()
	buf := make([]byte, 100_000)
	for i := range d.all {
		k := &d.all[i]
		switch p := d.do(kvstore.Request{Op: kvstore.Get, Key: k.name, Value: buf}); {
		case p.Status == kvstore.Corrupt && k.damaged && !d.copied && !k.acked:
		case p.Status != kvstore.OK:
			d.t.Fatalf("%q: %+v, %+v, copied %t", k.name, p, k.damaged, d.copied)
		case k.new && p.Version == k.had+1 && bytes.Equal(buf[:p.ValueLen], k.name):
		case k.acked || p.Version != k.had || !bytes.Equal(buf[:p.ValueLen], k.value):
			d.t.Fatalf("%q: %+v, had version %d and %d bytes; a live write was acknowledged: %t", k.name, p, k.had,
				len(k.value), k.acked)
		}
	}
}

// TestACrashAtEveryWriteOfACopyThatRestores: a restart finds damaged values as they were or restored, and live writes
// that were answered; the same copy does the rest.
func TestACrashAtEveryWriteOfACopyThatRestores(t *testing.T) {
	kvstore.PlainOnly(t)
	t.Parallel()
	for seed := range kvstore.Seeds(t, 2) {
		cfg := variant(seed, 40)
		cfg.Requests = 16
		base := &restoring{model: newModel(newRig(t, seed, cfg), 1, nil)}
		base.fill()
		crashCopies(t, func(at uint64) (*model, copying, *bool) {
			d := &restoring{model: base.again(seed + at), all: slices.Clone(base.all), batch: base.batch}
			return d.model, d, &d.copied
		})
	}
}
