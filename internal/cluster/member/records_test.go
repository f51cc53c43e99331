package member

import (
	"testing"

	"jbofd/internal/cluster"
	"jbofd/internal/cluster/etcd"
)

// TestAChangeOfNothingIsNotWritten, but a loss that is given up again is.
func TestAChangeOfNothingIsNotWritten(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1, "a")
	w.startAll()
	raw := w.raw()
	revision := func() int64 {
		got, err := raw.Get(t.Context(), etcd.Prefix("test")+"config")
		if err != nil || len(got.Kvs) != 1 {
			t.Fatal(got, err)
		}
		return got.Kvs[0].ModRevision
	}
	for i, written := range []bool{false, true, true, false} {
		before := revision()
		err := Change(t.Context(), etcd.Config{Endpoints: []string{w.etcd.URL}, Cluster: "test", Timeout: wait},
			func(r *cluster.Records) error {
				if written {
					r.Settings.AcceptLoss(0, 0)
				}
				return nil
			})
		if err != nil {
			t.Fatal(err)
		}
		if after := revision(); (after > before) != written {
			t.Errorf("change %d: revision %d, before %d, want a write: %v", i, after, before, written)
		}
	}
}
