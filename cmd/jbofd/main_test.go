package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"jbofd/internal/cluster/etcdserver"
)

func run1(t *testing.T, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	var out, err bytes.Buffer
	status = execute(args, &out, &err)
	return status, out.String(), err.String()
}

const valid = "listeners: [{address: \"127.0.0.1:0\"}]\nssds: [{name: s, backend: mem, size: 64MiB}]\n"

// withStdin runs f with a text as standard input.
func withStdin(t *testing.T, text string, f func()) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		_, _ = io.WriteString(w, text)
		_ = w.Close()
	}()
	before := os.Stdin
	os.Stdin = r
	defer func() {
		os.Stdin = before
		_ = r.Close()
	}()
	f()
}

func TestValidateReadsStandardInput(t *testing.T) {
	withStdin(t, valid, func() {
		if status, out, errs := run1(t, "validate", "-"); status != 0 || out != "-: valid\n" {
			t.Errorf("status %d, %s%s", status, out, errs)
		}
	})
	withStdin(t, valid+"nods: 1\n", func() {
		if status, _, errs := run1(t, "validate", "-"); status != 1 ||
			!strings.Contains(errs, "standard input:3:1: nods: unknown key") {
			t.Errorf("status %d, %s", status, errs)
		}
	})
}

func TestValidateRefusesWhatThisMachineLacks(t *testing.T) {
	for text, want := range map[string]string{
		strings.Replace(valid, "64MiB", "4000000TiB", 1): "ssds[0].size: 4000000TiB is too large " +
			"for a drive in memory",
		valid + "limits: {buffers: 1TiB}": "limits.buffers: 1TiB is more than the " +
			"memory of this machine",
		strings.Replace(valid, "{address", "{transport: rdma, address", 1): "built without rdma",
	} {
		file := filepath.Join(t.TempDir(), "c.yaml")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if status, out, errs := run1(t, "validate", file); status != 1 || !strings.Contains(errs, want) {
			t.Errorf("status %d, %s%s; want %q", status, out, errs, want)
		}
	}
}

// TestAFailedStartIsJSONToo if the log is, because systems that collect logs can read nothing else.
func TestAFailedStartIsJSONToo(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "c.yaml")
	text := strings.Replace(valid, "backend: mem, size: 64MiB", "path: "+dir+"/none", 1) +
		"log: {format: json}\nadmin: {socket: \"\"}\nmetrics: {address: \"\"}\ndiscovery: {address: \"\"}\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	status, _, errs := run1(t, "--config", file)
	if status != 1 {
		t.Errorf("status %d", status)
	}
	last := ""
	for line := range strings.Lines(errs) {
		if last = line; !json.Valid([]byte(line)) {
			t.Errorf("not JSON: %s", line)
		}
	}
	if !strings.Contains(last, "jbofd has ended") || !strings.Contains(last, dir+"/none") {
		t.Errorf("the last line is %s", last)
	}
}

// TestAReloadThatIsAskedForDuringTheStartIsDone, while the configuration is being read as well as later.
func TestAReloadThatIsAskedForDuringTheStartIsDone(t *testing.T) {
	hup := make(chan os.Signal, 1) // keeps the signal from ending the test
	signal.Notify(hup, syscall.SIGHUP)
	defer signal.Stop(hup)
	file := filepath.Join(t.TempDir(), "fifo")
	// A new one for each read, so that a writer cannot meet the reader before.
	renew := func() {
		if err := errors.Join(syscall.Mkfifo(file+".new", 0o600), os.Rename(file+".new", file)); err != nil {
			t.Error(err)
		}
	}
	renew()
	status := make(chan string, 1)
	go func() {
		code, out, errs := run1(t, "--config", file)
		status <- fmt.Sprintf("status %d, %s%s", code, out, errs)
	}()
	// give waits until the daemon reads its configuration, and gives it one.
	give := func(before func()) {
		done := make(chan error, 1)
		go func() {
			f, err := os.OpenFile(file, os.O_WRONLY, 0)
			if err == nil {
				before()
				_, err = f.WriteString(valid + "metrics: {address: \"\"}\nadmin: {socket: \"\"}\n" +
					"discovery: {address: \"\"}\nsubsystems: [{nqn: nqn.2026-11.example:a, allow_any_host: true}]\n")
				err = errors.Join(err, f.Close())
			}
			done <- err
		}()
		select {
		case err := <-done:
			if err != nil {
				t.Fatal(err)
			}
		case s := <-status:
			t.Fatal("the daemon has ended: ", s)
		case <-time.After(20 * time.Second):
			t.Fatal("the daemon does not read its configuration")
		}
	}
	send := func(s syscall.Signal) {
		if err := syscall.Kill(os.Getpid(), s); err != nil {
			t.Error(err)
		}
	}
	give(func() {
		renew()
		send(syscall.SIGHUP)
		<-hup // both channels have it
	})
	give(func() { send(syscall.SIGTERM) })
	if s := <-status; !strings.HasPrefix(s, "status 0") {
		t.Error(s)
	}
}

func TestAFileWithoutItsFlagIsAnsweredWithTheFlag(t *testing.T) {
	if status, _, errs := run1(t, "x.yaml"); status != 2 || !strings.Contains(errs, `"x.yaml"`) ||
		!strings.Contains(errs, "--config FILE") {
		t.Errorf("status %d, %s", status, errs)
	}
}

// TestOneDashIsAnsweredWithTwo, as in Go and etcd one is enough.
func TestOneDashIsAnsweredWithTwo(t *testing.T) {
	for _, args := range [][]string{{"-config", "x.yaml"}, {"-config=x.yaml"}, {"-demo"}} {
		want := args[0] + " has one dash; a configuration is given as --config FILE"
		if args[0] == "-demo" {
			want = "in -demo; see jbofd --help"
		}
		if status, _, errs := run1(t, args...); status != 2 || !strings.Contains(errs, want) {
			t.Errorf("%q: status %d, %s", args, status, errs)
		}
	}
}

// TestValidateRemarksUponServersOfEtcdThatNoNodeRuns, and calls the file valid.
func TestValidateRemarksUponServersOfEtcdThatNoNodeRuns(t *testing.T) {
	file := filepath.Join(t.TempDir(), "c.yaml")
	if err := os.WriteFile(file, []byte(valid+`subsystems: [{nqn: "nqn.2026-11.example:a", allow_any_host: true}]
cluster:
  name: demo
  subsystem: nqn.2026-11.example:a
  nodes: [{name: jbof0, address: "127.0.0.1:4430", target: "tcp://127.0.0.1:4420"}]
  etcd: {embedded: {members: [{name: jbof0, client_url: "http://127.0.0.1:2379", peer_url: "http://127.0.0.1:2380"},
    {name: n2, client_url: "http://h:1", peer_url: "http://h:2"},
    {name: n3, client_url: "http://i:1", peer_url: "http://i:2"}]}}
`), 0o600); err != nil {
		t.Fatal(err)
	}
	status, out, errs := run1(t, "validate", file)
	if etcdserver.Built && (status != 0 || !strings.Contains(out, ": valid") || strings.Count(errs, "remark: ") != 2 ||
		!strings.Contains(errs, `"n3" is none of cluster.nodes`)) {
		t.Errorf("status %d, %s%s", status, out, errs)
	}
	if !etcdserver.Built && status != 1 {
		t.Errorf("built without etcd: status %d, %s%s", status, out, errs)
	}
}

func TestVersionAndCompletionExist(t *testing.T) {
	if status, out, _ := run1(t, "--version"); status != 0 || !strings.Contains(out, version) {
		t.Errorf("status %d, %s", status, out)
	}
	if status, out, _ := run1(t, "--help"); status != 0 || !strings.Contains(out, "completion") ||
		!strings.Contains(out, "validate") {
		t.Errorf("status %d, %s", status, out)
	}
}

// TestABadCommandLineHasAnExitStatusOfItsOwn, as with jbofctl and jbofbench.
func TestABadCommandLineHasAnExitStatusOfItsOwn(t *testing.T) {
	for _, args := range [][]string{{}, {"--demo", "--config", "x"}, {"--config", "-"}, {"--cofnig", "x"},
		{"validate"}} {
		if status, _, stderr := run1(t, args...); status != 2 || stderr == "" {
			t.Errorf("%q: status %d, %s", args, status, stderr)
		}
	}
	if status, _, stderr := run1(t, "--config", "/nonexistent"); status != 1 {
		t.Errorf("a file that does not exist: status %d, %s", status, stderr)
	}
}

// TestTheMainThreadOnlyWaits: more goroutines than there are threads each take one for themselves, but not the main
// one.
func TestTheMainThreadOnlyWaits(t *testing.T) {
	const goroutines = 64
	threads, stop := make(chan int), make(chan struct{})
	defer close(stop)
	for range goroutines {
		go func() {
			runtime.LockOSThread()
			threads <- syscall.Gettid()
			<-stop
		}()
	}
	for range goroutines {
		if <-threads == os.Getpid() {
			t.Error("a goroutine has the main thread")
		}
	}
}
