package daemon

import (
	"strings"
	"testing"
)

// TestTheScrubIsShownAndPaused over the admin API.
func TestTheScrubIsShownAndPaused(t *testing.T) {
	w := newWorld(t)
	w.configure([]string{fastSource}, []string{"{nsid: 1, ssd: ssd0, size: 64MiB, type: kv, kv: {scrub_rate: 3MiB}}",
		"{nsid: 2, ssd: ssd0, size: 4MiB}"})
	n := w.mustStart()
	l, err := n.admin.KVScrubs(t.Context())
	if err != nil || len(l.Items) != 1 || l.Items[0].BytesPerSec != 3<<20 || l.Items[0].Chunks == 0 {
		t.Fatalf("%+v, %v", l, err)
	}
	id := l.Items[0].UUID
	for _, rate := range []int64{0, 5 << 20} {
		if s, err := n.admin.ScrubKV(t.Context(), id, rate); err != nil || s.BytesPerSec != rate {
			t.Errorf("%+v, %v", s, err)
		}
		if l, err := n.admin.KVScrubs(t.Context()); err != nil || l.Items[0].BytesPerSec != rate {
			t.Errorf("%+v, %v", l, err)
		}
	}
	if _, err := n.admin.ScrubKV(t.Context(), id, -1); err == nil || !strings.Contains(err.Error(), "0 or more") {
		t.Errorf("%v", err)
	}
	subs, err := n.admin.Subsystems(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, ns := range subs.Items[0].Namespaces {
		if _, err := n.admin.ScrubKV(t.Context(), ns.UUID, 1); (err == nil) != (ns.UUID == id) {
			t.Errorf("%s: %v", ns.UUID, err)
		}
	}
}
