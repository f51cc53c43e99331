package daemon

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"jbofd/internal/admin"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/fault"
)

// startRaw starts a node whose inside a test looks at.
func (w *world) startRaw() (*Node, *node, *lines) {
	w.t.Helper()
	cfg, err := w.load()
	if err != nil {
		w.t.Fatal(err)
	}
	log := &lines{}
	raw, err := start(Options{Config: cfg, Load: w.load, Stderr: log, Version: "test", CloseTimeout: time.Minute})
	if err != nil {
		w.t.Fatal(err)
	}
	raw.tel.Health().Clear("daemon") // as Run does
	w.t.Cleanup(func() {
		raw.beginStop()
		raw.stop()
	})
	return raw, &node{w: w, addrs: raw.addrs, admin: admin.NewClient(w.path("admin.sock"))}, log
}

// faulty is a drive whose device may hang or vanish.
func faulty(ssd, size string) string {
	return fmt.Sprintf("{name: %s, backend: file, path: DIR/%[1]s.img, size: %s, create: true, calibrate: false, "+
		"fault: {delay: 1us, delay_probability: 0}}", ssd, size)
}

// outcome waits for the end of a change.
func outcome(t *testing.T, what string, ended <-chan error) error {
	t.Helper()
	select {
	case err := <-ended:
		return err
	case <-time.After(30 * time.Second):
		panic(what + " does not end")
	}
}

// TestAResizeEndsWithItsDrive: it is refused, the drive's namespaces are withdrawn, also with a swap area on the drive,
// which keeps it in service, and the next reload is not kept waiting.
func TestAResizeEndsWithItsDrive(t *testing.T) {
	for _, stays := range []bool{false, true} {
		w := newWorld(t)
		drives := []string{memSSD, faulty("ssd1", "160MiB")}
		if stays {
			drives[1] = strings.Replace(drives[1], "fault:", "kv_swap: 16MiB, fault:", 1)
		}
		nss := func(size string) []string {
			return []string{"{nsid: 1, ssd: ssd0, size: 16MiB}", "{nsid: 3, ssd: ssd1, size: " + size + ", type: kv}"}
		}
		w.configure(drives, nss("64MiB"))
		raw, n, log := w.startRaw()
		host := n.connect()
		dev := raw.drives()[1].dev.(*fault.Device)
		dev.SetRules(fault.Rule{Ops: []ssd.Op{ssd.Write}, Offset: 1 << 20, Len: 140 << 20, Hold: true})
		w.configure(drives, nss("96MiB"))
		reloaded := make(chan error, 1)
		go func() {
			_, err := n.admin.Reload(t.Context())
			reloaded <- err
		}()
		if err := dev.AwaitHeld(t.Context(), 1); err != nil {
			t.Fatal(err)
		}
		dev.Vanish()
		if err := outcome(t, "the resize", reloaded); err == nil || !strings.Contains(err.Error(), "gone") &&
			!strings.Contains(err.Error(), "it was closed") {
			t.Errorf("the resize: %v", err)
		}
		if !stays {
			eventually(t, "the drive is withdrawn", func() error {
				if ids, err := host.NamespaceIDs(t.Context()); err != nil || len(ids) != 1 {
					return fmt.Errorf("a host sees %v, %v\n%s", ids, err, log.with(""))
				}
				return nil
			})
		}
		w.configure(drives, nss("64MiB"))
		go func() {
			_, err := n.admin.Reload(t.Context())
			reloaded <- err
		}()
		err := outcome(t, "another reload", reloaded)
		if (err != nil) != stays {
			t.Errorf("another reload: %v", err)
		}
	}
}
