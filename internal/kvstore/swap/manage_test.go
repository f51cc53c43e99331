package swap

import (
	"bytes"
	"encoding/binary"
	"errors"
	"slices"
	"testing"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/units"
)

// TestDroppingAnAreaFromAManifestIsAllOrNothing, whichever blocks of a write reach the disk, and even if a copy is
// damaged before.
func TestDroppingAnAreaFromAManifestIsAllOrNothing(t *testing.T) {
	source, lost, other := [16]byte{7}, [16]byte{1}, [16]byte{2}
	for damaged := range 3 { // the last time none
		made := make([]byte, sourceBytes)
		for i, offset := range format.SwapManifestOffsets {
			b := format.SwapManifest(made[offset:][:format.SwapManifestBytes])
			b.SetSource(source)
			b.SetGeneration(uint64(5 + i)) // as if the second had been written last
			b.AddArea(lost, 100)
			b.AddArea(other, 200)
			b.Seal()
			if i == damaged {
				b[70] ^= 1
			}
		}
		for writes := range 3 {
			for blocks := range format.SwapManifestBytes/testBlock + 1 {
				disk := bytes.Clone(made)
				manifest, err := LoadManifest(readFrom(disk), heap)
				if err != nil {
					t.Fatal(err)
				}
				if !manifest.Names(lost) || !manifest.Names(other) {
					t.Fatalf("the manifest names %+v", manifest.Areas)
				}
				left := writes
				err = manifest.Drop(lost, func(offset units.ExtentOffset, b []byte) error {
					if left == 0 {
						copy(disk[offset:], b[:blocks*testBlock])
						return errInjected
					}
					left--
					copy(disk[offset:], b)
					return nil
				}, heap)
				if (err == nil) != (writes == 2) || err != nil && !errors.Is(err, errInjected) {
					t.Fatalf("%d writes succeed: %v", writes, err)
				}
				after, err := LoadManifest(readFrom(disk), heap)
				if err != nil {
					t.Fatalf("copy %d damaged, %d writes and %d blocks: %v", damaged, writes, blocks, err)
				}
				// All entries are in the first block; the other blocks are zeroes before and after.
				if after.Source != source || !after.Names(other) || after.Names(lost) != (writes == 0 && blocks == 0) {
					t.Errorf("copy %d damaged, %d writes and %d blocks: the manifest of %x names %+v", damaged, writes,
						blocks, after.Source, after.Areas)
				}
				// When it is repeated, it succeeds, and damage of a copy does not bring the entry back.
				err = after.Drop(lost, func(offset units.ExtentOffset, b []byte) error {
					copy(disk[offset:], b)
					return nil
				}, heap)
				if err != nil {
					t.Fatal(err)
				}
				for i := range format.SwapManifestOffsets {
					one := bytes.Clone(disk)
					one[format.SwapManifestOffsets[i]] ^= 1
					if b, err := LoadManifest(readFrom(one), heap); err != nil || b.Names(lost) || !b.Names(other) {
						t.Errorf("with copy %d damaged: %+v, %v", i, b, err)
					}
				}
			}
		}
	}
}

// TestAnOlderCopyOfAManifestIsReplaced: a crash between the writes of the two copies has left an older one that lists
// records. It must be replaced, or it would come into force when the other copy is damaged later.
func TestAnOlderCopyOfAManifestIsReplaced(t *testing.T) {
	source, area := [16]byte{7}, [16]byte{1}
	for newer := range format.SwapManifestOffsets {
		disk := make([]byte, sourceBytes)
		for i, offset := range format.SwapManifestOffsets {
			b := format.SwapManifest(disk[offset:][:format.SwapManifestBytes])
			b.SetSource(source)
			b.SetGeneration(5)
			if i == newer {
				b.SetGeneration(6)
			} else {
				b.AddArea(area, 100)
			}
			b.Seal()
		}
		writes := 0
		mend := func() *Manifest {
			manifest, err := LoadManifest(readFrom(disk), heap)
			if err != nil {
				t.Fatal(err)
			}
			if err := manifest.Repair(func(offset units.ExtentOffset, b []byte) error {
				writes++
				copy(disk[offset:], b)
				return nil
			}, heap); err != nil {
				t.Fatal(err)
			}
			return manifest
		}
		mend()
		if mend(); writes != 2 {
			t.Errorf("%d writes, want 2: nothing is to be mended the second time", writes)
		}
		disk[format.SwapManifestOffsets[newer]] ^= 1
		if b, err := LoadManifest(readFrom(disk), heap); err != nil || b.Source != source || b.Names(area) {
			t.Errorf("with copy %d damaged: %+v, %v", newer, b, err)
		}
	}
}

// TestAForgottenSourceDoesNotHoldBackLogHead: LogHead advances, also after the next opening, and the source starts
// without records.
func TestAForgottenSourceDoesNotHoldBackLogHead(t *testing.T) {
	w := newWorld(t, *seed, 0, 1, 0)
	a := w.areas[0]
	write := func(source, n int) (refused int) {
		t.Helper()
		for i := range n {
			var key [8]byte
			binary.LittleEndian.PutUint64(key[:], uint64(i))
			if !a.m.Submit(&Append{Source: source, Kind: format.SwapPut, Key: key[:], Value: make([]byte, 500)}) {
				t.Fatal("not taken")
			}
			for again := true; again; {
				a.m.Turn(w.now, &a.act)
				again = len(a.act.IOs) > 0
				for _, q := range a.act.IOs {
					a.disk.Store(int64(q.Offset), q.Buf)
					a.m.Complete(q.Tag, nil)
				}
				for _, o := range a.act.Outcomes {
					if o.Result == Refused {
						refused++
					} else {
						a.m.Release(o.Source, o.Place-format.LogOffset(o.At)) // only the newest counts
					}
				}
				a.act.IOs, a.act.Outcomes = nil, nil
			}
		}
		return refused
	}
	gone, stays := [16]byte{1}, [16]byte{2}
	at, err := a.m.Attach(gone)
	if err != nil {
		t.Fatal(err)
	}
	write(at.Source, 10)
	w.open()
	a = w.areas[0]
	sources := a.m.Sources()
	if len(sources) != 1 || sources[0].UUID != gone || sources[0].Attached || sources[0].Keys == 0 {
		t.Fatalf("sources %+v", sources)
	}
	if at, err = a.m.Attach(stays); err != nil {
		t.Fatal(err)
	}
	if write(at.Source, 400) == 0 {
		t.Fatal("what a source has there does not keep the log from going round")
	}
	a.m.Forget(gone)
	if refused := write(at.Source, 400); refused > 1 { // the first finds no room, and makes it
		t.Errorf("%d refused", refused)
	}
	if sources := a.m.Sources(); len(sources) != 1 || sources[0].UUID != stays {
		t.Errorf("sources %+v", sources)
	}
	w.open()
	a = w.areas[0]
	if sources := a.m.Sources(); slices.ContainsFunc(sources, func(h SourceInfo) bool { return h.UUID == gone }) {
		t.Errorf("sources %+v", sources)
	}
	if at, err = a.m.Attach(gone); err != nil || len(at.Records) != 0 {
		t.Errorf("%d records, %v", len(at.Records), err)
	}
	if refused := write(at.Source, 1); refused != 0 {
		t.Error("a source that comes again is refused")
	}
}
