package daemon

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/internal/drive"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/fault"
	"jbofd/internal/ssd/file"
	"jbofd/internal/ssd/label"
)

// hotSSD is a drive whose device may vanish, and which is not made.
const hotSSD = "{name: ssd1, backend: file, path: DIR/ssd1.img, fault: {delay: 1us, delay_probability: 0}}"

var hotNamespaces = []string{"{nsid: 1, ssd: ssd0, size: 16MiB}", "{nsid: 2, ssd: ssd1, size: 16MiB}",
	"{nsid: 3, ssd: ssd1, size: 64MiB, type: kv}"}

// hotLookEvery is how often nodes of these tests look for drives.
const hotLookEvery = 200 * time.Millisecond

// hotTenants has the host be a tenant with a weight.
const hotTenants = "tenants: [{name: gold, hosts: [nqn.2026-11.example.jbofd:hot], weight: 7}]"

var hotData = bytes.Repeat([]byte("hot data"), 512)

// hotRig is a node with a drive, ssd1, that has data, and a host.
type hotRig struct {
	*node
	raw    *Node
	log    *lines
	host   *client.Controller
	mu     sync.Mutex
	events []uint32 // namespaces that the host was told of
}

// newHotRig makes the drive, and starts a node, without the drive if it is to be absent.
func newHotRig(t *testing.T, absent bool) *hotRig {
	w := newWorld(t)
	w.configure([]string{memSSD, strings.Replace(fileSSD, "64MiB", "96MiB", 1)}, hotNamespaces)
	n := w.mustStart()
	ns, err := n.connect().Namespace(t.Context(), 2)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := ns.WriteAt(t.Context(), hotData, 8192, 0); err != nil {
		t.Fatal(err)
	}
	if err := n.keysOf(3).Put(t.Context(), []byte("key"), hotData); err != nil {
		t.Fatal(err)
	}
	n.mustStop()
	if absent {
		w.rename("ssd1.img", "away")
	}
	w.configure([]string{memSSD, hotSSD}, hotNamespaces, hotTenants)
	r := &hotRig{}
	r.raw, r.node, r.log = w.startRaw()
	r.host, err = client.Connect(t.Context(), client.Options{Address: r.addrs.Listeners[0], SubNQN: nqn,
		HostNQN: "nqn.2026-11.example.jbofd:hot", OnEvent: func(e client.Event) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.events = append(r.events, e.NSIDs...)
		}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.host.Close() })
	return r
}

// ids are the namespaces that the host sees.
func (r *hotRig) ids() []uint32 {
	r.w.t.Helper()
	ids, err := r.host.NamespaceIDs(r.w.t.Context())
	if err != nil {
		r.w.t.Fatal(err)
	}
	return ids
}

func (w *world) rename(from, to string) {
	w.t.Helper()
	if err := os.Rename(w.path(from), w.path(to)); err != nil {
		w.t.Fatal(err)
	}
}

// sees waits until a host sees so many namespaces, and is told of the change.
func (r *hotRig) sees(namespaces int) {
	r.w.t.Helper()
	eventually(r.w.t, fmt.Sprintf("a host sees %d namespaces", namespaces), func() error {
		if got := r.ids(); len(got) != namespaces {
			return fmt.Errorf("it sees %v\n%s", got, r.log.with(""))
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		if len(r.events) == 0 {
			return errors.New("it is not told")
		}
		r.events = nil
		return nil
	})
}

// whole checks that all that was written to the drive is there, and that it takes more.
func (r *hotRig) whole() {
	t := r.w.t
	t.Helper()
	ns, err := r.host.Namespace(t.Context(), 2)
	if err != nil {
		t.Fatal(err)
	}
	got := make([]byte, len(hotData))
	if _, err := ns.ReadAt(t.Context(), got, 8192); err != nil || !bytes.Equal(got, hotData) {
		t.Errorf("the data are not there: %v", err)
	}
	for _, err := range []error{ignore(ns.WriteAt(t.Context(), got, 65536, 0)), ns.Flush(t.Context())} {
		if err != nil {
			t.Error(err)
		}
	}
	keys := r.keysOf(3)
	if v, err := keys.Value(t.Context(), []byte("key")); err != nil || !bytes.Equal(v, hotData) {
		t.Errorf("the value is not there: %v", err)
	}
	if err := keys.Put(t.Context(), []byte("another key"), hotData); err != nil {
		t.Error(err)
	}
	var shared drive.Snapshot
	r.raw.drives()[1].drive.Snapshot(&shared)
	if !slices.ContainsFunc(shared.Tenants, func(s drive.TenantSnapshot) bool { return s.Weight == 7 }) {
		t.Errorf("the drive does not know the tenant: %+v", shared.Tenants)
	}
	if s, err := r.admin.Status(t.Context()); err != nil || !s.Ready {
		t.Errorf("the node is not ready: %+v, %v", s, err)
	}
}

func ignore(_ int, err error) error { return err }

// TestADriveThatAppearsIsTakenIntoService: a drive of the configuration is not there at the start. Its namespaces are
// when it is.
func TestADriveThatAppearsIsTakenIntoService(t *testing.T) {
	r := newHotRig(t, true)
	if got := r.ids(); len(got) != 1 {
		t.Fatalf("a host sees %v", got)
	}
	r.w.rename("away", "ssd1.img")
	r.sees(3)
	r.whole()
}

// TestADriveThatVanishesComesBack: its namespaces are withdrawn, with writes under way, and come back with the drive,
// with what is on it. What is at its place meanwhile, another drive or a blank one, is not taken and stays as it is.
func TestADriveThatVanishesComesBack(t *testing.T) {
	r := newHotRig(t, false)
	for round := range 2 {
		r.whole()
		ns, err := r.host.Namespace(t.Context(), 2)
		if err != nil {
			t.Fatal(err)
		}
		failed := make(chan struct{})
		var load sync.WaitGroup
		for k := range int64(4) {
			load.Go(func() {
				for {
					if _, err := ns.WriteAt(t.Context(), hotData, 1<<20+k*4096, 0); err != nil {
						return
					}
				}
			})
		}
		go func() {
			defer close(failed)
			load.Wait()
		}()
		r.raw.drives()[1].dev.(*fault.Device).Vanish()
		r.sees(1)
		select {
		case <-failed:
		case <-time.After(20 * time.Second):
			t.Fatal("writes go on")
		}
		if l, err := r.admin.SSDs(t.Context()); err != nil || l.Items[1].Error == "" {
			t.Errorf("nothing says that the drive is gone: %+v, %v", l, err)
		}
		image, err := os.ReadFile(r.w.path("ssd1.img"))
		if err != nil {
			t.Fatal(err)
		}
		if round == 0 {
			r.replace("another", func(d ssd.Device) error {
				_, err := label.Format(d, label.NewUUID(), true)
				return err
			}, "another drive")
			r.replace("blank", func(ssd.Device) error { return nil }, "blank")
		}
		if err := os.WriteFile(r.w.path("back"), image, 0o600); err != nil {
			t.Fatal(err)
		}
		r.w.rename("back", "ssd1.img")
		if _, err := r.admin.Reload(t.Context()); err != nil {
			t.Error(err)
		}
		r.sees(3)
	}
	r.whole()
}

// replace puts a new drive at the place of the one that is gone, and waits until it is refused.
func (r *hotRig) replace(name string, prepare func(ssd.Device) error, refusal string) {
	t := r.w.t
	t.Helper()
	d, err := file.Open(file.Config{Name: name, Path: r.w.path(name), Create: true, SizeBytes: 96 << 20})
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(prepare(d), d.Close()); err != nil {
		t.Fatal(err)
	}
	before, err := os.ReadFile(r.w.path(name))
	if err != nil {
		t.Fatal(err)
	}
	said := len(r.log.with(refusal))
	r.w.rename(name, "ssd1.img")
	if _, err := r.admin.Reload(t.Context()); err != nil {
		t.Error(err)
	}
	eventually(t, "it is refused", func() error {
		if len(r.log.with(refusal)) == said {
			return fmt.Errorf("%q", r.log.with(""))
		}
		return nil
	})
	if after, err := os.ReadFile(r.w.path("ssd1.img")); err != nil || !bytes.Equal(before, after) {
		t.Errorf("%s has changed: %v", name, err)
	}
	if got := r.ids(); len(got) != 1 {
		t.Errorf("with %s: a host sees %v", name, got)
	}
}

// TestADriveThatAppearsWithoutRoomIsNotUsed: a drive appears on which the configuration's namespaces have no room. The
// others do not depend on it. It is used when the configuration is mended.
func TestADriveThatAppearsWithoutRoomIsNotUsed(t *testing.T) {
	r := newHotRig(t, true)
	w := r.w
	w.configure([]string{memSSD, hotSSD}, append(hotNamespaces, "{nsid: 4, ssd: ssd1, size: 64MiB}"), hotTenants)
	if _, err := r.admin.Reload(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.rename("away", "ssd1.img")
	eventually(t, "it is refused", func() error {
		if len(r.log.with("its namespaces cannot be served")) == 0 {
			return fmt.Errorf("%q", r.log.with(""))
		}
		return nil
	})
	w.configure([]string{memSSD, hotSSD}, append(hotNamespaces, "{nsid: 5, ssd: ssd0, size: 4MiB}"), hotTenants)
	if _, err := r.admin.Reload(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.sees(4)
	r.whole()
}
