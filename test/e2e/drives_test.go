package e2e

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"jbofd/client"
	"jbofd/internal/nvme"
)

// TestAForeignDriveIsLeftAlone: a non-empty file that jbofd did not format is refused with a message that says so, and
// is not modified. The other drive serves, and /readyz names the missing one.
func TestAForeignDriveIsLeftAlone(t *testing.T) {
	t.Parallel()
	d := newDaemon(t, setup{ssds: twoFiles, subsystems: openSubsystem +
		"      - {nsid: 2, ssd: ssd1, size: 4MiB}\n"})
	foreign := make([]byte, 64<<20)
	fill(foreign[512<<10:2<<20], 0, 9) // the data does not start at the beginning of the file
	path := filepath.Join(d.dir, "ssd1.img")
	if err := os.WriteFile(path, foreign, 0o600); err != nil {
		t.Fatal(err)
	}
	d.launch()
	if len(d.log.find("drive left out", "ssd1")) == 0 {
		t.Error("the log does not say that ssd1 is left out")
	}
	code, body := d.get("/readyz")
	if code != 503 || !strings.Contains(body, "ssd1") || strings.Contains(body, "ssd0") {
		t.Errorf("/readyz: %d %s, want 503 naming ssd1 only", code, body)
	}
	if code, _ := d.get("/healthz"); code != 200 {
		t.Errorf("/healthz: %d", code)
	}
	c := d.connect(d.options(hostA, nqnA))
	if ids, err := c.NamespaceIDs(ctx(t)); err != nil || !slices.Equal(ids, []uint32{1}) {
		t.Errorf("namespaces %v, %v; want 1, whose drive is there", ids, err)
	}
	if _, err := open(t, c, 1).ReadAt(ctx(t), make([]byte, 512), 0); err != nil {
		t.Error(err)
	}
	if now, err := os.ReadFile(path); err != nil || !bytes.Equal(now, foreign) {
		t.Errorf("the foreign file was changed, or %v", err)
	}
}

// TestANodeWithForeignDrivesOnlyExits: without a drive to serve, the daemon logs the reason and exits.
func TestANodeWithForeignDrivesOnlyExits(t *testing.T) {
	t.Parallel()
	d := newDaemon(t, setup{ssds: fileSSD, subsystems: openSubsystem})
	if err := os.WriteFile(filepath.Join(d.dir, "ssd0.img"), bytes.Repeat([]byte("precious"), 16<<20),
		0o600); err != nil {
		t.Fatal(err)
	}
	d.spawn()
	<-d.exited
	if d.cmd.ProcessState.Success() || len(d.log.find("jbofd:", "ssd0")) == 0 {
		t.Errorf("ended with %v and said\n%s", d.cmd.ProcessState, d.log)
	}
}

// TestADriveHasOneDaemon: a second daemon is refused with a message that names the file; the first one continues to
// serve.
func TestADriveHasOneDaemon(t *testing.T) {
	t.Parallel()
	d := start(t, setup{ssds: fileSSD, subsystems: openSubsystem})
	n := d.namespace(d.options(hostA, nqnA), 1)
	second := newDaemon(t, setup{ssds: strings.ReplaceAll(fileSSD, "@DIR@", d.dir), subsystems: openSubsystem})
	second.spawn()
	<-second.exited
	if second.cmd.ProcessState.Success() || len(second.log.find("in use")) == 0 && len(second.log.find("locked")) == 0 {
		t.Errorf("the second daemon ended with %v and said\n%s", second.cmd.ProcessState, second.log)
	}
	if _, err := n.WriteAt(ctx(t), make([]byte, 4096), 0, client.FUA); err != nil {
		t.Error(err)
	}
}

// TestADriveThatNeverAnswersDoesNotStopTheEnd.
func TestADriveThatNeverAnswersDoesNotStopTheEnd(t *testing.T) {
	t.Parallel()
	s := oneMem
	s.ssds = "  - {name: ssd0, backend: mem, size: 128MiB, fault: {delay: 60s, delay_probability: 1}}\n"
	s.limits = "drain_timeout: 1s"
	d := start(t, s)
	_, io := d.rawQueue(hostA, nqnA, 0, 32)
	io.send(io.capsule(rw(nvme.CmdRead, 1, 0, 1), nil, 512))
	eventually(t, "the command is with the drive", func() bool { return d.metric("jbof_ssd_io_now") == 1 })
	if took := d.term(); took > stopLimit {
		t.Errorf("stopped after %v", took)
	}
}

// TestAMissingDriveHasNoNamespacesButItsNeighbourServes.
func TestAMissingDriveHasNoNamespacesButItsNeighbourServes(t *testing.T) {
	t.Parallel()
	s := setup{ssds: twoFiles, subsystems: twoTenants}
	d := start(t, s)
	if err := d.connect(d.options(hostA, nqnA)).Close(); err != nil {
		t.Error(err)
	}
	d.term()
	moved := filepath.Join(d.dir, "elsewhere.img")
	if err := os.Rename(filepath.Join(d.dir, "ssd0.img"), moved); err != nil {
		t.Fatal(err)
	}
	s.ssds = strings.Replace(s.ssds, "create: true", "create: false", 1)
	d.write(s)
	d.launch()
	if code, body := d.get("/readyz"); code != 503 || !strings.Contains(body, "ssd0") {
		t.Errorf("/readyz: %d %s", code, body)
	}
	if _, err := d.namespace(d.options(hostB, nqnB), 1).ReadAt(ctx(t), make([]byte, 4096), 0); err != nil {
		t.Error(err)
	}
}
