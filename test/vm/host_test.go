//go:build vm

package vm

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"
)

// poll is the interval at which conditions are checked.
const poll = 50 * time.Millisecond

// host is the guest as one scenario sees it, with the daemons that the scenario started.
type host struct {
	*testing.T
	guest   *Guest
	where   place
	daemons []*Daemon
	console int // mark of the scenario's begin
	// disturbs is set by a scenario in which I/O may time out at the host.
	disturbs bool
	// hostile is set by a scenario that violates the protocol on purpose.
	hostile bool
}

// place is where the daemons of a group of scenarios run, and how the host reaches them.
type place struct {
	site site
	// cut and mend are shell scripts for the guest that part the host from the daemon, silently, and join them again.
	// Both may be run twice.
	cut, mend string
	// rdma is set in a guest with soft RoCE. Its objects are counted. Scenarios do less there, because a command takes
	// about ten times longer.
	rdma bool
}

// onThisMachine places the daemon on this machine; the guest reaches it over QEMU's user network.
func onThisMachine(jbofd string) place {
	return place{site: localSite{jbofd}, cut: "ip link set eth0 down", mend: "ip link set eth0 up"}
}

// scenario is one subtest.
type scenario struct {
	name string
	run  func(h *host)
}

// runScenarios runs each scenario with a freshly connected host and checks that it leaves nothing behind.
func runScenarios(t *testing.T, g *Guest, at place, list []scenario) {
	for _, s := range list {
		t.Run(s.name, func(t *testing.T) {
			if err := g.reason(); err != nil {
				t.Fatalf("the guest is gone: %v", err)
			}
			h := &host{T: t, guest: g, where: at, console: g.Mark()}
			defer h.leave()
			s.run(h)
		})
	}
}

// leave disconnects the host, checks that no daemon holds resources of it, and stops the daemons.
func (h *host) leave() {
	for _, d := range h.daemons {
		if d.Running() {
			d.Thaw() // no effect on a daemon that is not frozen
		}
	}
	if r, err := h.guest.Do(60*time.Second, "umount /mnt 2>/dev/null\n"+h.where.mend+
		"\nnvme disconnect-all"); err != nil || r.Code != 0 {
		h.Errorf("disconnecting: %v\n%v", err, r)
	}
	for _, d := range h.daemons {
		if d.killed {
			continue // killed by a scenario that failed before it restarted the daemon
		}
		if !d.Running() {
			h.Errorf("jbofd ended by itself: %v", d.proc.outcome())
			continue
		}
		h.eventually(20*time.Second, "no connection and no buffer in use is left in the daemon", func() error {
			return nothingHeld(d)
		})
		if n := h.metrics(d).Sum("jbof_protocol_errors_total"); n != 0 && !h.hostile {
			h.Errorf("jbofd counts %v protocol errors of a kernel that makes none", n)
		}
	}
	h.eventually(20*time.Second, "no queue pair and no CM identifier of a connection is left", func() error {
		n := h.objects()
		if n.QPs != 0 || n.Connections != 0 {
			return fmt.Errorf("%+v", n)
		}
		return nil
	})
	for _, d := range h.daemons {
		if !d.Running() {
			continue
		}
		took, err := d.Stop()
		if err != nil {
			h.Errorf("stopping jbofd: %v", err)
		}
		if took > 5*time.Second {
			h.Errorf("jbofd took %v to stop, allowed are 5 s", took)
		}
	}
	if h.where.rdma && !h.disturbs {
		h.noTimeouts()
	}
	for _, p := range h.guest.TakeProblems() {
		h.Errorf("the guest's kernel says: %s", p)
	}
	if h.Failed() {
		for _, d := range h.daemons {
			h.Logf("jbofd's log (last lines):\n%s", tail(d.Log(), 120))
		}
		h.Logf("the guest's console:\n%s", h.guest.ConsoleSince(h.console))
	}
	h.keep()
}

// Soft RoCE of Linux 6.1 occasionally loses a connection: when it retransmits a request, it registers memory again that
// is registered already, which fails. The following requests hang until the host's I/O timeout, and then the host
// reconnects. The only effect is the lost time.
var (
	timedOut  = regexp.MustCompile(`nvme\d+: I/O \d+ .*QID \d+.* timeout`)
	rxesFault = regexp.MustCompile(`rxe_reg_fast_mr: .* not free`)
)

// noTimeouts checks that every command of the host was answered, unless soft RoCE is the cause.
func (h *host) noTimeouts() {
	h.Helper()
	console := h.guest.ConsoleSince(h.console)
	if l := timedOut.FindString(console); l != "" {
		if !rxesFault.MatchString(console) {
			h.Errorf("the host waited in vain for an answer: %s", l)
		} else {
			h.Logf("soft RoCE lost a connection: %s", l)
		}
	}
}

// keep leaves the logs in $JBOFD_VM_KEEP.
func (h *host) keep() {
	dir := os.Getenv("JBOFD_VM_KEEP")
	if dir == "" {
		return
	}
	name := strings.ReplaceAll(h.Name(), "/", "-")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		h.Errorf("JBOFD_VM_KEEP: %v", err)
		return
	}
	files := map[string]string{name + ".console": h.guest.ConsoleSince(h.console)}
	for i, d := range h.daemons {
		files[fmt.Sprintf("%s.jbofd%d.log", name, i)] = d.Log()
	}
	for f, text := range files {
		if err := os.WriteFile(filepath.Join(dir, f), []byte(text+"\n"), 0o644); err != nil {
			h.Errorf("JBOFD_VM_KEEP: %v", err)
		}
	}
}

func tail(s string, n int) string {
	lines := strings.Split(s, "\n")
	if len(lines) > n {
		lines = append([]string{fmt.Sprintf("… %d lines before …", len(lines)-n)}, lines[len(lines)-n:]...)
	}
	return strings.Join(lines, "\n")
}

// eventually waits until check returns nil.
func (h *host) eventually(timeout time.Duration, what string, check func() error) bool {
	h.Helper()
	deadline := time.Now().Add(timeout)
	for {
		err := check()
		if err == nil {
			return true
		}
		if time.Now().After(deadline) {
			h.Errorf("not within %v: %s: %v", timeout, what, err)
			return false
		}
		time.Sleep(poll)
	}
}

// must is eventually for a condition without which the scenario cannot continue.
func (h *host) must(timeout time.Duration, what string, check func() error) {
	h.Helper()
	if !h.eventually(timeout, what, check) {
		h.FailNow()
	}
}

// try runs a command in the guest; it may fail.
func (h *host) try(timeout time.Duration, format string, args ...any) Result {
	h.Helper()
	r, err := h.guest.Do(timeout, fmt.Sprintf(format, args...))
	if err != nil {
		h.Fatal(err)
	}
	return r
}

// run runs a command in the guest that must succeed within half a minute.
func (h *host) run(format string, args ...any) string {
	h.Helper()
	return h.runFor(30*time.Second, format, args...)
}

// runFor is run with another limit.
func (h *host) runFor(timeout time.Duration, format string, args ...any) string {
	h.Helper()
	r := h.try(timeout, format, args...)
	if r.Code != 0 {
		h.Fatal(r)
	}
	return r.Stdout
}

// start runs a command in the guest in the background.
func (h *host) start(timeout time.Duration, format string, args ...any) *Job {
	h.Helper()
	j, err := h.guest.Start(timeout, fmt.Sprintf(format, args...))
	if err != nil {
		h.Fatal(err)
	}
	return j
}

// finish waits for a command of start, which must succeed.
func (h *host) finish(j *Job) string {
	h.Helper()
	r, err := j.Wait()
	if err != nil {
		h.Fatal(err)
	}
	if r.Code != 0 {
		h.Fatal(r)
	}
	return r.Stdout
}

// put writes a file in the guest.
func (h *host) put(path, content string) {
	h.Helper()
	if err := h.guest.put(path, content); err != nil {
		h.Fatal(err)
	}
}

// objects counts the RDMA objects in the guest; all are 0 where there is no RDMA.
func (h *host) objects() rdmaObjects {
	h.Helper()
	if !h.where.rdma {
		return rdmaObjects{}
	}
	n, err := h.guest.rdmaObjects()
	if err != nil {
		h.Fatal(err)
	}
	return n
}

// cut disconnects the host from the daemon, and mend connects them again.
func (h *host) cut() {
	h.Helper()
	h.run("%s", h.where.cut)
}

func (h *host) mend() {
	h.Helper()
	h.run("%s", h.where.mend)
}

// amount returns how much a scenario does: the first value, or the second over RDMA.
func (h *host) amount(quick, slow string) string {
	if h.where.rdma {
		return slow
	}
	return quick
}

// rounds is amount for a number of repetitions.
func (h *host) rounds(quick, slow int) int {
	if h.where.rdma {
		return slow
	}
	return quick
}

// runJSON runs a command in the guest and decodes what it prints.
func (h *host) runJSON(into any, format string, args ...any) {
	h.Helper()
	out := h.run(format, args...)
	if err := json.Unmarshal([]byte(out), into); err != nil {
		h.Fatalf("%s: %v in\n%s", fmt.Sprintf(format, args...), err, out)
	}
}

// address returns the address of a target as the guest sees it.
type address struct {
	transport, host string
	port            int
}

func (a address) flags() string {
	return fmt.Sprintf("-t %s -a %s -s %d", a.transport, a.host, a.port)
}

// digests are the flags of a connection with checksums, for a transport that has them.
func (a address) digests() string {
	if a.transport == "tcp" {
		return "-g -G"
	}
	return ""
}

// ioAddress is the daemon's listener for subsystems.
func (d *Daemon) ioAddress() address { return address{d.at.transport, d.at.seen, d.at.io} }

// secondAddress is the daemon's other listener for subsystems.
func (d *Daemon) secondAddress() address { return address{"tcp", d.at.seen, d.at.second} }

// discoveryAddress is the daemon's listener for discovery.
func (d *Daemon) discoveryAddress() address { return address{"tcp", d.at.seen, d.at.discovery} }

// daemon starts a jbofd that is stopped when the scenario ends.
func (h *host) daemon(s Setup) *Daemon {
	h.Helper()
	d, err := newDaemon(h.where.site)
	if err != nil {
		h.Fatal(err)
	}
	h.Cleanup(func() { d.site.remove(d.dir) })
	h.reconfigure(d, s)
	if err := d.Start(); err != nil {
		h.Fatal(err)
	}
	h.daemons = append(h.daemons, d)
	return d
}

func (h *host) reconfigure(d *Daemon, s Setup) {
	h.Helper()
	if err := d.Configure(s); err != nil {
		h.Fatal(err)
	}
}

// reload gives a running daemon another configuration.
func (h *host) reload(d *Daemon, s Setup) {
	h.Helper()
	h.reconfigure(d, s)
	if err := d.Reload(); err != nil {
		h.Fatal(err)
	}
}

// restart starts a daemon that was killed.
func (h *host) restart(d *Daemon) {
	h.Helper()
	if err := d.Start(); err != nil {
		h.Fatal(err)
	}
}

// connect connects the host and returns the controller's name, such as nvme0.
func (h *host) connect(a address, nqn, flags string) string {
	h.Helper()
	var reply struct{ Device string }
	h.runJSON(&reply, "nvme connect %s -n %s -o json %s", a.flags(), nqn, h.reconnecting(flags))
	if !regexp.MustCompile(`^nvme\d+$`).MatchString(reply.Device) {
		h.Fatalf("nvme connect names the controller %q", reply.Device)
	}
	h.waitLive(reply.Device, 10*time.Second)
	return reply.Device
}

// reconnecting adds to a connection's flags, over RDMA, that the host reconnects after one second instead of ten; see
// rxesFault.
func (h *host) reconnecting(flags string) string {
	if h.where.rdma && !regexp.MustCompile(`(^| )-c `).MatchString(flags) {
		return flags + " -c 1"
	}
	return flags
}

// disconnect removes all controllers of a subsystem.
func (h *host) disconnect(nqn string) {
	h.Helper()
	if out := h.run("nvme disconnect -n %s", nqn); !regexp.MustCompile(`disconnected [1-9]`).MatchString(out) {
		h.Errorf("nvme disconnect: %s", out)
	}
}

// state is what the kernel says about a controller: live, connecting, …
func (h *host) state(ctrl string) string {
	h.Helper()
	return strings.TrimSpace(h.try(10*time.Second, "cat /sys/class/nvme/%s/state", ctrl).Stdout)
}

func (h *host) waitLive(ctrl string, timeout time.Duration) {
	h.Helper()
	h.waitState(ctrl, "live", timeout)
}

func (h *host) waitState(ctrl, want string, timeout time.Duration) {
	h.Helper()
	h.must(timeout, ctrl+" is "+want, func() error {
		if s := h.state(ctrl); s != want {
			return fmt.Errorf("state %q", s)
		}
		return nil
	})
}

// find returns the block device of a namespace, such as /dev/nvme0n1; empty when there is none.
func (h *host) find(nqn string, nsid int) string {
	h.Helper()
	// nvme0c1n1 is a path of the multipath device nvme0n1.
	return strings.TrimSpace(h.try(10*time.Second, `cd /sys/block; for n in nvme*; do
		case $n in nvme*c*n*) continue;; esac
		if [ "$(cat $n/nsid 2>/dev/null)" = %d ] && [ "$(cat $n/device/subsysnqn 2>/dev/null)" = %s ] &&
			[ -b /dev/$n ]; then echo /dev/$n; fi
	done`, nsid, nqn).Stdout)
}

// device waits for the block device of a namespace.
func (h *host) device(nqn string, nsid int) string {
	h.Helper()
	var dev string
	h.must(15*time.Second, fmt.Sprintf("namespace %d of %s is a block device", nsid, nqn), func() error {
		if dev = h.find(nqn, nsid); dev == "" {
			return fmt.Errorf("not there")
		}
		// The kernel reads the partition table before the size is settled.
		if h.bytes(dev) == 0 {
			return fmt.Errorf("%s has no size", dev)
		}
		return nil
	})
	return dev
}

// bytes is the size of a block device, 0 when it is not there.
func (h *host) bytes(dev string) int64 {
	h.Helper()
	n, err := strconv.ParseInt(strings.TrimSpace(h.try(10*time.Second, "cat /sys/block/%s/size",
		filepath.Base(dev)).Stdout), 10, 64)
	if err != nil {
		return 0
	}
	return n * 512
}

// fails runs a command that must fail, and whose output or error must match.
func (h *host) fails(want, format string, args ...any) {
	h.Helper()
	r := h.try(30*time.Second, format, args...)
	if r.Code == 0 {
		h.Errorf("it succeeded, but should not have:\n%v", r)
	} else if !regexp.MustCompile(want).MatchString(r.Stdout + r.Stderr) {
		h.Errorf("no %q in\n%v", want, r)
	}
}

// matches runs a command that must succeed, and whose output must match every pattern.
func (h *host) matches(command string, patterns ...string) {
	h.Helper()
	r := h.try(30*time.Second, "%s", command)
	if r.Code != 0 {
		h.Errorf("failed:\n%v", r)
		return
	}
	for _, p := range patterns {
		if !regexp.MustCompile("(?m)" + p).MatchString(r.Stdout) {
			h.Errorf("no %q in\n%v", p, r)
		}
	}
}

// metrics reads the daemon's metrics.
func (h *host) metrics(d *Daemon) Metrics {
	h.Helper()
	m, err := d.Metrics()
	if err != nil {
		h.Fatal(err)
	}
	return m
}

// noConnections fails while the daemon has a connection.
func noConnections(d *Daemon) error {
	m, err := d.Metrics()
	if err != nil {
		return err
	}
	return m.zero("jbof_connections")
}

// Each drive keeps up to this many buffers of this size, into which Compare and Verify read, after their first use
// (package drive).
const (
	scratchBuffers = 4
	scratchBytes   = 128 << 10
)

// nothingHeld fails while the daemon has a connection or a buffer in use.
func nothingHeld(d *Daemon) error {
	m, err := d.Metrics()
	if err != nil {
		return err
	}
	if err := m.zero("jbof_connections"); err != nil {
		return err
	}
	const pool = "jbof_buffer_pool_bytes"
	if !m.Has(pool) {
		return fmt.Errorf("no metric %s", pool)
	}
	used := int(m.Sum(pool, `state="used"`))
	if used%scratchBytes != 0 || used/scratchBytes > scratchBuffers*d.drives {
		return fmt.Errorf("%d bytes of buffers are in use", used)
	}
	return nil
}

// zero fails when a metric is not there or not 0.
func (m Metrics) zero(name string, labels ...string) error {
	if !m.Has(name) {
		return fmt.Errorf("no metric %s", name)
	}
	if n := m.Sum(name, labels...); n != 0 {
		return fmt.Errorf("%s is %v", name, n)
	}
	return nil
}
