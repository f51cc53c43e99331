//go:build vm

package vm

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/internal/nvme"
)

// vfioModules are what gives a drive to a process: the driver, and the IOMMU of the machine. nvme is the kernel's own
// driver, which has the drives first.
var vfioModules = []string{"vfio_pci", "vfio_iommu_type1", "nvme"}

// emulatedDrives returns QEMU's arguments for a platform's IOMMU, a monitor at a socket, and NVMe drives of so many
// bytes, with options each. Drive i is device nvme<i>, at the address 0000:0<i + 1>:00.0.
func emulatedDrives(t *testing.T, p *Platform, monitor string, bytes int64, options ...string) []string {
	t.Helper()
	args := append([]string{"-monitor", "unix:" + monitor + ",server=on,wait=off"}, p.iommu...)
	for i, o := range options {
		args = append(args, driveArgs(i, emptyImage(t, bytes), o)...)
	}
	return args
}

// driveArgs are QEMU's arguments for NVMe drive i, with its image and options.
func driveArgs(i int, image, options string) []string {
	return []string{"-device", fmt.Sprintf("pcie-root-port,id=port%d,chassis=%[1]d,slot=%[1]d,bus=pcie.0", i),
		"-drive", fmt.Sprintf("if=none,format=raw,discard=unmap,id=drive%d,file=%s", i, image),
		"-device", fmt.Sprintf("nvme,id=nvme%d,serial=jbofd%[1]d,drive=drive%[1]d,bus=port%[1]d%s", i, options)}
}

// emptyImage makes a file of so many zeroes.
func emptyImage(t *testing.T, bytes int64) string {
	t.Helper()
	image := filepath.Join(t.TempDir(), "drive")
	if err := os.WriteFile(image, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(image, bytes); err != nil {
		t.Fatal(err)
	}
	return image
}

// nvmeGuest is a guest with NVMe drives that jbofd drives itself.
type nvmeGuest struct {
	*testing.T
	*Guest
	monitor string
	port    int
	bench   string
	// image is what the drive of ssd b is in, and pmr the file of the persistent memory of the drive of ssd a.
	image, pmr string
	// flushed is the last record that was flushed there.
	flushed *atomic.Int64
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

// tell gives commands to QEMU's monitor, and waits until they are carried out.
func (g *nvmeGuest) tell(commands ...string) {
	g.Helper()
	c, err := net.Dial("unix", g.monitor)
	if err != nil {
		g.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	r := bufio.NewReader(c)
	prompt := func() (said string) {
		for !strings.HasSuffix(said, "(qemu) ") {
			b, err := r.ReadByte()
			if err != nil {
				g.Fatalf("%v: %v: %q", commands, err, said)
			}
			said += string(b)
		}
		return said
	}
	prompt()
	for _, command := range commands {
		if _, err := c.Write([]byte(command + "\n")); err != nil {
			g.Fatal(err)
		}
		if said := prompt(); strings.Contains(said, "Error") {
			g.Fatalf("%s: %s", command, said)
		}
	}
}

// load starts a load from this machine against the daemon in the guest.
func (g *nvmeGuest) load(args ...string) *exec.Cmd {
	return exec.Command(g.bench, append([]string{"block", "--target", fmt.Sprintf("tcp://127.0.0.1:%d", g.port),
		"--nqn", "nqn.2026-11.example.jbofd:drives", "--json", "-q"}, args...)...)
}

// twoNVMeDrives begins the configuration of a guest that listens at a port, and has two drives that jbofd drives
// itself.
const twoNVMeDrives = `node: {name: vm, data_dir: /tmp/data}
metrics: {address: ""}
admin: {socket: /tmp/admin.sock}
discovery: {address: ""}
listeners: [{address: "10.0.2.15:%d"}]
ssds:
  - {name: a, backend: nvme, address: "0000:01:00.0"}
  - {name: b, backend: nvme, address: "0000:02:00.0"}
`

const nvmeConfig = twoNVMeDrives + `  - {name: c, backend: nvme, address: "0000:03:00.0"}
subsystems:
  - nqn: nqn.2026-11.example.jbofd:drives
    allow_any_host: true
    namespaces:
      - {nsid: 1, ssd: a, size: 32MiB}
      - {nsid: 2, ssd: b, size: 32MiB}
      - {nsid: 3, ssd: c, size: 8MiB}
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
	if err := goCommand(PC.goEnvironment(), "test", "-c", "-o", tests, "./internal/ssd/vfio"); err != nil {
		t.Fatal(err)
	}
	port, err := freePort()
	if err != nil {
		t.Fatal(err)
	}
	volatile, socket := newVolatile(t)
	g := &nvmeGuest{T: t, monitor: filepath.Join(dir, "monitor"), port: port, bench: filepath.Join(dir, "jbofbench"),
		flushed: new(atomic.Int64)}
	options := BootOptions{Modules: append(append([]string(nil), hostModules...), vfioModules...),
		Machine: ",kernel-irqchip=split", CommandLine: "intel_iommu=on no_timer_check", MemoryMiB: 1024,
		Forward: []int{port},
		Files: []File{{From: tests, To: "/usr/bin/vfio.test"}, {From: filepath.Join(dir, "jbofd"), To: guestJbofd},
			{From: filepath.Join(dir, "jbofctl"), To: "/usr/sbin/jbofctl"}}}
	g.pmr = emptyImage(t, pmrBytes)
	options.Devices = append(emulatedDrives(t, PC, g.monitor, 64<<20, withMemory,
		",logical_block_size=4096,physical_block_size=4096"), volatileArgs(2, socket)...)
	options.Devices = append(pmrArgs(g.pmr), options.Devices...)
	for _, o := range options.Devices {
		if _, image, ok := strings.Cut(o, "id=drive1,file="); ok {
			g.image = image
		}
	}
	g.Guest = bootWith(t, Boot, options)
	t.Run("taking drives from the kernel", func(t *testing.T) { g.in(t).bind() })
	if t.Failed() {
		return
	}
	t.Run("the promises of package ssd", func(t *testing.T) {
		out := g.in(t).run("JBOFD_TEST_NVME='0000:01:00.0 0000:02:00.0' vfio.test -test.v " +
			"-test.run 'DriveConforms|DriveIsQuiet|DriveMemoryConforms'")
		for line := range strings.Lines(out) {
			if strings.Contains(line, "interrupts of") {
				t.Log(strings.TrimSpace(line))
			}
		}
		if strings.Contains(out, "SKIP") {
			t.Error(out)
		}
	})
	t.Run("a drive that is too slow", func(t *testing.T) { g.in(t).slow() })
	t.Run("memory of a drive whose user is killed", func(t *testing.T) { g.in(t).memoryIsWritten() })
	t.Run("a daemon that is killed under load", func(t *testing.T) { g.in(t).killed() })
	t.Run("what a drive says of itself", func(t *testing.T) { g.in(t).health() })
	t.Run("a drive that is pulled under load and plugged in again", func(t *testing.T) { g.in(t).pulled() })
	for _, p := range g.TakeProblems() {
		t.Error(p)
	}
	if t.Failed() {
		return
	}
	t.Run("a power cut", func(t *testing.T) {
		g.in(t).powerCut(volatile, func() *nvmeGuest {
			options.Devices = append(emulatedDrives(t, PC, g.monitor, 0), volatileArgs(0, socket)...)
			options.Devices = append(options.Devices, pmrArgs(g.pmr)...)
			options.Devices = append(options.Devices, driveArgs(1, emptyImage(t, 4<<20), withMemory)...)
			next := g.in(t)
			next.Guest = bootWith(t, Boot, options)
			return next
		})
	})
}

// in returns the guest for a part of the test.
func (g *nvmeGuest) in(t *testing.T) *nvmeGuest {
	c := *g
	c.T = t
	return &c
}

// bind takes both drives from the kernel, but not while one is in use or holds something.
func (g *nvmeGuest) bind() {
	// The kernel's driver passes the question for the drive's health on.
	g.run(`jbofctl ssd smart-log /dev/nvme0n1 -o json | grep '"temperature": 323'`)
	g.run("mkfs.ext4 -q /dev/nvme0n1 && mount /dev/nvme0n1 /mnt")
	g.refused("jbofctl ssd bind 0000:01:00.0 --force", "in use")
	g.run("umount /mnt")
	g.refused("jbofctl ssd bind 0000:01:00.0", "only with --force")
	g.run("jbofctl ssd bind 0000:01:00.0 --force")
	g.run("jbofctl ssd unbind 0000:01:00.0")
	g.run("for i in 1 2 3 4 5 6 7 8 9 10; do test -b /dev/nvme0n1 && exit 0; sleep 0.5; done; exit 1")
	g.run("dd if=/dev/zero of=/dev/nvme0n1 bs=1M count=64 2>&1")
	g.run("jbofctl ssd bind 0000:01:00.0 && jbofctl ssd bind 01:00.0 && jbofctl ssd bind 0000:02:00.0 && " +
		"jbofctl ssd bind 0000:03:00.0")
	var list struct {
		Items []struct{ Address, Driver string }
	}
	err := json.Unmarshal([]byte(g.run("jbofctl ssd controllers -o json")), &list)
	if all := list.Items; err != nil || len(all) != 3 || all[0].Driver != "vfio-pci" || all[1].Driver != "vfio-pci" {
		g.Errorf("the controllers are %v, %v", all, err)
	}
}

// start starts the daemon, and waits until it is ready.
func (g *nvmeGuest) start() *Job {
	g.Helper()
	return g.startWith(fmt.Sprintf(nvmeConfig, g.port))
}

// startWith starts the daemon with a configuration, and waits until it is ready.
func (g *nvmeGuest) startWith(config string) *Job {
	g.Helper()
	if err := g.put("/tmp/jbofd.yaml", config); err != nil {
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
	g.run("for a in 1 2 3; do " +
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
	g.memoryIsThere("0000:01:00.0")
	g.start()
	if out, err := g.load("--nsid", "1", "--rw", "read", "--bs", "16k", "--iodepth", "8", "--size", "16m", "--verify",
		"crc32c", "--verify_only").CombinedOutput(); err != nil {
		g.Fatalf("%v\n%s\n%s", err, out, g.run("tail -50 /tmp/log"))
	}
}

// slow has a drive take longer for its commands than they may: they are aborted, the controller is reset, and each is
// answered.
func (g *nvmeGuest) slow() {
	// A breakpoint of QEMU's blkdebug is of no use here: the reset of the controller waits for the requests that it
	// holds, in QEMU itself. Those that wait for their turn under a limit are carried out then.
	throttle := func(iops int) { g.tell(fmt.Sprintf("block_set_io_throttle drive1 0 0 0 %d 0 0", iops)) }
	throttle(1)
	out := g.run("JBOFD_TEST_SLOW_NVME=0000:02:00.0 vfio.test -test.v -test.run SlowDrive")
	throttle(0)
	if strings.Contains(out, "SKIP") {
		g.Error(out)
	}
	for _, l := range strings.Split(out, "\n") {
		if strings.Contains(l, "answered") || strings.Contains(l, "reset") {
			g.Log(strings.TrimSpace(l))
		}
	}
}

// health has a drive warn: the daemon, its log and the SMART log of hosts have that soon.
func (g *nvmeGuest) health() {
	if said := g.run("jbofctl --socket /tmp/admin.sock ssd show a"); !strings.Contains(said, "2MiB, persistent\n") ||
		!strings.Contains(said, "1MiB, volatile\n") {
		g.Errorf("the drive's memory is not shown:\n%s", said)
	}
	const show = "jbofctl --socket /tmp/admin.sock ssd smart-log a -o json"
	var log struct {
		Warning     uint8  `json:"critical_warning"`
		Temperature uint16 `json:"temperature"`
	}
	if err := json.Unmarshal([]byte(g.run(show)), &log); err != nil || log.Warning != 0 || log.Temperature < 273 {
		g.Errorf("before it warns: %+v, %v", log, err)
	}
	g.tell("qom-set /machine/peripheral/nvme0 smart_critical_warning 4")
	g.run("for i in $(seq 50); do " + show + ` | grep -q '"critical_warning": 4' && exit 0; sleep 0.1; done; ` + show +
		"; exit 1")
	if said := g.run("cat /tmp/log"); !strings.Contains(said, "reliability is degraded") {
		g.Errorf("the daemon does not log that the drive warns:\n%s", said)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	c, _ := g.connect(ctx, 1)
	defer c.Close()
	var smart nvme.SMARTLog
	err := c.GetLogPage(ctx, client.LogPage{LID: nvme.LIDSMART}, smart[:])
	if err != nil || smart.CriticalWarning() != 4 || smart.Temperature() != log.Temperature {
		g.Errorf("the host's SMART log: warning %#x, %d K, %v", smart.CriticalWarning(), smart.Temperature(), err)
	}
}

// goneLine is what the daemon says of a drive that is gone.
var goneLine = regexp.MustCompile(`(?i)gone|removed`)

// pulled pulls a drive under load: its commands are answered, its namespace is withdrawn, and the other drive goes on.
// Then the drive is plugged in again, and is taken into service.
func (g *nvmeGuest) pulled() {
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	c, ns := g.connect(ctx, 2)
	defer c.Close()
	const kept = 24 << 20 // beyond what the load writes
	_, err := ns.WriteAt(ctx, blockOf(7, 7), kept, 0)
	if err = errors.Join(err, ns.Flush(ctx)); err != nil {
		g.Fatal(err)
	}
	load := g.load("--nsid", "2", "--rw", "randwrite", "--iodepth", "16", "--size", "16m", "--runtime", "60")
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
	g.sees(ctx, c, 2)
	// QEMU may still have the image locked for the drive that was pulled.
	g.tell("drive_add 0 if=none,format=raw,discard=unmap,id=again,file.locking=off,file="+g.image,
		"device_add nvme,id=again,serial=jbofd1,drive=again,bus=port1,logical_block_size=4096,physical_block_size=4096")
	g.run("for i in $(seq 100); do test -e /sys/bus/pci/devices/0000:02:00.0/driver && break; sleep 0.2; done; " +
		"jbofctl ssd bind 0000:02:00.0")
	g.sees(ctx, c, 3)
	got := make([]byte, volatileBlock)
	if _, err := ns.ReadAt(ctx, got, kept); err != nil || !bytes.Equal(got, blockOf(7, 7)) {
		g.Errorf("what was on the drive is not there: %v", err)
	}
	if out, err := g.load("--nsid", "2", "--rw", "randwrite", "--bs", "16k", "--iodepth", "8", "--size", "8m",
		"--verify", "crc32c").CombinedOutput(); err != nil {
		g.Errorf("after the drive is back: %v\n%s\n%s", err, out, g.run("tail -30 /tmp/log"))
	}
}

// sees waits until a host sees so many namespaces.
func (g *nvmeGuest) sees(ctx context.Context, c *client.Controller, namespaces int) {
	g.Helper()
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		ids, err := c.NamespaceIDs(ctx)
		if err == nil && len(ids) == namespaces {
			return
		}
		if time.Now().After(end) {
			g.Fatalf("a host sees %v, want %d, %v\n%s", ids, namespaces, err, g.run("tail -30 /tmp/log"))
		}
	}
}
