package daemon

import (
	"errors"
	"slices"
	"testing"

	"jbofd/internal/ssd"
	"jbofd/internal/ssd/label"
	"jbofd/internal/ssd/mem"
)

// TestALabelThatCannotBeWrittenLeavesTheOthersAsTheyWere, whichever is written first.
func TestALabelThatCannotBeWrittenLeavesTheOthersAsTheyWere(t *testing.T) {
	const old, grown = 1 << 20, 2 << 20
	for range 20 { // the order is random
		plan := labelPlan{}
		var drives []*openSSD
		for _, name := range []string{"good", "bad", "fine"} {
			dev, err := mem.Open(mem.Config{Name: name, SizeBytes: 8 << 20})
			if err != nil {
				t.Fatal(err)
			}
			store, err := label.Format(dev, label.NewUUID(), false)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := errors.Join(store.Close(), dev.Close()); err != nil {
					t.Error(err)
				}
			})
			e := label.Extent{UUID: label.NewUUID(), LengthBytes: old, NSID: 1, Use: label.Block, BlockShift: 12,
				NQN: "nqn.2026-11.example.jbofd:test"}
			if err := store.Update(func(l *label.Label) error {
				_, err := l.Allocate(e)
				return err
			}); err != nil {
				t.Fatal(err)
			}
			d := &openSSD{name: name, dev: dev, label: store}
			drives = append(drives, d)
			p := plan.of(d)
			p.changed = true
			if err := p.label.Grow(e.UUID, grown); err != nil {
				t.Fatal(err)
			}
		}
		bad := drives[1]
		if err := bad.label.Close(); err != nil {
			t.Fatal(err)
		}
		if err := plan.commit(); !errors.Is(err, ssd.ErrGone) {
			t.Fatalf("got %v", err)
		}
		for _, d := range slices.Delete(drives, 1, 2) {
			l, err := label.Inspect(d.dev)
			if err != nil || l.Extents[0].LengthBytes != old || d.label.Label().Extents[0].LengthBytes != old {
				t.Fatalf("%s: %v, %+v, in memory %+v", d.name, err, l, d.label.Label())
			}
		}
	}
}
