package member

import (
	"testing"

	"jbofd/internal/cluster"
	"jbofd/internal/cluster/etcd"
)

// TestAChangeOfNothingIsWrittenIfItIsToCountAgain, and else is not.
func TestAChangeOfNothingIsWrittenIfItIsToCountAgain(t *testing.T) {
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
	for _, rewrite := range []bool{false, true} {
		before := revision()
		err := Change(t.Context(), etcd.Config{Endpoints: []string{w.etcd.URL}, Cluster: "test", Timeout: wait},
			func(r *cluster.Records) error {
				r.Rewrite = rewrite
				return nil
			})
		if err != nil {
			t.Fatal(err)
		}
		if after := revision(); (after > before) != rewrite {
			t.Errorf("revision %d, before %d, with Rewrite %v", after, before, rewrite)
		}
	}
}
