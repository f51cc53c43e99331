package config

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"jbofd/internal/buildtags"
)

// nested returns n lines, each a level deeper than the one before.
func nested(n int, what string) string {
	var b strings.Builder
	for i := range n {
		b.WriteString(strings.Repeat(" ", i) + what + "\n")
	}
	return b.String()
}

// distinct returns n keys.
func distinct(n int, format string) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, format, i)
	}
	return b.String()
}

// processorTime is what the process has used: unlike the time of day, it does not depend on what else the machine does.
func processorTime(t *testing.T) time.Duration {
	t.Helper()
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// TestNestingBombsAreRefusedAtOnce: the parser would take minutes and gigabytes for each of them.
func TestNestingBombsAreRefusedAtOnce(t *testing.T) {
	n := 200_000
	if buildtags.Race {
		n /= 10 // one goroutine
	}
	for name, text := range map[string]string{
		"lists in brackets":         strings.Repeat("[", n),
		"closed lists":              strings.Repeat("[", n) + strings.Repeat("]", n),
		"mappings in braces":        strings.Repeat("{a: ", n),
		"bare braces":               strings.Repeat("{", n),
		"lists in a line":           strings.Repeat("- ", n),
		"keys in a line":            strings.Repeat("a: ", n),
		"question marks":            strings.Repeat("? ", n),
		"tags":                      strings.Repeat("!a ", n),
		"anchors":                   strings.Repeat("&a ", n),
		"tags in lines":             strings.Repeat("!a #\n", n),
		"keys in a line in braces":  "{" + strings.Repeat("a: ", n) + "}",
		"levels by indentation":     nested(2000, "a:"),
		"list levels":               nested(2000, "-"),
		"keys of one mapping":       distinct(n, "k%d: 1\n"),
		"the same key":              strings.Repeat("log: 1\n", n),
		"keys in braces":            "log: {" + distinct(n, "k%d: 1, ") + "}",
		"a bomb below a valid part": minimal + "node: " + strings.Repeat("[", n),
	} {
		t.Run(name, func(t *testing.T) {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			began := processorTime(t)
			_, err := Parse("bomb.yaml", []byte(text))
			took := processorTime(t) - began
			runtime.ReadMemStats(&after)
			if err == nil {
				t.Error("accepted")
			}
			if mib := (after.TotalAlloc - before.TotalAlloc) >> 20; took > 5*time.Second || mib > 1024 {
				t.Errorf("took %v and %d MiB", took, mib)
			}
		})
	}
}

func TestAFileTooLargeIsRefusedUnread(t *testing.T) {
	path := filepath.Join(t.TempDir(), "large.yaml")
	if err := os.WriteFile(path, []byte("#"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, 64<<30); err != nil { // sparse
		t.Fatal(err)
	}
	if _, err := Load(path, Machine{}); err == nil || !strings.Contains(err.Error(), "8MiB") {
		t.Errorf("got %v", err)
	}
}

// TestManyNamespacesAreNotANestingBomb: the bounds must not refuse what a large node needs.
func TestManyNamespacesAreNotANestingBomb(t *testing.T) {
	text := "listeners: [{address: \"127.0.0.1:0\"}]\nssds:\n" +
		distinct(40, "  - {name: s%d, backend: file, path: /dev/nvme%[1]dn1}\n") + "subsystems:\n"
	for i := range 1000 {
		text += fmt.Sprintf("  - nqn: nqn.2026-11.example.jbofd:s%d\n    hosts:\n", i) +
			distinct(50, "      - nqn.2014-08.org.nvmexpress:uuid:6f8b1c1e-6c29-4b5a-9a55-0d7f3f4f%04d\n") +
			fmt.Sprintf("    namespaces:\n      - {nsid: 1, ssd: s%d, size: 1GiB}\n", i%40)
	}
	if _, err := Parse("many.yaml", []byte(text)); err != nil {
		t.Error(err)
	}
}

func TestAByteOrderMarkIsIgnoredAndOtherEncodingsAreNamed(t *testing.T) {
	if _, err := Parse("bom.yaml", []byte("\uFEFF"+strings.TrimPrefix(minimal, "\n"))); err != nil {
		t.Errorf("with a byte order mark: %v", err)
	}
	if _, err := Parse("utf16.yaml", []byte{0xff, 0xfe, 'n', 0}); err == nil ||
		!strings.Contains(err.Error(), "UTF-16") {
		t.Errorf("UTF-16: %v", err)
	}
	if _, err := Parse("latin1.yaml", []byte("node: {name: \xe9}\n")); err == nil ||
		!strings.Contains(err.Error(), "UTF-8") {
		t.Errorf("Latin 1: %v", err)
	}
}

func TestAHundredProblemsAreShownAndTheRestCounted(t *testing.T) {
	_, err := Parse("x", []byte("listeners: [{address: \"127.0.0.1:0\"}]\nssds:\n"+
		distinct(250, "  - {name: s%d, backend: mem}\n")))
	if err == nil {
		t.Fatal("accepted")
	}
	lines := strings.Split(err.Error(), "\n")
	if len(lines) != maxLines+1 || lines[maxLines] != "and 150 more problems" {
		t.Errorf("%d lines, the last %q", len(lines), lines[len(lines)-1])
	}
}
