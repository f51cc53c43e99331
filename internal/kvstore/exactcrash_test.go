package kvstore_test

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
)

// exactKey is a key of TestACrashAtEveryWriteOfAnExactCopyIn: the version that it has, that the copy has, and that a
// live write gives it; 0: it does not exist, is not copied, not written.
type exactKey struct {
	name             []byte
	had, copied, new uint64
	// inside: its position is in the part that is copied. acked: the live write was answered.
	inside, acked bool
}

// exactCopy is a store with such keys.
type exactCopy struct {
	*model
	all    []exactKey
	batch  nvme.KVRange
	copied bool // the CopyIn was answered
}

const exactTag, exactClock = 1 << 62, 1000

// identityOf is the identity of the write that has given a version.
func (exactKey) identityOf(version uint64) kvstore.Identity {
	return kvstore.Identity{Client: 7, Seq: version}
}

// valueOf is the value of a version.
func (exactKey) valueOf(version uint64) []byte { return make([]byte, version%400) }

// fill stores what there is before, and makes the batch: of the upper half of all positions, in which each key has a
// version that is lower or higher than before, or the same, or is not there.
func (d *exactCopy) fill() {
	for i := range 560 {
		k := exactKey{name: fmt.Append(nil, "exact", i)}
		k.inside = d.s.Position(k.name) > 1<<63
		if i >= 260 { // live writes of new keys, by which segments are split while they are cleared
			k.new = exactClock + 1 + uint64(i)
			d.all = append(d.all, k)
			continue
		}
		if d.rng.IntN(4) > 0 {
			k.had = 1 + d.rng.Uint64N(exactClock)
		}
		if k.inside && d.rng.IntN(3) > 0 {
			if k.copied = 1 + d.rng.Uint64N(exactClock); d.rng.IntN(3) == 0 && k.had > 0 {
				k.copied = k.had
			}
		}
		if d.rng.IntN(5) == 0 {
			k.new = exactClock + 1 + uint64(i)
		}
		if k.had > 0 {
			if p := d.do(kvstore.Request{Op: kvstore.Put, Condition: kvstore.IfNewer, Version: k.had, Key: k.name,
				Value: k.valueOf(k.had), ID: k.identityOf(k.had)}); p.Status != kvstore.OK {
				d.t.Fatalf("%+v", p)
			}
		}
		d.all = append(d.all, k)
	}
	b := nvme.NewKVRange(make([]byte, 200_000), nvme.KVCopy, 0, math.MaxUint64, nvme.KVLastOf(1<<63))
	sorted := slices.Clone(d.all)
	slices.SortFunc(sorted, func(a, b exactKey) int {
		x, y := nvme.KVCursorAt(d.s.Position(a.name), a.name), nvme.KVCursorAt(d.s.Position(b.name), b.name)
		return x.Compare(&y)
	})
	for _, k := range sorted {
		if k.copied > 0 {
			var e nvme.KVEntry
			e, b, _ = b.Append(k.name, len(k.valueOf(k.copied)), 1)
			e.SetPosition(d.s.Position(k.name))
			e.SetVersion(k.copied)
			e.SetIdentity(0, nvme.KVIdentity{Client: 7, Seq: k.copied, Version: k.copied})
		}
	}
	b.SetTo(nvme.KVLastOf(math.MaxUint64))
	b.SetFlags(nvme.KVComplete)
	b.Seal()
	d.batch = b
}

// run submits the CopyIn and live writes, and steps until all is done or the process dies.
func (d *exactCopy) run() {
	d.t.Helper()
	d.copied = false
	d.rig.reply = func(p kvstore.Reply) {
		switch {
		case p.Tag == exactTag && p.Status == kvstore.OK:
			d.copied = true
		case p.Tag > exactTag && (p.Status == kvstore.OK || p.Status == kvstore.Superseded):
			d.all[p.Tag-exactTag-1].acked = true
		default:
			d.t.Fatalf("%+v", p)
		}
	}
	sent := false
	for i := 0; !d.crashed && (i < len(d.all) || !sent || !d.s.Idle()); {
		if !sent && d.rng.IntN(20) == 0 {
			sent = d.s.Submit(&kvstore.Request{Op: kvstore.CopyIn, Tag: exactTag, Value: d.batch,
				Version: exactClock})
		}
		for i < len(d.all) && d.all[i].new == 0 {
			i++
		}
		if i < len(d.all) && d.s.Submit(&kvstore.Request{Op: kvstore.Put, Condition: kvstore.IfNewer,
			Version: d.all[i].new, Key: d.all[i].name, Value: d.all[i].valueOf(d.all[i].new),
			Tag: exactTag + 1 + uint64(i), ID: d.all[i].identityOf(d.all[i].new)}) {
			i++
		}
		d.step()
	}
}

// verify compares what there is with what there may be.
func (d *exactCopy) verify() {
	d.t.Helper()
	buf := make([]byte, 1000)
	for i := range d.all {
		k := &d.all[i]
		p := d.do(kvstore.Request{Op: kvstore.Get, Key: k.name, Value: buf})
		if p.Status != kvstore.OK && p.Status != kvstore.NotFound || p.ValueLen != int(p.Version%400) {
			d.t.Fatalf("%q: %+v", k.name, p)
		}
		may := []uint64{k.had}
		if k.inside {
			may = append(may, 0, k.copied)
		}
		if d.copied && k.inside {
			may = []uint64{k.copied}
		}
		switch {
		case k.acked:
			may = []uint64{k.new}
		case k.new > 0:
			may = append(may, k.new)
		}
		if !slices.Contains(may, p.Version) {
			d.t.Fatalf("%q has version %d, may have %v: %+v, copied %t", k.name, p.Version, may, *k, d.copied)
		}
		d.verifyIdentities(k, p.Version)
	}
}

// verifyIdentities: a key has the identity of the write that has given its version. When the copy is done, it has that
// of the write that was copied, and none that was not, besides that of a live write.
func (d *exactCopy) verifyIdentities(k *exactKey, version uint64) {
	d.t.Helper()
	for _, v := range []uint64{k.had, k.copied, k.new} {
		if v == 0 {
			continue
		}
		id := k.identityOf(v)
		id.Retry = true
		p := d.do(kvstore.Request{Op: kvstore.Put, Key: k.name, ID: id, Condition: kvstore.IfVersion,
			Version: kvstore.MaxVersion})
		known := p.Status == kvstore.OK && p.Version == v
		if !known && p.Status != kvstore.VersionMismatch {
			d.t.Fatalf("%q: a retry of the write of version %d is answered %+v", k.name, v, p)
		}
		must := v == version || d.copied && k.inside && v == k.copied
		mayNot := d.copied && k.inside && v != k.copied && v != version
		if must && !known || mayNot && known {
			d.t.Fatalf("%q has version %d, the write of version %d is known: %t; %+v, copied %t", k.name, version, v,
				known, *k, d.copied)
		}
	}
}

// TestACrashAtEveryWriteOfAnExactCopyIn: a restart finds of each key what was there, nothing, or what the copy has, and
// live writes that were answered; the same copy does the rest. Keys outside of the part keep what they have.
func TestACrashAtEveryWriteOfAnExactCopyIn(t *testing.T) {
	kvstore.PlainOnly(t)
	for seed := range kvstore.Seeds(t, 2) {
		cfg := variant(seed, 40)
		cfg.Requests = 16
		base := &exactCopy{model: newModel(newRig(t, seed, cfg), 1, nil)}
		base.fill()
		base.settle()
		base.stop()
		crashCopies(t, func(at uint64) (*model, copying, *bool) {
			d := &exactCopy{model: base.again(seed + at), all: slices.Clone(base.all), batch: base.batch}
			return d.model, d, &d.copied
		})
	}
}

// copying is a CopyIn among live writes: run does it, verify compares what the store has with what may be there.
type copying interface {
	run()
	verify()
}

// crashCopies lets a copy crash at each of its writes, restarts and finishes it. again returns a new one, and
// where it notes that the CopyIn was answered.
func crashCopies(t *testing.T, again func(at uint64) (*model, copying, *bool)) {
	n := 0
	for at := 1; ; at += every(1 + at/8) {
		m, d, copied := again(uint64(at))
		m.reopen0()
		m.crashIn, m.power = at, at%2 == 0
		d.run()
		ended := !m.crashed
		if m.crashIn = 0; !ended {
			m.reopen0()
			d.verify()
			*copied = false
			d.run()
		}
		if !*copied {
			t.Fatal("the copy is not done")
		}
		d.verify()
		m.settle()
		m.recount()
		n++
		if ended {
			t.Logf("%d crashes, the last would be at write %d", n, at)
			return
		}
	}
}
