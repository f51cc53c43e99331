//go:build vm

package vm

import (
	"os"
	"path/filepath"
	"testing"
	"time"
)

// boot starts the guest of a test, with the modules given beside those of the NVMe/TCP host.
func boot(t *testing.T, commandLine string, modules ...string) *Guest {
	t.Helper()
	if err := CheckNeeds(); err != nil {
		t.Fatal(err)
	}
	return bootWith(t, Boot, BootOptions{Modules: append(append([]string(nil), hostModules...), modules...),
		CommandLine: commandLine, MemoryMiB: 1024})
}

// prepare returns the kernel of a platform.
func prepare(t *testing.T, p *Platform) *Kernel {
	t.Helper()
	begin := time.Now()
	k, err := PrepareKernel(CacheDir(), p)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("kernel %s ready in %v", k.Version, time.Since(begin).Round(time.Millisecond))
	return k
}

// bootWith boots a guest that lasts as long as the test, with the options given and those that all guests share.
// Without a kernel it is that of a PC.
func bootWith(t *testing.T, boot func(BootOptions) (*Guest, error), o BootOptions) *Guest {
	t.Helper()
	if o.Kernel == nil {
		o.Kernel = prepare(t, PC)
	}
	o.Dir, o.CPUs, o.Timeout = t.TempDir(), 2, 3*time.Minute
	g, err := boot(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(g.Close)
	t.Logf("guest up %v after QEMU's start", g.BootTime.Round(time.Millisecond))
	return g
}

// jbofdBinary is $JBOFD_VM_JBOFD, or a binary built from this tree with the invariants on.
func jbofdBinary(t *testing.T) string {
	t.Helper()
	if b := os.Getenv("JBOFD_VM_JBOFD"); b != "" {
		abs, err := filepath.Abs(b)
		if err != nil {
			t.Fatal(err)
		}
		return abs
	}
	b := filepath.Join(t.TempDir(), "jbofd")
	if err := goBuild(b, "./cmd/jbofd", "-tags", "invariants"); err != nil {
		t.Fatal(err)
	}
	return b
}

// TestLinuxHost runs every scenario of a Linux host against jbofd, in one boot.
func TestLinuxHost(t *testing.T) {
	jbofd := jbofdBinary(t)
	g := boot(t, "")
	var list []scenario
	for _, group := range [][]scenario{discoveryScenarios, adminScenarios, dataScenarios, kvScenarios, liveScenarios,
		failureScenarios} {
		list = append(list, group...)
	}
	runScenarios(t, g, onThisMachine(jbofd), list)
}

// kernelTarget makes the guest's own kernel serve a block device at an address of the guest.
const kernelTarget = `set -e
cd /sys/kernel/config/nvmet
mkdir subsystems/$NQN
echo 1 > subsystems/$NQN/attr_allow_any_host
mkdir subsystems/$NQN/namespaces/1
echo $DEVICE > subsystems/$NQN/namespaces/1/device_path
echo 1 > subsystems/$NQN/namespaces/1/enable
mkdir ports/1
echo $TRANSPORT > ports/1/addr_trtype
echo ipv4 > ports/1/addr_adrfam
echo $ADDRESS > ports/1/addr_traddr
echo $PORT > ports/1/addr_trsvcid
ln -s /sys/kernel/config/nvmet/subsystems/$NQN ports/1/subsystems/$NQN`

const kernelNQN = "nqn.2026-11.example.jbofd:kernel"

// serveKernelTarget starts the kernel's own target on a device.
func (h *host) serveKernelTarget(a address, device string) {
	h.Helper()
	h.run("NQN=%s DEVICE=%s TRANSPORT=%s ADDRESS=%s PORT=%d\n%s", kernelNQN, device, a.transport, a.host, a.port,
		kernelTarget)
}

// useKernelTarget does with the kernel's target what the other scenarios do with jbofd.
func (h *host) useKernelTarget(a address) {
	h.Helper()
	h.matches("nvme discover "+a.flags(), "subnqn:  "+kernelNQN)
	h.connect(a, kernelNQN, a.digests())
	dev := h.device(kernelNQN, 1)
	h.fio(dev, []fioJob{{"randrw", "512", "128k"}, {"randrw", "4k", "1m"}, {"randwrite", "1m", "8m"}})
	h.ext4(dev)
	h.disconnect(kernelNQN)
}

// TestKernelTarget runs what the scenarios do with data against the kernel's own target, without jbofd: when this fails
// too, the harness or the machine is to blame.
func TestKernelTarget(t *testing.T) {
	// Host and target in one kernel: the target receives from the very pages that the host sent, some of them in blocks
	// of pages that are not compound, which hardened usercopy takes for an overrun.
	g := boot(t, "hardened_usercopy=off", targetModules...)
	a := address{"tcp", "127.0.0.1", 4420}
	runScenarios(t, g, onThisMachine(""), []scenario{{"data and file system", func(h *host) {
		h.run("truncate -s 64M /tmp/disk.img; losetup /dev/loop0 /tmp/disk.img")
		h.serveKernelTarget(a, "/dev/loop0")
		h.useKernelTarget(a)
	}}})
}
