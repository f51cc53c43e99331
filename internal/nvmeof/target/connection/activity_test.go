package connection

import (
	"testing"

	"jbofd/internal/fence"
)

// TestALateSignOfLifeIsJudgedFirst: what is taken in past the association's lease may have come long ago, so that it
// counts as a sign of life only after the service has ended or renewed the association.
func TestALateSignOfLifeIsJudgedFirst(t *testing.T) {
	const lease = 100
	var c Conn
	h, judged := fence.NewHolder(func() {}), 0
	h.Lease(func() {
		if judged++; c.seen.Load() != lease {
			t.Errorf("the service finds that the host was seen at %d, want %d", c.seen.Load(), lease)
		}
		h.SetLease(3 * lease)
	})
	h.SetLease(lease)
	c.holder.Store(h)
	for _, x := range []struct {
		now    int64
		judged int
	}{{lease, 0}, {lease + 1, 1}, {3 * lease, 1}} {
		if c.NoteActivity(x.now); judged != x.judged || c.seen.Load() != x.now {
			t.Errorf("at %d: judged %d times, want %d; seen at %d", x.now, judged, x.judged, c.seen.Load())
		}
	}
}
