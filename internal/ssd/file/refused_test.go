package file

import (
	"errors"
	"os"
	"os/exec"
	"testing"

	"jbofd/internal/ssd"
	"jbofd/internal/ssd/ssdtest"
	"jbofd/internal/uring"
)

// TestRefusedIOURingFallsBackToThreads runs itself in a process whose seccomp
// filter answers EPERM to io_uring_setup, as container profiles do.
func TestRefusedIOURingFallsBackToThreads(t *testing.T) {
	const env = "JBOFD_TEST_REFUSE_IO_URING"
	if os.Getenv(env) == "" {
		cmd := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v")
		cmd.Env = append(os.Environ(), env+"=1")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		return
	}
	if err := refuseIOURing(); err != nil {
		t.Skipf("this machine lets us set no seccomp filter: %v", err)
	}
	if _, err := uring.New(1); !errors.Is(err, uring.ErrUnavailable) {
		t.Fatalf("uring.New: %v, want ErrUnavailable", err)
	}
	if _, err := Open(Config{Path: t.TempDir() + "/f", Create: true, SizeBytes: 1 << 20,
		Engine: EngineURing}); !errors.Is(err, uring.ErrUnavailable) {
		t.Errorf("Engine io_uring: %v, want ErrUnavailable", err)
	}
	ssdtest.Conformance(t, func(t *testing.T) ssd.Device {
		d := open(t, Config{})
		if d.Info().Engine != EngineThreads || !errors.Is(d.Fallback(), uring.ErrUnavailable) {
			t.Errorf("engine %q because of %v", d.Info().Engine, d.Fallback())
		}
		return d
	})
}
