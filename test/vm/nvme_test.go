//go:build vm

package vm

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

// vfioModules are what gives a drive to a process: the driver, and the IOMMU of the machine. nvme is the kernel's own
// driver, which has the drives first.
var vfioModules = []string{"vfio_pci", "vfio_iommu_type1", "nvme"}

// emulatedDrives returns QEMU's arguments for an IOMMU, a monitor at a socket, and NVMe drives of so many bytes, with
// options each. Drive i is device nvme<i>, at the address 0000:0<i + 1>:00.0.
func emulatedDrives(t *testing.T, monitor string, bytes int64, options ...string) []string {
	t.Helper()
	args := []string{"-monitor", "unix:" + monitor + ",server=on,wait=off",
		"-device", "intel-iommu,intremap=on,caching-mode=on"}
	for i, o := range options {
		image := filepath.Join(t.TempDir(), "drive")
		if err := os.WriteFile(image, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Truncate(image, bytes); err != nil {
			t.Fatal(err)
		}
		args = append(args, "-device", fmt.Sprintf("pcie-root-port,id=port%d,chassis=%[1]d,slot=%[1]d,bus=pcie.0", i),
			"-drive", fmt.Sprintf("if=none,format=raw,discard=unmap,id=drive%d,file=%s", i, image),
			"-device", fmt.Sprintf("nvme,id=nvme%d,serial=jbofd%[1]d,drive=drive%[1]d,bus=port%[1]d%s", i, o))
	}
	return args
}

// nvmeGuest is a guest with NVMe drives that jbofd drives itself.
type nvmeGuest struct {
	*testing.T
	*Guest
	monitor string
	port    int
	bench   string
}

// run runs a shell command in the guest, and returns its output. It must succeed.
func (g *nvmeGuest) run(format string, args ...any) string {
	g.Helper()
	r, err := g.Do(3*time.Minute, fmt.Sprintf(format, args...))
	if err == nil && r.Code != 0 {
		err = fmt.Errorf("exit status %d", r.Code)
	}
	if err != nil {
		g.Fatalf("%v\n%s", err, r)
	}
	return r.Stdout
}

// refused runs a command that must be refused for a reason.
func (g *nvmeGuest) refused(command, why string) {
	g.Helper()
	r, err := g.Do(time.Minute, command)
	if err != nil || r.Code != 1 || !strings.Contains(r.Stderr, why) {
		g.Fatalf("%v, want exit status 1 and %q\n%s", err, why, r)
	}
}

// tell gives a command to QEMU's monitor.
func (g *nvmeGuest) tell(command string) {
	g.Helper()
	c, err := net.Dial("unix", g.monitor)
	if err == nil {
		_, err = c.Write([]byte(command + "\n"))
	}
	if err != nil {
		g.Fatal(err)
	}
	g.Cleanup(func() { _ = c.Close() })
}

// load starts a load from this machine against the daemon in the guest.
func (g *nvmeGuest) load(args ...string) *exec.Cmd {
	return exec.Command(g.bench, append([]string{"block", "--target", fmt.Sprintf("tcp://127.0.0.1:%d", g.port),
		"--nqn", "nqn.2026-11.example.jbofd:drives", "--json", "-q"}, args...)...)
}

const nvmeConfig = `node: {name: vm, data_dir: /tmp/data}
metrics: {address: ""}
admin: {socket: /tmp/admin.sock}
discovery: {address: ""}
listeners: [{address: "10.0.2.15:%d"}]
ssds:
  - {name: a, backend: nvme, address: "0000:01:00.0"}
  - {name: b, backend: nvme, address: "0000:02:00.0"}
subsystems:
  - nqn: nqn.2026-11.example.jbofd:drives
    allow_any_host: true
    namespaces:
      - {nsid: 1, ssd: a, size: 32MiB}
      - {nsid: 2, ssd: b, size: 32MiB}
`

// TestNVMe has jbofd drive the guest's NVMe drives, without the kernel's driver.
func TestNVMe(t *testing.T) {
	if err := CheckNeeds(); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	programs := map[string]string{"jbofd": "./cmd/jbofd", "jbofctl": "./cmd/jbofctl", "jbofbench": "./cmd/jbofbench"}
	for name, from := range programs {
		if err := goBuild(filepath.Join(dir, name), from, "-tags", "invariants"); err != nil {
			t.Fatal(err)
		}
	}
	tests := filepath.Join(dir, "vfio.test")
	if err := goCommand("CGO_ENABLED=0", "test", "-c", "-o", tests, "./internal/ssd/vfio"); err != nil {
		t.Fatal(err)
	}
	port, err := freePort()
	if err != nil {
		t.Fatal(err)
	}
	g := &nvmeGuest{T: t, monitor: filepath.Join(dir, "monitor"), port: port, bench: filepath.Join(dir, "jbofbench")}
	g.Guest = bootWith(t, Boot, BootOptions{Modules: append(append([]string(nil), hostModules...), vfioModules...),
		Machine: ",kernel-irqchip=split", CommandLine: "intel_iommu=on", MemoryMiB: 1024, Forward: []int{port},
		Files: []File{{From: tests, To: "/usr/bin/vfio.test"}, {From: filepath.Join(dir, "jbofd"), To: guestJbofd},
			{From: filepath.Join(dir, "jbofctl"), To: "/usr/sbin/jbofctl"}},
		Devices: emulatedDrives(t, g.monitor, 64<<20, "", ",logical_block_size=4096,physical_block_size=4096")})
	t.Run("taking drives from the kernel", func(t *testing.T) { g.in(t).bind() })
	if t.Failed() {
		return
	}
	t.Run("the promises of package ssd", func(t *testing.T) {
		out := g.in(t).run("JBOFD_TEST_NVME='0000:01:00.0 0000:02:00.0' vfio.test -test.v -test.run Drive")
		if strings.Contains(out, "SKIP") {
			t.Error(out)
		}
	})
	t.Run("a daemon that is killed under load", func(t *testing.T) { g.in(t).killed() })
	t.Run("a drive that is pulled under load", func(t *testing.T) { g.in(t).pulled() })
	for _, p := range g.TakeProblems() {
		t.Error(p)
	}
}

// in returns the guest for a part of the test.
func (g *nvmeGuest) in(t *testing.T) *nvmeGuest {
	c := *g
	c.T = t
	return &c
}

// bind takes both drives from the kernel, but not while one is in use or holds something.
func (g *nvmeGuest) bind() {
	g.run("mkfs.ext4 -q /dev/nvme0n1 && mount /dev/nvme0n1 /mnt")
	g.refused("jbofctl ssd bind 0000:01:00.0 --force", "in use")
	g.run("umount /mnt")
	g.refused("jbofctl ssd bind 0000:01:00.0", "only with --force")
	g.run("jbofctl ssd bind 0000:01:00.0 --force")
	g.run("jbofctl ssd unbind 0000:01:00.0")
	g.run("for i in 1 2 3 4 5 6 7 8 9 10; do test -b /dev/nvme0n1 && exit 0; sleep 0.5; done; exit 1")
	g.run("dd if=/dev/zero of=/dev/nvme0n1 bs=1M count=64 2>&1")
	g.run("jbofctl ssd bind 0000:01:00.0 && jbofctl ssd bind 01:00.0 && jbofctl ssd bind 0000:02:00.0")
	var all []struct{ Address, Driver string }
	if err := json.Unmarshal([]byte(g.run("jbofctl ssd controllers -o json")), &all); err != nil || len(all) != 2 ||
		all[0].Driver != "vfio-pci" || all[1].Driver != "vfio-pci" {
		g.Errorf("the controllers are %v, %v", all, err)
	}
}

// start starts the daemon, and waits until it is ready.
func (g *nvmeGuest) start() *Job {
	g.Helper()
	if err := g.put("/tmp/jbofd.yaml", fmt.Sprintf(nvmeConfig, g.port)); err != nil {
		g.Fatal(err)
	}
	job, err := g.Start(10*time.Minute, "mkdir -p /tmp/data; exec jbofd --config /tmp/jbofd.yaml >>/tmp/log 2>&1")
	if err != nil {
		g.Fatal(err)
	}
	g.run("for i in $(seq 100); do jbofctl --socket /tmp/admin.sock status --check >/dev/null 2>&1 && exit 0; " +
		"sleep 0.2; done; cat /tmp/log; exit 1")
	return job
}

// killed kills the daemon under load, and starts it again: what it has acknowledged is there.
func (g *nvmeGuest) killed() {
	g.run("for a in 1 2; do " +
		"jbofctl ssd format 0000:0$a:00.0 --force --yes; done")
	job := g.start()
	if out, err := g.load("--nsid", "1", "--rw", "randwrite", "--bs", "16k", "--iodepth", "8", "--size", "16m",
		"--verify", "crc32c").CombinedOutput(); err != nil {
		g.Fatalf("%v\n%s\n%s", err, out, g.run("tail -50 /tmp/log"))
	}
	load := g.load("--nsid", "2", "--rw", "randwrite", "--iodepth", "16", "--runtime", "120")
	if err := load.Start(); err != nil {
		g.Fatal(err)
	}
	g.run("for i in $(seq 50); do jbofctl --socket /tmp/admin.sock connection list -o json | grep -q cntlid && " +
		"break; sleep 0.1; done; sleep 1; killall -9 jbofd")
	if _, err := job.Wait(); err != nil {
		g.Fatal(err)
	}
	_ = load.Process.Kill()
	_ = load.Wait()
	g.start()
	if out, err := g.load("--nsid", "1", "--rw", "read", "--bs", "16k", "--iodepth", "8", "--size", "16m", "--verify",
		"crc32c", "--verify_only").CombinedOutput(); err != nil {
		g.Fatalf("%v\n%s\n%s", err, out, g.run("tail -50 /tmp/log"))
	}
}

// goneLine is what the daemon says of a drive that is gone.
var goneLine = regexp.MustCompile(`(?i)gone|removed`)

// pulled pulls a drive under load: its commands are answered, and the other drive goes on.
func (g *nvmeGuest) pulled() {
	load := g.load("--nsid", "2", "--rw", "randwrite", "--iodepth", "16", "--runtime", "60")
	if err := load.Start(); err != nil {
		g.Fatal(err)
	}
	g.run("sleep 2")
	g.tell("device_del nvme1")
	done := make(chan error, 1)
	go func() { done <- load.Wait() }()
	select {
	case err := <-done:
		if err == nil {
			g.Error("the load has not noticed that its drive is gone")
		}
	case <-time.After(50 * time.Second):
		_ = load.Process.Kill()
		g.Errorf("the load is not answered\n%s", g.run("tail -30 /tmp/log"))
	}
	if log := g.run("cat /tmp/log"); !goneLine.MatchString(log) {
		g.Errorf("the daemon does not say that a drive is gone:\n%s", log)
	}
	g.run("for i in $(seq 50); do test -e /sys/bus/pci/devices/0000:02:00.0 || exit 0; sleep 0.2; done; " +
		"tail -30 /tmp/log; exit 1")
	out, err := g.load("--nsid", "1", "--rw", "randread", "--iodepth", "8", "--runtime", "1").CombinedOutput()
	if err != nil {
		g.Errorf("the other drive: %v\n%s", err, out)
	}
}
