package swap

import (
	"testing"

	"jbofd/internal/kvstore/format"
)

// TestRemainsOfATornGroupAreNotPartOfTheNext: two crashes tear the groups that are written at one place, so that the
// beginning of the second group stands before the end of the first, whose records are valid by themselves. None of them
// was acknowledged, and between the crashes recovery has found their keys unchanged.
func TestRemainsOfATornGroupAreNotPartOfTheNext(t *testing.T) {
	w := newWorld(t, *seed, 0, 1, 0)
	a := w.areas[0]
	source := [16]byte{1}
	// write makes a group of two records, of which the second begins at a block boundary, and lets one of its blocks
	// reach the SSD.
	write := func(version byte, block int) {
		at, err := a.m.Attach(source)
		if err != nil {
			t.Fatal(err)
		}
		for i, n := range []int{testBlock - format.SwapGroupHeaderBytes - format.SwapRecordHeaderBytes, 100} {
			if !a.m.Submit(&Append{Source: at.Source, Kind: format.SwapPut, Key: []byte{byte(i)},
				Value: value(i, int32(version), n)}) {
				t.Fatal("a record is not taken")
			}
		}
		a.m.Turn(w.now, &a.act)
		if len(a.act.IOs) != 1 || len(a.act.IOs[0].Buf) != 2*testBlock {
			t.Fatalf("%+v", a.act.IOs)
		}
		q := a.act.IOs[0]
		a.disk.Store(int64(q.Offset)+int64(block*testBlock), q.Buf[block*testBlock:][:testBlock])
		w.open()
		a = w.areas[0]
	}
	write(1, 1)
	write(2, 0)
	at, err := a.m.Attach(source)
	if err != nil {
		t.Fatal(err)
	}
	if len(at.Records) != 0 || at.Tail != 0 {
		t.Errorf("%d records of torn groups were found, and the log ends at %d: %+v", len(at.Records), at.Tail,
			at.Records)
	}
}
