package e2e

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/internal/testutil/images"
)

// TestAStopLeavesADriveThatHangs: the kernel does not end a process while it waits for a drive. The daemon has ended
// for all that, within its bound: it says which drive it has left, and another daemon gets its addresses and its other
// drive at once.
func TestAStopLeavesADriveThatHangs(t *testing.T) {
	t.Parallel()
	for _, kind := range []string{"file", "block device"} {
		t.Run(kind, func(t *testing.T) { testStopOfHanging(t, kind == "block device") })
	}
}

// TestAStartLeavesOutADriveThatHangs: a drive that does not answer while it is opened is left out after half a minute,
// and the other one serves. When it answers in the end it is closed again, so that a restart of the daemon can open it.
func TestAStartLeavesOutADriveThatHangs(t *testing.T) {
	t.Parallel()
	images.Private(t)
	m := images.New(t, t.TempDir(), 64<<20, "ssd0.img")
	d := newDaemon(t, setup{ssds: fmt.Sprintf("  - {name: ssd0, backend: file, path: %s}\n", m.Path(0)) +
		"  - {name: ssd1, backend: file, path: \"@DIR@/ssd1.img\", size: 64MiB, create: true}\n",
		subsystems: twoTenants})
	t.Cleanup(func() { m.Answer(0) })
	m.Silence(0)
	d.launch()
	if _, err := d.namespace(d.options(hostB, nqnB), 1).WriteAt(ctx(t), make([]byte, 4096), 0, client.FUA); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the log says that ssd0 is left out", func() bool {
		return len(d.log.find("drive left out", "ssd=ssd0", "has not answered within 30s")) == 1
	})
	m.Answer(0)
	eventually(t, "the drive that has answered is closed", func() bool {
		names, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", d.cmd.Process.Pid))
		return err == nil && !slices.ContainsFunc(names, func(name string) bool {
			to, err := os.Readlink(name)
			return err == nil && to == m.Path(0)
		})
	})
	d.term()
}

func testStopOfHanging(t *testing.T, block bool) {
	images.Private(t)
	m := images.New(t, t.TempDir(), 64<<20, "ssd0.img")
	path := m.Path(0)
	if block {
		var err error
		if path, err = m.Block(0); err != nil {
			t.Skip(err)
		}
	}
	ssd1 := "  - {name: ssd1, backend: file, path: \"@DIR@/ssd1.img\", size: 64MiB, create: true}\n"
	d := start(t, setup{ssds: fmt.Sprintf("  - {name: ssd0, backend: file, path: %s}\n", path) + ssd1,
		subsystems: twoTenants, limits: "drain_timeout: 1s"})
	t.Cleanup(func() { m.Answer(0) })
	want := bytes.Repeat([]byte("kept"), 1024)
	good := d.namespace(d.options(hostB, nqnB), 1)
	if _, err := good.WriteAt(ctx(t), want, 0, client.FUA); err != nil {
		t.Fatal(err)
	}
	o := d.options(hostA, nqnA)
	o.CtrlLossTimeout = -1
	hangs := d.namespace(o, 1)
	m.Silence(0)
	const writes = 8
	startWriters(t, d, writes)
	flushed := make(chan error, 1)
	go func() { flushed <- hangs.Flush(ctx(t)) }()
	eventually(t, "the drive has all requests", func() bool {
		return d.metric("jbof_ssd_io_now", "ssd", "ssd0") == writes+1
	})
	m.AwaitKept(0, 1)
	for range writes { // meanwhile the other drive works
		if _, err := good.WriteAt(ctx(t), want, 0, client.FUA); err != nil {
			t.Fatal(err)
		}
		if err := good.Flush(ctx(t)); err != nil {
			t.Fatal(err)
		}
	}
	if !block { // so it does not take twice as long
		eventually(t, "the daemon says that the drive hangs, and is ready", func() bool {
			code, body := d.get("/readyz")
			return code == 200 && strings.Contains(body, `"degraded":[{"component":"ssd ssd0","reason":"it takes `) &&
				d.metric("jbof_ssd_silent_seconds", "ssd", "ssd0") >= 7 &&
				d.metric("jbof_ssd_silent_seconds", "ssd", "ssd1") == 0 &&
				len(d.log.find("a drive takes requests and completes none", "ssd=ssd0")) == 1
		})
	}

	d.signal(syscall.SIGTERM)
	began := time.Now()
	within(t, stopLimit, "the daemon has ended", d.ended)
	t.Logf("ended after %v; the kernel is done with it: %v", time.Since(began).Round(time.Millisecond), !d.running())
	// What the daemon has written last may be read after it has ended.
	eventually(t, "the log says that ssd0 has been left", func() bool {
		return len(d.log.find("a drive has not answered within the time limit", "ssds=[ssd0]")) == 1
	})
	second := newDaemon(t, setup{ssds: strings.ReplaceAll(ssd1, "@DIR@", d.dir),
		subsystems: "  - nqn: " + nqnB + "\n    hosts: [" + hostB + "]\n    namespaces:\n" +
			"      - {nsid: 1, ssd: ssd1, size: 16MiB, block_size: 4096}\n"})
	second.addr, second.discovery, second.metrics = d.addr, d.discovery, d.metrics
	second.launch()
	got := make([]byte, len(want))
	if _, err := second.namespace(second.options(hostB, nqnB), 1).ReadAt(ctx(t), got, 0); err != nil {
		t.Error(err)
	} else if !bytes.Equal(got, want) {
		t.Error("what was acknowledged is not there")
	}
	second.term()
	m.Answer(0)
	<-d.exited
	if !d.cmd.ProcessState.Success() {
		t.Errorf("ended with %v", d.cmd.ProcessState)
	}
	d.clean()
	if err := <-flushed; err == nil {
		t.Error("a flush of the drive that hangs was answered")
	}
}

// ended reports whether the daemon has ended as far as it is up to it: threads may remain that wait for a drive.
func (d *daemon) ended() bool {
	if !d.running() {
		return true
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", d.cmd.Process.Pid))
	return err == nil && strings.HasPrefix(string(stat[bytes.LastIndexByte(stat, ')'):]), ") Z")
}
