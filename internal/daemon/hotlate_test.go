package daemon

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
)

// TestASizeThatWasChangedWhileTheDriveWasAwayIsApplied when it is back. If that is not possible, the node says why.
func TestASizeThatWasChangedWhileTheDriveWasAwayIsApplied(t *testing.T) {
	for _, size := range []string{"72MiB", "90MiB"} {
		r := newHotRig(t, true)
		r.w.configure([]string{memSSD, hotSSD}, []string{hotNamespaces[0], hotNamespaces[1],
			"{nsid: 3, ssd: ssd1, size: " + size + ", type: kv}"}, hotTenants)
		if _, err := r.admin.Reload(t.Context()); err != nil {
			t.Fatal(err)
		}
		r.w.rename("away", "ssd1.img")
		r.sees(3)
		fits := size != "90MiB" // beside the other namespace there is no room
		eventually(t, size+" is applied, or the node says why not", func() error {
			s, err := r.admin.Status(t.Context())
			l := r.raw.drives()[1].label.Label()
			has := fmt.Sprintf("%dMiB", l.Extents[l.FindNamespace(nqn, 3)].LengthBytes>>20)
			switch {
			case err != nil || s.Change != nil || !s.Ready != !fits || (has == size) != fits:
				return fmt.Errorf("the namespace has %s; %+v, %v", has, s, err)
			case !fits && !strings.Contains(s.Reasons[0].Reason, "90MiB wanted"):
				return fmt.Errorf("the reasons are %v", s.Reasons)
			}
			return nil
		})
		if fits {
			r.whole()
		}
	}
}

// TestADriveThatFailsWhileItsNamespacesAreMadeIsTriedAgain, but one that does not fit the configuration is not.
func TestADriveThatFailsWhileItsNamespacesAreMadeIsTriedAgain(t *testing.T) {
	for _, fails := range []bool{false, true} {
		w := newWorld(t)
		fault, size := "", "200MiB"
		if fails {
			fault, size = ", fault: {write_error_probability: 1}", "64MiB"
		}
		drive := "{name: ssd1, backend: file, path: DIR/ssd1.img, calibrate: false" + fault + "}"
		w.configure([]string{memSSD, drive}, []string{"{nsid: 1, ssd: ssd0, size: 16MiB}",
			"{nsid: 2, ssd: ssd1, size: " + size + ", type: kv}"})
		raw, _, log := w.startRaw()
		blank := w.path("blank")
		if err := errors.Join(os.WriteFile(blank, nil, 0o600), os.Truncate(blank, 96<<20)); err != nil {
			t.Fatal(err)
		}
		w.rename("blank", "ssd1.img")
		eventually(t, "it is refused", func() error {
			opened := 0
			for _, l := range log.with("drive opened") {
				if strings.Contains(l, "ssd=ssd1") {
					opened++
				}
			}
			err := raw.drives()[1].err
			if !errors.Is(err, errNamespaces) || pointless(err) == fails || fails && opened < 3 {
				return fmt.Errorf("opened %d times, %v\n%s", opened, err, log.with("WARN"))
			}
			return nil
		})
	}
}
