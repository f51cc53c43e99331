package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"jbofd/internal/buildtags"
)

func TestSimBadFlagsExitWith2(t *testing.T) {
	for _, c := range []struct {
		args string
		want []string
	}{
		{"sim gimbal --row no-such-row", []string{"--row", "no-such-row", "sim list"}},
		{"sim gimbal --row (", []string{"--row", "("}},
		{"sim gimbal --policy best", []string{"--policy", "best", "fifo"}},
		{"sim gimbal --seed x", []string{"--seed", "x"}},
		{"sim cluster --row no-such-row", []string{"--row", "no-such-row", "sim list"}},
		{"sim cluster --row (", []string{"--row", "("}},
	} {
		status, _, stderr := command(t, strings.Fields(c.args)...)
		if status != 2 {
			t.Errorf("%s: exit status %d, want 2", c.args, status)
		}
		for _, w := range c.want {
			if !strings.Contains(stderr, w) {
				t.Errorf("%s: %q does not say %q", c.args, stderr, w)
			}
		}
	}
}

func TestSimListsWhatItCanRun(t *testing.T) {
	status, out, _ := command(t, "sim", "list")
	if status != 0 || !strings.Contains(out, "utilisation/4K-read-fragmented") || !strings.Contains(out, "parda") {
		t.Errorf("status %d: %s", status, out)
	}
	if !strings.Contains(out, "crrs/C-zipf0.99-1-chain-tail") {
		t.Errorf("scenarios of sim cluster are missing: %s", out)
	}
}

// TestSimSaysHowLongItTakesAndEndsWithAVerdict.
func TestSimSaysHowLongItTakesAndEndsWithAVerdict(t *testing.T) {
	status, out, stderr := command(t, "sim", "gimbal", "--row", "cpu/4K-read-320us", "--policy", "fifo")
	if status != 0 || !strings.HasPrefix(stderr, "simulations: 1, of ") || !strings.Contains(stderr, "about ") {
		t.Errorf("status %d, %s", status, stderr)
	}
	_, verdict, ok := strings.Cut(out, "\nVerdict: ")
	if lines := strings.Split(strings.TrimSpace(verdict), "\n"); !ok || len(lines) != 4 ||
		!strings.HasPrefix(lines[3], "fifo ") {
		t.Errorf("%s", out)
	}
}

// TestSimRepeatsItself runs a quick scenario twice, to the screen and to a folder.
func TestSimRepeatsItself(t *testing.T) {
	if buildtags.Race {
		t.Skip("the arithmetic of one goroutine, of which TestSimSaysHowLongItTakesAndEndsWithAVerdict runs enough")
	}
	args := []string{"sim", "gimbal", "--row", "cpu/4K-read-320us", "--policy", "fifo", "--quiet"}
	status, table, stderr := command(t, args...)
	if status != 0 || !strings.Contains(table, "cpu/4K-read-320us") {
		t.Fatalf("status %d: %s%s", status, table, stderr)
	}
	dir := filepath.Join(t.TempDir(), "out")
	if status, again, _ := command(t, append(args, "--out", dir)...); status != 0 || again != table {
		t.Errorf("status %d, another table:\n%s%s", status, table, again)
	}
	if _, err := os.Stat(filepath.Join(dir, "report.md")); err != nil {
		t.Error(err)
	}
	status, out, _ := command(t, append(args, "--json")...)
	var doc struct {
		APIVersion string
		Results    []struct{ Scenario string }
	}
	if err := json.Unmarshal([]byte(out), &doc); status != 0 || err != nil || len(doc.Results) != 1 ||
		doc.Results[0].Scenario != "4K-read-320us" {
		t.Errorf("status %d, %v: %+v", status, err, doc)
	}
}
