// Package readme runs the commands of README.md as a new user would type them.
package readme

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const root = "../.."

// insideEnv names, for a copy of this test in a network namespace of its own, the script to run there.
const insideEnv = "JBOFD_README_SCRIPT"

func TestMain(m *testing.M) {
	if script := os.Getenv(insideEnv); script != "" {
		_ = os.Unsetenv(insideEnv)
		if err := loopbackUp(); err != nil {
			panic(err)
		}
		panic(syscall.Exec("/bin/bash", []string{"bash", "-euo", "pipefail", "-c", script}, os.Environ()))
	}
	os.Exit(m.Run())
}

// loopbackUp brings up the loopback interface of a new network namespace, by a netlink message.
func loopbackUp() error {
	s, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer unix.Close(s)
	const index = 1 // loopback is the first interface
	var b []byte
	// nlmsghdr: length, type and flags, sequence, port
	for _, v := range []uint32{32, unix.RTM_NEWLINK | (unix.NLM_F_REQUEST|unix.NLM_F_ACK)<<16, 1, 0,
		0, index, unix.IFF_UP, unix.IFF_UP} { // ifinfomsg: family and type, index, flags, which of them change
		b = binary.NativeEndian.AppendUint32(b, v)
	}
	if err := unix.Sendto(s, b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return err
	}
	answer := make([]byte, 4096)
	n, _, err := unix.Recvfrom(s, answer, 0)
	if err != nil {
		return err
	}
	if n < 20 {
		return fmt.Errorf("netlink answered %d bytes", n)
	}
	if errno := int32(binary.NativeEndian.Uint32(answer[16:])); errno != 0 {
		return unix.Errno(-errno)
	}
	return nil
}

// block returns the commands of the first code block below a heading of a document.
func block(t *testing.T, document, heading string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, document))
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile("(?s)\n" + regexp.QuoteMeta(heading) + "\n.*?```\n(.*?)```").FindSubmatch(text)
	if m == nil {
		t.Fatalf("%s has no code block below %q", document, heading)
	}
	return string(m[1])
}

// clone copies the tree without what builds leave in it.
func clone(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "readme") // short: a unix socket's path must be
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	for _, part := range []string{"Makefile", "go.mod", "go.sum", "cmd", "client", "internal", "configs",
		"test/bench/cluster.sh"} {
		err := filepath.WalkDir(filepath.Join(root, part), func(path string, e fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			rel, err := filepath.Rel(root, path)
			if err != nil || e.IsDir() {
				return err
			}
			data, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			info, err := e.Info()
			if err != nil {
				return err
			}
			to := filepath.Join(dir, rel)
			if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
				return err
			}
			return os.WriteFile(to, data, info.Mode().Perm())
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// TestTheCommandsOfREADMEDoWhatItSays types them, from make build to the end of the daemon, in a copy of the tree. They
// use fixed ports: where the kernel allows it, they have a network of their own.
func TestTheCommandsOfREADMEDoWhatItSays(t *testing.T) {
	script := block(t, "README.md", "## Start it")
	// At the end the daemon must have stopped in order.
	const stop = "kill %1"
	commands, _, ok := strings.Cut(script, stop)
	if !ok {
		t.Fatalf("README.md does not stop the daemon with %s", stop)
	}
	// What the next user tries: the wrong tool for the namespace, and another look.
	more := "bin/jbofbench block --target tcp://127.0.0.1:4420 --nqn nqn.2026-11.example.jbofd:demo --nsid 3 || " +
		"true\nbin/jbofctl reload --dry-run\n"
	dir := clone(t)
	out := typed(t, dir, "set -x\n"+commands+more+stop+"\nwait %1\n")
	for _, want := range []string{
		"configs/demo.yaml: valid", "ready           yes", "jbofd is ready", "randrw bs=4KiB iodepth=32",
		"jbofbench kv --nsid 3", "a reload would change nothing", "[READ], Return=OK", "[VERIFY], Return=OK",
		"msg=stopped",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("the output does not have %q", want)
		}
	}
	if t.Failed() {
		t.Log(out)
	}
	t.Run("a cluster on one machine", func(t *testing.T) { clusterOnOneMachine(t, dir) })
}

// clusterOnOneMachine types the commands of docs/cluster.md in a directory with the binaries.
func clusterOnOneMachine(t *testing.T, dir string) {
	script := block(t, "docs/cluster.md", "### On one machine")
	// What the next user tries: a partition as if it were a namespace, and the first daemon once more.
	const kill = "kill -9 ${pid[2]}"
	before, after, ok := strings.Cut(script, kill)
	if !ok {
		t.Fatalf("docs/cluster.md does not say %s", kill)
	}
	more := `if bin/jbofbench kv --target tcp://127.0.0.1:4420 --nqn nqn.2026-11.example.jbofd:cluster -P ` +
		`configs/ycsb/workloadb > early; then exit 1; fi
if [ -s early ]; then echo "something was done before that"; fi
if bin/jbofd --config data/n1.yaml; then exit 1; fi
$ctl cluster ring
`
	out := typed(t, dir, before+more+kill+after+"wait\n")
	words := strings.Join(strings.Fields(out), " ")
	for _, want := range []string{
		"the cluster is made: 256 ranges, for good, of which there are to be 3 copies", "256: 256 full",
		"the namespace is a partition of a cluster: --cluster is for it, in place of --target",
		"n2 away", "admin.socket: data/n1/admin.sock: another daemon answers there", "[READ], Return=OK",
		"[UPDATE], Return=OK",
	} {
		if !strings.Contains(words, want) {
			t.Errorf("the output does not have %q", want)
		}
	}
	if strings.Contains(out, "before that") || strings.Contains(out, "ERROR") {
		t.Error("something has failed, or was done to a partition")
	}
	for i := 1; i <= 3; i++ {
		if log, err := os.ReadFile(fmt.Sprintf("%s/data/n%d.log", dir, i)); err != nil ||
			!strings.Contains(string(log), "msg=stopped") {
			t.Errorf("n%d has not stopped: %v\n%s", i, err, log)
		}
	}
	if t.Failed() {
		t.Log(out)
	}
}

// typed runs a script in a directory, in a network of its own if the kernel allows that, and returns what it has
// printed. It must succeed.
func typed(t *testing.T, dir, script string, environ ...string) string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	run := func(ownNetwork bool) (string, error) {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
		defer cancel()
		c := exec.CommandContext(ctx, self)
		if !ownNetwork {
			c = exec.CommandContext(ctx, "/bin/bash", "-euo", "pipefail", "-c", script)
		}
		c.Dir, c.Env = dir, slices.DeleteFunc(os.Environ(),
			func(v string) bool { return strings.HasPrefix(v, "JBOFD_") })
		c.Env = append(c.Env, environ...)
		c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		if ownNetwork {
			c.Env = append(c.Env, insideEnv+"="+script)
			c.SysProcAttr.Cloneflags = syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET
			c.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}
			c.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}
		}
		c.Cancel = func() error { return syscall.Kill(-c.Process.Pid, syscall.SIGKILL) }
		var out bytes.Buffer
		c.Stdout, c.Stderr, c.WaitDelay = &out, &out, 10*time.Second
		err := c.Run()
		if c.Process != nil {
			_ = syscall.Kill(-c.Process.Pid, syscall.SIGKILL) // the daemon, if a command has failed
		}
		return out.String(), err
	}
	out, err := run(true)
	if err != nil && out == "" {
		t.Logf("no network of its own: %v", err)
		out, err = run(false)
	}
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return out
}

// TestREADMEAttachesTheDemonstration: what README says to type on a Linux host is what the daemon says.
func TestREADMEAttachesTheDemonstration(t *testing.T) {
	hints, err := os.ReadFile(filepath.Join(root, "configs", "demo.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	commands := block(t, "README.md",
		"A Linux host on the same machine is attached with nvme-cli, which needs root there:")
	for _, m := range regexp.MustCompile(`-a (\S+) -s (\S+)`).FindAllStringSubmatch(commands, -1) {
		if address := m[1] + ":" + m[2]; !strings.Contains(string(hints), `"`+address+`"`) {
			t.Errorf("configs/demo.yaml does not listen on %s", address)
		}
	}
	for _, m := range regexp.MustCompile(`-n (\S+)`).FindAllStringSubmatch(commands, -1) {
		if !strings.Contains(string(hints), "nqn: "+m[1]+"\n") {
			t.Errorf("configs/demo.yaml has no subsystem %s", m[1])
		}
	}
}

// TestTheFiguresOfREADMEAreThoseOfTheBenchmarks: a figure that was measured again changes in both.
func TestTheFiguresOfREADMEAreThoseOfTheBenchmarks(t *testing.T) {
	readme, err := os.ReadFile(filepath.Join(root, "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	benchmarks, err := os.ReadFile(filepath.Join(root, "docs", "benchmarks.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, table, ok := strings.Cut(string(readme), "| | SPDK nvmf_tgt")
	table, _, ok2 := strings.Cut(table, "\n\n")
	rows := strings.Split(table, "\n")
	if !ok || !ok2 || len(rows) != 5 {
		t.Fatalf("README.md has no table of three lines beside SPDK: %q", table)
	}
	figures := 0
	for _, row := range rows[2:] {
		cells := strings.Split(row, "|")[2:]
		for _, f := range regexp.MustCompile(`\d+ K\b|\d+\.\d+( %)?`).FindAllString(strings.Join(cells, "|"), -1) {
			figures++
			if !strings.Contains(string(benchmarks), f) {
				t.Errorf("docs/benchmarks.md does not have %q", f)
			}
		}
	}
	if figures < 10 {
		t.Errorf("only %d figures", figures)
	}
	for _, name := range []string{"SPDK", "nvmet"} {
		if i := strings.Index(string(readme), name); i < 0 || strings.Count(string(readme[:i]), "\n") > 30 {
			t.Errorf("the first screen does not name %s", name)
		}
	}
}
