package daemon

import (
	"bytes"
	"fmt"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"jbofd/client/kv"
)

// The drive of these tests, and sizes of the namespace on it.
const (
	resizeSSD = "{name: ssd0, backend: file, path: DIR/ssd0.img, size: 300MiB, create: true, calibrate: false}"
	kvLarge   = "{nsid: 1, ssd: ssd0, size: 160MiB, type: kv}"
	kvSmall   = "{nsid: 1, ssd: ssd0, size: 72MiB, type: kv}"
)

const resizeKeys = 400

func resizeValue(key int) []byte { return bytes.Repeat(fmt.Appendf(nil, "value %d. ", key), 4000) }

// putLarge stores all keys, some 18 MB, concurrently.
func putLarge(t *testing.T, ns *kv.Namespace) {
	t.Helper()
	var all sync.WaitGroup
	for w := range 20 {
		all.Go(func() {
			for key := w; key < resizeKeys; key += 20 {
				if err := ns.Put(t.Context(), fmt.Appendf(nil, "%d", key), resizeValue(key)); err != nil {
					t.Errorf("put %d: %v", key, err)
				}
			}
		})
	}
	all.Wait()
}

// gotLarge checks that all keys are there.
func gotLarge(t *testing.T, ns *kv.Namespace) {
	t.Helper()
	for key := range resizeKeys {
		if got, err := ns.Value(t.Context(), fmt.Appendf(nil, "%d", key)); err != nil ||
			!bytes.Equal(got, resizeValue(key)) {
			t.Fatalf("key %d: %d bytes, %v", key, len(got), err)
		}
	}
}

// TestAReloadResizesAKVNamespace: it shrinks and grows while a host uses it. What it frees is zero for the next one
// there, which keeps it from growing again.
func TestAReloadResizesAKVNamespace(t *testing.T) {
	w := newWorld(t)
	w.configure([]string{resizeSSD}, []string{kvLarge})
	n := w.mustStart()
	ns := n.keys()
	for range 4 {
		putLarge(t, ns)
	}
	reload := func(namespaces ...string) error {
		w.configure([]string{resizeSSD}, namespaces)
		if _, err := n.admin.DryReload(t.Context()); err != nil {
			return fmt.Errorf("dry: %w", err)
		}
		_, err := n.admin.Reload(t.Context())
		return err
	}
	const block = "{nsid: 2, ssd: ssd0, size: 100MiB}"
	if err := reload(kvSmall, block); err != nil {
		t.Fatal(err)
	}
	gotLarge(t, ns)
	b, err := n.connect().Namespace(t.Context(), 2)
	if err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 1<<20)
	for at := int64(0); at < 100<<20; at += int64(len(buf)) {
		if _, err := b.ReadAt(t.Context(), buf, at); err != nil || !zeroed(buf) {
			t.Fatalf("the new namespace at %d: %v, zero %v", at, err, zeroed(buf))
		}
	}
	before := n.extents()
	if err := reload(kvLarge, block); err == nil || !strings.Contains(err.Error(), "at most 72MiB") ||
		!strings.Contains(err.Error(), "behind it lies block of "+nqn+", nsid 2") {
		t.Errorf("growing over another namespace: %v", err)
	}
	if err := reload("{nsid: 1, ssd: ssd0, size: 64MiB, type: kv}", block,
		"{nsid: 3, ssd: ssd0, size: 134MiB}"); err == nil || !strings.Contains(err.Error(), "134MiB wanted") {
		t.Errorf("another namespace without room: %v", err)
	}
	if got := n.extents(); fmt.Sprint(got) != fmt.Sprint(before) {
		t.Errorf("a refused reload has changed the extents: %v, before %v", got, before)
	}
	if err := n.stop(); err != nil {
		t.Fatal(err)
	}
	w.configure([]string{resizeSSD}, []string{kvSmall, block})
	n = w.mustStart()
	gotLarge(t, n.keys())
}

func zeroed(b []byte) bool { return len(bytes.Trim(b, "\x00")) == 0 }

// TestAStartResizesAKVNamespace whose size was changed in the configuration while no daemon ran, or whose resize had
// not come to its end: it is served at once.
func TestAStartResizesAKVNamespace(t *testing.T) {
	w := newWorld(t)
	w.configure([]string{resizeSSD}, []string{kvLarge})
	n := w.mustStart()
	putLarge(t, n.keys())
	for _, size := range []string{kvSmall, kvLarge} {
		if err := n.stop(); err != nil {
			t.Fatal(err)
		}
		w.configure([]string{resizeSSD}, []string{size})
		n = w.mustStart()
		ns := n.keys()
		gotLarge(t, ns)
		for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(10 * time.Millisecond) {
			s, err := n.admin.Status(t.Context())
			if err != nil || !s.Ready {
				t.Fatalf("%+v, %v", s, err)
			}
			if s.Change == nil {
				break
			}
			if time.Now().After(deadline) {
				t.Fatalf("the resize does not end: %+v", s)
			}
		}
		want := map[string]string{kvSmall: "+75497472 ", kvLarge: "+167772160 "}[size]
		if got := n.extents(); len(got) != 1 || !strings.Contains(got[0], want) {
			t.Fatalf("extents %v, want %s", got, want)
		}
		gotLarge(t, ns)
	}
}

// bytesInUse is the figure of a refusal that the store's own work moves from one call to the next.
var bytesInUse = regexp.MustCompile(`[0-9.]+MiB (are in use)|(allowed: about) \d+MiB`)

// TestAShrinkWithoutRoomIsRefusedWithNumbers, by a dry run as by a reload.
func TestAShrinkWithoutRoomIsRefusedWithNumbers(t *testing.T) {
	w := newWorld(t)
	w.configure([]string{resizeSSD}, []string{kvLarge})
	n := w.mustStart()
	ns := n.keys()
	value := make([]byte, 1<<20)
	for key := range 80 {
		if err := ns.Put(t.Context(), fmt.Appendf(nil, "%d", key), value); err != nil {
			t.Fatal(err)
		}
	}
	w.configure([]string{resizeSSD}, []string{kvSmall})
	for range 2 {
		_, dry := n.admin.DryReload(t.Context())
		_, wet := n.admin.Reload(t.Context())
		if dry == nil || wet == nil {
			t.Fatalf("a dry run says\n%v\na reload\n%v", dry, wet)
		}
		said := bytesInUse.ReplaceAllString(wet.Error(), "N $1$2")
		if bytesInUse.ReplaceAllString(dry.Error(), "N $1$2") != said || !strings.Contains(said, "size 72MiB") ||
			!strings.Contains(said, "namespaces[0].size: ") || strings.Count(said, "N ") != 2 {
			t.Fatalf("a dry run says\n%v\na reload\n%v", dry, wet)
		}
	}
}
