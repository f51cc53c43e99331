package kvstore_test

import (
	"bytes"
	"fmt"
	"slices"
	"testing"

	"jbofd/internal/kvstore"
	"jbofd/internal/kvstore/check"
	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/space"
	"jbofd/internal/units"
)

// checked checks the partition on the drive, which nobody has open. It must not change the drive.
func (m *model) checked() check.Report {
	m.t.Helper()
	before := bytes.Clone(m.dev.Visible)
	report, err := check.Run(check.Config{PartitionBytes: m.cfg.PartitionBytes, BlockSize: m.cfg.BlockSize,
		SegTbl: make([]byte, len(m.cfg.SegTbl)), Alloc: space.HeapAlloc, MaxKeys: 1 << 20,
		Read: func(at units.ExtentOffset, buf []byte) error {
			copy(buf, m.dev.Visible[at:])
			return nil
		}})
	if err != nil {
		m.t.Fatal(err)
	}
	if !bytes.Equal(before, m.dev.Visible) {
		m.t.Fatal("the check has changed the drive")
	}
	return report
}

// text is how a report writes a key.
func text(key []byte) string {
	s := fmt.Sprintf("%q", key)
	return s[1 : len(s)-1]
}

// TestACheckFindsExactlyWhatIsDamaged: what it names as damaged is what the store then reports as damaged, and all else
// is sound.
func TestACheckFindsExactlyWhatIsDamaged(t *testing.T) {
	for seed := range kvstore.Seeds(t, times(4)) {
		r := newRig(t, seed, variant(seed, 40))
		m := newModel(r, 500, sizes(r.rng, 16<<10))
		m.random(3000, 24)
		if seed%2 == 0 {
			m.stop()
		} else {
			m.settle()
		}
		st := m.s.Stats()
		if got := m.checked(); !got.Sound() || got.Objects != st.Objects || got.SizeBytes != m.cfg.PartitionBytes ||
			got.Chunks != int(st.Chunks) || got.UnreadableBlocks > 0 {
			t.Fatalf("%+v; the store has %+v", got, st)
		}
		var places []int64
		if at, epoch := m.s.Place(m.keys[m.rng.IntN(len(m.keys))].name); epoch != 0 && seed%3 > 0 {
			m.dev.Visible[at+30] ^= 1
			m.dev.Durable[at+30] = m.dev.Visible[at+30]
			places = append(places, at+30)
		}
		for len(places) < 6 {
			at := int64(format.AreaStart) + m.rng.Int64N(st.Chunks*st.ChunkBytes)
			if kind, used := m.s.KindAt(at); used && kind != format.Checkpoint && at%st.ChunkBytes > 4096 {
				m.dev.Visible[at] ^= byte(1 << m.rng.IntN(8))
				m.dev.Durable[at] = m.dev.Visible[at]
				places = append(places, at)
			}
		}
		report := m.checked()
		if m.crash(); report.Loss != "" {
			continue // the store does not open
		}
		m.tolerant = true
		m.reopen0()
		values, segments := int64(0), map[uint32]bool{}
		buf := make([]byte, m.s.MaxValueBytes())
		for i := range m.keys {
			name := m.keys[i].name
			corrupt := m.do(kvstore.Request{Op: kvstore.Get, Key: name, Value: buf}).Status == kvstore.Corrupt
			lost := m.do(kvstore.Request{Op: kvstore.Exist, Key: name}).Status == kvstore.Corrupt
			switch named := slices.Contains(report.DamagedKeys, text(name)); {
			case lost:
				segments[m.s.SegmentOf(name)] = true
			case corrupt != named:
				t.Errorf("key %x: corrupt %v, named %v", name, corrupt, named)
			case corrupt:
				values++
			}
		}
		if report.DamagedValues != values || report.LostSegments < int64(len(segments)) {
			t.Errorf("%d damaged values in %d lost segments; the report says %+v", values, len(segments), report)
		}
		t.Logf("flips at %v: %d values, %d segments", places, report.DamagedValues, report.LostSegments)
	}
}

// TestACheckLeavesOutWhatWasDropped, although it is there until it is swept.
func TestACheckLeavesOutWhatWasDropped(t *testing.T) {
	m := newModel(newRig(t, seeds(t), small(40)), 300, func() int { return 300 })
	for i := range m.keys {
		m.push(kvstore.Put, i, 300)
	}
	m.settle()
	if p := m.do(kvstore.Request{Op: kvstore.Drop, Range: kvstore.Range{Last: 1 << 63}}); p.Status != kvstore.OK {
		t.Fatalf("status %d", p.Status)
	}
	m.crash()
	got := m.checked()
	m.reopen0()
	want := int64(0)
	for i := range m.keys {
		if m.do(kvstore.Request{Op: kvstore.Exist, Key: m.keys[i].name}).Status == kvstore.OK {
			want++
		}
	}
	if !got.Sound() || got.Objects != want || want == 0 || want == 300 {
		t.Errorf("%+v, want %d keys", got, want)
	}
}

// TestACheckStatesALossAndGoesOn: it says what is missing of the key log, and what is left.
func TestACheckStatesALossAndGoesOn(t *testing.T) {
	cfg := small(40)
	cfg.CheckpointBytes = 1 << 30
	m := newModel(newRig(t, seeds(t), cfg), 400, func() int { return 200 })
	for i := range m.keys {
		m.push(kvstore.Put, i, 200)
	}
	m.finish()
	parts := m.s.KeyLogSince()
	if len(parts) == 0 {
		t.Fatal("nothing was written since the last checkpoint")
	}
	middle := (parts[0][0] + parts[0][1]) / 2
	m.crash()
	for i := range int64(4096) {
		m.dev.Visible[middle+i] = 0
	}
	if got := m.checked(); got.Loss == "" || got.Sound() || got.Objects == 0 {
		t.Errorf("%+v", got)
	}
}
