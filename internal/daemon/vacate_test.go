package daemon

import (
	"errors"
	"testing"
	"time"

	"jbofd/internal/nvmeof/target"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/fault"
)

// TestNobodyGetsSpaceWhileTheDriveHasZeroes: an erasure was given up, and the drive still has its zeroes. A reload that
// publishes a namespace again, gives it an extent, or resizes one waits for them.
func TestNobodyGetsSpaceWhileTheDriveHasZeroes(t *testing.T) {
	drives := []string{memSSD, faulty("ssd1", "160MiB")}
	const kv64, kv96 = "{nsid: 3, ssd: ssd1, size: 64MiB, type: kv}", "{nsid: 3, ssd: ssd1, size: 96MiB, type: kv}"
	const block, other = "{nsid: 4, ssd: ssd1, size: 16MiB}", "{nsid: 5, ssd: ssd1, size: 16MiB}"
	for name, to := range map[string][]string{
		"a block namespace comes back": {kv64, block},
		"a new block namespace":        {kv64, other},
		"a resize":                     {kv96},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			first, second := []string{kv64, block}, []string{kv64}
			if name == "a resize" {
				first = second
			}
			w.configure(drives, first)
			raw, n, _ := w.startRaw()
			w.configure(drives, second)
			if _, err := n.admin.Reload(t.Context()); err != nil {
				t.Fatal(err)
			}
			d := raw.drives()[1]
			dev := d.dev.(*fault.Device)
			dev.SetRules(fault.Rule{Ops: []ssd.Op{ssd.WriteZeroes}, Hold: true})
			stop, erased := make(chan struct{}), make(chan error, 1)
			go func() { erased <- raw.publisher.Erase(d.drive, 128<<20, 16<<20, nil, stop) }()
			if err := dev.AwaitHeld(t.Context(), 1); err != nil {
				t.Fatal(err)
			}
			close(stop)
			if err := <-erased; !errors.Is(err, target.ErrStopped) {
				t.Fatal(err)
			}
			w.configure(drives, second)
			if _, err := n.admin.Reload(t.Context()); err != nil {
				t.Errorf("a reload that gives nobody space: %v", err)
			}
			ended := make(chan error, 1)
			w.configure(drives, to)
			go func() {
				_, err := n.admin.Reload(t.Context())
				ended <- err
			}()
			select {
			case err := <-ended:
				t.Errorf("the reload ends while the drive has zeroes: %v", err)
				ended <- err
			case <-time.After(300 * time.Millisecond): // it takes 10 s before it is refused
			}
			dev.SetRules()
			dev.Release()
			if err := outcome(t, "the reload", ended); err != nil {
				t.Error(err)
			}
		})
	}
}
