package partition

import (
	"testing"
	"time"

	"jbofd/internal/kvstore"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/fault"
)

// TestALongOpeningReportsItsProgress: the reported progress increases, and the opening ends.
func TestALongOpeningReportsItsProgress(t *testing.T) {
	r := newRig(t, partitionBytes, nil, failing(partitionBytes, fault.Config{Seed: 1}))
	p := r.mustOpen(true)
	newHost(p, 1, 1, 100).do(kvstore.Put, 1, 100)
	r.close(p)
	before := openingEvery
	openingEvery = time.Millisecond
	defer func() { openingEvery = before }()
	dev := r.dev.(*fault.Device)
	dev.SetRules(fault.Rule{Ops: []ssd.Op{ssd.Read}, Delay: 20 * time.Millisecond})
	told := 0
	p, err := Open(Config{Drive: r.o, OffsetBytes: offset, Background: 9, Store: kvstore.Config{PartitionBytes: r.size},
		Opening: func(what string, read, of int) {
			told++
			if what == "" || read < 0 || read > of {
				t.Errorf("%d of %d %q are read", read, of, what)
			}
		}})
	if err != nil {
		t.Fatal(err)
	}
	if told == 0 {
		t.Error("nothing was told")
	}
	dev.SetRules()
	r.close(p)
}
