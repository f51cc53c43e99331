package daemon

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"jbofd/client"
	"jbofd/client/kv"
	"jbofd/internal/admin"
	"jbofd/internal/ssd/label"
)

// Drives of these tests. The source partition is on ssd0, which is slow or not. ssd1 has the swap area.
const (
	slowSource = "{name: ssd0, backend: file, path: DIR/ssd0.img, size: 72MiB, create: true, calibrate: false, " +
		"fault: {delay: 25ms, delay_probability: 1}}"
	fastSource = "{name: ssd0, backend: file, path: DIR/ssd0.img, size: 72MiB, create: true, calibrate: false}"
	lender     = "{name: ssd1, backend: file, path: DIR/ssd1.img, size: 64MiB, create: true, calibrate: false, " +
		"kv_swap: 16MiB}"
	noLender = "{name: ssd1, backend: file, path: DIR/ssd1.img, size: 64MiB, create: true, calibrate: false}"
	lost     = "{name: ssd1, backend: file, path: DIR/nowhere.img, kv_swap: 16MiB}"
)

// swapNamespaces is a key-value namespace on ssd0 and a block namespace on each drive.
var swapNamespaces = []string{"{nsid: 1, ssd: ssd0, size: 64MiB, type: kv}", "{nsid: 2, ssd: ssd0, size: 2MiB}",
	"{nsid: 3, ssd: ssd1, size: 2MiB}"}

const (
	swapKeys = 2000
	// noDrain keeps the daemon from returning keys to the source partition when it stops.
	noDrain = "limits: {drain_timeout: 0s}"
)

// keys connects a host to namespace 1 with enough queues to overload its drive.
func (n *node) keys() *kv.Namespace {
	n.w.t.Helper()
	c, err := client.Connect(n.w.t.Context(), client.Options{Address: n.addrs.Listeners[0], SubNQN: nqn,
		HostNQN: "nqn.2026-11.example.jbofd:host",
		Queues:  4, Credits: client.CreditsOff})
	if err != nil {
		n.w.t.Fatal(err)
	}
	n.w.t.Cleanup(func() {
		if err := c.Close(); err != nil {
			n.w.t.Error(err)
		}
	})
	ns, err := kv.Open(n.w.t.Context(), c, 1, kv.Options{AtLeastOnce: true}) // to be swapped out
	if err != nil {
		n.w.t.Fatal(err)
	}
	return ns
}

func swapValue(key, version int) []byte {
	return bytes.Repeat(fmt.Appendf(nil, "%d of %d. ", version, key), 30)
}

// puts writes all keys concurrently.
func puts(t *testing.T, ns *kv.Namespace, version int) {
	t.Helper()
	var all sync.WaitGroup
	for w := range 300 {
		all.Go(func() {
			for key := w; key < swapKeys; key += 300 {
				if err := ns.Put(t.Context(), fmt.Appendf(nil, "%d", key), swapValue(key, version)); err != nil {
					t.Errorf("put %d: %v", key, err)
					return
				}
			}
		})
	}
	all.Wait()
}

// gets reads all keys and returns the number of keys with each version.
func gets(t *testing.T, ns *kv.Namespace) map[int]int {
	t.Helper()
	versions := map[int]int{}
	var mu sync.Mutex
	var all sync.WaitGroup
	for w := range 50 {
		all.Go(func() {
			for key := w; key < swapKeys; key += 50 {
				got, err := ns.Value(t.Context(), fmt.Appendf(nil, "%d", key))
				version := -1
				for v := range 5 {
					if bytes.Equal(got, swapValue(key, v)) {
						version = v
					}
				}
				if err != nil || version < 0 {
					t.Errorf("get %d: %v, %d bytes", key, err, len(got))
					return
				}
				mu.Lock()
				versions[version]++
				mu.Unlock()
			}
		})
	}
	all.Wait()
	return versions
}

// all checks that every key has the given version.
func all(t *testing.T, ns *kv.Namespace, version int) {
	t.Helper()
	if got := gets(t, ns); got[version] != swapKeys {
		t.Errorf("keys by version %v, want %d of version %d", got, swapKeys, version)
	}
}

// areas returns the swap areas as the admin API reports them.
func (n *node) areas() []admin.SwapArea {
	n.w.t.Helper()
	l, err := n.admin.Swap(n.w.t.Context())
	if err != nil {
		n.w.t.Fatal(err)
	}
	return l.Items
}

// kvInfo returns namespace 1 as the admin API reports it.
func (n *node) kvInfo() admin.Namespace {
	n.w.t.Helper()
	l, err := n.admin.Subsystems(n.w.t.Context())
	if err != nil {
		n.w.t.Fatal(err)
	}
	return l.Items[0].Namespaces[0]
}

func (n *node) mustStop() {
	n.w.t.Helper()
	if err := n.stop(); err != nil {
		n.w.t.Fatal(err)
	}
}

// blocks checks that the block namespaces can be read.
func (n *node) blocks(nsids ...uint32) {
	n.w.t.Helper()
	c := n.connect()
	for _, nsid := range nsids {
		ns, err := c.Namespace(n.w.t.Context(), nsid)
		if err == nil {
			_, err = ns.ReadAt(n.w.t.Context(), make([]byte, 4096), 0)
		}
		if err != nil {
			n.w.t.Errorf("namespace %d: %v", nsid, err)
		}
	}
}

// swapped creates the drives of a daemon that was stopped while many keys of version 2 were in the swap area of ssd1
// and their values of version 1 in the source partition. All values of version 1 are there.
func swapped(t *testing.T) (w *world, area string) {
	t.Helper()
	w = newWorld(t)
	w.configure([]string{fastSource, noLender}, swapNamespaces)
	n := w.mustStart()
	puts(t, n.keys(), 1)
	n.mustStop()
	w.configure([]string{slowSource, lender}, swapNamespaces, noDrain)
	n = w.mustStart()
	puts(t, n.keys(), 2)
	areas := n.areas()
	if len(areas) != 1 || areas[0].SSD != "ssd1" || areas[0].State != "open" || len(areas[0].Sources) != 1 {
		t.Fatalf("areas %+v", areas)
	}
	h := areas[0].Sources[0]
	info := n.kvInfo()
	if !h.Open || h.NSID != 1 || h.SubNQN != nqn || h.UUID != info.UUID || h.Keys < swapKeys/3 ||
		info.SwappedKeys < swapKeys/3 {
		t.Fatalf("home %+v of %+v", h, info)
	}
	n.mustStop()
	return w, areas[0].UUID
}

// TestSwapAreas follows a node through stops, reloads and lost drives. Each part begins with the drives of a daemon
// that was stopped with keys in a swap area.
func TestSwapAreas(t *testing.T) {
	made, area := swapped(t)
	for name, part := range map[string]func(*testing.T, *world, string){
		"returned": keysInASwapAreaSurviveAStopAndReturn, "removed": aRetiringSwapAreaIsFreedWhenEmpty,
		"another size": aSwapAreaOfAnotherSize, "drive missing": aNamespaceDoesNotOpenWithoutTheDriveThatHasItsKeys,
		"damaged": aDamagedSwapAreaIsLeftOut, "comes and goes": aNamespaceIsRemovedAndAddedWithItsKeys,
		"deleted":         deletingANamespaceDeletesItsKeys,
		"source and back": aStoreWithSwappedKeysComesBackWithItsDrive,
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			copyImages(t, made.dir, w.dir)
			part(t, w, area)
		})
	}
}

// keysInASwapAreaSurviveAStopAndReturn checks that keys survive a stop in the swap area and are returned to the
// source partition when its drive is idle.
func keysInASwapAreaSurviveAStopAndReturn(t *testing.T, w *world, area string) {
	w.configure([]string{slowSource, lender}, swapNamespaces, noDrain)
	n := w.mustStart()
	if a := n.areas(); len(a) != 1 || a[0].UUID != area || a[0].Sources[0].Keys < swapKeys/10 {
		t.Fatalf("areas %+v", a)
	}
	all(t, n.keys(), 2)
	n.mustStop()
	// Now the daemon has time to return the keys.
	w.configure([]string{fastSource, lender}, swapNamespaces)
	n = w.mustStart()
	all(t, n.keys(), 2)
	n.mustStop()
	n = w.mustStart()
	if a := n.areas(); len(a) != 1 || a[0].UUID != area || len(a[0].Sources) != 0 {
		t.Errorf("areas %+v", a)
	}
	all(t, n.keys(), 2)
	n.mustStop()
	// Now no namespace needs ssd1.
	w.configure([]string{fastSource, lost}, swapNamespaces)
	n = w.mustStart()
	all(t, n.keys(), 2)
	n.blocks(2)
}

// aRetiringSwapAreaIsFreedWhenEmpty checks that an area that is no longer configured is removed once it
// is empty, at a reload or at the next start.
func aRetiringSwapAreaIsFreedWhenEmpty(t *testing.T, w *world, area string) {
	w.configure([]string{slowSource, noLender}, swapNamespaces, noDrain)
	n := w.mustStart()
	a := n.areas()
	if len(a) != 1 || a[0].UUID != area || a[0].State != "retiring" || a[0].Sources[0].Keys < swapKeys/10 {
		t.Fatalf("areas %+v", a)
	}
	if _, err := n.admin.DiscardSwap(t.Context(), area); !errors.Is(err, admin.ErrRefused) ||
		!strings.Contains(err.Error(), "will be returned") {
		t.Errorf("an area with keys that can come home is given up: %v", err)
	}
	ns := n.keys()
	all(t, ns, 2)
	puts(t, ns, 3) // new values do not go to the retiring area
	all(t, ns, 3)
	n.mustStop()
	w.configure([]string{fastSource, noLender}, swapNamespaces)
	n = w.mustStart()
	all(t, n.keys(), 3)
	n.mustStop()
	n = w.mustStart()
	if a := n.areas(); len(a) != 0 {
		t.Errorf("areas %+v", a)
	}
	if e := n.extents(); len(e) != 3 {
		t.Errorf("extents %v", e)
	}
	all(t, n.keys(), 3)
}

// aSwapAreaOfAnotherSize checks that an area of the newly configured size replaces the old area.
func aSwapAreaOfAnotherSize(t *testing.T, w *world, area string) {
	larger := strings.Replace(lender, "16MiB", "24MiB", 1)
	w.configure([]string{fastSource, larger}, swapNamespaces)
	if _, err := w.load(); err != nil {
		t.Fatal(err)
	}
	n := w.mustStart()
	a := n.areas()
	if len(a) != 2 || a[0].UUID != area || a[0].State != "retiring" || a[1].State != "open" ||
		a[1].SizeBytes != 24<<20 {
		t.Fatalf("areas %+v", a)
	}
	all(t, n.keys(), 2)
	n.mustStop()
	n = w.mustStart()
	if b := n.areas(); len(b) != 1 || b[0].UUID != a[1].UUID {
		t.Errorf("areas %+v, want %s only", b, a[1].UUID)
	}
	all(t, n.keys(), 2)
	n.mustStop()
	w.configure([]string{fastSource, strings.Replace(lender, "16MiB", "55MiB", 1)}, swapNamespaces)
	if _, err := w.start(); !errors.Is(err, label.ErrNoRoom) || !strings.Contains(err.Error(), "kv_swap 55MiB") {
		t.Errorf("an area without room: %v", err)
	}
}

// aNamespaceDoesNotOpenWithoutTheDriveThatHasItsKeys checks that only the namespace whose keys are on the missing drive
// stays closed, and that it opens once the area is discarded.
func aNamespaceDoesNotOpenWithoutTheDriveThatHasItsKeys(t *testing.T, w *world, area string) {
	w.configure([]string{fastSource, lost}, swapNamespaces)
	n := w.mustStart()
	if i := n.kvInfo(); !strings.Contains(i.Error, area) || !strings.Contains(i.Error, "ssd ssd1") {
		t.Errorf("the namespace says %q", i.Error)
	}
	s, err := n.admin.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if s.Ready || !slices.ContainsFunc(s.Reasons, func(r admin.Reason) bool {
		return r.Component == "namespace "+nqn+" 1" && strings.Contains(r.Reason, area)
	}) {
		t.Errorf("status %+v", s)
	}
	a := n.areas()
	if len(a) != 1 || a[0].UUID != area || a[0].State != "missing" || len(a[0].Sources) != 1 ||
		a[0].Sources[0].NSID != 1 || a[0].Sources[0].Open {
		t.Fatalf("areas %+v", a)
	}
	n.blocks(2)
	// The missing drive does not prevent a reload.
	w.configure([]string{fastSource, lost}, append(slices.Clone(swapNamespaces), "{nsid: 4, ssd: ssd0, size: 1MiB}"))
	if _, err := n.admin.Reload(t.Context()); err != nil {
		t.Errorf("reload: %v", err)
	}
	n.blocks(4)
	n.mustStop()
	// When the drive is back, all values are available again.
	keep := t.TempDir()
	copyImages(t, w.dir, keep)
	w.configure([]string{fastSource, lender}, swapNamespaces)
	n = w.mustStart()
	all(t, n.keys(), 2)
	n.mustStop()
	// After the area is discarded, its keys have their old values, even if the drive returns.
	copyImages(t, keep, w.dir)
	w.configure([]string{fastSource, lost}, swapNamespaces)
	n = w.mustStart()
	if _, err := n.admin.DiscardSwap(t.Context(), "0425d6c3-77cf-4e62-873e-0484d7ac5274"); !errors.Is(err,
		admin.ErrRefused) {
		t.Errorf("an area that nobody knows is given up: %v", err)
	}
	if _, err := n.admin.DiscardSwap(t.Context(), area); err != nil {
		t.Fatal(err)
	}
	if i := n.kvInfo(); i.Error != "" {
		t.Errorf("the namespace says %q", i.Error)
	}
	ns := n.keys()
	before := gets(t, ns)
	if before[1] < swapKeys/10 || before[1]+before[2] != swapKeys {
		t.Errorf("keys by version %v", before)
	}
	if len(n.areas()) != 0 {
		t.Errorf("areas %+v", n.areas())
	}
	n.mustStop()
	w.configure([]string{fastSource, lender}, swapNamespaces)
	n = w.mustStart()
	ns = n.keys()
	if after := gets(t, ns); after[1] != before[1] || after[2] != before[2] {
		t.Errorf("keys by version %v, without the drive %v", after, before)
	}
	puts(t, ns, 3)
	all(t, ns, 3)
	if _, err := n.admin.DiscardSwap(t.Context(), area); !errors.Is(err, admin.ErrRefused) ||
		!strings.Contains(err.Error(), "in use") {
		t.Errorf("an area in use is given up: %v", err)
	}
}

// copyImages copies the files of the drives.
func copyImages(t *testing.T, from, to string) {
	t.Helper()
	for _, name := range []string{"ssd0.img", "ssd1.img"} {
		b, err := os.ReadFile(filepath.Join(from, name))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(to, name), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// aDamagedSwapAreaIsLeftOut checks that a damaged area and the namespaces that need it are not opened, and that the
// area can be discarded.
func aDamagedSwapAreaIsLeftOut(t *testing.T, w *world, area string) {
	// The area is the second extent on ssd1, after 2 MiB of blocks.
	f, err := os.OpenFile(w.path("ssd1.img"), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt(bytes.Repeat([]byte{7}, 8192), label.AlignBytes+2<<20); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	w.configure([]string{fastSource, lender}, swapNamespaces)
	n := w.mustStart()
	a := n.areas()
	if len(a) != 1 || a[0].State != "failed" || !strings.Contains(a[0].Error, "superblock of the swap area") ||
		len(a[0].Sources) != 1 {
		t.Fatalf("areas %+v", a)
	}
	if i := n.kvInfo(); !strings.Contains(i.Error, "kv_swap of ssd ssd1") {
		t.Errorf("the namespace says %q", i.Error)
	}
	n.blocks(2, 3)
	if _, err := n.admin.DeleteNamespace(t.Context(), area); !errors.Is(err, admin.ErrRefused) {
		t.Errorf("a swap area is deleted as a namespace: %v", err)
	}
	if _, err := n.admin.DiscardSwap(t.Context(), area); err != nil {
		t.Fatal(err)
	}
	if got := gets(t, n.keys()); got[1] < swapKeys/10 {
		t.Errorf("keys by version %v", got)
	}
	if s, err := n.admin.Status(t.Context()); err != nil || !s.Ready {
		t.Errorf("%+v, %v", s, err)
	}
	n.mustStop()
	n = w.mustStart()
	if a := n.areas(); len(a) != 1 || a[0].UUID == area || a[0].State != "open" {
		t.Errorf("areas %+v", a)
	}
}

// aNamespaceIsRemovedAndAddedWithItsKeys checks reloads that add and remove a namespace with keys in a swap area.
func aNamespaceIsRemovedAndAddedWithItsKeys(t *testing.T, w *world, _ string) {
	w.configure([]string{fastSource, lender}, swapNamespaces[1:])
	n := w.mustStart()
	a := n.areas()
	if len(a) != 1 || len(a[0].Sources) != 1 || a[0].Sources[0].Open || a[0].Sources[0].Keys < swapKeys/10 {
		t.Fatalf("areas %+v", a)
	}
	uuid := a[0].Sources[0].UUID
	// The namespace is configured again. It can be removed once its keys have been returned to it.
	w.configure([]string{fastSource, lender}, swapNamespaces)
	if _, err := n.admin.Reload(t.Context()); err != nil {
		t.Fatal(err)
	}
	all(t, n.keys(), 2)
	w.configure([]string{fastSource, lender}, swapNamespaces[1:])
	if _, err := n.admin.Reload(t.Context()); err != nil {
		t.Fatal(err)
	}
	if a := n.areas(); len(a) != 1 || len(a[0].Sources) != 0 {
		t.Errorf("areas %+v", a)
	}
	if _, err := n.admin.DeleteNamespace(t.Context(), uuid); err != nil {
		t.Fatal(err)
	}
	n.mustStop()
}

// deletingANamespaceDeletesItsKeys checks that deleting a namespace also deletes its keys from swap areas.
func deletingANamespaceDeletesItsKeys(t *testing.T, w *world, _ string) {
	w.configure([]string{fastSource, lender}, swapNamespaces[1:])
	n := w.mustStart()
	if _, err := n.admin.DeleteNamespace(t.Context(), n.areas()[0].Sources[0].UUID); err != nil {
		t.Fatal(err)
	}
	if a := n.areas(); len(a) != 1 || len(a[0].Sources) != 0 {
		t.Errorf("areas %+v", a)
	}
}
