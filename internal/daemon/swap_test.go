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

// Drives of these tests: keys are at home on ssd0, which is slow or not, and swapped to ssd1.
const (
	slowHome  = "{name: ssd0, backend: file, path: DIR/ssd0.img, size: 72MiB, create: true, calibrate: false, fault: {delay: 25ms, delay_probability: 1}}"
	quickHome = "{name: ssd0, backend: file, path: DIR/ssd0.img, size: 72MiB, create: true, calibrate: false}"
	lender    = "{name: ssd1, backend: file, path: DIR/ssd1.img, size: 64MiB, create: true, calibrate: false, kv_swap: 16MiB}"
	noLender  = "{name: ssd1, backend: file, path: DIR/ssd1.img, size: 64MiB, create: true, calibrate: false}"
	lost      = "{name: ssd1, backend: file, path: DIR/nowhere.img, kv_swap: 16MiB}"
)

// swapSpaces are keys on ssd0 and blocks on both drives.
var swapSpaces = []string{"{nsid: 1, ssd: ssd0, size: 64MiB, type: kv}", "{nsid: 2, ssd: ssd0, size: 2MiB}", "{nsid: 3, ssd: ssd1, size: 2MiB}"}

const (
	swapKeys = 2000
	// noDrain keeps keys from coming home when the daemon stops.
	noDrain = "limits: {drain_timeout: 0s}"
)

// keys connects a host to namespace 1, with enough queues to overload its drive.
func (n *node) keys() *kv.Namespace {
	n.w.t.Helper()
	c, err := client.Connect(n.w.t.Context(), client.Options{Address: n.addrs.Listeners[0], SubNQN: nqn, HostNQN: "nqn.2026-11.example.jbofd:host",
		Queues: 4, Credits: client.CreditsOff})
	if err != nil {
		n.w.t.Fatal(err)
	}
	n.w.t.Cleanup(func() {
		if err := c.Close(); err != nil {
			n.w.t.Error(err)
		}
	})
	ns, err := kv.Open(n.w.t.Context(), c, 1, kv.Options{})
	if err != nil {
		n.w.t.Fatal(err)
	}
	return ns
}

func swapValue(key, version int) []byte {
	return bytes.Repeat(fmt.Appendf(nil, "%d of %d. ", version, key), 30)
}

// puts puts all keys, many at once.
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

// gets returns how many keys have which version.
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

// all holds every key to a version.
func all(t *testing.T, ns *kv.Namespace, version int) {
	t.Helper()
	if got := gets(t, ns); got[version] != swapKeys {
		t.Errorf("keys by version %v, want %d of version %d", got, swapKeys, version)
	}
}

// areas is what the admin API says of swap areas.
func (n *node) areas() []admin.SwapArea {
	n.w.t.Helper()
	l, err := n.admin.Swap(n.w.t.Context())
	if err != nil {
		n.w.t.Fatal(err)
	}
	return l.Items
}

// kvInfo is what the admin API says of namespace 1.
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

// blocks demands that the namespaces of blocks can be read.
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

// swapped makes drives of a daemon that was stopped while many keys of version 2 were in the swap area of ssd1, and
// those of version 1 at home. Version 1 is complete.
func swapped(t *testing.T) (w *world, area string) {
	t.Helper()
	w = newWorld(t)
	w.configure([]string{quickHome, noLender}, swapSpaces)
	n := w.mustStart()
	puts(t, n.keys(), 1)
	n.mustStop()
	w.configure([]string{slowHome, lender}, swapSpaces, noDrain)
	n = w.mustStart()
	puts(t, n.keys(), 2)
	areas := n.areas()
	if len(areas) != 1 || areas[0].SSD != "ssd1" || areas[0].State != "open" || len(areas[0].Homes) != 1 {
		t.Fatalf("areas %+v", areas)
	}
	h := areas[0].Homes[0]
	info := n.kvInfo()
	if !h.Open || h.NSID != 1 || h.SubNQN != nqn || h.UUID != info.UUID || h.Keys < swapKeys/3 || info.SwappedKeys < swapKeys/3 {
		t.Fatalf("home %+v of %+v", h, info)
	}
	n.mustStop()
	return w, areas[0].UUID
}

// TestSwapAreas through the life of a box: each part begins with the drives of one that was stopped with keys in a swap area.
func TestSwapAreas(t *testing.T) {
	made, area := swapped(t)
	for name, part := range map[string]func(*testing.T, *world, string){
		"come home": keysInASwapAreaSurviveAStopAndComeHome, "removed": aSwapAreaThatIsConfiguredNoMoreGoesWhenItIsEmpty,
		"another size": aSwapAreaOfAnotherSize, "drive missing": withoutTheDriveThatHasItsKeysANamespaceDoesNotOpen,
		"damaged": aDamagedSwapAreaIsLeftOut, "comes and goes": aNamespaceComesAndGoesWithItsKeys, "deleted": aNamespaceThatIsDeletedTakesItsKeysWithIt,
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			copyImages(t, made.dir, w.dir)
			part(t, w, area)
		})
	}
}

// keysInASwapAreaSurviveAStopAndComeHome when their drive has time.
func keysInASwapAreaSurviveAStopAndComeHome(t *testing.T, w *world, area string) {
	w.configure([]string{slowHome, lender}, swapSpaces, noDrain)
	n := w.mustStart()
	if a := n.areas(); len(a) != 1 || a[0].UUID != area || a[0].Homes[0].Keys < swapKeys/10 {
		t.Fatalf("areas %+v", a)
	}
	all(t, n.keys(), 2)
	n.mustStop()
	// With time to come home.
	w.configure([]string{quickHome, lender}, swapSpaces)
	n = w.mustStart()
	all(t, n.keys(), 2)
	n.mustStop()
	n = w.mustStart()
	if a := n.areas(); len(a) != 1 || a[0].UUID != area || len(a[0].Homes) != 0 {
		t.Errorf("areas %+v", a)
	}
	all(t, n.keys(), 2)
	n.mustStop()
	// And now nobody needs ssd1.
	w.configure([]string{quickHome, lost}, swapSpaces)
	n = w.mustStart()
	all(t, n.keys(), 2)
	n.blocks(2)
}

// aSwapAreaThatIsConfiguredNoMoreGoesWhenItIsEmpty, at a reload or the next start.
func aSwapAreaThatIsConfiguredNoMoreGoesWhenItIsEmpty(t *testing.T, w *world, area string) {
	w.configure([]string{slowHome, noLender}, swapSpaces, noDrain)
	n := w.mustStart()
	a := n.areas()
	if len(a) != 1 || a[0].UUID != area || a[0].State != "retiring" || a[0].Homes[0].Keys < swapKeys/10 {
		t.Fatalf("areas %+v", a)
	}
	if _, err := n.admin.DiscardSwap(t.Context(), area); !errors.Is(err, admin.ErrRefused) || !strings.Contains(err.Error(), "come home by themselves") {
		t.Errorf("an area with keys that can come home is given up: %v", err)
	}
	ns := n.keys()
	all(t, ns, 2)
	puts(t, ns, 3) // of which what is new does not go there
	all(t, ns, 3)
	n.mustStop()
	w.configure([]string{quickHome, noLender}, swapSpaces)
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

// aSwapAreaOfAnotherSize takes the place of the old one.
func aSwapAreaOfAnotherSize(t *testing.T, w *world, area string) {
	larger := strings.Replace(lender, "16MiB", "24MiB", 1)
	w.configure([]string{quickHome, larger}, swapSpaces)
	if _, err := w.load(); err != nil {
		t.Fatal(err)
	}
	n := w.mustStart()
	a := n.areas()
	if len(a) != 2 || a[0].UUID != area || a[0].State != "retiring" || a[1].State != "open" || a[1].SizeBytes != 24<<20 {
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
	w.configure([]string{quickHome, strings.Replace(lender, "16MiB", "55MiB", 1)}, swapSpaces)
	if _, err := w.start(); !errors.Is(err, label.ErrNoRoom) || !strings.Contains(err.Error(), "kv_swap 55MiB") {
		t.Errorf("an area without room: %v", err)
	}
}

// withoutTheDriveThatHasItsKeysANamespaceDoesNotOpen, everything else does; it can be told to do without.
func withoutTheDriveThatHasItsKeysANamespaceDoesNotOpen(t *testing.T, w *world, area string) {
	w.configure([]string{quickHome, lost}, swapSpaces)
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
	if len(a) != 1 || a[0].UUID != area || a[0].State != "missing" || len(a[0].Homes) != 1 || a[0].Homes[0].NSID != 1 || a[0].Homes[0].Open {
		t.Fatalf("areas %+v", a)
	}
	n.blocks(2)
	// A reload is not kept back by it.
	w.configure([]string{quickHome, lost}, append(slices.Clone(swapSpaces), "{nsid: 4, ssd: ssd0, size: 1MiB}"))
	if _, err := n.admin.Reload(t.Context()); err != nil {
		t.Errorf("reload: %v", err)
	}
	n.blocks(4)
	n.mustStop()
	// With the drive all is there again.
	keep := t.TempDir()
	copyImages(t, w.dir, keep)
	w.configure([]string{quickHome, lender}, swapSpaces)
	n = w.mustStart()
	all(t, n.keys(), 2)
	n.mustStop()
	// What is given up has its old value, also when the drive is back.
	copyImages(t, keep, w.dir)
	w.configure([]string{quickHome, lost}, swapSpaces)
	n = w.mustStart()
	if _, err := n.admin.DiscardSwap(t.Context(), "0425d6c3-77cf-4e62-873e-0484d7ac5274"); !errors.Is(err, admin.ErrRefused) {
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
	w.configure([]string{quickHome, lender}, swapSpaces)
	n = w.mustStart()
	ns = n.keys()
	if after := gets(t, ns); after[1] != before[1] || after[2] != before[2] {
		t.Errorf("keys by version %v, without the drive %v", after, before)
	}
	puts(t, ns, 3)
	all(t, ns, 3)
	if _, err := n.admin.DiscardSwap(t.Context(), area); !errors.Is(err, admin.ErrRefused) || !strings.Contains(err.Error(), "in use") {
		t.Errorf("an area in use is given up: %v", err)
	}
}

// copyImages copies the drives.
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

// aDamagedSwapAreaIsLeftOut with the namespaces that need it, and can be given up.
func aDamagedSwapAreaIsLeftOut(t *testing.T, w *world, area string) {
	// It was the second extent made on ssd1, behind 2 MiB of blocks.
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
	w.configure([]string{quickHome, lender}, swapSpaces)
	n := w.mustStart()
	a := n.areas()
	if len(a) != 1 || a[0].State != "failed" || !strings.Contains(a[0].Error, "superblock of the swap area") || len(a[0].Homes) != 1 {
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

// aNamespaceComesAndGoesWithItsKeys by reloads.
func aNamespaceComesAndGoesWithItsKeys(t *testing.T, w *world, _ string) {
	w.configure([]string{quickHome, lender}, swapSpaces[1:])
	n := w.mustStart()
	if a := n.areas(); len(a) != 1 || len(a[0].Homes) != 1 || a[0].Homes[0].Open || a[0].Homes[0].Keys < swapKeys/10 {
		t.Fatalf("areas %+v", a)
	}
	uuid := n.areas()[0].Homes[0].UUID
	// It comes back, and goes when it has taken its keys home.
	w.configure([]string{quickHome, lender}, swapSpaces)
	if _, err := n.admin.Reload(t.Context()); err != nil {
		t.Fatal(err)
	}
	all(t, n.keys(), 2)
	w.configure([]string{quickHome, lender}, swapSpaces[1:])
	if _, err := n.admin.Reload(t.Context()); err != nil {
		t.Fatal(err)
	}
	if a := n.areas(); len(a) != 1 || len(a[0].Homes) != 0 {
		t.Errorf("areas %+v", a)
	}
	if _, err := n.admin.DeleteNamespace(t.Context(), uuid); err != nil {
		t.Fatal(err)
	}
	n.mustStop()
}

// aNamespaceThatIsDeletedTakesItsKeysWithIt out of swap areas.
func aNamespaceThatIsDeletedTakesItsKeysWithIt(t *testing.T, w *world, _ string) {
	w.configure([]string{quickHome, lender}, swapSpaces[1:])
	n := w.mustStart()
	if _, err := n.admin.DeleteNamespace(t.Context(), n.areas()[0].Homes[0].UUID); err != nil {
		t.Fatal(err)
	}
	if a := n.areas(); len(a) != 1 || len(a[0].Homes) != 0 {
		t.Errorf("areas %+v", a)
	}
}
