package member

import (
	"path/filepath"
	"testing"

	"jbofd/internal/cluster/view"
)

// TestTheEpochOfTheLastMomentIsSaved: the membership's goroutine sees an epoch and ends, before the one that saves
// epochs gets to run. That one must not take its end for the end of the work.
func TestTheEpochOfTheLastMomentIsSaved(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	for epoch := uint64(1); epoch <= 16; epoch++ { // which of both channels is seen first is left to chance
		d, err := openState(dir)
		if err != nil {
			t.Fatal(err)
		}
		if want := view.Epoch(epoch - 1); d.seen != want {
			t.Fatalf("epoch %d was saved, want %d", d.seen, want)
		}
		m := &Member{dir: d, ended: make(chan struct{}), grown: make(chan struct{}, 1)}
		m.epoch.Store(epoch)
		signal(m.grown)
		close(m.ended)
		m.done.Add(1)
		m.save()
		m.done.Wait()
		d.close()
	}
}
