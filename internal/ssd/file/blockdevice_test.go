package file

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"jbofd/internal/ssd"
	"jbofd/internal/ssd/ssdtest"
)

// loop returns a loop device over a new sparse file.
func loop(t *testing.T, blockSize int) string {
	t.Helper()
	f := filepath.Join(t.TempDir(), "backing")
	if err := os.WriteFile(f, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(f, 16<<20); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("losetup", "--find", "--show", "--sector-size", fmt.Sprint(blockSize), f).CombinedOutput()
	if err != nil {
		t.Skipf("this machine lacks loop devices or root: losetup: %v %s", err, out)
	}
	dev := strings.TrimSpace(string(out))
	t.Cleanup(func() {
		if out, err := exec.Command("losetup", "--detach", dev).CombinedOutput(); err != nil {
			t.Errorf("losetup --detach %s: %v %s", dev, err, out)
		}
	})
	return dev
}

func TestConformanceOnBlockDevices(t *testing.T) {
	forEachEngine(t, func(t *testing.T, engine string) {
		for _, bs := range []int{512, 4096} {
			t.Run(fmt.Sprint(bs), func(t *testing.T) {
				ssdtest.Conformance(t, func(t *testing.T) ssd.Device {
					d := open(t, Config{Path: loop(t, bs), Engine: engine, SizeBytes: 16 << 20})
					if i := d.Info(); i.BlockSize != bs || !i.VolatileCache {
						t.Errorf("%+v", i)
					}
					return d
				})
			})
		}
	})
}

func TestBlockDeviceInUseIsRefusedWithItsHolder(t *testing.T) {
	path := loop(t, 512)
	open(t, Config{Path: path, SizeBytes: 16 << 20})
	_, err := Open(Config{Path: path})
	if !errors.Is(err, ErrInUse) || !strings.Contains(err.Error(), fmt.Sprintf("process %d (", os.Getpid())) {
		t.Errorf("second Open: %v, want ErrInUse and our process number", err)
	}
	_, err = Open(Config{Path: loop(t, 512), SizeBytes: 1 << 20})
	if !errors.Is(err, ErrSize) {
		t.Errorf("wrong size: %v, want ErrSize", err)
	}
}

// TestABlockDeviceOfADeadProcessIsWaitedFor: after kill -9 it is held for as long as the kernel needs to take down the
// io_uring.
func TestABlockDeviceOfADeadProcessIsWaitedFor(t *testing.T) {
	path := loop(t, 4096)
	dead, err := unix.Open(path, unix.O_RDWR|unix.O_EXCL|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	time.AfterFunc(200*time.Millisecond, func() {
		if err := unix.Close(dead); err != nil {
			t.Error(err)
		}
	})
	open(t, Config{Path: path, SizeBytes: 16 << 20})
}

// TestABlockDeviceThatWasPulledIsGone: the kernel leaves it with a capacity of 0, and fails writes as if there were no
// space. Whoever asks first learns it.
func TestABlockDeviceThatWasPulledIsGone(t *testing.T) {
	request := func(op ssd.Op) func(*testing.T, *Device, ssd.Queue) error {
		return func(t *testing.T, _ *Device, q ssd.Queue) error {
			return ssdtest.Do(t, q, ssd.Request{Op: op, Offset: 4096, Len: 512, Buf: make([]byte, 512)})
		}
	}
	forEachEngine(t, func(t *testing.T, engine string) {
		for name, ask := range map[string]func(*testing.T, *Device, ssd.Queue) error{
			"read": request(ssd.Read), "write": request(ssd.Write),
			"is it healthy": func(_ *testing.T, d *Device, _ ssd.Queue) error { return d.Healthy() },
		} {
			path := loop(t, 512)
			d := open(t, Config{Path: path, Engine: engine, SizeBytes: 16 << 20})
			q := openQueue(t, d, 1)
			if err := d.Healthy(); err != nil {
				t.Fatal(err)
			}
			pull(t, path)
			if err := ask(t, d, q); !errors.Is(err, ssd.ErrGone) {
				t.Errorf("%s: %v", name, err)
			}
			if err := d.Healthy(); !errors.Is(err, ssd.ErrGone) {
				t.Errorf("after %s: %v", name, err)
			}
		}
	})
}

// pull gives a loop device a capacity of 0.
func pull(t *testing.T, path string) {
	t.Helper()
	backing, err := exec.Command("losetup", "--noheadings", "--output", "BACK-FILE", path).Output()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(strings.TrimSpace(string(backing)), 0); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("losetup", "--set-capacity", path).CombinedOutput(); err != nil {
		t.Fatalf("%v %s", err, out)
	}
}
