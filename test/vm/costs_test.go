//go:build vm && costs

package vm

import (
	"path/filepath"
	"testing"
	"time"
)

// TestCostsOfBackends prints what I/O costs by the kernel's NVMe driver and by jbofd's own, in one guest. It is run by
// hand: see docs/benchmarks.md.
func TestCostsOfBackends(t *testing.T) {
	if err := CheckNeeds(); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	tests := filepath.Join(dir, "vfio.test")
	err := goCommand(PC.goEnvironment(), "test", "-tags", "costs", "-c", "-o", tests, "./internal/ssd/vfio")
	if err != nil {
		t.Fatal(err)
	}
	options := BootOptions{Modules: append(append([]string(nil), hostModules...), vfioModules...),
		Machine: ",kernel-irqchip=split", CommandLine: "intel_iommu=on no_timer_check", MemoryMiB: 1024,
		Files: []File{{From: tests, To: "/usr/bin/vfio.test"}}}
	options.Devices = emulatedDrives(t, PC, filepath.Join(dir, "monitor"), 64<<20, "", "")
	g := bootWith(t, Boot, options)
	r, err := g.Do(4*time.Minute, "dd if=/dev/zero of=/dev/nvme0n1 bs=1M count=64 2>&1; "+
		"JBOFD_TEST_COSTS='/dev/nvme1n1 0000:01:00.0' vfio.test -test.v -test.run CostsOfBackends")
	t.Logf("%v\n%s\n%s", err, r.Stdout, r.Stderr)
	if err != nil || r.Code != 0 {
		t.Fail()
	}
}
