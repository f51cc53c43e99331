package vm

import (
	"bytes"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"jbofd/internal/config"
)

// These tests need no VM: they check the harness's own parts.

func TestModulesAreLoadedAfterWhatTheyDependOn(t *testing.T) {
	deps, err := parseModulesDep("kernel/a-tcp.ko: kernel/fabrics.ko kernel/core.ko " +
		"kernel/crc.ko\nkernel/fabrics.ko: " +
		"kernel/core.ko kernel/crc.ko\nkernel/core.ko: kernel/crc.ko\nkernel/crc.ko:\nkernel/other.ko:\n")
	if err != nil {
		t.Fatal(err)
	}
	got, err := resolveModules(deps, []string{"core", "a_tcp"})
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{"kernel/crc.ko", "kernel/core.ko", "kernel/fabrics.ko",
		"kernel/a-tcp.ko"}; !reflect.DeepEqual(got, want) {
		t.Errorf("order %v, want %v", got, want)
	}
	if _, err := resolveModules(deps, []string{"nosuch"}); err == nil || !strings.Contains(err.Error(), "nosuch") {
		t.Errorf("a module that is not there: %v", err)
	}
}

func TestArchiveHasFoldersBeforeFilesAndIsAligned(t *testing.T) {
	var b bytes.Buffer
	a := newArchive(&b)
	a.file("/x/y/file", 0o644, []byte("hello"))
	a.file("/x/y/second", 0o755, nil)
	if err := a.close(); err != nil {
		t.Fatal(err)
	}
	var names []string
	data := b.Bytes()
	for pos := 0; pos < len(data); {
		if string(data[pos:pos+6]) != "070701" {
			t.Fatalf("no entry at %d", pos)
		}
		size, nameSize := hex(t, data[pos+54:pos+62]), hex(t, data[pos+94:pos+102])
		name := string(data[pos+110 : pos+110+nameSize-1])
		pos = align4(pos + 110 + nameSize)
		if name == "x/y/file" && string(data[pos:pos+size]) != "hello" {
			t.Errorf("content %q", data[pos:pos+size])
		}
		pos = align4(pos + size)
		names = append(names, name)
	}
	if want := []string{"x", "x/y", "x/y/file", "x/y/second", "TRAILER!!!"}; !reflect.DeepEqual(names, want) {
		t.Errorf("entries %v, want %v", names, want)
	}
}

func align4(n int) int { return (n + 3) &^ 3 }

func hex(t *testing.T, digits []byte) int {
	t.Helper()
	n := 0
	for _, d := range digits {
		i := strings.IndexByte("0123456789abcdef", d)
		if i < 0 {
			t.Fatalf("%q is no hex number", digits)
		}
		n = n<<4 | i
	}
	return n
}

func TestWhatIsMissingIsNamedWithItsPackage(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PATH", dir)
	saved := needs
	t.Cleanup(func() { needs = saved })
	needs = []need{{program: "jbofd-no-such-tool", apt: "no-such-package"}, {program: "jbofd-present", apt: "other"},
		{file: filepath.Join(dir, "lib*.so"), apt: "no-such-library"},
		{file: filepath.Join(dir, "*-present"), apt: "other"}}
	if err := os.WriteFile(filepath.Join(dir, "jbofd-present"), []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	err := CheckNeeds()
	if err == nil || !strings.Contains(err.Error(), "jbofd-no-such-tool (package no-such-package)") ||
		!strings.Contains(err.Error(), "lib*.so (package no-such-library)") || !strings.HasSuffix(err.Error(),
		"install no-such-library no-such-package") || strings.Contains(err.Error(), "jbofd-present") {
		t.Errorf("got %v", err)
	}
}

func TestConfigurationsOfTheScenariosAreValid(t *testing.T) {
	s := Setup{
		SSDs: []SSD{{Name: "ssd0", Backend: "mem", Size: "256MiB", Fault: "{delay: 8s}"},
			{Name: "ssd1", Backend: "file", Size: "128MiB"}},
		Subsystems: []Subsystem{
			{NQN: "nqn.2026-11.example.jbofd:a",
				Namespaces: []Namespace{{NSID: 1, SSD: "ssd0", Size: "64MiB", BlockSize: 512,
					Hosts: []string{HostNQN}}}},
			{NQN: "nqn.2026-11.example.jbofd:b", Hosts: []string{HostNQN},
				Namespaces: []Namespace{{NSID: 7, SSD: "ssd1", Size: "64MiB", BlockSize: 4096, UUID: HostID}}},
		},
		Limits: "{queue_depth: 64}",
	}
	c, err := config.Parse("scenario", []byte(s.yaml("/var/tmp/x", endpoints{
		transport: "tcp", ip: "127.0.0.1", seen: HostAddress, metricsIP: "127.0.0.1", ip6: "::1", io: 20001,
		second: 20002, discovery: 20003, metrics: 20004,
	})))
	if err != nil {
		t.Fatal(err)
	}
	if len(c.SSDs) != 2 || len(c.Subsystems) != 2 || c.Subsystems[0].Namespaces[0].BlockSize != 512 ||
		c.Subsystems[1].AllowAnyHost || c.Limits.QueueDepth != 64 {
		t.Errorf("read back as %+v", c)
	}
}

func TestMetricsAreSummedByLabel(t *testing.T) {
	m, err := parseMetrics("# HELP a b\n" +
		"a{op=\"read\",ssd=\"0\"} 2\na{op=\"read\",ssd=\"1\"} 3\na{op=\"write\"} 1e3\nab 7\n")
	if err != nil {
		t.Fatal(err)
	}
	if m.Sum("a") != 1005 || m.Sum("a", `op="read"`) != 5 || m.Sum("a", `op="read"`, `ssd="1"`) != 3 ||
		m.Sum("ab") != 7 || m.Has("b") || !m.Has("a") {
		t.Errorf("sums are wrong: %v", m)
	}
}

func TestKernelFaultsAreRecognised(t *testing.T) {
	for line, want := range map[string]bool{
		"[   12.3] BUG: unable to handle page fault for address: 0":      true,
		"[   12.3] INFO: task fio:123 blocked for more than 60 seconds.": true,
		"[   12.3] Kernel panic - not syncing: Fatal exception":          true,
		"[   12.3] kernel BUG at mm/usercopy.c:101!":                     true,
		"[   12.3] WARNING: CPU: 0 PID: 1 at drivers/nvme/host/tcp.c:1":  true,
		"[   12.3] watchdog: BUG: soft lockup - CPU#1 stuck for 22s!":    false,
		"[   12.3] nvme nvme0: starting error recovery":                  false,
		"[   12.3] blk_update_request: I/O error, dev nvme0n1, sector 0": false,
	} {
		if got := kernelProblem.MatchString(line); got != want {
			t.Errorf("%q: %v, want %v", line, got, want)
		}
	}
}

func TestLogLinesAreFoundAfterTheMark(t *testing.T) {
	var d Daemon
	w := &lineWriter{line: d.logLine}
	w.Write([]byte("one\nkeep alive exp"))
	mark := d.LogMark()
	w.Write([]byte("ired host=x\r\n"))
	if got := d.LogMatches(mark, regexp.MustCompile("keep"),
		regexp.MustCompile("host=x")); got != "keep alive expired host=x" {
		t.Errorf("found %q", got)
	}
	if got := d.LogMatches(mark, regexp.MustCompile("one")); got != "" {
		t.Errorf("found %q, which is before the mark", got)
	}
}

func TestPortsAreGivenOnce(t *testing.T) {
	seen := map[int]bool{}
	for range 500 {
		port, err := freePort()
		if err != nil {
			t.Fatal(err)
		}
		if seen[port] || port >= 32768 {
			t.Fatalf("port %d", port)
		}
		seen[port] = true
	}
}
