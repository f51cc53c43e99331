package daemon

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"jbofd/internal/ssd/fault"
)

// TestADriveThatWasRefusedKeepsItsNamespaces: nothing can be erased on it while it is closed, and no change waits for
// that.
func TestADriveThatWasRefusedKeepsItsNamespaces(t *testing.T) {
	r := newHotRig(t, true)
	r.w.configure([]string{memSSD, hotSSD}, []string{hotNamespaces[0], hotNamespaces[2],
		"{nsid: 4, ssd: ssd1, size: 16MiB}"}, hotTenants) // for which there is no room beside the namespace 2
	if _, err := r.admin.Reload(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.w.rename("away", "ssd1.img")
	eventually(t, "it is refused", func() error {
		if len(r.log.with("its namespaces cannot be served")) == 0 {
			return errors.New("not yet")
		}
		return nil
	})
	l := r.raw.drives()[1].label.Label()
	done := make(chan error, 1)
	go func() { done <- r.raw.DeleteNamespace(l.Extents[l.FindNamespace(nqn, 2)].UUID.String()) }()
	select {
	case err := <-done:
		if err == nil || !strings.Contains(err.Error(), "not in service") {
			t.Errorf("deleted on a drive that is closed: %v", err)
		}
	case <-time.After(30 * time.Second):
		panic("the deletion waits for a drive that is closed")
	}
}

// TestTheListSaysThatNamespacesAreWithdrawn with their drive.
func TestTheListSaysThatNamespacesAreWithdrawn(t *testing.T) {
	r := newHotRig(t, false)
	r.raw.drives()[1].dev.(*fault.Device).Vanish()
	r.sees(1)
	l, err := r.admin.Subsystems(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, ns := range l.Items[0].Namespaces {
		if (ns.Error != "") != (ns.SSD == "ssd1") {
			t.Errorf("namespace %d: %q", ns.NSID, ns.Error)
		}
	}
}

// TestADriveInThePlaceOfAnotherOneGetsNoNewNamespace: two drives have exchanged their names, and one of them appears
// before the other. What the host wants is on that one.
func TestADriveInThePlaceOfAnotherOneGetsNoNewNamespace(t *testing.T) {
	const size = ", size: 96MiB, create: true, calibrate: false}"
	made := func(ssd string) string { return fmt.Sprintf("{name: %s, backend: file, path: DIR/%[1]s.img"+size, ssd) }
	there := func(ssd string) string { return strings.Replace(made(ssd), size, ", calibrate: false}", 1) }
	nss := []string{"{nsid: 1, ssd: ssd0, size: 16MiB}", "{nsid: 2, ssd: ssd1, size: 16MiB}",
		"{nsid: 3, ssd: ssd2, size: 16MiB}"}
	w := newWorld(t)
	w.configure([]string{memSSD, made("ssd1"), made("ssd2")}, nss)
	w.mustStart().mustStop()
	w.rename("ssd1.img", "a")
	w.rename("ssd2.img", "b")
	w.configure([]string{memSSD, there("ssd1"), there("ssd2")}, nss)
	_, n, log := w.startRaw()
	host := n.connect()
	refused := func(ssd, why string) {
		t.Helper()
		eventually(t, ssd+" is refused", func() error {
			for _, l := range log.with("its namespaces cannot be served") {
				if strings.Contains(l, "ssd="+ssd) && strings.Contains(l, why) {
					return nil
				}
			}
			return fmt.Errorf("%q", log.with("WARN"))
		})
		if ids, err := host.NamespaceIDs(t.Context()); err != nil || len(ids) != 1 {
			t.Errorf("the host sees %v, %v", ids, err)
		}
	}
	w.rename("b", "ssd1.img")
	refused("ssd1", "ssd ssd2, which may have that one, is not there")
	w.rename("a", "ssd2.img")
	refused("ssd2", "have the drives' paths been exchanged?")
}

// TestADriveThatFailsAsSoonAsItIsInServiceComesBackLessOften: each return replays its stores, and each end takes the
// namespaces from hosts. Nothing of the drives that were replaced is kept.
func TestADriveThatFailsAsSoonAsItIsInServiceComesBackLessOften(t *testing.T) {
	r := newHotRig(t, false)
	began, least := time.Now(), time.Duration(0)
	for n := range 3 {
		r.raw.drives()[1].dev.(*fault.Device).Vanish()
		r.sees(1)
		image, err := os.ReadFile(r.w.path("ssd1.img"))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(r.w.path("back"), image, 0o600); err != nil {
			t.Fatal(err)
		}
		r.w.rename("back", "ssd1.img")
		r.sees(3)
		least += hotLookEvery << n
	}
	if took := time.Since(began); took < least {
		t.Errorf("it was in service again three times within %v, must take %v", took, least)
	}
	eventually(t, "no drive is kept for requests that it may still have", func() error {
		if n := r.raw.publisher.Undrained(); n > 0 {
			return fmt.Errorf("%d are", n)
		}
		return nil
	})
}

// TestADriveThatIsGoneAndStaysIsNotAskedAgain: one with a swap area is not withdrawn, and each request to it is an
// error of the drive.
func TestADriveThatIsGoneAndStaysIsNotAskedAgain(t *testing.T) {
	w := newWorld(t)
	gone := strings.Replace(lender, "kv_swap", "fault: {delay: 1us, delay_probability: 0}, kv_swap", 1)
	w.configure([]string{fastSource, gone}, swapNamespaces)
	n, _, _ := w.startRaw()
	d := n.drives()[1]
	for since, want := range map[time.Duration]time.Duration{maxOpenWait / 2: time.Hour, maxOpenWait + 1: 0} {
		served := awaited{at: time.Now().Add(-since), wait: time.Hour}
		if n.attendDrive(1, &served); served.wait != want {
			t.Errorf("served for %v: %+v", since, served)
		}
	}
	d.dev.(*fault.Device).Vanish()
	var state awaited
	before := d.drive.Stats().Errors.Load()
	n.attendDrive(1, &state)
	if now := d.drive.Stats().Errors.Load(); now != before || state != (awaited{}) {
		t.Errorf("%d requests have failed; %+v", now-before, state)
	}
}

// TestNewNamespacesAreMadeBesideADriveThatIsMissing: at a start, and on a drive that appears and is blank.
func TestNewNamespacesAreMadeBesideADriveThatIsMissing(t *testing.T) {
	const missing = "{name: ssd2, backend: file, path: DIR/ssd2.img, calibrate: false}"
	const used = "{name: ssd1, backend: file, path: DIR/ssd1.img, size: 96MiB, create: true, calibrate: false}"
	there := strings.Replace(used, "size: 96MiB, create: true, ", "", 1)
	nss := []string{"{nsid: 1, ssd: ssd0, size: 16MiB}", "{nsid: 2, ssd: ssd1, size: 16MiB}"}
	w := newWorld(t)
	w.configure([]string{memSSD, used}, nss)
	w.mustStart().mustStop()
	nss = append(nss, "{nsid: 3, ssd: ssd2, size: 16MiB}", "{nsid: 4, ssd: ssd1, size: 16MiB}")
	w.configure([]string{memSSD, there, missing}, nss)
	n := w.mustStart()
	if got := len(n.namespaces(n.connect())); got != 3 {
		t.Errorf("a start makes %d namespaces, want those of both drives that are there", got)
	}
	n.mustStop()
	w.rename("ssd1.img", "away")
	n = w.mustStart()
	host := n.connect()
	if err := os.WriteFile(w.path("blank"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(w.path("blank"), 96<<20); err != nil {
		t.Fatal(err)
	}
	w.rename("blank", "ssd1.img")
	eventually(t, "the blank drive is used", func() error {
		if got := len(n.namespaces(host)); got != 3 {
			return fmt.Errorf("%d namespaces", got)
		}
		return nil
	})
}
