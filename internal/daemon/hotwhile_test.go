package daemon

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/internal/admin"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/fault"
	"jbofd/internal/testutil/images"
)

// startRaw starts a node whose inside a test looks at.
func (w *world) startRaw(more ...func(*Options)) (*Node, *node, *lines) {
	w.t.Helper()
	cfg, err := w.load()
	if err != nil {
		w.t.Fatal(err)
	}
	log := &lines{}
	o := Options{Config: cfg, Load: w.load, Stderr: log, Version: "test", CloseTimeout: time.Minute,
		LookForDrivesEvery: hotLookEvery}
	for _, set := range more {
		set(&o)
	}
	raw, err := start(o)
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

// back lets a drive return that has vanished, with what was on it.
func (w *world) back(ssd string) {
	w.t.Helper()
	image, err := os.ReadFile(w.path(ssd + ".img"))
	if err == nil {
		err = os.WriteFile(w.path("back"), image, 0o600)
	}
	if err != nil {
		w.t.Fatal(err)
	}
	w.rename("back", ssd+".img")
}

// hostSees waits until a host sees so many namespaces.
func hostSees(t *testing.T, host *client.Controller, namespaces int, log *lines) {
	t.Helper()
	eventually(t, fmt.Sprintf("a host sees %d namespaces", namespaces), func() error {
		if ids, err := host.NamespaceIDs(t.Context()); err != nil || len(ids) != namespaces {
			return fmt.Errorf("it sees %v, %v\n%s", ids, err, log.with(""))
		}
		return nil
	})
}

// TestADriveComesAndGoesWhileAnotherIsErased: neither the deletion of a namespace of another drive nor the resize of
// one keeps it. Both end as if nothing had happened. What a reload was to resize on the drive itself is not resized.
func TestADriveComesAndGoesWhileAnotherIsErased(t *testing.T) {
	const mine, other = "{nsid: 3, ssd: ssd1, size: 64MiB, type: kv}", "{nsid: 1, ssd: ssd0, size: 72MiB, type: kv}"
	drives := []string{faulty("ssd0", "96MiB"), faulty("ssd1", "160MiB")}
	for _, resize := range []bool{false, true} {
		w := newWorld(t)
		w.configure(drives, []string{other, "{nsid: 2, ssd: ssd0, size: 16MiB}", mine})
		raw, n, log := w.startRaw()
		host := n.connect()
		dev := raw.drives()[0].dev.(*fault.Device)
		l := raw.drives()[0].label.Label()
		id := l.Extents[l.FindNamespace(nqn, 2)].UUID.String()
		dev.SetRules(fault.Rule{Ops: []ssd.Op{ssd.WriteZeroes}, Hold: true}) // as a large one takes
		ended := make(chan error, 1)
		nss := []string{other, mine}
		if resize {
			nss = []string{strings.Replace(other, "72", "68", 1), strings.Replace(mine, "64", "72", 1)}
		}
		w.configure(drives, nss)
		go func() {
			_, err := n.admin.Reload(t.Context())
			if err == nil && !resize {
				err = raw.DeleteNamespace(id)
			}
			ended <- err
		}()
		if err := dev.AwaitHeld(t.Context(), 1); err != nil {
			t.Fatal(err)
		}
		left := 1 // the configuration with a resize is not in force yet
		if resize {
			left = 2
		}
		raw.drives()[1].dev.(*fault.Device).Vanish()
		hostSees(t, host, left, log)
		select {
		case err := <-ended:
			t.Fatalf("resize %v: it has ended: %v", resize, err)
		default:
		}
		eventually(t, "the change is under way", func() error {
			if c := raw.runningChange(); c == nil || strings.Contains(c.What, "ssd ssd1") {
				return fmt.Errorf("under way is %v", c)
			}
			return nil
		})
		if !resize {
			w.back("ssd1")
			hostSees(t, host, left+1, log)
		}
		dev.SetRules()
		dev.Release()
		if err := outcome(t, "the change", ended); err != nil {
			t.Errorf("resize %v: %v", resize, err)
		}
		if resize {
			w.back("ssd1")
			hostSees(t, host, 2, log)
		}
		if l := raw.drives()[0].label.Label(); resize != (l.FindNamespace(nqn, 2) >= 0) ||
			resize == (l.Extents[l.FindNamespace(nqn, 1)].LengthBytes == 72<<20) {
			t.Errorf("resize %v: %+v", resize, l.Extents)
		}
	}
}

// TestADriveComesBackOnlyWhenNothingUsesItsFormerSelf: a change that erases on it, or resizes.
func TestADriveComesBackOnlyWhenNothingUsesItsFormerSelf(t *testing.T) {
	r := newHotRig(t, false)
	d := r.raw.drives()[1]
	held, end := make(chan struct{}), make(chan struct{})
	ended := make(chan error, 1)
	if err := r.raw.beginChange("a long change"); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer r.raw.endChange()
		ended <- r.raw.withoutReload(d, func() error {
			close(held)
			<-end
			return nil
		})
	}()
	<-held
	d.dev.(*fault.Device).Vanish()
	r.sees(1)
	r.w.back("ssd1")
	eventually(t, "it is refused", func() error {
		if len(r.log.with("still being resized or erased")) == 0 {
			return errors.New("not yet")
		}
		return nil
	})
	close(end)
	if err := outcome(t, "the change", ended); !errors.Is(err, ssd.ErrGone) {
		t.Errorf("the change on a drive that was withdrawn: %v", err)
	}
	r.sees(3)
	r.whole()
}

// TestAnOpeningThatHangsIsGivenUp: it is said, only a reload tries again, up to a limit, and the drive is taken into
// service when it answers.
func TestAnOpeningThatHangsIsGivenUp(t *testing.T) {
	w := newWorld(t)
	images := images.New(t, t.TempDir(), 96<<20, "hangs")
	w.configure([]string{memSSD, "{name: ssd1, backend: file, path: DIR/ssd1.img, calibrate: false}"},
		[]string{"{nsid: 1, ssd: ssd0, size: 16MiB}", "{nsid: 2, ssd: ssd1, size: 16MiB}"})
	raw, n, log := w.startRaw(func(o *Options) { o.OpenTimeout = 2 * time.Second })
	host := n.connect()
	images.Silence(0)
	if err := os.Symlink(images.Path(0), w.path("ssd1.img")); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it is said", func() error {
		if l, err := n.admin.SSDs(t.Context()); err != nil || !strings.Contains(l.Items[1].Error, "has not answered") {
			return fmt.Errorf("%v, %v", l.Items, err)
		}
		return nil
	})
	if got := log.with("has not answered within 2s"); len(got) != 1 {
		t.Errorf("the log: %q", got)
	}
	images.AwaitKept(0, 1)
	for under := 1; under <= maxOpenings; under++ {
		if raw.mayOpen("ssd1", false) || raw.mayOpen("ssd1", true) != (under < maxOpenings) {
			t.Errorf("%d openings have not ended: another one may begin: %v, after a reload: %v", under,
				raw.mayOpen("ssd1", false), raw.mayOpen("ssd1", true))
		}
		raw.hot.count("ssd1", 1)
	}
	raw.hot.count("ssd1", -maxOpenings)
	images.Answer(0)
	hostSees(t, host, 2, log)
}

// TestAStopLeavesADriveThatIsBeingOpened: those that are in service are closed, and the log names the one that is not.
func TestAStopLeavesADriveThatIsBeingOpened(t *testing.T) {
	w := newWorld(t)
	images := images.New(t, t.TempDir(), 96<<20, "hangs")
	w.configure([]string{strings.Replace(fileSSD, "ssd1", "ssd0", 2),
		"{name: ssd1, backend: file, path: DIR/ssd1.img, calibrate: false}"},
		[]string{"{nsid: 1, ssd: ssd0, size: 16MiB}"})
	cfg, err := w.load()
	if err != nil {
		t.Fatal(err)
	}
	log := &lines{}
	n, err := start(Options{Config: cfg, Load: w.load, Stderr: log, Version: "test", CloseTimeout: time.Minute,
		LookForDrivesEvery: hotLookEvery})
	if err != nil {
		t.Fatal(err)
	}
	images.Silence(0)
	if err := os.Symlink(images.Path(0), w.path("ssd1.img")); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it is being opened", func() error {
		if n.mayOpen("ssd1", false) {
			return errors.New("not yet")
		}
		return nil
	})
	served := n.drives()[0].dev
	n.beginStop()
	n.stop()
	if got := log.with("stopped without it"); len(got) != 1 || !strings.Contains(got[0], "ssd1") ||
		len(log.with("time limit")) > 0 {
		t.Errorf("the log: %q", log.with(""))
	}
	if err := served.Healthy(); !errors.Is(err, ssd.ErrGone) {
		t.Errorf("the drive that was in service is not closed: %v", err)
	}
	images.Answer(0)
	n.hot.attending.Wait()
	if err := n.pool.Close(); err != nil { // the stop has left it to the opening
		t.Error(err)
	}
}

// TestAStopWaitsForAChangeThatErases: it uses a drive, which must not be closed meanwhile.
func TestAStopWaitsForAChangeThatErases(t *testing.T) {
	r := newHotRig(t, false)
	held, end := make(chan struct{}), make(chan struct{})
	if err := r.raw.beginChange("a long change"); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer r.raw.endChange()
		_ = r.raw.withoutReload(r.raw.drives()[1], func() error {
			close(held)
			<-end
			return nil
		})
	}()
	<-held
	changed := r.raw.awaitChange()
	if within(50*time.Millisecond, changed) {
		t.Error("the change has not ended")
	}
	close(end)
	if !within(30*time.Second, changed) {
		t.Error("the change has ended")
	}
}
