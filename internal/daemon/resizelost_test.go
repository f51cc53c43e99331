package daemon

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"jbofd/client/kv"
	"jbofd/internal/admin"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/fault"
)

// writesOfStores holds the writes of the key-value store on a drive.
func writesOfStores(dev *fault.Device) {
	dev.SetRules(fault.Rule{Ops: []ssd.Op{ssd.Write}, Offset: 1 << 20, Len: 140 << 20, Hold: true})
}

// TestAResizeThatWasGivenUpIsNotCutOff: the drive is silent, so that a reload that resizes ends with an error. The
// resize goes on when the drive answers. Until then no reload may take the end of the extent away: neither one that
// takes the growing back, since the store is to become longer, nor one that repeats the shrinking, since the durable
// superblock is still that of the old size.
func TestAResizeThatWasGivenUpIsNotCutOff(t *testing.T) {
	for _, c := range []struct{ from, to, then int64 }{{64, 96, 64}, {64, 96, 96}, {96, 64, 64}} {
		t.Run(fmt.Sprintf("%d to %d, then %d", c.from, c.to, c.then), func(t *testing.T) {
			w := newWorld(t)
			drives := []string{memSSD, faulty("ssd1", "160MiB")}
			configure := func(mib int64) {
				w.configure(drives, []string{fmt.Sprintf("{nsid: 3, ssd: ssd1, size: %dMiB, type: kv}", mib)})
			}
			configure(c.from)
			raw, n, log := w.startRaw()
			raw.reload.Lock()
			raw.resizePatience = 100 * time.Millisecond
			raw.reload.Unlock()
			ns, err := kv.Open(t.Context(), n.connect(), 3, kv.Options{})
			if err != nil {
				t.Fatal(err)
			}
			for key := range 50 {
				if err := ns.Put(t.Context(), fmt.Append(nil, key), resizeValue(key)); err != nil {
					t.Fatal(err)
				}
			}
			dev := raw.drives()[1].dev.(*fault.Device)
			defer func() {
				dev.SetRules()
				dev.Release()
			}()
			writesOfStores(dev)
			configure(c.to)
			if _, err := n.admin.Reload(t.Context()); err == nil || !strings.Contains(err.Error(), "answered nothing") {
				t.Fatal(err)
			}
			extent := func() int64 {
				l := raw.drives()[1].label.Label()
				return l.Extents[l.FindNamespace(nqn, 3)].LengthBytes >> 20
			}
			l := raw.drives()[1].label.Label()
			s := raw.publisher.Store(l.Extents[l.FindNamespace(nqn, 3)].UUID)
			if !s.ResizeState().Running || extent() != 96 {
				t.Fatalf("given up: %+v, an extent of %d MiB", s.ResizeState(), extent())
			}
			if c.then == 96 {
				eventually(t, "it is about to become durable", func() error {
					if s.SizeBytes() != c.to<<20 {
						dev.Release() // the next writes are held
						return fmt.Errorf("%+v", s.ResizeState())
					}
					return nil
				})
			}
			configure(c.then)
			for _, reload := range []func(context.Context) (admin.Reload, error){n.admin.DryReload, n.admin.Reload} {
				if _, err := reload(t.Context()); err == nil ||
					!strings.Contains(err.Error(), "still being changed") || extent() != 96 {
					t.Fatalf("a reload meanwhile: %v, an extent of %d MiB", err, extent())
				}
			}
			dev.SetRules()
			dev.Release()
			eventually(t, "a reload ends", func() error {
				_, err := n.admin.Reload(t.Context())
				return err
			})
			if got := extent(); got != c.then || !s.HasSize(c.then<<20) {
				t.Errorf("an extent of %d MiB, a store of %d, want %d: %v", got, s.SizeBytes()>>20, c.then,
					log.with("resized"))
			}
			for key := range 50 {
				got, err := ns.Value(t.Context(), fmt.Append(nil, key))
				if err != nil || !bytes.Equal(got, resizeValue(key)) {
					t.Fatalf("key %d: %d bytes, %v", key, len(got), err)
				}
			}
		})
	}
}

// TestADriveThatIsBackChangesNoOtherSizes: a reload has resized a namespace of ssd1, and was refused because ssd2
// vanished. When ssd2 is back, nobody has asked for the namespace of ssd1 to become as it was, nor for that of ssd2.
func TestADriveThatIsBackChangesNoOtherSizes(t *testing.T) {
	w := newWorld(t)
	drives := []string{memSSD, faulty("ssd1", "160MiB"), faulty("ssd2", "160MiB")}
	nss := func(size string) []string {
		return []string{"{nsid: 3, ssd: ssd1, size: " + size + ", type: kv}", "{nsid: 5, ssd: ssd2, size: " + size +
			", type: kv}"}
	}
	w.configure(drives, nss("64MiB"))
	raw, n, log := w.startRaw()
	host := n.connect()
	dev := raw.drives()[2].dev.(*fault.Device)
	writesOfStores(dev)
	ended := make(chan error, 1)
	w.configure(drives, nss("96MiB"))
	go func() {
		_, err := n.admin.Reload(t.Context())
		ended <- err
	}()
	if err := dev.AwaitHeld(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	sizes := func(want int64) {
		t.Helper()
		if err := raw.beginChange("a look"); err != nil { // after what a return has begun
			t.Fatal(err)
		}
		defer raw.endChange()
		for i, nsid := range []uint32{3, 5} {
			l := raw.drives()[1+i].label.Label()
			if got := l.Extents[l.FindNamespace(nqn, nsid)].LengthBytes >> 20; got != want {
				t.Errorf("namespace %d has %d MiB, want %d:\n%s", nsid, got, want, log.with("resized"))
			}
		}
	}
	dev.Vanish()
	if err := outcome(t, "the reload", ended); err == nil {
		t.Fatal("it was not refused")
	}
	hostSees(t, host, 1, log)
	w.back("ssd2")
	hostSees(t, host, 2, log)
	if all := raw.owed(""); len(all) > 0 {
		t.Errorf("%s is owed, which nobody has asked for", all[0].what())
	}
	raw.drives()[2].dev.(*fault.Device).Vanish()
	hostSees(t, host, 1, log) // what looks after the drive has ended its first return
	sizes(96)
	raw.cfgMu.Lock()
	ahead := raw.resizedAhead
	raw.resizedAhead = nil // as if a start had not come to it
	raw.cfgMu.Unlock()
	if len(raw.owed("ssd1")) != 1 || len(raw.owed("ssd0")) != 0 {
		t.Error("a drive is owed what another one is")
	}
	raw.cfgMu.Lock()
	raw.resizedAhead = ahead
	raw.cfgMu.Unlock()
	w.configure(drives, nss("72MiB"))
	if _, err := n.admin.Reload(t.Context()); err != nil {
		t.Fatal(err)
	}
	raw.cfgMu.Lock()
	defer raw.cfgMu.Unlock()
	if len(raw.resizedAhead) > 0 {
		t.Errorf("a reload was accepted, and the sizes of %v are still from a refused one", raw.resizedAhead)
	}
}
