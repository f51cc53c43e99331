//go:build vm

package vm

import (
	"errors"
	"fmt"
	"io/fs"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// armTests are the packages whose tests run on arm64, and which of them: those with structures of the kernel, of
// devices or of disks, with atomics, alignment, checksums or clocks.
var armTests = []struct{ pkg, run string }{
	{"internal/uring", "."},
	{"internal/eventfd", "."},
	{"internal/turn", "."},
	{"internal/fence", "."},
	{"internal/bufpool", "Aligned|Arena|Concurrent|AllocateNothing|PutAll"},
	{"internal/nvme", "Golden|Layout|Sizes|Agree|ReadsBack|Uint128"},
	{"internal/nvmeof/tcp/pdu", "."},
	{"internal/kvstore/format", "Golden|ReadAsWritten|InPieces|40Bits"},
	{"internal/ssd/label", "Golden|Decode|ToldApart"},
	{"internal/ssd/file", "."},
	{"internal/ssd/mem", "."},
	{"internal/ssd/vfio/pcie", "."},
	{"internal/ssd/vfio/pci", "."},
	{"internal/ssd/vfio", "DriveConforms|DriveIsQuiet|DriveMemoryConforms|AllocatesNothing"},
	{"internal/cluster/member", "TheClock"},
	{"client/internal/window", "."},
}

// armConfig is that of a node of two drives that jbofd drives itself, and one that the kernel does.
const armConfig = twoNVMeDrives + `  - {name: c, backend: file, path: /dev/nvme2n1}
subsystems:
  - nqn: nqn.2026-11.example.jbofd:drives
    allow_any_host: true
    namespaces:
      - {nsid: 1, ssd: a, size: 32MiB}
      - {nsid: 2, ssd: b, size: 64MiB, type: kv}
      - {nsid: 3, ssd: c, size: 32MiB}
`

// armPrograms builds the programs of an arm64 guest, and the tests of armTests with their data.
func armPrograms(t *testing.T) (files []File) {
	t.Helper()
	dir := t.TempDir()
	for _, name := range []string{"jbofd", "jbofctl"} {
		to := filepath.Join(dir, name)
		if err := ARM.build(to, "./cmd/"+name, "-ldflags", "-s -w"); err != nil {
			t.Fatal(err)
		}
		files = append(files, File{From: to, To: "/usr/sbin/" + name})
	}
	args := []string{"test", "-c", "-vet=off", "-ldflags", "-s -w", "-o", dir + "/"}
	for _, a := range armTests {
		args = append(args, "./"+a.pkg)
		name := path.Base(a.pkg) + ".test"
		files = append(files, File{From: filepath.Join(dir, name), To: path.Join("/tests", a.pkg, name)})
		from := filepath.Join(sourceDir(), "../..", a.pkg)
		err := filepath.WalkDir(filepath.Join(from, "testdata"), func(file string, e fs.DirEntry, err error) error {
			if err == nil && !e.IsDir() {
				files = append(files, File{From: file, To: path.Join("/tests", a.pkg, strings.TrimPrefix(file, from))})
			}
			return err
		})
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(err)
		}
	}
	if err := goCommand(ARM.goEnvironment(), args...); err != nil {
		t.Fatal(err)
	}
	return append(files, File{From: filepath.Join(sourceDir(), "../../deploy/jbof/interrupts.sh"),
		To: "/usr/lib/jbofd/interrupts.sh"})
}

// armGuest boots a machine like a JBOF's: arm64, an IOMMU, three NVMe drives, and a disk for files at /files, whose
// file system has direct I/O.
func armGuest(t *testing.T) *nvmeGuest {
	t.Helper()
	dir := t.TempDir()
	bench := filepath.Join(dir, "jbofbench")
	if err := goBuild(bench, "./cmd/jbofbench"); err != nil {
		t.Fatal(err)
	}
	files := emptyImage(t, 512<<20)
	if _, err := command(dir, "mkfs.ext4", "-q", files); err != nil {
		t.Fatal(err)
	}
	port, err := freePort()
	if err != nil {
		t.Fatal(err)
	}
	g := &nvmeGuest{T: t, monitor: filepath.Join(dir, "monitor"), port: port, bench: bench}
	o := BootOptions{Kernel: prepare(t, ARM), Modules: armModules, MemoryMiB: 1280, Forward: []int{port},
		Devices: append(pmrArgs(emptyImage(t, pmrBytes)), emulatedDrives(t, ARM, g.monitor, 96<<20, withMemory,
			",logical_block_size=4096,physical_block_size=4096", "")...)}
	o.Devices = append(o.Devices, "-drive", "if=none,format=raw,id=files,file="+files, "-device",
		"virtio-blk-pci,drive=files")
	begin := time.Now()
	o.Files = armPrograms(t)
	t.Logf("programs built in %v", time.Since(begin).Round(time.Millisecond))
	g.Guest = bootWith(t, Boot, o)
	g.run("mkdir /files && mount -t ext4 /dev/vda /files")
	if machine := strings.TrimSpace(g.run("uname -m")); machine != "aarch64" {
		t.Fatalf("the machine is %s", machine)
	}
	return g
}

// TestARM64 runs jbofd on arm64, on a machine like a JBOF's. The emulator orders memory as this machine does, so what a
// missing barrier does is not seen here.
func TestARM64(t *testing.T) {
	if err := CheckNeeds(); err != nil {
		t.Fatal(err)
	}
	g := armGuest(t)
	g.run("jbofctl ssd bind 0000:01:00.0 && jbofctl ssd bind 0000:02:00.0")
	for _, a := range armTests {
		t.Run(a.pkg, func(t *testing.T) { g.in(t).tests(a.pkg, a.run) })
	}
	t.Run("a node", func(t *testing.T) { g.in(t).armNode() })
	for _, p := range g.TakeProblems() {
		t.Error(p)
	}
}

// tests runs tests of a package in the guest. Both drives are theirs.
func (g *nvmeGuest) tests(pkg, run string) {
	out := g.run("export TMPDIR=/files JBOFD_TEST_NVME='0000:01:00.0 0000:02:00.0'; cd /tests/%s && "+
		"./%s.test -test.short -test.v -test.run '%s'", pkg, path.Base(pkg), run)
	// Some tests of files need loop devices by name, or a file system in user space.
	if !strings.Contains(out, "--- PASS") || pkg != "internal/ssd/file" && strings.Contains(out, "--- SKIP") {
		g.Errorf("no test was run, or not all were\n%s", out)
	}
}

// armNode has hosts on this machine use a node in the guest, which is killed and comes back with what it acknowledged.
func (g *nvmeGuest) armNode() {
	g.run("for d in 0000:01:00.0 0000:02:00.0 /dev/nvme2n1; do jbofctl ssd format $d --force --yes; done")
	config := fmt.Sprintf(armConfig, g.port)
	job := g.startWith(config)
	log := g.run("cat /tmp/log")
	if strings.Contains(log, "slower") || strings.Count(log, "drive opened") != 3 ||
		!strings.Contains(log, "io_uring") {
		g.Errorf("the drives are not opened as they can be:\n%s", log)
	}
	// Each drive has a processor for its interrupts.
	g.run("/usr/lib/jbofd/interrupts.sh")
	of := func(drive int) string {
		return strings.TrimSpace(g.run("for i in $(sed -n 's/^ *\\([0-9]*\\):.*vfio-msix.*(0000:0%d:.*/\\1/p' "+
			"/proc/interrupts); do cat /proc/irq/$i/smp_affinity_list; done | sort -u", drive+1))
	}
	if first, second := of(0), of(1); first+second != "01" && first+second != "10" {
		g.Errorf("processors %q have the interrupts of a drive, and %q those of the other one", first, second)
	}
	state := filepath.Join(g.TempDir(), "state")
	keys := func(what string) *exec.Cmd {
		return exec.Command(g.bench, "kv", what, "-P", filepath.Join(sourceDir(), "../../configs/ycsb/workloada"),
			"-p", "recordcount=1000", "-p", "operationcount=3000", "-p", "fieldcount=1", "-p", "fieldlength=1500",
			"--target", fmt.Sprintf("tcp://127.0.0.1:%d", g.port), "--nqn", "nqn.2026-11.example.jbofd:drives",
			"--nsid", "2", "--depth", "16", "--state", state, "-G", "-q")
	}
	blocks := func(nsid string, more ...string) *exec.Cmd {
		return g.load(append([]string{"--nsid", nsid, "--bs", "16k", "--iodepth", "8", "--size", "4m", "--verify",
			"crc32c", "-G", "-g"}, more...)...)
	}
	do := func(what *exec.Cmd) {
		g.Helper()
		begin := time.Now()
		if out, err := what.CombinedOutput(); err != nil {
			g.Fatalf("%v: %v\n%s\n%s", what.Args, err, out, g.run("tail -50 /tmp/log"))
		}
		g.Logf("%v in %v", what.Args[1:3], time.Since(begin).Round(time.Millisecond))
	}
	do(blocks("1", "--rw", "randwrite"))
	do(blocks("3", "--rw", "randwrite"))
	do(keys("load"))
	do(keys("run"))
	g.run("killall -9 jbofd")
	if _, err := job.Wait(); err != nil {
		g.Fatal(err)
	}
	job = g.startWith(config)
	do(blocks("1", "--rw", "read", "--verify_only"))
	do(blocks("3", "--rw", "read", "--verify_only"))
	do(keys("verify"))
	g.run("killall jbofd")
	if r, err := job.Wait(); err != nil || r.Code != 0 {
		g.Errorf("the daemon ends with %v, %v\n%s", r, err, g.run("tail -50 /tmp/log"))
	}
}
